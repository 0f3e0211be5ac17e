"""Removing trees that agents made: renamed away at once, removed beside the event loop.

A tree may be as large and as deep as an agent liked to make it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
from pathlib import Path

import trio


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
            if not await self._find("-mindepth", "1", "-delete"):
                # without root, directories are closed to the daemon if agents closed them
                await self._find("-type", "d", "!", "-perm", "-700", "-exec", "chmod", "700",
                                 "{}", ";")
                await self._find("-mindepth", "1", "-delete")

    async def _find(self, *what: str) -> bool:
        done = await trio.run_process(
            ["find", str(self._directory), *what],
            check=False,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return done.returncode == 0
