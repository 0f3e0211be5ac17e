"""A minimal pyfuse3 filesystem: what the library itself costs, as a reference.

A read-only tree with the paths that the bench uses, and one writable file per
directory that is kept in memory. Nothing is remembered in the kernel beyond
what ``--timeout`` says for names and attributes, and, with ``--keep-cache``,
the pages of what was read. Runs as a process of its own:

    python -m bench.reference.minimal MOUNTPOINT [--timeout SECONDS] [--many N] [--keep-cache]
"""

from __future__ import annotations

import argparse
import errno
import os
import stat
import sys
from collections.abc import Sequence

import pyfuse3
from pyfuse3 import (
    EntryAttributes,
    FileHandleT,
    FileInfo,
    FileNameT,
    FUSEError,
    InodeT,
    ReaddirToken,
    RequestContext,
    SetattrFields,
)

from bench.reference.serving import serve

#: what an agent called ``NAME`` has, as far as the bench looks
FILES = {"status": b"new\n", "exec": b"true\n", "meta.json": b"{}\n"}
WRITABLE = "meta.json"


class Minimal(pyfuse3.Operations):
    """``agent/bench.d/`` with three files, and ``many/`` with N empty ones."""

    supports_dot_lookup = False
    enable_writeback_cache = False

    def __init__(self, timeout: float, many: int, *, keep_cache: bool) -> None:
        super().__init__()
        self._keep_cache = keep_cache
        self._timeout = timeout
        self._names: dict[int, dict[bytes, int]] = {pyfuse3.ROOT_INODE: {}}
        self._data: dict[int, bytes] = {}
        self._writable: set[int] = set()
        self._next = int(pyfuse3.ROOT_INODE) + 1
        directory = self._add_directory(self._add_directory(pyfuse3.ROOT_INODE, "agent"), "bench.d")
        for name, data in FILES.items():
            number = self._add(directory, name)
            self._data[number] = data
            if name == WRITABLE:
                self._writable.add(number)
        crowd = self._add_directory(pyfuse3.ROOT_INODE, "many")
        for position in range(many):
            self._data[self._add(crowd, f"n{position}")] = b""

    def _add(self, parent: int, name: str) -> int:
        number = self._next
        self._next += 1
        self._names[parent][name.encode()] = number
        return number

    def _add_directory(self, parent: int, name: str) -> int:
        number = self._add(parent, name)
        self._names[number] = {}
        return number

    def _entry(self, inode: int) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = InodeT(inode)
        if inode in self._names:
            entry.st_mode = pyfuse3.ModeT(stat.S_IFDIR | 0o755)
        else:
            writable = 0o200 if inode in self._writable else 0
            entry.st_mode = pyfuse3.ModeT(stat.S_IFREG | 0o444 | writable)
            entry.st_size = len(self._data[inode])
        entry.st_nlink = 1
        entry.entry_timeout = entry.attr_timeout = self._timeout
        return entry

    async def lookup(
        self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        inode = self._names.get(parent_inode, {}).get(name)
        if inode is None:
            raise FUSEError(errno.ENOENT)
        return self._entry(inode)

    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        return self._entry(inode)

    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        if fields.update_size:
            self._data[inode] = self._data[inode][: attr.st_size]
        return self._entry(inode)

    async def open(self, inode: InodeT, flags: int, ctx: RequestContext) -> FileInfo:
        if flags & os.O_ACCMODE != os.O_RDONLY and inode not in self._writable:
            raise FUSEError(errno.EACCES)
        if flags & os.O_TRUNC:
            self._data[inode] = b""
        return FileInfo(fh=FileHandleT(inode), keep_cache=self._keep_cache)

    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        return self._data[fh][off : off + size]

    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        data = self._data[fh]
        self._data[fh] = data[:off].ljust(off, b"\0") + buf + data[off + len(buf) :]
        return len(buf)

    async def flush(self, fh: FileHandleT) -> None:
        """Answered, as a filesystem has to that reports errors at close(2)."""

    async def release(self, fh: FileHandleT) -> None:
        pass

    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        return FileHandleT(inode)

    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        entries = list(self._names[fh].items())
        for position in range(start_id, len(entries)):
            name, inode = entries[position]
            entry = self._entry(inode)
            if not pyfuse3.readdir_reply(token, FileNameT(name), entry, position + 1):
                break

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        pass


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.reference.minimal", description=__doc__.split("\n")[0]
    )
    parser.add_argument("point", metavar="MOUNTPOINT", help="an empty directory")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=0.0,
        help="how long the kernel may keep names and attributes (default: 0)",
    )
    parser.add_argument(
        "--many", metavar="N", type=int, default=0, help="files in many/ (default: 0)"
    )
    parser.add_argument(
        "--keep-cache", action="store_true", help="let the kernel keep pages beyond close(2)"
    )
    arguments = parser.parse_args(argv)
    operations = Minimal(arguments.timeout, arguments.many, keep_cache=arguments.keep_cache)
    serve(operations, arguments.point, "minimal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
