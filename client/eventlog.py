"""The log of the events of all agents, in one order, as `ctx events` shows it."""

from __future__ import annotations

from client.declaring import Arguments
from client.exits import NOT_RUNNING, Failure
from client.following import RETRY, nobody_reads
from client.loop import Lines, Loop, parse_object
from client.output import complain
from client.root import Root
from client.sockets import (
    MESSAGE_CODES,
    NO_ANSWER,
    Connection,
    answer,
    ask,
    connect_daemon,
    refusal,
)
from client.types import Any, Callable, Sequence

EVENT = b'{"seq":'  # begins a line of the log


class Log:
    """The events that the daemon has in one order, from one on; `tell` shows lines of them."""

    def __init__(
        self, root: Root, args: Arguments, types: Sequence[str],
        tell: Callable[[Sequence[bytes]], object],
    ) -> None:
        self.root = root
        self.tell = tell
        self.follow: bool = args.follow
        self.fields = {"types": types, "agents": [args.name] if args.name else []}
        self.after: int = args.after or 0  # the number of the last one that was shown
        if args.follow and args.after is None:
            self.after = answer(connect_daemon(root), op="events")["seq"]
        self.loop = Loop()
        self.waits = False  # for another ctxd

    def show(self) -> None:
        """Show them, and those that come, to whichever daemon."""
        self.loop.watch(1, nobody_reads, 0)  # poll(2) tells of errors unasked
        self.begin()
        self.loop.run()

    def begin(self) -> None:
        """Ask the daemon, as soon as there is one again."""
        try:
            connection = connect_daemon(self.root)
        except Failure as failure:
            if not self.waits or failure.status != NOT_RUNNING:
                raise
            self.loop.later(RETRY, self.begin)
            return
        ask(connection, op="events", after=self.after, follow=self.follow, **self.fields)
        arriving = Lines(connection.fileno())
        self.loop.watch(connection.fileno(), lambda: self.take(connection, arriving))

    def take(self, connection: Connection, arriving: Lines) -> None:
        """Show what has come."""
        lines = arriving.read()
        if lines is None:
            self.loop.forget(connection.fileno())
            connection.close()
            if not self.follow:
                raise Failure(f"{NO_ANSWER}; go on with: --after {self.after}", NOT_RUNNING)
            if not self.waits:
                complain("ctxd has ended: waiting for the next one")
            self.waits = True
            self.loop.later(RETRY, self.begin)
            return
        events: list[bytes] = []
        for line in lines:
            if line.startswith(EVENT):
                events.append(line)
            else:
                self.show_some(events)
                events = []
                self.heed(parse_object(line) or {})
        self.show_some(events)

    def show_some(self, events: Sequence[bytes]) -> None:
        """Show events, and remember which is the last."""
        self.tell(events)
        if events:
            self.after = (parse_object(events[-1]) or {}).get("seq", self.after)

    def heed(self, frame: dict[str, Any]) -> None:
        """Act on what the daemon says between events."""
        if frame.get("type") == "error":
            raise refusal(frame, MESSAGE_CODES)
        if frame.get("type") == "lost":
            complain(f"events before the number {frame.get('oldest')} are gone")
        self.loop.over |= frame.get("type") == "end"
