"""The commands for tasks, work items and waits: what an agent runs, has to do, and waits for."""

from __future__ import annotations

import os

from client.agents import SET_NOTES, create, create_numbered, do_rm, do_set
from client.control import all_worked
from client.declaring import (
    CWD,
    ENDED,
    ENV,
    LISTING,
    OF,
    TIMEOUT,
    VALUES,
    WAIT,
    Arguments,
    command,
    declare,
    flag,
    line_count,
    operand,
    option,
)
from client.exits import OK, Misuse
from client.files import given, value_of
from client.output import STDOUT, as_json, complain, escape, show_rows, shown_line
from client.planes import PLANES, describe, objects, path_of, plane_path
from client.root import PARTS, Root, below, label
from client.types import Sequence
from client.verbs import do_verb, do_wait

#: how a command line names an object of each group
FORMS = {"task": "TASK", "work": "ID", "waits": "WAIT"}
NOUNS = {group: PARTS[PLANES[group].directory].partition(" ")[2] for group in FORMS}
ONE = {group: operand("name", form, f"the {NOUNS[group]}") for group, form in FORMS.items()}
SEVERAL = {
    group: operand("names", f"{form}...", f"the {NOUNS[group]}s") for group, form in FORMS.items()
}


def do_list(root: Root, args: Arguments) -> None:
    """List the objects of a plane."""
    plane = PLANES[args.group]
    rows = [describe(root, owner, plane.files) for owner in objects(root, plane_path(root, args))]
    rows = [row for row in rows if row["status"] and (args.all or row["status"] not in plane.over)]
    columns = {args.group.removesuffix("s").upper(): "name", **plane.columns}
    show_rows(rows, columns, raw=args.json)


def do_show(root: Root, args: Arguments) -> None:
    """Show all files of an object of a plane."""
    plane = PLANES[args.group]
    owner = path_of(root, args, args.name)
    root.call(owner, os.stat)
    facts = describe(root, owner, [*plane.files, *plane.texts])
    if args.json:
        STDOUT.text(as_json(facts))
        return
    colored = STDOUT.is_colored()
    for key, value in facts.items():
        if "\n" in value:
            value = "\n  " + value.replace("\n", "\n  ")
        elif value:
            value = " " + value
        if value:
            shown = escape(value, keep="\n\t")
            STDOUT.text(shown_line([(key, "heading"), ":"], colored) + f"{shown}\n")


for group, noun in NOUNS.items():
    declare(do_list, f"{group} list", f"List {noun}s that have not ended.", OF, ENDED, *LISTING)
    declare(do_show, f"{group} show", f"Show all about a {noun}.", OF, *LISTING, ONE[group])


def create_object(root: Root, args: Arguments, files: Sequence[tuple[str, bytes]]) -> str:
    """Create a task or a work item, and return its path.

    Without a name it gets the first free one of `group`-1, `group`-2, ...
    """
    if args.name is not None:
        owner = path_of(root, args, args.name)
        create(root, owner, files)
        return owner
    return create_numbered(root, f"{plane_path(root, args)}/{args.group}", files)


# tasks


@command(
    "task start",
    OF,
    option("--name", "TASK", "default: the first free name of task-1, task-2, ..."),
    CWD,
    ENV,
    flag("--input", "let it read input from: ctx task input"),
    option("--title", "TEXT", "a line that says what it is for"),
    option("--work", "ID", "the work item that it is for"),
    flag("--wait", "show its output and exit with its status"),
    rest="shell",
)
def do_task_start(root: Root, args: Arguments) -> int:
    """Run a command.

    A shell runs COMMAND: a single word unchanged, several words quoted. Prints the name of the
    task. With --wait, Ctrl-C stops the task and a second Ctrl-C kills it. Exit status with
    --wait: the command's, 128+N after signal N, 130 if cancelled.
    """
    import shlex

    words = args.shell
    if not words:
        raise Misuse("no command: give one after --")
    lines = {
        "title": [args.title] if args.title else [],
        "cwd": [os.path.abspath(args.cwd)] if args.cwd else [],
        "env": args.env,
        "accepts_input": ["1"] if args.input else [],
        "work": [args.work] if args.work else [],
        "cmd": words if len(words) == 1 else [shlex.join(words)],
    }
    files = [(file, value_of("\n".join(items))) for file, items in lines.items() if items]
    files += [] if args.wait else [("ctl", b"start\n")]
    owner = create_object(root, args, files)
    if not args.wait:
        STDOUT.lines([label(owner)])
        return OK
    from client.events import TASK_OUTCOMES, exit_status, task_ending
    from client.spawn import run_foreground

    run_foreground(root, owner, {"output": STDOUT})
    status, exited = task_ending(root, owner)
    if status != "completed" and not exited.startswith("exit:"):
        complain(f"{label(owner)}: {status or 'gone'} {exited}".rstrip())
    return exit_status(TASK_OUTCOMES.get(status, ""), exited)


@command(
    "task output",
    OF,
    flag("-f", "--follow", "continue until it has ended"),
    option("-n", "--lines", "LINES", "the last LINES", type=line_count),
    ONE["task"],
)
def do_task_output(root: Root, args: Arguments) -> None:
    """Show the output of a task."""
    from client.following import Tail, follow

    owner = path_of(root, args, args.name)
    tail = Tail(root, below(owner, "output"), STDOUT, args.lines)
    tail.pump()
    if args.follow:
        follow(root, owner, [tail])


@command(
    "task input",
    OF,
    ONE["task"],
    operand("text", "[TEXT...]", "default, and -: standard input"),
    rest="text",
)
def do_task_input(root: Root, args: Arguments) -> None:
    """Write to the standard input of a task."""
    piped = args.text in ([], ["-"])
    data = given(args.text) if piped else value_of(" ".join(args.text))
    if not data:
        raise Misuse("nothing to send: the text is empty")
    root.write(path_of(root, args, args.name, "input"), data)


declare(do_verb, "task stop", "Stop tasks.", OF, SEVERAL["task"], WAIT)
declare(do_verb, "task kill", "Stop tasks at once.", OF, SEVERAL["task"], WAIT)
declare(
    do_wait,
    "task wait",
    "Wait until tasks have ended.\n\nPrints TASK, status and exit of each. Exits 0 if all"
    " completed, 1 if not, 124 on timeout.",
    OF,
    *LISTING,
    TIMEOUT,
    SEVERAL["task"],
)
# work items


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
    owner = create_object(root, args, files)
    STDOUT.lines([label(owner)])
    if args.focus:
        focus(root, args, label(owner))


declare(do_set, "work set", f"Write files of a work item.\n\n{SET_NOTES}", OF, ONE["work"], VALUES)


def focus(root: Root, args: Arguments, name: str) -> None:
    """Make a work item the current one of its agent."""
    path_of(root, args, name)
    root.write(below(plane_path(root, args), "current"), value_of(name))


@command("work focus", OF, ONE["work"])
def do_work_focus(root: Root, args: Arguments) -> None:
    """Make a work item the current one."""
    focus(root, args, args.name)


def do_work_end(root: Root, args: Arguments) -> int:
    """Mark work items as done or as cancelled."""
    status = value_of({"done": "done", "cancel": "cancelled"}[args.command])
    paths = [path_of(root, args, name, "status") for name in args.names]
    return all_worked(paths, lambda path: root.write(path, status))


declare(do_work_end, "work done", "Mark work items as done.", OF, SEVERAL["work"])
declare(do_work_end, "work cancel", "Mark work items as cancelled.", OF, SEVERAL["work"])


# waits


@command(
    "waits add",
    OF,
    option("--work", "ID", "the work item that it blocks"),
    option("--deadline", "WHEN", "a time, or a duration from now"),
    ONE["waits"],
    operand(
        "on",
        "ON...",
        "timer WHEN, timer every DURATION [until WHEN], task T, child NAME, reply NAME [MESSAGE], "
        "message, trigger or triggers",
    ),
)
def do_waits_add(root: Root, args: Arguments) -> None:
    """Wait for something.

    For a trigger, or triggers, prints the file that fires the wait when it is written.
    """
    owner = path_of(root, args, args.name)
    lines = {"work": args.work, "deadline": args.deadline, "on": " ".join(args.on)}
    create(root, owner, [(file, value_of(line)) for file, line in lines.items() if line])
    token = root.value(f"{owner}/token")
    if token:
        STDOUT.lines([root.join(f"trigger/{token}")])


declare(do_rm, "task rm", "Remove tasks that have ended.", OF, SEVERAL["task"])
declare(do_rm, "waits cancel", "Cancel waits and remove them.", OF, SEVERAL["waits"])
