"""A connection to a socket of ctxfs, made again when it is lost, whose frames come by a loop."""

from __future__ import annotations

import time

from client.exits import Failure
from client.loop import Lines, Loop, encode, parse_object
from client.sockets import Connection
from client.types import Any, Callable

Frame = dict[str, Any]

RETRY, RETRY_MAX = 0.1, 2.0  # seconds between two attempts to connect
LOST_MAX = 60.0  # seconds after which what could not be said has failed


class Link:
    """A connection; if it is lost, it is made again, later each time, until it is closed."""

    def __init__(self, loop: Loop, connect: Callable[[], Connection]) -> None:
        self.loop = loop
        self.connect = connect
        self.connection: Connection | None = None
        self.lines = Lines(-1)
        self.delay = RETRY
        self.lost: float | None = None  # since when nobody answers
        self.over = False

    # what differs

    def begin(self) -> None:
        """Ask what there is to ask on a new connection."""
        raise NotImplementedError

    def heard(self, frame: Frame) -> None:
        """Take a frame."""
        raise NotImplementedError

    def failed(self, error: Failure | OSError, seconds: float) -> None:
        """Give up, if it is too late to connect once more: nobody answers for so many seconds."""
        raise NotImplementedError

    # what does not

    def open(self) -> None:
        """Connect; `Failure` or `OSError`."""
        self.connection = self.connect()
        self.lines = Lines(self.connection.fileno())
        self.loop.watch(self.lines.fd, self._read)
        self.begin()

    def reopen(self) -> None:
        """Connect now, or as soon as somebody answers."""
        if self.over:
            return
        try:
            self.open()
        except (Failure, OSError) as error:
            self.failed(error, self._again())

    def ask(self, **fields: object) -> None:
        """Send a request, if there is a connection."""
        if self.connection is not None:
            self.loop.write(self.lines.fd, encode(fields))

    def close(self) -> None:
        """End the connection for good."""
        self.over = True
        self._end()

    def _end(self) -> None:
        if self.connection is not None:
            self.loop.forget(self.lines.fd)
            self.connection.close()
            self.connection = None

    def _again(self) -> float:
        self.lost = time.monotonic() if self.lost is None else self.lost
        self.loop.later(self.delay, self.reopen)
        self.delay = min(2 * self.delay, RETRY_MAX)
        return time.monotonic() - self.lost

    def _read(self) -> None:
        lines = self.lines.read()
        for frame in [None] if lines is None else map(parse_object, lines):
            if frame is None:  # the end; no frame is anything else
                self._end()
                self._again()
            if frame is None or self.connection is None:
                return
            self.delay, self.lost = RETRY, None
            self.heard(frame)
