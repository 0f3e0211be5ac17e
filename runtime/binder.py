"""Binding sockets on the filesystem by a process of its own (binder.c says why)."""

from __future__ import annotations

import array
import os
import socket
import subprocess
from pathlib import Path
from typing import Final

import trio

_ANSWER_MAX: Final = 16


class Binder:
    """The helper process. It ends when ``close`` is called or the daemon dies."""

    def __init__(self, program: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = subprocess.Popen(
                [str(program), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={},
            )
        finally:
            theirs.close()
        self._channel = trio.socket.from_stdlib_socket(ours)
        self._one_at_a_time = trio.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def bind(self, directory: Path, name: str) -> socket.socket:
        """A listening socket bound to ``name``; ``OSError`` of what failed."""
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
        return socket.socket(fileno=fds[0])

    def close(self) -> None:
        self._channel.close()
        self._process.wait()
