"""The `ctx` command: manages agents of a mounted ctxfs through plain files and sockets.

This program is the installed command, `/ctx/bin/ctx`, every `/ctx/agent/NAME` and every
`/ctx/tool/NAME`. It also runs in sandboxes. So it uses only the standard library and an isolated
interpreter, and imports slow modules where they are used. It does the same with modules of this
package that only some commands need.
"""

from __future__ import annotations

import _signal  # signal itself takes a millisecond to import
import os
import sys

from client.exits import FAILED, INTERRUPTED, OK, PIPE_CLOSED, Failure
from client.output import STDOUT, complain
from client.root import Root, default_root
from client.types import FrameType, NoReturn, Sequence

LATER = 0.002  # seconds until an interrupt is looked at again


def handle_of(path: str) -> tuple[Root, str, str] | None:
    """Return root, kind (`agent` or `tool`) and name if a program path is a handle, else None.

    A program that is not at its path any more was run from a filesystem that is gone: a handle
    whose daemon has died since.
    """
    for candidate in (os.path.abspath(path), os.path.realpath(path)):
        directory, name = os.path.split(candidate)
        top, kind = os.path.split(directory)
        if kind not in ("agent", "tool"):
            continue
        if os.path.isdir(candidate + ".d") or not os.path.exists(candidate):
            return Root(top), kind, name
    return None


def run_handle(root: Root, kind: str, name: str, words: Sequence[str]) -> int:
    """Act as the handle of an agent or a tool."""
    catch_interrupts()
    if kind == "agent":
        from client.messages import run_agent_handle

        return run_agent_handle(root, name, words)
    from client.tools import run_tool_handle

    run_tool_handle(root, name, words)
    return OK


def run_command(argv: Sequence[str]) -> int:
    """Run the command that a command line names."""
    from client.commands import GROUPS, parse_command, parse_options

    named, words = parse_options(argv)
    if words[0] in ("-h", "--help") or words == ["help"]:
        topic = []
    elif words[0] in GROUPS and words[1:] in (["-h"], ["--help"]):
        topic = words[:1]
    elif words == ["--version"]:
        from client.words import VERSION

        STDOUT.text(f"ctx {VERSION}\n")
        return OK
    else:
        command, args = parse_command(words)
        catch_interrupts()
        return command.handler(Root(named or default_root()), args) or OK
    from client.help import show_help  # without argparse, whose import takes as long as the rest

    show_help(topic)
    return OK


def run(argv: Sequence[str] | None) -> int:
    """Run a command line, by default of this process, and return the exit status."""
    if argv is None:
        argv = sys.argv[1:]
        handle = handle_of(sys.argv[0])
        if handle:
            return run_handle(*handle, argv)
    return run_command(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, report errors, and return the exit status."""
    try:
        return run(argv)
    except Failure as failure:
        complain(str(failure))
        return failure.status
    except SystemExit as end:  # argparse printed the reason
        return end.code if isinstance(end.code, int) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return PIPE_CLOSED
    except OSError as error:
        named = isinstance(error.filename, str)
        reason = error.strerror or str(error)
        complain(f"{error.filename}: {reason}" if named else reason)
        return FAILED


def open_all() -> None:
    """Open those of standard input, output and error that are closed, as empty and not writable.

    What this program opens would get their numbers, and what it prints would be written there.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDONLY)  # it gets the lowest free number: this one


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C as an exception, once no module is being imported.

    The importer calls Python code from places that only print exceptions.
    """
    while frame is not None:
        if "importlib" in frame.f_code.co_filename:
            _signal.setitimer(_signal.ITIMER_REAL, LATER)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def catch_interrupts() -> None:
    """Make an interrupt an exception from here on; before, it ends the process (start.py).

    There is nothing to undo before, and argparse fails otherwise if it is interrupted.
    """
    if _signal.getsignal(_signal.SIGINT) == _signal.SIG_DFL:
        _signal.signal(_signal.SIGALRM, lambda *_: _signal.raise_signal(_signal.SIGINT))
        _signal.signal(_signal.SIGINT, interrupt)


def program() -> NoReturn:
    """Run the command line of this process, and end it at once.

    Output is written when it is made, and no thread has anything left to do. So nothing is lost if
    the interpreter is not taken down, which takes a tenth of the time of `ctx ps` of many agents.
    """
    open_all()
    try:
        status = main()
    except KeyboardInterrupt:  # another one, while the first was handled
        status = INTERRUPTED
    os._exit(status)
