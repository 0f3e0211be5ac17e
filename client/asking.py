"""Commands that ask one thing, at the socket of an agent or of ctxd."""

from __future__ import annotations

import time

from client.declaring import LISTING, NAME, Arguments, command, operand
from client.exits import DENIED, OK
from client.output import STDOUT, Part, complain, headed, show, show_rows, size
from client.root import Root
from client.sockets import answer, connect, connect_daemon, connect_own
from client.types import Any


@command("ping", operand("name", "[NAME]", "default: your own agent, else ctxd"))
def do_ping(root: Root, args: Arguments) -> None:
    """Ask whether an agent, or ctxd, answers.

    Exits 69 if it does not run.
    """
    began = time.monotonic()
    connection = connect(root, args.name) if args.name else connect_own(root)
    answer(connection, op="ping")
    STDOUT.text(f"pong {1000 * (time.monotonic() - began):.1f} ms\n")


PERMISSIONS = (
    *("connect", "create", "detach", "execute", "read", "start", "stop", "use", "write"),
)


@command(
    "why",
    *LISTING,
    NAME,
    operand("verb", "PERM", "create, read, connect, ...", words=PERMISSIONS),
    operand("object", "CLASS:NAME", "such as agent:coder or network:default"),
)
def do_why(root: Root, args: Arguments) -> int:
    """Show why an agent may or may not do something.

    For example: ctx why coder create agent:rev-1. Exits 0 if the agent may, 13 if not.
    """
    connection = connect_own(root, args.name)
    asked = {"agent": args.name, "verb": args.verb, "object": args.object}
    found = answer(connection, op="why", **asked)
    allowed, lines = bool(found.get("allowed")), [str(line) for line in found.get("lines", ())]
    word, may = ("yes", "may") if allowed else ("no", "may not")
    verdict: list[Part] = [(word, word), f": {args.name} {may} {args.verb} {args.object}"]
    show({**asked, "allowed": allowed, "lines": lines}, [verdict, *lines], args.json)
    return OK if allowed else DENIED


def cell(row: dict[str, Any], key: str) -> str:
    """Return a number of an account in the unit that people read."""
    value = row.get(key, "")
    if key in ("use", "limit", "reserve", "held") and isinstance(value, int):
        if row.get("account") in ("memory", "tmp", "disk"):
            return size(value)
        if row.get("account") == "time":
            return f"{value}ms"
    return str(value)


@command("quota", *LISTING)
def do_quota(root: Root, args: Arguments) -> None:
    """Show what an owner uses, and its limits.

    Shows the accounts of your user; in an agent, the accounts of its owner; for root, the
    accounts of all owners. In JSON, sizes are in bytes and time is in milliseconds.
    """
    rows = answer(connect_own(root), op="quota").get("accounts", [])
    columns = headed("owner", "account", "use", "limit", "reserve", "most", "held")
    show_rows(rows, columns, cell, args.json)


@command("who", *LISTING, operand("address", "ADDRESS", "such as fd63:7478:6673:0:1:2:3:4"))
def do_who(root: Root, args: Arguments) -> None:
    """Show which agent had an address in the log of a proxy.

    A relay tells a network with header: proxy, or counters, the life of its agent as an address.
    Shows name, owner, id of the life, and its status, which is removed if there is no such agent
    any more. Only of your agents; root sees all.
    """
    address = args.address.strip("[]")
    frame = answer(connect_daemon(root), op="who", address=address)
    row = {key: frame.get(key, "") for key in ("agent", "owner", "incarnation", "status")}
    status = str(row["status"])
    line: list[Part] = [(str(row["agent"]), "name"), f" of uid {row['owner']}, life "]
    show(row, [[*line, f"{row['incarnation']}, ", (status, status)]], args.json)


@command("reexec")
def do_reexec(root: Root, args: Arguments) -> None:
    """Have ctxd execute its program again, such as a new version.

    Agents, open files and connections go on, and callers wait for less than a second or two.
    ctxd first runs the program with --check. If that fails, nothing happens, and this command
    says why. What is wrong in the files of declared agents is told, too. Only for root, or for
    the user that runs ctxd.
    """
    lost = "ctxd has ended meanwhile; its log says why"
    frame = answer(connect_daemon(root), lost=lost, op="reexec")
    before, version = frame.get("before"), frame.get("version")
    for wrong in frame.get("wrong", ()):
        complain(str(wrong))
    STDOUT.lines([f"ctxd {version}{f' (was {before})' if before != version else ''}"])
