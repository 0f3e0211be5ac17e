"""The kernel's caches: what it may keep, and when it must forget.

Attributes and names are kept until they change; the pages of a control file
too. Forgetting attributes never blocks and is done at once. Forgetting pages
may wait for a read in progress, and forgetting a name for whatever holds the
lock of its directory: the event loop has to answer both, so they are done in
worker threads. Two of them: a request on the directory itself may wait for
pages, but never for a name.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import pyfuse3
import trio

log = logging.getLogger("ctxd.cache")

#: seconds; as good as forever, because every change is told
FOREVER: Final = 3600.0


class Poller:
    """Versions of the files that poll(2) works on, and who waits for the next."""

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}
        #: by inode, and there by the open file: the kernel asks anew at each poll(2)
        self._waiting: dict[int, dict[int, pyfuse3.PollHandle]] = {}

    def version(self, inode: int) -> int:
        return self._versions.get(inode, 0)

    def wait(self, inode: int, file: int, handle: pyfuse3.PollHandle) -> None:
        self._waiting.setdefault(inode, {})[file] = handle

    def closed(self, inode: int, file: int) -> None:
        """The open file is gone, and whoever polled it."""
        waiting = self._waiting.get(inode)
        if waiting is not None and waiting.pop(file, None) is not None and not waiting:
            del self._waiting[inode]

    def changed(self, inode: int) -> None:
        self._versions[inode] = self.version(inode) + 1
        for handle in self._waiting.pop(inode, {}).values():
            with suppress(OSError):
                handle.notify()


class Cache:
    """Tells the kernel what to forget. Inert until the filesystem is mounted."""

    def __init__(self) -> None:
        self.mounted = False
        self.poller = Poller()
        #: how often each inode was told to the kernel, which knows no others
        self._known: Counter[int] = Counter()
        self._paged: set[int] = set()
        self._pages: set[int] = set()
        self._wake = trio.Event()
        self._clean = trio.Event()
        self._clean.set()
        self._names: set[tuple[int, str]] = set()
        self._names_wake = trio.Event()
        self._names_clean = trio.Event()
        self._names_clean.set()

    def note_known(self, inode: int) -> None:
        """The kernel is told of this inode once more (FUSE_LOOKUP and its like)."""
        self._known[inode] += 1

    def note_forgotten(self, inode: int, count: int) -> None:
        """The kernel dropped it so many times (FUSE_FORGET)."""
        self._known[inode] -= count
        if self._known[inode] <= 0:
            del self._known[inode]

    def forget_attributes(self, inode: int) -> None:
        if self.mounted and (inode in self._known or inode == pyfuse3.ROOT_INODE):
            with suppress(OSError):
                pyfuse3.invalidate_inode(pyfuse3.InodeT(inode), attr_only=True)

    def forget_pages(self, inodes: Iterable[int]) -> None:
        """Attributes at once, pages soon; ``settled`` waits for them."""
        for inode in inodes:
            self.forget_attributes(inode)
            if self.mounted and inode in self._paged:
                self._paged.discard(inode)
                self._pages.add(inode)
        if self._pages:
            self._clean = trio.Event() if self._clean.is_set() else self._clean
            self._wake.set()

    def note_pages(self, inode: int) -> None:
        """The kernel is given pages of this inode, which it may keep."""
        self._paged.add(inode)

    def forget_name(self, parent: int, name: str) -> None:
        """Soon; ``names_settled`` waits for it."""
        if self.mounted:
            self._names.add((parent, name))
            if self._names_clean.is_set():
                self._names_clean = trio.Event()
            self._names_wake.set()

    async def settled(self) -> None:
        """Returns when no stale page is left in the kernel."""
        await self._clean.wait()

    async def names_settled(self) -> None:
        """Returns when no stale name is left in the kernel.

        Never in a request that holds the lock of a directory.
        """
        await self._names_clean.wait()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run_names)
            while True:
                await self._wake.wait()
                self._wake = trio.Event()
                pages, self._pages = self._pages, set()
                await trio.to_thread.run_sync(_forget_pages, pages)
                if not self._pages:
                    self._clean.set()

    async def _run_names(self) -> None:
        while True:
            await self._names_wake.wait()
            self._names_wake = trio.Event()
            names, self._names = self._names, set()
            # It may hang on a directory when the filesystem goes: then it is left behind.
            await trio.to_thread.run_sync(_forget_names, names, abandon_on_cancel=True)
            if not self._names:
                self._names_clean.set()


def _forget_pages(inodes: set[int]) -> None:
    for inode in inodes:
        # ENOENT: the kernel does not know the inode
        with suppress(OSError):
            pyfuse3.invalidate_inode(pyfuse3.InodeT(inode), attr_only=False)


def _forget_names(names: set[tuple[int, str]]) -> None:
    for parent, name in names:
        # ENOENT: the kernel does not know the name
        with suppress(OSError):
            pyfuse3.invalidate_entry(pyfuse3.InodeT(parent), pyfuse3.FileNameT(name.encode()))
