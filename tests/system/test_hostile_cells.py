"""Nothing of an agent runs outside of a leaf, and nothing of a view makes a cell."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.cgroups import Cgroup, path_of
from tests.harness import (
    AGENT_UID,
    Daemon,
    end_process,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.membership import Membership, watched

#: what made cells at some time, or does; and what a start may want to look with
FORGED = ("test", "bwrap", "setpriv", "enter", "view", "keeper", "stage", "find", "stat", "env")
LIBRARIES = ("libcap.so.2", "libc.so.6", "libselinux.so.1", "ld.so.preload")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    made = Daemon()
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def watch(daemon: Daemon) -> Iterator[Membership]:
    with watched(daemon.cgroup.path, daemon.pid, frozenset({AGENT_UID})) as made:
        yield made


@pytest.fixture
def forged(daemon: Daemon) -> Path:
    """Programs of an agent's that note where they run."""
    made = daemon.base / "forged"
    made.mkdir()
    for name in FORGED:
        program = made / name
        program.write_text(
            "#!/bin/sh\n"
            f'{{ echo "{name} ran"; cat /proc/self/cgroup; env; }} >> {daemon.base}/work/noted\n'
        )
        program.chmod(0o755)
    for name in LIBRARIES:
        (made / name).write_text("no library at all")
    work = daemon.base / "work"
    work.mkdir()
    for path in (work, made, *made.iterdir()):
        os.chown(path, AGENT_UID, AGENT_UID)
    return made


def test_a_forged_test_in_a_parents_view_runs_nowhere(
    daemon: Daemon, watch: Membership, forged: Path
) -> None:
    """It ran in the daemon's cgroup once, as an operator: one process for each hidden path."""
    work = daemon.base / "work"
    lines = "".join(f"- /work/{number} hide\\n" for number in range(100))
    child = (
        "cd $CTX_ROOT/agent && mkdir kid.d && "
        f"printf %b '{lines}' > kid.d/mount && echo 'cat /work/7/secret' > kid.d/exec && "
        "echo start > kid.d/ctl && cat kid.d/wait"
    )
    for number in range(100):
        (work / str(number)).mkdir()
        (work / str(number) / "secret").write_text("secret")
    mount = f"{work} {work} rw\n{work} /work rw\n{forged} /usr/local/bin ro\n"
    mount += "".join(
        f"{forged}/{name} /usr/bin/{name} ro\n"
        for name in ("test", "bwrap", "setpriv")
        if Path("/usr/bin", name).exists()
    )
    mount += f"{forged}/ld.so.preload /etc/ld.so.preload ro\n" if Path(
        "/etc/ld.so.preload").exists() else ""
    agent = daemon.finish("boss", f'sh -c "{child}"', mount=mount, uid=str(AGENT_UID),
                          gid=str(AGENT_UID))
    assert read(agent, "reason") == "exit:0\n", read(agent, "log")
    kid = daemon.agent_dir("kid")
    assert (read(kid, "reason"), read(kid, "out")) == ("exit:1\n", "")
    assert "ermission denied" in read(kid, "log")
    assert not (work / "noted").exists()
    assert watch.violations() == []


def test_a_forged_keeper_is_not_what_a_later_run_enters_by(
    daemon: Daemon, watch: Membership, forged: Path
) -> None:
    """The programs are on a mount that an agent can cover for its children, not for us."""
    programs = daemon.runtime / "root" / "bin"
    covering = f"{forged} {programs} ro"
    work = daemon.base / "work"
    child = (
        f"cd $CTX_ROOT/agent && mkdir kid.d && echo '{covering}' > kid.d/mount && "
        "echo turn > kid.d/mode && echo \\\"sh -c 'id -u'\\\" > kid.d/exec && "
        "echo start > kid.d/ctl && "
        "while [ $(cat kid.d/status) != idle ]; do sleep 0.02; done; "
        "echo go > kid.d/inbox && sleep 1000"
    )
    agent = daemon.run("boss", f'sh -c "{child}"', mount=f"{work} {work} rw\n{forged} {forged} ro",
                       uid=str(AGENT_UID), gid=str(AGENT_UID))
    kid = daemon.agent_dir("kid")
    wait_until(lambda: kid.exists() and read(kid, "out"), "its run has spoken")
    assert read(kid, "out") == f"{AGENT_UID}\n"
    assert not (work / "noted").exists()
    write(agent / "ctl", "stop")
    wait_dead(agent)
    assert watch.violations() == []


def test_the_daemons_cgroup_holds_the_daemon_binder_and_guard(
    daemon: Daemon, watch: Membership
) -> None:
    agent = daemon.run("one", "sleep 1000", uid=str(AGENT_UID), gid=str(AGENT_UID))
    wait_status(agent, "busy")
    mount = daemon.cgroup.path.parent
    own = Cgroup(mount / (path_of(daemon.pid) or "").removeprefix("/"))
    names = [
        (Path("/proc") / str(pid) / "comm").read_text().strip()
        for pid in own.processes()
        if pid != daemon.pid
    ]
    assert set(names) == {"ctx-binder", "ctx-guard"}
    (monitor,) = daemon.monitors()
    assert (path_of(monitor) or "").endswith("/user-0/monitor")
    assert os.stat(f"/proc/{monitor}").st_uid == 0
    write(agent / "ctl", "stop")
    wait_dead(agent)
    agent.rmdir()
    assert watch.violations() == []


def test_monitors_are_frozen_and_killed_with_no_agent(daemon: Daemon) -> None:
    agent = daemon.run("one", "sleep 1000", limits="grace=200ms")
    wait_status(agent, "busy")
    (monitor,) = daemon.monitors()
    nodes = list(daemon.cgroup.path.glob("user-*/agent-one"))
    assert nodes and monitor not in Cgroup(nodes[0]).processes()
    end_process(int(read(agent, "pid")))
    wait_dead(agent)
    assert read(agent, "reason") == "signal:9\n"


@pytest.mark.parametrize("leaf", ["helper", "monitor", "daemon", "user-0/monitor"])
def test_whoever_is_in_a_leaf_of_the_daemons_has_no_rights(daemon: Daemon, leaf: str) -> None:
    """With uid 0 too: what was led astray there orders nobody about."""
    path = daemon.cgroup.path / leaf
    path.mkdir(parents=True, exist_ok=True)
    code = (
        "import os, sys\n"
        "open(sys.argv[1] + '/cgroup.procs', 'w').write('0')\n"
        "try: os.mkdir(sys.argv[2])\n"
        "except OSError as error: print(error.errno)\n"
        "else: print(0)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, str(path), str(daemon.agent_dir("mine"))],
        capture_output=True, text=True, check=True,
    )
    assert int(said.stdout) in (errno.EACCES, errno.EPERM), said.stdout
    assert not daemon.agent_dir("mine").exists()


def test_hundreds_of_hidden_paths_are_a_start_like_any_other(
    daemon: Daemon, watch: Membership
) -> None:
    work = daemon.base / "work"
    work.mkdir()
    count = 250
    for number in range(count):
        (work / str(number)).mkdir()
    table = f"{work} /w rw\n" + "".join(f"- /w/{number} hide\n" for number in range(count))
    agent = daemon.make("many", "sh -c 'grep -c /w/ /proc/self/mountinfo'")
    write(agent / "mount", table)
    write(agent / "ctl", "start")
    wait_dead(agent)
    assert read(agent, "out") == f"{count}\n"
    assert watch.violations() == []


def test_a_stranger_in_the_daemons_cgroup_is_seen_however_short(
    daemon: Daemon, watch: Membership
) -> None:
    """What the other tests rely on."""
    own = daemon.cgroup.path.parent / (path_of(daemon.pid) or "").removeprefix("/")
    script = 'echo $$ > "$0/cgroup.procs"; exec true'
    subprocess.run(["sh", "-c", script, str(own)], check=True)
    wait_until(watch.violations, "the kernel has told")
    assert watch.violations() == ["true ran in the daemon's own cgroup"]
