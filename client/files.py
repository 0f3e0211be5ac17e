"""Reading and writing files as bytes; standard input and values from the command line."""

from __future__ import annotations

import errno
import os
import time

from client.exits import Failure, Misuse
from client.jsontext import dumps, loads
from client.output import decode, gist, write_all
from client.types import Any, Iterator, Sequence
from client.words import JSON_MISTAKES

BLOCK = 1 << 16
LARGE = 1 << 20  # as much as the kernel asks ctxd for at a time


def read_all(fd: int) -> bytes:
    """Read a descriptor to its end."""
    chunks = []
    while chunk := os.read(fd, LARGE):
        chunks.append(chunk)
    return b"".join(chunks)


class Opened:
    """A file that is open for the block of a `with` statement, which gets its descriptor."""

    def __init__(self, path: str, flags: int = os.O_RDONLY, mode: int = 0o600) -> None:
        self.fd = os.open(path, flags, mode)

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def read_file(path: str) -> bytes:
    """Return the contents of a file."""
    with Opened(path) as fd:
        return read_all(fd)


def read_limited(path: str, most: int) -> bytes:
    """Return the contents of a regular file of at most so many bytes; `OSError` for any other."""
    import stat

    # opening a FIFO would wait for its writer
    with Opened(path, os.O_RDONLY | os.O_NONBLOCK) as fd:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        data = b""
        while len(data) <= most and (chunk := os.read(fd, most + 1 - len(data))):
            data += chunk
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most} bytes")
    return data


def read_ahead(path: str) -> Iterator[bytes]:
    """Yield the contents of a file; a thread reads on in a long one.

    So ctxd makes what follows while what it made before is looked at.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        while 0 < len(piece := os.read(fd, LARGE)) < BLOCK:
            yield piece
    except BaseException:
        os.close(fd)
        raise
    if not piece:
        os.close(fd)
        return
    import threading
    from queue import SimpleQueue

    pieces: SimpleQueue[bytes | OSError] = SimpleQueue()

    def read() -> None:
        try:
            while piece := os.read(fd, LARGE):
                pieces.put(piece)
            pieces.put(b"")
        except OSError as error:
            pieces.put(error)
        finally:
            os.close(fd)

    threading.Thread(target=read, daemon=True).start()
    while piece:
        yield piece
        following = pieces.get()
        if isinstance(following, OSError):
            raise following
        piece = following


def read_control(path: str) -> bytes:
    """Return the contents of a control file; a short read is its end."""
    with Opened(path) as fd:
        data = os.read(fd, BLOCK)
        return data if len(data) < BLOCK else data + read_all(fd)


def first_line(path: str) -> str:
    """Return the first line of a file, empty if it cannot be read."""
    try:
        return decode(read_file(path)).partition("\n")[0].strip()
    except OSError:
        return ""


def write_file(path: str, data: bytes) -> None:
    """Replace the contents of a file; a control file rejects them at `write` or at `close`."""
    with Opened(path, os.O_WRONLY | os.O_TRUNC) as fd:
        write_all(fd, data)


def read_stdin() -> bytes:
    """Return standard input, empty if it is closed."""
    try:
        return read_all(0)
    except OSError as error:
        if error.errno == errno.EBADF:
            return b""
        raise Failure(f"cannot read standard input: {error.strerror}") from None


def is_unread() -> bool:
    """Return whether standard input is a pipe that has an end, and something before it."""
    import fcntl
    import select
    import stat
    import termios

    try:
        if not stat.S_ISFIFO(os.fstat(0).st_mode):
            return False
        poller = select.poll()
        poller.register(0, 0)
        ended = bool(poller.poll(0))
        return ended and fcntl.ioctl(0, termios.FIONREAD, bytes(4)) != bytes(4)
    except OSError:
        return False


def given(words: Sequence[str]) -> bytes:
    """Return the data to send: the arguments; standard input if there are none, or for `-`."""
    if not words and os.isatty(0):
        raise Misuse("nothing to send: give a text, or pipe one to standard input")
    return os.fsencode(" ".join(words)) if words and list(words) != ["-"] else read_stdin()


def json_object(data: bytes, what: str) -> dict[str, Any]:
    """Return what a text of JSON says; a failure names what it is, and the place."""
    try:
        value = loads(data.decode().rstrip())
    except UnicodeDecodeError:
        raise Misuse(f"{what} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        import json

        if not isinstance(error, json.JSONDecodeError):
            message = f"{what} is not JSON that can be read: too long a number, or nested too deep"
            raise Misuse(message) from None
        said = next(said for begin, said in JSON_MISTAKES.items() if error.msg.startswith(begin))
        where = f"line {error.lineno}, column {error.colno}"
        raise Misuse(f"{what} is not JSON: {where}: {said}") from None
    if not isinstance(value, dict):
        shown = gist(dumps(value))
        raise Misuse(f'{what} is not a JSON object such as {{"key": "value"}}: {shown}')
    return value


def value_of(text: str) -> bytes:
    """Return a value from the command line as lines of a control file."""
    data = os.fsencode(text)
    return data if data.endswith(b"\n") else data + b"\n"


def find_program(name: str) -> str:
    """Return the path of an installed program, empty if it is missing."""
    for directory in [*os.get_exec_path(), "/usr/sbin", "/sbin"]:
        path = os.path.join(directory, name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return ""


def close(fd: int) -> None:
    """Close a descriptor; the kernel says of one whose ctxd is gone that it is not connected."""
    try:
        os.close(fd)
    except OSError:
        return


def pairs(text: str) -> dict[str, str]:
    """Return the values of key=value lines."""
    return dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line)


def amounts(text: str) -> dict[str, int | float]:
    """Return the numbers of key=value lines, such as those of `usage`."""
    found: dict[str, int | float] = {}
    for key, value in pairs(text).items():
        if value.replace(".", "", 1).isdigit():
            found[key] = float(value) if "." in value else int(value)
    return found


def tokens_of(usage: dict[str, int | float]) -> int | None:
    """Return the tokens that `tokens.max` limits; None if nobody counts them."""
    return int(usage["tokens.in"] + usage["tokens.out"]) if "tokens.in" in usage else None


def stamp(when: float) -> str:
    """Return a time in seconds as ctxd writes it."""
    seconds, milliseconds = divmod(round(when * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{milliseconds:03}Z"


def timestamp(text: str) -> float:
    """Return a time as ctxd writes it, RFC 3339 in UTC, in seconds; 0 for anything else.

    This is `datetime.fromisoformat`, whose import takes longer than that of all of `ctx`.
    """
    try:
        year, month, day = int(text[:4]), int(text[5:7]), int(text[8:10])
        hour, minute, second = int(text[11:13]), int(text[14:16]), float(text[17:].rstrip("Z"))
    except ValueError:
        return 0.0
    # years that begin with March end with the day that only some have
    years, months = (year, month - 3) if month > 2 else (year - 1, month + 9)
    days = 365 * years + years // 4 - years // 100 + years // 400 + (306 * months + 5) // 10 + day
    return float((days - 719469) * 86400 + hour * 3600 + minute * 60) + second
