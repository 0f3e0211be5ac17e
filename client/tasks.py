"""Tasks: commands that run inside an agent."""

from __future__ import annotations

import os

from client.agents import create_object, do_rm
from client.declaring import (
    CWD,
    ENDED,
    ENV,
    LISTING,
    OF,
    TIMEOUT,
    WAIT,
    Arguments,
    command,
    declare,
    flag,
    line_count,
    operand,
    option,
)
from client.events import TASK_OUTCOMES, exit_status, task_ending
from client.exits import OK, Misuse
from client.files import given, value_of
from client.following import Tail, follow
from client.output import STDOUT, complain
from client.planes import do_list, do_show, path_of
from client.root import Root, below, label
from client.spawn import run_foreground
from client.verbs import do_verb, do_wait

TASK = operand("name", "TASK", "the task")
TASKS = operand("names", "TASK...", "the tasks")
declare(do_list, "task list", "List tasks that have not ended.", OF, ENDED, *LISTING)
declare(do_show, "task show", "Show all about a task.", OF, *LISTING, TASK)


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
    owner = create_object(root, args, "task", files)
    if not args.wait:
        STDOUT.lines([label(owner)])
        return OK
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
    TASK,
)
def do_task_output(root: Root, args: Arguments) -> None:
    """Show the output of a task."""
    owner = path_of(root, args, args.name)
    tail = Tail(root, below(owner, "output"), STDOUT, args.lines)
    tail.pump()
    if args.follow:
        follow(root, owner, [tail])


@command(
    "task input", OF, TASK, operand("text", "[TEXT...]", "default: standard input"), rest="text"
)
def do_task_input(root: Root, args: Arguments) -> None:
    """Write to the standard input of a task."""
    data = value_of(" ".join(args.text)) if args.text else given([])
    if not data:
        raise Misuse("nothing to send: the text is empty")
    root.write(path_of(root, args, args.name, "input"), data)


declare(do_verb, "task stop", "Stop tasks.", OF, TASKS, WAIT)
declare(do_verb, "task kill", "Stop tasks at once.", OF, TASKS, WAIT)
declare(
    do_wait,
    "task wait",
    "Wait until tasks have ended.\n\nPrints TASK, status and exit of each. Exits 0 if all"
    " completed, 1 if not, 124 on timeout.",
    OF,
    *LISTING,
    TIMEOUT,
    TASKS,
)
declare(do_rm, "task rm", "Remove tasks that have ended.", OF, TASKS)
