"""Append-only histories: files to which whole lines are added and nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from runtime.store import Pending

_TAIL: Final = 1 << 21


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


class History:
    """Writes posted lines to their files below the state directory."""

    def __init__(self, state: Path) -> None:
        self._state = state

    def append(self, pending: Pending) -> None:
        """One line to its file, as a single append."""
        path = self._state / pending.path
        data = (pending.line + "\n").encode()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        try:
            _write_all(fd, data)
        finally:
            os.close(fd)

    def complete(self, pending: Pending) -> None:
        """Like ``append`` for a line of which an earlier daemon may have written some or all."""
        path = self._state / pending.path
        data = (pending.line + "\n").encode()
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(fd).st_size
            length = _TAIL + len(data)
            tail = os.pread(fd, length, max(0, size - length))
            if data in tail:
                return
            torn = tail.rpartition(b"\n")[2]
            # The lines of the outbox are in order, so a torn end is this line's beginning.
            written = len(torn) if torn and data.startswith(torn) else 0
            _write_all(fd, data[written:])
        finally:
            os.close(fd)

    def sync(self, path: str) -> None:
        fd = os.open(self._state / path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
