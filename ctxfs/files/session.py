"""Sessions and the parent's side of delegations, as rows (ctxfs(5), Sessions)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ctxfs.files.documents import open_real
from ctxfs.files.pack import pack
from ctxfs.handles import HistoryHandle
from ctxfs.nodes import Call, Handle, Node
from ctxfs.rows import Kind, Plane, Render, Row, RowNode, Table
from runtime.caller import OPERATORS, Caller, Role
from runtime.change import Change
from runtime.errors import DeniedError, MalformedError
from runtime.lifecycle import Status
from runtime.model import Agent, Session
from runtime.names import dump_json, parse_json_object, quote, timestamp

if TYPE_CHECKING:
    from ctxfs.filesystem import Filesystem

_READERS: Final = OPERATORS | Role.SELF | Role.SESSION_READER
#: of a message, whatever its writer says
_GIVEN: Final = ("id", "ts", "from")
_ROLES: Final = ("user", "assistant", "system")
#: documents that a child's directory and its parent's channel show as one
DOCUMENTS: Final = ("handoff.md", "input.jsonl", "result.md", "refs.jsonl", "artifact")
#: what an agent gave back, shown in its session once the agent is reset
ARCHIVED: Final = ("result.md", "refs.jsonl", "artifact")


def _path(name: str) -> Callable[[Filesystem, Session], Path]:
    return lambda fs, session: fs.runtime.agents.sessions.directory(session) / name


def _file_size(name: str) -> Callable[[Filesystem, Any], int]:
    def size(fs: Filesystem, session: Session) -> int:
        try:
            return _path(name)(fs, session).stat().st_size
        except FileNotFoundError:
            return 0

    return size


def _file_time(name: str) -> Callable[[Filesystem, Any], float]:
    def mtime(fs: Filesystem, session: Session) -> float:
        try:
            return _path(name)(fs, session).stat().st_mtime
        except FileNotFoundError:
            return session.created

    return mtime


def _read_file(name: str) -> Render:
    def render(fs: Filesystem, session: Session, caller: Caller) -> bytes:
        try:
            return _path(name)(fs, session).read_bytes()
        except FileNotFoundError:
            return b""

    return render


def _open_events(fs: Filesystem, node: RowNode, call: Call, flags: int) -> Handle:
    path = _path("events.jsonl")(fs, node.obj)
    return HistoryHandle(fs, node, call.caller, path, flags=flags, append=None, limit=0)


def _open_messages(fs: Filesystem, node: RowNode, call: Call, flags: int) -> Handle:
    session: Session = node.obj

    def append(lines: list[str]) -> None:
        agent = fs.runtime.agents.registry.get(session.incarnation)
        if agent is None or agent.index != call.caller.agent:
            raise DeniedError("only the agent of this session may append messages")
        change = Change()
        for line in lines:
            message = parse_json_object(line)
            role = message.get("role")
            if role not in _ROLES:
                raise MalformedError(f"unknown role {quote(str(role))}; use {', '.join(_ROLES)}")
            if "content" not in message:
                raise MalformedError(f"{quote(line)} has no content")
            kept = {key: value for key, value in message.items() if key not in _GIVEN}
            change.message(
                session.index, **{"from": f"agent:{agent.name}", "run": agent.run, **kept}
            )
        fs.runtime.agents.journal.commit(change)

    path = _path("messages.jsonl")(fs, session)
    limit = fs.runtime.config.frame_max
    return HistoryHandle(fs, node, call.caller, path, flags=flags, append=append, limit=limit)


def _open_memory(fs: Filesystem, node: RowNode, call: Call, flags: int) -> Handle:
    session: Session = node.obj
    path = _path("context/memory.md")(fs, session)
    return open_real(
        fs, node, call, flags, path, lambda: fs.session_changed(session.index, ("memory.md",))
    )


def _time(attribute: str) -> Render:
    return lambda fs, session, caller: timestamp(getattr(session, attribute)) + "\n"


def _state(fs: Filesystem, session: Session, caller: Caller) -> str:
    return session.state + "\n"


def _cwd(fs: Filesystem, session: Session, caller: Caller) -> str:
    agent = fs.runtime.agents.registry.get(session.incarnation)
    return fs.working_directory(agent) + "\n" if agent is not None else ""


def _meta(fs: Filesystem, session: Session, caller: Caller) -> str:
    agent = fs.runtime.agents.registry.recall(session.incarnation)
    facts = {"agent": session.agent, "session": session.name}
    if agent is not None:
        facts |= {"incarnation": agent.incarnation, "parent": agent.lineage}
    return dump_json(facts) + "\n"


def _pack(fs: Filesystem, session: Session, caller: Caller) -> str:
    """Results, reference summaries and artifact paths of the children, never their messages."""
    return pack(fs.runtime.agents, session, channel_status)


def _channels(fs: Filesystem, session: Session, call: Call) -> Iterator[str]:
    for name, _ in fs.runtime.agents.sessions.channels(session.index):
        yield name


def _find_channel(fs: Filesystem, session: Session, call: Call, name: str) -> Node | None:
    index = fs.runtime.agents.sessions.find_channel(session.index, name)
    return fs.channel(index) if index is not None else None


def _history(name: str, doc: str, **more: Any) -> Row:
    return Row(name=name, doc=doc, read=_READERS, size=_file_size(name), mtime=_file_time(name),
               **more)


ROWS: Final = (
    Row(name="", within="session", kind=Kind.DIRECTORY, mode=0o755, read=_READERS),
    _history("messages.jsonl", "the conversation: {id, ts, role, from, run, content} per line; "
             "only appended to", mode=0o644, write=Role.SELF, opener=_open_messages),
    _history("events.jsonl", "what happened: {id, ts, type, agent, ...} per line; "
             "written by the runtime only", polled=True, opener=_open_events),
    _history("latest.md", "the last reply", render=_read_file("latest.md")),
    Row(name="state", doc="active done error cancelled", read=_READERS, render=_state),
    Row(name="cwd", doc="working directory", read=_READERS, render=_cwd, volatile=True),
    Row(name="created_at", doc="RFC 3339 time", read=_READERS, render=_time("created")),
    Row(name="updated_at", doc="RFC 3339 time of the last event", read=_READERS,
        render=_time("updated"), depends=("updated",)),
    Row(name="meta.json", doc="the agent that the session belongs to", read=_READERS, render=_meta),
    Row(name="context", kind=Kind.DIRECTORY, mode=0o755, read=_READERS,
        doc="the working set, rebuildable"),
    Row(name="memory.md", within="context", mode=0o644, read=_READERS, write=Role.SELF,
        document=True, opener=_open_memory, size=_file_size("context/memory.md"),
        mtime=_file_time("context/memory.md"), doc="the agent's own notes"),
    Row(name="episode", within="context", kind=Kind.DIRECTORY, mode=0o755, read=_READERS,
        write=Role.SELF, doc="the agent's episodes, one file per work item"),
    Row(name="pack.md", within="context", read=_READERS, render=_pack, generated=True,
        doc="results, references and artifact paths of its children"),
    Row(name="child", within="context", kind=Kind.DIRECTORY, mode=0o755, read=_READERS,
        entries=_channels, find=_find_channel, doc="the parent's side of each delegation"),
)

TABLE: Final = Table(Plane.SESSION, ROWS)


def channel_status(child: Agent) -> str:
    """pending active done error cancelled."""
    if child.status is Status.NEW:
        return "pending"
    if child.status is not Status.DEAD:
        return "active"
    return "cancelled" if child.outcome == "interrupted" else child.outcome


def _channel_session(fs: Filesystem, child: Agent, caller: Caller) -> str:
    session = fs.runtime.agents.sessions.get(child.session)
    return (session.name if session is not None else "default") + "\n"


CHANNEL_ROWS: Final = (
    Row(name="", within="channel", kind=Kind.DIRECTORY, mode=0o755),
    Row(name="agent", doc="name of the child",
        render=lambda fs, child, caller: child.name + "\n"),
    Row(name="session", doc="the child's session", render=_channel_session),
    Row(name="status", doc="pending active done error cancelled",
        render=lambda fs, child, caller: channel_status(child) + "\n",
        depends=("outcome", "status")),
)

CHANNEL_TABLE: Final = Table(Plane.CHANNEL, CHANNEL_ROWS)
