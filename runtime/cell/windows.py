"""The daemon's ends of windows.

A window is a pair of sockets for an agent that is to live as long as somebody holds the other end.
The kernel closes that with its last holder, whatever ended him. A cell's monitor has a copy of this
end (inlet.h), so that the agent ends also while no daemon lives, and the next one asks it for that.
Nothing is ever read from a window: who holds the other end may send anything.
"""

from __future__ import annotations

import select
import socket
from typing import Final

import trio

from runtime.authority.accounts import Charge
from runtime.ids import AgentIndex

#: why an agent ends whose window was closed
HANGUP: Final = "hangup"
#: the most that it may take, in seconds; as in keeper.c
HANG_UP_GRACE: Final = 0.5


class Ends:
    """One for each agent that has a window, by the agent's index."""

    def __init__(self) -> None:
        self._ends: dict[AgentIndex, tuple[socket.socket, Charge]] = {}
        #: an epoll that wants nothing tells of hang-ups only
        self._hangups = select.epoll()

    def put(self, index: AgentIndex, end: socket.socket, charge: Charge) -> None:
        self.drop(index)
        self._ends[index] = end, charge
        self._hangups.register(end, 0)

    def __contains__(self, index: AgentIndex) -> bool:
        return index in self._ends

    def get(self, index: AgentIndex) -> socket.socket | None:
        return self._ends[index][0] if index in self._ends else None

    def items(self) -> list[tuple[AgentIndex, socket.socket]]:
        return [(index, end) for index, (end, _) in self._ends.items()]

    def drop(self, index: AgentIndex) -> None:
        """Closes one, if there is one."""
        if index in self._ends:
            end, charge = self._ends.pop(index)
            self._hangups.unregister(end)
            end.close()
            charge.release()

    async def hung_up(self) -> list[AgentIndex]:
        """Waits for windows to be closed; those are dropped."""
        await trio.lowlevel.wait_readable(self._hangups.fileno())
        numbers = {number for number, _ in self._hangups.poll(0)}
        found = [index for index, end in self.items() if end.fileno() in numbers]
        for index in found:
            self.drop(index)
        return found
