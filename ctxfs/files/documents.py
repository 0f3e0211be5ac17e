"""Documents: real files of an agent or session that rows stand for (ctxfs(5), Agents)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ctxfs.tree import shapes
from ctxfs.tree.base import Base
from ctxfs.tree.rows import Check, Document, Lines, Shown
from runtime.agents import results
from runtime.authority.guard import Guard
from runtime.caller import INSIDERS, PARTIES, Caller, Role
from runtime.records.model import Agent
from runtime.texts import names


def _path(name: str) -> Callable[[Base, Agent], Path]:
    return lambda base, agent: base.agents.documents.path(agent, name)


def document(
    name: str,
    doc: str,
    *,
    guard: Guard[Agent],
    read: Role = INSIDERS,
    shape: shapes.Shape | None = None,
) -> Document[Agent]:
    """A document of an agent's that is written in place."""

    def written(base: Base, agent: Agent) -> None:
        if name == "result.md":
            base.agents.documents.result_written(agent)
        base.agents.journal.tell_agent(agent.index, (name,))

    return Document(
        name=name, doc=doc, shape=shape, read=read, guard=guard, real=_path(name),
        share=lambda base, agent: base.agents.disk.share(agent),
        written=written, ensure=lambda base, agent: base.agents.documents.ensure(agent),
        text=shape is shapes.TEXT,
    )  # fmt: skip


def lines_document(
    name: str,
    doc: str,
    check: Check[Agent],
    *,
    guard: Guard[Agent],
    read: Role = INSIDERS,
    shape: shapes.Shape | None = None,
) -> Lines[Agent]:
    """A document of JSON lines, which is staged like a control."""

    def store(base: Base, agent: Agent, caller: Caller, data: bytes) -> None:
        share = base.agents.disk.share(agent)
        share.check(caller, len(data))
        base.agents.documents.write(agent, name, data)
        share.note(len(data))

    return Lines(
        name=name, doc=doc, shape=shape, read=read, guard=guard, real=_path(name),
        check=check, store=store,
    )  # fmt: skip


def kept_document(name: str, doc: str) -> Shown[Agent]:
    """One that the runtime writes, for the parties."""
    return Shown(name=name, doc=doc, read=PARTIES, real=_path(name))


def check_input(base: Base, agent: Agent, caller: Caller, line: str) -> None:
    if line.strip():
        names.parse_json_object(line)


def check_ref(base: Base, agent: Agent, caller: Caller, line: str) -> None:
    results.check_ref(line)
