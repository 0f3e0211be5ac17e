"""The command that asks whether a socket is served."""

from __future__ import annotations

import time

from client.declaring import Arguments, command, operand
from client.exits import OK
from client.output import STDOUT
from client.root import Root
from client.sockets import answer, connect, connect_own


@command("ping", operand("name", "[NAME]", "default: your own agent, else ctxd"))
def do_ping(root: Root, args: Arguments) -> int:
    """Ask whether an agent, or ctxd, answers.

    Exits 69 if it does not run.
    """
    began = time.monotonic()
    connection = connect(root, args.name) if args.name else connect_own(root)
    answer(connection, op="ping")
    STDOUT.text(f"pong {1000 * (time.monotonic() - began):.1f} ms\n")
    return OK
