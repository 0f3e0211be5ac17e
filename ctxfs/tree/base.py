"""What the tree stands on: the runtime, and the daemon's own parts that nodes use."""

from __future__ import annotations

import time
from typing import TypeVar

from ctxfs.caching import Cache
from ctxfs.disks import Disks
from ctxfs.program import program
from ctxfs.reasons import Reasons
from ctxfs.tree.durable import Durable, DurableNode
from ctxfs.tree.nodes import Node
from ctxfs.tree.spaces import SpaceRow, Spaces
from runtime.caller import INSIDERS, PARTIES, Caller, Role
from runtime.cell.cell import working_directory, workspace
from runtime.errors import CtxError
from runtime.kernel.output import Segments
from runtime.records.model import Agent
from runtime.runtime import Runtime

_O = TypeVar("_O")


class Base:
    """What nodes, rows, open files and tools share. It knows no layouts and no rows."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.reasons = Reasons(runtime.agents)
        self.cache = Cache()
        self.disks = Disks(runtime.agents.identity.payer)
        self.durable = Durable(self.cache, self.disks.close)
        self.spaces = Spaces(runtime)
        self.started = time.time()
        #: how many requests of the kernel were answered
        self.requests = 0
        self.client_program: bytes = program()

    # real files

    def root_of(self, row: SpaceRow[_O], obj: _O) -> DurableNode:
        """The root directory of a space of real files."""
        return self.durable.root(self.spaces.of(row, obj))

    async def settled(self, directory: Node, name: str) -> None:
        """Returns when no thread changes the real file of this name; ``OverTimeError``."""
        if not self.disks.busy or not isinstance(directory, DurableNode):
            return
        try:
            inode = self.durable.find(directory, name).inode
        except (CtxError, OSError):
            return  # the operation itself tells its caller what is wrong
        self.durable.forget(inode, 0)
        await self.disks.settled(inode)

    # what a caller may know, and is

    def visible(self, agent: Agent, caller: Caller) -> bool:
        """Whether the caller may know of the agent."""
        if not agent.private:
            return True
        return bool(self.runtime.agents.identity.roles(caller, agent) & INSIDERS)

    def listed(self, agent: Agent, caller: Caller) -> bool:
        """Whether the caller finds the agent by listing; a mere reader must know its name."""
        if not agent.private:
            return True
        if caller.agent is not None and caller.agent not in (agent.index, agent.parent):
            return False  # whatever its policy says: that would have to be looked at for each
        return bool(self.runtime.agents.identity.roles(caller, agent) & PARTIES)

    def root_roles(self, caller: Caller) -> Role:
        """What the caller is to what belongs to no agent."""
        return self.runtime.agents.identity.root_roles(caller)

    # of an agent

    def output(self, agent: Agent, name: str) -> Segments:
        return Segments(self.runtime.agents.documents.directory(agent) / name)

    def working_directory(self, agent: Agent) -> str:
        return working_directory(self.runtime.agents, agent)

    def workspace(self, agent: Agent) -> str | None:
        """The workspace in force, None if there is none."""
        return workspace(self.runtime.agents, agent)
