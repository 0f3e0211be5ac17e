"""Sessions and the parent's side of delegations, as rows (ctxfs(5), Sessions)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ctxfs.files import agent as agent_files
from ctxfs.files import fields
from ctxfs.files.folders import EPISODE
from ctxfs.files.pack import pack
from ctxfs.tree.base import Base
from ctxfs.tree.layouts import Layout
from ctxfs.tree.nodes import Call, Node
from ctxfs.tree.rownodes import RowNode
from ctxfs.tree.rows import Directory, Document, History, Row, Shown
from runtime.agents.messages import OWN
from runtime.agents.now import now
from runtime.authority.disk import Share
from runtime.authority.guard import Guard
from runtime.caller import HISTORIANS, Caller, Role
from runtime.cell.cell import working_directory
from runtime.errors import MalformedError
from runtime.ids import AgentIndex, SessionIndex
from runtime.records.change import Change
from runtime.records.lifecycle import Status
from runtime.records.model import Agent, Session
from runtime.texts.names import dump_json, parse_json_object, quote

_WRITING: Final[Guard[Session]] = Guard(who=Role.SELF)
#: of a message, whatever its writer says
_GIVEN: Final = ("id", "ts", "from", "provenance", "run")
_ROLES: Final = ("user", "assistant", "system")

def _path(name: str) -> Callable[[Base, Session], Path]:
    return lambda base, session: base.runtime.agents.sessions.directory(session) / name


def _held(base: Base, session: Session) -> bytes | None:
    return base.runtime.agents.sessions.held(session)


def _share(base: Base, session: Session) -> Share:
    return base.runtime.agents.disk.share(session)


def _append(base: Base, session: Session, lines: list[str]) -> None:
    """The session's own agent adds messages to the conversation."""
    agent = base.runtime.agents.registry.get(session.agent_index)
    assert agent is not None  # it has been let write
    change = Change()
    for line in lines:
        message = parse_json_object(line)
        role = message.get("role")
        if role not in _ROLES:
            raise MalformedError(f"unknown role {quote(str(role))}; use {', '.join(_ROLES)}")
        if "content" not in message:
            raise MalformedError(f"{quote(line)} has no content")
        kept = {key: value for key, value in message.items() if key not in _GIVEN}
        given = {"from": f"agent:{agent.name}", "provenance": OWN, "run": agent.run.id}
        change.say(session.index, **given, **kept)
    base.runtime.agents.journal.commit(change)


def _memory_written(base: Base, session: Session) -> None:
    base.runtime.agents.journal.tell_session(session.index, ("memory.md",))


def _cwd(base: Base, session: Session, caller: Caller) -> str:
    agent = base.runtime.agents.registry.get(session.agent_index)
    return working_directory(base.runtime.agents, agent) + "\n" if agent is not None else ""


def _meta(base: Base, session: Session, caller: Caller) -> str:
    agent = base.runtime.agents.registry.recall(session.agent_index)
    facts = {"agent": session.agent, "session": session.name}
    if agent is not None:
        facts |= {"incarnation": agent.incarnation, "parent": agent.lineage}
    return dump_json(facts) + "\n"


def _pack(base: Base, session: Session, caller: Caller) -> str:
    """Results, reference summaries and artifact paths of the children, never their messages."""
    return pack(base.runtime.agents, session, channel_status)


def _now(base: Base, session: Session, caller: Caller) -> str:
    """Where its agent is, by the records of this moment."""
    return now(base.runtime.agents, session)


def _channels(base: Base, session: Session, call: Call) -> Iterator[str]:
    for name, _ in base.runtime.agents.sessions.channels(session.index):
        yield name


def _find_channel(base: Base, session: Session, call: Call, name: str) -> Node | None:
    index = base.runtime.agents.sessions.find_channel(session.index, name)
    child = base.runtime.agents.registry.recall(AgentIndex(index)) if index is not None else None
    return RowNode(base, CHANNEL, child.index, child) if child is not None else None


def _archive(base: Base, session: Session) -> Agent | None:
    """The agent that was reset since, whose results its session shows."""
    agent = base.runtime.agents.registry.recall(session.agent_index)
    return agent if agent is not None and agent.archived else None


def _archived(base: Base, session: Session, call: Call) -> Iterator[str]:
    if _archive(base, session) is not None:
        yield from agent_files.RESULTS


def _find_archived(base: Base, session: Session, call: Call, name: str) -> Node | None:
    reset = _archive(base, session) if name in agent_files.RESULTS else None
    return agent_files.shown_document(base, reset, name) if reset is not None else None


def _documents(base: Base, child: Agent, call: Call) -> Iterator[str]:
    yield from agent_files.DOCUMENTS


def _find_document(base: Base, child: Agent, call: Call, name: str) -> Node | None:
    return agent_files.shown_document(base, child, name) if name in agent_files.DOCUMENTS else None


ROWS: Final[tuple[Row[Session], ...]] = (
    Directory(name="", top=True, read=HISTORIANS,
        entries=_archived, find=_find_archived),
    History(name="messages.jsonl", mode=0o644, read=HISTORIANS, guard=_WRITING,
        append=_append, real=_path("messages.jsonl"), share=_share,
        doc="the conversation: {id, ts, role, from, provenance, run, content} per line; only "
        "appended to"),
    History(name="events.jsonl", read=HISTORIANS, polled=True, real=_path("events.jsonl"),
        held=_held, share=_share, size=lambda base, session: session.held,
        changed=lambda base, session: None if session.held is None else session.updated,
        doc="what happened: {id, ts, type, agent, ...} per line; written by the "
        "runtime only"),
    Shown(name="latest.md", read=HISTORIANS, real=_path("latest.md"), doc="the last reply"),
    Shown(name="state", read=HISTORIANS, render=fields.value("state"),
        doc="active done error cancelled"),
    Shown(name="cwd", doc="working directory", read=HISTORIANS, render=_cwd, volatile=True),
    Shown(name="created_at", doc="RFC 3339 time", read=HISTORIANS, render=fields.time("created")),
    Shown(name="updated_at", doc="RFC 3339 time of the last event", read=HISTORIANS,
        render=fields.time("updated"), depends=("updated",)),
    Shown(name="meta.json", read=HISTORIANS, render=_meta,
        doc="the agent that the session belongs to"),
    Directory(name="context", read=HISTORIANS,
        doc="the working set, rebuildable"),
    Document(name="memory.md", within="context", read=HISTORIANS, guard=_WRITING,
        real=_path("context/memory.md"), share=_share, written=_memory_written,
        ensure=lambda base, session: base.runtime.agents.sessions.ensure(session),
        doc="the agent's own notes"),
    Directory(name="episode", within="context", read=HISTORIANS,
        guard=EPISODE.write, folder=EPISODE, doc="the agent's episodes, one file per work item"),
    Shown(name="pack.md", within="context", read=HISTORIANS, render=_pack, generated=True,
        doc="results, references and artifact paths of its children"),
    Shown(name="now.md", within="context", read=HISTORIANS, render=_now, generated=True,
        doc="what its agent works on and waits for, its children and tasks, and their reports"),
    Directory(name="child", within="context", read=HISTORIANS,
        entries=_channels, find=_find_channel, doc="the parent's side of each delegation"),
)


class _Sessions(Layout[Session]):
    """The sessions of agents, those of earlier incarnations and removed agents too."""

    def find(self, base: Base, index: int, row: Row[Session]) -> Session | None:
        return base.runtime.agents.sessions.get(SessionIndex(index))

    def path(self, base: Base, session: Session) -> str:
        return f"home/{session.owner}/agent/{session.agent}/session/{session.name}"

    def agent(self, base: Base, session: Session) -> Agent | None:
        return base.runtime.agents.registry.recall(session.agent_index)


LAYOUT: Final = _Sessions(number=3, name="session", rows=ROWS, closed=True, hidden=True)


def channel_status(child: Agent) -> str:
    """pending active done error cancelled."""
    if child.status is Status.NEW:
        return "pending"
    if child.status is not Status.DEAD:
        return "active"
    return "cancelled" if child.outcome == "interrupted" else child.outcome


def _channel_session(base: Base, child: Agent, caller: Caller) -> str:
    session = base.runtime.agents.sessions.get(child.session)
    return (session.name if session is not None else "default") + "\n"


CHANNEL_ROWS: Final[tuple[Row[Agent], ...]] = (
    Directory(name="", top=True, entries=_documents,
        find=_find_document),
    Shown(name="agent", doc="name of the child",
        render=fields.value("name")),
    Shown(name="session", doc="the child's session", render=_channel_session),
    Shown(name="status", doc="pending active done error cancelled",
        render=lambda base, child, caller: channel_status(child) + "\n",
        depends=("outcome", "status")),
)


class _Channels(Layout[Agent]):
    """The parents' side of delegations, by the child, which may be gone."""

    def find(self, base: Base, index: int, row: Row[Agent]) -> Agent | None:
        return base.runtime.agents.registry.recall(AgentIndex(index))

    def path(self, base: Base, child: Agent) -> str:
        return f"context/child/{child.channel}"

    def agent(self, base: Base, child: Agent) -> Agent:
        return child


CHANNEL: Final = _Channels(number=4, name="channel", rows=CHANNEL_ROWS, hidden=True)
