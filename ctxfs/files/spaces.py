"""The spaces of real files, as rows: what an agent gives back, its episodes, a user's own
files, and what is shared."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ctxfs.tree.durable import Space
from runtime.authority.disk import Share
from runtime.authority.guard import ANY_STATUS, Act, Facts, Guard, Unless
from runtime.caller import HISTORIANS, INSIDERS, Caller, Role
from runtime.errors import DeniedError, MissingError
from runtime.records.lifecycle import Status
from runtime.records.model import Agent, Session
from runtime.texts.names import quote

if TYPE_CHECKING:
    from ctxfs.filesystem import Filesystem

_UNLIMITED: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceRow:
    """One kind of spaces; the functions get the space's object.

    ``key`` tells the spaces of a kind apart. ``root`` is where the files really are, ``owner``
    whom they are shown to belong to, None if to their real owner. ``links`` says whether
    links can be made. A ``bounded`` space has as many files, of as many bytes, as is configured;
    any other is bounded by its owner's account of the disk, which is its ``share``, alone.
    ``lasting`` tells whether something may still be written: then all who look at it share
    one count. Who may is decided by ``agent``; of a space that is no agent's, everybody has
    a part in it who lives, and modes tell the rest.
    """

    name: str
    key: Callable[[Any], str]
    path: Callable[[Any], str]
    root: Callable[[Filesystem, Any], Path]
    owner: Callable[[Filesystem, Any], tuple[int, int] | None]
    share: Callable[[Filesystem, Any], Share]
    agent: Callable[[Filesystem, Any], Agent | None]
    read: Guard
    write: Guard
    lasting: Callable[[Filesystem, Any], bool] = lambda fs, obj: True
    incarnation: Callable[[Any], str | None] = lambda obj: None
    links: bool
    bounded: bool

    def of(self, fs: Filesystem, obj: Any) -> Space:
        """The space of an object, with the limits of the configuration as it is now."""
        config, agents = fs.runtime.config, fs.runtime.agents

        def check(guard: Guard, act: Act, caller: Caller) -> None:
            agent = self.agent(fs, obj)
            if agent is not None:
                roles = agents.identity.roles(caller, agent)
            else:
                roles = Role.ANYONE if agents.identity.still(caller) else Role.NONE
            guard.check(act, self.path(obj), agents, caller, roles, agent, obj)

        return Space(
            path=self.path(obj),
            root=lambda: self.root(fs, obj),
            owner=lambda: self.owner(fs, obj),
            links=self.links,
            limit=config.document_max if self.bounded else _UNLIMITED,
            files=config.files if self.bounded else None,
            total=config.artifact_max if self.bounded else None,
            incarnation=self.incarnation(obj),
            may_read=lambda caller: check(self.read, Act.READ, caller),
            may_write=lambda caller: check(self.write, Act.WRITE, caller),
            share=self.share(fs, obj),
        )


class Spaces:
    """The spaces that may change: one object for each, so that they can be compared."""

    def __init__(self, fs: Filesystem) -> None:
        self._fs = fs
        self._known: dict[tuple[str, str], Space] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, row: SpaceRow, obj: Any) -> Space:
        space = row.of(self._fs, obj)
        if not row.lasting(self._fs, obj):
            return space
        known = self._known.setdefault((row.name, row.key(obj)), space)
        known.limit, known.files, known.total = space.limit, space.files, space.total
        return known

    def known(self, row: SpaceRow, obj: Any) -> Space | None:
        return self._known.get((row.name, row.key(obj)))

    def of_agent(self, agent: Agent) -> list[Space]:
        """Those that go with an agent."""
        found = (self._known.get(key) for key in _keys_of(agent))
        return [space for space in found if space is not None]

    def drop_agent(self, agent: Agent) -> None:
        """It is gone."""
        for key in _keys_of(agent):
            self._known.pop(key, None)

    def drop_shared(self, name: str) -> None:
        self._known.pop((SHARED.name, name), None)


def _keys_of(agent: Agent) -> tuple[tuple[str, str], ...]:
    return (ARTIFACT.name, agent.incarnation), (EPISODE.name, str(agent.session))


# who may


def _unless_allowed(perm: str) -> Unless:
    def why(facts: Facts, caller: Caller, name: str) -> str:
        agent = facts.registry.get(caller.agent) if caller.agent is not None else None
        if agent is None or facts.authority.allows(agent, "shared", name, perm):
            return ""
        return f"shared:{name} {perm} is not in the agent's effective policy"

    return Unless(f"an agent asks that lacks policy {perm}", DeniedError, why)


# where and whose


def _episode_owner(fs: Filesystem, session: Session) -> tuple[int, int]:
    agent = fs.runtime.agents.registry.recall(session.incarnation)
    return (agent.uid, agent.gid) if agent is not None else (0, 0)


def _data_root(fs: Filesystem, uid: int) -> Path:
    """Made when somebody looks at it first."""
    path = fs.runtime.places.state / "home" / str(uid) / "data"
    if not path.is_dir():
        path.mkdir(parents=True, mode=0o700)
        os.chown(path, uid, -1)
    return path


def shared_root(fs: Filesystem, name: str) -> Path:
    return fs.runtime.places.state / "shared" / name


def shared_owner(fs: Filesystem, name: str) -> int:
    """The uid of whoever made it; ``MissingError``."""
    try:
        return os.lstat(shared_root(fs, name)).st_uid
    except FileNotFoundError:
        raise MissingError(f"there is no space {quote(name)}") from None


ARTIFACT: Final = SpaceRow(
    name="artifact",
    key=lambda agent: agent.incarnation,
    path=lambda agent: f"agent/{agent.name}.d/artifact",
    root=lambda fs, agent: fs.runtime.agents.documents.path(agent, "artifact"),
    owner=lambda fs, agent: (agent.uid, agent.gid),
    share=lambda fs, agent: fs.runtime.agents.disk.share(agent),
    agent=lambda fs, agent: agent,
    read=Guard(who=INSIDERS),
    write=Guard(who=Role.SELF, when=ANY_STATUS - {Status.DEAD}),
    lasting=lambda fs, agent: fs.runtime.agents.registry.get(agent.index) is not None,
    incarnation=lambda agent: agent.incarnation,
    links=False,
    bounded=True,
)
EPISODE: Final = SpaceRow(
    name="episode",
    key=lambda session: str(session.index),
    path=lambda session: (
        f"home/{session.owner}/agent/{session.agent}/session/{session.name}/context/episode"
    ),
    root=lambda fs, session: (
        fs.runtime.agents.sessions.directory(session) / "context" / "episode"
    ),
    owner=_episode_owner,
    share=lambda fs, session: fs.runtime.agents.disk.share(session),
    agent=lambda fs, session: fs.runtime.agents.registry.recall(session.incarnation),
    read=Guard(who=HISTORIANS),
    write=Guard(who=Role.SELF),
    lasting=lambda fs, session: fs.runtime.agents.registry.get(session.incarnation) is not None,
    links=False,
    bounded=True,
)
DATA: Final = SpaceRow(
    name="data",
    key=str,
    path=lambda uid: f"home/{uid}/data",
    root=_data_root,
    owner=lambda fs, uid: None,
    share=lambda fs, uid: fs.runtime.agents.disk.share_of(uid),
    agent=lambda fs, uid: None,
    read=Guard(who=Role.ANYONE),
    write=Guard(who=Role.ANYONE),
    links=True,
    bounded=False,
)
SHARED: Final = SpaceRow(
    name="shared",
    key=str,
    path=lambda name: f"shared/{name}",
    root=shared_root,
    owner=lambda fs, name: None,
    share=lambda fs, name: fs.runtime.agents.disk.share_of(shared_owner(fs, name)),
    agent=lambda fs, name: None,
    read=Guard(who=Role.ANYONE, unless=(_unless_allowed("read"),)),
    write=Guard(who=Role.ANYONE, unless=(_unless_allowed("write"),)),
    links=True,
    bounded=False,
)
