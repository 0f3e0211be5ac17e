"""Waiting for an end without the daemon: FIFOs on a tmpfs of its own (fifo(7)).

The kernel blocks a process that opens one for reading. At the end the FIFO is
replaced by an empty file and the old one opened for writing, which lets its
readers go. The names cannot be guessed and the directory cannot be listed.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

import trio

from runtime.ids import WaitFileName
from runtime.kernel.handover import Descriptors

#: A reader may have looked the FIFO up before it was replaced and open it after: pauses before
#: the release is repeated.
_REPEAT_SECONDS: Final = (0.1, 0.2, 0.7)


class WaitFiles:
    """The ``wait`` files of all agents, by token."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._released: list[int] = []
        #: those of which the release is being repeated
        self._due: list[int] = []
        self._wake = trio.Event()

    def path(self, token: WaitFileName) -> Path:
        return self._directory / token

    def create(self, token: WaitFileName) -> None:
        """A FIFO that blocks its readers; one left by an earlier daemon is kept."""
        with contextlib.suppress(FileExistsError):
            os.mkfifo(self.path(token))
            # written by nobody: a stranger's open for writing would release the waiters
            os.chmod(self.path(token), 0o444)

    @staticmethod
    def _make_empty(path: Path) -> None:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o444))

    def release(self, token: WaitFileName) -> None:
        """Lets all readers go, those that are just opening it too; idempotent."""
        path = self.path(token)
        held = self._hold(path)
        if held is None:
            return
        temporary = path.with_name(f"{token}.ended")
        self._make_empty(temporary)
        os.replace(temporary, path)
        self._let_go(held)

    def remove(self, token: WaitFileName) -> None:
        path = self.path(token)
        held = self._hold(path)
        path.unlink(missing_ok=True)
        if held is not None:
            self._let_go(held)

    @staticmethod
    def _hold(path: Path) -> int | None:
        """The FIFO, which somebody may read; None if it was released, or is not there."""
        try:
            if not stat.S_ISFIFO(os.lstat(path).st_mode):
                return None
            return os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None

    def _let_go(self, held: int) -> None:
        self._nudge(held)
        self._released.append(held)
        self._wake.set()

    def keep(self, tokens: set[WaitFileName]) -> None:
        """Removes what belongs to no agent any more."""
        for name in map(WaitFileName, os.listdir(self._directory)):
            if name not in tokens:
                self.remove(name)

    @staticmethod
    def _nudge(held: int) -> None:
        path, flags = f"/proc/self/fd/{held}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
        # ENXIO: nobody reads
        with contextlib.suppress(OSError):
            try:
                fd = os.open(path, flags)
            except PermissionError:  # modes count for a daemon without root; it has no name now
                os.chmod(path, 0o600)
                fd = os.open(path, flags)
            os.close(fd)

    async def run(self) -> None:
        """Repeats the release for readers that were between look-up and open."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            self._due, self._released = self._released, []
            for seconds in _REPEAT_SECONDS:
                await trio.sleep(seconds)
                for held in self._due:
                    self._nudge(held)
            for held in self._due:
                os.close(held)
            self._due = []

    def save(self, descriptors: Descriptors) -> list[int]:
        """The FIFOs whose release is repeated, for the next daemon."""
        return [descriptors.keep(held) for held in (*self._due, *self._released)]

    def restore(self, saved: list[int]) -> None:
        self._released += saved
        if saved:
            self._wake.set()
