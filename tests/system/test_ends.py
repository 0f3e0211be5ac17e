"""However an agent ends, what it owns ends with it: in order, once, and without a trace."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from runtime.kernel.cgroups import Cgroup
from tests.worlds.daemon import (
    Daemon,
    end_process,
    read,
    refusal,
    wait_dead,
    wait_status,
    wait_until,
    write,
)

#: enough for "breeds", and not for the machine; not every shell can limit it (ulimit -u)
FORKS_MAX: Final = 200
#: programs that make it hard to end them
STUBBORN: Final = {
    "deaf": "trap '' TERM; echo up; while :; do sleep 0.05; done",
    "double-forks": "(setsid sleep 1000 &) & wait; sleep 1000",
    "forks": "perl -e 'while (1) { if (fork) { exit } }' & sleep 1000",
    "breeds": f"perl -e 'while (1) {{ wait if ++$n > {FORKS_MAX}; $p = fork; "
              "exec qw(sleep 0.2) if defined $p && !$p }'",
    "stops-itself": "kill -STOP $$; sleep 1000",
    "plain": "sleep 1000",
}


def sh(script: str) -> str:
    return f"sh -c {shlex.quote(script)}"


def is_up(agent: Path) -> bool:
    return read(agent, "out") == "up\n"


def node(agent: Path) -> Cgroup:
    return Cgroup(Path(read(agent, "cgroup").strip()))


def tree(daemon: Daemon, prefix: str, program: str, *, grace: str, end: str = "") -> list[Path]:
    """boss, its child and its grandchild, each ``busy`` with ``program``."""
    found: list[Path] = []
    for depth in range(3):
        agent = daemon.make(f"{prefix}{depth}", limits=f"grace={grace}")
        if found:
            write(agent / "parent", f"agent:{found[-1].name.removesuffix('.d')}")
        script = end if end and not found else program
        write(agent / "exec", sh(script))
        write(agent / "ctl", "start")
        wait_status(agent, "busy")
        if "echo up" in script:
            wait_until(partial(is_up, agent), "its traps are set")
        found.append(agent)
    return found


def events(agent: Path) -> list[dict[str, Any]]:
    text = (agent / "session" / "events.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def check_ended(agents: list[Path], nodes: list[Cgroup], outcome: str, reason: str) -> None:
    """Everything that must be true of a tree that has ended."""
    top, *below = agents
    assert (read(top, "outcome"), read(top, "reason")) == (f"{outcome}\n", f"{reason}\n")
    for agent in below:
        assert read(agent, "status") == "dead\n"
        assert read(agent, "outcome") == "cancelled\n"
        assert read(agent, "reason") == "parent_dead\n"
        assert read(agent / "session", "state") == "cancelled\n"
    wait_until(lambda: not any(each.exists() for each in nodes), "their cgroups are removed")
    for above, agent in zip(agents, below, strict=False):
        name, owner = agent.name.removesuffix(".d"), above.name.removesuffix(".d")
        assert read(above / "session" / "context" / "child" / name, "status") == "cancelled\n"
        cancels = [e for e in events(above) if e["type"] == "agent.child.cancel"]
        assert [(e["parent"], e["child"], e["reason"]) for e in cancels] == [
            (owner, name, "parent_dead")
        ]
    for agent in agents:
        kinds = [e["type"] for e in events(agent)]
        assert kinds.count("agent.stop") == kinds.count("run.end") == 1
        statuses = [e["status"] for e in events(agent) if e["type"] == "agent.status"]
        assert statuses == ["starting", "busy", "stopping", "dead"]
        ids = [e["id"] for e in events(agent)]
        assert ids == [f"e{number}" for number in range(1, len(ids) + 1)]
    ended = [next(e["ts"] for e in events(a) if e["type"] == "agent.stop") for a in agents]
    assert ended == sorted(ended, reverse=True), "leaves first"


def verb(word: str) -> Callable[[Daemon, list[Path]], None]:
    return lambda daemon, agents: write(agents[0] / "ctl", word)


def kill_program(daemon: Daemon, agents: list[Path]) -> None:
    end_process(int(read(agents[0], "pid")))


def finish(daemon: Daemon, agents: list[Path]) -> None:
    """The program of the first agent waits for this."""
    write(agents[0] / "meta.json", '{"go": true}')


def shorten(daemon: Daemon, agents: list[Path]) -> None:
    write(agents[0] / "limits", "timeout=1ms")


def shut_down(daemon: Daemon, agents: list[Path]) -> None:
    assert daemon.stop() == 0
    daemon.start()


UNTIL_GO: Final = "while ! grep -q go $CTX_SELF/meta.json; do sleep 0.05; done; "
WAYS: Final = {
    "stop": (verb("stop"), "", "cancelled", "operator_stop"),
    "kill": (verb("kill"), "", "cancelled", "operator_stop"),
    "exit 0": (finish, UNTIL_GO + "exit 0", "done", "exit:0"),
    "exit 3": (finish, UNTIL_GO + "exit 3", "error", "exit:3"),
    "crash": (finish, UNTIL_GO + "kill -SEGV $$", "error", "signal:11"),
    "killed": (kill_program, "", "error", "signal:9"),
    "timeout": (shorten, "", "cancelled", "timeout"),
    "shutdown": (shut_down, "", "cancelled", "shutdown"),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_ending_ends_the_subtree(daemon: Daemon, way: str) -> None:
    act, end, outcome, reason = WAYS[way]
    agents = tree(daemon, "a", "sleep 1000", grace="5s", end=end)
    sibling = daemon.run("sibling", "sleep 1000")
    wait_status(sibling, "busy")
    nodes = [node(agent) for agent in agents]
    act(daemon, agents)
    wait_dead(agents[0])
    check_ended(agents, nodes, outcome, reason)
    if way != "shutdown":
        assert read(sibling, "status") == "busy\n"


@pytest.mark.parametrize(("way", "kind"), [
    pytest.param(way, kind, marks=[] if (way == "killed") is (kind in ("plain", "breeds", "forks"))
                 else pytest.mark.long)
    for way in ("stop", "killed") for kind in STUBBORN
])
def test_no_program_escapes(daemon: Daemon, kind: str, way: str) -> None:
    act, _, outcome, reason = WAYS[way]
    agents = tree(daemon, "a", STUBBORN[kind], grace="300ms")
    nodes = [node(agent) for agent in agents]
    act(daemon, agents)
    wait_dead(agents[0])
    check_ended(agents, nodes, outcome, reason)


@pytest.mark.parametrize("depth", [0, 1])
def test_what_somebody_froze_is_thawed_and_ended(daemon: Daemon, depth: int) -> None:
    program = "trap 'echo term; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    agents = tree(daemon, "a", program, grace="20s")
    nodes = [node(agent) for agent in agents]
    nodes[depth].freeze(True)
    wait_until(lambda: nodes[depth].keys("cgroup.events")["frozen"], "it is frozen")
    write(agents[0] / "ctl", "stop")
    wait_dead(agents[0])
    check_ended(agents, nodes, "cancelled", "operator_stop")
    assert [read(agent, "out") for agent in agents] == ["up\nterm\n"] * 3


def test_a_parent_that_cannot_start_has_no_children_to_end(daemon: Daemon) -> None:
    agent = daemon.run("boss", "true", cwd="/none/such")
    wait_dead(agent)
    assert read(agent, "reason").startswith("start_failed: ")
    node = daemon.cgroup.child("user-0", "agent-boss")
    wait_until(lambda: not node.exists(), "its cgroup is removed")
    kid = daemon.make("kid")
    assert refusal(kid / "parent", "agent:boss") == "EBUSY"


def test_what_is_told_to_end_finds_the_order_of_things(daemon: Daemon) -> None:
    """At SIGTERM: parent and child are stopping already, nothing new starts."""
    # what SIGTERM starts may be seen, and be sent SIGTERM too
    look = (
        'trap "" TERM; '
        "cat $CTX_ROOT/agent/boss.d/status $CTX_SELF/status; "
        "mkdir $CTX_ROOT/agent/late.d 2>&1 | grep -c busy; exit 0"
    )
    boss = daemon.run("boss", sh("sleep 1000"), limits="grace=1h")
    wait_status(boss, "busy")
    kid = daemon.make("kid", parent="agent:boss")
    write(kid / "exec", sh(f"trap '{look}' TERM; echo up; while :; do sleep 0.05; done"))
    write(kid / "ctl", "start")
    wait_until(lambda: read(kid, "out") == "up\n", "it is ready for SIGTERM")
    late = daemon.make("later", "true", parent="agent:boss")
    write(boss / "ctl", "stop")
    assert refusal(late / "ctl", "start") == "EBUSY"
    wait_dead(boss)
    assert read(kid, "out") == "up\nstopping\nstopping\n1\n"
    assert (read(late, "status"), read(late, "reason")) == ("dead\n", "parent_dead\n")
    assert not daemon.agent_dir("late").exists()


def test_one_grace_period_is_shared_and_cut_short(daemon: Daemon) -> None:
    """Each has an hour; the ending agent's counts, and nobody waits when all are gone."""
    agents = tree(daemon, "a", "sleep 1000", grace="1h")
    write(agents[0] / "ctl", "stop")
    wait_dead(agents[0])
    agents = tree(daemon, "b", STUBBORN["deaf"], grace="1h")
    write(agents[0] / "limits", "grace=300ms")
    write(agents[0] / "ctl", "stop")
    wait_dead(agents[0])
    assert read(agents[2], "reason") == "parent_dead\n"


def test_a_kill_below_ends_the_wait_there_and_not_above(daemon: Daemon) -> None:
    agents = tree(daemon, "a", STUBBORN["deaf"], grace="1h")
    write(agents[0] / "ctl", "stop")
    write(agents[1] / "ctl", "kill")
    wait_dead(agents[1])
    assert read(agents[0], "status") == "stopping\n"
    assert read(agents[1], "reason") == read(agents[2], "reason") == "parent_dead\n"
    write(agents[0] / "ctl", "kill")
    wait_dead(agents[0])
    assert read(agents[0], "reason") == "operator_stop\n"


@pytest.mark.parametrize("alive", [True, False])
def test_a_killed_cell_is_the_cause_of_all_that_dies_with_it(daemon: Daemon, alive: bool) -> None:
    """SIGKILL of PID 1: nobody below can tell which was first."""
    agents = tree(daemon, "a", "sleep 1000", grace="5s")
    nodes = [node(agent) for agent in agents]
    incarnation = read(agents[0], "incarnation").strip()
    record = daemon.runtime / "record" / f"{incarnation}-r1"
    words = dict(line.split(" ", 1) for line in record.read_text().splitlines())
    if not alive:
        daemon.kill()
    end_process(int(words["keeper"]))
    if not alive:
        wait_until(lambda: not nodes_populated(daemon), "all end without a daemon")
        daemon.start()
    wait_dead(agents[0])
    check_ended(agents, nodes, "error", "signal:9")


def nodes_populated(daemon: Daemon) -> bool:
    return daemon.cgroup.child("user-0").populated()


# at the wrong moment


def test_a_stop_during_the_start(daemon: Daemon) -> None:
    for number in range(10):
        agent = daemon.make(f"a{number}", "sleep 1000")
        with open(agent / "ctl", "wb", buffering=0) as ctl:
            ctl.write(b"start\nstop\n")
        wait_dead(agent)
        assert read(agent, "reason") == "operator_stop\n"
        kinds = [e["type"] for e in daemon.events(f"a{number}")]
        assert kinds.count("agent.stop") == 1
        assert kinds.count("run.start") == kinds.count("run.end")


def test_during_the_end_everything_else_is_refused(daemon: Daemon) -> None:
    agents = tree(daemon, "a", STUBBORN["deaf"], grace="1h")
    write(agents[0] / "ctl", "stop")
    for agent in agents:
        name = agent.name.removesuffix(".d")
        for word in ("start", "stop", "pause", "resume", "reset"):
            assert refusal(agent / "ctl", word) == "EBUSY", word
            assert "is stopping" in read(agent, "error")
        with pytest.raises(OSError, match="busy"):
            agent.rmdir()
        kid = daemon.make(f"kid-of-{name}")
        assert refusal(kid / "parent", f"agent:{name}") == "EBUSY"
        kid.rmdir()
    write(agents[0] / "ctl", "kill")
    wait_dead(agents[0])
    agents[0].rmdir()
    assert os.listdir(daemon.root / "agent") == []


def test_a_parent_is_stopped_and_removed_while_children_start(daemon: Daemon) -> None:
    boss = daemon.run("boss", "sleep 1000")
    wait_status(boss, "busy")
    kids = [daemon.make(f"kid{n}", "sleep 1000", parent="agent:boss") for n in range(20)]
    refused = []

    def start(agent: Path) -> None:
        code = refusal(agent / "ctl", "start")
        refused.append(code)
        assert code in ("accepted", "EBUSY", "ENOENT")

    threads = [threading.Thread(target=start, args=(kid,)) for kid in kids]
    for thread in threads[:10]:
        thread.start()
    write(boss / "ctl", "stop")
    for thread in threads[10:]:
        thread.start()
    wait_dead(boss)
    boss.rmdir()
    for thread in threads:
        thread.join()
    assert len(refused) == 20
    assert os.listdir(daemon.root / "agent") == []
    node = daemon.cgroup.child("user-0", "agent-boss")
    wait_until(lambda: not node.exists(), "its cgroup is removed")


def test_a_hundred_at_once(daemon: Daemon) -> None:
    boss = daemon.run("boss", "sleep 1000")
    wait_status(boss, "busy")
    kids = [daemon.run(f"kid{n}", "sleep 1000", parent="agent:boss") for n in range(100)]
    for kid in kids:
        wait_status(kid, "busy")
    end_process(int(read(boss, "pid")))
    wait_dead(boss)
    cancelled = [e["child"] for e in daemon.events("boss") if e["type"] == "agent.child.cancel"]
    assert sorted(cancelled) == sorted(kid.name.removesuffix(".d") for kid in kids)
    assert {read(kid, "reason") for kid in kids} == {"parent_dead\n"}
    boss.rmdir()



def test_who_looks_in_a_view_that_ends_leaves_no_cgroup(daemon: Daemon) -> None:
    """Paths of children are looked up in their parent's view, by a process in its cgroup."""
    (daemon.base / "there").mkdir()
    over = threading.Event()

    def look(child: Path, number: int) -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                write(child / "mount", f"/there /there{number} ro")

    for number in range(3):
        over.clear()
        agent = daemon.run(f"viewed{number}", sh("sleep 0.8"),
                           mount=f"{daemon.base}/there /there ro")
        wait_status(agent, "busy")
        cgroup = node(agent)
        children = [daemon.make(f"viewer{number}-{n}", parent=f"agent:viewed{number}")
                    for n in range(4)]
        threads = [threading.Thread(target=look, args=(child, n))
                   for n, child in enumerate(children)]
        for thread in threads:
            thread.start()
        wait_dead(agent)
        assert read(agent, "reason") == "exit:0\n"
        over.set()
        for thread in threads:
            thread.join()
        wait_until(lambda c=cgroup: not c.exists(), "its cgroup is gone")  # type: ignore[misc]
