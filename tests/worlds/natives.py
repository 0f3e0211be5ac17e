"""Programs of ours that are run as they are, without cgroups and without a launcher."""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import trio

from runtime.authority.disk import Disk
from runtime.cell.cell import native
from runtime.kernel.helpers import Helpers
from runtime.kernel.spawn import Process
from runtime.kernel.walker import Walker

#: above what a program is given
_ASIDE = 100


class _Spawner:
    home = None

    async def start(
        self, leaf: None, words: Sequence[str | Path], *, owner: int, fds: Sequence[int | None]
    ) -> Process:
        null = os.open(os.devnull, os.O_RDWR)
        aside = [fcntl.fcntl(null if fd is None else fd, fcntl.F_DUPFD_CLOEXEC, _ASIDE)
                 for fd in fds]  # fmt: skip
        try:
            actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(aside)]
            return Process(os.posix_spawn(words[0], [*map(str, words)], {}, file_actions=actions))
        finally:
            for fd in (null, *aside):
                os.close(fd)


class _Nursery:
    start_soon = staticmethod(trio.lowlevel.spawn_system_task)


class Children(Helpers):
    """Helpers that are children of the test."""

    def __init__(self) -> None:
        super().__init__(cast(Any, _Spawner()), cast(Any, _Nursery()))


def walker_of(top: Path) -> Walker:
    """Walks below a directory."""
    return Walker(Children(), native("walk"), top)


async def measure_all(disk: Disk, state: Path) -> None:
    """What every owner has, now."""
    for each in disk._measures.values():
        each.ended = -math.inf
    async with trio.open_nursery() as nursery:
        await disk._survey(walker_of(state), nursery)
    await disk._note_room()
