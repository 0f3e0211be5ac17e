"""The command that offers the tools of an agent to a client of the Model Context Protocol.

It speaks two eras of the protocol on standard input and output. Since 2026-07-28 each request says
its version and there is no session; before, a session begins with `initialize`.
"""

from __future__ import annotations

import os
import time

from client.calls import WAITS, Call, Calls
from client.declaring import OF, Arguments, command, flag
from client.exits import OK, PIPE_CLOSED, Failure, Misuse
from client.files import close
from client.jsonrpc import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    NO_METHOD,
    Peer,
    Refused,
    is_id,
    object_in,
    text_in,
)
from client.jsontext import loads
from client.links import LOST_MAX, RETRY_MAX, Frame
from client.loop import POLLPRI, Loop, encode
from client.output import decode, escape
from client.root import Root, agent, own_agent, readable, tool
from client.types import Any, Result, TypeGuard
from client.words import ABOUT_ONE, HINTS, TOOLS, VERSION

Object = dict[str, Any]
Key = tuple[type, str | int]


MODERN = ("2026-07-28",)
LEGACY = ("2025-11-25", "2025-06-18")  # the first one is offered for any other
META = "io.modelcontextprotocol/"
SUBSCRIPTION = f"{META}subscriptionId"
NO_VERSION = -32022
LINE_MAX = 4 << 20  # bytes of a message
OPEN_MAX = 2048  # requests that are not answered
PROGRESS = 5.0  # seconds between two notes of progress
LAST_LINE_MAX = 500  # characters
LIST_AGAIN = 0.5  # seconds between two attempts to list the tools
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
#: the tool by which Claude Code asks whether it may use another one
PERMISSION = "Permission"
PERMISSION_TOOL: Object = {
    "name": PERMISSION,
    "description": "Asks people whether a tool may be used, and returns what they say.",
    "inputSchema": {
        "type": "object",
        "properties": {
            "tool_name": {"type": "string", "description": "Name of the tool."},
            "input": {"type": "object", "description": "Its input."},
            "tool_use_id": {"type": "string", "description": "Id of the call."},
        },
        "required": ["tool_name", "input"],
    },
}


class Request:
    """A request that is not answered yet; `modern` says in which era it was made."""

    def __init__(self, ident: str | int, modern: bool, token: str | int | None) -> None:
        self.id = ident
        self.modern = modern
        self.token = token  # of its progress
        self.began = time.monotonic()
        self.call: Call | None = None
        self.asked: Any = None  # client.permits.Asked, which few need
        self.listens = False


def key_of(ident: str | int) -> Key:
    """Return what tells requests apart: 1 is not "1"."""
    return type(ident), ident


def is_name(name: object) -> TypeGuard[str]:
    """Return whether there can be a tool, a task or an agent of this name."""
    if not isinstance(name, str):
        return False
    return 0 < len(name) <= 128 and name[0] != "." and NAME_CHARS.issuperset(name)


def read_tool(root: Root, name: str) -> Object | None:
    """Return a tool as clients see it; None if it is not the caller's any more."""
    files = ("description", "schema", "output_schema")
    texts = readable(lambda: [root.read(tool(name, file)) for file in files], list[bytes]())
    if not texts:
        return None
    shown: Object = {
        "name": name,
        "description": decode(texts[0]).rstrip("\n"),
        "inputSchema": loads(texts[1].decode()),
        "outputSchema": loads(texts[2].decode()),
    }
    if name in TOOLS:
        shown["annotations"] = {hint: name in names for hint, names in HINTS.items()}
    return shown


class Watch:
    """Notices that the caller has other tools than before, while somebody wants to know."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.known: list[str] | None = None
        self.look_at = 0.0
        self.looked = 0.0
        self.fd = -1

    def look_soon(self) -> None:
        """Look again: an event has happened, or the daemon has ended."""
        self.close()
        self.look_in(max(0.0, self.looked + LOOK_AGAIN - time.monotonic()))

    def look_in(self, seconds: float) -> None:
        """Look after some time."""
        self.look_at = time.monotonic() + seconds
        self.server.loop.later(seconds, self.look)

    def look(self) -> None:
        """Tell if the tools are others, if it is time to look."""
        server, now = self.server, time.monotonic()
        if now < self.look_at or not server.is_heard():
            return
        self.looked = now
        self.close()
        try:
            path = server.root.join(agent(server.name(), "session/events.jsonl"))
            self.fd = os.open(path, os.O_RDONLY)
            server.loop.watch(self.fd, self.look_soon, POLLPRI)  # events tell of a new policy
            os.pread(self.fd, 1, 0)
            names = server.root.names("tool")
        except (OSError, Failure):
            self.look_in(RETRY_MAX)
            return
        self.look_in(LOOK)
        before, self.known = self.known, names
        if before is not None and before != names:
            server.tell_change()

    def close(self) -> None:
        """Close the file of events."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self.server.loop.forget(fd)
            close(fd)


class Server(Peer):
    """The protocol, with a client."""

    strict = True

    def __init__(
        self, loop: Loop, root: Root, name: str, *, outside: bool, permissions: bool = False
    ) -> None:
        super().__init__(loop, 0, 1, LINE_MAX)
        self.root = root
        self.outside = outside
        self.permissions = permissions
        self.given_name = name
        self.requests: dict[Key, Request] = {}
        self.legacy = ""  # the version of the session, once there is one
        self.initialized = False
        self.calls = Calls(loop, root, self.socket)
        self.watch = Watch(self)
        self.listing: list[Request] = []  # that wait for the daemon
        self.lists_later = False

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

    def close(self) -> None:
        """Close all that is open, and withdraw what nobody waits for any more."""
        for request in self.requests.values():
            if request.asked is not None:
                request.asked.withdraw()
        self.calls.end()
        self.watch.close()

    # messages

    def is_asked(self) -> bool:
        return any(not each.listens for each in self.requests.values())

    def refuse(self, ident: object, refused: Refused) -> None:
        """Send an error; about nobody knows which request, without an id."""
        self.say(**({} if ident is None else {"id": ident}), error=refused.error)

    def reply(self, request: Request, **result: object) -> None:
        """Send the result of a request, in the form of its era."""
        self.requests.pop(key_of(request.id), None)
        if request.modern:
            about = {f"{META}serverInfo": SERVER}
            result = {"resultType": "complete", **result, "_meta": about}
        self.answer(request.id, result)

    def check(self, frame: Object) -> None:
        if frame.get("jsonrpc") != "2.0" or not isinstance(frame.get("method"), str):
            raise Refused(INVALID_REQUEST, 'a message has "jsonrpc": "2.0" and a method')
        if not isinstance(frame.get("params", {}), dict):
            raise Refused(INVALID_PARAMS, "params is an object")

    def serve(self, method: str, params: Object, ident: object) -> None:
        if is_id(ident):
            self.take_request(ident, method, params)
        else:
            self.take_notification(method, params)

    def take_notification(self, method: str, params: Object) -> None:
        """Take what is not answered, whatever it says."""
        if method == "notifications/initialized" and self.legacy:
            self.initialized = True
            self.watch.look()
        elif method == "notifications/cancelled" and is_id(params.get("requestId")):
            request = self.requests.pop(key_of(params["requestId"]), None)
            if request is not None and request.call is not None:
                self.calls.cancel(request.call)
            if request is not None and request.asked is not None:
                request.asked.withdraw()
            self.listing = [each for each in self.listing if each is not request]

    def take_request(self, ident: str | int, method: str, params: Object) -> None:
        """Take what is answered, now or later; `Refused`."""
        if key_of(ident) in self.requests:
            raise Refused(INVALID_REQUEST, "a request with this id is not answered yet")
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
        self.reply(request)

    def initialize(self, request: Request, params: Object) -> None:
        wanted = needed(params, "protocolVersion", str)
        for field in ("capabilities", "clientInfo"):
            needed(params, field, dict)
        self.legacy = wanted if wanted in LEGACY else LEGACY[0]
        self.reply(
            request,
            protocolVersion=self.legacy,
            capabilities=CAPABILITIES,
            serverInfo=SERVER,
            instructions=INSTRUCTIONS,
        )

    def discover(self, request: Request, params: Object) -> None:
        self.reply(
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
        if not self.lists_later:
            self.list_all()

    def call_tool(self, request: Request, params: Object) -> None:
        name, given = needed(params, "name", str), params.get("arguments", {})
        if not isinstance(given, dict):
            raise Refused(INVALID_PARAMS, "arguments is an object")
        if not is_name(name):
            raise Refused(INVALID_PARAMS, f"unknown tool: {name[:100]}")
        if self.outside and name in ABOUT_ONE:
            given = {"agent_id": self.name(), **given}
        self.requests[key_of(request.id)] = request
        if request.token is not None:
            self.loop.later(PROGRESS, lambda: self.progress(request))
        if self.permissions and name == PERMISSION:
            self.permit(request, given)
            return
        request.call = Call(name, given, lambda call, frame: self.answered(request, frame))
        self.calls.add(request.call)

    def permit(self, request: Request, params: Object) -> None:
        """Ask people whether a tool may be used; an error of the tool if nobody can be asked."""
        from client.permits import Asked, End, asks_for, decided

        name, given = text_in(params, "tool_name"), object_in(params, "input")

        def over(end: End) -> None:
            self.tell(request, encode(decided(name, given, end)).decode().strip())

        try:
            request.asked = Asked(self.loop, self.root, "claude", asks_for(name, given), over)
        except Failure as failure:
            self.tell(request, f"nobody can be asked: {failure}", failed=True)

    def listen(self, request: Request, params: Object) -> None:
        wanted = needed(params, "notifications", dict)
        honored = {"toolsListChanged": True} if wanted.get("toolsListChanged") is True else {}
        request.listens = bool(honored)
        self.requests[key_of(request.id)] = request
        self.notify(
            "notifications/subscriptions/acknowledged",
            {"notifications": honored, "_meta": {SUBSCRIPTION: request.id}},
        )
        self.watch.look()

    # later

    def answered(self, request: Request, frame: Frame) -> None:
        """Answer a call of a tool."""
        call = request.call
        assert call is not None
        if frame.get("type") == "tool":
            output = frame.get("output")
            text = encode(output).decode().rstrip("\n")
            shown = {"type": "text", "text": text}
            self.reply(request, content=[shown], structuredContent=output, isError=False)
            return
        code, reason = str(frame.get("code") or "EIO"), str(frame.get("message") or "failed")
        if code in ("ENOENT", "EACCES") and not self.has_tool(call.name):
            self.give_up(request, INVALID_PARAMS, f"unknown tool: {call.name}")
            return
        self.tell(request, f"{code}: {reason}", failed=True)

    def tell(self, request: Request, text: str, *, failed: bool = False) -> None:
        """Answer a call of a tool with a text."""
        self.reply(request, content=[{"type": "text", "text": text}], isError=failed)

    def give_up(self, request: Request, code: int, message: str) -> None:
        """Answer a request with an error."""
        self.requests.pop(key_of(request.id), None)
        self.refuse(request.id, Refused(code, message))

    def has_tool(self, name: str) -> bool:
        """Return whether the caller has a tool, or nobody knows."""
        return self.root.present(tool(name)) or not self.root.present("tool")

    def list_all(self) -> None:
        """Answer requests for the list, as soon as the daemon is there."""
        self.lists_later = False
        try:
            names = self.root.names("tool")
            tools = [shown for name in names if (shown := read_tool(self.root, name))]
            tools += [PERMISSION_TOOL] if self.permissions else []
        except (Failure, ValueError, RecursionError) as error:
            now = time.monotonic()
            for request in [each for each in self.listing if now - each.began >= LOST_MAX]:
                self.listing.remove(request)
                self.give_up(request, INTERNAL_ERROR, str(error))
            self.lists_later = bool(self.listing)
            if self.lists_later:
                self.loop.later(LIST_AGAIN, self.list_all)
            return
        self.watch.known = names
        listing, self.listing = self.listing, []
        for request in listing:
            fresh = {"ttlMs": LISTED_MS, "cacheScope": "private"} if request.modern else {}
            self.reply(request, tools=tools, **fresh)

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

    def progress(self, request: Request) -> None:
        """Tell how long a call takes, and what its task wrote last; and again later."""
        if self.requests.get(key_of(request.id)) is not request:
            return
        now = time.monotonic()
        seconds = (now - request.began) // PROGRESS * PROGRESS
        params: Object = {"progressToken": request.token, "progress": int(seconds)}
        said = "people are asked" if request.call is None else self.last_line(request.call)
        self.notify("notifications/progress", {**params, **({"message": said} if said else {})})
        self.loop.later(request.began + seconds + PROGRESS - now, lambda: self.progress(request))

    def last_line(self, call: Call) -> str:
        """Return what the task of a call wrote last; empty if it has none."""
        if call.link is not None and call.link.lost is not None:
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


def needed(fields: Object, name: str, kind: type[Result]) -> Result:
    """Return a field that has to be there; `Refused`."""
    value = fields.get(name)
    if not isinstance(value, kind):
        raise Refused(INVALID_PARAMS, f"{name} is missing")
    return value


def check_meta(meta: Object) -> None:
    """Check what each request says since 2026-07-28; `Refused`."""
    version = meta[f"{META}protocolVersion"]
    if not isinstance(version, str):
        raise Refused(INVALID_PARAMS, f"{META}protocolVersion is a string")
    if version not in MODERN:
        raise Refused(
            NO_VERSION, "unsupported protocol version", supported=list(MODERN), requested=version
        )
    needed(meta, f"{META}clientCapabilities", dict)
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


@command(
    "mcp", OF, flag("--permissions", "also offer Permission, by which Claude Code asks people")
)
def do_mcp(root: Root, args: Arguments) -> int:
    """Offer the tools of an agent by the Model Context Protocol.

    Speaks the protocol on standard input and output, until the end of the input, when all that
    was asked is answered. Inside an agent, the tools are its own. Versions: 2026-07-28,
    2025-11-25 and 2025-06-18.
    """
    own = own_agent(root) or os.environ.get("CTX_AGENT", "")
    if own and args.agent not in (None, own):
        raise Misuse(f"this is inside the agent {own}: leave out --agent")
    if args.permissions and not own:
        raise Misuse("only an agent asks: use --permissions inside of one")
    if not own and not args.agent and root.present("agent"):
        raise Misuse("you are not in an agent: say which one with --agent NAME")
    loop = Loop()
    server = Server(
        loop, root, own or args.agent or "",
        outside=bool(args.agent and not own), permissions=args.permissions,
    )
    try:
        while not (loop.over or 1 in loop.broken):
            loop.step()
        loop.drain()
    finally:
        server.close()
    return PIPE_CLOSED if 1 in loop.broken else OK
