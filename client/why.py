"""The command why: why an agent may or may not do something."""

from __future__ import annotations

from client.arguments import LISTING, NAME
from client.declaring import Arguments, command, operand
from client.exits import DENIED, OK
from client.output import STDOUT, as_json
from client.root import Root
from client.sockets import answer, connect_own


@command(
    "why",
    *LISTING,
    NAME,
    operand("verb", "PERM", "create, read, connect, ..."),
    operand("object", "CLASS:NAME", "such as agent:coder or network:default"),
)
def do_why(root: Root, args: Arguments) -> int:
    """Show why an agent may or may not do something.

    For example: ctx why coder create agent:rev-1. Exits 0 if the agent may, 13 if not.
    """
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
