"""The knowledge of `ctx top` of a ctxfs, read by threads so that the screen never waits for ctxd.

One thread reads `agents` when poll(2) tells that it changed. The other looks at the agents that
are on the screen, at most each second: at their `usage`, and at their last event if there is a new
one. Each rests ten times as long as it read, so that they take at most a tenth of ctxd's time.
"""

from __future__ import annotations

import errno
import json
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from client.exits import Failure
from client.files import amounts, close, read_all, read_control, tokens_of
from client.installed.model import ENDED, Agent, Event, Snapshot, Usage, told
from client.loop import parse_object
from client.output import decode
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
                told = False
                try:
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
        os.lseek(fd, 0, os.SEEK_SET)
        text = decode(self.root.call("agents", lambda _: read_all(fd)))
        rows = [json.loads(line) for line in text.splitlines()]
        agents = {row["name"]: Agent.of(row) for row in rows}
        return Snapshot(agents, families(self.root, rows))


class Sampler(Reader):
    """Looks at the agents on the screen, and calls `show` when it has learnt something."""

    def __init__(self, root: Root, show: Callable[[], None]) -> None:
        super().__init__(root)
        self.show = show
        self.usage: dict[tuple[str, str], Usage] = {}
        self.metered = False  # whether tokens are counted
        self.last: dict[tuple[str, str], Event] = {}
        self.visible: Sequence[Agent] = ()
        self.others: Sequence[Agent] = ()  # whose usage the order of the lines depends on
        self.present = Snapshot()
        self.turn = 0
        self.spent: dict[tuple[str, str], tuple[float, int]] = {}  # when, microseconds
        #: of whose last events is known: the session, and how long it was
        self.sizes: dict[tuple[str, str], tuple[str, int]] = {}
        self.over: set[tuple[str, str]] = set()  # of whom there will be no other event

    def look_at(self, visible: Sequence[Agent], others: Sequence[Agent], present: Snapshot) -> None:
        """Say which agents are on the screen, and which others are sorted by what they use."""
        self.visible, self.others, self.present = visible, others, present

    def run(self) -> None:
        """Look until the end of the program."""
        while not self.ended.is_set():
            self.begun = begun = time.monotonic()
            visible = list(self.visible)
            learnt = [self.measure(each) for each in self.measured(visible)]
            learnt += [self.read(each) for each in visible]
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
        values = amounts(text)
        if not values:
            return False
        now, cpu = time.monotonic(), int(values.get("cpu_usec", 0))
        before, spent = self.spent.get(of.key, (now, cpu))
        passed = now - before
        self.spent[of.key] = (now, cpu)
        used = max(0, cpu - spent) / passed / 1e6 if passed > 0 else None
        memory, processes = int(values.get("memory_current", 0)), int(values.get("processes", 0))
        tokens = tokens_of(values)
        self.metered = tokens is not None
        self.usage[of.key] = Usage(used, memory, processes, tokens, values.get("cost"))
        return True

    def read(self, of: Agent) -> bool:
        """Read the last event of an agent, if its session has grown."""
        if of.key in self.over:
            return False
        path = agent(of.name, "session/events.jsonl")
        try:
            grown = (of.session, os.stat(self.root.join(path)).st_size)
            if self.sizes.get(of.key) == grown:
                return False
            lines = self.root.last_lines(path, 1)
        except (Failure, OSError) as failure:
            number = failure.number if isinstance(failure, Failure) else failure.errno
            if number != errno.ENOTCONN:  # not the caller's, or gone
                self.over.add(of.key)
            return False
        self.sizes[of.key] = grown
        if of.status == ENDED:  # there will be no other
            self.over.add(of.key)
        event = parse_object(lines[0]) if lines else None
        if event is not None:
            self.last[of.key] = told(event)
        return event is not None

    def forget(self) -> None:
        """Forget agents that are not there any more."""
        keys = {each.key for each in self.present.agents.values()}
        kept: tuple[dict[tuple[str, str], Any], ...]
        kept = (self.usage, self.last, self.spent, self.sizes)
        for known in kept:
            for gone in known.keys() - keys:
                del known[gone]
        self.over &= keys
