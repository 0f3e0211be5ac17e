"""The command why: why an agent may or may not do something."""

from __future__ import annotations

from client.arguments import LISTING, NAME, Command, arg
from client.exits import DENIED, OK
from client.output import STDOUT, as_json
from client.sockets import answer, connect_own

TYPE_CHECKING = False
if TYPE_CHECKING:
    from client.arguments import Arguments
    from client.root import Root


def do_why(root: Root, args: Arguments) -> int:
    """Explain a decision: the lines of policies that allow it, or the missing ones."""
    connection = connect_own(root, args.name)
    found = answer(connection, op="why", agent=args.name, verb=args.verb, object=args.object)
    allowed, lines = bool(found.get("allowed")), [str(line) for line in found.get("lines", ())]
    if args.json:
        asked = {"agent": args.name, "verb": args.verb, "object": args.object}
        STDOUT.text(as_json({**asked, "allowed": allowed, "lines": lines}))
    else:
        word, may = ("yes", "may") if allowed else ("no", "may not")
        STDOUT.lines([[(word, word), f": {args.name} {may} {args.verb} {args.object}"], *lines])
    return OK if allowed else DENIED


COMMANDS = (
    Command(
        "why",
        "show why an agent may or may not do something",
        (
            *LISTING,
            NAME,
            arg("verb", metavar="PERM", help="create, read, connect, ..."),
            arg("object", metavar="CLASS:NAME", help="such as agent:coder or network:default"),
        ),
        do_why,
        "For example: ctx why coder create agent:rev-1. Exits 0 if the agent may, 13 if not.",
    ),
)
