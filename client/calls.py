"""Calls of tools over the socket of an agent, or of the daemon, until each is answered.

A connection may end, and the daemon too. Then there is another connection, and what was not
answered is said again: a call with an id is carried out once.
"""

from __future__ import annotations

import errno
import os
import time

from client.declaring import duration
from client.exits import Failure
from client.links import LOST_MAX, Frame, Link
from client.loop import Loop, encode
from client.root import Root
from client.sockets import open_socket
from client.types import Any, Callable

PENDING_MAX = 16  # calls of one connection that the daemon lets wait
LINKS_MAX = 8
WAITING_MAX = 1024  # calls that wait for a connection
SIZE_MAX = 64 << 20  # and their bytes
WAITS = "TaskOutput"  # the tool that waits, and begins nothing
ASKS = "Ask"  # the tool that begins something, and may wait then
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
        if name == ASKS and given.get("block") is True:
            self.given = {"timeout": WAIT, **given}
        self.answered = answered
        self.began = time.monotonic()
        self.until: float | None = None
        if name == WAITS and given.get("block") is True:
            wait = seconds(given.get("timeout", WAIT))
            self.until = None if wait is None else self.began + wait
        self.link: Carrier | None = None
        self.alone = False  # on a connection of its own, where every error is about it
        self.size = len(encode(given))

    def request(self) -> Frame:
        """Return the request, which waits for what is left of the time."""
        given = self.given
        if self.until is not None:
            left = max(0.0, self.until - time.monotonic())
            given = {**given, "timeout": round(left, 3)}
        return {"op": "tool", "id": self.id, "name": self.name, "input": given}

    def end(self, frame: Frame) -> None:
        """Answer the call."""
        self.link = None
        self.answered(self, frame)

    def fail(self, code: str, message: str) -> None:
        """Answer the call with an error."""
        self.end({"type": "error", "code": code, "message": message})


class Carrier(Link):
    """One connection, and the calls that it has to answer."""

    def __init__(self, of: Calls, alone: bool) -> None:
        super().__init__(of.loop, lambda: open_socket(of.root, of.path()))
        self.of = of
        self.alone = alone
        self.calls: dict[str, Call] = {}

    def carry(self, call: Call) -> None:
        """Make one more call."""
        self.calls[call.id] = call
        call.link = self
        if self.connection is None and self.lost is None:
            self.reopen()
        else:
            self.ask(**call.request())

    def reopen(self) -> None:
        if self.calls:
            super().reopen()
        else:
            self.of.rest(self)

    def begin(self) -> None:
        for call in self.calls.values():
            self.ask(**call.request())

    def heard(self, frame: Frame) -> None:
        self.of.receive(self, frame)

    def failed(self, error: Failure | OSError, seconds: float) -> None:
        number = error.errno if isinstance(error, OSError) else error.number
        denied = number in (errno.EACCES, errno.EPERM)  # the caller may not use the socket
        now = time.monotonic()
        for call in list(self.calls.values()):
            if denied:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                self.calls.pop(call.id).fail("EACCES", reason or "denied")
            elif min(seconds, now - call.began) >= LOST_MAX:
                message = f"ctxd does not answer for {LOST_MAX:.0f} s, and {UNKNOWN}"
                self.calls.pop(call.id).fail("ENOTCONN", message)
        self.of.rest(self)


class Calls:
    """All calls that are not answered; `path` returns that of the socket below the root."""

    def __init__(self, loop: Loop, root: Root, path: Callable[[], str]) -> None:
        self.loop = loop
        self.root = root
        self.path = path
        self.waiting: list[Call] = []  # for a connection that has room
        self.links: list[Carrier] = []

    def add(self, call: Call) -> None:
        """Make one more call."""
        away = (link for link in self.links if link.connection is None)
        waiting = [*self.waiting, *(each for link in away for each in link.calls.values())]
        size = call.size + sum(each.size for each in waiting)
        if len(waiting) >= WAITING_MAX or size > SIZE_MAX:
            call.fail("EAGAIN", f"{len(waiting)} calls wait: call again when some are answered")
            return
        self.waiting.append(call)
        self.distribute()

    def distribute(self) -> None:
        """Give the calls that wait to connections, as far as these have room."""
        while self.waiting and (link := self.link_for(self.waiting[0])):
            link.carry(self.waiting.pop(0))

    def link_for(self, call: Call) -> Carrier | None:
        """Return a connection that has room for a call, None if there is none now."""
        if not call.alone:
            for link in self.links:
                if not link.alone and len(link.calls) < PENDING_MAX:
                    return link
        if len(self.links) >= LINKS_MAX:
            unused = next((link for link in self.links if not link.calls), None)
            if unused is None:
                return None
            self.drop(unused)
        self.links.append(Carrier(self, call.alone))
        return self.links[-1]

    def cancel(self, call: Call) -> None:
        """Wait no longer for the answer of a call; what it has begun goes on."""
        if call.link is not None:
            call.link.calls.pop(call.id, None)
            call.link.ask(op="cancel", id=call.id)
            self.rest(call.link)
        elif call in self.waiting:
            self.waiting.remove(call)

    def receive(self, link: Carrier, frame: Frame) -> None:
        """Take a frame: the answer of a call, or an error about nobody knows which."""
        name = frame.get("id")
        if name is None and frame.get("type") == "error" and link.calls:
            if len(link.calls) > 1:
                self.separate(link)
                return
            name = next(iter(link.calls))
        call = link.calls.pop(name, None) if isinstance(name, str) else None
        if call is not None:
            call.end(frame)
        self.rest(link)

    def separate(self, link: Carrier) -> None:
        """Say the calls of a connection again, each on one of its own."""
        self.drop(link)
        for call in reversed(link.calls.values()):
            call.link, call.alone = None, True
            self.waiting.insert(0, call)
        self.distribute()

    def rest(self, link: Carrier) -> None:
        """Drop a connection that is of no use any more; there may be room for what waits."""
        if link in self.links and not link.calls and (link.alone or link.connection is None):
            self.drop(link)
        if self.waiting:
            self.loop.later(0.0, self.distribute)

    def drop(self, link: Carrier) -> None:
        """End a connection."""
        self.links.remove(link)
        link.close()

    def end(self) -> None:
        """Close all connections."""
        for link in list(self.links):
            self.drop(link)
