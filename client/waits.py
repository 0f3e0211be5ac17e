"""The commands for waits: what an agent waits for."""

from __future__ import annotations

from client.agents import create, do_rm
from client.arguments import ENDED, LISTING, OF
from client.declaring import Arguments, command, declare, operand, option
from client.exits import OK
from client.files import value_of
from client.output import STDOUT
from client.planes import do_list, do_show, path_of
from client.root import Root

WAIT = operand("name", "WAIT", "the wait")
WAITS = operand("names", "WAIT...", "the waits")
declare(do_list, "waits list", "List waits that have not ended.", OF, ENDED, *LISTING)
declare(do_show, "waits show", "Show all about a wait.", OF, *LISTING, WAIT)


@command(
    "waits add",
    OF,
    option("--work", "ID", "the work item that it blocks"),
    option("--deadline", "WHEN", "a time, or a duration from now"),
    WAIT,
    operand(
        "on", "ON...", "timer WHEN, task T, child NAME, reply NAME [MESSAGE], message or trigger"
    ),
)
def do_waits_add(root: Root, args: Arguments) -> int:
    """Wait for something.

    For a trigger, prints the file that fires the wait when it is written.
    """
    owner = path_of(root, args, args.name)
    lines = {"work": args.work, "deadline": args.deadline, "on": " ".join(args.on)}
    create(root, owner, [(file, value_of(line)) for file, line in lines.items() if line])
    token = root.value(f"{owner}/token")
    if token:
        STDOUT.lines([root.join(f"trigger/{token}")])
    return OK


declare(do_rm, "waits cancel", "Cancel waits and remove them.", OF, WAITS)
