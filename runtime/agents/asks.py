"""The asks of agents: questions to people, or to their supervisors (ctxfs-tasks(5), Asks).

An ask is asked once and leaves that state once: it is answered, expires or is withdrawn, in the
change that tells of it and fires what waits for it. Never does the agent that asks, or one below
it, answer: only operators do, and the agent that supervises it if it is asked.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Final

from runtime import crashpoints
from runtime.agents.conditions import answer_facts
from runtime.agents.messages import Messages
from runtime.agents.moments import Moments, expiry
from runtime.agents.planes import AwaitedPlane, PlaneKind
from runtime.agents.waiting import WaitingPlane
from runtime.authority.accounts import Resource
from runtime.authority.facts import Facts
from runtime.authority.guard import TAKING, Act, Guard, unless
from runtime.caller import CONTROLLERS, OPERATORS, PARTIES, Caller, Role
from runtime.errors import DeniedError, MalformedError, TooLongError, WrongStateError
from runtime.ids import NO_MESSAGE
from runtime.kernel.linux import boot_id
from runtime.records.change import Change
from runtime.records.items import REPORTED, Ask, AskStatus, MessageStatus
from runtime.records.model import Agent
from runtime.texts.forms import FORM_MAX, parse_filled, parse_form
from runtime.texts.names import (
    BLANKS,
    check_choice,
    dump_json,
    is_unfinished_json,
    parse_json_object,
    quote,
    timestamp,
)

ASK_KINDS: Final = ("question", "permission")
OPERATOR, SUPERVISOR = "operator", "supervisor"
ADDRESSEES: Final = (OPERATOR, SUPERVISOR)
#: how long it is asked
LIVES: Final = ("agent", "run")
QUESTION_MAX: Final = 1024
_OPTIONS_MAX: Final = 16
_LABEL_MAX: Final = 200
_WORD: Final = re.compile(r"[!-~]{1,64}")
#: of those that have ended
KEPT: Final = 64


@unless("it was asked", WrongStateError)
def _asked(facts: Facts, caller: Caller, ask: Ask) -> str:
    if ask.status is AskStatus.NEW:
        return ""
    return f"the ask {quote(ask.name)} was asked: its status is {ask.status}"


@unless("it is not asked yet", WrongStateError)
def _unasked(facts: Facts, caller: Caller, ask: Ask) -> str:
    if ask.status is not AskStatus.NEW:
        return ""
    return f"the ask {quote(ask.name)} is not asked yet"


@unless("it is over", WrongStateError)
def _over(facts: Facts, caller: Caller, ask: Ask) -> str:
    if not ask.over:
        return ""
    what = f": {quote(ask.answer.partition(chr(10))[0])}" if ask.answer else ""
    return (
        f"the ask {quote(ask.name)} is over: {ask.status} by {ask.by} "
        f"at {timestamp(ask.ended)}{what}"
    )


@unless("the caller is an agent, and it is not asked of that", DeniedError)
def _others(facts: Facts, caller: Caller, ask: Ask) -> str:
    agent = facts.registry.get(ask.agent)
    if caller.agent is None or agent is None:
        return ""
    supervisor = facts.registry.supervisor_of(agent)
    if ask.to == SUPERVISOR and supervisor is not None and supervisor.index == caller.agent:
        return ""
    what = f"the ask {quote(ask.name)} of {quote(agent.name)}"
    return f"{what} is for operators: only they may answer it"


@unless("it is asked and the caller is the agent itself, or it is not and the caller is another",
        DeniedError)
def _not_now(facts: Facts, caller: Caller, ask: Ask) -> str:
    is_new, is_own = ask.status is AskStatus.NEW, caller.agent == ask.agent
    if is_new is is_own:
        return ""
    who = "only the agent itself" if is_new else "only its creator and operators"
    return f"{who} may write to, as the status of {quote(ask.name)} is {ask.status}"


#: its files are written, its addressee is, and its answer is
WRITING: Final = Guard(who=Role.SELF, when=TAKING, unless=(_asked,))
ADDRESSING: Final = Guard(who=PARTIES, unless=(_not_now, _over))
ANSWERING: Final = Guard(who=CONTROLLERS, unless=(_others, _unasked, _over), local=True)
ASKS: Final = PlaneKind(
    cls=Ask, what="ask", limit=lambda config: config.asks,
    making=Guard(who=Role.SELF, when=TAKING), removing=Guard(who=PARTIES), writing=WRITING,
    remedy="rmdir or AskWithdraw",
    relief="wait for an answer, or withdraw one with rmdir or AskWithdraw",
    kept=KEPT,
)


# fields


def parse_options(text: str) -> str:
    """Lines WORD [LABEL]; ``MalformedError``."""
    lines = [line for each in text.split("\n") if (line := each.strip(BLANKS))]
    if len(lines) > _OPTIONS_MAX:
        raise MalformedError(f"{len(lines)} options are too many; use at most {_OPTIONS_MAX}")
    for line in lines:
        word, _, label = line.partition(" ")
        if not _WORD.fullmatch(word) or len(label) > _LABEL_MAX or not label.isprintable():
            raise MalformedError(
                f"{quote(line)} is not an option; use WORD or WORD LABEL: up to 64 characters of "
                f"ASCII, and up to {_LABEL_MAX} printable ones"
            )
    words = words_of("\n".join(lines))
    for word in words:
        if words.count(word) > 1:
            raise MalformedError(f"{quote(word)} is an option twice")
    return "".join(f"{line}\n" for line in lines)


def words_of(options: str) -> list[str]:
    """The words of which an answer begins with one; none if any text does."""
    return [line.partition(" ")[0] for line in options.splitlines()]


def _parse_deadline(text: str) -> str:
    expiry(text)
    return text


def _parse_default(text: str) -> str:
    if "\n" in text or len(text.encode()) > FORM_MAX:
        raise MalformedError(f"{quote(text)}: use one line of at most {FORM_MAX} bytes")
    return text


_PARSERS: Final[dict[str, Callable[[str], str]]] = {
    "ask_kind": lambda text: check_choice(text, ASK_KINDS),
    "detail": str,
    "options": parse_options,
    "form": lambda text: dump_json(parse_form(text)) if text.strip() else "",
    "default": _parse_default,
    "deadline": _parse_deadline,
    "to": lambda text: check_choice(text, ADDRESSEES),
    "life": lambda text: check_choice(text, LIVES),
}


def is_unfinished(text: str) -> bool:
    """Whether it begins an object of JSON of several lines."""
    return text.startswith("{") and is_unfinished_json(text)


class AskPlane(AwaitedPlane[Ask]):
    """The asks of all agents."""

    def __init__(self, facts: Facts, *, messages: Messages, waiting: WaitingPlane) -> None:
        super().__init__(facts, ASKS)
        self._messages = messages
        self._waiting = waiting
        self.moments = Moments(facts, Ask, self._moments_of, self._expire)

    # looking

    def addressee(self, agent: Agent, ask: Ask) -> str:
        """Whom it asks: nobody supervises a root agent, so its operators."""
        return ask.to if self._registry.supervisor_of(agent) is not None else OPERATOR

    def count_open(self, agent: Agent) -> int:
        return sum(ask.status is AskStatus.OPEN for ask in self._items.of(agent.index, Ask))

    def seen_by(self, caller: Caller) -> list[Ask]:
        """The open ones that a caller may answer, or that it asks; the oldest first."""
        found: Iterable[Ask] = self._items.pending(Ask)
        if caller.agent is not None:
            own = self._registry.calling(caller)
            near = (own, *self._registry.children(own)) if own is not None else ()
            found = (ask for each in near for ask in self._items.of(each.index, Ask))
        theirs: dict[int, bool] = {}
        seen = []
        for ask in found:
            agent = self._registry.get(ask.agent)
            if agent is None or ask.status is not AskStatus.OPEN:
                continue
            if caller.agent is not None:
                is_theirs = caller.agent == agent.index or not _others.why(
                    self._facts, caller, ask
                )
            else:  # it is to an agent what it is to its owner's others
                if agent.owner not in theirs:
                    roles = self._identity.roles(caller, agent)
                    theirs[agent.owner] = bool(roles & OPERATORS)
                is_theirs = theirs[agent.owner]
            if is_theirs:
                seen.append(ask)
        return sorted(seen, key=lambda ask: (ask.asked, ask.index))

    # asking

    def check_asker(self, caller: Caller, agent: Agent) -> None:
        """``DeniedError`` for any other than the agent itself."""
        roles = self._identity.roles(caller, agent)
        self._kind.making.check_who(Act.MAKE, "an ask", self._facts, roles, agent)

    # what a caller commits, or drops to see what it raises

    def update(self, change: Change, agent: Agent, ask: Ask, field: str, text: str) -> None:
        """One field, before it is asked. ``MalformedError``, ``TooLongError`` or
        ``WrongStateError``."""
        self.check_open(ask)
        limit = self._settings.config.control_max
        if len(text.encode()) > limit:
            raise TooLongError(f"{field} may have at most {limit} bytes")
        change.put(ask, **{field: _PARSERS[field](text)})
        if change.peek(ask, "options") and change.peek(ask, "form"):
            raise MalformedError("an ask has options or a form, not both: empty the other one")

    def begin(self, change: Change, agent: Agent, ask: Ask, question: str) -> None:
        """Asks, once. ``MalformedError``, ``QuotaError`` or ``WrongStateError``."""
        self.check_open(ask)
        WRITING.check_when(Act.WRITE, "question", agent)
        if not question.strip():
            raise MalformedError("the question is empty: write one line")
        if "\n" in question or len(question.encode()) > QUESTION_MAX:
            raise MalformedError(
                f"{quote(question)}: a question is one line of at most {QUESTION_MAX} bytes; write "
                "the rest to detail"
            )
        try:
            self.check_default(change, ask)
        except MalformedError as error:
            raise MalformedError(f"default: {error.sentence}") from None
        if change.peek(ask, "life") == "run" and not agent.run.id:
            raise WrongStateError(f"{quote(agent.name)} has no run: write agent to life")
        self._accounts.check(agent.owner, Resource.ASKS, 1)
        change.step(ask, AskStatus.OPEN)
        change.put(
            ask, question=question, asked=time.time(), run=agent.run.id, boot=boot_id(),
            **expiry(change.peek(ask, "deadline")),
        )
        change.tell(
            agent, "ask.open", ask=ask.name, ask_kind=change.peek(ask, "ask_kind"),
            to=change.peek(ask, "to"), question=question,
        )
        self._tell_supervisor(change, agent, ask)

    def check_default(self, change: Change, ask: Ask) -> None:
        """``MalformedError`` if nobody could answer that."""
        if default := change.peek(ask, "default"):
            self.parse_answer(change, ask, default)

    def address(
        self, change: Change, caller: Caller, agent: Agent, ask: Ask, text: str
    ) -> None:
        """Whom it asks; of an open one, somebody passes it on. ``DeniedError``, ``MalformedError``,
        ``QuotaError`` or ``WrongStateError``."""
        self.check_there(ask)
        ADDRESSING.check_object(self._facts, caller, ask)
        to, before = check_choice(text, ADDRESSEES), change.peek(ask, "to")
        change.put(ask, to=to)
        if change.peek(ask, "status") is AskStatus.NEW or to == before:
            return
        if to == SUPERVISOR and caller.agent is not None:
            raise DeniedError(
                f"the ask {quote(ask.name)} is for operators: only they may let the supervisor of "
                f"{quote(agent.name)} answer"
            )
        change.tell(agent, "ask.to", ask=ask.name, to=to)
        self._take_back_message(change, agent, ask)
        self._tell_supervisor(change, agent, ask)

    def _tell_supervisor(self, change: Change, agent: Agent, ask: Ask) -> None:
        supervisor = self._registry.supervisor_of(agent)
        if supervisor is None or change.peek(ask, "to") != SUPERVISOR:
            return
        if not self._messages.takes_notices(change, supervisor):
            return
        told = {
            "type": "ask",
            "agent": agent.name,
            "ask": ask.name,
            "question": change.peek(ask, "question"),
            "options": change.peek(ask, "options").splitlines(),
            "asked_at": timestamp(change.peek(ask, "asked")),
        }
        message = self._messages.queue(
            change, supervisor, text=dump_json(told), sender=f"agent:{agent.name}",
            provenance=REPORTED,
        )  # fmt: skip
        change.put(ask, message=message.name)

    def _take_back_message(self, change: Change, agent: Agent, ask: Ask) -> None:
        """Its supervisor need not read it any more."""
        supervisor, name = self._registry.supervisor_of(agent), change.peek(ask, "message")
        if supervisor is None or not name:
            return
        message = self._messages.find(supervisor, name)
        if message is not None and change.peek(message, "status") is MessageStatus.QUEUED:
            self._messages.drop(change, supervisor, [message], "ask_over")
        change.put(ask, message=NO_MESSAGE)

    # answering

    def parse_answer(self, change: Change, ask: Ask, text: str) -> str:
        """An answer as it is kept: a line, then perhaps a note; ``MalformedError`` for one that
        does not fit."""
        if form := change.peek(ask, "form"):
            return dump_json(parse_filled(parse_json_object(form), text)) + "\n"
        line, _, note = text.partition("\n")
        word, words = line.strip(BLANKS), words_of(change.peek(ask, "options"))
        if words and word not in words:
            raise MalformedError(f"{quote(word)} is no option; use {', '.join(words)}")
        if not word:
            raise MalformedError("the answer is empty: write a line, and perhaps more with a note")
        return "\n".join(filter(None, (word, note.strip("\n")))) + "\n"

    def check_answer(self, ask: Ask, text: str) -> None:
        """Looks at what is written so far; ``MalformedError`` if no answer begins so."""
        if not (ask.form and is_unfinished(text)):
            self.parse_answer(Change(), ask, text)

    def answer(self, caller: Caller, agent: Agent, ask: Ask, text: str) -> None:
        """The one answer. ``DeniedError``, ``MalformedError``, or ``WrongStateError``, which says
        who was first."""
        with self._journal.changing() as change:
            self.settle(change, caller, agent, ask, text)
        crashpoints.reach("ask.answered")

    def settle(
        self, change: Change, caller: Caller, agent: Agent, ask: Ask, text: str
    ) -> None:
        """Answers in a change that the caller commits."""
        ANSWERING.check(Act.WRITE, "answer", self._facts, caller, agent, ask)
        self.check_there(ask)
        answer = self.parse_answer(change, ask, text)
        self._end(change, agent, ask, AskStatus.ANSWERED, answer)
        self._forget_old(change, agent)

    # other ends

    def still_open(self, change: Change, agent: Agent) -> list[Ask]:
        """The asks of an agent that wait for their answer."""
        asks = self._items.of(agent.index, Ask)
        return [ask for ask in asks if change.peek(ask, "status") is AskStatus.OPEN]

    def withdraw(self, change: Change, agent: Agent, asks: Iterable[Ask]) -> None:
        """Nobody waits for their answers any more."""
        for ask in asks:
            self._end(change, agent, ask, AskStatus.WITHDRAWN)
        self._forget_old(change, agent)

    def run_over(self, change: Change, agent: Agent) -> None:
        """The run at hand ends, and with it what it alone asks."""
        asks = self.still_open(change, agent)
        self.withdraw(change, agent, [ask for ask in asks if ask.life == "run"])

    def _moments_of(self, ask: Ask) -> tuple[float, ...]:
        return (self.moments.deadline(ask),) if ask.status is AskStatus.OPEN else ()

    def _expire(self, change: Change, agent: Agent, ask: Ask, moment: float) -> None:
        answer = self.parse_answer(change, ask, ask.default) if ask.default else ""
        self._end(change, agent, ask, AskStatus.EXPIRED, answer)
        self._forget_old(change, agent)

    def _removing(self, change: Change, agent: Agent, item: Ask) -> None:
        if not item.over:
            self._end(change, agent, item, AskStatus.WITHDRAWN)

    def _end(
        self, change: Change, agent: Agent, ask: Ask, to: AskStatus, answer: str = ""
    ) -> None:
        was_asked = change.peek(ask, "status") is AskStatus.OPEN
        change.step(ask, to)
        by = change.by or self._journal.actor
        change.put(ask, answer=answer, by=by, ended=time.time())
        if was_asked:
            # what was typed may be a secret; a word of the options is none
            word = {"answer": answer.partition("\n")[0]} if ask.options and answer else {}
            change.tell(agent, "ask.end", ask=ask.name, status=to.value, **word)
        self._take_back_message(change, agent, ask)
        facts = cache(lambda: answer_facts(change, ask))
        self._waiting.resource_over(change, agent, "answer", ask.name, facts)

    def _forget_old(self, change: Change, agent: Agent) -> None:
        ended = [a for a in self._items.of(agent.index, Ask) if change.is_over(a)]
        ended.sort(key=lambda ask: (change.peek(ask, "ended"), ask.index))
        for old in ended[:-KEPT]:
            if old not in change.dropped_items:
                change.drop(old)
