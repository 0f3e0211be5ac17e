"""The other side of a link, which says whatever a test has it say: a host, or a lead."""

from __future__ import annotations

import json
import secrets
import select
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from tests.worlds.daemon import MARK, TIMEOUT, Daemon

#: what a lead executes: it copies both ways between its own input and output and a socket
_BRIDGE: Final = """\
import os, select, socket, sys
s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])
while True:
    for f in select.select([0, s], [], [])[0]:
        try: data = os.read(0, 65536) if f == 0 else s.recv(65536)
        except ConnectionError: data = b""
        if not data: os._exit(0)
        try: s.sendall(data) if f == 0 else os.write(1, data)
        except BrokenPipeError: sys.exit()
"""


#: bytes of a file in one frame
_PART_MAX: Final = 48 << 10


class Wire:
    """One connection. ``heard`` has all that came; messages are acknowledged."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.settimeout(TIMEOUT)
        self._rest = b""
        self.heard: list[dict[str, Any]] = []
        self._looked = 0
        #: of the last message of this side
        self.number = 0
        self.acknowledges = True
        #: that this side, as a host, has given its lead
        self.known = ""
        #: of the other side
        self.hello: dict[str, Any] = {}

    def line(self) -> bytes:
        """The next line; empty at the end."""
        while b"\n" not in self._rest:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                return b""
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        return line + b"\n"

    def is_told(self) -> bool:
        """Whether something has come that nobody has read."""
        return bool(self._rest or select.select([self.socket], [], [], 0)[0])

    def say(self, op: str, **said: Any) -> None:
        self.raw(json.dumps({"op": op, **said}).encode() + b"\n")

    def raw(self, data: bytes) -> None:
        with suppress(ConnectionError):
            self.socket.sendall(data)

    def tell(self, op: str, agent: str, **said: Any) -> int:
        """A numbered message."""
        self.number += 1
        self.say(op, n=self.number, agent=agent, **said)
        return self.number

    def next(self) -> dict[str, Any] | None:
        """The next frame; of ``bytes`` with its data."""
        if not (line := self.line()):
            return None
        said: dict[str, Any] = json.loads(line)
        if said["op"] == "bytes" and said["length"]:
            while len(self._rest) < said["length"]:
                self._rest += self.socket.recv(1 << 16)
            said["data"], self._rest = self._rest[: said["length"]], self._rest[said["length"] :]
        if "n" in said and self.acknowledges:
            self.say("ack", got=said["n"])
        self.heard.append(said)
        return said

    def until(self, is_it: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The next frame that is it, of those that no earlier call has looked at."""
        while True:
            while self._looked < len(self.heard):
                self._looked += 1
                if is_it(self.heard[self._looked - 1]):
                    return self.heard[self._looked - 1]
            assert self.next() is not None, f"the connection is over; came: {self.heard[-5:]}"

    def op(self, *ops: str) -> dict[str, Any]:
        return self.until(lambda said: said["op"] in ops)


class FalseHost:
    """Whatever a lead reaches with ``command``."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "s"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self.path.chmod(0o666)
        self._listener.listen()
        self._listener.settimeout(TIMEOUT)

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-ISc", _BRIDGE, str(self.path)]

    def accept(self) -> Wire:
        return Wire(self._listener.accept()[0])

    def meet(self, **more: Any) -> Wire:
        """The next connection, which is open."""
        wire = self.accept()
        wire.raw(b"ctxfs-peer 1 %d\n" % more.get("version", 1))
        wire.hello = wire.op("hello")
        wire.known = more.get("as", secrets.token_hex(16))
        wire.say("hello", **{
            "version": 1, "as": wire.known, "alias": "one", "node": "false", "boot": "b", "sent": 0,
            "got": 0, "seen": "", "lease_max": 3600, "networks": [], "shared": [],
            "product": "0", **more})  # fmt: skip
        wire.say("ask", ask=1)
        return wire

    def close(self) -> None:
        self._listener.close()


@contextmanager
def false_host() -> Iterator[FalseHost]:
    with tempfile.TemporaryDirectory(prefix=f"{MARK}-", dir="/tmp") as directory:
        Path(directory).chmod(0o755)
        host = FalseHost(Path(directory))
        try:
            yield host
        finally:
            host.close()


@contextmanager
def false_lead(host: Daemon, **more: Any) -> Iterator[Wire]:
    """A connection as of ctx peer, which is open."""
    with socket.socket(socket.AF_UNIX) as made:
        made.connect(str(host.runtime / "ctxd.sock"))
        wire = Wire(made)
        wire.raw(b'{"op":"peer"}\n')
        assert wire.line() == b"ctxfs-peer 1 3\n"
        wire.say("hello", **{
            "version": 1, "as": "", "name": "one", "owner": "root", "ttl": 30.0, "grace": 5.0,
            "sent": 0, "got": 0, "seen": "", **more})  # fmt: skip
        wire.hello = wire.op("hello")
        yield wire


def give(wire: Wire, agent: str, file: str, data: bytes) -> None:
    """What the other side wants of a file of an agent."""
    end = 0
    while end < len(data):
        want = wire.until(lambda said: said["op"] == "want" and said["file"] == file)
        begin, end = want["offset"], want["offset"] + want["credit"]
        for offset in range(begin, min(end, len(data)), _PART_MAX):
            part = data[offset : min(offset + _PART_MAX, end)]
            frame = {"op": "bytes", "agent": agent, "file": file, "offset": offset}
            wire.raw(json.dumps({**frame, "length": len(part)}).encode() + b"\n" + part)
