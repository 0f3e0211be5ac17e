"""The commands for work items: what an agent has to do."""

from __future__ import annotations

from client.agents import SET_NOTES, create, create_numbered, do_set
from client.arguments import ENDED, LISTING, OF, VALUES, Command, arg
from client.control import for_each
from client.exits import FAILED, OK
from client.files import value_of
from client.output import STDOUT
from client.planes import do_list, do_show, path_of, plane_path
from client.root import Root, below, label

TYPE_CHECKING = False
if TYPE_CHECKING:
    from client.arguments import Arguments


def do_work_new(root: Root, args: Arguments) -> int:
    """Create a work item and print its id."""
    files = [("objective", value_of(args.objective))]
    if args.name is None:
        owner = create_numbered(root, f"{plane_path(root, args)}/work", files)
    else:
        owner = path_of(root, args, args.name)
        create(root, owner, files)
    STDOUT.lines([label(owner)])
    return focus(root, args, label(owner)) if args.focus else OK


def focus(root: Root, args: Arguments, name: str) -> int:
    """Make a work item the current one of its agent."""
    path_of(root, args, name)
    root.write(below(plane_path(root, args), "current"), value_of(name))
    return OK


def do_work_focus(root: Root, args: Arguments) -> int:
    """Make a work item the current one of its agent."""
    return focus(root, args, args.name)


def do_work_end(root: Root, args: Arguments) -> int:
    """Mark work items as done or as cancelled."""
    status = value_of({"done": "done", "cancel": "cancelled"}[args.command])
    paths = [path_of(root, args, name, "status") for name in args.names]
    worked = for_each(paths, lambda path: root.write(path, status))
    return OK if len(worked) == len(paths) else FAILED


WORK = arg("name", metavar="ID", help="the work item")
WORKS = arg("names", metavar="ID", nargs="+", help="the work items")
COMMANDS = (
    Command("work list", "list work items that have not ended", (OF, ENDED, *LISTING), do_list),
    Command("work show", "show all about a work item", (OF, *LISTING, WORK), do_show),
    Command(
        "work new",
        "create a work item and print its id",
        (
            OF,
            arg("--focus", action="store_true", help="make it the current work item"),
            arg(
                "name",
                metavar="ID",
                nargs="?",
                help="default: the first free id of work-1, work-2, ...",
            ),
            arg("objective", metavar="OBJECTIVE", help="what the agent has to achieve"),
        ),
        do_work_new,
    ),
    Command("work set", "write files of a work item", (OF, WORK, VALUES), do_set, SET_NOTES),
    Command("work focus", "make a work item the current one", (OF, WORK), do_work_focus),
    Command("work done", "mark work items as done", (OF, WORKS), do_work_end),
    Command("work cancel", "mark work items as cancelled", (OF, WORKS), do_work_end),
)
