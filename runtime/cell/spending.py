"""Sums of what owners used of models since the daemon began, which never fall.

The file of counters of an agent has what all below it used, too. So only those at the top of a
lineage are added up, and what a file gained since it was looked at last: files go, sums stay.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from runtime.agents.parts import Agents
from runtime.cell.networks import Counters, metered
from runtime.records.model import Agent
from runtime.records.spent import NOTHING_SPENT, Spent

#: the numbers of ``Spent.sums``, as in the file ``usage``
KEYS: Final = tuple(Spent().usage)


class Spending:
    """The sums of each owner. ``directory`` has the files."""

    def __init__(self, agents: Agents, directory: Path) -> None:
        self._agents = agents
        self._registry = registry = agents.registry
        self._directory = directory
        #: in the order of ``KEYS``; cost is in 10⁻⁹ of the unit. The daemon's user has some always
        self.of_owner: dict[int, tuple[int, ...]] = {
            agents.privilege.uid: NOTHING_SPENT
        }
        #: what is known of the file at the top of a lineage; of one that was there before the
        #: daemon, what it had then
        self._seen: dict[str, tuple[int, ...]] = {}
        before = [agent for agent in registry if agent.live or agent.spent]
        self._before: dict[str, tuple[int, ...]] = {
            agent.incarnation: agent.spent or NOTHING_SPENT for agent in before
        }
        for agent in before:
            for top in (agent.incarnation, registry.payers(agent)[-1]):
                if spent := Counters(directory / top).spent():
                    self._before[top] = spent.sums

    def look(self, agent: Agent) -> None:
        """Adds what was used since the last look at who pays for an agent."""
        if not metered(self._agents):
            return
        top = self._registry.payers(agent)[-1]
        spent = Counters(self._directory / top).spent()
        if spent is None:
            return
        seen = self._seen.get(top) or self._before.get(top, NOTHING_SPENT)
        self._seen[top] = spent.sums
        of = self.of_owner.get(spent.owner, NOTHING_SPENT)
        self.of_owner[spent.owner] = tuple(
            total + max(0, now - then)
            for total, now, then in zip(of, spent.sums, seen, strict=True)
        )

    def forget(self, agent: Agent) -> None:
        """Nothing more is known of a file that is gone."""
        if not self._seen and not self._before:
            return
        top = self._registry.payers(agent)[-1]
        if not (self._directory / top).exists():
            self._seen.pop(top, None)
            self._before.pop(top, None)
