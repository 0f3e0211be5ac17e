"""How agents come into being: made, configured as somebody's child, given another life."""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from runtime import crashpoints
from runtime.agents import placing
from runtime.agents.ends import Ends
from runtime.agents.messages import Messages
from runtime.agents.removals import Removals
from runtime.agents.tasks import TaskPlane, why_fetching, why_no_handle
from runtime.authority.facts import Facts, Part
from runtime.authority.guard import Act, Guard, of_move, unless
from runtime.caller import CONTROLLERS, NOBODY, Caller, Role
from runtime.errors import DeniedError, MalformedError, QuotaError, TakenError, WrongStateError
from runtime.ids import NO_AGENT, Incarnation, SessionIndex, WaitFileName
from runtime.kernel import linux
from runtime.records.change import Change
from runtime.records.items import Task
from runtime.records.lifecycle import Cue, Status
from runtime.records.model import Agent, Profile
from runtime.records.registry import why_no_children
from runtime.texts import policy
from runtime.texts.names import NAME_MAX, check_name, free_number, is_name, quote

#: of a name that is made up: of the parent's in it, and digits at the end
_STEM_MAX: Final = 58
_DIGITS_MAX: Final = 6
#: what to do where there are too many
_REMEDY: Final = "remove agents that have ended, with rmdir or AgentRemove"
#: names that are tried at random
_TRIES: Final = 32


def _owner(caller: Caller, parent: Agent | None) -> int:
    return parent.owner if parent is not None else caller.uid


@unless("an agent has the name", TakenError)
def _taken(facts: Facts, caller: Caller, name: str) -> str:
    if facts.registry.named(name) is None:
        return ""
    return f"an agent named {quote(name)} exists; choose another name or rmdir it"


@unless("the calling process cannot be identified", DeniedError)
def _unknown(facts: Facts, caller: Caller, name: str) -> str:
    return "" if caller.known else "cannot identify the calling process"


@unless("the calling agent is ending", WrongStateError)
def _ending(facts: Facts, caller: Caller, name: str) -> str:
    parent = facts.registry.calling(caller)
    if caller.agent is None or (parent is not None and parent.accepts_children):
        return ""
    return "the calling agent is ending and can no longer create agents"


@unless("the calling agent's effective policy lacks create", DeniedError)
def _not_allowed(facts: Facts, caller: Caller, name: str) -> str:
    parent = facts.registry.calling(caller)
    if parent is None or facts.authority.allows(parent, "agent", name, "create"):
        return ""
    return f"agent:{name} create is not in the effective policy of {quote(parent.name)}"


@unless("the name and its history belong to another user", DeniedError)
def _held(facts: Facts, caller: Caller, name: str) -> str:
    holder = facts.registry.holder(name)
    if holder in (None, _owner(caller, facts.registry.calling(caller))):
        return ""
    if facts.identity.is_master(caller):
        return ""
    return f"the name {quote(name)} and its history belong to another user"


@unless("it would exceed the maximum of agents, children or depth", QuotaError)
def _full(facts: Facts, caller: Caller, name: str) -> str:
    parent = facts.registry.calling(caller)
    owner, maximum = _owner(caller, parent), facts.settings.config.agents
    if facts.registry.count(owner) >= maximum:
        return f"uid {owner} has {maximum} agents, the configured maximum: {_REMEDY}"
    return _why_no_child(facts, name, parent) if parent is not None else ""


def _why_no_child(facts: Facts, name: str, parent: Agent) -> str:
    """Why an agent with this name cannot be a child, as far as numbers say."""
    config, depth = facts.settings.config, facts.registry.depth(parent)
    if depth >= config.depth:
        return (
            f"{quote(name)} would be {depth + 1} levels deep; "
            f"the configured maximum is {config.depth}"
        )
    placed = facts.registry.placed(parent)
    if placed is not None and depth > placed.guest["bound"]["depth"]:
        return f"{quote(name)} would be deeper below {quote(placed.name)} than its lead allows"
    ended = sum(child.status is Status.DEAD for child in facts.registry.children(parent))
    if ended >= config.ended:
        what = f"{quote(parent.name)} has {ended} children that have ended"
        return f"{what}, the configured maximum (ended): {_REMEDY}"
    return _why_crowded(facts, parent)


def _why_crowded(facts: Facts, parent: Agent) -> str:
    """Why an agent cannot have one more child that has not ended."""
    there, most = facts.registry.children(parent), facts.settings.config.children
    if sum(child.status is not Status.DEAD for child in there) < most:
        return ""
    what = f"{quote(parent.name)} has {most} children that have not ended, the configured maximum"
    return f"{what} (children): wait until one has ended, or end one with ctl or AgentStop"


@unless("the calling agent has a task of the name", TakenError)
def _command(facts: Facts, caller: Caller, name: str) -> str:
    parent = facts.registry.calling(caller)
    return why_no_handle(facts, parent, name) if parent is not None else ""


#: who makes agents, by mkdir(2)
MAKING: Final = Guard(
    who=Role.ANYONE,
    unless=(_taken, _unknown, _ending, _not_allowed, _held, _full, _command),
)


@unless("its parent is not live", WrongStateError)
def orphaned(facts: Facts, caller: Caller, agent: Agent) -> str:
    """Nothing is reset or started below what is not live."""
    return facts.registry.why_orphaned(agent)


@unless("its worktree is being fetched", WrongStateError)
def _fetching(facts: Facts, caller: Caller, agent: Agent) -> str:
    return why_fetching(agent)


@unless("its parent has a command of its name", TakenError)
def _replaced(facts: Facts, caller: Caller, agent: Agent) -> str:
    parent = facts.registry.parent_of(agent) if agent.owned else None
    return why_no_handle(facts, parent, agent.name) if parent is not None else ""


@unless("its parent has as many children as it may have", QuotaError)
def _crowded(facts: Facts, caller: Caller, agent: Agent) -> str:
    parent = facts.registry.parent_of(agent)
    return _why_crowded(facts, parent) if parent is not None else ""


@unless("its run is paused", WrongStateError)
def _frozen(facts: Facts, caller: Caller, agent: Agent) -> str:
    if agent.status is not Status.PAUSED or not agent.run.id:
        return ""
    return f"session does not fit: the run {agent.run.id} is paused"


#: who resets an agent, and who switches its session
RESETTING: Final = of_move(
    CONTROLLERS | Role.STARTER, Cue.RESET, _fetching, orphaned, _replaced, _crowded
)
SWITCHING: Final = Guard(
    who=CONTROLLERS,
    when=frozenset({Status.NEW, Status.READY, Status.IDLE, Status.PAUSED}),
    unless=(_frozen,),
)


class Births(Part):
    """Makes agents, and says whose they are."""

    def __init__(
        self, facts: Facts, *, messages: Messages, tasks: TaskPlane, ends: Ends, removals: Removals
    ) -> None:
        super().__init__(facts)
        self._messages = messages
        self._tasks = tasks
        self._ends = ends
        self._removals = removals

    def take_back(self) -> None:
        """Agents that an earlier daemon made to start and did not start (``Journal.starting``)."""
        for agent in self._registry:
            if agent.status is Status.NEW and agent.made_to_start:
                self._removals.unmake(agent)

    def create(self, caller: Caller, name: str) -> Agent:
        """A new agent: a child if an agent calls, else a root agent.

        ``MalformedError`` for its name, and the errors of ``MAKING``.
        """
        check_name(name)
        MAKING.check_object(self._facts, caller, name)
        parent = self._registry.calling(caller)
        agent = Agent(
            index=NO_AGENT,
            incarnation=Incarnation(secrets.token_hex(8)),
            name=name,
            owner=_owner(caller, parent),
            uid=caller.uid,
            gid=caller.gid,
            label=f"{name}_t",
            created=time.time(),
            wait_token=WaitFileName(secrets.token_hex(16)),
            made_to_start=self._journal.cause.starts,
        )
        if parent is None:
            self._default_root(agent, caller)
        else:
            for key, value in self._child_values(agent, parent).items():
                setattr(agent, key, value)
        change = Change()
        if parent is not None:
            self._tasks.make_handle(change, parent, agent)
        self._make(change, agent)
        return agent

    def guest(self, caller: Caller, name: str, incarnation: Incarnation, **values: Any) -> Agent:
        """An agent of another machine's daemon, which ``caller`` is here, for ``placing``: a root
        agent that nobody but its operators sees. Its name can be given to no other agent.

        ``TakenError``, ``DeniedError``, ``QuotaError``.
        """
        for reason in (_taken, _held, _full):
            reason.check(self._facts, caller, name)
        agent = Agent(
            index=NO_AGENT,
            incarnation=incarnation,
            name=name,
            owner=caller.uid,
            uid=caller.uid,
            gid=caller.gid,
            created=time.time(),
            wait_token=WaitFileName(secrets.token_hex(16)),
            **values,
        )
        if self._is_known(agent):
            raise TakenError(f"there is something of an agent {quote(incarnation)} here")
        self._default_root(agent, caller)
        agent.profile = Profile.PRIVATE_CHILD.value
        return agent

    @contextmanager
    def placing(self, agent: Agent) -> Iterator[Change]:
        """Makes a guest by one change with all that is written to it meanwhile; after an error it
        never was."""
        self._prepare(agent)
        try:
            with self._journal.gathering() as change:
                change.made.append(agent)
                yield change
        except BaseException:
            self._take_back_made(change)
            raise
        crashpoints.reach("create.inserted")
        self._register(agent)

    def _is_known(self, agent: Agent) -> bool:
        """Whether anything of its incarnation, whatever became of that, is there."""
        question = "SELECT 1 FROM answers WHERE caller=? LIMIT 1"
        return (
            self._registry.incarnation(agent.incarnation) is not None
            or self._registry.is_paying(agent.incarnation)
            or self._documents.directory(agent).exists()
            or self._store.value(bool, question, agent.incarnation) is not None
        )

    def _make(self, change: Change, agent: Agent) -> None:
        change.made.append(agent)
        self._prepare(agent)
        self._commit_made(change)
        self._register(agent)

    def free_name(self, caller: Caller, parent: Agent) -> str:
        """A name that a new child of an agent can have, if ``caller`` makes it.

        Of the first object that the parent's effective policy lets it create and of which a name
        is free: PREFIX1, PREFIX2, …, for ``*`` PARENT-1, PARENT-2, … An operator needs no policy.
        ``DeniedError`` if there is no such object, ``TakenError`` if no name is free.
        """
        allowed = ["*"]
        if caller.agent is not None:
            policy_now = self._authority.effective_policy(parent)
            allowed = policy_now.objects("allow", "agent", "create").all
        if not allowed:
            raise DeniedError(f"no agent create is in the effective policy of {quote(parent.name)}")
        for wanted in allowed:
            if name := self._free_of(parent, wanted):
                return name
        raise TakenError(
            f"no name that the effective policy of {quote(parent.name)} lets it create is free: "
            f"{_REMEDY}"
        )

    def _free_of(self, parent: Agent, wanted: str) -> str:
        """A free name of an object of a policy; empty if there is none."""
        if not wanted.endswith("*"):
            return wanted if self._is_free(parent, wanted) else ""
        prefix = wanted.removesuffix("*") or f"{parent.name[:_STEM_MAX]}-"
        most = 10 ** min(NAME_MAX - len(prefix), _DIGITS_MAX) - 1

        def is_taken(number: int) -> bool:
            return not self._is_free(parent, f"{prefix}{number}")

        if most < 1 or not is_name(f"{prefix}1"):
            return ""
        number = free_number(is_taken, most)
        if not number:
            # another user may hold just the names that are looked at
            tries = (1 + secrets.randbelow(most) for _ in range(_TRIES))
            number = next((n for n in tries if not is_taken(n)), 0)
        return f"{prefix}{number}" if number else ""

    def _is_free(self, parent: Agent, name: str) -> bool:
        if not is_name(name) or self._registry.named(name) is not None:
            return False
        if self._items.named(parent.index, Task, name) is not None:
            return False
        return self._registry.holder(name) in (None, parent.owner)

    def _default_root(self, agent: Agent, caller: Caller) -> None:
        agent.lineage = f"operator uid:{caller.uid}"
        agent.creator_uid, agent.creator_gid = caller.uid, caller.gid
        agent.maker = caller.uid
        agent.creator_groups = (
            linux.groups_of(caller.pid) if caller.groups is None else caller.groups
        )
        agent.uid, agent.gid, agent.groups = placing.default_ids(self._facts, agent)
        agent.policy = policy.default_root(self._settings.config.policy, agent.label)

    def _child_values(self, agent: Agent, parent: Agent) -> dict[str, Any]:
        """The defaults of a child of ``parent``, if that has room for what comes with it."""
        self._messages.check_room(parent)
        session = self._sessions.load(parent.session)
        lineage = f"agent:{parent.name} session:{session.name}"
        return {
            "parent": parent.index,
            "parent_session": parent.session,
            "channel": agent.name,
            "lineage": lineage + (f" run:{parent.run.id}" if parent.run.id else ""),
            "payers": (agent.incarnation, *self._registry.payers(parent)),
            "life": "owned",
            "profile": Profile.PRIVATE_CHILD.value,
            "uid": parent.uid,
            "gid": parent.gid,
            "groups": parent.groups,
            "policy": policy.default_child(
                self._authority.effective_policy(parent), agent.label
            ),
            "exec": agent.exec or parent.exec,
            "author": agent.author or parent.author,
            "restart": "no",
            "policy_of_root": (),
        }

    def _prepare(self, agent: Agent) -> None:
        """Makes what an agent has beside its record."""
        self._store.keep_reserve()
        self._wait_files.create(agent.wait_token, agent.owner, self._registry.family(agent))
        crashpoints.reach("create.waitfile")

    def _discard(self, agent: Agent) -> None:
        self._documents.discard(agent)
        self._wait_files.remove(agent.wait_token)

    def _commit_made(self, change: Change) -> None:
        try:
            self._journal.commit(change)
        except BaseException:
            self._take_back_made(change)
            raise
        crashpoints.reach("create.inserted")

    def _take_back_made(self, change: Change) -> None:
        for agent in change.made:
            self._sessions.forget(agent.session)
            self._discard(agent)

    def _register(self, agent: Agent) -> None:
        self._registry.add(agent)
        self._journal.tell_listed(agent)
        crashpoints.reach("create.announced")

    def renew(self, agent: Agent) -> Agent:
        """``reset``: a ``new`` incarnation of a dead agent in its place.

        The configuration and the delegated task are kept; what it gave back stays
        with its session. Its dead descendants go, as with ``remove``. The errors of ``RESETTING``.
        """
        RESETTING.check_when(Act.SAY, "reset", agent)
        RESETTING.check_object(self._facts, NOBODY, agent)
        parent = self._registry.parent_of(agent)
        incarnation = Incarnation(secrets.token_hex(8))
        new = agent.renewed(
            index=NO_AGENT,
            incarnation=incarnation,
            payers=(incarnation, *self._registry.payers(agent)[1:]),
            spent=(),
            limits_told={},
            created=time.time(),
            wait_token=WaitFileName(secrets.token_hex(16)),
            parent_session=parent.session if parent is not None else None,
        )
        change = Change()
        change.made.append(new)
        members, left = self._removals.going(agent)
        for member in members:
            change.set(member, removed=True, archived=member is agent)
        change.set(agent, worktree=None)  # it is the new one's
        if parent is not None and new.owned:
            self._tasks.make_handle(change, parent, new)
        self._prepare(new)
        try:
            # a write replaces the second file (``write_document``), so it needs no copy
            for name, put in (("handoff.md", shutil.copyfile), ("input.jsonl", os.link)):
                old = self._documents.path(agent, name)
                if old.exists():
                    self._documents.ensure(new)
                    put(old, self._documents.path(new, name))
        except BaseException:
            self._discard(new)
            raise
        self._commit_made(change)
        crashpoints.reach("reset.committed")
        for member in reversed(members):
            self._removals.forget(member)
        self._removals.leave(left)
        self._register(new)
        return new

    def switch_session(self, agent: Agent, name: str) -> None:
        """Makes a session of this incarnation the current one; a new one if the name is new.

        The guard (``SWITCHING``) was asked. ``DeniedError`` for a session of an earlier
        incarnation; ``QuotaError``.
        """
        change = Change()
        with self._store.transaction():
            self.add_session(change, agent, name)
            if change.agents:
                self._journal.commit(change)
        crashpoints.reach("session.switched")

    def add_session(self, change: Change, agent: Agent, name: str) -> None:
        """Adds that; the session is made at once, if it is new."""
        index = self.check_session(agent, name)
        if index == agent.session:
            return
        if index is None:
            index = self._sessions.make(agent, name)
        others = {agent.session, *agent.other_sessions} - {index}
        change.set(agent, session=index, other_sessions=tuple(sorted(others)))

    def check_session(self, agent: Agent, name: str) -> SessionIndex | None:
        """A session of an agent, if there is one of this name; ``DeniedError``."""
        index = self._sessions.named(agent.owner, agent.name, name)
        if index is not None and self._sessions.load(index).agent_index != agent.index:
            raise DeniedError(
                f"the session {quote(name)} belongs to an earlier incarnation of "
                f"{quote(agent.name)}"
            )
        return index

    def adopt(self, agent: Agent, parent: Agent | None) -> None:
        """Makes a ``new`` agent the child of ``parent``, or a root agent again."""
        before = agent.parent
        if before == (parent.index if parent is not None else None):
            return
        if agent.worktree is not None:
            raise WrongStateError(
                f"cannot change the parent: {quote(agent.name)} has a worktree of its repository"
            )
        if parent is None:
            label = agent.label
            values: dict[str, Any] = {
                "parent": None,
                "parent_session": None,
                "channel": "",
                "lineage": f"operator uid:{agent.owner}",
                "payers": (),
                "life": "detached",
                "profile": Profile.PUBLIC_NAMED.value,
                "policy": policy.default_root(self._settings.config.policy, label),
                "policy_of_root": (),
                "creator_uid": agent.uid,
                "creator_gid": agent.gid,
                "creator_groups": agent.groups,
            }
        else:
            if parent.index == agent.index or parent in self._registry.descendants(agent):
                raise MalformedError(f"{quote(parent.name)} cannot be its own ancestor")
            if why := why_no_children(parent):
                raise WrongStateError(why)
            placing.check_here(parent, "has children")
            if full := _why_no_child(self._facts, agent.name, parent):
                raise QuotaError(full)
            self._tasks.check_handle(parent, agent.name)
            values = self._child_values(agent, parent)
        # its paths are another creator's now: they are looked at when it starts
        values["sources"] = {}
        change = Change()
        change.set(agent, **values)
        former = self._registry.parent_of(agent)
        self._ends.leave(change, agent)
        if parent is not None:
            change.channels.append((parent.session, agent.name))
            self._tasks.make_handle(change, parent, agent)
        self._journal.commit(change)
        if former is not None:
            self._registry.part(agent, former.index)
            self._journal.tell_agent(former.index, ("child",))
        self._registry.join(agent)
        self._journal.tell_parent(agent)

    def set_life(self, agent: Agent, life: str, profile: str) -> None:
        """Whether a child dies with its parent, which has a handle of it then."""
        change = Change()
        change.set(agent, life=life, profile=profile)
        parent = self._registry.parent_of(agent)
        if parent is not None and agent.owned != (life != "detached"):
            if agent.owned:
                self._tasks.drop_handle(change, parent, agent)
            else:
                self._tasks.check_handle(parent, agent.name)
                self._tasks.make_handle(change, parent, agent)
        self._journal.commit(change)

    def change_owner(self, agent: Agent, owner: int) -> None:
        """Gives a ``new`` agent, its name and its session to another user."""
        session = self._sessions.load(agent.session)
        before, old = session.owner, self._sessions.directory(session)
        new = self._sessions.directory(dataclasses.replace(session, owner=owner))
        if self._sessions.named(owner, agent.name, session.name) is not None:
            raise TakenError(
                f"uid {owner} already has a session {session.name} of {quote(agent.name)}"
            )
        self._trash.discard(new, owner)  # an earlier daemon did not come to the commit
        try:
            if old.exists():
                # a rename into another directory would take a lock of the whole filesystem
                new.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                shutil.copytree(old, new, symlinks=True, copy_function=os.link)
            change = Change()
            change.set(agent, owner=owner)
            change.set_session(session.index, owner=owner)
            change.claims.append((agent.name, owner))
            self._journal.commit(change)
        except BaseException:
            self._trash.discard(new, owner)
            raise
        self._trash.discard(old, before)
        if not self._sessions.any(before, agent.name):
            self._sessions.discard_homes(before, agent.name)
