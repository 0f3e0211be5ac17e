"""Open real files: read, written and cut off in place, by threads where the disk is waited for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Final

from ctxfs.disks import Work, read_cached
from ctxfs.tree.nodes import Node, OpenFile
from runtime.authority.disk import Share
from runtime.caller import Caller
from runtime.errors import TooLargeError
from runtime.kernel.handover import Descriptors
from runtime.texts.names import decode

#: bytes of UTF-8 that no character begins with, of which it has three at most
_CONTINUES: Final = bytes(range(0x80, 0xC0))


class OpenRealFile(OpenFile):
    """A real file of the daemon's, read and written in place, as its node lets the caller."""

    # each write is in the file once it is answered
    flushes = False

    def __init__(
        self, node: Node, caller: Caller, fd: int, *, limit: int, append: bool, share: Share,
        text: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(node, caller)
        self._text = text
        self.fd = fd
        self._limit = limit
        self._append = append
        self._share = share
        #: how many threads work on it, and whether it is to be closed when none does
        self._at_work = 0
        self._released = False

    def read(self, offset: int, size: int) -> bytes | None:
        self.node.check_reader(self.caller)
        return read_cached(self.fd, size, offset)

    @contextmanager
    def reading(self, offset: int, size: int) -> Iterator[Callable[[], bytes]]:
        self.node.check_reader(self.caller)
        with self._in_use():
            yield partial(os.pread, self.fd, size, offset)

    def resizing(self, size: int) -> AbstractContextManager[None]:
        """Around what makes the file at least, or by truncation exactly, so many bytes long."""
        return nullcontext()

    def writing(self, offset: int, data: bytes) -> Work[int]:
        # who may not does not wait to be told, and who waited has to be allowed still
        self.node.check_writing(self.caller)
        return self._writing(offset, data)

    @contextmanager
    def _writing(self, offset: int, data: bytes) -> Iterator[Callable[[], int]]:
        self.node.check_writing(self.caller)
        if self._append:
            offset = os.fstat(self.fd).st_size
        if self._text:  # a character may be in two writes
            decode(data[:3].lstrip(_CONTINUES if offset else b"") + data[3:], final=False)
        end = offset + len(data)
        if end > self._limit:
            raise TooLargeError(f"a document may have at most {self._limit} bytes (document_max)")
        on_disk = self._share.writing(self.caller, self.fd, len(data))
        with self._in_use(), on_disk, self.resizing(end):
            yield partial(os.pwrite, self.fd, data, offset)
        self.node.changed()

    def truncating(self, size: int) -> Work[None] | None:
        self.node.check_writing(self.caller)
        return self._truncating(size) if size or os.fstat(self.fd).st_size else None

    @contextmanager
    def _truncating(self, size: int) -> Iterator[Callable[[], None]]:
        self.node.check_writing(self.caller)
        if size > self._limit:
            raise TooLargeError(f"a document may have at most {self._limit} bytes (document_max)")
        with self._in_use(), self._share.writing(self.caller, self.fd, 0), self.resizing(size):
            yield partial(os.ftruncate, self.fd, size)
        self.node.changed()

    def syncing(self) -> Callable[[], None]:
        return lambda: os.fsync(self.fd)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keeps the descriptor open while a thread works on it, so that its number stays taken."""
        self._at_work += 1
        try:
            yield
        finally:
            self._at_work -= 1
            if self._released and not self._at_work:
                self.node.closed(self.fd)

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        return {"fd": descriptors.keep(self.fd)}

    def release(self) -> None:
        self._released = True
        if not self._at_work:
            self.node.closed(self.fd)
