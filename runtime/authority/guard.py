"""Guards: each says who may do a thing, when, and what stands in its way, once, beside the thing.

Writes of files, ``mkdir`` and ``rmdir``, verbs and the operations of sockets are decided by
guards and by nothing else that knows callers or statuses; the manual is made of the same.

An operation that is called from elsewhere asks the same guard again. What a guard does not decide:

- Values: it judges before the daemon knows what is written. What a line may say, also by which
  caller or for which agent, is the parser's matter. A start parses again what was written before,
  because a parent may have less now.
- Quotas: how much there may be is the accounts' matter, and is counted when the change is made,
  with all that the change makes.
- The moment: some things only the runtime knows, and only when it acts: that a run has just ended,
  that the kernel refuses, that a parent's cell cannot run git now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final, Generic, Never, TypeVar

from runtime.authority.facts import Facts
from runtime.caller import Caller, Role
from runtime.errors import CtxError, DeniedError, ForbiddenError, WrongStateError
from runtime.records.lifecycle import AGENT_MOVES, Cue, Status
from runtime.records.model import Agent
from runtime.texts.names import quote

#: what a guard judges: an agent, a session, a task, the name of something to be made
_O_contra = TypeVar("_O_contra", contravariant=True)

ANY_STATUS: Final = frozenset(Status)
#: of an agent below which something may begin
TAKING: Final = ANY_STATUS - {Status.NEW, Status.STOPPING, Status.DEAD}


class Act(Enum):
    """How a thing is used: the verbs of the sentences with which it is refused."""

    WRITE = ("write", "written")
    MAKE = ("make", "made")
    REMOVE = ("remove", "removed")
    SAY = ("say", "said")
    USE = ("use", "used")
    ASK = ("ask for", "asked for")
    SEND = ("send", "sent")
    READ = ("read", "read")


@dataclass(frozen=True, slots=True)
class Unless(Generic[_O_contra]):
    """A reason to refuse every caller: ``text`` goes on after "refused if" in the manual.

    ``why`` gives the sentence of the error for an object, empty if nothing does.
    """

    text: str
    error: type[CtxError]
    why: Callable[[Facts, Caller, _O_contra], str]

    def check(self, facts: Facts, caller: Caller, obj: _O_contra) -> None:
        sentence = self.why(facts, caller, obj)
        if sentence:
            raise self.error(sentence)


def unless(
    text: str, error: type[CtxError]
) -> Callable[[Callable[[Facts, Caller, _O_contra], str]], Unless[_O_contra]]:
    """Makes a reason to refuse of the function that tells why."""
    return partial(Unless, text, error)


#: what changes an agent, or tells it something: by its lead alone, of one that was placed here
_LED: Final = frozenset((Act.WRITE, Act.MAKE, Act.REMOVE, Act.SAY, Act.SEND))
#: who changes it from within: itself, and its children
_WITHIN: Final = Role.SELF | Role.CHILD
#: for whom a delegated thing of a private child is
WITHIN_FAMILY: Final = Role.CREATOR | Role.CHILD | Role.SENDER


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard(Generic[_O_contra]):
    """``who`` may, ``when`` the agent has one of these statuses, ``unless`` something else.

    It is generic in what its obstacles look at, beside the caller and the agent. A ``delegated``
    thing of a private child is between the child, its creator and its own children.
    ``misfit`` is the error for another status, where it is not the usual one. Of an agent that
    another machine's daemon has placed here, operators may do what is ``local`` only.
    """

    who: Role = Role.NONE
    when: frozenset[Status] = ANY_STATUS
    unless: tuple[Unless[_O_contra], ...] = ()
    delegated: bool = False
    local: bool = False
    misfit: Callable[[Status], CtxError] | None = None

    def wanted(self, facts: Facts, agent: Agent | None) -> Role:
        """The roles that may, for this agent."""
        if not self.delegated or agent is None or not agent.private:
            return self.who
        if facts.registry.parent_of(agent) is not None:
            return self.who & WITHIN_FAMILY
        return self.who

    def check(
        self,
        act: Act,
        what: str,
        facts: Facts,
        caller: Caller,
        agent: Agent | None,
        obj: _O_contra,
        roles: Role | None = None,
    ) -> None:
        """Identity first, then the state, then the object; raises what it is refused with.
        ``roles`` are the caller's to the agent, where nobody gives him others."""
        if roles is None:
            roles = facts.identity.roles(caller, agent) if agent is not None else Role.NONE
        self.check_who(act, what, facts, roles, agent)
        if agent is not None:
            self.check_when(act, what, agent)
        self.check_object(facts, caller, obj)

    def check_who(
        self, act: Act, what: str, facts: Facts, roles: Role, agent: Agent | None
    ) -> None:
        """``DeniedError`` if these may not, ``ForbiddenError`` if only its lead may."""
        wanted = self.wanted(facts, agent)
        infinitive, participle = act.value
        if not roles & wanted:
            raise DeniedError(f"the caller may not {infinitive} {what}; {said(wanted)} may")
        if agent is None or not agent.is_guest or self.local or roles & _WITHIN:
            return
        if act in _LED:
            where = f"at {agent.guest['alias']}, which has placed {quote(agent.name)} here"
            raise ForbiddenError(f"{what} can only be {participle} {where}")

    def check_when(self, act: Act, what: str, agent: Agent) -> None:
        """``WrongStateError``, or the ``misfit``, in another status."""
        if agent.status in self.when:
            return
        if self.misfit is not None:
            raise self.misfit(agent.status)
        _, participle = act.value
        raise WrongStateError(
            f"{what} can be {participle} {times(self.when)}; {quote(agent.name)} is {agent.status}"
            f"{self._remedy(agent.status)}"
        )

    def _remedy(self, status: Status) -> str:
        """How an agent that has ended, or not begun, gets into a status that does."""
        if status is Status.NEW:
            return ": start it first"
        if status is Status.DEAD:
            return ": reset it first" if Status.NEW in self.when else ": reset and start it first"
        return ""

    def check_object(self, facts: Facts, caller: Caller, obj: _O_contra) -> None:
        """The error of the first thing that stands in the way."""
        for reason in self.unless:
            reason.check(facts, caller, obj)


#: a guard of whichever things: of it can be asked who may and when, and what else is refused
AnyGuard = Guard[Never]
#: of a thing that cannot be done, whatever it is
NEVER: Final[Guard[object]] = Guard()


def of_move(
    who: Role, cue: Cue, *unless: Unless[Agent], local: bool = False
) -> Guard[Agent]:
    """The guard of a verb of agents: ``when`` the table of statuses has the move."""
    return Guard(
        who=who,
        local=local,
        when=frozenset(status for status, e in AGENT_MOVES.table if e is cue),
        unless=unless,
        misfit=lambda status: AGENT_MOVES.refusal(status, cue),
    )


_SAID: Final = (
    (Role.CREATOR, "the creator"),
    (Role.OPERATOR, "operators"),
    (Role.CHILD, "supervised children"),
    (Role.SELF, "the agent itself"),
    (Role.READER, "agents with policy read"),
    (Role.STARTER, "agents with policy start"),
    (Role.STOPPER, "agents with policy stop"),
    (Role.WRITER, "agents with policy write"),
    (Role.SESSION_READER, "agents with policy session read"),
    (Role.SENDER, "the sender"),
)


def said(roles: Role) -> str:
    """Roles in words, for reasons and the manual."""
    if roles & Role.ANYONE:
        return "everybody"
    if roles == Role.ROOT:
        return "operators with uid 0"
    return _listed([text for role, text in _SAID if role & roles], "and") or "nobody"


def times(when: frozenset[Status]) -> str:
    """Statuses in words, for reasons and the manual."""
    if when == ANY_STATUS:
        return "at any time"
    if len(when) > len(ANY_STATUS) / 2:
        return "unless " + _listed([s.value for s in Status if s not in when], "or")
    return "while " + _listed([s.value for s in Status if s in when], "or")


def _listed(words: list[str], last: str) -> str:
    *before, end = words or [""]
    return f"{', '.join(before)} {last} {end}" if before else end
