"""The commands that only the installed client has: top and timeline."""

from __future__ import annotations

import os

from client.declaring import JSON, NAME, Arguments, command, flag, option
from client.exits import FAILED, Failure, Misuse
from client.output import STDOUT, as_json, complain
from client.root import Root


@command("top")
def do_top(root: Root, args: Arguments) -> int:
    """Watch all agents on the whole screen, and control them.

    The key ? explains keys and columns, q quits. It needs a terminal, and the installed client:
    the one in sandboxes cannot draw.
    """
    if not (os.isatty(0) and os.isatty(1)):
        raise Misuse("top needs a terminal; ctx tree and ctx ps print the agents")
    if os.environ.get("TERM", "dumb") == "dumb":
        raise Misuse("top needs a terminal with a cursor, and TERM says that it has none")
    try:
        from client.installed.app import run
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("client"):
            message = "top needs the installed client, and this is the one of sandboxes"
        else:
            message = f"top needs the Python package {missing.name}: pip install 'ctxfs[top]'"
        raise Failure(f"{message}; ctx tree and ctx ps print the agents", FAILED) from None
    return run(root)


ROWS = 60  # lines of text, or of a picture, above which agents of one kind share a line
WIDTH = 100  # columns of what is no terminal


@command(
    "timeline",
    JSON,
    option("--svg", "FILE", "draw a picture; - stands for standard output"),
    flag("--all", "a line for each agent, however many"),
    NAME,
)
def do_timeline(root: Root, args: Arguments) -> None:
    """Show who ran when in a family, who ended whom and why.

    Shows the last life of the agent, also of a removed one, and all lives below it.
    """
    try:
        from client.installed.chart import planned, text_of
        from client.installed.lives import family_of
        from client.installed.picture import picture
    except ModuleNotFoundError:
        message = "timeline needs the installed client, and this is the one of sandboxes"
        raise Failure(f"{message}; ctx events prints the events", FAILED) from None
    top = family_of(root, args.name)
    if args.json:
        STDOUT.text(as_json([life.row() for life in top.family()]))
    rows = planned(top, len(list(top.family())) if args.all else ROWS)
    if args.svg:
        write_picture(args.svg, picture(top, rows))
    if not (args.json or args.svg):
        STDOUT.lines(text_of(top, rows, STDOUT.width() or WIDTH))


def write_picture(path: str, data: bytes) -> None:
    """Write a picture to a file, or to standard output."""
    if path == "-":
        STDOUT.copy(data)
        return
    with open(path, "wb") as file:
        file.write(data)
    complain(f"wrote {path}")
