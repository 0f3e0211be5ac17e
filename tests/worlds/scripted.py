"""A lead that says what a test says to a real daemon, over its socket as ``ctx peer`` does."""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from runtime.peers.lease import Grants
from runtime.peers.peering import (
    PART_LEAST,
    Acknowledged,
    Bytes,
    Event,
    Grown,
    Hello,
    Lead,
    Message,
    Over,
    Want,
)
from runtime.peers.streams import Stream
from runtime.peers.talking import now
from tests.worlds.daemon import TIMEOUT, Daemon

_PIECE: Final = 1 << 16


class ScriptedLead:
    """A registration at a host, with what the lead's disk has of it. It speaks while a test waits,
    and connects again if the host has closed."""

    def __init__(self, host: Daemon, name: str = "one", lease: float = 5.0) -> None:
        self.host = host
        self.name = name
        self.lease = lease
        self.known = ""
        self.stream = Stream()
        self.grants = Grants(lease, 10.0, now())
        self.facts: list[dict[str, Any]] = []
        self.hello: dict[str, Any] = {}
        #: what the host may want, and what came of what it has: by agent and file
        self.files: dict[tuple[str, str], bytes] = {}
        self.came: dict[tuple[str, str], bytes] = defaultdict(bytes)
        self.grown: dict[tuple[str, str], int] = {}
        self.overs: list[int] = []
        #: called when the host is gone
        self.lost: Callable[[], object] = lambda: time.sleep(0.1)
        self._socket: socket.socket | None = None

    def connect(self) -> None:
        self.close()
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(TIMEOUT)
        made.connect(str(self.host.runtime / "ctxd.sock"))
        made.sendall(b'{"op":"peer"}\n')
        said: dict[str, Any] = {"as": self.known, "name": self.name, "owner": "any"}
        said |= {"ttl": self.lease, "grace": 5.0}
        self.peering = Lead(said, self.stream, self.grants)
        self._socket = made

    def close(self) -> None:
        """The host is not answered any more."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def say(self, op: str, agent: str, **said: Any) -> None:
        self.stream.record(op, agent, **said)

    def want(self, agent: str, file: str, size: int) -> None:
        self.peering.want(agent, file, len(self.came[agent, file]), size)

    def until(self, is_so: Callable[[], object], what: str = "", timeout: float = TIMEOUT) -> None:
        """Speaks until something is so."""
        end = time.monotonic() + timeout
        while not is_so():
            if time.monotonic() > end:
                raise AssertionError(f"{what or 'it'} is not so: {self.facts[-5:]}")
            try:
                self._speak()
            except OSError:
                self.close()
                self.lost()

    def _speak(self) -> None:
        if self._socket is None:
            self.connect()
        assert self._socket is not None
        while data := self.peering.outgoing():
            self._socket.sendall(data)
        self._socket.settimeout(0.05)
        with suppress(TimeoutError):
            data = self._socket.recv(_PIECE)
            if not data:
                raise ConnectionResetError
            for event in self.peering.feed(data, now()):
                self._hear(event)
        self._socket.settimeout(TIMEOUT)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Hello):
            self.hello = dict(event.said)
            if self.peering.fits(event):
                self.peering.go_on(event)
            else:
                assert not self.known, "the host does not know it any more"
                self.known = event.said["as"]
                self.peering.go_on(event, new=(self.stream, self.grants))
        elif isinstance(event, Message):
            self.stream.done(event.number, event.line)
            self.facts.append({key: event.said[key] for key in event.said if key != "n"})
        elif isinstance(event, Want):
            data = self.files[event.agent, event.file][event.offset :][: event.credit]
            for at in range(0, len(data), PART_LEAST):
                piece = data[at : at + PART_LEAST]
                self.peering.give(event.agent, event.file, event.offset + at, piece)
        elif isinstance(event, Bytes):
            self.came[event.agent, event.file] += event.data
        elif isinstance(event, Grown):
            self.grown[event.agent, event.file] = event.length
        elif isinstance(event, Over):
            self.overs.append(event.upto)
        else:
            assert isinstance(event, Acknowledged)

    def told(self, op: str, agent: str) -> list[dict[str, Any]]:
        return [fact for fact in self.facts if fact["op"] == op and fact["agent"] == agent]

    def statuses(self, agent: str) -> list[str]:
        return [fact["status"] for fact in self.told("state", agent)]

    def ended(self, agent: str, timeout: float = TIMEOUT) -> dict[str, Any]:
        """How an agent ended, once."""
        self.until(lambda: self.told("dead", agent), f"{agent} is dead", timeout)
        (ended,) = self.told("ended", agent)
        return ended
