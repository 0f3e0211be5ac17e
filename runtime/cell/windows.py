"""The daemon's ends of what clients hold: windows, and viewers before there is a terminal.

A window is a pair of sockets for an agent that is to live as long as somebody holds the other end.
The kernel closes that with its last holder, whatever ended him. A cell's monitor has a copy of this
end (inlet.h), so that the agent ends also while no daemon lives, and the next one asks it for that.
Nothing is ever read from a window: who holds the other end may send anything.

A viewer is such a pair, too, and its monitor alone serves it. The daemon has its end until there is
a monitor, as while an agent waits for its turn to start.
"""

from __future__ import annotations

import contextlib
import select
import socket
from dataclasses import dataclass
from typing import Final, NamedTuple

import trio

from runtime.authority.accounts import Charge
from runtime.ids import AgentIndex

#: why an agent ends whose window was closed
HANGUP: Final = "hangup"
#: the most that it may take, in seconds; as in keeper.c
HANG_UP_GRACE: Final = 0.5
#: of a packet, which has its kind first; a viewer that leaves sends this
_PACKET: Final = 8192
_LEAVES: Final = b"d"


class Key(NamedTuple):
    """For what somebody holds the other end: an agent, or a task of it. With a number it is a
    viewer, else a window. The first viewer came before the program began."""

    agent: AgentIndex
    task: str = ""
    viewer: int = 0


#: of a viewer that was there first
FIRST: Final = 1


@dataclass(frozen=True, slots=True)
class End:
    """``screen`` are the columns and rows of a viewer."""

    socket: socket.socket
    charge: Charge
    screen: tuple[int, int] | None = None

    def close(self) -> None:
        self.socket.close()
        self.charge.release()


class Ends:
    """All of them, by whom they are for."""

    def __init__(self) -> None:
        self._ends: dict[Key, End] = {}
        #: agents whose windows an earlier daemon took along, and whose clients may come back
        self.awaited: set[AgentIndex] = set()
        #: an epoll that wants nothing tells of hang-ups only
        self._hangups = select.epoll()

    def put(self, key: Key, end: End) -> None:
        self.drop(key)
        self._ends[key] = end
        self.awaited.discard(key.agent)
        self._hangups.register(end.socket, 0)

    def __contains__(self, key: Key) -> bool:
        return key in self._ends or (key.agent in self.awaited and key == Key(key.agent))

    def find(self, key: Key) -> End | None:
        return self._ends.get(key)

    def get(self, index: AgentIndex) -> socket.socket | None:
        """The window of an agent."""
        end = self.find(Key(index))
        return end.socket if end is not None else None

    def items(self) -> list[tuple[Key, End]]:
        return list(self._ends.items())

    def take(self, key: Key) -> End | None:
        """One that is not watched any more, if there is one."""
        end = self._ends.pop(key, None)
        if end is not None:
            self._hangups.unregister(end.socket)
        return end

    def drop(self, key: Key) -> None:
        """Closes one, if there is one."""
        if (end := self.take(key)) is not None:
            end.close()

    def drop_all(self, index: AgentIndex) -> None:
        self.awaited.discard(index)
        for key in [key for key in self._ends if key.agent == index]:
            self.drop(key)

    async def hung_up(self) -> list[tuple[Key, bool]]:
        """Waits for some to be closed, which are dropped; and whether that was said before."""
        await trio.lowlevel.wait_readable(self._hangups.fileno())
        numbers = {number for number, _ in self._hangups.poll(0)}
        found = [(key, end) for key, end in self.items() if end.socket.fileno() in numbers]
        left = [(key, bool(key.viewer) and _has_left(end.socket)) for key, end in found]
        for key, _ in left:
            self.drop(key)
        return left


def _has_left(end: socket.socket) -> bool:
    """Whether a viewer said that it leaves, in what it sent before it closed."""
    with contextlib.suppress(OSError):
        while packet := end.recv(_PACKET, socket.MSG_DONTWAIT):
            if packet == _LEAVES:
                return True
    return False
