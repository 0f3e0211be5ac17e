"""A viewer of a terminal, without the client: it types, and has what it was shown."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from tests.worlds.daemon import TIMEOUT, Daemon, wait_until


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


#: says what it is told, a line at a time
_ECHOES = "sh -c 'stty -echo; echo ready; while read -r x; do echo got $x; done'"


def echoing(stack: ExitStack, daemon: Daemon, *names: str) -> list[Viewer]:
    """Agents that say what they are told, each with a viewer that it ends with."""
    viewers = []
    for name in names:
        daemon.make(name, _ECHOES, tty="80x24")
        viewers.append(stack.enter_context(Viewer(daemon, name, start=True, hangup=True)))
        viewers[-1].wait_for("ready\r\n")
    return viewers


class Typing:
    """Somebody at each of some terminals, of programs that say what they are told: all type a
    number, and the next one when all have seen the last. ``latest`` is the longest that they waited
    for that, in seconds."""

    def __init__(self, viewers: Sequence[Viewer]) -> None:
        self._viewers = viewers
        self.typed = 0
        self.latest = 0.0
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._over.wait(0.005):  # people are slower
                self._type(self.typed + 1)
                self.typed += 1
        except BaseException as error:
            self._failure = error

    def _type(self, number: int) -> None:
        begun = time.monotonic()
        for viewer in self._viewers:
            viewer.enter(f"{number}\n")
        for viewer in self._viewers:
            while not viewer.shown.endswith(b"\n"):
                assert viewer.see(), f"the end ({viewer.over}) at {number}"
            assert viewer.shown == b"got %d\r\n" % number
            viewer.shown = b""
        self.latest = max(self.latest, time.monotonic() - begun)

    def go_on(self, times: int) -> None:
        """Returns when all have typed so many more."""
        enough = self.typed + times
        wait_until(lambda: self.typed >= enough or self._failure, f"all type: {self._failure}")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(TIMEOUT)
        if self._failure is not None:
            raise self._failure

    @property
    def echoed(self) -> str:
        """All that each of the programs has written."""
        return "ready\r\n" + "".join(f"got {number + 1}\r\n" for number in range(self.typed))
