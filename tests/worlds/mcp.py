"""What ``ctx mcp`` says, checked by the published schemas, and a client that speaks to it."""

from __future__ import annotations

import json
import os
import random
import select
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import IO, Any

import mcp_types.methods as schemas
from pydantic import TypeAdapter

MODERN = "2026-07-28"
LEGACY = ("2025-11-25", "2025-06-18")
META = "io.modelcontextprotocol/"
ABOUT = {"name": "test", "version": "1"}
TIMEOUT = 30.0

Message = dict[str, Any]


@cache
def _adapter(model: Any) -> TypeAdapter[Any]:
    return TypeAdapter(model)


def check(message: Message, method: str, version: str) -> None:
    """One line of a server: the answer of a request for ``method``, or a notification."""
    assert message["jsonrpc"] == "2.0"
    assert "id" not in message or isinstance(message["id"], str | int)
    if "method" in message:
        assert message.keys() <= {"jsonrpc", "method", "params"}, "a server asks for nothing"
        _adapter(schemas.SERVER_NOTIFICATIONS[message["method"], version]).validate_python(message)
    elif "error" in message:
        assert message.keys() <= {"jsonrpc", "id", "error"}
        error = message["error"]
        assert isinstance(error["code"], int) and isinstance(error["message"], str)
        assert not -32019 <= error["code"] <= -32000
    else:
        assert message.keys() == {"jsonrpc", "id", "result"}
        _adapter(schemas.SERVER_RESULTS[method, version]).validate_python(message["result"])
        assert ("resultType" in message["result"]) is (version == MODERN)


def meta(version: str = MODERN, **more: Any) -> Message:
    return {
        f"{META}protocolVersion": version,
        f"{META}clientCapabilities": {},
        f"{META}clientInfo": ABOUT,
        **more,
    }


def request(
    ident: str | int,
    method: str,
    version: str,
    params: Mapping[str, Any] | None = None,
    **more: Any,
) -> Message:
    """As a client of this version asks; ``more`` is for ``_meta``."""
    about = meta(**more) if version == MODERN else more
    body = {**(params or {}), **({"_meta": about} if about else {})}
    return {"jsonrpc": "2.0", "id": ident, "method": method, "params": body}


def initialize(version: str) -> Message:
    params = {"protocolVersion": version, "capabilities": {}, "clientInfo": ABOUT}
    return {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}


def hostile_lines(seed: int, count: int, names: Sequence[str] = ()) -> Iterator[bytes]:
    """Random ones, and ordinary ones that are damaged at random; ``names`` are of tools."""
    chance = random.Random(seed)
    values: list[Any] = [
        *(None, True, 0, -1, 1.5, 2**70, "", "x", "\ud800", "a\0b", "../..", [], {}, [[]]),
        *("initialize", "tools/list", "tools/call", "notifications/cancelled", {"_meta": 1}),
        *(MODERN, *LEGACY, meta()), *names,
    ]
    keys = [
        *("jsonrpc", "id", "method", "params", "_meta", "name", "arguments", "requestId"),
        *("cursor", "notifications", "result", "error", "progressToken"),
        f"{META}protocolVersion",
    ]
    methods = [
        *("tools/list", "tools/call", "server/discover", "subscriptions/listen", "initialize"),
        *("ping", "notifications/cancelled"),
    ]
    idents: list[str | int]
    for number in range(count):
        idents = [number, str(number)]
        message: Any = request(
            chance.choice(idents),
            chance.choice(methods),
            chance.choice((MODERN, *LEGACY)),
            {chance.choice(keys): deepcopy(chance.choice(values))},
        )
        if names and not number % 4:
            message["method"], message["params"]["name"] = "tools/call", chance.choice(names)
        for _ in range(chance.randrange(4)):
            target = chance.choice([message, message.get("params")])
            if isinstance(target, dict):
                target[chance.choice(keys)] = deepcopy(chance.choice(values))
        line = json.dumps(message).encode()
        kind = chance.randrange(4)
        if kind == 0:
            line = chance.randbytes(chance.randrange(200)).replace(b"\n", b"")
        elif kind == 1 and line:
            data = bytearray(line)
            for _ in range(chance.randrange(1, 5)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            line = bytes(data).replace(b"\n", b"")
        yield line


class Joined:
    """A process at the other end of a socket, which is its standard input and output."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.stdin: IO[bytes] | None = connection.makefile("wb")
        self.stdout: IO[bytes] = connection.makefile("rb")
        self.stderr = None

    def wait(self, timeout: float) -> int:
        """Until it has ended."""
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(timeout)
        while self.connection.recv(1 << 16):
            pass
        return 0


class McpClient:
    """Speaks one version to a process; all that comes is checked."""

    def __init__(self, process: subprocess.Popen[bytes] | Joined, version: str) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process = process
        self.version = version
        self.asked: dict[str | int, str] = {}
        self.number = 0
        self.heard: list[Message] = []
        self._data = b""
        if version != MODERN:
            self.asked[0] = "initialize"
            self.write(initialize(version))
            answer = self.answer_of(0)
            assert answer["result"]["protocolVersion"] == version
            self.write({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def write(self, message: Message | bytes) -> None:
        data = message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n"
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def send(self, method: str, params: Mapping[str, Any] | None = None, **more: Any) -> int:
        """Asks; returns the id."""
        self.number += 1
        self.asked[self.number] = method
        self.write(request(self.number, method, self.version, params, **more))
        return self.number

    def receive(self, timeout: float = TIMEOUT) -> Message:
        """The next message; ``TimeoutError``, ``EOFError``."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        while b"\n" not in self._data:
            if not select.select([fd], [], [], timeout)[0]:
                raise TimeoutError
            data = os.read(fd, 1 << 16)
            if not data:
                raise EOFError
            self._data += data
        line, _, self._data = self._data.partition(b"\n")
        message: Message = json.loads(line)
        ident = message.get("id")
        check(message, self.asked.get(ident, "") if ident is not None else "", self.version)
        self.heard.append(message)
        return message

    def answer_of(self, ident: str | int) -> Message:
        """What comes before it is in ``heard``."""
        while (message := self.receive()).get("id") != ident:
            pass
        return message

    def ask(self, method: str, params: Mapping[str, Any] | None = None, **more: Any) -> Message:
        return self.answer_of(self.send(method, params, **more))

    def call(self, name: str, /, **given: Any) -> Message:
        """The result of a tool."""
        answer = self.ask("tools/call", {"name": name, "arguments": given})
        result: Message = answer["result"]
        return result

    def close(self) -> int:
        """The exit status at the end of its input."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.stdin = None
        return self.process.wait(TIMEOUT)
