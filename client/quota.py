"""The command quota: the accounts of an owner."""

from __future__ import annotations

from client.arguments import LISTING
from client.declaring import Arguments, command
from client.exits import OK
from client.output import show_rows, size
from client.root import Root
from client.sockets import answer, connect_own
from client.types import Any


def cell(row: dict[str, Any], key: str) -> str:
    """Return a number of an account in the unit that people read."""
    value = row.get(key, "")
    if key in ("use", "limit", "reserve", "held") and isinstance(value, int):
        if row.get("account") in ("memory", "disk"):
            return size(value)
        if row.get("account") == "time":
            return f"{value}ms"
    return str(value)


@command("quota", *LISTING)
def do_quota(root: Root, args: Arguments) -> int:
    """Show what an owner uses, and its limits.

    Shows the accounts of your user; in an agent, the accounts of its owner; for root, the
    accounts of all owners. In JSON, sizes are in bytes and time is in milliseconds.
    """
    rows = answer(connect_own(root), op="quota").get("accounts", [])
    columns = ("owner", "account", "use", "limit", "reserve", "most", "held")
    show_rows(rows, columns, cell, args.json)
    return OK
