"""The command bridge: an agent that speaks another protocol as a resident agent of ctxfs.

It runs inside the sandbox, as the program of the agent, and starts the other one. See Resident
programs in ctxfs-programs(7) for what it reads and writes.
"""

from __future__ import annotations

import os
import time

from client.commands import SUBJECTS
from client.control import Terminated, terminate
from client.declaring import Arguments, command, flag, operand, option
from client.exits import FAILED, OK, Failure, Misuse
from client.files import Opened, json_object, read_file
from client.jsonrpc import NO_METHOD, Peer, Refused, object_in, objects_in, text_in
from client.loop import Lines, Loop, parse_object
from client.output import complain, write_all
from client.permits import CANCELLED, Asking, End, choose, detail_of, fields_of, selected, words_for
from client.root import Root
from client.types import Any, Sequence

#: of the protocol
VERSION = 1
#: a way to continue a session that first tells all of it
REPLAYING = "session/load"


#: of tool calls, as the protocol names them
KINDS = (
    *("read", "edit", "delete", "move", "search", "execute", "think", "fetch", "switch_mode"),
    "other",
)
#: what is done about tool calls that need permission: by their kinds, by people, or nothing
POLICY, ASK, DENY = "policy", "ask", "deny"
#: what the program of the agent is, to the model
OWN_WORDS = ("operator", "supervisor", "delegation", "bootstrap")
#: why a turn ended without an answer
STOPS = {
    "refusal": "the model refuses to go on",
    "max_tokens": "the model has written as much as it may",
    "max_turn_requests": "the model was asked as often as it may be in one turn",
    "cancelled": "the agent ended the turn, which nobody had cancelled",
}
AUTH_REQUIRED = -32000
#: seconds without a word after which an agent that has loaded a session has replayed it: some
#: answer first, and replay then
QUIET = 0.5
#: characters of a piece of a reply, and of a title
PIECE, TITLE = 64 << 10, 500
#: tool calls of a turn whose kinds and titles are known, the latest ones
CALLS_MAX = 1000


def taken_servers(
    servers: dict[str, dict[str, Any]], capabilities: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return MCP servers in the form of the protocol, as far as the agent takes them."""
    taken = []
    for name, server in servers.items():
        if "command" in server:
            env, args = pairs_of(object_in(server, "env")), server.get("args", [])
            taken.append({"name": name, "command": server["command"], "args": args, "env": env})
            continue
        kind, headers = server.get("type", "http"), pairs_of(object_in(server, "headers"))
        if object_in(capabilities, "mcpCapabilities").get(kind) is True:
            taken.append({"type": kind, "name": name, "url": server.get("url"), "headers": headers})
        else:
            complain(f"the agent takes no MCP servers of type {kind}: {name} is left out")
    return taken


def pairs_of(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the values of an object as the protocol lists them."""
    return [{"name": key, "value": value} for key, value in values.items()]


def piece_in(update: dict[str, Any]) -> str:
    """Return the piece of the answer in an update, empty if it is another update."""
    if update.get("sessionUpdate") != "agent_message_chunk":
        return ""
    content = object_in(update, "content")
    if content.get("type") == "text":
        return text_in(content, "text")
    return f"[{text_in(content, 'uri') or text_in(content, 'type')}]"


def said_of(error: dict[str, Any]) -> str:
    """Return the sentence in an error of JSON-RPC."""
    data = error.get("data")
    detail = text_in({"details": data}, "details") or text_in(object_in(error, "data"), "details")
    return ": ".join(filter(None, (text_in(error, "message") or "failed", detail)))


class Memory:
    """The id of the agent's session, which is kept in the home of the agent for the next run."""

    def __init__(self, words: Sequence[str]) -> None:
        home, session = os.environ.get("HOME"), os.environ.get("CTX_SESSION", "default")
        self.path = os.path.join(home, f".ctx-acp-{session}.json") if home else ""
        self.words = list(words)

    def recall(self) -> str:
        """Return the id of the session that this program had before, empty if it had none."""
        import json

        try:
            kept = json.loads(read_file(self.path))
        except (OSError, ValueError, RecursionError):
            return ""
        if not isinstance(kept, dict) or kept.get("program") != self.words:
            return ""
        return text_in(kept, "session")

    def keep(self, session: str) -> None:
        """Keep the id of a session."""
        import json

        if not self.path:
            return
        data = json.dumps({"program": self.words, "session": session}).encode()
        try:
            with Opened(f"{self.path}~", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
                write_all(fd, data)
            os.replace(f"{self.path}~", self.path)
        except OSError as error:
            complain(f"{self.path}: {error.strerror}: the next run begins a new conversation")


class Program:
    """The program that is bridged, which leads a session of its own."""

    def __init__(self, words: Sequence[str]) -> None:
        from subprocess import PIPE, Popen

        self.process = Popen(words, stdin=PIPE, stdout=PIPE, bufsize=0, start_new_session=True)
        assert self.process.stdout is not None and self.process.stdin is not None
        self.says, self.hears = self.process.stdout.fileno(), self.process.stdin.fileno()

    def stop(self) -> int:
        """End it, if it has not ended, and return its exit status as of a shell.

        Whoever wants it dead sooner kills the run: what does not end by SIGTERM is not hurried.
        """
        from subprocess import TimeoutExpired

        try:
            self.process.wait(0.2)
        except TimeoutExpired:
            self.terminate()
        status = self.process.wait()
        return status if status >= 0 else 128 - status

    def terminate(self) -> None:
        """Send SIGTERM to it and to what it has started: some wait for another process, which is
        what ends, and pass on no signals."""
        import signal

        try:
            os.killpg(self.process.pid, signal.SIGTERM)
        except ProcessLookupError:
            return


class Turn:
    """A message, from the line that brings it to the line that ends it."""

    def __init__(self, message: dict[str, Any]) -> None:
        self.id = message["id"]
        text, provenance = text_in(message, "text"), text_in(message, "provenance")
        self.texts = [text]
        if provenance not in OWN_WORDS:  # whoever it is, it is not whom the agent works for
            sender = f"Message from {text_in(message, 'from')} (provenance: {provenance}):"
            self.texts.insert(0, sender)
        self.prompted = self.cancelled = self.spoken = self.apart = False


class Permits:
    """Says which tool calls are permitted: some kinds, and the rest by a way of its own."""

    def __init__(self, asking: Asking, way: str, kinds: Sequence[str]) -> None:
        self.asking = asking
        self.way = way
        self.kinds = kinds

    def permits(self, kind: str) -> bool:
        """Return whether a kind of tool calls is permitted without a question."""
        return kind in self.kinds or (self.way == POLICY and not self.kinds)


class Bridge(Peer):
    """The program with the other protocol; standard input and output are ctxfs."""

    def __init__(
        self,
        loop: Loop,
        program: Program,
        permits: Permits,
        servers: dict[str, dict[str, Any]],
        memory: Memory,
        mode: str = "",
    ) -> None:
        super().__init__(loop, program.says, program.hears)
        self.program = program
        self.permits = permits
        self.servers = servers
        self.memory = memory
        self.mode = mode
        self.session = ""
        #: the message at hand, the turn that goes on, and the message that ended last
        self.turn: Turn | None = None
        self.going: Turn | None = None
        self.last: object = None
        #: the kinds and titles of the tool calls of this turn
        self.calls: dict[str, dict[str, str]] = {}
        #: when the agent said something last
        self.heard = time.monotonic()
        self.input = Lines(0)
        self.closed = False
        self.status = OK
        loop.watch(0, self.hear)

    # with ctxfs

    def tell(self, **line: Any) -> None:
        """Write a line to ctxfs."""
        import json

        write_all(1, json.dumps(line).encode() + b"\n")

    def hear(self) -> None:
        """Take what ctxfs has written."""
        lines = self.input.read()
        if lines is None:
            self.loop.forget(0)
            self.closed = True
            self.loop.over = self.turn is None
            return
        for line in lines:
            message = parse_object(line)  # none: a daemon had begun it when it died; it comes again
            if message is not None and isinstance(message.get("id"), str):
                self.obey(message)

    def obey(self, message: dict[str, Any]) -> None:
        """Take one line: a message, or that the one at hand is cancelled; each may come twice."""
        turn, known = self.turn, (self.turn.id if self.turn else None, self.last)
        if message.get("type") == "message" and message["id"] not in known:
            self.turn = Turn(message)
            self.begin()
        elif message.get("type") == "cancel" and turn is not None and turn.id == message["id"]:
            if not turn.prompted:
                self.finish("message")
            elif not turn.cancelled:
                turn.cancelled = True
                self.notify("session/cancel", {"sessionId": self.session})
                self.permits.asking.withdraw()

    def finish(self, kind: str, text: str = "") -> None:
        """End the message at hand."""
        if self.turn is not None:
            self.tell(type=kind, id=self.turn.id, text=text)
            self.last, self.turn = self.turn.id, None
        if self.closed and not self.going:
            self.loop.over = True

    # with the agent

    def greet(self) -> None:
        """Begin the conversation."""
        client = {"name": "ctx", "title": "ctxfs", "version": "1"}
        can: dict[str, Any] = {"fs": {"readTextFile": False, "writeTextFile": False}}
        can["terminal"] = False
        if self.permits.way == ASK:
            can["elicitation"] = {"form": {}}
        params = {"protocolVersion": VERSION, "clientCapabilities": can}
        self.request("initialize", {**params, "clientInfo": client}, self.greeted)

    def greeted(self, result: dict[str, Any], error: dict[str, Any] | None) -> None:
        """Open a session in the version that the agent speaks."""
        self.demand("initialize", error)
        version = result.get("protocolVersion")
        if type(version) is not int or version != VERSION:
            said = f"it speaks version {version} of the protocol, not {VERSION}"
            raise Failure(f"{self.name}: {said}")
        capabilities = object_in(result, "agentCapabilities")
        sessions = object_in(capabilities, "sessionCapabilities")
        # how a session is continued, the best way first
        ways = ["session/resume"] * isinstance(sessions.get("resume"), dict)
        ways += [REPLAYING] * (capabilities.get("loadSession") is True)
        known = self.memory.recall()
        servers = taken_servers(self.servers, capabilities)
        self.open({"cwd": os.getcwd(), "mcpServers": servers}, ways if known else [], known)

    def open(self, params: dict[str, Any], ways: Sequence[str], known: str) -> None:
        """Open the session that there was before, by one of these ways, or a new one."""

        def resumed(result: dict[str, Any], error: dict[str, Any] | None) -> None:
            if error is None:
                if ways[0] == REPLAYING:
                    self.heard = time.monotonic()
                    self.settle(known)
                else:
                    self.opened(known)
                return
            complain(f"{self.name}: {ways[0]}: {said_of(error)}")
            self.open(params, ways[1:], known)

        def made(result: dict[str, Any], error: dict[str, Any] | None) -> None:
            self.demand("session/new", error)
            session = text_in(result, "sessionId")
            self.memory.keep(session)
            self.opened(session)

        if ways:
            self.request(ways[0], {"sessionId": known, **params}, resumed)
        else:
            self.request("session/new", params, made)

    def settle(self, session: str) -> None:
        """Open a session as soon as nothing more of it is replayed."""
        left = QUIET - (time.monotonic() - self.heard)
        if left > 0:
            self.loop.later(left, lambda: self.settle(session))
        else:
            self.opened(session)

    def opened(self, session: str) -> None:
        """Take messages from now on."""

        def set_mode(result: dict[str, Any], error: dict[str, Any] | None) -> None:
            self.demand("session/set_mode", error)
            self.session = session
            self.begin()

        if self.mode:
            self.request("session/set_mode", {"sessionId": session, "modeId": self.mode}, set_mode)
        else:
            set_mode({}, None)

    def demand(self, what: str, error: dict[str, Any] | None) -> None:
        """Fail if the agent cannot be spoken to."""
        if error is None:
            return
        hint = ""
        if error.get("code") == AUTH_REQUIRED:
            hint = "; put its key into env, or its login into its home"
        raise Failure(f"{self.name}: {what}: {said_of(error)}{hint}")

    @property
    def name(self) -> str:
        """The agent's program, for complaints."""
        return self.memory.words[0]

    def begin(self) -> None:
        """Begin the turn of the message at hand, if nothing else goes on."""
        turn = self.turn
        if turn is None or turn.prompted or self.going or not self.session:
            return
        turn.prompted, self.going = True, turn
        self.calls.clear()
        blocks = [{"type": "text", "text": text} for text in turn.texts]
        self.request("session/prompt", {"sessionId": self.session, "prompt": blocks}, self.ended)

    def ended(self, result: dict[str, Any], failed: dict[str, Any] | None) -> None:
        """Tell how the turn ended, and begin the next one."""
        stop, error = text_in(result, "stopReason"), "" if failed is None else said_of(failed)
        turn, self.going = self.going, None
        if turn is not None and turn is self.turn:
            if turn.cancelled or (stop == "end_turn" and not error):
                self.finish("message")
            else:
                reason = STOPS.get(stop, "the agent ended the turn")
                self.finish("error", error or f"{stop}: {reason}")
        self.begin()
        if self.closed and not self.going:
            self.loop.over = True

    def serve(self, method: str, params: dict[str, Any], ident: object) -> None:
        self.heard = time.monotonic()
        own = text_in(params, "sessionId") == self.session
        if method == "session/update":
            if own and self.going is not None:
                self.update(self.going, object_in(params, "update"))
        elif method == "session/request_permission":
            self.permit(params, ident) if own else self.decide(ident, CANCELLED)
        elif method == "elicitation/create" and self.permits.way == ASK:
            self.elicit(params, ident) if own else self.answer(ident, {"action": "cancel"})
        elif ident is not None:
            raise Refused(NO_METHOD, f"{method}: this client does not offer it")

    def update(self, turn: Turn, update: dict[str, Any]) -> None:
        """Pass on what the agent says and does; what it replays of old turns is not said now."""
        if turn is not self.turn:
            return  # ctxfs has given up that message
        piece = piece_in(update)
        if piece:
            if turn.apart and turn.spoken:
                piece = "\n\n" + piece
            turn.spoken, turn.apart = True, False
            for start in range(0, len(piece), PIECE):
                self.tell(type="delta", id=turn.id, text=piece[start : start + PIECE])
        if update.get("sessionUpdate") in ("tool_call", "tool_call_update"):
            turn.apart = True
            self.note(turn, update)

    def note(self, turn: Turn, call: dict[str, Any]) -> None:
        """Write a line about a tool call, which is no reply and is kept in `out`, if it is news."""
        ident = text_in(call, "toolCallId")[:TITLE]
        before = self.calls.get(ident, {})
        now = {**before}
        for key in ("title", "kind", "status"):
            if text_in(call, key):
                now[key] = text_in(call, key)[:TITLE]
        if now != before:
            self.calls[ident] = now
            if len(self.calls) > CALLS_MAX:
                del self.calls[next(iter(self.calls))]
            self.tell(type="tool_call", message=turn.id, call=ident, **now)

    def decide(self, ident: object, outcome: dict[str, Any]) -> None:
        """Answer a permission request."""
        self.answer(ident, {"outcome": outcome})

    def permit(self, params: dict[str, Any], ident: object) -> None:
        """Answer a permission request: at once by the kind of the tool call, or as people do."""
        if self.going is None or self.going.cancelled or self.going is not self.turn:
            self.decide(ident, CANCELLED)
            return
        call = object_in(params, "toolCall")
        known = self.calls.get(text_in(call, "toolCallId")[:TITLE], {})
        kind = text_in(call, "kind") or known.get("kind", "other")
        title = (text_in(call, "title") or known.get("title", ""))[:TITLE]
        options = objects_in(params, "options")
        allowed = self.permits.permits(kind)
        if not allowed and self.permits.way == ASK and options:
            words = words_for([text_in(each, "optionId") for each in options])
            labels = [(word, text_in(options[place], "name")) for word, place in words.items()]
            files = fields_of(f"{kind}: {title}", detail_of(call.get("rawInput", call)), labels)

            def over(end: End) -> None:
                self.decide(ident, selected(options, words.get(end.answer)))

            if self.permits.asking.ask(files, over):
                return
        outcome = choose(options, allowed)
        if outcome == CANCELLED or not allowed:
            complain(f"not permitted: {kind}: {title}")
        self.decide(ident, outcome)

    def elicit(self, params: dict[str, Any], ident: object) -> None:
        """Have people fill in a form."""
        form = object_in(params, "requestedSchema")
        files = fields_of(text_in(params, "message"), detail_of(form), form=form)

        def over(end: End) -> None:
            content = parse_object(end.text.encode())
            accepted = {"action": "accept", "content": content}
            self.answer(ident, accepted if content is not None else {"action": "cancel"})

        if not form or not self.permits.asking.ask(files, over):
            self.answer(ident, {"action": "cancel"})

    def junk(self, line: bytes, code: int, message: str) -> None:
        write_all(1, line + b"\n")  # as any other output

    def end(self) -> None:
        """The agent says no more: it has ended, or is to."""
        self.permits.asking.withdraw()
        self.status = self.program.stop()
        if self.turn is not None:
            self.status = self.status or FAILED
            self.finish("error", f"{self.name} ended")
        self.loop.over = True


def own_servers(root: Root) -> dict[str, dict[str, Any]]:
    """Return the MCP server with the tools of the agent that this runs in, if it runs in one."""
    names = ("CTX_ROOT", "CTX_AGENT", "CTX_SELF")
    env = {name: os.environ[name] for name in names if name in os.environ}
    if "CTX_AGENT" not in env or "mcp" not in SUBJECTS:
        return {}
    return {"ctx": {"command": root.join("bin/ctx"), "args": ["mcp"], "env": env}}


def servers_of(path: str) -> dict[str, dict[str, Any]]:
    """Return the MCP servers in a file of the form that their clients share."""
    try:
        found = json_object(read_file(path), path)
    except OSError as error:
        raise Misuse(f"{path}: {error.strerror}") from None
    servers = object_in(found, "mcpServers")
    if not servers:
        raise Misuse(f'{path}: write {{"mcpServers": {{"NAME": {{"command": ...}}}}}}')
    for name, server in servers.items():
        if not isinstance(server, dict) or not isinstance(
            server.get("command", server.get("url")), str
        ):
            raise Misuse(f"{path}: {name}: write its command, or its url")
    return servers


@command(
    "bridge",
    operand("protocol", "PROTOCOL", "acp", choices=("acp",)),
    option(
        "--permit",
        "WAY",
        "what is done about tool calls: policy (default), which permits the kinds of --allow or "
        "all; ask people about others; or deny others",
        choices=(POLICY, ASK, DENY),
    ),
    option("--allow", "KIND...", "permit tool calls of this kind (repeatable)", choices=KINDS),
    option("--session-mode", "ID", "the mode of its session, as the program calls it"),
    option("--mcp", "FILE", 'MCP servers for the program, as {"mcpServers": {...}}'),
    flag("--bare", "do not give it the tools of the agent that it is in"),
    rest="program",
)
def do_bridge(root: Root, args: Arguments) -> int:
    """Be a resident agent whose program speaks another protocol.

    Runs inside an agent of mode resident, as its program: ctx spawn NAME --mode resident -- ctx
    bridge acp -- PROGRAM. acp is the Agent Client Protocol, version 1.
    """
    import signal

    if not args.program:
        raise Misuse("no program: give one after --")
    servers = own_servers(root) if not args.bare else {}
    servers.update(servers_of(args.mcp) if args.mcp else {})
    write_all(1, b'{"type":"hello","takes":["cancel"]}\n')
    program = None
    signal.signal(signal.SIGTERM, terminate)
    try:
        program = Program(args.program)
        loop = Loop()
        permits = Permits(Asking(loop, root, "acp"), args.permit or POLICY, args.allow)
        memory = Memory(args.program)
        bridge = Bridge(loop, program, permits, servers, memory, args.session_mode or "")
        bridge.greet()
        loop.run()
        return bridge.status
    except Terminated:
        return 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if program is not None:
            program.terminate()
            program.process.wait()
