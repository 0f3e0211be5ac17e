"""The command that has ctxd execute its program again."""

from __future__ import annotations

from client.declaring import Arguments, command
from client.exits import OK
from client.output import STDOUT
from client.root import Root
from client.sockets import answer, connect_daemon


@command("reexec")
def do_reexec(root: Root, args: Arguments) -> int:
    """Have ctxd execute its program again, such as a new version.

    Agents, open files and connections go on, and callers wait for less than a second or two.
    ctxd first runs the program with --check. If that fails, nothing happens, and this command
    says why. Only for root, or for the user that runs ctxd.
    """
    lost = "ctxd has ended meanwhile; its log says why"
    frame = answer(connect_daemon(root), lost=lost, op="reexec")
    before, version = frame.get("before"), frame.get("version")
    STDOUT.lines([f"ctxd {version}{f' (was {before})' if before != version else ''}"])
    return OK
