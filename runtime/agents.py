"""The agents: the one place where their state changes.

A change is committed, its events go to the histories, and then those who
watch are told (``Watching``), in this order.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import logging
import os
import secrets
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import trio

from runtime import crashpoints, linux
from runtime.accounts import accounts_of, payer
from runtime.authority import policy
from runtime.authority.attenuation import Authority
from runtime.authority.identity import Caller, Identity, Role, supplementary_groups
from runtime.cgroups import Hierarchy
from runtime.change import EVENTS, RUNTIME, Change, Watching
from runtime.config import Config
from runtime.disk import Disk, Share
from runtime.errors import (
    CtxError,
    DeniedError,
    MalformedError,
    NoSpaceError,
    QuotaError,
    TakenError,
    WrongStateError,
)
from runtime.history import History
from runtime.items import Item, Items, Message, Task, TaskEvent, Wait
from runtime.lifecycle import AFTERWARDS, AGENT_MOVES, Effect, Event, Status
from runtime.living import Living
from runtime.messages import Messages
from runtime.model import SESSION_STATES, Agent, Outcome, Profile, Session
from runtime.names import check_name, dump_json, parse_duration, parse_size, quote, timestamp
from runtime.privilege import ROOT, Privilege
from runtime.store import Pending, Store
from runtime.tasks import TaskPlane
from runtime.trash import Trash
from runtime.waiting import WaitingPlane, child_payload
from runtime.waits import Waits
from runtime.work import WorkPlane

log = logging.getLogger("ctxd.agents")


#: what a message is, by what its sender is to the agent
_PROVENANCES: Final = (
    (Role.OPERATOR | Role.ROOT, "operator"),
    (Role.CREATOR, "supervisor"),
    (Role.WRITER, "agent"),
)
#: what a program may always print, in bytes
_LOG_MIN: Final = 64 << 10
_RETRY_SECONDS: Final = 1.0
#: lines that are in their files, and in the outbox until these are synced
_OUTBOX_MAX: Final = 1000
#: records of one agent that end in one change
_ENDED_AT_ONCE: Final = 64
#: agents that are removed in one step of the loop
_REMOVED_AT_ONCE: Final = 64
#: what a new incarnation does not have from the one before
_OF_ONE_LIFE: Final = (
    *("status", "outcome", "reason", "cause", "run", "pid", "boot", "cgroup", "session"),
    *("caused_by", "run_caused_by"),
    *("cell", "run_cause", "run_started", "frozen", "other_sessions", "reply_offset"),
    *("kept_offset", "started", "ended", "usage", "paused_from", "restarts", "restart_at"),
    *("output_start", "result_from_output"),
    *("bound_policy", "bound_mount", "bound_root", "focus"),
)


class Agents:
    """All agents that have not been removed, and the sessions of all."""

    def __init__(
        self,
        *,
        config: Config,
        store: Store,
        history: History,
        hierarchy: Hierarchy,
        waits: Waits,
        trash: Trash,
        state: Path,
        privilege: Privilege = ROOT,
    ) -> None:
        self.config = config
        self.accounts = accounts_of(config)
        self.privilege = privilege
        self.state = state
        self._base = state / "agent"
        self.waits = waits
        self.trash = trash
        self.watching: list[Watching] = []
        self.identity = Identity(self, hierarchy)
        self.authority = Authority(self)
        self._hierarchy = hierarchy
        self._store = store
        self._history = history
        self._undelivered: list[Pending] = store.undelivered()
        #: who acts in the present step of the loop, and what of that is to be told
        self._actor: Caller | None = None
        self._order: tuple[int, str, str, dict[str, str]] | None = None
        #: files to which a write failed
        self._cut: set[str] = set()
        self._late: list[Change] = []
        self._room = trio.Event()
        self._agents = {agent.index: agent for agent in store.load_agents()}
        self._by_name = {agent.name: agent for agent in self._agents.values()}
        self._children: dict[int, list[int]] = {}
        self._sessions: dict[int, Session] = {}
        self.items = Items()
        self.messages = Messages(self)
        self.tasks = TaskPlane(self)
        self.work = WorkPlane(self)
        self.waiting = WaitingPlane(self)
        for item in store.load_items():
            self.items.add(item)
            self._note_wait(item)
        for agent in self._agents.values():
            if agent.parent is not None:
                self._children.setdefault(agent.parent, []).append(agent.index)
        self.living = Living(self)
        self.disk = Disk(self.accounts, state, store.holders)
        self._long_log = trio.Event()
        store.crowded = lambda: self._long_log.set()
        #: up to where the outbox is in the histories, and where it was synced last
        self._appended = self._synced = 0
        self._syncing = trio.Lock()
        self._crowded = trio.Event()
        #: owned by what was removed, and still to be
        self._left: deque[Agent] = deque()
        self._more_left = trio.Event()
        #: histories whose last number is known to be the session's
        self._numbered: set[str] = set()
        self._complete_histories()

    def _complete_histories(self) -> None:
        """What an earlier daemon, or the disk, did not get from the outbox to the files."""
        lines: dict[str, list[str]] = {}
        for pending in self._undelivered:
            lines.setdefault(pending.path, []).append(pending.line)
        for path, wanted in lines.items():
            with contextlib.suppress(FileNotFoundError):  # of a history since removed
                self._history.complete(path, wanted)
        if self._undelivered:
            self._appended = self._undelivered[-1].seq
        self._undelivered.clear()

    # looking up

    def __iter__(self) -> Iterator[Agent]:
        return iter(list(self._agents.values()))

    def get(self, index: int) -> Agent | None:
        """An agent that has not been removed."""
        return self._agents.get(index)

    def recall(self, index: int) -> Agent | None:
        """An agent, removed ones included (their channels outlive them)."""
        return self._agents.get(index) or self._store.find_agent(index)

    def named(self, name: str) -> Agent | None:
        return self._by_name.get(name)

    def by_cgroup(self, path: str) -> Agent | None:
        """The agent whose cgroup a path below the daemon's root is in, however deep."""
        agent: Agent | None = None
        parts = path.split("/")[1:]
        while parts and parts[0].startswith("agent-"):
            found = self._by_name.get(parts[0].removeprefix("agent-"))
            if found is None or (agent is not None and found.parent != agent.index):
                break  # below a known agent: of that agent's own making
            agent = found
            parts = parts[2:] if parts[1:2] == ["child"] else []
        if agent is None or not agent.cgroup:
            return None
        return agent

    def children(self, agent: Agent) -> list[Agent]:
        """Children that have not been removed, oldest first."""
        return [self._agents[i] for i in self._children.get(agent.index, ()) if i in self._agents]

    def descendants(self, agent: Agent) -> list[Agent]:
        """Owned descendants, parents before children."""
        found: list[Agent] = []
        for child in self.children(agent):
            if child.owned:
                found += [child, *self.descendants(child)]
        return found

    def parent_of(self, agent: Agent) -> Agent | None:
        return self._agents.get(agent.parent) if agent.parent is not None else None

    def live_parent(self, agent: Agent) -> Agent | None:
        """The parent, None for a root agent.

        ``WrongStateError`` if it is not live: nothing is made or started below it.
        """
        if agent.parent is None:
            return None
        parent = self._agents.get(agent.parent)
        if parent is None:
            raise WrongStateError(f"the parent of {quote(agent.name)} was removed")
        _check_accepts(parent)
        return parent

    def ancestors(self, agent: Agent) -> list[Agent]:
        """Owners, the oldest first."""
        found: list[Agent] = []
        parent = self.parent_of(agent) if agent.owned else None
        while parent is not None:
            found.insert(0, parent)
            parent = self.parent_of(parent) if parent.owned else None
        return found

    def session(self, index: int) -> Session | None:
        session = self._sessions.get(index)
        if session is None:
            session = self._store.find_session(index)
            if session is not None and session.incarnation in self._agents:
                self._sessions[index] = session
        return session

    def sessions(self, owner: int, name: str) -> list[tuple[str, int]]:
        return self._store.sessions(owner, name)

    def session_named(self, owner: int, agent: str, name: str) -> int | None:
        return self._store.session_named(owner, agent, name)

    def first_session(self, owner: int, agent: str) -> int | None:
        return self._store.first_session(owner, agent)

    def session_agents(self, owner: int) -> list[str]:
        return self._store.session_agents(owner)

    def session_owners(self) -> list[int]:
        return self._store.session_owners()

    def channels(self, session: int) -> list[tuple[str, int]]:
        return self._store.channels(session)

    def find_channel(self, session: int, name: str) -> int | None:
        return self._store.find_channel(session, name)

    # where things are

    def directory(self, agent: Agent) -> Path:
        """The incarnation's own directory: records, output, documents."""
        return self._base / agent.incarnation

    def document(self, agent: Agent, name: str) -> Path:
        return self._base / f"{agent.incarnation}/doc/{name}"

    def session_path(self, session: Session) -> str:
        """Relative to the state directory."""
        return f"home/{session.owner}/agent/{session.agent}/{session.name}"

    def session_directory(self, session: Session) -> Path:
        return self.state / self.session_path(session)

    def node_path(self, agent: Agent) -> str:
        """The agent's cgroup below the daemon's root."""
        parent = self.parent_of(agent)
        if parent is not None and agent.owned:
            return f"{self.node_path(parent)}/child/agent-{agent.name}"
        return f"user-{agent.owner}/agent-{agent.name}"

    def share(self, whose: Agent | Session) -> Share:
        """The disk account for what belongs to an agent, or a session."""
        return Share(self.disk, lambda: whose.owner, lambda caller: payer(self, caller))

    def share_of(self, uid: int) -> Share:
        """The disk account of a user."""
        return Share(self.disk, lambda: uid, lambda caller: payer(self, caller))

    # derived values

    def grace(self, agent: Agent) -> float:
        """Seconds between SIGTERM and SIGKILL."""
        text = agent.limits.get("grace")
        return parse_duration(text) if text else self.config.grace

    def timeout(self, agent: Agent) -> float | None:
        text = agent.limits.get("timeout")
        return parse_duration(text) if text else self.config.timeout

    def log_max(self, agent: Agent) -> int:
        text = agent.limits.get("log_max")
        return parse_size(text) if text else self.config.log_max

    def log_room(self, agent: Agent) -> int:
        """``log_max``, or what there is left of the owner's disk account."""
        return min(self.log_max(agent), max(_LOG_MIN, self.disk.room(agent.owner)))

    def depth(self, agent: Agent) -> int:
        parent = self.parent_of(agent)
        return 1 + (self.depth(parent) if parent is not None else 0)

    # changing

    def commit(self, change: Change) -> None:
        """Commits, appends to the histories, tells those who watch, and has done what it calls for.

        ``NoSpaceError`` on a full disk, ``QuotaError`` if the owner's accounts have no room
        for its texts; with nothing changed.
        """
        self.living.check(change)
        self._commit_late()
        self._attribute(change)
        self._commit(change)
        self._have_done(change, afterwards=True)

    @contextlib.contextmanager
    def acting(self, caller: Caller, agent: Agent | None = None, **what: str) -> Iterator[None]:
        """Whatever is committed meanwhile was caused by ``caller``.

        Not to be awaited in: others act then. ``what`` is a control of ``agent`` that is
        written (``file``), or a verb obeyed (``verb``), which its history tells in the same
        transaction, or after it where that changes nothing else in the store.
        """
        before = self._actor, self._order
        self._actor, self._order = caller, None
        if agent is not None:
            self._order = (agent.session, "agent.control", agent.name, what)
        try:
            yield
            if self._order is not None:  # it is obeyed, and cannot be refused any more
                self.note(Change())
        finally:
            self._actor, self._order = before

    @property
    def acting_caller(self) -> Caller | None:
        """Who acts now; None for the runtime itself."""
        return self._actor

    @property
    def actor(self) -> str:
        """Who acts now, as in ``by`` of events."""
        return self.describe(self._actor) if self._actor is not None else RUNTIME

    def describe(self, caller: Caller) -> str:
        """``operator uid:N``, or ``agent:NAME run:ID`` without the run if there is none."""
        if caller.agent is None:
            return f"operator uid:{caller.uid}"
        agent = self.recall(caller.agent)
        if agent is None:
            return RUNTIME
        return f"agent:{agent.name}" + (f" run:{agent.run}" if agent.run else "")

    def _attribute(self, change: Change) -> None:
        by = self.actor
        if self._order is not None:
            session, kind, name, what = self._order
            self._order = None
            order = Change(by=by)
            order.event(session, kind, name, **what)
            change.lines[:0] = order.lines
        change.attribute(by)

    def draft(self) -> Change:
        """An empty change, for who decides himself whether it is committed or noted."""
        return Change()

    @contextlib.contextmanager
    def changing(self) -> Iterator[Change]:
        """A change that is committed once all of it is said, and not at all after an error."""
        change = Change()
        yield change
        self.commit(change)

    def note(self, change: Change) -> None:
        """Like ``commit``, for what has happened and cannot be refused.

        On a full disk it holds in memory at once and is committed as soon as
        there is room: nobody may keep an agent alive by filling the disk.
        """
        self._attribute(change)
        try:
            self._commit_late()
            self._commit(change)
        except NoSpaceError as error:
            log.error("%s; %d changes wait for room", error, len(self._late) + 1)
            self._late.append(change)
            self._room.set()
            for agent, values in change.agents:
                for name, value in values.items():
                    setattr(agent, name, value)
            for item, values in change.items.values():
                for name, value in values.items():
                    setattr(item, name, value)
                self._note_wait(item)
            self._have_done(change)
            for agent, values in change.agents:
                self._tell_agent(agent.index, values)
            self._tell_changed(change)
        self._have_done(change, afterwards=True)

    def _have_done(self, change: Change, *, afterwards: bool = False) -> None:
        """What a change calls for, once: it may be committed a second time (``_late``)."""
        effects, change.effects = change.effects, []
        due: list[tuple[Agent, Effect]] = []
        for each in effects:
            (due if (each[1] in AFTERWARDS) is afterwards else change.effects).append(each)
        for agent, effect in due:
            for watching in self.watching:
                watching.due(agent, effect)

    def _commit_late(self) -> None:
        while self._late:
            self._commit(self._late[0])
            del self._late[0]

    async def run(self) -> None:
        """Keeps the outbox short, and tries again what could not be written."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._empty_outbox)
            nursery.start_soon(self._checkpoint)
            nursery.start_soon(self._retry)
            nursery.start_soon(self._remove_left)

    async def _empty_outbox(self) -> None:
        """Nobody may ever ask for fsync(2): now and then the disk is synced beside the loop."""
        while True:
            await self._crowded.wait()
            self._crowded = trio.Event()
            async with self._syncing:
                appended = self._appended
                self._history.forget()
                await trio.to_thread.run_sync(
                    linux.sync_filesystem, self.state, abandon_on_cancel=True
                )
                self._note_synced(appended)

    async def _checkpoint(self) -> None:
        """Keeps the store's log of writes short: beside the loop, since it waits for the disk."""
        while True:
            await self._long_log.wait()
            self._long_log = trio.Event()
            try:
                await trio.to_thread.run_sync(self._store.checkpoint, abandon_on_cancel=True)
            except NoSpaceError as error:
                log.error("%s; the store is written to its log only", error)
                await trio.sleep(_RETRY_SECONDS)

    def _note_synced(self, appended: int) -> None:
        self._synced = max(self._synced, appended)
        self._store.delivered(self._synced)

    async def _retry(self) -> None:
        """Once a second, while something is left."""
        while True:
            await self._room.wait()
            await trio.sleep(_RETRY_SECONDS)
            with contextlib.suppress(NoSpaceError):
                self._commit_late()
            self.deliver()
            if not self._late and not self._undelivered:
                self._room = trio.Event()

    def _commit(self, change: Change) -> None:
        posted: list[Pending] = []
        merged: dict[int, tuple[Agent, dict[str, Any]]] = {}
        for agent, values in change.agents:
            merged.setdefault(agent.index, (agent, {}))[1].update(values)
        sessions: dict[int, Session] = {}
        before: dict[int, dict[str, Any]] = {}
        now = time.time()
        try:
            with self._store.transaction():
                for name, owner in change.claims:
                    self._store.claim_name(name, owner)
                for index, name in change.channels:
                    self._retire_channel(index, name)
                for agent, values in merged.values():
                    self._store.put_agent(agent.index, {**agent.dump(), **values})
                    if values.get("removed"):
                        self._store.delete_items(agent.index)
                for agent in change.made:
                    self._make(change, agent)
                    change.event(agent.session, "agent.create", agent.name, parent=agent.lineage)
                self._store_items(change, now)
                for index in (*change.sessions, *(line[0] for line in change.lines)):
                    if index not in sessions:
                        sessions[index] = self._load_session(index)
                        before[index] = sessions[index].dump()
                for index, values in change.sessions.items():
                    for name, value in values.items():
                        setattr(sessions[index], name, value)
                for (index, file), some in itertools.groupby(change.lines, lambda line: line[:2]):
                    fields = [line[2] for line in some]
                    posted.append(self._post(sessions[index], file, fields, now))
                for session in sessions.values():
                    session.updated = now
                    self._store.put_session(session)
        except BaseException:
            for index, values in before.items():
                for name, value in values.items():
                    setattr(sessions[index], name, value)
            raise
        for agent, values in merged.values():
            for name, value in values.items():
                setattr(agent, name, value)
        self._apply_items(change, now)
        crashpoints.reach("write.committed")
        self._have_done(change)
        self._undelivered += posted
        self.deliver()
        for agent, values in merged.values():
            self._tell_agent(agent.index, values)
        self._tell_items(change)
        told: dict[int, set[str]] = {index: {"updated"} for index in sessions}
        for index, values in change.sessions.items():
            told[index].update(values)
        for index, file, _ in change.lines:
            told[index].add(file)
        for index, name in change.touched:
            told.setdefault(index, set()).add(name)
        for index, names in told.items():
            self._tell_session(index, names)

    def _store_items(self, change: Change, now: float) -> None:
        """Inside the transaction. A record that is made gets its number here."""
        for item in change.made_items:
            for name, value in change.items.get(id(item), (item, {}))[1].items():
                setattr(item, name, value)
            item.created = item.created or now
            item.updated = now
            item.index = self._store.insert_item(item)
        made, dropped = set(map(id, change.made_items)), set(map(id, change.dropped_items))
        for item, values in change.items.values():
            if id(item) not in made and id(item) not in dropped:
                self._store.put_item(item.index, {**item.record(), "updated": now, **values})
        for item in change.dropped_items:
            self._store.delete_item(item.index)

    def _apply_items(self, change: Change, now: float) -> None:
        for item in change.made_items:
            self.items.add(item)
        for item, values in change.items.values():
            item.updated = now
            for name, value in values.items():
                setattr(item, name, value)
            self._note_wait(item)
        dropped = set(map(id, change.dropped_items))
        for item in (*change.made_items, *(item for item, _ in change.items.values())):
            if id(item) not in dropped:
                item.keep(self._store.read_text)
        for item in change.dropped_items:
            self.items.drop(item)

    def _note_wait(self, item: Item) -> None:
        if isinstance(item, Wait):
            if self.items.get(item.index) is item:
                self.items.note_wait(item)
            self.waiting.expect(item)

    def _tell_items(self, change: Change) -> None:
        for watching in self.watching:
            for item in (*change.made_items, *change.dropped_items):
                watching.item_listed(item)
        self._tell_changed(change)

    def _tell_changed(self, change: Change) -> None:
        for watching in self.watching:
            for item, values in change.items.values():
                watching.item_changed(item, (*values, "updated"))

    def _load_session(self, index: int) -> Session:
        session = self.session(index)
        if session is None:
            raise LookupError(f"session {index} is not in the store")
        return session

    def _post(
        self, session: Session, file: str, lines: list[dict[str, Any]], now: float
    ) -> Pending:
        path = f"{self.session_path(session)}/{file}"
        if path not in self._numbered:
            # A loss of power may have kept lines whose record it took.
            self._numbered.add(path)
            last = self._history.last_number(path)
            if file == EVENTS:
                session.events = max(session.events, last)
            else:
                session.messages = max(session.messages, last)
        if file == EVENTS:
            letter, last = "e", session.events
            session.events += len(lines)
        else:
            letter, last = "m", session.messages
            session.messages += len(lines)
        when = timestamp(now)
        texts = (
            dump_json({"id": f"{letter}{number}", "ts": when, **fields})
            for number, fields in enumerate(lines, last + 1)
        )
        return self._store.post(path, "\n".join(texts))

    def deliver(self) -> None:
        """Moves what the outbox holds to the histories, in order; the rest waits."""
        lines: dict[str, list[str]] = {}
        for pending in self._undelivered:
            lines.setdefault(pending.path, []).append(pending.line)
        for path, wanted in lines.items():
            try:
                if path in self._cut:
                    self._history.complete(path, wanted)
                else:
                    self._history.append(path, wanted)
            except FileNotFoundError:
                log.warning("history %s was removed, events for it are dropped", path)
            except OSError as error:
                log.error("history %s: %s; kept for later", path, error.strerror)
                self._cut.add(path)  # some of it may be there already
                self._room.set()
                continue
            crashpoints.reach("outbox.appended")
            self._cut.discard(path)
        # What is in a file stays in the outbox until the file is synced: of two things
        # that are written, a loss of power may keep either.
        if self._undelivered and not self._cut:
            self._appended = self._undelivered[-1].seq
        self._undelivered = [each for each in self._undelivered if each.path in self._cut]
        if self._appended - self._synced > _OUTBOX_MAX:
            self._crowded.set()

    def update(self, agent: Agent, **values: Any) -> None:
        """Changes fields of one agent."""
        change = Change()
        change.set(agent, **values)
        self.commit(change)

    async def synced(self) -> None:
        """Returns when everything acknowledged so far survives a loss of power; ``OSError``.

        The disk is waited for beside the loop, by one at a time: whoever comes meanwhile
        would else miss what another has taken to sync.
        """
        async with self._syncing:
            appended = self._appended
            await self._history.synced()
            self._note_synced(appended)
            await trio.to_thread.run_sync(self._store.sync)

    # life

    def create(self, caller: Caller, name: str) -> Agent:
        """A new agent: a child if an agent calls, else a root agent.

        Raises ``MalformedError``, ``TakenError``, ``DeniedError``, ``QuotaError`` or
        ``WrongStateError`` (the calling agent is ending).
        """
        check_name(name)
        if name in self._by_name:
            raise TakenError(
                f"an agent named {quote(name)} exists; choose another name or rmdir it"
            )
        if not caller.known:
            raise DeniedError("the calling process could not be identified")
        parent = self.get(caller.agent) if caller.agent is not None else None
        if caller.agent is not None and (parent is None or not parent.accepts_children):
            raise WrongStateError("the calling agent is ending: it cannot make agents any more")
        if parent is not None and not self.authority.allows(parent, "agent", name, "create"):
            raise DeniedError(
                f"agent:{name} create is not in the effective policy of {quote(parent.name)}"
            )
        owner = parent.owner if parent is not None else caller.uid
        holder = self._store.name_owner(name)
        if holder is not None and holder != owner and not self.identity.is_master(caller):
            raise DeniedError(f"the name {quote(name)} and its history belong to another user")
        if sum(a.owner == owner for a in self._agents.values()) >= self.config.agents:
            raise QuotaError(f"uid {owner} has {self.config.agents} agents, the configured maximum")
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
        if name in self._by_name or self.items.named(parent.index, Task, name) is not None:
            return False
        return self._store.name_owner(name) in (None, parent.owner)

    def _default_root(self, agent: Agent, caller: Caller) -> None:
        agent.lineage = f"operator uid:{caller.uid}"
        agent.creator_uid, agent.creator_gid = caller.uid, caller.gid
        agent.creator_groups = (
            supplementary_groups(caller.pid) if caller.groups is None else caller.groups
        )
        agent.groups = agent.creator_groups
        agent.policy = policy.default_root(self.config.policy, agent.label)
        privilege = self.privilege
        if privilege.rootless:
            agent.uid, agent.gid, agent.groups = privilege.uid, privilege.gid, privilege.groups
        elif caller.uid == 0:
            agent.uid, agent.gid = self.config.agent_ids()
            agent.groups = ()

    def _child_values(self, agent: Agent, parent: Agent) -> dict[str, Any]:
        """The defaults of a child of ``parent``; ``QuotaError``."""
        if self.depth(parent) >= self.config.depth:
            raise QuotaError(
                f"{quote(agent.name)} would be {self.depth(parent) + 1} levels deep, "
                f"the configured maximum is {self.config.depth}"
            )
        if len(self.children(parent)) >= self.config.children:
            raise QuotaError(
                f"{quote(parent.name)} has {self.config.children} children, the configured maximum"
            )
        self.tasks.check_handle(parent, agent.name)
        self.messages.check_room(parent)
        session = self._load_session(parent.session)
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
                self.authority.effective_policy(parent), agent.label
            ),
            "exec": agent.exec or parent.exec,
            "restart": "no",
            "policy_of_root": (),
        }

    def _prepare(self, agent: Agent) -> None:
        """What an agent has on disk before it is recorded."""
        self._store.keep_reserve()
        try:
            documents = self.directory(agent) / "doc"
            documents.mkdir(parents=True, mode=0o700)
            (documents / "artifact").mkdir()
            self.waits.create(agent.wait_token)
        except BaseException:
            self._discard(agent)
            raise
        crashpoints.reach("create.documents")

    def _discard(self, agent: Agent) -> None:
        self.trash.discard(self.directory(agent))
        self.waits.remove(agent.wait_token)

    def _commit_made(self, change: Change) -> None:
        try:
            self.commit(change)
        except BaseException:
            for agent in change.made:
                self._sessions.pop(agent.session, None)
                self._discard(agent)
            raise
        crashpoints.reach("create.inserted")

    def _make(self, change: Change, agent: Agent) -> None:
        """Inside the transaction: its record, its session, and whose name it is."""
        if self._store.name_owner(agent.name) != agent.owner:
            self._store.claim_name(agent.name, agent.owner)
        self._retire_channel(agent.parent_session, agent.channel)
        agent.index = self._store.insert_agent(agent)
        agent.session = self._new_session(agent)
        self._store.put_agent(agent.index, agent.dump())
        parent = self.parent_of(agent)
        if parent is not None and agent.owned:
            self.tasks.make_handle(change, parent, agent)

    def _register(self, agent: Agent) -> None:
        self._agents[agent.index] = agent
        self._by_name[agent.name] = agent
        if agent.parent is not None:
            self._children.setdefault(agent.parent, []).append(agent.index)
        self._tell_listed(agent)
        self._tell_parent(agent)
        crashpoints.reach("create.announced")

    def renew(self, agent: Agent) -> Agent:
        """``reset``: a ``new`` incarnation of a dead agent in its place.

        The configuration and the delegated task are kept; what it gave back stays
        with its session. Its dead descendants go, as with ``remove``.
        """
        AGENT_MOVES.check(agent.status, Event.RESET)
        self.tasks.check_not_fetching(agent)
        parent = self.live_parent(agent)
        if parent is not None and agent.owned:
            self.tasks.check_handle(parent, agent.name)
        fresh = Agent(index=0, incarnation="", name="", owner=0, uid=0, gid=0)
        new = dataclasses.replace(
            agent,
            **{name: getattr(fresh, name) for name in _OF_ONE_LIFE},
            index=0,
            incarnation=secrets.token_hex(8),
            created=time.time(),
            wait_token=secrets.token_hex(16),
            parent_session=parent.session if parent is not None else None,
        )
        change = Change()
        change.made.append(new)
        members, left = self._going(agent)
        for member in members:
            change.set(member, removed=True, archived=member is agent)
        change.set(agent, worktree=None)  # it is the new one's
        self._prepare(new)
        try:
            # the second is replaced by whoever writes it (``write_document``): no copy is needed
            for name, put in (("handoff.md", shutil.copyfile), ("input.jsonl", os.link)):
                with contextlib.suppress(FileNotFoundError):
                    put(self.document(agent, name), self.document(new, name))
        except BaseException:
            self._discard(new)
            raise
        self._commit_made(change)
        crashpoints.reach("reset.committed")
        for member in reversed(members):
            self._forget(member)
        self._leave(left)
        self._register(new)
        return new

    def _tell_agent(self, index: int, names: Iterable[str]) -> None:
        for watching in self.watching:
            watching.agent_changed(index, names)

    def _tell_session(self, index: int, names: Iterable[str]) -> None:
        for watching in self.watching:
            watching.session_changed(index, names)

    def _tell_listed(self, agent: Agent) -> None:
        for watching in self.watching:
            watching.agent_listed(agent)

    def _tell_parent(self, agent: Agent) -> None:
        if agent.parent is not None:
            self._tell_agent(agent.parent, ("child",))
        if agent.parent_session is not None:
            self._tell_session(agent.parent_session, ("child",))

    def _retire_channel(self, session: int | None, channel: str) -> None:
        """The channel of an earlier child of this name becomes NAME~1, NAME~2, …"""
        if session is None:
            return
        earlier = self._store.find_channel(session, channel)
        # As this transaction has it: memory follows when it is committed.
        old = self._store.find_agent(earlier) if earlier is not None else None
        if old is None:
            return
        number = self._store.retired_channels(session, channel) + 1
        while self._store.find_channel(session, f"{channel}~{number}") is not None:
            number += 1
        # Only a removed agent leaves its name, so no record in memory changes with it.
        self._store.put_agent(old.index, {**old.dump(), "channel": f"{channel}~{number}"})

    def switch_session(self, agent: Agent, name: str) -> None:
        """Makes a session of this incarnation the current one, a new one if there is none.

        ``WrongStateError`` while it works, or after its end; ``DeniedError`` for a
        session of an earlier incarnation; ``QuotaError``.
        """
        if agent.status in (Status.BUSY, Status.STARTING, Status.STOPPING, Status.DEAD):
            raise WrongStateError(f"session does not fit: the agent is {agent.status}")
        if agent.status is Status.PAUSED and agent.run:
            raise WrongStateError(f"session does not fit: the run {agent.run} is paused")
        index = self._store.session_named(agent.owner, agent.name, name)
        if index == agent.session:
            return
        if index is not None and self._load_session(index).incarnation != agent.index:
            raise DeniedError(f"the session {quote(name)} is of an earlier {quote(agent.name)}")
        change = Change()
        with self._store.transaction():
            if index is None:
                index = self._new_session(agent, name)
            others = {agent.session, *agent.other_sessions} - {index}
            change.set(agent, session=index, other_sessions=tuple(sorted(others)))
            self.commit(change)
        crashpoints.reach("session.switched")

    def _new_session(self, agent: Agent, wanted: str = "") -> int:
        name = wanted or "default"
        if self._store.session_named(agent.owner, agent.name, name) is not None:
            name = self._free_session(agent)
        now = time.time()
        session = Session(
            index=0,
            owner=agent.owner,
            agent=agent.name,
            name=name,
            incarnation=agent.index,
            created=now,
            updated=now,
        )
        directory = self.session_directory(session)
        # left over only where a crash came between this and the commit
        self.trash.discard(directory)
        (directory / "context" / "episode").mkdir(parents=True, mode=0o700)
        session.index = self._store.insert_session(session)
        self._sessions[session.index] = session
        return session.index

    def _free_session(self, agent: Agent) -> str:
        """A free name ``default.NUMBER``, found by doubling and halving: thousands of sessions
        of one agent are not all looked at. Gaps that removed sessions left may stay."""

        def is_taken(number: int) -> bool:
            name = f"default.{number}"
            return self._store.session_named(agent.owner, agent.name, name) is not None

        free = 2
        while is_taken(free):
            free *= 2
        taken = free // 2  # 1 stands for the first, which has no number
        while free - taken > 1:
            middle = (taken + free) // 2
            if is_taken(middle):
                taken = middle
            else:
                free = middle
        return f"default.{free}"

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
                "policy": policy.default_root(self.config.policy, label),
                "policy_of_root": (),
                "creator_uid": agent.uid,
                "creator_gid": agent.gid,
                "creator_groups": agent.groups,
            }
        else:
            if parent.index == agent.index or parent in self.descendants(agent):
                raise MalformedError(f"{quote(parent.name)} cannot be its own ancestor")
            _check_accepts(parent)
            values = self._child_values(agent, parent)
            values["exec"] = agent.exec or parent.exec
        # its paths are another creator's now: they are looked at when it starts
        values["sources"] = {}
        change = Change()
        change.set(agent, **values)
        former = self.parent_of(agent)
        if former is not None:  # it is no child of that one's any more
            self.tasks.drop_handle(change, former, agent)
            payload = child_payload(agent.name, agent.status, "", "")
            self.waiting.resource_over(change, former, "child", agent.name, payload)
        if parent is not None:
            change.channels.append((parent.session, agent.name))
            self.tasks.make_handle(change, parent, agent)
        self.commit(change)
        if former is not None:
            self._children[former.index].remove(agent.index)
            self._tell_agent(former.index, ("child",))
        if agent.parent is not None:
            bisect.insort(self._children.setdefault(agent.parent, []), agent.index)
        self._tell_parent(agent)

    def set_life(self, agent: Agent, life: str, profile: str) -> None:
        """Whether a child dies with its parent, which has a handle of it then."""
        change = Change()
        change.set(agent, life=life, profile=profile)
        parent = self.parent_of(agent)
        if parent is not None and agent.owned != (life != "detached"):
            if agent.owned:
                self.tasks.drop_handle(change, parent, agent)
            else:
                self.tasks.check_handle(parent, agent.name)
                self.tasks.make_handle(change, parent, agent)
        self.commit(change)

    def change_owner(self, agent: Agent, owner: int) -> None:
        """Gives a ``new`` agent, its name and its session to another user."""
        session = self._load_session(agent.session)
        old = self.session_directory(session)
        new = self.state / f"home/{owner}/agent/{agent.name}/{session.name}"
        if self._store.session_named(owner, agent.name, session.name) is not None:
            raise TakenError(f"uid {owner} has a session {session.name} of {quote(agent.name)}")
        new.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.rename(old, new)
        try:
            change = Change()
            change.set(agent, owner=owner)
            change.set_session(session.index, owner=owner)
            change.claims.append((agent.name, owner))
            self.commit(change)
        except BaseException:
            os.rename(new, old)
            raise

    def remove(self, agent: Agent) -> None:
        """Removes a ``new`` or ``dead`` agent and its descendants; history stays."""
        members, left = self._going(agent)
        for member in (*members, *left):
            if member.live:
                raise WrongStateError(
                    f"{quote(member.name)} is {member.status}: stop it, wait, then remove"
                )
            self.tasks.check_not_fetching(member)
        self._cancel_new_of(members)
        change = Change()
        parent = self.parent_of(agent)
        if parent is not None:
            self.tasks.drop_handle(change, parent, agent)
        self._remove(change, members)
        self._leave(left)

    def _going(self, agent: Agent) -> tuple[list[Agent], list[Agent]]:
        """What goes with an agent: at once, itself included, and a little at a time after it."""
        members = [agent, *self.descendants(agent)]
        return members[:_REMOVED_AT_ONCE], members[_REMOVED_AT_ONCE:]

    def _cancel_new_of(self, members: list[Agent]) -> None:
        """In changes of their own, before anything is said of handles: those end with them."""
        for member in members:
            if member.status is Status.NEW:
                change = Change()
                self.record_end(
                    change, member, Event.REMOVING, Outcome.CANCELLED, "operator_stop"
                )
                self.note(change)

    def _remove(self, change: Change, members: list[Agent]) -> None:
        for member in members:
            change.set(member, removed=True)
        try:
            self.commit(change)
        except NoSpaceError:
            # removing makes room: it is what the reserve is kept for
            self._store.release_reserve()
            self.commit(change)
        crashpoints.reach("remove.committed")
        for member in reversed(members):
            self._forget(member)

    def _leave(self, members: list[Agent]) -> None:
        """What these were owned by is removed: they go soon, and never start meanwhile, since
        what has lost its owner cannot (``live_parent``)."""
        if members:
            self._left += members
            self._more_left.set()

    async def _remove_left(self) -> None:
        """What an owner that was removed has left behind, also with an earlier daemon."""
        self._leave([a for a in self if a.owned and self.parent_of(a) is None])
        while True:
            await self._more_left.wait()
            self._more_left = trio.Event()
            while self._left:
                part = [self._left.popleft() for _ in range(min(len(self._left), _REMOVED_AT_ONCE))]
                there = [m for m in part if self.get(m.index) is m and not m.live]
                crashpoints.reach("remove.more")
                try:
                    self._cancel_new_of(there)
                    self._remove(Change(by=RUNTIME), there)
                except CtxError as error:
                    log.error("what a removed agent owned could not be removed: %s", error)
                await trio.lowlevel.checkpoint()

    def unmake(self, agent: Agent) -> None:
        """Takes back the making of a ``new`` agent, whose configuration failed.

        Unlike after ``remove``, neither a session nor a channel tells of it.
        """
        session = self._load_session(agent.session)
        channel_of = agent.parent_session
        change = Change()
        change.set(agent, removed=True, parent_session=None, channel="")
        parent = self.parent_of(agent)
        if parent is not None:
            self.tasks.drop_handle(change, parent, agent)
        try:
            self._erase(change, session)
        except NoSpaceError:
            self._store.release_reserve()
            self._erase(change, session)
        self._forget(agent)
        directory = self.session_directory(session)
        self.trash.discard(directory)
        with contextlib.suppress(OSError):  # an earlier life of the name has sessions there
            directory.parent.rmdir()
        if channel_of is not None:
            self._tell_session(channel_of, ("child",))

    def _erase(self, change: Change, session: Session) -> None:
        with self._store.transaction():
            self.commit(change)
            self._erase_session(session)

    def remove_temporary(self, agent: Agent) -> None:
        """Of a ``temp`` child only the parent's channel stays."""
        try:
            self.remove(agent)
        except CtxError as error:
            log.error("%s: it is temp and could not be removed: %s", agent.name, error)

    def _forget(self, agent: Agent) -> None:
        self.authority.forget(agent)
        del self._agents[agent.index]
        del self._by_name[agent.name]
        for task in self.items.of(agent.index, Task):
            self.tasks.forget(task)
        self.items.drop_all(agent.index)
        self._children.pop(agent.index, None)
        if agent.parent is not None and agent.parent in self._children:
            self._children[agent.parent].remove(agent.index)
        for session in (agent.session, *agent.other_sessions):
            self._sessions.pop(session, None)
        self.waits.remove(agent.wait_token)
        crashpoints.reach("remove.forgotten")
        self.clear_directory(agent)
        self.disk.look()
        self._tell_listed(agent)
        self._tell_parent(agent)

    def clear_directory(self, agent: Agent) -> None:
        """Removes what only the object had; documents of a channel or a session stay."""
        directory = self.directory(agent)
        if agent.parent_session is None and not agent.archived:
            self.trash.discard(directory)
            return
        for path in directory.iterdir() if directory.is_dir() else ():
            if path.name == "doc":
                continue
            self.trash.discard(path)

    def remove_strays(self) -> None:
        """Files of no agent: left by a crash between two steps."""
        known = {agent.incarnation for agent in self}
        kept = self._store.kept_incarnations()
        for directory in self._base.iterdir():
            if directory.name in known:
                continue
            for path in directory.iterdir():
                if path.name != "doc" or directory.name not in kept:
                    self.trash.discard(path)
            if directory.name not in kept:
                self.trash.discard(directory)
        tokens = {task.wait_token for task in self.items.all(Task) if not task.child}
        self.waits.keep(tokens | {agent.wait_token for agent in self})

    def record_end(
        self, change: Change, agent: Agent, event: Event, outcome: Outcome, reason: str
    ) -> None:
        """Adds to ``change`` that an event makes an agent dead, and what this means for it, its
        session and its parent."""
        self.waiting.cancel_all(change, agent)
        self.tasks.keep_worktree(change, agent, f"it ended without that being seen ({reason})")
        change.set(
            agent,
            outcome=outcome.value,
            reason=reason,
            ended=time.time(),
            pid=0,
            run="",
            cell="",
            run_cause=None,
            frozen=False,
            cgroup="",
        )
        for session in (agent.session, *agent.other_sessions):
            change.set_session(session, state=SESSION_STATES[outcome])
        change.move(agent, event, outcome=outcome, reason=reason)
        parent = self.parent_of(agent)
        if parent is not None and "parent_dead" in reason and agent.parent_session is not None:
            change.event(
                agent.parent_session,
                "agent.child.cancel",
                parent.name,
                parent=parent.name,
                child=agent.name,
                reason="parent_dead",
            )
        self.messages.add_ends(change, agent, reason)
        lost = outcome is Outcome.INTERRUPTED
        self.tasks.add_ends(change, agent, TaskEvent.INTERRUPT if lost else TaskEvent.CANCEL)
        change.event(agent.session, "agent.stop", agent.name, status=outcome.value, reason=reason)
        if parent is not None:
            self.tasks.child_ended(change, parent, agent, outcome)
            payload = child_payload(agent.name, Status.DEAD, outcome.value, reason)
            self.waiting.resource_over(change, parent, "child", agent.name, payload)

    def add_some_ends(
        self, change: Change, agent: Agent, reason: str, *, everything: bool
    ) -> bool:
        """Of what ``record_end`` will end, some, if it is so much that it would hold up others.

        Without ``everything`` the agent is started again: only its commands end.
        """
        tasks = self.tasks.unfinished(change, agent)
        waits = self.waiting.armed(change, agent) if everything else []
        queued = self.messages.pending(agent) if everything else []
        if len(tasks) + len(waits) + len(queued) <= _ENDED_AT_ONCE:
            return False
        for wait in waits[:_ENDED_AT_ONCE]:
            self.waiting.cancel(change, agent, wait)
        self.messages.drop(change, agent, queued[:_ENDED_AT_ONCE], reason)
        for task in tasks[:_ENDED_AT_ONCE]:
            self.tasks.end(change, agent, task, TaskEvent.CANCEL)
        return True

    def send(
        self,
        caller: Caller,
        agent: Agent,
        text: str,
        *,
        priority: str = "normal",
        name: str = "",
        asked: str = "",
    ) -> Message:
        """A message from somebody to an agent, as its ``ingress`` allows.

        ``DeniedError``, and whatever ``Messages.queue`` raises.
        """
        roles = self.identity.roles(caller, agent)
        if agent.private and self.parent_of(agent) is not None:
            roles &= Role.CREATOR
        provenance = next((word for role, word in _PROVENANCES if roles & role), None)
        if provenance is None:
            who = "its supervisor" if agent.private else "operators and agents with policy write"
            raise DeniedError(f"{quote(agent.name)} takes messages of {who} only")
        sender = f"operator uid:{caller.uid}"
        if caller.agent is not None and (actor := self.get(caller.agent)) is not None:
            sender = f"agent:{actor.name}"
        with self.acting(caller), self.changing() as change:
            message = self.messages.queue(
                change,
                agent,
                text=text,
                sender=sender,
                provenance=provenance,
                priority=priority,
                name=name,
                asked=asked,
            )
        crashpoints.reach("message.queued")
        return message

    def next_run(self, agent: Agent) -> str:
        with self._store.transaction():
            return f"r{self._store.next_run(agent.name)}"

    def remove_session(self, session: Session) -> None:
        """Removes the directory and record of a session whose incarnation is over."""
        agent = self.get(session.incarnation)
        if agent is not None:
            raise WrongStateError(f"the agent {quote(agent.name)} of this session still exists")
        with self._store.transaction():
            self._erase_session(session)
        self.trash.discard(self.session_directory(session))
        self.disk.look()
        agent = self.recall(session.incarnation)
        if agent is not None and agent.archived and agent.parent_session is None:
            self.trash.discard(self.directory(agent))
        self._sessions.pop(session.index, None)

    def _erase_session(self, session: Session) -> None:
        """Inside a transaction: its record, and the name that nothing tells of any more."""
        self._store.delete_session(session.index)
        if (
            self._store.name_owner(session.agent) == session.owner
            and self._store.first_session(session.owner, session.agent) is None
        ):
            self._store.release_name(session.agent)

    def document_size(self, agent: Agent, name: str) -> int:
        try:
            return self.document(agent, name).stat().st_size
        except FileNotFoundError:
            return 0

    def read_document(self, agent: Agent, name: str, size: int = -1) -> bytes:
        """All of it, or so many bytes; nothing if it was never written."""
        try:
            with open(self.document(agent, name), "rb") as file:
                return file.read(size)
        except FileNotFoundError:
            return b""

    def write_document(self, agent: Agent, name: str, data: bytes) -> None:
        """Replaces a document as a whole; readers see the old or the new one."""
        replace_file(self.document(agent, name), data)
        self._tell_agent(agent.index, (name,))


def _check_accepts(parent: Agent) -> None:
    if not parent.accepts_children:
        raise WrongStateError(
            f"the parent {quote(parent.name)} is {parent.status}: nothing is made "
            "or started below it"
        )


def replace_file(path: Path, data: bytes) -> None:
    """Writes beside it, then renames over it (rename(2))."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(data)
    os.replace(temporary, path)
