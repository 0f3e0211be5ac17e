"""Calls of tools over the socket of an agent, or of the daemon, until each is answered.

A connection may end, and the daemon too. Then there is another connection, and what was not
answered is said again: a call with an id is carried out once.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque

from client.arguments import duration
from client.exits import Failure
from client.links import LOST_MAX, RETRY, RETRY_MAX, Frame, Link
from client.loop import Loop, encode
from client.root import Root
from client.sockets import open_socket
from client.types import Any, Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket


PENDING_MAX = 16  # calls of one connection that the daemon lets wait
LINKS_MAX = 8
WAITING_MAX = 1024  # calls that wait for a connection
SIZE_MAX = 64 << 20  # and their bytes
WAITS = "TaskOutput"  # the tool that may wait
WAIT = 50.0  # seconds: some clients give up after 60
UNKNOWN = "whether it was carried out is not known"


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
        self.link: Carrier | None = None
        self.lost: float | None = None  # since when there is no connection for it
        self.alone = False  # on a connection of its own, where every error is about it
        self.size = len(encode(given))

    def make(self, link: Carrier, now: float) -> None:
        """Send the request, which waits for what is left of the time."""
        self.link, self.lost = link, None
        link.calls[self.id] = self
        given = self.given
        if self.until is not None:
            given = {**given, "timeout": round(max(0.0, self.until - now), 3)}
        link.ask(op="tool", id=self.id, name=self.name, input=given)

    def fail(self, code: str, message: str) -> None:
        """Answer the call with an error."""
        self.answered(self, {"type": "error", "code": code, "message": message})


class Carrier(Link):
    """One connection, and the calls that it has to answer."""

    def __init__(self, of: Calls, connection: socket.socket, alone: bool) -> None:
        super().__init__(of.loop)
        self.of = of
        self.calls: dict[str, Call] = {}
        self.alone = alone
        self.useful = False  # something was answered
        self.connect(connection)

    def take(self, frame: Frame) -> None:
        self.of.receive(self, frame)

    def lost(self) -> None:
        self.of.lose(self)


class Calls:
    """All calls that are not answered; `path` returns that of the socket below the root."""

    def __init__(self, loop: Loop, root: Root, path: Callable[[], str]) -> None:
        self.loop = loop
        self.root = root
        self.path = path
        self.waiting: deque[Call] = deque()
        self.size = 0  # of what waits
        self.links: list[Carrier] = []
        self.delay = RETRY
        self.retry_at = 0.0

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
                message = f"ctxd does not answer for {LOST_MAX:.0f} s, and {UNKNOWN}"
                self.first().fail("ENOTCONN", message)
                continue
            link = self.link_for(call, now)
            if link is None:
                return
            self.first().make(link, now)

    def add(self, call: Call) -> None:
        """Make one more call."""
        if len(self.waiting) >= WAITING_MAX or self.size + call.size > SIZE_MAX:
            call.fail(
                "EAGAIN", f"{len(self.waiting)} calls wait: call again when some are answered"
            )
            return
        self.waiting.append(call)
        self.size += call.size
        self.go_on(time.monotonic())

    def cancel(self, call: Call) -> None:
        """Wait no longer for the answer of a call; what it has begun goes on."""
        if call.link is not None:
            call.link.calls.pop(call.id, None)
            call.link.ask(op="cancel", id=call.id)
        elif call in self.waiting:
            self.waiting.remove(call)
            self.size -= call.size

    def first(self) -> Call:
        """Return the first call that waits, which does so no longer."""
        call = self.waiting.popleft()
        self.size -= call.size
        return call

    def link_for(self, call: Call, now: float) -> Carrier | None:
        """Return a connection that has room for a call, None if there is none now."""
        if not call.alone:
            for link in self.links:
                if not link.alone and len(link.calls) < PENDING_MAX:
                    return link
        if len(self.links) >= LINKS_MAX:
            unused = next((link for link in self.links if not link.calls), None)
            if unused is None:
                return None
            self.close(unused)
        if now < self.retry_at:
            self.mark_lost(now)
            return None
        try:
            connection = open_socket(self.root, self.path())
        except (OSError, Failure) as error:
            self.put_off(now)
            self.mark_lost(now)
            number = error.errno if isinstance(error, OSError) else error.number
            if number in (errno.EACCES, errno.EPERM):  # the caller may not use the socket
                message = error.strerror if isinstance(error, OSError) else str(error)
                while self.waiting:
                    self.first().fail("EACCES", message or "denied")
            return None
        self.links.append(Carrier(self, connection, call.alone))
        return self.links[-1]

    def put_off(self, now: float) -> None:
        """Try again later, and later each time."""
        self.retry_at = now + self.delay
        self.delay = min(RETRY_MAX, 2 * self.delay)

    def mark_lost(self, now: float) -> None:
        """There is no connection for what waits."""
        for call in self.waiting:
            if call.lost is None:
                call.lost = now

    def receive(self, link: Carrier, frame: Frame) -> None:
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

    def lose(self, link: Carrier, *, alone: bool = False) -> None:
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

    def close(self, link: Carrier) -> None:
        """Close a connection."""
        if link in self.links:
            self.links.remove(link)
        link.close()

    def end(self) -> None:
        """Close all connections."""
        for link in list(self.links):
            self.close(link)
