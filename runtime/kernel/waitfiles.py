"""Waiting for an end without the daemon: FIFOs on a tmpfs of its own (fifo(7)).

The kernel blocks a process that opens one for reading. At the end the FIFO is replaced by an empty
file, and a program of ours (release.c) lets its readers go: the daemon opens no FIFO that others
have open. The names cannot be guessed and the directory cannot be listed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from pathlib import Path
from typing import Final

import trio

from runtime.errors import CtxError
from runtime.ids import WaitFileName
from runtime.kernel import orders
from runtime.kernel.helpers import Helpers

log = logging.getLogger("ctxd.waitfiles")

_RETRY_SECONDS: Final = 1.0
#: a reader may have looked the FIFO up before it was replaced and open it after
_KEPT_SECONDS: Final = 1.0
#: the program ends by itself earlier, also if there is always something to do
_SECONDS: Final = 30.0


class WaitFiles:
    """The ``wait`` files of all agents, by token; ``released`` is where the program finds those
    whose readers it is to let go."""

    def __init__(self, directory: Path, released: Path, program: Path) -> None:
        self._directory = directory
        self._released = released
        self._program = program
        self._wake = trio.Event()
        self._wake.set()  # an earlier daemon may have left some

    def path(self, token: WaitFileName) -> Path:
        return self._directory / token

    def create(self, token: WaitFileName) -> None:
        """A FIFO that blocks its readers; one left by an earlier daemon is kept."""
        with contextlib.suppress(FileExistsError):
            os.mkfifo(self.path(token))
            # written by nobody: a stranger's open for writing would release the waiters
            os.chmod(self.path(token), 0o444)

    def release(self, token: WaitFileName) -> None:
        """Lets all readers go, those that are just opening it too; idempotent."""
        path = self.path(token)
        if not _is_fifo(path):
            return
        temporary = path.with_name(f"{token}.ended")
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o444))
        self._let_go(path)
        os.replace(temporary, path)
        self._wake.set()

    def remove(self, token: WaitFileName) -> None:
        path = self.path(token)
        if _is_fifo(path):
            self._let_go(path)
            self._wake.set()
        path.unlink(missing_ok=True)

    def _let_go(self, path: Path) -> None:
        """A rename into another directory would take a lock of the whole filesystem."""
        with contextlib.suppress(FileExistsError):
            os.link(path, self._released / path.name)

    def keep(self, tokens: set[WaitFileName]) -> None:
        """Removes what belongs to no agent any more."""
        for name in map(WaitFileName, os.listdir(self._directory)):
            if name not in tokens:
                self.remove(name)

    @property
    def any_released(self) -> bool:
        """Whether the program has something to do."""
        return bool(os.listdir(self._released))

    def command(self, kept: float = _KEPT_SECONDS) -> list[str]:
        """Lets those go whose end has come, and whoever comes within so many seconds."""
        return orders.words(self._program, self._released, int(1000 * kept))

    async def run(self, helpers: Helpers) -> None:
        """Has the program let readers go, whenever there may be any."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self.any_released:
                try:
                    words = self.command()
                    await helpers.ask(os.geteuid(), "release", words, seconds=_SECONDS)
                except (CtxError, OSError) as error:
                    log.error("who waits for an end waits longer: %s", error)
                    await trio.sleep(_RETRY_SECONDS)


def _is_fifo(path: Path) -> bool:
    """Whether it is there, and was not released."""
    try:
        return stat.S_ISFIFO(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False
