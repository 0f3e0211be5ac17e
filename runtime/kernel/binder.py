"""Binding sockets on the filesystem by a process of its own (binder.c says why)."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import trio

from runtime.kernel import orders
from runtime.kernel.cgroups import Cgroup
from runtime.kernel.spawn import Spawner

log = logging.getLogger("ctxd.binder")

_ANSWER_MAX: Final = 16
#: the connection of the filesystem to the daemon, which ends, or begins anew: nobody waits then
_GONE: Final = (errno.ECONNABORTED, errno.ENOTCONN)


class Binder:
    """The helper process. It ends when ``close`` is called or the daemon dies; when somebody
    kills it, another one is started for the next question."""

    def __init__(self, program: Path, spawner: Spawner, cgroup: Cgroup) -> None:
        self._words = (program, "3")
        self._spawner = spawner
        self._cgroup = cgroup
        self._one_at_a_time = trio.Lock()
        #: is called when it is about to ask the filesystem for something
        self.asking: Callable[[], None] = lambda: None
        with self._connected() as fds:
            self._process = spawner.start_now(cgroup, self._words, fds=fds)

    @contextmanager
    def _connected(self) -> Iterator[list[int | None]]:
        """The descriptors that a helper is handed, to be asked over a channel."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            yield [None, None, 2, theirs.fileno()]

    @property
    def pid(self) -> int:
        return self._process.pid

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """While no answer is waited for, and nothing is asked."""
        async with self._one_at_a_time:
            yield

    async def bind(self, directory: Path, name: str) -> socket.socket:
        """A listening socket bound to ``name``; ``OSError`` of what failed."""
        made = await self._ask(directory, name)
        assert made is not None
        return socket.socket(fileno=made)

    async def wait_answering(self, directory: Path) -> None:
        """Until the filesystem that a directory is on answers; ``OSError``."""
        await self._ask(directory, "")

    async def _ask(self, directory: Path, name: str) -> int | None:
        request = orders.message(directory, name)
        self.asking()
        async with self._one_at_a_time:
            # not cancelled between question and answer: the next one would get it
            with trio.CancelScope(shield=True):
                answer = await self._answer(request)
                if answer is None:
                    await self._begin_another()
                    answer = await self._answer(request)
        data, fds = answer or (str(errno.EPIPE).encode(), [])
        error = int(data)
        if error in _GONE:
            await trio.sleep_forever()
        if error:
            raise OSError(error, os.strerror(error), f"{directory}/{name}")
        return fds[0] if fds else None

    async def _answer(self, request: bytes) -> tuple[bytes, list[int]] | None:
        """An errno and the descriptor that came with it; None if the helper is gone."""
        try:
            self._channel.send(request)
            await trio.lowlevel.wait_readable(self._channel)
            data, fds, _, _ = socket.recv_fds(self._channel, _ANSWER_MAX, 1)
        except (BrokenPipeError, ConnectionResetError):
            return None
        return (data, fds) if data else None

    async def _begin_another(self) -> None:
        log.warning("the binder is gone: starting another one")
        self._channel.close()
        await self._process.wait()
        with self._connected() as fds:
            self._process = await self._spawner.start(
                self._cgroup, self._words, owner=os.getuid(), fds=fds
            )

    def close(self) -> None:
        self._channel.close()
        self._process.wait_now()
