"""The commands spawn and run: a program as an agent."""

from __future__ import annotations

import os

from client.agents import assignments, create, parent_line
from client.arguments import CWD, ENV, NAME, PARENT, Command, arg, one_of
from client.control import catch_interrupts, control, end, for_each, interrupt
from client.ends import ending, exit_status, session_of
from client.exits import FAILED, NOT_RUNNING, OK, USAGE, Failure
from client.files import read_stdin, value_of
from client.following import Tail, follow, wait_ended
from client.messages import converse, message_text
from client.output import STDERR, STDOUT, complain
from client.root import Root, agent, below, label
from client.sockets import connect_started
from client.words import LIVES, MODES, MOUNT_MODES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from client.arguments import Arguments
    from client.output import Output


def mount_line(text: str) -> str:
    """Return the line of a `mount` file for SRC[:TARGET[:ro|rw|hide]], also SRC:ro|rw|hide.

    SRC may also be shared:SPACE or home:, and needs a TARGET then.
    """
    parts = text.split(":")
    mode = parts.pop() if len(parts) > 1 and parts[-1] in MOUNT_MODES else "ro"
    if any(char in text for char in "\t\n"):
        parts = []
    if len(parts) == 3 and ((parts[0] == "shared" and parts[1]) or parts[:2] == ["home", ""]):
        return "\t".join((":".join(parts[:2]), parts[2], mode, "-"))
    if not 0 < len(parts) <= 2 or not all(parts):
        raise Failure(f'"{text}" is not SRC[:TARGET[:ro|rw|hide]]', USAGE)
    source = os.path.abspath(parts[0])
    return "\t".join((source, parts[1] if len(parts) == 2 else source, mode, "-"))


def exec_line(words: Sequence[str]) -> bytes:
    """Return a program and its arguments as an `exec` line."""
    import shlex

    line = shlex.join(words)
    if "\n" in line:
        raise Failure("an argument contains a newline, which an exec line cannot contain", USAGE)
    return value_of(line)


def program_files(args: Arguments) -> list[tuple[str, bytes]]:
    """Return the control files for the options of `spawn` and `run`."""
    if not args.program:
        raise Failure("no program: give one after --", USAGE)
    lines = {
        "mount": [mount_line(text) for text in args.mount],
        "env": args.env,
        "cwd": [os.path.abspath(args.cwd)] if args.cwd else [],
        "limits": args.limit + ([f"timeout={args.timeout}"] if args.timeout else []),
    }
    for file in ("life", "restart", "mode", "context", "workspace", "model"):
        lines[file] = list(filter(None, [getattr(args, file)]))
    files = parent_line(args.parent) + assignments(args.set)
    files += [(file, value_of("\n".join(items))) for file, items in lines.items() if items]
    return [*files, ("exec", exec_line(args.program))]


def do_spawn(root: Root, args: Arguments) -> int:
    """Create an agent for a program, start it, and wait for it with --wait."""
    files = program_files(args)
    if args.rm and not args.wait:
        raise Failure("--rm needs --wait", USAGE)
    if args.wait and ("life", b"temp\n") in files:
        message = "the output of a temp agent is removed with it: use --wait --rm instead"
        raise Failure(message, USAGE)
    handoff = b"" if os.isatty(0) else read_stdin()
    files += [("handoff.md", handoff)] if handoff else []
    owner = agent(args.name)
    if not args.wait:
        create(root, owner, [*files, ("ctl", b"start\n")])
        STDOUT.lines([args.name])
        return OK
    create(root, owner, files)
    session = session_of(root, owner)
    run_foreground(root, owner, {"out": STDOUT, "log": STDERR})
    outcome, reason = ending(root, owner, session)
    if outcome != "done" and not reason.startswith("exit:"):
        complain(f"{args.name}: {outcome or 'gone'} {reason}".rstrip())
    if args.rm and root.present(owner):
        for_each([owner], root.remove)
    return exit_status(outcome, reason)


def run_foreground(root: Root, owner: str, outputs: dict[str, Output]) -> None:
    """Start an agent or a task and copy its files to their outputs until it has ended.

    Ctrl-C stops it. If it cannot be started, remove it again.
    """
    restore = catch_interrupts(lambda count: interrupt(root, owner, count))
    try:
        tails = [Tail(root, below(owner, file), output) for file, output in outputs.items()]
        try:
            control(root, owner, "start")
        except Failure:
            for_each([owner], root.remove)
            raise
        follow(root, owner, tails)
    finally:
        restore()


def do_run(root: Root, args: Arguments) -> int:
    """Send one message to a program, run by a new agent or by an existing one."""
    files = program_files(args)
    if not any(file == "mode" for file, _ in files):
        files.append(("mode", b"turn\n"))
    if ("mode", b"once\n") in files:
        raise Failure("mode once accepts no messages; use ctx spawn", USAGE)
    text = message_text([] if args.message is None else [args.message])
    owner = agent(args.name)
    made = not root.present(owner)
    if made:
        create(root, owner, [*files, ("ctl", b"start\n")])
    else:
        check_program(root, args.name, dict(files)["exec"])
    try:
        return run_message(root, owner, text)
    finally:
        if made and not args.keep:
            dispose(root, owner)


def check_program(root: Root, name: str, line: bytes) -> None:
    """Fail if an agent is known to execute another program than an `exec` line names."""
    program = root.field(name, "exec")
    if program and value_of(program) != line:
        raise Failure(f"{name} already exists and executes: {program}")


def run_message(root: Root, owner: str, text: str) -> int:
    """Send a message to an agent that was just started; return the exit status of its run."""
    name, session = label(owner), session_of(root, owner)
    try:
        connection = connect_started(root, name)
    except Failure as failure:
        outcome, reason = ending(root, owner, session)
        if failure.status != NOT_RUNNING or not reason.startswith("start_failed"):
            raise
        complain(f"{name}: {outcome} {reason}")
        return exit_status(outcome, reason)
    status, reason = converse(connection, name, text)
    return exit_status("error", reason) if status == FAILED and reason else status


def dispose(root: Root, owner: str) -> None:
    """Stop an agent and remove it when it is dead; Ctrl-C kills it, a second one leaves it."""
    restore = catch_interrupts(lambda count: interrupt(root, owner, count + 1))
    try:
        end(root, owner, "stop")
        for _ in wait_ended(root, [owner]):
            if root.present(owner):  # the daemon removes a temp agent
                root.remove(owner)
    except Failure as failure:
        complain(str(failure))
    finally:
        restore()


PROGRAM_OPTIONS = (
    PARENT,
    arg(
        "--mount",
        metavar="SRC:TARGET:MODE",
        action="append",
        default=[],
        help="mount a path, shared:SPACE or home: in its sandbox; "
        f"MODE is {one_of(MOUNT_MODES)}",
    ),
    ENV,
    CWD,
    arg("--set", metavar="FILE=VALUE", action="append", default=[], help="write a control file"),
    arg("--timeout", metavar="DURATION", help="end it after this time"),
    arg(
        "--limit",
        metavar="K=V",
        action="append",
        default=[],
        help="limit it, such as memory.max=1G",
    ),
    arg(
        "--restart",
        metavar="WHEN",
        help="when to start it again: on-failure or always; not for a child",
    ),
    arg("--life", metavar="LIFE", help=f"of a child: {one_of(LIVES)}"),
    arg("--mode", metavar="MODE", help=f"how it runs: {one_of(MODES)}"),
    arg("--context", metavar="CONTEXT", help="what a child knows at first: fresh or fork"),
    arg(
        "--workspace",
        metavar="WORKSPACE",
        help="where it works: inherit, worktree or explicit_root:/DIR",
    ),
    arg("--model", metavar="MODEL", help="the model that it uses"),
)
COMMANDS = (
    Command(
        "spawn",
        "run a program as an agent",
        (
            *PROGRAM_OPTIONS,
            arg("--wait", action="store_true", help="show its output and exit with its status"),
            arg("--rm", action="store_true", help="remove the agent afterwards"),
            NAME,
        ),
        do_spawn,
        "TARGET defaults to SRC, and MODE to ro. Standard input becomes handoff.md, unless it is a"
        " terminal. With --wait, Ctrl-C stops the agent and a second Ctrl-C kills it. Exit status"
        " with --wait: the program's, 124 on timeout, 126 if it could not start, 128+N after"
        " signal N, 137 when out of memory, 130 if cancelled.",
        rest="program",
    ),
    Command(
        "run",
        "run a program to answer one message",
        (
            *PROGRAM_OPTIONS,
            arg("--message", metavar="TEXT", help="the message; default: standard input"),
            arg("--keep", action="store_true", help="keep the agent, for send and chat"),
            NAME,
        ),
        do_run,
        "Creates the agent as spawn does, in mode turn, and removes it afterwards. If an agent of"
        " that name exists, run uses and keeps it. Ctrl-C cancels the message. Exit status: as with"
        " spawn --wait, for the message's run; 13 denied, 69 not running.",
        rest="program",
    ),
)
