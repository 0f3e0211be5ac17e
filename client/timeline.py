"""The command timeline: who ran when, who ended whom and why, in an agent's family."""

from __future__ import annotations

from client.arguments import JSON, NAME
from client.declaring import Arguments, command, flag, option
from client.exits import FAILED, OK, Failure
from client.output import STDOUT, as_json, complain
from client.root import Root

ROWS = 60  # lines of text, or of a picture, above which agents of one kind share a line
WIDTH = 100  # columns of what is no terminal


@command(
    "timeline",
    JSON,
    option("--svg", "FILE", "draw a picture; - stands for standard output"),
    flag("--all", "a line for each agent, however many"),
    NAME,
)
def do_timeline(root: Root, args: Arguments) -> int:
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
    return OK


def write_picture(path: str, data: bytes) -> None:
    """Write a picture to a file, or to standard output."""
    if path == "-":
        STDOUT.copy(data)
        return
    try:
        with open(path, "wb") as file:
            file.write(data)
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}") from None
    complain(f"wrote {path}")
