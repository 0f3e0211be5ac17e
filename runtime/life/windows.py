"""Windows: agents that end when the client that made them is gone (ctxfs-tools(5), Sockets).

The record of such an agent says so. The daemon and the cell's monitor have the same end of the
window, and each of them sees it hang up. If the daemon is not there, or does not act, the monitor
ends the cell (monitor.c), and the next daemon reads that in the record of the run. What nobody has
the end of when a daemon begins was hung up before it was started, or after it had ended.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from typing import Any

from runtime.authority.accounts import Payer, Resource
from runtime.cell.port import Host, Part, guarded
from runtime.cell.windows import HANGUP
from runtime.ids import AgentIndex
from runtime.kernel.handover import Descriptors
from runtime.life.ending import Ender
from runtime.records.change import Change, Subscriber
from runtime.records.lifecycle import Status
from runtime.records.model import Agent, Outcome


class Windows(Part, Subscriber):
    """Opens windows, and ends those whose window was closed."""

    def __init__(self, host: Host, ender: Ender) -> None:
        super().__init__(host)
        self._ender = ender
        host.agents.journal.subscribe(self)

    # Subscriber

    def agent_listed(self, agent: Agent) -> None:
        if self._agents.registry.get(agent.index) is not agent:
            self._ends.drop(agent.index)

    # opening

    def make(self, agent: Agent, who: Payer, *, remove: bool) -> socket.socket:
        """The other end of a window for an agent that is ``new``, which ends, and is removed then
        if it is to be, when that is closed everywhere. ``QuotaError``, ``NoSpaceError``."""
        with ExitStack() as stack:
            charge = self._agents.accounts.charged(who, Resource.DESCRIPTORS, 1)
            stack.callback(charge.release)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(ours.close)
            stack.callback(theirs.close)
            change = Change()
            change.set(agent, window="remove" if remove else "end")
            self._agents.journal.commit(change)
            stack.pop_all()
        self._ends.put(agent.index, ours, charge)
        return theirs

    # hanging up

    async def run(self) -> None:
        while True:
            for index in await self._ends.hung_up():
                agent = self._agents.registry.get(index)
                if agent is not None:
                    with guarded(agent):
                        self._hang_up(agent)

    def _hang_up(self, agent: Agent) -> None:
        if agent.status is Status.DEAD:
            self._ender.remove_unwanted(agent)
            return
        self._ender.end(agent, Outcome.CANCELLED, HANGUP)
        live_cell = self._live_cells.get(agent.index)
        if live_cell is not None:
            live_cell.facts.leave_cell()  # its monitor need not tell the keeper

    async def take_back(self) -> None:
        """Gets those of agents that live back from their monitors, and ends agents that have none
        any more."""
        for agent in self._agents.registry:
            if not agent.window or agent.index in self._ends:
                continue
            live_cell = self._live_cells.get(agent.index)
            if live_cell is not None and live_cell.facts.exist():
                end = await live_cell.facts.inlet.ask_window()
                if end is not None:
                    self._keep(agent, end)
                    continue
                if not live_cell.record().hung_up:
                    continue  # its monitor was killed, which ends it, too
            with guarded(agent):
                self._hang_up(agent)

    def _keep(self, agent: Agent, end: socket.socket) -> None:
        payer = Payer(agent.owner, agent.name)
        charge = self._agents.accounts.charged_anyway(payer, Resource.DESCRIPTORS, 1)
        self._ends.put(agent.index, end, charge)

    # in the next daemon

    def save(self, descriptors: Descriptors) -> list[list[int]]:
        return [[index, descriptors.keep(end.fileno())] for index, end in self._ends.items()]

    def take_over(self, saved: list[list[Any]]) -> None:
        for index, fd in saved:
            agent = self._agents.registry.get(AgentIndex(index))
            if agent is None:
                os.close(fd)
            else:
                self._keep(agent, socket.socket(fileno=fd))
