"""What is found now and then where the kernel does not count memory."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest
import trio

from runtime.cell.cell import Places
from runtime.cell.port import LiveCell, LiveCells
from runtime.cell.record import Facts
from runtime.kernel.cgroups import Cgroup, Hierarchy
from runtime.kernel.processes import Census, Place
from runtime.life.metering import Meter
from runtime.records.model import Agent
from tests.worlds.hosts import host_with
from tests.worlds.records import World, inside, operator


class Counted:
    """Tells how much memory agents use, by their names."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes

    async def memory(
        self, owner: int, places: Sequence[Place], kind: str = "usage"
    ) -> list[tuple[int, int]]:
        return [(self.sizes[place.agent], 1) for place in places]


def metered(
    world: World, *agents: Agent, sizes: dict[str, int], controllers: Sequence[str] = ()
) -> Meter:
    cells = LiveCells()
    for agent in agents:
        node = Cgroup(world.path / f"cgroup-{agent.name}")
        cells[agent.index] = LiveCell(agent, node, lambda key: Facts(world.path / key))
    hierarchy = cast(Hierarchy, SimpleNamespace(controllers=controllers))
    places = Places(mount=world.path, state=world.state, runtime=world.path / "run")
    host = host_with(agents=world.agents, hierarchy=hierarchy, places=places, live_cells=cells)
    return Meter(host, cast(Census, Counted(sizes)))


class Looked(Exception):
    """It has looked at all of them."""


def look_once(meter: Meter) -> None:
    async def pause(seconds: float) -> None:
        raise Looked

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Looked):
        patch.setattr(trio, "sleep", pause)
        trio.run(meter.run)


def peak(meter: Meter, agent: Agent) -> int | None:
    """What was found so far; ``usage`` would look again."""
    cell = meter._live_cells[agent.index]
    return meter.final(cell).get("memory_peak_sampled")


def test_what_a_child_uses_is_its_parents_too(world: World) -> None:
    # the adopted one is older than the agent that it becomes a child of
    older = world.agents.births.create(operator(1), "older")
    boss = world.live(world.agents.births.create(operator(1), "boss"))
    kid = world.live(world.agents.births.create(inside(world.may_create(boss)), "kid"))
    world.agents.births.adopt(older, kid)
    world.live(older)
    sizes = {"boss": 1, "kid": 20, "older": 300}
    meter = metered(world, boss, kid, older, sizes=sizes)
    look_once(meter)
    assert [peak(meter, agent) for agent in (boss, kid, older)] == [321, 320, 300]
    sizes["kid"] = 2
    look_once(meter)
    assert peak(meter, kid) == 320, "the highest that was found"
    assert trio.run(meter.usage, kid, 0)["memory_current"] == 302
    sizes["kid"] = 200
    assert trio.run(meter.usage, kid, 0)["memory_peak_sampled"] == 500, "somebody has read it"


def test_where_the_kernel_counts_nobody_looks(world: World) -> None:
    agent = world.live(world.agents.births.create(operator(1), "a"))
    meter = metered(world, agent, sizes={"a": 1}, controllers=("memory",))
    trio.run(meter.run)
    assert "memory_peak_sampled" not in trio.run(meter.usage, agent, 0)
