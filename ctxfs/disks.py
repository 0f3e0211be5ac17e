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
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from resource import RUSAGE_THREAD, getrusage
from typing import Final, TypeVar
from weakref import WeakValueDictionary

import trio

from runtime.authority.accounts import Payer, Reserve
from runtime.authority.loop import Batches
from runtime.caller import Caller
from runtime.errors import OverTimeError

log = logging.getLogger("ctxd.disks")

_R = TypeVar("_R")

#: What a thread does of a request. The event loop checks when it enters it, and counts when it
#: leaves it.
Work = AbstractContextManager[Callable[[], _R]]

_THREADS: Final = 8
_THREADS_OF_OWNER: Final = 2
#: an answer about processes waits no longer than this for them, and for its turn
_LOOK_SECONDS: Final = 5.0
#: bytes that an owner may have in line to be cut off: the kernel holds the locks of those files,
#: and who waits cannot be killed
_CUT_MAX: Final = 4 << 30
#: an operation on a file waits no longer than this for the thread that changes it
_SETTLED_SECONDS: Final = 1.0
#: descriptors in line to be closed: they are on no account any more
_CLOSING_MAX: Final = 256
#: bytes of a file that may go at once
_SMALL: Final = 1 << 20
#: bytes that may be written at once, and again in a second: below what a kernel keeps unwritten
#: before it makes writers wait, and what most disks write in that time
_MUCH: Final = 64 << 20
#: a write that waits longer than this has waited for the disk: the next ones go to threads
_LONG_SECONDS: Final = 0.005
#: for so long
_SLOW_SECONDS: Final = 10.0


class _Lanes:
    """Threads for one sort of work: one at a time for an agent, two for an owner."""

    def __init__(self) -> None:
        self.threads = trio.CapacityLimiter(_THREADS)
        self._payers: WeakValueDictionary[Payer, trio.Lock] = WeakValueDictionary()
        self._owners: WeakValueDictionary[tuple[int, bool], trio.CapacityLimiter] = (
            WeakValueDictionary()
        )

    def turn(self, who: Payer) -> trio.Lock:
        return self._payers.setdefault(who, trio.Lock())

    def share(self, who: Payer) -> trio.CapacityLimiter:
        owner = _owner(who)
        return self._owners.setdefault(owner, trio.CapacityLimiter(_THREADS_OF_OWNER))


def _owner(who: Payer) -> tuple[int, bool]:
    return who.owner, who.reserve is not Reserve.NONE


class Disks:
    """Has threads do the work: one at a time for a file and for an agent, two for an owner.

    So only the caller that truncates a large file waits for it.
    """

    def __init__(self, payer: Callable[[Caller], Payer]) -> None:
        self._payer = payer
        self._disk, self._looks = _Lanes(), _Lanes()
        self._files: WeakValueDictionary[int, trio.Lock] = WeakValueDictionary()
        self._cutting: Counter[tuple[int, bool]] = Counter()
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
            return await self.do(caller, work, file, size)
        waits = _waits()
        with work as act:
            result = act()
        now = time.monotonic()
        if now - begun > _LONG_SECONDS and _waits() > waits:
            self._slow = now + _SLOW_SECONDS
        return result

    async def do(
        self, caller: Caller, work: Work[_R], file: int | None = None, size: int = 0
    ) -> _R:
        """The result of a thread's ``work``, after it was this caller's turn; raises what it
        raises, and ``OverTimeError``. ``file`` is the inode number of a file that it changes,
        ``size`` how many of its bytes."""
        who = self._payer(caller)
        turn, share = self._disk.turn(who), self._disk.share(who)
        with self._in_line(_owner(who), size):
            async with turn:
                # not before, so that nobody keeps others from a file who waits for its own turn
                lock = trio.Lock()
                changing = lock if file is None else self._files.setdefault(file, lock)
                async with changing, share:
                    with work as act:
                        return await trio.to_thread.run_sync(act, limiter=self._disk.threads)

    async def look(self, caller: Caller, work: Work[_R]) -> _R:
        """The same for what looks at processes, by threads that do nothing else: the kernel lets
        it wait for a process that waits for a file, which is read by ``do`` in the same caller's
        turn. ``OverTimeError`` if it takes long, as where the file is on a disk that is gone; the
        thread is left to itself then, and is one of its owner's until it ends."""
        who = self._payer(caller)
        with trio.move_on_after(_LOOK_SECONDS):
            async with self._looks.turn(who), self._looks.threads:
                with work as act:
                    return await trio.to_thread.run_sync(
                        act, limiter=self._looks.share(who), abandon_on_cancel=True
                    )
        raise OverTimeError("its processes cannot be looked at now: try again")

    @contextmanager
    def _in_line(self, owner: tuple[int, bool], size: int) -> Iterator[None]:
        """While so many bytes of an owner's file are to go."""
        if size <= _SMALL:
            yield
            return
        if self._cutting[owner] and self._cutting[owner] + size > _CUT_MAX:
            raise OverTimeError(
                f"uid {owner[0]} is already truncating {self._cutting[owner]} bytes: try again"
            )
        self._cutting[owner] += size
        try:
            yield
        finally:
            self._cutting[owner] -= size
            if not self._cutting[owner]:
                del self._cutting[owner]

    @property
    def busy(self) -> bool:
        """Whether any file is being changed by a thread."""
        return bool(self._files)

    async def settled(self, file: int) -> None:
        """Returns when no thread changes this file: a caller that asks the kernel for its lock
        meanwhile waits for the thread. ``OverTimeError`` if that takes long."""
        changing = self._files.get(file)
        if changing is None:
            return
        with trio.move_on_after(_SETTLED_SECONDS):
            async with changing:
                return
        raise OverTimeError("the file is being truncated: try again")

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
        st = os.fstat(fd)
        # pages of a hole are in memory, too
        if max(st.st_size, st.st_blocks * 512) > _SMALL and len(self._closing) < _CLOSING_MAX:
            self._closing.add(fd)
        else:
            os.close(fd)

    async def run(self) -> None:
        """Closes for ever what takes a while."""
        await self._closing.run()


def _waits() -> int:
    """How often this thread has waited for something other than its turn on a processor."""
    return getrusage(RUSAGE_THREAD).ru_nvcsw


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
