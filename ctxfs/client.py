#!/usr/bin/env -S python3 -IS
"""The `ctx` command: agents of a mounted ctxfs from a shell, through plain files and sockets.

This one file is the installed command, `/ctx/bin/ctx`, every `/ctx/agent/NAME` and every
`/ctx/tool/NAME`, inside sandboxes too: hence the standard library only, an isolated interpreter,
and modules that are slow to load imported where they are used.
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
ABREAST = 32  # files that are read at a time, where there are many
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


def as_json(value: object) -> str:
    """Return a value as indented JSON."""
    import json

    return json.dumps(value, indent=2) + "\n"


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


def show_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    STDOUT.text("\n".join(table(header, rows)) + "\n")


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


def read_control(path: str) -> bytes:
    """Return the contents of a control: it is over where less is read than was asked for."""
    fd = os.open(path, os.O_RDONLY)
    try:
        chunks = [os.read(fd, BLOCK)]
        while len(chunks[-1]) == BLOCK:
            chunks.append(os.read(fd, BLOCK))
        return b"".join(chunks)
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


def gist(text: str, width: int = 72) -> str:
    """Return the first line of a text, shortened to `width` characters."""
    line = text.partition("\n")[0]
    short = line[: width - 1].rstrip() if len(line) > width else line
    return short if short == text.rstrip("\n") else f"{short}…"


#: what is in a directory, by the directory's name: at the root and in an agent
KINDS = {"agent": "an agent", "tool": "a tool"}
PARTS = {"task": "a task", "work": "a work item", "waiting": "a wait"}


def below(owner: str, file: str) -> str:
    """Return the path of a file of something, given the path of that."""
    if any(part in ("", ".", "..") for part in file.split("/")):
        raise Failure(f'"{file}" is not a file of "{label(owner)}"', USAGE)
    return f"{owner}/{file}"


def object_path(directory: str, name: str, file: str = "") -> str:
    """Return the path of an agent or a tool, or of a file in it, relative to the root."""
    if not name or "/" in name:
        raise Failure(f'"{name}" cannot be the name of {KINDS[directory]}', USAGE)
    owner = f"{directory}/{name}.d"
    return below(owner, file) if file else owner


def agent(name: str, file: str = "") -> str:
    """Return the path of an agent, or of a file in it, relative to the root."""
    return object_path("agent", name, file)


def tool(name: str, file: str = "") -> str:
    """Return the path of a tool's directory, or of a file in it, relative to the root."""
    return object_path("tool", name, file)


def label(owner: str) -> str:
    """Return the name of the agent, task, work item or wait whose path is given."""
    return owner.rpartition("/")[2].removesuffix(".d")


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

    def remove(self, owner: str) -> None:
        """Remove an agent, or a task, work item or wait of one."""
        self.call(owner, os.rmdir)

    def names(self, directory: str) -> list[str]:
        """Return the names of all agents, or of all tools, that the caller may see."""
        names = self.call(directory, os.listdir)
        return sorted(name[:-2] for name in names if name.endswith(".d"))

    def value(self, relative: str) -> str:
        """Return a control, empty when it is kept from the caller or just went away."""
        try:
            return decode(self.call(relative, read_control)).rstrip("\n")
        except Failure as failure:
            if failure.number in (errno.EACCES, errno.ENOENT, errno.EPERM, errno.ESTALE):
                return ""
            raise

    def field(self, name: str, file: str) -> str:
        """Return a control of an agent, empty like `value`."""
        return self.value(agent(name, file))

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
        missing = self.missing(relative) if number == errno.ENOENT else ""
        return missing or f"{relative}: {HINTS.get(number) or os.strerror(number)} ({code})"

    def missing(self, relative: str) -> str:
        """Return which object on the way to a file is not there, empty if all are."""
        parts = relative.split("/")
        for depth, kinds in ((2, KINDS), (4, PARTS)):
            kind = kinds.get(parts[depth - 2]) if len(parts) >= depth else None
            owner = "/".join(parts[:depth])
            if kind and not self.present(owner):
                return f'no {kind.partition(" ")[2]} "{label(owner)}"'
        return ""

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
        end = self.size
        if lines == 0 or end == 0:
            return end
        if self.read(1, end - 1) == b"\n":
            end -= 1  # it ends the last line, and begins none
        while end > 0:  # backwards, and nothing is kept: a line may be as long as the file
            step = min(BLOCK, end)
            data = self.read(step, end - step)
            at = len(data)
            while (at := data.rfind(b"\n", 0, at)) >= 0:
                lines -= 1
                if lines == 0:
                    return end - step + at + 1
            end -= step
        return 0

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


def open_wait(root: Root, owner: str) -> int:
    """Return a descriptor that polls as readable or hung up once an agent, or a task, has ended.

    A reader that opened a FIFO before any writer did sees POLLHUP only after a writer has come and
    gone, see pipe_poll() in the kernel; the regular file in place of the FIFO is readable at once.
    """
    return root.open(f"{owner}/wait", os.O_RDONLY | os.O_NONBLOCK)


def wait_ended(root: Root, owners: Iterable[str], timeout: float | None = None) -> Iterator[str]:
    """Yield agents or tasks as they end, until all have; `TimeoutError` if that takes too long."""
    import select

    waiting = {open_wait(root, owner): owner for owner in owners}
    deadline = None if timeout is None else time.monotonic() + timeout
    poller = select.poll()
    for fd in waiting:
        poller.register(fd, select.POLLIN)
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        ready = poller.poll(left)
        if not ready:
            raise TimeoutError(", ".join(map(label, waiting.values())))
        for fd, _ in ready:
            poller.unregister(fd)
            os.close(fd)
            yield waiting.pop(fd)


def follow(root: Root, owner: str, pumps: Iterable[Pump], events_fd: int | None = None) -> None:
    """Copy what grows until its owner has ended, at once when `events_fd` says that it has."""
    import select

    poller = select.poll()
    wait_fd = open_wait(root, owner)
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


def interrupt(root: Root, owner: str, count: int) -> None:
    """Act on the first, second or third Ctrl-C: stop the agent or task, kill it, leave it alone."""
    if count > 2:
        raise KeyboardInterrupt
    verb, more = ("stop", " (Ctrl-C again kills it)") if count == 1 else ("kill", "")
    complain(f"{label(owner)}: {verb}{more}")
    end(root, owner, verb)


def end(root: Root, owner: str, verb: str) -> None:
    """Stop or kill an agent or a task, which may have ended, or be ending, already."""
    try:
        control(root, owner, verb)
    except Failure as failure:
        if failure.number != errno.EBUSY:
            complain(str(failure))


def control(root: Root, owner: str, line: str) -> None:
    """Write a verb to the `ctl` file of an agent or a task."""
    if "\n" in line:
        raise Failure(f'"{line}" is more than one line', USAGE)
    root.write(f"{owner}/ctl", value_of(line))


def session_of(root: Root, owner: str) -> str:
    """Return the path of an agent's session, empty if it is kept from the caller."""
    try:
        target = os.readlink(root.join(f"{owner}/session"))
    except OSError:
        return ""
    return os.path.normpath(os.path.join(owner, target))


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


def ending(root: Root, owner: str, session: str = "") -> tuple[str, str]:
    """Return the outcome and the reason of a dead agent, as far as the caller may know them.

    With the path of its session also when it was removed, or reset, as soon as it was dead.
    An agent knows at least the outcome of its own child.
    """
    for event in last_events(root, session) if session else ():
        if event.get("type") == "agent.stop":
            return str(event.get("status")), str(event.get("reason"))
    outcome, reason = root.value(f"{owner}/outcome"), root.value(f"{owner}/reason")
    if not outcome:
        status = first_line(root.join(f"self/session/context/child/{label(owner)}/status"))
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
    """Return the exit status that stands for the end of an agent, or of a run."""
    kind, _, detail = reason.partition(",")[0].partition(":")
    number = int(detail) if detail.isascii() and detail.isdigit() else FAILED
    if outcome == "done":
        return OK
    if outcome == "cancelled":
        return TIMED_OUT if kind == "timeout" else INTERRUPTED
    if outcome != "error":
        return FAILED
    by_kind = {
        "exit": number,
        "signal": 128 + number,
        "oom": OUT_OF_MEMORY,
        "start_failed": CANNOT_START,
        "timeout": TIMED_OUT,
    }
    return by_kind.get(kind, FAILED)


#: what the end of a task would be as that of an agent
TASK_OUTCOMES = {"completed": "done", "failed": "error", "cancelled": "cancelled"}


def task_ending(root: Root, owner: str) -> tuple[str, str]:
    """Return the last status of a task, and how its command exited."""
    return root.value(f"{owner}/status"), root.value(f"{owner}/exit")


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

MESSAGE_CODES = {
    **dict.fromkeys(("EACCES", "EPERM"), DENIED),
    **dict.fromkeys(("ESRCH", "ENOTCONN", "ECONNREFUSED"), NOT_RUNNING),
}
ENDINGS = {"processed": OK, "aborted": INTERRUPTED, "dropped": INTERRUPTED}


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


def connect_started(root: Root, name: str) -> socket.socket:
    """Return a connection to an agent that was just started, as soon as there can be one."""
    import select

    status = agent(name, "status")
    status_fd = root.open(status)
    poller = select.poll()
    poller.register(status_fd, select.POLLPRI)
    try:
        while True:
            state = root.call(status, lambda _: os.pread(status_fd, BLOCK, 0))
            try:
                return connect(root, name)
            except Failure as failure:
                if failure.status != NOT_RUNNING or state != b"starting\n":
                    raise
            poller.poll(TICK_MS)
    finally:
        os.close(status_fd)


def connect_daemon(root: Root) -> socket.socket:
    """Return a connection to the daemon, which answers operators there."""
    began = time.time()
    try:
        return open_socket(root, "ctxd.sock")
    except OSError as error:
        number = error.errno or errno.EIO
        reason = root.rejection(number, "ctxd.sock", began) or root.guess(number, "ctxd.sock")
        status = DENIED if number in (errno.EACCES, errno.EPERM) else NOT_RUNNING
        raise Failure(reason, status) from None


def own_agent(root: Root) -> str:
    """Return the name of the agent that the caller runs in, empty if it is in none."""
    try:
        return label(os.readlink(root.join("self")))
    except OSError:
        return ""


def own_name(root: Root) -> str:
    """Return the name of the agent that the caller runs in, which there must be."""
    name = own_agent(root)
    if not name:
        raise Failure("you are in no agent: name one", USAGE)
    return name


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


def refusal(frame: dict[str, Any], codes: dict[str, int]) -> int:
    """Complain about an error frame and return the exit status it stands for."""
    code, field = str(frame.get("code") or ""), str(frame.get("field") or "")
    detail = str(frame.get("message") or frame.get("text") or "failed")
    detail = detail if field in detail else f"{field}: {detail}"
    complain(f"{detail} ({code})" if code else detail)
    return codes.get(code, FAILED)


def ask(connection: socket.socket, **fields: object) -> None:
    """Send a request."""
    import json

    try:
        connection.sendall(json.dumps(fields).encode() + b"\n")
    except (BrokenPipeError, ConnectionResetError):
        return  # what the peer said before it closed is still to be read


def converse(
    connection: socket.socket, name: str, text: str, priority: str | None = None
) -> tuple[int, str]:
    """Send a message to an agent and show its reply.

    Returns the exit status that its end stands for, and the reason of that end.
    """
    ident = os.urandom(8).hex()
    cancelled = False

    def cancel(count: int) -> None:
        nonlocal cancelled
        cancelled = True
        if count > 1:
            raise KeyboardInterrupt
        ask(connection, op="cancel", id=ident)

    reply = Reply()
    last: dict[str, Any] = {}
    options = {"priority": priority} if priority else {}
    ask(connection, op="send", id=ident, input=text, **options)
    restore = catch_interrupts(cancel)
    try:
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
    """Say what went wrong with a message, unless its sender cancelled it.

    `frame` is the last one about it, empty if there was none. Returns as `converse` does.
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
        return refusal(frame, MESSAGE_CODES), ""
    complain(f"{name}: the connection ended before the reply did")
    return FAILED, ""


def given(words: Sequence[str]) -> bytes:
    """Return what is to be sent: the arguments, else standard input."""
    if not words and os.isatty(0):
        raise Failure("nothing to send: give a text, or pipe one in", USAGE)
    return os.fsencode(" ".join(words)) if words else read_stdin()


def utf8(data: bytes) -> str:
    """Return the text of a message."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Failure("the text to send is not UTF-8", USAGE) from None


def message_text(words: Sequence[str]) -> str:
    """Return the message to send: the arguments, else standard input."""
    text = utf8(given(words))
    if not text.strip():
        raise Failure("nothing to send: the text is empty", USAGE)
    return text


def run_agent_handle(root: Root, name: str, words: Sequence[str]) -> int:
    """Act as the message handle of an agent."""
    if list(words) in (["-h"], ["--help"]):
        usage = f"usage: {root.path}/agent/{name} [TEXT...]\n\nSends TEXT, or standard input, "
        STDOUT.text(escape(usage + f"to the agent {name} and shows its reply.\n", keep="\n"))
        return OK
    text = message_text(words[1:] if words[:1] == ["--"] else words)
    return converse(connect(root, name), name, text)[0]


# --- tools --------------------------------------------------------------------------------------

TOOL_CODES = {
    "EINVAL": USAGE,
    **dict.fromkeys(("EACCES", "EPERM"), DENIED),
    "EOPNOTSUPP": NOT_RUNNING,
}


def tool_input(words: Sequence[str]) -> dict[str, Any]:
    """Return the input of a tool: the argument, else standard input, else an empty object."""
    import json

    data = os.fsencode(words[0]) if words else b"" if os.isatty(0) else read_stdin()
    try:
        value = json.loads(data.decode() if data.strip() else "{}")
    except (ValueError, RecursionError) as error:
        raise Failure(f"the input is not JSON: {error}", USAGE) from None
    if not isinstance(value, dict):
        raise Failure(f"the input is not a JSON object: {gist(json.dumps(value))}", USAGE)
    return value


def call_tool(root: Root, name: str, words: Sequence[str]) -> int:
    """Call a tool and print what it returns as one line; its refusals become exit statuses."""
    import json

    value = tool_input(words)
    own = own_agent(root)
    ident = os.urandom(8).hex()
    with connect(root, own) if own else connect_daemon(root) as connection:
        ask(connection, op="tool", id=ident, name=name, input=value)
        for frame in frames(connection):
            if frame.get("id") not in (None, ident):
                continue
            if frame.get("type") == "tool":
                output = json.dumps(frame.get("output"), ensure_ascii=False) + "\n"
                STDOUT.copy(output.encode("utf-8", "backslashreplace"))
                return OK
            if frame.get("type") == "error":
                status = refusal(frame, TOOL_CODES)
                absent = frame.get("code") == "ENOENT" and not root.present(f"tool/{name}")
                return NOT_RUNNING if absent else status
    raise Failure(f"{name}: the connection ended before the answer came", NOT_RUNNING)


def describe_tool(root: Root, name: str) -> str:
    """Return what a tool does, takes and returns."""
    import contextlib
    import json

    parts = [root.read(tool(name, "description")).decode("utf-8", "backslashreplace").rstrip()]
    for title, file in (("input", "schema"), ("output", "output_schema")):
        schema = root.value(tool(name, file))
        with contextlib.suppress(ValueError, RecursionError):  # else it is shown as it is
            schema = json.dumps(json.loads(schema), indent=2, ensure_ascii=False)
        parts += [f"{title}:\n{schema}"] if schema else []
    return "\n\n".join(parts) + "\n"


def run_tool_handle(root: Root, name: str, words: Sequence[str]) -> int:
    """Act as one of the tools."""
    if list(words) in (["-h"], ["--help"]):
        usage = f"usage: {root.path}/tool/{name} [JSON]\n\nTakes JSON from standard input, too.\n\n"
        STDOUT.copy((usage + describe_tool(root, name)).encode("utf-8", "backslashreplace"))
        return OK
    words = words[1:] if words[:1] == ["--"] else words
    if len(words) > 1:
        raise Failure(f"{name} takes one argument: a JSON object, quoted", USAGE)
    return call_tool(root, name, words)


HANDLES = {"agent": run_agent_handle, "tool": run_tool_handle}


def handle_of(path: str) -> tuple[Root, str, str] | None:
    """Return the root, `agent` or `tool`, and the name of one, if a program path is its handle."""
    for candidate in (os.path.abspath(path), os.path.realpath(path)):
        directory, name = os.path.split(candidate)
        top, kind = os.path.split(directory)
        if kind in HANDLES and os.path.isdir(candidate + ".d"):
            return Root(top), kind, name
    return None


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


def describe_agents(root: Root, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return what `ps` shows of agents.

    Many of their files are read at a time: where others keep the daemon busy, each is
    answered a little late, and hundreds would else be waited for in turn.
    """
    from concurrent.futures import ThreadPoolExecutor  # slow to import, for others

    def born(name: str) -> float | None:
        try:
            return os.stat(root.join(agent(name, "incarnation"))).st_mtime
        except OSError:
            return None

    files = ("status", "outcome", "reason", "parent", "run", "pid")
    with ThreadPoolExecutor(ABREAST) as pool:
        texts = pool.map(lambda each: root.field(*each), [(n, f) for n in names for f in files])
        times = pool.map(born, names)
        rows: list[dict[str, Any]] = []
        for name, since in zip(names, times, strict=True):
            row: dict[str, Any] = {"name": name, **{file: next(texts) for file in files}}
            row["age"] = None if since is None else max(0, int(time.time() - since))
            if row["status"] == "starting" and not row["run"]:
                row["reason"] = awaited_restart(root, name)
            rows.append(row)
        return rows


def do_ps(root: Root, args: Arguments) -> int:
    """List agents."""
    rows = describe_agents(root, root.names("agent"))
    rows = [row for row in rows if row["status"] and (args.all or row["status"] != "dead")]
    if args.json:
        STDOUT.text(as_json(rows))
        return OK
    columns = ("name", "status", "outcome", "reason", "parent", "run", "pid", "age")
    for row in rows:
        row["parent"] = row["parent"].partition(" ")[0]
        row["age"] = "" if row["age"] is None else age(row["age"])
    cells = [[row[column] for column in columns] for row in rows]
    show_table([column.upper() for column in columns], cells)
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
    names = root.names("agent")
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


def value_pairs(words: Sequence[str]) -> list[tuple[str, bytes]]:
    """Return the files and values of FILE VALUE, FILE - or FILE=VALUE arguments."""
    if len(words) != 2 or "=" in words[0]:
        return assignments(words)
    file, text = words
    return [(file, (read_stdin() or b"\n") if text == "-" else value_of(text))]


def create(root: Root, owner: str, files: Sequence[tuple[str, bytes]]) -> None:
    """Make an agent, or a task, work item or wait of one, and write its files.

    Nothing is left of it when one is refused. The task of an agent comes first: that of a child is
    written by nobody but its creator.
    """
    files = sorted(files, key=lambda pair: pair[0] not in ("handoff.md", "input.jsonl"))
    paths = [(below(owner, file), data) for file, data in files]
    root.call(owner, os.mkdir)
    try:
        for path, data in paths:
            root.write(path, data)
    except BaseException:
        for_each([owner], root.remove)
        raise


def create_numbered(root: Root, stem: str, files: Sequence[tuple[str, bytes]]) -> str:
    """Make an object under the first free name of `stem`-1, `stem`-2, ... and return its path."""
    number = 1
    while True:
        owner = f"{stem}-{number}"
        try:
            create(root, owner, files)
            return owner
        except Failure as failure:
            if failure.number != errno.EEXIST or not root.present(owner):
                raise
        number += 1


def parent_line(parent: str | None) -> list[tuple[str, bytes]]:
    """Return the file that makes an agent the child of another."""
    return [("parent", value_of(f"agent:{parent}"))] if parent else []


def do_new(root: Root, args: Arguments) -> int:
    """Make an agent."""
    create(root, agent(args.name), parent_line(args.parent) + assignments(args.files))
    return OK


def do_set(root: Root, args: Arguments) -> int:
    """Write control files of an agent or of a work item."""
    for file, value in value_pairs(args.values):
        root.write(path_of(root, args, args.name, file), value)
    return OK


def do_get(root: Root, args: Arguments) -> int:
    """Show a file of an agent."""
    STDOUT.copy(root.read(agent(args.name, args.file)))
    return OK


def do_verb(root: Root, args: Arguments) -> int:
    """Write the verb that the command is named after to each agent or task, and maybe wait."""
    owners = [path_of(root, args, name) for name in args.names]
    worked = for_each(owners, lambda owner: control(root, owner, args.command))
    if getattr(args, "wait", False):
        worked = list(wait_ended(root, worked))
    return OK if len(worked) == len(owners) else FAILED


def do_order(root: Root, args: Arguments) -> int:
    """Write the verb that the command is named after to an agent, with the word that it takes."""
    control(root, agent(args.name), " ".join(filter(None, (args.command, args.word))))
    return OK


def do_wait(root: Root, args: Arguments) -> int:
    """Wait until all agents or tasks have ended and say how."""
    outcomes = []
    owners = [path_of(root, args, name) for name in args.names]
    sessions = {owner: session_of(root, owner) for owner in owners}
    try:
        for owner in wait_ended(root, sessions, args.timeout):
            if args.group:
                outcome, reason = task_ending(root, owner)
            else:
                outcome, reason = ending(root, owner, sessions[owner])
            outcomes.append(outcome)
            STDOUT.lines([f"{label(owner)} {outcome or '-'} {reason or '-'}"])
    except TimeoutError as error:
        complain(f"not ended in time: {error}")
        return TIMED_OUT
    return OK if all(outcome in ("done", "completed") for outcome in outcomes) else FAILED


def do_result(root: Root, args: Arguments) -> int:
    """Show the result of an agent exactly as it is."""
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


def do_log(root: Root, args: Arguments) -> int:
    """Show what an agent wrote."""
    files = [args.only] if args.only else ["log", "out"]
    before = identity(root, args.name)
    tails = [Tail(root, agent(args.name, file), STDOUT, args.lines) for file in files]
    output = Labelled(tails)
    output.pump()
    if args.follow:
        follow(root, agent(args.name), [output])
        if identity(root, args.name) != before:
            complain(f"{args.name} is gone: the last that it wrote may be missing")
    return OK


def describe_event(line: bytes) -> str:
    """Return a line of a history as one that is readable."""
    event = parse_event(line)
    return decode(line) if event is None else show_event(event)


def show_event(event: dict[str, Any]) -> str:
    """Return an event as one readable line."""
    import json

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


def do_events(root: Root, args: Arguments) -> int:
    """Show what happened to an agent."""
    name = args.name or own_name(root)
    events = Events(root, agent(name, "session/events.jsonl"), args.json)
    events.pump()
    if args.follow:
        follow(root, agent(name), [events], events.fd)
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


def program_files(args: Arguments) -> list[tuple[str, bytes]]:
    """Return the control files that the options of `spawn` and `run` stand for."""
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
    """Make an agent for a program, start it and maybe wait for it."""
    files = program_files(args)
    if args.rm and not args.wait:
        raise Failure("--rm needs --wait", USAGE)
    if args.wait and ("life", b"temp\n") in files:
        raise Failure("what a temp agent wrote goes with it: use --wait --rm instead", USAGE)
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
    """Start an agent or a task and show what it writes, by file, until it has ended.

    Ctrl-C stops it. If it cannot be started it is removed again.
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
    """Send one message to a program, as an agent that is there for that alone or stays."""
    files = program_files(args)
    if not any(file == "mode" for file, _ in files):
        files.append(("mode", b"turn\n"))
    if ("mode", b"once\n") in files:
        raise Failure("a once agent takes no messages: use ctx spawn", USAGE)
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
    """Fail if an agent is known to execute something else than an `exec` line says."""
    program = root.field(name, "exec")
    if program and value_of(program) != line:
        raise Failure(f"{name} is there already, and executes: {program}")


def run_message(root: Root, owner: str, text: str) -> int:
    """Send a message to an agent that was just started and exit as its program did."""
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
    """Stop an agent and remove it when it is dead; Ctrl-C kills it, a second one lets it be."""
    restore = catch_interrupts(lambda count: interrupt(root, owner, count + 1))
    try:
        end(root, owner, "stop")
        for _ in wait_ended(root, [owner]):
            if root.present(owner):  # a temp agent goes by itself
                root.remove(owner)
    except Failure as failure:
        complain(str(failure))
    finally:
        restore()


def do_rm(root: Root, args: Arguments) -> int:
    """Remove agents, or tasks or waits of one."""
    owners = [path_of(root, args, name) for name in args.names]
    worked = for_each(owners, root.remove)
    return OK if len(worked) == len(owners) else FAILED


def do_send(root: Root, args: Arguments) -> int:
    """Send a message to an agent and show its reply."""
    text = message_text(args.text)
    return converse(connect(root, args.name), args.name, text, args.priority)[0]


def typed_lines(prompt: str) -> Iterator[bytes]:
    """Yield the lines that are typed at a terminal, which may be edited; Ctrl-C clears one."""
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
    """Yield the lines of standard input as they come."""
    with open(0, "rb", closefd=False) as lines:
        yield from lines


def do_chat(root: Root, args: Arguments) -> int:
    """Send each line as a message and show the replies, until there are no more lines.

    Each message has a connection of its own: what comes in between is not for us.
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


def do_queue(root: Root, args: Arguments) -> int:
    """Show the messages that wait for an agent, the next one first."""
    data = root.read(agent(args.name or own_name(root), "queue"))
    if args.json:
        STDOUT.copy(data)
        return OK
    columns = ("id", "ts", "from", "provenance", "priority", "text")
    messages = filter(None, map(parse_event, data.splitlines()))
    cells = [[gist(str(message.get(column, ""))) for column in columns] for message in messages]
    show_table([column.upper() for column in columns], cells)
    return OK


def do_help(root: Root, args: Arguments) -> int:
    """Show help."""
    if not args.topic:
        STDOUT.text(overview())
    elif len(args.topic) == 1 and args.topic[0] in GROUPS:
        STDOUT.text(group_help(args.topic[0]))
    else:
        command, rest = find_command(args.topic)
        if rest:
            raise no_command(" ".join(args.topic))
        parser_for(command).print_help()
    return OK


# --- tasks, work items and waits ----------------------------------------------------------------


class Plane:
    """A directory in each agent that holds objects of one kind.

    `over` are the statuses of those from which nothing more will come; `files` is what tells of
    one, `texts` what does so at length, and `columns` what a table shows of it: a heading, and the
    files of which the first that is not empty is shown.
    """

    def __init__(
        self,
        directory: str,
        over: str,
        files: str,
        texts: str,
        columns: Sequence[tuple[str, str]],
    ) -> None:
        self.directory = directory
        self.over = over.split()
        self.files = files.split()
        self.texts = texts.split()
        self.columns = columns


PLANES = {
    "task": Plane(
        "task",
        "completed failed cancelled interrupted",
        "kind status exit pid title cmd cwd accepts_input work worktree started_at ended_at",
        "env preview",
        (("KIND", "kind"), ("STATUS", "status"), ("EXIT", "exit"), ("TITLE", "title cmd")),
    ),
    "work": Plane(
        "work",
        "done cancelled",
        "status objective blocked_by parent created_at updated_at",
        "plan.md acceptance.md",
        (
            ("STATUS", "status"),
            ("BLOCKED BY", "blocked_by"),
            ("PARENT", "parent"),
            ("OBJECTIVE", "objective"),
        ),
    ),
    "waits": Plane(
        "waiting",
        "fired cancelled expired",
        "status on work deadline token",
        "payload",
        (("STATUS", "status"), ("ON", "on"), ("WORK", "work"), ("DEADLINE", "deadline")),
    ),
}


def plane_path(root: Root, args: Arguments) -> str:
    """Return the path of the plane that a command is about, in the agent that it names."""
    return agent(args.agent or own_name(root), PLANES[args.group].directory)


def path_of(root: Root, args: Arguments, name: str, file: str = "") -> str:
    """Return the path of the agent or the object that a command names, or of a file of it."""
    if not args.group:
        return agent(name, file)
    if not name or "/" in name:
        kind = PARTS[PLANES[args.group].directory]
        raise Failure(f'"{name}" cannot be the name of {kind}', USAGE)
    owner = below(plane_path(root, args), name)
    return below(owner, file) if file else owner


def number_last(name: str) -> tuple[str, int]:
    """Return a key that sorts task-10 after task-9."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)


def objects(root: Root, directory: str) -> list[str]:
    """Return the paths of the objects in a plane."""
    names = sorted(root.call(directory, os.listdir), key=number_last)
    owners = (f"{directory}/{name}" for name in names)
    return [owner for owner in owners if os.path.isdir(root.join(owner))]


def describe(root: Root, owner: str, files: Iterable[str]) -> dict[str, str]:
    """Return the name and the files of an object."""
    return {"name": label(owner), **{file: root.value(f"{owner}/{file}") for file in files}}


def do_list(root: Root, args: Arguments) -> int:
    """List the objects of a plane."""
    plane = PLANES[args.group]
    rows = [describe(root, owner, plane.files) for owner in objects(root, plane_path(root, args))]
    rows = [row for row in rows if row["status"] and (args.all or row["status"] not in plane.over)]
    if args.json:
        STDOUT.text(as_json(rows))
        return OK
    header = [args.group.removesuffix("s").upper(), *(heading for heading, _ in plane.columns)]
    cells = [
        [row["name"]]
        + [
            gist(next((row[file] for file in files.split() if row[file]), ""))
            for _, files in plane.columns
        ]
        for row in rows
    ]
    show_table(header, cells)
    return OK


def do_show(root: Root, args: Arguments) -> int:
    """Show all that there is to know of an object of a plane."""
    plane = PLANES[args.group]
    owner = path_of(root, args, args.name)
    root.call(owner, os.stat)
    facts = describe(root, owner, [*plane.files, *plane.texts])
    if args.json:
        STDOUT.text(as_json(facts))
        return OK
    for key, value in facts.items():
        if "\n" in value:
            value = "\n  " + value.replace("\n", "\n  ")
        elif value:
            value = " " + value
        if value:
            STDOUT.text(escape(f"{key}:{value}\n", keep="\n\t"))
    return OK


def do_task_start(root: Root, args: Arguments) -> int:
    """Make a task for a command, start it and maybe wait for it."""
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
    """Show what a task wrote."""
    owner = path_of(root, args, args.name)
    tail = Tail(root, below(owner, "output"), STDOUT, args.lines)
    tail.pump()
    if args.follow:
        follow(root, owner, [tail])
    return OK


def do_task_input(root: Root, args: Arguments) -> int:
    """Write a line, or standard input as it is, to what a task reads."""
    data = value_of(" ".join(args.text)) if args.text else given([])
    if not data:
        raise Failure("nothing to send: the text is empty", USAGE)
    root.write(path_of(root, args, args.name, "input"), data)
    return OK


def do_work_new(root: Root, args: Arguments) -> int:
    """Make a work item and say its id."""
    files = [("objective", value_of(args.objective))]
    if args.name is None:
        owner = create_numbered(root, f"{plane_path(root, args)}/work", files)
    else:
        owner = path_of(root, args, args.name)
        create(root, owner, files)
    STDOUT.lines([label(owner)])
    return focus(root, args, label(owner)) if args.focus else OK


def focus(root: Root, args: Arguments, name: str) -> int:
    """Make a work item the one that its agent is at."""
    path_of(root, args, name)
    root.write(below(plane_path(root, args), "current"), value_of(name))
    return OK


def do_work_focus(root: Root, args: Arguments) -> int:
    """Make a work item the one that its agent is at."""
    return focus(root, args, args.name)


def do_work_end(root: Root, args: Arguments) -> int:
    """Mark work items as done or as cancelled."""
    status = value_of({"done": "done", "cancel": "cancelled"}[args.command])
    paths = [path_of(root, args, name, "status") for name in args.names]
    worked = for_each(paths, lambda path: root.write(path, status))
    return OK if len(worked) == len(paths) else FAILED


def do_waits_add(root: Root, args: Arguments) -> int:
    """Make a wait and arm it; say whom to tell, if it waits for a trigger."""
    owner = path_of(root, args, args.name)
    lines = {"work": args.work, "deadline": args.deadline, "on": " ".join(args.on)}
    create(root, owner, [(file, value_of(line)) for file, line in lines.items() if line])
    token = root.value(f"{owner}/token")
    if token:
        STDOUT.lines([root.join(f"trigger/{token}")])
    return OK


def do_tool_list(root: Root, args: Arguments) -> int:
    """List the tools."""
    files = ("family", "description")
    rows = [describe(root, tool(name), files) for name in root.names("tool")]
    if args.json:
        STDOUT.text(as_json(rows))
        return OK
    cells = [[row["name"], row["family"], gist(row["description"])] for row in rows]
    show_table(["TOOL", "FAMILY", "DESCRIPTION"], cells)
    return OK


def do_tool_show(root: Root, args: Arguments) -> int:
    """Show what a tool does, takes and returns."""
    STDOUT.copy(describe_tool(root, args.name).encode("utf-8", "backslashreplace"))
    return OK


def do_tool_call(root: Root, args: Arguments) -> int:
    """Call a tool."""
    return call_tool(root, args.name, [] if args.input is None else [args.input])


# --- doctor -------------------------------------------------------------------------------------

NEW_KERNEL = "install Linux 5.14 or newer"
V2_ONLY = "boot with cgroup v2 only: systemd.unified_cgroup_hierarchy=1 cgroup_no_v1=all"
CONTROLLERS = ("memory", "cpu", "pids")
PROGRAMS = (
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


def landlock_abi() -> int:
    """Return the version of Landlock that the kernel has, -1 for none."""
    import ctypes

    number, version = LANDLOCK
    return int(ctypes.CDLL(None).syscall(number, None, ctypes.c_size_t(0), version))


def check_landlock(abi: int) -> Finding:
    """Judge whether the kernel keeps agents from the host's abstract sockets, and apart."""
    problem = (
        "Landlock has no scopes: an agent can trace its children's programs and read their "
        "memory, and with network:default it reaches the host's abstract sockets"
    )
    remedy = "Linux 6.12 or newer, with landlock in the lsm= boot parameter"
    fact = f"Landlock ABI {abi}: cells of parent and child, and abstract sockets, are apart"
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
    yield check_landlock(landlock_abi())
    yield from check_programs(uid if rootless else 0)
    yield from check_identity(uid)
    if rootless:
        yield from check_mounts(mountinfo, user_directory(uid))
    yield check_daemon(root)
    yield from check_policies(root)
    if rootless:
        for sentence in WEAKER:
            yield "weak", sentence, ""


def do_why(root: Root, args: Arguments) -> int:
    """Explain a decision: which line of whose policy allows it, or what is missing where."""
    # operators alone are answered by the daemon's own socket
    connection = connect(root, args.name) if own_agent(root) else connect_daemon(root)
    with connection:
        ask(connection, op="why", agent=args.name, verb=args.verb, object=args.object)
        for frame in frames(connection):
            if frame.get("type") == "error":
                return refusal(frame, MESSAGE_CODES)
            may = "may" if frame.get("allowed") else "may not"
            word = "yes" if frame.get("allowed") else "no"
            STDOUT.text(f"{word}: {args.name} {may} {args.verb} {args.object}\n")
            for line in frame.get("lines", ()):
                STDOUT.text(f"{line}\n")
            return OK if frame.get("allowed") else DENIED
    raise Failure("the daemon did not answer", NOT_RUNNING)


def audited_events(root: Root, name: str) -> Iterator[dict[str, Any]]:
    """Yield what somebody caused in an agent's session, as far as the caller may read that."""
    try:
        tail = Tail(root, agent(name, "session/events.jsonl"), STDOUT)
    except Failure:
        return
    partial = b""
    try:
        for chunk in tail.chunks():
            *lines, partial = (partial + chunk).split(b"\n")
            for event in map(parse_event, lines):
                if event and event.get("by", "runtime") != "runtime":
                    yield event
    finally:
        os.close(tail.fd)


def audited_refusals(root: Root, name: str) -> list[dict[str, Any]]:
    """Return what the daemon refused lately."""
    inside = own_agent(root)
    connection = connect(root, inside) if inside else connect_daemon(root)
    with connection:
        ask(connection, op="audit", **({"agent": name} if name and not inside else {}))
        for frame in frames(connection):
            if frame.get("type") == "error":
                detail = str(frame.get("message"))
                raise Failure(detail, MESSAGE_CODES.get(str(frame.get("code")), FAILED))
            return [item for item in frame.get("refusals", ()) if isinstance(item, dict)]
    raise Failure("the daemon did not answer", NOT_RUNNING)


def describe_refusal(item: dict[str, Any]) -> str:
    """Return a refusal as one readable line."""
    more = f" (and {item['more']} more in that second)" if item.get("more") else ""
    where = f"{item.get('path')}: " if item.get("path") else ""
    what = f"{item.get('code')} {where}{item.get('reason')}{more}"
    return f"{item.get('ts', '-')} {'refused':<18} by={item.get('by')} {what}"


def do_audit(root: Root, args: Arguments) -> int:
    """Show who did what, and what was refused to whom."""
    import json

    found = []
    for item in audited_refusals(root, args.name or ""):
        line = json.dumps({"type": "refused", **item}) if args.json else describe_refusal(item)
        found.append((str(item.get("ts")), line))
    for name in [args.name] if args.name else root.names("agent"):
        for event in audited_events(root, name):
            line = json.dumps(event) if args.json else show_event(event)
            found.append((str(event.get("ts")), line))
    STDOUT.lines(line for _, line in sorted(found, key=lambda entry: entry[0]))
    return OK


#: what root agents were given before version 0.2 if nothing was configured
OLD_DEFAULTS = ("agent:* create,start,stop,read,write", "tool:* execute", "model:* use")


def check_policies(root: Root) -> Iterator[Finding]:
    """Judge root agents that have rights to all others because nobody took them away."""
    try:
        names = root.names("agent")
    except Failure:
        return
    for name in names:
        try:
            lines = decode(root.read(agent(name, "policy"))).splitlines()
            subject = root.value(agent(name, "label"))
            made_by = root.value(agent(name, "parent"))
            over = root.value(agent(name, "status")) == "dead"
        except Failure:
            continue  # not the caller's, or gone
        if over or not made_by.startswith("operator"):
            continue
        if lines == [f"allow {subject} {line}" for line in OLD_DEFAULTS]:
            what = f"{name} has the default policy of version 0.1: it reads, writes to and stops "
            what += "every agent of its owner"
            wanted = [f"allow {subject} {line}" for line in ("agent:* create", *OLD_DEFAULTS[1:])]
            words = " ".join(f"'{line}'" for line in wanted)
            yield "warn", what, f"printf '%s\\n' {words} > {root.join(agent(name, 'policy'))}"


def do_quota(root: Root, args: Arguments) -> int:
    """Show the accounts of the caller's owner; root's shows those of all."""
    name = own_agent(root)
    connection = connect(root, name) if name else connect_daemon(root)
    with connection:
        ask(connection, op="quota")
        for frame in frames(connection):
            if frame.get("type") == "error":
                return refusal(frame, MESSAGE_CODES)
            rows = frame.get("accounts", [])
            if args.json:
                STDOUT.text(as_json(rows))
                return OK
            keys = ("owner", "account", "use", "limit", "reserve", "most", "held")
            cells = [[str(row.get(key, "")) for key in keys] for row in rows]
            show_table([key.upper() for key in keys], cells)
            return OK
    raise Failure("the daemon did not answer", NOT_RUNNING)


def do_doctor(root: Root, args: Arguments) -> int:
    """Say what this machine lacks."""
    found = list(findings(root))
    if args.json:
        rows = [{"level": level, "what": what, "remedy": fix} for level, what, fix in found]
        STDOUT.text(as_json(rows))
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
    """One row of the table of commands; a name of two words belongs to a group."""

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


class Group:
    """Commands whose names share their first word; alone, that word lists.

    `other` is the command that is meant when the second word is none of theirs.
    """

    def __init__(self, summary: str, notes: str = "", other: str = "") -> None:
        self.summary = summary
        self.notes = notes
        self.other = other


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
PROGRAM_OPTIONS = (
    PARENT,
    arg("--mount", metavar="SRC:TARGET:MODE", action="append", default=[], help="ro, rw or hide"),
    arg("--env", metavar="K=V", action="append", default=[], help="a variable of its environment"),
    arg("--cwd", metavar="DIR", help="its working directory"),
    arg("--set", metavar="FILE=VALUE", action="append", default=[], help="a control file"),
    arg("--timeout", metavar="DURATION", help="end it after this time"),
    arg("--limit", metavar="K=V", action="append", default=[], help="such as memory.max=1G"),
    arg("--restart", metavar="WHEN", help="start it again: on-failure or always; not of a child"),
    arg("--life", metavar="LIFE", help="of a child: owned, temp or detached"),
    arg("--mode", metavar="MODE", help="once, turn or resident"),
    arg("--context", metavar="CONTEXT", help="fresh or fork"),
    arg("--workspace", metavar="WORKSPACE", help="inherit, worktree or explicit_root:/DIR"),
    arg("--model", metavar="MODEL", help="the model that it uses"),
)
SPAWN_OPTIONS = (
    *PROGRAM_OPTIONS,
    arg("--wait", action="store_true", help="show its output and exit as it does"),
    arg("--rm", action="store_true", help="remove the agent afterwards"),
    NAME,
)
RUN_OPTIONS = (
    *PROGRAM_OPTIONS,
    arg("--message", metavar="TEXT", help="the message; default: standard input"),
    arg("--keep", action="store_true", help="let the agent stay, for send and chat"),
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
AUDIT = [JSON, arg("name", metavar="NAME", nargs="?", help="default: all that you may read")]
TOPIC = arg("topic", metavar="COMMAND", nargs="*", help="about this command")
RUN = arg("--run", dest="word", metavar="RUN", help="only if this is the current one")
SESSION = arg("word", metavar="SESSION", help="one of its name, or a new one")

OF = arg("-a", "--agent", metavar="NAME", help="default: the agent you are in")
ENDED = arg("--all", action="store_true", help="those that are over, too")
TASK = arg("name", metavar="TASK", help="the task")
TASKS = arg("names", metavar="TASK", nargs="+", help="the tasks")
WORK = arg("name", metavar="ID", help="the work item")
WORKS = arg("names", metavar="ID", nargs="+", help="the work items")
FOR_WORK = arg("--work", metavar="ID", help="the work item that it is for")
WAITING = arg("name", metavar="WAIT", help="the wait")
WAITINGS = arg("names", metavar="WAIT", nargs="+", help="the waits")
TOOL = arg("name", metavar="TOOL", help="the tool")
TASK_OPTIONS = (
    OF,
    arg("--name", metavar="TASK", help="default: the first free one of task-1, task-2, ..."),
    arg("--cwd", metavar="DIR", help="its working directory"),
    arg("--env", metavar="K=V", action="append", default=[], help="a variable of its environment"),
    arg("--input", action="store_true", help="let it take input, see: ctx task input"),
    arg("--title", metavar="TEXT", help="what it is for, in a line"),
    FOR_WORK,
    arg("--wait", action="store_true", help="show its output and exit as it does"),
)
OUTPUT_OPTIONS = (
    OF,
    arg("-f", "--follow", action="store_true", help="go on until it has ended"),
    arg("-n", "--lines", metavar="LINES", type=line_count, help="the last LINES"),
    TASK,
)
INPUT_OPTIONS = (OF, TASK, arg("text", metavar="TEXT", nargs="*", help="default: standard input"))
WORK_OPTIONS = (
    OF,
    arg("--focus", action="store_true", help="make it the one that the agent is at"),
    arg("name", metavar="ID", nargs="?", help="default: the first free one of work-1, work-2, ..."),
    arg("objective", metavar="OBJECTIVE", help="what is to be achieved"),
)
WAIT_OPTIONS = (
    OF,
    arg("--work", metavar="ID", help="the work item that it blocks"),
    arg("--deadline", metavar="WHEN", help="a time, or a duration from now"),
    WAITING,
    arg("on", metavar="ON", nargs="+", help="timer WHEN, task T, child NAME, message or trigger"),
)
INPUT = arg("input", metavar="JSON", nargs="?", help="an object; default: standard input")

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
RUN_NOTES = (
    "The agent is made as by spawn, in mode turn, unless there is one of that name already, which"
    " then stays. Ctrl-C cancels the message. Exits as spawn --wait does, by the end of the"
    " message's run; 13 denied, 69 not running."
)
SEND_NOTES = (
    "Ctrl-C cancels the message. Exits 0 done, 1 error, 13 denied, 69 not running, 130 cancelled."
)
CHAT_NOTES = (
    "Each line is a message. Ctrl-C cancels the message that is being answered, or clears the line;"
    " Ctrl-D ends. Without a terminal, exits as send does for the first message that failed."
)
ABORT_NOTES = "The agent is paused then; resume goes on with its next message."
TASK_START_NOTES = (
    "COMMAND is run by a shell: a single word as it is, several ones quoted. Prints the name of the"
    " task. With --wait, Ctrl-C stops it and a second one kills it; exits with the command's"
    " status, 128+N after signal N, 130 if cancelled."
)
TASK_WAIT_NOTES = "Prints TASK, status and exit of each. Exits 0 if all completed, 124 on timeout."
WAITS_ADD_NOTES = "For a trigger, prints the file that fires it when it is written to."
TOOL_GROUP_NOTES = "ctx tool NAME JSON calls a tool, too."
TOOL_CALL_NOTES = (
    "Prints the output as one line. Exits 1 on errors, 2 on bad input, 13 if denied, 69 if there is"
    " no such tool."
)

AUDIT_NOTES = (
    "Events that somebody caused, from the sessions that you may read, and what the daemon refused"
    " lately, by time. An agent is told what was refused to itself."
)
QUOTA_NOTES = (
    "Shows the accounts of the user, in an agent those of its owner, and root's those of all. Sizes"
    " are bytes, time is milliseconds."
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
    Command("abort", "kill an agent's current run alone", [RUN, NAME], do_order, ABORT_NOTES),
    Command("reset", "make dead agents new again", [NAMES], do_verb),
    Command("session", "switch an agent to a session", [NAME, SESSION], do_order),
    Command("wait", "wait until agents are dead", [NAMES, TIMEOUT], do_wait, WAIT_NOTES),
    Command("result", "show the result of an agent", [NAME], do_result, RESULT_NOTES),
    Command("log", "show what an agent wrote: log, then out", [*LOG_OPTIONS, NAME], do_log),
    Command("events", "show what happened", [FOLLOW, JSON, OWN], do_events, EVENTS_NOTES),
    Command("spawn", "run a program as an agent", SPAWN_OPTIONS, do_spawn, SPAWN_NOTES, "program"),
    Command("run", "have a message answered", RUN_OPTIONS, do_run, RUN_NOTES, "program"),
    Command("rm", "remove new or dead agents", [NAMES], do_rm),
    Command("send", "send a message, show the reply", SEND_OPTIONS, do_send, SEND_NOTES, "text"),
    Command("chat", "send messages as they are typed", [NAME], do_chat, CHAT_NOTES),
    Command("queue", "list the messages that wait", [JSON, OWN], do_queue),
    Command("task list", "list tasks that have not ended", [OF, ENDED, JSON], do_list),
    Command("task show", "show all about a task", [OF, JSON, TASK], do_show),
    Command(
        "task start", "run a command", TASK_OPTIONS, do_task_start, TASK_START_NOTES, rest="shell"
    ),
    Command("task output", "show what a task wrote", OUTPUT_OPTIONS, do_task_output),
    Command("task input", "write to a task", INPUT_OPTIONS, do_task_input, rest="text"),
    Command("task stop", "stop tasks", [OF, TASKS, WAIT], do_verb),
    Command("task kill", "stop tasks at once", [OF, TASKS, WAIT], do_verb),
    Command(
        "task wait", "wait until tasks have ended", [OF, TASKS, TIMEOUT], do_wait, TASK_WAIT_NOTES
    ),
    Command("task rm", "remove tasks that have ended", [OF, TASKS], do_rm),
    Command("work list", "list work items that are not over", [OF, ENDED, JSON], do_list),
    Command("work show", "show all about a work item", [OF, JSON, WORK], do_show),
    Command("work new", "make a work item and print its id", WORK_OPTIONS, do_work_new),
    Command("work set", "write files of a work item", [OF, WORK, VALUES], do_set, SET_NOTES),
    Command("work focus", "make a work item the current one", [OF, WORK], do_work_focus),
    Command("work done", "mark work items as done", [OF, WORKS], do_work_end),
    Command("work cancel", "mark work items as cancelled", [OF, WORKS], do_work_end),
    Command("waits list", "list waits that are not over", [OF, ENDED, JSON], do_list),
    Command("waits show", "show all about a wait", [OF, JSON, WAITING], do_show),
    Command("waits add", "wait for something", WAIT_OPTIONS, do_waits_add, WAITS_ADD_NOTES),
    Command("waits cancel", "cancel waits and remove them", [OF, WAITINGS], do_rm),
    Command("tool list", "list the tools that you may call", [JSON], do_tool_list),
    Command("tool show", "show what a tool does, takes and returns", [TOOL], do_tool_show),
    Command("tool call", "call a tool", [TOOL, INPUT], do_tool_call, TOOL_CALL_NOTES),
    Command("why", "say why an agent may do something, or not", WHY_OPTIONS, do_why, WHY_NOTES),
    Command("audit", "show who did what, and what was refused", AUDIT, do_audit, AUDIT_NOTES),
    Command("quota", "show what an owner holds, and may hold", [JSON], do_quota, QUOTA_NOTES),
    Command("doctor", "say what this machine lacks, and how to get it", [JSON], do_doctor),
    Command("help", "show help", [TOPIC], do_help),
)
GROUPS = {
    "task": Group("commands that run inside an agent"),
    "work": Group("what an agent is to get done"),
    "waits": Group("what an agent waits for"),
    "tool": Group("the same for models, JSON in and out", TOOL_GROUP_NOTES, "call"),
}

EXAMPLES = """\
examples:
  ctx spawn hello --wait --rm -- echo "hello from a sandbox"
  ctx spawn build --mount "$PWD:/src:rw" --cwd /src --timeout 10m -- make
  ctx spawn watch --restart on-failure -- my-agent
  echo "review the last commit" | ctx spawn rev --parent coder -- my-agent
  ctx wait rev && ctx result rev
  ctx log -f coder
  ctx run coder --keep --message "fix the test" -- my-agent && ctx chat coder
  ctx task start -a coder --wait -- 'make test 2>&1 | tail'
  ctx work new -a coder --focus "make the tests pass"
  ctx waits add -a coder later timer 30m
  ctx tool call AgentGet '{"agent_id": "coder"}'
"""


def overview() -> str:
    """Return the help about all commands."""
    single = {command.name: command.summary for command in COMMANDS if " " not in command.name}
    groups = {name: f"{group.summary}: {' '.join(members(name))}" for name, group in GROUPS.items()}
    rows = {**single, **groups}
    listed = "".join(f"  {name:<8} {summary}\n" for name, summary in rows.items())
    return (
        "usage: ctx [--root DIR] COMMAND [ARGUMENT...]\n\n"
        "Works with the agents of a mounted ctxfs.\n\n"
        f"commands (ctx help COMMAND tells more):\n{listed}\n"
        "options:\n  --root DIR  where ctxfs is mounted (default: $CTX_ROOT, else that of your\n"
        "              own ctxd, else /ctx)\n"
        f"  -h, --help  show this\n\n{EXAMPLES}"
    )


def members(group: str) -> dict[str, Command]:
    """Return the commands of a group by the second words of their names."""
    split = ((command.name.partition(" "), command) for command in COMMANDS)
    return {second: command for (first, _, second), command in split if second and first == group}


def group_help(name: str) -> str:
    """Return the help about the commands of a group."""
    group = GROUPS[name]
    rows = "".join(f"  {word:<7} {command.summary}\n" for word, command in members(name).items())
    notes = f"\n{group.notes}\n" if group.notes else ""
    return (
        f"usage: ctx {name} [COMMAND] [ARGUMENT...]\n\n"
        f"{group.summary[0].upper()}{group.summary[1:]}; without a COMMAND, lists them.\n\n"
        f"commands (ctx help {name} COMMAND tells more):\n{rows}{notes}"
    )


def no_command(name: str) -> Failure:
    """Return what is to be said when there is no such command."""
    group = name.partition(" ")[0]
    return Failure(f'no command "{name}"; see: ctx help{f" {group}" * (group in GROUPS)}', USAGE)


def find_command(words: list[str]) -> tuple[Command, list[str]]:
    """Return the row of the command that some words begin with, and the words after its name."""
    rows = {command.name: command for command in COMMANDS}
    for count in (2, 1):
        command = rows.get(" ".join(words[:count]))
        if command:
            return command, words[count:]
    first, second = words[0], " ".join(words[1:2])
    if first not in GROUPS:
        raise no_command(first)
    if not second or second.startswith("-"):
        return rows[f"{first} list"], words[1:]
    if not GROUPS[first].other:
        raise no_command(f"{first} {second}")
    return rows[f"{first} {GROUPS[first].other}"], words[1:]


#: how the words after -- are called
REST = {"program": "-- PROGRAM [ARG...]", "shell": "-- COMMAND..."}


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
    if command.rest in REST:
        parser.usage = f"{parser.format_usage().partition(': ')[2].rstrip()} {REST[command.rest]}"
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
    if words[0] in ("-h", "--help"):
        words = ["help"]
    elif words[0] in GROUPS and words[1:] in (["-h"], ["--help"]):
        words = ["help", words[0]]
    command, words = find_command(words)
    rest: list[str] = []
    if command.rest and "--" in words:  # argparse would look into what follows
        split = words.index("--")
        words, rest = words[:split], words[split + 1 :]
    args = parser_for(command).parse_intermixed_args(words)
    first, _, second = command.name.partition(" ")
    args.group, args.command = (first, second) if second else ("", first)
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
                root, kind, name = handle
                return HANDLES[kind](root, name, argv)
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
