"""The commands for waits: what an agent waits for."""

from __future__ import annotations

from client.agents import create, do_rm
from client.arguments import ENDED, LISTING, OF, Command, arg
from client.exits import OK
from client.files import value_of
from client.output import STDOUT
from client.planes import do_list, do_show, path_of
from client.root import Root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from client.arguments import Arguments


def do_waits_add(root: Root, args: Arguments) -> int:
    """Create and arm a wait; for a trigger, print the file that fires it."""
    owner = path_of(root, args, args.name)
    lines = {"work": args.work, "deadline": args.deadline, "on": " ".join(args.on)}
    create(root, owner, [(file, value_of(line)) for file, line in lines.items() if line])
    token = root.value(f"{owner}/token")
    if token:
        STDOUT.lines([root.join(f"trigger/{token}")])
    return OK


WAIT = arg("name", metavar="WAIT", help="the wait")
WAITS = arg("names", metavar="WAIT", nargs="+", help="the waits")
COMMANDS = (
    Command("waits list", "list waits that have not ended", (OF, ENDED, *LISTING), do_list),
    Command("waits show", "show all about a wait", (OF, *LISTING, WAIT), do_show),
    Command(
        "waits add",
        "wait for something",
        (
            OF,
            arg("--work", metavar="ID", help="the work item that it blocks"),
            arg("--deadline", metavar="WHEN", help="a time, or a duration from now"),
            WAIT,
            arg(
                "on",
                metavar="ON",
                nargs="+",
                help="timer WHEN, task T, child NAME, reply NAME [MESSAGE], message or trigger",
            ),
        ),
        do_waits_add,
        "For a trigger, prints the file that fires the wait when it is written.",
    ),
    Command("waits cancel", "cancel waits and remove them", (OF, WAITS), do_rm),
)
