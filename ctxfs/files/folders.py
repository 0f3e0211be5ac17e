"""The artifacts of an agent, and the episodes of a session: folders of real files, as rows."""

from __future__ import annotations

from typing import Any, Final

from ctxfs.tree.folder import FolderRow
from runtime.authority.guard import ANY_STATUS, Guard
from runtime.caller import HISTORIANS, INSIDERS, Role
from runtime.ids import AgentIndex, SessionIndex
from runtime.records.lifecycle import Status
from runtime.records.model import Agent, Session
from runtime.runtime import Runtime


def _find_agent(runtime: Runtime, key: str) -> Agent | None:
    index, _, incarnation = key.partition(".")
    agent = runtime.agents.registry.recall(AgentIndex(int(index)))
    return agent if agent is not None and agent.incarnation == incarnation else None


ARTIFACT: Final[FolderRow[Agent]] = FolderRow(
    name="artifact",
    key=lambda agent: f"{agent.index}.{agent.incarnation}",
    find=_find_agent,
    path=lambda agent: f"agent/{agent.name}.d/artifact",
    root=lambda runtime, agent: runtime.agents.documents.path(agent, "artifact"),
    ensure=lambda runtime, agent: runtime.agents.documents.ensure(agent),
    mode=0o755,
    holder=lambda agent: (agent.owner, agent.name),
    agent=lambda runtime, agent: agent,
    read=Guard(who=INSIDERS),
    write=Guard(who=Role.SELF, when=ANY_STATUS - {Status.DEAD}),
)
EPISODE: Final[FolderRow[Session]] = FolderRow(
    name="episode",
    key=lambda session: str(session.index),
    find=lambda runtime, key: runtime.agents.sessions.get(SessionIndex(int(key))),
    path=lambda session: (
        f"home/{session.owner}/agent/{session.agent}/session/{session.name}/context/episode"
    ),
    root=lambda runtime, session: (
        runtime.agents.sessions.directory(session) / "context" / "episode"
    ),
    ensure=lambda runtime, session: runtime.agents.sessions.ensure(session),
    mode=0o700,
    holder=lambda session: (session.owner, session.agent),
    agent=lambda runtime, session: runtime.agents.registry.recall(session.agent_index),
    read=Guard(who=HISTORIANS),
    write=Guard(who=Role.SELF),
)

#: by name
ROWS: Final[dict[str, FolderRow[Any]]] = {row.name: row for row in (ARTIFACT, EPISODE)}
