"""Calls of tools over the socket of an agent, or of the daemon, until each is answered.

A connection may end, and the daemon too. Then there is another connection, and what was not
answered is said again: a call with an id is carried out once.
"""

from __future__ import annotations

import errno
import os
import select
import time
from collections import deque

from client.arguments import duration
from client.exits import Failure
from client.sockets import open_socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator
    from typing import Any

    from client.root import Root

    Frame = dict[str, Any]


PENDING_MAX = 16  # calls of one connection that the daemon lets wait
LINKS_MAX = 8
WAITING_MAX = 1024  # calls that wait for a connection
SIZE_MAX = 64 << 20  # and their bytes
RETRY, RETRY_MAX = 0.1, 2.0  # seconds between two attempts to connect
LOST_MAX = 60.0  # seconds after which a call that cannot be made has failed
WAITS = "TaskOutput"  # the tool that may wait
WAIT = 50.0  # seconds: some clients give up after 60
BLOCK = 1 << 16
UNKNOWN = "whether it was carried out is not known"


def encode(value: object) -> bytes:
    """Return one line of JSON."""
    import json

    try:
        return json.dumps(value, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(value).encode() + b"\n"


def seconds(timeout: object) -> float | None:
    """Return the seconds of a timeout that the tool takes; None for any other value."""
    if isinstance(timeout, str):
        try:
            return duration(timeout)
        except Failure:
            return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        return None
    return float(timeout) if 0 <= timeout < 1e9 else None


class Call:
    """One call of a tool; `answered` gets the frame that answers it."""

    def __init__(
        self, name: str, given: dict[str, Any], answered: Callable[[Call, Frame], None]
    ) -> None:
        self.id = os.urandom(8).hex()
        self.name = name
        self.given = given
        self.answered = answered
        self.began = time.monotonic()
        self.until: float | None = None
        if name == WAITS and given.get("block") is True:
            wait = seconds(given.get("timeout", WAIT))
            self.until = None if wait is None else self.began + wait
        self.link: Link | None = None
        self.lost: float | None = None  # since when there is no connection for it
        self.alone = False  # on a connection of its own, where every error is about it
        self.size = len(encode(given))

    def frame(self, now: float) -> bytes:
        """Return the request, which waits for what is left of the time."""
        given = self.given
        if self.until is not None:
            given = {**given, "timeout": round(max(0.0, self.until - now), 3)}
        return encode({"op": "tool", "id": self.id, "name": self.name, "input": given})


class Link:
    """One connection, and the calls that it has to answer."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.fd = connection.fileno()
        self.calls: dict[str, Call] = {}
        self.unsent = bytearray()
        self.unread = bytearray()
        self.alone = False
        self.useful = False  # something was answered

    def send(self, data: bytes) -> None:
        """Send as much as there is room for, and the rest later; `OSError` if it is broken."""
        self.unsent += data
        try:
            while self.unsent:
                del self.unsent[: self.connection.send(self.unsent)]
        except BlockingIOError:
            return

    def lines(self) -> Iterator[bytes]:
        """Yield the whole lines that have arrived; `EOFError` or `OSError` at the end."""
        while True:
            try:
                data = self.connection.recv(BLOCK)
            except BlockingIOError:
                return
            searched = len(self.unread)
            self.unread += data
            while (end := self.unread.find(b"\n", searched)) >= 0:
                line, searched = bytes(self.unread[:end]), 0
                del self.unread[: end + 1]
                yield line
            if not data:
                raise EOFError


class Calls:
    """All calls that are not answered; `path` returns that of the socket below the root."""

    def __init__(self, root: Root, path: Callable[[], str]) -> None:
        self.root = root
        self.path = path
        self.waiting: deque[Call] = deque()
        self.size = 0  # of what waits
        self.links: dict[int, Link] = {}
        self.delay = RETRY
        self.retry_at = 0.0

    # for the loop

    def interests(self) -> Iterator[tuple[int, int]]:
        """Yield descriptors and what to wait for."""
        for link in self.links.values():
            yield link.fd, select.POLLIN | (select.POLLOUT if link.unsent else 0)

    def handle(self, fd: int) -> None:
        """Go on with a connection that is ready."""
        import json

        link = self.links[fd]
        try:
            link.send(b"")
            for line in link.lines():
                try:
                    frame = json.loads(line)
                except (ValueError, RecursionError):
                    raise EOFError from None
                if isinstance(frame, dict):
                    self.receive(link, frame)
                    if fd not in self.links:
                        return
        except (EOFError, OSError):
            self.lose(link)

    def due(self, now: float) -> float | None:
        """Return in how many seconds there is something to do without any descriptor."""
        if not self.waiting:
            return None
        return self.retry_at - now if self.retry_at > now else RETRY_MAX

    def go_on(self, now: float) -> None:
        """Make the calls that wait, as far as there are connections; give up the oldest."""
        while self.waiting:
            call = self.waiting[0]
            if call.lost is not None and now - call.lost >= LOST_MAX:
                self.take()
                message = f"ctxd does not answer for {LOST_MAX:.0f} s, and {UNKNOWN}"
                call.answered(call, {"type": "error", "code": "ENOTCONN", "message": message})
                continue
            link = self.link_for(call, now)
            if link is None:
                return
            self.take()
            call.link, call.lost = link, None
            link.calls[call.id] = call
            try:
                link.send(call.frame(now))
            except OSError:
                self.lose(link)

    # for whoever calls

    def add(self, call: Call) -> None:
        """Make one more call."""
        if len(self.waiting) >= WAITING_MAX or self.size + call.size > SIZE_MAX:
            message = f"{len(self.waiting)} calls wait: call again when some are answered"
            call.answered(call, {"type": "error", "code": "EAGAIN", "message": message})
            return
        self.waiting.append(call)
        self.size += call.size
        self.go_on(time.monotonic())

    def cancel(self, call: Call) -> None:
        """Wait no longer for the answer of a call; what it has begun goes on."""
        link = call.link
        if link is None:
            if call in self.waiting:
                self.waiting.remove(call)
                self.size -= call.size
            return
        link.calls.pop(call.id, None)
        try:
            link.send(encode({"op": "cancel", "id": call.id}))
        except OSError:
            self.lose(link)

    # connections

    def take(self) -> Call:
        """Return the first call that waits."""
        call = self.waiting.popleft()
        self.size -= call.size
        return call

    def link_for(self, call: Call, now: float) -> Link | None:
        """Return a connection that has room for a call, None if there is none now."""
        if not call.alone:
            for link in self.links.values():
                if not link.alone and len(link.calls) < PENDING_MAX:
                    return link
        if len(self.links) >= LINKS_MAX:
            for link in self.links.values():
                if not link.calls:
                    self.close(link)
                    break
            else:
                return None
        if now < self.retry_at:
            self.mark_lost(now)
            return None
        try:
            connection = open_socket(self.root, self.path())
        except (OSError, Failure) as error:
            self.put_off(now)
            self.mark_lost(now)
            number = error.errno if isinstance(error, OSError) else error.number
            if number in (errno.EACCES, errno.EPERM):
                self.refuse(error)
            return None
        link = Link(connection)
        link.alone = call.alone
        self.links[link.fd] = link
        return link

    def refuse(self, error: OSError | Failure) -> None:
        """Answer everything that waits: the caller may not use the socket."""
        message = error.strerror if isinstance(error, OSError) else str(error)
        while self.waiting:
            call = self.take()
            call.answered(call, {"type": "error", "code": "EACCES", "message": message or "denied"})

    def put_off(self, now: float) -> None:
        """Try again later, and later each time."""
        self.retry_at = now + self.delay
        self.delay = min(RETRY_MAX, 2 * self.delay)

    def mark_lost(self, now: float) -> None:
        """There is no connection for what waits."""
        for call in self.waiting:
            if call.lost is None:
                call.lost = now

    def receive(self, link: Link, frame: Frame) -> None:
        """Take a frame: the answer of a call, or an error about nobody knows which."""
        link.useful = True
        self.delay = RETRY
        name = frame.get("id")
        if name is None and frame.get("type") == "error" and link.calls:
            if len(link.calls) > 1:
                self.lose(link, alone=True)
                return
            name = next(iter(link.calls))
        call = link.calls.pop(name, None) if isinstance(name, str) else None
        if call is not None:
            call.link = None
            call.answered(call, frame)
        if link.alone:
            self.close(link)

    def lose(self, link: Link, *, alone: bool = False) -> None:
        """A connection has ended: say again what it has not answered."""
        now = time.monotonic()
        self.close(link)
        if not link.useful:
            self.put_off(now)
        elif not alone:
            self.retry_at = now + RETRY
        for call in reversed(link.calls.values()):
            call.link = None
            call.alone = call.alone or alone
            call.lost = None if alone else now
            self.waiting.appendleft(call)
            self.size += call.size

    def close(self, link: Link) -> None:
        """Close a connection."""
        self.links.pop(link.fd, None)
        link.connection.close()

    def end(self) -> None:
        """Close all connections."""
        for link in list(self.links.values()):
            self.close(link)
