"""What an agent may by default, and that the history and the log say who did what."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import signal
import time

import pytest

from tests.worlds.daemon import Daemon, read, wait_dead, wait_status, wait_until, write

SLEEP = "sleep 1000"


def sh(text: str) -> str:
    return f"sh -c {shlex.quote(text)}"


def try_each(*commands: str) -> str:
    """A program that says ok or no for each command."""
    return sh("; ".join(f"if {c}; then echo ok; else echo no; fi" for c in commands))


@pytest.mark.usefixtures("guard_after")
def test_a_root_agent_reads_writes_and_stops_no_other_by_default(daemon: Daemon) -> None:
    victim = daemon.make("victim", SLEEP, env="SECRET=hidden", mode="turn")
    write(victim / "ctl", "start")
    wait_status(victim, "idle")
    at = "$CTX_ROOT/agent/victim"
    attacker = daemon.finish("attacker", try_each(
        f"cat {at}.d/env", f"cat {at}.d/out", f"cat {at}.d/policy", f"echo obey > {at}.d/inbox",
        f"echo kill > {at}.d/ctl", f"echo stop > {at}.d/ctl", f"echo pause > {at}.d/ctl",
        f"{at} obey", f"ls {at}.d/session/", f"cat {at}.d/session/events.jsonl",
    ))  # fmt: skip
    assert read(attacker, "out") == "no\n" * 10
    assert read(victim, "status") == "idle\n"
    assert read(victim, "queue") == ""


def test_what_an_agent_made_it_controls_without_a_line(daemon: Daemon) -> None:
    policy = "agent:* create,detach", "tool:* execute"
    boss = daemon.run("boss", "sh", """
        cd $CTX_ROOT/agent
        for name in kid free; do
            mkdir $name.d
            echo SECRET=x > $name.d/env
            echo sleep 1000 > $name.d/exec
        done
        echo detached > free.d/life
        for name in kid free; do
            echo start > $name.d/ctl
            until grep -q busy $name.d/status; do :; done
            cat $name.d/env
            echo stop > $name.d/ctl
            cat $name.d/wait
            cat $name.d/reason
        done
    """, policy="\n".join(f"allow boss_t {line}" for line in policy))
    wait_dead(boss)
    assert read(boss, "out") == "SECRET=x\nsupervisor_stop\n" * 2, read(boss, "log")


@pytest.mark.usefixtures("guard_after")
def test_an_environment_is_for_no_agent_by_policy(daemon: Daemon) -> None:
    daemon.run("victim", SLEEP, env="SECRET=hidden")
    reader = daemon.finish("reader", try_each(
        "cat $CTX_ROOT/agent/victim.d/exec", "cat $CTX_ROOT/agent/victim.d/env",
        "cat $CTX_ROOT/self/env",
    ), policy="allow reader_t agent:* read,write,start,stop", env="OWN=1")  # fmt: skip
    assert read(reader, "out") == "sleep 1000\nok\nno\nOWN=1\nok\n"
    assert read(daemon.agent_dir("victim"), "env") == "SECRET=hidden\n"


def test_the_history_names_who_wrote_and_who_stopped(daemon: Daemon) -> None:
    stopper = daemon.run("stopper", "sh", """
        until grep -q busy $CTX_ROOT/agent/victim.d/status; do :; done
        echo stop > $CTX_ROOT/agent/victim.d/ctl
        cat $CTX_ROOT/agent/victim.d/wait
    """, policy="allow stopper_t agent:victim read,stop")
    victim = daemon.run("victim", SLEEP, env="SECRET=hidden")
    wait_dead(victim)
    wait_dead(stopper)
    events = daemon.events("victim")
    me, it = f"operator uid:{os.geteuid()}", "agent:stopper run:r1"
    assert all("by" in event for event in events)
    controls = [(e.get("file"), e.get("verb"), e["by"]) for e in events
                if e["type"] == "agent.control"]
    assert controls == [
        ("env", None, me), ("exec", None, me), (None, "start", me), (None, "stop", it),
    ]  # fmt: skip
    assert next(e["by"] for e in events if e["type"] == "agent.create") == me
    ends = [e for e in events if e["type"] in ("run.end", "agent.stop")]
    assert [e["by"] for e in ends] == [it, it]
    stopping = [e for e in events if e.get("status") in ("stopping", "dead")]
    assert [e["by"] for e in stopping] == [it, it]
    assert next(e["by"] for e in events if e["type"] == "run.start") == "runtime"
    assert "hidden" not in read(victim, "session/events.jsonl")
    said = daemon.ctx("audit", "victim").stdout
    assert re.search(r"agent\.control +agent=victim verb=stop by=agent:stopper run:r1\n", said)
    assert "by=runtime" not in said


@pytest.mark.usefixtures("guard_after")
def test_what_was_refused_is_told_with_who_tried(daemon: Daemon) -> None:
    daemon.run("victim", SLEEP)
    daemon.finish("thief", try_each("cat $CTX_ROOT/agent/victim.d/env"), policy="")
    said = daemon.ctx("audit", "victim").stdout
    assert re.search(r"refused +by=agent:thief run:r1 EACCES agent/victim\.d", said), said
    own = daemon.finish("own", sh("cat $CTX_ROOT/agent/victim.d/env; "
                                  "python3 -IS $CTX_ROOT/bin/ctx audit"))
    told = read(own, "out")
    assert "by=agent:own run:r1 EACCES" in told
    assert "thief" not in told
    assert "rejected" not in read(daemon.agent_dir("victim"), "session/events.jsonl")


@pytest.mark.usefixtures("guard_after")
def test_what_a_socket_refuses_is_told_too(daemon: Daemon) -> None:
    victim = daemon.run("victim", SLEEP)
    wait_status(victim, "busy")
    knock = (
        "import os,socket; s=socket.socket(socket.AF_UNIX); "
        "s.connect(os.environ['CTX_ROOT']+'/agent/victim.sock'); "
        "s.sendall(b'{\\\"op\\\":\\\"cancel\\\",\\\"id\\\":\\\"x\\\"}\\n'); s.recv(999)"
    )
    daemon.finish("knocker", sh(f'python3 -c "{knock}"'))
    assert read(victim, "status") == "busy\n"
    said = daemon.ctx("audit", "victim").stdout
    assert re.search(r"by=agent:knocker run:r1 EACCES agent/victim\.sock: ", said), said


def test_tasks_and_runs_that_somebody_ends_say_who(daemon: Daemon) -> None:
    agent = daemon.make("turner", "sh -c 'sleep 1000'", mode="turn")
    write(agent / "ctl", "start")
    wait_status(agent, "idle")
    write(agent / "limits", "grace=1s")
    for name, command, end in (
        ("long", f"echo up; exec {SLEEP}", "signal:15"),
        ("deaf", f"trap '' TERM; echo up; {SLEEP}; {SLEEP}", "signal:9"),
    ):
        task = agent / "task" / name
        task.mkdir()
        write(task / "cmd", command)
        write(task / "ctl", "start")
        wait_until(lambda t=task: read(t, "output") == "up\n", "it runs")  # type: ignore[misc]
        write(task / "ctl", "stop")
        wait_until(lambda t=task: read(t, "status") == "cancelled\n", "it ends")  # type: ignore[misc]
        assert read(task, "exit") == f"{end}\n"
    write(agent / "inbox", "work")
    wait_until(lambda: read(agent, "pid"), "a run begins")
    write(agent / "ctl", "abort")
    wait_until(lambda: "run.end" in {e["type"] for e in daemon.events("turner")}, "it ends")
    told = {e["type"]: e["by"] for e in daemon.events("turner")}
    me = f"operator uid:{os.geteuid()}"
    for kind in ("task.start", "task.end", "message.queued", "run.end", "message.end"):
        assert told[kind] == me, kind
    assert told["run.start"] == "runtime"


@pytest.mark.usefixtures("guard")
def test_refusals_of_one_agent_fill_no_log_and_hold_up_nobody(daemon: Daemon) -> None:
    bystander = daemon.run("bystander", SLEEP)
    wait_status(bystander, "busy")
    flood = daemon.run("flood", sh(
        "x=$(printf %200s | tr ' ' x); cd $CTX_ROOT/agent; "
        "while :; do for i in 1 2 3 4 5 6 7 8 9; do (: > bystander.d/$x) 2>/dev/null; "
        "mkdir $x$x 2>/dev/null; done; done & "
        "while :; do rmdir bystander.d; done 2>/dev/null"
    ), policy="")
    begun_with = daemon.log.stat().st_size
    wait_until(lambda: daemon.log.stat().st_size > begun_with + 500, "it is refused")
    before, begun = daemon.log.stat().st_size, time.monotonic()
    slowest = 0.0
    while (spent := time.monotonic() - begun) < 1.5:
        at = time.monotonic()
        assert read(bystander, "status") == "busy\n"
        slowest = max(slowest, time.monotonic() - at)
    grown = daemon.log.stat().st_size - before
    assert grown < 12_000 * (spent + 2), f"{grown} bytes in {spent:.1f} s"
    assert slowest < 1.0
    write(flood / "ctl", "kill")
    wait_dead(flood)
    wait_until(lambda: re.search("… [0-9]+ more: ctxd.rejected agent:flood",
                                 daemon.log.read_text()), "the others are counted")


@pytest.mark.long
@pytest.mark.usefixtures("guard")
def test_a_log_that_nobody_reads_holds_up_nothing(daemon: Daemon) -> None:
    with open(f"/proc/{daemon.pid}/fd/2", "wb") as log:
        fcntl.fcntl(log, fcntl.F_SETPIPE_SZ, 4096)
    reader = daemon._tee.pid
    os.kill(reader, signal.SIGSTOP)
    try:
        for number in range(200):
            with pytest.raises(OSError, match="Invalid"):
                daemon.path("agent", f"{'x' * 240}{number}").mkdir()
        assert read(daemon.finish("after", "echo hello"), "out") == "hello\n"
    finally:
        os.kill(reader, signal.SIGCONT)


@pytest.mark.parametrize("name", ["cgroup.procs", "memory.max", "cgroup.kill", "a.b", "tasks"])
def test_a_task_may_be_named_like_a_file_of_a_cgroup(shared_daemon: Daemon, name: str) -> None:
    agent = shared_daemon.agent_dir("worker")
    if not agent.exists():
        shared_daemon.run("worker", SLEEP)
    wait_status(agent, "busy")
    task = agent / "task" / name
    task.mkdir()
    write(task / "cmd", "echo done")
    write(task / "ctl", "start")
    wait_until(lambda: read(task, "status") == "completed\n", "it ends")
    assert read(task, "output") == "done\n"
    task.rmdir()


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM])
def test_signals_without_a_meaning_end_no_daemon(shared_daemon: Daemon, number: int) -> None:
    os.kill(shared_daemon.pid, number)
    name = signal.Signals(number).name
    if number != signal.SIGALRM:  # the daemon's own timers send it
        wait_until(lambda: f"{name} is refused" in shared_daemon.log.read_text(), "it is logged")
    assert "state=ready" in read(shared_daemon.root, "status")
