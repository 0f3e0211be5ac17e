"""Processes around messages, runs and tasks die, with a daemon and without one."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from runtime.cell.record import RunRecord, read_record
from tests.worlds import stages
from tests.worlds.daemon import alive, end_process, read, wait_dead, wait_status, wait_until, write
from tests.worlds.fates import SLEEP, Scene, reboot, scene_of
from tests.worlds.invariants import Crashed

ALONE = pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.long)],
                                ids=["daemon", "alone"])


def record_of(scene: Scene, agent: Path, what: str, roles: Sequence[str]) -> RunRecord:
    """The monitor's record of a run, of a task or, named by a dash, of the cell, once it has the
    PIDs of these: the program may speak before."""
    incarnation = read(agent, "incarnation").strip()
    (path,) = (scene.daemon.runtime / "record").glob(f"{incarnation}-{what}")

    def has_all() -> bool:
        record = read_record(path)
        return all(getattr(record, role) for role in roles)

    wait_until(has_all, f"{path} has the PIDs of {roles}")
    return read_record(path)


def events(scene: Scene, name: str, kind: str, least: int = 0) -> list[dict[str, str]]:
    """Those that are told, at least so many: a history may just get its file."""
    found: list[dict[str, str]] = []

    def is_told() -> bool:
        found[:] = [event for event in stages.history(scene, name) if event["type"] == kind]
        return len(found) >= least

    wait_until(is_told, f"{least} of {kind}")
    return found


def working(scene: Scene, mode: str, word: str = "hold") -> Path:
    """An agent with a message in flight and one in its queue, a child and a task."""
    agent = stages.agent(scene, "one", mode)
    scene.wait("one", stages.BETWEEN[mode])
    scene.new("kid", SLEEP, parent="agent:one")
    scene.operator.verb("kid", "start")
    scene.wait("kid", "busy")
    task = stages.task(scene, "one", "long", SLEEP)
    wait_until(lambda: read(task, "status") == "running\n", "the task runs")
    scene.operator.say("one", f"{word} it")
    wait_until(lambda: f"got {word} it" in stages.output(scene, "one"), "it is being worked on")
    scene.operator.say("one", "next")
    scene.invariants.observe()
    return agent


def kill(scene: Scene, alone: bool, *pids: int) -> None:
    """Ends processes; if there is no daemon meanwhile, there is one again afterwards."""
    if alone:
        scene.daemon.kill()
    end_process(pids[0])
    for pid in pids[1:]:
        with suppress(ProcessLookupError):  # the end of one may be that of the next
            end_process(pid)
    wait_until(lambda: not any(alive(pid) for pid in pids), "they are gone")
    if alone:
        scene.invariants.observe()
        scene.daemon.start()


def finish(scene: Scene) -> None:
    scene.invariants.check(scene.operator)
    scene.invariants.dismantle(scene.operator)


#: what is killed, and how the run ends then
RUN_ROLES = {
    "program": ("error", "signal:9"),
    "chain": None,
    "runner": ("error", "signal:9"),
    "monitor": ("interrupted", "runtime_lost"),
}


@ALONE
@pytest.mark.parametrize("role", RUN_ROLES)
def test_a_death_around_a_turn(role: str, alone: bool) -> None:
    """It ends that run and its message only; the next message is worked on."""
    with scene_of() as scene:
        scene.daemon.start()
        agent = working(scene, "turn", "gate")
        # without the runner nobody waits for the program; its end is that of its leaf
        victims = ("keeper", "program") if role == "runner" else (role,)
        record = record_of(scene, agent, "r1", victims)
        kept = read(agent / "task" / "long", "pid")
        kill(scene, alone, *(getattr(record, each) for each in victims))
        (stages.gate(scene) / "open").touch()
        stages.conversed(scene, "one", "turn")
        (end, _) = events(scene, "one", "run.end", 2)
        end_of = RUN_ROLES[role] or ("done", "exit:0")
        assert (end["outcome"], end["reason"]) == end_of
        assert stages.ends(scene, "one") == [
            "failed" if RUN_ROLES[role] else "processed", "processed"]
        assert read(agent / "task" / "long", "pid") == kept
        assert read(scene.daemon.agent_dir("kid"), "status") == "busy\n"
        finish(scene)


def test_a_cell_that_ends_before_its_run_begins_ends_the_agent() -> None:
    """The daemon died when it had committed the run, and the cell did after it."""
    with scene_of("run.committed") as scene:
        scene.daemon.start()
        agent = stages.agent(scene, "one", "turn")
        scene.wait("one", "idle")
        keeper = record_of(scene, agent, "cell-*", ("keeper",)).keeper
        with suppress(Crashed):
            scene.operator.say("one", "go")
        scene.daemon.wait_killed()
        end_process(keeper)
        wait_until(lambda: not alive(keeper), "the cell is gone")
        scene.arm("")
        scene.daemon.start()
        wait_dead(agent)
        assert read(agent, "reason") == "signal:9\n"
        assert stages.ends(scene, "one") == ["failed"]
        finish(scene)


#: what is killed, and how the agent ends then
CELL_ROLES = {
    ("turn", "cell keeper"): ("error", "signal:9"),
    ("turn", "cell monitor"): ("interrupted", "runtime_lost"),
    ("resident", "cell keeper"): ("error", "signal:9"),
    ("resident", "cell monitor"): ("interrupted", "runtime_lost"),
    ("resident", "run program"): ("error", "signal:9"),
    ("resident", "run monitor"): ("interrupted", "runtime_lost"),
}


@ALONE
@pytest.mark.parametrize(("mode", "role"), CELL_ROLES, ids=str)
def test_a_death_that_is_the_agents(mode: str, role: str, alone: bool) -> None:
    """All that it owns ends, without a daemon too; what was not answered has failed."""
    with scene_of() as scene:
        scene.daemon.start()
        agent = working(scene, mode)
        which, part = role.split()
        record = record_of(scene, agent, "cell-*" if which == "cell" else "r1", (part,))
        victim = getattr(record, part)
        node = scene.daemon.cgroup.child("user-0", "agent-one")
        scene.hold("one", "kid")
        if alone:
            scene.daemon.kill()
        end_process(victim)
        if alone and role != "run monitor":
            wait_until(lambda: not node.populated(), "all of it ends without a daemon")
        if alone:
            scene.daemon.start()
        wait_dead(agent)
        assert (read(agent, "outcome").strip(), read(agent, "reason").strip()) == (
            CELL_ROLES[mode, role])
        assert read(scene.daemon.agent_dir("kid"), "reason") == "parent_dead\n"
        assert read(agent / "task" / "long", "status") in ("cancelled\n", "interrupted\n")
        # that its task has ended may be one more message
        assert sorted(set(stages.ends(scene, "one"))) == ["dropped", "failed"]
        assert stages.ends(scene, "one").count("failed") == 1
        finish(scene)


TASK_ROLES = {
    "program": ("failed", "signal:9"),
    "chain": ("running", ""),
    "runner": ("interrupted", ""),
    "monitor": ("interrupted", ""),
}


@ALONE
@pytest.mark.parametrize("role", TASK_ROLES)
def test_a_death_around_a_task(role: str, alone: bool) -> None:
    with scene_of() as scene:
        scene.daemon.start()
        agent = stages.agent(scene, "one", "turn")
        scene.wait("one", "idle")
        task = stages.task(scene, "one", "long", f"exec {SLEEP}")
        wait_until(lambda: read(task, "status") == "running\n", "it runs")
        victims = ("keeper", "program") if role == "runner" else (role,)
        record = record_of(scene, agent, "task-long", (*victims, "program"))
        kill(scene, alone, *(getattr(record, each) for each in victims))
        if role != "chain":
            wait_dead(task)
            wait_until(lambda: not alive(record.program), "the program is gone")
            assert len(events(scene, "one", "task.end", 1)) == 1
        assert (read(task, "status").strip(), read(task, "exit").strip()) == TASK_ROLES[role]
        stages.conversed(scene, "one", "turn")
        finish(scene)


# the daemon


@pytest.mark.parametrize("mode", ["turn", pytest.param("resident", marks=pytest.mark.long)])
def test_a_long_queue_outlives_many_daemons(mode: str) -> None:
    """Each of fifty messages is worked on once, in order, whoever is there to see it."""
    with scene_of() as scene:
        scene.daemon.start()
        agent = stages.agent(scene, "one", mode)
        scene.wait("one", stages.BETWEEN[mode])
        for number in range(50):
            scene.operator.say("one", f"word {number}")
        for number in (1, 9, 20, 21, 40):
            wait_until(lambda n=number: len(stages.ends(scene, "one")) >= n, "some are done")  # type: ignore[misc]
            scene.daemon.kill()
            scene.invariants.observe()
            scene.daemon.start()
            scene.invariants.check(scene.operator)
        stages.conversed(scene, "one", mode)
        assert stages.ends(scene, "one") == ["processed"] * 50
        got = [line for line in stages.output(scene, "one") if line.startswith("got")]
        assert list(dict.fromkeys(got)) == [f"got word {number}" for number in range(50)]
        assert read(agent, "status") == f"{stages.BETWEEN[mode]}\n"
        finish(scene)


@pytest.mark.parametrize("mode", ["turn", "resident"])
def test_a_reply_that_no_daemon_heard(mode: str) -> None:
    with scene_of() as scene:
        scene.daemon.start()
        agent = working(scene, mode, "gate")
        reply = scene.daemon.state / "agent" / read(agent, "incarnation").strip() / "reply"
        scene.daemon.kill()
        (stages.gate(scene) / "open").touch()
        records = scene.daemon.runtime / "record"
        if mode == "turn":
            wait_until(lambda: any("exit 0" in p.read_text() for p in records.iterdir()),
                       "the run is over")
        else:
            wait_until(lambda: any('"message"' in p.read_text() for p in reply.iterdir()),
                       "the reply is there")
        scene.invariants.observe()
        scene.daemon.start()
        stages.conversed(scene, "one", mode)
        assert stages.ends(scene, "one") == ["processed", "processed"]
        finish(scene)


def test_a_message_of_which_only_a_part_was_told() -> None:
    """The next daemon tells the rest, and nothing twice."""
    script = (
        f'{stages.AT_GATE}; while read -r line; do case $line in *\\}}) '
        'id=${line#*\\"id\\":\\"}; id=${id%%\\"*}; echo "whole $id"; '
        'echo "{\\"type\\":\\"message\\",\\"id\\":\\"$id\\",\\"text\\":\\"re\\"}";; '
        '*) echo part;; esac; done'
    )
    with scene_of() as scene:
        scene.daemon.start()
        gate = stages.gate(scene)
        agent = scene.run("one", f"sh -c {shlex.quote(script)}", mode="resident",
                          mount=f"{gate} /gate ro")
        scene.wait("one", "ready")
        scene.operator.say("one", '"' * 900_000)  # more than a pipe holds, escaped
        scene.operator.say("one", "next")
        scene.wait("one", "busy")
        scene.daemon.restart()
        scene.daemon.restart()
        (gate / "open").touch()
        scene.wait("one", "ready")
        wait_until(lambda: stages.ends(scene, "one") == ["processed"] * 2, "both are answered")
        lines = stages.output(scene, "one")
        told = [event["message"] for event in events(scene, "one", "message.end")]
        assert lines == [f"whole {name}" for name in told]
        assert read(agent, "queue") == ""
        finish(scene)


@ALONE
def test_a_reply_before_the_end_counts(alone: bool) -> None:
    """A resident program that answers and fails at once has answered."""
    with scene_of() as scene:
        scene.daemon.start()
        agent = stages.agent(scene, "one", "resident")
        scene.wait("one", "ready")
        scene.operator.say("one", "exit")
        if alone:
            wait_until(lambda: "got exit" in stages.output(scene, "one"), "it is told")
            scene.daemon.kill()
            node = scene.daemon.cgroup.child("user-0", "agent-one")
            # also if it ended before the daemon did
            wait_until(lambda: not node.populated(), "its cell ends")
            scene.daemon.start()
        wait_dead(agent)
        assert (read(agent, "outcome"), read(agent, "reason")) == ("error\n", "exit:4\n")
        assert stages.ends(scene, "one") == ["processed"]
        finish(scene)


def test_what_was_waited_for_came_while_there_was_no_daemon() -> None:
    """A task, a child, a timer and a deadline."""
    with scene_of() as scene:
        scene.daemon.start()
        agent = stages.agent(scene, "one", "turn")
        scene.wait("one", "idle")
        task = stages.task(scene, "one", "short", f"{stages.AT_GATE}; exit 5")
        scene.new("kid", f"sh -c '{stages.AT_GATE}; exit 6'", parent="agent:one")
        scene.operator.verb("kid", "start")
        scene.wait("kid", "busy")
        wait_until(lambda: read(task, "status") == "running\n", "the task runs")
        pids = [int(read(d, "pid")) for d in (task, scene.daemon.agent_dir("kid"))]
        item = agent / "work" / "w1"
        item.mkdir()
        write(item / "objective", "what waits")
        waits = {"task": "task short", "child": "child kid", "timer": "timer 300ms"}
        paths = [stages.wait(scene, "one", title, on, work="w1") for title, on in waits.items()]
        late = stages.wait(scene, "one", "late", "message", deadline="300ms", work="w1")
        assert read(item, "status") == "blocked\n"
        due = time.time() + 0.4
        scene.daemon.kill()
        (stages.gate(scene) / "open").touch()
        wait_until(lambda: not any(alive(pid) for pid in pids) and time.time() > due, "all came")
        scene.invariants.observe()
        scene.daemon.start()
        for path in paths:
            wait_until(lambda p=path: read(p, "status") == "fired\n", path.name)  # type: ignore[misc]
        wait_until(lambda: read(late, "status") == "expired\n", "the deadline is over")
        payload = json.loads(read(agent / "waiting" / "task", "payload"))
        assert (payload["task"], payload["status"], payload["exit"]) == (
            "short", "failed", "exit:5",
        )  # fmt: skip
        assert read(item, "status") == "open\n"
        stages.conversed(scene, "one", "turn")
        senders = Counter(e["from"] for e in events(scene, "one", "message.queued"))
        assert senders == {
            f"{what}": 1 for what in (
                "task:short", "task:kid", "wait:task", "wait:child", "wait:timer", "wait:late")}
        for _ in range(2):  # nothing of it happens again
            scene.daemon.restart()
            stages.conversed(scene, "one", "turn")
            assert senders == Counter(e["from"] for e in events(scene, "one", "message.queued"))
        finish(scene)


def test_a_stop_that_is_half_done_when_the_daemon_dies() -> None:
    """The program is gone, a task is deaf; the tasks of it are unknown to nobody."""
    with scene_of() as scene:
        scene.daemon.start()
        agent = working(scene, "turn")
        deaf = stages.task(scene, "one", "deaf", f'trap "" TERM; echo up; {SLEEP}')
        wait_until(lambda: read(deaf, "output") == "up\n", "it is deaf")
        scene.operator.write("one", "limits", "grace=1h")
        scene.hold("one")
        scene.operator.verb("one", "stop")
        scene.daemon.kill()
        scene.invariants.observe()
        scene.daemon.start()
        assert read(agent, "status") == "stopping\n"
        assert alive(int(read(deaf, "pid")))
        scene.operator.verb("one", "kill")
        wait_dead(agent)
        scene.promise("one", "cancelled", "operator_stop")
        assert Counter(stages.ends(scene, "one")) == {"aborted": 1, "dropped": 1}
        assert read(deaf, "status") == "cancelled\n"
        finish(scene)


def test_every_status_is_adopted() -> None:
    """And from each an agent goes on."""
    with scene_of() as scene:
        scene.daemon.start()
        wanted = {}
        for name, mode, word, verb, status in (
            ("idle", "turn", "", "", "idle"),
            ("ready", "resident", "", "", "ready"),
            ("turning", "turn", "gate", "", "busy"),
            ("residing", "resident", "gate", "", "busy"),
            ("resting", "turn", "", "pause", "paused"),
            ("waiting", "resident", "", "pause", "paused"),
            ("frozen", "turn", "gate", "pause", "paused"),
            ("stuck", "resident", "gate", "pause", "paused"),
            ("aborted", "turn", "hold", "abort", "paused"),
            ("broken", "resident", "hold", "abort", "paused"),
        ):
            wanted[name] = (mode, status)
            agent = stages.agent(scene, name, mode)
            scene.wait(name, stages.BETWEEN[mode])
            long = stages.task(scene, name, "long", SLEEP)
            wait_until(lambda d=long: read(d, "status") == "running\n", "its task runs")  # type: ignore[misc]
            if word:
                scene.operator.say(name, word)
                wait_until(lambda n=name, w=word: f"got {w}" in stages.output(scene, n), "told")  # type: ignore[misc]
            if verb:
                scene.operator.verb(name, verb)
            if verb == "abort":
                wait_until(lambda d=agent: read(d, "run") == "", "its run has ended")  # type: ignore[misc]

        def facts() -> dict[str, tuple[str, ...]]:
            return {
                name: tuple(
                    read(scene.daemon.agent_dir(name), file)
                    for file in ("status", "pid", "run", "task/long/status", "task/long/pid")
                )
                for name in wanted
            }

        before = facts()
        assert {name: found[0].strip() for name, found in before.items()} == {
            name: status for name, (_, status) in wanted.items()}
        for _ in range(2):
            scene.daemon.kill()
            scene.invariants.observe()
            scene.daemon.start()
            scene.invariants.check(scene.operator)
            assert facts() == before
        (stages.gate(scene) / "open").touch()
        for name, (mode, status) in wanted.items():
            if status == "paused":
                scene.operator.verb(name, "resume")
            scene.operator.say(name, "go on")
            stages.conversed(scene, name, mode)
            assert stages.ends(scene, name)[-1] == "processed"
        finish(scene)


def test_a_second_abort_spares_the_cell_too() -> None:
    """The later runs of a once agent are not where its PID 1 is."""
    with scene_of() as scene:
        scene.daemon.start()
        agent = stages.agent(scene, "one", "once")
        for run in ("r1", "r2", "r3"):
            wait_until(lambda r=run: f"got {r}" in stages.output(scene, "one"), f"{run} is there")  # type: ignore[misc]
            wait_status(agent, "busy")
            scene.operator.verb("one", "abort")
            wait_until(lambda: read(agent, "run") == "", "its run has ended")
            scene.daemon.restart()
            scene.operator.verb("one", "resume")
        wait_until(lambda: "got r4" in stages.output(scene, "one"), "r4 is there")
        wait_status(agent, "busy")
        scene.invariants.check(scene.operator)
        os.kill(int(read(agent, "pid")), signal.SIGTERM)
        wait_dead(agent)
        assert (read(agent, "outcome"), read(agent, "reason")) == ("error\n", "signal:15\n")
        reasons = [event["reason"] for event in events(scene, "one", "run.end")]
        assert reasons == ["operator_aborted"] * 3 + ["signal:15"]
        finish(scene)


def test_an_end_after_an_abort_is_waited_for() -> None:
    """Whoever removes it at once takes nothing from under the daemon's feet."""
    with scene_of() as scene:
        scene.daemon.start()
        names = [f"one{number}" for number in range(10)]
        for name in names:
            agent = stages.agent(scene, name, "once")
            scene.wait(name, "busy")
            scene.operator.verb(name, "abort")
            wait_until(lambda d=agent: read(d, "run") == "", "its run has ended")  # type: ignore[misc]
        for name in names:
            scene.operator.verb(name, "kill")
        for name in names:
            wait_dead(scene.daemon.agent_dir(name))
            scene.operator.remove(name)
        finish(scene)


def test_what_is_started_while_its_agent_ends_does_not_outlive_it() -> None:
    """Tasks and runs are on their way into the cell when that is stopped."""
    with scene_of() as scene:
        scene.daemon.start()
        for number in range(10):
            agent = stages.agent(scene, "one", "turn", limits="grace=1h")
            scene.wait("one", "idle")
            scene.operator.say("one", "hold on")
            for title in range(number):
                stages.task(scene, "one", f"t{title}", SLEEP)
            scene.operator.verb("one", "stop")
            wait_dead(agent)
            node = scene.daemon.cgroup.child("user-0", "agent-one")
            wait_until(lambda c=node: not c.exists(), "it is removed")  # type: ignore[misc]
            scene.operator.remove("one")
        finish(scene)


def test_a_turn_agent_goes_on_after_a_reboot() -> None:
    """The message in flight has failed; the others, waits and what has not begun are there."""
    with scene_of() as scene:
        scene.daemon.start()
        agent = working(scene, "turn")
        armed = stages.wait(scene, "one", "for-ever", "timer 1h")
        made = agent / "task" / "made"
        made.mkdir()
        queued = [e["message"] for e in events(scene, "one", "message.queued")]
        again = scene.run("again", SLEEP, restart="always")
        scene.wait("again", "busy")
        scene.daemon.kill()
        scene.invariants.observe()
        reboot(scene)
        scene.promise("kid", "interrupted", "reboot")
        scene.daemon.start()

        def told() -> dict[str, tuple[str, str]]:
            ends = events(scene, "one", "message.end")
            return {e["message"]: (e["outcome"], e.get("reason", "")) for e in ends}

        wait_until(lambda: queued[1] in told(), "what it was sent before is worked on")
        assert [told()[message] for message in queued[:2]] == [
            ("failed", "reboot"), ("processed", "")
        ]  # fmt: skip
        wait_until(lambda: read(agent, "queue") == "", "it is told of what ended")
        scene.wait("one", "idle")
        for task, status in (("long", "interrupted"), ("kid", "interrupted"), ("made", "queued")):
            assert read(agent / "task" / task, "status") == f"{status}\n"
        assert read(armed, "status") == "armed\n"
        first, *_ = events(scene, "one", "run.end")
        assert (first["outcome"], first["reason"]) == ("interrupted", "reboot")
        assert "r1 ended: interrupted reboot" in read(agent, "log")
        scene.wait("again", "busy")
        assert read(again, "run") == "r2\n"
        finish(scene)


def test_a_resident_agent_ends_with_a_reboot() -> None:
    """The message in flight has failed, the others are dropped, tasks interrupted."""
    with scene_of() as scene:
        scene.daemon.start()
        agent = working(scene, "resident")
        armed = stages.wait(scene, "one", "for-ever", "timer 1h")
        made = agent / "task" / "made"
        made.mkdir()
        # its id is known only where it is told
        queued = [e["message"] for e in events(scene, "one", "message.queued")]
        scene.daemon.kill()
        scene.invariants.observe()
        reboot(scene)
        scene.promise("one", "interrupted", "reboot")
        scene.daemon.start()
        wait_dead(agent)
        told = {e["message"]: (e["outcome"], e["reason"])
                for e in events(scene, "one", "message.end")}
        assert told.pop(queued[0]) == ("failed", "reboot")
        assert told.pop(queued[1]) == ("dropped", "reboot")
        assert {outcome for outcome, _ in told.values()} <= {"dropped"}
        for task in ("long", "kid"):
            assert read(agent / "task" / task, "status") == "interrupted\n"
        assert read(made, "status") == "interrupted\n"
        wait_dead(agent / "task" / "long")
        assert read(armed, "status") == "cancelled\n"
        (end,) = events(scene, "one", "run.end", 1)
        assert (end["outcome"], end["reason"]) == ("interrupted", "reboot")
        finish(scene)


def test_what_is_aborted_while_it_is_paused_goes_on() -> None:
    """What is frozen is killed, and says nothing of it; its cell learns later that it stays."""
    with scene_of() as scene:
        scene.daemon.start()
        agent = stages.agent(scene, "one", "once")
        for run in ("r1", "r2"):
            wait_until(lambda r=run: f"got {r}" in stages.output(scene, "one"), f"{run} is there")  # type: ignore[misc]
            wait_status(agent, "busy")
            scene.operator.verb("one", "pause")
            wait_status(agent, "paused")
            scene.operator.verb("one", "abort")
            wait_until(lambda: read(agent, "run") == "", "its run has ended")
            scene.daemon.restart()
            assert read(agent, "status") == "paused\n"
            scene.operator.verb("one", "resume")
        wait_until(lambda: "got r3" in stages.output(scene, "one"), "r3 is there")
        wait_status(agent, "busy")
        finish(scene)
