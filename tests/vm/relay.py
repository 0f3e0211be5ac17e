"""What leads from one machine to the ctxd of another, for much less work than ssh(1) is where it is
emulated.

    relay.py ADDRESS PORT     its standard input and output are a connection there
    relay.py PORT SOCKET      leads each connection to ctxd's socket, as ctx peer does
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable

_PIECE = 1 << 16


def _copy(take: Callable[[int], bytes], give: Callable[[bytes], object]) -> None:
    with contextlib.suppress(OSError):
        while data := take(_PIECE):
            give(data)


def _copy_and_end(take: Callable[[int], bytes], give: Callable[[bytes], object]) -> None:
    _copy(take, give)
    os._exit(0)


def _join(address: str, port: str) -> None:
    made = socket.create_connection((address, int(port)), 10)
    made.settimeout(None)
    for take, give in (
        (lambda size: os.read(0, size), made.sendall), (made.recv, lambda data: os.write(1, data))
    ):  # fmt: skip
        threading.Thread(target=_copy_and_end, args=(take, give)).start()


def _lead(made: socket.socket, path: str) -> None:
    with made, socket.socket(socket.AF_UNIX) as own, contextlib.suppress(OSError):
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        own.connect(path)
        own.sendall(b'{"op":"peer"}\n')
        back = threading.Thread(target=_copy, args=(own.recv, made.sendall))
        back.start()
        _copy(made.recv, own.sendall)
        own.shutdown(socket.SHUT_RDWR)
        back.join()


def _serve(port: str, path: str) -> None:
    listener = socket.create_server(("", int(port)))
    while True:
        made, _ = listener.accept()
        threading.Thread(target=_lead, args=(made, path)).start()


if __name__ == "__main__":
    (_serve if sys.argv[1].isdigit() else _join)(*sys.argv[1:])
