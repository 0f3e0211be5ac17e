"""What somebody sends closes as slowly as he likes, and holds up nobody for it."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from runtime.kernel import linux

#: how long closing what is sent takes, in seconds
SLOW = 20


@pytest.fixture(autouse=True)
def as_before_linux_6_16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(linux, "_refuses_descriptors", lambda: False)
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    yield
    signal.signal(signal.SIGALRM, before)


def sent(number: int) -> socket.socket:
    """Where somebody has sent so many connections that nobody else has, and whose peers read
    nothing of what they are sent."""
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener, theirs:
        for _ in range(number):
            with socket.create_connection(listener.getsockname()) as connection:
                peers.append(listener.accept()[0])
                connection.setblocking(False)
                while True:
                    try:
                        connection.send(bytes(1 << 16))
                    except BlockingIOError:
                        break
                connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, SLOW))
                socket.send_fds(theirs, [b"x"], [connection.fileno()])
                # the one that was sent is the last
                os.close(connection.detach())
    return ours


#: that do not read
peers: list[socket.socket] = []


@pytest.mark.parametrize("number", [1, 8])
@pytest.mark.parametrize("end", [
    pytest.param(lambda connection: os.read(connection.fileno(), 4096), id="read"),
    pytest.param(lambda connection: connection.close(), id="closed"),
])
def test_what_was_sent_closes_at_once(
    number: int, end: Callable[[socket.socket], object]
) -> None:
    connection = sent(number)
    begun = time.monotonic()
    with linux.hurried(), connection:
        end(connection)
    assert time.monotonic() - begun < SLOW / 4
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    while peers:
        peers.pop().close()
