"""The commands reports and audit, from the histories of many agents."""

from __future__ import annotations

import errno
import os

from client.declaring import LISTING, Arguments, command, flag, operand
from client.events import block_for, show_event, whole_lines
from client.exits import Failure
from client.following import nobody_reads
from client.loop import Loop, parse_object
from client.output import STDOUT, Part, some
from client.root import Root, agent, object_path, own_agent
from client.sockets import answer, connect_own
from client.types import Any, Iterable, Iterator, Sequence

# reports


TICK = 0.2  # seconds between two looks at the histories of the agents that are there
FULL_TICK = 5.0  # and at all histories
GONE = (errno.EACCES, errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
MARK = b'"agent.report"'


class Report:
    """One report: when, by whom, and its line of the history."""

    def __init__(self, line: bytes) -> None:
        event = parse_object(line) or {}
        self.line = line
        self.reports = event.get("type") == "agent.report"
        self.time = str(event.get("ts", "-"))
        self.parts: list[Part] = [
            (self.time, "faint"),
            " ",
            (str(event.get("agent", "-")), "name"),
            f": {event.get('text', '')}",
        ]


class Histories:
    """The event files of agents, read as they grow. None is kept open: they may be very many."""

    def __init__(self, root: Root, names: Sequence[str]) -> None:
        self.root = root
        self.names = names
        self.offsets: dict[str, int] = {}
        self.denied: set[str] = set()  # asking again would be a refusal each time
        self.live: list[str] = []

    def listed(self, directory: str) -> list[str]:
        """Return the names in a directory; none if it is gone, or not for the caller."""
        if directory in self.denied:
            return []
        try:
            return sorted(self.root.call(directory, os.listdir))
        except Failure as failure:
            if failure.number not in GONE:
                raise
            if failure.number == errno.EACCES:
                self.denied.add(directory)
            return []

    def all(self) -> Iterator[str]:
        """Yield the event files of all sessions, of removed agents too."""
        for owner in sorted(self.root.call("home", os.listdir)):
            histories = f"home/{owner}/agent"
            for name in self.names or self.listed(histories):
                sessions = f"{histories}/{name}/session"
                for session in self.listed(sessions):
                    yield f"{sessions}/{session}/events.jsonl"

    def current(self) -> list[str]:
        """Return the event files of the agents that are there, and of those that were just now."""
        before = self.live
        names = self.names or self.root.names("agent")
        self.live = [path for name in names if (path := self.current_of(name))]
        return [*dict.fromkeys((*before, *self.live))]

    def current_of(self, name: str) -> str:
        """Return the event file of an agent's current session, empty if it is not to be had."""
        link = agent(name, "session")
        if link in self.denied:
            return ""
        try:
            target = os.readlink(self.root.join(link))
        except OSError as error:
            if error.errno == errno.EACCES:
                self.denied.add(link)
            return ""
        return os.path.normpath(f"{agent(name)}/{target}/events.jsonl")

    def fresh(self, paths: Iterable[str]) -> Iterator[Report]:
        """Yield the reports since the last call in some event files, the oldest first."""
        from heapq import merge

        known = list(paths)
        each = (self.fresh_of(path, block_for(len(known))) for path in known)
        return merge(*each, key=lambda report: report.time)

    def fresh_of(self, path: str, block: int) -> Iterator[Report]:
        """Yield those in one file, and remember where its last whole line ends."""
        if path in self.denied:
            return
        offset = self.offsets.get(path, 0)
        try:
            if os.stat(self.root.join(path)).st_size > offset:
                for line, end in whole_lines(self.root.join(path), offset, block):
                    self.offsets[path] = end
                    if MARK in line and (report := Report(line)).reports:
                        yield report
            self.offsets.setdefault(path, 0)
        except OSError as error:
            if error.errno == errno.EACCES:
                self.denied.add(path)
            elif error.errno not in GONE:
                raise self.root.failure(error, path, 0.0) from None


def show(reports: Iterable[Report], raw: bool) -> None:
    """Print reports, one per line."""
    for batch in some(reports):
        if raw:
            STDOUT.copy(b"".join(report.line + b"\n" for report in batch))
        else:
            STDOUT.lines(report.parts for report in batch)


@command(
    "reports",
    flag("-f", "--follow", "continue, also with new agents"),
    *LISTING,
    operand("names", "[NAME...]", "default: all agents that you may read"),
)
def do_reports(root: Root, args: Arguments) -> None:
    """Show what agents told their supervisors.

    Shows time, agent and text of each report, oldest first, also of removed agents. --json
    prints the lines of events.jsonl unchanged. Ctrl-C ends -f.
    """
    for name in args.names:
        object_path("agent", name)  # fails for what cannot be a name
    histories = Histories(root, args.names)

    def show_all() -> None:
        show(histories.fresh(histories.all()), args.json)

    if args.follow:
        loop = Loop()
        loop.watch(1, nobody_reads, 0)  # poll(2) tells of errors unasked
        loop.every(FULL_TICK, show_all)
        loop.every(TICK, lambda: show(histories.fresh(histories.current()), args.json))
        loop.run()
    show_all()
    known = {path.split("/")[3] for path in histories.offsets}
    for name in args.names:
        if name not in known:
            raise Failure(f'no agent "{name}", or you may not read its history')


# audit


REFUSED = "refused"


def audited_events(root: Root, name: str, block: int) -> Iterator[dict[str, Any]]:
    """Yield the events of an agent's session that a caller caused, if the session is readable."""
    path = root.join(agent(name, "session/events.jsonl"))
    try:
        for line, _ in whole_lines(path, 0, block):
            event = parse_object(line)
            if event and event.get("by", "runtime") != "runtime":
                yield event
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            raise


def audited_refusals(root: Root, name: str) -> list[dict[str, Any]]:
    """Return the recent refusals of the daemon."""
    about: dict[str, Any] = {"agent": name} if name and not own_agent(root) else {}
    found = answer(connect_own(root), op="audit", **about)
    return [item for item in found.get("refusals", ()) if isinstance(item, dict)]


def describe_refusal(item: dict[str, Any]) -> list[Part]:
    """Return a refusal as one readable line."""
    more = f" (and {item['more']} more in that second)" if item.get("more") else ""
    where = f"{item.get('path')}: " if item.get("path") else ""
    what = f"{item.get('code')} {where}{item.get('reason')}{more}"
    when = str(item.get("ts", "-"))
    return [(when, "faint"), " ", (f"{'refused':<18}", "error"), f" by={item.get('by')} {what}"]


def described(item: dict[str, Any]) -> list[Part]:
    """Return a refusal or an event as one readable line."""
    return describe_refusal(item) if item.get("type") == REFUSED else show_event(item)


@command("audit", *LISTING, operand("name", "[NAME]", "default: all that you may read"))
def do_audit(root: Root, args: Arguments) -> None:
    """Show who did what, and what was refused.

    Shows, by time, the events that callers caused, from the current sessions of all agents that
    you may read, and recent refusals of the daemon. An agent sees only its own refusals.
    """
    import json
    from heapq import merge

    refused = [{"type": REFUSED, **item} for item in audited_refusals(root, args.name or "")]
    names = [args.name] if args.name else root.names("agent")
    events = (audited_events(root, name, block_for(len(names))) for name in names)
    for batch in some(merge(refused, *events, key=lambda item: str(item.get("ts")))):
        if args.json:
            STDOUT.text("".join(json.dumps(item) + "\n" for item in batch))
        else:
            STDOUT.lines(map(described, batch))
