"""Whole lives on a machine in memory: what its facts make of agents, runs and tasks."""

from __future__ import annotations

import json
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

from runtime.cell.port import LiveCell
from runtime.life.supervisor import Supervisor
from runtime.records.items import Message, Task
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.records.run import BETWEEN_RUNS, RunStatus
from tests.worlds.daemon import TIMEOUT
from tests.worlds.jumping import run_jumping
from tests.worlds.memory import Machine, places_in, supervisor_on
from tests.worlds.records import ROOT, World


class Stage:
    """A daemon, as far as it leads agents, on a machine that outlives it."""

    def __init__(self, world: World, machine: Machine, nursery: trio.Nursery) -> None:
        self.world = world
        self.machine = machine
        for name in ("agent", "home", "trash"):
            (world.state / name).mkdir(exist_ok=True)
        places_in(world).networks.mkdir(parents=True, exist_ok=True)
        self.supervisor: Supervisor = supervisor_on(machine, world, nursery)

    async def begin(self, **more: Any) -> Agent:
        """An agent whose first program, or cell, is born."""
        agent = self.world.agents.births.create(ROOT, "x")
        self.world.agents.journal.update(agent, exec="program", **more)
        self.supervisor.start(agent)
        await self.until(lambda: self.cell(agent).facts.exist())
        return agent

    def cell(self, agent: Agent) -> LiveCell:
        return self.supervisor._live_cells[agent.index]

    async def until(self, is_so: Callable[[], bool]) -> None:
        with trio.fail_after(TIMEOUT):
            while not is_so():
                await trio.testing.wait_all_tasks_blocked()
                if not is_so():
                    await trio.sleep(1)

    async def be(self, agent: Agent, *statuses: Status) -> None:
        await self.until(lambda: agent.status in statuses)

    def events(self, agent: Agent, kind: str) -> list[dict[str, Any]]:
        lines = map(json.loads, self.world.lines(agent))
        return [event for event in lines if event["type"] == kind]


def on_stage(
    world: World, act: Callable[[Any], Awaitable[None]], machine: Machine,
    kind: type[Stage] = Stage,
) -> None:
    """The clock jumps to what is waited for."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await act(kind(world, machine, nursery))
            nursery.cancel_scope.cancel()

    run_jumping(main)


@pytest.mark.parametrize(
    ("end", "outcome", "reason"),
    [
        ({"code": 0}, "done", "exit:0"),
        ({"code": 3}, "error", "exit:3"),
        ({"signal": 11}, "error", "signal:11"),
        (None, "interrupted", "runtime_lost"),
    ],
)
def test_a_run_begins_and_ends(
    world: World, end: dict[str, int] | None, outcome: str, reason: str
) -> None:
    async def act(stage: Stage) -> None:
        agent = await stage.begin()
        assert (agent.status, agent.run.status) == (Status.STARTING, RunStatus.BEGUN)
        cell = stage.cell(agent)
        pid = stage.machine.began(cell)
        await stage.be(agent, Status.BUSY)
        assert (agent.run.status, agent.run.pid) == (RunStatus.RUNNING, pid)
        if end is None:
            stage.machine.lost(cell)
        else:
            stage.machine.ended(cell, **end)
        await stage.be(agent, Status.DEAD)
        assert (agent.outcome, agent.reason, agent.run) == (outcome, reason, BETWEEN_RUNS)
        assert [event["pid"] for event in stage.events(agent, "run.start")] == [pid]
        assert [event["reason"] for event in stage.events(agent, "run.end")] == [reason]
        assert not cell.facts.exist()

    on_stage(world, act, Machine())


@pytest.mark.parametrize("obedient", [True, False])
def test_a_stop_is_sigterm_and_after_the_grace_sigkill(world: World, obedient: bool) -> None:
    async def act(stage: Stage) -> None:
        agent = await stage.begin()
        cell = stage.cell(agent)
        stage.machine.began(cell)
        await stage.be(agent, Status.BUSY)
        begun = trio.current_time()
        with world.agents.journal.acting(ROOT):
            stage.supervisor.stop(agent, kill=False)
        assert agent.status is Status.STOPPING
        await stage.be(agent, Status.DEAD)
        took, grace = trio.current_time() - begun, world.agents.settings.grace(agent)
        assert took < grace if obedient else took >= grace
        assert (agent.outcome, agent.reason) == ("cancelled", "operator_stop")
        expected = signal.SIGTERM if obedient else signal.SIGKILL
        assert stage.machine.signals[cell.facts.key] == expected

    on_stage(world, act, Machine(obedient=obedient))


async def working(stage: Stage) -> tuple[Agent, Message]:
    """An agent whose run works on a message."""
    agent = await stage.begin(mode="turn")
    stage.machine.held(stage.cell(agent))
    await stage.be(agent, Status.IDLE)
    assert agent.run == BETWEEN_RUNS
    message = stage.world.agents.messages.send(ROOT, agent, "do it")
    await stage.until(lambda: agent.run.status is RunStatus.BEGUN)
    run = stage.cell(agent).run_at_hand()
    await stage.until(run.facts.exist)
    stage.machine.began(run)
    await stage.until(lambda: agent.run.status is RunStatus.RUNNING)
    assert agent.status is Status.BUSY
    return agent, message


def test_what_is_killed_and_still_there_is_hurried_once(world: World) -> None:
    machine = Machine(crowded=True)

    async def act(stage: Stage) -> None:
        agent = await stage.begin()
        machine.began(stage.cell(agent))
        await stage.be(agent, Status.BUSY)
        for _ in range(3):
            stage.supervisor.stop(agent, kill=True)
        await stage.be(agent, Status.DEAD)

    on_stage(world, act, machine)
    assert machine.hurries == 1


def test_a_run_for_each_message_leaves_the_cell(world: World) -> None:
    async def act(stage: Stage) -> None:
        agent, message = await working(stage)
        stage.machine.ended(stage.cell(agent).run_at_hand(), code=0)
        await stage.be(agent, Status.IDLE)
        assert (agent.run, message.status.value) == (BETWEEN_RUNS, "processed")
        assert stage.cell(agent).facts.exist(), "the cell goes on"

    on_stage(world, act, Machine())


def test_an_abort_ends_the_run_alone(world: World) -> None:
    async def act(stage: Stage) -> None:
        agent, message = await working(stage)
        stage.supervisor.abort(agent, agent.run.id)
        assert (agent.status, agent.run.status) == (Status.BUSY, RunStatus.ENDING)
        await stage.until(lambda: agent.run == BETWEEN_RUNS)
        assert (agent.status, message.status.value) == (Status.PAUSED, "aborted")
        stage.supervisor.resume(agent)
        assert agent.status is Status.IDLE

    on_stage(world, act, Machine())


def test_a_command_is_a_run_as_well(world: World) -> None:
    async def act(stage: Stage) -> None:
        agent, _ = await working(stage)
        tasks = world.agents.tasks
        task: Task = tasks.make(ROOT, agent, "t")
        tasks.set(task, cmd="make")
        tasks.start(ROOT, agent, task)
        execution = stage.cell(agent).command("t")
        await stage.until(execution.facts.exist)
        pid = stage.machine.began(execution)
        await stage.until(lambda: task.status.value == "running")
        assert task.pid == pid
        stage.machine.ended(execution, code=3)
        await stage.until(lambda: task.over)
        assert (task.status.value, task.exit) == ("failed", "exit:3")
        assert agent.status is Status.BUSY

    on_stage(world, act, Machine())


def test_the_next_daemon_takes_over_what_the_machine_has(world: World) -> None:
    machine = Machine()

    async def first(stage: Stage) -> None:
        agent = await stage.begin()
        stage.machine.began(stage.cell(agent))
        await stage.be(agent, Status.BUSY)

    async def second(stage: Stage) -> None:
        (agent,) = stage.world.agents.registry
        await stage.supervisor.recover()
        assert (agent.status, agent.run.status) == (Status.BUSY, RunStatus.RUNNING)
        stage.machine.ended(stage.cell(agent), code=0)
        await stage.be(agent, Status.DEAD)
        assert agent.reason == "exit:0"

    on_stage(world, first, machine)
    world.reopen()
    on_stage(world, second, machine)
