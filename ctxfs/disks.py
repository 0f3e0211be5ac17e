"""Threads for what waits for the disk: reading, changing and closing real files.

Only the daemon has these files open, so a thread waits for the disk and for nothing that a caller
does: what it is to write has come before it begins. Reads and changes have threads of their own,
for a caller may need a page to be read before it has what it writes. What is in memory is read at
once; a change may always wait, as long as the kernel has too much that is not written yet.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import Final, TypeVar

import trio

from runtime.authority.accounts import Payer, Reserve
from runtime.authority.loop import Batches
from runtime.caller import Caller
from runtime.kernel.lanes import Lanes

log = logging.getLogger("ctxd.disks")

_R = TypeVar("_R")

#: What a thread does of a request. The event loop checks when it enters it, and counts when it
#: leaves it.
Work = AbstractContextManager[Callable[[], _R]]

_THREADS: Final = 8
_THREADS_OF_OWNER: Final = 2
#: bytes of a file that may go, or be sent to the disk, when it is closed at once
_SMALL: Final = 1 << 20
#: descriptors in line to be closed: they are on no account any more
_CLOSING_MAX: Final = 256


class _Threads:
    """Those for one sort of work: one at a time for an agent, two for an owner."""

    def __init__(self) -> None:
        self._limit = trio.CapacityLimiter(_THREADS)
        self._agents = Lanes[Payer]()
        self._owners = Lanes[tuple[int, bool]](_THREADS_OF_OWNER)

    async def do(
        self, who: Payer, work: Work[_R], file: AbstractAsyncContextManager[object]
    ) -> _R:
        owner = who.owner, who.reserve is not Reserve.NONE
        # not the file first, so that nobody keeps others from it who waits for its own turn
        async with self._agents.turn(who), self._owners.turn(owner), file:
            with work as act:
                return await trio.to_thread.run_sync(act, limiter=self._limit)


class Disks:
    """Has threads do the work; raises what it raises."""

    def __init__(self, payer: Callable[[Caller], Payer]) -> None:
        self._payer = payer
        self._reads, self._changes = _Threads(), _Threads()
        self._files = Lanes[int]()
        self._closing = Batches[int](_close_all)

    async def read(self, caller: Caller, work: Work[_R]) -> _R:
        return await self._reads.do(self._payer(caller), work, nullcontext())

    async def change(self, caller: Caller, work: Work[_R], file: int) -> _R:
        """Changes the file with this inode number, as the only one who does."""
        return await self._changes.do(self._payer(caller), work, self._files.turn(file))

    def close(self, fd: int) -> None:
        """Closes a descriptor. It may be the last of a file without a name; and what replaced
        the text of a file is sent to the disk by some filesystems (ext4, auto_da_alloc)."""
        st = os.fstat(fd)
        # pages of a hole are in memory, too
        if max(st.st_size, st.st_blocks * 512) > _SMALL and len(self._closing) < _CLOSING_MAX:
            self._closing.add(fd)
        else:
            os.close(fd)

    async def run(self) -> None:
        """Closes for ever what takes a while."""
        await self._closing.run()


def _close_all(fds: set[int]) -> None:
    for fd in fds:
        try:
            os.close(fd)
        except OSError as error:
            log.warning("cannot close a file of an agent: %s", error.strerror)


def read_cached(fd: int, size: int, offset: int) -> bytes | None:
    """As pread(2); None if that would wait for the disk."""
    buffer = bytearray(size)
    try:
        count = os.preadv(fd, [buffer], offset, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
            raise
        return None
    if count < size and offset + count < os.fstat(fd).st_size:
        return None
    del buffer[count:]
    return bytes(buffer)
