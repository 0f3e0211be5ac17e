"""Removing trees that agents made: renamed away at once, removed by a program of ours."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from pathlib import Path
from typing import Final

import trio

from runtime.errors import CtxError
from runtime.kernel.walker import Removed, Walker

log = logging.getLogger("ctxd.trash")

#: collects what is discarded in this time for one program
_COLLECT_SECONDS: Final = 0.1
_RETRY_SECONDS: Final = 30.0


class Trash:
    """A directory on the same filesystem as what is discarded, with one for each owner."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        #: owners of what is to be removed
        self._full: set[int] = set()
        self._removing: set[int] = set()
        self._wake = trio.Event()

    def discard(self, path: Path, owner: int) -> None:
        """Takes a file or tree away; one that is not there is fine."""
        if not self._has_place(owner):
            owner = 0  # a full disk has no room for one more directory
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, self._directory / str(owner) / secrets.token_hex(8))
            self._full.add(owner)
            self._wake.set()

    def _has_place(self, owner: int) -> bool:
        try:
            (self._directory / str(owner)).mkdir(mode=0o700)
        except FileExistsError:
            return True
        except OSError:
            return False
        return True

    async def run(self, walker: Walker) -> None:
        self._find_left()
        async with trio.open_nursery() as nursery:
            while True:
                for owner in self._full - self._removing:
                    self._removing.add(owner)
                    nursery.start_soon(self._remove, walker, owner)
                await self._wake.wait()
                self._wake = trio.Event()
                await trio.sleep(_COLLECT_SECONDS)

    def _find_left(self) -> None:
        """What an earlier daemon left; older ones had no directories of owners."""
        self._has_place(0)
        for path in list(self._directory.iterdir()):
            if path.name.isdigit() and len(path.name) < 16:
                self._full.add(int(path.name))
            else:
                self.discard(path, 0)

    async def _remove(self, walker: Walker, owner: int) -> None:
        """Until all of an owner's is gone, or what is left cannot be removed."""
        try:
            while owner in self._full:
                self._full.discard(owner)
                try:
                    done = await walker.remove(owner, f"{self._directory.name}/{owner}")
                except (CtxError, OSError) as error:
                    log.warning("what uid %d discarded is not removed yet: %s", owner, error)
                    self._full.add(owner)
                    await trio.sleep(_RETRY_SECONDS)
                    continue
                if done is Removed.MORE:
                    self._full.add(owner)
        finally:
            self._removing.discard(owner)
            self._wake.set()
