"""What is found now and then where the kernel does not count memory."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest
import trio

from runtime.authority.accounts import Resource
from runtime.authority.upkeep import TMP_OF_AGENT
from runtime.cell.cell import Places
from runtime.cell.port import LiveCell, LiveCells
from runtime.cell.record import Facts
from runtime.errors import QuotaError
from runtime.kernel.cgroups import Cgroup, Hierarchy
from runtime.kernel.processes import Census, Place, Used
from runtime.life.metering import Meter
from runtime.records.config import Config
from runtime.records.model import Agent
from tests.worlds.hosts import host_with
from tests.worlds.records import World, inside, operator


class Counted:
    """Tells how much memory agents use, by their names."""

    def __init__(self, sizes: dict[str, int], files: dict[str, int]) -> None:
        self.sizes = sizes
        self.files = files

    async def memory(
        self, owner: int, places: Sequence[Place], kind: str = "usage", *, processes: bool = True
    ) -> list[Used]:
        names = [place.agent for place in places]
        sizes = self.sizes if processes else {}
        return [Used(sizes.get(name, 0), 1, self.files.get(name, 0)) for name in names]


def metered(
    world: World,
    *agents: Agent,
    sizes: dict[str, int],
    files: dict[str, int] | None = None,
    controllers: Sequence[str] = (),
) -> Meter:
    cells = LiveCells()
    for agent in agents:
        node = Cgroup(world.path / f"cgroup-{agent.name}")
        cells[agent.index] = LiveCell(agent, node, lambda key: Facts(world.path / key))
    hierarchy = cast(Hierarchy, SimpleNamespace(controllers=controllers))
    places = Places(mount=world.path, state=world.state, runtime=world.path / "run")
    host = host_with(agents=world.agents, hierarchy=hierarchy, places=places, live_cells=cells)
    return Meter(host, cast(Census, Counted(sizes, files or {})))


class Looked(Exception):
    """It has looked at all of them."""


def look_once(meter: Meter) -> None:
    async def pause(seconds: float) -> None:
        raise Looked

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Looked):
        patch.setattr(trio, "sleep", pause)
        trio.run(meter.run)


def peak(meter: Meter, agent: Agent) -> float | None:
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


def test_where_the_kernel_counts_nobody_looks_at_processes(world: World) -> None:
    agent = world.live(world.agents.births.create(operator(1), "a"))
    meter = metered(world, agent, sizes={"a": 1}, controllers=("memory",))
    look_once(meter)
    assert peak(meter, agent) is None
    assert "memory_peak_sampled" not in trio.run(meter.usage, agent, 0)


@pytest.mark.parametrize("controllers", [(), ("memory",)])
def test_files_in_memory_are_on_the_account_of_their_owner(
    world: World, controllers: tuple[str, ...]
) -> None:
    """Until the cell is gone; at its bound nothing more is started."""
    agents = world.agents
    boss = world.live(agents.births.create(operator(1), "boss"))
    kid = world.live(agents.births.create(inside(world.may_create(boss)), "kid"))
    files = {"boss": 5 << 20, "kid": 100 << 20}
    meter = metered(
        world, boss, kid, sizes={"boss": 1, "kid": 2}, files=files, controllers=controllers
    )

    def held() -> int:
        return agents.accounts.use(1, Resource.TMP)

    assert held() == 2 * TMP_OF_AGENT
    look_once(meter)
    assert held() == 105 << 20
    files["kid"] = 1000 << 20
    usage = trio.run(meter.usage, boss, 0)
    assert usage["memory_tmp"] == 1005 << 20 == held()
    assert controllers or usage["memory_current"] == (1005 << 20) + 3
    agents.accounts.configure(Config(owner_tmp_max=1100 << 20))
    with pytest.raises(QuotaError, match=r'account tmp .* "kid" holds most'):
        agents.accounts.check(1, Resource.TMP, 100 << 20)
    meter.final(meter._live_cells.pop(kid.index))
    assert held() == (5 << 20) + TMP_OF_AGENT
    del meter._live_cells[boss.index]
    look_once(meter)
    assert held() == 2 * TMP_OF_AGENT
