"""Children that wait for their turn: ``children.running`` in the limits of who owns them."""

from __future__ import annotations

from typing import Any

import pytest
import trio.testing

from runtime.caller import NOBODY
from runtime.errors import QuotaError, WrongStateError
from runtime.life.beginning import STARTING
from runtime.records.items import Task
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.texts.limits import RUNNING
from tests.unit.runtime.life.test_lives import Stage, on_stage
from tests.worlds.memory import Machine
from tests.worlds.records import ROOT, World, inside


class Line(Stage):
    """A parent, and children that it starts."""

    parent: Agent

    async def open(self, most: int | None) -> None:
        self.parent = await self.begin(mode="turn")
        self.machine.held(self.cell(self.parent))
        self.world.may_create(self.parent)
        await self.be(self.parent, Status.IDLE)
        self.limit(self.parent, most)

    def limit(self, agent: Agent, most: int | None) -> None:
        limits = {} if most is None else {RUNNING: str(most)}
        self.world.agents.journal.update(agent, limits=limits)

    async def start(self, *names: str, below: Agent | None = None, **more: Any) -> list[Agent]:
        made = []
        for name in names:
            agent = self.world.agents.births.create(inside(below or self.parent), name)
            self.world.agents.journal.update(agent, exec="program", **more)
            STARTING.check_object(self.world.agents, NOBODY, agent)
            self.supervisor.start(agent)
            made.append(agent)
        await self.settle()
        for agent in made:
            if not agent.queued and agent.how.name == "once":
                self.machine.began(self.cell(agent))
        await self.settle()
        return made

    async def end(self, agent: Agent) -> None:
        self.machine.ended(self.cell(agent), code=0)
        await self.be(agent, Status.DEAD)
        await self.settle()

    async def settle(self) -> None:
        await trio.testing.wait_all_tasks_blocked()

    def running(self) -> list[str]:
        children = self.world.agents.registry.children(self.parent)
        return [child.name for child in children if child.cell.id]


def in_line(world: World, act: Any, machine: Machine | None = None) -> None:
    on_stage(world, act, machine or Machine(), kind=Line)


def test_a_start_beyond_the_limit_waits_and_goes_on_in_order(world: World) -> None:
    async def act(line: Line) -> None:
        await line.open(2)
        a, b, c, d = await line.start(*"abcd")
        assert line.running() == ["a", "b"]
        for agent in (c, d):
            assert (agent.status, agent.reason) == (Status.STARTING, "queued")
            handle = world.agents.items.named(line.parent.index, Task, agent.name)
            assert handle is not None and world.agents.tasks.status(handle) == "queued"
        assert [e["status"] for e in line.events(c, "agent.status")] == ["starting"]
        assert not line.events(c, "agent.start")
        await line.end(b)
        assert line.running() == ["a", "c"]
        assert (c.status, c.reason, c.queued) == (Status.STARTING, "", 0)
        await line.end(a)
        assert line.running() == ["c", "d"]

    in_line(world, act)


@pytest.mark.parametrize("how", ["stop", "kill", "remove"])
def test_what_waits_can_be_cancelled(world: World, how: str) -> None:
    async def act(line: Line) -> None:
        await line.open(1)
        a, b, c = await line.start(*"abc")
        with world.agents.journal.acting(ROOT):
            if how == "remove":
                world.agents.removals.remove(b)
            else:
                line.supervisor.stop(b, kill=how == "kill")
        await line.be(b, Status.DEAD)
        assert (b.outcome, b.reason) == ("cancelled", "operator_stop")
        await line.settle()
        assert b.index not in line.supervisor._live_cells
        assert line.running() == ["a"], "it had no place of its own"
        (d,) = await line.start("d")
        assert d.queued > c.queued
        await line.end(a)
        assert line.running() == ["c"]

    in_line(world, act)


def test_a_higher_limit_starts_as_many_more(world: World) -> None:
    async def act(line: Line) -> None:
        await line.open(0)
        await line.start(*"abcd")
        assert line.running() == []
        line.limit(line.parent, 2)
        await line.settle()
        assert line.running() == ["a", "b"]
        line.limit(line.parent, None)
        await line.settle()
        assert line.running() == ["a", "b", "c", "d"]

    in_line(world, act)


def test_a_child_has_no_higher_limit_than_what_owns_it(world: World) -> None:
    async def act(line: Line) -> None:
        await line.open(1)
        (a,) = await line.start("a", mode="turn")
        line.machine.held(line.cell(a))
        await line.be(a, Status.IDLE)
        world.may_create(a)
        line.limit(a, 5)
        await line.start("b", "c", below=a)
        found = {child.name: child.queued for child in world.agents.registry.children(a)}
        assert found == {"b": 0, "c": 1}
        line.limit(line.parent, 2)
        await line.settle()
        assert not world.agents.registry.named("c").queued  # type: ignore[union-attr]

    in_line(world, act)


def test_what_its_owner_leaves_waiting_ends_with_it(world: World) -> None:
    async def act(line: Line) -> None:
        await line.open(1)
        a, b, c = await line.start(*"abc")
        line.supervisor.stop(line.parent, kill=False)
        await line.be(line.parent, Status.DEAD)
        assert [(each.outcome, each.reason) for each in (a, b, c)] == 3 * [
            ("cancelled", "parent_dead")
        ]
        assert not line.supervisor._live_cells
        assert not line.events(b, "agent.start")

    in_line(world, act)


def test_nothing_starts_in_what_is_paused(world: World) -> None:
    async def act(line: Line) -> None:
        await line.open(1)
        a, b = await line.start(*"ab")
        line.supervisor.pause(line.parent)
        await line.end(a)
        assert line.running() == []
        line.supervisor.resume(line.parent)
        await line.settle()
        assert line.running() == ["b"]
        assert not b.queued

    in_line(world, act)


def test_nothing_starts_below_what_waits(world: World) -> None:
    async def act(line: Line) -> None:
        await line.open(0)
        (a,) = await line.start("a")
        with pytest.raises(WrongStateError, match="waits for its turn"):
            await line.start("b", below=world.may_create(a))

    in_line(world, act)


def test_detached_children_and_root_agents_do_not_wait(world: World) -> None:
    async def act(line: Line) -> None:
        await line.open(0)
        child = world.agents.births.create(inside(line.parent), "d")
        world.agents.births.set_life(child, "detached", "public_named")
        world.agents.journal.update(child, exec="program")
        line.supervisor.start(child)
        await line.settle()
        assert child.cell.id and not child.queued

    in_line(world, act)


def test_the_next_daemon_has_the_same_line(world: World) -> None:
    machine = Machine()

    async def first(line: Line) -> None:
        await line.open(1)
        await line.start(*"abc")

    async def second(line: Line) -> None:
        registry = world.agents.registry
        a, b, c = (registry.named(name) for name in "abc")
        assert a is not None and b is not None and c is not None
        line.parent = registry.parent_of(a)  # type: ignore[assignment]
        # the first one ended while there was no daemon
        machine.ended(line.supervisor._make_live_cell(a), code=0)
        line.supervisor._live_cells.clear()
        await line.supervisor.recover()
        await line.settle()
        assert line.running() == ["b"]
        assert (c.status, c.reason) == (Status.STARTING, "queued")

    in_line(world, first, machine)
    world.reopen()
    in_line(world, second, machine)


@pytest.mark.settings(children=2, ended=2)
def test_what_has_ended_counts_by_itself(world: World) -> None:
    async def act(line: Line) -> None:
        await line.open(None)
        a, _ = await line.start(*"ab")
        with pytest.raises(QuotaError, match=r"2 children that have not ended.*\(children\)"):
            await line.start("c")
        await line.end(a)
        (c,) = await line.start("c")
        with pytest.raises(QuotaError, match="not ended"):
            world.agents.births.renew(a)
        await line.end(c)
        with pytest.raises(QuotaError, match=r"2 children that have ended.*\(ended\): remove"):
            await line.start("d")
        world.agents.removals.remove(a)
        await line.start("d")

    in_line(world, act)
