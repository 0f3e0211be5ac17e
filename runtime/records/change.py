"""The changes of one transaction, and who is told of them (``runtime.agents.parts``).

One change holds all consequences of a cause, and code reads records through the change (``peek``).
A wait that fires sends a message to its agent and unblocks the work item. If one change has two
causes, such as the ends of two children, the second sees what the first changed: so a wait fires
once, or the whole change never happened. To find out what a file would refuse, the daemon makes
the same change and discards it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeVar

from runtime.caller import Caller
from runtime.ids import AgentIndex, CallId, SessionIndex
from runtime.records.items import Item, Task, Wait
from runtime.records.lifecycle import AGENT_MOVES, Cue, Effect, Status
from runtime.records.model import Agent, Session
from runtime.records.run import BETWEEN_RUNS, RUN_MOVES, Run, RunCue, RunStatus

_I = TypeVar("_I", bound=Item)
_UP: Final = (Status.READY, Status.IDLE, Status.BUSY)

EVENTS: Final = "events.jsonl"
#: the types of events
EVENT_TYPES: Final = (
    *("agent.create", "agent.control", "agent.start", "agent.status", "agent.stop"),
    *("agent.child.cancel", "agent.report", "agent.limit", "run.start", "run.end"),
    *("message.queued", "message.end", "task.start", "task.end", "work.status"),
    *("wait.armed", "wait.fired", "wait.cancelled", "wait.expired"),
    *("ask.open", "ask.to", "ask.end", "terminal.attach", "terminal.leave"),
)
#: who caused what nobody did
RUNTIME: Final = "runtime"
#: of a wait: what it waits for, and what it holds up
WAIT_KEYS: Final = {"on", "work"}


#: what takes back, last one first, what is changed in memory while a transaction may still fail
Undoing = list[Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Posted:
    """A message to another machine's daemon, of the registration ``key``; ``agent`` is an
    incarnation."""

    key: str
    op: str
    agent: str
    said: Mapping[str, Any]


@dataclass(slots=True, eq=False)
class Answer:
    """The answer of one call, stored with what the call changes.

    ``make`` says it when a change holds; None while a later change decides it. ``call`` tells
    calls apart, ``name`` is the id that its caller gave it.
    """

    caller: str
    name: CallId
    call: str
    make: Callable[[], dict[str, Any] | None] = lambda: None
    #: None until it is stored, and its bytes there
    size: int = 0
    output: dict[str, Any] | None = None
    #: it is stored that the call has begun
    begun: bool = False


@dataclass(slots=True)
class Demand:
    """A control of an agent that is written, or a verb that it is told, until a history has it."""

    agent: Agent
    #: the event that tells of it
    event: dict[str, str]
    told: bool = False


@dataclass(slots=True)
class Doing:
    """A message of another machine's daemon (``runtime.peers``), until it is done."""

    key: str
    number: int
    line: bytes
    #: who has it done there, as in ``by`` of events here
    by: str = ""
    done: bool = False


class Cause(NamedTuple):
    """The cause of what is committed in one step of the loop: who acts, and for what.

    The journal holds it instead of having it passed: rows, verbs, planes and effects between the
    request and the commit would all carry it untouched, and whoever forgot it would lie.
    """

    #: None for the runtime itself
    caller: Caller | None = None
    demand: Demand | None = None
    #: of the call that is being decided
    answer: Answer | None = None
    #: what is made is to be started before its maker is answered; a daemon that dies between the
    #: two has answered nobody, and the next one takes it back
    starts: bool = False
    #: what another machine's daemon said
    doing: Doing | None = None
    #: to which belongs what is changed of agents, and what takes that back (``Journal.gathering``)
    gathered: tuple[Change, Undoing] | None = None


class Subscriber:
    """Is told of changes: by all methods, or by those that it overrides."""

    def admit(self, change: Change) -> None:
        """Raises if a change is to be refused, before anything is done for it."""

    def agent_changed(self, index: AgentIndex, names: Iterable[str]) -> None:
        """Fields or documents of an agent changed."""

    def session_changed(self, index: SessionIndex, names: Iterable[str]) -> None:
        """Files of a session changed."""

    def agent_listed(self, agent: Agent) -> None:
        """An agent appeared or went."""

    def history_grew(self, session: Session, size: int) -> None:
        """So many bytes were added to what a session remembers, and to the log of its owner."""

    def caught_up(self) -> None:
        """The histories have what they had no room for on the disk."""

    def item_changed(self, item: Item, names: Iterable[str]) -> None:
        """Fields of a plane's record changed."""

    def item_listed(self, item: Item) -> None:
        """A plane's record appeared or went."""

    def attempt(self, agent: Agent, effect: Effect) -> None:
        """Does what a move of an agent calls for before it is committed (``BEFOREHAND``);
        ``KernelError`` refuses the change."""

    def storing(self, change: Change, when: float) -> None:
        """Inside the transaction, once the lines of histories have their numbers: what is still to
        be added to the messages that the change posts."""

    def posting(self, change: Change, undoing: Undoing) -> None:
        """Inside the transaction: stores those messages, and which ones were done."""

    def restore(self, agent: Agent) -> None:
        """Undoes what was attempted for an agent: the change was not committed."""

    def due(self, agent: Agent, effect: Effect) -> None:
        """A move of an agent holds, and this is to be done for it.

        What is done ``AFTERWARDS`` may raise ``KernelError``, for the caller to be told.
        """


#: of a change, what is added to that of a larger one as it is
_LISTS: Final = (
    *("dropped_items", "lines", "claims", "runs", "channels"),
    *("made", "handles", "touched", "effects", "moves", "posts", "done"),
)


class Change:
    """The changes of one transaction: collected first, applied all or not at all.

    A part of a larger change sees, by ``peek`` and ``items_of``, what that holds already.

    ``by`` names who caused the change, as in ``events.jsonl``. If it is empty, the caller that
    acts when the change is committed is named (``Agents.acting``), or the runtime.
    """

    def __init__(self, whole: Change | None = None, *, by: str = "") -> None:
        self._whole = whole
        self.by: str = by or (whole.by if whole is not None else "")
        self.items: dict[int, tuple[Item, dict[str, Any]]] = {}
        self.made_items: list[Item] = []
        #: the same by agent and kind, and the waits of each agent that get something to wait for
        self._made_of: dict[tuple[AgentIndex, type[Item]], list[Any]] = {}
        self._rearmed: dict[AgentIndex, list[Wait]] = {}
        self.dropped_items: list[Item] = []
        self.agents: dict[int, tuple[Agent, dict[str, Any]]] = {}
        self.sessions: dict[SessionIndex, dict[str, Any]] = {}
        self.lines: list[tuple[SessionIndex, str, dict[str, Any]]] = []
        #: names that go to another owner
        self.claims: list[tuple[str, int]] = []
        #: names that have one run more, and its number
        self.runs: list[tuple[str, int]] = []
        #: channels that a new child takes over
        self.channels: list[tuple[SessionIndex, str]] = []
        #: agents that come into being, and the handles of those
        self.made: list[Agent] = []
        self.handles: list[tuple[Task, Agent]] = []
        #: files of sessions that were written beside the store
        self.touched: list[tuple[SessionIndex, str]] = []
        #: of the call that it is made for
        self.answer: Answer | None = None
        #: what its moves call for, in their order
        self.effects: list[tuple[Agent, Effect]] = []
        #: the moves of agents that another machine's daemon is to know of
        self.moves: list[tuple[Agent, Cue]] = []
        #: messages to such daemons, and of those that they sent, which are done: registration,
        #: number and text
        self.posts: list[Posted] = []
        self.done: list[tuple[str, int, bytes]] = []

    def move(self, agent: Agent, cue: Cue, **why: Any) -> None:
        """An agent's next status, as ``lifecycle`` has it, with what that calls for.

        ``why`` goes into the event that tells of it, if it is another status than before.
        ``WrongStateError`` or ``NotRunningError`` if the cue does not fit.
        """
        status = self.peek_agent(agent, "status")
        move = AGENT_MOVES.move(status, cue)
        self.effects += [(agent, Effect(effect)) for effect in move.effects]
        if self.peek_agent(agent, "peer"):
            self.moves.append((agent, cue))
        to = move.status
        if to is None:
            to = Status(self.peek_agent(agent, "paused_from"))
            self.set(agent, paused_from="", frozen=False)
        elif to is Status.PAUSED and status is not to:
            self.set(agent, paused_from=status.value, frozen=Effect.FREEZE in move.effects)
        if to is not status:
            self.set(agent, status=to, since=time.time())
            self.tell(agent, "agent.status", status=to.value, **why)
        if status is Status.STARTING and to in _UP and self.peek_agent(agent, "paused_from"):
            self.move(agent, Cue.PAUSE)  # it was paused when the machine went down

    def show(self, agent: Agent, status: Status, *, told: bool, **why: Any) -> None:
        """The status of an agent that is away, as its host says: the table was asked there.
        ``told`` says whether there is room for an event."""
        if status is self.peek_agent(agent, "status"):
            return
        self.set(agent, status=status, since=time.time())
        if told:
            self.tell(agent, "agent.status", status=status.value, **why)

    def run(self, agent: Agent, cue: RunCue, **values: Any) -> None:
        """The next status of an agent's run, with what that calls for, and ``values`` of it.
        ``WrongStateError`` if the cue does not fit."""
        run: Run = self.peek_agent(agent, "run")
        move = RUN_MOVES.move(run.status, cue)
        self.effects += [(agent, Effect(effect)) for effect in move.effects]
        if move.status is None or move.status is RunStatus.NONE:
            self.set(agent, run=BETWEEN_RUNS)
        else:
            self.set(agent, run=replace(run, status=move.status, **values))

    def hear(self, agent: Agent, **values: Any) -> None:
        """Something became of what an agent's run says."""
        self.set(agent, said=replace(self.peek_agent(agent, "said"), **values))

    def post(self, key: str, op: str, agent: str, /, **said: Any) -> None:
        """A message to the other side of a registration."""
        self.posts.append(Posted(key, op, agent, said))

    def step(self, item: Item, cue: StrEnum) -> Any:
        """The next status of a plane's record, as its table has it; ``WrongStateError``."""
        to = item.moves.move(self.peek(item, "status"), cue).status
        self.put(item, status=to)
        return to

    def is_over(self, item: Item) -> bool:
        """Whether nothing follows the status that it has, or will have."""
        return self.peek(item, "status") in item.moves.terminal

    def set(self, agent: Agent, **values: Any) -> None:
        self.agents.setdefault(id(agent), (agent, {}))[1].update(values)

    def put(self, item: Item, **values: Any) -> None:
        """Changes a plane's record, one that is made in this change too."""
        self.items.setdefault(id(item), (item, {}))[1].update(values)
        if isinstance(item, Wait) and not values.keys().isdisjoint(WAIT_KEYS):
            self._rearmed.setdefault(item.agent, []).append(item)

    def make(self, item: Item) -> None:
        self.made_items.append(item)
        self._made_of.setdefault((item.agent, type(item)), []).append(item)

    def make_handle(self, task: Task, child: Agent) -> None:
        """A task that is the handle of a child, which may have no index yet."""
        self.make(task)
        self.handles.append((task, child))

    def drop(self, item: Item) -> None:
        self.dropped_items.append(item)

    def peek(self, item: Item, name: str) -> Any:
        """A field as it will be when all of this is applied."""
        return self._peek("items", item, name)

    def peek_agent(self, agent: Agent, name: str) -> Any:
        """A field of an agent as it will be when all of this is applied."""
        return self._peek("agents", agent, name)

    def _peek(self, kind: str, record: Item | Agent, name: str) -> Any:
        change: Change | None = self
        while change is not None:
            _, values = getattr(change, kind).get(id(record), (record, {}))
            if name in values:
                return values[name]
            change = change._whole
        return getattr(record, name)

    def newly_made(self, agent: AgentIndex, cls: type[_I]) -> list[_I]:
        """The records of one kind and agent that are made in this change."""
        above = self._whole.newly_made(agent, cls) if self._whole is not None else []
        return above + self._made_of.get((agent, cls), [])

    def rearmed(self, agent: AgentIndex) -> list[Wait]:
        """Waits of one agent that this change makes, or says anew what they are for."""
        above = self._whole.rearmed(agent) if self._whole is not None else []
        return above + self._made_of.get((agent, Wait), []) + self._rearmed.get(agent, [])

    def set_session(self, index: SessionIndex, **values: Any) -> None:
        self.sessions.setdefault(index, {}).update(values)

    def add(self, other: Change) -> None:
        """All that another one changes, after what is here."""
        for item, values in other.items.values():
            self.put(item, **values)
        for item in other.made_items:
            self.make(item)
        for agent, values in other.agents.values():
            self.set(agent, **values)
        for index, changed in other.sessions.items():
            self.set_session(index, **changed)
        for name in _LISTS:
            getattr(self, name).extend(getattr(other, name))

    def event(self, session: SessionIndex, kind: str, agent: str, **fields: Any) -> None:
        """One line of ``events.jsonl``; id and time are set at the commit, and who caused it
        if the change does not say."""
        assert kind in EVENT_TYPES, kind
        if self.by:
            fields["by"] = self.by
        self.lines.append((session, EVENTS, {"type": kind, "agent": agent, **fields}))

    def tell(self, agent: Agent, kind: str, **fields: Any) -> None:
        """One event of an agent, in its current session."""
        self.event(agent.session, kind, agent.name, **fields)

    def attribute(self, by: str) -> None:
        """Says of whatever does not say it yet who caused it."""
        self.by = self.by or by
        for _, file, fields in self.lines:
            if file == EVENTS:
                fields.setdefault("by", self.by)

    def say(self, session: SessionIndex, /, **fields: Any) -> None:
        """One line of ``messages.jsonl``."""
        self.lines.append((session, "messages.jsonl", fields))
