"""The commands spawn and run: a program as an agent."""

from __future__ import annotations

import errno
import os

from client.agents import Removing
from client.control import catch_interrupts, end, for_each, interrupt
from client.declaring import Arguments, command, flag, operand, option
from client.events import ending, exit_status, session_of
from client.exits import FAILED, NOT_RUNNING, OK, Failure, Misuse
from client.files import is_unread, read_stdin, value_of
from client.following import RETRY, Concluded, Following, Tail, wait_ended
from client.making import MAKING_OPTIONS, Files, Making, by_program, make, value
from client.messages import converse, message_text
from client.output import STDERR, STDOUT, Output, complain
from client.root import Root, agent, below, label
from client.sockets import connect_started, open_window
from client.types import Callable, Iterator


def possible(root: Root, args: Arguments, fitted: Callable[[Files], Files]) -> Iterator[Making]:
    """Yield the agent that a command line describes, with the files as `fitted` makes them, for
    each name that it may get."""
    if args.agent:
        from client.recipes import by_recipe

        makings = by_recipe(root, args)
    else:
        makings = iter([by_program(args)])
    for name, files in makings:
        yield name, fitted(files)


def with_terminal(files: Files, size: str) -> Files:
    """Return the files of an agent whose program gets a terminal."""
    mode = value(files, "mode")
    if mode not in ("", "once"):
        raise Misuse(f"--tty is for programs that run once, and the mode is {mode}")
    return [*files, ("tty", value_of(size))]


WORDS = operand(
    "words", "[NAME...]", "the agent; with --agent, instead: the words of its task, or -"
)


@command(
    "spawn",
    *MAKING_OPTIONS,
    option("--handoff", "TEXT", "its task; - reads it from standard input"),
    flag("--wait", "show its output and exit with its status"),
    flag("--rm", "remove the agent afterwards"),
    option(
        "--tty",
        "COLSxROWS",
        "give it a terminal, for ctx attach; default: as large as this one",
        nargs="?",
        const="",
    ),
    WORDS,
    rest="program",
)
def do_spawn(root: Root, args: Arguments) -> int:
    """Run a program as an agent.

    TARGET defaults to SRC, and MODE to ro. A size of the terminal is given as --tty=COLSxROWS.
    Standard input is read only for --handoff - (with --agent, also for - in place of the words).
    With --wait, Ctrl-C stops the agent and a second Ctrl-C kills it. Exit status with --wait: the
    program's, 124 on timeout, 126 if it could not start, 128+N after signal N, 137 when out of
    memory, 130 if cancelled.
    """
    if args.rm and not args.wait:
        raise Misuse("--rm needs --wait")
    size = args.tty
    if size == "":
        from client.terminal import own_size

        size = own_size()

    def checked(files: Files) -> Files:
        if args.wait and value(files, "life") == "temp":
            message = "the output of a temp agent is removed with it: use --wait --rm instead"
            raise Misuse(message)
        return files if size is None else with_terminal(files, size)

    makings = possible(root, args, checked)
    handoff = handoff_of(args)
    more = [("handoff.md", handoff)] if handoff else []
    if not args.wait:
        owner = make(root, args, makings, *more, ("ctl", b"start\n"))
        STDOUT.lines([label(owner)])
        return OK
    return run_once(root, make(root, args, makings, *more, own=args.rm), remove=args.rm)


def run_once(root: Root, owner: str, *, remove: bool) -> int:
    """Start an agent and show its output until it has ended; return its exit status."""
    session = session_of(root, owner)
    run_foreground(root, owner, {"out": STDOUT, "log": STDERR})
    outcome, reason = ending(root, owner, session)
    if not outcome:  # else its log has told
        complain(f"{label(owner)}: gone {reason}".rstrip())
    if remove and root.present(owner):
        for_each([owner], root.remove)
    return exit_status(outcome, reason)


def handoff_of(args: Arguments) -> bytes:
    """Return the task: an option, the words after a recipe; standard input if one is `-`."""
    words = args.words if args.agent else []
    if words and args.handoff is not None:
        raise Misuse("give the task once: by --handoff, or after the options")
    text = " ".join(words) if args.handoff is None else args.handoff
    if not text and is_unread():  # until 0.2, it was read
        complain("standard input is not read: for the task of the agent, say --handoff -")
    return read_stdin() if text == "-" else os.fsencode(text)


def run_foreground(root: Root, owner: str, outputs: dict[str, Output]) -> None:
    """Start an agent or a task and copy its files to their outputs until it has ended.

    Ctrl-C stops it. If it cannot be started, remove it again. A ctxd that is started anew goes on
    with it.
    """
    restore = catch_interrupts(lambda count: interrupt(root, owner, count))
    try:
        tails = [Tail(root, below(owner, file), output) for file, output in outputs.items()]
        with Removing(root, owner):
            root.write(below(owner, "ctl"), b"start\n")
        following = Following(root, for_reader=False, patient=True)
        following.add(owner, [Concluded(tails)])
        keep_window(following, owner)
        following.copy()
    finally:
        restore()


def keep_window(following: Following, owner: str) -> None:
    """Open the window of an agent again, if a ctxd that went away took it along: of what runs at a
    node, nobody else here has the other end."""
    root = following.root

    def reopen() -> None:
        following.forget(root.window)
        os.close(root.window)
        root.window = -1
        open_again()

    def open_again() -> None:
        try:
            root.window = open_window(root, owner)
        except (Failure, OSError) as error:
            if isinstance(error, OSError) or error.number == errno.ENOTCONN:
                following.later(RETRY, open_again)
            return
        keep_window(following, owner)

    if root.window >= 0:
        following.watch(root.window, reopen, 0)


@command(
    "run",
    *MAKING_OPTIONS,
    option("--message", "TEXT", "the message; default, and -: standard input"),
    flag("--keep", "keep the agent, for send and chat"),
    flag("--tty", "run it once, at this terminal"),
    WORDS,
    rest="program",
)
def do_run(root: Root, args: Arguments) -> int:
    """Run a program to answer one message, or at this terminal.

    Creates the agent as spawn does, in mode turn, and removes it afterwards. If an agent of
    that name exists, run uses and keeps it. Ctrl-C cancels the message. Exit status: as with
    spawn --wait, for the message's run; 13 denied, 69 not running. With --tty, the mode is once,
    and the message is the task; the agent ends with this window, and Ctrl-] d leaves it running,
    for ctx attach. Exit status: the program's.
    """
    if args.tty:
        return run_at_terminal(root, args)
    def taking_messages(files: Files) -> Files:
        mode = value(files, "mode")
        if mode == "once":
            raise Misuse("mode once accepts no messages; use ctx spawn")
        return files if mode else [*files, ("mode", b"turn\n")]

    text = message_of(args)
    if args.agent and args.name and root.present(agent(args.name)):
        return run_message(root, agent(args.name), text)
    makings = possible(root, args, taking_messages)
    if not args.agent:
        [(name, files)] = makings
        if root.present(agent(name)):
            check_program(root, name, value(files, "exec"))
            return run_message(root, agent(name), text)
        makings = iter([(name, files)])
    owner = make(root, args, makings, ("ctl", b"start\n"), own=not args.keep)
    if args.keep and args.agent and not args.name:
        complain(f"the agent is {label(owner)}")
    try:
        return run_message(root, owner, text)
    finally:
        if not args.keep:
            dispose(root, owner)


def run_at_terminal(root: Root, args: Arguments) -> int:
    """Run a program at the caller's terminal; return its exit status."""
    from client.terminal import (
        at_terminal,
        carried,
        hold_signals,
        only_operators,
        own_size,
        started,
    )

    if not at_terminal():
        raise Misuse("run --tty needs a terminal; without one: ctx spawn --tty, then ctx attach")
    only_operators(root)
    if not any(line.startswith("env=") for line in args.set):  # which says all
        args.env = [*carried(args.env), *args.env]
    words = args.words if args.agent else []
    task = " ".join(words) if args.message is None else args.message
    named = args.name if args.agent else args.words[:1] and args.words[0]
    if named and root.present(agent(named)):
        remedy = f"be at its terminal with: ctx attach {named}, or choose another name"
        raise Failure(f"{named} exists already; {remedy}", number=errno.EEXIST)
    makings = possible(root, args, lambda files: with_terminal(files, own_size()))
    more = [("handoff.md", os.fsencode(task))] if task else []
    hold_signals()
    owner = make(root, args, makings, *more, own=not args.keep)
    return started(root, owner, remove=not args.keep)


def message_of(args: Arguments) -> str:
    """Return the message: an option, the words after a recipe, else standard input."""
    words = args.words if args.agent else []
    if words and args.message is not None:
        raise Misuse("give the message once: by --message, or after the options")
    return message_text(words if args.message is None else [args.message])


def check_program(root: Root, name: str, line: str) -> None:
    """Fail if an agent is known to execute another program than an `exec` line names."""
    program = root.field(name, "exec")
    if program and program != line:
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
