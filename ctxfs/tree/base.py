"""The ground of the tree: the runtime, and the daemon's own parts that nodes use.

The functions of a row receive the ``Base`` and the row's object, and nothing from above. Only the
roof knows all planes: ``ctxfs.filesystem`` finds the node of an inode number, and
``ctxfs.forgetting`` the inodes that show what changed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ctxfs.caching import Cache
from ctxfs.disks import Disks
from ctxfs.keptlines import KeptLines
from ctxfs.program import program
from ctxfs.reasons import Reasons
from ctxfs.tree.folders import Folders
from runtime.authority.identity import Identity
from runtime.authority.loop import AtHand
from runtime.authority.reach import Reach
from runtime.caller import INSIDERS, PARTIES, Caller
from runtime.kernel.handover import Handed
from runtime.records.model import Agent
from runtime.runtime import Runtime


class View:
    """The agents that one caller finds, for as long as it lists them."""

    def __init__(self, identity: Identity, caller: Caller) -> None:
        self._identity = identity
        self._caller = caller
        #: by owner: outside of agents, a caller is to an agent what it is to its owner's others
        self._of_owner: dict[int, bool] = {}

    def lists(self, agent: Agent) -> bool:
        """Whether the caller finds the agent; a mere reader must know its name."""
        if not agent.private:
            return True
        own = self._caller.agent
        if own is None:
            return self.is_inside(agent)
        if own not in (agent.index, agent.parent):
            return False  # whatever its policy says: that would have to be looked at for each
        return bool(self._identity.roles(self._caller, agent) & PARTIES)

    def finds(self, agent: Agent) -> bool | None:
        """Whether the caller is inside of an agent that it finds; None of any other."""
        return self.is_inside(agent) if self.lists(agent) else None

    def is_inside(self, agent: Agent) -> bool:
        """Whether it is one of those who see the configuration of the agent."""
        if self._caller.agent is not None:
            return bool(self._identity.roles(self._caller, agent) & INSIDERS)
        inside = self._of_owner.get(agent.owner)
        if inside is None:
            inside = bool(self._identity.roles(self._caller, agent) & INSIDERS)
            self._of_owner[agent.owner] = inside
        return inside


class Base(Handed):
    """The one object that nodes, rows, open files and tools share. It knows no layouts and no
    rows."""

    #: the time of what never changes, and what was counted
    HANDED = ("started", "requests")

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.agents = runtime.agents
        self.reasons = Reasons(self.agents)
        self.reach = Reach(self.agents.registry, self.agents.authority)
        self.agents.journal.subscribe(self.reach)
        self.cache = Cache()
        self.kept_lines = KeptLines()
        self.disks = Disks(self.agents.identity.payer)
        self.folders = Folders(runtime, self.cache, self.disks)
        self.agents.disk.unnamed = self.folders.unnamed
        #: calls of tools that have begun to change something, or are about to be answered
        self.calls = AtHand()
        self.started = time.time()
        #: how many requests of the kernel were answered
        self.requests = 0
        #: those that are not answered yet
        self.at_hand: dict[int, Any] = {}
        self.client_program: bytes = program()
        #: the directories of recipes that agents may name
        self.recipe_places: tuple[Path, ...] = ()

    # what a caller may know, and is

    def visible(self, agent: Agent, caller: Caller) -> bool:
        """Whether the caller may know of the agent."""
        if not agent.private:
            return True
        return bool(self.agents.identity.roles(caller, agent) & INSIDERS)

    def view(self, caller: Caller) -> View:
        """The agents that the caller finds by listing."""
        return View(self.agents.identity, caller)
