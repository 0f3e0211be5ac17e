"""JSON-RPC 2.0 in lines."""

from __future__ import annotations

from client.exits import Failure
from client.jsontext import loads
from client.loop import LINE_MAX, Lines, Loop, encode
from client.types import Any, Callable, TypeGuard

#: what is done with an answer: its result, or its error and {}
Then = Callable[[dict[str, Any], dict[str, Any] | None], None]


#: levels of JSON, which is more than the daemon takes; what is made of a frame has a few more, and
#: Python's own limit on them is one on what it does at that moment
DEPTH_MAX = 100

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
    try:
        found: object = loads(line.decode(), parse_constant=refuse_constant, parse_float=finite)
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


def is_id(value: object) -> TypeGuard[str | int]:
    """Return whether a value can be the id of a request."""
    return isinstance(value, str | int) and not isinstance(value, bool)


class Peer:
    """Another program, which asks and answers in JSON-RPC."""

    #: whether what is neither a request nor an answer is an error
    strict = False

    def __init__(self, loop: Loop, read_fd: int, write_fd: int, most: int = LINE_MAX) -> None:
        self.loop = loop
        self.lines = Lines(read_fd, most)
        self.write_fd = write_fd
        self.silent = False  # it says no more, and may listen
        self.asked: dict[int, Then] = {}
        loop.watch(read_fd, self._read)

    # what differs

    def serve(self, method: str, params: dict[str, Any], ident: object) -> None:
        """Handle a request, or a notification, which has no id; it may be refused."""
        raise NotImplementedError

    def end(self) -> None:
        """Handle the end of what the other program says: what it asked is answered yet."""
        self.silent = True
        self.loop.watch(self.write_fd, self.loop.stop, 0)  # unless it does not listen either
        self.rest()

    def is_asked(self) -> bool:
        """Return whether a request is not answered yet."""
        return False

    def check(self, frame: dict[str, Any]) -> None:
        """Refuse a request that cannot be served."""
        params = frame.get("params")
        if not isinstance(frame.get("method"), str) or not isinstance(params, dict | None):
            raise Refused(INVALID_REQUEST, "a request has a method and an object of params")

    def junk(self, line: bytes, code: int, message: str) -> None:
        """Handle a line that is no frame."""
        self.refuse(None, Refused(code, message))

    # what does not

    def say(self, **frame: Any) -> None:
        """Send a frame."""
        self.loop.write(self.write_fd, encode({"jsonrpc": "2.0", **frame}))
        self.rest()

    def rest(self) -> None:
        """End if nothing is left to be answered."""
        self.loop.over = self.loop.over or (self.silent and not self.is_asked())

    def request(self, method: str, params: dict[str, Any], then: Then) -> int:
        """Ask for something, and return the id of the request; `then` gets the result, or the
        error."""
        ident = len(self.asked) + 1
        while ident in self.asked:
            ident += 1
        self.asked[ident] = then
        self.say(id=ident, method=method, params=params)
        return ident

    def notify(self, method: str, params: dict[str, Any] | None = None) -> None:
        """Tell something."""
        self.say(method=method, **({} if params is None else {"params": params}))

    def answer(self, ident: object, result: dict[str, Any]) -> None:
        """Answer a request."""
        self.say(id=ident, result=result)

    def refuse(self, ident: object, refused: Refused) -> None:
        """Answer a request with an error."""
        self.say(id=ident, error=refused.error)

    def _read(self) -> None:
        lines = self.lines.read()
        for line in self.lines.rest() if lines is None else lines:
            self.take(line)
        if lines is None:
            self.loop.forget(self.lines.fd)
            self.end()

    def take(self, line: bytes) -> None:
        """Take a line."""
        if not line.strip():
            return
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
        elif "method" in frame or (self.strict and not {"result", "error"} & frame.keys()):
            self._serve(frame)
        elif type(frame.get("id")) is int and frame["id"] in self.asked:
            then = self.asked.pop(frame["id"])
            error = frame.get("error")
            then(object_in(frame, "result"), error if isinstance(error, dict) else None)

    def _serve(self, frame: dict[str, Any]) -> None:
        ident = frame["id"] if is_id(frame.get("id")) else None
        try:
            if "id" in frame and ident is None:
                raise Refused(INVALID_REQUEST, "an id is a string or a number")
            self.check(frame)
            self.serve(frame["method"], frame.get("params") or {}, ident)
        except Refused as refused:
            if "id" in frame or "method" not in frame:  # this is no notification
                self.refuse(ident, refused)
        except (Failure, OSError) as failure:  # the daemon may end while one of its files is read
            message = (isinstance(failure, OSError) and failure.strerror) or str(failure)
            if "id" in frame:
                self.refuse(ident, Refused(INTERNAL_ERROR, message))
