"""What an owner holds, and may hold."""

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
    """Show the accounts of the caller's owner; root's shows those of all."""
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
        "Shows the accounts of the user, in an agent those of its owner, and root's those of all."
        " Sizes are bytes, time is milliseconds.",
    ),
)
