"""The command that asks whether a socket is served."""

from __future__ import annotations

import time

from client.arguments import Command, arg
from client.exits import OK
from client.output import STDOUT
from client.root import Root
from client.sockets import answer, connect, connect_own

TYPE_CHECKING = False
if TYPE_CHECKING:
    from client.arguments import Arguments


def do_ping(root: Root, args: Arguments) -> int:
    """Ask an agent, or ctxd, and print how long the answer took."""
    began = time.monotonic()
    connection = connect(root, args.name) if args.name else connect_own(root)
    answer(connection, op="ping")
    STDOUT.text(f"pong {1000 * (time.monotonic() - began):.1f} ms\n")
    return OK


COMMANDS = (
    Command(
        "ping",
        "ask whether an agent, or ctxd, answers",
        (arg("name", metavar="NAME", nargs="?", help="default: your own agent, else ctxd"),),
        do_ping,
        "Exits 69 if it does not run.",
    ),
)
