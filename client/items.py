"""The commands for work items and waits: what an agent has to do, and what it waits for."""

from __future__ import annotations

from client.agents import SET_NOTES, create, create_object, do_rm, do_set
from client.control import all_worked
from client.declaring import (
    ENDED,
    LISTING,
    OF,
    VALUES,
    Arguments,
    command,
    declare,
    flag,
    operand,
    option,
)
from client.files import value_of
from client.output import STDOUT
from client.planes import do_list, do_show, path_of, plane_path
from client.root import Root, below, label

# work items


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
def do_work_new(root: Root, args: Arguments) -> None:
    """Create a work item and print its id."""
    files = [("objective", value_of(args.objective))]
    owner = create_object(root, args, "work", files)
    STDOUT.lines([label(owner)])
    if args.focus:
        focus(root, args, label(owner))


declare(do_set, "work set", f"Write files of a work item.\n\n{SET_NOTES}", OF, WORK, VALUES)


def focus(root: Root, args: Arguments, name: str) -> None:
    """Make a work item the current one of its agent."""
    path_of(root, args, name)
    root.write(below(plane_path(root, args), "current"), value_of(name))


@command("work focus", OF, WORK)
def do_work_focus(root: Root, args: Arguments) -> None:
    """Make a work item the current one."""
    focus(root, args, args.name)


def do_work_end(root: Root, args: Arguments) -> int:
    """Mark work items as done or as cancelled."""
    status = value_of({"done": "done", "cancel": "cancelled"}[args.command])
    paths = [path_of(root, args, name, "status") for name in args.names]
    return all_worked(paths, lambda path: root.write(path, status))


declare(do_work_end, "work done", "Mark work items as done.", OF, WORKS)
declare(do_work_end, "work cancel", "Mark work items as cancelled.", OF, WORKS)


# waits


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
def do_waits_add(root: Root, args: Arguments) -> None:
    """Wait for something.

    For a trigger, prints the file that fires the wait when it is written.
    """
    owner = path_of(root, args, args.name)
    lines = {"work": args.work, "deadline": args.deadline, "on": " ".join(args.on)}
    create(root, owner, [(file, value_of(line)) for file, line in lines.items() if line])
    token = root.value(f"{owner}/token")
    if token:
        STDOUT.lines([root.join(f"trigger/{token}")])


declare(do_rm, "waits cancel", "Cancel waits and remove them.", OF, WAITS)
