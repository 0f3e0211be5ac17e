"""Nothing of an agent runs outside of a leaf, and nothing of a view makes a cell."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.kernel.cgroups import Cgroup, path_of, unified_mount
from tests.worlds.daemon import (
    AGENT_UID,
    Daemon,
    alive,
    end_process,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.membership import EVENT, EXEC, WATCH, Place, Watch

#: what made cells at some time, or does; and what a start may want to look with
FORGED = ("test", "bwrap", "setpriv", "enter", "view", "keeper", "stage", "find", "stat", "env")
LIBRARIES = ("libcap.so.2", "libc.so.6", "libselinux.so.1", "ld.so.preload")


@pytest.fixture
def watch(daemon: Daemon) -> Place:
    if WATCH.why_not:
        pytest.skip(f"membership is not watched: {WATCH.why_not}")
    assert daemon.place is not None
    return daemon.place


@pytest.fixture
def forged(daemon: Daemon) -> Path:
    """Programs of an agent's that note where they run."""
    made = daemon.base / "forged"
    made.mkdir()
    for name in FORGED:
        program = made / name
        program.write_text(
            "#!/bin/sh\n"
            f'{{ echo "{name} ran"; /bin/cat /proc/self/cgroup; /usr/bin/env; }} '
            f">> {daemon.base}/work/noted\n"
        )
        program.chmod(0o755)
    for name in LIBRARIES:
        (made / name).write_text("no library at all")
    work = daemon.base / "work"
    work.mkdir()
    for path in (work, made, *made.iterdir()):
        os.chown(path, AGENT_UID, AGENT_UID)
    return made


@pytest.mark.usefixtures("guard_beside")
def test_a_forged_test_in_a_parents_view_runs_nowhere(
    daemon: Daemon, watch: Place, forged: Path
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
    assert not (work / "noted").exists(), (work / "noted").read_text()
    assert read(agent, "reason") == "exit:0\n", read(agent, "log")
    kid = daemon.agent_dir("kid")
    assert (read(kid, "reason"), read(kid, "out")) == ("exit:1\n", "")
    assert "ermission denied" in read(kid, "log")
    assert watch.violations() == []


@pytest.mark.usefixtures("guard_beside")
def test_a_forged_keeper_is_not_what_a_later_run_enters_by(
    daemon: Daemon, watch: Place, forged: Path
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
    daemon: Daemon, watch: Place
) -> None:
    agent = daemon.run("one", "sleep 1000", uid=str(AGENT_UID), gid=str(AGENT_UID))
    wait_status(agent, "busy")
    mount = unified_mount()
    assert mount is not None
    own = Cgroup(mount / (path_of(daemon.pid) or "").removeprefix("/"))
    names = [
        (Path("/proc") / str(pid) / "comm").read_text().strip()
        for pid in own.processes()
        if pid != daemon.pid
    ]
    assert set(names) == {"ctx-binder", "ctx-guard"}
    (monitor,) = daemon.monitors()
    assert (path_of(monitor) or "").endswith(f"/user-{os.geteuid()}/monitor")
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


@pytest.mark.usefixtures("guard_after")
@pytest.mark.parametrize("leaf", ["helper", "monitor", "daemon", f"user-{os.geteuid()}/monitor"])
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


@pytest.mark.usefixtures("guard")
def test_hundreds_of_hidden_paths_are_a_start_like_any_other(
    daemon: Daemon, watch: Place
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


# what the other tests rely on

MOVE = 'echo $$ > "$0/cgroup.procs"; exec "$@"'


def moved(daemon: Daemon, path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A command that root starts in a cgroup."""
    return subprocess.run(["sh", "-c", MOVE, str(path), *command], check=True, text=True,
                          stdout=subprocess.PIPE)


def stranger(
    daemon: Daemon, *command: str, until: Callable[[list[str]], object] = bool
) -> None:
    """A command that reads its input, in the daemon's own cgroup until that is seen: of what is
    gone before it is looked at, on a busy machine, nothing may be seen."""
    place = daemon.place
    assert place is not None
    stays = subprocess.Popen(["sh", "-c", MOVE, str(daemon.own.path), *command],
                             stdin=subprocess.PIPE)
    try:
        wait_until(lambda: until(place.violations()), "it is seen")
    finally:
        stays.communicate()


def test_a_stranger_in_the_daemons_cgroup_is_seen_however_short(
    daemon: Daemon, watch: Place
) -> None:
    def is_seen() -> bool:
        moved(daemon, daemon.own.path, "/usr/bin/true")
        return any("true ran in" in what for what in watch.violations())

    # a busy machine may be faster than the watch, but not always
    wait_until(is_seen, "it is seen")
    with pytest.raises(AssertionError, match=r"true ran in the daemon's own cgroup"):
        daemon.check_own_cgroup()
    daemon.check_own_cgroup()  # it is told once


def test_a_stranger_with_a_name_of_the_house_is_seen(
    daemon: Daemon, watch: Place, forged: Path
) -> None:
    for name in ("launcher", "binder", "ctx-guard"):
        shutil.copy("/usr/bin/cat", forged / name)
        ran = f"{forged / name} ran in the daemon's own cgroup"
        stranger(daemon, str(forged / name), until=lambda found, ran=ran: ran in found)  # type: ignore[misc]
        watch.take()


def test_what_a_stranger_forks_is_seen(daemon: Daemon, watch: Place) -> None:
    def kinds(found: list[str]) -> set[str]:
        return {what.partition(" ")[2] for what in found}

    both = {"ran in the daemon's own cgroup", "began in the daemon's own cgroup"}
    stranger(daemon, "sh", "-c", "(exec cat); true",
             until=lambda found: len(found) >= 3 and kinds(found) == both)
    assert kinds(watch.take()) == both


@pytest.mark.needs_root("everything has the ids of agents")
def test_whoever_has_an_agents_ids_and_is_in_no_leaf_is_seen(
    daemon: Daemon, watch: Place
) -> None:
    leaf = daemon.cgroup.path / "helper"
    ids = ("setpriv", f"--reuid={AGENT_UID}", f"--regid={AGENT_UID}", "--clear-groups")
    moved(daemon, leaf, "true")
    assert watch.take() == [], "root may be there"
    # whoever has been waited for when it is looked at has no ids any more
    stays = subprocess.Popen(["sh", "-c", MOVE, str(leaf), *ids, "cat"], stdin=subprocess.PIPE)
    try:
        wait_until(watch.violations, "it is seen")
    finally:
        stays.communicate()
    found = watch.take()
    # setpriv, too, if it has given up its ids when it is looked at
    ran = f"(uid {AGENT_UID}) ran in /{daemon.cgroup.path.name}/helper, in no agent's leaf"
    assert found and all(what.endswith(ran) for what in found), found


@pytest.mark.needs_root("everything has the ids of agents")
def test_who_looks_for_an_operator_is_no_agent(daemon: Daemon, watch: Place) -> None:
    """With the ids of one that has the uid of agents."""
    directory = daemon.agent_dir("made")
    script = f"mkdir {directory}; echo /usr /u ro > {directory}/mount"
    subprocess.run(["sh", "-c", script], check=True, user=AGENT_UID, group=AGENT_UID,
                   extra_groups=[])
    assert read(directory, "mount") == "/usr /u ro\n"
    assert watch.violations() == []


def test_a_violation_fails_what_ends_the_daemon_and_ends_it(daemon: Daemon, watch: Place) -> None:
    for end in (daemon.kill, daemon.stop):
        stranger(daemon, "cat")
        with pytest.raises(AssertionError, match="own cgroup"):
            end()
        assert daemon.process is None
        daemon.start()
    daemon.check_own_cgroup()


@pytest.mark.settings(watchdog="2s")
def test_a_daemon_that_begins_anew_in_its_process_is_watched(daemon: Daemon) -> None:
    if WATCH.why_not:
        pytest.skip(f"membership is not watched: {WATCH.why_not}")
    pid = daemon.pid
    house = living_in(daemon) - {pid}
    daemon.abort()
    wait_until(lambda: is_ready(daemon), "it is mounted anew")
    wait_until(lambda: not house & living_in(daemon), "it has begun anew")
    wait_until(daemon.guards, "there is a guard again")
    assert daemon.pid == pid and not daemon.has_ended()
    daemon.check_own_cgroup()
    stranger(daemon, "cat")
    with pytest.raises(AssertionError, match="own cgroup"):
        daemon.check_own_cgroup()


def test_a_thread_with_the_pid_of_one_that_is_gone_is_no_stranger(
    daemon: Daemon, watch: Place
) -> None:
    """What is told late may be of one whose pid was given away since."""
    ours = [int(each) for each in os.listdir(f"/proc/{daemon.pid}/task")]
    threads = [each for each in ours if each != daemon.pid]
    assert threads
    for when in (0, time.clock_gettime_ns(time.CLOCK_MONOTONIC)):
        for thread in threads:
            WATCH.tell(EVENT.pack(EXEC, when, thread, thread, 0, 0))
        assert bool(watch.take()) == bool(when)


def living_in(daemon: Daemon) -> set[int]:
    return {pid for pid in daemon.own.processes() if alive(pid)}


def is_ready(daemon: Daemon) -> bool:
    try:
        return "ready" in (daemon.root / "status").read_text()
    except OSError:
        return False


@pytest.mark.needs_root("it makes a container")
def test_a_container_is_told_nothing(watch: Place) -> None:
    """Although it hears of pids, as long as this test is told."""
    code = """if True:
        from tests.worlds.membership import Unavailable, Watch
        try:
            Watch().start()
        except Unavailable as error:
            print(error)
    """
    found = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c",
                            code], capture_output=True, text=True, check=True, timeout=30)
    assert found.stdout == "no proc connector: not in the machine's first PID namespace\n"
    assert not watch.is_blind()


# with so little, those of any other test are lost as well
@pytest.mark.long
@pytest.mark.needs_root("with so little room a user is told nothing at all")
@pytest.mark.alone
def test_when_events_are_lost_it_is_known(daemon: Daemon, watch: Place) -> None:
    few = Watch(buffer=1)  # as little as the kernel gives
    few.start()
    place = Place(few, root=daemon.cgroup.path, own=daemon.own.path, programs=daemon.runtime,
                  rootless=False)
    try:
        assert not place.is_blind()
        with few.beginning(place):  # and looks at nothing
            subprocess.run(["sh", "-c", "for i in $(seq 200); do (:); done"], check=True)
        assert place.violations() == ["events were lost: the machine was faster than this"]
        place.look_again()
        assert place.violations() == []
    finally:
        few.stop()
