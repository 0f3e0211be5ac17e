"""Tasks: commands that run inside an agent."""

from __future__ import annotations

import os

from client.agents import create, create_numbered, do_rm
from client.arguments import (
    CWD,
    ENDED,
    ENV,
    LISTING,
    OF,
    TIMEOUT,
    WAIT,
    Command,
    arg,
    line_count,
)
from client.ends import TASK_OUTCOMES, exit_status, task_ending
from client.exits import OK, USAGE, Failure
from client.files import given, value_of
from client.following import Tail, follow
from client.output import STDOUT, complain
from client.planes import do_list, do_show, path_of, plane_path
from client.root import Root, below, label
from client.spawn import run_foreground
from client.verbs import do_verb, do_wait

TYPE_CHECKING = False
if TYPE_CHECKING:
    from client.arguments import Arguments


def do_task_start(root: Root, args: Arguments) -> int:
    """Create a task for a command, start it, and wait for it with --wait."""
    import shlex

    words = args.shell
    if not words:
        raise Failure("no command: give one after --", USAGE)
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
    if args.name is None:
        owner = create_numbered(root, f"{plane_path(root, args)}/task", files)
    else:
        owner = path_of(root, args, args.name)
        create(root, owner, files)
    if not args.wait:
        STDOUT.lines([label(owner)])
        return OK
    run_foreground(root, owner, {"output": STDOUT})
    status, exited = task_ending(root, owner)
    if status != "completed" and not exited.startswith("exit:"):
        complain(f"{label(owner)}: {status or 'gone'} {exited}".rstrip())
    return exit_status(TASK_OUTCOMES.get(status, ""), exited)


def do_task_output(root: Root, args: Arguments) -> int:
    """Show the output of a task."""
    owner = path_of(root, args, args.name)
    tail = Tail(root, below(owner, "output"), STDOUT, args.lines)
    tail.pump()
    if args.follow:
        follow(root, owner, [tail])
    return OK


def do_task_input(root: Root, args: Arguments) -> int:
    """Write a line, or standard input unchanged, to the standard input of a task."""
    data = value_of(" ".join(args.text)) if args.text else given([])
    if not data:
        raise Failure("nothing to send: the text is empty", USAGE)
    root.write(path_of(root, args, args.name, "input"), data)
    return OK


TASK = arg("name", metavar="TASK", help="the task")
TASKS = arg("names", metavar="TASK", nargs="+", help="the tasks")
COMMANDS = (
    Command("task list", "list tasks that have not ended", (OF, ENDED, *LISTING), do_list),
    Command("task show", "show all about a task", (OF, *LISTING, TASK), do_show),
    Command(
        "task start",
        "run a command",
        (
            OF,
            arg(
                "--name",
                metavar="TASK",
                help="default: the first free name of task-1, task-2, ...",
            ),
            CWD,
            ENV,
            arg("--input", action="store_true", help="let it read input from: ctx task input"),
            arg("--title", metavar="TEXT", help="a line that says what it is for"),
            arg("--work", metavar="ID", help="the work item that it is for"),
            arg("--wait", action="store_true", help="show its output and exit with its status"),
        ),
        do_task_start,
        "A shell runs COMMAND: a single word unchanged, several words quoted. Prints the name of"
        " the task. With --wait, Ctrl-C stops the task and a second Ctrl-C kills it. Exit status"
        " with --wait: the command's, 128+N after signal N, 130 if cancelled.",
        rest="shell",
    ),
    Command(
        "task output",
        "show the output of a task",
        (
            OF,
            arg("-f", "--follow", action="store_true", help="continue until it has ended"),
            arg("-n", "--lines", metavar="LINES", type=line_count, help="the last LINES"),
            TASK,
        ),
        do_task_output,
    ),
    Command(
        "task input",
        "write to the standard input of a task",
        (OF, TASK, arg("text", metavar="TEXT", nargs="*", help="default: standard input")),
        do_task_input,
        rest="text",
    ),
    Command("task stop", "stop tasks", (OF, TASKS, WAIT), do_verb),
    Command("task kill", "stop tasks at once", (OF, TASKS, WAIT), do_verb),
    Command(
        "task wait",
        "wait until tasks have ended",
        (OF, *LISTING, TIMEOUT, TASKS),
        do_wait,
        "Prints TASK, status and exit of each. Exits 0 if all completed, 1 if not, 124 on timeout.",
    ),
    Command("task rm", "remove tasks that have ended", (OF, TASKS), do_rm),
)
