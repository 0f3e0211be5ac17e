"""Ways of living: paused, started again, made anew, temporary, detached."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.kernel.cgroups import Cgroup
from runtime.kernel.linux import MNT_DETACH, MS_BIND, mount, unmount
from tests.worlds.daemon import (
    Daemon,
    alive,
    end_process,
    read,
    refusal,
    wait_dead,
    wait_status,
    wait_until,
    write,
)

SLEEP = "sleep 1000"
DEAF = "sh -c 'trap \"\" TERM; echo deaf; while :; do sleep 0.05; done'"


def node(agent: Path) -> Cgroup:
    return Cgroup(Path(read(agent, "cgroup").strip()))


def child_of(daemon: Daemon, parent: str, name: str, command: str = SLEEP, **files: str) -> Path:
    """A started child, made by an operator."""
    agent = daemon.make(name, parent=f"agent:{parent}", **files)
    write(agent / "exec", command)
    write(agent / "ctl", "start")
    return agent


def busy(daemon: Daemon, name: str, command: str = SLEEP, **files: str) -> Path:
    agent = daemon.run(name, command, **files)
    wait_status(agent, "busy")
    return agent


# paused


def test_a_paused_subtree_is_frozen_and_goes_on(daemon: Daemon) -> None:
    boss = busy(daemon, "boss")
    kid = child_of(daemon, "boss", "kid")
    wait_status(kid, "busy")
    write(boss / "ctl", "pause")
    assert (read(boss, "status"), read(kid, "status")) == ("paused\n", "busy\n")
    wait_until(lambda: node(kid).keys("cgroup.events")["frozen"], "what is below is frozen")
    assert refusal(boss / "ctl", "pause") == "EBUSY"
    write(boss / "ctl", "resume")
    assert read(boss, "status") == "busy\n"
    wait_until(lambda: not node(kid).keys("cgroup.events")["frozen"], "it goes on")
    assert refusal(boss / "ctl", "resume") == "EBUSY"
    statuses = [e["status"] for e in daemon.events("boss") if e["type"] == "agent.status"]
    assert statuses == ["starting", "busy", "paused", "busy"]


@pytest.mark.parametrize("verb", ["stop", "kill"])
def test_what_is_paused_is_ended_like_anything_else(daemon: Daemon, verb: str) -> None:
    program = "sh -c 'trap \"echo term; exit 0\" TERM; echo up; while :; do sleep 0.05; done'"
    boss = busy(daemon, "boss", program, limits="grace=1h")
    kid = child_of(daemon, "boss", "kid", program)
    wait_status(kid, "busy")
    wait_until(lambda: read(boss, "out") == read(kid, "out") == "up\n",
               "they are ready for SIGTERM")
    write(kid / "ctl", "pause")
    write(boss / "ctl", "pause")
    write(boss / "ctl", verb)
    wait_dead(boss)
    assert (read(boss, "outcome"), read(boss, "reason")) == ("cancelled\n", "operator_stop\n")
    assert read(kid, "reason") == "parent_dead\n"
    if verb == "stop":
        assert read(boss, "out") == read(kid, "out") == "up\nterm\n"


def test_nothing_starts_inside_what_is_frozen(daemon: Daemon) -> None:
    boss = busy(daemon, "boss")
    kid = child_of(daemon, "boss", "kid")
    wait_status(kid, "busy")
    write(boss / "ctl", "pause")
    below = daemon.make("below", SLEEP, parent="agent:kid")
    assert refusal(below / "ctl", "start") == "EBUSY"
    assert '"boss", which it would run in, is paused' in read(below, "error")
    assert read(below, "status") == "new\n"


def test_paused_is_paused_after_a_crash(daemon: Daemon) -> None:
    paused, running = busy(daemon, "paused"), busy(daemon, "running")
    write(paused / "ctl", "pause")
    daemon.kill()
    # as if the crash had come between the record and the freezer
    node_of = {name: daemon.cgroup.child(f"user-0/agent-{name}") for name in ("paused", "running")}
    node_of["paused"].freeze(False)
    node_of["running"].freeze(True)
    daemon.start()
    assert (read(paused, "status"), read(running, "status")) == ("paused\n", "busy\n")
    assert node_of["paused"].read("cgroup.freeze") == "1\n"
    assert node_of["running"].read("cgroup.freeze") == "0\n"
    write(paused / "ctl", "resume")
    assert read(paused, "status") == "busy\n"


def test_what_died_while_it_was_paused_is_not_frozen_in_its_next_life(daemon: Daemon) -> None:
    agent = busy(daemon, "flaky", restart="always")
    write(agent / "ctl", "pause")
    # frozen processes die by SIGKILL, and its cgroup may be kept for the next life
    node(agent).kill()
    wait_until(lambda: read(agent, "run") == "r2\n", "it is restarted")
    wait_status(agent, "busy")
    assert node(agent).read("cgroup.freeze") == "0\n"


def test_a_timeout_ends_a_paused_agent_too(daemon: Daemon) -> None:
    agent = busy(daemon, "slow")
    write(agent / "ctl", "pause")
    write(agent / "limits", "timeout=500ms")  # since its start, which may take as long
    wait_dead(agent)
    assert read(agent, "reason") == "timeout\n"


# started again


@pytest.fixture
def impatient() -> Daemon:
    return Daemon(config="restart_max: 1\n")


def test_a_failing_agent_is_started_again_and_given_up(impatient: Daemon) -> None:
    impatient.start()
    try:
        boss = impatient.run(
            "flaky",
            "sh -c 'echo $CTX_RUN; mkdir $CTX_ROOT/agent/kid-$CTX_RUN.d; exit 3'",
            restart="on-failure",
        )
        begun = time.monotonic()
        wait_dead(boss)
        assert time.monotonic() - begun > 0.9, "the first back-off is a second"
        assert read(boss, "out") == "r1\nr2\n"
        assert (read(boss, "outcome"), read(boss, "reason")) == ("error\n", "exit:3\n")
        assert "restart 1 of 1 in 1 s" in read(boss, "log")
        events = impatient.events("flaky")
        assert [e["run"] for e in events if e["type"] == "run.end"] == ["r1", "r2"]
        assert [e["child"] for e in events if e["type"] == "agent.child.cancel"] == [
            "kid-r1",
            "kid-r2",
        ]
        assert len([e for e in events if e["type"] == "agent.stop"]) == 1
    finally:
        impatient.close()


@pytest.mark.parametrize(
    ("restart", "command", "reason"),
    [("on-failure", "true", "exit:0\n"), ("no", "false", "exit:1\n")],
)
def test_what_need_not_be_started_again_is_dead(
    shared_daemon: Daemon, restart: str, command: str, reason: str
) -> None:
    agent = shared_daemon.finish(f"once-{restart}", command, restart=restart)
    assert read(agent, "reason") == reason


@pytest.mark.parametrize("verb", ["stop", "kill"])
def test_between_two_runs_it_can_be_ended(daemon: Daemon, verb: str) -> None:
    agent = daemon.run("flaky", "true", restart="always")
    wait_until(lambda: read(agent, "status") == "starting\n" and not read(agent, "run"),
               "it waits for its next run")
    assert (read(agent, "pid"), read(agent, "cgroup")) == ("", "")
    write(agent / "ctl", verb)
    wait_dead(agent)
    assert (read(agent, "outcome"), read(agent, "reason")) == ("cancelled\n", "operator_stop\n")


def test_the_back_off_survives_a_crash_and_the_socket_a_restart(daemon: Daemon) -> None:
    script = "sh -c 'test $CTX_RUN != r1 && exec sleep 1000; exit 1'"
    agent = daemon.run("flaky", script, restart="on-failure")
    wait_until(lambda: not read(agent, "run"), "it waits for its next run")
    daemon.restart()
    wait_status(agent, "busy")
    assert read(agent, "run") == "r2\n"
    end_process(int(read(agent, "pid")))
    wait_until(lambda: read(agent, "run") == "r3\n", "it runs again")
    wait_status(agent, "busy")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(daemon.root / "agent" / "flaky.sock"))
        connection.sendall(b'{"op":"ping"}\n')
        assert b"pong" in connection.recv(1000)


def test_a_stopped_agent_and_a_stopping_daemon_start_nothing_again(daemon: Daemon) -> None:
    agent = busy(daemon, "forever", restart="always")
    write(agent / "ctl", "stop")
    wait_dead(agent)
    assert read(agent, "reason") == "operator_stop\n"
    other = busy(daemon, "other", restart="always")
    waiting = daemon.run("waiting", "false", restart="always")
    wait_until(lambda: not read(waiting, "run"), "it waits for its next run")
    assert daemon.stop() == 0
    daemon.start()
    assert read(other, "reason") == read(waiting, "reason") == "shutdown\n"


@pytest.mark.parametrize("crash", [False, True], ids=["", "crash"])
def test_a_kill_while_it_ends_is_the_end(daemon: Daemon, crash: bool) -> None:
    """Its program is gone, what it left behind takes the grace: no other run follows, also if the
    daemon is killed before the end."""
    agent = daemon.run("flaky", "sh -c 'trap \"\" TERM; sleep 1000 & exit 3'",
                       restart="always", limits="grace=1h")
    wait_status(agent, "stopping")
    write(agent / "ctl", "kill")
    if crash:
        daemon.restart()
    wait_dead(agent)
    assert read(agent, "reason") == "exit:3\n"
    assert "restart" not in read(agent, "log")


def test_what_dies_while_it_is_paused_is_started_again_and_goes_on(daemon: Daemon) -> None:
    """Also in the next daemon, which freezes again what is paused."""
    agent = busy(daemon, "flaky", restart="always")
    place = Cgroup(Path(read(agent, "cgroup").strip()))
    write(agent / "ctl", "pause")
    place.write("cgroup.kill", "1")
    wait_until(lambda: read(agent, "run") == "r2\n", "it is started again")
    wait_status(agent, "busy")
    daemon.restart()
    assert (read(agent, "status"), place.read("cgroup.freeze")) == ("busy\n", "0\n")


def test_each_run_has_its_own_result(daemon: Daemon) -> None:
    agent = daemon.run("counter", "sh -c 'echo $CTX_RUN'", restart="always")
    wait_until(lambda: read(agent, "result.md") == "r1\n", "the first run is over")
    wait_until(lambda: read(agent, "result.md") == "r2\n", "so is the second")
    write(agent / "ctl", "kill")
    wait_dead(agent)
    lines = (agent / "session" / "messages.jsonl").read_text().splitlines()
    said = [(m["run"], m["content"]) for m in map(json.loads, lines)]
    assert said[:2] == [("r1", "r1\n"), ("r2", "r2\n")]


def test_a_child_does_not_start_between_two_runs_of_its_parent(daemon: Daemon) -> None:
    boss = daemon.run("boss", "false", restart="on-failure")
    wait_until(lambda: not read(boss, "run"), "it waits for its next run")
    kid = daemon.make("kid", SLEEP, parent="agent:boss")
    assert refusal(kid / "ctl", "start") == "EBUSY"
    write(boss / "ctl", "kill")


def test_children_are_not_started_again(shared_daemon: Daemon) -> None:
    agent = shared_daemon.make("root-only", "true", restart="always")
    busy(shared_daemon, "root-only-boss")
    write(agent / "parent", "agent:root-only-boss")
    assert read(agent, "restart") == "no\n"
    assert refusal(agent / "restart", "always") == "EINVAL"


# made anew


def test_a_reset_agent_runs_again_as_another_incarnation(daemon: Daemon) -> None:
    agent = daemon.finish("coder", "sh -c 'cat; echo $CTX_RUN $CTX_SESSION'", "the task\n")
    first = read(agent, "incarnation")
    assert read(agent, "result.md") == "the task\nr1 default\n"
    held = os.open(agent / "result.md", os.O_RDONLY)
    write(agent / "ctl", "reset")
    assert read(agent, "status") == "new\n"
    assert read(agent, "handoff.md") == "the task\n"
    assert read(agent, "result.md") == read(agent, "out") == read(agent, "reason") == ""
    assert read(agent, "incarnation") != first
    old = daemon.path("home/0/agent/coder/session/default")
    assert read(old, "result.md") == os.pread(held, 100, 0).decode() == "the task\nr1 default\n"
    os.close(held)
    assert read(old, "state") == "done\n"
    write(agent / "ctl", "start")
    wait_dead(agent)
    assert read(agent, "result.md") == "the task\nr2 default.2\n"
    agent.rmdir()
    assert read(old, "result.md") == "the task\nr1 default\n"


def test_a_waiter_of_the_earlier_incarnation_is_not_kept(daemon: Daemon) -> None:
    agent = daemon.finish("coder", "true")
    write(agent / "ctl", "reset")
    write(agent / "exec", SLEEP)
    write(agent / "ctl", "start")
    wait_status(agent, "busy")
    write(agent / "ctl", "kill")
    wait_dead(agent)


# temporary


def test_of_a_temp_child_the_channel_stays(daemon: Daemon) -> None:
    boss = busy(daemon, "boss")
    child_of(daemon, "boss", "kid", "echo found", life="temp")
    kid = daemon.agent_dir("kid")
    wait_until(lambda: not kid.exists(), "the object is gone")
    channel = boss / "session" / "context" / "child" / "kid"
    assert read(channel, "status") == "done\n"
    assert read(channel, "result.md") == "found\n"
    assert os.listdir(boss / "child") == []
    again = child_of(daemon, "boss", "kid", "echo again", life="temp")
    wait_until(lambda: not again.exists(), "so is the next of its name")
    assert sorted(os.listdir(channel.parent)) == ["kid", "kid~1"]


@pytest.mark.parametrize("whose", ["kid", "boss"])
def test_a_temp_child_that_never_ran_goes_at_its_end_too(daemon: Daemon, whose: str) -> None:
    boss = busy(daemon, "boss")
    kid = daemon.make("kid", parent="agent:boss", life="temp")
    write(daemon.agent_dir(whose) / "ctl", "stop")
    wait_until(lambda: not kid.exists(), "the object is gone")
    assert read(boss / "session" / "context" / "child" / "kid", "status") == "cancelled\n"


def test_a_temp_child_that_ended_without_a_daemon_goes_at_the_next_start(daemon: Daemon) -> None:
    boss = busy(daemon, "boss")
    kid = child_of(daemon, "boss", "kid", life="temp")
    wait_status(kid, "busy")
    pid = int(read(kid, "pid"))
    daemon.kill()
    end_process(pid)
    wait_until(lambda: not alive(pid), "it ends")
    daemon.start()
    wait_until(lambda: not kid.exists(), "the object is gone")
    assert read(boss / "session" / "context" / "child" / "kid", "status") == "error\n"


# detached


def detached_child(daemon: Daemon, command: str = SLEEP, **files: str) -> Path:
    kid = child_of(daemon, "boss", "kid", command, life="detached", **files)
    wait_status(kid, "busy", "dead")
    return kid


def test_a_detached_child_lives_on(daemon: Daemon) -> None:
    boss = busy(daemon, "boss")
    kid = detached_child(daemon)
    assert (read(kid, "profile"), read(kid, "supervisor")) == ("public_named\n", "none\n")
    assert node(kid).path == daemon.cgroup.path / "user-0" / "agent-kid"
    below = child_of(daemon, "kid", "below")
    wait_status(below, "busy")
    daemon.kill()
    end_process(int(daemon_pid(daemon, "boss")))
    daemon.start()
    wait_dead(boss)
    boss.rmdir()
    assert (read(kid, "status"), read(below, "status")) == ("busy\n", "busy\n")
    assert read(kid, "parent") == "agent:boss session:default run:r1\n", "the lineage is kept"
    assert "agent.child.cancel" not in [e["type"] for e in daemon.events("kid")]
    write(kid / "ctl", "stop")
    wait_dead(kid)
    assert read(below, "reason") == "parent_dead\n"


def daemon_pid(daemon: Daemon, name: str) -> str:
    """The main process of an agent, with no daemon to ask: the program of its leaf."""
    leaf = daemon.cgroup.child(f"user-0/agent-{name}/run")
    (pid,) = [p for p in leaf.processes() if Path(f"/proc/{p}/comm").read_text() == "sleep\n"]
    return str(pid)


def test_a_detached_child_sees_what_its_parent_sees_and_no_more(daemon: Daemon) -> None:
    inside, outside = daemon.base / "inside", daemon.base / "outside"
    for directory in (inside, outside):
        directory.mkdir()
        (directory / "file").write_text(f"{directory.name}\n")
    boss = busy(daemon, "boss", mount=f"{inside} /data ro\n{inside} /tmp/deep rw")
    look = (
        "cat /data/file /tmp/deep/file; touch /data/x; ls /proc | grep -c ^[0-9]; "
        f"ls -d {outside}; echo here > $CTX_SELF/result.md; "
        "while ! test -e $CTX_SELF/artifact/go; do sleep 0.05; done; cat $CTX_SELF/status"
    )
    kid = detached_child(daemon, f"sh -c '{look}'")
    wait_until(lambda: read(kid, "result.md") == "here\n", "it has looked around")
    # what it said comes by its monitor
    wait_until(lambda: str(outside) in read(kid, "log") and read(kid, "out").count("\n") == 3,
               "all that it said is there")
    assert read(kid, "out").splitlines()[:2] == ["inside", "inside"]
    assert int(read(kid, "out").splitlines()[2]) < 8, "its own processes only"
    assert "Read-only file system" in read(kid, "log")
    assert f"{outside}: No such file" in read(kid, "log").replace("'", "")
    write(boss / "ctl", "kill")
    wait_dead(boss)
    daemon.restart()
    uid = int(read(kid, "uid"))
    pid = os.fork()
    if not pid:
        # the agent's own process would: its cgroup is what makes it the agent
        node(kid).child("run").write("cgroup.procs", "0")
        os.setgid(uid)
        os.setuid(uid)
        os.close(os.open(kid / "artifact" / "go", os.O_CREAT | os.O_WRONLY))
        os._exit(0)
    # the agent may have seen the file, and ended with all that was in its leaf
    assert os.waitpid(pid, 0)[1] in (0, signal.SIGTERM)
    wait_dead(kid)
    assert read(kid, "out").splitlines()[-1] == "busy", "the mount is found again"
    assert read(kid, "mount.effective").splitlines()[0].split("\t")[1] == "/data"


def test_a_source_of_a_detached_child_is_named_in_its_parents_view(daemon: Daemon) -> None:
    data = daemon.base / "data"
    (data / "below").mkdir(parents=True)
    (data / "below" / "file").write_text("found\n")
    busy(daemon, "boss", mount=f"{data} /seen ro")
    kid = detached_child(daemon, "cat /mine/file", mount="/seen/below /mine ro")
    wait_dead(kid)
    assert read(kid, "out") == "found\n"
    bad = daemon.make("bad", parent="agent:boss", life="detached")
    for source in (str(data), "/seen/none"):
        assert refusal(bad / "mount", f"{source} /mine ro") == "ENOENT", source


def test_a_detached_childs_authority_is_frozen_at_its_start(daemon: Daemon) -> None:
    boss = busy(daemon, "boss")
    kid = detached_child(daemon)
    before = read(kid, "policy.effective")
    assert "model:*" in before
    write(boss / "policy", "")
    assert read(kid, "policy.effective") == before
    write(boss / "ctl", "kill")
    wait_dead(boss)
    boss.rmdir()
    assert read(kid, "policy.effective") == before


def test_a_detached_child_starts_from_a_live_parent_only(daemon: Daemon) -> None:
    boss = busy(daemon, "boss")
    kid = daemon.make("kid", SLEEP, parent="agent:boss", life="detached")
    write(boss / "ctl", "kill")
    wait_dead(boss)
    assert read(kid, "status") == "new\n"
    assert refusal(kid / "ctl", "start") == "EBUSY"
    boss.rmdir()
    assert refusal(kid / "ctl", "start") == "EBUSY"
    assert "the parent of \"kid\" was removed" in read(kid, "error")
    kid.rmdir()


def test_an_agent_may_not_detach_without_policy(daemon: Daemon) -> None:
    lines = ["cd $CTX_ROOT/agent", "mkdir kid.d", "echo detached > kid.d/life || cat ../error"]
    boss = daemon.finish("boss", f"sh -c '{'; '.join(lines)}'")
    assert "agent:kid detach is not in the caller's effective policy" in read(boss, "out")


# a thousand idle agents


@pytest.mark.settings(watchdog="0s")
@pytest.mark.alone
def test_idle_agents_cost_nothing(daemon: Daemon) -> None:
    """Nothing is woken for agents that do nothing: a second without a context switch.

    What the daemon does now and then, whatever agents it has, is left out: the watchdog by
    its setting, and the measuring of disks by looking again.
    """
    agents = [busy(daemon, f"idle{number}") for number in range(10)]
    pids = [daemon.pid, *daemon.monitors()]
    pids += [pid for agent in agents for pid in node(agent).processes()]

    def switches() -> dict[str, str]:
        found = {}
        for pid in pids:
            for task in Path(f"/proc/{pid}/task").iterdir():
                found[str(task)] = (task / "status").read_text().partition("voluntary_ctxt")[2]
        return found

    def is_idle() -> bool:
        before = switches()
        time.sleep(1)
        return switches() == before

    wait_until(is_idle, "nothing is woken for a second")




# what the kernel refuses


@contextmanager
def unwritable(file: Path) -> Iterator[None]:
    """A file of a cgroup that takes nothing, as in a read-only hierarchy; in own mounts only."""
    mount("/dev/full", file, "none", MS_BIND)
    try:
        yield
    finally:
        unmount(file, MNT_DETACH)


def test_a_pause_and_a_resume_that_the_kernel_refuses_change_nothing(
    secluded_daemon: Daemon,
) -> None:
    daemon = secluded_daemon
    boss = busy(daemon, "boss")
    freezer = node(boss).path / "cgroup.freeze"
    with unwritable(freezer):
        assert refusal(boss / "ctl", "pause") == "ENOSPC"
        assert read(boss, "status") == "busy\n"
        error = read(boss, "error")
        assert 'cannot freeze "boss": No space left on device' in error
    write(boss / "ctl", "pause")
    wait_until(lambda: node(boss).keys("cgroup.events")["frozen"], "it is frozen")
    with unwritable(freezer):
        assert refusal(boss / "ctl", "resume") == "ENOSPC"
        assert read(boss, "status") == "paused\n"
    assert node(boss).keys("cgroup.events")["frozen"]
    write(boss / "ctl", "resume")
    statuses = [e["status"] for e in daemon.events("boss") if e["type"] == "agent.status"]
    assert statuses == ["starting", "busy", "paused", "busy"]


@pytest.mark.settings(grace="1h")
def test_a_kill_that_the_kernel_refuses_can_be_said_again(secluded_daemon: Daemon) -> None:
    daemon = secluded_daemon
    boss = busy(daemon, "boss", DEAF)
    wait_until(lambda: read(boss, "out") == "deaf\n", "it does not hear SIGTERM")
    with unwritable(node(boss).path / "cgroup.kill"):
        assert refusal(boss / "ctl", "kill") == "ENOSPC"
        assert read(boss, "status") == "stopping\n"
        assert 'cannot kill "boss" yet: No space left on device' in read(boss, "error")
    write(boss / "ctl", "kill")
    wait_dead(boss)
    assert (read(boss, "outcome"), read(boss, "reason")) == ("cancelled\n", "operator_stop\n")


@pytest.mark.settings(grace="10ms")
def test_a_kill_is_tried_again_after_the_grace_until_the_kernel_takes_it(
    secluded_daemon: Daemon,
) -> None:
    daemon = secluded_daemon
    boss = busy(daemon, "boss", DEAF)
    wait_until(lambda: read(boss, "out") == "deaf\n", "it does not hear SIGTERM")
    with unwritable(node(boss).path / "cgroup.kill"):
        write(boss / "ctl", "stop")
        wait_until(lambda: "cannot kill it yet" in daemon.log.read_text(), "it was tried")
    wait_dead(boss)
    assert (read(boss, "outcome"), read(boss, "reason")) == ("cancelled\n", "operator_stop\n")
