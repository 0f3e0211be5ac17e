"""Open real files that need not be there: documents before they are written, and histories."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from ctxfs.disks import read_cached
from ctxfs.tree.members import Member
from ctxfs.tree.openfiles import LINES_AT_ONCE, OpenRow, whole_lines
from ctxfs.tree.rows import History, Real
from runtime.caller import Caller
from runtime.errors import ForbiddenError, TooLongError
from runtime.texts.names import decode

_O = TypeVar("_O")
_R = TypeVar("_R")


class OpenByPath(OpenRow[_O]):
    """A real file that need not be there: it is opened for each read."""

    def __init__(self, node: Member[_O], row: Real[_O], caller: Caller) -> None:
        super().__init__(node, caller, writing=True)
        self._path = row.real(node.base, node.obj)

    def read(self, offset: int, size: int) -> bytes | None:
        self.node.check_reader(self.caller)
        if offset == 0:
            self._seen = self._base.cache.poller.version(self.node.inode)
        return self._read(read_cached, size, offset)

    @contextmanager
    def reading(self, offset: int, size: int) -> Iterator[Callable[[], bytes]]:
        self.node.check_reader(self.caller)
        yield lambda: self._read(os.pread, size, offset)

    def _read(self, pread: Callable[[int, int, int], _R], size: int, offset: int) -> _R | bytes:
        try:
            with open(self._path, "rb") as file:
                return pread(file.fileno(), size, offset)
        except FileNotFoundError:
            return b""

    def syncing(self) -> Callable[[], None]:
        def sync() -> None:
            with suppress(FileNotFoundError), open(self._path, "rb") as file:
                os.fsync(file.fileno())

        return sync


class OpenHistory(OpenByPath[_O]):
    """A file of lines that only grows: what is appended are whole JSON lines."""

    HANDED = ("_rest", "_refused")

    def __init__(
        self, node: Member[_O], row: History[_O], caller: Caller, flags: int
    ) -> None:
        super().__init__(node, row, caller)
        self._row = row
        self._appends = bool(flags & os.O_APPEND)
        self._limit = self._base.runtime.config.frame_max
        self._rest = b""
        self._refused = False
        if flags & os.O_TRUNC:
            self.truncate(0)

    def read(self, offset: int, size: int) -> bytes | None:
        found = super().read(offset, size)
        held = self._row.held(self._base, self.node.obj)
        return found if held is None else held[offset : offset + size]

    def truncate(self, size: int) -> None:
        raise ForbiddenError("a history cannot be truncated")

    def write(self, offset: int, data: bytes) -> int:
        if self._row.append is None:
            raise ForbiddenError("only the runtime writes this history")
        self.node.check_writing(self.caller)
        size = self._path.stat().st_size if self._path.exists() else 0
        if not self._appends and offset != size:
            raise ForbiddenError("a history takes only additions: open it with O_APPEND (>>)")
        share = self._row.share(self._base, self.node.obj)
        share.check(self.caller, len(data))
        if self._refused or len(self._rest) + len(data) > self._limit:
            # the kernel splits a long write(2): the rest belongs to the refused line
            self._rest = b""
            self.charge(0)
            self._refused = True
            raise TooLongError(f"a line of a history may have at most {self._limit} bytes")
        lines, rest, left = whole_lines(self._rest + data, LINES_AT_ONCE)
        self._rest = b""
        self._append_all(lines)
        self.charge(len(rest))
        self._rest = rest
        return len(data) - left

    @property
    def unfinished(self) -> bool:
        return bool(self._rest)

    def _append_all(self, lines: list[bytes]) -> None:
        """As one change: all of them, or none."""
        wanted = [decode(line) for line in lines if line.strip()]
        if wanted and self._row.append is not None:
            self.node.check_writer(self.caller)
            self._row.append(self._base, self.node.obj, wanted)

    def flush(self) -> None:
        rest, self._rest = self._rest, b""
        self._refused = False
        self.charge(0)
        self._append_all([rest])
