"""The command quota: the accounts of an owner."""

from __future__ import annotations

from client.arguments import JSON, Command
from client.exits import OK
from client.output import STDOUT, as_json, show_table
from client.sockets import answer, connect_own

TYPE_CHECKING = False
if TYPE_CHECKING:
    from client.arguments import Arguments
    from client.root import Root


def do_quota(root: Root, args: Arguments) -> int:
    """Show the accounts of the caller's owner; for root, of all owners."""
    rows = answer(connect_own(root), op="quota").get("accounts", [])
    if args.json:
        STDOUT.text(as_json(rows))
        return OK
    keys = ("owner", "account", "use", "limit", "reserve", "most", "held")
    cells = [[str(row.get(key, "")) for key in keys] for row in rows]
    show_table([key.upper() for key in keys], cells)
    return OK


COMMANDS = (
    Command(
        "quota",
        "show what an owner uses, and its limits",
        (JSON,),
        do_quota,
        "Shows the accounts of your user; in an agent, the accounts of its owner; for root, the"
        " accounts of all owners. Sizes are in bytes, time is in milliseconds.",
    ),
)
