"""The use that agents make of the machine, as the file ``usage`` and the ends of runs tell it.

Where the kernel counts the memory of cgroups, its numbers are told. Elsewhere the memory of
processes is added up, shared pages in parts (PSS). A peak is then the highest sum that somebody
read, or that was found now and then: looking takes at most a hundredth of a processor.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import trio

from runtime.cell import networks
from runtime.cell.port import Host, LiveCell, Part
from runtime.errors import CtxError
from runtime.ids import AgentIndex
from runtime.kernel import clock
from runtime.kernel.processes import Census, Place
from runtime.records.model import Agent

#: seconds between two looks at all agents, at least, and how much longer than the looks
_LEAST: Final = 5.0
_TIMES_A_LOOK: Final = 100
#: agents before others have their turn in the loop
_AT_ONCE: Final = 256


class Meter(Part):
    """Tells what agents use."""

    def __init__(self, host: Host, census: Census) -> None:
        super().__init__(host)
        self._census = census
        self._counted = host.port.counts_memory

    async def processes(self, agent: Agent, asker: int, payer: int) -> bytes:
        """``Census.describe`` of an agent and all that it owns, in the turn of who asks."""
        return await self._census.describe(payer, self._places_of(agent), asker)

    def _places_of(self, agent: Agent) -> list[Place]:
        family = (agent, *self._agents.registry.descendants(agent))
        cells = (self._live_cells.get(each.index) for each in family)
        return [_place(cell) for cell in cells if cell is not None]

    async def usage(self, agent: Agent, payer: int) -> dict[str, int]:
        """cpu_usec, memory_current, memory_peak, processes, wall_msec; bytes and counts; and what
        passed through networks, found in the turn of who asks. Instead of memory_peak,
        memory_peak_sampled where the kernel does not count. Once the agent is dead, what was
        recorded."""
        live_cell = self._live_cells.get(agent.index)
        if live_cell is None or not agent.cell.cgroup:
            return agent.usage
        started, started_up = agent.started, agent.started_up
        found = await self._census.memory(payer, self._places_of(agent))
        current, processes = sum(used for used, _ in found), sum(count for _, count in found)
        if self._counted:
            current = self._port.memory(live_cell.node)
        else:
            live_cell.memory_peak = max(live_cell.memory_peak, current)
        return {
            **self._spent(live_cell),
            "memory_current": current,
            "processes": processes,
            "wall_msec": int(clock.since(started, started_up) * 1000),
            **networks.usage(self._places.networks, agent),
        }

    def final(self, live_cell: LiveCell) -> dict[str, int]:
        """The last usage of an agent whose processes have ended."""
        return {
            **self._spent(live_cell),
            "processes": 0,
            **networks.usage(self._places.networks, live_cell.agent),
        }

    def _spent(self, live_cell: LiveCell) -> dict[str, int]:
        found = self._port.spent(live_cell.node)
        if not self._counted and live_cell.memory_peak:
            found["memory_peak_sampled"] = live_cell.memory_peak
        return found

    async def run(self) -> None:
        """Looks at all agents now and then, where the kernel does not count."""
        registry = self._agents.registry
        while not self._counted:
            live: dict[int, dict[AgentIndex, Place]] = {}
            for number, live_cell in enumerate(tuple(self._live_cells.values())):
                if number % _AT_ONCE == 0:
                    await trio.lowlevel.checkpoint()
                agent = live_cell.agent
                live.setdefault(agent.owner, {})[agent.index] = _place(live_cell)
            used, took = await self._sampled(live)
            deepest_first = sorted(
                self._live_cells.values(), key=lambda each: registry.depth(each.agent), reverse=True
            )
            for number, live_cell in enumerate(deepest_first):
                if number % _AT_ONCE == 0:
                    await trio.lowlevel.checkpoint()
                agent = live_cell.agent
                sampled = used.get(agent.index, 0)
                parent = registry.parent_of(agent)
                if parent is not None and agent.owned and parent.index in used:
                    used[parent.index] += sampled
                live_cell.memory_peak = max(live_cell.memory_peak, sampled)
            await trio.sleep(max(_LEAST, _TIMES_A_LOOK * took))

    async def _sampled(
        self, live: dict[int, dict[AgentIndex, Place]]
    ) -> tuple[dict[AgentIndex, int], float]:
        """The memory that each agent uses, and the seconds that looking took."""
        used: dict[AgentIndex, int] = {}
        took = 0.0
        for owner, places in live.items():
            begun = trio.current_time()
            # one that holds it up is looked at another time
            with suppress(CtxError, OSError):
                found = await self._census.memory(owner, list(places.values()), "sample")
                used.update(zip(places, (size for size, _ in found), strict=True))
                took += trio.current_time() - begun
        return used, took


def _place(live_cell: LiveCell) -> Place:
    programs = live_cell.programs()
    spared = frozenset().union(*(each.spared() for each in programs))
    begun = all(each.settled for each in programs)
    return Place(live_cell.agent.name, live_cell.leaves(), spared, begun)
