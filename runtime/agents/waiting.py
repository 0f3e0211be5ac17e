"""The waits of agents, and what wakes them (ctxfs-tasks(5), Waits).

A wait is armed once and leaves that state once, in the change that tells of its
cause: it is fired, cancelled or expired with everything that this means, or not at
all. Causes in one change see each other (``Change.peek``). Two stay armed, and tell each time:
``triggers``, and ``timer every``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import cache
from typing import Final

from runtime import crashpoints
from runtime.agents.conditions import (
    EVERY,
    Condition,
    Conditions,
    Payload,
    Shown,
    message_facts,
    moments,
    parse,
    reply_facts,
)
from runtime.agents.messages import Messages, notice_of
from runtime.agents.moments import Moments, expiry
from runtime.agents.planes import Plane, PlaneKind, armed_for
from runtime.agents.results import EndFacts, Results
from runtime.agents.work import WorkPlane
from runtime.authority.facts import Facts
from runtime.authority.guard import TAKING, Act, Guard, unless
from runtime.caller import NOBODY, PARTIES, Caller, Role
from runtime.errors import DeniedError, MissingError, QuotaError, WrongStateError
from runtime.ids import TriggerToken
from runtime.kernel import clock
from runtime.kernel.linux import boot_id
from runtime.records.change import Change
from runtime.records.items import NOTICES, Message, Wait, WaitStatus, Work
from runtime.records.lifecycle import LIVE
from runtime.records.model import Agent
from runtime.texts.names import dump_json, is_duration, quote, timestamp

#: notices that an agent has not read of one wait that stays armed
_UNREAD: Final = 64
@unless("it was armed before", WrongStateError)
def _armed(facts: Facts, caller: Caller, wait: Wait) -> str:
    return "" if wait.status is WaitStatus.NEW else f"cannot arm: the wait is {wait.status}"


@unless("it has ended", WrongStateError)
def _over(facts: Facts, caller: Caller, wait: Wait) -> str:
    if not wait.over:
        return ""
    return f"the wait {quote(wait.name)} has ended: its status is {wait.status}"


@unless("it was used, or its wait has ended", MissingError)
def _used(facts: Facts, caller: Caller, wait: Wait) -> str:
    armed = wait.status is WaitStatus.ARMED and facts.items.get(wait.index) is wait
    if armed and wait.has_token:
        return ""
    return "this token is no longer valid: it was used, or its wait has ended"


#: ``on`` is written, its other files are, and its token is
ARMING: Final = Guard(who=PARTIES, when=TAKING, unless=(_armed,))
WRITING: Final = Guard(who=PARTIES, when=LIVE, unless=(_over,))
TRIGGERING: Final = Guard(who=Role.ANYONE, unless=(_used,))
WAITS: Final = PlaneKind(
    cls=Wait, what="wait", limit=lambda config: config.waits, removing=Guard(who=PARTIES),
    writing=WRITING, remedy="rmdir or WaitCancel",
    relief="cancel one with rmdir or WaitCancel",
)


class WaitingPlane(Plane[Wait]):
    """The waits of all agents."""

    def __init__(
        self, facts: Facts, *, messages: Messages, work: WorkPlane, results: Results
    ) -> None:
        super().__init__(facts, WAITS)
        self._messages = messages
        self._work = work
        self._conditions = Conditions(facts, messages, results)
        self.moments = Moments(facts, Wait, self._moments_of, self._come)
        messages.when_queued.append(self._message_queued)
        messages.when_ended.append(self._message_ended)
        work.when_over.append(self._cancel_on)

    # looking

    def armed(self, change: Change, agent: Agent) -> list[Wait]:
        """Those that are, once a change is applied."""
        waits = self.of(change, agent)
        return [w for w in waits if change.peek(w, "status") is WaitStatus.ARMED]

    def _oldest_first(
        self, change: Change, agent: Agent, field: str, value: str
    ) -> list[Wait]:
        waits = armed_for(self._items, change, agent, field, value)
        return sorted(waits, key=lambda wait: wait.index or math.inf)

    def with_token(self, token: TriggerToken) -> Wait | None:
        """The wait that a write to this token fires; None for a used token."""
        wait = self._items.with_token(token)
        is_good = wait is not None and not _used.why(self._facts, NOBODY, wait)
        return wait if is_good else None

    # arming

    def arm(self, caller: Caller, agent: Agent, wait: Wait, text: str) -> None:
        """Says what it waits for; if that is over, the wait fires at once.

        ``MalformedError``, ``MissingError``, ``DeniedError`` (the caller's families),
        or ``WrongStateError``: it was armed before, or the agent is ending.
        """
        with self._journal.changing() as change:
            self.begin(change, caller, agent, wait, text)
        crashpoints.reach("wait.armed")

    def begin(self, change: Change, caller: Caller, agent: Agent, wait: Wait, text: str) -> None:
        """Arms a wait in a change that the caller commits, or drops to see what ``arm`` raises."""
        self.check_there(wait)
        ARMING.check_when(Act.WRITE, "on", agent)
        ARMING.check_object(self._facts, caller, wait)
        change.step(wait, WaitStatus.ARMED)
        kind, argument = parse(text)
        self._check_family(caller, kind.family)
        work = self._open_work(change, agent, change.peek(wait, "work"))
        on = f"{kind.usage.split()[0]} {argument}".rstrip()
        self._check_few(change, agent, kind, on)
        now, up = clock.wall(), clock.up()
        times = moments(kind, argument, now)
        is_counted = kind is EVERY or is_duration(argument)
        due_up = up + times["due"] - now if is_counted and times["due"] else 0.0
        deadline = expiry(change.peek(wait, "deadline"))
        change.put(wait, on=on, due_up=due_up, boot=boot_id(), **deadline, **times)
        answer: Payload | None = None
        if kind.over is not None:
            answer = kind.over(self._conditions, change, agent, argument)
        elif 0 < times["due"] <= now:
            answer = {"due": timestamp(times["due"])}
        self._tell(change, agent, wait, WaitStatus.ARMED)
        if answer is not None:
            self.fire(change, agent, wait, answer)
        elif work is not None:
            self._work.block(change, agent, work)

    def _check_few(self, change: Change, agent: Agent, kind: Condition, on: str) -> None:
        """All that wait for the same are answered at once, in the change of their cause. Timers
        that are due again and again wake the daemon as often."""
        most = kind.most(on)
        if not most:
            return
        if kind is EVERY:
            on = "timer every"
            there = sum(bool(wait.period) for wait in self.armed(change, agent))
        else:
            there = sum(1 for _ in armed_for(self._items, change, agent, "on", on))
        if there >= most:
            raise QuotaError(
                f"{quote(agent.name)} already has {there} waits for {on!r}, the maximum: "
                "cancel one first, with rmdir or WaitCancel"
            )

    def _check_family(self, caller: Caller, family: str) -> None:
        if caller.agent is None:
            return
        maker = self._registry.calling(caller)
        if maker is None or family not in self._authority.families(maker):
            raise DeniedError(f"the calling agent lacks {family}, which this kind of wait needs")

    def _open_work(self, change: Change, agent: Agent, name: str) -> Work | None:
        """The work item that a wait is to block; None for no name."""
        if not name:
            return None
        item = self._work.named(change, agent, name)
        if change.is_over(item):
            raise WrongStateError(
                f"the work item {quote(name)} has ended: its status is {item.status}"
            )
        return item

    def set(self, agent: Agent, wait: Wait, field: str, text: str) -> None:
        """``work`` or ``deadline``, empty for none, of a wait that is not over.

        ``MalformedError``, ``MissingError`` or ``WrongStateError``.
        """
        with self._journal.changing() as change:
            self.update(change, agent, wait, field, text)

    def update(self, change: Change, agent: Agent, wait: Wait, field: str, text: str) -> None:
        """Sets a field in a change that the caller commits, or drops to see what ``set`` raises."""
        self.check_open(wait)
        _SETTERS[field](self, change, agent, wait, text)

    def _set_work(self, change: Change, agent: Agent, wait: Wait, text: str) -> None:
        before = change.peek(wait, "work")
        if before == text:
            return
        item = self._open_work(change, agent, text)
        change.put(wait, work=text)
        if change.peek(wait, "status") is not WaitStatus.ARMED:
            return
        self._release(change, agent, before)
        if item is not None:
            self._work.block(change, agent, item)

    def _set_deadline(self, change: Change, agent: Agent, wait: Wait, text: str) -> None:
        deadline = expiry(text)
        change.put(wait, deadline=text)
        if change.peek(wait, "status") is WaitStatus.ARMED:
            change.put(wait, **deadline)

    # what becomes of them

    def fire(self, change: Change, agent: Agent, wait: Wait, payload: Payload | Shown) -> None:
        """The cause of an armed wait is there; the agent is told."""
        answer = payload if isinstance(payload, Shown) else Shown.of(payload)
        self._leave(change, agent, wait, WaitStatus.FIRED, answer)

    def expire(self, change: Change, agent: Agent, wait: Wait) -> None:
        """Its deadline is over; the agent is told."""
        payload = {"deadline": timestamp(change.peek(wait, "expires"))}
        self._leave(change, agent, wait, WaitStatus.EXPIRED, Shown.of(payload))

    def cancel(self, change: Change, agent: Agent, wait: Wait) -> None:
        """Nobody wants to know any more."""
        self._leave(change, agent, wait, WaitStatus.CANCELLED, None)

    def cancel_all(self, change: Change, agent: Agent) -> None:
        """The agent has ended."""
        for wait in self.armed(change, agent):
            self.cancel(change, agent, wait)

    def _cancel_on(self, change: Change, agent: Agent, item: Work) -> None:
        """The work item is over."""
        for wait in self._oldest_first(change, agent, "work", item.name):
            self.cancel(change, agent, wait)

    def resource_over(
        self, change: Change, agent: Agent, kind: str, name: str, facts: EndFacts
    ) -> None:
        """A ``task`` or ``child`` of the agent's has ended; ``facts`` is called if it waits."""
        answer: Shown | None = None
        for wait in self._oldest_first(change, agent, "on", f"{kind} {name}"):
            answer = answer or Shown.of(facts())
            self.fire(change, agent, wait, answer)

    def child_over(
        self, change: Change, agent: Agent, child: Agent, facts: EndFacts, outcome: str, reason: str
    ) -> None:
        """A child of the agent's has ended, or is its child no more."""
        self.resource_over(change, agent, "child", child.name, facts)
        # its messages have ended before it does, unless it stops being a child
        over = reply_facts(child.name, outcome, reason)
        waiting = [m for m in self._messages.pending(child) if not change.is_over(m)]
        for name in (child.name, *(f"{child.name} {m.name}" for m in waiting)):
            self.resource_over(change, agent, "reply", name, lambda: over)

    def _message_ended(self, change: Change, child: Agent, message: Message) -> None:
        """A message to an agent has ended; its parent may wait for the reply."""
        parent = self._registry.parent_of(child)
        if parent is None or not self._messages.is_parents(child, message):
            return
        facts = cache(lambda: self._conditions.reply(change, parent, child, message))
        for name in (child.name, f"{child.name} {message.name}"):
            self.resource_over(change, parent, "reply", name, facts)

    def tells(self, change: Change, agent: Agent, child: Agent, message: Message) -> bool:
        """Whether this change tells the agent, which waited for it, that a message has ended."""
        names = {f"reply {child.name}", f"reply {child.name} {message.name}"}
        return any(
            wait.on in names and wait.status is not change.peek(wait, "status")
            for wait in self.of(change, agent)
        )

    def _message_queued(self, change: Change, agent: Agent, message: Message) -> None:
        """Somebody sent the agent a message."""
        if message.provenance in NOTICES:
            return
        for wait in self._oldest_first(change, agent, "on", "message"):
            self.fire(change, agent, wait, message_facts(message))

    def trigger(self, wait: Wait, text: str) -> None:
        """Somebody wrote to its token; ``MissingError`` if that is not good any more, and
        ``QuotaError`` if too much of what was written is unread."""
        TRIGGERING.check_object(self._facts, NOBODY, wait)
        agent = self._registry.get(wait.agent)
        assert agent is not None
        with self._journal.changing() as change:
            if not wait.repeats:
                self.fire(change, agent, wait, text)
            elif len(self._messages.unread(agent, wait)) < _UNREAD:
                self._messages.check_room(agent)
                self._happen(change, agent, wait, Shown.of(text))
            else:
                raise QuotaError(
                    f"{_UNREAD} events that were written to this token are unread: write again "
                    "when the agent has read some"
                )
        crashpoints.reach("wait.fired")

    def _leave(
        self, change: Change, agent: Agent, wait: Wait, to: WaitStatus, answer: Shown | None
    ) -> None:
        """It is over, and with it what it meant; told to the agent if there is an answer."""
        change.step(wait, to)
        self._tell(change, agent, wait, to)
        if answer is not None:
            self._notify(change, agent, wait, answer)
        self._release(change, agent, change.peek(wait, "work"))

    def _notify(self, change: Change, agent: Agent, wait: Wait, answer: Shown) -> None:
        """Tells the agent what the wait is answered with, and whether it is still armed."""
        change.put(wait, payload=answer.shown)
        notice = {"wait": wait.name, "on": change.peek(wait, "on")}
        notice |= {"status": change.peek(wait, "status").value}
        notice |= _named(change.peek(wait, "work"))
        begin = dump_json(notice).removesuffix("}")
        self._messages.notify(
            change,
            agent,
            text=f'{begin},"payload":{answer.json}}}\n',
            provenance="wait",
            sender=notice_of(wait),
        )

    def _happen(self, change: Change, agent: Agent, wait: Wait, answer: Shown) -> None:
        """It has happened once more, and the wait stays armed."""
        self._tell(change, agent, wait, WaitStatus.FIRED)
        self._notify(change, agent, wait, answer)

    def _come_again(self, change: Change, agent: Agent, wait: Wait) -> None:
        """A timer is due that is due again: the times that nobody was told of meanwhile, because
        no daemon ran or what was told last is unread, count as one."""
        late = clock.up() - self._due(wait)
        now = min(wait.due + late, wait.until or math.inf)
        last = wait.due + max(now - wait.due, 0.0) // wait.period * wait.period
        missed = wait.missed + round((last - wait.due) / wait.period)
        answer = Shown.of({"due": timestamp(last), "missed": missed})
        due = last + wait.period
        if wait.until and due > wait.until:
            self.fire(change, agent, wait, answer)
            return
        change.put(wait, due=due, due_up=wait.due_up and wait.due_up + due - wait.due)
        if self._messages.unread(agent, wait):
            change.put(wait, missed=missed + 1)
            return
        change.put(wait, missed=0)
        self._happen(change, agent, wait, answer)

    def _release(self, change: Change, agent: Agent, work: str) -> None:
        if not work:
            return
        with contextlib.suppress(MissingError):
            self._work.release(change, agent, self._work.named(change, agent, work))

    @staticmethod
    def _tell(change: Change, agent: Agent, wait: Wait, what: WaitStatus) -> None:
        change.tell(
            agent,
            f"wait.{what}",
            wait=wait.name,
            on=change.peek(wait, "on"),
            **_named(change.peek(wait, "work")),
        )

    def _check_room(self, agent: Agent) -> None:
        self._messages.check_room(agent)

    def _removing(self, change: Change, agent: Agent, wait: Wait) -> None:
        if wait.status is WaitStatus.ARMED:
            self.cancel(change, agent, wait)
        self._messages.discard_notices(change, agent, wait)

    # timers and deadlines

    def _due(self, wait: Wait) -> float:
        return self.moments.counted(wait, wait.due, wait.due_up)

    def _moments_of(self, wait: Wait) -> tuple[float, ...]:
        if wait.status is not WaitStatus.ARMED:
            return ()
        return self._due(wait), self.moments.deadline(wait)

    def _come(self, change: Change, agent: Agent, wait: Wait, moment: float) -> None:
        # the one of the two that was due first has happened
        if moment == self._due(wait) and wait.period:
            self._come_again(change, agent, wait)
        elif moment == self._due(wait):
            self.fire(change, agent, wait, {"due": timestamp(wait.due)})
        else:
            self.expire(change, agent, wait)


def _named(work: str) -> dict[str, str]:
    return {"work": work} if work else {}


_SETTERS: Final[dict[str, Callable[[WaitingPlane, Change, Agent, Wait, str], None]]] = {
    "work": WaitingPlane._set_work,
    "deadline": WaitingPlane._set_deadline,
}
