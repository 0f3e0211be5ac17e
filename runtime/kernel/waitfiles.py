"""Waiting for an end without the daemon: FIFOs on a tmpfs of its own (fifo(7)).

The kernel blocks a process that opens one for reading. At the end the FIFO is replaced by an empty
file, and a program of ours (release.c) lets its readers go: the daemon opens no FIFO that others
have open. Each owner has a program of his own, which leaves behind a few FIFOs of each family of
agents that somebody holds: others do not wait for what holds up one. The names cannot be guessed
and the directory cannot be listed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from pathlib import Path
from typing import Final

import trio

from runtime.errors import CtxError
from runtime.ids import WaitFileName
from runtime.kernel import orders
from runtime.kernel.helpers import Helpers
from runtime.kernel.inotify import Wakeup

log = logging.getLogger("ctxd.waitfiles")

_RETRY_SECONDS: Final = 1.0
#: a reader may have looked the FIFO up before it was replaced and open it after
_KEPT_SECONDS: Final = 1.0
#: the program ends by itself earlier, also if there is always something to do
_SECONDS: Final = 30.0


class WaitFiles:
    """The ``wait`` files of all agents, by token; in ``released``, the program of each owner finds
    those whose readers it is to let go."""

    def __init__(self, directory: Path, released: Path, program: Path) -> None:
        self._directory = directory
        self._released = released
        self._program = program
        #: owner and family
        self._whose: dict[WaitFileName, tuple[int, int]] = {}
        #: whose program there is
        self._served: set[int] = set()
        self._wake = Wakeup()
        self._wake.notify()  # an earlier daemon may have left some

    def path(self, token: WaitFileName) -> Path:
        return self._directory / token

    def create(self, token: WaitFileName, owner: int, family: int, *, over: bool = False) -> None:
        """A FIFO that blocks its readers. What an earlier daemon left is kept, but not a file of
        an end that is not ``over``: the state is one of before it. A ``family`` is a number of
        those agents who may hold each other's."""
        self._whose[token] = owner, family
        path = self.path(token)
        try:
            os.mkfifo(path)
        except FileExistsError:
            if over or _is_fifo(path):
                return
            path.unlink()
            os.mkfifo(path)
        # written by nobody: a stranger's open for writing would release the waiters
        os.chmod(path, 0o444)

    def release(self, token: WaitFileName) -> None:
        """Lets all readers go, those that are just opening it too; idempotent."""
        path = self.path(token)
        if not _is_fifo(path):
            return
        temporary = path.with_name(f"{token}.ended")
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o444))
        self._let_go(token)
        os.replace(temporary, path)

    def remove(self, token: WaitFileName) -> None:
        path = self.path(token)
        if _is_fifo(path):
            self._let_go(token)
        path.unlink(missing_ok=True)
        self._whose.pop(token, None)

    def _let_go(self, token: WaitFileName) -> None:
        """Gives it to the program with the time of that, from which the program counts. A rename
        into another directory would take a lock of the whole filesystem."""
        # what is left of no agent is nobody else's
        owner, family = self._whose.get(token, (os.geteuid(), 0))
        released = self._released_of(owner)
        released.mkdir(exist_ok=True)
        now = time.monotonic_ns() // 1_000_000
        with contextlib.suppress(FileExistsError):
            os.link(self.path(token), released / f"{family}.{now}.{token}")
        self._wake.notify()

    def _released_of(self, owner: int) -> Path:
        return self._released / str(owner)

    def keep(self, tokens: set[WaitFileName]) -> None:
        """Removes what belongs to no agent any more."""
        for name in map(WaitFileName, os.listdir(self._directory)):
            if name not in tokens:
                self.remove(name)
        # nor by who owns it: without root that is the uid of all agents
        self._directory.chmod(0o311)

    def released(self) -> list[int]:
        """The owners whose programs have something to do."""
        owners = map(int, os.listdir(self._released))
        return [owner for owner in owners if self._any_released(owner)]

    def _any_released(self, owner: int) -> bool:
        # what begins with a dot is the program's own
        return any(name[0] != "." for name in os.listdir(self._released_of(owner)))

    def command(self, owner: int, kept: float = _KEPT_SECONDS) -> list[str]:
        """Lets those go whose end has come, and whoever comes within so many seconds."""
        return orders.words(self._program, self._released_of(owner), int(1000 * kept))

    async def run(self, helpers: Helpers) -> None:
        """Has the programs let readers go, whenever there may be any."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._wake.wait_changed()
                for owner in set(self.released()) - self._served:
                    self._served.add(owner)
                    nursery.start_soon(self._serve, helpers, owner)

    async def _serve(self, helpers: Helpers, owner: int) -> None:
        while self._any_released(owner):
            try:
                words = self.command(owner)
                await helpers.ask(owner, "release", words, seconds=_SECONDS)
            except (CtxError, OSError) as error:
                log.error("who waits for an end waits longer: %s", error)
                await trio.sleep(_RETRY_SECONDS)
        self._served.discard(owner)


def _is_fifo(path: Path) -> bool:
    """Whether it is there, and was not released."""
    try:
        return stat.S_ISFIFO(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False
