"""The records below an agent: messages, tasks, work items, waits, asks and reports.

Each is one row of the store and belongs to one incarnation. What each may
become is a table, as for agents (``runtime.records.lifecycle``): pure, and a pair that
is not in it is refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from types import MemberDescriptorType
from typing import Any, ClassVar, Final, Self, TypeVar

from runtime.errors import MalformedError
from runtime.ids import (
    NO_AGENT,
    NO_BOOT,
    NO_ITEM,
    NO_MESSAGE,
    NO_RUN,
    NO_WAIT_FILE,
    AgentIndex,
    BootId,
    ItemIndex,
    MessageId,
    RunId,
    SessionIndex,
    TriggerToken,
    WaitFileName,
)
from runtime.records.moves import Moves
from runtime.records.stored import dumped, loaded, names_of
from runtime.records.visits import Visit
from runtime.texts.names import quote

_S = TypeVar("_S", bound=StrEnum)


class MessageStatus(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    PROCESSED = "processed"
    FAILED = "failed"
    ABORTED = "aborted"
    DROPPED = "dropped"


def _steps(what: str, steps: Mapping[_S, Collection[_S]]) -> Moves[_S, _S]:
    """Moves that nobody has a word for: the cue is the status to be."""
    return Moves(what, {(at, to): to for at, reached in steps.items() for to in reached})


_M = MessageStatus
MESSAGE_MOVES: Final = _steps(
    "message",
    {_M.QUEUED: (_M.RUNNING, _M.DROPPED), _M.RUNNING: (_M.PROCESSED, _M.FAILED, _M.ABORTED)},
)


class TaskStatus(StrEnum):
    #: shown as queued: it waits to be configured and started
    MADE = "made"
    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"

    @property
    def shown(self) -> str:
        return "queued" if self is TaskStatus.MADE else self.value


class TaskCue(StrEnum):
    START = "start"
    STOP = "stop"
    KILL = "kill"
    RUN = "run"
    #: its end, by the names of outcomes
    DONE = "done"
    ERROR = "error"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    #: a handle, which nobody starts, ends: its child was what ran
    FOLLOW = "follow"


_T, _TE = TaskStatus, TaskCue
#: the status that a task has after each end
TASK_ENDS: Final = {
    _TE.DONE: _T.COMPLETED,
    _TE.ERROR: _T.FAILED,
    _TE.CANCELLED: _T.CANCELLED,
    _TE.INTERRUPTED: _T.INTERRUPTED,
}
TASK_MOVES: Final = Moves(
    "task",
    {
        (_T.MADE, _TE.START): _T.QUEUED,
        (_T.MADE, _TE.STOP): _T.CANCELLED,
        (_T.MADE, _TE.KILL): _T.CANCELLED,
        (_T.MADE, _TE.CANCELLED): _T.CANCELLED,
        (_T.MADE, _TE.INTERRUPTED): _T.INTERRUPTED,
        (_T.QUEUED, _TE.RUN): _T.RUNNING,
        (_T.QUEUED, _TE.STOP): _T.CANCELLING,
        (_T.QUEUED, _TE.KILL): _T.CANCELLING,
        (_T.RUNNING, _TE.STOP): _T.CANCELLING,
        (_T.RUNNING, _TE.KILL): _T.CANCELLING,
        (_T.CANCELLING, _TE.KILL): _T.CANCELLING,
        **{
            (status, cue): to
            for status in (_T.QUEUED, _T.RUNNING)
            for cue, to in TASK_ENDS.items()
        },
        (_T.CANCELLING, _TE.CANCELLED): _T.CANCELLED,
        (_T.CANCELLING, _TE.INTERRUPTED): _T.INTERRUPTED,
        (_T.MADE, _TE.FOLLOW): _T.RUNNING,
    },
    verbs=frozenset({_TE.START, _TE.STOP, _TE.KILL}),
)


class WorkStatus(StrEnum):
    OPEN = "open"
    ACTIVE = "active"
    BLOCKED = "blocked"
    DONE = "done"
    CANCELLED = "cancelled"


_W = WorkStatus
#: it is active while the agent works on it
WORK_MOVES: Final = _steps(
    "work item",
    {at: set(WorkStatus) - {at} for at in (_W.OPEN, _W.ACTIVE, _W.BLOCKED)},
)


class WaitStatus(StrEnum):
    NEW = "new"
    ARMED = "armed"
    FIRED = "fired"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


_A = WaitStatus
WAIT_MOVES: Final = _steps(
    "wait",
    {_A.NEW: (_A.ARMED, _A.CANCELLED), _A.ARMED: (_A.FIRED, _A.CANCELLED, _A.EXPIRED)},
)


class AskStatus(StrEnum):
    NEW = "new"
    OPEN = "open"
    ANSWERED = "answered"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"


_Q = AskStatus
ASK_MOVES: Final = _steps(
    "ask", {_Q.NEW: (_Q.OPEN, _Q.WITHDRAWN), _Q.OPEN: (_Q.ANSWERED, _Q.EXPIRED, _Q.WITHDRAWN)}
)


class ReportStatus(StrEnum):
    KEPT = "kept"


REPORT_MOVES: Final[Moves[ReportStatus, ReportStatus]] = Moves("report", {})

PRIORITIES: Final = ("interject", "next", "normal", "background")
#: why a message that was worked on is ended: by ``abort``, and by ``cancel``
BY_ABORT: Final = "operator_aborted"
BY_CANCEL: Final = "message_cancelled"
#: of messages that answer something themselves
NOTICES: Final = ("task_result", "wait")
#: of the task of a child that its parent supervises
DELEGATION: Final = "delegation"
#: of what a supervised child reports
REPORTED: Final = "child"


#: a text of a record that is longer than this is on the disk, not in memory; in characters
LONG_ABOVE: Final = 1024


@dataclass(frozen=True, slots=True)
class LongText:
    """A long text of a record, which is read from the store when it is asked for."""

    length: int
    read: Callable[[], str]


class _LongField:
    """A field that holds a text, or the place where it is kept; reading it gives the text."""

    def __init__(self, slot: MemberDescriptorType) -> None:
        self.slot = slot

    def __get__(self, item: Item | None, owner: type[Item]) -> Any:
        if item is None:
            return self
        value = self.slot.__get__(item, owner)
        return value.read() if isinstance(value, LongText) else value

    def __set__(self, item: Item, value: str | LongText) -> None:
        self.slot.__set__(item, value)


_C = TypeVar("_C", bound="type[Item]")


def _with_long(cls: _C) -> _C:
    """A class whose fields in ``long`` may be kept elsewhere."""
    for name in cls.long:
        setattr(cls, name, _LongField(cls.__dict__[name]))
    return cls


@dataclass(slots=True, kw_only=True, eq=False)
class Item:
    """One record of a plane. ``agent`` is the index of its incarnation, times are epoch seconds.

    Fields in ``long`` may be texts of any length.
    """

    kind: ClassVar[str] = ""
    moves: ClassVar[Moves[Any, Any]]
    long: ClassVar[tuple[str, ...]] = ()
    #: of what waits for something to become of it: found without looking at all (``Items.pending``)
    pending: ClassVar[StrEnum | None] = None

    #: of its row in the store, 0 before it has one
    index: ItemIndex = NO_ITEM
    agent: AgentIndex
    name: str
    status: Any = None
    created: float = 0.0
    updated: float = 0.0

    @property
    def over(self) -> bool:
        """Whether nothing follows its status."""
        return self.status in self.moves.terminal

    @property
    def key(self) -> str:
        """Identifies it among the items of its kind and agent."""
        return self.name

    def dump(self) -> dict[str, Any]:
        """With all its texts."""
        return dumped(self)

    def record(self) -> dict[str, Any]:
        """All fields but the index, with ``LongText`` for what is not in memory."""
        return {name: self.raw(name) for name in names_of(type(self))}

    def raw(self, name: str) -> Any:
        """A field as it is in memory: a text may be ``LongText``."""
        if name in self.long:
            return type(self).__dict__[name].slot.__get__(self, type(self))
        return getattr(self, name)

    def length(self, name: str) -> int:
        """The length of a text, in characters."""
        value = self.raw(name)
        return value.length if isinstance(value, LongText) else len(value)

    def keep(self, read: Callable[[ItemIndex, str], str]) -> None:
        """Lets go of long texts: ``read`` finds them by index and field from now on."""
        for name in self.long:
            value = self.raw(name)
            if isinstance(value, str) and len(value) > LONG_ABOVE:
                setattr(self, name, LongText(len(value), partial(read, self.index, name)))

    @classmethod
    def load(
        cls, index: ItemIndex, values: dict[str, Any], read: Callable[[ItemIndex, str], str]
    ) -> Self:
        """From what the store has; ``read`` finds what it has elsewhere."""
        elsewhere = {
            name: LongText(values[name], partial(read, index, name))
            for name in cls.long
            if isinstance(values.get(name), int)
        }
        return loaded(cls, {**values, **elsewhere}, index=index)


@_with_long
@dataclass(slots=True, kw_only=True, eq=False)
class Message(Item):
    """One message to an agent; ``name`` is its id, unique in its session.

    ``asked`` identifies the caller that gave the id and may repeat it; empty for a random id.
    The ids of reports are their reporters': no child can take that of another child's.
    """

    kind: ClassVar[str] = "message"
    moves: ClassVar = MESSAGE_MOVES
    long: ClassVar[tuple[str, ...]] = ("text", "reply")
    pending: ClassVar = MessageStatus.QUEUED

    name: MessageId
    status: MessageStatus = MessageStatus.QUEUED
    session: SessionIndex
    sender: str
    provenance: str
    priority: str = "normal"
    text: str = ""
    run: RunId = NO_RUN
    reply: str = ""
    reason: str = ""
    asked: str = ""
    #: the delegated task, which comes before all others
    first: bool = False

    @property
    def key(self) -> str:
        asked = self.asked if self.provenance == REPORTED else ""
        return self.key_of(self.session, self.name, asked)

    @staticmethod
    def key_of(session: SessionIndex, name: MessageId, reporter: str = "") -> str:
        """The key of a message of this id; of a report, of what its caller asked for."""
        return f"{session}/{reporter} {name}" if reporter else f"{session}/{name}"


@_with_long
@dataclass(slots=True, kw_only=True, eq=False)
class Task(Item):
    """A managed execution: a command of the agent's, or the handle of a supervised child."""

    kind: ClassVar[str] = "task"
    moves: ClassVar = TASK_MOVES
    long: ClassVar[tuple[str, ...]] = ("title", "cmd", "cwd", "env")

    status: TaskStatus = TaskStatus.MADE
    #: whether its making and its start are one (``Journal.starting``)
    made_to_start: bool = False
    task_kind: str = "command_task"
    title: str = ""
    cmd: str = ""
    cwd: str = ""
    env: str = ""
    accepts_input: bool = False
    #: the size at first of the terminal that it has, ``COLSxROWS``; empty if it has none
    tty: str = ""
    #: the uid of the operator who made it, None if that was an agent
    maker: int | None = None
    #: who looks at that
    viewers: tuple[Visit, ...] = ()
    #: whether such a one has hung it up: ``end``, or ``remove`` if it is removed at its end
    window: str = ""
    work: str = ""
    exit: str = ""
    #: why it ended, as of an agent
    reason: str = ""
    pid: int = 0
    started: float = 0.0
    ended: float = 0.0
    #: a stop was asked for by KILL
    given_up: bool = False
    #: who asked last for its start or its end, as in ``by`` of events
    by: str = ""
    wait_token: WaitFileName = NO_WAIT_FILE
    #: the child that a child_agent_task supervises
    child: AgentIndex = NO_AGENT
    #: the state of that child's worktree; all of it is the child's (runtime.workspace)
    worktree: str = ""


@_with_long
@dataclass(slots=True, kw_only=True, eq=False)
class Work(Item):
    """A work item; what it is about are documents beside the store."""

    kind: ClassVar[str] = "work"
    moves: ClassVar = WORK_MOVES
    long: ClassVar[tuple[str, ...]] = ("objective", "plan", "acceptance", "parent")

    status: WorkStatus = WorkStatus.OPEN
    objective: str = ""
    plan: str = ""
    acceptance: str = ""
    #: ids of other items
    blocked_by: tuple[str, ...] = ()
    parent: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class Timed(Item):
    """One that may have a deadline: as written, and the moment that this was when it began to
    count, 0 for none; by CLOCK_BOOTTIME of the boot in which it was said, if as a duration."""

    deadline: str = ""
    expires: float = 0.0
    expires_up: float = 0.0
    boot: BootId = NO_BOOT


@_with_long
@dataclass(slots=True, kw_only=True, eq=False)
class Wait(Timed):
    """Why an agent, or one of its work items, cannot go on."""

    kind: ClassVar[str] = "wait"
    moves: ClassVar = WAIT_MOVES
    long: ClassVar[tuple[str, ...]] = ("on", "payload")
    pending: ClassVar = WaitStatus.ARMED

    status: WaitStatus = WaitStatus.NEW
    on: str = ""
    work: str = ""
    #: of a timer; by CLOCK_BOOTTIME too, if said as a duration
    due: float = 0.0
    due_up: float = 0.0
    #: of one that is due again: after so many seconds, until this moment, 0 for none; and how
    #: often it was since its last notice, which is unread
    period: float = 0.0
    until: float = 0.0
    missed: int = 0
    payload: str = ""
    #: what fires it if it ``has_token``; the others never show theirs
    token: TriggerToken = field(default_factory=lambda: TriggerToken(secrets.token_hex(16)))

    @property
    def has_token(self) -> bool:
        return self.on in ("trigger", "triggers")

    @property
    def repeats(self) -> bool:
        """Whether it stays armed when what it waits for has happened."""
        return self.on == "triggers" or bool(self.period)


@_with_long
@dataclass(slots=True, kw_only=True, eq=False)
class Ask(Timed):
    """A question of an agent's to people, or to its supervisor; ``name`` is the agent's for it."""

    kind: ClassVar[str] = "ask"
    moves: ClassVar = ASK_MOVES
    long: ClassVar[tuple[str, ...]] = (
        *("question", "detail", "options", "form", "default", "answer"),
    )
    pending: ClassVar = AskStatus.OPEN

    status: AskStatus = AskStatus.NEW
    ask_kind: str = "question"
    question: str = ""
    detail: str = ""
    #: lines WORD [LABEL]; or a form, on one line
    options: str = ""
    form: str = ""
    default: str = ""
    to: str = "operator"
    life: str = "agent"
    #: the run that asked, and the message with which the supervisor was told
    run: RunId = NO_RUN
    message: MessageId = NO_MESSAGE
    #: a line, and perhaps more with a note; who gave it, as in ``by`` of events
    answer: str = ""
    by: str = ""
    asked: float = 0.0
    ended: float = 0.0
    wait_token: WaitFileName = NO_WAIT_FILE


@_with_long
@dataclass(slots=True, kw_only=True, eq=False)
class Report(Item):
    """One of the last reports to an agent by its children; ``name`` is the id of the message,
    ``run`` the child's.

    Without a child it is one of the agent's own that nobody received: only its id is kept,
    which may be said again.
    """

    kind: ClassVar[str] = "report"
    moves: ClassVar = REPORT_MOVES
    long: ClassVar[tuple[str, ...]] = ("text",)

    name: MessageId
    status: ReportStatus = ReportStatus.KEPT
    session: SessionIndex
    child: str = ""
    run: RunId = NO_RUN
    #: its beginning
    text: str = ""

    @property
    def key(self) -> str:
        return f"{self.child}/{self.session}/{self.name}"


KINDS: Final[dict[str, type[Item]]] = {
    cls.kind: cls for cls in (Message, Task, Work, Wait, Ask, Report)
}

def check_priority(text: str) -> str:
    """``MalformedError`` if the text is not a priority."""
    if text not in PRIORITIES:
        raise MalformedError(f"unknown priority {quote(text)}; use {', '.join(PRIORITIES)}")
    return text
