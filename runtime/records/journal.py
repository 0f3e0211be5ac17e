"""The one way in which anything changes: a change is committed, then told.

A change is one transaction of the store. Its events go to an outbox in the same transaction and
from there to the histories; then each ``Subscriber`` is told, and does what the change calls for.

Controls that are written and verbs that are obeyed are events too, in the transaction of what they
change.

A change is applied in memory inside its transaction, and undone there if that fails; nothing else
runs in between. Effects that the kernel may refuse come before the commit, the others after it
(``lifecycle``). A change is one step of the loop, so large ones are split by who makes them, and
each part leaves a state from which the next daemon goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from runtime import crashpoints
from runtime.errors import KernelError, NoSpaceError
from runtime.ids import NO_AGENT, AgentIndex, SessionIndex
from runtime.kernel.inotify import Wakeup
from runtime.records.acting import Acting
from runtime.records.change import EVENTS, Answer, Change, Subscriber, Undoing
from runtime.records.fleet import Fleet, numbered, path_of, plain
from runtime.records.history import History
from runtime.records.itemlists import Items
from runtime.records.items import Item
from runtime.records.lifecycle import AFTERWARDS, BEFOREHAND, Effect
from runtime.records.model import Agent, Session
from runtime.records.outbox import Outbox
from runtime.records.registry import Registry
from runtime.records.sessions import Sessions
from runtime.records.store import Pending, Store
from runtime.texts.names import dump_json, shown_json, timestamp

log = logging.getLogger("ctxd.journal")

_RETRY_SECONDS: Final = 1.0
#: bytes of events that the store holds for a session
_HELD_MAX: Final = 2048


class Journal(Acting):
    """Commits changes, and knows who acts in the present step of the loop (``Acting``)."""

    def __init__(
        self,
        *,
        store: Store,
        registry: Registry,
        items: Items,
        sessions: Sessions,
        history: History,
        fleet: Fleet,
        state: Path,
    ) -> None:
        super().__init__(registry)
        self._store = store
        self._history = history
        self._items = items
        self._sessions = sessions
        #: by the methods of ``Subscriber``: those that override it
        self._told: dict[str, list[Callable[..., None]]] = defaultdict(list)
        #: changes that hold in memory, and wait for room on the disk
        self._late: list[Change] = []
        self._room = trio.Event()
        self._long_log = Wakeup()
        store.crowded = self._long_log.notify
        #: histories whose last number is known to be the session's
        self._numbered: set[str] = set()
        self._outbox = Outbox(store, history, fleet)
        #: see ``Outbox.synced``, ``Store.sync``
        self.synced, self.sync = self._outbox.synced, store.sync

    @property
    def behind(self) -> int:
        """Changes and lines of histories that wait for room on the disk."""
        return len(self._late) + len(self._outbox.left)

    def subscribe(self, subscriber: Subscriber) -> None:
        """It is told of every change from now on, after earlier subscribers."""
        for name, default in vars(Subscriber).items():
            if callable(default) and getattr(type(subscriber), name) is not default:
                self._told[name].append(getattr(subscriber, name))

    # changing

    def commit(self, change: Change) -> None:
        """``NoSpaceError`` on a full disk, ``QuotaError`` if the owner's accounts have no room
        for its texts, ``KernelError`` if what it calls for cannot be done; with nothing changed."""
        for admit in self._told["admit"]:
            admit(change)
        if self.cause.gathered is not None:
            self._gather(change, *self.cause.gathered)
            return
        self._commit_late()
        self._attribute(change)
        attempted = [each for each in change.effects if each[1] in BEFOREHAND]
        change.effects = [each for each in change.effects if each[1] not in BEFOREHAND]
        try:
            for agent, effect in attempted:
                for attempt in self._told["attempt"]:
                    attempt(agent, effect)
            self._commit(change)
        except BaseException:
            for agent, _ in attempted:
                for restore in self._told["restore"]:
                    restore(agent)
            if change.done and self.cause.doing is not None:
                self.cause.doing.done = False
            raise
        self._have_done(change, afterwards=True)

    def note(self, change: Change) -> None:
        """Like ``commit``, for what has happened and cannot be refused. ``KernelError`` tells that
        a kill failed; the change holds all the same.

        On a full disk it holds in memory at once and is committed as soon as
        there is room: nobody may keep an agent alive by filling the disk.
        """
        if self.cause.gathered is not None:
            self._gather(change, *self.cause.gathered)
            return
        self._attribute(change)
        try:
            self._commit_late()
            self._commit(change)
        except NoSpaceError as error:
            log.error("%s; %d changes are waiting for disk space", error, len(self._late) + 1)
            self._late.append(change)
            self._room.set()
            for agent, values in change.agents.values():
                self._registry.change(agent, values)
            for item, values in change.items.values():
                _set(item, values)
                self._items.note(item)
            if change.answer is not None and change.answer.output is None:
                change.answer.output = change.answer.make()
            self._have_done(change)
            self._tell_agents(change)
            self._tell_changed(change)
        self._have_done(change, afterwards=True)

    def _gather(self, change: Change, whole: Change, undoing: Undoing) -> None:
        """Has a change hold, which is committed with what else is said (``gathering``)."""
        self._attribute(change)
        self._apply_agents(change, undoing)
        whole.add(change)

    def update(self, agent: Agent, **values: Any) -> None:
        """Changes fields of one agent."""
        change = Change()
        change.set(agent, **values)
        self.commit(change)

    @contextlib.contextmanager
    def changing(self) -> Iterator[Change]:
        """A change that is committed once all of it is said, and not at all after an error."""
        change = Change()
        yield change
        self.commit(change)

    def _have_done(self, change: Change, *, afterwards: bool = False) -> None:
        """Has done what a change calls for, once: it may be committed a second time (``_late``).
        What fails is raised when all has been tried."""
        effects, change.effects = change.effects, []
        due: list[tuple[Agent, Effect]] = []
        for each in effects:
            (due if (each[1] in AFTERWARDS) is afterwards else change.effects).append(each)
        failed: KernelError | None = None
        for agent, effect in due:
            for do in self._told["due"]:
                try:
                    do(agent, effect)
                except KernelError as error:
                    failed = failed or error
        if failed is not None:
            raise failed

    # committing

    def _attribute(self, change: Change) -> None:
        demand, answer, by = self.cause.demand, self.cause.answer, self.actor
        if answer is not None and answer.output is None:
            change.answer = answer
        if demand is not None and not demand.told:
            demand.told = True
            change.lines.insert(0, (demand.agent.session, EVENTS, {**demand.event, "by": by}))
        if (doing := self.cause.doing) is not None and not doing.done:
            doing.done = True
            change.done.append((doing.key, doing.number, doing.line))
        change.attribute(by)

    def _commit_late(self) -> None:
        while self._late:
            self._commit(self._late[0])
            del self._late[0]

    def _commit(self, change: Change) -> None:
        now = time.time()
        undoing: Undoing = []
        try:
            with self._store.transaction():
                self._store_agents(change)
                self._store_items(change, now)
                sessions = self._apply_sessions(change, undoing)
                posted, grown = self._store_lines(change, sessions, timestamp(now))
                undoing.append(partial(_shorten, change.posts, len(change.posts)))
                for complete in self._told["storing"]:
                    complete(change, now)
                for post in self._told["posting"]:
                    post(change, undoing)
                self._store_sessions(change, sessions, now)
                # so that what a call answers is said of what will hold
                self._apply_agents(change, undoing)
                self._apply_items(change, now, undoing)
                self._store_answer(change.answer, now, undoing)
        except BaseException:
            for undo in reversed(undoing):
                undo()
            raise
        self._let_go_of_items(change)
        crashpoints.reach("write.committed")
        self._have_done(change)
        self._deliver(posted)
        self._tell_agents(change)
        self._tell_items(change)
        self._tell_sessions(change, sessions, grown)

    def _store_agents(self, change: Change) -> None:
        """Inside the transaction: those that change, and those that are made."""
        for name, owner in change.claims:
            self._store.claim_name(name, owner)
        for index, name in change.channels:
            self._sessions.retire_channel(index, name)
        for agent, values in change.agents.values():
            if agent.index != NO_AGENT:  # or what was gathered of it is inserted with it
                self._store.put_agent(agent.index, {**agent.dump(), **values}, values)
            if values.get("removed"):
                self._store.delete_items(agent.index)
        for agent in change.made:
            self._insert(agent)
            change.tell(agent, "agent.create", parent=agent.lineage)
        for name, number in change.runs:
            self._store.put_runs(name, number)
        for task, child in change.handles:
            task.child = child.index

    def _insert(self, agent: Agent) -> None:
        """Its record, its session, and whose name it is."""
        if self._store.name_owner(agent.name) != agent.owner:
            self._store.claim_name(agent.name, agent.owner)
        self._sessions.retire_channel(agent.parent_session, agent.channel)
        agent.index = self._store.insert_agent(agent)
        agent.session = self._sessions.make(agent, agent.guest.get("session", ""))
        self._store.put_agent(agent.index, agent.dump())

    def _apply_sessions(self, change: Change, undoing: Undoing) -> dict[SessionIndex, Session]:
        """In memory, the sessions that are changed, or whose histories grow."""
        sessions: dict[SessionIndex, Session] = {}
        for index in (*change.sessions, *(line[0] for line in change.lines)):
            if index not in sessions:
                sessions[index] = self._sessions.load(index)
                undoing.append(partial(_set, sessions[index], sessions[index].dump()))
        for index, values in change.sessions.items():
            _set(sessions[index], values)
        return sessions

    def _store_sessions(
        self, change: Change, sessions: Mapping[SessionIndex, Session], now: float
    ) -> None:
        """Inside the transaction, with the numbers of their last lines."""
        for index, session in sessions.items():
            session.updated = now
            self._store.put_session(session, change.sessions.get(index, ()))

    def _store_lines(
        self, change: Change, sessions: Mapping[SessionIndex, Session], when: str
    ) -> tuple[list[Pending], dict[SessionIndex, int]]:
        """Inside the transaction: what is on its way to files, and how much that is."""
        posted: list[Pending] = []
        grown: dict[SessionIndex, int] = defaultdict(int)
        for (index, file), some in itertools.groupby(change.lines, lambda line: line[:2]):
            session, fields = sessions[index], [line[2] for line in some]
            lines = self._number(session, file, fields, when)
            size, is_event = len(lines.encode()) + 1, file == EVENTS
            held = session.held if is_event else None
            room = -1 if held is None else _HELD_MAX - size - held
            if room < 0:
                posted += self._release(session)
            last = self._store.number(len(fields))
            text = numbered(session, lines, last) if is_event else lines
            grown[index] += size + (len(text.encode()) + 1 if is_event else 0)
            if room >= 0:
                self._sessions.hold(index, text + "\n")
                session.held = _HELD_MAX - room
            else:
                row = Pending(last, f"{self._sessions.path(session)}/{file}", text)
                self._store.post(row)
                posted.append(row._replace(line=lines))
            if is_event:
                posted.append(Pending(last, path_of(session.owner), text))
        return posted, grown

    def _apply_agents(self, change: Change, undoing: Undoing) -> None:
        """In memory, what is changed."""
        for agent, values in change.agents.values():
            was = {name: getattr(agent, name) for name in values}
            undoing.append(partial(self._registry.change, agent, was))
            self._registry.change(agent, values)

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

    def _apply_items(self, change: Change, now: float, undoing: Undoing) -> None:
        """In memory, what is made and changed."""
        for item in change.made_items:
            undoing.append(partial(self._take_back, item, self._items.add(item)))
        for item, values in change.items.values():
            undoing.append(partial(self._items.note, item))
            before = {name: item.raw(name) for name in values}
            undoing.append(partial(_set, item, {"updated": item.updated, **before}))
            item.updated = now
            _set(item, values)
            self._items.note(item)

    def _let_go_of_items(self, change: Change) -> None:
        """Lets go of items that were dropped, and of the long texts of the others."""
        dropped = set(map(id, change.dropped_items))
        for item in (*change.made_items, *(item for item, _ in change.items.values())):
            if id(item) not in dropped:
                item.keep(self._store.read_text)
        for item in change.dropped_items:
            self._items.drop(item)

    def _take_back(self, item: Item, replaced: Item | None) -> None:
        self._items.drop(item)
        if replaced is not None:
            self._items.add(replaced)

    def _store_answer(self, answer: Answer | None, now: float, undoing: Undoing) -> None:
        """Inside the transaction, if there is one and it is known by now."""
        if answer is None:
            return
        if answer.output is None:
            undoing.append(partial(setattr, answer, "output", None))
            answer.output = answer.make()
        if answer.output is not None or answer.begun:
            answer.size = self._store.put_answer(
                answer.caller, answer.name, answer.call, now, answer.output
            )

    # telling

    def tell_agent(self, index: AgentIndex, names: Iterable[str]) -> None:
        """Fields or documents of an agent changed."""
        for tell in self._told["agent_changed"]:
            tell(index, names)

    def tell_session(self, index: SessionIndex, names: Iterable[str]) -> None:
        """Files of a session changed."""
        for tell in self._told["session_changed"]:
            tell(index, names)

    def tell_listed(self, agent: Agent) -> None:
        """An agent appeared, or went."""
        for tell in self._told["agent_listed"]:
            tell(agent)
        self.tell_parent(agent)

    def tell_parent(self, agent: Agent) -> None:
        """An agent's parent has a child more, or less."""
        if agent.parent is not None:
            self.tell_agent(agent.parent, ("child",))
        if agent.parent_session is not None:
            self.tell_session(agent.parent_session, ("child",))

    def _tell_agents(self, change: Change) -> None:
        for agent, values in change.agents.values():
            self.tell_agent(agent.index, values)

    def _tell_sessions(
        self,
        change: Change,
        sessions: Mapping[SessionIndex, Session],
        grown: Mapping[SessionIndex, int],
    ) -> None:
        told: dict[SessionIndex, set[str]] = {index: {"updated"} for index in sessions}
        for index, values in change.sessions.items():
            told[index].update(values)
        for index, name in (*(line[:2] for line in change.lines), *change.touched):
            told.setdefault(index, set()).add(name)
        for index, names in told.items():
            self.tell_session(index, names)
        for index, size in grown.items():
            for tell in self._told["history_grew"]:
                tell(sessions[index], size)

    def _tell_items(self, change: Change) -> None:
        for tell in self._told["item_listed"]:
            for item in (*change.made_items, *change.dropped_items):
                tell(item)
        self._tell_changed(change)

    def _tell_changed(self, change: Change) -> None:
        for tell in self._told["item_changed"]:
            for item, values in change.items.values():
                tell(item, (*values, "updated"))

    # histories

    def _number(self, session: Session, file: str, lines: list[dict[str, Any]], when: str) -> str:
        """The lines with their ids and times, and newlines between them. Whoever shows events at a
        terminal, by tail -f or cat /ctx/events, is not to obey what an agent says in them."""
        path = f"{self._sessions.path(session)}/{file}"
        count, letter = ("events", "e") if file == EVENTS else ("messages", "m")
        last = getattr(session, count)
        if session.held is None and path not in self._numbered:
            # A loss of power may have kept lines whose record it took.
            self._numbered.add(path)
            last = max(last, self._history.last_number(path))
        setattr(session, count, last + len(lines))
        dump = shown_json if file == EVENTS else dump_json
        texts = (
            dump({"id": f"{letter}{number}", "ts": when, **fields})
            for number, fields in enumerate(lines, last + 1)
        )
        return "\n".join(texts)

    def _release(self, session: Session) -> Iterator[Pending]:
        """Inside the transaction: what the store held of a session goes to its file. It holds
        events as long as they are few: a file and its directories take far more of the disk, and
        of the time of an agent that ends soon."""
        if session.held is None:
            return
        self._sessions.ensure(session)
        session.held = None
        if held := self._sessions.release(session.index).removesuffix("\n"):
            row = Pending(self._store.number(1), f"{self._sessions.path(session)}/{EVENTS}", held)
            self._store.post(row)
            yield row._replace(line=plain(held))

    def _deliver(self, posted: Iterable[Pending] = ()) -> None:
        if not self._outbox.deliver(posted):
            self._room.set()

    # beside

    async def run(self) -> None:
        """Keeps the outbox short, and tries again what could not be written."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._outbox.run)
            nursery.start_soon(self._checkpoint)
            nursery.start_soon(self._retry)

    async def _checkpoint(self) -> None:
        """Keeps the store's log of writes short: beside the loop, since it waits for the disk."""
        while True:
            await self._long_log.wait_changed()
            try:
                await trio.to_thread.run_sync(self._store.checkpoint, abandon_on_cancel=True)
            except NoSpaceError as error:
                log.error("%s; the store is written to its log only", error)
                await trio.sleep(_RETRY_SECONDS)

    async def _retry(self) -> None:
        """Once a second, while something is left."""
        while True:
            await self._room.wait()
            await trio.sleep(_RETRY_SECONDS)
            with contextlib.suppress(NoSpaceError):
                self._commit_late()
            self._deliver()
            if not self.behind:
                self._room = trio.Event()
                for tell in self._told["caught_up"]:
                    tell()

    @property
    def late(self) -> Sequence[Change]:
        """Changes that hold in memory, and are not stored yet."""
        return self._late

    @property
    def is_late(self) -> bool:
        """Whether changes that are acknowledged wait for room on the disk."""
        return bool(self._late)


def _shorten(some: list[Any], size: int) -> None:
    del some[size:]


def _set(record: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(record, name, value)
