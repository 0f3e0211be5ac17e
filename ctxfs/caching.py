"""The kernel's caches: what it may keep, and when it must forget.

Attributes and most names are kept until they change. Forgetting attributes
never blocks, and is done at once, in the request that changes them.

Names need no forgetting. The kernel would have to lock their directory for it,
and a process that waits for that waits for every request on the directory. An
inode whose object is gone is answered with ESTALE, and its attributes are
forgotten: the kernel then walks the path again, and asks for each name anew
(LOOKUP_REVAL). Names that not everybody may see are never kept, and neither
are those of an agent that may still turn private. Names that went are told in
addition, by a thread that nobody waits for: for the few calls that do not walk
again, such as inotify_add_watch(2), and so that the kernel's memory is free again.

The kernel does not know an inode before the process that looked it up has run on after the reply.
What is to be forgotten meanwhile is told again until the kernel knows the inode, or has dropped it:
it would keep attributes of before the change.

Pages are kept of public values. Forgetting them may wait for a read of one in progress, which the
event loop has to answer: so a thread does it, and the writer waits for that thread, but not for
long.

Pages of a value that can be polled are exact in three ways. Its attributes are forgotten in the
step that changes it; its time is that of the change, so that a kernel which asks for the
attributes drops the pages itself (FUSE_AUTO_INVAL_DATA); and pollers are told when the thread is
done. That thread waits for reads in progress, so none of them fills a page behind it. The kernel
cuts what it reads into pages to the size that it was told: so such a read gets the value of which
the kernel was told the size, which is an older one if the read began before the change.

One hole is the kernel's: it takes a new size and drops the pages of before in two steps. Who reads
between them, while another reader that began before the change has just filled a page, gets that
page cut to the new size, or with zeros. The next read is right.

Nothing is kept of values that change by themselves, and no pages of what may turn private: the
kernel serves pages to every process with a descriptor, even if it lost its rights. Sockets are
looked up each time, since connect(2) does not walk again. Below a private name, everything is kept
again.

Pages are kept only for those who open a value that has lasted for a second. A read that pages
answer does not come to the daemon, which so takes the open for the first read. If poll(2) reports
the same version twice, the reader was answered from a page that another reader had filled: the
page is dropped once more.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

import pyfuse3
import trio

from runtime.authority.loop import Batches
from runtime.kernel.handover import Descriptors, Handed

#: seconds; as good as forever, because every change is told
FOREVER: Final = 3600.0
#: a writer waits no longer than this for the kernel to forget pages
NOTIFICATION_SECONDS: Final = 0.25
#: seconds after which the kernel is told again of an inode that it did not know, at first and at
#: most; and how often
_AGAIN_SECONDS: Final = (0.001, 1.0)
_AGAIN: Final = 64
#: removed names that wait to be told to the kernel; any more are not told
_NAMES_MAX: Final = 4096

#: seconds for which a value that can be polled has to last before its pages are kept. What
#: changes more often is read from the daemon: two changes within one read would show the value
#: of one with the size of the other.
STEADY_SECONDS: Final = 1.0
#: seconds between two times that pollers are told of what changes often
_OFTEN_SECONDS: Final = 0.1

#: inodes that are told to the kernel in one step, when it has to forget all
_AT_ONCE: Final = 256

#: a process in poll(2)
Waiter = pyfuse3.PollHandle


class Poller(Handed):
    """Versions of the files that poll(2) works on, and who waits for the next."""

    HANDED = ("_versions", "_again")

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}
        #: by inode, and there by the open file: the kernel asks anew at each poll(2)
        self._waiting: dict[int, dict[int, Waiter]] = {}
        #: changed, and not told yet
        self._again: set[int] = set()
        self._some_again = trio.Event()

    def version(self, inode: int) -> int:
        return self._versions.get(inode, 0)

    def is_awaited(self, inode: int) -> bool:
        """Whether somebody waits for its next version."""
        return inode in self._waiting

    def wait(self, inode: int, file: int, handle: Waiter) -> None:
        self._waiting.setdefault(inode, {})[file] = handle

    def closed(self, inode: int, file: int) -> None:
        """The open file is gone, and so are the processes that polled it."""
        waiting = self._waiting.get(inode)
        if waiting is not None and waiting.pop(file, None) is not None and not waiting:
            del self._waiting[inode]

    def changed(self, inode: int) -> None:
        self._versions[inode] = self.version(inode) + 1
        for handle in self._waiting.pop(inode, {}).values():
            with suppress(OSError):
                handle.notify()

    def changed_again(self, inode: int) -> None:
        """Pollers of a file that changes often are told soon, at most ten times a second."""
        self._again.add(inode)
        self._some_again.set()

    async def run(self) -> None:
        while True:
            await self._some_again.wait()
            self._some_again = trio.Event()
            again, self._again = self._again, set()
            for inode in again:
                self.changed(inode)
            await trio.sleep(_OFTEN_SECONDS)

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        """Everybody who waits is woken once, and the kernel asks anew."""
        for waiting in self._waiting.values():
            for handle in waiting.values():
                with suppress(OSError):
                    handle.notify()
        self._waiting.clear()
        return super().save(descriptors)

    def restore(self, saved: Mapping[str, Any]) -> None:
        super().restore(saved)
        self._some_again.set()


class Cache(Handed):
    """Tells the kernel what to forget. Inert until the filesystem is mounted."""

    #: what the kernel knows and keeps
    HANDED = ("_known", "_paged", "_told", "_early")

    def __init__(self) -> None:
        self.mounted = False
        self.poller = Poller()
        #: how often each inode was told to the kernel, which knows no others
        self._known: Counter[int] = Counter()
        self._paged: set[int] = set()
        #: values that can be polled, as of when the kernel was told their sizes
        self._told: dict[int, bytes] = {}
        #: of these the kernel did not know when their attributes were to be forgotten
        self._early: set[int] = set()
        self._some_early = trio.Event()
        self._pages = Batches[tuple[int, bool]](_forget_pages, self._tell_pollers)
        self._names = Batches[tuple[int, str]](_forget_names)

    async def idle(self) -> None:
        """Returns when no thread tells the kernel anything."""
        while not self.is_idle:
            await self._pages.idle()
            await self._names.idle()

    @property
    def is_idle(self) -> bool:
        return self._pages.is_idle and self._names.is_idle

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        """With an idle cache."""
        return {
            **super().save(descriptors),
            "pages": self._pages.waiting,
            "names": self._names.waiting,
            "poller": self.poller.save(descriptors),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        super().restore(saved)
        for inode, polled in saved["pages"]:
            self._pages.add((inode, polled))
        for parent, name in saved["names"]:
            self._names.add((parent, name))
        self._some_early.set()
        self.poller.restore(saved["poller"])

    async def distrust(self, is_ours: Callable[[int], bool]) -> None:
        """Has the kernel ask for all inodes of this kind anew: another program may show them
        otherwise. Who polls is told nothing, for nothing has changed."""
        for number, inode in enumerate(list(self._known)):
            if is_ours(inode):
                self.forget_attributes(inode)
                self.drop_pages(inode)
            if number % _AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        self.forget_attributes(pyfuse3.ROOT_INODE)

    def note_known(self, inode: int) -> None:
        """The kernel is told of this inode once more (FUSE_LOOKUP and its like)."""
        self._known[inode] += 1

    def note_listed(self, inodes: Iterable[int]) -> None:
        """The kernel is told of each of these inodes once more (FUSE_READDIRPLUS)."""
        self._known.update(inodes)

    def note_forgotten(self, inode: int, count: int) -> None:
        """The kernel dropped it so many times (FUSE_FORGET)."""
        self._known[inode] -= count
        if self._known[inode] <= 0:
            del self._known[inode]
            self._paged.discard(inode)
            self._told.pop(inode, None)

    def is_known(self, inode: int) -> bool:
        """Whether the kernel was told of this inode and has not dropped it."""
        return inode in self._known

    def _knows(self, inode: int) -> bool:
        return self.mounted and (inode in self._known or inode == pyfuse3.ROOT_INODE)

    def forget_attributes(self, inode: int) -> None:
        if self._knows(inode) and not _forget_attributes(inode):
            self._early.add(inode)
            self._some_early.set()

    def forget_attributes_of(self, inodes: Iterable[int]) -> None:
        """Forgets the attributes of many inodes, few of which the kernel knows."""
        known = self._known
        for inode in inodes:
            if inode in known:
                self.forget_attributes(inode)

    def forget_pages(self, inodes: Iterable[int]) -> None:
        """Attributes at once, pages soon; ``settled`` waits for them."""
        known, paged = self._known, self._paged
        if not self.mounted:
            return
        for inode in inodes:
            if inode not in known and inode not in paged and inode != pyfuse3.ROOT_INODE:
                continue  # most of them
            self.forget_attributes(inode)
            if inode in paged:
                paged.discard(inode)
                self._pages.add((inode, False))

    def forget_polled(self, inode: int) -> None:
        """Forgets attributes and pages of a value that can be polled; pollers are told once no
        page is left."""
        self.forget_attributes(inode)
        if self.mounted and inode in self._paged:
            # and it stays there: somebody may be about to read into a page, not knowing yet
            self._pages.add((inode, True))
        else:
            self.poller.changed(inode)

    def drop_pages(self, inode: int) -> None:
        """Has the next read come here, although nothing changed."""
        if self.mounted and inode in self._paged:
            self._pages.add((inode, False))

    def _tell_pollers(self, gone: set[tuple[int, bool]]) -> None:
        for inode, polled in gone:
            if polled:
                self.poller.changed(inode)

    def note_pages(self, inode: int) -> None:
        """The kernel is given pages of this inode, which it may keep."""
        self._paged.add(inode)

    def note_told(self, inode: int, value: bytes) -> None:
        """The kernel is told the size of a value whose pages it may keep."""
        self._told[inode] = value

    def told(self, inode: int) -> bytes | None:
        """The value that fits the size which the kernel was told last; None if it was not."""
        return self._told.get(inode)

    def forget_name(self, parent: int, name: str, inode: int) -> None:
        """A name whose inode is gone. Nobody waits for it, and nothing depends on it."""
        if self._knows(inode) and len(self._names) < _NAMES_MAX:
            self._names.add((parent, name))

    def mark(self) -> int:
        """For ``settled``: the present, before a change."""
        return self._pages.added

    async def settled(self, since: int) -> None:
        """Returns when no page is left that was to be forgotten since a ``mark``.

        At most ``NOTIFICATION_SECONDS`` later in any case.
        """
        if self._pages.added == since:
            return
        with trio.move_on_after(NOTIFICATION_SECONDS):
            await self._pages.wait(since)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._names.run)
            nursery.start_soon(self._pages.run)
            nursery.start_soon(self._forget_again)
            nursery.start_soon(self.poller.run)

    async def _forget_again(self) -> None:
        """Has the kernel forget the attributes of inodes that it did not know yet."""
        while True:
            await self._some_early.wait()
            pause, longest = _AGAIN_SECONDS
            for _ in range(_AGAIN):
                await trio.sleep(pause)
                pause = min(2 * pause, longest)
                self._early = {
                    inode
                    for inode in self._early
                    if self._knows(inode) and not _forget_attributes(inode)
                }
                if not self._early:
                    break
            # of what is left the kernel has failed to make an inode
            self._early.clear()
            self._some_early = trio.Event()


def _forget_attributes(inode: int) -> bool:
    """False if the kernel does not know the inode, or not yet."""
    try:
        pyfuse3.invalidate_inode(pyfuse3.InodeT(inode), attr_only=True)
    except OSError as error:
        return error.errno != errno.ENOENT
    return True


def _forget_pages(inodes: set[tuple[int, bool]]) -> None:
    for inode, _ in inodes:
        # ENOENT: the kernel does not know the inode
        with suppress(OSError):
            pyfuse3.invalidate_inode(pyfuse3.InodeT(inode), attr_only=False)


def _forget_names(names: set[tuple[int, str]]) -> None:
    for parent, name in names:
        # ENOENT: the kernel does not know the name
        with suppress(OSError):
            pyfuse3.invalidate_entry(pyfuse3.InodeT(parent), pyfuse3.FileNameT(name.encode()))
