"""Durable trees that are mounted into cells: what they are good for, and who gets them."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sqlite3
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worlds.daemon import (
    AGENT_UID,
    Daemon,
    read,
    refusal,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.ordinary import OrdinaryDaemon, ordinary_daemon

PYTHON = "/usr/bin/python3"


def policy(directory: Path, *lines: str) -> str:
    label = read(directory, "label").strip()
    return read(directory, "policy") + "".join(f"allow {label} {line}\n" for line in lines)


def space(daemon: Daemon, name: str, owner: int = AGENT_UID) -> Path:
    """A new space; where its files really are."""
    path = daemon.path("shared", name)
    path.mkdir()
    os.chown(path, owner, owner)
    return daemon.state / "tree/shared" / name


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


def shell(text: str) -> str:
    """An ``exec`` line of a script without double quotes and backslashes."""
    return f'sh -c "{textwrap.dedent(text).strip()}"'.replace("\n", "; ")


def test_a_space_is_mounted_where_the_line_says(daemon: Daemon) -> None:
    backing = space(daemon, "data")
    agent = make(
        daemon,
        "x",
        shell("""
            echo new > /t/new; cat /t/new; grep ' /t ' /proc/self/mountinfo | cut -d' ' -f6
            ls $CTX_ROOT/shared/data
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
    agent = make(
        daemon, "x", "sleep 1000", "shared:data read,write", mount="shared:data /t ro"
    )
    wait_status(start(agent), "busy")
    text = read(agent, "policy")
    assert refusal(agent / "policy", text.replace("read,write", "read")) == "accepted"
    assert refusal(agent / "policy", "") == "EBUSY"
    assert '"x" is running with shared:data mounted' in daemon.error()
    write(agent / "ctl", "kill")
    wait_dead(agent)


def test_a_space_that_is_another_by_then_is_not_used(daemon: Daemon) -> None:
    """Removed and made anew, it may even have the same inode."""
    backing = space(daemon, "data")
    agent = make(daemon, "x", "ls /t", "shared:data read", mount="shared:data /t ro")
    daemon.path("shared", "data").rmdir()
    gone = make(daemon, "y", "ls /t", "shared:data read")
    assert refusal(gone / "mount", "shared:data /t ro") == "ENOENT"
    space(daemon, "data")
    (backing / "secret").touch()
    assert finish(agent) == ""
    assert read(agent, "reason").startswith("start_failed: ESTALE: mount source shared:data: ")
    write(gone / "mount", "shared:data /t ro")
    shutil.rmtree(backing)
    wait_dead(start(gone))
    assert "mount source shared:data: there is no space" in read(gone, "reason")


def test_the_owners_own_files(daemon: Daemon) -> None:
    agent = make(daemon, "x", "sh -c 'echo kept > /h/file'", mount="home: /h rw")
    data = daemon.state / "tree/home" / read(agent, "owner").strip()
    os.chown(data, AGENT_UID, AGENT_UID)
    finish(agent)
    assert read(data, "file") == "kept\n", read(agent, "log")


def test_a_channel_needs_the_right_to_write(daemon: Daemon) -> None:
    """The kernel opens a FIFO without asking the daemon."""
    backing = space(daemon, "data")
    os.mkfifo(backing / "fifo")
    (backing / "fifo").chmod(0o666)
    use = "cd $CTX_ROOT/shared/data; exec 3<>fifo; echo through >&3; read said <&3; echo $said"
    assert finish(make(daemon, "w", shell(use), "shared:data read,write")) == "through\n"
    # what the kernel keeps of the name is for nobody else
    assert finish(make(daemon, "r", shell(use), "shared:data read")) == ""
    assert "fifo: Permission denied" in read(daemon.agent_dir("r"), "log")


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


BOTH = "shared:data read,write"


OF_CHILD = "agent:* create"


def test_a_child_has_of_it_what_its_own_policy_and_its_parent_have(daemon: Daemon) -> None:
    """A child gets no ``write`` by default: what its parent has is read-only there."""
    backing = space(daemon, "data")
    look = (
        "sh -c 'for d in /t /u; do touch $d/$CTX_AGENT 2>/dev/null && echo $d rw; done; "
        "ls /t/seen'"
    )
    hide, line = "echo '- /t hide' > hidden.d/mount", "echo 'shared:data /u rw' > own.d/mount"
    lines = [
        *child("reader", look),
        *child("writer", look, policies("writer", BOTH)),
        *child("none", look, "echo > none.d/policy"),
        *child("hidden", look, policies("hidden", BOTH), hide),
        *child("own", look, policies("own", BOTH), line),
        "cat reader.d/wait writer.d/wait none.d/wait hidden.d/wait own.d/wait",
    ]
    agent = make(
        daemon, "boss", script(*lines), BOTH, OF_CHILD,
        mount="shared:data /t rw",
    )
    (backing / "seen").touch()
    finish(agent)
    out = {each: read(daemon.agent_dir(each), "out").splitlines() for each in
           ("reader", "writer", "none", "hidden", "own")}
    assert out["reader"][0] == "/t/seen"
    assert out["writer"][0] == "/t rw"
    assert out["none"] == out["hidden"] == []
    assert out["own"][:2] == ["/t rw", "/u rw"]
    assert read(daemon.agent_dir("reader"), "mount.effective") == "shared:data\t/t\tro\t-\n"
    assert read(daemon.agent_dir("none"), "mount.effective") == "shared:data\t/t\thide\t-\n"


@pytest.mark.parametrize("hidden", [False, True])
def test_a_child_gets_no_more_of_it_than_its_parent_has(daemon: Daemon, hidden: bool) -> None:
    space(daemon, "data")
    space(daemon, "other")
    line = f"- {daemon.path('shared', 'data')} hide" if hidden else "shared:data /t ro"
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


def test_a_detached_child_keeps_what_it_has(daemon: Daemon) -> None:
    backing = space(daemon, "data")
    mount = "echo 'shared:data /u rw' > kid.d/mount"
    command = "sh -c 'touch /u/mine; touch /t/inherited; cp /t/inherited /r/no'"
    more = ["echo detached > kid.d/life", policies("kid", BOTH), mount]
    lines = child("kid", command, *more)
    agent = make(
        daemon, "boss", script(*lines, "cat kid.d/wait"), BOTH, OF_CHILD, "agent:* detach",
        mount="shared:data /t rw\nshared:data /r ro",
    )
    finish(agent)
    wait_dead(daemon.agent_dir("kid"))
    assert sorted(os.listdir(backing)) == ["inherited", "mine"], read(agent, "log")


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


def test_open_files_and_mappings_outlive_the_daemon(daemon: Daemon) -> None:
    backing = space(daemon, "data")
    (backing / "program").write_text(WRITER)
    agent = make(
        daemon, "x", f"{PYTHON} /t/program", "shared:data read,write", mount="shared:data /t rw"
    )
    start(agent)
    wait_until((backing / "ready").exists, "it has the file open")
    wait_status(agent, "busy")  # which the daemon may note later
    pid = int(read(agent, "pid"))
    daemon.kill()
    os.kill(pid, signal.SIGUSR1)
    wait_until((backing / "done").exists, "it goes on while there is no daemon")
    assert read(backing, "new") == "made"
    data = (backing / "file").read_bytes()
    assert (data[:4], data[100:104]) == (b"mmap", b"open")
    daemon.start()
    os.kill(pid, signal.SIGUSR1)
    wait_dead(agent)
    assert read(agent, "reason") == "exit:0\n"


DATABASE = """
import os, sqlite3, sys
name, count = sys.argv[1], int(sys.argv[2])
base = sqlite3.connect('/t/base', timeout=60, isolation_level=None)
assert base.execute('pragma journal_mode').fetchone() == ('wal',)
for n in range(count):
    base.execute('begin immediate')
    base.execute('insert into t values (?, ?)', (name, n))
    base.execute('commit')
"""


def test_a_database_with_a_shared_index_has_two_writers(daemon: Daemon) -> None:
    backing = space(daemon, "data")
    (backing / "program").write_text(DATABASE)
    # by one: sqlite does not wait for its turn when it changes the mode
    base = sqlite3.connect(backing / "base")
    base.execute("pragma journal_mode=wal")
    base.execute("create table t (who text, n integer)")
    base.close()
    os.chown(backing / "base", AGENT_UID, AGENT_UID)
    agents = [
        make(daemon, name, f"{PYTHON} /t/program {name} 100", "shared:data read,write",
             mount="shared:data /t rw")
        for name in ("x", "y")
    ]
    for agent in agents:
        start(agent)
    for agent in agents:
        wait_dead(agent)
        assert read(agent, "reason") == "exit:0\n", read(agent, "log")
    base = sqlite3.connect(backing / "base")
    counted = base.execute("select who, count(*) from t group by who order by who").fetchall()
    assert counted == [("x", 100), ("y", 100)]
    assert base.execute("pragma integrity_check").fetchone() == ("ok",)
    base.close()


def test_both_ways_show_one_tree(daemon: Daemon) -> None:
    """What is changed by the line is seen at the next open, names after a second at most."""
    backing = space(daemon, "data")
    seen = daemon.path("shared", "data", "file")
    (backing / "file").write_text("one\n")
    assert seen.read_text() == "one\n"
    assert seen.stat().st_size == 4
    (backing / "file").write_text("number two\n")
    assert seen.read_text() == "number two\n"
    wait_until(lambda: seen.stat().st_size == 11, "attributes follow")
    (backing / "other").write_text("another\n")
    (backing / "other").rename(backing / "file")
    wait_until(lambda: seen.read_text() == "another\n", "a file in its place is seen")
    (backing / "file").unlink()
    wait_until(lambda: not seen.exists(), "its end is seen")


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
    """Whoever writes the tree replaces directories by links while others use both ways."""
    backing = space(daemon, "data")
    secret = daemon.base / "secret"
    secret.mkdir()
    (secret / "key").write_text("secret\n")
    target = str(secret)
    (backing / "dir").mkdir()
    (backing / "dir" / "key").write_text("mine\n")
    seen = daemon.path("shared", "data", "dir")
    assert (seen / "key").read_text() == "mine\n"
    agent = make(
        daemon, "x", shell(f"mv /t/dir /t/old; ln -s {target} /t/dir; cat /t/dir/key"),
        "shared:data read,write", mount="shared:data /t rw",
    )
    assert finish(agent) == "", "the link leads to a path of the cell's view"
    wait_until(seen.is_symlink, "the filesystem shows the link")
    other = make(
        daemon, "y", f"cat {seen}/key", "shared:data read", mount="shared:data /t ro"
    )
    assert finish(other) == "", "so does the filesystem's link"


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


# without root


@pytest.fixture
def user() -> Iterator[OrdinaryDaemon]:
    with ordinary_daemon() as daemon:
        yield daemon


def test_an_ordinary_users_daemon_hands_them_in_too(user: OrdinaryDaemon) -> None:
    mount = "echo 'shared:data /u rw' > kid.d/mount"
    lines = [
        *child("kid", "touch /u/kid /t/kid", policies("kid", BOTH), mount),
        "cat kid.d/wait",
        "touch /t/boss; touch /r/no",
    ]

    def life() -> str:
        user.path("shared", "data").mkdir()
        agent = user.make("boss", script(*lines))
        write(agent / "policy", policy(agent, BOTH, OF_CHILD))
        write(agent / "mount", "shared:data /t rw\nshared:data /r ro\nhome: /h rw")
        write(agent / "ctl", "start")
        wait_dead(agent)
        kid = user.agent_dir("kid")
        return read(agent, "reason") + read(agent, "log") + read(kid, "reason") + read(kid, "log")

    said = user.do(life)
    assert sorted(os.listdir(user.state / "tree/shared/data")) == ["boss", "kid"], said
    assert "Read-only file system" in said
