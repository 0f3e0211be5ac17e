"""The knowledge of `ctx top` of a ctxfs, read by threads so that the screen never waits for ctxd.

One thread reads `agents` when poll(2) tells that it changed. The other looks at the agents that
are on the screen: their `usage`, at most each second, and their last event, when poll(2) tells of
one. Each rests ten times as long as it read, so that they take at most a tenth of ctxd's time.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable, Sequence

from client.events import parse_event
from client.exits import Failure
from client.files import close, pairs, read_control
from client.following import Tail
from client.installed.model import Agent, Event, Snapshot, Usage, told
from client.output import STDOUT, decode
from client.ps import families
from client.root import Root, agent

LIST_TICK = 0.5  # seconds between two readings of the list, at least
USAGE_TICK = 1.0  # the same of usages
SHARE = 10  # how many times as long as reading takes a reader rests
RETRY = 0.5  # seconds between two attempts to find a ctxd that went away
SILENT = 3.0  # seconds after which a ctxd is said not to answer
OTHERS = 50  # agents that are not on the screen, of which one round reads the usage


class Reader(threading.Thread):
    """A thread that reads from a ctxfs, and knows how long the present reading takes."""

    def __init__(self, root: Root) -> None:
        super().__init__(daemon=True)
        self.root = root
        self.begun: float | None = None  # of the present reading
        self.ended = threading.Event()

    @property
    def silent(self) -> bool:
        """Whether ctxd does not answer."""
        begun = self.begun
        return begun is not None and time.monotonic() - begun > SILENT

    def rest(self, least: float, took: float) -> None:
        """Wait before the next reading."""
        self.begun = None
        self.ended.wait(max(least, SHARE * took))


class Lister(Reader):
    """Reads `agents` after each change, and calls `show` with what it found.

    While there is no ctxd, it calls `away` with the reason, once.
    """

    def __init__(
        self, root: Root, show: Callable[[Snapshot], None], away: Callable[[str], None]
    ) -> None:
        super().__init__(root)
        self.show = show
        self.away = away

    def run(self) -> None:
        """Read until the end of the program."""
        told = False
        while not self.ended.is_set():
            try:
                self.begun = time.monotonic()
                fd = self.root.open("agents")
                try:
                    told = False
                    self.follow(fd)
                finally:
                    close(fd)
            except (Failure, OSError, ValueError) as failure:
                if not told and not self.ended.is_set():
                    self.away(str(failure))
                told = True
            self.rest(RETRY, 0)

    def follow(self, fd: int) -> None:
        """Read one open `agents` again and again, until its ctxd is gone."""
        poller = select.poll()
        poller.register(fd, select.POLLPRI)
        while not self.ended.is_set():
            self.begun = begun = time.monotonic()
            self.show(self.read(fd))
            self.rest(LIST_TICK, time.monotonic() - begun)
            while not poller.poll(1000):
                if self.ended.is_set():
                    return

    def read(self, fd: int) -> Snapshot:
        """Return all agents, and which are below which."""
        pieces: list[bytes] = []
        offset = 0
        while piece := self.root.call(
            "agents",
            lambda _, offset=offset: os.pread(fd, 1 << 20, offset),  # type: ignore[misc]
        ):
            pieces.append(piece)
            offset += len(piece)
        rows = [json.loads(line) for line in decode(b"".join(pieces)).splitlines()]
        agents = {row["name"]: Agent.of(row) for row in rows}
        return Snapshot(agents, families(self.root, rows))


class Events(Tail):
    """The events of one session, of which only the last is of interest."""

    def __init__(self, root: Root, of: Agent) -> None:
        super().__init__(root, agent(of.name, "session/events.jsonl"), STDOUT, lines=0)
        self.of = of

    def last(self) -> Event | None:
        """Return the last event; None if there is none that can be read."""
        self.read(1, 0)  # from now on poll(2) tells of changes
        self.size = os.fstat(self.fd).st_size
        self.offset = self.start_of_last(1)
        event = parse_event(b"".join(self.chunks()))
        return told(event) if event else None


class Sampler(Reader):
    """Looks at the agents on the screen, and calls `show` when it has learnt something."""

    def __init__(self, root: Root, show: Callable[[], None]) -> None:
        super().__init__(root)
        self.show = show
        self.usage: dict[tuple[str, str], Usage] = {}
        self.last: dict[tuple[str, str], Event] = {}
        self.visible: Sequence[Agent] = ()
        self.others: Sequence[Agent] = ()  # whose usage the order of the lines depends on
        self.present = Snapshot()
        self.turn = 0
        self.spent: dict[tuple[str, str], tuple[float, int]] = {}  # when, microseconds
        self.events: dict[tuple[str, str], Events] = {}
        self.over: set[tuple[str, str]] = set()  # dead agents whose last event is known

    def look_at(self, visible: Sequence[Agent], others: Sequence[Agent], present: Snapshot) -> None:
        """Say which agents are on the screen, and which others are sorted by what they use."""
        self.visible, self.others, self.present = visible, others, present

    def run(self) -> None:
        """Look until the end of the program."""
        while not self.ended.is_set():
            self.begun = begun = time.monotonic()
            visible = list(self.visible)
            learnt = [self.measure(each) for each in self.measured(visible)]
            learnt += self.follow(visible)
            self.forget()
            if any(learnt):
                self.show()
            self.rest(USAGE_TICK, time.monotonic() - begun)

    def measured(self, visible: list[Agent]) -> list[Agent]:
        """Return the agents whose usage this round reads: the visible, and others in turn."""
        others = [each for each in self.others if each.lives]
        self.turn = (self.turn + OTHERS) % max(1, len(others))
        more = (others + others)[self.turn : self.turn + min(OTHERS, len(others))]
        return list({each.key: each for each in (*visible, *more) if each.lives}.values())

    def measure(self, of: Agent) -> bool:
        """Read the usage of an agent."""
        try:
            text = decode(read_control(self.root.join(agent(of.name, "usage"))))
        except OSError:
            return False
        values = {key: int(value) for key, value in pairs(text).items() if value.isdigit()}
        if not values:
            return False
        now, cpu = time.monotonic(), values.get("cpu_usec", 0)
        before, spent = self.spent.get(of.key, (now, cpu))
        passed = now - before
        self.spent[of.key] = (now, cpu)
        used = max(0, cpu - spent) / passed / 1e6 if passed > 0 else None
        memory, processes = values.get("memory_current", 0), values.get("processes", 0)
        self.usage[of.key] = Usage(used, memory, processes)
        return True

    def follow(self, visible: list[Agent]) -> list[bool]:
        """Read the last events of the visible agents that have new ones."""
        keys = {each.key for each in visible}
        for key in [key for key in self.events if key not in keys]:
            close(self.events.pop(key).fd)
        poller, by_fd = select.poll(), {}
        learnt = []
        for each in visible:
            events = self.events.get(each.key)
            if events is not None and events.of.session == each.session:
                poller.register(events.fd, select.POLLPRI)
                by_fd[events.fd] = each
            elif each.key not in self.over:
                learnt.append(self.open(each))
        for fd, _ in poller.poll(0):
            learnt.append(self.read(by_fd[fd]))
        return learnt

    def open(self, of: Agent) -> bool:
        """Begin to follow the events of an agent."""
        before = self.events.pop(of.key, None)
        if before is not None:
            close(before.fd)
        try:
            self.events[of.key] = Events(self.root, of)
        except (Failure, OSError):  # not the caller's, or gone
            self.over.add(of.key)
            return False
        return self.read(of)

    def read(self, of: Agent) -> bool:
        """Read the last event of an agent; of a dead one there will be no other."""
        events = self.events[of.key]
        try:
            last = events.last()
        except (Failure, OSError):  # its ctxd is gone
            last = None
        if last is not None:
            self.last[of.key] = last
        if last is None or of.status == "dead":
            close(self.events.pop(of.key).fd)
        if of.status == "dead":
            self.over.add(of.key)
        return last is not None

    def forget(self) -> None:
        """Forget agents that are not there any more."""
        keys = {each.key for each in self.present.agents.values()}
        for gone in (self.usage.keys() | self.last.keys() | self.spent.keys()) - keys:
            for kept in (self.usage, self.last, self.spent):
                kept.pop(gone, None)
        self.over &= keys
