"""The commands ps and tree: agents as a list and as a tree."""

from __future__ import annotations

import os
import time

from client.arguments import JSON, Command, arg
from client.ends import awaited_restart
from client.exits import OK, USAGE, Failure
from client.output import STDOUT, as_json, show_table
from client.root import Root, agent, own_agent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any, TypeVar

    from client.arguments import Arguments

    Item = TypeVar("Item")
    Result = TypeVar("Result")


PROCESS_COLUMNS = ("agent", "pid", "state", "cpu", "memory", "age", "command")
ABREAST = 32  # files read at the same time


def age(seconds: float) -> str:
    """Return a duration in its largest whole unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def state_of(root: Root, name: str) -> dict[str, Any]:
    """Return name, status, outcome and reason of an agent."""
    row = {file: root.field(name, file) for file in ("status", "outcome", "reason")}
    if row["status"] == "starting" and not root.field(name, "run"):
        row["reason"] = awaited_restart(root, name)
    return {"name": name, **row}


def abreast(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the results of a function for each item, calling it for several at a time.

    This is `map` of ThreadPoolExecutor, whose import takes longer than the whole `ps`.
    """
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


def born(root: Root, name: str) -> float | None:
    """Return the creation time of an agent, None if it is gone."""
    try:
        return os.stat(root.join(agent(name, "incarnation"))).st_mtime
    except OSError:
        return None


def describe_agents(root: Root, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of `ps`.

    This reads many files at a time. A busy daemon delays each answer a little, and reading
    hundreds of files one after the other would add up these delays.
    """
    files = ("status", "outcome", "reason", "parent", "run", "pid")
    texts = iter(abreast(lambda each: root.field(*each), [(n, f) for n in names for f in files]))
    times = abreast(lambda name: born(root, name), names)
    rows: list[dict[str, Any]] = []
    for name, since in zip(names, times, strict=True):
        row: dict[str, Any] = {"name": name, **{file: next(texts) for file in files}}
        row["age"] = None if since is None else max(0, int(time.time() - since))
        if row["status"] == "starting" and not row["run"]:
            row["reason"] = awaited_restart(root, name)
        rows.append(row)
    return rows


def processes(root: Root, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the processes of agents and of all that they own."""
    import json

    lines = b"".join(root.read(agent(name, "processes")) for name in names).splitlines()
    return [json.loads(line) for line in lines]


def show_processes(root: Root, args: Arguments) -> int:
    """List the processes of an agent, or of all agents that the caller may look into."""
    if args.name:
        names = [args.name]
    else:  # those of the others are among their owners'
        everybody = root.names("agent")
        lives = abreast(lambda name: root.field(name, "life"), everybody)
        names = [n for n, life in zip(everybody, lives, strict=True) if life == "detached"]
        own = own_agent(root)
        if own and own not in names:
            names.append(own)
        names = [name for name in names if os.access(root.join(agent(name, "processes")), os.R_OK)]
    rows = processes(root, names)
    if args.json:
        STDOUT.text(as_json(rows))
        return OK
    cells = []
    for row in rows:
        shown = {key: "-" if value is None else str(value) for key, value in row.items()}
        if row["age"] is not None:
            shown["age"] = age(row["age"])
        if row["memory"] is not None:
            shown["memory"] = f"{row['memory'] >> 10}K"
        cells.append([shown[column] for column in PROCESS_COLUMNS])
    show_table([column.upper() for column in PROCESS_COLUMNS], cells)
    return OK


def do_ps(root: Root, args: Arguments) -> int:
    """List agents."""
    if args.processes:
        return show_processes(root, args)
    if args.name:
        raise Failure("ps takes a NAME with -p only; try ctx tree NAME", USAGE)
    rows = describe_agents(root, root.names("agent"))
    rows = [row for row in rows if row["status"] and (args.all or row["status"] != "dead")]
    if args.json:
        STDOUT.text(as_json(rows))
        return OK
    columns = ("name", "status", "outcome", "reason", "parent", "run", "pid", "age")
    for row in rows:
        row["parent"] = row["parent"].partition(" ")[0]
        row["age"] = "" if row["age"] is None else age(row["age"])
    cells = [[row[column] for column in columns] for row in rows]
    show_table([column.upper() for column in columns], cells)
    return OK


def children(root: Root, name: str) -> list[str]:
    """Return the names of an agent's children; none if the caller may not list them."""
    directory = root.join(agent(name, "child"))
    try:
        targets = [os.readlink(os.path.join(directory, entry)) for entry in os.listdir(directory)]
    except OSError:
        return []
    return sorted(os.path.basename(target.rstrip("/")).removesuffix(".d") for target in targets)


def do_tree(root: Root, args: Arguments) -> int:
    """Show agents below their parents."""
    names = root.names("agent")
    below = {name: children(root, name) for name in names}
    if args.name:
        root.call(agent(args.name), os.stat)
        tops = [args.name]
    else:
        owned = {child for others in below.values() for child in others}
        tops = [name for name in names if name not in owned]
    seen: set[str] = set()

    def show(name: str, first: str, rest: str) -> Iterator[str]:
        facts = list(state_of(root, name).values())[1:]
        life = root.field(name, "life") if first else ""
        if life in ("temp", "detached"):
            facts.append(f"({life})")
        yield first + name + "  " + (" ".join(filter(None, facts)) or "?")
        seen.add(name)
        inner = [child for child in below.get(name, ()) if child not in seen]
        for child in inner:
            fork, line = ("└─ ", "   ") if child == inner[-1] else ("├─ ", "│  ")
            yield from show(child, rest + fork, rest + line)

    for top in tops:
        STDOUT.lines(show(top, "", ""))
    return OK


COMMANDS = (
    Command(
        "ps",
        "list agents that are not dead",
        (
            arg("-a", "--all", action="store_true", help="also list dead agents"),
            arg("-p", "--processes", action="store_true", help="list processes of agents"),
            JSON,
            arg(
                "name", metavar="NAME", nargs="?", help="with -p: only this agent and what it owns"
            ),
        ),
        do_ps,
        "With -p, PID is as the caller sees it, CPU is in seconds, and MEMORY is the proportional"
        " set size (PSS).",
    ),
    Command(
        "tree",
        "show agents below their parents",
        (arg("name", metavar="NAME", nargs="?", help="show only this agent and its descendants"),),
        do_tree,
    ),
)
