"""The work items of an agent, and which has the focus (ctxfs-tasks(5), Work items).

An item is blocked while something is in its way: an armed wait, or an item in its
``blocked_by`` that is not over. With nothing in the way it is open again, or active
if it has the focus. A ``blocked`` that was written without such a reason is revoked by writing
``open``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from runtime.agents.planes import Plane, PlaneKind, armed_for
from runtime.authority.facts import Facts
from runtime.authority.guard import Guard, unless
from runtime.caller import PARTIES, Caller
from runtime.errors import MalformedError, TooLongError, WrongStateError
from runtime.records.change import Change
from runtime.records.items import Wait, WaitStatus, Work, WorkStatus
from runtime.records.lifecycle import LIVE
from runtime.records.model import Agent
from runtime.texts.names import check_choice, quote


@unless("it is done or cancelled", WrongStateError)
def _over(facts: Facts, caller: Caller, item: Work) -> str:
    if item.over:
        return f"the work item {quote(item.name)} has ended: its status is {item.status}"
    return ""


@unless("it is active or blocked", WrongStateError)
def _in_use(facts: Facts, caller: Caller, item: Work) -> str:
    if item.status in (WorkStatus.ACTIVE, WorkStatus.BLOCKED):
        return f"the work item {quote(item.name)} is {item.status}: end it or open it first"
    return ""


#: its files are written
WRITING: Final = Guard(who=PARTIES, when=LIVE, unless=(_over,))
WORK_ITEMS: Final = PlaneKind(
    cls=Work,
    what="work item",
    limit=lambda config: config.work_items,
    removing=Guard(who=PARTIES, unless=(_in_use,)),
    writing=WRITING,
    remedy="rmdir or WorkRemove",
    relief="finish or cancel one with status or WorkUpdate",
)
_STATUSES: Final = tuple(status.value for status in WorkStatus)
#: before the name of a wait, in ``blocked_by``
_WAIT: Final = "wait "


class WorkPlane(Plane[Work]):
    """The work items of all agents."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts, WORK_ITEMS)
        #: each is called in a change in which an item ends
        self.when_over: list[Callable[[Change, Agent, Work], None]] = []

    # looking

    def obstacles(self, change: Change, agent: Agent, item: Work) -> list[str]:
        """The obstacles in its way, as in ``blocked_by``, but without the items that are over."""
        wanted = change.peek(item, "blocked_by")
        there = {other.name: other for other in self.of(change, agent)} if wanted else {}
        items = [
            name
            for name in wanted
            if name in there and not change.is_over(there[name])
        ]
        armed = armed_for(self._items, change, agent, "work", item.name)
        return items + [f"{_WAIT}{wait.name}" for wait in armed][::-1]

    def _is_obstructed(self, change: Change, agent: Agent, item: Work) -> bool:
        """Whether something is in its way: of a thousand waits one is looked for, not all."""
        armed = armed_for(self._items, change, agent, "work", item.name)
        return any(True for _ in armed) or bool(self.obstacles(change, agent, item))

    def blocked_by(self, agent: Agent, item: Work) -> str:
        """The lines of ``blocked_by``: ids as they were written, then the armed waits."""
        armed = (
            wait.name
            for wait in self._items.of(agent.index, Wait)
            if wait.status is WaitStatus.ARMED and wait.work == item.name
        )
        return "".join(f"{name}\n" for name in (*item.blocked_by, *(_WAIT + w for w in armed)))

    def named(self, change: Change, agent: Agent, name: str) -> Work:
        """As ``find``, with what a change is about to make."""
        for item in change.newly_made(agent.index, Work):
            if item.name == name:
                return item
        return self.find(agent, name)

    # changing

    def set(self, agent: Agent, item: Work, field: str, text: str) -> None:
        """One field; ``status``, ``parent`` without the newline of their files.

        ``WrongStateError``, ``MissingError``, ``MalformedError`` or ``TooLongError``.
        """
        with self._journal.changing() as change:
            self.update(change, agent, item, field, text)

    def update(self, change: Change, agent: Agent, item: Work, field: str, text: str) -> None:
        """Sets a field in a change that the caller commits, or drops to see what ``set`` raises."""
        self.check_open(item)
        limit = self._settings.config.control_max
        if len(text.encode()) > limit:
            raise TooLongError(f"{field} may have at most {limit} bytes")
        setter = _SETTERS.get(field)
        if setter is None:
            change.put(item, **{field: text})
        else:
            setter(self, change, agent, item, text)

    def focus(self, agent: Agent, name: str) -> None:
        """Turns to the item of this name, or for an empty one to none."""
        with self._journal.changing() as change:
            self.turn_to(change, agent, name)

    def turn_to(self, change: Change, agent: Agent, name: str) -> None:
        """Focuses an item in a change that the caller commits, or drops."""
        item = self.named(change, agent, name) if name else None
        if item is not None and change.is_over(item):
            self.check_open(item)
            raise WrongStateError(f"the work item {quote(name)} is about to end")
        before = change.peek_agent(agent, "focus")
        if before and before != name:
            self._leave(change, agent, self.named(change, agent, before))
        if before != name:
            change.set(agent, focus=name)
        if item is not None and change.peek(item, "status") is not WorkStatus.ACTIVE:
            self._become(change, agent, item, WorkStatus.ACTIVE)

    def block(self, change: Change, agent: Agent, item: Work) -> None:
        """Something got in its way."""
        if change.peek(item, "status") in (WorkStatus.OPEN, WorkStatus.ACTIVE):
            self._become(change, agent, item, WorkStatus.BLOCKED)

    def release(self, change: Change, agent: Agent, item: Work) -> None:
        """Something is not in its way any more; perhaps something else is."""
        blocked = change.peek(item, "status") is WorkStatus.BLOCKED
        if not blocked or self._is_obstructed(change, agent, item):
            return
        focused = change.peek_agent(agent, "focus") == item.name
        self._become(change, agent, item, WorkStatus.ACTIVE if focused else WorkStatus.OPEN)

    def _become(self, change: Change, agent: Agent, item: Work, to: WorkStatus) -> None:
        change.step(item, to)
        self._tell(change, agent, item, to)

    @staticmethod
    def _tell(change: Change, agent: Agent, item: Work, status: WorkStatus) -> None:
        change.tell(agent, "work.status", work=item.name, status=status.value)

    def _leave(self, change: Change, agent: Agent, item: Work) -> None:
        """It loses the focus."""
        if change.peek(item, "status") is WorkStatus.ACTIVE:
            # it may have been taken up although something was in its way
            blocked = self.obstacles(change, agent, item)
            back = WorkStatus.BLOCKED if blocked else WorkStatus.OPEN
            self._become(change, agent, item, back)

    # Plane

    def _added(self, change: Change, agent: Agent, item: Work) -> None:
        self._tell(change, agent, item, item.status)

    def _removing(self, change: Change, agent: Agent, item: Work) -> None:
        for other in self.of(change, agent):
            if item.name in other.blocked_by:
                left = tuple(name for name in other.blocked_by if name != item.name)
                change.put(other, blocked_by=left)
                self.release(change, agent, other)

    # the fields that mean more than their text

    def _set_parent(self, change: Change, agent: Agent, item: Work, text: str) -> None:
        if "\n" in text:
            raise MalformedError(f"{quote(text)}: a parent must be one line")
        change.put(item, parent=text)

    def _set_status(self, change: Change, agent: Agent, item: Work, text: str) -> None:
        wanted = WorkStatus(check_choice(text, _STATUSES))
        if wanted is not change.peek(item, "status"):
            _TO_STATUS[wanted](self, change, agent, item)

    def _open(self, change: Change, agent: Agent, item: Work) -> None:
        status = change.peek(item, "status")
        blocked = self.obstacles(change, agent, item)
        if status is WorkStatus.BLOCKED and blocked:
            raise WrongStateError(
                f"the work item {quote(item.name)} is blocked by {', '.join(blocked[:8])}: "
                "end or cancel that, or write active to go on anyway"
            )
        if change.peek_agent(agent, "focus") == item.name:
            self.turn_to(change, agent, "")
        if status is WorkStatus.BLOCKED:
            self._become(change, agent, item, WorkStatus.OPEN)

    def _activate(self, change: Change, agent: Agent, item: Work) -> None:
        self.turn_to(change, agent, item.name)

    def _finish(self, change: Change, agent: Agent, item: Work) -> None:
        if not change.peek(item, "objective").strip():
            raise WrongStateError(
                f"the work item {quote(item.name)} has no objective: write one first"
            )
        self._end(change, agent, item, WorkStatus.DONE)

    def _cancel(self, change: Change, agent: Agent, item: Work) -> None:
        self._end(change, agent, item, WorkStatus.CANCELLED)

    def _end(self, change: Change, agent: Agent, item: Work, to: WorkStatus) -> None:
        self._become(change, agent, item, to)
        if change.peek_agent(agent, "focus") == item.name:
            change.set(agent, focus="")
        for told in self.when_over:
            told(change, agent, item)
        for other in self.of(change, agent):
            if item.name in change.peek(other, "blocked_by"):
                self.release(change, agent, other)

    def _set_blocked_by(self, change: Change, agent: Agent, item: Work, text: str) -> None:
        names = dict.fromkeys(
            line for line in text.split("\n") if line and not line.startswith(_WAIT)
        )
        for name in names:
            if name == item.name:
                raise MalformedError(f"{quote(name)} cannot block itself")
            self.named(change, agent, name)
        before = self.obstacles(change, agent, item)
        change.put(item, blocked_by=tuple(names))
        after = self.obstacles(change, agent, item)
        if set(after) - set(before):
            self.block(change, agent, item)
        elif before:
            self.release(change, agent, item)


_SETTERS: Final[dict[str, Callable[[WorkPlane, Change, Agent, Work, str], None]]] = {
    "parent": WorkPlane._set_parent,
    "status": WorkPlane._set_status,
    "blocked_by": WorkPlane._set_blocked_by,
}
_TO_STATUS: Final[dict[WorkStatus, Callable[[WorkPlane, Change, Agent, Work], None]]] = {
    WorkStatus.OPEN: WorkPlane._open,
    WorkStatus.ACTIVE: WorkPlane._activate,
    WorkStatus.BLOCKED: WorkPlane.block,
    WorkStatus.DONE: WorkPlane._finish,
    WorkStatus.CANCELLED: WorkPlane._cancel,
}
