"""Programs of ours that do for the daemon what may take as long as an agent likes.

The daemon itself makes no system call that waits for what an agent holds. A helper makes it, in
the leaf ``helper``, with an empty environment, and is given up after a time. One that sleeps in
the kernel cannot be killed: so an owner has one of a kind, and others have theirs.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Final

import trio

from runtime.errors import KernelError, UnansweredError
from runtime.kernel import orders
from runtime.kernel.cgroups import Cgroup
from runtime.kernel.lanes import Lanes
from runtime.kernel.spawn import Process, Spawner, complaint

#: bytes of an answer
ANSWER_MAX: Final = 16 << 20
_AT_ONCE: Final = 1 << 16
#: bytes of a complaint that are told
_COMPLAINT_MAX: Final = 1000


class Helpers:
    """Starts helpers, waits for what they say, and kills those that do not say it in time."""

    def __init__(self, spawner: Spawner, nursery: trio.Nursery) -> None:
        self._spawner = spawner
        self._nursery = nursery
        self._turns = Lanes[tuple[int, str]]()

    async def ask(
        self,
        owner: int,
        kind: str,
        words: Sequence[str | Path],
        *,
        seconds: float,
        message: bytes | None = None,
        fds: Sequence[int | None] = (),
    ) -> bytes:
        """The answer of a helper on its standard output, at most ``ANSWER_MAX`` bytes; it finds a
        ``message`` at 3, and ``fds`` after it.

        An owner has one of a kind at a time. Its turn and its answer together may take so many
        ``seconds``; then, and if nobody waits for it any more, it gets SIGKILL, and keeps the
        turn until it is gone. ``UnansweredError``; ``KernelError`` with what it said, if it fails;
        ``OSError`` if it cannot be started.
        """
        turn = (owner, kind)
        with trio.move_on_after(seconds):
            await self._turns.enter(turn)
            gone = partial(self._turns.leave, turn)
            return await self.run(owner, kind, words, gone=gone, message=message, fds=fds)
        raise UnansweredError(f"{kind}: not done within {seconds:g} s: try again")

    async def tell(
        self, owner: int, kind: str, program: Path, *told: orders.Order, seconds: float
    ) -> bytes:
        """The answer of a program that finds at 3 all that it is to do."""
        message = orders.message(*told)
        return await self.ask(owner, kind, (program, "3"), seconds=seconds, message=message)

    async def run(
        self,
        owner: int,
        kind: str,
        words: Sequence[str | Path],
        *,
        gone: Callable[[], object],
        leaf: Cgroup | None = None,
        message: bytes | None = None,
        fds: Sequence[int | None] = (),
    ) -> bytes:
        """The answer of a helper that is started at once, in a leaf, for as long as somebody
        waits. ``gone`` is called when nothing of the helper is left, which may be later."""
        process = None
        try:
            with ExitStack() as stack:
                if message is not None:
                    file = orders.memory_file(kind, message)
                    stack.callback(os.close, file)
                    fds = [file, *fds]
                ends = [_pair(stack), _pair(stack)]
                said, complained = (ours for ours, _ in ends)
                theirs = [None, *(end.fileno() for _, end in ends), *fds]
                process = await self._spawner.start(
                    leaf or self._spawner.home, words, owner=owner, fds=theirs
                )
                for _, end in ends:
                    end.close()
                answer = await _heard(said, kind)
                status = await process.wait()
                if status != 0:
                    raise KernelError(_complaint(complained) or f"{kind} failed ({status})")
                return answer
        finally:
            if process is None or process.wait_now(0) is not None:
                gone()
            else:
                process.kill()
                self._nursery.start_soon(_bury, process, gone)


async def _bury(process: Process, gone: Callable[[], object]) -> None:
    await process.wait()
    gone()


def _pair(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    """(where the daemon listens, where a helper speaks): it waits when nobody listens."""
    ours, theirs = socket.socketpair()
    stack.enter_context(ours).setblocking(False)
    stack.enter_context(theirs)
    return ours, theirs


async def _heard(said: socket.socket, kind: str) -> bytes:
    answer = bytearray()
    while True:
        await trio.lowlevel.wait_readable(said)
        part = said.recv(_AT_ONCE)
        if not part:
            return bytes(answer)
        answer += part
        if len(answer) > ANSWER_MAX:
            raise KernelError(f"{kind}: an answer of more than {ANSWER_MAX} bytes")


def _complaint(complained: socket.socket) -> str:
    with suppress(OSError):
        return complaint(complained.recv(_COMPLAINT_MAX))
    return ""
