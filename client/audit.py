"""The command audit: actions and refusals, with their callers."""

from __future__ import annotations

import os

from client.arguments import LISTING, Command, arg
from client.events import parse_event, show_event
from client.exits import OK, Failure
from client.following import Tail
from client.output import STDOUT
from client.root import Root, agent, own_agent
from client.sockets import answer, connect_own

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from client.arguments import Arguments
    from client.output import Part


def audited_events(root: Root, name: str) -> Iterator[dict[str, Any]]:
    """Yield the events of an agent's session that a caller caused, if the session is readable."""
    try:
        tail = Tail(root, agent(name, "session/events.jsonl"), STDOUT)
    except Failure:
        return
    partial = b""
    try:
        for chunk in tail.chunks():
            *lines, partial = (partial + chunk).split(b"\n")
            for event in map(parse_event, lines):
                if event and event.get("by", "runtime") != "runtime":
                    yield event
    finally:
        os.close(tail.fd)


def audited_refusals(root: Root, name: str) -> list[dict[str, Any]]:
    """Return the recent refusals of the daemon."""
    about = {"agent": name} if name and not own_agent(root) else {}
    found = answer(connect_own(root), op="audit", **about)
    return [item for item in found.get("refusals", ()) if isinstance(item, dict)]


def describe_refusal(item: dict[str, Any]) -> list[Part]:
    """Return a refusal as one readable line."""
    more = f" (and {item['more']} more in that second)" if item.get("more") else ""
    where = f"{item.get('path')}: " if item.get("path") else ""
    what = f"{item.get('code')} {where}{item.get('reason')}{more}"
    when = str(item.get("ts", "-"))
    return [(when, "faint"), " ", (f"{'refused':<18}", "error"), f" by={item.get('by')} {what}"]


def do_audit(root: Root, args: Arguments) -> int:
    """Show actions and refusals, with their callers, by time."""
    import json

    found: list[tuple[str, str | list[Part]]] = []
    for item in audited_refusals(root, args.name or ""):
        line = json.dumps({"type": "refused", **item}) if args.json else describe_refusal(item)
        found.append((str(item.get("ts")), line))
    for name in [args.name] if args.name else root.names("agent"):
        for event in audited_events(root, name):
            line = json.dumps(event) if args.json else show_event(event)
            found.append((str(event.get("ts")), line))
    STDOUT.lines(line for _, line in sorted(found, key=lambda entry: entry[0]))
    return OK


COMMANDS = (
    Command(
        "audit",
        "show who did what, and what was refused",
        (*LISTING, arg("name", metavar="NAME", nargs="?", help="default: all that you may read")),
        do_audit,
        "Shows, by time, the events that callers caused, from all sessions that you may read, and"
        " recent refusals of the daemon. An agent sees only its own refusals.",
    ),
)
