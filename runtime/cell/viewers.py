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

from runtime.records.visits import Visit

#: of a run: at the same time, and ever; as in terminal.h
VIEWERS_MAX: Final = 8
VIEWERS_EVER: Final = 4000
#: struct viewing of inlet.h
_VIEWING: Final = struct.Struct("=cBBxIIHHQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """The monitor's end of a visit. ``screen`` are columns and rows, if they are known."""

    visit: Visit
    end: socket.socket
    screen: tuple[int, int] | None = None

    def order(self, grace: float) -> bytes:
        """The packet for the monitor; a hang-up may take so many seconds."""
        visit = self.visit
        return _VIEWING.pack(
            *(b"t", visit.looks, visit.hangs_up, visit.number, visit.uid),
            *(self.screen or (0, 0)),
            round(1000 * grace),
        )
