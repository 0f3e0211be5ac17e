"""Removing what ended long ago: agents, tasks and work items, and histories of removed agents.

``ctx prune`` asks for it, and the settings ``keep_ended`` and ``keep_sessions`` have it done by
itself. Nothing is lost that somebody may still want: what lives, what is declared, commits that
nobody has taken over, and results that an agent has in the session of its parent stay, with the
reason.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import trio

from runtime.agents.planes import Plane
from runtime.agents.removals import REMOVING, Removals
from runtime.agents.tasks import TaskPlane, why_unfetched
from runtime.agents.work import WorkPlane
from runtime.authority.facts import Facts, Part
from runtime.caller import CONTROLLERS, NOBODY, OPERATORS, PARTIES, Caller, Role
from runtime.errors import CtxError
from runtime.ids import AgentIndex, SessionIndex
from runtime.records.items import Task
from runtime.records.lifecycle import Status
from runtime.records.model import Agent, Session
from runtime.texts.names import quote, timestamp

log = logging.getLogger("ctxd.pruning")

#: between two looks by the settings: a tenth of what is kept, but from and to
_FIRST_LOOK: Final = 10.0
_LAST_LOOK: Final = 3600.0
#: sessions that are read at once
_AT_ONCE: Final = 64


def _sentence(check: Callable[[], None]) -> str:
    """The sentence of a refusal, empty if nothing is refused."""
    try:
        check()
    except CtxError as error:
        return error.sentence
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Old:
    """Something that ended long ago, by its path below the root, and why it stays, if it does."""

    path: str
    owner: int
    ended: float
    why: str
    remove: Callable[[], None]

    def facts(self) -> dict[str, object]:
        """As operation ``prune`` tells of it."""
        told = {"path": self.path, "owner": self.owner, "ended": timestamp(self.ended)}
        return {**told, "left": self.why} if self.why else told


class Pruning(Part):
    """Finds what ended before a moment, and removes it."""

    def __init__(
        self, facts: Facts, removals: Removals, tasks: TaskPlane, work: WorkPlane
    ) -> None:
        super().__init__(facts)
        self._removals = removals
        self._planes: tuple[Plane[Any], ...] = (tasks, work)

    async def run(self) -> None:
        """Does what the settings say."""
        while True:
            config = self._settings.config
            kept = [each for each in (config.keep_ended, config.keep_sessions) if each is not None]
            await trio.sleep(max(_FIRST_LOOK, min([_LAST_LOOK, *(each / 10 for each in kept)])))
            config, now = self._settings.config, time.time()
            await self.prune(
                None,
                self._tell_log,
                ended=None if config.keep_ended is None else now - config.keep_ended,
                sessions=None if config.keep_sessions is None else now - config.keep_sessions,
            )

    @staticmethod
    async def _tell_log(old: Old) -> None:
        if not old.why:
            log.info("removed %s, which ended %s", old.path, timestamp(old.ended))

    async def prune(
        self,
        caller: Caller | None,
        tell: Callable[[Old], Awaitable[None]],
        *,
        ended: float | None,
        sessions: float | None,
        dry: bool = False,
    ) -> None:
        """Removes what ended, and the histories that were written last, before these moments; a
        ``dry`` call only tells of it. For a caller what it may remove, for None everything."""
        for old in self._find(caller, ended, sessions):
            if old is not None and not old.why and not dry:
                try:
                    with self._journal.acting(caller) if caller is not None else nullcontext():
                        old.remove()
                except CtxError as error:
                    old = replace(old, why=error.sentence)
            await trio.lowlevel.checkpoint()
            if old is not None:
                await tell(old)

    def _find(
        self, caller: Caller | None, ended: float | None, sessions: float | None
    ) -> Iterator[Old | None]:
        """A little at a time: None where there is nothing."""
        going: set[AgentIndex] = set()
        if ended is not None:
            for agent in self._registry:
                if self._registry.get(agent.index) is not agent or agent.index in going:
                    continue  # it goes with its parent
                roles = Role(~0) if caller is None else self._identity.roles(caller, agent)
                if agent.status is not Status.DEAD or agent.since > ended:
                    yield from self._items_of(agent, ended, roles)
                elif roles & CONTROLLERS:
                    members = [agent, *self._registry.descendants(agent)]
                    why = self._why_left(agent, members, ended)
                    if not why:
                        going.update(member.index for member in members)
                    yield Old(
                        path=f"agent/{agent.name}.d",
                        owner=agent.owner,
                        ended=agent.since,
                        why=why,
                        remove=partial(self._removals.remove, agent),
                    )
                yield None
        if sessions is not None:
            yield from self._histories(caller, sessions, going)

    def _why_left(self, agent: Agent, members: list[Agent], ended: float) -> str:
        """Why an agent that ended long ago is not removed with those that it owns."""
        if why := _sentence(partial(REMOVING.check_object, self._facts, NOBODY, agent)):
            return why
        for member in members:
            if member.since > ended:
                return f"{quote(member.name)}, which it owns, ended later"
            if member.declared:
                return f"{member.declared} declares {quote(member.name)}"
            if member.window == "remove":
                return f"the client that made {quote(member.name)} has its window open"
            if why := why_unfetched(member):
                return why
        return ""

    def _items_of(self, agent: Agent, ended: float, roles: Role) -> Iterator[Old | None]:
        """Tasks and work items of an agent that stays."""
        if not roles & PARTIES:
            return
        for plane in self._planes:
            for item in plane.over(agent):
                is_task = isinstance(item, Task)
                if is_task and item.child and self._registry.get(item.child):
                    continue  # it goes with the child
                when = item.ended if is_task else item.updated
                if when <= ended:
                    yield Old(
                        path=f"agent/{agent.name}.d/{item.kind}/{item.name}",
                        owner=agent.owner,
                        ended=when,
                        why=_sentence(partial(plane.check_removal, item)),
                        remove=partial(plane.remove, agent, item),
                    )

    def _histories(
        self, caller: Caller | None, before: float, going: set[AgentIndex]
    ) -> Iterator[Old | None]:
        """Sessions of agents that are removed, or go; the last one of a name takes its durable
        home along."""
        operator = caller is None or self._identity.root_roles(caller) & OPERATORS
        last: SessionIndex | None = SessionIndex(0)
        holds = {agent.parent_session for agent in self._registry if agent.index not in going}
        while operator and last is not None:
            question = "SELECT idx FROM sessions WHERE idx>? ORDER BY idx LIMIT ?"
            found = self._store.execute(question, last, _AT_ONCE).fetchall()
            last = found[-1][0] if found else None
            for (index,) in found:
                session = self._sessions.find(index)
                if session is None or session.updated > before:
                    continue
                if caller is not None and not self._is_own(caller, session):
                    continue
                there = self._registry.get(session.agent_index)
                if there is None or there.index in going:
                    yield self._old_session(session, held=session.index in holds)
            yield None

    def _is_own(self, caller: Caller, session: Session) -> bool:
        return caller.uid == session.owner or self._identity.is_master(caller)

    def _old_session(self, session: Session, *, held: bool) -> Old:
        name, where = session.agent, f"home/{session.owner}/agent/{session.agent}/session"
        return Old(
            path=f"{where}/{session.name}",
            owner=session.owner,
            ended=session.updated,
            why=f"a child of {quote(name)} has its results there" if held else "",
            remove=partial(self._removals.remove_session, session),
        )
