"""A loop that waits for several descriptors at once; lines, and frames of JSON in them."""

from __future__ import annotations

import os
import time

from client.jsontext import dumps, loads
from client.types import Any, Callable

BLOCK = 1 << 16
#: bytes of a line, of which no more is kept than tells that it is longer
LINE_MAX = 16 << 20
#: nothing is read while so much waits for somebody who does not read
BACKLOG_MAX = 16 << 20
#: a pipe that poll(2) reports as writable takes as much without blocking
AT_ONCE = 4096
SHARE = 10  # what is done again and again takes at most one part in so many of the time
LONGEST = 86400.0  # seconds of one poll(2), which takes at most 24 days
POLLIN, POLLPRI, POLLOUT = 1, 2, 4  # of poll(2); select is imported where it is used


def encode(value: object) -> bytes:
    """Return one line of JSON; half of a surrogate pair is escaped, as JSON can have it."""
    return dumps(value).encode("utf-8", "backslashreplace") + b"\n"


def parse_object(line: bytes) -> dict[str, Any] | None:
    """Return what a line of JSON says; None if that is no object."""
    try:
        found = loads(line.decode()) if line else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class Lines:
    """The lines that arrive at a descriptor: at most one byte too many of one that is too long."""

    def __init__(self, fd: int, most: int = LINE_MAX) -> None:
        self.fd = fd
        self.most = most
        self.pieces: list[bytes] = []
        self.size = 0

    def read(self) -> list[bytes] | None:
        """Return the lines that one read completes; None at the end."""
        try:
            data = os.read(self.fd, BLOCK)
        except OSError:
            return None  # the peer reset the connection
        return self.add(data) if data else None

    def add(self, data: bytes) -> list[bytes]:
        """Return the lines that more bytes complete."""
        first, *more = data.split(b"\n")
        self._add(first)
        if not more:
            return []
        lines = [b"".join(self.pieces), *(line[: self.most + 1] for line in more[:-1])]
        self.pieces, self.size = [], 0
        self._add(more[-1])
        return lines

    def rest(self) -> list[bytes]:
        """Return the last line, which the end has completed, if there is one."""
        return self.add(b"\n") if self.size else []

    def _add(self, piece: bytes) -> None:
        piece = piece[: max(0, self.most + 1 - self.size)]
        if piece:
            self.pieces.append(piece)
            self.size += len(piece)


class Loop:
    """Calls whoever waits for a descriptor or for a time, and writes what can be written."""

    def __init__(self) -> None:
        import select

        self.poller = select.poll()
        self.readers: dict[int, tuple[int, Callable[[], object]]] = {}
        self.unwritten: dict[int, bytearray] = {}
        self.times: list[tuple[float, Callable[[], object]]] = []
        self.broken: set[int] = set()  # nobody reads what is written there
        self.over = False

    def watch(self, fd: int, action: Callable[[], object], events: int = POLLIN) -> None:
        """Call `action` whenever there is something to read, or another event."""
        self.readers[fd] = events, action
        self._register(fd)

    def forget(self, fd: int) -> None:
        """Call nobody for a descriptor, and write no more to it; it is still open."""
        self.readers.pop(fd, None)
        self.unwritten.pop(fd, None)
        self.broken.discard(fd)
        self._register(fd)

    def _register(self, fd: int) -> None:
        if fd in self.readers or fd in self.unwritten:
            events = self.readers[fd][0] if fd in self.readers else 0
            self.poller.register(fd, events | POLLOUT * (fd in self.unwritten))
        else:
            self.poller.register(fd)  # or it may be unknown
            self.poller.unregister(fd)

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Call `action` after some time."""
        self.times.append((time.monotonic() + seconds, action))

    def every(self, seconds: float, action: Callable[[], object]) -> None:
        """Call `action` now and again and again, for at most a tenth of the time."""
        begun = time.monotonic()
        action()
        took = time.monotonic() - begun
        self.later(max(seconds, SHARE * took), lambda: self.every(seconds, action))

    def write(self, fd: int, data: bytes) -> None:
        """Write data as soon as they can be written."""
        if fd not in self.unwritten:
            self.unwritten[fd] = bytearray()
            self._register(fd)
        self.unwritten[fd] += data

    def stop(self) -> None:
        """Say that it is over."""
        self.over = True

    def run(self) -> None:
        """Serve until somebody says that it is over."""
        while not self.over:
            self.step()

    def drain(self, most: int = 0) -> None:
        """Write until no more than this is left of what anybody is to read."""
        while any(len(data) > most for data in self.unwritten.values()):
            self.step(reading=False)

    def step(self, reading: bool = True, most: float | None = None) -> bool:
        """Wait for the next thing to do, at most so many seconds, and do it; return whether there
        was one."""
        import select

        late = any(len(data) > BACKLOG_MAX for data in self.unwritten.values())
        hears, poller = reading and not late, self.poller
        if not hears:
            poller = select.poll()
            for fd in self.unwritten:
                poller.register(fd, POLLOUT)
        waits = [when - time.monotonic() for when, _ in self.times] if reading else []
        waits += [] if most is None else [most]
        wait = 1000 * max(0.0, min(*waits, LONGEST)) if waits else None
        ready = poller.poll(wait)
        for fd, found in ready:
            if fd in self.unwritten and found & ~(POLLIN | POLLPRI):
                self._flush(fd)
            if hears and found & ~POLLOUT and fd in self.readers:
                self.readers[fd][1]()
        now = time.monotonic()
        due = [action for when, action in self.times if when <= now] if reading else []
        if due:
            self.times = [row for row in self.times if row[0] > now]
            for action in due:
                action()
        return bool(ready or due)

    def _flush(self, fd: int) -> None:
        data = self.unwritten[fd]
        try:
            del data[: os.write(fd, data[:AT_ONCE])]
        except OSError:
            data.clear()  # a reader learns this by the end of the input
            self.broken.add(fd)
        if not data:
            del self.unwritten[fd]
            self._register(fd)
