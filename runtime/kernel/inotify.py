"""Waiting for files to change: one inotify(7) descriptor for the whole daemon.

The kernel reports changes of ``cgroup.events`` this way too (cgroups(7)), so
that neither exits nor emptiness need polling.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import trio

from runtime.kernel import linux


class Wakeup:
    """Something to wait on; may stand for several files and for other causes too.

    Any number of tasks wait for it to be as they want it (``until``, ``after``); one of them may
    leave it to the wakeup to know which changes it has seen (``wait_changed``).
    """

    def __init__(self) -> None:
        #: how often those who wait were told
        self.count = 0
        self._seen = 0
        self._waiting = trio.lowlevel.ParkingLot()
        #: by so many
        self._held = 0

    def notify(self) -> None:
        if not self._held:
            self.count += 1
            if self._waiting:
                self._waiting.unpark_all()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Returns when it is so: looks now, and after each change."""
        while not is_so():
            await self._waiting.park()
            while self._held:  # since it was told
                await self._waiting.park()

    async def after(self, count: int) -> None:
        """Returns when there is a change that is not among so many."""
        await trio.lowlevel.checkpoint()
        await self.until(lambda: self.count != count)

    async def wait_changed(self) -> None:
        """Returns at once if there was a change since the last return."""
        await self.after(self._seen)
        self._seen = self.count

    def hold(self) -> None:
        """Has whoever waits do so until ``let_go``, and look then."""
        self._held += 1

    def let_go(self) -> None:
        self._held -= 1
        self.notify()


class Watcher:
    """Hands the events of one inotify descriptor to those who wait for them."""

    def __init__(self) -> None:
        self._fd = linux.inotify_init()
        self._watched: dict[int, list[Wakeup]] = {}

    @contextmanager
    def watching(self, path: Path | str, wakeup: Wakeup) -> Iterator[None]:
        """Notifies ``wakeup`` whenever ``path`` is modified; ``OSError`` if it is not there."""
        watch = self._begin(path, wakeup)
        try:
            yield
        finally:
            self._end(watch, wakeup)

    @contextmanager
    def watching_present(self, wakeup: Wakeup, *paths: Path | str) -> Iterator[None]:
        """Notifies ``wakeup`` whenever one of several files is modified, as far as they are
        there."""
        watches: list[int] = []
        try:
            for path in paths:
                with suppress(OSError):
                    watches.append(self._begin(path, wakeup))
            yield
        finally:
            for watch in watches:
                self._end(watch, wakeup)

    def _begin(self, path: Path | str, wakeup: Wakeup) -> int:
        watch = linux.inotify_add_watch(self._fd, path, linux.IN_MODIFY)
        self._watched.setdefault(watch, []).append(wakeup)
        return watch

    def _end(self, watch: int, wakeup: Wakeup) -> None:
        waiting = self._watched.get(watch)
        if waiting is not None:
            waiting.remove(wakeup)
            if not waiting:
                del self._watched[watch]
                # EINVAL: the file went away, and its watch with it
                with suppress(OSError):
                    linux.inotify_rm_watch(self._fd, watch)

    async def run(self) -> None:
        """Serves until cancelled."""
        while True:
            await trio.lowlevel.wait_readable(self._fd)
            for watch, mask in linux.parse_inotify(os.read(self._fd, 65536)):
                if mask & linux.IN_Q_OVERFLOW:
                    self._notify_all()
                    continue
                # That the file is gone is a change too.
                for wakeup in self._watched.get(watch, ()):
                    wakeup.notify()
                if mask & linux.IN_IGNORED:
                    self._watched.pop(watch, None)

    def _notify_all(self) -> None:
        """The kernel's queue was full: whatever it dropped, everybody looks again.

        A watch whose IN_IGNORED was dropped remains until the task that waits for it releases it.
        """
        for waiting in self._watched.values():
            for wakeup in waiting:
                wakeup.notify()

    def close(self) -> None:
        os.close(self._fd)
