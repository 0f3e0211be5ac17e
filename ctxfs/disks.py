"""Reading, writing and cutting off real files: by threads, beside the event loop.

A real file may be as large as its owner's disk account, and none of it need be in memory. To
read it waits for the disk then, to write waits while the kernel has too much that is not
written yet, and to cut off or close a gigabyte takes half a second.

A thread makes a small request take four times as long. So what is in memory is read at once, and
what is small is written at once, as long as it is not much in all and did not take long a moment
ago.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, TypeVar
from weakref import WeakValueDictionary

import trio

from runtime.accounts import Payer, Reserve, payer
from runtime.loop import Batches

if TYPE_CHECKING:
    from runtime.authority.identity import Caller
    from runtime.runtime import Runtime

_R = TypeVar("_R")

#: What a thread does of a request. The event loop checks when it enters it, and counts when it
#: leaves it.
Work = AbstractContextManager[Callable[[], _R]]

_THREADS: Final = 8
_THREADS_OF_OWNER: Final = 2
#: bytes of a file that may go at once
_SMALL: Final = 1 << 20
#: bytes that may be written at once, and again in a second: below what a kernel keeps unwritten
#: before it makes writers wait, and what most disks write in that time
_MUCH: Final = 64 << 20
#: a write that takes longer than this has waited for the disk: the next ones go to threads
_LONG_SECONDS: Final = 0.005
#: for so long
_SLOW_SECONDS: Final = 10.0


class Disks:
    """Has threads do the work: one at a time for a file and for an agent, two for an owner.

    So whoever cuts off what is large waits for it alone.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._threads = trio.CapacityLimiter(_THREADS)
        self._files: WeakValueDictionary[int, trio.Lock] = WeakValueDictionary()
        self._payers: WeakValueDictionary[Payer, trio.Lock] = WeakValueDictionary()
        self._owners: WeakValueDictionary[tuple[int, bool], trio.CapacityLimiter] = (
            WeakValueDictionary()
        )
        self._closing = Batches[int](_close_all)
        #: until when the disk is taken for slow
        self._slow = 0.0
        #: bytes that may still be written at once, and when that was so
        self._room, self._then = float(_MUCH), 0.0

    async def change(self, caller: Caller, work: Work[_R], file: int, size: int) -> _R:
        """Changes the file with this inode number, of which so many bytes are written or go: at
        once if they are few, no thread changes it, and the disk is not slow; else as ``do``."""
        begun = time.monotonic()
        if begun < self._slow or file in self._files or not self._is_little(size, begun):
            return await self.do(caller, work, file)
        with work as act:
            result = act()
        now = time.monotonic()
        if now - begun > _LONG_SECONDS:
            self._slow = now + _SLOW_SECONDS
        return result

    async def do(self, caller: Caller, work: Work[_R], file: int | None = None) -> _R:
        """The result of a thread's ``work``, after it was this caller's turn; raises what it
        raises. ``file`` is the inode number of a file that it changes."""
        who = payer(self._runtime.agents, caller)
        owner = who.owner, who.reserve is not Reserve.NONE
        changing = self._files.setdefault(file, trio.Lock()) if file is not None else trio.Lock()
        turn = self._payers.setdefault(who, trio.Lock())
        share = self._owners.setdefault(owner, trio.CapacityLimiter(_THREADS_OF_OWNER))
        async with changing, turn, share:
            with work as act:
                return await trio.to_thread.run_sync(act, limiter=self._threads)

    def _is_little(self, size: int, now: float) -> bool:
        self._room = min(_MUCH, self._room + (now - self._then) * _MUCH)
        self._then = now
        if size > _SMALL or size > self._room:
            return False
        self._room -= size
        return True

    def close(self, fd: int) -> None:
        """Closes a descriptor. It may be the last of a file without a name; and what replaced
        the text of a file is sent to the disk by some filesystems (ext4, auto_da_alloc)."""
        if os.fstat(fd).st_blocks * 512 > _SMALL:
            self._closing.add(fd)
        else:
            os.close(fd)

    async def run(self) -> None:
        """Closes for ever what takes a while."""
        await self._closing.run()


def _close_all(fds: set[int]) -> None:
    for fd in fds:
        os.close(fd)


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
