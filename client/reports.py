"""The reports of agents, from their histories."""

from __future__ import annotations

import errno
import os
import time

from client.arguments import LISTING
from client.declaring import Arguments, command, flag, operand
from client.events import block_for, parse_event, whole_lines
from client.exits import OK, Failure
from client.following import SHARE, sleep_for_reader
from client.output import STDOUT, Part, some
from client.root import Root, agent, object_path
from client.types import Iterable, Iterator, Sequence

TICK = 0.2  # seconds between two looks at the histories of the agents that are there
FULL_TICK = 5.0  # and at all histories
GONE = (errno.EACCES, errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
MARK = b'"agent.report"'


class Report:
    """One report: when, by whom, and its line of the history."""

    def __init__(self, line: bytes) -> None:
        event = parse_event(line) or {}
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
        self.live = [path for name in self.present() if (path := self.current_of(name))]
        return [*dict.fromkeys((*before, *self.live))]

    def present(self) -> Iterable[str]:
        return self.names or self.root.names("agent")

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
        if path in self.denied:
            return
        offset = self.offsets.get(path, 0)
        try:
            if os.stat(self.root.join(path)).st_size > offset:
                yield from self.read(path, offset, block)
            self.offsets.setdefault(path, 0)
        except OSError as error:
            if error.errno == errno.EACCES:
                self.denied.add(path)
            elif error.errno not in GONE:
                raise self.root.failure(error, path, 0.0) from None

    def read(self, path: str, offset: int, block: int) -> Iterator[Report]:
        """Yield what whole lines tell from an offset on, and remember where they end."""
        for line, end in whole_lines(self.root.join(path), offset, block):
            self.offsets[path] = end
            if MARK in line and (report := Report(line)).reports:
                yield report


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
def do_reports(root: Root, args: Arguments) -> int:
    """Show what agents told their supervisors.

    Shows time, agent and text of each report, oldest first, also of removed agents. --json
    prints the lines of events.jsonl unchanged. Ctrl-C ends -f.
    """
    for name in args.names:
        object_path("agent", name)  # fails for what cannot be a name
    histories = Histories(root, args.names)
    begun = time.monotonic()
    show(histories.fresh(histories.all()), args.json)
    if not args.follow:
        known = {path.split("/")[3] for path in histories.offsets}
        for name in args.names:
            if name not in known:
                raise Failure(f'no agent "{name}", or you may not read its history')
        return OK
    looked = time.monotonic()
    cost = looked - begun
    while True:
        begun = time.monotonic()
        show(histories.fresh(histories.current()), args.json)
        now = time.monotonic()
        sleep_for_reader(max(TICK, SHARE * (now - begun)))
        if now - looked > max(FULL_TICK, SHARE * cost):
            begun = time.monotonic()
            show(histories.fresh(histories.all()), args.json)
            looked = time.monotonic()
            cost = looked - begun
