"""What the parts that start, lead and end programs of agents work on."""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from runtime.agents.parts import Agents
from runtime.cell.cell import Places
from runtime.cell.execution import LiveCells
from runtime.kernel.cgroups import Hierarchy
from runtime.kernel.inotify import Watcher
from runtime.kernel.spawn import Spawner
from runtime.kernel.sweeper import Sweeper


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine, and what lives on it."""

    agents: Agents
    places: Places
    hierarchy: Hierarchy
    watcher: Watcher
    spawner: Spawner
    sweeper: Sweeper
    nursery: trio.Nursery
    live_cells: LiveCells = field(default_factory=LiveCells)


class Part:
    """Whoever works on it."""

    def __init__(self, host: Host) -> None:
        self._agents = host.agents
        self._places = host.places
        self._hierarchy = host.hierarchy
        self._watcher = host.watcher
        self._spawner = host.spawner
        self._sweeper = host.sweeper
        self._nursery = host.nursery
        self._live_cells = host.live_cells
