"""The terminal of a program in a cell, at a person's terminal: for run --tty, attach and enter.

The daemon hands over a socket to the monitor of the program, and has no part in what follows. Each
packet there begins with its kind (ctxfs-tools(5), the operation terminal). What an agent writes is
filtered (screen.py), and what is typed is searched for the key that leaves (keys.py).
"""

from __future__ import annotations

import _signal  # signal itself takes a millisecond to import
import _socket
import errno
import os
import re
import select
import time
from contextlib import suppress

from client.agents import create_numbered
from client.control import for_each
from client.declaring import NAME, Arguments, command, option
from client.events import TASK_OUTCOMES, ending, exit_status, session_of, task_ending
from client.exits import CANNOT_START, DENIED, FAILED, INTERRUPTED, NOT_RUNNING, OK, Failure, Misuse
from client.files import value_of
from client.following import wait_ended
from client.keys import ANSWER, ANSWER_SIZE, HOLD, LEAVE, Typed, leave_key, shown
from client.output import complain, escape, has_unicode, write_all
from client.root import Root, agent, label, own_agent
from client.screen import Screen
from client.sockets import MESSAGE_CODES, handed_over, not_running
from client.types import Any, Callable, Sequence

PACKET = 8 << 10  # bytes of a packet, with its kind
UNSENT_MOST = 1 << 20  # bytes that wait for a program that does not read
UNSHOWN_MOST = 256 << 10  # and for a screen that takes nothing
AT_ONCE = 32  # packets between two looks at the keyboard
LEAVING = 1.0  # seconds for the monitor to take what was typed
DRAIN = 0.2  # seconds for the terminal to answer
#: and if it was asked before, or is far away: what it says later would be input of the shell
DRAIN_LONG = 1.0
SOON = 10.0  # seconds until the end of a program is known to the daemon
ENDS = (_signal.SIGHUP, _signal.SIGINT, _signal.SIGQUIT, _signal.SIGTERM)
HELD = (_signal.SIGHUP, _signal.SIGINT, _signal.SIGTERM)
HUNG_UP = 128 + _signal.SIGHUP
WELL = b"\x1b[5n"  # are you? Every terminal answers
SIZE = "80x24"  # without a terminal
#: variables that go along, as ssh has them, if their values can harm nobody
CARRIED = re.compile(r"(?:TERM|COLORTERM|LANG|LC_[A-Z]+)=[A-Za-z0-9._+@-]{1,64}")
TERM = "TERM="
TERMINALS = ("/etc/terminfo", "/lib/terminfo", "/usr/share/terminfo")
CODES = {**MESSAGE_CODES, **dict.fromkeys(("ENOENT", "EBUSY"), NOT_RUNNING)}
SHELL = "if command -v bash >/dev/null; then exec bash; else exec sh; fi"


def has_entry(term: str) -> bool:
    """Return whether programs of the machine know a terminal of that name, as terminfo(5) has it;
    what a user has at home, or a terminal brings along, is not in sandboxes."""
    kinds = (term[:1], f"{ord(term[:1] or '.'):x}")
    return any(os.path.isfile(f"{top}/{kind}/{term}") for top in TERMINALS for kind in kinds)


def carried(given: Sequence[str] = ()) -> list[str]:
    """Return the lines of `env` for what a program has to know of the caller's terminal; none for
    variables that were given."""
    names = {line.partition("=")[0] for line in given}
    lines = (f"{name}={value}" for name, value in sorted(os.environ.items()) if name not in names)
    fit = [line for line in lines if CARRIED.fullmatch(line)]
    return [line for line in fit if not line.startswith(TERM) or has_entry(line[len(TERM) :])]


def own_size() -> str:
    """Return the size of the caller's terminal, or one that every program can live with."""
    for fd in (1, 0, 2):
        try:
            columns, lines = os.get_terminal_size(fd)
        except OSError:
            continue
        if columns and lines:
            return f"{min(columns, 1000)}x{min(lines, 1000)}"
    return SIZE


def at_terminal() -> bool:
    """Return whether somebody sits there."""
    return os.isatty(0) and os.isatty(1)


def only_operators(root: Root) -> None:
    """Fail in agents."""
    if own_agent(root) or os.environ.get("CTX_AGENT"):
        message = "an agent may not use terminals: only operators attach, from outside of agents"
        raise Failure(message, DENIED)


class Viewer:
    """A socket to the monitor of a program: what is to be sent waits here until it takes that."""

    def __init__(self, fd: int) -> None:
        self.socket = _socket.socket(fileno=fd)
        self.socket.setblocking(False)
        self.fd = fd
        self.waiting: list[bytes] = []
        self.size = 0  # of what waits

    def send(self, kind: bytes, data: bytes = b"") -> None:
        """Send packets, in order with those that wait."""
        room = PACKET - len(kind)
        for at in range(0, len(data) or 1, room):
            self.waiting.append(kind + data[at : at + room])
        self.size += len(data)
        self.flush()

    def flush(self) -> None:
        """Send what the monitor takes."""
        while self.waiting:
            try:
                self.socket.send(self.waiting[0])
            except BlockingIOError:
                return
            except OSError:  # it is gone, which is read
                self.waiting.clear()
                break
            self.size -= len(self.waiting.pop(0)) - 1
        self.size = 0

    def receive(self) -> bytes | None:
        """Return a packet, an empty one at the end, None if there is none yet."""
        try:
            return self.socket.recv(PACKET + 1)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def close(self) -> None:
        """Leave without a word."""
        self.socket.close()


class Session:
    """A person, or a program behind pipes, at the terminal of a program."""

    def __init__(
        self, viewer: int, name: str, *, look: bool, raw: bool, leave: int, ends: bool = False
    ) -> None:
        self.viewer = Viewer(viewer)
        self.ends = ends  # the program, with this: it needs a terminal, which may be gone by now
        self.name = name
        self.look = look
        self.leave = leave
        #: how it ended, in the monitor's words, or "detached"; empty if a signal ended it
        self.end = ""
        self.signal = 0
        self.person = at_terminal()
        self.is_screen = os.isatty(1)
        heard = self.person and not look
        self.screen = Screen(name, raw=raw, heard=heard, unicode=has_unicode())
        self.typed = Typed(leave)
        self.held_since = 0.0
        self.out = own_description(1) if self.is_screen else 1
        self.unshown = bytearray()
        self.leaving: float | None = None  # since then
        self.newline = True  # whether the cursor is at the beginning of a line

    # the loop

    def run(self) -> None:
        """Show and send until it has ended, and leave the terminal as it was."""
        saved = self._take_terminal()
        restore, woken = watch_signals()
        try:
            self._tell_size()  # it may have changed since it was asked for
            self._serve(woken)
            self._show_rest(woken)
        finally:
            self.viewer.close()
            try:
                self._give_back(saved)
            finally:
                restore()
                if self.out != 1:
                    os.close(self.out)

    def _serve(self, woken: int) -> None:
        poller = select.poll()
        poller.register(woken, select.POLLIN)
        while not (self.end or self.signal):
            reads = self.leaving is None and self.viewer.size < UNSENT_MOST
            watched = (
                (0, select.POLLIN * reads),
                (self.viewer.fd, select.POLLIN * (len(self.unshown) < UNSHOWN_MOST)
                 | select.POLLOUT * bool(self.viewer.waiting)),
                (self.out, select.POLLOUT * bool(self.unshown)),
            )  # fmt: skip
            for fd, events in watched:
                if events:
                    poller.register(fd, events)
                else:
                    poller.register(fd)
                    poller.unregister(fd)
            found = dict(poller.poll(self._patience()))
            if woken in found:
                self._heed(os.read(woken, 256))
            if self.viewer.fd in found:
                self.viewer.flush()
                self._receive()
            if self.out in found:
                self._flush()
            if 0 in found and not (self.end or self.signal):
                self._read()
            elif self.typed.holds and time.monotonic() >= self.held_since + HOLD:
                self._send(self.typed.release())
            self._check_leaving()

    def _patience(self) -> float | None:
        """Return in how many milliseconds there is something to do in any case."""
        since = self.leaving if self.person else None
        until = None if since is None else since + LEAVING
        until = self.held_since + HOLD if self.typed.holds else until
        return None if until is None else 1000 * max(0.0, until - time.monotonic())

    def _heed(self, numbers: bytes) -> None:
        for number in numbers:
            if number == _signal.SIGWINCH:
                self._tell_size()
            elif number in ENDS:
                self.signal = number

    def _tell_size(self) -> None:
        if self.person and not self.look:
            self.viewer.send(b"w", own_size().encode())

    # what is typed

    def _read(self) -> None:
        try:
            data = os.read(0, PACKET - 1)
        except OSError:
            data = b""
        if not data and (self.person or self.ends):
            self.signal = _signal.SIGHUP  # the terminal is gone
        elif not self.person:
            self._send(data)
            if not data:
                self._leave()
        else:
            self._send(self.typed.feed(data))
            self.held_since = time.monotonic()
            wanted, self.typed.wants = self.typed.wants, ""
            if wanted == "leave":
                self._leave()
            elif wanted:
                key = shown(self.leave)
                self._tell(f"{key} d leaves, {key} {key} types {key}")

    def _send(self, data: bytes) -> None:
        if data and not self.look:
            self.viewer.send(b"i", data)

    def _leave(self) -> None:
        self.viewer.send(b"d")
        self.leaving = time.monotonic()

    def _check_leaving(self) -> None:
        since = self.leaving if self.person else None  # all that was piped is yet to be taken
        if since is None or self.end or time.monotonic() < since + LEAVING:
            return
        if self.viewer.waiting:  # the monitor would not know that it may go on
            self.leaving = None
            self.viewer.waiting.remove(b"d")
            self._tell("it takes no input, so you cannot leave yet")
        else:
            self.end = "detached"

    # what is shown

    def _receive(self) -> None:
        for _ in range(AT_ONCE):
            packet = self.viewer.receive()
            if packet is None:
                return
            if not packet:
                self.end = self.end or ("detached" if self.leaving is not None else "lost")
                return
            self._take(packet[:1], packet[1:])
            if self.end or len(self.unshown) > UNSHOWN_MOST:
                return

    def _take(self, kind: bytes, data: bytes) -> None:
        if kind in (b"o", b"t"):
            shown = self.screen.feed(data, again=kind == b"t") if self.is_screen else data
            self._show(shown)
        elif kind == b"m" and self.is_screen:
            self._show(self.screen.obey(data))
        elif kind == b"l":
            self.screen.begin()
            self._tell(f"{text_of(data)} bytes were not shown")
        elif kind == b"n":
            self._tell(text_of(data))
        elif kind == b"q":
            self.screen.asks = self.screen.heard and data == b"1"
        elif kind == b"x":
            self.end = text_of(data) or "lost"

    def _show(self, data: bytes) -> None:
        if data:
            self.newline = data.endswith(b"\n")
            self.unshown += data
            self._flush()

    def _flush(self) -> None:
        while self.unshown:
            try:
                del self.unshown[: os.write(self.out, self.unshown[:PACKET])]
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EPIPE:
                    raise BrokenPipeError from None
                self.unshown.clear()  # the terminal is gone, which is read
            if self.out == 1:
                return  # it may block

    def _show_rest(self, woken: int) -> None:
        poller = select.poll()
        poller.register(self.out, select.POLLOUT)
        poller.register(woken, select.POLLIN)
        while self.unshown and not self.signal:
            found = dict(poller.poll())
            if woken in found:
                self._heed(os.read(woken, 256))
            else:
                self._flush()

    def _tell(self, text: str) -> None:
        """Say something between what the program draws."""
        text = f"{escape(self.name)}: {escape(text)}"
        if not self.person:
            complain(text)
        elif self.screen.alternate:  # where a new line would scroll what is drawn
            self._show(f"\x1b7\x1b[999;1H\x1b[0;7m{text}\x1b[0m\x1b[K\x1b8".encode())
        else:
            self._show(f"{'' if self.newline else chr(13) + chr(10)}[{text}]\r\n".encode())

    # the person's terminal

    def _take_terminal(self) -> list[Any] | None:
        if not self.person:
            return None
        import termios
        import tty

        saved = termios.tcgetattr(0)
        tty.setraw(0, termios.TCSADRAIN)  # what was typed before is kept
        return saved

    def _give_back(self, saved: list[Any] | None) -> None:
        if self.is_screen:
            left_line = not (self.screen.alternate or self.newline or self.end.startswith("exit"))
            self._write([*self.screen.undone(), *([b"\r\n"] if left_line else [])])
            if self.person:
                self._drain()
        if saved is not None:
            import termios

            try:
                termios.tcsetattr(0, termios.TCSANOW, saved)
            except termios.error:
                return  # the terminal is gone

    def _write(self, parts: Sequence[bytes]) -> None:
        """Write what a terminal takes within a time: it may be stopped."""
        poller = select.poll()
        poller.register(self.out, select.POLLOUT)
        for part in parts:
            if not poller.poll(1000 * DRAIN):
                return
            try:
                write_all(self.out, part)
            except OSError:
                return

    def _drain(self) -> None:
        """Drop what the terminal still says to the program: else the shell would get it.

        It answers in order. So the last answer is to the question that is asked here, and what
        follows was typed: one byte is read at a time.
        """
        wanted = max(0, self.screen.asked - self.typed.answered) + 1
        self._write([WELL])
        poller = select.poll()
        poller.register(0, select.POLLIN)
        long = self.screen.talked or "SSH_CONNECTION" in os.environ
        until = time.monotonic() + (DRAIN_LONG if long else DRAIN)
        told = b""
        while wanted:
            left = until - time.monotonic()
            if left <= 0 or not poller.poll(1000 * left):
                return
            try:
                byte = os.read(0, 1)
            except OSError:
                return
            if not byte:
                return
            told = told[1 - ANSWER_SIZE :] + byte
            wanted -= bool(ANSWER.fullmatch(told))


def own_description(fd: int) -> int:
    """Return a descriptor of the same terminal on which a write does not wait, and with which no
    other program shares that; the same descriptor if there is none."""
    try:
        return os.open(os.ttyname(fd), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return fd


def hold_signals() -> None:
    """Have signals wait that end this process, until it is at a terminal: half of what is made for
    that would be left. Ctrl-\\ does not."""
    _signal.pthread_sigmask(_signal.SIG_BLOCK, HELD)


def watch_signals() -> tuple[Callable[[], None], int]:
    """Have signals be read from a descriptor; return a function that undoes this, and it."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = {}
    for number in (*ENDS, _signal.SIGWINCH):
        if _signal.getsignal(number) != _signal.SIG_IGN or number == _signal.SIGWINCH:
            before[number] = _signal.signal(number, lambda *_: None)
    before[_signal.SIGTSTP] = _signal.signal(_signal.SIGTSTP, _signal.SIG_IGN)
    woken = _signal.set_wakeup_fd(writer)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, HELD)

    def restore() -> None:
        _signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            _signal.signal(number, handler)
        os.close(reader)
        os.close(writer)

    return restore, reader


def text_of(data: bytes) -> str:
    """Return what a packet says."""
    return data.decode("utf-8", "replace")


# what the commands do


def view(
    root: Root,
    owner: str,
    *,
    look: bool = False,
    raw: bool = False,
    leave: int = LEAVE,
    greets: bool = False,
    **more: object,
) -> int:
    """Be at the terminal of an agent or a task until that ends, and return the exit status.

    More fields of the request say what is to be started, and what ends with this process.
    """
    of_agent, _, task = owner.partition("/task/")
    name, session = label(of_agent), session_of(root, of_agent)
    fields: dict[str, object] = {"op": "terminal", "agent": name, "look": look, **more}
    fields |= {"task": task} if task else {}
    fields |= {"size": own_size()} if at_terminal() and not look else {}
    viewer, ends = handed_over(root, CODES, **fields), bool(more.get("hangup"))
    there = Session(viewer, name, look=look, raw=raw, leave=leave, ends=ends)
    if greets and there.person:
        how = "looking at" if look else "at the terminal of"
        complain(f"{how} {place(owner)}; {shown(leave)} d leaves it running")
    there.run()
    if there.signal:
        _signal.raise_signal(there.signal)  # it does now what it does elsewhere
        return 128 + there.signal
    if there.end == "detached":
        if there.person:
            complain(f"left {place(owner)}, which goes on; come back: ctx attach {place(owner)}")
        return OK
    status = how_it_ended(root, owner, session, there.end)
    if more.get("remove"):
        remove_ended(root, owner)
    return status


def remove_ended(root: Root, owner: str) -> None:
    """Remove what has ended, as the daemon does, too, so that its name is free when this ends."""
    with suppress(Failure, TimeoutError):
        list(wait_ended(root, [owner], SOON))
        root.remove(owner)


def how_it_ended(root: Root, owner: str, session: str, end: str) -> int:
    """Return the exit status for what the monitor said of an end; tell of one that is no exit."""
    kind, _, what = end.partition(" ")
    if kind == "exit" and what.isdigit():
        return int(what)
    with suppress(Failure, TimeoutError):  # it may be removed, or start again
        list(wait_ended(root, [owner], SOON))
    if "/task/" in owner:
        status, reason = task_ending(root, owner)
        outcome = TASK_OUTCOMES.get(status, "")
    else:
        outcome, reason = ending(root, owner, session)
    complain(f"{place(owner)}: {outcome} {reason}" if outcome else f"{place(owner)}: {end}")
    if outcome:
        return exit_status(outcome, reason)
    number = int(what) if kind == "signal" and what.isdigit() else 0
    by_kind: dict[str, int] = {"signal": 128 + number, "hangup": HUNG_UP, "aborted": INTERRUPTED}
    return by_kind.get(kind, CANNOT_START if kind == "failed" else FAILED)


def attach(root: Root, owner: str, *, look: bool, raw: bool, leave: str | None) -> int:
    """Be at the terminal of an agent, or of a task of it."""
    key = LEAVE if leave is None else leave_key(leave)
    only_operators(root)
    if not root.present(owner):
        raise Failure(root.missing(owner), NOT_RUNNING, errno.ENOENT)
    return view(root, owner, look=look, raw=raw, leave=key, greets=True)


def place(owner: str) -> str:
    """Return how a command line names an agent, or a task of it."""
    of_agent, _, task = owner.partition("/task/")
    return f"{label(of_agent)}/{task}" if task else label(of_agent)


def started(root: Root, owner: str, *, remove: bool) -> int:
    """Start what was just made, which ends with this process, and be at its terminal; return the
    exit status."""
    try:
        return view(root, owner, start=True, hangup=True, remove=remove)
    except Failure:
        for_each([owner], root.remove)
        raise


@command(
    "enter",
    option("--cwd", "DIR", "the directory in the sandbox to begin in"),
    NAME,
    rest="program",
)
def do_enter(root: Root, args: Arguments) -> int:
    """Run a shell, or another program, where an agent is.

    It is a task of the agent, with a terminal, and ends with this window; the agent goes on. It has
    the rights of the agent, which can read what you type: type no password. Ctrl-] d leaves it
    running, for ctx attach NAME/enter-1. Default: bash, or sh if there is none. Exit status: the
    program's.
    """
    import shlex

    owner = agent(args.name)
    if not root.present(owner):
        raise Failure(root.missing(owner), NOT_RUNNING, errno.ENOENT)
    only_operators(root)
    status = root.field(args.name, "status")
    if status in ("new", "dead"):
        raise not_running(root, args.name, status, by_message=False)
    if status == "paused":
        message = f"{args.name} is paused; continue it first: ctx resume {args.name}"
        raise Failure(message, NOT_RUNNING, errno.EBUSY)
    if not at_terminal():
        remedy = f"ctx task start -a {args.name} --wait -- COMMAND"
        raise Misuse(f"enter needs a terminal; without one: {remedy}")
    lines = {
        "tty": [own_size()],
        "cwd": [args.cwd] if args.cwd else [],
        "env": carried(),
        "cmd": [f"exec {shlex.join(args.program)}" if args.program else SHELL],
    }
    files = [(file, value_of("\n".join(items))) for file, items in lines.items() if items]
    hold_signals()
    try:
        task = create_numbered(root, f"{owner}/task/enter", files)
    except Failure as failure:
        if failure.number not in (errno.EACCES, errno.EPERM):
            raise
        message = f"you may not enter {args.name}: only its operators may ({failure})"
        raise Failure(message, DENIED, failure.number) from None
    return started(root, task, remove=True)
