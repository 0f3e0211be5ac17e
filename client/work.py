"""The commands for work items: what an agent has to do."""

from __future__ import annotations

from client.agents import SET_NOTES, create_object, do_set
from client.arguments import ENDED, LISTING, OF, VALUES
from client.control import all_worked
from client.declaring import Arguments, command, declare, flag, operand
from client.exits import OK
from client.files import value_of
from client.output import STDOUT
from client.planes import do_list, do_show, path_of, plane_path
from client.root import Root, below, label

WORK = operand("name", "ID", "the work item")
WORKS = operand("names", "ID...", "the work items")
declare(do_list, "work list", "List work items that have not ended.", OF, ENDED, *LISTING)
declare(do_show, "work show", "Show all about a work item.", OF, *LISTING, WORK)


@command(
    "work new",
    OF,
    flag("--focus", "make it the current work item"),
    operand("name", "[ID]", "default: the first free id of work-1, work-2, ..."),
    operand("objective", "OBJECTIVE", "what the agent has to achieve"),
)
def do_work_new(root: Root, args: Arguments) -> int:
    """Create a work item and print its id."""
    files = [("objective", value_of(args.objective))]
    owner = create_object(root, args, "work", files)
    STDOUT.lines([label(owner)])
    return focus(root, args, label(owner)) if args.focus else OK


declare(do_set, "work set", f"Write files of a work item.\n\n{SET_NOTES}", OF, WORK, VALUES)


def focus(root: Root, args: Arguments, name: str) -> int:
    """Make a work item the current one of its agent."""
    path_of(root, args, name)
    root.write(below(plane_path(root, args), "current"), value_of(name))
    return OK


@command("work focus", OF, WORK)
def do_work_focus(root: Root, args: Arguments) -> int:
    """Make a work item the current one."""
    return focus(root, args, args.name)


def do_work_end(root: Root, args: Arguments) -> int:
    """Mark work items as done or as cancelled."""
    status = value_of({"done": "done", "cancel": "cancelled"}[args.command])
    paths = [path_of(root, args, name, "status") for name in args.names]
    return all_worked(paths, lambda path: root.write(path, status))


declare(do_work_end, "work done", "Mark work items as done.", OF, WORKS)
declare(do_work_end, "work cancel", "Mark work items as cancelled.", OF, WORKS)
