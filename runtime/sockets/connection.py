"""One accepted connection: JSON Lines in and out, and what its peer pays for them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import trio

from runtime.authority.accounts import Accounts, Charge, Payer, Resource
from runtime.authority.loop import Timed, Turns
from runtime.caller import Caller
from runtime.errors import MalformedError, TooLongError
from runtime.kernel import linux
from runtime.kernel.handover import Descriptors, pack_caller
from runtime.records.config import Config
from runtime.records.model import Agent
from runtime.texts.names import dump_json

#: of a connection: its own, and one to notice that the peer hangs up
_DESCRIPTORS: Final = 2
#: about what one costs in memory before anything is said, in bytes
_OWN_SIZE: Final = 16 << 10
#: seconds between two connections of one owner's agents, and between two of its followers that
#: are told of more: each costs a dozen steps or two
REST_SECONDS: Final = 0.004
#: of what is sent and received, what the kernel gives or is given at once
_PIECE: Final = 64 << 10
#: frames up to this size are part of that
_SMALL: Final = 4 << 10
#: about what a value takes, such as an empty list and its place in another
_VALUE: Final = 64


@dataclass(slots=True, eq=False, kw_only=True)
class Asked:
    """The JSON values of a frame that asks for something, and of what was done of it so far, for
    the next daemon: noted before it is said."""

    fields: dict[str, Any]
    progress: dict[str, Any] = field(default_factory=dict)


def _encoded(frame: dict[str, Any]) -> bytearray:
    return bytearray((dump_json(frame) + "\n").encode())


def _place(unsent: list[bytearray], one: bytearray) -> int:
    """Equal frames are not the same."""
    return next(place for place, each in enumerate(unsent) if each is one)


def _memory_of(text: str) -> int:
    """About what a line takes as a text, which one wide character makes wide, and as values."""
    values = sum(text.count(each) for each in ",:[{")
    return 2 * sys.getsizeof(text) + values * _VALUE


class Connection:
    """One accepted connection. Frames are sent whole, one at a time."""

    def __init__(
        self,
        server: Server,
        stream: trio.SocketStream,
        caller: Caller,
        config: Config,
        accounts: Accounts,
        turns: Turns,
        who: Payer,
    ) -> None:
        self.server = server
        self.stream = stream
        self.caller = caller
        self._time = accounts.time
        self._turns = turns
        self.who = who
        self._lock = trio.Lock()
        self._buffer = bytearray()
        self._frame_max = config.frame_max
        self._charges = tuple(
            Charge(accounts, who, resource)
            for resource in (Resource.CONNECTIONS, Resource.DESCRIPTORS, Resource.MEMORY)
        )
        self._memory = self._charges[-1]
        #: what is charged for the line that is being answered
        self.answering = 0
        #: the line that was received and is not being answered yet
        self.at_hand = ""
        #: what was said and not taken by the kernel yet, in order
        self._unsent: list[bytearray] = []
        #: operations that are answered later
        self.pending: list[Asked] = []
        #: what the daemon before had yet to send, and what it was asked and how far it came
        self.left_unsent = bytearray()
        self.left_pending: list[tuple[dict[str, Any], dict[str, Any]]] = []
        #: the wait for a line
        self.receiving = trio.CancelScope()
        #: whether nothing more is received from it
        self.ending = False

    def admit(self) -> None:
        """Charges the peer for the connection itself; ``QuotaError``."""
        for charge, amount in zip(self._charges, (1, _DESCRIPTORS, _OWN_SIZE), strict=True):
            charge.resize(amount)

    def charge(self, more: int) -> None:
        """Charges the peer for bytes that are kept for it; fewer than 0 are given back."""
        self._memory.resize(self._memory.amount + more)

    def release(self) -> None:
        """Gives back all that is charged, at the end of the connection."""
        for charge in self._charges:
            charge.release()

    def timed(self, coroutine: Coroutine[Any, Any, None]) -> Timed[None]:
        """Awaits it; what its steps take of the loop is charged to the peer's owner."""
        return Timed(coroutine, partial(self._time.pay, self.who))

    async def send(self, frame: dict[str, Any] | bytearray) -> None:
        """Waits until the peer has room: a slow reader slows only itself, and what waits
        for it is charged to it. ``QuotaError``. Bytes are the connection's from then on: nobody
        else is to keep a copy, which nobody would pay for."""
        left = frame if isinstance(frame, bytearray) else _encoded(frame)
        held = len(left) if len(left) > _SMALL else 0
        self.charge(held)
        self._unsent.append(left)
        try:
            await self._turns.take(self.who)
            async with self._lock:
                # the one that is sent is first, whoever had to wait for a turn
                self._unsent.insert(0, self._unsent.pop(_place(self._unsent, left)))
                await self._send_all(left)
        finally:
            del self._unsent[_place(self._unsent, left)]
            self.charge(-held)

    async def hand(self, frame: dict[str, Any], descriptor: int, asked: Asked) -> None:
        """Sends the answer to what was asked with a descriptor, in one step with ``done``."""
        data = _encoded(frame)
        peer = self.stream.socket._sock  # type: ignore[attr-defined]
        await self._turns.take(self.who)
        async with self._lock:
            while True:
                try:
                    socket.send_fds(peer, [data], [descriptor])
                    asked.progress["done"] = True
                    return
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(self.stream.socket.fileno())
                except OSError as error:
                    raise trio.BrokenResourceError(str(error)) from error

    async def _send_all(self, left: bytearray) -> None:
        """Takes away what the kernel has taken, so that it is known at any time what is left."""
        while left:
            await trio.lowlevel.checkpoint()
            try:
                # not by trio, which tells what was sent a step later
                sent = os.write(self.stream.socket.fileno(), left[:_PIECE])
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self.stream.socket.fileno())
                continue
            except OSError as error:
                raise trio.BrokenResourceError(str(error)) from error
            del left[:sent]

    # in the next daemon

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        received = self.at_hand.encode() + b"\n" if self.at_hand else b""
        return {
            "fd": descriptors.keep(self.stream.socket.fileno()),
            "caller": pack_caller(self.caller),
            # older programs read it
            "path": self.server.path,
            "received": received + self._buffer,
            "unsent": b"".join(self._unsent),
            "pending": [
                [asked.fields, asked.progress]
                for asked in self.pending
                if "done" not in asked.progress
            ],
            "ending": self.ending,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Charges for what there is already."""
        self._buffer = bytearray(saved["received"])
        self.ending = saved["ending"]
        sizes = (1, _DESCRIPTORS, _OWN_SIZE + len(self._buffer))
        for charge, amount in zip(self._charges, sizes, strict=True):
            charge.set(amount)
        self.left_unsent, self.left_pending = bytearray(saved["unsent"]), saved["pending"]

    async def next_line(self) -> str | None:
        """The next line, None at the end of the connection, or of all of the server.

        Raises what ``receive`` raises.
        """
        with trio.CancelScope() as self.receiving:
            # of lines that came together each has a step
            await trio.lowlevel.checkpoint()
            if not (self.server.ended.is_set() or self.ending):
                return await self.receive()
        return None

    def take_rest(self) -> bytes:
        """The bytes that came after the line at hand, for whoever reads the peer from now on."""
        rest = bytes(self._buffer)
        self.charge(-len(rest))
        self._buffer.clear()
        return rest

    def take_line(self) -> str:
        """The line at hand, which is being answered from now on."""
        line, self.at_hand = self.at_hand, ""
        return line

    async def receive(self) -> str | None:
        """The next line, None at the end.

        Raises ``TooLongError``, ``MalformedError`` or ``QuotaError``.
        """
        # The line before this one was kept until it was answered.
        self.charge(-self.answering)
        self.answering = 0
        searched = 0
        self._drop_blanks()
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > self._frame_max:
                raise TooLongError(f"a frame may have at most {self._frame_max} bytes")
            if not await self._receive_some():
                if not self._buffer:
                    return None
                self.charge(1)
                self._buffer += b"\n"  # the end ends a line too
            if not searched:
                self._drop_blanks()
        if end > self._frame_max:
            raise TooLongError(f"a frame may have at most {self._frame_max} bytes")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self.answering = end + 1
        try:
            text = line.decode()
        except UnicodeDecodeError:
            raise MalformedError("a frame must be UTF-8") from None
        if len(text) > _SMALL:
            more = _memory_of(text) - self.answering
            self.charge(more)
            self.answering += more
        # known in the same step: whoever waits for it goes on in a later one
        self.at_hand = text
        return self.at_hand

    async def _receive_some(self) -> bool:
        """Bytes from the peer, in its turn; False at the end. An end has its turn too: hundreds of
        connections may end at once, and each end costs as much as a frame."""
        data = b""
        try:
            data = await self._read()
        finally:
            await self._turns.take(self.who)
        return bool(data)

    async def _read(self) -> bytes:
        while True:
            await trio.lowlevel.checkpoint()
            try:
                # not by trio, which tells what was received a step later
                with linux.hurried():
                    data = os.read(self.stream.socket.fileno(), _PIECE)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self.stream.socket.fileno())
                continue
            except OSError as error:
                raise trio.BrokenResourceError(str(error)) from error
            self.charge(len(data))
            self._buffer += data
            return data

    def _drop_blanks(self) -> None:
        """Drops all empty lines before a frame at once: there may be very many."""
        frames = self._buffer.lstrip()
        if len(frames) < len(self._buffer):
            self.charge(len(frames) - len(self._buffer))
            self._buffer = frames


class Server:
    """A listening socket and its open connections; ``agent`` is None at those of the daemon."""

    def __init__(self, agent: Agent | None = None) -> None:
        self.agent = agent
        self.accepting = trio.CancelScope()
        self.refusing = False
        self.ended = trio.Event()
        #: while it accepts
        self.listener: socket.socket | None = None
        #: accepted, and not admitted yet
        self.arriving: list[socket.socket] = []
        self.connections: list[Connection] = []
        #: taken over, and not opened by this daemon yet
        self.restored = False

    @property
    def path(self) -> str:
        """The name of the socket, as in reasons."""
        return f"agent/{self.agent.name}.sock" if self.agent is not None else "ctxd.sock"

    def end(self) -> None:
        """Nothing more is accepted or received."""
        self.accepting.cancel()
        self.ended.set()
        for connection in self.connections:
            connection.receiving.cancel()
