"""The commands ps and tree: agents as a list and as a tree."""

from __future__ import annotations

import os
import time

from client.declaring import LISTING, Arguments, command, flag, operand, option
from client.exits import Misuse
from client.files import amounts, timestamp, tokens_of
from client.jsontext import loads
from client.output import (
    STDOUT,
    Part,
    age,
    as_json,
    headed,
    show,
    show_rows,
    show_table,
    size,
    tokens,
)
from client.root import Root, agent, own_agent
from client.types import Any, Callable, Item, Iterator, Result, Sequence

PROCESS_COLUMNS = headed("agent", "pid", "state", "cpu", "memory", "age", "command")
COLUMNS = ("name", "status", "outcome", "reason", "parent", "run", "pid", "age", "node", "tty")
SOMETIMES = ("node", "tty")  # columns that are there if an agent has something in them
AGES: dict[str, str] = {}  # by the second in which an agent was made
ABREAST = 32  # files read at the same time
STATE = ("status", "outcome", "reason")
DETACHED = "public_named"  # the profile of agents that live on without a parent
#: what siblings are sorted by: the key of their usage, the largest first
SORTS = {"name": "", "cpu": "cpu_usec", "memory": "memory_current", "tokens": "tokens",
         "cost": "cost"}


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
        row.get("node", ""), terminal(row),
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

    NODE is there if one of them runs at another machine, and TTY if one has a terminal: tty:2 is
    one that two look at, by ctx attach. With -p, PID is as the caller sees it, CPU is in seconds,
    and MEMORY is the proportional set size (PSS).
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
        places = [
            place
            for place, column in enumerate(COLUMNS)
            if column not in SOMETIMES or any(row[place] for row in table)
        ]
        columns = [COLUMNS[place].upper() for place in places]
        show_table(columns, ([row[place] for place in places] for row in table))


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

    def __init__(self, root: Root, only: str = "", sort: str = "") -> None:
        """Look at the agents; `only` may be one that is found by its name alone.

        With one of `SORTS`, look also at what they use.
        """
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
        #: by the keys of the file, and their sum `tokens`
        self.usage: dict[str, dict[str, int | float]] = {}
        if sort:
            self.measure(root, SORTS[sort])

    def measure(self, root: Root, key: str) -> None:
        """Read what each agent that is shown uses, and sort siblings by it."""
        names = [*self.below]
        texts = abreast(lambda name: root.field(name, "usage"), names)
        for name, text in zip(names, texts, strict=True):
            usage = amounts(text)
            count = tokens_of(usage)
            self.usage[name] = usage if count is None else {**usage, "tokens": count}
        if key:
            for siblings in (self.tops, *self.below.values()):
                siblings.sort(key=lambda name: (-self.usage[name].get(key, -1), name))

    def long(self) -> tuple[list[str], list[list[str]]]:
        """Return the headings and rows of a table with what each agent uses."""
        metered = any("tokens" in usage for usage in self.usage.values())
        placed = any(self.facts[name].get("node") for name in self.below)
        columns = ["NAME", "STATUS", *["NODE"] * placed, "CPU", "MEMORY", "PROCS"]
        columns += ["TOKENS", "COST"] * metered

        def rows(name: str, first: str, rest: str) -> Iterator[list[str]]:
            usage, facts = self.usage[name], self.facts[name]
            cells = [facts.get("node", "")] * placed
            cells.append(f"{usage['cpu_usec'] / 1e6:.1f}" if "cpu_usec" in usage else "")
            cells.append(size(int(usage["memory_current"])) if "memory_current" in usage else "")
            cells.append(str(usage.get("processes", "")))
            if metered:
                cells.append(tokens(int(usage["tokens"])) if "tokens" in usage else "")
                cells.append(f"{usage['cost']:.2f}" if "cost" in usage else "")
            status = facts["outcome"] or facts["status"] or "?"
            yield [first + name, status, *cells]
            for below in self.branches(name, rest):
                yield from rows(*below)

        return columns, [row for top in self.tops for row in rows(top, "", "")]

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
        node = facts.get("node")
        shown = (life if life in ("temp", "detached") else "", f"at {node}" * bool(node))
        for more in (*shown, terminal(facts)):
            words += [(f"({more})", "faint")] if more else []
        for number, word in enumerate(words or [("?", "")]):
            parts += [" " * bool(number), word]
        yield parts
        yield from self.lines_below(name, rest)

    def lines_below(self, name: str, rest: str = "") -> Iterator[list[Part]]:
        """Yield the agents below an agent as lines."""
        for below in self.branches(name, rest):
            yield from self.lines(*below)

    def branches(self, name: str, rest: str) -> Iterator[tuple[str, str, str]]:
        """Yield each agent just below an agent, with what is drawn before it, and before what is
        below it."""
        inner = self.below[name]
        for child in inner:
            fork, line = ("└─ ", "   ") if child == inner[-1] else ("├─ ", "│  ")
            yield child, rest + fork, rest + line

    def nested(self, name: str, now: float) -> dict[str, Any]:
        """Return an agent as an object, with those below it in `children`."""
        facts = self.facts[name]
        row = described(facts, now) if "created_at" in facts else dict(facts)
        if name in self.owned:
            row["life"] = self.lives.get(name, "detached")
        if self.usage:
            row["usage"] = self.usage[name]
        row["children"] = [self.nested(child, now) for child in self.below[name]]
        return row


@command(
    "tree",
    flag("-l", "--long", "also show what each agent, with all below it, uses"),
    option("--sort", "BY", "sort siblings by name, cpu, memory, tokens or cost",
           choices=(*SORTS,)),
    *LISTING,
    operand("name", "[NAME]", "show only this agent and its descendants"),
)
def do_tree(root: Root, args: Arguments) -> None:
    """Show agents below their parents.

    With -l or --sort, CPU is in seconds, and TOKENS (in and out) and COST are what models say was
    used, where a meter counts it: ctxfs-meter(8).
    """
    if args.name:
        root.call(agent(args.name), os.stat)
    forest = Forest(root, args.name or "", args.sort or ("name" if args.long else ""))
    now = time.time()
    nested = [forest.nested(top, now) for top in forest.tops] if args.json else []
    if forest.usage and not args.json:
        show_table(*forest.long())
        return
    show(nested, (line for top in forest.tops for line in forest.lines(top)), args.json)
