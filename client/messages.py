"""Messages to agents: sending them, showing their replies, listing the queue."""

from __future__ import annotations

import os

from client.control import catch_interrupts
from client.declaring import LISTING, NAME, OWN, Arguments, arg, command, operand
from client.exits import FAILED, INTERRUPTED, OK, Misuse
from client.files import given
from client.loop import parse_object
from client.output import STDOUT, complain, escape, gist, headed, show_rows
from client.root import Root, agent, own_name
from client.sockets import MESSAGE_CODES, Connection, ask, connect, frames, refusal
from client.types import Any, Iterator, Sequence
from client.words import PRIORITIES

#: the final statuses of a message, with exit statuses
ENDINGS = {"processed": OK, "failed": FAILED, "aborted": INTERRUPTED, "dropped": INTERRUPTED}


class Reply:
    """The reply to a message, shown as it arrives."""

    def __init__(self) -> None:
        self.shown = ""

    def delta(self, text: str) -> None:
        """Show a piece of the reply."""
        STDOUT.copy(text.encode("utf-8", "backslashreplace"))
        self.shown += text

    def message(self, text: str) -> None:
        """Show the whole reply, or the rest of it after the pieces."""
        if text.startswith(self.shown):
            self.delta(text[len(self.shown) :])
        elif self.shown.strip() != text.strip():
            self.finish()
            self.delta(text)

    def finish(self) -> None:
        """End the last line."""
        if self.shown and not self.shown.endswith("\n"):
            self.delta("\n")


def converse(
    connection: Connection, name: str, text: str, priority: str | None = None
) -> tuple[int, str]:
    """Send a message to an agent and show its reply.

    Return the exit status for the end of the message, and the reason of that end.
    """
    ident = os.urandom(8).hex()
    cancelled = sent = False

    def cancel(count: int) -> None:
        nonlocal cancelled
        cancelled = True
        if count > 1:
            raise KeyboardInterrupt
        if sent:
            ask(connection, op="cancel", id=ident)

    reply = Reply()
    last: dict[str, Any] = {}
    options = {"priority": priority} if priority else {}
    restore = catch_interrupts(cancel)
    try:
        ask(connection, op="send", id=ident, input=text, **options)
        sent = True
        if cancelled:  # while it was sent
            ask(connection, op="cancel", id=ident)
        for frame in frames(connection):
            kind, content = frame.get("type"), frame.get("text")
            if frame.get("id") not in (None, ident):
                continue
            if kind in ("delta", "message") and isinstance(content, str):
                getattr(reply, kind)(content)
            elif kind in ("done", "error"):
                last = frame
                break
    finally:
        restore()
        connection.close()
        reply.finish()
    return judge_end(name, last, cancelled)


def judge_end(name: str, frame: dict[str, Any], cancelled: bool) -> tuple[int, str]:
    """Report the failure of a message, unless its sender cancelled it.

    `frame` is the last frame about the message, empty if none came. Return as `converse` does.
    """
    kind = frame.get("type")
    if kind == "done":
        became = str(frame.get("status") or ("aborted" if cancelled else "processed"))
        status, reason = ENDINGS.get(became, FAILED), str(frame.get("reason") or "")
        if status != OK and not (cancelled and status == INTERRUPTED):
            complain(f"{name}: {became} {reason}".rstrip())
        return status, reason
    if cancelled:
        return INTERRUPTED, ""
    if kind == "error":
        failure = refusal(frame, MESSAGE_CODES)
        complain(str(failure))
        return failure.status, ""
    complain(f"{name}: the connection ended before the reply did")
    return FAILED, ""


def utf8(data: bytes) -> str:
    """Return the text of a message."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Misuse("the text is not UTF-8") from None


def message_text(words: Sequence[str]) -> str:
    """Return the message to send: the arguments, else standard input, which is also `-`."""
    text = utf8(given(words))
    if not text.strip():
        raise Misuse("nothing to send: the text is empty")
    return text


def run_agent_handle(root: Root, name: str, words: Sequence[str]) -> int:
    """Act as the message handle of an agent."""
    if list(words) in (["-h"], ["--help"]):
        usage = f"usage: {root.path}/agent/{name} [TEXT...]\n\nSends TEXT, or standard input, "
        STDOUT.text(escape(usage + f"to the agent {name} and shows its reply.\n", keep="\n"))
        return OK
    text = message_text(words[1:] if words[:1] == ["--"] else words)
    return converse(connect(root, name), name, text)[0]


@command(
    "send",
    arg("--priority", choices=PRIORITIES, help="its place in the queue (default: normal)"),
    NAME,
    operand("text", "[TEXT...]", "default, and -: standard input"),
    rest="text",
)
def do_send(root: Root, args: Arguments) -> int:
    """Send a message and show the reply.

    Ctrl-C cancels the message. Exit status: 0 processed, 1 error, 13 denied, 69 not running,
    130 cancelled.
    """
    text = message_text(args.text)
    return converse(connect(root, args.name), args.name, text, args.priority)[0]


def typed_lines(prompt: str) -> Iterator[bytes]:
    """Yield lines typed and edited at a terminal; Ctrl-C clears a line."""
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (input() edits with it)
    while True:
        try:
            yield os.fsencode(input(prompt))
        except KeyboardInterrupt:
            STDOUT.text("\n")
        except EOFError:
            STDOUT.text("\n")
            return


def piped_lines() -> Iterator[bytes]:
    """Yield the lines of standard input as they arrive."""
    with open(0, "rb", closefd=False) as lines:
        yield from lines


@command("chat", NAME)
def do_chat(root: Root, args: Arguments) -> int:
    """Send each line as a message.

    Each line is a message. Ctrl-C cancels the message that is being answered, or clears the
    line; Ctrl-D ends chat. Without a terminal, exits as send does for the first message that
    failed.
    """
    terminal = os.isatty(0) and os.isatty(1)
    connect(root, args.name).close()
    failed = OK
    for line in typed_lines(escape(f"{args.name}> ")) if terminal else piped_lines():
        if not line.strip():
            continue
        try:
            text = utf8(line.rstrip(b"\n"))
            status = converse(connect(root, args.name), args.name, text)[0]
        except KeyboardInterrupt:
            status = INTERRUPTED
        if status == INTERRUPTED and not terminal:
            return status
        failed = failed or status
    return OK if terminal else failed


@command("queue", *LISTING, OWN)
def do_queue(root: Root, args: Arguments) -> None:
    """List the waiting messages."""
    data = root.read(agent(args.name or own_name(root), "queue"))
    if args.json:
        STDOUT.copy(data)
        return
    messages = [*filter(None, map(parse_object, data.splitlines()))]
    columns = headed("id", "ts", "from", "provenance", "priority", "text")
    show_rows(messages, columns, lambda message, column: gist(str(message.get(column, ""))))
