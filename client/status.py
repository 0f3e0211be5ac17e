"""The command status: what an agent is, does and waits for, on one screen."""

from __future__ import annotations

import os
import time

from client.declaring import LISTING, Arguments, command, line_count, operand, option
from client.events import awaited_restart
from client.files import amounts, pairs, stamp, timestamp, tokens_of
from client.loop import parse_object
from client.output import Part, age, decode, first_of, gist, show, size, tokens
from client.planes import PLANES, describe, objects
from client.ps import Forest
from client.root import Root, agent, own_agent, readable
from client.types import Any, Iterable, Iterator

FILES = (
    "status", "outcome", "reason", "run", "pid", "exec", "mode", "model", "parent", "supervisor",
    "owner", "life", "restart", "cwd", "workspace", "incarnation", "created_at", "error",
)  # fmt: skip
LINES = 5  # of each of log and out
LAST = 1 << 14  # bytes of a file that its last lines are looked for in
OVER = ("new", "dead")


def last_lines(root: Root, path: str, count: int) -> list[bytes]:
    """Return the last lines of a file that the caller may read."""
    return readable(lambda: root.last_lines(path, count, LAST), list[bytes]())


def numbers(text: str) -> dict[str, int | str]:
    """Return the values of key=value lines, as numbers where they are."""
    return {key: int(value) if value.isdigit() else value for key, value in pairs(text).items()}


def items(root: Root, name: str, group: str) -> list[dict[str, str]]:
    """Return the tasks, work items, waits or asks of an agent that have not ended."""
    plane = PLANES[group]
    directory = agent(name, plane.directory)
    owners = readable(lambda: objects(root, directory), list[str]())
    files = dict.fromkeys(file for several in plane.columns.values() for file in several.split())
    rows = [describe(root, owner, files) for owner in owners]
    return [row for row in rows if row["status"] and row["status"] not in plane.over]


def facts_of(root: Root, name: str, lines: int) -> tuple[dict[str, Any], Forest]:
    """Return what there is to say of an agent, by the names of files, and those below it."""
    owner = agent(name)
    root.call(owner, os.stat)
    forest = Forest(root, name)
    listed = forest.nested(name, time.time())
    facts: dict[str, Any] = {"name": name}
    for file in FILES:
        value = listed.get(file)
        facts[file] = value if isinstance(value, str) else root.field(name, file)
    if not facts["created_at"]:
        facts["created_at"] = root.value(agent(name, "session/created_at"))
    if facts["status"] == "starting" and not facts["reason"]:
        facts["reason"] = awaited_restart(root, name)
    changed = root.call(agent(name, "status"), os.stat).st_mtime
    facts["since"] = listed.get("since") or stamp(changed)
    facts["tty"], facts["viewers"] = listed.get("tty", ""), listed.get("viewers", 0)
    facts["node"] = pairs(root.field(name, "node"))
    facts["handoff.md"] = gist(root.field(name, "handoff.md"))
    facts["usage"] = amounts(root.field(name, "usage"))
    queue = readable(lambda: root.read(agent(name, "queue")), b"")
    facts["queue"] = len(queue.splitlines())
    message = parse_object(readable(lambda: root.read(agent(name, "message")), b""))
    facts["message"] = message
    for group, plane in PLANES.items():
        facts[plane.directory] = items(root, name, group)
    facts["children"] = listed["children"]
    for file in ("log", "out"):
        facts[file] = [decode(line) for line in last_lines(root, agent(name, file), lines)]
    return facts, forest


def ago(when: str) -> str:
    """Return a time, and how long ago it was."""
    return f"since {when} ({age(time.time() - timestamp(when))} ago)"


def bullet(status: str) -> tuple[str, str]:
    """Return the sign in front of a headline."""
    return ("○" if status in OVER else "●", status)


def used(usage: dict[str, Any]) -> str:
    """Return what an agent and all that it owns use of the machine."""
    words = []
    if "cpu_usec" in usage:
        words.append(f"CPU {int(usage['cpu_usec']) / 1e6:.3f}s")
    if "memory_current" in usage:
        peak = usage.get("memory_peak", usage.get("memory_peak_sampled"))
        most = f" (peak {size(int(peak))})" if peak is not None else ""
        words.append(f"memory {size(int(usage['memory_current']))}{most}")
    if "processes" in usage:
        words.append(f"processes {usage['processes']}")
    return ", ".join(words)


def place(node: dict[str, str]) -> str:
    """Return where an agent runs, and what was heard of it; empty for this machine."""
    if not node:
        return ""
    seen = node.get("seen")
    words = [f"{node.get('name')}, link {node.get('link')}"]
    if seen:
        words.append(f"heard {age(time.time() - timestamp(seen))} ago")
    words.append(f"lease {node.get('lease')} s")
    if node.get("pending"):
        words.append(f"not confirmed: {node['pending']}")
    if node.get("fetch", "0") != "0":
        words.append(f"{size(int(node['fetch']))} to come")
    return ", ".join(words)


def spent(usage: dict[str, Any]) -> str:
    """Return what an agent and all below it use of models; empty if nobody counts that."""
    count = tokens_of(usage)
    if count is None:
        return ""
    words = [f"{tokens(count)} ({usage['tokens.in']} in, {usage['tokens.out']} out)"]
    if "tokens.left" in usage:
        words.append(f"{tokens(int(usage['tokens.left']))} left")
    words.append(f"cost {usage['cost']:.2f}")
    if "cost.left" in usage:
        words.append(f"{usage['cost.left']:.2f} left")
    if usage["requests.refused"]:
        words.append(f"{usage['requests.refused']} requests refused")
    return ", ".join(words)


def described(facts: dict[str, Any], forest: Forest) -> Iterator[list[Part]]:
    """Yield the lines about an agent."""
    status, title = facts["status"], facts["handoff.md"]
    yield [bullet(status), " ", (facts["name"], "name"), f" - {title}" if title else ""]

    def row(key: str, *parts: Part) -> list[Part]:
        return [(f"{key:>10}", "heading"), ": " if parts else ":", *parts]

    end = [(f" {facts[file]}", facts[file]) for file in ("outcome", "reason") if facts[file]]
    yield row("Status", (status or "?", status), *end, f" {ago(facts['since'])}")
    if facts["mode"]:  # else the caller may see neither
        run = [f"{facts['run']}, " if facts["run"] else "none, " if status not in OVER else ""]
        yield row("Run", *run, f"mode {facts['mode']}")
    simple = (
        ("Program", facts["exec"]),
        ("PID", facts["pid"]),
        ("Node", place(facts["node"])),
        ("Terminal", facts["tty"] and f"{facts['tty']}, {facts['viewers']} look at it"),
        ("Usage", used(facts["usage"])),
        ("Tokens", spent(facts["usage"])),
        ("Parent", facts["parent"] + (f", life {facts['life']}" if facts["life"] else "")),
        ("Message", message_line(facts["message"])),
        ("Queue", f"{facts['queue']} waiting" if facts["queue"] else ""),
        ("Error", facts["error"]),
    )
    for key, value in simple:
        if value:
            yield row(key, value)
    for key, directory, text in (
        ("Work", "work", "objective"),
        ("Task", "task", "title cmd"),
        ("Waits for", "waiting", "on"),
        ("Asks", "ask", "question"),
    ):
        for item in facts[directory]:
            what, status = first_of(item, text), item["status"]
            yield row(key, (item["name"], "name"), " ", (status, status), f" {what}" * bool(what))
    children = list(forest.lines_below(facts["name"], "            "))
    if children:
        yield row("Children")
        yield from children
    for file in ("log", "out"):
        if facts[file]:
            yield row(f"Last {file}")
            for line in facts[file]:
                yield [f"            {line}"]


def message_line(message: dict[str, Any] | None) -> str:
    """Return the message at hand as a line."""
    if not message:
        return ""
    return f"{message.get('id')} from {message.get('from')}: {gist(str(message.get('text', '')))}"


def about_daemon(root: Root) -> tuple[dict[str, Any], list[list[Part]]]:
    """Return what the daemon says of itself, and the lines about it."""
    facts = numbers(decode(root.read("status")))
    state = str(facts.get("state", "?"))
    agents: list[Part] = []
    for key, count in facts.items():
        status = key.removeprefix("agents.")
        if status != key and count:
            agents += [", " if agents else "", f"{count} ", (status, status)]
    rows: list[tuple[str, list[Part]]] = [
        ("Status", [(state, state)]),
        ("Mount", [str(facts.get("mount", root.path))]),
        ("Up for", [up_for(str(facts.get("uptime")))]),
        ("Agents", agents or ["none"]),
    ]
    headline: list[Part] = [("●", state), " ", ("ctxd", "name"), f" {facts.get('version', '')}"]
    return facts, [headline, *([(f"{key:>10}", "heading"), ": ", *rest] for key, rest in rows)]


def up_for(value: str) -> str:
    """Return how long the daemon has run."""
    seconds = value.removesuffix("s").partition(".")[0]
    return age(int(seconds)) if seconds.isdigit() else value


@command(
    "status",
    option(
        "-n",
        "--lines",
        "LINES",
        f"lines of log and of out (default: {LINES} each)",
        type=line_count,
    ),
    *LISTING,
    operand("name", "[NAME]", "default: the agent you are in, else ctxd itself"),
)
def do_status(root: Root, args: Arguments) -> None:
    """Show what an agent is, does and waits for.

    What you may not read is left out.
    """
    name = args.name or own_agent(root)
    lines: Iterable[list[Part]]
    if name:
        facts, forest = facts_of(root, name, LINES if args.lines is None else args.lines)
        lines = described(facts, forest)
    else:
        facts, lines = about_daemon(root)
    show(facts, lines, args.json)
