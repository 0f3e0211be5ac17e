"""Sessions and the parent's side of delegations, as rows (ctxfs(5), Sessions)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from ctxfs.files import agent as agent_files
from ctxfs.files import fields
from ctxfs.files.folders import EPISODE
from ctxfs.files.pack import pack
from ctxfs.tree.base import Base
from ctxfs.tree.layouts import Layout, only_top
from ctxfs.tree.nodes import Call, Node
from ctxfs.tree.rownodes import found
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
    return lambda base, session: base.agents.sessions.directory(session) / name


def _share(base: Base, session: Session) -> Share:
    return base.agents.disk.share(session)


def _append(base: Base, session: Session, lines: list[str]) -> None:
    """The session's own agent adds messages to the conversation."""
    agent = base.agents.registry.get(session.agent_index)
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
    base.agents.journal.commit(change)


def _cwd(base: Base, session: Session, caller: Caller) -> str:
    agent = base.agents.registry.get(session.agent_index)
    return working_directory(base.agents, agent) + "\n" if agent is not None else ""


def _meta(base: Base, session: Session, caller: Caller) -> str:
    agent = base.agents.registry.recall(session.agent_index)
    facts = {"agent": session.agent, "session": session.name}
    if agent is not None:
        facts |= {"incarnation": agent.incarnation, "parent": agent.lineage}
    return dump_json(facts) + "\n"


def _find_channel(base: Base, session: Session, call: Call, name: str) -> Node | None:
    index = base.agents.sessions.find_channel(session.index, name)
    child = base.agents.registry.recall(AgentIndex(index)) if index is not None else None
    return found(base, CHANNEL, child)


def _archive(base: Base, session: Session) -> Agent | None:
    """The agent that was reset since, whose results its session shows."""
    agent = base.agents.registry.recall(session.agent_index)
    return agent if agent is not None and agent.archived else None


def _archived(base: Base, session: Session, call: Call) -> Iterable[str]:
    return agent_files.RESULTS if _archive(base, session) is not None else ()


def _find_archived(base: Base, session: Session, call: Call, name: str) -> Node | None:
    reset = _archive(base, session) if name in agent_files.RESULTS else None
    return agent_files.shown_document(base, reset, name) if reset is not None else None


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
        held=lambda base, session: base.agents.sessions.held(session),
        share=_share, size=lambda base, session: session.held,
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
        real=_path("context/memory.md"), share=_share,
        written=lambda base, session: base.agents.journal.tell_session(
            session.index, ("memory.md",)
        ),
        ensure=lambda base, session: base.agents.sessions.ensure(session),
        doc="the agent's own notes"),
    Directory(name="episode", within="context", read=HISTORIANS,
        guard=EPISODE.write, folder=EPISODE, doc="the agent's episodes, one file per work item"),
    Shown(name="pack.md", within="context", read=HISTORIANS, generated=True,
        # never their messages
        render=lambda base, session, caller: pack(base.agents, session, channel_status),
        doc="results, references and artifact paths of its children"),
    Shown(name="now.md", within="context", read=HISTORIANS, generated=True,
        render=lambda base, session, caller: now(base.agents, session),
        doc="what its agent works on and waits for, its children and tasks, and their reports; "
        "of a worktree, what that lacks"),
    Directory(name="child", within="context", read=HISTORIANS,
        entries=lambda base, session, call: (
            name for name, _ in base.agents.sessions.channels(session.index)
        ),
        find=_find_channel, doc="the parent's side of each delegation"),
)


LAYOUT: Final[Layout[Session]] = Layout(
    number=3, name="session", rows=ROWS, closed=True, removable=True, asked=only_top,
    find=lambda base, index, row: base.agents.sessions.get(SessionIndex(index)),
    path=lambda base, session: (
        f"home/{session.owner}/agent/{session.agent}/session/{session.name}"
    ),
    agent=lambda base, session: base.agents.registry.recall(session.agent_index),
)  # fmt: skip


def channel_status(child: Agent) -> str:
    """pending active done error cancelled."""
    if child.status is Status.NEW:
        return "pending"
    if child.status is not Status.DEAD:
        return "active"
    return "cancelled" if child.outcome == "interrupted" else child.outcome


CHANNEL_ROWS: Final[tuple[Row[Agent], ...]] = (
    Directory(name="", top=True, find=_find_document,
        entries=lambda base, child, call: agent_files.DOCUMENTS),
    Shown(name="agent", doc="name of the child",
        render=fields.value("name")),
    Shown(name="session", doc="the child's session",
        render=lambda base, child, caller: (
            base.agents.sessions.name_of(child) or "default"
        ) + "\n"),
    Shown(name="status", doc="pending active done error cancelled",
        render=lambda base, child, caller: channel_status(child) + "\n",
        depends=("outcome", "status")),
)


#: the parents' side of delegations, by the child, which may be gone
CHANNEL: Final[Layout[Agent]] = Layout(
    number=4, name="channel", rows=CHANNEL_ROWS, asked=only_top,
    find=lambda base, index, row: base.agents.registry.recall(AgentIndex(index)),
    path=lambda base, child: f"context/child/{child.channel}",
    agent=lambda base, child: child,
)  # fmt: skip
