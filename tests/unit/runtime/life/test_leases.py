"""What becomes of agents whose lease is over, on a machine in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from runtime.cell.port import LiveCell
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from tests.unit.runtime.life.test_lives import Stage, on_stage, working
from tests.worlds.memory import Machine
from tests.worlds.records import World

OVER = ("interrupted", "lease_over")


async def once(stage: Stage) -> Agent:
    agent = await stage.begin()
    stage.machine.began(stage.cell(agent))
    await stage.be(agent, Status.BUSY)
    return agent


async def turn(stage: Stage) -> Agent:
    agent, _ = await working(stage)
    return agent


def told_dead(stage: Stage, agent: Agent) -> None:
    assert (agent.status, agent.outcome, agent.reason) == (Status.DEAD, *OVER)
    told = [(event["outcome"], event["reason"]) for event in stage.events(agent, "run.end")]
    assert told == [OVER]
    told = [(event["status"], event["reason"]) for event in stage.events(agent, "agent.stop")]
    assert told == [OVER]


def leave_by_sigterm(machine: Machine, cell: LiveCell) -> None:
    for each in cell.programs():
        machine.ended(each, code=0 if each.record().started else None)


def be_killed(machine: Machine, cell: LiveCell) -> None:
    for each in cell.programs():
        machine.ended(each)


@pytest.mark.parametrize("begin", [once, turn])
@pytest.mark.parametrize("obedient", [True, False])
def test_a_daemon_ends_it_too(world: World, begin: Any, obedient: bool) -> None:
    async def act(stage: Stage) -> None:
        agent = await begin(stage)
        stage.machine.lease_over(stage.cell(agent))
        await stage.be(agent, Status.STOPPING, Status.DEAD)
        await stage.be(agent, Status.DEAD)
        told_dead(stage, agent)

    on_stage(world, act, Machine(obedient=obedient))


@pytest.mark.parametrize("begin", [once, turn])
@pytest.mark.parametrize("end", [leave_by_sigterm, be_killed])
def test_the_next_daemon_tells_it_once(
    world: World, begin: Any, end: Callable[[Machine, LiveCell], None]
) -> None:
    machine, cells = Machine(), list[LiveCell]()

    async def before(stage: Stage) -> None:
        cells.append(stage.cell(await begin(stage)))

    on_stage(world, before, machine)
    machine.lease_over(cells[0])
    end(machine, cells[0])
    for _ in range(2):
        world.reopen()

        async def after(stage: Stage) -> None:
            agent = world.agents.registry.named("x")
            assert agent is not None
            await stage.supervisor.recover()
            await stage.be(agent, Status.DEAD)
            told_dead(stage, agent)

        on_stage(world, after, machine)


def test_what_does_not_begin_past_the_end_is_no_failed_start(world: World) -> None:
    async def act(stage: Stage) -> None:
        agent = await stage.begin(restart="always")
        cell = stage.cell(agent)
        stage.machine.lease_over(cell, failed="its lease was over before it began")
        stage.machine.ended(cell)
        await stage.be(agent, Status.DEAD)
        assert (agent.outcome, agent.reason) == OVER

    on_stage(world, act, Machine())
