"""The events of a session."""

from __future__ import annotations

import os

from client.arguments import FOLLOW, LISTING, OWN
from client.declaring import Arguments, command
from client.exits import OK, Failure
from client.files import BLOCK
from client.following import Tail, follow
from client.output import STDOUT, Part, decode
from client.root import Root, agent, own_name
from client.types import Any, Iterator

ROOM = 64 << 20  # bytes of many histories together that are in memory at a time
LEAST = 4 << 10  # and of each of them


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Parse a line of a history; None if it is not an object."""
    import json

    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def last_events(root: Root, session: str) -> list[dict[str, Any]]:
    """Return the last events of a session, the newest first; none if they cannot be read."""
    try:
        tail = Tail(root, f"{session}/events.jsonl", STDOUT, lines=10)
    except Failure:
        return []
    try:
        lines = b"".join(tail.chunks()).splitlines()
    finally:
        os.close(tail.fd)
    return [event for event in map(parse_event, reversed(lines)) if event]


def whole_lines(path: str, offset: int, block: int) -> Iterator[tuple[bytes, int]]:
    """Yield the whole lines of a history from an offset on, and where each ends.

    Only about `block` bytes are in memory at a time, and the file is not kept open: agents write
    as much as they have room for on the disk, and there may be very many histories.
    """
    rest = b""
    while True:
        fd = os.open(path, os.O_RDONLY)
        try:
            chunk = os.pread(fd, block, offset + len(rest))
        finally:
            os.close(fd)
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            offset += len(line) + 1
            yield line, offset


def block_for(histories: int) -> int:
    """Return how many bytes to read at a time from each of so many histories."""
    return max(LEAST, min(BLOCK, ROOM // max(1, histories)))


def show_event(event: dict[str, Any]) -> list[Part]:
    """Return an event as one readable line."""
    import json

    parts: list[Part] = [
        (str(event.get("ts", "-")), "faint"),
        " ",
        (f"{event.get('type', '-')!s:<18}", "heading"),
    ]
    for key, value in event.items():
        if key not in ("id", "ts", "type"):
            text = value if isinstance(value, str) else json.dumps(value)
            parts += [f" {key}=", (text, text if key in ("status", "outcome") else "")]
    return parts


def describe_event(line: bytes) -> str | list[Part]:
    """Return a line of a history in readable form."""
    event = parse_event(line)
    return decode(line) if event is None else show_event(event)


class Events(Tail):
    """The events of a session, read in whole lines."""

    def __init__(self, root: Root, relative: str, raw: bool) -> None:
        super().__init__(root, relative, STDOUT)
        self.raw = raw

    def pump(self) -> None:
        """Show the events since the last call."""
        self.read(1, 0)  # arms POLLPRI again, which reports changes since the last read at offset 0
        for lines in self.batches():
            if self.raw:
                self.output.copy(b"".join(line + b"\n" for line in lines))
            else:
                self.output.lines(describe_event(line) for line in lines if line)


def last_session(root: Root, name: str) -> str:
    """Return the newest session in the history of a removed agent, empty if there is none."""
    own = str(os.getuid())
    for owner in sorted(root.listed("home"), key=lambda uid: (uid != own, uid)):
        directory = f"home/{owner}/agent/{name}/session"
        found = [f"{directory}/{session}" for session in root.listed(directory)]
        if found:
            return max(found, key=lambda session: root.value(f"{session}/updated_at"))
    return ""


@command("events", FOLLOW, *LISTING, OWN)
def do_events(root: Root, args: Arguments) -> int:
    """Show the events of an agent.

    Shows the current session, or the last session of a removed agent. --json prints the lines
    of events.jsonl unchanged.
    """
    name = args.name or own_name(root)
    lives = root.present(agent(name))
    session = agent(name, "session") if lives else last_session(root, name)
    events = Events(root, f"{session or agent(name, 'session')}/events.jsonl", args.json)
    events.pump()
    if args.follow and lives:
        follow(root, agent(name), [events], events.fd)
    return OK
