"""A plane: the records of one kind below every agent, who makes, finds and removes them."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import trio

from runtime.agents import placing
from runtime.authority.facts import Facts, Part
from runtime.authority.guard import TAKING, Act, Guard
from runtime.caller import NOBODY, PARTIES, Caller
from runtime.errors import MissingError, QuotaError, TakenError
from runtime.ids import ItemIndex, WaitFileName
from runtime.records.change import Change, Subscriber
from runtime.records.config import Config
from runtime.records.itemlists import Items
from runtime.records.items import Ask, Item, Task, Wait, WaitStatus
from runtime.records.model import Agent
from runtime.texts.names import check_name, quote

_I = TypeVar("_I", bound=Item)
_A = TypeVar("_A", bound=Task | Ask)

#: who makes records below an agent, unless it is said otherwise of a kind
MAKING: Final[Guard[Agent]] = Guard(who=PARTIES, when=TAKING)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneKind(Generic[_I]):
    """One kind of records: its name, the setting for how many an agent has, and who makes, writes
    and removes them."""

    cls: type[_I]
    what: str
    limit: Callable[[Config], int]
    making: Guard[Agent] = MAKING
    removing: Guard[_I]
    #: who writes its files
    writing: Guard[_I]
    #: how one is removed: rmdir, and the tool that does the same
    remedy: str
    #: what to do where there are too many that have not ended
    relief: str
    #: of those that have ended, the last ones that stay; None if all do, and more are refused when
    #: they are as many as the setting ``ended``
    kept: int | None = None


class Plane(Part, Generic[_I]):
    """The records of one kind below every agent: makes, finds and removes them."""

    def __init__(self, facts: Facts, kind: PlaneKind[_I]) -> None:
        super().__init__(facts)
        self._kind = kind
        self._cls = kind.cls
        self._what = kind.what

    # looking

    def of(self, change: Change, agent: Agent) -> list[_I]:
        """The items of an agent, oldest first, with the ones that a change is about to make."""
        return self._items.of(agent.index, self._cls) + change.newly_made(
            agent.index, self._cls
        )

    def find(self, agent: Agent, name: str) -> _I:
        """``MissingError`` if there is none of this name."""
        item = self._items.named(agent.index, self._cls, name)
        if item is None:
            raise MissingError(f"{quote(agent.name)} has no {self._what} {quote(name)}")
        return item

    def check_there(self, item: _I) -> None:
        """``MissingError`` for one that was removed while somebody had it open."""
        if item.index and self._items.get(item.index) is not item:
            raise MissingError(f"the {self._what} {quote(item.name)} was removed")

    def check_open(self, item: _I) -> None:
        """Whether its files may be written; ``MissingError`` for one that is removed."""
        self.check_there(item)
        self._kind.writing.check_object(self._facts, NOBODY, item)

    def over(self, agent: Agent) -> list[_I]:
        """The items of an agent that have ended."""
        return [item for item in self._items.of(agent.index, self._cls) if item.over]

    def check_removal(self, item: _I) -> None:
        """Whether it can be removed, whoever asks; raises what its guard refuses it with."""
        self._kind.removing.check_object(self._facts, NOBODY, item)

    # changing

    def make(self, caller: Caller, agent: Agent, name: str) -> _I:
        """A new one, for a caller that may make it; ``DeniedError`` for what else it lacks, then
        whatever ``add`` raises."""
        self._kind.making.check_object(self._facts, caller, agent)
        with self._journal.changing() as change:
            return self.add(change, agent, name)

    def add(self, change: Change, agent: Agent, name: str) -> _I:
        """A new one, in a change that the caller commits.

        ``MalformedError``, ``UnsupportedError`` (the agent runs elsewhere), ``TakenError``,
        ``WrongStateError`` (it is not live) or ``QuotaError``.
        """
        check_name(name)
        placing.check_here(agent, f"its {self._what}s are")
        there = self.of(change, agent)
        if any(item.name == name for item in there):
            raise TakenError(why_taken(agent, self._what, name))
        self._kind.making.check_when(Act.MAKE, one(self._what), agent)
        config = self._settings.config
        limit = self._kind.limit(config)
        counted = list(filter(self._counts, there))
        ended = sum(map(change.is_over, counted))
        if len(counted) - ended >= limit:
            raise QuotaError(
                f"{quote(agent.name)} has {limit} {self._what}s that have not ended, the "
                f"configured maximum: {self._kind.relief}"
            )
        if self._kind.kept is None and ended >= config.ended:
            raise QuotaError(
                f"{quote(agent.name)} has {ended} {self._what}s that have ended, the configured "
                f"maximum (ended): remove some, with {self._kind.remedy}"
            )
        self._check_room(agent)
        item = self._cls(agent=agent.index, name=name)
        change.make(item)
        self._added(change, agent, item)
        return item

    def remove(self, agent: Agent, item: _I) -> None:
        """Takes away one whose guard allows it."""
        with self._journal.changing() as change:
            self._removing(change, agent, item)
            change.drop(item)

    def _counts(self, item: _I) -> bool:
        """Whether it counts against the maximum."""
        return True

    def _check_room(self, agent: Agent) -> None:
        """``QuotaError`` if what a new one leads to has no room."""

    def _added(self, change: Change, agent: Agent, item: _I) -> None:
        """Adds to the change what else its making means."""

    def _removing(self, change: Change, agent: Agent, item: _I) -> None:
        """Adds to the change what else its removal means."""


class AwaitedPlane(Plane[_A], Subscriber):
    """A plane whose records have ends that are waited for: by a file, or in a call."""

    def __init__(self, facts: Facts, kind: PlaneKind[_A]) -> None:
        super().__init__(facts, kind)
        #: set at the end of one that a caller waits for
        self._ends: dict[ItemIndex, trio.Event] = {}
        self._journal.subscribe(self)

    # Subscriber

    def item_changed(self, item: Item, names: Iterable[str]) -> None:
        if isinstance(item, self._cls) and item.over:
            if item.wait_token:
                self._wait_files.release(item.wait_token)
            self._tell_end(item)

    def item_listed(self, item: Item) -> None:
        if isinstance(item, self._cls) and not self._is_there(item):
            if item.wait_token:
                self._wait_files.remove(item.wait_token)
            self._tell_end(item)

    def _tell_end(self, item: _A) -> None:
        waiting = self._ends.pop(item.index, None)
        if waiting is not None:
            waiting.set()

    def _is_there(self, item: _A) -> bool:
        return self._items.get(item.index) is item

    # looking

    def known(self, agent: Agent) -> list[_A]:
        """The records of an agent, oldest first."""
        return self._items.of(agent.index, self._cls)

    async def wait_over(self, item: _A) -> None:
        """Returns once it has ended, or was removed."""
        while self._is_there(item) and not item.over:
            await self._ends.setdefault(item.index, trio.Event()).wait()

    # Plane

    def make(self, caller: Caller, agent: Agent, name: str) -> _A:
        item = super().make(caller, agent, name)
        self.block(agent, item)
        return item

    def block(self, agent: Agent, item: _A) -> None:
        """Its ``wait`` blocks readers from now on, unless it has ended."""
        if item.wait_token:
            family = self._registry.family(agent)
            self._wait_files.create(item.wait_token, agent.owner, family, over=item.over)
            if item.over:
                self._wait_files.release(item.wait_token)

    def _added(self, change: Change, agent: Agent, item: _A) -> None:
        item.wait_token = WaitFileName(secrets.token_hex(16))


def why_taken(agent: Agent, what: str, name: str) -> str:
    """The sentence for a name that a record of an agent has."""
    return f"{quote(agent.name)} already has {one(what)} {quote(name)}: choose another name"


def one(what: str) -> str:
    """The noun with its article."""
    return f"{'an' if what[0] in 'aeiou' else 'a'} {what}"


def armed_for(
    items: Items, change: Change, agent: Agent, field: str, value: str
) -> Iterator[Wait]:
    """The waits of an agent that are armed, once a change is applied, for a thing (``on``), or
    that hold up a work item (``work``).

    The newest first: the change may have ended the others, from the oldest on.
    """
    seen = set()
    for wait in itertools.chain(
        reversed(change.rearmed(agent.index)), items.armed(agent.index, field, value)
    ):
        if id(wait) in seen or change.peek(wait, "status") is not WaitStatus.ARMED:
            continue
        if change.peek(wait, field) == value:
            seen.add(id(wait))
            yield wait
