"""Sockets at paths: longer than an address, and where something was left."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from runtime.kernel import unixsockets


def test_a_path_may_be_longer_than_an_address(tmp_path: Path) -> None:
    (directory := tmp_path / ("d" * 120)).mkdir()
    with unixsockets.listen(directory / "s", unixsockets.PACKETS) as listening:
        with unixsockets.connect(directory / "s") as made:
            made.send(b"one")
            made.send(b"two")
        peer, _ = listening.accept()
        with peer:
            assert (peer.recv(10), peer.recv(10)) == (b"one", b"two")


def test_a_socket_that_was_left_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "s"
    unixsockets.listen(path).close()
    with unixsockets.listen(path), socket.socket(socket.AF_UNIX) as made:
        made.connect(str(path))
    path.unlink()
    path.write_text("kept")
    with pytest.raises(OSError, match="in use"):
        unixsockets.listen(path)
    assert path.read_text() == "kept"
