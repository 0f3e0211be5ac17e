"""Unix sockets with a path of any length (unix(7))."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

#: keeps packets apart, and never waits
PACKETS: Final = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK


def listen(path: Path, kind: int = socket.SOCK_STREAM, backlog: int = 128) -> socket.socket:
    """A socket that listens there, in place of one that was left there; what connects before
    somebody takes it over waits."""
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
    with socket.socket(socket.AF_UNIX, kind) as made, _short(path) as address:
        made.bind(address)
        made.listen(backlog)
        return socket.socket(fileno=made.detach())


def connect(path: Path) -> socket.socket:
    """A socket of packets; ``OSError``: nobody listens there, or too many wait."""
    with _short(path) as address:
        made = socket.socket(socket.AF_UNIX, PACKETS)
        try:
            made.connect(address)
        except BaseException:
            made.close()
            raise
        return made


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A shorter path of the same file: sun_path holds 108 bytes."""
    held = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{held}/{path.name}"
    finally:
        os.close(held)
