"""The events of a session, or of all; the ends of agents and tasks, and their exit statuses."""

from __future__ import annotations

import os

from client.declaring import LISTING, Arguments, command, flag, operand, option
from client.exits import (
    CANNOT_START,
    FAILED,
    INTERRUPTED,
    OK,
    OUT_OF_MEMORY,
    TIMED_OUT,
    Failure,
    Misuse,
)
from client.files import BLOCK, Opened, first_line
from client.following import Tail, follow
from client.jsontext import dumps
from client.loop import parse_object
from client.output import STDOUT, Part, decode
from client.root import Root, agent, label, own_agent, own_name
from client.types import Any, Iterator, Sequence
from client.words import EVENT_TYPES, SESSION_ENDS

ROOM = 64 << 20  # bytes of many histories together that are in memory at a time
LEAST = 4 << 10  # and of each of them
DIGITS = 19  # of the number of an event, at most


def last_events(root: Root, session: str) -> list[dict[str, Any]]:
    """Return the last events of a session, the newest first; none if they cannot be read."""
    try:
        lines = root.last_lines(f"{session}/events.jsonl", 10)
    except Failure:
        return []
    return [event for event in map(parse_object, reversed(lines)) if event]


def whole_lines(path: str, offset: int, block: int) -> Iterator[tuple[bytes, int]]:
    """Yield the whole lines of a history from an offset on, and where each ends.

    Only about `block` bytes are in memory at a time, and the file is not kept open: agents write
    as much as they have room for on the disk, and there may be very many histories.
    """
    rest = b""
    while True:
        with Opened(path) as fd:
            chunk = os.pread(fd, block, offset + len(rest))
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
    parts: list[Part] = [
        (str(event.get("ts", "-")), "faint"),
        " ",
        (f"{event.get('type', '-')!s:<18}", "heading"),
    ]
    for key, value in event.items():
        if key not in ("id", "ts", "type", "seq", "session"):
            text = value if isinstance(value, str) else dumps(value)
            parts += [f" {key}=", (text, text if key in ("status", "outcome") else "")]
    return parts


def describe_event(line: bytes) -> str | list[Part]:
    """Return a line of a history in readable form."""
    event = parse_object(line)
    return decode(line) if event is None else show_event(event)


def types_of(word: str) -> list[str]:
    """Return the types of events that a word stands for; `run.*` for all that begin with run."""
    begun = (word[:-1],) if word.endswith("*") else ()
    found = [kind for kind in EVENT_TYPES if kind == word or kind.startswith(begun)]
    if not found:
        raise Misuse(f'"{word}" is not a type of events: {", ".join(EVENT_TYPES)}')
    return found


def is_of(line: bytes, types: Sequence[str]) -> bool:
    """Return whether a line is an event of one of some types, or if there are none, of any."""
    return not types or (parse_object(line) or {}).get("type") in types


def show_events(lines: Sequence[bytes], raw: bool) -> None:
    """Print lines of a history."""
    if raw:
        STDOUT.copy(b"".join(line + b"\n" for line in lines))
    else:
        STDOUT.lines(describe_event(line) for line in lines if line)


class Events(Tail):
    """The events of a session, read in whole lines: of some types, or all if there are none."""

    def __init__(self, root: Root, relative: str, raw: bool, types: Sequence[str] = ()) -> None:
        super().__init__(root, relative, STDOUT)
        self.raw = raw
        self.types = types

    def pump(self) -> None:
        """Show the events since the last call."""
        self.read(1, 0)  # arms POLLPRI again, which reports changes since the last read at offset 0
        for lines in self.batches():
            show_events([line for line in lines if is_of(line, self.types)], self.raw)


def last_session(root: Root, name: str) -> str:
    """Return the newest session in the history of a removed agent, empty if there is none."""
    own = str(os.getuid())
    for owner in sorted(root.listed("home"), key=lambda uid: (uid != own, uid)):
        directory = f"home/{owner}/agent/{name}/session"
        found = [f"{directory}/{session}" for session in root.listed(directory)]
        if found:
            return max(found, key=lambda session: root.value(f"{session}/updated_at"))
    return ""


def event_number(text: str) -> int:
    """Return the number of an event."""
    if text.isascii() and text.isdigit() and len(text) <= DIGITS:
        return int(text)
    raise Misuse(f'"{text}" is not the number of an event, which its "seq" is with --json')


@command(
    "events",
    flag("-f", "--follow", "continue; with a name until the agent is dead"),
    option("--after", "SEQ", "of all agents, those after this number", type=event_number),
    option("--type", "TYPE...", "only of this type, such as agent.stop or 'run.*'",
           type=types_of, words=EVENT_TYPES),
    *LISTING,
    operand("name", "[NAME]", "default: the agent you are in, else all of yours"),
)
def do_events(root: Root, args: Arguments) -> None:
    """Show the events of an agent, or of all.

    Shows the current session, or the last session of a removed agent. --json prints the lines
    of events.jsonl unchanged. Outside of agents and without a name, or with --after, it shows the
    events of all of your agents in one order, to root of all; with -f new ones only, unless
    --after says more, and it goes on when ctxd is started again. --json then has their numbers.
    """
    types = [kind for some in args.type for kind in some]
    if args.after is not None or not (args.name or own_agent(root)):
        from client.eventlog import Log

        Log(root, args, types, lambda lines: show_events(lines, args.json)).show()
        return
    name = args.name or own_name(root)
    lives = root.present(agent(name))
    session = agent(name, "session") if lives else last_session(root, name)
    path = f"{session or agent(name, 'session')}/events.jsonl"
    events = Events(root, path, args.json, types)
    events.pump()
    if args.follow and lives:
        follow(root, agent(name), [events], events.fd)


# ends


def session_of(root: Root, owner: str) -> str:
    """Return the path of an agent's session, empty if the caller may not see it."""
    try:
        target = os.readlink(root.join(f"{owner}/session"))
    except OSError:
        return ""
    return os.path.normpath(os.path.join(owner, target))


def ending(root: Root, owner: str, session: str = "") -> tuple[str, str]:
    """Return the outcome and the reason of a dead agent, each empty if the caller may not see it.

    The path of its session also gives the end of an agent that was already removed or reset.
    A parent sees at least the outcome of its child.
    """
    for event in last_events(root, session) if session else ():
        if event.get("type") == "agent.stop":
            return str(event.get("status")), str(event.get("reason"))
    outcome, reason = root.value(f"{owner}/outcome"), root.value(f"{owner}/reason")
    if not outcome:
        status = first_line(root.join(f"self/session/context/child/{label(owner)}/status"))
        outcome = status if status in SESSION_ENDS else ""
    return outcome, reason


def awaited_restart(root: Root, name: str) -> str:
    """Return the restart that an agent waits for, and the end that caused it."""
    for event in last_events(root, agent(name, "session")):
        reason = str(event.get("reason"))
        if event.get("type") == "agent.status" and reason.startswith("restart:"):
            return f"{reason} after {event.get('after')}"
    return ""


def identity(root: Root, name: str) -> int:
    """Return a number that differs between incarnations of a name, 0 if it does not exist."""
    try:
        return os.stat(root.join(agent(name))).st_ino
    except OSError:
        return 0


def exit_status(outcome: str, reason: str) -> int:
    """Return the exit status for the end of an agent or a run."""
    kind, _, detail = reason.partition(",")[0].partition(":")
    number = int(detail) if detail.isascii() and detail.isdigit() else FAILED
    if outcome == "done":
        return OK
    if outcome == "cancelled":
        return TIMED_OUT if kind == "timeout" else INTERRUPTED
    if outcome != "error":
        return FAILED
    by_kind = {
        "exit": number,
        "signal": 128 + number,
        "oom": OUT_OF_MEMORY,
        "start_failed": CANNOT_START,
        "timeout": TIMED_OUT,
    }
    return by_kind.get(kind, FAILED)


#: the outcome of an agent that corresponds to the last status of a task
TASK_OUTCOMES = {"completed": "done", "failed": "error", "cancelled": "cancelled"}


def task_ending(root: Root, owner: str) -> tuple[str, str]:
    """Return the last status of a task, and the exit of its command."""
    return root.value(f"{owner}/status"), root.value(f"{owner}/exit")
