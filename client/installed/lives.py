"""The lives of an agent and of its descendants, as the events of their sessions tell them."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from client.events import whole_lines
from client.exits import Failure
from client.files import LARGE, Opened, stamp, timestamp
from client.loop import parse_object
from client.ps import abreast
from client.root import Root, agent
from client.types import Any, Iterable, Iterator

#: of these a life is made
TOLD = ("agent.create", "agent.start", "agent.status", "agent.stop", "run.start", "run.end")
HEAD = 4096  # bytes of a session in which its agent is made, and gets another parent
SLACK = 0.002  # seconds; times of events are whole milliseconds
#: what ended an agent, in words for people
WORDS = {
    "oom": "failed: out of memory",
    "timeout": "took longer than its timeout",
    "self_stop": "stopped itself",
    "shutdown": "ended with ctxd",
    "reboot": "lost in a reboot",
    "runtime_lost": "lost",
    "lease_over": "lost: its machine heard no more of the one on which it was made",
}


class Span:
    """A time for which an agent had one status; `end` is None of the present one.

    `after` is the end of a run after which it waits to be started again.
    """

    def __init__(self, status: str, begin: float, run: str = "", after: str = "") -> None:
        self.status = status
        self.begin = begin
        self.run = run
        self.after = after
        self.end: float | None = None


class Life:
    """One incarnation of a name, from its making to its end."""

    def __init__(self, owner: str, name: str, events: list[dict[str, Any]]) -> None:
        self.owner = owner
        self.name = name
        made = events[0]
        self.made = timestamp(str(made.get("ts")))
        self.made_by = str(made.get("by", ""))
        self.parent_name = parent_in(str(made.get("parent", "")))
        self.moved = False  # another parent was written
        self.spans = [Span("new", self.made)]
        self.run = ""
        self.runs: list[dict[str, Any]] = []
        self.sessions: list[str] = []
        self.stopped: float | None = None  # when its end began
        self.end: float | None = None
        self.outcome = ""
        self.reason = ""
        self.ended_by = ""
        self.parent: Life | None = None
        self.children: list[Life] = []
        for event in events:
            self.add(event)

    def add(self, event: dict[str, Any]) -> None:
        """Take in the next event."""
        when, kind = timestamp(str(event.get("ts"))), event.get("type")
        by, run = str(event.get("by", "")), str(event.get("run", ""))
        if event["session"] not in self.sessions:
            self.sessions.append(event["session"])
        if kind == "agent.control" and event.get("file") == "parent":
            self.moved = True
        elif kind == "agent.status":
            status = str(event.get("status", ""))
            if status == "busy":
                self.run = run or self.run
            self.go_on(Span(status, when, self.run if status == "busy" else "",
                            str(event.get("after", ""))))  # fmt: skip
            if status == "stopping" and self.stopped is None:
                self.stopped, self.ended_by = when, by
            elif status == "starting":  # again: that was no end
                self.stopped, self.ended_by = None, ""
        elif kind == "agent.start" and self.spans[-1].after:
            self.go_on(Span("starting", when))
        elif kind == "run.start":
            self.run = run
        elif kind == "run.end":
            told = ("run", "outcome", "reason", "started", "ended")
            self.runs.append({key: event.get(key, "") for key in told})
        elif kind == "agent.stop":
            self.end = self.spans[-1].end = when
            self.outcome, self.reason = str(event.get("status")), str(event.get("reason"))
            self.stopped = when if self.stopped is None else self.stopped
            self.ended_by = self.ended_by or by

    def go_on(self, next_span: Span) -> None:
        """End the present status."""
        self.spans[-1].end = next_span.begin
        self.spans.append(next_span)

    def covers(self, when: float) -> bool:
        """Whether this is the life that a name had at some time."""
        return self.made - SLACK <= when <= (self.end or when) + SLACK

    def family(self) -> Iterator[Life]:
        """Yield this life, then those below it, in order of making."""
        yield self
        for child in sorted(self.children, key=lambda child: (child.made, child.name)):
            yield from child.family()

    @property
    def status(self) -> str:
        """Its last status."""
        return self.spans[-1].status

    @property
    def ender(self) -> str:
        """The one who ended it: `parent`, the name of an agent as `agent:NAME`, `operator uid:N`,
        or nobody else: empty."""
        if self.reason.startswith("parent_dead"):
            return "parent"
        stopped = self.reason.partition(",")[0] in ("operator_stop", "supervisor_stop")
        return self.ended_by.partition(" run:")[0] if stopped else ""

    def fate(self) -> str:
        """Return how it ended, or its status, in words for people."""
        if self.end is None:
            after = self.spans[-1].after
            if after:
                return f"waits to start again, after {after}"
            return "not started" if self.status == "new" else f"still {self.status}"
        reason, _, more = self.reason.partition(",")
        more = f", {more}" if more else ""
        if self.ender == "parent":
            above = self.parent.name if self.parent else self.parent_name
            return f"ended with parent {above}{more}"
        if self.ender:
            return f"stopped by {self.ender.removeprefix('agent:')}{more}"
        if self.outcome == "done" and reason.startswith("exit:"):
            return "done"
        if reason in WORDS:
            return WORDS[reason] + more
        if reason.startswith("start_failed"):
            return f"could not start{self.reason.removeprefix('start_failed')}"
        return f"failed: {self.reason}" if self.outcome == "error" else self.reason or self.outcome

    def row(self) -> dict[str, Any]:
        """Return the life as an object of JSON."""
        return {
            "name": self.name,
            "owner": self.owner,
            "sessions": self.sessions,
            "parent": self.parent.name if self.parent else "",
            "made": stamp(self.made),
            "made_by": self.made_by,
            "status": self.status,
            "ended": "" if self.end is None else stamp(self.end),
            "outcome": self.outcome,
            "reason": self.reason,
            "ended_by": self.ended_by,
            "runs": self.runs,
            "statuses": [
                {
                    "status": span.status,
                    "begin": stamp(span.begin),
                    "end": "" if span.end is None else stamp(span.end),
                    "run": span.run,
                    "after": span.after,
                }
                for span in self.spans
                if span.status != "dead"
            ],
        }


def parent_in(lineage: str) -> str:
    """Return the name of the parent that a lineage tells of, empty if it is no agent."""
    kind, _, name = lineage.partition(" ")[0].partition(":")
    return name if kind == "agent" else ""


def makes_life(event: dict[str, Any]) -> bool:
    """Return whether an event tells of a life: only those are kept, of very many."""
    kind = event.get("type")
    return kind in TOLD or (kind == "agent.control" and event.get("file") == "parent")


class Histories:
    """All sessions that the caller may read; those of a name are read once."""

    def __init__(self, root: Root) -> None:
        """Look at the beginnings of all sessions, to know who is below whom."""
        self.root = root
        self.read: dict[tuple[str, str], list[Life]] = {}
        self.heads: dict[tuple[str, str], dict[str, bytes]] = {}  # the beginnings of sessions
        #: names (with their owners) that were made by an agent of a name, and those that the
        #: first events do not tell the parent of
        self.made_by: dict[str, set[tuple[str, str]]] = {}
        self.moved: dict[str, set[str]] = {}
        owners = self.root.call("home", os.listdir)
        known = [
            (owner, name) for owner in owners for name in self.root.listed(f"home/{owner}/agent")
        ]
        for (owner, name), heads in zip(known, abreast(self.beginnings, known), strict=True):
            self.heads[owner, name] = heads
            for head in heads.values():
                first = parse_object(head.partition(b"\n")[0])
                if first and first.get("type") == "agent.create":
                    parent = parent_in(str(first.get("parent", "")))
                    self.made_by.setdefault(parent, set()).add((owner, name))
                    if b'"file":"parent"' in head:
                        self.moved.setdefault(name, set()).add(owner)

    def beginnings(self, of: tuple[str, str]) -> dict[str, bytes]:
        """Return the beginnings of the sessions of a name, each empty if it cannot be read."""
        directory = "home/{}/agent/{}/session".format(*of)
        found: dict[str, bytes] = {}
        for session in self.root.listed(directory):
            found[session] = b""
            with suppress(OSError), Opened(self.events_of(*of, session)) as fd:
                found[session] = os.pread(fd, HEAD, 0)
        return found

    def events_of(self, owner: str, name: str, session: str) -> str:
        """Return the path of the events of a session."""
        return self.root.join(f"home/{owner}/agent/{name}/session/{session}/events.jsonl")

    def lives(self, owner: str, name: str) -> list[Life]:
        """Return the lives of a name, the first one first."""
        if (owner, name) not in self.read:
            events = sorted(self.events(owner, name), key=lambda event: str(event.get("ts")))
            begins = [
                place for place, event in enumerate(events) if event.get("type") == "agent.create"
            ]
            parts = zip(begins, [*begins[1:], len(events)], strict=True)
            self.read[owner, name] = [Life(owner, name, events[begin:end]) for begin, end in parts]
        return self.read[owner, name]

    def events(self, owner: str, name: str) -> Iterator[dict[str, Any]]:
        """Yield the events of all sessions of a name."""
        for session, head in self.heads.get((owner, name), {}).items():
            lines: Iterable[bytes] = head.split(b"\n")
            if len(head) == HEAD:  # there may be more
                path = self.events_of(owner, name, session)
                lines = (line for line, _ in whole_lines(path, 0, LARGE))
            try:
                first = True
                for event in filter(None, map(parse_object, lines)):
                    if first or makes_life(event):
                        yield {**event, "session": session}
                    first = False
            except OSError:
                continue

    def last(self, name: str) -> Life:
        """Return the last life of a name, its present one if it has one."""
        path = agent(name)  # fails for what cannot be a name
        owners = [owner for owner, known in self.heads if known == name]
        lives = [life for owner in owners for life in self.lives(owner, name)]
        if not lives:
            self.root.call(path, os.stat)
            raise Failure(f'you may not read the history of "{name}"')
        return max(lives, key=lambda life: life.made)

    def descend(self, top: Life) -> None:
        """Find all lives below one."""
        waiting, seen = [top], {top}
        for life in waiting:
            for child in self.children(life):
                if child not in seen:
                    seen.add(child)
                    child.parent = life
                    life.children.append(child)
                    waiting.append(child)

    def children(self, life: Life) -> Iterable[Life]:
        """Yield the lives that a life is the parent of."""
        for owner, name in self.made_by.get(life.name, ()):
            for child in self.lives(owner, name):
                made_here = child.parent_name == life.name and not child.moved
                if made_here and life.covers(child.made):
                    yield child
        for session in life.sessions:
            directory = f"home/{life.owner}/agent/{life.name}/session/{session}/context/child"
            for channel in self.root.listed(directory):
                name = channel.partition("~")[0]
                for owner in self.moved.get(name, ()):
                    yield from self.of_channel(life, owner, name, f"{directory}/{channel}")

    def of_channel(self, parent: Life, owner: str, name: str, channel: str) -> Iterator[Life]:
        """Yield the life that a channel to a child is of, if another parent was written for it."""
        lives = self.lives(owner, name)
        found = [child for child in lives if child.moved and parent.covers(child.made)]
        if len(lives) > 1:
            told = self.root.value(f"{channel}/session")
            found = [child for child in found if told in child.sessions]
        yield from found


def family_of(root: Root, name: str) -> Life:
    """Return the last life of an agent, with all lives below it."""
    histories = Histories(root)
    top = histories.last(name)
    histories.descend(top)
    return top


def last_moment(top: Life) -> float:
    """Return when the last of a family ended; now, if one of them lives."""
    ends = [life.end for life in top.family()]
    return max(end for end in ends if end is not None) if None not in ends else time.time()
