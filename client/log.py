"""The commands result, now, log and attach: what agents made, work on, and print."""

from __future__ import annotations

import errno
import os

from client.control import for_each
from client.declaring import (
    COLOR,
    FOLLOW,
    NAME,
    OWN,
    Arguments,
    arg,
    command,
    declare,
    flag,
    line_count,
    operand,
    option,
)
from client.events import ending, exit_status, identity, session_of
from client.exits import DENIED, FAILED, NOT_RUNNING, OK, Failure
from client.files import BLOCK
from client.following import Following, Labelled, Named, Tail, allow_descriptors
from client.loop import Lines, parse_object
from client.output import STDOUT, complain
from client.ps import Forest, listed
from client.root import Root, agent, below, own_name
from client.sockets import not_running

NAME_STYLES = 6  # in output.STYLES
LOOK = 1.0  # seconds between two looks for new agents


@command("result", NAME)
def do_result(root: Root, args: Arguments) -> int:
    """Show the result of an agent.

    Exits 1 if the agent has not finished.
    """
    owner = agent(args.name)
    result = root.read(below(owner, "result.md"))
    STDOUT.copy(result)
    status = root.field(args.name, "status")
    if status != "dead":
        complain(f"{args.name} has not finished: its status is {status or 'unknown'}")
        return FAILED
    if not result:
        complain(f"{args.name} ended without a result: {' '.join(ending(root, owner))}")
    return OK


@command("now", OWN)
def do_now(root: Root, args: Arguments) -> None:
    """Show what an agent works on and waits for.

    Shows session/context/now.md: the current work item with its plan, armed waits, children and
    tasks with their statuses, and the last reports of children.
    """
    owner = agent(args.name or own_name(root))
    STDOUT.copy(root.read(below(owner, "session/context/now.md")))


def do_log(root: Root, args: Arguments) -> int:
    """Show the output of agents."""
    return Logs(root, args).show()


class Logs:
    """The output of an agent, or of several, with their names in front of the lines."""

    def __init__(self, root: Root, args: Arguments) -> None:
        self.root = root
        self.args = args
        self.alone = len(args.names) == 1 and not args.children
        self.files = [file for file in ("log", "out") if file in (args.only or (file,))]
        self.following = Following(root)
        self.known: dict[str, str] = {}  # of each name, when the agent was made that has it
        self.dead: set[str] = set()  # of those that nobody named, at the last look
        self.shown = 0
        self.width = 0
        self.looked = False  # at those that were there first

    def show(self) -> int:
        """Show what there is; with --follow, also what comes."""
        allow_descriptors()
        self.known = self.agents()
        wanted = [name for name in self.known if name not in self.dead]
        self.width = max(map(len, wanted), default=0)
        failed = [name for name in wanted if not self.add(name)]
        self.looked = True
        if self.args.follow:
            if self.args.children or not self.args.names:
                self.following.every(LOOK, self.look)
            self.following.copy(forever=not self.args.names)
        return FAILED if any(name in self.args.names for name in failed) else OK

    def agents(self) -> dict[str, str]:
        """Return of whom output can be shown, with the times when they were made."""
        if self.args.names and not self.args.children:
            return dict.fromkeys(self.args.names, "")
        if not self.args.names:
            rows = [row for some in listed(self.root) for row in some]
            self.dead = {row["name"] for row in rows if row["status"] == "dead"}
            return dict(sorted((row["name"], row["created_at"]) for row in rows))
        forest = Forest(self.root)
        names = [each for name in self.args.names for each in forest.family(name)]
        return {name: forest.facts.get(name, {}).get("created_at", "") for name in names}

    def add(self, name: str) -> bool:
        """Show the output of one more agent, and follow it if that is wanted."""
        before = identity(self.root, name)
        lines = None if self.looked else self.args.lines
        try:
            tails = [Tail(self.root, agent(name, file), STDOUT, lines) for file in self.files]
        except Failure as failure:
            if self.alone or failure.number == errno.ENOTCONN:
                raise
            if name in self.args.names and not self.looked:
                complain(str(failure))
            return False
        self.width = max(self.width, len(name))
        self.shown += 1
        style = f"name-{self.shown % NAME_STYLES}"
        output = Labelled(tails) if self.alone else Named(tails, f"{name:<{self.width}}", style)
        output.pump()

        def ended() -> None:
            output.close()
            if identity(self.root, name) != before:
                complain(f"{name} was removed or reset: its last output may be missing")

        if self.args.follow:
            self.following.add(agent(name), [output], ended)
        else:
            output.close()
        return True

    def look(self) -> None:
        """Add agents that came since."""
        now = self.agents()
        for name, made in now.items():
            if self.known.get(name) != made:
                self.add(name)
        self.known = now


for _name, _summary in (
    ("log", "Show the output of agents: log, then out."),
    ("logs", "Another name of log."),
):
    declare(
        do_log, _name,
        f"{_summary}\n\nOf several agents, each line has its name in front. -f without a NAME"
        " continues, also with new agents, until Ctrl-C.",
        FOLLOW,
        arg("--out", dest="only", action="append_const", const="out", help="stdout only"),
        arg("--err", dest="only", action="append_const", const="log", help="stderr and log only"),
        option("-n", "--lines", "LINES", "the last LINES of each", type=line_count),
        flag("-c", "--children", "also of all agents below, and of those that are made later"),
        COLOR,
        operand("names", "[NAME...]", "default: all agents that live"),
    )  # fmt: skip


BEFORE = 10  # lines of what was said before


class Detached(Exception):
    """The user leaves."""


class Replies(Tail):
    """The answers of a resident agent, to anybody: its program's output does not have it."""

    def pump(self) -> None:
        """Show the replies since the last call."""
        for line in (line for lines in self.batches() for line in lines):
            message = parse_object(line) or {}
            if message.get("role") == "assistant":
                text = str(message.get("content", ""))
                self.output.copy(text.rstrip("\n").encode("utf-8", "backslashreplace") + b"\n")


def send_typed(root: Root, name: str, typed: Lines) -> None:
    """Send each line of standard input that is there as a message; at its end, leave.

    Tell why if the agent does not take a line.
    """
    try:
        data = os.read(0, BLOCK)
    except BlockingIOError:
        return
    except OSError:  # the terminal is gone, or standard input is closed
        data = b""
    lines = [line + b"\n" for line in typed.add(data or b"\n") if line.strip()]
    for_each(lines, lambda line: root.write(agent(name, "inbox"), line))
    if not data:
        raise Detached


@command(
    "attach",
    COLOR,
    flag("--look", "only look at its terminal: what you type goes nowhere"),
    flag("--raw", "show also what could harm your terminal"),
    option("--leave-key", "^X", "the key that leaves its terminal; default: ^], which is Ctrl-]"),
    operand("name", "NAME", "the agent, or as NAME/TASK a task of it that has a terminal"),
)
def do_attach(root: Root, args: Arguments) -> int:
    """Be at the terminal of an agent; of one without, follow the output, and send what you type.

    At a terminal, Ctrl-] d leaves it running, Ctrl-] Ctrl-] types Ctrl-], and Ctrl-] ? says so. If
    standard input is no terminal, it is typed, and its end leaves. Without one, each line is sent
    as a message, and Ctrl-C or Ctrl-D leaves the agent running. Exits 0 when you left, else as the
    agent ended.
    """
    name, _, task = args.name.partition("/")
    owner = agent(name)
    if not root.present(owner):
        raise Failure(root.missing(owner), NOT_RUNNING, errno.ENOENT)
    place = f"{owner}/task/{task}" if task else owner
    has_terminal = bool(task or args.look or root.value(f"{place}/tty"))
    status = root.field(name, "status")
    if status in ("new", "dead"):
        raise not_running(root, name, status, by_message=not has_terminal)
    try:
        if has_terminal:
            from client.terminal import attach

            return attach(root, place, look=args.look, raw=args.raw, leave=args.leave_key)
        return attach_lines(root, name)
    except Failure as failure:
        hidden = failure.number == errno.ENOENT and root.present(place)
        if failure.number != errno.EACCES and not hidden:
            raise
        who = "only its operators may, and its supervisor if it has no terminal"
        message = f"you may not attach to {args.name}: {who} ({failure})"
        raise Failure(message, DENIED, failure.number) from None


def attach_lines(root: Root, name: str) -> int:
    """Follow the output of an agent without a terminal, and send it the lines of standard input."""
    owner = agent(name)
    session, mode = session_of(root, owner), root.field(name, "mode")
    pumps: list[Labelled | Tail] = [
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
        typed = Lines(0)
        following.watch(0, lambda: send_typed(root, name, typed))
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
