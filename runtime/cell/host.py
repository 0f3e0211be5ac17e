"""The surroundings of the parts that start, lead and end programs of agents."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import trio

from runtime.agents.parts import Agents
from runtime.cell.cell import Places
from runtime.cell.execution import LiveCells
from runtime.cell.port import Port
from runtime.kernel import output
from runtime.kernel.cgroups import Hierarchy
from runtime.kernel.daemonlog import because_of
from runtime.kernel.inotify import Watcher
from runtime.kernel.spawn import Spawner
from runtime.kernel.sweeper import Sweeper
from runtime.records.model import Agent

log = logging.getLogger("ctxd.host")


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
    port: Port
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
        self._port = host.port

    def _tell_log(self, agent: Agent, *lines: str) -> None:
        """Lines of the agent's own log, if there is room for them."""
        directory = self._agents.documents.directory(agent) / "log"
        with contextlib.suppress(OSError):
            for line in lines:
                output.append_line(directory, line, self._agents.settings.log_max(agent))


def about(agent: Agent, *, run: str = "", reason: str = "") -> dict[str, Any]:
    """``extra`` of a line of the daemon's log that is about one agent."""
    return because_of(agent.owner, agents=[agent.name], run=run, reason=reason)


@contextlib.contextmanager
def guarded(agent: Agent, *expected: type[Exception]) -> Iterator[None]:
    """A bug in the care of one agent ends neither the daemon nor the care of others."""
    try:
        yield
    except expected:
        raise
    except Exception:
        log.exception("%s: a bug in ctxfs", agent.name)
