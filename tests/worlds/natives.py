"""Programs of ours that are run as they are, without cgroups and without a daemon."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import trio

from runtime.cell.cell import native
from runtime.errors import KernelError, OverTimeError
from runtime.kernel.walker import Walker


class Children:
    """Helpers that are children of the test; their descriptors are as they are told."""

    async def ask(
        self,
        owner: int,
        kind: str,
        words: Sequence[str | Path],
        *,
        seconds: float,
        fds: Sequence[int | None] = (),
    ) -> bytes:
        moved = [str(word) for word in words]
        given = [fd for fd in fds if fd is not None]
        if given:  # those that it would find from 3 on come after its directory
            moved[5 : 5 + len(given)] = [str(fd) for fd in given]
        with trio.move_on_after(seconds):
            done = await trio.run_process(
                moved, capture_stdout=True, capture_stderr=True, check=False, env={}, pass_fds=given
            )
            if done.returncode:
                raise KernelError((done.stderr or b"").decode())
            return done.stdout or b""
        raise OverTimeError(f"{kind}: not done")


def walker_of(top: Path) -> Walker:
    """Walks below a directory."""
    return Walker(Children(), native("walk"), top)
