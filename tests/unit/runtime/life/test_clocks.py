"""Durations take as long as they say, whatever the wall clock is set to and however often ctxd is
started meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import trio.testing

from ctxfs.files import shared
from runtime.kernel import clock
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from tests.unit.runtime.life.test_lives import Stage, on_stage, working
from tests.worlds.memory import Machine
from tests.worlds.records import ROOT, World

HOUR = 3600.0
JUMPS = pytest.mark.parametrize("jump", [-30 * 24 * HOUR, 30 * 24 * HOUR])


class Clocks:
    """Both clocks, from now on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.passed = self.set = 0.0
        wall, up = clock.wall(), clock.up()
        patch.setattr(clock, "wall", lambda: wall + self.passed + self.set)
        patch.setattr(clock, "up", lambda: up + self.passed)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def the_agent(stage: Stage) -> Agent:
    (agent,) = stage.world.agents.registry
    return agent


async def begun(stage: Stage, mode: str) -> Agent:
    limits = {"timeout": "1h"}
    if mode == "turn":
        agent, _ = await working(stage)
        stage.world.agents.journal.update(agent, limits=limits)
        return agent
    agent = await stage.begin(limits=limits)
    stage.machine.began(stage.cell(agent))
    await stage.be(agent, Status.BUSY)
    return agent


async def look(stage: Stage, agent: Agent) -> None:
    """Who waits for its time to be over looks again, as once in a minute."""
    for execution in (stage.cell(agent), stage.cell(agent).run_at_hand()):
        execution.changed.notify()
    await trio.testing.wait_all_tasks_blocked()


@JUMPS
@pytest.mark.parametrize("mode", ["once", "turn"])
def test_a_run_has_its_time(world: World, clocks: Clocks, mode: str, jump: float) -> None:
    machine = Machine()

    async def first(stage: Stage) -> None:
        await begun(stage, mode)

    async def second(stage: Stage) -> None:
        await stage.supervisor.recover()
        agent = the_agent(stage)
        clocks.passed = HOUR - 1
        await look(stage, agent)
        assert agent.status is Status.BUSY and not agent.run.ending
        usage = await stage.supervisor.meter.usage(agent, 0)
        assert 0 <= usage["wall_msec"] <= 1000 * HOUR
        clocks.passed = HOUR + 1
        await look(stage, agent)
        await stage.until(lambda: not agent.run.id)
        (end,) = stage.events(agent, "run.end")
        assert end["reason"] == "timeout"

    on_stage(world, first, machine)
    clocks.set = jump
    world.reopen()
    on_stage(world, second, machine)


@JUMPS
def test_a_restart_has_its_delay(world: World, clocks: Clocks, jump: float) -> None:
    machine = Machine()

    async def first(stage: Stage) -> None:
        agent = await stage.begin(restart="always")
        stage.machine.began(stage.cell(agent))
        await stage.be(agent, Status.BUSY)
        stage.machine.ended(stage.cell(agent), code=0)
        await stage.until(lambda: agent.waits_to_run)
        assert agent.restarts == 1

    async def second(stage: Stage) -> None:
        await stage.supervisor.recover()
        agent = the_agent(stage)
        assert agent.waits_to_run, "not yet"
        clocks.passed = 2.0
        await stage.until(lambda: agent.run.id == "r2")

    on_stage(world, first, machine)
    clocks.set = jump
    world.reopen()
    on_stage(world, second, machine)


@JUMPS
def test_a_run_of_a_moment_does_not_begin_the_count_anew(
    world: World, clocks: Clocks, jump: float
) -> None:
    async def act(stage: Stage) -> None:
        agent = await stage.begin(restart="always")
        stage.machine.began(stage.cell(agent))
        await stage.be(agent, Status.BUSY)
        world.agents.journal.update(agent, restarts=3)
        clocks.set = jump
        stage.machine.ended(stage.cell(agent), code=0)
        await stage.until(lambda: agent.waits_to_run)
        assert agent.restarts == 4

    on_stage(world, act, Machine())


@pytest.mark.parametrize("more", [{"started": 0.0}, {"restart_at": 0.0}])
def test_what_an_older_version_wrote_goes_on_by_the_wall_clock(
    clocks: Clocks, more: dict[str, Any]
) -> None:
    (moment,) = (clock.wall() + value for value in more.values())
    clocks.passed, clocks.set = 5.0, 7.0
    assert clock.since(moment, 0.0) == pytest.approx(12.0)


@JUMPS
def test_a_measure_is_old_after_its_time(world: World, clocks: Clocks, jump: float) -> None:
    space = world.agents.spaces.add("team", owner=0, gid=0, mode=0o700)
    clocks.set, clocks.passed = jump, 29.0
    assert not shared._unknown.why(world.agents, ROOT, space)
    clocks.passed = 31.0
    assert shared._unknown.why(world.agents, ROOT, space)
