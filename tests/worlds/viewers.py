"""A viewer of a terminal, without the client: it types, and has what it was shown."""

from __future__ import annotations

import contextlib
import json
import socket
from types import TracebackType
from typing import Any, Self

from tests.worlds.daemon import TIMEOUT, Daemon


def ask(daemon: Daemon, **fields: Any) -> tuple[dict[str, Any], list[int]]:
    """One operation of the daemon's socket: the answer, and the descriptors that came with it.
    ``OSError`` if the daemon dies before."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT)
        connection.connect(str(daemon.runtime / "ctxd.sock"))
        connection.sendall(json.dumps(fields).encode() + b"\n")
        data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 4)
    if not data:
        raise ConnectionResetError("the daemon has ended")
    return json.loads(data), fds


class Viewer:
    """``said`` is the answer. A refusal is a ``PermissionError`` with its code and its sentence."""

    def __init__(self, daemon: Daemon, agent: str, **fields: Any) -> None:
        self.said, fds = ask(daemon, op="terminal", agent=agent, **fields)
        if self.said["type"] == "error":
            raise PermissionError(f"{self.said['code']}: {self.said['message']}")
        self.end = socket.socket(fileno=fds[0])
        self.end.settimeout(TIMEOUT)
        #: output, notices, and how it ended
        self.shown, self.notices, self.over = b"", list[str](), ""

    def enter(self, text: str) -> None:
        self.end.send(b"i" + text.encode())

    def leave(self) -> None:
        self.end.send(b"d")
        self.end.close()

    def see(self) -> bool:
        """Takes one packet; False at the end."""
        packet = b""
        with contextlib.suppress(ConnectionResetError):
            packet = self.end.recv(1 << 14)
        kind, rest = packet[:1], packet[1:]
        if kind in (b"o", b"t"):
            self.shown += rest
        elif kind == b"n":
            self.notices.append(rest.decode())
        elif kind == b"x":
            self.over = rest.decode()
        return bool(packet)

    def wait_for(self, text: str) -> None:
        """Until it was shown; what comes after is looked for the next time."""
        while text.encode() not in self.shown:
            assert self.see(), f"{self.shown!r} and the end ({self.over}), and no {text!r}"
        self.shown = self.shown.partition(text.encode())[2]

    def wait_notice(self, text: str) -> None:
        while text not in self.notices:
            assert self.see(), f"the end ({self.over}), and no {text!r}"

    def wait_over(self) -> str:
        while self.see():
            pass
        return self.over

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end.close()
