"""A service manager, as what it starts sees it: a socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.kernel.systemd import notify
from tests.worlds.daemon import TIMEOUT


@contextmanager
def service_manager(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """One for this process: the socket at which it is told."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(path / "notify"))
        listening.settimeout(TIMEOUT)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path / "notify"))
        yield listening


def fill(manager: socket.socket) -> int:
    """Tells it as much as its queue holds; how many times."""
    # longer than any queue is here (net.unix.max_dgram_qlen)
    for told in range(3 * 512):
        if not notify("STATUS=filled"):
            return told
    pytest.fail("the queue of the socket has no end")
