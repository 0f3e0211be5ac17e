"""How long the agents of another machine's daemon may run here: leases, as monitors read them.

A lease has a number, which is never used again, and a file of that name. The file has eight bytes,
written at once: the end of the lease in nanoseconds of CLOCK_BOOTTIME. Monitors sleep until the
end that they read last, and look then whether it was put off (monitor.c); they need no daemon for
this. So an end only grows, and what is to end sooner is ended by the daemon.

A lease that is over is over for good, and its file is removed: no program begins under it, and
monitors that have the file open find it empty. The files outlive the daemon, in a directory that a
reboot empties, and the next daemon goes on with the leases that are not over.
"""

from __future__ import annotations

import os
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_END: Final = struct.Struct("=Q")
_NS: Final = 1_000_000_000


class Leases:
    """All of this machine. Ends are in seconds of CLOCK_BOOTTIME."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        for name in os.listdir(directory):
            if self.end(int(name)) <= _now() / _NS:
                self.stop(int(name))

    def path(self, number: int) -> Path:
        """For a monitor."""
        return self._directory / str(number)

    def grant(self, end: float) -> int:
        """A new lease; its number."""
        number = _now()  # later than all before it
        self._write(number, end, os.O_CREAT | os.O_EXCL)
        return number

    def end(self, number: int) -> float:
        """When a lease is over; 0 if it was stopped."""
        try:
            data = self.path(number).read_bytes()
        except FileNotFoundError:
            return 0.0
        return float(_END.unpack(data)[0]) / _NS if len(data) == _END.size else 0.0

    def extend(self, number: int, end: float) -> None:
        """Puts off the end of a lease, unless it is over, or ends later anyway."""
        if _now() / _NS < self.end(number) < end:
            self._write(number, end)

    def stop(self, number: int) -> None:
        """A lease is over. What runs under it is yet to be ended."""
        with suppress(FileNotFoundError):
            os.truncate(self.path(number), 0)
            self.path(number).unlink()

    def _write(self, number: int, end: float, flags: int = 0) -> None:
        fd = os.open(self.path(number), os.O_WRONLY | os.O_CLOEXEC | flags, 0o600)
        try:
            os.pwrite(fd, _END.pack(int(end * _NS)), 0)
        finally:
            os.close(fd)


def _now() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
