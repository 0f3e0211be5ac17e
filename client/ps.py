"""The commands ps and tree: agents as a list and as a tree."""

from __future__ import annotations

import os
import time

from client.declaring import LISTING, Arguments, command, flag, operand
from client.exits import Misuse
from client.files import timestamp
from client.jsontext import loads
from client.output import STDOUT, Part, age, as_json, headed, show, show_rows, show_table, size
from client.root import Root, agent, own_agent
from client.types import Any, Callable, Item, Iterator, Result, Sequence

PROCESS_COLUMNS = headed("agent", "pid", "state", "cpu", "memory", "age", "command")
COLUMNS = ("name", "status", "outcome", "reason", "parent", "run", "pid", "age", "tty")
AGES: dict[str, str] = {}  # by the second in which an agent was made
ABREAST = 32  # files read at the same time
STATE = ("status", "outcome", "reason")
DETACHED = "public_named"  # the profile of agents that live on without a parent


def abreast(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the results of a function for each item, calling it for several at a time.

    This is `map` of ThreadPoolExecutor, whose import takes longer than the whole `ps`.
    """
    if len(items) < 2:
        return [*map(function, items)]
    import threading

    results: dict[int, Result] = {}
    failures: list[Exception] = []

    def work(first: int) -> None:
        try:
            for index in range(first, len(items), ABREAST):
                results[index] = function(items[index])
        except Exception as failure:  # the caller raises it
            failures.append(failure)

    firsts = range(min(ABREAST, len(items)))
    threads = [threading.Thread(target=work, args=(first,)) for first in firsts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        raise failure
    return [results[index] for index in range(len(items))]


def listed(root: Root) -> Iterator[list[dict[str, Any]]]:
    """Yield what `agents` tells of each agent, some at a time, in order of creation.

    What it left out is empty. A caller that does not keep the rows needs memory for few: new
    memory costs more than parsing.
    """
    import gc

    gc.disable()  # it would look at all rows again and again
    for lines in root.lines("agents"):
        rows: list[dict[str, Any]] = loads("[" + lines.replace("\n", ",") + "]")
        for row in rows:
            if "run" not in row:
                row.update({key: row.get(key, "") for key in ("reason", "run", "supervisor")})
            if row["status"] == "starting" and not row["run"] and not row["reason"]:
                from client.events import awaited_restart

                row["reason"] = awaited_restart(root, row["name"])
        yield rows


def described(row: dict[str, Any], now: float) -> dict[str, Any]:
    """Return what `ps --json` says of an agent: all that `agents` does, and its age."""
    shown = {key: row[key] for key in ("name", "status", "outcome", "reason", "parent", "run")}
    pid = row.get("pid")
    shown["pid"] = "" if pid is None else str(pid)
    shown["age"] = max(0, int(now - timestamp(row["created_at"])))
    return {**row, **shown}


def terminal(row: dict[str, Any]) -> str:
    """Return that an agent has a terminal, and how many look at it; empty if it has none."""
    looking = row.get("viewers", 0)
    return f"tty:{looking}" if looking else "tty" if row.get("tty") else ""


def cells(row: dict[str, Any], now: float) -> tuple[str, ...]:
    """Return the same as the cells of a table, without a dictionary for each agent."""
    second = row["created_at"][:19] + "Z"
    shown_age = AGES.get(second)
    if shown_age is None:
        shown_age = AGES[second] = age(int(now - timestamp(second)))
    pid = row.get("pid")
    return (
        row["name"], row["status"], row["outcome"], row["reason"],
        row["parent"].partition(" ")[0], row["run"], "" if pid is None else str(pid), shown_age,
        terminal(row),
    )  # fmt: skip


def processes(root: Root, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the processes of agents and of all that they own."""
    lines = b"".join(root.read(agent(name, "processes")) for name in names).decode().splitlines()
    return [loads(line) for line in lines]


def show_processes(root: Root, args: Arguments) -> None:
    """List the processes of an agent, or of all agents that the caller may look into."""
    if args.name:
        names = [args.name]
    else:  # those of the others are among their owners'
        names = sorted(
            row["name"] for rows in listed(root) for row in rows if row["profile"] == DETACHED
        )
        own = own_agent(root)
        if own and own not in names:
            names.append(own)
        names = [name for name in names if os.access(root.join(agent(name, "processes")), os.R_OK)]
    show_rows(processes(root, names), PROCESS_COLUMNS, process_cell, args.json)


def process_cell(row: dict[str, Any], column: str) -> str:
    """Return what a table says of a process."""
    value = row[column]
    if value is None:
        return "-"
    return {"age": age, "memory": size}.get(column, str)(value)


@command(
    "ps",
    flag("-a", "--all", "also list dead agents"),
    flag("-p", "--processes", "list processes of agents"),
    *LISTING,
    operand("name", "[NAME]", "with -p: only this agent and what it owns"),
)
def do_ps(root: Root, args: Arguments) -> None:
    """List agents that are not dead.

    TTY is there if one of them has a terminal: tty:2 is one that two look at, by ctx attach. With
    -p, PID is as the caller sees it, CPU is in seconds, and MEMORY is the proportional set size
    (PSS).
    """
    if args.processes:
        show_processes(root, args)
        return
    if args.name:
        raise Misuse("ps takes a NAME with -p only; try ctx tree NAME")
    now = time.time()
    rows = (row for some in listed(root) for row in some if args.all or row["status"] != "dead")
    if args.json:
        shown = sorted((described(row, now) for row in rows), key=lambda row: row["name"])
        STDOUT.text(as_json(shown))
    else:
        table = sorted((cells(row, now) for row in rows), key=lambda row: row[0])
        most = len(COLUMNS) - (not any(row[-1] for row in table))  # TTY is the last one
        columns = [column.upper() for column in COLUMNS[:most]]
        show_table(columns, (row[:most] for row in table))


def families(root: Root, rows: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the names of the children of each agent that has some.

    `parent` outlives the parent, whose name another agent may have by now. That one is younger
    than the child, as is a parent that was given to the child later: only `child` tells them apart.
    """
    below: dict[str, list[str]] = {}
    place = {row["name"]: number for number, row in enumerate(rows)}
    for number, row in enumerate(rows):
        name = row["name"]
        kind, _, parent = row["parent"].partition(" ")[0].partition(":")
        if kind != "agent" or parent not in place:
            continue
        if place[parent] < number or name in root.listed(agent(parent, "child")):
            below.setdefault(parent, []).append(name)
    return {name: sorted(below[name]) for name in below}


class Forest:
    """All agents, as a tree."""

    def __init__(self, root: Root, only: str = "") -> None:
        """Look at the agents; `only` may be one that is found by its name alone."""
        rows = [row for some in listed(root) for row in some]
        self.facts = {row["name"]: row for row in rows}
        below = families(root, rows)
        if only and only not in self.facts:
            values = {file: root.field(only, file) for file in STATE}
            self.facts[only] = {"name": only, **values}
        self.owned = {child for others in below.values() for child in others}
        own = sorted(name for name in self.facts if name not in self.owned)
        self.tops = [only] if only else own
        #: of each agent that is shown; names may have gone around in a circle
        self.below: dict[str, list[str]] = {}
        left = list(self.tops)
        while left:
            name = left.pop()
            self.below[name] = []
            self.below[name] = [name for name in below.get(name, ()) if name not in self.below]
            left += self.below[name]
        #: of children that die with their parents, for all others `profile` tells
        inside = [name for name in self.below if name in self.owned]
        bound = [name for name in inside if self.facts[name]["profile"] != DETACHED]
        lives = abreast(lambda name: root.field(name, "life"), bound)
        self.lives = dict(zip(bound, lives, strict=True))

    def family(self, name: str) -> Iterator[str]:
        """Yield the name of an agent, and those of all agents below it."""
        yield name
        for child in self.below.get(name, ()):
            yield from self.family(child)

    def lines(self, name: str, first: str = "", rest: str = "") -> Iterator[list[Part]]:
        """Yield an agent and those below it as lines."""
        facts, life = self.facts[name], self.lives.get(name, "detached") if first else ""
        parts: list[Part] = [first, (name, "name"), "  "]
        words: list[tuple[str, str]] = [(facts[file], facts[file]) for file in STATE if facts[file]]
        for more in (life if life in ("temp", "detached") else "", terminal(facts)):
            words += [(f"({more})", "faint")] if more else []
        for number, word in enumerate(words or [("?", "")]):
            parts += [" " * bool(number), word]
        yield parts
        yield from self.lines_below(name, rest)

    def lines_below(self, name: str, rest: str = "") -> Iterator[list[Part]]:
        """Yield the agents below an agent as lines."""
        inner = self.below[name]
        for child in inner:
            fork, line = ("└─ ", "   ") if child == inner[-1] else ("├─ ", "│  ")
            yield from self.lines(child, rest + fork, rest + line)

    def nested(self, name: str, now: float) -> dict[str, Any]:
        """Return an agent as an object, with those below it in `children`."""
        facts = self.facts[name]
        row = described(facts, now) if "created_at" in facts else dict(facts)
        if name in self.owned:
            row["life"] = self.lives.get(name, "detached")
        row["children"] = [self.nested(child, now) for child in self.below[name]]
        return row


@command("tree", *LISTING, operand("name", "[NAME]", "show only this agent and its descendants"))
def do_tree(root: Root, args: Arguments) -> None:
    """Show agents below their parents."""
    if args.name:
        root.call(agent(args.name), os.stat)
    forest = Forest(root, args.name or "")
    now = time.time()
    nested = [forest.nested(top, now) for top in forest.tops] if args.json else []
    show(nested, (line for top in forest.tops for line in forest.lines(top)), args.json)
