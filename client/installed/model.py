"""The lines of `ctx top`: which agents are shown, in which order, and what a line says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from client.files import timestamp
from client.output import escape, gist

#: what follows `sorted by`, in the order of the key that goes on to the next
SORTS = ("name", "cpu", "memory", "tokens", "cost", "change")
#: those by what is used, also of agents that are not on the screen; those that a meter counts
BY_USE, BY_METER = SORTS[1:5], SORTS[3:5]
ENDED = "dead"
SIZES = ((1 << 40, "T"), (1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K"))
#: of an event of each type, what is worth a place in a line
TOLD: dict[str, tuple[str, ...]] = {
    "agent.create": ("by",),
    "agent.control": ("file", "verb", "by"),
    "agent.start": ("by",),
    "agent.report": ("text",),
    "agent.status": ("status", "outcome", "reason"),
    "agent.stop": ("status", "reason"),
    "agent.child.cancel": ("child", "reason"),
    "run.start": ("run",),
    "run.end": ("run", "outcome", "reason"),
    "message.queued": ("from",),
    "message.end": ("outcome", "reason"),
    "task.start": ("task",),
    "task.end": ("task", "status", "exit"),
    "ask.open": ("question",),
    "ask.end": ("status", "answer", "by"),
}


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent, as a line of the root's `agents` tells of it."""

    name: str
    status: str
    outcome: str
    reason: str
    run: str
    session: str
    queue: int
    asks: int  # that nobody has answered
    node: str  # at which it runs; empty for this machine
    created_at: str
    since: float  # seconds since the epoch

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Agent:
        """Return an agent from a parsed line; keys that the caller may not read are missing."""
        keys = ("outcome", "reason", "run", "session", "node")
        text = {key: str(row.get(key, "")) for key in keys}
        return cls(
            name=str(row["name"]),
            status=str(row["status"]),
            queue=int(row.get("queue", 0)),
            asks=int(row.get("asks", 0)),
            created_at=str(row["created_at"]),
            since=timestamp(str(row.get("since", row["created_at"]))),
            **text,
        )

    @property
    def lives(self) -> bool:
        return self.status not in ("new", ENDED)

    @property
    def key(self) -> tuple[str, str]:
        """The key that tells this incarnation from others of its name."""
        return self.name, self.created_at

    @property
    def state(self) -> str:
        """The status; of a dead agent why it ended, which the mark before its name judges."""
        if self.status != ENDED:
            return self.status
        return self.reason if self.reason and self.outcome != "done" else self.outcome or ENDED

    @property
    def kind(self) -> str:
        """The word by which a line is coloured: the status, of a dead agent the outcome."""
        return self.outcome if self.status == ENDED and self.outcome else self.status


@dataclass(frozen=True, slots=True)
class Usage:
    """The use that an agent, with all that it owns, makes of the machine."""

    cpu: float | None  # processors, since the sample before; None of the first
    memory: int  # bytes
    processes: int
    tokens: int | None = None  # in and out of models, since its life began; None if nobody counts
    cost: float | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """The last thing that happened to an agent."""

    time: float  # seconds since the epoch
    text: str


@dataclass(slots=True)
class Snapshot:
    """All agents at one moment, and the names of the children of each."""

    agents: dict[str, Agent] = field(default_factory=dict)
    below: dict[str, list[str]] = field(default_factory=dict)

    @property
    def tops(self) -> list[str]:
        """The agents that have no parent here; of parents in a circle, none is."""
        owned = {child for children in self.below.values() for child in children}
        return [name for name in self.agents if name not in owned]

    def descendants(self, name: str) -> list[str]:
        """Return the names of all agents below one."""
        found: dict[str, None] = {}
        waiting = [name]
        while waiting:
            new = [child for child in self.below.get(waiting.pop(), ()) if child not in found]
            found.update(dict.fromkeys(new))
            waiting += new
        found.pop(name, None)
        return list(found)

    def counts(self) -> Counter[str]:
        """Return how many agents have each status."""
        return Counter(agent.status for agent in self.agents.values())


@dataclass(frozen=True, slots=True)
class Line:
    """An agent on the screen: the drawn branches before its name, and what is folded below it."""

    agent: Agent
    branches: str
    children: int
    hidden: int  # descendants that are folded away


@dataclass(slots=True)
class View:
    """The part of a snapshot that the user wants to see."""

    sort: str = SORTS[0]
    folded: set[tuple[str, str]] = field(default_factory=set)
    without_dead: bool = False
    find: str = ""

    def next_sort(self, metered: bool) -> None:
        """Sort by the next of `SORTS`, of which some make sense if a meter counts tokens."""
        after = SORTS.index(self.sort) + 1
        around = (*SORTS[after:], *SORTS[:after])
        self.sort = next(sort for sort in around if metered or sort not in BY_METER)


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts rev-2 before rev-10."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


def order(view: View, usage: Mapping[tuple[str, str], Usage]) -> Callable[[Agent], Any]:
    """Return the key by which siblings are sorted; those without a value come last."""

    def key(agent: Agent) -> Any:
        used = usage.get(agent.key) if agent.lives else None
        values = {
            "cpu": -(used.cpu or 0.0) if used else 1.0,
            "memory": -used.memory if used else 1,
            "tokens": -(used.tokens or 0) if used else 1,
            "cost": -(used.cost or 0.0) if used else 1.0,
            "change": -agent.since,
        }
        return values.get(view.sort, 0), natural(agent.name)

    return key


def wanted(snapshot: Snapshot, view: View) -> set[str]:
    """Return the names of the agents to show: those that fit, and those that they are below."""
    fits = {
        name
        for name, agent in snapshot.agents.items()
        if not (view.without_dead and agent.status == ENDED) and view.find in name
    }
    parents = {child: name for name, children in snapshot.below.items() for child in children}
    shown: set[str] = set()
    for name in fits:
        above: str | None = name
        while above is not None and above not in shown:
            shown.add(above)
            above = parents.get(above)
    return shown


def lines(snapshot: Snapshot, view: View, usage: Mapping[tuple[str, str], Usage]) -> list[Line]:
    """Return the agents as the lines of a tree."""
    shown, by = wanted(snapshot, view), order(view, usage)
    seen: set[str] = set()

    def sorted_names(names: list[str]) -> list[str]:
        agents = [snapshot.agents[name] for name in names if name in shown and name not in seen]
        return [agent.name for agent in sorted(agents, key=by)]

    def walk(name: str, first: str, rest: str) -> Iterator[Line]:
        agent = snapshot.agents[name]
        seen.add(name)
        children = sorted_names(snapshot.below.get(name, []))
        folded = agent.key in view.folded
        hidden = len(shown.intersection(snapshot.descendants(name))) if folded else 0
        yield Line(agent, first, len(children), hidden)
        if folded:
            seen.update(snapshot.descendants(name))
            return
        for child in children:
            fork, line = ("└─", "  ") if child == children[-1] else ("├─", "│ ")
            yield from walk(child, rest + fork, rest + line)

    found: list[Line] = []
    for top in sorted_names(snapshot.tops):
        found += walk(top, "", "")
    for name in sorted_names(list(snapshot.agents)):  # of a circle, which no parent is above
        if name not in seen:
            found += walk(name, "", "")
    return found


def size(count: int) -> str:
    """Return bytes in at most five characters."""
    for unit, letter in SIZES:
        if count >= unit:
            value = count / unit
            return f"{value:.1f}{letter}" if value < 9.95 else f"{value:.0f}{letter}"
    return f"{count}B"


def percent(cpu: float | None) -> str:
    """Return processors as a percentage of one, as top(1) does."""
    if cpu is None:
        return ""
    value = cpu * 100
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def told(event: Mapping[str, Any]) -> Event:
    """Return an event as a line of the screen, with its control characters made harmless."""
    kind = str(event.get("type", "-"))
    values = (event.get(key) for key in TOLD.get(kind, ()))
    words = " ".join(str(value) for value in values if value not in (None, ""))
    text = gist(words.lstrip("\n"), 400)
    return Event(timestamp(str(event.get("ts", ""))), escape(f"{kind} {text}".strip()))
