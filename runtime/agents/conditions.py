"""Lines of ``on``: what a wait can be for, whether it has happened already, and what it is answered
with then (ctxfs-tasks(5), Waits)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from runtime.agents.messages import Messages
from runtime.agents.results import Results, shortened
from runtime.authority.facts import Facts, Part
from runtime.errors import MalformedError, MissingError
from runtime.ids import MessageId
from runtime.records.change import Change
from runtime.records.items import NOTICES, Ask, Item, Message, MessageStatus, Task
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.texts.names import (
    dump_json,
    parse_duration,
    parse_json_object,
    parse_moment,
    parse_usage,
    quote,
    words,
)

_I = TypeVar("_I", bound=Item)
#: what a wait is answered with: a text as it is, or an object that is shown as JSON
Payload = str | dict[str, Any]

#: armed waits of one agent for the same task, child or ask, each told all of what that gave back
_FOR_AN_END: Final = 16
#: for a message, or for replies of the same child
_FOR_A_MESSAGE: Final = 64
#: and for the end of one message: many of these may end in one change
_FOR_ONE_MESSAGE: Final = 4
#: timers of one agent that are due again and again, and the seconds between two times
_AGAIN: Final = 16
_LEAST_PERIOD: Final = 10.0


@dataclass(frozen=True, slots=True)
class Shown:
    """A payload as ``payload`` shows it and as JSON: made once for all that are told it."""

    shown: str
    json: str

    @classmethod
    def of(cls, payload: Payload) -> Shown:
        json = dump_json(payload)
        return cls(payload if isinstance(payload, str) else json + "\n", json)


@dataclass(frozen=True, slots=True)
class Condition:
    """A word of ``on``; ``over`` gives what it is answered with if that is there already.

    It raises ``MissingError`` or ``MalformedError`` if what is waited for can never come.
    """

    usage: str
    family: str
    #: None for what nobody knows before it happens, and for times (``moments``)
    over: Callable[[Conditions, Change, Agent, str], Payload | None] | None = None
    #: how many can wait for the same, if it is something that many can wait for
    shared: int = 0

    def most(self, on: str) -> int:
        """How many waits of one agent can be on this line, 0 for any number."""
        return _FOR_ONE_MESSAGE if self is _REPLY and len(on.split(" ")) > 2 else self.shared


class Conditions(Part):
    """Answers for waits that are armed."""

    def __init__(self, facts: Facts, messages: Messages, results: Results) -> None:
        super().__init__(facts)
        self._messages = messages
        self._results = results

    def task_over(self, change: Change, agent: Agent, argument: str) -> Payload | None:
        task = self._named(change, agent, Task, argument)
        return self._results.of_task(change, agent, task) if change.is_over(task) else None

    def ask_over(self, change: Change, agent: Agent, argument: str) -> Payload | None:
        ask = self._named(change, agent, Ask, argument)
        return answer_facts(change, ask) if change.is_over(ask) else None

    def _named(self, change: Change, agent: Agent, cls: type[_I], name: str) -> _I:
        made = [item for item in change.newly_made(agent.index, cls) if item.name == name]
        item = made[0] if made else self._items.named(agent.index, cls, name)
        if item is None:
            raise MissingError(f"{quote(agent.name)} has no {cls.kind} {quote(name)}")
        return item

    def child_over(self, change: Change, agent: Agent, argument: str) -> Payload | None:
        for child in self._registry.children(agent):
            if child.name == argument:
                if change.peek_agent(child, "status") is not Status.DEAD:
                    return None
                return self._results.of_child(change, agent, child)
        raise MissingError(f"{quote(agent.name)} has no child {quote(argument)}")

    def reply_over(self, change: Change, agent: Agent, argument: str) -> Payload | None:
        name, _, wanted = argument.partition(" ")
        child = next((c for c in self._registry.children(agent) if c.name == name), None)
        if child is None:
            raise MalformedError(f"{quote(agent.name)} has no child {quote(name)}")
        if not child.how.takes_messages:
            raise MalformedError(
                f"{quote(name)} is a once agent, which answers no messages: wait for its end, "
                f"{quote(f'child {name}')}"
            )
        if not wanted:
            if change.peek_agent(child, "status") is not Status.DEAD:
                return None
            return reply_facts(name, child.outcome, child.reason)
        made = [m for m in change.newly_made(child.index, Message) if m.name == wanted]
        message = made[0] if made else self._messages.find(child, MessageId(wanted))
        if message is None or not self._messages.is_parents(child, message):
            raise MissingError(
                f"{quote(agent.name)} sent no message {quote(wanted)} to {quote(name)}, or it "
                "ended long ago"
            )
        if not change.is_over(message):
            return None
        return self.reply(change, agent, child, message)

    def message_over(self, change: Change, agent: Agent, argument: str) -> Payload | None:
        queued = [m for m in self._messages.pending(agent) if m.provenance not in NOTICES]
        for message in queued:
            if change.peek(message, "status") is MessageStatus.QUEUED:
                return message_facts(message)
        return None

    def reply(
        self, change: Change, agent: Agent, child: Agent, message: Message
    ) -> dict[str, Any]:
        """The payload of a wait for the reply to a message that has ended."""
        whole = change.peek(message, "reply")
        handle, path = self._items.named(agent.index, Task, child.name), ""
        if whole and handle is not None and handle.child == child.index:
            path = self._results.output_path(agent, handle.name)
        reply, truncated = shortened(whole, "path" if path else "")
        return reply_facts(
            child.name,
            str(change.peek(message, "status")),
            change.peek(message, "reason"),
            message=message.name,
            run=change.peek(message, "run"),
            reply=reply,
            truncated=truncated,
            path=path,
        )


def message_facts(message: Message) -> dict[str, Any]:
    """The payload of a wait for a message."""
    return {
        "message": message.name,
        "from": message.sender,
        "provenance": message.provenance,
        "priority": message.priority,
    }


def answer_facts(change: Change, ask: Ask) -> dict[str, Any]:
    """The payload of a wait for an answer: a text, or of a form an object; empty without one."""
    line, _, note = change.peek(ask, "answer").partition("\n")
    return {
        "ask": ask.name,
        "status": change.peek(ask, "status").value,
        "answer": parse_json_object(line) if ask.form and line else line,
        "note": note.removesuffix("\n"),
        "by": change.peek(ask, "by"),
    }


def reply_facts(child: str, outcome: str, reason: str, **more: Any) -> dict[str, Any]:
    """The payload of a wait for a reply; with nothing more for one that never comes, because the
    child has ended."""
    facts = {"child": child, "message": "", "outcome": outcome, "run": "", "reason": reason}
    return {**facts, "reply": "", "truncated": False, "path": "", **more}


_TIMER: Final = Condition("timer DURATION|TIME", "core")
#: stays armed
EVERY: Final = Condition("timer every DURATION [until DURATION|TIME]", "core", shared=_AGAIN)
_REPLY: Final = Condition(
    "reply NAME [MESSAGE]", "core", Conditions.reply_over, shared=_FOR_A_MESSAGE
)
_CONDITIONS: Final[dict[str, Condition]] = {
    kind.usage.split()[0]: kind
    for kind in (
        _TIMER,
        Condition("task NAME", "core", Conditions.task_over, shared=_FOR_AN_END),
        Condition("child NAME", "core", Conditions.child_over, shared=_FOR_AN_END),
        Condition("answer ASK", "core", Conditions.ask_over, shared=_FOR_AN_END),
        _REPLY,
        Condition("message", "core", Conditions.message_over, shared=_FOR_A_MESSAGE),
        Condition("trigger", "external_trigger"),
        Condition("triggers", "external_trigger"),
    )
}


def parse(text: str) -> tuple[Condition, str]:
    """(kind, argument) of a line of ``on``; ``MalformedError``."""
    if words(text)[:2] == ["timer", "every"]:
        return EVERY, " ".join(words(text)[1:])
    kind, arguments = parse_usage(text, _CONDITIONS, "condition")
    return kind, " ".join(arguments)


def moments(kind: Condition, argument: str, now: float) -> dict[str, float]:
    """When a timer is due, in which period it is again, and until when; 0 for none."""
    due = period = until = 0.0
    if kind is _TIMER:
        due = parse_moment(argument, now)
    if kind is EVERY:
        given = argument.split(" ")[1:]
        if len(given) not in (1, 3) or given[1:2] not in ([], ["until"]):
            raise MalformedError(f"{quote(f'timer {argument}')}: use {EVERY.usage}")
        period, until = parse_duration(given[0]), 0.0
        due = parse_moment(given[0], now)
        if period < _LEAST_PERIOD:
            raise MalformedError(f"{quote(given[0])} is less than {_LEAST_PERIOD:g}s")
        if len(given) > 1:
            until = parse_moment(given[2], now)
            if until < due:
                raise MalformedError(f"{quote(given[2])} is before the timer is due")
    return {"due": due, "period": period, "until": until}
