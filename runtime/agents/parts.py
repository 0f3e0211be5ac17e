"""All that there is of agents but their processes, put together.

A module that reacts to others subscribes to them: waits to queued messages and to the ends of work
items, accounts and caches to the journal. Objects are made in the order in which they need each
other, here, in ``runtime.runtime`` and in ``ctxfs.daemon``. The sockets come last, because they
call the tools.
"""

from __future__ import annotations

import trio

from runtime.agents.answers import Answers
from runtime.agents.asks import AskPlane
from runtime.agents.births import Births
from runtime.agents.ends import Ends
from runtime.agents.messages import Messages
from runtime.agents.nodes import Nodes
from runtime.agents.pruning import Pruning
from runtime.agents.removals import Removals
from runtime.agents.reports import Reports
from runtime.agents.results import Results
from runtime.agents.tasks import TaskPlane
from runtime.agents.waiting import WaitingPlane
from runtime.agents.work import WorkPlane
from runtime.authority.facts import Facts
from runtime.authority.upkeep import Upkeep
from runtime.kernel.helpers import Helpers
from runtime.kernel.walker import Walker
from runtime.records.config import Config


class Agents(Facts):
    """All facts, and the parts, each of one subject, that can do something with them. Other
    modules take the part that they need."""

    def __post_init__(self, config: Config) -> None:
        super().__post_init__(config)
        self.upkeep = Upkeep(self)
        self.nodes = Nodes(self)
        self.messages = messages = Messages(self, Reports(self))
        self.work = work = WorkPlane(self)
        self.results = results = Results(self)
        self.waiting = waiting = WaitingPlane(
            self, messages=messages, work=work, results=results
        )
        self.tasks = tasks = TaskPlane(
            self, results=results, messages=messages, waiting=waiting, upkeep=self.upkeep
        )
        self.asks = asks = AskPlane(self, messages=messages, waiting=waiting)
        self.ends = ends = Ends(
            self, messages=messages, tasks=tasks, waiting=waiting, asks=asks
        )
        self.removals = removals = Removals(self, tasks, ends)
        self.births = Births(self, messages=messages, tasks=tasks, ends=ends, removals=removals)
        self.pruning = Pruning(self, removals, tasks, work)
        self.answers = Answers(self)

    async def run(self, walker: Walker, helpers: Helpers) -> None:
        """Runs what goes on beside requests."""
        async with trio.open_nursery() as nursery:
            beside = self.journal, self.removals, self.pruning, self.answers
            timed = self.waiting.moments, self.asks.moments
            for each in (*beside, *timed):
                nursery.start_soon(each.run)
            nursery.start_soon(self.wait_files.run, helpers)
            nursery.start_soon(self.trash.run, walker)
            nursery.start_soon(self.disk.run, walker)
