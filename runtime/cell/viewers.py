"""Viewers: who looks at the terminal of a program, and types there.

A viewer is a pair of sockets. The run's monitor gets one end (terminal.h), and an operator of the
agent the other: no byte of a terminal passes the daemon, and none of them needs it any more. That
a viewer is there, or has left, is in the record of the run.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Final

#: of a run: at the same time, and ever; as in terminal.h
VIEWERS_MAX: Final = 8
VIEWERS_EVER: Final = 4000
#: struct viewing of inlet.h
_VIEWING: Final = struct.Struct("=cBBxIIHHQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """The monitor's end of one, and what it may: one that looks cannot type, and when one that is
    to hang up is closed without a word, the program ends.

    ``number`` is its own in the run; ``uid`` is whose it is, for the record. ``screen`` are columns
    and rows, if they are known.
    """

    end: socket.socket
    number: int
    uid: int
    look: bool = False
    hangup: bool = False
    screen: tuple[int, int] | None = None

    def order(self, grace: float) -> bytes:
        """The packet for the monitor; a hang-up may take so many seconds."""
        return _VIEWING.pack(
            *(b"t", self.look, self.hangup, self.number, self.uid),
            *(self.screen or (0, 0)),
            round(1000 * grace),
        )
