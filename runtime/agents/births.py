"""How agents come into being: made, configured as somebody's child, given another life."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import secrets
import shutil
import time
from typing import Any

from runtime import crashpoints
from runtime.agents.messages import Messages
from runtime.agents.removals import Removals
from runtime.agents.tasks import TaskPlane
from runtime.agents.waiting import WaitingPlane, child_payload
from runtime.authority.attenuation import Authority
from runtime.authority.identity import Identity
from runtime.caller import Caller
from runtime.errors import (
    DeniedError,
    MalformedError,
    QuotaError,
    TakenError,
    WrongStateError,
)
from runtime.kernel import linux
from runtime.kernel.privilege import Privilege
from runtime.kernel.waits import Waits
from runtime.records.change import Change
from runtime.records.documents import Documents
from runtime.records.items import Items, Task
from runtime.records.journal import Journal
from runtime.records.lifecycle import AGENT_MOVES, Event, Status
from runtime.records.model import Agent, Profile
from runtime.records.registry import Registry, check_accepts
from runtime.records.sessions import Sessions
from runtime.records.settings import Settings
from runtime.records.store import Store
from runtime.texts import policy
from runtime.texts.names import check_name, quote


class Births:
    """Makes agents, and says whose they are."""

    def __init__(
        self,
        *,
        settings: Settings,
        store: Store,
        registry: Registry,
        items: Items,
        sessions: Sessions,
        journal: Journal,
        documents: Documents,
        waits: Waits,
        identity: Identity,
        authority: Authority,
        privilege: Privilege,
        messages: Messages,
        tasks: TaskPlane,
        waiting: WaitingPlane,
        removals: Removals,
    ) -> None:
        self._settings = settings
        self._store = store
        self._registry = registry
        self._items = items
        self._sessions = sessions
        self._journal = journal
        self._documents = documents
        self._waits = waits
        self._identity = identity
        self._authority = authority
        self._privilege = privilege
        self._messages = messages
        self._tasks = tasks
        self._waiting = waiting
        self._removals = removals

    def create(self, caller: Caller, name: str) -> Agent:
        """A new agent: a child if an agent calls, else a root agent.

        Raises ``MalformedError``, ``TakenError``, ``DeniedError``, ``QuotaError`` or
        ``WrongStateError`` (the calling agent is ending).
        """
        check_name(name)
        if self._registry.named(name) is not None:
            raise TakenError(
                f"an agent named {quote(name)} exists; choose another name or rmdir it"
            )
        if not caller.known:
            raise DeniedError("cannot identify the calling process")
        parent = self._registry.get(caller.agent) if caller.agent is not None else None
        if caller.agent is not None and (parent is None or not parent.accepts_children):
            raise WrongStateError("the calling agent is ending and can no longer create agents")
        if parent is not None and not self._authority.allows(parent, "agent", name, "create"):
            raise DeniedError(
                f"agent:{name} create is not in the effective policy of {quote(parent.name)}"
            )
        owner = parent.owner if parent is not None else caller.uid
        holder = self._store.name_owner(name)
        if holder is not None and holder != owner and not self._identity.is_master(caller):
            raise DeniedError(f"the name {quote(name)} and its history belong to another user")
        maximum = self._settings.config.agents
        if sum(a.owner == owner for a in self._registry) >= maximum:
            raise QuotaError(f"uid {owner} has {maximum} agents, the configured maximum")
        agent = Agent(
            index=0,
            incarnation=secrets.token_hex(8),
            name=name,
            owner=owner,
            uid=caller.uid,
            gid=caller.gid,
            label=f"{name}_t",
            created=time.time(),
            wait_token=secrets.token_hex(16),
        )
        if parent is None:
            self._default_root(agent, caller)
        else:
            for key, value in self._child_values(agent, parent).items():
                setattr(agent, key, value)
        change = Change()
        change.made.append(agent)
        if parent is not None:
            self._tasks.make_handle(change, parent, agent)
        self._prepare(agent)
        self._commit_made(change)
        self._register(agent)
        return agent

    def free_name(self, parent: Agent) -> str:
        """The first of PARENT-1, PARENT-2, … that a new child of an agent can have."""
        stem = parent.name[:58]
        numbers = itertools.count(1)
        return next(name for n in numbers if self._is_free(parent, name := f"{stem}-{n}"))

    def _is_free(self, parent: Agent, name: str) -> bool:
        if self._registry.named(name) is not None:
            return False
        if self._items.named(parent.index, Task, name) is not None:
            return False
        return self._store.name_owner(name) in (None, parent.owner)

    def _default_root(self, agent: Agent, caller: Caller) -> None:
        agent.lineage = f"operator uid:{caller.uid}"
        agent.creator_uid, agent.creator_gid = caller.uid, caller.gid
        agent.creator_groups = (
            linux.groups_of(caller.pid) if caller.groups is None else caller.groups
        )
        agent.groups = agent.creator_groups
        agent.policy = policy.default_root(self._settings.config.policy, agent.label)
        privilege = self._privilege
        if privilege.rootless:
            agent.uid, agent.gid, agent.groups = privilege.uid, privilege.gid, privilege.groups
        elif caller.uid == 0:
            agent.uid, agent.gid = self._settings.config.agent_ids()
            agent.groups = ()

    def _child_values(self, agent: Agent, parent: Agent) -> dict[str, Any]:
        """The defaults of a child of ``parent``; ``QuotaError``."""
        config, depth = self._settings.config, self._registry.depth(parent)
        if depth >= config.depth:
            raise QuotaError(
                f"{quote(agent.name)} would be {depth + 1} levels deep; "
                f"the configured maximum is {config.depth}"
            )
        if len(self._registry.children(parent)) >= config.children:
            raise QuotaError(
                f"{quote(parent.name)} has {config.children} children, the configured maximum"
            )
        self._tasks.check_handle(parent, agent.name)
        self._messages.check_room(parent)
        session = self._sessions.load(parent.session)
        lineage = f"agent:{parent.name} session:{session.name}"
        return {
            "parent": parent.index,
            "parent_session": parent.session,
            "channel": agent.name,
            "lineage": lineage + (f" run:{parent.run}" if parent.run else ""),
            "life": "owned",
            "profile": Profile.PRIVATE_CHILD.value,
            "uid": parent.uid,
            "gid": parent.gid,
            "groups": parent.groups,
            "policy": policy.default_child(
                self._authority.effective_policy(parent), agent.label
            ),
            "exec": agent.exec or parent.exec,
            "restart": "no",
            "policy_of_root": (),
        }

    def _prepare(self, agent: Agent) -> None:
        """What an agent has on disk before it is recorded."""
        self._store.keep_reserve()
        try:
            self._documents.make(agent)
            self._waits.create(agent.wait_token)
        except BaseException:
            self._discard(agent)
            raise
        crashpoints.reach("create.documents")

    def _discard(self, agent: Agent) -> None:
        self._documents.discard(agent)
        self._waits.remove(agent.wait_token)

    def _commit_made(self, change: Change) -> None:
        try:
            self._journal.commit(change)
        except BaseException:
            for agent in change.made:
                self._sessions.forget(agent.session)
                self._discard(agent)
            raise
        crashpoints.reach("create.inserted")

    def _register(self, agent: Agent) -> None:
        self._registry.add(agent)
        self._journal.tell_listed(agent)
        crashpoints.reach("create.announced")

    def renew(self, agent: Agent) -> Agent:
        """``reset``: a ``new`` incarnation of a dead agent in its place.

        The configuration and the delegated task are kept; what it gave back stays
        with its session. Its dead descendants go, as with ``remove``.
        """
        AGENT_MOVES.check(agent.status, Event.RESET)
        self._tasks.check_not_fetching(agent)
        parent = self._registry.live_parent(agent)
        if parent is not None and agent.owned:
            self._tasks.check_handle(parent, agent.name)
        new = agent.renewed(
            index=0,
            incarnation=secrets.token_hex(8),
            created=time.time(),
            wait_token=secrets.token_hex(16),
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
            # the second is replaced by whoever writes it (``write_document``): no copy is needed
            for name, put in (("handoff.md", shutil.copyfile), ("input.jsonl", os.link)):
                with contextlib.suppress(FileNotFoundError):
                    put(self._documents.path(agent, name), self._documents.path(new, name))
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
        """Makes a session of this incarnation the current one, a new one if there is none.

        ``WrongStateError`` while it works, or after its end; ``DeniedError`` for a
        session of an earlier incarnation; ``QuotaError``.
        """
        if agent.status in (Status.BUSY, Status.STARTING, Status.STOPPING, Status.DEAD):
            raise WrongStateError(f"cannot switch the session: the agent is {agent.status}")
        if agent.status is Status.PAUSED and agent.run:
            raise WrongStateError(
                f"cannot switch the session: the run {agent.run} is paused; resume it first"
            )
        index = self._store.session_named(agent.owner, agent.name, name)
        if index == agent.session:
            return
        if index is not None and self._sessions.load(index).incarnation != agent.index:
            raise DeniedError(
                f"the session {quote(name)} belongs to an earlier incarnation of "
                f"{quote(agent.name)}"
            )
        change = Change()
        with self._store.transaction():
            if index is None:
                index = self._sessions.make(agent, name)
            others = {agent.session, *agent.other_sessions} - {index}
            change.set(agent, session=index, other_sessions=tuple(sorted(others)))
            self._journal.commit(change)
        crashpoints.reach("session.switched")

    def adopt(self, agent: Agent, parent: Agent | None) -> None:
        """Makes a ``new`` agent the child of ``parent``, or a root agent again."""
        before = agent.parent
        if before == (parent.index if parent is not None else None):
            return
        if agent.worktree is not None:
            raise WrongStateError(f"{quote(agent.name)} has a worktree of its parent's repository")
        if parent is None:
            label = agent.label
            values: dict[str, Any] = {
                "parent": None,
                "parent_session": None,
                "channel": "",
                "lineage": f"operator uid:{agent.owner}",
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
            check_accepts(parent)
            values = self._child_values(agent, parent)
            values["exec"] = agent.exec or parent.exec
        # its paths are another creator's now: they are looked at when it starts
        values["sources"] = {}
        change = Change()
        change.set(agent, **values)
        former = self._registry.parent_of(agent)
        if former is not None:  # it is no child of that one's any more
            self._tasks.drop_handle(change, former, agent)
            payload = child_payload(agent.name, agent.status, "", "")
            self._waiting.resource_over(change, former, "child", agent.name, payload)
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
        old = self._sessions.directory(session)
        new = self._sessions.directory(dataclasses.replace(session, owner=owner))
        if self._store.session_named(owner, agent.name, session.name) is not None:
            raise TakenError(
                f"uid {owner} already has a session {session.name} of {quote(agent.name)}"
            )
        new.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.rename(old, new)
        try:
            change = Change()
            change.set(agent, owner=owner)
            change.set_session(session.index, owner=owner)
            change.claims.append((agent.name, owner))
            self._journal.commit(change)
        except BaseException:
            os.rename(new, old)
            raise
