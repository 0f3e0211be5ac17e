"""The meter between a relay and an upstream, both of the test: what passes, what is refused, what
is charged, and what becomes of those who go, break off, lie or send too much."""

from __future__ import annotations

import array
import json
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import trio
import trio.testing

from runtime.metering import apart, passing
from runtime.metering.passing import Meter
from runtime.metering.settings import Network, Settings
from runtime.records.spent import NO_LIMIT, PLACES, SIZE, SPENT, VERSION

GREETING: Final = bytes.fromhex("0d0a0d0a000d0a515549540a21210024") + bytes(36)
PATHS: Final = {"anthropic": "/v1/messages", "openai": "/v1/chat/completions",
                "gemini": "/v1beta/models/m:generateContent"}  # fmt: skip
#: what the upstream of a test does with one request: its head, its body and its stream
Answer = Callable[[bytes, bytes, trio.SocketStream], Awaitable[None]]


def said(text: str = "", *, given: int = 10, made: int = 5, **more: Any) -> bytes:
    usage = {"input_tokens": given, "output_tokens": made}
    answer = {"type": "message", "model": "m", "text": text, "usage": usage, **more}
    return json.dumps(answer).encode()


def http(body: bytes, status: str = "200 OK", more: str = "") -> bytes:
    kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"HTTP/1.1 {status}\r\n{kind}{more}\r\n".encode() + body


def answers(*parts: bytes) -> Answer:
    """Sends these, and closes."""
    async def answer(head: bytes, body: bytes, stream: trio.SocketStream) -> None:
        for part in parts:
            await stream.send_all(part)

    return answer


WHOLE: Final = answers(http(said()))
START: Final = b'data: {"type":"message_start","message":{"model":"m","usage":' \
               b'{"input_tokens":10,"output_tokens":1}}}\n\n'  # fmt: skip
DELTA: Final = b'data: {"type":"content_block_delta","delta":{"text":"%s"}}\n\n'
LAST: Final = b'data: {"type":"message_delta","usage":{"output_tokens":5}}\n\n'
STREAM: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
CUT: Final = STREAM.replace(b"Connection: close", b"Transfer-Encoding: chunked")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)




class Counters:
    """A file of counters, as ctxd makes them."""

    def __init__(self, path: Path, name: str, owner: int = 0) -> None:
        self.path = path
        path.write_bytes(VERSION.to_bytes(8, "little").ljust(SIZE, b"\0"))
        path.chmod(0o600)
        with path.open("r+b") as file:
            file.seek(SPENT)
            file.write(name.encode())
        self.set("tokens_max", NO_LIMIT)
        self.set("cost_max", NO_LIMIT)
        self.set("owner", owner)

    def set(self, number: str, value: int) -> None:
        with self.path.open("r+b") as file:
            file.seek(PLACES[number])
            file.write(value.to_bytes(8, "little"))

    def __getitem__(self, number: str) -> int:
        at = PLACES[number]
        return int.from_bytes(self.path.read_bytes()[at : at + 8], "little")

    @property
    def tokens(self) -> tuple[int, int]:
        return self["input"], self["output"]


class Told(NamedTuple):
    status: int
    head: bytes
    body: bytes

    @property
    def message(self) -> str:
        return str(json.loads(self.body)["error"]["message"])


class Client:
    """A relay, and the program behind it."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._came = bytearray()

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def ask(self, body: bytes = b'{"model":"m"}', path: str = "/v1/messages",
                  more: str = "", method: str = "POST") -> None:  # fmt: skip
        head = f"{method} {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n{more}\r\n"
        await self.send(head.encode() + body)

    async def more(self) -> bool:
        try:
            data = await self.stream.receive_some(65536)
        except trio.BrokenResourceError:
            return False
        self._came += data
        return bool(data)

    async def until(self, text: bytes) -> bytes:
        while text not in self._came:
            assert await self.more(), bytes(self._came)
        at = self._came.index(text) + len(text)
        found = bytes(self._came[:at])
        del self._came[:at]
        return found

    async def answer(self) -> Told:
        """One with a length."""
        head = await self.until(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        while len(self._came) < length:
            assert await self.more(), bytes(self._came)
        body = bytes(self._came[:length])
        del self._came[:length]
        return Told(int(head.split(b" ", 2)[1]), head, body)

    async def rest(self) -> bytes:
        """All until the meter closes."""
        while await self.more():
            pass
        return bytes(self._came)


class Scene:
    """A meter with one network, an upstream and counters, all in one loop."""

    def __init__(self, directory: Path, nursery: trio.Nursery, api: str = "anthropic",
                 drain: float = 0.05) -> None:  # fmt: skip
        self.directory = directory
        self.nursery = nursery
        self.upstream = directory / "upstream"
        network = Network(api, "meter", str(self.upstream))
        self.meter = Meter(Settings({"meter": network}, drain, os.geteuid(), {}))
        self.own = self.counters("kid")
        self.boss = self.counters("boss")
        self.answer: Answer = WHOLE
        #: (head, body) of each request that came to the upstream
        self.asked: list[tuple[bytes, bytes]] = []
        self.stop = trio.CancelScope()
        self.open: list[Any] = []

    def counters(self, name: str, owner: int = 0) -> Counters:
        return Counters(self.directory / name, name, owner)

    async def begin(self) -> None:
        listening = trio.socket.socket(socket.AF_UNIX)
        await listening.bind(str(self.upstream))
        listening.listen(100)

        async def serve() -> None:
            with self.stop:
                await trio.serve_listeners(
                    self._upstream, [trio.SocketListener(listening)], handler_nursery=self.nursery
                )

        self.nursery.start_soon(serve)

    async def _upstream(self, stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            async with stream:
                came = bytearray()
                while b"\r\n\r\n" not in came:
                    if not (data := await stream.receive_some(65536)):
                        return
                    came += data
                head, _, body = bytes(came).partition(b"\r\n\r\n")
                length = int(head.lower().partition(b"\r\ncontent-length: ")[2].split(b"\r\n")[0])
                gathered = bytearray(body)
                while len(gathered) < length:
                    gathered += await stream.receive_some(1 << 20)
                self.asked.append((head, bytes(gathered)))
                await self.answer(head, bytes(gathered), stream)

    def connected(self) -> trio.SocketStream:
        """A socket of which the meter has the other end."""
        ours, theirs = socket.socketpair()
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(theirs))
        self.nursery.start_soon(self.meter.serve, "meter", stream)
        self.open.append(ours)
        return trio.SocketStream(trio.socket.from_stdlib_socket(ours))

    async def greeted(self, fds: Sequence[int], greeting: bytes = GREETING) -> Client:
        stream = self.connected()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        await stream.socket.sendmsg([greeting], rights)
        return Client(stream)

    async def client(self, *payers: Counters) -> Client:
        fds = [os.open(each.path, os.O_RDWR) for each in payers or (self.own, self.boss)]
        try:
            return await self.greeted(fds)
        finally:
            for fd in fds:
                os.close(fd)


@asynccontextmanager
async def a_scene(directory: Path, **words: Any) -> AsyncIterator[Scene]:
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            made = Scene(directory, nursery, **words)
            await made.begin()
            try:
                yield made
            finally:
                nursery.cancel_scope.cancel()
                for each in made.open:
                    each.close()


def played(directory: Path, play: Callable[[Scene], Awaitable[None]], **words: Any) -> None:
    async def all_of_it() -> None:
        async with a_scene(directory, **words) as there:
            await play(there)

    trio.run(all_of_it)


@pytest.fixture(autouse=True)
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of pytest begins with more memory than the meter's."""
    monkeypatch.setattr(apart, "_BYTES", 1 << 40)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Any:
    """No input is an exception that nobody expected."""
    yield
    records = [*caplog.get_records("call"), *caplog.records]
    assert not [record for record in records if record.exc_info], records


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await trio.sleep(0.001)


# whose a connection is


def test_what_is_asked_is_counted_at_all_payers_before_it_is_answered(tmp_path: Path) -> None:
    async def play(there: Scene) -> None:
        one = await there.client()
        for n in range(1, 4):
            await one.ask()
            assert (await one.answer()).body == said()
            for each in (there.own, there.boss):
                assert (each.tokens, each["requests"]) == ((10 * n, 5 * n), n)

    played(tmp_path, play)


def _file(directory: Path, wrong: str) -> int:
    """A descriptor of no file of counters."""
    path = Counters(directory / "wrong", "x").path
    if wrong == "mode":
        path.chmod(0o640)
    elif wrong == "size":
        os.truncate(path, SIZE + 1)
    elif wrong == "version":
        with path.open("r+b") as file:
            file.write((1).to_bytes(8, "little"))
    elif wrong == "directory":
        return os.open(directory, os.O_RDONLY)
    elif wrong == "owner":
        os.chown(path, 12345, 12345)
    elif wrong == "fifo":
        os.mkfifo(directory / "fifo", 0o600)
        return os.open(directory / "fifo", os.O_RDWR)
    elif wrong == "path only":
        return os.open(path, os.O_PATH)
    return os.open(path, os.O_RDONLY if wrong == "read-only" else os.O_RDWR)


@pytest.mark.parametrize("wrong", [
    "mode", "size", "version", "directory", "owner", "fifo", "path only", "read-only",
])  # fmt: skip
def test_a_file_of_another_kind_closes_the_connection(tmp_path: Path, wrong: str) -> None:
    if wrong == "owner" and os.geteuid():
        pytest.skip("only root gives files away")

    async def play(there: Scene) -> None:
        fds = [os.open(there.own.path, os.O_RDWR), _file(tmp_path, wrong)]
        before = len(os.listdir("/proc/self/fd"))
        one = await there.greeted(fds)
        assert await one.rest() == b""
        await one.stream.aclose()
        assert len(os.listdir("/proc/self/fd")) == before, "descriptors are left"
        for fd in fds:
            os.close(fd)
        good = await there.client()
        await good.ask()
        assert (await good.answer()).status == 200

    played(tmp_path, play)


@pytest.mark.parametrize(("greeting", "fds"), [
    (b"POST /v1/messages HTTP/1.1\r\n\r\n".ljust(52), 1), (GREETING[:30], 1), (GREETING, 0),
    (GREETING, 33), (b"\0" * 52, 2), (GREETING.replace(b"QUIT", b"Quit"), 1),
    (b"PROXY TCP6 ::1 ::1 1 1\r\n", 1), (b"x", 0), (b"", 0),
])  # fmt: skip
def test_whoever_is_no_relay_is_not_served(tmp_path: Path, greeting: bytes, fds: int) -> None:
    async def play(there: Scene) -> None:
        descriptors = [os.open(there.own.path, os.O_RDWR) for _ in range(fds)]
        before = len(os.listdir("/proc/self/fd"))
        stream = there.connected()
        one = Client(stream)
        if greeting:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            await stream.socket.sendmsg([greeting], rights if fds else [])
        else:
            await stream.send_eof()
        assert await one.rest() == b""
        await stream.aclose()
        assert len(os.listdir("/proc/self/fd")) == before
        for fd in descriptors:
            os.close(fd)

    played(tmp_path, play)


def test_whoever_says_nothing_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing, "_GREETING_SECONDS", 0.05)

    async def play(there: Scene) -> None:
        assert await Client(there.connected()).rest() == b""

    played(tmp_path, play)


def test_another_uid_is_no_relay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4294900000)

    async def play(there: Scene) -> None:
        there.meter.settings.relay_user = 4294900001
        assert await (await there.client()).rest() == b""

    played(tmp_path, play)


def test_a_second_header_and_descriptors_are_a_part_of_the_request(tmp_path: Path) -> None:
    async def play(there: Scene) -> None:
        one = await there.client()
        other = there.counters("other")
        with other.path.open("r+b") as file:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()]))]
            await one.stream.socket.sendmsg([GREETING], rights)
        await one.ask()
        assert (await one.answer()).status == 400
        two = await there.client()
        with other.path.open("r+b") as file:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()]))]
            await two.stream.socket.sendmsg([b"POST /v1/messages HTTP/1.1\r\nHost: h\r\n"], rights)
        await two.send(b"Content-Length: 2\r\n\r\n{}")
        assert (await two.answer()).status == 200
        assert (there.own["requests"], other["requests"]) == (1, 0)

    played(tmp_path, play)


# what is refused

BODY: Final = b'{"model":"m"}'
CHUNKED: Final = b"d\r\n" + BODY + b"\r\n0\r\n\r\n"


def _head(*lines: str, first: str = "POST /v1/messages HTTP/1.1") -> bytes:
    return "\r\n".join([first, "Host: h", *lines, "", ""]).encode("latin-1")


REFUSED_HEADS: Final[dict[str, tuple[bytes, int]]] = {
    "two lengths": (_head("Content-Length: 13", "Content-Length: 14") + BODY, 400),
    "equal lengths": (_head("Content-Length: 13", "content-length: 13") + BODY, 400),
    "a list of lengths": (_head("Content-Length: 13, 13") + BODY, 400),
    "length and chunks": (_head("Content-Length: 13", "Transfer-Encoding: chunked") + CHUNKED, 400),
    "chunks and length": (_head("Transfer-Encoding: chunked", "Content-Length: 3") + CHUNKED, 400),
    "identity, chunked": (_head("Transfer-Encoding: identity, chunked") + CHUNKED, 400),
    "chunked twice": (_head("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), 400),
    "xchunked": (_head("Transfer-Encoding: xchunked") + CHUNKED, 501),
    "blank before the colon": (_head("Content-Length : 13") + BODY, 400),
    "signed length": (_head("Content-Length: +13") + BODY, 400),
    "NUL": (_head("X: a\0b", "Content-Length: 13") + BODY, 400),
    "lone CR": (_head("X: a\rContent-Length: 0", "Content-Length: 13") + BODY, 400),
    "no host": (b"POST /v1/messages HTTP/1.1\r\nContent-Length: 13\r\n\r\n" + BODY, 400),
    "two hosts": (_head("Host: i", "Content-Length: 13") + BODY, 400),
    "no host of old": (b"POST /v1/messages HTTP/1.0\r\nContent-Length: 13\r\n\r\n" + BODY, 400),
    "a host that goes": (_head("Connection: host", "Content-Length: 13") + BODY, 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 403),
    "absolute": (_head("Content-Length: 13", first="POST http://h/v1/messages HTTP/1.1"), 403),
    "upgrade": (_head("Connection: upgrade", "Upgrade: websocket", "Content-Length: 13"), 426),
    "get": (_head(first="GET /v1/messages HTTP/1.1"), 403),
    "connect": (_head(first="CONNECT h:443 HTTP/1.1"), 403),
    "unknown": (_head("Content-Length: 13", first="POST /v1/files HTTP/1.1") + BODY, 403),
    "dots": (_head("Content-Length: 13", first="POST /v1/x/../messages HTTP/1.1") + BODY, 403),
    "no object": (_head("Content-Length: 2") + b"[]", 400),
    "nothing": (_head("Content-Length: 0"), 400),
    "no length": (_head(), 400),
    "in the background": (_head("Content-Length: 19") + b'{"background":true}', 403),
    "too large": (_head(f"Content-Length: {(32 << 20) + 1}"), 413),
    "endless": (_head("Content-Length: 99999999999999999999"), 413),
    "long head": (_head(f"X: {'x' * 70_000}"), 431),
    "many headers": (_head(*["a:"] * 10_000), 431),
    "a chunk that is none": (_head("Transfer-Encoding: chunked") + b"zz\r\n", 400),
    "a chunk that is too long": (_head("Transfer-Encoding: chunked") + b"f" * 30 + b"\r\n", 400),
    "no request": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_HEADS)
def test_what_could_be_read_in_two_ways_or_not_counted_is_refused(
    tmp_path: Path, name: str
) -> None:
    async def play(there: Scene) -> None:
        data, status = REFUSED_HEADS[name]
        one = await there.client()
        with suppress(trio.BrokenResourceError):
            await one.send(data)
        told = await one.answer()
        assert (told.status, told.message[:7]) == (status, "ctxfs: "), told
        assert b"connection: close" in told.head.lower()
        assert not there.asked and there.own["requests"] == 0 and there.own.tokens == (0, 0)

    played(tmp_path, play)


@pytest.mark.parametrize("request_", [
    _head("Transfer-Encoding: chunked") + b"d;a=b;c\r\n" + BODY + b"\r\n0;x\r\nTrailer: t\r\n\r\n",
    _head("Content-Length: 13").replace(b"\r\n", b"\n") + BODY,
    _head("Content-Length:", " 13").replace(b"Length:\r\n", b"Length:\r\n ") + BODY,
    _head("X: a", "\tb", "Content-Length: 13") + BODY,
    _head("Content-Length: 13", "TE: trailers", "Connection: x, te", "X: y",
          "Keep-Alive: 5", "Accept-Encoding: br", "Proxy-Authorization: z") + BODY,
    _head("Content-Length: 13", first="POST /v1/messages?beta=true HTTP/1.1") + BODY,
])  # fmt: skip
def test_what_passes_is_written_anew(tmp_path: Path, request_: bytes) -> None:
    async def play(there: Scene) -> None:
        one = await there.client()
        await one.send(request_ + _head("Content-Length: 13") + BODY)
        assert [(await one.answer()).status for _ in range(2)] == [200, 200]
        for head, body in there.asked:
            lines = head.lower().split(b"\r\n")
            assert body == BODY and lines.count(b"content-length: 13") == 1
            assert lines.count(b"accept-encoding: identity") == 1
            assert lines.count(b"connection: close") == 1 and b"x: y" not in lines
            for name in (b"transfer-encoding", b"keep-alive", b"te", b"trailer", b"proxy-"):
                assert not any(line.startswith(name) for line in lines)

    played(tmp_path, play)


def test_pipelined_requests_are_each_counted(tmp_path: Path) -> None:
    async def play(there: Scene) -> None:
        one = await there.client()
        await one.send((_head("Content-Length: 13") + BODY) * 20)
        for _ in range(20):
            assert (await one.answer()).status == 200
        assert there.own.tokens == (200, 100) and there.own["requests"] == 20

    played(tmp_path, play)


def test_a_body_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing, "_BODY_SECONDS", 0.05)

    async def play(there: Scene) -> None:
        one = await there.client()
        await one.send(_head("Content-Length: 13") + b"{")
        assert (await one.answer()).status == 408

    played(tmp_path, play)


def test_whoever_waits_to_continue_is_told_so_but_not_if_it_is_refused(tmp_path: Path) -> None:
    async def play(there: Scene) -> None:
        one = await there.client()
        await one.send(_head("Content-Length: 13", "Expect: 100-continue"))
        assert (await one.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        await one.send(BODY)
        assert (await one.answer()).status == 200
        assert b"expect" not in there.asked[0][0].lower()
        await one.send(_head(f"Content-Length: {1 << 30}", "Expect: 100-continue"))
        assert (await one.answer()).status == 413

    played(tmp_path, play)


def test_too_many_chunks_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing, "_BODY_MAX", 1000)

    async def play(there: Scene) -> None:
        one = await there.client()
        await one.send(_head("Transfer-Encoding: chunked") + b"64\r\n" + b"x" * 100)
        with suppress(trio.BrokenResourceError):
            await one.send((b"\r\n64\r\n" + b"x" * 100) * 20)
        assert (await one.answer()).status == 413
        assert there.meter.memory._free == passing.BODIES_MAX

    played(tmp_path, play)


# what the upstream does


def test_without_an_upstream_nothing_is_charged(tmp_path: Path) -> None:
    async def play(there: Scene) -> None:
        there.upstream.unlink()
        one = await there.client()
        await one.ask()
        told = await one.answer()
        assert (told.status, told.message) == (502, "ctxfs: the proxy cannot be reached")
        assert not await one.more()
        await trio.testing.wait_all_tasks_blocked()
        assert there.own["requests"] == 0 and there.own.tokens == (0, 0)

    played(tmp_path, play)


def test_a_full_queue_of_the_upstream_is_waited_for(tmp_path: Path) -> None:
    async def play(there: Scene) -> None:
        there.stop.cancel()
        there.upstream.unlink()
        listening = trio.socket.socket(socket.AF_UNIX)
        there.open.append(listening)
        await listening.bind(str(there.upstream))
        listening.listen(0)
        others = []
        with trio.move_on_after(0.05):
            while True:
                other = socket.socket(socket.AF_UNIX)
                other.setblocking(False)
                others.append(other)
                try:
                    other.connect(str(there.upstream))
                except BlockingIOError:
                    break
        one = await there.client()
        await one.ask()
        await trio.sleep(0.03)
        assert there.own["requests"] == 0, "nothing was sent"
        for other in others:
            other.close()
        there.nursery.start_soon(
            trio.serve_listeners, there._upstream, [trio.SocketListener(listening)]
        )
        assert (await one.answer()).status == 200
        assert there.own.tokens == (10, 5)

    played(tmp_path, play)


@pytest.mark.parametrize("status", ["400 Bad", "401 No", "429 Slow", "500 Oh", "529 Busy", "302 X"])
def test_what_the_api_refuses_costs_nothing(tmp_path: Path, status: str) -> None:
    async def play(there: Scene) -> None:
        there.answer = answers(http(said("no"), status, more="Retry-After: 3\r\n"))
        one = await there.client()
        await one.ask()
        told = await one.answer()
        assert (str(told.status), told.body) == (status[:3], said("no"))
        assert b"retry-after: 3" in told.head.lower()
        assert there.own.tokens == (0, 0) and there.own["requests"] == 1

    played(tmp_path, play)


CUTS: Final[dict[str, tuple[tuple[bytes, ...], tuple[int, int], int]]] = {
    # parts of an answer; at least so much is charged; whether that is estimated
    "before the head": ((), (4, 0), 502),
    "in the head": ((b"HTTP/1.1 200 OK\r\nX",), (4, 0), 502),
    "not HTTP": ((b"SSH-2.0-x\r\n\r\n",), (4, 0), 502),
    "in the middle": ((CUT, chunk(START), chunk(DELTA % (b"x" * 300))), (10, 100), 200),
    "before the last event": ((CUT, chunk(START), chunk(LAST)[:-30]), (10, 1), 200),
    "a whole one": ((http(said("y" * 600))[:-20],), (4, 200), 200),
    "no usage": ((http(b'{"type":"message"}'),), (4, 6), 200),
}  # fmt: skip


@pytest.mark.parametrize("name", CUTS)
def test_what_breaks_off_is_estimated(tmp_path: Path, name: str) -> None:
    async def play(there: Scene) -> None:
        parts, least, status = CUTS[name]
        there.answer = answers(*parts)
        one = await there.client()
        await one.ask()
        came = await one.rest() if name != "no usage" else (await one.answer()).head
        assert came.startswith(b"HTTP/1.1 %d" % status)
        assert there.own["estimated"] > 0 or name == "before the last event"
        assert all(map(int.__ge__, there.own.tokens, least)), there.own.tokens
        assert there.own.tokens == there.boss.tokens
        assert there.own.tokens[1] <= least[1] + 100

    played(tmp_path, play)


def test_an_answer_before_the_body_was_read_is_passed_on(tmp_path: Path) -> None:
    async def play(there: Scene) -> None:
        there.stop.cancel()
        there.upstream.unlink()
        listening = trio.socket.socket(socket.AF_UNIX)
        there.open.append(listening)
        await listening.bind(str(there.upstream))
        listening.listen(1)
        one = await there.client()
        there.nursery.start_soon(one.ask, b'{"messages":"%s"}' % (b"x" * (1 << 20)))
        stream = trio.SocketStream((await listening.accept())[0])
        await stream.receive_some(10)
        await stream.send_all(http(b"{}", "413 Large"))
        await stream.send_eof()
        await stream.aclose()
        assert (await one.answer()).status == 413
        assert there.own.tokens == (0, 0)

    played(tmp_path, play)


# clients that go


def test_a_client_that_goes_at_once_pays_what_is_counted(tmp_path: Path) -> None:
    async def play(there: Scene) -> None:
        one = await there.client()
        await one.ask()
        await one.stream.aclose()
        await until(lambda: there.own.tokens == (10, 5))
        assert there.own["estimated"] == 0

    played(tmp_path, play, drain=30)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_a_client_that_goes_in_the_middle(tmp_path: Path, half: bool, ends: bool) -> None:
    """What ends within the drain is exact; else upstream is closed, and it is estimated."""
    async def play(there: Scene) -> None:
        gone, closed = trio.Event(), trio.Event()

        async def answer(head: bytes, body: bytes, stream: trio.SocketStream) -> None:
            await stream.send_all(STREAM + START + DELTA % (b"x" * 3000))
            await gone.wait()
            if ends:
                await stream.send_all(LAST)
            else:
                assert not await stream.receive_some(1)
                closed.set()

        there.answer = answer
        one = await there.client()
        await one.ask()
        await one.until(b"xxx")
        await (one.stream.send_eof() if half else one.stream.aclose())
        gone.set()
        if ends:
            await until(lambda: there.own.tokens == (10, 5))
        else:
            await closed.wait()
            await until(lambda: there.own["estimated"] > 0)
            assert there.own["input"] == 10 and there.own["output"] >= 1000
        assert there.own.tokens == there.boss.tokens

    played(tmp_path, play, drain=30 if ends else 0.01)


def test_nobody_pays_less_by_going_before_the_last_event(tmp_path: Path) -> None:
    async def play(there: Scene) -> None:
        async def answer(head: bytes, body: bytes, stream: trio.SocketStream) -> None:
            await stream.send_all(STREAM + START + DELTA % b"seen")
            await trio.sleep(0.02)
            await stream.send_all(LAST)

        there.answer = answer
        for n in range(1, 6):
            one = await there.client()
            await one.ask()
            await one.until(b"seen")
            await one.stream.aclose()
            await until(lambda n=n: there.own.tokens == (10 * n, 5 * n))  # type: ignore[misc]
        assert there.own["estimated"] == 0

    played(tmp_path, play, drain=30)


# limits


def test_at_a_limit_each_request_is_refused_on_the_same_connection(tmp_path: Path) -> None:
    async def play(there: Scene) -> None:
        there.boss.set("tokens_max", 15)
        one = await there.client()
        await one.ask()
        assert (await one.answer()).status == 200
        for n in range(1, 4):
            await one.ask()
            told = await one.answer()
            sentence = "ctxfs: tokens.max=15 of agent:boss is used up (15)"
            assert (told.status, told.message) == (429, sentence)
            assert b"x-should-retry: false" in told.head
            assert there.own["refused"] == there.boss["refused"] == n
        assert len(there.asked) == 1
        there.boss.set("tokens_max", 100)
        await one.ask()
        assert (await one.answer()).status == 200

    played(tmp_path, play)


def test_near_a_limit_requests_wait_and_go_one_after_the_other(tmp_path: Path) -> None:
    async def play(there: Scene) -> None:
        there.boss.set("tokens_max", 100)
        flying = most = 0

        async def answer(head: bytes, body: bytes, stream: trio.SocketStream) -> None:
            nonlocal flying, most
            flying += 1
            most = max(most, flying)
            await trio.sleep(0.002)
            flying -= 1
            await stream.send_all(http(said()))

        there.answer = answer
        statuses: list[int] = []

        async def one_of_many() -> None:
            one = await there.client(there.own, there.boss)
            await one.ask(b'{"model":"m","max_tokens":90}')
            statuses.append((await one.answer()).status)

        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(one_of_many)
        assert (most, sum(there.boss.tokens)) == (1, 105)  # 6 of 15, and one that was let through
        assert (statuses.count(200), statuses.count(429)) == (7, 33)

    played(tmp_path, play)


@pytest.mark.parametrize("then", ["goes", "raised", "lowered", "ends"])
def test_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    monkeypatch.setattr(passing, "_LOOK_SECONDS", 0.01)

    async def play(there: Scene) -> None:
        there.boss.set("tokens_max", 100)
        done = trio.Event()

        async def answer(head: bytes, body: bytes, stream: trio.SocketStream) -> None:
            if len(there.asked) == 1:
                await done.wait()
            await stream.send_all(http(said()))

        there.answer = answer
        body = b'{"model":"m","max_tokens":90}'
        first, second = await there.client(), await there.client()
        await first.ask(body)
        await until(lambda: len(there.asked) == 1)
        await second.ask(body)
        with trio.move_on_after(0.05):
            await second.more()
            raise AssertionError("it does not wait")
        if then == "goes":
            await second.stream.aclose()
            await until(lambda: not any(
                payer.turn.locked() for payer in there.meter._files._payers.values()))
        elif then == "raised":
            there.boss.set("tokens_max", 1000)
            assert (await second.answer()).status == 200
        elif then == "lowered":
            there.boss.set("tokens_max", 0)
            assert (await second.answer()).status == 429
        done.set()
        assert (await first.answer()).status == 200
        if then == "ends":
            assert (await second.answer()).status == 200
        payer = next(iter(there.meter._files._payers.values()))
        await until(lambda: payer.flying == 0)
        assert (payer.held, payer.held_cost) == (0, 0)

    played(tmp_path, play)


def test_what_is_free_neither_counts_nor_makes_a_trouble_go(tmp_path: Path) -> None:
    async def play(there: Scene) -> None:
        there.own.set("tokens_max", 0)
        one = await there.client()
        await one.ask()
        assert (await one.answer()).status == 429
        before = there.own["trouble"], 0
        await one.ask(path="/v1/messages/count_tokens")
        assert (await one.answer()).status == 200
        assert (there.own["trouble"], there.own["requests"]) == before
        assert there.own.tokens == (0, 0)

    played(tmp_path, play)


@pytest.mark.parametrize("api", PATHS)
def test_a_refusal_has_the_form_of_its_api(tmp_path: Path, api: str) -> None:
    async def play(there: Scene) -> None:
        there.own.set("tokens_max", 0)
        one = await there.client()
        await one.ask(path=PATHS[api])
        told = await one.answer()
        assert told.status == 429 and told.message.startswith("ctxfs: tokens.max=0 of agent:kid")

    played(tmp_path, play, api=api)


# memory, descriptors, others


def test_bodies_wait_for_memory_and_none_waits_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than an agent's share, in many requests at once: all are answered."""
    monkeypatch.setattr(passing, "_BODIES_OF_ONE", 250_000)
    monkeypatch.setattr(passing, "BODIES_MAX", 1_000_000)
    most = 0

    async def play(there: Scene) -> None:
        statuses: list[int] = []

        async def look() -> None:
            nonlocal most
            while True:
                most = max(most, passing.BODIES_MAX - there.meter.memory._free)
                await trio.sleep(0)

        async def one_of_many() -> None:
            one = await there.client()
            await one.ask(b'{"model":"m","x":"%s"}' % (b"x" * 100_000))
            statuses.append((await one.answer()).status)

        there.nursery.start_soon(look)
        async with trio.open_nursery() as nursery:
            for _ in range(30):
                nursery.start_soon(one_of_many)
        assert statuses == [200] * 30
        await until(lambda: there.meter.memory._free == passing.BODIES_MAX)
        assert not there.meter.memory._used

    played(tmp_path, play)
    assert 200_000 < most <= 250_000


def test_an_owner_leaves_memory_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many agents that begin bodies and send no more do not keep another owner's waiting."""
    monkeypatch.setattr(passing, "_BODIES_OF_ONE", 200_000)
    monkeypatch.setattr(passing, "BODIES_MAX", 1_000_000)

    async def play(there: Scene) -> None:
        for n in range(20):
            greedy = await there.client(there.counters(f"greedy{n}", owner=1000))
            await greedy.send(_head("Content-Length: 100000") + b"{")
        await until(lambda: there.meter.memory._free == 500_000)
        one = await there.client(there.counters("other", owner=1001))
        await one.ask(b'{"x":"%s"}' % (b"x" * 200_000)[:199_000])
        assert (await one.answer()).status == 200

    played(tmp_path, play)


def test_a_body_takes_no_memory_while_its_answer_runs(tmp_path: Path) -> None:
    async def play(there: Scene) -> None:
        async def answer(head: bytes, body: bytes, stream: trio.SocketStream) -> None:
            await stream.send_all(STREAM + START)
            await trio.sleep_forever()

        there.answer = answer
        one = await there.client()
        await one.ask(b'{"messages":"%s"}' % (b"x" * 1_000_000))
        await one.until(b"message_start")
        assert there.meter.memory._free == passing.BODIES_MAX

    played(tmp_path, play)


def test_descriptors_do_not_leak(tmp_path: Path) -> None:
    """Connections of every sort."""
    async def play(there: Scene) -> None:
        chance = random.Random(1)
        before = len(os.listdir("/proc/self/fd"))
        data = [value for value, _ in REFUSED_HEADS.values() if len(value) < 1000]

        async def some() -> None:
            for _ in range(100):
                one = await there.client()
                with suppress(trio.BrokenResourceError, AssertionError):
                    match chance.randrange(4):
                        case 0:
                            await one.ask()
                            await one.answer()
                        case 1:
                            await one.send(chance.choice(data))
                            await one.stream.send_eof()
                            await one.rest()
                        case 2:
                            await one.ask()
                await one.stream.aclose()

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(some)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
        assert not there.meter._files._payers
        assert there.meter.memory._free == passing.BODIES_MAX

    played(tmp_path, play)


async def _longest_step() -> float:
    """Seconds of the processor, of which others may have their share."""
    longest = 0.0
    while True:
        begun = time.thread_time()
        try:
            await trio.sleep(0)
        except trio.Cancelled:
            return longest
        longest = max(longest, time.thread_time() - begun)


def test_small_chunks_keep_nobody_waiting(tmp_path: Path) -> None:
    """Each is a step of its own."""
    async def play(there: Scene) -> None:
        one = await there.client()
        there.nursery.start_soon(
            one.send, _head("Transfer-Encoding: chunked") + b"1\r\n{\r\n" * 200_000
        )
        with trio.move_on_after(1):
            assert await _longest_step() < 0.1

    played(tmp_path, play)


#: pytest's helpers are threads, of which the meter has none
_MAY_FORK: Final = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


@_MAY_FORK
@pytest.mark.parametrize("part", [
    b"1,", *(pytest.param(part, marks=pytest.mark.long) for part in (b"[],", b'"QUJD",'))
])
def test_long_bodies_keep_nobody_waiting(tmp_path: Path, part: bytes) -> None:
    async def play(there: Scene) -> None:
        one = await there.client()
        body = b'{"messages":[' + part * ((32 << 20) // len(part) - 10)

        async def asks(scope: trio.CancelScope) -> None:
            await one.send(_head(f"Content-Length: {len(body)}"))
            for at in range(0, len(body), 1 << 20):
                await one.send(body[at : at + (1 << 20)])
            assert (await one.answer()).status == 400  # it has no end
            scope.cancel()

        with trio.CancelScope() as scope:
            there.nursery.start_soon(asks, scope)
            assert await _longest_step() < 0.03
        assert there.meter.memory._free == passing.BODIES_MAX

    played(tmp_path, play)


@_MAY_FORK
def test_long_bodies_of_one_owner_leave_time_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each, what is beyond the first MiB comes and goes in the owner's pace."""
    monkeypatch.setattr(passing, "_LONG_A_SECOND", 20 << 20)

    async def play(there: Scene) -> None:
        begun = trio.current_time()

        async def asks(name: str, owner: int, size: int) -> None:
            one = await there.client(there.counters(name, owner=owner))
            await one.ask(b'{"x":"%s"}' % (b"x" * size))
            assert (await one.answer()).status == 200

        async with trio.open_nursery() as nursery:
            for name, owner, size in (("a", 1, 2 << 20), ("b", 1, 2 << 20), ("c", 2, 2 << 20),
                                      ("d", 3, 1000)):  # fmt: skip
                nursery.start_soon(asks, name, owner, size)
        assert sorted(there.meter.paced) == [1, 2]
        assert there.meter.paced[1] - begun >= 0.2 and there.meter.paced[2] - begun >= 0.1

    played(tmp_path, play)


def _long(*fields: str) -> bytes:
    return f'{{{",".join(("", *fields))[1:]},"messages":["{"x" * (2 << 20)}"]}}'.encode()


@_MAY_FORK
@pytest.mark.parametrize(("api", "body", "wanted"), [
    ("anthropic", _long('"model":"m"', '"a": 1', '"a":2'), _long('"model":"m"', '"a": 1', '"a":2')),
    ("anthropic", b'{"x":"%s"}' % (b"x" * 3_000_000), b'{"x":"%s"}' % (b"x" * 3_000_000)),
    ("openai", _long('"stream":false', '"a": 1', '"a":2'), _long('"stream":false', '"a":2')),
    ("openai", _long('"stream":true'),
     _long('"stream":true')[:-1] + b',"stream_options":{"include_usage":true}}'),
    ("openai", _long('"background":true'), 403), ("anthropic", _long()[:-1], 400),
])  # fmt: skip
def test_what_long_bodies_ask_for(
    tmp_path: Path, api: str, body: bytes, wanted: bytes | int
) -> None:
    """As short ones."""
    async def play(there: Scene) -> None:
        one = await there.client()
        await one.ask(body, PATHS[api])
        status = int((await one.until(b"\r\n")).split()[1])
        if isinstance(wanted, int):
            assert status == wanted and not there.asked
        else:
            assert status == 200 and there.asked[0][1] == wanted
        assert there.meter.memory._free == passing.BODIES_MAX

    played(tmp_path, play, api=api)


@_MAY_FORK
@pytest.mark.parametrize(("room", "status"), [(1 << 40, 200), (1, 413)])
def test_many_fields_take_no_more_memory_than_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, status: int
) -> None:
    monkeypatch.setattr(apart, "_BYTES", room)

    async def play(there: Scene) -> None:
        one = await there.client()
        await one.ask(b"{%s}" % b",".join(b'"%d":1' % n for n in range(300_000)))
        assert (await one.answer()).status == status
        assert there.meter.memory._free == passing.BODIES_MAX

    played(tmp_path, play)


def test_meters_end_connections_that_are_idle(tmp_path: Path) -> None:
    """Those that have a request are answered."""
    async def play(there: Scene) -> None:
        done = trio.Event()

        async def answer(head: bytes, body: bytes, stream: trio.SocketStream) -> None:
            await done.wait()
            await stream.send_all(http(said()))

        there.answer = answer
        idle, partial, busy = [await there.client() for _ in range(3)]
        await partial.send(b"POST /v1/mess")
        await busy.ask()
        await until(lambda: len(there.asked) == 1 and len(there.meter._idle) == 2)
        there.meter.end()
        assert (await idle.rest(), await partial.rest()) == (b"", b"")
        done.set()
        assert (await busy.answer()).body == said()
        assert await busy.rest() == b""
        assert there.own.tokens == (10, 5)

    played(tmp_path, play)
