"""The command audit: actions and refusals, with their callers."""

from __future__ import annotations

import errno

from client.arguments import LISTING
from client.declaring import Arguments, command, operand
from client.events import block_for, parse_event, show_event, whole_lines
from client.exits import OK
from client.output import STDOUT, Part, some
from client.root import Root, agent, own_agent
from client.sockets import answer, connect_own
from client.types import Any, Iterator

REFUSED = "refused"


def audited_events(root: Root, name: str, block: int) -> Iterator[dict[str, Any]]:
    """Yield the events of an agent's session that a caller caused, if the session is readable."""
    path = root.join(agent(name, "session/events.jsonl"))
    try:
        for line, _ in whole_lines(path, 0, block):
            event = parse_event(line)
            if event and event.get("by", "runtime") != "runtime":
                yield event
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            raise


def audited_refusals(root: Root, name: str) -> list[dict[str, Any]]:
    """Return the recent refusals of the daemon."""
    about: dict[str, Any] = {"agent": name} if name and not own_agent(root) else {}
    found = answer(connect_own(root), op="audit", **about)
    return [item for item in found.get("refusals", ()) if isinstance(item, dict)]


def describe_refusal(item: dict[str, Any]) -> list[Part]:
    """Return a refusal as one readable line."""
    more = f" (and {item['more']} more in that second)" if item.get("more") else ""
    where = f"{item.get('path')}: " if item.get("path") else ""
    what = f"{item.get('code')} {where}{item.get('reason')}{more}"
    when = str(item.get("ts", "-"))
    return [(when, "faint"), " ", (f"{'refused':<18}", "error"), f" by={item.get('by')} {what}"]


def described(item: dict[str, Any]) -> list[Part]:
    """Return a refusal or an event as one readable line."""
    return describe_refusal(item) if item.get("type") == REFUSED else show_event(item)


@command("audit", *LISTING, operand("name", "[NAME]", "default: all that you may read"))
def do_audit(root: Root, args: Arguments) -> int:
    """Show who did what, and what was refused.

    Shows, by time, the events that callers caused, from the current sessions of all agents that
    you may read, and recent refusals of the daemon. An agent sees only its own refusals.
    """
    import json
    from heapq import merge

    refused = [{"type": REFUSED, **item} for item in audited_refusals(root, args.name or "")]
    names = [args.name] if args.name else root.names("agent")
    events = (audited_events(root, name, block_for(len(names))) for name in names)
    for batch in some(merge(refused, *events, key=lambda item: str(item.get("ts")))):
        if args.json:
            STDOUT.text("".join(json.dumps(item) + "\n" for item in batch))
        else:
            STDOUT.lines(map(described, batch))
    return OK
