"""Sockets with a path that keep packets apart (SOCK_SEQPACKET in unix(7))."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def listen(path: Path) -> int:
    """A socket that listens there; what connects before somebody takes it over waits."""
    path.unlink(missing_ok=True)
    with _made() as made, _short(path) as address:
        made.bind(address)
        made.listen()
        return made.detach()


def connect(path: Path) -> socket.socket:
    """A socket that never waits; ``OSError``: nobody listens there, or too many wait."""
    with _short(path) as address:
        made = _made()
        try:
            made.connect(address)
        except BaseException:
            made.close()
            raise
        return made


def _made() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A shorter path of the same file: sun_path holds 108 bytes."""
    held = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{held}/{path.name}"
    finally:
        os.close(held)
