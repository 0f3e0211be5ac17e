"""Removing trees that agents made: renamed away at once, removed beside the event loop.

A tree may be as large and as deep as an agent liked to make it: deeper than a path is
long, and than descriptors last. So what is deep in a tree is taken out of it first, and
emptied beside it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Final

import trio

#: entries that a thread removes before it can be left
_BATCH: Final = 2000
#: levels of a tree that are emptied from within it
_DEPTH: Final = 4
#: collects what is discarded in this time for one thread: a thread for each costs the loop more
_COLLECT_SECONDS: Final = 0.1


class Trash:
    """A directory on the same filesystem as what is discarded."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._wake = trio.Event()
        self._wake.set()  # for what an earlier daemon left

    def discard(self, path: Path) -> None:
        """Takes a file or tree away; one that is not there is fine."""
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, self._directory / secrets.token_hex(8))
            self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            #: what cannot be removed, until something is discarded again
            stuck: set[str] = set()
            while await trio.to_thread.run_sync(self._remove_some, stuck):
                pass
            await trio.sleep(_COLLECT_SECONDS)

    def _remove_some(self, stuck: set[str]) -> bool:
        """False if nothing is left but what is stuck."""
        left = _BATCH
        with _Directory(self._directory) as top:
            for name, is_directory in top.entries():
                if name in stuck:
                    continue
                if not is_directory:
                    done = top.unlink(name)
                else:
                    done, left = self._empty(top, top, name, left, _DEPTH)
                if not done:
                    stuck.add(name)
                left -= 1
                if left <= 0:
                    return True
            return any(name not in stuck for name, _ in top.entries())

    def _empty(
        self, top: _Directory, parent: _Directory, name: str, left: int, depth: int
    ) -> tuple[bool, int]:
        """Removes a directory, if no more than ``left`` entries were there, and what is left
        of those. What is deeper than ``depth``, or cannot be removed, it takes to the top."""
        try:
            parent.open_up(name)
            with _Directory(name, parent.fd) as directory:
                for entry, is_directory in directory.entries():
                    left -= 1
                    if left <= 0:
                        return True, 0
                    if not is_directory:
                        os.unlink(entry, dir_fd=directory.fd)
                        continue
                    done = False
                    if depth:
                        done, left = self._empty(top, directory, entry, left, depth - 1)
                        if left <= 0:
                            return True, 0
                    if not done:
                        directory.open_up(entry)
                        directory.move(entry, top)
            os.rmdir(name, dir_fd=parent.fd)
        except OSError:
            return False, left
        return True, left


class _Directory:
    """An open directory, not reached by a link."""

    def __init__(self, path: Path | str, parent: int | None = None) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self.fd = os.open(path, flags, dir_fd=parent)

    def __enter__(self) -> _Directory:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def entries(self) -> list[tuple[str, bool]]:
        """(name, whether it is a directory) of the first ones, as many as are removed at
        a time."""
        found = []
        with os.scandir(self.fd) as listing:
            for entry in listing:
                found.append((entry.name, entry.is_dir(follow_symlinks=False)))
                if len(found) > _BATCH:
                    break
        return found

    def open_up(self, name: str) -> None:
        """Without root, a directory is closed to the daemon if its agent closed it."""
        if os.geteuid() == 0:
            return
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=self.fd)
        try:
            os.chmod(f"/proc/self/fd/{fd}", 0o700)
        finally:
            os.close(fd)

    def move(self, name: str, to: _Directory) -> None:
        os.rename(name, secrets.token_hex(8), src_dir_fd=self.fd, dst_dir_fd=to.fd)

    def unlink(self, name: str) -> bool:
        try:
            os.unlink(name, dir_fd=self.fd)
        except OSError:
            return False
        return True
