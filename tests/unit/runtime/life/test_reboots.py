"""A reboot: what ran has ended and is told as that, and what waited goes on."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import pytest

from runtime.ids import BootId
from runtime.life.turns import has_turn
from runtime.records.items import Task, Wait
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.records.run import BETWEEN_RUNS
from runtime.texts.limits import RUNNING
from tests.unit.runtime.life.test_lives import on_stage, working
from tests.unit.runtime.life.test_turns import Line
from tests.worlds.memory import Machine
from tests.worlds.records import ROOT, World, inside

Act = Callable[[Line], Awaitable[None]]


def rebooted(
    world: World, before: Act, after: Act, *, declared: Collection[str] = ()
) -> None:
    """Nothing of the machine outlives the two acts but the state."""

    async def second(line: Line) -> None:
        await line.supervisor.recover(declared)
        await line.settle()
        await after(line)

    on_stage(world, before, Machine(), kind=Line)
    world.reopen()
    machine = Machine()
    machine.boot = BootId("another boot")
    on_stage(world, second, machine, kind=Line)


def agent_of(line: Line, name: str = "x") -> Agent:
    found = line.world.agents.registry.named(name)
    assert found is not None
    return found


def queue(line: Line, agent: Agent) -> list[str]:
    return [message.text for message in line.world.agents.messages.pending(agent)]


def notices(line: Line, agent: Agent) -> dict[str, tuple[str, str]]:
    """Of the ends of tasks that it has not been told yet."""
    found = {}
    for text in queue(line, agent):
        told = json.loads(text)
        found[told["task"]] = told["status"], told["reason"]
    return found


def test_a_turn_agent_is_idle_again_with_what_it_was_sent(world: World) -> None:
    async def before(line: Line) -> None:
        agent, _ = await working(line)
        for text in ("second", "third"):
            world.agents.messages.send(ROOT, agent, text)
        tasks = world.agents.tasks
        for name in ("ran", "made"):
            tasks.set(tasks.make(ROOT, agent, name), cmd="make")
        tasks.start(ROOT, agent, tasks.find(agent, "ran"))
        waiting = world.agents.waiting
        waiting.arm(ROOT, agent, waiting.make(ROOT, agent, "later"), "timer 1h")

    async def after(line: Line) -> None:
        agent = agent_of(line)
        assert (agent.status, agent.run, agent.outcome) == (Status.STARTING, BETWEEN_RUNS, "")
        assert agent.cell.boot == line.machine.boot
        told = line.events(agent, "message.end")
        assert [(end["outcome"], end["reason"]) for end in told] == [("failed", "reboot")]
        (end,) = line.events(agent, "run.end")
        assert (end["outcome"], end["reason"]) == ("interrupted", "reboot")
        ran, made = (line.world.agents.tasks.find(agent, name) for name in ("ran", "made"))
        assert (ran.status.value, made.status.value) == ("interrupted", "made")
        (wait,) = line.world.agents.items.of(agent.index, Wait)
        assert wait.status.value == "armed"
        log = line.world.agents.documents.directory(agent) / "log"
        assert b"r1 ended: interrupted reboot" in b"".join(
            path.read_bytes() for path in sorted(log.iterdir())
        )
        first, *_ = queue(line, agent)
        line.machine.held(line.cell(agent))
        await line.until(lambda: bool(agent.run.id))
        current = line.world.agents.messages.current(agent)
        assert current is not None and current.text == first
        assert agent.run.id == "r2"

    rebooted(world, before, after)


def test_what_was_paused_is_paused_again(world: World) -> None:
    async def before(line: Line) -> None:
        agent, _ = await working(line)
        world.agents.messages.send(ROOT, agent, "second")
        line.supervisor.pause(agent)

    async def after(line: Line) -> None:
        agent = agent_of(line)
        assert (agent.status, agent.frozen) == (Status.STARTING, False)
        line.machine.held(line.cell(agent))
        await line.be(agent, Status.PAUSED)
        assert agent.frozen and queue(line, agent) == ["second"]
        line.supervisor.resume(agent)
        assert agent.status is Status.IDLE
        await line.until(lambda: bool(agent.run.id))

    rebooted(world, before, after)


def test_children_that_ran_once_are_told_to_a_parent_that_goes_on(world: World) -> None:
    async def before(line: Line) -> None:
        await line.open(2)
        await line.start("once")
        (turn,) = await line.start("turn", mode="turn")
        world.agents.messages.send(inside(line.parent), turn, "for the child")
        await line.start("waits")
        assert line.running() == ["once", "turn"]

    async def after(line: Line) -> None:
        line.parent = parent = agent_of(line)
        assert parent.status is Status.STARTING
        once, turn = agent_of(line, "once"), agent_of(line, "turn")
        assert (once.status, once.outcome, once.reason) == (Status.DEAD, "interrupted", "reboot")
        assert once.last_line == "r1 ended: interrupted reboot"
        handles = {task.name: task.status.value for task in line.world.agents.items.all(Task)}
        assert handles["once"] == "interrupted" and handles["turn"] != "interrupted"
        assert notices(line, parent) == {"once": ("interrupted", "reboot")}
        assert queue(line, turn) == ["for the child"]
        assert line.running() == ["turn", "waits"], "one of the two places is free"
        line.machine.held(line.cell(turn))
        await line.until(lambda: bool(turn.run.id))

    rebooted(world, before, after)


def test_the_line_of_those_that_wait_is_the_same(world: World) -> None:
    async def before(line: Line) -> None:
        await line.open(1)
        (first,) = await line.start("first", mode="turn")
        line.machine.held(line.cell(first))
        await line.start("b", "c")

    async def after(line: Line) -> None:
        line.parent = agent_of(line)
        b, c = agent_of(line, "b"), agent_of(line, "c")
        assert [(each.status, each.reason) for each in (b, c)] == 2 * [(Status.STARTING, "queued")]
        assert line.running() == ["first"]
        line.supervisor.stop(agent_of(line, "first"), kill=True)
        await line.until(lambda: not b.queued)
        assert c.queued and not has_turn(line.world.agents.registry, c)
        assert line.parent.limits == {RUNNING: "1"}

    rebooted(world, before, after)


@pytest.mark.parametrize("mode", ["once", "resident"])
@pytest.mark.parametrize(
    ("why", "more", "again"),
    [
        ("always", {"restart": "always"}, True),
        ("declared", {}, True),
        ("on-failure", {"restart": "on-failure"}, False),
        ("no", {}, False),
    ],
)
def test_what_is_to_run_always_does(
    world: World, mode: str, why: str, more: dict[str, Any], again: bool
) -> None:
    async def before(line: Line) -> None:
        agent = await line.begin(mode=mode, **more)
        if mode == "resident":
            line.machine.held(line.cell(agent))
            await line.until(lambda: bool(agent.run.id))
            await line.until(lambda: line.cell(agent).run_at_hand().facts.exist())
            line.machine.began(line.cell(agent).run_at_hand())
            await line.be(agent, Status.READY)
            for text in ("first", "second"):
                world.agents.messages.send(ROOT, agent, text)
            await line.be(agent, Status.BUSY)
        else:
            line.machine.began(line.cell(agent))
            await line.be(agent, Status.BUSY)

    async def after(line: Line) -> None:
        agent = agent_of(line)
        (end,) = line.events(agent, "run.end")
        assert (end["run"], end["outcome"], end["reason"]) == ("r1", "interrupted", "reboot")
        if not again:
            assert (agent.outcome, agent.reason) == ("interrupted", "reboot")
            return
        assert agent.status is Status.STARTING
        cell = line.cell(agent)
        if mode == "once":
            assert agent.run.id == "r2"
            line.machine.began(cell)
            await line.be(agent, Status.BUSY)
            return
        assert queue(line, agent) == ["second"]
        line.machine.held(cell)
        await line.until(lambda: agent.run.id == "r2")
        await line.until(lambda: cell.run_at_hand().facts.exist())
        line.machine.began(cell.run_at_hand())
        await line.be(agent, Status.BUSY)

    rebooted(world, before, after, declared=["x"] if why == "declared" else [])


def test_what_was_being_ended_has_ended(world: World) -> None:
    async def before(line: Line) -> None:
        await line.open(None)
        (child,) = await line.start("child", mode="turn")
        line.machine.held(line.cell(child))
        await line.be(child, Status.IDLE)
        line.machine.obedient = False
        line.supervisor.stop(line.parent, kill=False)
        assert line.parent.status is child.status is Status.STOPPING

    async def after(line: Line) -> None:
        for name in ("x", "child"):
            agent = agent_of(line, name)
            assert (agent.outcome, agent.reason) == ("interrupted", "reboot")

    rebooted(world, before, after)


def test_what_waited_for_its_next_run_still_does(world: World) -> None:
    async def before(line: Line) -> None:
        agent = await line.begin(restart="on-failure")
        line.machine.began(line.cell(agent))
        await line.be(agent, Status.BUSY)
        line.machine.ended(line.cell(agent), code=1)
        await line.until(lambda: agent.waits_to_run)
        world.agents.journal.update(agent, restart_at=0.0)

    async def after(line: Line) -> None:
        agent = agent_of(line)
        await line.until(lambda: agent.run.id == "r2")
        assert agent.restarts == 1

    rebooted(world, before, after)


def test_a_child_ends_with_a_parent_that_begins_anew(world: World) -> None:
    async def before(line: Line) -> None:
        await line.open(1)
        world.agents.journal.update(line.parent, restart="always", mode="resident")
        await line.start("child", mode="turn")
        await line.start("waits")

    async def after(line: Line) -> None:
        for name in ("child", "waits"):
            agent = agent_of(line, name)
            assert (agent.outcome, agent.reason) == ("interrupted", "reboot")
        assert agent_of(line).status is Status.STARTING

    rebooted(world, before, after)
