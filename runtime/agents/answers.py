"""The answers of tools to calls with an id: a call that is said again is not made again.

The answer is stored in the transaction of what the call changes (``Journal.answering``). So
whoever was not answered, because a connection or the daemon ended, may say the call again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Final

import trio

from runtime.agents.messages import check_id
from runtime.authority.accounts import Charge, Payer, Resource
from runtime.authority.facts import Facts, Part
from runtime.caller import Caller
from runtime.errors import NoSpaceError, StaleError, TakenError
from runtime.ids import CallId, Incarnation
from runtime.kernel import clock
from runtime.kernel.lanes import Lanes
from runtime.records.change import Answer, Change, Subscriber
from runtime.records.model import Agent
from runtime.texts.names import quote

#: an answer is kept for so long
KEPT_SECONDS: Final = 3600.0
#: of one caller, and their bytes; the oldest go first
KEPT: Final = 1024
KEPT_SIZE: Final = 8 << 20
#: of an answer beside its text, on the disk account, in bytes
_ROW: Final = 512
#: what most answers take, for which there has to be room before a call is made
_ROOM: Final = 4096
_LOOK_SECONDS: Final = 60.0
#: that are forgotten in one step
_AT_ONCE: Final = 64
#: bytes of one, which of a caller's it is, and a caller's oldest: in SQL
_SIZE: Final = "LENGTH(CAST(answer AS BLOB))"
_ONE: Final = "caller=? AND id=?"
_OLDEST: Final = "idx IN (SELECT idx FROM answers WHERE caller=? ORDER BY idx LIMIT ?)"


def check_call_id(text: str) -> CallId:
    """``MalformedError``."""
    return CallId(check_id(text))


def digest(tool: str, given: Any) -> str:
    """Tells calls apart that have one id."""
    text = json.dumps([tool, given], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class _Kept:
    """The answers that are kept for one caller."""

    __slots__ = ("charge", "count", "size")

    def __init__(self, charge: Charge) -> None:
        self.charge = charge
        self.count = self.size = 0

    def add(self, count: int, size: int) -> None:
        self.count += count
        self.size += size
        self.charge.set(self.size + self.count * _ROW)


class Answers(Part, Subscriber):
    """The answers of all callers, on the disk accounts of their owners."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._kept: dict[str, _Kept] = {}
        #: calls that are being made
        self._turns = Lanes[tuple[str, CallId]]()
        #: how much the wall clock, by which answers are stored, was ahead of the other
        self._ahead = clock.ahead()
        agents = {agent.incarnation: agent for agent in self._registry}
        question = f"SELECT caller, COUNT(*), SUM({_SIZE}) FROM answers GROUP BY caller"
        for caller, count, size in self._store.execute(question).fetchall():
            uid = caller.removeprefix("uid:")
            if uid != caller:
                self._kept_of(caller, Payer(int(uid))).add(count, size)
            elif (agent := agents.get(Incarnation(caller))) is not None:
                self._kept_of(caller, Payer(agent.owner, agent.name)).add(count, size)
            else:
                self._drop("caller=?", caller)
        self._journal.subscribe(self)

    def _kept_of(self, caller: str, who: Payer) -> _Kept:
        kept = self._kept.get(caller)
        if kept is None:
            charge = self._accounts.charged_anyway(who, Resource.DISK, 0)
            kept = self._kept[caller] = _Kept(charge)
        return kept

    # Subscriber

    def agent_listed(self, agent: Agent) -> None:
        if self._registry.get(agent.index) is agent:
            return
        kept = self._kept.pop(agent.incarnation, None)
        if kept is not None:
            kept.charge.release()
            self._drop("caller=?", agent.incarnation)

    # calling

    def turn(self, caller: Caller, name: CallId) -> AbstractAsyncContextManager[None]:
        """A call that is said again waits until it is made."""
        return self._turns.turn((caller.key, name))

    def find(self, caller: Caller, name: CallId, call: str) -> dict[str, Any] | None:
        """The answer to a call of this id; ``TakenError`` if it was another one.

        ``StaleError`` for one of which nobody knows what came of it.
        """
        self._follow_clock()
        question = f"SELECT call, made, answer FROM answers WHERE {_ONE}"
        found = self._store.execute(question, caller.key, name).fetchone()
        if found is None:
            return None
        made, at, text = found
        if at < clock.wall() - KEPT_SECONDS:
            self._drop(_ONE, caller.key, name)
            return None
        if made != call:
            raise TakenError(f"id: {quote(name)} is the id of another call")
        if not text:
            raise StaleError(
                "the daemon ended during this call, and whether it was carried out is not known: "
                "look before you call again with another id"
            )
        output: dict[str, Any] = json.loads(text)
        return output

    @contextmanager
    def giving(
        self, caller: Caller, name: CallId, call: str, *, frees: bool
    ) -> Iterator[Answer]:
        """While a call is made. ``QuotaError`` before, if the owner's disk account has no room
        to keep the answer, unless the call makes room itself."""
        who = self._identity.payer(caller)
        if not frees:
            self._disk.check(who.owner, _ROOM, reserve=who.reserve)
        answer = Answer(caller.key, name, call)
        try:
            yield answer
        finally:
            if answer.output is not None:
                self._note(answer, Payer(who.owner, who.name))
            elif answer.begun:  # it was not counted
                self._delete(_ONE, answer.caller, answer.name)

    def begin(self, answer: Answer) -> None:
        """The call's next step is no change of the store: if the daemon dies meanwhile, the call
        is not made again."""
        answer.begun = True
        self._commit(answer)

    def settle(self, answer: Answer, output: dict[str, Any]) -> dict[str, Any]:
        """The answer of a call that is made. What no change of it has decided is stored now."""
        if answer.output is None:
            answer.make = lambda: output
            self._commit(answer)
        return answer.output or output

    def _commit(self, answer: Answer) -> None:
        change = Change()
        change.answer = answer
        self._journal.note(change)

    # forgetting

    def _note(self, answer: Answer, who: Payer) -> None:
        kept = self._kept_of(answer.caller, who)
        kept.add(1, answer.size)
        while kept.count > KEPT or (kept.size > KEPT_SIZE and kept.count > 1):
            # several at once, or each call of a busy caller would make room for itself
            most = min(max(kept.count - KEPT, KEPT // 16, 1), kept.count - 1)
            if not self._drop(_OLDEST, answer.caller, most):
                break

    def _drop(self, which: str, *values: Any) -> int:
        """How many were dropped. On a full disk another time."""
        gone = self._delete(which, *values)
        for caller, size in gone:
            kept = self._kept.get(caller)
            if kept is not None:
                kept.add(-1, -size)
                if not kept.count:
                    del self._kept[caller]
        return len(gone)

    def _delete(self, which: str, *values: Any) -> list[tuple[str, int]]:
        """The callers of those that were, and the bytes of each."""
        statement = f"DELETE FROM answers WHERE {which} RETURNING caller, {_SIZE}"
        with contextlib.suppress(NoSpaceError), self._store.transaction():
            return self._store.execute(statement, *values).fetchall()
        return []

    def forget_old(self) -> bool:
        """Those whose time is over; whether there may be more."""
        self._follow_clock()
        before = clock.wall() - KEPT_SECONDS
        some = "idx IN (SELECT idx FROM answers WHERE made<? LIMIT ?)"
        return self._drop(some, before, _AT_ONCE) == _AT_ONCE

    def _follow_clock(self) -> None:
        """When the wall clock was set, nothing became older or younger by that."""
        before, self._ahead = self._ahead, clock.ahead()
        by = self._ahead - before
        if abs(by) > clock.SET_SECONDS:
            with contextlib.suppress(NoSpaceError), self._store.transaction():
                self._store.execute("UPDATE answers SET made=made+?", by)

    async def run(self) -> None:
        """Forgets what nobody asks for any more."""
        while True:
            await trio.sleep(0 if self.forget_old() else _LOOK_SECONDS)
