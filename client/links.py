"""A connection to a socket of ctxfs, whose frames come by a loop, and when to make it again."""

from __future__ import annotations

from client.events import parse_event
from client.loop import Lines, Loop, encode
from client.types import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

Frame = dict[str, Any]

RETRY, RETRY_MAX = 0.1, 2.0  # seconds between two attempts to connect
LOST_MAX = 60.0  # seconds after which what could not be said has failed


class Link:
    """A connection, which may be made again when it is lost."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.connection: socket.socket | None = None
        self.lines = Lines(-1)

    def take(self, frame: Frame) -> None:
        """Take a frame."""
        raise NotImplementedError

    def lost(self) -> None:
        """The connection has ended."""
        raise NotImplementedError

    def connect(self, connection: socket.socket) -> None:
        """Begin with a connection."""
        self.connection = connection
        self.lines = Lines(connection.fileno())
        self.loop.watch(self.lines.fd, self._read)

    def ask(self, **fields: object) -> None:
        """Send a request, if there is a connection."""
        if self.connection is not None:
            self.loop.write(self.lines.fd, encode(fields))

    def close(self) -> None:
        """End the connection."""
        if self.connection is not None:
            self.loop.forget(self.lines.fd)
            self.connection.close()
            self.connection = None

    def _read(self) -> None:
        lines = self.lines.read()
        for frame in [None] if lines is None else map(parse_event, lines):
            if frame is None:  # the end; no frame is anything else
                self.close()
                self.lost()
            elif self.connection is not None:
                self.take(frame)
