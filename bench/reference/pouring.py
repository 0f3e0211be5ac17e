"""A link that only carries: bytes that are poured into it by the command of a real one.

    python -m bench.reference.pouring SOCKET BYTES

listens as ctxd does, greets ``ctx peer`` as a host would, and then says nothing but bytes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

_PIECE: Final = 128 << 10
_GREETING: Final = b"ctxfs-peer 1 1\n"


def pour(path: Path, size: int) -> None:
    """For one connection after the other."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        while True:
            connection, _ = listening.accept()
            with connection:
                if not connection.recv(_PIECE):
                    continue  # somebody looks whether it listens
                connection.sendall(_GREETING)
                for begin in range(0, size, _PIECE):
                    connection.sendall(bytes(min(_PIECE, size - begin)))


def take(command: list[str], file: Path, size: int) -> None:
    """What a reader of the command does at least: reads it all, and writes it to a file."""
    ours, theirs = socket.socketpair()
    with ours, subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno()) as process:
        theirs.close()
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            left = size + len(_GREETING)
            while left and (data := os.read(ours.fileno(), _PIECE)):
                os.write(fd, data)
                left -= len(data)
        finally:
            os.close(fd)
            process.kill()
    file.unlink()
    if left:
        raise RuntimeError(f"{left} bytes did not come through {command}")


if __name__ == "__main__":
    pour(Path(sys.argv[1]), int(sys.argv[2]))
