"""Passing requests on, and their answers back: HTTP/1.1, parsed and written anew both ways.

A connection comes from a relay, which says first whose it is, and hands over the descriptors of
the payers' counters (``runtime/native/relay.c``). Each request on it is judged, goes out on a
connection of its own, and is charged piece by piece, each before the client gets that piece.
No error of one connection reaches another one.

What an agent sends costs time before it is known to be refused. So pieces of bodies take turns
with all else, and those of an owner's long ones leave much of the time to others. Memory is taken
before a body comes, by its length, and one that takes long to read is read by a process beside this
one. A body is in a file in memory: it has no place in the memory of this process, which would take
longer to fill, and to free.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import socket
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final
from weakref import WeakSet

import h11
import trio
from trio.lowlevel import ParkingLot, checkpoint

from runtime.kernel import linux
from runtime.metering import reading
from runtime.metering.apart import asked, asked_apart
from runtime.metering.charging import Request, refusal
from runtime.metering.counters import Files, ForeignError, Payer
from runtime.metering.reading import Asked, Form, Reader, UncountableError
from runtime.metering.settings import Settings

log = logging.getLogger("ctxfs-meter")

#: what a relay says first: the signature of PROXY v2, TCP over IPv6, and 36 bytes of addresses
_GREETING: Final = bytes.fromhex("0d0a0d0a000d0a515549540a21210024")
_GREETING_SIZE: Final = len(_GREETING) + 36
_PAYERS_MAX: Final = 32
_GREETING_SECONDS: Final = 10.0
_BODY_SECONDS: Final = 60.0
#: for what a client still sends when it has its last answer
_LINGER_SECONDS: Final = 5.0
_HEAD_MAX: Final = 64 << 10
_LINES_MAX: Final = 256
_BODY_MAX: Final = 32 << 20
_TOO_LONG: Final = f"the body has more than {_BODY_MAX} bytes"
#: of bodies that wait in memory: of all, and of one agent
BODIES_MAX: Final = 512 << 20
_BODIES_OF_ONE: Final = 64 << 20
_PART: Final = 64 << 10
#: bodies that are read here, within 5 ms: so many bytes, and colons, of which each key has one
_QUICK_BODY: Final = 1 << 20
_QUICK_KEYS: Final = 10_000
#: of an owner's longer bodies that come and go in a second: few, so that others find a processor
_LONG_A_SECOND: Final = 32 << 20
#: how soon a limit that was raised is noticed, and that the queue of an upstream has room
_LOOK_SECONDS: Final = 1.0
_QUEUE_LOOK_SECONDS: Final = 0.01
_HOP: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
     b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)  # fmt: skip
_OWN: Final = _HOP | {b"accept-encoding", b"content-length", b"expect"}
#: what says how long a body is: h11 makes one of equal ones, and takes one of both sorts
_BLANK: Final = re.compile(rb"\n\r?\n")
_LENGTHS: Final = re.compile(rb"(?i)\n(?:content-length|transfer-encoding)[ \t]*:([^\n]*)")
_CLOSED: Final = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)


class _Side:
    """One end of a connection, and what h11 knows of it."""

    def __init__(self, stream: trio.SocketStream, role: Any) -> None:
        self.stream = stream
        self.http = h11.Connection(role, max_incomplete_event_size=_HEAD_MAX)

    async def event(self) -> h11.Event | type[h11.PAUSED]:
        """The next one of a client."""
        while True:
            if self.http.their_state is h11.IDLE:
                _check_head(self.http.trailing_data[0])
            event = self.http.next_event()
            if event is not h11.NEED_DATA:
                return event  # type: ignore[return-value]
            if self.http.they_are_waiting_for_100_continue:
                await self.send(h11.InformationalResponse(status_code=100, headers=[]))
            await self.receive()

    async def receive(self) -> None:
        self.http.receive_data(await self.stream.receive_some(_PART))

    async def send(self, *events: h11.Event) -> None:
        said = b"".join(filter(None, map(self.http.send, events)))
        with suppress(BlockingIOError):  # what needs no turn of the loop is sooner
            said = said[os.write(self.stream.socket.fileno(), said) :]
        if said:
            await self.stream.send_all(said)


class _Memory:
    """Bytes of bodies. An agent has at most its share, an owner no more than is left."""

    def __init__(self) -> None:
        self._free = BODIES_MAX
        #: of agents by their accounts, of owners by their uids
        self._used: Counter[Payer | int] = Counter()
        self._lot = ParkingLot()

    async def take(self, payer: Payer, size: int) -> None:
        async with payer.memory_turn:
            while (
                self._used[payer] + size > _BODIES_OF_ONE
                or self._used[payer["owner"]] + size > self._free - size
            ):
                await self._lot.park()
            self._add(payer, size)

    def give(self, payer: Payer, size: int) -> None:
        self._add(payer, -size)
        self._used += Counter()  # forgets who has nothing
        self._lot.unpark_all()

    def _add(self, payer: Payer, size: int) -> None:
        self._free -= size
        self._used.update({payer: size, payer["owner"]: size})


class Meter:
    """All that connections share."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.memory = _Memory()
        #: of an owner one long body at a time is read, or waits for those of other ones
        self.reading: defaultdict[int, trio.Lock] = defaultdict(trio.Lock)
        self.apart = trio.Lock()
        #: until when an owner's long bodies have had their share of the time
        self.paced: defaultdict[int, float] = defaultdict(float)
        self._files = Files((0, os.geteuid()))
        #: connections that wait for a request
        self._idle = WeakSet[trio.CancelScope]()
        self._ends = False

    def end(self) -> None:
        """Takes no more requests."""
        self._ends = True
        for scope in self._idle:
            scope.cancel()

    async def serve(self, path: str, stream: trio.SocketStream) -> None:
        """One connection of a relay's to the socket of a network, until it ends."""
        client = _Side(stream, h11.SERVER)
        payers: list[Payer] = []
        async with stream:
            try:
                with trio.fail_after(_GREETING_SECONDS):
                    await self._greeted(stream, payers)
                while request := await self._next(client):
                    if not await _Exchange(self, path, client, payers, request).run():
                        return
                    client.http.start_next_cycle()
            except (ForeignError, trio.TooSlowError, *_CLOSED):
                return
            except h11.RemoteProtocolError as error:
                await _say_last(client, error.error_status_hint, str(error))
            except UncountableError as error:
                await _say_last(client, *error.args)
            except Exception:  # of one connection, whatever it is
                log.exception("a connection to %s", path)
            finally:
                payers.clear()  # an error of h11 keeps what led to it

    async def _greeted(self, stream: trio.SocketStream, payers: list[Payer]) -> None:
        """Finds the payers, of whose files a relay hands over descriptors. ``ForeignError`` for
        whoever is none; ``UncountableError`` for files that another meter writes."""
        await trio.lowlevel.wait_readable(stream.socket)
        with socket.socket(fileno=os.dup(stream.socket.fileno())) as plain:
            _, uid, _ = linux.peer(plain)
            data, fds, flags, _ = socket.recv_fds(plain, _GREETING_SIZE, _PAYERS_MAX)
        try:
            known = uid in (self.settings.relay_user, os.geteuid())
            whole = data.startswith(_GREETING) and len(data) == _GREETING_SIZE
            if not (known and whole and fds) or flags & socket.MSG_CTRUNC:
                raise ForeignError
            payers += map(self._files.of, fds)
        finally:
            for fd in fds:
                os.close(fd)
        for payer in payers:
            payer.lock()

    async def _next(self, client: _Side) -> h11.Request | None:
        request = None
        with trio.CancelScope() as scope:
            self._idle.add(scope)
            request = None if self._ends else await client.event()
        return request if isinstance(request, h11.Request) else None


class _Exchange:
    """One request, from its head to the end of its answer."""

    def __init__(
        self, meter: Meter, path: str, client: _Side, payers: Sequence[Payer], head: h11.Request
    ) -> None:
        self._meter = meter
        self._client = client
        self._payers = payers
        self._head = head
        network = meter.settings.networks.get(path)
        if network is None:
            raise UncountableError(503, "this network is no longer configured")
        self._upstream = network.upstream
        self._form = _form_of(network.api, head)
        #: bytes of memory that it has
        self._taken = 0
        #: of an answer that is counted: so far of none
        self._reader = None if self._form.free else Reader(self._form)
        #: when it was sent to those who may charge for it; whether the client takes no more
        self._begun, self._gone = 0.0, False

    async def run(self) -> bool:
        """Whether another request may follow."""
        size = int(dict(self._head.headers).get(b"content-length", _BODY_MAX))
        if size > _BODY_MAX:
            raise UncountableError(413, _TOO_LONG)
        await self._meter.memory.take(self._payers[0], size)
        self._taken = size
        more = False
        try:
            with open(os.memfd_create("body"), "r+b", buffering=0) as self._body:
                self._wanted = await self._read(self._body.fileno())
                self._head = _anew(self._head, self._wanted.size)
                self._request = Request(self._payers, self._meter.settings.rates, self._wanted)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch, nursery.cancel_scope)
                    more = await self._judged()
                    nursery.cancel_scope.cancel()
        finally:
            self._give(self._taken)
        if not more and not self._gone:  # and the client had no answer yet, see _say_last
            raise UncountableError(502, "the proxy cannot be reached")
        return not self._gone and self._client.http.our_state is h11.DONE

    def _give(self, size: int) -> None:
        self._taken -= size
        self._meter.memory.give(self._payers[0], size)

    async def _read(self, file: int) -> Asked:
        """Has a body read: what it asks for."""
        size = 0
        with trio.move_on_after(_BODY_SECONDS) as scope:
            while isinstance(part := await self._client.event(), h11.Data):
                size += os.write(file, part.data)
                if size > self._taken:
                    raise UncountableError(413, _TOO_LONG)
                await self._let_others(size, len(part.data))
        if scope.cancelled_caught:
            raise UncountableError(408, "the body did not come in time")
        self._give(self._taken - size)
        if size <= _QUICK_BODY:
            came = os.pread(file, size, 0)
            if came.count(b":") <= _QUICK_KEYS:
                return asked(self._form, came, file)
        async with self._meter.reading[self._payers[0]["owner"]], self._meter.apart:
            return await asked_apart(self._form, file)

    async def _let_others(self, passed: int, size: int) -> None:
        """Have their turn after each part of a body, and much of the time if it is long."""
        if passed > _QUICK_BODY:
            paced, owner = self._meter.paced, self._payers[0]["owner"]
            paced[owner] = max(paced[owner], trio.current_time()) + size / _LONG_A_SECOND
            await trio.sleep_until(paced[owner])
        elif passed > size:
            await checkpoint()

    async def _watch(self, scope: trio.CancelScope) -> None:
        """Notices that the client goes, and keeps what it sends meanwhile, which is bounded."""
        client = self._client
        while len(client.http.trailing_data[0]) < _HEAD_MAX:
            try:
                data = await client.stream.receive_some(_PART)
            except _CLOSED:
                data = b""
            if not data:
                self._gone = True
                drain = self._meter.settings.drain if self._begun else 0
                scope.deadline = trio.current_time() + drain
                return
            client.http.receive_data(data)

    async def _judged(self) -> bool:
        """Whether the client has a whole answer, or a refusal."""
        if self._form.free:
            return await self._pass()
        try:
            verdict = self._request.judge()
            while isinstance(at := verdict, Payer):
                async with at.turn:
                    while (verdict := self._request.judge()) is at:
                        with trio.move_on_after(_LOOK_SECONDS):
                            await at.ended.park()
            if isinstance(verdict, str):
                headers, body = refusal(self._form.api, verdict)
                return await _say(self._client, 429, headers, body)
            return await self._pass()
        finally:
            self._request.end()

    async def _pass(self) -> bool:
        """Whether an answer came, whole."""
        whole = False
        try:
            async with _connected(self._upstream) as stream:
                self._begun = trio.current_time()
                if self._reader:
                    self._request.sent()
                upstream = _Side(stream, h11.CLIENT)
                with suppress(*_CLOSED):  # it may have answered before
                    await upstream.send(self._head)
                    await self._send_body(stream)
                self._body.close()
                self._give(self._taken)
                whole = await self._answer(upstream)
        except (h11.RemoteProtocolError, *_CLOSED) as error:
            log.error("%s: %s", self._upstream, error)
        finally:
            self._settle()
        return whole

    async def _send_body(self, stream: trio.SocketStream) -> None:
        begin = 0
        while begin < self._wanted.size:
            if begin:
                await trio.lowlevel.wait_writable(stream.socket)
            sent = os.sendfile(stream.socket.fileno(), self._body.fileno(), begin, _PART)
            begin += sent
            await self._let_others(begin, sent)

    async def _answer(self, upstream: _Side) -> bool:
        """Counts what comes, and then shows it: what came at once, at once."""
        came: list[h11.Event] = []
        while True:
            event = upstream.http.next_event()
            if event is h11.NEED_DATA:
                await self._show(came)
                came = []
                await upstream.receive()
            elif isinstance(event, h11.Response):
                came.append(self._answer_head(event))
            elif isinstance(event, h11.Data):
                data = bytes(event.data)
                came.append(h11.Data(data=self._reader.feed(data) if self._reader else data))
            elif isinstance(event, h11.EndOfMessage):
                came.append(h11.Data(data=self._reader.finish() if self._reader else b""))
                self._settle()
                await self._show([*came, h11.EndOfMessage()])
                return True
            elif isinstance(event, h11.ConnectionClosed):
                return False

    def _answer_head(self, event: h11.Response) -> h11.Response:
        said = {name: value.decode("latin-1") for name, value in event.headers}
        if self._reader:
            kind, encoding = said.get(b"content-type", ""), said.get(b"content-encoding", "")
            reader = Reader(self._form, kind, encoding, hides=self._wanted.hides)
            self._reader = reader if 200 <= event.status_code < 300 else None
        dropped = _HOP | ({b"content-length"} if self._wanted.hides else set())
        kept = [(name, value) for name, value in event.headers if name not in dropped]
        return h11.Response(status_code=event.status_code, headers=kept, reason=event.reason)

    def _settle(self) -> None:
        """Charges what the answer said, or may have used."""
        if self._reader and self._begun:
            self._request.settle(self._reader, trio.current_time() - self._begun)
            self._reader = None

    async def _show(self, events: Sequence[h11.Event]) -> None:
        """Charges what is known, and then shows these to the client."""
        if self._reader:
            self._request.charge(self._reader.usage, self._reader.model)
        if events and not self._gone:
            try:
                await self._client.send(*events)
            except _CLOSED:  # which is noticed elsewhere too
                self._gone = True


@asynccontextmanager
async def _connected(path: str) -> AsyncIterator[trio.SocketStream]:
    """A stream to an upstream, whose queue may be full for a while."""
    with socket.socket(socket.AF_UNIX) as made:
        made.setblocking(False)
        while (error := made.connect_ex(path)) == errno.EAGAIN:
            await trio.sleep(_QUEUE_LOOK_SECONDS)
        if error:
            raise OSError(error, os.strerror(error))
        yield trio.SocketStream(trio.socket.from_stdlib_socket(made))


def _check_head(came: bytes) -> None:
    """``UncountableError`` for a head that is too long, or could be read in two ways."""
    end = _BLANK.search(came)
    head = came[: end and end.end()]
    if len(head) > _HEAD_MAX or head.count(b"\n") > _LINES_MAX:
        most = f"{_HEAD_MAX} bytes or {_LINES_MAX} lines"
        raise UncountableError(431, f"the head has more than {most}")
    if end and b"," in b",".join(_LENGTHS.findall(head)):
        raise UncountableError(400, "a body has one length")


def _form_of(api: str, request: h11.Request) -> Form:
    """``UncountableError`` for what cannot be counted."""
    if b"upgrade" in dict(request.headers):
        raise UncountableError(426, "nothing but HTTP/1.1 can be counted here")
    path = request.target.partition(b"?")[0].decode("latin-1")
    form = reading.form_of(api, path) if request.method == b"POST" else None
    if form is None:
        method = request.method.decode("latin-1")
        raise UncountableError(403, f"{method} {path[:128]} cannot be counted, so it does not pass")
    return form


def _anew(request: h11.Request, size: int) -> h11.Request:
    connection = b",".join(value for name, value in request.headers if name == b"connection")
    named = {name.strip().lower() for name in connection.split(b",")}
    kept = [pair for pair in request.headers if pair[0] not in _OWN and pair[0] not in named]
    headers = [*kept, (b"Accept-Encoding", b"identity"), (b"Connection", b"close")]
    headers.append((b"Content-Length", b"%d" % size))
    try:
        return h11.Request(method=request.method, target=request.target, headers=headers)
    except h11.LocalProtocolError as error:
        raise UncountableError(400, str(error)) from None


async def _say(client: _Side, status: int, headers: dict[str, str], body: bytes) -> bool:
    """An answer of the meter's own; False if nobody takes it."""
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
    head = h11.Response(status_code=status, headers=list(headers.items()))
    try:
        await client.send(head, h11.Data(data=body), h11.EndOfMessage())
    except (h11.LocalProtocolError, *_CLOSED):
        return False
    return True


async def _say_last(client: _Side, status: int, sentence: str) -> None:
    """An error, after which the connection is closed; nothing in the middle of an answer."""
    if client.http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
        body = json.dumps({"error": {"message": f"ctxfs: {sentence}"}}).encode()
        if await _say(client, status, {"Connection": "close"}, body):
            # a close with something unread resets the connection, which can overtake the answer
            with suppress(*_CLOSED), trio.move_on_after(_LINGER_SECONDS):
                await client.stream.send_eof()
                while await client.stream.receive_some(_PART):
                    pass
