"""Paths that somebody writes: what they led to then is what is mounted later, or nothing is."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.kernel.cgroups import Cgroup
from tests.system.hostile.guarded import BESIDE, guarded
from tests.worlds import daemon as harness
from tests.worlds.daemon import AGENT_UID, Daemon, persist, read, wait_dead, wait_until

SECRET = "the operator's key\n"
#: files of an agent that name a path in its creator's view, and how
FIELDS = {"mount": "{} /x ro", "root": "{}", "workspace": "explicit_root:{}"}


class Ground:
    """A directory that some agent may write, and one with a secret that it may not give."""

    def __init__(self, daemon: Daemon, name: str) -> None:
        self.base = daemon.base / name
        self.data = self.base / "data"
        self.secret = self.base / "secret"
        for path in (self.base, self.data, self.secret):
            path.mkdir()
            os.chown(path, AGENT_UID, AGENT_UID)
        (self.secret / "key").write_text(SECRET)

    def link(self) -> None:
        """``mv data x; ln -s secret data``, as an agent does it."""
        self.data.rename(self.base / "x")
        self.data.symlink_to(self.secret)
        os.chown(self.data, AGENT_UID, AGENT_UID, follow_symlinks=False)

    def another(self) -> None:
        self.data.rename(self.base / "x")
        self.secret.rename(self.data)

    def none(self) -> None:
        self.data.rename(self.base / "x")


@pytest.fixture
def ground(shared_daemon: Daemon, request: pytest.FixtureRequest) -> Ground:
    return Ground(shared_daemon, f"ground-{abs(hash(request.node.name))}")


def agent_name(ground: Ground) -> str:
    return ground.base.name


@pytest.fixture(scope="module", autouse=True)
def guarded_module(shared_daemon: Daemon) -> Iterator[None]:
    """The whole module is an attack."""
    with guarded(shared_daemon, bystanders=BESIDE):
        yield


# Who looks has a second, after which a write is refused with EAGAIN: "try again". A busy machine
# takes that long now and then, and whoever is told so tries again.


def write(path: Path, text: str) -> None:
    persist(lambda: harness.write(path, text))


def refusal(path: Path, text: str) -> str:
    try:
        write(path, text)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "accepted"


#: the same for a shell, whose echo calls whatever it is refused with an "I/O error"
PUT = """
put() {
    n=0
    until echo "$1" > $2; do
        grep -q EAGAIN $CTX_ROOT/error && [ $((n+=1)) -lt 20 ] || { cat $CTX_ROOT/error; return 1; }
    done
}
"""


# when it is written


@pytest.mark.parametrize("field", FIELDS)
def test_an_agents_link_is_not_followed(
    shared_daemon: Daemon, ground: Ground, field: str
) -> None:
    agent = shared_daemon.make(agent_name(ground))
    ground.link()
    for path in (ground.data, ground.data / "key"):
        assert refusal(agent / field, FIELDS[field].format(path)) == "EACCES"
        error = shared_daemon.error()
        assert f'the link "{ground.data}" to "{ground.secret}" does not belong to root' in error
        assert read(agent, "error") == error, "it is what was written that is refused, not who"
    assert read(agent, field) in ("", "inherit\n")


@pytest.mark.needs_root("no link there is root's")
def test_roots_links_are_followed_and_shown_as_what_they_are(
    shared_daemon: Daemon, ground: Ground
) -> None:
    here = shared_daemon.base / f"root-{ground.base.name}"
    here.mkdir()
    (here / "way").symlink_to(f"../{here.name}/./on")
    (here / "on").symlink_to(ground.base)
    agent = shared_daemon.make(agent_name(ground), "cat /x/key")
    write(agent / "mount", f"{here}/way/secret /x ro")
    write(agent / "ctl", "start")
    wait_dead(agent)
    assert read(agent, "out") == SECRET
    assert read(agent, "mount") == f"{here}/way/secret /x ro\n"
    assert read(agent, "mount.effective") == f"{ground.secret}\t/x\tro\t-\n"


@pytest.mark.parametrize(
    ("path", "name"),
    [("nowhere", "ENOENT"), ("secret/key/below", "ENOTDIR"), ("loop", "EACCES")],
)
@pytest.mark.parametrize("field", FIELDS)
def test_what_is_not_there_is_said_at_once(
    shared_daemon: Daemon, ground: Ground, field: str, path: str, name: str
) -> None:
    (ground.base / "loop").symlink_to("loop")
    agent = shared_daemon.make(agent_name(ground))
    assert refusal(agent / field, FIELDS[field].format(ground.base / path)) == name


def test_the_daemons_directories_are_refused_by_any_name(
    shared_daemon: Daemon, ground: Ground
) -> None:
    here = shared_daemon.base / f"root-{ground.base.name}"
    here.mkdir()
    (here / "state").symlink_to(shared_daemon.state)
    (here / "proc").symlink_to("/proc/self/cwd")
    agent = shared_daemon.make(agent_name(ground))
    for path in (here / "state", here / "state" / "agent", here / "proc"):
        assert refusal(agent / "mount", f"{path} /x ro") == "EACCES"


def test_a_table_has_a_limit_and_all_of_it_is_mounted(
    shared_daemon: Daemon, ground: Ground
) -> None:
    lines = [f"/etc/hostname /m/{n} ro\n" for n in range(2049)]
    agent = shared_daemon.make(agent_name(ground), "sh -c 'ls /m | wc -l'")
    assert refusal(agent / "mount", "".join(lines)) == "EDQUOT"
    write(agent / "mount", "".join(lines[:2048]))
    write(agent / "mount", "".join(lines[:800]))
    write(agent / "ctl", "start")
    wait_dead(agent)
    assert read(agent, "out") == "800\n", read(agent, "reason")


# when it is used


@pytest.mark.parametrize("swap", [Ground.link, Ground.another, Ground.none])
@pytest.mark.parametrize("field", FIELDS)
def test_a_path_that_leads_elsewhere_by_then_is_not_used(
    shared_daemon: Daemon, ground: Ground, field: str, swap: Callable[[Ground], None]
) -> None:
    agent = shared_daemon.make(agent_name(ground), f"cat {ground.data}/key /x/key /key")
    write(agent / field, FIELDS[field].format(ground.data))
    swap(ground)
    write(agent / "ctl", "start")
    wait_dead(agent)
    assert read(agent, "out") == ""
    said = f"start_failed: ctxfs: ESTALE: mount source {ground.data}: the path no longer leads " \
        "to the file or directory that it led to: write the line again\n"
    assert read(agent, "reason") == said
    assert read(agent, "error").endswith(f" agent/{agent_name(ground)}.d/ctl: {said}")


def test_written_again_it_is_good_again(shared_daemon: Daemon, ground: Ground) -> None:
    agent = shared_daemon.make(agent_name(ground), "cat /x/key")
    write(agent / "mount", f"{ground.data} /x ro")
    ground.another()
    write(agent / "mount", f"{ground.data} /x ro")
    write(agent / "ctl", "start")
    wait_dead(agent)
    assert read(agent, "out") == SECRET


@pytest.mark.usefixtures("guard_after")
def test_what_a_line_was_is_known_across_a_crash_and_looked_up_if_it_is_not(daemon: Daemon) -> None:
    """As for what an earlier version has written, which recorded nothing."""
    grounds = [Ground(daemon, name) for name in ("swapped", "plain", "linked")]
    agents = [daemon.make(ground.base.name, "cat /x/key") for ground in grounds]
    for agent, ground in zip(agents, grounds, strict=True):
        write(agent / "mount", f"{ground.data} /x ro")
    daemon.kill()
    with sqlite3.connect(daemon.state / "ctxfs.db") as database:
        for ground in grounds[1:]:
            database.execute(
                "UPDATE agents SET data=json_remove(data, '$.sources') "
                "WHERE json_extract(data, '$.name')=?", (ground.base.name,)
            )
    database.close()
    grounds[0].another()
    (grounds[1].data / "key").write_text("plain\n")
    grounds[2].link()
    daemon.start()
    for agent in agents:
        write(agent / "ctl", "start")
        wait_dead(agent)
    assert "no longer leads to the file or directory" in read(agents[0], "reason")
    assert read(agents[1], "out") == "plain\n"
    assert f'the link "{grounds[2].data}" to' in read(agents[2], "reason")


def test_paths_of_the_host_are_looked_up_in_the_view_of_a_parent_that_is_written_later(
    shared_daemon: Daemon, ground: Ground
) -> None:
    """They were good when they were written; in the other view nothing is at them."""
    name = agent_name(ground)
    boss = shared_daemon.make(f"{name}.boss", "sleep 1000")
    write(boss / "ctl", "start")
    wait_until(lambda: read(boss, "status") == "busy\n", "it runs")
    nowhere = f'"{ground.data}" ("{ground.base}") does not exist in the view of "{name}.boss"\n'
    for field, line in FIELDS.items():
        agent = shared_daemon.make(f"{name}.{field}", "true")
        write(agent / field, line.format(ground.data))
        write(agent / "parent", f"agent:{name}.boss")
        write(agent / "ctl", "start")
        wait_dead(agent)
        assert read(agent, "reason") == f"start_failed: {nowhere}"
        assert read(agent, "error").endswith(f" agent/{agent.name}/ctl: start_failed: {nowhere}")
        again = shared_daemon.make(f"{name}.{field}.again", "true")
        write(again / "parent", f"agent:{name}.boss")
        assert refusal(again / field, line.format(ground.data)) == "ENOENT"
        assert read(again, "error").endswith(f" agent/{again.name}/{field}: {nowhere}")
    write(boss / "ctl", "kill")
    wait_dead(boss)


@pytest.mark.usefixtures("guard_after")
def test_why_a_start_failed_is_an_agents_error_whichever_daemon_is_asked(daemon: Daemon) -> None:
    ground = Ground(daemon, "gone")
    agent = daemon.make("gone", "true")
    write(agent / "mount", f"{ground.data} /x ro")
    ground.none()
    write(agent / "ctl", "start")
    wait_dead(agent)
    said = read(agent, "error")
    assert "ESTALE" in said
    daemon.kill()
    daemon.start()
    assert read(agent, "error") == said
    assert refusal(agent / "mount", "/etc /x ro") == "EBUSY"
    assert "EBUSY agent/gone.d/mount: " in read(agent, "error"), "refused later"


# by agents, in their own view


def inside(daemon: Daemon, ground: Ground, *lines: str) -> Path:
    script = ground.base / "script"
    script.write_text(f"cd $CTX_ROOT/agent; exec 2>&1\n{PUT}" + "\n".join(lines) + "\n")
    agent = daemon.make(agent_name(ground), "sh /work/script",
                        policy=f"allow {agent_name(ground)}_t agent:* create,detach")
    write(agent / "mount", f"{ground.base} /work rw")
    write(agent / "ctl", "start")
    wait_dead(agent)
    return agent


@pytest.mark.parametrize("life", ["owned", "detached"])
@pytest.mark.parametrize("field", FIELDS)
def test_a_childs_path_is_what_it_was_when_its_parent_wrote_it(
    shared_daemon: Daemon, ground: Ground, field: str, life: str
) -> None:
    """Whatever a sibling does in a directory that both may write."""
    name = f"c{agent_name(ground)}.d"
    agent = inside(
        shared_daemon, ground,
        f"mkdir {name}; echo {life} > {name}/life; echo cat /x/key /work/data/key /key > "
        f"{name}/exec; put '{FIELDS[field].format('/work/data')}' {name}/{field} || exit",
        "mv /work/data /work/x; ln -s /work/secret /work/data",
        f"put '{FIELDS[field].format('/work/data')}' {name}/{field} && echo taken",
        f"echo start > {name}/ctl; cat {name}/wait; cat {name}/reason {name}/out",
    )
    said = read(agent, "out")
    assert "the path no longer leads to the file or directory that it led to" in said, said
    assert "taken" not in said
    assert SECRET not in said


def test_a_private_child_gives_nothing_beside_its_workspace_by_a_link(
    shared_daemon: Daemon, ground: Ground
) -> None:
    """Not even by a link of root's, which is followed."""
    (ground.data / "out").symlink_to("../secret")
    child, below = f"c{agent_name(ground)}.d", f"d{agent_name(ground)}.d"
    (ground.base / "child").write_text(
        f"cd $CTX_ROOT/agent; mkdir {below}; {PUT}"
        f"put '/work/data /y ro' {below}/mount && echo own\n"
        f"put '/work/data/out /y ro' {below}/mount || echo refused\n"
    )
    agent = inside(
        shared_daemon, ground,
        f"mkdir {child}; put explicit_root:/work/data {child}/workspace",
        f"echo 'allow {child[:-2]}_t agent:* create' > {child}/policy",
        f"echo sh /work/child > {child}/exec; echo start > {child}/ctl; cat {child}/wait",
        f"cat {child}/out {child}/log {child}/reason",
    )
    said = read(agent, "out")
    assert "own\n" in said, said
    assert "refused\n" in said
    assert "EAGAIN" not in said, said


def test_a_look_that_takes_too_long_is_refused_for_now_and_harms_nothing(
    shared_daemon: Daemon, ground: Ground
) -> None:
    """Its leaf is frozen: no helper gets ahead. A shell calls this an "I/O error"."""
    name = f"c{agent_name(ground)}.d"
    boss = shared_daemon.make(
        agent_name(ground), "sh /work/script",
        policy=f"allow {agent_name(ground)}_t agent:* create",
    )
    write(boss / "mount", f"{ground.base} /work rw")
    (ground.base / "script").write_text(
        f"exec 2>&1; cd $CTX_ROOT/agent; mkdir {name}; echo made; "
        f"until test -e /work/go; do sleep 0.02; done; echo '/work/data /x ro' > {name}/mount; "
        "cat $CTX_ROOT/error; echo over; sleep 1000"
    )
    write(boss / "ctl", "start")
    wait_until(lambda: read(boss, "out") == "made\n", "there is a child")
    leaf = Cgroup(Path(read(boss, "cgroup").strip())).child("look")
    leaf.path.mkdir()
    leaf.freeze(True)
    (ground.base / "go").touch()
    wait_until(lambda: "over" in read(boss, "out"), "it is answered")
    said = read(boss, "out")
    assert "I/O error" in said
    assert "EAGAIN" in said, said
    assert "did not answer within a second" in said
    leaf.freeze(False)
    write(boss.parent / name / "mount", "/work/data /x ro")
    assert read(boss.parent / name, "mount") == "/work/data /x ro\n"
    write(boss / "ctl", "kill")
    wait_dead(boss)
