"""The spaces of real files, as rows: what an agent gives back, its episodes, a user's own
files, and what is shared."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from ctxfs.tree.spaces import Place, SpaceRow
from runtime.authority.guard import ANY_STATUS, Facts, Guard, Unless
from runtime.caller import HISTORIANS, INSIDERS, Caller, Role
from runtime.errors import DeniedError, MissingError
from runtime.ids import AgentIndex, SessionIndex
from runtime.records.lifecycle import Status
from runtime.records.model import Agent, Session
from runtime.runtime import Runtime
from runtime.texts.names import quote

# who may


def _unless_allowed(perm: str) -> Unless[str]:
    def why(facts: Facts, caller: Caller, name: str) -> str:
        agent = facts.registry.get(caller.agent) if caller.agent is not None else None
        if agent is None or facts.authority.allows(agent, "shared", name, perm):
            return ""
        return f"shared:{name} {perm} is not in the agent's effective policy"

    return Unless(f"the caller is an agent that lacks policy {perm}", DeniedError, why)


# where and whose


def _episode_owner(runtime: Runtime, session: Session) -> tuple[int, int]:
    agent = runtime.agents.registry.recall(session.agent_index)
    return (agent.uid, agent.gid) if agent is not None else (0, 0)


def _data_root(runtime: Runtime, uid: int) -> Path:
    """Made when somebody looks at it first."""
    path = runtime.places.state / "home" / str(uid) / "data"
    if not path.is_dir():
        path.mkdir(parents=True, mode=0o700)
        os.chown(path, uid, -1)
    return path


def shared_root(runtime: Runtime, name: str) -> Path:
    return runtime.places.state / "shared" / name


def shared_owner(runtime: Runtime, name: str) -> int:
    """The uid of its maker; ``MissingError``."""
    try:
        return os.lstat(shared_root(runtime, name)).st_uid
    except FileNotFoundError:
        raise MissingError(f"there is no space {quote(name)}") from None


def _find_agent(runtime: Runtime, key: str) -> Agent | None:
    index, _, incarnation = key.partition(".")
    agent = runtime.agents.registry.recall(AgentIndex(int(index)))
    return agent if agent is not None and agent.incarnation == incarnation else None


ARTIFACT: Final[SpaceRow[Agent]] = SpaceRow(
    name="artifact",
    key=lambda agent: f"{agent.index}.{agent.incarnation}",
    find=_find_agent,
    path=lambda agent: f"agent/{agent.name}.d/artifact",
    root=lambda runtime, agent: runtime.agents.documents.path(agent, "artifact"),
    ensure=lambda runtime, agent: runtime.agents.documents.ensure(agent),
    mode=0o755,
    created=lambda agent: agent.created,
    owner=lambda runtime, agent: (agent.uid, agent.gid),
    share=lambda runtime, agent: runtime.agents.disk.share(agent),
    agent=lambda runtime, agent: agent,
    read=Guard(who=INSIDERS),
    write=Guard(who=Role.SELF, when=ANY_STATUS - {Status.DEAD}),
    lasting=lambda runtime, agent: runtime.agents.registry.get(agent.index) is not None,
    incarnation=lambda agent: agent.incarnation,
    links=False,
    bounded=True,
)
EPISODE: Final[SpaceRow[Session]] = SpaceRow(
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
    created=lambda session: session.created,
    owner=_episode_owner,
    share=lambda runtime, session: runtime.agents.disk.share(session),
    agent=lambda runtime, session: runtime.agents.registry.recall(session.agent_index),
    read=Guard(who=HISTORIANS),
    write=Guard(who=Role.SELF),
    lasting=lambda runtime, session: runtime.agents.registry.get(session.agent_index) is not None,
    links=False,
    bounded=True,
)
DATA: Final[SpaceRow[int]] = SpaceRow(
    name="data",
    key=str,
    find=lambda runtime, key: int(key),
    path=lambda uid: f"home/{uid}/data",
    root=_data_root,
    owner=lambda runtime, uid: None,
    share=lambda runtime, uid: runtime.agents.disk.share_of(uid),
    agent=lambda runtime, uid: None,
    read=Guard(who=Role.ANYONE),
    write=Guard(who=Role.ANYONE),
    links=True,
    bounded=False,
)
SHARED: Final[SpaceRow[str]] = SpaceRow(
    name="shared",
    key=str,
    find=lambda runtime, name: name if shared_root(runtime, name).is_dir() else None,
    path=lambda name: f"shared/{name}",
    root=shared_root,
    owner=lambda runtime, name: None,
    share=lambda runtime, name: runtime.agents.disk.share_of(shared_owner(runtime, name)),
    agent=lambda runtime, name: None,
    read=Guard(who=Role.ANYONE, unless=(_unless_allowed("read"),)),
    write=Guard(who=Role.ANYONE, unless=(_unless_allowed("write"),)),
    links=True,
    bounded=False,
)


def places_of(agent: Agent) -> tuple[Place, ...]:
    """Those of the spaces that go with an agent."""
    return ARTIFACT.place(agent), (EPISODE.name, str(agent.session))


#: by name
ROWS: Final[dict[str, SpaceRow[Any]]] = {
    row.name: row for row in (ARTIFACT, EPISODE, DATA, SHARED)
}
