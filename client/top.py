"""The command top: all agents on the whole screen."""

from __future__ import annotations

import os

from client.declaring import Arguments, command
from client.exits import FAILED, USAGE, Failure
from client.root import Root


@command("top")
def do_top(root: Root, args: Arguments) -> int:
    """Watch all agents on the whole screen, and control them.

    The key ? explains keys and columns, q quits. It needs a terminal, and the installed client:
    the one in sandboxes cannot draw.
    """
    if not (os.isatty(0) and os.isatty(1)):
        raise Failure("top needs a terminal; ctx tree and ctx ps print the agents", USAGE)
    if os.environ.get("TERM", "dumb") == "dumb":
        raise Failure("top needs a terminal with a cursor, and TERM says that it has none", USAGE)
    try:
        from client.installed.app import run
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("client"):
            message = "top needs the installed client, and this is the one of sandboxes"
        else:
            message = f"top needs the Python package {missing.name}: pip install 'ctxfs[top]'"
        raise Failure(f"{message}; ctx tree and ctx ps print the agents", FAILED) from None
    return run(root)
