"""The command that offers the tools of an agent to a client of the Model Context Protocol.

It speaks two eras of the protocol on standard input and output. Since 2026-07-28 each request says
its version and there is no session; before, a session begins with `initialize`.
"""

from __future__ import annotations

import errno
import os
import select
import time

from client.arguments import OF
from client.calls import LOST_MAX, RETRY, RETRY_MAX, WAITS, Call, Calls, encode
from client.declaring import Arguments, command
from client.exits import OK, PIPE_CLOSED, USAGE, Failure
from client.jsonrpc import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    NO_METHOD,
    PARSE_ERROR,
    Lines,
    Refused,
    parse,
)
from client.output import decode, escape
from client.root import Root, agent, own_agent, tool
from client.words import ABOUT_ONE, HINTS, TOOLS, VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, TypeGuard

    from client.calls import Frame

    Object = dict[str, Any]
    Key = tuple[type, str | int]


MODERN = ("2026-07-28",)
LEGACY = ("2025-11-25", "2025-06-18")  # the first one is offered for any other
META = "io.modelcontextprotocol/"
SUBSCRIPTION = f"{META}subscriptionId"
NO_VERSION = -32022
LINE_MAX = 4 << 20  # bytes of a message
UNWRITTEN_MAX = 8 << 20  # bytes of answers, above which nothing more is read
PIPE = 4096  # bytes that a pipe takes at once when it takes any
OPEN_MAX = 2048  # requests that are not answered
PROGRESS = 5.0  # seconds between two notes of progress
LAST_LINE_MAX = 500  # characters
LOOK = 30.0  # seconds between two looks at the tools; after an event of the agent at once
LOOK_AGAIN = 1.0  # but not more often than this
DISCOVERED_MS, LISTED_MS = 3_600_000, 30_000  # how long answers stay true
NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.+")
SERVER = {"name": "ctx", "title": "ctxfs", "version": VERSION}
CAPABILITIES = {"tools": {"listChanged": True}}
INSTRUCTIONS = (
    "The tools of an agent of ctxfs: they start, watch and end other agents and commands, send "
    "messages, and keep what the agent works on. A call that waits is answered after 50 seconds "
    "with the status so far, unless its timeout says more: call again to go on waiting."
)


class Request:
    """A request that is not answered yet; `modern` says in which era it was made."""

    def __init__(self, ident: str | int, modern: bool, token: str | int | None) -> None:
        self.id = ident
        self.modern = modern
        self.token = token  # of its progress
        self.began = time.monotonic()
        self.told = 0.0  # seconds of the last note of progress
        self.call: Call | None = None
        self.listens = False


def is_id(value: object) -> TypeGuard[str | int]:
    """Return whether a value can be the id of a request, or a token."""
    return isinstance(value, str | int) and not isinstance(value, bool)


def key_of(ident: str | int) -> Key:
    """Return what tells requests apart: 1 is not "1"."""
    return type(ident), ident


def is_name(name: object) -> TypeGuard[str]:
    """Return whether there can be a tool, a task or an agent of this name."""
    if not isinstance(name, str):
        return False
    return 0 < len(name) <= 128 and name[0] != "." and NAME_CHARS.issuperset(name)


def read_tool(root: Root, name: str) -> Object:
    """Return a tool as clients see it."""
    import json

    shown: Object = {
        "name": name,
        "description": decode(root.read(tool(name, "description"))).rstrip("\n"),
        "inputSchema": json.loads(root.read(tool(name, "schema"))),
        "outputSchema": json.loads(root.read(tool(name, "output_schema"))),
    }
    if name in TOOLS:
        shown["annotations"] = {hint: name in names for hint, names in HINTS.items()}
    return shown


class Watch:
    """Notices that the caller has other tools than before."""

    def __init__(self, root: Root, name: Callable[[], str]) -> None:
        self.root = root
        self.name = name
        self.known: list[str] | None = None
        self.look_at = 0.0
        self.looked = 0.0
        self.fd = -1

    def interests(self) -> Iterator[tuple[int, int]]:
        """Yield the descriptor of the agent's events, which tell of a new policy."""
        if self.fd >= 0:
            yield self.fd, select.POLLPRI

    def handle(self) -> None:
        """Look soon: an event has happened, or the daemon has ended."""
        self.look_at = min(self.look_at, max(time.monotonic(), self.looked + LOOK_AGAIN))
        try:
            os.pread(self.fd, 1, 0)  # or it would be told again
        except OSError:
            self.close()

    def changed(self, now: float) -> bool:
        """Return whether the tools are others, if it is time to look."""
        if now < self.look_at:
            return False
        self.looked, self.look_at = now, now + LOOK
        self.close()
        try:
            self.fd = os.open(
                self.root.join(agent(self.name(), "session/events.jsonl")), os.O_RDONLY
            )
            os.pread(self.fd, 1, 0)
            names = self.root.names("tool")
        except (OSError, Failure):
            self.look_at = now + RETRY_MAX
            return False
        before, self.known = self.known, names
        return before is not None and before != names

    def close(self) -> None:
        """Close the file of events."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            try:
                os.close(fd)
            except OSError:  # the daemon has ended
                return


class Server:
    """The protocol: lines come in, `unwritten` goes out."""

    def __init__(self, root: Root, name: str, *, outside: bool) -> None:
        self.root = root
        self.outside = outside
        self.given_name = name
        self.unwritten = bytearray()
        self.requests: dict[Key, Request] = {}
        self.legacy = ""  # the version of the session, once there is one
        self.initialized = False
        self.calls = Calls(root, self.socket)
        self.watch = Watch(root, self.name)
        self.listing: list[Request] = []  # that wait for the daemon
        self.list_at = 0.0
        self.list_delay = RETRY

    def name(self) -> str:
        """Return the name of the agent; `Failure` while the daemon does not tell."""
        if not self.given_name:
            self.given_name = own_agent(self.root) or os.environ.get("CTX_AGENT", "")
        if not self.given_name:
            raise Failure(f"no ctxd answers at {self.root.path}")
        return self.given_name

    def socket(self) -> str:
        """Return the path of the socket below the root."""
        return "ctxd.sock" if self.outside else f"agent/{self.name()}.sock"

    def end(self) -> None:
        """Close all that is open."""
        self.calls.end()
        self.watch.close()

    # messages

    def send(self, **message: object) -> None:
        self.unwritten += encode({"jsonrpc": "2.0", **message})

    def notify(self, method: str, params: Object | None = None) -> None:
        self.send(method=method, **({} if params is None else {"params": params}))

    def fail(self, error: Object, ident: object = None) -> None:
        """Send an error; about nobody knows which request, without an id."""
        self.send(**({"id": ident} if is_id(ident) else {}), error=error)

    def answer(self, request: Request, **result: object) -> None:
        """Send the result of a request, in the form of its era."""
        if request.modern:
            about = {f"{META}serverInfo": SERVER}
            result = {"resultType": "complete", **result, "_meta": about}
        self.send(id=request.id, result=result)

    def line(self, line: bytes) -> None:
        """Take one message."""
        if len(line) > LINE_MAX:
            about = f"a message may have at most {LINE_MAX} bytes"
            self.fail({"code": INVALID_REQUEST, "message": about})
            return
        if not line.strip():
            return
        try:
            message = parse(line)
        except ValueError:
            self.fail({"code": PARSE_ERROR, "message": "this is not JSON"})
            return
        if not isinstance(message, dict):
            self.fail({"code": INVALID_REQUEST, "message": "a message is one JSON object"})
            return
        ident, method = message.get("id"), message.get("method")
        try:
            if message.get("jsonrpc") != "2.0":
                raise Refused(INVALID_REQUEST, 'a message has "jsonrpc": "2.0"')
            if "method" not in message and ("result" in message or "error" in message):
                return  # an answer, to nothing that was asked
            if not isinstance(method, str):
                raise Refused(INVALID_REQUEST, "a message has a method")
            if "id" not in message:
                self.take_notification(method, message.get("params"))
                return
            if not is_id(ident):
                raise Refused(INVALID_REQUEST, "an id is a string or an integer")
            self.take_request(ident, method, message.get("params", {}))
        except Refused as refused:
            self.fail(refused.error, ident)

    def take_notification(self, method: str, params: object) -> None:
        """Take what is not answered, whatever it says."""
        if method == "notifications/initialized" and self.legacy:
            self.initialized = True
        elif method == "notifications/cancelled" and isinstance(params, dict):
            ident = params.get("requestId")
            if not is_id(ident):
                return
            request = self.requests.pop(key_of(ident), None)
            if request is None:
                return
            if request.call is not None:
                self.calls.cancel(request.call)
            if request in self.listing:
                self.listing.remove(request)

    def take_request(self, ident: str | int, method: str, params: object) -> None:
        """Take what is answered, now or later; `Refused`."""
        if key_of(ident) in self.requests:
            raise Refused(INVALID_REQUEST, "a request with this id is not answered yet")
        if not isinstance(params, dict):
            raise Refused(INVALID_PARAMS, "params is an object")
        meta = params.get("_meta", {})
        if not isinstance(meta, dict):
            raise Refused(INVALID_PARAMS, "_meta is an object")
        modern = f"{META}protocolVersion" in meta
        if modern:
            check_meta(meta)
        elif not self.legacy and method not in ("initialize", "ping"):
            raise Refused(
                INVALID_PARAMS,
                f"say the version in _meta ({META}protocolVersion: {', '.join(MODERN)}), or begin "
                f"with initialize ({', '.join(LEGACY)})",
            )
        token = meta.get("progressToken")
        if token is not None and not is_id(token):
            raise Refused(INVALID_PARAMS, "progressToken is a string or an integer")
        handler = (MODERN_METHODS if modern else LEGACY_METHODS).get(method)
        if handler is None:
            raise Refused(NO_METHOD, f"no method {method[:100]}")
        if len(self.requests) >= OPEN_MAX:
            raise Refused(INTERNAL_ERROR, f"{OPEN_MAX} requests are not answered yet")
        handler(self, Request(ident, modern, token), params)

    # methods

    def ping(self, request: Request, params: Object) -> None:
        self.answer(request)

    def initialize(self, request: Request, params: Object) -> None:
        wanted = params.get("protocolVersion")
        if not isinstance(wanted, str):
            raise Refused(INVALID_PARAMS, "protocolVersion is missing")
        for field in ("capabilities", "clientInfo"):
            if not isinstance(params.get(field), dict):
                raise Refused(INVALID_PARAMS, f"{field} is missing")
        self.legacy = wanted if wanted in LEGACY else LEGACY[0]
        self.answer(
            request,
            protocolVersion=self.legacy,
            capabilities=CAPABILITIES,
            serverInfo=SERVER,
            instructions=INSTRUCTIONS,
        )

    def discover(self, request: Request, params: Object) -> None:
        self.answer(
            request,
            supportedVersions=list(MODERN),
            capabilities=CAPABILITIES,
            instructions=INSTRUCTIONS,
            ttlMs=DISCOVERED_MS,
            cacheScope="public",
        )

    def list_tools(self, request: Request, params: Object) -> None:
        if "cursor" in params:
            raise Refused(INVALID_PARAMS, "there is no cursor: all tools are in one answer")
        self.requests[key_of(request.id)] = request
        self.listing.append(request)
        self.list_at = min(self.list_at, time.monotonic())
        self.go_on_listing(time.monotonic())

    def call_tool(self, request: Request, params: Object) -> None:
        name, given = params.get("name"), params.get("arguments", {})
        if not isinstance(name, str):
            raise Refused(INVALID_PARAMS, "name is missing")
        if not isinstance(given, dict):
            raise Refused(INVALID_PARAMS, "arguments is an object")
        if not is_name(name):
            raise Refused(INVALID_PARAMS, f"unknown tool: {name[:100]}")
        if self.outside and name in ABOUT_ONE:
            given = {"agent_id": self.name(), **given}
        self.requests[key_of(request.id)] = request
        request.call = Call(name, given, lambda call, frame: self.answered(request, frame))
        self.calls.add(request.call)

    def listen(self, request: Request, params: Object) -> None:
        wanted = params.get("notifications")
        if not isinstance(wanted, dict):
            raise Refused(INVALID_PARAMS, "notifications is missing")
        honored = {"toolsListChanged": True} if wanted.get("toolsListChanged") is True else {}
        request.listens = bool(honored)
        self.requests[key_of(request.id)] = request
        self.notify(
            "notifications/subscriptions/acknowledged",
            {"notifications": honored, "_meta": {SUBSCRIPTION: request.id}},
        )

    # later

    def answered(self, request: Request, frame: Frame) -> None:
        """Answer a call of a tool."""
        self.requests.pop(key_of(request.id), None)
        call = request.call
        assert call is not None
        if frame.get("type") == "tool":
            output = frame.get("output")
            text = encode(output).decode().rstrip("\n")
            shown = {"type": "text", "text": text}
            self.answer(request, content=[shown], structuredContent=output, isError=False)
            return
        code, reason = str(frame.get("code") or "EIO"), str(frame.get("message") or "failed")
        if code in ("ENOENT", "EACCES") and not self.has_tool(call.name):
            self.fail({"code": INVALID_PARAMS, "message": f"unknown tool: {call.name}"}, request.id)
            return
        self.answer(request, content=[{"type": "text", "text": f"{code}: {reason}"}], isError=True)

    def has_tool(self, name: str) -> bool:
        """Return whether the caller has a tool, or nobody knows."""
        try:
            os.stat(self.root.join(tool(name)))
        except OSError as error:
            return error.errno != errno.ENOENT or not self.root.present("tool")
        return True

    def go_on_listing(self, now: float) -> None:
        """Answer requests for the list, if the daemon is there."""
        if not self.listing or now < self.list_at:
            return
        try:
            names = self.root.names("tool")
            tools = [shown for name in names if (shown := self.tool(name))]
        except (Failure, ValueError, RecursionError) as error:
            self.list_at = now + self.list_delay
            self.list_delay = min(RETRY_MAX, 2 * self.list_delay)
            for request in [each for each in self.listing if now - each.began >= LOST_MAX]:
                self.listing.remove(request)
                self.requests.pop(key_of(request.id), None)
                self.fail({"code": INTERNAL_ERROR, "message": str(error)}, request.id)
            return
        self.list_delay = RETRY
        self.watch.known = names
        listing, self.listing = self.listing, []
        for request in listing:
            self.requests.pop(key_of(request.id), None)
            fresh = {"ttlMs": LISTED_MS, "cacheScope": "private"} if request.modern else {}
            self.answer(request, tools=tools, **fresh)

    def tool(self, name: str) -> Object | None:
        """Return a tool, None if it is the caller's no longer."""
        try:
            return read_tool(self.root, name)
        except Failure as failure:
            if failure.number in (errno.ENOENT, errno.ESTALE, errno.EACCES):
                return None
            raise

    def go_on(self, now: float) -> float | None:
        """Do what it is time for; return in how many seconds there is more to do."""
        self.calls.go_on(now)
        self.go_on_listing(now)
        due = [each for each in (self.calls.due(now), self.progress(now)) if each is not None]
        if self.listing:
            due.append(max(0.0, self.list_at - now))
        if self.is_heard():
            if self.watch.changed(now):
                self.tell_change()
            due.append(max(0.0, self.watch.look_at - now))
        return min(due, default=None)

    def is_heard(self) -> bool:
        """Return whether somebody wants to be told of other tools."""
        return self.initialized or any(each.listens for each in self.requests.values())

    def tell_change(self) -> None:
        method = "notifications/tools/list_changed"
        if self.initialized:
            self.notify(method)
        for request in self.requests.values():
            if request.listens:
                self.notify(method, {"_meta": {SUBSCRIPTION: request.id}})

    def progress(self, now: float) -> float | None:
        """Tell how long calls take, and what their tasks wrote last."""
        due: list[float] = []
        for request in self.requests.values():
            if request.call is None or request.token is None:
                continue
            if now - request.began >= request.told + PROGRESS:
                request.told = (now - request.began) // PROGRESS * PROGRESS
                params: Object = {"progressToken": request.token, "progress": int(request.told)}
                said = self.last_line(request.call)
                self.notify(
                    "notifications/progress", {**params, **({"message": said} if said else {})}
                )
            due.append(request.began + request.told + PROGRESS - now)
        return min(due, default=None)

    def last_line(self, call: Call) -> str:
        """Return what the task of a call wrote last; empty if it has none."""
        if call.lost is not None:
            return "ctxd does not answer: trying again"
        task = call.given.get("task_id")
        owner = call.given.get("agent_id", self.given_name)
        if call.name != WAITS or not (is_name(task) and is_name(owner)):
            return ""
        try:
            lines = self.root.value(agent(owner, f"task/{task}/preview")).split("\n")
        except Failure:
            return ""
        line = next((line for line in reversed(lines) if line.strip()), "")
        return escape(line[-LAST_LINE_MAX:])


def check_meta(meta: Object) -> None:
    """Check what each request says since 2026-07-28; `Refused`."""
    version = meta[f"{META}protocolVersion"]
    if not isinstance(version, str):
        raise Refused(INVALID_PARAMS, f"{META}protocolVersion is a string")
    if version not in MODERN:
        raise Refused(
            NO_VERSION, "unsupported protocol version", supported=list(MODERN), requested=version
        )
    if not isinstance(meta.get(f"{META}clientCapabilities"), dict):
        raise Refused(INVALID_PARAMS, f"{META}clientCapabilities is missing")
    about = meta.get(f"{META}clientInfo", {"name": "", "version": ""})
    if not isinstance(about, dict) or not all(
        isinstance(about.get(field), str) for field in ("name", "version")
    ):
        raise Refused(INVALID_PARAMS, f"{META}clientInfo has a name and a version")


MODERN_METHODS = {
    "server/discover": Server.discover,
    "tools/list": Server.list_tools,
    "tools/call": Server.call_tool,
    "subscriptions/listen": Server.listen,
}
LEGACY_METHODS = {
    "initialize": Server.initialize,
    "ping": Server.ping,
    "tools/list": Server.list_tools,
    "tools/call": Server.call_tool,
}


def write_some(unwritten: bytearray) -> None:
    """Write as much to standard output as it takes without waiting."""
    poller = select.poll()
    poller.register(1, select.POLLOUT)
    while unwritten:
        ready = poller.poll(0)
        if not ready:
            return
        if not ready[0][1] & select.POLLOUT:
            raise BrokenPipeError
        del unwritten[: os.write(1, unwritten[:PIPE])]


def serve(server: Server) -> int:
    """Serve standard input until its end."""
    lines = Lines(0, LINE_MAX)
    while True:
        timeout = server.go_on(time.monotonic())
        write_some(server.unwritten)
        poller = select.poll()
        full = len(server.unwritten) > UNWRITTEN_MAX
        if server.unwritten:
            poller.register(1, select.POLLOUT)
        if not full:
            poller.register(0, select.POLLIN)
            for fd, events in (*server.calls.interests(), *server.watch.interests()):
                poller.register(fd, events)
        for fd, events in poller.poll(None if timeout is None else 1000 * max(0.001, timeout)):
            if fd == 0:
                found = lines.read()
                if found is None:
                    return OK
                for each in found:
                    server.line(each)
            elif fd == server.watch.fd:
                server.watch.handle()
            elif fd in server.calls.links:
                server.calls.handle(fd)
            elif fd == 1 and not events & select.POLLOUT:
                return PIPE_CLOSED


@command("mcp", OF)
def do_mcp(root: Root, args: Arguments) -> int:
    """Offer the tools of an agent by the Model Context Protocol.

    Speaks the protocol on standard input and output, until the end of the input. Inside an
    agent, the tools are its own. Versions: 2026-07-28, 2025-11-25 and 2025-06-18.
    """
    own = own_agent(root) or os.environ.get("CTX_AGENT", "")
    if own and args.agent not in (None, own):
        raise Failure(f"this is inside the agent {own}: leave out --agent", USAGE)
    if not own and not args.agent and root.present("agent"):
        raise Failure("you are not in an agent: name one with --agent", USAGE)
    server = Server(root, own or args.agent or "", outside=bool(args.agent and not own))
    try:
        status = serve(server)
    finally:
        server.end()
    write_some(server.unwritten)
    return status
