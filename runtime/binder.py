"""Binding sockets on the filesystem by a process of its own (binder.c says why)."""

from __future__ import annotations

import array
import os
import socket
from pathlib import Path
from typing import Final

import trio

from runtime.cgroups import Cgroup
from runtime.spawn import Spawner

_ANSWER_MAX: Final = 16


class Binder:
    """The helper process. It ends when ``close`` is called or the daemon dies."""

    def __init__(self, program: Path, spawner: Spawner, cgroup: Cgroup) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = spawner.start_now(
                cgroup, [program, "3"], fds=[None, None, 2, theirs.fileno()]
            )
        self._channel = trio.socket.from_stdlib_socket(ours)
        self._one_at_a_time = trio.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def bind(self, directory: Path, name: str) -> socket.socket:
        """A listening socket bound to ``name``; ``OSError`` of what failed."""
        made = await self._ask(directory, name)
        assert made is not None
        return socket.socket(fileno=made)

    async def wait_answering(self, directory: Path) -> None:
        """Until the filesystem that a directory is on answers; ``OSError``."""
        await self._ask(directory, "")

    async def _ask(self, directory: Path, name: str) -> int | None:
        request = os.fsencode(directory) + b"\0" + name.encode() + b"\0"
        async with self._one_at_a_time:
            # not cancelled between question and answer: the next one would get it
            with trio.CancelScope(shield=True):
                await self._channel.send(request)
                data, ancillary, _, _ = await self._channel.recvmsg(
                    _ANSWER_MAX, socket.CMSG_SPACE(array.array("i").itemsize)
                )
        error = int(data or b"32")  # nothing: the helper is gone, EPIPE
        if error:
            raise OSError(error, os.strerror(error), f"{directory}/{name}")
        fds = array.array("i")
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(content[: fds.itemsize])
        return fds[0] if fds else None

    def close(self) -> None:
        self._channel.close()
        self._process.wait_now()
