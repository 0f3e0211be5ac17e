"""One connection of a link, with input and output: what is read is heard, what is said is sent.

Reading never waits for writing: two daemons that both wrote first would wait for each other.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Final

import trio

from runtime.kernel.inotify import Wakeup
from runtime.peers.peering import Event, Host, Message, Peering, SilentLinkError

#: of what is read at once; of what is written, unless one frame has more
_PIECE: Final = 512 << 10
_WRITTEN: Final = 128 << 10
#: bytes that are read at once of a file of which much is to come: less is waited for so long
_LITTLE: Final = 96 << 10
_GATHERING: Final = 0.001
#: of frames that are read between two looks at the clock, and seconds that others may wait
_STEP: Final = 4 << 10
_STEP_SECONDS: Final = 0.001
#: what a connection may take in memory: a line, bytes that are asked for, answers, and what the
#: kernel has of these
MEMORY: Final = 4608 << 10


def now() -> float:
    """Seconds of CLOCK_BOOTTIME: a lease goes on while a machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Talk:
    """A connection between its first byte and its last."""

    def __init__(
        self,
        peering: Peering,
        fd: int,
        patience: float,
        turn: Callable[[], Awaitable[None]],
        fed: Callable[[], None] = lambda: None,
    ) -> None:
        """``patience``: seconds after which a connection on which nothing comes is over; ``turn``
        is awaited between two steps, so that however many connections one owner has, others are
        served between any two; ``fed`` is called when something came, and its events were heard.
        """
        self.peering = peering
        peering.push = self.push
        self._patience = patience
        self._turn = turn
        self._fed = fed
        #: told when there is something to say
        self.said = Wakeup()
        #: bytes that were read and written
        self.moved = [0, 0]
        self.heard = trio.current_time()
        self.fd = fd
        #: what the kernel has not taken yet of what is said
        self.left = memoryview(b"")
        #: what was read, and the peering has not taken yet
        self.unheard = memoryview(b"")
        #: ends when nothing was heard for too long
        self._scope = trio.CancelScope(deadline=self.heard + patience)
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True
        self._scope.cancel()

    def expect(self, patience: float) -> None:
        """From now on a connection is over on which nothing comes for so many seconds."""
        self._patience = patience
        self._scope.deadline = self.heard + patience

    async def run(self, hear: Callable[..., Awaitable[None]], received: bytes = b"") -> None:
        """Until either side has enough. ``hear`` gets an event, or several messages that are done
        together. ``BrokenLinkError``."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                for task in (self._send, self._ask):
                    nursery.start_soon(task)
                await self._hear(hear, received)
                nursery.cancel_scope.cancel()
        if self._scope.cancelled_caught and not self._is_closed:
            raise SilentLinkError(f"nothing was heard for {self._patience:g} s")

    async def _hear(self, hear: Callable[..., Awaitable[None]], data: bytes) -> None:
        begun, is_first = time.monotonic(), True

        async def rest() -> None:
            nonlocal begun
            if time.monotonic() - begun > _STEP_SECONDS:
                await trio.lowlevel.checkpoint()
                await self._turn()
                begun = time.monotonic()

        while True:
            self.unheard = memoryview(data)
            self.peering.hears = True
            while self.unheard or is_first:
                # frames are read in short steps; bytes of files take no time
                size, is_first = _PIECE if self.peering.lacks else _STEP, False
                is_all = len(data) == len(self.unheard) <= size
                piece = data if is_all else bytes(self.unheard[:size])
                self.unheard = self.unheard[size:]
                found = self.peering.feed(piece, now())
                for events in _together(found, self.peering):
                    await hear(*events)
                    await rest()  # it may be a change with its transaction, or a file
                self._fed()
                await rest()
            self.peering.hears = False
            self.push()
            came = None
            if self.peering.lacks:  # there may be more at once
                much = self.peering.credit < self.peering.credit_max // 2
                if much and 0 < len(data) < _LITTLE:
                    await trio.sleep(_GATHERING)
                    begun = time.monotonic()
                came = self._read()
            while came is None:
                await trio.lowlevel.wait_readable(self.fd)
                begun = time.monotonic()
                came = self._read()
            if not (data := came):
                return
            self.heard = trio.current_time()
            self._scope.deadline = self.heard + self._patience
            self.moved[0] += len(data)

    def _read(self) -> bytes | None:
        """Reads what there is: nothing at the end, None before there is something."""
        try:
            return os.read(self.fd, _PIECE)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in (errno.ECONNRESET, errno.EPIPE):
                return b""
            raise

    def push(self) -> None:
        """Sends what there is to say, and later what the kernel does not take at once."""
        if not self._push():
            self.said.notify()

    def _push(self) -> bool:
        """Sends what there is to say, as far as the kernel takes it; whether that is all."""
        while self.left or (data := self.peering.outgoing(_WRITTEN)):
            self.left = self.left or memoryview(data)
            try:
                written = os.write(self.fd, self.left)
            except BlockingIOError:
                return False
            except OSError:
                return True  # who reads is told of the end, after what came before it
            self.left = self.left[written:]
            self.moved[1] += written
        return True

    async def _send(self) -> None:
        count = 0

        def is_told() -> bool:
            return self.said.count != count

        while True:
            count = self.said.count
            while not self._push():
                await trio.lowlevel.wait_writable(self.fd)
            await self.said.until(is_told)

    async def _ask(self) -> None:
        """A host asks for its lease in time."""
        while isinstance(self.peering, Host):
            if self.peering.is_open:
                due = self.peering.tick(now())
                self.said.notify()
                await trio.sleep(max(due - now(), 0.0))
            else:
                await self.said.after(self.said.count)


def _together(events: Iterable[Event], peering: Peering) -> Iterator[list[Event]]:
    """Messages that follow each other and can be done at once, and anything else by itself."""
    messages: list[Event] = []
    for event in events:
        most = peering.at_once(event) if isinstance(event, Message) else 1
        if len(messages) >= most:
            yield messages
            messages = []
        messages.append(event)
        if most == 1:
            yield messages
            messages = []
    if messages:
        yield messages
