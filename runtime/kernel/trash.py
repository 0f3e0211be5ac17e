"""Removing trees: their names are free at once, and a program of ours removes them.

They are renamed in the directory where they are. A rename into another directory takes a lock of
the whole filesystem, which an agent that renames in a durable tree may hold.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Final

import trio

from runtime.errors import CtxError
from runtime.kernel.inotify import Wakeup
from runtime.kernel.walker import Removed, Walker

log = logging.getLogger("ctxd.trash")

#: collects what is discarded in this time for one program
_COLLECT_SECONDS: Final = 0.1
_RETRY_SECONDS: Final = 30.0
#: trees that one program removes
_AT_ONCE: Final = 1000


class Trash:
    """Below ``trash`` in the state, with a directory for each owner: marks, links whose text says
    where the tree now is, from the state."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._directory = state / "trash"
        #: of each owner, by their marks, the trees that are to be removed
        self._left: dict[int, dict[Path, str]] = {}
        self._removing: set[int] = set()
        self._wake = Wakeup()

    def discard(self, path: Path, owner: int) -> None:
        """Takes a file or tree in the state away; one that is not there is fine."""
        if not os.path.lexists(path):
            return  # and leaves no mark
        hidden = path.with_name(f".{secrets.token_hex(8)}")
        tree = str(hidden.relative_to(self._state))
        mark = self._directory / str(owner) / hidden.name
        with suppress(OSError):  # a full disk: only a daemon that dies now forgets the tree
            mark.parent.mkdir(mode=0o700, exist_ok=True)
            mark.symlink_to(tree)
        with suppress(FileNotFoundError):  # a program of an earlier daemon has just removed it
            os.rename(path, hidden)
        self._left.setdefault(owner, {})[mark] = tree
        self._wake.notify()

    async def run(self, walker: Walker) -> None:
        self._find_left()
        async with trio.open_nursery() as nursery:
            while True:
                for owner in self._left.keys() - self._removing:
                    self._removing.add(owner)
                    nursery.start_soon(self._remove, walker, owner)
                await self._wake.wait_changed()
                await trio.sleep(_COLLECT_SECONDS)

    def _find_left(self) -> None:
        """Finds what an earlier daemon left; older ones had the trees themselves here."""
        for path in self._directory.iterdir():
            if path.name.isdigit() and len(path.name) < 16:
                marks = {mark: os.readlink(mark) for mark in path.iterdir()}
                self._left.setdefault(int(path.name), {}).update(marks)
            else:
                self._left.setdefault(0, {})[path] = f"{self._directory.name}/{path.name}"

    async def _remove(self, walker: Walker, owner: int) -> None:
        """Until all of an owner's is gone, or what is left cannot be removed."""
        marks = self._left[owner]
        try:
            while marks:
                trees = dict(itertools.islice(marks.items(), _AT_ONCE))
                try:
                    done = await walker.remove(owner, list(trees.values()))
                except (CtxError, OSError) as error:
                    log.warning("what uid %d discarded is not removed yet: %s", owner, error)
                    done = []
                for mark, how in zip(trees, done, strict=False):
                    if how is Removed.DONE:
                        mark.unlink(missing_ok=True)
                    if how is not Removed.MORE:
                        del marks[mark]
                if not done:
                    # the others do not wait for the one that somebody holds
                    held = next(iter(trees))
                    marks[held] = marks.pop(held)
                    await trio.sleep(_RETRY_SECONDS)
            del self._left[owner]
        finally:
            self._removing.discard(owner)
            self._wake.notify()
