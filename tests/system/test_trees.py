"""Durable trees in cells: who has which, where, and what that is good for."""

from __future__ import annotations

import errno
import os
import pwd
import shlex
import shutil
import signal
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.worlds.daemon import (
    AGENT_UID,
    MARK,
    Daemon,
    persist,
    read,
    refusal,
    running,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.ordinary import OrdinaryDaemon, ordinary_daemon
from tests.worlds.reexecution import Replaceable, replaceable

T = TypeVar("T")

PYTHON = "/usr/bin/python3"
BOTH = "shared:data read,write"
OF_CHILD = "agent:* create"


@pytest.fixture(params=["root", "ordinary"])
def either(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """A daemon of root's, and one of an ordinary user's."""
    if request.param == "ordinary":
        with ordinary_daemon() as user:
            yield user
    else:
        with running(Daemon()) as daemon:
            yield daemon


@pytest.fixture
def outside() -> Iterator[Daemon]:
    """A daemon whose runtime directory is in none of the directories that each cell has anew."""
    daemon = Daemon()
    daemon.runtime = Path(tempfile.mkdtemp(prefix=f"{MARK}-", dir="/run"))
    daemon.arguments[daemon.arguments.index("--runtime") + 1] = str(daemon.runtime)
    try:
        with running(daemon):
            yield daemon
    finally:
        shutil.rmtree(daemon.runtime, ignore_errors=True)


def do(daemon: Daemon, function: Callable[[], T]) -> T:
    """What a function returns, done by an operator."""
    return daemon.do(function) if isinstance(daemon, OrdinaryDaemon) else function()


def policy(directory: Path, *lines: str) -> str:
    label = read(directory, "label").strip()
    return read(directory, "policy") + "".join(f"allow {label} {line}\n" for line in lines)


def space(daemon: Daemon, name: str, owner: int = AGENT_UID) -> Path:
    """A new space; where its files really are."""

    place = daemon.path("shared", name)
    # one that had the name may just be removed
    do(daemon, lambda: persist(place.mkdir))
    # which waits for the tree
    do(daemon, lambda: persist((place / "data").readlink))
    path = daemon.state / "tree" / "space" / name / name
    if not daemon.rootless:
        os.chown(path, owner, owner)
    return path


def remove(daemon: Daemon, name: str) -> None:
    """A space that is empty, as soon as the daemon knows that."""

    def removed() -> bool:
        try:
            daemon.path("shared", name).rmdir()
        except OSError as error:
            assert error.errno in (errno.EAGAIN, errno.ENOTEMPTY), error
            return False
        return True

    wait_until(removed, "it is measured, and removed")


def way(daemon: Daemon, name: str = "shared/data") -> str:
    """Where all have a tree."""
    return f"{daemon.runtime}/tree/{name}"


def make(
    daemon: Daemon, name: str, command: str, *policies: str, mount: str = "", **files: str
) -> Path:
    directory = daemon.make(name, command, **files)
    if policies:
        write(directory / "policy", policy(directory, *policies))
    if mount:
        write(directory / "mount", mount)
    return directory


def start(directory: Path) -> Path:
    write(directory / "ctl", "start")
    return directory


def finish(directory: Path) -> str:
    """What it said until its end."""
    wait_dead(start(directory))
    return read(directory, "out")


def ran(
    daemon: Daemon, name: str, command: str, *policies: str, mount: str = "", **files: str
) -> str:
    """What an agent said until its end, its log too."""

    def life() -> str:
        agent = make(daemon, name, command, *policies, mount=mount, **files)
        return finish(agent) + read(agent, "log")

    return do(daemon, life)


def shell(text: str) -> str:
    """An ``exec`` line of a script without double quotes and backslashes."""
    return f'sh -c "{textwrap.dedent(text).strip()}"'.replace("\n", "; ")


def script(*lines: str) -> str:
    return "sh -c " + shlex.quote("cd $CTX_ROOT/agent; " + "; ".join(lines))


def child(name: str, command: str, *lines: str) -> list[str]:
    return [
        f"mkdir {name}.d",
        *lines,
        f"printf '%s\\n' {shlex.quote(command)} > {name}.d/exec",
        f"echo start > {name}.d/ctl",
    ]


def policies(name: str, *lines: str) -> str:
    words = " ".join(shlex.quote(f"allow {name}_t {line}") for line in lines)
    return f"printf '%s\\n' {words} > {name}.d/policy"


# at their own places


def test_a_policy_gives_a_space_to_read_or_to_write(either: Daemon) -> None:
    for name in ("data", "more", "other"):
        space(either, name)
    there = way(either, "shared")
    said = ran(
        either, "x",
        shell(f"""
            cd {there}; echo new > data/new; cat data/new
            grep ' {way(either)} ' /proc/self/mountinfo | cut -d' ' -f6
            ls; touch more/no; ls other; mkdir mine; touch mine
        """),
        BOTH, "shared:more read",
    ).splitlines()
    assert said[0] == "new"
    assert {"rw", "nosuid", "nodev"} <= set(said[1].split(","))
    assert said[2:4] == ["data", "more"]
    assert "'more/no': Read-only file system" in said[4]
    assert "'other': No such file or directory" in said[5]
    assert all("Read-only file system" in line for line in said[6:8]), said
    assert (either.state / "tree/space/data/data/new").read_text() == "new\n"


def test_a_cell_gains_no_space_while_it_lives(daemon: Daemon) -> None:
    """One that is made later is there from the next cell on."""
    there = way(daemon, "shared/late")
    look = f"ls {there} && echo there"
    agent = make(
        daemon, "x", shell(f"{look}; echo >&2; cat $CTX_SELF/task/t/input; {look}"),
        "shared:* read",
    )
    write(agent / "exec", shell(f"until test -e {way(daemon, 'shared/first')}/go; do sleep 0.02; "
                                f"done; {look}"))
    first = space(daemon, "first")
    start(agent)
    wait_status(agent, "busy")
    space(daemon, "late")
    (first / "go").touch()
    wait_dead(agent)
    assert "No such file or directory" in read(agent, "log")
    assert finish(make(daemon, "y", f"sh -c '{look}'", "shared:* read")) == "there\n"


def test_a_cell_has_all_that_it_may_have_at_once(either: Daemon) -> None:
    """32 spaces, 16 lines, two homes: each is a descriptor on the way."""
    for number in range(40):
        space(either, f"s{number:02}")
    lines = [f"shared:s{number:02} /line/{number} ro" for number in range(20, 35)]
    table = "\n".join([*lines, "home: /home/mine rw"])
    said = ran(
        either, "x",
        shell(f"""
            ls {way(either, 'shared')} | wc -l; ls /line | wc -l; touch ~/x /home/mine/y; ls ~
        """),
        "shared:* read", mount=table, homedir="durable",
    )
    assert said.split("\n")[:3] == ["32", "15", "x"]
    left_out = " ".join(f"s{number}" for number in range(32, 40))
    assert f"ctxfs: no room for more than 32 spaces: {left_out}\n" in said
    line = "shared:s00 /one/more ro\n"
    agent = either.agent_dir("x")
    do(either, agent.rmdir)
    do(either, lambda: make(either, "x", "true", "shared:* read"))
    assert do(either, lambda: refusal(agent / "mount", f"{table}\n{line}")) == "EDQUOT"


@pytest.mark.parametrize(
    "line", ["- {} hide", "- {}/shared/data hide", "- {}/shared hide", "- /ctx/shared hide",
             "- /ctx/shared/data/data hide"]
)
def test_a_line_that_hides_a_tree_counts_for_it(daemon: Daemon, line: str) -> None:
    """Whichever of its names the line has."""
    (space(daemon, "data") / "key").touch()
    line = line.replace("/ctx", str(daemon.root)).format(daemon.runtime / "tree")
    said = ran(daemon, "x", f"ls {way(daemon)}/key", BOTH, mount=line)
    assert "No such file" in said or "Permission denied" in said


def test_a_line_narrows_a_tree(daemon: Daemon) -> None:
    space(daemon, "data")
    there = way(daemon)
    said = ran(daemon, "x", f"touch {there}/no", BOTH, mount=f"shared:data {there} ro")
    assert "Read-only file system" in said


def test_an_agent_with_the_hosts_tree_has_its_own_spaces_only(daemon: Daemon) -> None:
    (space(daemon, "data") / "key").touch()
    (space(daemon, "other") / "key").touch()
    there = way(daemon, "shared")
    command = f"sh -c 'ls {there}/data {there}/other; ls {daemon.state} {daemon.runtime}/record'"
    said = ran(daemon, "x", command, "shared:data read", iso="shared")
    assert said.split("\n")[:2] == [f"{there}/data:", "key"]
    assert said.count("No such file or directory") == 3, said


# homes


def test_a_users_own_tree_comes_by_a_line_only(either: Daemon) -> None:
    owner = do(either, os.getuid)
    there = way(either, f"home/{owner}")
    use = f"sh -c 'touch {there}/$CTX_AGENT; ls {there}'"
    assert "No such file" in ran(either, "without", use)
    said = ran(either, "with", use, mount="home: /h rw")
    if either.rootless:
        assert said.startswith("with\n")
    else:
        assert "Permission denied" in said, "it is for who owns it: root"
        (either.state / "tree/home/0").chmod(0o777)
        assert ran(either, "again", use, mount="home: /h rw").startswith("again\n")
    assert "Read-only" in ran(either, "reader", use, mount="home: /h ro")
    lines = ["mkdir kid.d", "echo 'home: /h rw' > kid.d/mount || cat $CTX_ROOT/error"]
    said = ran(either, "boss", script(*lines), OF_CHILD)
    assert '"home:" rw exceeds the view of the parent "boss"' in said


def test_agents_have_no_tree_of_the_uid_that_they_run_as(daemon: Daemon) -> None:
    """All that root makes run as one uid, whatever their policies: it would be common to them."""
    use = shell(f"""
        cd $CTX_ROOT/home/{AGENT_UID}/data && echo mine > note && cat note
        touch {way(daemon, f'home/{AGENT_UID}')}/x && echo made
    """)
    agent = make(daemon, "x", use)
    write(agent / "policy", "")
    finish(agent)
    assert read(agent, "out") == "", read(agent, "log")
    for path in (f"{daemon.root}/home/{AGENT_UID}/data", way(daemon, f"home/{AGENT_UID}")):
        assert refusal(make(daemon, "y", "true") / "mount", f"{path} /x rw") != "accepted"
        daemon.agent_dir("y").rmdir()


def test_a_users_own_tree_has_the_users_group(daemon: Daemon) -> None:
    users = [each for each in pwd.getpwall() if each.pw_uid not in (each.pw_gid, 0, AGENT_UID)]
    if not users:
        pytest.skip("each user here has a group of the same number")
    uid = users[0].pw_uid
    finish(make(daemon, "x", "true", mount="home: /h ro", owner=str(uid)))
    st = (daemon.state / f"tree/home/{uid}").stat()
    assert (st.st_uid, st.st_gid) == (uid, users[0].pw_gid)


def test_a_child_has_the_users_own_tree_by_a_line_of_its_own(daemon: Daemon) -> None:
    there = way(daemon, "home/0")
    look = f"sh -c 'ls {there} && touch {there}/kid'"
    line = "echo 'home: /own ro' > own.d/mount"
    lines = [
        *child("none", look), *child("own", look, line),
        "cat none.d/wait own.d/wait", "touch /h/boss",
    ]
    start(make(daemon, "first", "true", mount="home: /h ro"))
    wait_dead(daemon.agent_dir("first"))
    (daemon.state / "tree/home/0").chmod(0o777)
    said = ran(daemon, "boss", script(*lines), OF_CHILD, mount="home: /h rw")
    assert os.listdir(daemon.state / "tree/home/0") == ["boss"], said
    assert "No such file" in read(daemon.agent_dir("none"), "log")
    assert "Read-only" in read(daemon.agent_dir("own"), "log")


# lines that name them


def test_a_space_is_mounted_where_the_line_says(daemon: Daemon) -> None:
    backing = space(daemon, "data")
    agent = make(
        daemon,
        "x",
        shell(f"""
            echo new > /t/new; cat /t/new; grep ' /t ' /proc/self/mountinfo | cut -d' ' -f6
            ls {way(daemon)}
        """),
        "shared:data read,write",
        mount="shared:data /t rw",
    )
    said, options, listed = finish(agent).splitlines()
    assert (said, listed) == ("new", "new")
    assert {"rw", "nosuid", "nodev"} <= set(options.split(","))
    assert read(agent, "mount.effective") == "shared:data\t/t\trw\t-\n"
    st = (backing / "new").stat()
    assert (st.st_uid, (backing / "new").read_text()) == (AGENT_UID, "new\n")


def test_a_read_only_line_refuses_writes_of_the_files_owner(daemon: Daemon) -> None:
    backing = space(daemon, "data")
    (backing / "mine").write_text("old\n")
    os.chown(backing / "mine", AGENT_UID, AGENT_UID)
    agent = make(
        daemon,
        "x",
        shell("""
            echo more >> /t/mine; touch /t/new; chmod 777 /t/mine; rm -f /t/mine
            mount -o remount,bind,rw /t; cat /t/mine
        """),
        "shared:data read,write",
        mount="shared:data /t ro",
    )
    assert finish(agent) == "old\n"
    log = read(agent, "log")
    assert log.count("Read-only file system") == 4, log
    assert (backing / "mine").stat().st_mode & 0o777 == 0o644


def test_the_policy_is_judged_when_a_line_is_written_and_at_the_start(daemon: Daemon) -> None:
    space(daemon, "data")
    agent = make(daemon, "x", "true", "shared:data read")
    mount = agent / "mount"
    assert refusal(mount, "shared:data /t rw") == "EACCES"
    assert "shared:data write is not in the effective policy of" in daemon.error()
    assert refusal(mount, "shared:other /t ro") == "ENOENT"
    assert 'there is no space "other"' in daemon.error()
    for line in ("shared:../x /t ro", "shared:data /t ro rbind", "home:x /t ro"):
        assert refusal(mount, line) == "EINVAL", line
    assert refusal(mount, "shared:data /t ro noexec") == "accepted"
    write(agent / "policy", "")
    assert refusal(agent / "ctl", "start") == "EACCES"
    assert "shared:data read is not in the effective policy of" in daemon.error()


def test_a_right_is_not_taken_from_what_has_the_space_mounted(daemon: Daemon) -> None:
    space(daemon, "data")
    agent = make(daemon, "x", "sleep 1000", BOTH, "shared:none read")
    wait_status(start(agent), "busy")
    text = read(agent, "policy")
    assert refusal(agent / "policy", text.replace("read,write", "read")) == "EBUSY"
    assert '"x" is running with shared:data mounted' in daemon.error()
    assert refusal(agent / "policy", text.replace("read,write", "write")) == "accepted"
    daemon.kill()
    daemon.start()
    assert refusal(agent / "policy", "") == "EBUSY"
    write(agent / "ctl", "kill")
    wait_dead(agent)


def test_a_space_that_is_another_by_then_is_not_used(daemon: Daemon) -> None:
    """Removed and made anew, it may even have the same inode."""
    backing = space(daemon, "data")
    agent = make(daemon, "x", "ls /t", "shared:data read", mount="shared:data /t ro")
    remove(daemon, "data")
    gone = make(daemon, "y", "ls /t", "shared:data read")
    assert refusal(gone / "mount", "shared:data /t ro") == "ENOENT"
    space(daemon, "data")
    (backing / "secret").touch()
    assert finish(agent) == ""
    assert read(agent, "reason").startswith("start_failed: ESTALE: shared:data: another space")
    write(gone / "mount", "shared:data /t ro")
    shutil.rmtree(backing)
    wait_dead(start(gone))
    assert read(gone, "reason") == "start_failed: ctxfs: ENOENT: shared:data: it was removed\n"


def test_a_space_that_is_gone_at_the_start_is_named(daemon: Daemon) -> None:
    space(daemon, "data")
    agent = make(daemon, "x", "true", "shared:data read", mount="shared:data /t ro")
    remove(daemon, "data")
    wait_dead(start(agent))
    assert read(agent, "reason").startswith('start_failed: shared:data: there is no space "data"')


# children


def test_a_child_has_of_it_what_its_own_policy_gives(outside: Daemon) -> None:
    """A child gets no ``write`` by default: what its parent has is read-only there. So at the own
    place of the tree, and where a line of its parent has it."""
    backing = space(outside, "data")
    there = way(outside)
    look = (
        f"sh -c 'for d in {there} /t /u; do touch $d/$CTX_AGENT 2>/dev/null && echo $d rw; done; "
        f"ls {there}/seen /t/seen'"
    )
    hide = f"printf '%s\\n' '- /t hide' '- {there} hide' > hidden.d/mount"
    line = "echo 'shared:data /u rw' > own.d/mount"
    lines = [
        *child("reader", look),
        *child("writer", look, policies("writer", BOTH)),
        *child("none", look, "echo > none.d/policy"),
        *child("hidden", look, policies("hidden", BOTH), hide),
        *child("own", look, policies("own", BOTH), line),
        "cat reader.d/wait writer.d/wait none.d/wait hidden.d/wait own.d/wait",
    ]
    agent = make(
        outside, "boss", script(*lines), BOTH, OF_CHILD, mount="shared:data /t rw",
    )
    (backing / "seen").touch()
    finish(agent)
    out = {each: read(outside.agent_dir(each), "out").splitlines() for each in
           ("reader", "writer", "none", "hidden", "own")}
    seen = [f"{there}/seen", "/t/seen"]
    assert out["reader"] == sorted(seen), read(agent, "log")
    assert out["writer"][:2] == [f"{there} rw", "/t rw"]
    assert out["none"] == out["hidden"] == []
    assert out["own"][:3] == [f"{there} rw", "/t rw", "/u rw"]
    assert read(outside.agent_dir("reader"), "mount.effective") == "shared:data\t/t\tro\t-\n"
    assert read(outside.agent_dir("none"), "mount.effective") == "shared:data\t/t\thide\t-\n"


def test_what_is_delegated_is_handed_in_though_the_parent_has_none(either: Daemon) -> None:
    backing = space(either, "data")
    there = way(either)
    lines = [
        f"ls {there}",
        *child("kid", f"touch {there}/kid /u/line", policies("kid", BOTH),
               "echo 'shared:data /u rw' > kid.d/mount"),
        "cat kid.d/wait kid.d/log",
    ]

    def life() -> str:
        agent = make(either, "boss", script(*lines), OF_CHILD)
        write(agent / "policy", read(agent, "policy") + f"delegate boss_t {BOTH}\n")
        finish(agent)
        return read(agent, "log") + read(agent, "out")

    said = do(either, life)
    assert sorted(os.listdir(backing)) == ["kid", "line"], said
    assert "No such file" in said


@pytest.mark.parametrize("hidden", [False, True])
def test_a_child_gets_no_more_of_it_than_lines_leave_its_parent(
    daemon: Daemon, hidden: bool
) -> None:
    space(daemon, "data")
    space(daemon, "other")
    place = daemon.path("shared", "data")
    line = f"- {place} hide" if hidden else f"shared:data {way(daemon)} ro"
    lines = [
        f"mkdir kid.d; {policies('kid', BOTH)}",
        *(f"echo '{each}' > kid.d/mount || cat $CTX_ROOT/error" for each in
          ("shared:data /u rw", "shared:other /u ro", "shared:data /u ro")),
    ]
    agent = make(
        daemon, "boss", script(*lines), BOTH, OF_CHILD, mount=line
    )
    said = finish(agent)
    assert '"shared:data" rw exceeds the view of the parent "boss"' in said
    assert "shared:other read is not in the effective policy of" in said
    assert ('"shared:data" ro exceeds the view' in said) is hidden


def test_what_a_line_hides_in_a_tree_a_child_has_not_either(outside: Daemon) -> None:
    backing = space(outside, "data")
    for name in ("secret", "open"):
        (backing / name).mkdir()
        (backing / name / "key").touch()
    there = way(outside)
    look = f"sh -c 'ls {there}/open {there}/secret'"
    lines = [*child("kid", look, policies("kid", BOTH)), "cat kid.d/wait kid.d/out kid.d/log"]
    ways = (there, f"{outside.root}/shared/data/data")
    for name, line in zip("ab", (f"- {each}/secret hide" for each in ways), strict=True):
        said = ran(outside, name, script(*lines, "rmdir kid.d"), BOTH, OF_CHILD, mount=line)
        assert "key" in said
        assert "Permission denied" in said, (name, said)


def test_what_comes_along_with_a_directory_is_no_more_than_the_policy(outside: Daemon) -> None:
    """A directory above the trees, and above where its parent's lines have one."""
    (space(outside, "data") / "key").touch()
    where = f"/x/{outside.runtime.name}/tree/shared/data"
    command = f"sh -c 'cat {where}/key; cat /y/t/key; touch /y/t/no'"
    lines = [
        *child("kid", command, policies("kid", "shared:data read"),
               "printf '%s\\n' '/run /x ro' '/d /y rw' > kid.d/mount"),
        *child("none", command, "echo > none.d/policy",
               "printf '%s\\n' '/run /x ro' '/d /y rw' > none.d/mount"),
        "cat kid.d/wait none.d/wait",
    ]
    said = ran(
        outside, "boss", script(*lines), BOTH, OF_CHILD, mount="shared:data /d/t rw",
        profile="public_named",
    )
    kid, none = (read(outside.agent_dir(each), "log") for each in ("kid", "none"))
    assert "Read-only file system" in kid, said + kid
    assert kid.count("key") == 1, kid
    assert none.count("Permission denied") + none.count("No such file") == 3, said + none


def test_three_deep(daemon: Daemon) -> None:
    """Each by a line of its own, of which only the policy is its parent's. A private child gives
    nothing beside its workspace: for its child an operator writes the line."""
    backing = space(daemon, "data")
    *third, _ = child("c", "touch /c/third", policies("c", BOTH))
    refused = "echo 'shared:data /c rw' > c.d/mount || touch /b/refused"
    second = script(*third, refused, "cat c.d/wait", "touch /b/second")
    mount = "echo 'shared:data /b rw' > b.d/mount"
    lines = child("b", second, policies("b", BOTH, OF_CHILD), mount)
    agent = make(daemon, "a", script(*lines, "cat b.d/wait"), BOTH, OF_CHILD)
    start(agent)
    wait_until((backing / "refused").exists, "the private child is refused")
    write(daemon.agent_dir("c") / "mount", "shared:data /c rw")
    start(daemon.agent_dir("c"))
    wait_dead(agent)
    logs = [read(daemon.agent_dir(each), "log") for each in "abc"]
    assert sorted(os.listdir(backing)) == ["refused", "second", "third"], logs


def test_a_detached_child_keeps_what_it_has(either: Daemon) -> None:
    backing = space(either, "data")
    mount = "echo 'shared:data /u rw' > kid.d/mount"
    there = way(either)
    command = f"sh -c 'touch /u/mine; touch /t/inherited; touch {there}/place; touch /r/no'"
    more = ["echo detached > kid.d/life", policies("kid", BOTH), mount]
    less = ["echo detached > less.d/life", "echo > less.d/policy"]
    lines = [
        *child("kid", command, *more), "cat kid.d/wait",
        *child("less", f"ls {there} /t /r", *less), "cat less.d/wait",
    ]
    said = ran(
        either, "boss", script(*lines), BOTH, OF_CHILD, "agent:* detach",
        mount="shared:data /t rw\nshared:data /r ro",
    )
    assert sorted(os.listdir(backing)) == ["inherited", "mine", "place"], said
    assert do(either, lambda: read(either.agent_dir("less"), "out")) == ""


# paths that lead into them


def test_a_path_into_a_tree_is_that_tree(either: Daemon) -> None:
    """Of a root agent, whose paths are an operator's; by the tree's own place, and by the link."""
    backing = space(either, "data")
    do(either, lambda: (backing / "sub").mkdir()) if either.rootless else (backing / "sub").mkdir()
    if not either.rootless:
        os.chown(backing / "sub", AGENT_UID, AGENT_UID)
    ways = (way(either), f"{either.root}/shared/data/data")
    for name, source in zip("xy", (f"{each}/sub" for each in ways), strict=True):

        def life(name: str = name, source: str = source) -> list[str]:
            agent = make(either, name, shell("echo $CTX_AGENT > /m/file; cat /m/file"))
            said = [refusal(agent / "mount", f"{source} /m ro"), either.error()]
            write(agent / "policy", policy(agent, "shared:data read"))
            said += [refusal(agent / "mount", f"{source} /m rw"), either.error()]
            write(agent / "policy", policy(agent, BOTH))
            persist(lambda: write(agent / "mount", f"{source} /m rw"))
            return [*said, finish(agent), read(agent, "log")]

        said = do(either, life)
        assert (said[0], said[2]) == ("EACCES", "EACCES")
        assert "shared:data read is not in the effective policy of" in said[1]
        assert "shared:data write is not in the effective policy of" in said[3]
        assert said[4] == f"{name}\n", said[5]
    assert (backing / "sub" / "file").read_text() == "y\n"


def test_a_runtime_directory_behind_a_link_is_where_that_leads(
    outside: Daemon, tmp_path: Path
) -> None:
    outside.stop()
    link = tmp_path / "link"
    link.symlink_to(outside.runtime)
    outside.arguments[outside.arguments.index("--runtime") + 1] = str(link)
    outside.start()
    (space(outside, "data") / "file").touch()
    for name, where in (("x", outside.runtime), ("y", link)):
        line = f"{where}/tree/shared/data /m ro"
        assert ran(outside, name, "ls /m", BOTH, mount=line).startswith("file\n")


@pytest.mark.parametrize("below", ["", "/shared", "/home", "/../record"])
def test_nothing_else_of_the_runtime_directory_is_given(daemon: Daemon, below: str) -> None:
    space(daemon, "data")
    (daemon.path("home", "0") / "data").readlink()  # which makes it
    agent = make(daemon, "x", "true", "shared:* read,write")
    path = os.path.normpath(f"{daemon.runtime}/tree{below}")
    for file, text in (("mount", f"{path} /x ro"), ("root", path),
                       ("workspace", f"explicit_root:{path}")):
        assert refusal(agent / file, text) == "EACCES", file
    link = daemon.base / "link"
    link.symlink_to(path)
    assert refusal(agent / "mount", f"{link} /x ro") == "EACCES"


def test_a_path_of_another_object_by_then_is_not_used(daemon: Daemon) -> None:
    backing = space(daemon, "data")
    (backing / "sub").mkdir()
    agent = make(daemon, "x", "ls /m", BOTH, mount=f"{way(daemon)}/sub /m ro")
    (backing / "sub").rename(backing / "was")
    (backing / "sub").symlink_to("was")
    assert finish(agent) == ""
    assert read(agent, "reason").startswith("start_failed: ctxfs: ESTALE: mount source")
    os.symlink("/etc", backing / "etc")
    agent = make(daemon, "y", "true", BOTH)
    os.chown(backing / "etc", AGENT_UID, AGENT_UID, follow_symlinks=False)
    assert refusal(agent / "mount", f"{way(daemon)}/etc /m ro") == "EACCES"


def test_a_childs_path_into_a_tree_needs_its_own_policy(either: Daemon) -> None:
    backing = space(either, "data")
    path = way(either)
    attempts = [f"echo '{path}/sub /m {mode}' > kid.d/mount || cat $CTX_ROOT/error"
                for mode in ("rw", "ro")]
    lines = [
        f"mkdir {path}/sub; echo mine > {path}/sub/file; mkdir kid.d; echo > kid.d/policy",
        *attempts, policies("kid", "shared:data read"), *attempts,
        "echo 'cat /m/file' > kid.d/exec; echo start > kid.d/ctl; cat kid.d/wait kid.d/out",
    ]

    def life() -> str:
        agent = make(either, "boss", script(*lines), BOTH, OF_CHILD)
        write(agent / "workspace", f"explicit_root:{path}")
        return finish(agent) + read(agent, "log")

    said = do(either, life)
    assert said.count("shared:data write is not in the effective policy of") == 2, said
    assert said.count("shared:data read is not in the effective policy of") == 1
    assert "\nmine\n" in said
    assert (backing / "sub").is_dir()


def test_a_workspace_and_a_root_in_a_tree(daemon: Daemon) -> None:
    """As the policy gives the tree: who may only read cannot write there either."""
    backing = space(daemon, "data")
    (backing / "work").mkdir()
    os.chown(backing / "work", AGENT_UID, AGENT_UID)
    path = f"{way(daemon)}/work"
    agent = make(daemon, "x", "sh -c 'pwd; touch file'")
    workspace = f"explicit_root:{path}"
    assert refusal(agent / "workspace", workspace) == refusal(agent / "root", path) == "EACCES"
    write(agent / "policy", policy(agent, "shared:data read"))
    write(agent / "workspace", workspace)
    assert finish(agent) == f"{path}\n"
    assert "Read-only file system" in read(agent, "log")
    agent = make(daemon, "y", "sh -c 'pwd; touch file'", BOTH)
    write(agent / "workspace", workspace)
    assert finish(agent) == f"{path}\n"
    assert (backing / "work" / "file").exists(), read(agent, "log")
    for name in ("bin", "lib", "lib64"):
        os.symlink(f"usr/{name}", backing / name)
    for name in ("usr", "proc", "dev", "tmp", "run"):
        (backing / name).mkdir()
    for name, given in (("p", "shared:data read"), ("q", BOTH)):
        agent = make(daemon, name, "sh -c 'touch /here; ls /'", given)
        write(agent / "root", way(daemon))
        write(agent / "mount", "/usr /usr ro")
        finish(agent)
        log = read(agent, "log")
        assert ("Read-only file system" in log) is (name == "p"), log
    assert (backing / "here").exists(), log


@pytest.mark.parametrize("by", ["place", "line"])
def test_a_repository_in_a_tree_has_worktrees(outside: Daemon, by: str) -> None:
    """What a child has of it is the repository to read, and a worktree, whatever else of the
    space its policy gives. So where a line of its parent's has the tree: there a child has what
    its policy gives, too."""
    backing = space(outside, "data")
    (backing / "secret").touch()
    at = way(outside) if by == "place" else "/t"
    path, given = f"{at}/repo", "shared:data read" if by == "line" else ""
    work = (
        f"sh -c 'ls {at}/secret; ls {path}; touch {path}/no {at}/no; cd /workspace && "
        "echo theirs > file && git -c user.name=k -c user.email=k@k commit -qam by-$CTX_AGENT'"
    )
    git = "git -c user.name=b -c user.email=b@b"
    lines = [
        f"cd {path} && {git} init -q && echo mine > file && {git} add file && "
        f"{git} commit -qm mine; cd $CTX_ROOT/agent",
        *child("kid", work, policies("kid", given) if given else "echo > kid.d/policy",
               "echo worktree > kid.d/workspace"),
        "cat kid.d/wait kid.d/log",
        *child("two", work, policies("two", BOTH), "echo worktree > two.d/workspace"),
        f"cat two.d/wait two.d/log; cd {path}; git log --oneline --format=%s ctx/kid ctx/two",
    ]
    (backing / "repo").mkdir()
    os.chown(backing / "repo", AGENT_UID, AGENT_UID)
    boss = script(*lines)
    if by == "line":
        # whose workspace is a path in the view of its parent, which has the line
        top = child("boss", boss, policies("boss", BOTH, OF_CHILD),
                    f"echo public_named > boss.d/profile; echo explicit_root:{path} > "
                    "boss.d/workspace")
        boss = script(*top, "cat boss.d/wait boss.d/out boss.d/log")
    agent = make(outside, "top" if by == "line" else "boss", boss, BOTH, OF_CHILD,
                 "agent:* detach", mount="shared:data /t rw")
    if by == "place":
        write(agent / "workspace", f"explicit_root:{path}")
    said = finish(agent)
    assert {"by-kid", "by-two"} <= set(said.split("\n")), said + read(agent, "log")
    kid, two = (read(outside.agent_dir(name), "log") for name in ("kid", "two"))
    assert ("secret': No such file" in kid) is (by == "place")
    assert "secret" not in two
    for log in (kid, two):
        assert "repo/no': Read-only file system" in log
    assert f"{at}/no': Read-only file system" in kid
    assert (backing / "no").exists(), two


# what outlives the daemon


WRITER = """
import mmap, os, signal, sys, time
fd = os.open('/t/file', os.O_RDWR | os.O_CREAT)
os.truncate(fd, 4096)
pages = mmap.mmap(fd, 4096)
go = []
signal.signal(signal.SIGUSR1, lambda *_: go.append(1))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.close(os.open('/t/ready', os.O_CREAT))
signal.sigwait([signal.SIGUSR1])
pages[:4] = b'mmap'
os.pwrite(fd, b'open', 100)
open('/t/new', 'w').write('made')
os.close(os.open('/t/done', os.O_CREAT))
signal.sigwait([signal.SIGUSR1])
"""


@pytest.mark.parametrize("how", ["crash", pytest.param("reexec", marks=pytest.mark.long)])
def test_open_files_and_mappings_outlive_the_daemon(how: str) -> None:
    with replaceable() as daemon:
        _live_on(daemon, how)


def _live_on(daemon: Replaceable, how: str) -> None:
    backing = space(daemon, "data")
    (backing / "program").write_text(WRITER.replace("/t/", f"{way(daemon)}/"))
    agent = make(daemon, "x", f"{PYTHON} {way(daemon)}/program", BOTH)
    start(agent)
    wait_until((backing / "ready").exists, "it has the file open")
    wait_status(agent, "busy")  # which the daemon may note later
    pid = int(read(agent, "pid"))
    if how == "crash":
        daemon.kill()
    else:
        daemon.reexec()
    os.kill(pid, signal.SIGUSR1)
    wait_until((backing / "done").exists, "it goes on")
    assert read(backing, "new") == "made"
    data = (backing / "file").read_bytes()
    assert (data[:4], data[100:104]) == (b"mmap", b"open")
    if how == "crash":
        daemon.start()
    os.kill(pid, signal.SIGUSR1)
    wait_dead(agent)
    assert read(agent, "reason") == "exit:0\n"


# hostile


def test_what_is_dangerous_in_the_backing_is_harmless_inside(daemon: Daemon) -> None:
    backing = space(daemon, "data")
    shutil.copy("/usr/bin/id", backing / "id")
    os.chmod(backing / "id", 0o6755)
    os.mknod(backing / "null", 0o666 | 0o020000, os.makedev(1, 3))
    os.chmod(backing / "null", 0o666)
    agent = make(
        daemon, "x", shell("/t/id -u; cat /t/null || echo refused; mknod /t/mine c 1 3 || echo no"),
        "shared:data read,write", mount="shared:data /t rw",
    )
    assert finish(agent).splitlines() == [str(AGENT_UID), "refused", "no"]


def test_links_in_the_space_lead_nowhere_else(daemon: Daemon) -> None:
    """Whoever writes the tree replaces directories by links."""
    backing = space(daemon, "data")
    secret = daemon.base / "secret"
    secret.mkdir()
    (secret / "key").write_text("secret\n")
    there = way(daemon)
    (backing / "dir").mkdir()
    command = f"mv {there}/dir {there}/old; ln -s {secret} {there}/dir; cat {there}/dir/key"
    assert finish(make(daemon, "x", shell(command), BOTH)) == ""
    assert (backing / "dir").is_symlink()
    other = make(daemon, "y", "cat /t/dir/key", "shared:data read", mount="shared:data /t ro")
    assert finish(other) == ""


def test_a_target_below_a_hostile_link_stays_in_the_view(daemon: Daemon) -> None:
    backing = space(daemon, "data")
    ground = daemon.base / "ground"
    ground.mkdir()
    os.chown(ground, AGENT_UID, AGENT_UID)
    (ground / "way").symlink_to("/etc")
    victim = daemon.base / "victim"
    victim.mkdir()
    os.chown(victim, AGENT_UID, AGENT_UID)
    (ground / "up").symlink_to(f"../../../../../..{victim}")
    (backing / "file").touch()
    agent = make(
        daemon, "x", shell(f"ls /g/up; ls -d {victim}/*; ls /etc/t"),
        "shared:data read",
        mount=f"{ground} /g rw\nshared:data /g/up/t ro\nshared:data /g/way/t ro",
    )
    said = finish(agent)
    assert os.listdir(victim) == [], "nothing is made outside"
    assert "start_failed" in read(agent, "reason") or "file" in said
    assert not Path("/etc/t").exists()


def test_modes_decide_beside_the_policy(daemon: Daemon) -> None:
    backing = space(daemon, "data", owner=AGENT_UID + 7)
    os.chmod(backing, 0o700)
    (backing / "key").touch()
    agent = make(daemon, "x", "ls /t", "shared:data read", mount="shared:data /t ro")
    assert finish(agent) == ""
    assert "Permission denied" in read(agent, "log")


#: gives a user a file, by an access list (acl(5)): what was the mode's group is its mask
LIST = """
import os, struct, sys
entries = [(1, 6, -1), (2, 6, os.getuid()), (4, 0, -1), (16, 6, -1), (32, 0, -1)]
entries = b"".join(struct.pack("<HHi", *entry) for entry in entries)
os.setxattr(sys.argv[1], "system.posix_acl_access", struct.pack("<I", 2) + entries)
"""


def test_an_access_list_that_an_agent_sets_is_the_kernels(either: Daemon) -> None:
    """Its mask is no right of the group's, though it looks like one in the mode."""
    backing = space(either, "data")
    there = way(either)
    do(either, lambda: (backing / "list").write_text(LIST))
    said = ran(
        either, "x",
        shell(f"cd {there}; echo secret > file; chmod 600 file; {PYTHON} list file; "
              "stat -c %a file; cat file"),
        BOTH,
    )
    assert said.startswith("660\nsecret\n"), said
    if either.rootless:
        return  # whose space is in a home that is closed to others
    backing.chmod(0o711)
    group = str((backing / "file").stat().st_gid)
    for uid, gid, may in (("54321", group, False), (str(AGENT_UID), "54321", True)):
        command = ["setpriv", "--reuid", uid, "--regid", gid, "--clear-groups", "cat"]
        done = subprocess.run([*command, f"{there}/file"], capture_output=True, text=True)
        assert (done.stdout == "secret\n") is may, done
