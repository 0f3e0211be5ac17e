"""The command attach: the output of an agent, and messages typed to it, until one leaves."""

from __future__ import annotations

import os

from client.arguments import COLOR, NAME
from client.declaring import Arguments, command
from client.ends import ending, exit_status, session_of
from client.events import parse_event
from client.exits import NOT_RUNNING, OK, Failure
from client.files import BLOCK
from client.following import Following, Labelled, Tail
from client.loop import Lines
from client.output import STDOUT, complain
from client.root import Root, agent

BEFORE = 10  # lines of what was said before


class Detached(Exception):
    """The user leaves."""


class Replies(Tail):
    """The answers of a resident agent, to anybody: its program's output does not have it."""

    def pump(self) -> None:
        """Show the replies since the last call."""
        for line in (line for lines in self.batches() for line in lines):
            message = parse_event(line) or {}
            if message.get("role") == "assistant":
                text = str(message.get("content", ""))
                self.output.copy(text.rstrip("\n").encode("utf-8", "backslashreplace") + b"\n")


class Typed:
    """Lines of standard input, each sent as a message."""

    def __init__(self, root: Root, name: str) -> None:
        self.root = root
        self.name = name
        self.splitter = Lines(0)

    def read(self) -> None:
        """Send the lines that are there; at the end of the input, leave."""
        try:
            data = os.read(0, BLOCK)
        except BlockingIOError:
            return
        except OSError:  # the terminal is gone, or standard input is closed
            data = b""
        for line in self.splitter.add(data or b"\n"):
            self.send(line)
        if not data:
            raise Detached

    def send(self, line: bytes) -> None:
        """Send a line, unless it is blank; tell why if the agent does not take it."""
        if not line.strip():
            return
        try:
            self.root.write(agent(self.name, "inbox"), line + b"\n")
        except Failure as failure:
            if failure.status == NOT_RUNNING:
                raise
            complain(str(failure))


@command("attach", COLOR, NAME)
def do_attach(root: Root, args: Arguments) -> int:
    """Follow the output of an agent, and send it what you type.

    Each line is sent as a message. Ctrl-C or Ctrl-D detaches and leaves the agent running.
    Exits 0 when detached, else as the agent ended.
    """
    name, owner = args.name, agent(args.name)
    status = root.field(name, "status") if root.present(owner) else ""
    if status in ("new", "dead"):
        message = f"{name} is not running: its status is {status}; see: ctx log {name}"
        raise Failure(message, NOT_RUNNING)
    session, mode = session_of(root, owner), root.field(name, "mode")
    pumps: list[Labelled | Replies] = [
        Labelled([Tail(root, agent(name, file), STDOUT, BEFORE) for file in ("log", "out")])
    ]
    if mode == "resident" and session:
        pumps.append(Replies(root, f"{session}/messages.jsonl", STDOUT, BEFORE))
    if os.isatty(0) and os.isatty(2):
        sends = "its input is closed" if mode == "once" else "each line is sent as a message"
        complain(f"attached to {name} ({mode}): {sends}; Ctrl-C or Ctrl-D leaves it running")
    following = Following(root)
    following.add(owner, pumps)
    if mode != "once" or os.isatty(0):
        following.watch(0, Typed(root, name).read)
    try:
        for pump in pumps:
            pump.pump()
        following.copy()
    except (KeyboardInterrupt, Detached):
        now = root.field(name, "status")
        complain(f"detached: {name} goes on ({now})" if now else f"detached from {name}")
        return OK
    outcome, reason = ending(root, owner, session)
    complain(f"{name} ended: {outcome or 'gone'} {reason}".rstrip())
    return exit_status(outcome, reason)
