#!/usr/bin/env -S python3 -IS
"""The `ctx` command: agents of a mounted ctxfs from a shell, through plain files and sockets.

This one file is the installed command, `/ctx/bin/ctx` and every `/ctx/agent/NAME`, inside sandboxes
too: hence the standard library only, an isolated interpreter, and modules that are slow to load
imported where they are used.
"""

from __future__ import annotations

import errno
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    import socket
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Any, Protocol, TypeVar

    Result = TypeVar("Result")
    Arguments = argparse.Namespace
    Argument = tuple[tuple[str, ...], dict[str, Any]]
    Finding = tuple[str, str, str]

    class Pump(Protocol):
        def pump(self) -> None: ...


DEFAULT_ROOT = "/ctx"
START_HINT = "start it as root with: systemctl start ctxd (or: ctxd)"
DELEGATE = "systemd-run --user --scope -p Delegate=yes ctxd, or see ROOTLESS in ctxd(8)"
BLOCK = 1 << 16
TICK_MS = 100  # how often growing files are looked at while following them
CLOCK_SLACK = 0.25  # seconds; rejections are stamped in whole milliseconds

OK, FAILED, USAGE, DENIED, NOT_RUNNING = 0, 1, 2, 13, 69
TIMED_OUT, CANNOT_START, INTERRUPTED, OUT_OF_MEMORY, PIPE_CLOSED = 124, 126, 130, 137, 141

HINTS = {
    errno.EACCES: "you are not allowed to do this",
    errno.EBUSY: "not possible in its present state",
    errno.EDQUOT: "a limit is reached",
    errno.EEXIST: "exists already",
    errno.EINVAL: "not accepted",
    errno.EIO: "ctxd met a bug of its own; its log says more",
    errno.EMSGSIZE: "too long",
    errno.EOPNOTSUPP: "this machine or set-up cannot do that; see: ctx doctor",
    errno.EPERM: "nobody is allowed to do this",
    errno.ESRCH: "nothing is running",
    errno.ESTALE: "it has been replaced meanwhile",
}


def user_directory(uid: int) -> str:
    """Return where a user's ctxd, run without root, keeps what does not survive a reboot."""
    return os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}"


def default_root() -> str:
    """Return where the file system is if nothing says so: a user's own, else the machine's."""
    own = os.path.join(user_directory(os.getuid()), "ctx")
    return own if os.path.lexists(own) else DEFAULT_ROOT


class Failure(Exception):
    """A sentence for the user, and the exit status that goes with it."""

    def __init__(self, message: str, status: int = FAILED, number: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.number = number


# --- output -------------------------------------------------------------------------------------


def escape(text: str, keep: str = "") -> str:
    """Return `text` with all that a terminal might obey, except what is in `keep`, spelled out."""
    keep += "\u00a0\u202f\u3000"  # blanks that are "not printable", but harmless
    return "".join(
        char if char.isprintable() or char in keep else ascii(char)[1:-1] for char in text
    )


def decode(data: bytes) -> str:
    """Return bytes as text, with what is not UTF-8 spelled out."""
    return data.decode("utf-8", "backslashreplace")


def write_all(fd: int, data: bytes) -> None:
    """Write all bytes to a descriptor, waiting where it would not."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            time.sleep(0.01)


class Output:
    """One of our descriptors: contents are exact for pipes and files, escaped for a terminal."""

    def __init__(self, fd: int) -> None:
        import codecs

        self.fd = fd
        self.decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def copy(self, data: bytes) -> None:
        """Write contents that somebody else made."""
        if os.isatty(self.fd):
            data = escape(self.decoder.decode(data), keep="\n\t").encode()
        write_all(self.fd, data)

    def text(self, text: str) -> None:
        """Write text of our own."""
        write_all(self.fd, text.encode("utf-8", "backslashreplace"))

    def lines(self, lines: Iterable[str]) -> None:
        """Write each item as one line, with control characters escaped."""
        self.text("".join(escape(line) + "\n" for line in lines))


STDOUT = Output(1)
STDERR = Output(2)


def complain(message: str) -> None:
    """Say one line on stderr."""
    STDERR.lines([f"ctx: {message}"])


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, its columns aligned and its empty cells shown as `-`."""
    cells = [list(header)] + [[escape(cell) or "-" for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


# --- files --------------------------------------------------------------------------------------


def read_all(fd: int) -> bytes:
    """Read a descriptor to its end."""
    chunks = []
    while chunk := os.read(fd, BLOCK):
        chunks.append(chunk)
    return b"".join(chunks)


def read_file(path: str) -> bytes:
    """Return the contents of a file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_all(fd)
    finally:
        os.close(fd)


def first_line(path: str) -> str:
    """Return the first line of a file, empty if it cannot be read."""
    try:
        return decode(read_file(path)).partition("\n")[0].strip()
    except OSError:
        return ""


def write_file(path: str, data: bytes) -> None:
    """Replace the contents of a file; a control file rejects them at `write` or at `close`."""
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)


def read_stdin() -> bytes:
    """Return standard input, which is empty when there is none."""
    try:
        return read_all(0)
    except OSError as error:
        if error.errno == errno.EBADF:
            return b""
        raise Failure(f"cannot read standard input: {error.strerror}") from None


def value_of(text: str) -> bytes:
    """Return a value from the command line as the lines of a control file."""
    data = os.fsencode(text)
    return data if data.endswith(b"\n") else data + b"\n"


def timestamp(text: str) -> float:
    """Return an RFC 3339 time in seconds, or 0 for anything else."""
    from datetime import datetime

    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def agent(name: str, file: str = "") -> str:
    """Return the path of an agent, or of a file in it, relative to the root."""
    if not name or "/" in name:
        raise Failure(f'"{name}" cannot be the name of an agent', USAGE)
    if file and any(part in ("", ".", "..") for part in file.split("/")):
        raise Failure(f'"{file}" is not a file of an agent', USAGE)
    return f"agent/{name}.d/{file}".rstrip("/")


class Root:
    """A mounted ctxfs, whose failures come with the reason that the daemon left."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)

    def join(self, relative: str) -> str:
        """Return the absolute path of something below the root."""
        return os.path.join(self.path, relative)

    def call(self, relative: str, operation: Callable[[str], Result]) -> Result:
        """Apply a file operation; an `OSError` becomes a `Failure` with the best known reason."""
        began = time.time()
        try:
            return operation(self.join(relative))
        except OSError as error:
            number = error.errno or errno.EIO
            message = self.rejection(number, relative, began) or self.guess(number, relative)
            raise Failure(message, number=number) from None

    def read(self, relative: str) -> bytes:
        """Return the contents of a file."""
        return self.call(relative, read_file)

    def write(self, relative: str, data: bytes) -> None:
        """Write a control file."""
        self.call(relative, lambda path: write_file(path, data))

    def open(self, relative: str, flags: int = os.O_RDONLY) -> int:
        """Return a descriptor for a file."""
        return self.call(relative, lambda path: os.open(path, flags))

    def remove(self, name: str) -> None:
        """Remove an agent."""
        self.call(agent(name), os.rmdir)

    def agents(self) -> list[str]:
        """Return the names of all agents that the caller may see."""
        return sorted(name[:-2] for name in self.call("agent", os.listdir) if name.endswith(".d"))

    def field(self, name: str, file: str) -> str:
        """Return a one-line control, empty when it is kept from the caller or just went away."""
        try:
            return decode(self.read(agent(name, file))).rstrip("\n")
        except Failure as failure:
            if failure.number in (errno.EACCES, errno.ENOENT, errno.EPERM, errno.ESTALE):
                return ""
            raise

    def rejection(self, number: int, relative: str, began: float) -> str | None:
        """Return the daemon's sentence about an operation that just failed, if it is about that."""
        try:
            line = decode(read_file(self.join("error"))).partition("\n")[0]
        except OSError:
            return None
        when, _, rest = line.partition(" ")
        code, _, rest = rest.partition(" ")
        subject = escape("/".join(relative.split("/")[:2]))
        if getattr(errno, code, None) != number or timestamp(when) < began - CLOCK_SLACK:
            return None
        if not rest.startswith((subject + ":", subject + "/")):
            return None
        return f"{rest} ({code})"

    def guess(self, number: int, relative: str) -> str:
        """Return a sentence about a failure that the daemon gave no reason for."""
        code = "EOPNOTSUPP" if number == errno.EOPNOTSUPP else errno.errorcode.get(number, "?")
        if number == errno.ENOTCONN:
            return f"the ctxd of {self.path} has died ({code}); {START_HINT}"
        if not self.present("agent"):
            return f"no ctxd answers at {self.path}; {START_HINT}"
        parts = relative.split("/")
        if number == errno.ENOENT and len(parts) > 1 and not self.present("/".join(parts[:2])):
            return f'no agent "{parts[1][:-2]}"'
        return f"{relative}: {HINTS.get(number) or os.strerror(number)} ({code})"

    def present(self, relative: str) -> bool:
        """Return whether something is there, visible or not."""
        try:
            os.stat(self.join(relative))
        except OSError as error:
            return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENOTCONN)
        return True


# --- waiting and following ----------------------------------------------------------------------


def catch_interrupts(action: Callable[[int], None]) -> Callable[[], object]:
    """Call `action` with the count of every Ctrl-C; returns what undoes this.

    Python runs the handler between two instructions and goes on with the system call that was
    interrupted, so nothing that is being copied is lost, unlike with KeyboardInterrupt.
    """
    import signal

    count = 0

    def handle(*_: object) -> None:
        nonlocal count
        count += 1
        action(count)

    previous = signal.signal(signal.SIGINT, handle)
    return lambda: signal.signal(signal.SIGINT, previous)


class Tail:
    """A file that is copied to an output as it grows."""

    def __init__(self, root: Root, relative: str, output: Output, lines: int | None = None) -> None:
        self.root = root
        self.relative = relative
        self.name = relative.rpartition("/")[2]
        self.output = output
        self.fd = root.open(relative)
        self.size = os.fstat(self.fd).st_size
        self.offset = 0 if lines is None else self.start_of_last(lines)

    def start_of_last(self, lines: int) -> int:
        """Return the offset at which the last `lines` lines begin."""
        data, position = b"", self.size
        while position > 0 and data.count(b"\n") <= lines:
            step = min(BLOCK, position)
            position -= step
            data = self.read(step, position) + data
        parts = data.removesuffix(b"\n").split(b"\n")
        skipped = sum(len(part) + 1 for part in parts[: max(0, len(parts) - lines)])
        return min(self.size, position + skipped)

    def read(self, size: int, offset: int) -> bytes:
        """Return some bytes of the file."""
        return self.root.call(self.relative, lambda _: os.pread(self.fd, size, offset))

    def chunks(self) -> Iterator[bytes]:
        """Yield what has been added since the last time."""
        while chunk := self.read(BLOCK, self.offset):
            self.offset += len(chunk)
            yield chunk

    def pump(self) -> None:
        """Copy what has been added since the last time."""
        for chunk in self.chunks():
            self.output.copy(chunk)


class Labelled:
    """Several tails on one output, told apart by headings as soon as a second one speaks."""

    def __init__(self, tails: Sequence[Tail]) -> None:
        self.tails = tails
        self.several = sum(tail.size > 0 for tail in tails) > 1
        self.current: Tail | None = None

    def pump(self) -> None:
        """Copy what has been added since the last time."""
        for tail in self.tails:
            for chunk in tail.chunks():
                if tail is not self.current:
                    self.heading(tail)
                tail.output.copy(chunk)

    def heading(self, tail: Tail) -> None:
        """Announce that what follows is of another file."""
        if self.current or self.several:
            tail.output.text(("\n" if self.current else "") + f"==> {tail.name} <==\n")
        self.current = tail


def open_wait(root: Root, name: str) -> int:
    """Return a descriptor that polls as readable or hung up once the agent is dead.

    A reader that opened a FIFO before any writer did sees POLLHUP only after a writer has come and
    gone, see pipe_poll() in the kernel; the regular file in place of the FIFO is readable at once.
    """
    return root.open(agent(name, "wait"), os.O_RDONLY | os.O_NONBLOCK)


def wait_dead(root: Root, names: Iterable[str], timeout: float | None = None) -> Iterator[str]:
    """Yield agents as they die, until all of them have; `TimeoutError` when that takes too long."""
    import select

    waiting = {open_wait(root, name): name for name in names}
    deadline = None if timeout is None else time.monotonic() + timeout
    poller = select.poll()
    for fd in waiting:
        poller.register(fd, select.POLLIN)
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        ready = poller.poll(left)
        if not ready:
            raise TimeoutError(", ".join(waiting.values()))
        for fd, _ in ready:
            poller.unregister(fd)
            os.close(fd)
            yield waiting.pop(fd)


def follow(root: Root, name: str, pumps: Iterable[Pump], events_fd: int | None = None) -> None:
    """Copy what grows until the agent is dead, at once when `events_fd` says that it has grown."""
    import select

    poller = select.poll()
    wait_fd = open_wait(root, name)
    poller.register(wait_fd, select.POLLIN)
    if events_fd is not None:
        poller.register(events_fd, select.POLLPRI)
    ready: list[int] = []
    while wait_fd not in ready:
        ready = [fd for fd, _ in poller.poll(TICK_MS if events_fd is None else 1000)]
        for pump in pumps:
            pump.pump()
        if events_fd in ready:
            time.sleep(0.02)  # let bursts come in one piece


def interrupt_agent(root: Root, name: str, count: int) -> None:
    """Act on the first, second or third Ctrl-C: stop the agent, kill it, leave it alone."""
    if count > 2:
        raise KeyboardInterrupt
    verb, more = ("stop", " (Ctrl-C again kills it)") if count == 1 else ("kill", "")
    complain(f"{name}: {verb}{more}")
    try:
        command_agent(root, name, verb)
    except Failure as failure:
        if failure.number != errno.EBUSY:  # it may have ended, or be stopping already
            complain(str(failure))


def command_agent(root: Root, name: str, verb: str) -> None:
    """Write a verb to the `ctl` file of an agent."""
    root.write(agent(name, "ctl"), value_of(verb))


def session_of(root: Root, name: str) -> str:
    """Return the path of an agent's session, empty if it is kept from the caller."""
    try:
        target = os.readlink(root.join(agent(name, "session")))
    except OSError:
        return ""
    return os.path.normpath(os.path.join(agent(name), target))


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Return a line of a history as an object, None if it is not one."""
    import json

    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def last_events(root: Root, session: str) -> list[dict[str, Any]]:
    """Return the last events of a session, the newest first; none if they cannot be read."""
    try:
        tail = Tail(root, f"{session}/events.jsonl", STDOUT, lines=10)
    except Failure:
        return []
    try:
        lines = b"".join(tail.chunks()).splitlines()
    finally:
        os.close(tail.fd)
    return [event for event in map(parse_event, reversed(lines)) if event]


def ending(root: Root, name: str, session: str = "") -> tuple[str, str]:
    """Return the outcome and the reason of a dead agent, as far as the caller may know them.

    With the path of its session also when it was removed, or reset, as soon as it was dead.
    An agent knows at least the outcome of its own child.
    """
    for event in last_events(root, session) if session else ():
        if event.get("type") == "agent.stop":
            return str(event.get("status")), str(event.get("reason"))
    outcome, reason = root.field(name, "outcome"), root.field(name, "reason")
    if not outcome:
        status = first_line(root.join(f"self/session/context/child/{name}/status"))
        outcome = status if status in ("done", "error", "cancelled") else ""
    return outcome, reason


def awaited_restart(root: Root, name: str) -> str:
    """Return which restart an agent waits for, and the end that is the reason for it."""
    for event in last_events(root, agent(name, "session")):
        reason = str(event.get("reason"))
        if event.get("type") == "agent.status" and reason.startswith("restart:"):
            return f"{reason} after {event.get('after')}"
    return ""


def identity(root: Root, name: str) -> int:
    """Return a number that is another one for each incarnation of a name, 0 if there is none."""
    try:
        return os.stat(root.join(agent(name))).st_ino
    except OSError:
        return 0


def exit_status(outcome: str, reason: str) -> int:
    """Return the exit status that stands for the end of an agent."""
    kind, _, detail = reason.partition(",")[0].partition(":")
    number = int(detail) if detail.isascii() and detail.isdigit() else FAILED
    if outcome == "done":
        return OK
    if outcome == "cancelled":
        return TIMED_OUT if kind == "timeout" else INTERRUPTED
    if outcome != "error":
        return FAILED
    by_kind = {"exit": number, "signal": 128 + number, "oom": OUT_OF_MEMORY}
    return by_kind.get(kind, CANNOT_START if kind == "start_failed" else FAILED)


def for_each(names: Sequence[str], action: Callable[[str], object]) -> list[str]:
    """Apply an action to each name, complaining about failures, and return those it worked for."""
    worked = []
    for name in names:
        try:
            action(name)
            worked.append(name)
        except Failure as failure:
            if failure.status == USAGE:
                raise
            complain(str(failure))
    return worked


# --- messages -----------------------------------------------------------------------------------

DENIALS = ("EACCES", "EPERM")
ABSENCES = ("ESRCH", "ENOTCONN", "ECONNREFUSED")
ENDINGS = {
    **dict.fromkeys(("processed", "done", "completed"), OK),
    **dict.fromkeys(("aborted", "dropped", "cancelled"), INTERRUPTED),
}


def open_socket(root: Root, path: str) -> socket.socket:
    """Return a connection to a socket below the root; ``OSError`` if there is none."""
    import socket

    directory, name = os.path.split(root.join(path))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:  # through the directory's descriptor, because socket addresses are limited to 107 bytes
        directory_fd = os.open(directory, os.O_PATH)
        try:
            connection.connect(f"/proc/self/fd/{directory_fd}/{name}")
        finally:
            os.close(directory_fd)
    except OSError:
        connection.close()
        raise
    return connection


def connect(root: Root, name: str) -> socket.socket:
    """Return a connection to an agent; the failure says whether it is missing, down or closed."""
    began = time.time()
    try:
        return open_socket(root, f"agent/{name}.sock")
    except OSError as error:
        number = error.errno or errno.EIO
        if number in (errno.EACCES, errno.EPERM):
            reason = root.rejection(number, f"agent/{name}.sock", began)
            raise Failure(reason or f"{name}: you may not send to it (EACCES)", DENIED) from None
        if number in (errno.ENOENT, errno.ECONNREFUSED) and root.present(agent(name)):
            status = root.field(name, "status") or "unknown"
            raise Failure(f"{name} is not running: its status is {status}", NOT_RUNNING) from None
        raise Failure(root.guess(number, agent(name)), NOT_RUNNING) from None


class Reply:
    """The reply to one message, shown as it arrives."""

    def __init__(self) -> None:
        self.shown = ""

    def delta(self, text: str) -> None:
        """Show a piece of the reply."""
        STDOUT.copy(text.encode("utf-8", "backslashreplace"))
        self.shown += text

    def message(self, text: str) -> None:
        """Show the whole reply, or what the pieces lacked of it."""
        if text.startswith(self.shown):
            self.delta(text[len(self.shown) :])
        elif self.shown.strip() != text.strip():
            self.finish()
            self.delta(text)

    def finish(self) -> None:
        """End the last line."""
        if self.shown and not self.shown.endswith("\n"):
            self.delta("\n")


def frames(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield the frames that arrive on a connection."""
    import json

    try:
        for line in connection.makefile("rb"):
            frame = json.loads(line)
            if isinstance(frame, dict):
                yield frame
    except (ConnectionResetError, ValueError, RecursionError):
        return  # broken off in the middle of a frame, at best


def refusal(frame: dict[str, Any]) -> int:
    """Complain about an error frame and return the exit status it stands for."""
    code = str(frame.get("code") or "")
    detail = str(frame.get("message") or frame.get("text") or "failed")
    complain(f"{detail} ({code})" if code else detail)
    return DENIED if code in DENIALS else NOT_RUNNING if code in ABSENCES else FAILED


def converse(root: Root, name: str, text: str, priority: str | None = None) -> int:
    """Send a message to an agent, show its reply and return the exit status."""
    import json

    connection = connect(root, name)
    ident = os.urandom(8).hex()
    default = "done"

    def request(**fields: str) -> None:
        try:
            connection.sendall(json.dumps({**fields, "id": ident}).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            return  # what the peer said before it closed is still to be read

    def cancel(count: int) -> None:
        nonlocal default
        default = "aborted"
        if count > 1:
            raise KeyboardInterrupt
        request(op="cancel")

    reply = Reply()
    request(op="send", input=text, **({"priority": priority} if priority else {}))
    restore = catch_interrupts(cancel)
    try:
        for frame in frames(connection):
            kind, content = frame.get("type"), frame.get("text")
            if frame.get("id") not in (None, ident):
                continue
            if kind in ("delta", "message") and isinstance(content, str):
                getattr(reply, kind)(content)
            elif kind == "error":
                return ENDINGS[default] or refusal(frame)
            elif kind == "done":
                return ENDINGS.get(str(frame.get("status") or default), FAILED)
    finally:
        restore()
        connection.close()
        reply.finish()
    complain(f"{name}: the connection ended before the reply did")
    return ENDINGS[default] or FAILED


def message_text(words: Sequence[str]) -> str:
    """Return the text to send: the arguments, else standard input."""
    if not words and os.isatty(0):
        raise Failure("nothing to send: give a text, or pipe one in", USAGE)
    try:
        text = (os.fsencode(" ".join(words)) if words else read_stdin()).decode()
    except UnicodeDecodeError:
        raise Failure("the text to send is not UTF-8", USAGE) from None
    if not text.strip():
        raise Failure("nothing to send: the text is empty", USAGE)
    return text


def handle_of(path: str) -> tuple[Root, str] | None:
    """Return whose message handle a program path is, if it is `ROOT/agent/NAME`."""
    for candidate in (os.path.abspath(path), os.path.realpath(path)):
        directory, name = os.path.split(candidate)
        if os.path.basename(directory) == "agent" and os.path.isdir(candidate + ".d"):
            return Root(os.path.dirname(directory)), name
    return None


def run_handle(root: Root, name: str, words: Sequence[str]) -> int:
    """Act as the message handle of an agent."""
    if list(words) in (["-h"], ["--help"]):
        usage = f"usage: {root.path}/agent/{name} [TEXT...]\n\nSends TEXT, or standard input, "
        STDOUT.text(escape(usage + f"to the agent {name} and shows its reply.\n", keep="\n"))
        return OK
    return converse(root, name, message_text(words[1:] if words[:1] == ["--"] else words))


# --- commands -----------------------------------------------------------------------------------


def age(seconds: float) -> str:
    """Return a duration in its largest whole unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def state_of(root: Root, name: str) -> dict[str, Any]:
    """Return name, status, outcome and reason of an agent: why it is dead, or between two runs."""
    row = {file: root.field(name, file) for file in ("status", "outcome", "reason")}
    if row["status"] == "starting" and not root.field(name, "run"):
        row["reason"] = awaited_restart(root, name)
    return {"name": name, **row}


def describe_agent(root: Root, name: str) -> dict[str, Any]:
    """Return what `ps` shows of an agent."""
    row = state_of(root, name)
    row |= {file: root.field(name, file) for file in ("parent", "run", "pid")}
    try:
        born = os.stat(root.join(agent(name, "incarnation"))).st_mtime
        row["age"] = max(0, int(time.time() - born))
    except OSError:
        row["age"] = None
    return row


def do_ps(root: Root, args: Arguments) -> int:
    """List agents."""
    rows = [describe_agent(root, name) for name in root.agents()]
    rows = [row for row in rows if row["status"] and (args.all or row["status"] != "dead")]
    if args.json:
        import json

        STDOUT.text(json.dumps(rows, indent=2) + "\n")
        return OK
    columns = ("name", "status", "outcome", "reason", "parent", "run", "pid", "age")
    for row in rows:
        row["parent"] = row["parent"].partition(" ")[0]
        row["age"] = "" if row["age"] is None else age(row["age"])
    cells = [[row[column] for column in columns] for row in rows]
    STDOUT.text("\n".join(table([column.upper() for column in columns], cells)) + "\n")
    return OK


def children(root: Root, name: str) -> list[str]:
    """Return the names of an agent's children, as far as the caller may list them."""
    directory = root.join(agent(name, "child"))
    try:
        targets = [os.readlink(os.path.join(directory, entry)) for entry in os.listdir(directory)]
    except OSError:
        return []
    return sorted(os.path.basename(target.rstrip("/")).removesuffix(".d") for target in targets)


def do_tree(root: Root, args: Arguments) -> int:
    """Show agents below their parents."""
    names = root.agents()
    below = {name: children(root, name) for name in names}
    if args.name:
        root.call(agent(args.name), os.stat)
        tops = [args.name]
    else:
        owned = {child for others in below.values() for child in others}
        tops = [name for name in names if name not in owned]
    seen: set[str] = set()

    def show(name: str, first: str, rest: str) -> Iterator[str]:
        facts = list(state_of(root, name).values())[1:]
        life = root.field(name, "life") if first else ""
        if life in ("temp", "detached"):
            facts.append(f"({life})")
        yield first + name + "  " + (" ".join(filter(None, facts)) or "?")
        seen.add(name)
        inner = [child for child in below.get(name, ()) if child not in seen]
        for child in inner:
            fork, line = ("└─ ", "   ") if child == inner[-1] else ("├─ ", "│  ")
            yield from show(child, rest + fork, rest + line)

    for top in tops:
        STDOUT.lines(show(top, "", ""))
    return OK


def assignments(words: Sequence[str]) -> list[tuple[str, bytes]]:
    """Return the files and values of FILE=VALUE arguments."""
    pairs = []
    for word in words:
        file, equals, value = word.partition("=")
        if not equals or not file:
            raise Failure(f'"{word}" is not FILE=VALUE', USAGE)
        pairs.append((file, value_of(value)))
    return pairs


def create(root: Root, name: str, files: Sequence[tuple[str, bytes]]) -> None:
    """Make an agent and write its files; nothing is left of it when one is refused.

    Its task comes first: that of a child is written by nobody but its creator.
    """
    files = sorted(files, key=lambda pair: pair[0] not in ("handoff.md", "input.jsonl"))
    paths = [(agent(name, file), data) for file, data in files]
    root.call(agent(name), os.mkdir)
    try:
        for path, data in paths:
            root.write(path, data)
    except BaseException:
        for_each([name], root.remove)
        raise


def parent_line(parent: str | None) -> list[tuple[str, bytes]]:
    """Return the file that makes an agent the child of another."""
    return [("parent", value_of(f"agent:{parent}"))] if parent else []


def do_new(root: Root, args: Arguments) -> int:
    """Make an agent."""
    create(root, args.name, parent_line(args.parent) + assignments(args.files))
    return OK


def do_set(root: Root, args: Arguments) -> int:
    """Write control files."""
    words = args.values
    if len(words) == 2 and "=" not in words[0]:
        file, text = words
        value = (read_stdin() or b"\n") if text == "-" else value_of(text)
        pairs = [(file, value)]
    else:
        pairs = assignments(words)
    for file, value in pairs:
        root.write(agent(args.name, file), value)
    return OK


def do_get(root: Root, args: Arguments) -> int:
    """Show a file of an agent."""
    STDOUT.copy(root.read(agent(args.name, args.file)))
    return OK


def do_verb(root: Root, args: Arguments) -> int:
    """Write the verb that the command is named after to each agent, and maybe wait."""
    worked = for_each(args.names, lambda name: command_agent(root, name, args.command))
    if getattr(args, "wait", False):
        worked = list(wait_dead(root, worked))
    return OK if len(worked) == len(args.names) else FAILED


def do_wait(root: Root, args: Arguments) -> int:
    """Wait until all agents are dead and say how they ended."""
    outcomes = []
    sessions = {name: session_of(root, name) for name in args.names}
    try:
        for name in wait_dead(root, sessions, args.timeout):
            outcome, reason = ending(root, name, sessions[name])
            outcomes.append(outcome)
            STDOUT.lines([f"{name} {outcome or '-'} {reason or '-'}"])
    except TimeoutError as error:
        complain(f"not ended in time: {error}")
        return TIMED_OUT
    return OK if all(outcome == "done" for outcome in outcomes) else FAILED


def do_result(root: Root, args: Arguments) -> int:
    """Show the result of an agent exactly as it is."""
    result = root.read(agent(args.name, "result.md"))
    STDOUT.copy(result)
    status = root.field(args.name, "status")
    if status != "dead":
        complain(f"{args.name} has not finished: its status is {status or 'unknown'}")
        return FAILED
    if not result:
        complain(f"{args.name} ended without a result: {' '.join(ending(root, args.name))}")
    return OK


def do_log(root: Root, args: Arguments) -> int:
    """Show what an agent wrote."""
    files = [args.only] if args.only else ["log", "out"]
    before = identity(root, args.name)
    tails = [Tail(root, agent(args.name, file), STDOUT, args.lines) for file in files]
    output = Labelled(tails)
    output.pump()
    if args.follow:
        follow(root, args.name, [output])
        if identity(root, args.name) != before:
            complain(f"{args.name} is gone: the last that it wrote may be missing")
    return OK


def describe_event(line: bytes) -> str:
    """Return an event as one readable line."""
    import json

    event = parse_event(line)
    if event is None:
        return decode(line)
    rest = (
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in event.items()
        if key not in ("id", "ts", "type")
    )
    kind = str(event.get("type", "-"))
    return f"{event.get('ts', '-')} {kind:<18} {' '.join(rest)}".rstrip()


class Events(Tail):
    """The events of a session, whole lines at a time."""

    def __init__(self, root: Root, relative: str, raw: bool) -> None:
        super().__init__(root, relative, STDOUT)
        self.raw = raw
        self.partial = b""

    def pump(self) -> None:
        """Show the events since the last time."""
        self.read(1, 0)  # arms POLLPRI again: it tells of changes since a read at offset 0
        lines = (self.partial + b"".join(self.chunks())).split(b"\n")
        self.partial = lines.pop()
        if self.raw:
            self.output.copy(b"".join(line + b"\n" for line in lines))
        else:
            self.output.lines(describe_event(line) for line in lines if line)


def own_name(root: Root) -> str:
    """Return the name of the agent that the caller runs in."""
    try:
        target = os.readlink(root.join("self"))
    except OSError:
        raise Failure("you are in no agent: name one", USAGE) from None
    return os.path.basename(target).removesuffix(".d")


def do_events(root: Root, args: Arguments) -> int:
    """Show what happened to an agent."""
    name = args.name or own_name(root)
    events = Events(root, agent(name, "session/events.jsonl"), args.json)
    events.pump()
    if args.follow:
        follow(root, name, [events], events.fd)
    return OK


def mount_line(text: str) -> str:
    """Return the line of a `mount` file for SRC[:TARGET[:ro|rw|hide]], also SRC:ro|rw|hide."""
    parts = text.split(":")
    modes = ("ro", "rw", "hide")
    mode = parts.pop() if len(parts) > 1 and parts[-1] in modes else "ro"
    if len(parts) > 2 or not all(parts) or any(char in text for char in "\t\n"):
        raise Failure(f'"{text}" is not SRC[:TARGET[:ro|rw|hide]]', USAGE)
    source = os.path.abspath(parts[0])
    return "\t".join((source, parts[1] if len(parts) == 2 else source, mode, "-"))


def exec_line(words: Sequence[str]) -> bytes:
    """Return a program and its arguments as an `exec` line."""
    import shlex

    line = shlex.join(words)
    if "\n" in line:
        raise Failure("an argument holds a newline, which an exec line cannot express", USAGE)
    return value_of(line)


def spawn_files(args: Arguments) -> list[tuple[str, bytes]]:
    """Return the control files that the options of `spawn` stand for."""
    lines = {
        "mount": [mount_line(text) for text in args.mount],
        "env": args.env,
        "cwd": [os.path.abspath(args.cwd)] if args.cwd else [],
        "limits": args.limit + ([f"timeout={args.timeout}"] if args.timeout else []),
        "life": [args.life] if args.life else [],
        "restart": [args.restart] if args.restart else [],
    }
    files = parent_line(args.parent) + assignments(args.set)
    files += [(file, value_of("\n".join(items))) for file, items in lines.items() if items]
    files.append(("exec", exec_line(args.program)))
    handoff = b"" if os.isatty(0) else read_stdin()
    return files + ([("handoff.md", handoff)] if handoff else [])


def do_spawn(root: Root, args: Arguments) -> int:
    """Make an agent for a program, start it and maybe wait for it."""
    if not args.program:
        raise Failure("no program: give one after --", USAGE)
    if args.rm and not args.wait:
        raise Failure("--rm needs --wait", USAGE)
    files = spawn_files(args)
    if args.wait and ("life", b"temp\n") in files:
        raise Failure("what a temp agent wrote goes with it: use --wait --rm instead", USAGE)
    if not args.wait:
        create(root, args.name, [*files, ("ctl", b"start\n")])
        STDOUT.lines([args.name])
        return OK
    create(root, args.name, files)
    restore = catch_interrupts(lambda count: interrupt_agent(root, args.name, count))
    try:
        return run_foreground(root, args)
    finally:
        restore()


def run_foreground(root: Root, args: Arguments) -> int:
    """Start an agent, show what it writes until it is dead and return its exit status."""
    tails = [
        Tail(root, agent(args.name, file), output)
        for file, output in (("out", STDOUT), ("log", STDERR))
    ]
    session = session_of(root, args.name)
    try:
        command_agent(root, args.name, "start")
    except Failure:
        for_each([args.name], root.remove)
        raise
    follow(root, args.name, tails)
    outcome, reason = ending(root, args.name, session)
    if outcome != "done" and not reason.startswith("exit:"):
        complain(f"{args.name}: {outcome or 'gone'} {reason}".rstrip())
    if args.rm and root.present(agent(args.name)):
        for_each([args.name], root.remove)
    return exit_status(outcome, reason)


def do_rm(root: Root, args: Arguments) -> int:
    """Remove agents."""
    worked = for_each(args.names, root.remove)
    return OK if len(worked) == len(args.names) else FAILED


def do_send(root: Root, args: Arguments) -> int:
    """Send a message to an agent and show its reply."""
    return converse(root, args.name, message_text(args.text), args.priority)


def do_help(root: Root, args: Arguments) -> int:
    """Show help."""
    if args.topic is None:
        STDOUT.text(overview())
    else:
        parser_for(find_command(args.topic)).print_help()
    return OK


# --- doctor -------------------------------------------------------------------------------------

NEW_KERNEL = "install Linux 5.14 or newer"
V2_ONLY = "boot with cgroup v2 only: systemd.unified_cgroup_hierarchy=1 cgroup_no_v1=all"
CONTROLLERS = ("memory", "cpu", "pids")
PROGRAMS = (
    ("bwrap", "FAIL", "bubblewrap", "makes the sandboxes"),
    ("setpriv", "FAIL", "util-linux", "drops privileges"),
    ("fusermount3", "FAIL", "fuse3", "mounts for users other than root"),
    ("git", "warn", "git", "only for workspace=worktree"),
)
FUSECTL = "/sys/fs/fuse/connections"
#: what a ctxd of an ordinary user cannot give, one sentence each
WEAKER = (
    "agents have your uid: their sandboxes alone keep them from ctxd's files and from yours",
    "whoever runs with your uid outside of agents is an operator, and could change ctxd itself: "
    "give no agent your home or XDG_RUNTIME_DIR, nor a socket of something that starts programs",
    "histories and output are as safe as your account, not root's",
    "iso=shared is refused; so are other values of owner, uid, gid and groups",
    "agents keep your supplementary groups",
    "an agent can let those go who wait for the end of another one, before that has ended",
    "an agent can make cgroups below its own, and freeze itself; limits above it hold",
    "agents share what the kernel allows your uid: processes, user namespaces, watches",
    "nobody else has agents here; root, and processes with another gid, cannot even look",
)
NAMESPACES = (
    ("user/max_user_namespaces", "0", "FAIL", "user namespaces are turned off", "15000"),
    ("kernel/unprivileged_userns_clone", "0", "FAIL", "only root may make user namespaces", "1"),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "warn",
        "AppArmor restricts user namespaces to programs that have a profile",
        "0",
    ),
)


def judge(good: bool, what: str, level: str, problem: str, remedy: str) -> Finding:
    """Return `what` as a good finding, else the problem and its remedy."""
    return ("ok", what, "") if good else (level, problem, remedy)


def find_program(name: str) -> str:
    """Return the path of a program of the system, empty if there is none."""
    for directory in [*os.get_exec_path(), "/usr/sbin", "/sbin"]:
        path = os.path.join(directory, name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return ""


def check_kernel(release: str) -> Finding:
    """Judge a kernel release."""
    import re

    numbers = tuple(int(number) for number in re.findall("[0-9]+", release)[:2])
    note = "" if numbers >= (6, 13) else " (6.13 and newer identify callers faster)"
    problem = f"kernel {release} is too old: no cgroup.kill"
    return judge(numbers >= (5, 14), f"kernel {release}{note}", "FAIL", problem, NEW_KERNEL)


def check_fuse(path: str = "/dev/fuse") -> Finding:
    """Judge the FUSE device."""
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError as error:
        remedy = "modprobe fuse; in a container: --device /dev/fuse --cap-add SYS_ADMIN"
        if error.errno == errno.EACCES:
            remedy = f"chmod 666 {path}, or run ctxd as root"
        return "FAIL", f"{path}: {error.strerror}", remedy
    return "ok", f"{path} opens", ""


def check_cgroups(mountinfo: str, own: str = "") -> Iterator[Finding]:
    """Judge the cgroup v2 hierarchy in the text of a mountinfo file, and its controllers.

    `own` is the cgroup of an ordinary user's process, below the hierarchy's root.
    """
    lines = (line.partition(" - ") for line in mountinfo.splitlines())
    mounts = [before.split()[4] for before, _, after in lines if after.startswith("cgroup2 ")]
    if not mounts:
        yield "FAIL", "cgroup v2 is not mounted", V2_ONLY
        return
    mount = mounts[0]
    groups = [entry.path for entry in os.scandir(mount) if entry.is_dir()]
    killable = not groups or any(os.path.exists(f"{group}/cgroup.kill") for group in groups)
    what = f"cgroup v2 at {mount}"
    yield judge(killable, what, "FAIL", f"{what} has no cgroup.kill", NEW_KERNEL)
    available = first_line(f"{mount}/cgroup.controllers").split()
    remedy = V2_ONLY
    if own and all(name in available for name in CONTROLLERS):
        available = first_line(f"{mount}{own}/cgroup.controllers").split()
        remedy = "systemctl edit user@.service: [Service] Delegate=cpu memory pids"
    missing = ", ".join(name for name in CONTROLLERS if name not in available)
    problem = f"no {missing} controller in cgroup v2: such limits answer EOPNOTSUPP"
    yield judge(not missing, f"controllers {' '.join(CONTROLLERS)}", "warn", problem, remedy)
    if own:
        yield check_delegated(mount + own)


def check_delegated(path: str) -> Finding:
    """Judge whether a ctxd without root could make cgroups where this process is."""
    if path.endswith("/daemon"):  # where ctxd goes itself
        path = path.rpartition("/")[0]
    files = ("", "cgroup.procs", "cgroup.subtree_control")
    ours = all(os.access(os.path.join(path, file), os.W_OK) for file in files)
    return judge(ours, f"the cgroup {path} is yours", "warn", f"{path} is not yours", DELEGATE)


def check_namespaces(directory: str = "/proc/sys") -> Finding:
    """Judge whether unprivileged user namespaces can be made."""
    for file, bad, level, problem, good in NAMESPACES:
        if first_line(f"{directory}/{file}") == bad:
            return level, problem, f"sysctl {file.replace('/', '.')}={good}"
    return "ok", "unprivileged user namespaces", ""


def check_programs(uid: int) -> Iterator[Finding]:
    """Judge the programs that ctxd runs."""
    for program, level, package, purpose in PROGRAMS:
        path = find_program(program)
        if path or uid != 0 or program != "fusermount3":
            problem, remedy = f"{program} is missing ({purpose})", f"apt-get install {package}"
            yield judge(bool(path), f"{program}: {path}", level, problem, remedy)


def check_identity(uid: int) -> Iterator[Finding]:
    """Judge the interpreter, who runs it, and as whom agents will run."""
    import pwd

    python = "python " + ".".join(map(str, sys.version_info[:3]))
    recent = sys.version_info[:2] >= (3, 11)
    yield judge(recent, python, "FAIL", f"{python} is too old", "install python 3.11 or newer")
    if uid != 0:
        try:
            yield "ok", f"ctxd would run without root, as {pwd.getpwuid(uid).pw_name}", ""
        except KeyError:
            remedy = "add it to passwd(5)"
            yield "FAIL", f"uid {uid} has no name: fusermount3 mounts nothing for it", remedy
        return
    yield "ok", "uid 0", ""
    try:
        yield "ok", f"agents of root run as the user ctxfs, uid {pwd.getpwnam('ctxfs').pw_uid}", ""
    except KeyError:
        yield "ok", "there is no system user ctxfs: agents of root run as uid 61000", ""


def check_daemon(root: Root) -> Finding:
    """Judge whether a daemon answers."""
    try:
        lines = decode(root.read("status")).splitlines()
    except Failure as failure:
        return "warn", str(failure).partition("; ")[0], START_HINT
    status = dict(line.partition("=")[::2] for line in lines)
    facts = [f"{key}={status.get(key)}" for key in ("version", "mount", "controllers")]
    what = f"ctxd at {root.path} is {status.get('state')}: {' '.join(facts)}"
    return judge(status.get("state") == "ready", what, "warn", what, "wait, or see its log")


def check_mounts(mountinfo: str, directory: str) -> Iterator[Finding]:
    """Judge what becomes of the mount when a ctxd without root crashes."""
    mounts = {}
    for line in mountinfo.splitlines():
        fields = line.partition(" - ")[0].split()
        mounts[fields[4]] = any(field.startswith("shared:") for field in fields[6:])
    place = os.path.realpath(directory)
    while place not in mounts and place != "/":
        place = os.path.dirname(place)
    what = f"{directory} is on a shared mount: agents find {DEFAULT_ROOT} again after a crash"
    problem = f"{directory} is on no shared mount ({place}): agents that live through a crash of "
    problem += "ctxd have no file system any more"
    yield judge(mounts.get(place, False), what, "warn", problem, f"mount --make-shared {place}")
    problem = f"nothing is mounted at {FUSECTL}: should ctxd die in the midst of a call, that hangs"
    remedy = f"mount -t fusectl none {FUSECTL}"
    yield judge(FUSECTL in mounts, f"fusectl at {FUSECTL}", "warn", problem, remedy)


def is_rootless(root: Root, uid: int) -> bool:
    """Whether the ctxd at hand is an ordinary user's, or would be."""
    try:
        return uid != 0 and os.stat(root.path).st_uid != 0
    except OSError:
        return uid != 0


LANDLOCK = 444, 1  # landlock_create_ruleset(2), LANDLOCK_CREATE_RULESET_VERSION


def check_landlock() -> Finding:
    """Judge whether the kernel can keep agents from the host's abstract sockets."""
    import ctypes

    number, version = LANDLOCK
    abi = ctypes.CDLL(None).syscall(number, None, ctypes.c_size_t(0), version)
    problem = "Landlock cannot scope abstract sockets: with network:default agents reach the host's"
    remedy = "Linux 6.12 or newer, with landlock in the lsm= boot parameter"
    fact = f"Landlock ABI {abi}: abstract sockets are scoped"
    return judge(abi >= 6, fact, "warn", problem, remedy)


def findings(root: Root) -> Iterator[Finding]:
    """Yield everything that `doctor` finds."""
    uid = os.getuid()
    rootless = is_rootless(root, uid)
    mountinfo = decode(read_file("/proc/self/mountinfo"))
    own = ""
    if rootless:
        lines = decode(read_file("/proc/self/cgroup")).splitlines()
        own = "".join(line[3:] for line in lines if line.startswith("0::"))
    yield check_kernel(os.uname().release)
    yield check_fuse()
    yield from check_cgroups(mountinfo, own)
    yield check_namespaces()
    yield check_landlock()
    yield from check_programs(uid if rootless else 0)
    yield from check_identity(uid)
    if rootless:
        yield from check_mounts(mountinfo, user_directory(uid))
    yield check_daemon(root)
    if rootless:
        for sentence in WEAKER:
            yield "weak", sentence, ""


def do_why(root: Root, args: Arguments) -> int:
    """Explain a decision: which line of whose policy allows it, or what is missing where."""
    import json

    if os.environ.get("CTX_AGENT"):  # operators alone are answered by the daemon's own socket
        connection = connect(root, args.name)
    else:
        try:
            connection = open_socket(root, "ctxd.sock")
        except OSError as error:
            raise Failure(root.guess(error.errno or errno.EIO, "ctxd.sock"), NOT_RUNNING) from None
    with connection:
        request = {"op": "why", "agent": args.name, "verb": args.verb, "object": args.object}
        connection.sendall(json.dumps(request).encode() + b"\n")
        for frame in frames(connection):
            if frame.get("type") == "error":
                return refusal(frame)
            may = "may" if frame.get("allowed") else "may not"
            word = "yes" if frame.get("allowed") else "no"
            STDOUT.text(f"{word}: {args.name} {may} {args.verb} {args.object}\n")
            for line in frame.get("lines", ()):
                STDOUT.text(f"{line}\n")
            return OK if frame.get("allowed") else DENIED
    raise Failure("the daemon did not answer", NOT_RUNNING)


def do_doctor(root: Root, args: Arguments) -> int:
    """Say what this machine lacks."""
    found = list(findings(root))
    if args.json:
        import json

        rows = [{"level": level, "what": what, "remedy": fix} for level, what, fix in found]
        STDOUT.text(json.dumps(rows, indent=2) + "\n")
    else:
        STDOUT.lines(f"{level:<4}  {what}{'; ' * bool(fix)}{fix}" for level, what, fix in found)
    return FAILED if any(level == "FAIL" for level, _, _ in found) else OK


# --- the command line ---------------------------------------------------------------------------


def duration(text: str) -> float:
    """Return the seconds of a duration such as 500ms, 30s, 10m, 2h or 1d."""
    for unit, seconds in (("ms", 0.001), ("s", 1), ("m", 60), ("h", 3600), ("d", 86400)):
        number = text.removesuffix(unit)
        if number != text and number.isascii() and number.isdigit():
            return int(number) * seconds
    raise ValueError(text)


def line_count(text: str) -> int:
    """Return a number of lines."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)


def arg(*flags: str, **options: Any) -> Argument:
    """Return one argument of a command, in the terms of argparse."""
    return flags, options


class Command:
    """One row of the table of commands."""

    def __init__(
        self,
        name: str,
        summary: str,
        arguments: Sequence[Argument],
        handler: Callable[[Root, Arguments], int],
        notes: str = "",
        rest: str = "",
    ) -> None:
        self.name = name
        self.summary = summary
        self.arguments = arguments
        self.handler = handler
        self.notes = notes
        self.rest = rest  # the argument that takes the words after --


NAME = arg("name", metavar="NAME", help="the agent")
NAMES = arg("names", metavar="NAME", nargs="+", help="the agents")
PARENT = arg("--parent", metavar="P", help="make it a child of the agent P")
ALL = arg("-a", "--all", action="store_true", help="dead ones too")
JSON = arg("--json", action="store_true", help="as JSON")
FOLLOW = arg("-f", "--follow", action="store_true", help="go on until the agent is dead")
WAIT = arg("--wait", action="store_true", help="return when they are dead")
SUBTREE = arg("name", metavar="NAME", nargs="?", help="this agent and those below it")
FILES = arg("files", metavar="FILE=VALUE", nargs="*", help="control files to write")
VALUES = arg("values", metavar="FILE=VALUE", nargs="+", help="or FILE VALUE, FILE -")
TIMEOUT = arg("-t", "--timeout", metavar="DURATION", type=duration, help="such as 30s or 10m")
LOG_OPTIONS = (
    FOLLOW,
    arg("--out", dest="only", action="store_const", const="out", help="stdout only"),
    arg("--err", dest="only", action="store_const", const="log", help="stderr and log only"),
    arg("-n", "--lines", metavar="LINES", type=line_count, help="the last LINES of each"),
)
SPAWN_OPTIONS = (
    PARENT,
    arg("--mount", metavar="SRC:TARGET:MODE", action="append", default=[], help="ro, rw or hide"),
    arg("--env", metavar="K=V", action="append", default=[], help="a variable of its environment"),
    arg("--cwd", metavar="DIR", help="its working directory"),
    arg("--set", metavar="FILE=VALUE", action="append", default=[], help="a control file"),
    arg("--timeout", metavar="DURATION", help="end it after this time"),
    arg("--limit", metavar="K=V", action="append", default=[], help="such as memory.max=1G"),
    arg("--restart", metavar="WHEN", help="start it again: on-failure or always; not of a child"),
    arg("--life", metavar="LIFE", help="of a child: owned, temp or detached"),
    arg("--wait", action="store_true", help="show its output and exit as it does"),
    arg("--rm", action="store_true", help="remove the agent afterwards"),
    NAME,
)
SEND_OPTIONS = (
    arg("--priority", choices=("interject", "next", "normal", "background")),
    NAME,
    arg("text", metavar="TEXT", nargs="*", help="default: standard input"),
)
WHY_OPTIONS = (
    NAME,
    arg("verb", metavar="PERM", help="create, read, connect, ..."),
    arg("object", metavar="CLASS:NAME", help="such as agent:coder or network:default"),
)
OWN = arg("name", metavar="NAME", nargs="?", help="default: the agent you are in")
TOPIC = arg("topic", metavar="COMMAND", nargs="?", help="about this command")

NEW_NOTES = "If a value is refused, the agent is removed again."
SET_NOTES = "FILE - writes standard input, as it is."
WAIT_NOTES = "Prints NAME, outcome and reason of each. Exits 0 if all are done, 124 on timeout."
RESULT_NOTES = "Exits 1 if the agent has not finished."
EVENTS_NOTES = "Shows the current session. With --json, events are as they are in the file."
SPAWN_NOTES = (
    "TARGET is SRC and MODE is ro if left out. Standard input, unless a terminal, becomes"
    " handoff.md. With --wait, Ctrl-C stops the agent and a second one kills it; exits with the"
    " program's status, 124 on timeout, 126 if it could not start, 128+N after signal N, 137 when"
    " out of memory, 130 if cancelled."
)
SEND_NOTES = (
    "Ctrl-C cancels the message. Exits 0 done, 1 error, 13 denied, 69 not running, 130 cancelled."
)

WHY_NOTES = "For example: ctx why coder create agent:rev-1. Exits 0 if it may, 13 if it may not."

COMMANDS = (
    Command("ps", "list agents that are not dead", [ALL, JSON], do_ps),
    Command("tree", "show agents below their parents", [SUBTREE], do_tree),
    Command("new", "make an agent", [NAME, PARENT, FILES], do_new, NEW_NOTES),
    Command("set", "write control files", [NAME, VALUES], do_set, SET_NOTES),
    Command("get", "show a file of an agent", [NAME, arg("file", metavar="FILE")], do_get),
    Command("start", "start agents", [NAMES], do_verb),
    Command("stop", "stop agents, killing them after their grace period", [NAMES, WAIT], do_verb),
    Command("kill", "stop agents at once", [NAMES, WAIT], do_verb),
    Command("pause", "freeze agents and all that they own", [NAMES], do_verb),
    Command("resume", "let paused agents go on", [NAMES], do_verb),
    Command("reset", "make dead agents new again", [NAMES], do_verb),
    Command("wait", "wait until agents are dead", [NAMES, TIMEOUT], do_wait, WAIT_NOTES),
    Command("result", "show the result of an agent", [NAME], do_result, RESULT_NOTES),
    Command("log", "show what an agent wrote: log, then out", [*LOG_OPTIONS, NAME], do_log),
    Command("events", "show what happened", [FOLLOW, JSON, OWN], do_events, EVENTS_NOTES),
    Command("spawn", "run a program as an agent", SPAWN_OPTIONS, do_spawn, SPAWN_NOTES, "program"),
    Command("rm", "remove new or dead agents", [NAMES], do_rm),
    Command("send", "send a message, show the reply", SEND_OPTIONS, do_send, SEND_NOTES, "text"),
    Command("why", "say why an agent may do something, or not", WHY_OPTIONS, do_why, WHY_NOTES),
    Command("doctor", "say what this machine lacks, and how to get it", [JSON], do_doctor),
    Command("help", "show help", [TOPIC], do_help),
)

EXAMPLES = """\
examples:
  ctx spawn hello --wait --rm -- echo "hello from a sandbox"
  ctx spawn build --mount "$PWD:/src:rw" --cwd /src --timeout 10m -- make
  ctx spawn watch --restart on-failure -- my-agent
  echo "review the last commit" | ctx spawn rev --parent coder -- my-agent
  ctx wait rev && ctx result rev
  ctx log -f coder
"""


def overview() -> str:
    """Return the help about all commands."""
    rows = "".join(f"  {command.name:<8} {command.summary}\n" for command in COMMANDS)
    return (
        "usage: ctx [--root DIR] COMMAND [ARGUMENT...]\n\n"
        "Works with the agents of a mounted ctxfs.\n\n"
        f"commands (ctx help COMMAND tells more):\n{rows}\n"
        "options:\n  --root DIR  where ctxfs is mounted (default: $CTX_ROOT, else that of your\n"
        "              own ctxd, else /ctx)\n"
        f"  -h, --help  show this\n\n{EXAMPLES}"
    )


def find_command(name: str) -> Command:
    """Return the row of a command."""
    for command in COMMANDS:
        if command.name == name:
            return command
    raise Failure(f'no command "{name}"; see: ctx help', USAGE)


def parser_for(command: Command) -> argparse.ArgumentParser:
    """Return the parser of a command's arguments."""
    import argparse

    class Parser(argparse.ArgumentParser):
        def _print_message(self, message: str, file: object = None) -> None:
            (STDERR if file is sys.stderr else STDOUT).text(message)

    parser = Parser(
        prog=f"ctx {command.name}",
        description=f"{command.summary[0].upper()}{command.summary[1:]}.",
        epilog=command.notes,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, width=90),
    )
    for flags, options in command.arguments:
        parser.add_argument(*flags, **options)
    if command.rest == "program":
        parser.usage = f"{parser.format_usage().partition(': ')[2].rstrip()} -- PROGRAM [ARG...]"
    return parser


def parse(argv: Sequence[str]) -> tuple[Root, Command, Arguments]:
    """Return the root, the command and its arguments that a command line asks for."""
    words = list(argv)
    path = os.environ.get("CTX_ROOT") or default_root()
    while words and words[0].startswith("--root"):
        option, equals, path = words.pop(0).partition("=")
        if option != "--root" or not (equals or words):
            raise Failure("use: --root DIR", USAGE)
        path = path if equals else words.pop(0)
    if not words:
        raise Failure("no command; see: ctx help", USAGE)
    name = "help" if words[0] in ("-h", "--help") else words[0]
    command, words, rest = find_command(name), words[1:], []
    if command.rest and "--" in words:  # argparse would look into what follows
        split = words.index("--")
        words, rest = words[:split], words[split + 1 :]
    args = parser_for(command).parse_intermixed_args(words)
    args.command = name
    if command.rest:
        setattr(args, command.rest, getattr(args, command.rest, []) + rest)
    return Root(path), command, args


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    try:
        if argv is None:
            argv = sys.argv[1:]
            handle = handle_of(sys.argv[0])
            if handle:
                return run_handle(*handle, argv)
        root, command, args = parse(argv)
        return command.handler(root, args)
    except Failure as failure:
        complain(str(failure))
        return failure.status
    except SystemExit as end:  # argparse has said why
        return end.code if isinstance(end.code, int) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return PIPE_CLOSED
    except OSError as error:
        complain(error.strerror or str(error))
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
