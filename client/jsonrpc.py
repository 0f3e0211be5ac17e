"""JSON-RPC 2.0 in lines, and a loop that waits for several descriptors at once."""

from __future__ import annotations

import os
import time

from client.exits import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    #: what is done with an answer: its result, or its error and {}
    Then = Callable[[dict[str, Any], dict[str, Any] | None], None]


BLOCK = 1 << 16
#: levels of JSON, which is more than the daemon takes; what is made of a frame has a few more, and
#: Python's own limit on them is one on what it does at that moment
DEPTH_MAX = 100
#: bytes of a line, of which no more is kept than tells that it is longer
LINE_MAX = 16 << 20
#: nothing is read while so much waits for somebody who does not read
BACKLOG_MAX = 16 << 20
#: a pipe that poll(2) reports as writable takes as much without blocking
AT_ONCE = 4096

PARSE_ERROR, INVALID_REQUEST, NO_METHOD = -32700, -32600, -32601
INVALID_PARAMS, INTERNAL_ERROR = -32602, -32603


class Refused(Exception):
    """A request that is answered with an error; `data` says more of it."""

    def __init__(self, code: int, message: str, **data: object) -> None:
        super().__init__(message)
        self.error: dict[str, Any] = {"code": code, "message": clean(message)}
        if data:
            self.error["data"] = data


def parse(line: bytes) -> object:
    """Return what a line of JSON says; `ValueError` if it is none, or is nested too deep.

    What it returns can be said again, as a part of another line.
    """
    import json

    try:
        found = json.loads(line.decode(), parse_constant=refuse_constant, parse_float=finite)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if line.count(b"[") + line.count(b"{") > DEPTH_MAX:  # perhaps in a string, or side by side
        check_depth(found)
    return found


def refuse_constant(text: str) -> None:
    """Refuse NaN and infinities, which Python takes for numbers."""
    raise ValueError(text)


def finite(text: str) -> float:
    """Return a number; of one that is too large, Python would make an infinity."""
    number = float(text)
    if number - number:
        raise ValueError(text)
    return number


def check_depth(value: object) -> None:
    """Refuse what is nested too deep."""
    level = [value]
    for _ in range(DEPTH_MAX + 1):
        inner: list[object] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
        if not inner:
            return
        level = inner
    raise ValueError("nested too deep")


def clean(text: str) -> str:
    """Return a text without halves of surrogate pairs, which UTF-8 does not have."""
    return text.encode("utf-8", "replace").decode()


def text_in(fields: dict[str, Any], key: str) -> str:
    """Return a text among the fields of an object, empty if it has none there."""
    value = fields.get(key)
    return clean(value) if isinstance(value, str) else ""


def object_in(fields: dict[str, Any], key: str) -> dict[str, Any]:
    """Return an object among the fields of another one, empty if it has none there."""
    value = fields.get(key)
    return value if isinstance(value, dict) else {}


def objects_in(fields: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the objects of a list among the fields of an object."""
    value = fields.get(key)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


class Lines:
    """The lines that arrive at a descriptor: at most one byte too many of one that is too long."""

    def __init__(self, fd: int, most: int = LINE_MAX) -> None:
        self.fd = fd
        self.most = most
        self.pieces: list[bytes] = []
        self.size = 0

    def read(self) -> list[bytes] | None:
        """Return the lines that one read completes; None at the end."""
        try:
            data = os.read(self.fd, BLOCK)
        except OSError:
            return None  # the peer reset the connection
        return self.add(data) if data else None

    def add(self, data: bytes) -> list[bytes]:
        """Return the lines that more bytes complete."""
        first, *more = data.split(b"\n")
        self._add(first)
        if not more:
            return []
        lines = [b"".join(self.pieces), *(line[: self.most + 1] for line in more[:-1])]
        self.pieces, self.size = [], 0
        self._add(more[-1])
        return lines

    def _add(self, piece: bytes) -> None:
        piece = piece[: max(0, self.most + 1 - self.size)]
        if piece:
            self.pieces.append(piece)
            self.size += len(piece)


class Loop:
    """Calls whoever waits for something to read or for a time, and writes what can be written."""

    def __init__(self) -> None:
        self.readers: dict[int, Callable[[], None]] = {}
        self.unwritten: dict[int, bytearray] = {}
        self.times: list[tuple[float, Callable[[], None]]] = []
        self.over = False

    def watch(self, fd: int, action: Callable[[], None]) -> None:
        """Call `action` whenever there is something to read."""
        self.readers[fd] = action

    def forget(self, fd: int) -> None:
        """Call nobody for a descriptor, and write no more to it."""
        self.readers.pop(fd, None)
        self.unwritten.pop(fd, None)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` after some time."""
        self.times.append((time.monotonic() + seconds, action))

    def write(self, fd: int, data: bytes) -> None:
        """Write data as soon as they can be written."""
        self.unwritten.setdefault(fd, bytearray()).extend(data)

    def run(self) -> None:
        """Serve until somebody says that it is over."""
        while not self.over:
            self.step()

    def drain(self, most: int = 0) -> None:
        """Write until no more than this is left of what anybody is to read."""
        while any(len(data) > most for data in self.unwritten.values()):
            self.step(reading=False)

    def step(self, reading: bool = True) -> None:
        """Wait for the next thing to do, and do it."""
        import select

        masks = dict.fromkeys(self.unwritten, select.POLLOUT)
        if reading and all(len(data) <= BACKLOG_MAX for data in self.unwritten.values()):
            for fd in self.readers:
                masks[fd] = masks.get(fd, 0) | select.POLLIN
        poller = select.poll()
        for fd, mask in masks.items():
            poller.register(fd, mask)
        due = min((when for when, _ in self.times), default=None)
        wait = None if due is None or not reading else max(0.0, due - time.monotonic()) * 1000
        for fd, events in poller.poll(wait):
            if fd in self.unwritten and events & ~select.POLLIN:
                self._flush(fd)
            readable = masks[fd] & select.POLLIN and events & ~select.POLLOUT
            if readable and fd in self.readers:
                self.readers[fd]()
        if reading:
            now = time.monotonic()
            actions = [action for when, action in self.times if when <= now]
            self.times = [row for row in self.times if row[0] > now]
            for action in actions:
                action()

    def _flush(self, fd: int) -> None:
        data = self.unwritten[fd]
        try:
            del data[: os.write(fd, data[:AT_ONCE])]
        except OSError:
            data.clear()  # nobody reads it any more; a reader learns this by the end of the input
        if not data:
            del self.unwritten[fd]


class Peer:
    """Another program, which asks and answers in JSON-RPC."""

    def __init__(self, loop: Loop, read_fd: int, write_fd: int) -> None:
        self.loop = loop
        self.lines = Lines(read_fd)
        self.write_fd = write_fd
        self.asked: dict[int, Then] = {}
        loop.watch(read_fd, self._read)

    # what differs

    def serve(self, method: str, params: dict[str, Any], ident: object) -> None:
        """Handle a request, or a notification, which has no id; it may be refused."""
        raise NotImplementedError

    def end(self) -> None:
        """Handle the end of what the other program says."""
        raise NotImplementedError

    def junk(self, line: bytes, code: int, message: str) -> None:
        """Handle a line that is no frame."""
        self.refuse(None, Refused(code, message))

    # what does not

    def say(self, frame: dict[str, Any]) -> None:
        """Send a frame."""
        import json

        data = json.dumps({"jsonrpc": "2.0", **frame}, ensure_ascii=False, separators=(",", ":"))
        self.loop.write(self.write_fd, data.encode("utf-8", "replace") + b"\n")

    def request(self, method: str, params: dict[str, Any], then: Then) -> None:
        """Ask for something; `then` gets the result, or the error."""
        ident = len(self.asked) + 1
        while ident in self.asked:
            ident += 1
        self.asked[ident] = then
        self.say({"id": ident, "method": method, "params": params})

    def notify(self, method: str, params: dict[str, Any]) -> None:
        """Tell something."""
        self.say({"method": method, "params": params})

    def answer(self, ident: object, result: dict[str, Any]) -> None:
        """Answer a request."""
        self.say({"id": ident, "result": result})

    def refuse(self, ident: object, refused: Refused) -> None:
        """Answer a request with an error."""
        self.say({"id": ident, "error": refused.error})

    def _read(self) -> None:
        lines = self.lines.read()
        if lines is None:
            self.loop.forget(self.lines.fd)
            self.end()
            return
        for line in lines:
            if line.strip():
                self._take(line)

    def _take(self, line: bytes) -> None:
        if len(line) > self.lines.most:
            self.junk(line, INVALID_REQUEST, f"a line may have at most {self.lines.most} bytes")
            return
        try:
            frame = parse(line)
        except ValueError:
            self.junk(line, PARSE_ERROR, "this line is not valid JSON")
            return
        if not isinstance(frame, dict):
            self.junk(line, INVALID_REQUEST, "a frame is an object")
        elif "method" in frame:
            self._serve(frame)
        elif type(frame.get("id")) is int and frame["id"] in self.asked:
            then = self.asked.pop(frame["id"])
            error = frame.get("error")
            then(object_in(frame, "result"), error if isinstance(error, dict) else None)

    def _serve(self, frame: dict[str, Any]) -> None:
        ident, method, params = frame.get("id"), frame["method"], frame.get("params", {})
        try:
            if "id" in frame and (not isinstance(ident, (str, int)) or isinstance(ident, bool)):
                ident = None
                raise Refused(INVALID_REQUEST, "an id is a string or a number")
            if not isinstance(method, str) or not isinstance(params, (dict, type(None))):
                raise Refused(INVALID_REQUEST, "a request has a method and an object of params")
            self.serve(method, params or {}, ident)
        except Refused as refused:
            if "id" in frame:
                self.refuse(ident, refused)
        except (Failure, OSError) as failure:  # the daemon may end while one of its files is read
            message = (isinstance(failure, OSError) and failure.strerror) or str(failure)
            if "id" in frame:
                self.refuse(ident, Refused(INTERNAL_ERROR, message))
