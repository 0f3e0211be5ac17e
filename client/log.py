"""The commands result, now and log: the result of an agent, what it works on, and its output."""

from __future__ import annotations

from client.arguments import FOLLOW, NAME, OWN, Command, arg, line_count
from client.ends import ending, identity
from client.exits import FAILED, OK
from client.following import Labelled, Tail, follow
from client.output import STDOUT, complain
from client.root import Root, agent, below, own_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from client.arguments import Arguments


def do_result(root: Root, args: Arguments) -> int:
    """Show the result of an agent unchanged."""
    owner = agent(args.name)
    result = root.read(below(owner, "result.md"))
    STDOUT.copy(result)
    status = root.field(args.name, "status")
    if status != "dead":
        complain(f"{args.name} has not finished: its status is {status or 'unknown'}")
        return FAILED
    if not result:
        complain(f"{args.name} ended without a result: {' '.join(ending(root, owner))}")
    return OK


def do_now(root: Root, args: Arguments) -> int:
    """Show what an agent works on and waits for, its children and tasks."""
    owner = agent(args.name or own_name(root))
    STDOUT.copy(root.read(below(owner, "session/context/now.md")))
    return OK


def do_log(root: Root, args: Arguments) -> int:
    """Show the output of an agent."""
    files = [args.only] if args.only else ["log", "out"]
    before = identity(root, args.name)
    tails = [Tail(root, agent(args.name, file), STDOUT, args.lines) for file in files]
    output = Labelled(tails)
    output.pump()
    if args.follow:
        follow(root, agent(args.name), [output])
        if identity(root, args.name) != before:
            complain(f"{args.name} was removed or reset: its last output may be missing")
    return OK


COMMANDS = (
    Command(
        "result",
        "show the result of an agent",
        (NAME,),
        do_result,
        "Exits 1 if the agent has not finished.",
    ),
    Command(
        "now",
        "show what an agent works on and waits for",
        (OWN,),
        do_now,
        "Shows session/context/now.md: the current work item with its plan, armed waits, children"
        " and tasks with their statuses, and the last reports of children.",
    ),
    Command(
        "log",
        "show the output of an agent: log, then out",
        (
            FOLLOW,
            arg("--out", dest="only", action="store_const", const="out", help="stdout only"),
            arg(
                "--err", dest="only", action="store_const", const="log", help="stderr and log only"
            ),
            arg("-n", "--lines", metavar="LINES", type=line_count, help="the last LINES of each"),
            NAME,
        ),
        do_log,
    ),
)
