"""The files as a caller reaches them, for tools: what mkdir(2), write(2) and rmdir(2) would do."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext

from ctxfs.disks import Disks
from ctxfs.tree.nodes import Call, Node, OpenFile


class Paths:
    """Paths are relative to the root. Everything raises what the same system call would."""

    def __init__(self, root: Node, disks: Disks, call: Call) -> None:
        self._root = root
        self._disks = disks
        self._call = call

    def find(self, path: str) -> Node:
        node = self._root
        for name in filter(None, path.split("/")):
            node = node.lookup(self._call, name)
        return node

    def mkdir(self, where: str, name: str) -> None:
        self.find(where).mkdir(self._call, name, 0o755)

    def rmdir(self, where: str, name: str) -> None:
        self.find(where).rmdir(self._call, name)

    def check_writer(self, path: str) -> None:
        """Whether the caller may write the file now; the document is there from then on."""
        self.find(path).open(self._call, os.O_WRONLY).release()

    async def write(self, path: str, text: str) -> None:
        """``printf TEXT > PATH``."""
        async with self.staged(path, text) as opened:
            await self._flush(opened)

    async def write_lines(
        self, path: str, lines: Sequence[str], at: Callable[[int | None], None]
    ) -> None:
        """``printf '%s\\n' LINE... > PATH``, one line after the other.

        ``at`` is told which line is next, and None before all of them are taken together.
        """
        async with self._opened(path) as opened:
            offset = 0
            for number, line in enumerate(lines or [""]):
                at(number if lines else None)
                data = f"{line}\n".encode()
                while data:
                    taken = await self._write(opened, offset, data)
                    offset, data = offset + taken, data[taken:]
            at(None)
            await self._flush(opened)

    async def say(
        self, path: str, line: str, meanwhile: AbstractContextManager[None] | None = None
    ) -> None:
        """``echo LINE > PATH``, of a file that obeys each line at once: ``meanwhile`` it does."""
        async with self._opened(path) as opened:
            data = f"{line}\n".encode()
            await opened.prepare(data)
            with meanwhile or nullcontext():
                opened.write(0, data)
            await self._flush(opened)

    @asynccontextmanager
    async def staged(self, path: str, text: str) -> AsyncIterator[OpenFile]:
        """All of a control or a document of lines, checked, before the flush that commits it."""
        async with self._opened(path) as opened:
            data, offset = text.encode(), 0
            while offset < len(data):
                offset += await self._write(opened, offset, data[offset:])
            yield opened

    async def write_some(self, path: str, text: str) -> int:
        """One write(2): how many bytes of the text were taken."""
        async with self._opened(path) as opened:
            written = await self._write(opened, 0, text.encode())
            await self._flush(opened)
        return written

    async def _write(self, opened: OpenFile, offset: int, data: bytes) -> int:
        await opened.prepare(data)
        writing = opened.writing(offset, data)
        if writing is None:
            return opened.write(offset, data)
        return await self._disks.change(opened.caller, writing, opened.node.inode)

    async def _flush(self, opened: OpenFile) -> None:
        await opened.prepare(b"\n")
        opened.flush()

    @asynccontextmanager
    async def _opened(self, path: str) -> AsyncIterator[OpenFile]:
        opened = self.find(path).open(self._call, os.O_WRONLY | os.O_TRUNC)
        try:
            cutting = opened.truncating(0)
            if cutting is not None:
                await self._disks.change(opened.caller, cutting, opened.node.inode)
            yield opened
        finally:
            opened.release()
