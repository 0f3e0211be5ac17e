"""The files of counters (``runtime/native/counters.h``) that relays hand over: each is mapped once,
and written by one meter.

A descriptor is a right that ctxd gave to the relay of one agent, so nothing is looked up here by a
name, a pid or a cgroup: what it is a descriptor of is all that is asked.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from weakref import WeakValueDictionary, finalize

import trio

from runtime.metering.reading import UncountableError
from runtime.records.spent import NAME_SIZE, NO_LIMIT, PLACES, SIZE, SPENT, VERSION

log = logging.getLogger("ctxfs-meter")


class ForeignError(Exception):
    """A descriptor that was handed over is of no file of counters of this ctxd."""


class Payer:
    """The account of one agent: a block of 64-bit numbers in its file, the name first.

    The limits are ctxd's, and what is used the meter's alone. So every number is stored at once,
    and needs no lock.
    """

    def __init__(self, fd: int) -> None:
        self._fd = os.dup(fd)
        finalize(self, os.close, self._fd)
        self._map = mmap.mmap(fd, SIZE)
        self._words = memoryview(self._map).cast("Q")
        name = self._map[SPENT : SPENT + NAME_SIZE]
        self.name = name.rstrip(b"\0").decode("ascii", "replace")
        #: tokens and cost that requests hold, and how many these are
        self.held = self.held_cost = self.flying = 0
        #: the first of those that wait for an end has its turn, and looks at each ``ended``
        self.turn = trio.Lock()
        self.ended = trio.lowlevel.ParkingLot()
        #: who waits for memory, the same
        self.memory_turn = trio.Lock()

    def __getitem__(self, number: str) -> int:
        return int(self._words[PLACES[number] // 8])

    def add(self, number: str, more: int) -> None:
        """A number that would wrap stays at its most."""
        self._words[PLACES[number] // 8] = min(NO_LIMIT, self[number] + more)

    def tell(self, trouble: int) -> None:
        """Notes why a request was refused, for ctxd: inotify(7) sees a write, and no change in
        memory."""
        if self["trouble"] != trouble:
            with suppress(OSError):
                os.pwrite(self._fd, trouble.to_bytes(8, "little"), PLACES["trouble"])

    @property
    def tokens(self) -> int:
        return self["input"] + self["output"]

    def is_above(self, tokens: int, cost: int) -> bool:
        """Whether it is above a limit with so much beside what is used and held."""
        return (
            self.tokens + self.held + tokens > self["tokens_max"] != NO_LIMIT
            or self["cost"] + self.held_cost + cost > self["cost_max"] != NO_LIMIT
        )

    def lock(self) -> None:
        """Be its only writer. POSIX has such a lock go with the process, as with each close of a
        descriptor of the file; one of the open file would outlive it in the relay."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except OSError:
            log.error("another meter writes the counters of %s: it has to end first", self.name)
            raise UncountableError(503, "another meter writes the counters") from None


class Files:
    """Those that connections have now."""

    def __init__(self, owners: Sequence[int]) -> None:
        #: uids that ctxd may have, and the mode of its files
        self._owned = [(owner, 0o600) for owner in owners]
        self._payers = WeakValueDictionary[tuple[int, int], Payer]()

    def of(self, fd: int) -> Payer:
        """The account in the file of a descriptor; ``ForeignError``."""
        found = os.fstat(fd)
        key = (found.st_dev, found.st_ino)
        if payer := self._payers.get(key):
            return payer
        if (
            not stat.S_ISREG(found.st_mode)
            or (found.st_uid, stat.S_IMODE(found.st_mode)) not in self._owned
            or found.st_size != SIZE
            or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR
            or int.from_bytes(os.pread(fd, 8, 0), "little") != VERSION
        ):
            raise ForeignError
        payer = self._payers[key] = Payer(fd)
        return payer
