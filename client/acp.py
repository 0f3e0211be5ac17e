"""The command acp: an agent of ctxfs as an agent in an editor, by the Agent Client Protocol.

It speaks as an operator, outside of the daemon, which so parses no protocol of others. What
differs between versions is a table by number, chosen once, when both sides have agreed.
"""

from __future__ import annotations

import os

from client.agents import Line, Value, create_own
from client.author import author_line
from client.control import Terminated, end, for_each, terminate
from client.declaring import Arguments, command, operand, option
from client.events import last_events, session_of
from client.exits import Failure, Misuse
from client.files import first_line
from client.following import open_wait
from client.inbox import Inbox
from client.jsonrpc import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    NO_METHOD,
    Peer,
    Refused,
    clean,
    object_in,
    objects_in,
    text_in,
)
from client.links import LOST_MAX, Link
from client.loop import Loop, parse_object
from client.recipes import Recipe, agent_lines, check_lacks, check_place, find, lacks, one_field
from client.root import Root, agent, label
from client.sockets import MESSAGE_CODES, connect, connect_started, refusal
from client.spawn import dispose
from client.types import Any, Callable
from client.words import AGENT_FILES

#: what answers a request: its params, and its id
Method = Callable[["Editor", dict[str, Any], object], None]


#: of the protocol
VERSION = 1
#: the protocol's code for a thing that is not there
NOT_FOUND = -32002
#: in which words a bridge says that a model stopped (client/bridge.py), which the protocol has too
STOPS = ("refusal", "max_tokens", "max_turn_requests")
#: errors that the cancel of a message may get, which has ended or was refused
CANCEL_CODES = ("ESRCH", "ENOENT")
#: what is replayed of a conversation at a time
REPLAYED = 1 << 20


def text_of_prompt(blocks: list[dict[str, Any]]) -> str:
    """Return the text of a prompt: its parts, and where those are that are only named."""
    parts = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            parts.append(text_in(block, "text"))
        elif kind == "resource_link":
            parts.append(text_in(block, "uri"))
        elif kind == "resource" and isinstance(block.get("resource"), dict):
            resource = block["resource"]
            if not isinstance(resource.get("text"), str):
                raise Refused(INVALID_PARAMS, f"{text_in(resource, 'uri')}: only text is taken")
            parts.append(f"{text_in(resource, 'uri')}:\n{text_in(resource, 'text')}\n")
        else:
            raise Refused(INVALID_PARAMS, f"a prompt has text and resources, not {kind}")
    text = "".join(parts)
    if not text.strip():
        raise Refused(INVALID_PARAMS, "the prompt is empty")
    return text


class Again(Link):
    """A connection to the agent of a session, made again while that may live."""

    def __init__(self, session: Session) -> None:
        root, name = session.editor.root, session.name
        super().__init__(session.editor.loop, lambda: connect(root, name))
        self.session = session
        self.editor = session.editor
        self.name = name

    def failed(self, error: Failure | OSError, seconds: float) -> None:
        status = first_line(self.editor.root.join(agent(self.name, "status")))
        if status == "dead" or seconds >= LOST_MAX:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Nobody answers any more."""
        self.close()


class Prompt(Again):
    """A message to the agent, and its reply on the way to the editor."""

    def __init__(self, session: Session, ident: object, text: str) -> None:
        super().__init__(session)
        self.ident = ident
        self.text = text
        self.message = os.urandom(8).hex()
        #: what of the reply was passed on, and how much of it this connection has told
        self.shown, self.told = "", 0
        self.cancelled = False

    def begin(self) -> None:
        self.told = 0
        self.ask(op="send", id=self.message, input=self.text)
        if self.cancelled:
            self.cancel()

    def cancel(self) -> None:
        """Have the message ended."""
        self.cancelled = True
        self.ask(op="cancel", id=self.message)

    def heard(self, frame: dict[str, Any]) -> None:
        kind, text = frame.get("type"), text_in(frame, "text")
        if kind == "delta":
            fresh = text[max(0, len(self.shown) - self.told) :]
            self.told += len(text)
            self.show(fresh)
        elif kind == "message":
            if text.startswith(self.shown):
                self.show(text[len(self.shown) :])
            elif self.shown.strip() != text.strip():
                self.show("\n\n" + text)
        elif kind == "done":
            self.done(str(frame.get("status")), text_in(frame, "reason"))
        elif kind == "error" and not (self.cancelled and frame.get("code") in CANCEL_CODES):
            self.give_up(refusal(frame, MESSAGE_CODES))

    def show(self, text: str) -> None:
        """Pass on a piece of the reply."""
        if text:
            self.shown += text
            self.session.say("agent_message_chunk", text)

    def done(self, status: str, reason: str) -> None:
        """Tell the editor how the turn ended."""
        word = reason.partition(":")[0]
        if status == "failed" and word not in STOPS:
            self.give_up(Failure(reason or status))
            return
        stop = {"processed": "end_turn", "failed": word}.get(status, "cancelled")
        self.leave()
        self.editor.answer(self.ident, {"stopReason": stop})

    def give_up(self, error: Exception) -> None:
        self.leave()
        if self.cancelled:  # which is all that the editor wants to hear
            self.editor.answer(self.ident, {"stopReason": "cancelled"})
            return
        self.editor.refuse(self.ident, Refused(INTERNAL_ERROR, str(error)))

    def leave(self) -> None:
        """The turn has ended."""
        self.close()
        self.session.prompts.remove(self)


class Watch(Again):
    """The events of an agent's session: its tasks and children are tool calls in the editor."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        last = last_events(self.editor.root, agent(self.name, "session"))
        self.after = text_in(last[0], "id") if last else ""
        #: the ids of the calls that go on, by task
        self.calls: dict[str, str] = {}

    def begin(self) -> None:
        self.ask(op="resume", **({"after": self.after} if self.after else {}))
        self.session.inbox.look()

    def heard(self, frame: dict[str, Any]) -> None:
        kind, task = frame.get("type"), text_in(frame, "task")
        if kind == "error":  # whoever may send messages need not be allowed to read events
            self.close()
            return
        self.after = text_in(frame, "id") or self.after
        if kind in ("ask.open", "ask.to", "ask.end"):
            self.session.inbox.look()
        elif kind == "task.start" and task:
            self.calls[task] = f"{task}.{self.after}"
            self.session.update(
                "tool_call",
                toolCallId=self.calls[task],
                status="in_progress",
                **self.describe(task),
            )
        elif kind == "task.end" and task in self.calls:
            status = "completed" if frame.get("status") == "completed" else "failed"
            text = self.field(task, "preview") or self.field(task, "exit")
            content = [{"type": "content", "content": {"type": "text", "text": clean(text)}}]
            self.session.update(
                "tool_call_update",
                toolCallId=self.calls.pop(task),
                status=status,
                content=content if text else [],
            )

    def describe(self, task: str) -> dict[str, Any]:
        """Return title and kind of a task, as of a tool call."""
        title = self.field(task, "title")
        if self.field(task, "kind") == "child_agent_task":
            return {"title": f"{task}: {title}" if title else task, "kind": "other"}
        command = self.field(task, "cmd").strip().partition("\n")[0]
        return {"title": clean(title or command or task), "kind": "execute"}

    def field(self, task: str, file: str) -> str:
        """Return a file of a task, empty if it is gone."""
        try:
            return self.editor.root.field(self.name, f"task/{task}/{file}")
        except Failure:
            return ""


class Session:
    """A conversation of the editor with an agent."""

    def __init__(self, editor: Editor, name: str, ident: str) -> None:
        self.editor = editor
        self.name = name
        self.ident = ident
        self.prompts: list[Prompt] = []
        self.inbox = Inbox(editor, editor.root, name, ident, elicits=editor.elicits)
        self.watch = Watch(self)
        try:
            self.watch.open()
        except Failure:  # the first prompt says why
            self.watch.close()

    def update(self, kind: str, /, **fields: Any) -> None:
        """Tell the editor something."""
        update = {"sessionUpdate": kind, **fields}
        self.editor.notify("session/update", {"sessionId": self.ident, "update": update})

    def say(self, kind: str, text: str) -> None:
        """Tell the editor a text."""
        self.update(kind, content={"type": "text", "text": text})

    def replay(self) -> None:
        """Tell the editor what was said so far."""
        root = self.editor.root
        path = agent(self.name, "session/messages.jsonl")
        with open(root.open(path), "rb") as lines:
            for line in lines:
                said = parse_object(line) or {}
                user = {"user": True, "assistant": False}.get(str(said.get("role")))
                if user is not None and text_in(said, "content"):
                    kind = "user_message_chunk" if user else "agent_message_chunk"
                    self.say(kind, text_in(said, "content"))
                    self.editor.loop.drain(REPLAYED)

    def cancel(self) -> None:
        """Have all messages that go on ended."""
        for prompt in self.prompts:
            prompt.cancel()


class Source:
    """Where the agents of sessions come from: here, one that is there already."""

    #: whether a session can be loaded by a later process
    lasting = True

    def __init__(self, root: Root, name: str) -> None:
        self.root = root
        self.name = name

    def current(self) -> str:
        """Return the id of the agent's session."""
        return label(session_of(self.root, agent(self.name))) or self.name

    def open(self, cwd: str) -> tuple[str, str]:
        """Return an agent for a new session, and the id of the session."""
        connect(self.root, self.name).close()  # or tell now why not
        return self.name, self.current()

    def find(self, ident: str) -> str:
        """Return the agent of an earlier session."""
        connect(self.root, self.name).close()
        if ident != self.current():
            message = f"the session of {self.name} is {self.current()}, not {ident}"
            raise Refused(NOT_FOUND, message)
        return self.name

    def close(self, name: str) -> None:
        """A session of this agent has ended."""

    def leave(self) -> None:
        """All sessions have ended."""


class Recipes(Source):
    """Here: a new agent for each session, which ends with it."""

    lasting = False

    def __init__(self, root: Root, name: str, loop: Loop) -> None:
        super().__init__(root, name)
        self.recipe = find(name)
        self.loop = loop
        #: agents that are there, with their windows, and those of them that are being stopped
        self.made: dict[str, int] = {}
        self.ending: dict[int, str] = {}

    def open(self, cwd: str) -> tuple[str, str]:
        if not os.path.isabs(cwd) or not os.path.isdir(cwd):
            raise Refused(INVALID_PARAMS, f"cwd: {cwd}: not an absolute path of a directory")
        name = f"{self.recipe.name}-{os.urandom(4).hex()}"
        owner = agent(name)
        files = recipe_files(self.root, self.recipe, name, cwd)
        files = [*files, *author_line(files), ("ctl", b"start\n")]
        self.made[name] = create_own(self.root, owner, files)
        try:
            connect_started(self.root, name).close()
        except Failure:
            reason = self.root.field(name, "reason")
            self.close(name)
            if reason:
                raise Failure(f"{self.name}: {reason}") from None
            raise
        return name, name

    def find(self, ident: str) -> str:
        raise Refused(NOT_FOUND, f"{ident} has ended with its session")

    def close(self, name: str) -> None:
        end(self.root, agent(name), "stop")
        fd = open_wait(self.root, agent(name))
        self.ending[fd] = name
        self.loop.watch(fd, lambda: self.remove(fd))

    def remove(self, fd: int) -> None:
        """Remove an agent that has ended."""
        self.loop.forget(fd)
        os.close(fd)
        name = self.ending.pop(fd)
        for_each([agent(name)], self.root.remove)
        window = self.made.pop(name)
        if window >= 0:
            os.close(window)

    def leave(self) -> None:
        for name in self.made:
            if name not in self.ending.values():
                end(self.root, agent(name), "stop")
        for name in self.made:
            dispose(self.root, agent(name))


def recipe_files(root: Root, recipe: Recipe, name: str, cwd: str) -> list[tuple[str, Value]]:
    """Return the control files of an agent of a recipe that works in `cwd`.

    That is all that it may change. Nobody is there to be asked for a network, so it gets the one
    that the recipe finds here.
    """
    network, missing = lacks(root, recipe)
    check_lacks(recipe, missing)
    check_place(recipe, cwd, "open the directory of a project")
    lines = agent_lines(recipe, name, network=network, cwd=cwd)
    lines.pop("workspace", None)
    lines.pop("homedir", None)  # it would be that of a name which nobody uses again
    here = one_field(os.path.realpath(cwd), "cwd")
    mounts = [line for line in lines.get("mount", ()) if line.text.split("\t")[:1] != [here]]
    for line in mounts:
        if line.text.split("\t")[2:3] == ["rw"]:
            raise Misuse(f"{line.where}: only the editor's directory may be rw")
    lines["mount"] = [*mounts, Line(f"{here}\t{here}\trw\t-", "the editor's cwd")]
    lines["cwd"] = [Line(here, "the editor's cwd")]
    lines.setdefault("mode", [Line("turn", "the default of ctx acp")])
    return [(file, lines[file]) for file in sorted(lines, key=AGENT_FILES.index)]


class Editor(Peer):
    """The program that this one is an agent of, on standard input and output."""

    def __init__(self, loop: Loop, root: Root, source: Source) -> None:
        super().__init__(loop, 0, 1)
        self.root = root
        self.source = source
        self.sessions: dict[str, Session] = {}
        self.begun = False  # a version was agreed on
        self.elicits = False  # it shows forms

    def end(self) -> None:
        if not self.source.lasting:  # the conversations end, and their agents
            for session in self.sessions.values():
                session.cancel()
        super().end()

    def is_asked(self) -> bool:
        return any(session.prompts for session in self.sessions.values())

    def serve(self, method: str, params: dict[str, Any], ident: object) -> None:
        if ident is None and method != "session/cancel":
            return  # nobody would hear what came of it
        if method == "initialize":
            self.initialize(params, ident)
        elif self.begun and method in METHODS:
            METHODS[method](self, params, ident)
        else:
            hint = "" if self.begun else "; begin with initialize"
            raise Refused(NO_METHOD, f"{method}: this agent does not offer it{hint}")

    def initialize(self, params: dict[str, Any], ident: object) -> None:
        """Offer the version that is known here, whatever the editor wants."""
        self.begun = True
        forms = object_in(object_in(params, "clientCapabilities"), "elicitation").get("form")
        self.elicits = isinstance(forms, dict)
        lasting: dict[str, Any] = {"resume": {}} if self.source.lasting else {}
        self.answer(ident, {
            "protocolVersion": VERSION,
            "agentCapabilities": {
                "loadSession": self.source.lasting,
                "promptCapabilities": {"image": False, "audio": False, "embeddedContext": True},
                "mcpCapabilities": {"http": False, "sse": False},
                "sessionCapabilities": {"close": {}, **lasting},
            },
            "agentInfo": {"name": "ctx", "title": self.source.name, "version": "1"},
            "authMethods": [],
        })  # fmt: skip

    def session(self, params: dict[str, Any]) -> Session:
        """Return the session that a request is about."""
        ident = text_in(params, "sessionId")
        if ident not in self.sessions:
            raise Refused(NOT_FOUND, f"no session {ident} is open")
        return self.sessions[ident]

    def new(self, params: dict[str, Any], ident: object) -> None:
        """Answer session/new."""
        name, session = self.source.open(text_in(params, "cwd"))
        if session not in self.sessions:
            self.sessions[session] = Session(self, name, session)
        self.answer(ident, {"sessionId": session})

    def resume(self, params: dict[str, Any], ident: object) -> None:
        """Answer session/resume."""
        self.known(params)
        self.answer(ident, {})

    def load(self, params: dict[str, Any], ident: object) -> None:
        """Answer session/load: as session/resume, after all that was said."""
        self.known(params).replay()
        self.answer(ident, {})

    def known(self, params: dict[str, Any]) -> Session:
        """Return the session that a request is about, which may be one of an earlier process."""
        session = text_in(params, "sessionId")
        if session not in self.sessions:
            self.sessions[session] = Session(self, self.source.find(session), session)
        return self.sessions[session]

    def prompt(self, params: dict[str, Any], ident: object) -> None:
        """Send a message; the answer comes when it has ended."""
        session = self.session(params)
        prompt = Prompt(session, ident, text_of_prompt(objects_in(params, "prompt")))
        prompt.open()
        session.prompts.append(prompt)

    def cancel(self, params: dict[str, Any], ident: object) -> None:
        """Have all messages of a session ended."""
        self.session(params).cancel()
        if ident is not None:  # it is a notification, but whoever asks is answered
            self.answer(ident, {})

    def close(self, params: dict[str, Any], ident: object) -> None:
        """Answer session/close."""
        session = self.session(params)
        del self.sessions[session.ident]
        session.cancel()
        session.watch.close()
        self.source.close(session.name)
        self.answer(ident, {})


METHODS: dict[str, Method] = {
    "session/new": Editor.new,
    "session/load": Editor.load,
    "session/resume": Editor.resume,
    "session/prompt": Editor.prompt,
    "session/cancel": Editor.cancel,
    "session/close": Editor.close,
}


@command(
    "acp",
    operand("name", "[NAME]", "the agent"),
    option(
        "--agent", "RECIPE", "instead: make an agent for each conversation; a directory, or a name"
    ),
)
def do_acp(root: Root, args: Arguments) -> None:
    """Be an agent in an editor.

    Speaks the Agent Client Protocol on standard input and output: an editor starts it. An agent
    made by a recipe may change only the directory that the editor names, and ends with its
    conversation.
    """
    import signal

    if bool(args.name) is bool(args.agent):
        raise Misuse("name an agent that is there, or a recipe with --agent")
    loop = Loop()
    source = Recipes(root, args.agent, loop) if args.agent else Source(root, args.name)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, terminate)
    try:
        Editor(loop, root, source)
        loop.run()
        loop.drain()
    except Terminated:
        return
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        source.leave()
