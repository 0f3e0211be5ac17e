"""Append-only histories: files to which whole lines are added and nothing else."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import trio

from runtime.kernel import linux

log = logging.getLogger("ctxd.history")

_TAIL: Final = 1 << 21
_ID: Final = re.compile(rb'^\{"id":"[a-z]([0-9]{1,15})"', re.M)
#: of a file of lines that is read at once, in bytes
PIECE: Final = 128 << 10


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


class History:
    """Writes posted lines to their files below the state directory."""

    def __init__(self, state: Path) -> None:
        self._state = state
        #: files that have lines which a loss of power could take
        self._unsynced: set[str] = set()

    def append(self, path: str, lines: Iterable[str]) -> int:
        """Lines to one file, as a single append; returns how many bytes these are."""
        fd = self.writable(path)
        try:
            return self.write(fd, path, lines)
        finally:
            os.close(fd)

    def writable(self, path: str) -> int:
        """The descriptor of a file, for ``write``; it is made if it is not there."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(f"{self._state}/{path}", flags, 0o600)

    def write(self, fd: int, path: str, lines: Iterable[str]) -> int:
        """Lines to an open file, as a single append; returns how many bytes these are."""
        data = "".join(f"{line}\n" for line in lines).encode()
        self._unsynced.add(path)
        _write_all(fd, data)
        return len(data)

    def complete(self, path: str, lines: Iterable[str]) -> None:
        """Like ``append`` for lines of one file, in order, of which an earlier daemon may
        have written some or all.

        What a loss of power left of a line that is not one of these is cut off.
        """
        fd = os.open(
            self._state / path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            self._unsynced.add(path)
            size = os.fstat(fd).st_size
            wanted = [(line + "\n").encode() for some in lines for line in some.split("\n")]
            begin = max(0, size - _TAIL - sum(map(len, wanted)))
            tail = os.pread(fd, size - begin, begin)
            missing = [data for data in wanted if data not in tail]
            torn = tail.partition(b"\0")[0].rpartition(b"\n")[2]
            if b"\0" in tail or (torn and not (missing and missing[0].startswith(torn))):
                # blocks that never reached the disk read as zeros
                whole = tail[: len(tail.partition(b"\0")[0]) - len(torn)]
                log.warning(
                    "history %s: removing %d bytes of an incomplete line", path,
                    len(tail) - len(whole),
                )
                os.ftruncate(fd, begin + len(whole))
                missing = [data for data in wanted if data not in whole]
                torn = b""
            for data in missing:
                # The lines are in order, so a torn end is the next one's beginning.
                _write_all(fd, data[len(torn) :])
                torn = b""
        finally:
            os.close(fd)

    def last_number(self, path: str) -> int:
        """The number in the id of the last line (``e17``), 0 if there is none."""
        try:
            with open(self._state / path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL))
                found = _ID.findall(file.read())
        except FileNotFoundError:
            return 0
        return int(found[-1]) if found else 0

    async def synced(self, *, with_all: bool = False) -> None:
        """Returns when every line written so far survives a loss of power; ``OSError``.

        ``with_all`` syncs their whole filesystem, for which a shutdown does not wait.
        """
        paths, self._unsynced = self._unsynced, set()
        whole = partial(linux.sync_filesystem, self._state)
        sync = whole if with_all else partial(self._sync, paths)
        try:
            await trio.to_thread.run_sync(sync, abandon_on_cancel=with_all)
        except BaseException:
            self._unsynced |= paths
            raise

    def _sync(self, paths: set[str]) -> None:
        for path in paths:
            with suppress(FileNotFoundError):  # removed since
                fd = os.open(self._state / path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)


def read_lines(fd: int, offset: int, size: int = PIECE) -> bytes:
    """Complete lines of a file from an offset on, one at least if there is one."""
    while True:
        data = os.pread(fd, size, offset)
        lines = data[: data.rfind(b"\n") + 1]
        if lines or len(data) < size:
            return lines
        size *= 2


def find_line(fd: int, last: int, number: Callable[[bytes], int], piece: int = PIECE) -> int:
    """An offset in a file of lines whose numbers grow, of a line's beginning, before which all
    are at most ``last``; few places of a long one are looked at.

    ``number`` gets bytes that begin with a line, and tells its number, 0 if it has none.
    """
    low, high = 0, os.fstat(fd).st_size
    while high - low > piece:
        middle = (low + high) // 2
        block = os.pread(fd, piece, middle)
        begin = block.find(b"\n") + 1
        found = number(block[begin:]) if begin else 0
        if not found:
            break  # a line longer than that: from here on all is looked at
        if found > last:
            high = middle
        else:
            low = middle + begin
    return low
