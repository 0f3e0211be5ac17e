"""How agents and sessions go: what was removed leaves its history, and nothing else."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Final

import trio

from runtime import crashpoints
from runtime.agents.ends import Ends
from runtime.agents.tasks import TaskPlane, why_fetching
from runtime.authority.facts import Facts, Part
from runtime.authority.guard import Guard, unless
from runtime.caller import CONTROLLERS, NOBODY, OPERATORS, Caller
from runtime.errors import CtxError, ForbiddenError, NoSpaceError, WrongStateError
from runtime.ids import NO_WAIT_FILE, WaitFileName
from runtime.kernel.daemonlog import because_of
from runtime.records.change import RUNTIME, Change
from runtime.records.lifecycle import Cue, Status
from runtime.records.model import Agent, Outcome, Session
from runtime.texts.names import quote

log = logging.getLogger("ctxd.removals")

#: agents that are removed in one step of the loop
_AT_ONCE: Final = 64


@unless("it, or an agent below it, is live, except one that waits for its turn", WrongStateError)
def _alive(facts: Facts, caller: Caller, found: Agent) -> str:
    for member in (found, *facts.registry.descendants(found)):
        if member.live and not member.waits_its_turn:
            what = f"{quote(member.name)} is {member.status}"
            return f"{what}: stop it and wait for its end, then remove it"
    return ""


@unless("the worktree of one of them is being fetched", WrongStateError)
def _fetching(facts: Facts, caller: Caller, found: Agent) -> str:
    members = (found, *facts.registry.descendants(found))
    return next(filter(None, map(why_fetching, members)), "")


@unless("the lead of one that it has placed here wants it yet", ForbiddenError)
def _wanted(facts: Facts, caller: Caller, found: Agent) -> str:
    keep = facts.settings.config.placed_keep
    if not found.is_guest or found.guest.get("forgotten"):
        return ""
    if found.status is Status.DEAD and found.ended < time.time() - keep:
        return ""
    lead, days = found.guest["alias"], f"{keep / 86400:g} days"
    return f"{lead} has placed {quote(found.name)} here: it goes with it, or {days} after its end"


@unless("its agent still exists", WrongStateError)
def _present(facts: Facts, caller: Caller, found: Session) -> str:
    there = facts.registry.get(found.agent_index)
    return f"the agent {quote(there.name)} of this session still exists" if there else ""


#: who removes agents and sessions, by rmdir(2)
REMOVING: Final = Guard(who=CONTROLLERS, unless=(_wanted, _alive, _fetching), local=True)
REMOVING_SESSIONS: Final = Guard(who=OPERATORS, unless=(_present,))


class Removals(Part):
    """Removes agents and sessions."""

    def __init__(self, facts: Facts, tasks: TaskPlane, ends: Ends) -> None:
        super().__init__(facts)
        self._tasks = tasks
        self._ends = ends
        #: owned by what was removed, and still to be
        self._left: deque[Agent] = deque()
        self._more_left = trio.Event()

    def remove(self, agent: Agent) -> None:
        """Removes an agent of which nothing runs, and its descendants; history stays. The errors of
        ``REMOVING``."""
        REMOVING.check_object(self._facts, NOBODY, agent)
        self._take_away(agent)

    def _take_away(self, agent: Agent) -> None:
        members, left = self.going(agent)
        self._cancel_new_of(members)
        change = Change()
        parent = self._registry.parent_of(agent)
        if parent is not None:
            self._tasks.drop_handle(change, parent, agent)
        self._remove(change, members)
        self.leave(left)

    def going(self, agent: Agent) -> tuple[list[Agent], list[Agent]]:
        """The agents that go with an agent: at once, itself included, and a little at a time after
        it."""
        members = [agent, *self._registry.descendants(agent)]
        return members[:_AT_ONCE], members[_AT_ONCE:]

    def _cancel_new_of(self, members: list[Agent]) -> None:
        """In changes of their own, before anything is said of handles: those end with them."""
        for member in members:
            if member.status is Status.NEW or member.waits_its_turn:
                change = Change()
                self._ends.record(
                    change, member, Cue.REMOVING, Outcome.CANCELLED, "operator_stop"
                )
                self._journal.note(change)

    def _remove(self, change: Change, members: list[Agent], *sessions: Session) -> None:
        for member in members:
            change.set(member, removed=True)
        self._erase(change, *sessions)
        crashpoints.reach("remove.committed")
        for member in reversed(members):
            self.forget(member)

    def leave(self, members: list[Agent]) -> None:
        """The owners of these are removed: they go soon, and never start meanwhile, since what has
        lost its owner cannot (``Registry.why_orphaned``)."""
        if members:
            self._left += members
            self._more_left.set()

    async def run(self) -> None:
        """Removes what an owner that was removed has left behind, also with an earlier daemon."""
        self.leave([a for a in self._registry if a.owned and self._registry.parent_of(a) is None])
        while True:
            await self._more_left.wait()
            self._more_left = trio.Event()
            while self._left:
                part = [self._left.popleft() for _ in range(min(len(self._left), _AT_ONCE))]
                there = [m for m in part if self._registry.get(m.index) is m and not m.live]
                crashpoints.reach("remove.more")
                try:
                    self._cancel_new_of(there)
                    self._remove(Change(by=RUNTIME), there)
                except CtxError as error:
                    log.error("cannot remove what a removed agent owned: %s", error)
                await trio.lowlevel.checkpoint()

    def unmake(self, agent: Agent) -> None:
        """Takes back the making of an agent whose configuration failed, if it is ``new`` still.

        Unlike after ``remove``, neither a session nor a channel tells of it. What its parent
        began to wait for meanwhile is told to it all the same.
        """
        if agent.status is not Status.NEW or self._registry.get(agent.index) is not agent:
            return
        session = self._sessions.load(agent.session)
        channel_of = agent.parent_session
        change = Change()
        change.set(agent, removed=True, parent_session=None, channel="")
        self._ends.leave(change, agent)
        self._erase(change, session)
        self.forget(agent)
        directory = self._sessions.directory(session)
        if not self._sessions.any(session.owner, session.agent):
            directory = directory.parent  # no earlier life of the name has sessions there
        self._trash.discard(directory, session.owner)
        if channel_of is not None:
            self._journal.tell_session(channel_of, ("child",))

    def _erase(self, change: Change, *sessions: Session) -> None:
        """Commits a removal, and that of sessions."""
        try:
            self._commit(change, *sessions)
        except NoSpaceError:
            # the reserve is kept for this: a removal makes room
            self._store.release_reserve()
            self._commit(change, *sessions)

    def _commit(self, change: Change, *sessions: Session) -> None:
        with self._store.transaction() if sessions else nullcontext():
            self._journal.commit(change)
            for session in sessions:
                self._sessions.erase(session)

    def remove_ended(self, agent: Agent) -> None:
        """Removes an agent that has ended and that nobody is to remove."""
        try:
            self.remove(agent)
        except CtxError as error:
            why = because_of(agent.owner, agents=[agent.name])
            log.error("%s: cannot remove it after its end: %s", agent.name, error, extra=why)

    def remove_copies(self, change: Change, *agents: Agent) -> None:
        """Removes guests that have ended and that their lead forgets, with what else is changed:
        the history is there.

        A durable home is for the next agent of its name.
        """
        sessions, members, left = [], [], []
        for agent in agents:
            for reason in (_alive, _fetching):
                reason.check(self._facts, NOBODY, agent)
            sessions += [*map(self._sessions.load, (agent.session, *agent.other_sessions))]
            now, later = self.going(agent)
            members += now
            left += later
        self._cancel_new_of(members)
        self._remove(change, members, *sessions)
        self.leave(left)
        for session in sessions:
            self._forget_session(session)

    def forget(self, agent: Agent) -> None:
        """One whose removal is committed: nothing of it is left in memory, nor of its files."""
        self._authority.forget(agent)
        self._registry.drop(agent)
        for token in self._wait_tokens([agent]):
            self._wait_files.remove(token)
        self._items.drop_all(agent.index)
        for session in (agent.session, *agent.other_sessions):
            self._sessions.forget(session)
        crashpoints.reach("remove.forgotten")
        self._documents.clear(agent, kept=self._is_shown(agent))
        self._disk.look(agent.owner)
        self._journal.tell_listed(agent)

    def remove_strays(self) -> None:
        """Files of no agent: left by a crash between two steps."""
        self._documents.remove_strays(
            {agent.incarnation for agent in self._registry}, self._store.kept_incarnations()
        )
        self._wait_files.keep(self._wait_tokens(self._registry))

    def _wait_tokens(self, agents: Iterable[Agent]) -> set[WaitFileName]:
        """The wait files of agents, and of what below them has an end."""
        tokens = {agent.wait_token for agent in agents}
        for agent in agents:
            tokens |= {item.wait_token for item in self._items.awaited(agent.index)}
        return tokens - {NO_WAIT_FILE}

    def remove_session(self, session: Session) -> None:
        """Removes the directory and record of a session whose agent is over. The errors of
        ``REMOVING_SESSIONS``."""
        REMOVING_SESSIONS.check_object(self._facts, NOBODY, session)
        if len(self._sessions.of(session.owner, session.agent)) == 1:
            # first, so that no crash leaves a home without the history that it is part of
            self._sessions.discard_homes(session.owner, session.agent)
        with self._store.transaction():
            self._sessions.erase(session)
        self._forget_session(session)

    def _forget_session(self, session: Session) -> None:
        """One that is erased: with it go documents that nothing else shows, its agent's and those
        of children, whose channels are gone."""
        self._sessions.forget(session.index)
        self._trash.discard(self._sessions.directory(session), session.owner)
        children = [index for _, index in self._sessions.channels(session.index)]
        for index in (session.agent_index, *children):
            agent = self._registry.recall(index)
            there = self._registry.get(index) is not None
            if agent is not None and not there and not self._is_shown(agent):
                self._documents.discard(agent)
        self._disk.look(session.owner)

    def _is_shown(self, agent: Agent) -> bool:
        """Whether the documents of one that is removed are: in the channel that its parent's
        session has of it, or with its own session."""
        sessions = [agent.parent_session, agent.session if agent.archived else None]
        return any(each is not None and self._sessions.get(each) for each in sessions)
