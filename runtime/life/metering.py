"""What agents use of the machine, as the file ``usage`` and the ends of runs tell it.

Where the kernel counts the memory of cgroups, its numbers are told. Elsewhere the memory of
processes is added up, shared pages in parts (PSS). A peak is then the highest sum that somebody
read, or that was found now and then: looking takes at most a hundredth of a processor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

import trio

from runtime.agents.parts import Agents
from runtime.authority.disk import Gait
from runtime.authority.limits import spent
from runtime.cell import networks
from runtime.cell.cell import Places
from runtime.cell.execution import LiveCell, LiveCells
from runtime.kernel.cgroups import Hierarchy
from runtime.kernel.processes import Place, memory
from runtime.records.model import Agent

#: seconds between two looks at all agents, at least, and how much longer than a look
_LEAST: Final = 5.0
_TIMES_A_LOOK: Final = 100
#: agents before others have their turn in the loop
_AT_ONCE: Final = 256


class Meter:
    """Tells what agents use."""

    def __init__(
        self, *, agents: Agents, hierarchy: Hierarchy, places: Places, live_cells: LiveCells
    ) -> None:
        self._agents = agents
        self._places = places
        self._live_cells = live_cells
        self._counted = "memory" in hierarchy.controllers

    def places(self, agent: Agent) -> list[Place]:
        """Where the processes of an agent and of all that it owns are."""
        family = (agent, *self._agents.registry.descendants(agent))
        cells = ((each, self._live_cells.get(each.index)) for each in family)
        return [_place(each, cell) for each, cell in cells if cell is not None]

    def usage(self, agent: Agent) -> Callable[[], dict[str, int]]:
        """What finds it out, for a thread: cpu_usec, memory_current, memory_peak, processes,
        wall_msec; bytes and counts; and what passed through networks. Instead of memory_peak,
        memory_peak_sampled where the kernel does not count. Once the agent is dead, what was
        recorded."""
        live_cell = self._live_cells.get(agent.index)
        if live_cell is None or not agent.cgroup:
            recorded = agent.usage
            return lambda: recorded
        places, started = self.places(agent), agent.started

        def find() -> dict[str, int]:
            current, processes = memory(places)
            if self._counted:
                current = live_cell.node.number("memory.current") or 0
            else:
                live_cell.memory_peak = max(live_cell.memory_peak, current)
            return {
                **self._spent(live_cell),
                "memory_current": current,
                "processes": processes,
                "wall_msec": int((time.time() - started) * 1000),
                **networks.usage(self._places.networks, agent),
            }

        return find

    def final(self, agent: Agent, live_cell: LiveCell) -> dict[str, int]:
        """The same of an agent whose processes have ended."""
        return {
            **self._spent(live_cell),
            "processes": 0,
            **networks.usage(self._places.networks, agent),
        }

    def _spent(self, live_cell: LiveCell) -> dict[str, int]:
        found = spent(live_cell.node, counted=self._counted)
        if not self._counted and live_cell.memory_peak:
            found["memory_peak_sampled"] = live_cell.memory_peak
        return found

    async def run(self) -> None:
        """Looks at all agents now and then, where the kernel does not count."""
        registry = self._agents.registry
        while not self._counted:
            live: list[Agent] = []
            places: list[Place] = []
            for number, agent in enumerate(tuple(registry)):
                if number % _AT_ONCE == 0:
                    await trio.lowlevel.checkpoint()
                live_cell = self._live_cells.get(agent.index)
                if live_cell is not None:
                    live.append(agent)
                    places.append(_place(agent, live_cell))
            # a daemon that ends does not wait for it
            found, took = await trio.to_thread.run_sync(_measured, places, abandon_on_cancel=True)
            used = dict(zip((agent.index for agent in live), found, strict=True))
            deepest_first = sorted(live, key=registry.depth, reverse=True)
            for number, agent in enumerate(deepest_first):
                if number % _AT_ONCE == 0:
                    await trio.lowlevel.checkpoint()
                parent = registry.parent_of(agent)
                if parent is not None and agent.owned and parent.index in used:
                    used[parent.index] += used[agent.index]
                live_cell = self._live_cells.get(agent.index)
                if live_cell is not None:
                    live_cell.memory_peak = max(live_cell.memory_peak, used[agent.index])
            await trio.sleep(max(_LEAST, _TIMES_A_LOOK * took))


def _place(agent: Agent, live_cell: LiveCell) -> Place:
    executions = (live_cell, *live_cell.entered())
    spared = frozenset().union(*(each.spared() for each in executions))
    begun = all(each.settled for each in executions)
    return Place(agent.name, live_cell.leaves(), spared, begun)


def _measured(places: Iterable[Place]) -> tuple[list[int], float]:
    """Bytes in each place, and the seconds of the processor that this took."""
    begun, gait = time.thread_time(), Gait()
    found = [memory((place,), gait.step)[0] for place in places]
    return found, time.thread_time() - begun
