"""The use that agents make of the machine, as the file ``usage`` and the ends of runs tell it.

Where the kernel counts the memory of cgroups, its numbers are told. Elsewhere the memory of
processes is added up, shared pages in parts (PSS), with the files that cells have in memory. A peak
is then the highest sum that somebody read, or that was found now and then: looking takes at most a
hundredth of a processor. What is found of files is on the account of the owner, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import trio

from runtime.authority.accounts import Charge, Payer, Resource
from runtime.authority.upkeep import TMP_OF_AGENT
from runtime.cell import networks
from runtime.cell.port import Host, LiveCell, Part
from runtime.errors import CtxError
from runtime.ids import AgentIndex
from runtime.kernel import clock
from runtime.kernel.processes import Census, Place, Used
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
        #: somebody looks at what an agent uses that is away
        self.wanted: Callable[[Agent], None] = lambda agent: None
        self._counted = host.port.counts_memory
        #: for the files that each cell has in memory
        self._charges: dict[AgentIndex, Charge] = {}

    async def processes(self, agent: Agent, asker: int, payer: int) -> bytes:
        """``Census.describe`` of an agent and all that it owns, in the turn of who asks."""
        return await self._census.describe(
            payer, [_place(cell) for cell in self._cells_of(agent)], asker
        )

    def _cells_of(self, agent: Agent) -> list[LiveCell]:
        family = (agent, *self._agents.registry.descendants(agent))
        cells = (self._live_cells.get(each.index) for each in family)
        return [cell for cell in cells if cell is not None and not cell.agent.away]

    def _here(self) -> list[LiveCell]:
        return [cell for cell in self._live_cells.values() if not cell.agent.away]

    async def _look(self, payer: int, cells: Sequence[LiveCell], kind: str) -> list[Used]:
        """Has the census tell what each of them uses; now and then, and without their processes
        where the kernel counts those."""
        places = []
        for number, cell in enumerate(cells):
            if number % _AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
            places.append(_place(cell))
        processes = kind == "usage" or not self._counted
        found = await self._census.memory(payer, places, kind, processes=processes)
        for cell, used in zip(cells, found, strict=True):
            self._charge(cell.agent, used.files)
        return found

    def _charge(self, agent: Agent, files: int) -> None:
        """Puts on the account what its cell has in memory now, above what its start paid."""
        charge = self._charges.get(agent.index)
        if charge is None:
            payer = Payer(agent.owner, agent.name)
            charge = self._charges[agent.index] = Charge(self._agents.accounts, payer, Resource.TMP)
        charge.set(max(0, files - TMP_OF_AGENT))

    async def usage(self, agent: Agent, payer: int) -> dict[str, int | float]:
        """cpu_usec, memory_current, memory_peak, memory_tmp, processes, wall_msec; bytes and
        counts; and what passed through networks, found in the turn of who asks. Instead of
        memory_peak, memory_peak_sampled where the kernel does not count. Once the agent is dead,
        what was recorded; of one that is away, what its host told last."""
        if agent.away:
            self.wanted(agent)
            lasted = {"wall_msec": int(clock.since(agent.started, agent.started_up) * 1000)}
            return {**agent.usage, **(lasted if agent.live else {})}
        live_cell = self._live_cells.get(agent.index)
        if live_cell is None or not agent.cell.cgroup:
            # what is left is said by limits, which may have changed since
            kept = {key: used for key, used in agent.usage.items() if not key.endswith(".left")}
            return {**kept, **networks.usage(self._agents, self._places.networks, agent)}
        started, started_up = agent.started, agent.started_up
        found = await self._look(payer, self._cells_of(agent), "usage")
        files = sum(used.files for used in found)
        current = sum(used.memory for used in found) + files
        if self._counted:
            current = self._port.memory(live_cell.node)
        else:
            live_cell.memory_peak = max(live_cell.memory_peak, current)
        return {
            **self._spent(live_cell),
            "memory_current": current,
            "memory_tmp": files,
            "processes": sum(used.processes for used in found),
            "wall_msec": int(clock.since(started, started_up) * 1000),
            **networks.usage(self._agents, self._places.networks, agent),
        }

    def final(self, live_cell: LiveCell) -> dict[str, int | float]:
        """The last usage of an agent whose processes have ended."""
        self._charge(live_cell.agent, 0)  # until this agent has another cell
        return {
            **self._spent(live_cell),
            "processes": 0,
            **networks.usage(self._agents, self._places.networks, live_cell.agent),
        }

    def _spent(self, live_cell: LiveCell) -> dict[str, int]:
        found = self._port.spent(live_cell.node)
        if not self._counted and live_cell.memory_peak:
            found["memory_peak_sampled"] = live_cell.memory_peak
        return found

    async def run(self) -> None:
        """Looks at all agents now and then."""
        registry = self._agents.registry
        while True:
            live: dict[int, list[LiveCell]] = {}
            for live_cell in self._here():
                live.setdefault(live_cell.agent.owner, []).append(live_cell)
            used, took = await self._sampled(live)
            deepest_first = sorted(
                self._here(), key=lambda each: registry.depth(each.agent), reverse=True
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
            for index in self._charges.keys() - self._live_cells.keys():
                self._charges.pop(index).set(0)
            await trio.sleep(max(_LEAST, _TIMES_A_LOOK * took))

    async def _sampled(
        self, live: dict[int, list[LiveCell]]
    ) -> tuple[dict[AgentIndex, int], float]:
        """The memory that each agent uses, and the seconds that looking took."""
        used: dict[AgentIndex, int] = {}
        took = 0.0
        for owner, cells in live.items():
            begun = trio.current_time()
            # one that holds it up is looked at another time
            with suppress(CtxError, OSError):
                found = await self._look(owner, cells, "sample")
                for cell, each in zip(cells, found, strict=True):
                    used[cell.agent.index] = each.memory + each.files
                took += trio.current_time() - begun
        return used, took


def _place(live_cell: LiveCell) -> Place:
    programs = live_cell.programs()
    spared = frozenset().union(*(each.spared() for each in programs))
    begun = all(each.settled for each in programs)
    return Place(live_cell.agent.name, live_cell.keeper, live_cell.leaves(), spared, begun)
