"""A change is caused by somebody who acts in the present step of the loop, for some cause.

Code that acts for a caller wraps its changes in ``acting``; every event that is committed inside
gets the caller as ``by``. Later consequences (the end of an agent, a run, a task) keep the caller
in the record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from runtime.caller import Caller
from runtime.records.change import EVENTS, RUNTIME, Answer, Cause, Change, Demand, Doing, Undoing
from runtime.records.lifecycle import ENDING_VERBS
from runtime.records.model import Agent
from runtime.records.registry import Registry


class Acting:
    """The journal, as far as it knows why changes are committed."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        #: in the present step of the loop
        self.cause = Cause()

    def commit(self, change: Change) -> None:
        """Commits a change, or raises a ``CtxError``."""
        raise NotImplementedError

    def note(self, change: Change) -> None:
        """Commits what cannot be refused."""
        raise NotImplementedError

    @contextlib.contextmanager
    def acting(self, caller: Caller, agent: Agent | None = None, **what: str) -> Iterator[None]:
        """Changes that are committed meanwhile were caused by ``caller``.

        Not to be awaited in: others act then. ``what`` is a control of ``agent`` that is
        written (``file``), or a verb obeyed (``verb``), which its history tells in the same
        transaction, or after it where that changes nothing else in the store.
        """
        demand: Demand | None = None
        if agent is not None:
            demand = Demand(agent, {"type": "agent.control", "agent": agent.name, **what})
        with self._caused(caller=caller, demand=demand):
            yield
            if demand is not None and not demand.told:
                # what ends something is obeyed by now, and cannot be refused any more
                (self.note if what.get("verb") in ENDING_VERBS else self.commit)(Change())

    def starting(self) -> AbstractContextManager[None]:
        """Agents and tasks that are made meanwhile are to be started (``Cause.starts``).

        Not to be awaited in: others make things then.
        """
        return self._caused(starts=True)

    def answering(self, answer: Answer) -> AbstractContextManager[None]:
        """Changes that are committed meanwhile decide a call: the first change of which ``answer``
        can say what the call answers is stored with that.

        Not to be awaited in: others change things then.
        """
        return self._caused(answer=answer)

    @contextlib.contextmanager
    def doing(self, key: str, number: int, line: bytes, by: str = "") -> Iterator[Doing]:
        """A message of another machine's daemon is done by the first change that is committed
        meanwhile, or else by one that changes nothing. If it says ``by`` whom it comes, it is that
        one who acts.

        Not to be awaited in: others change things then.
        """
        doing = Doing(key, number, line, by)
        with self._caused(doing=doing):
            yield doing
            if not doing.done:
                self.note(Change())

    def preparing(self) -> AbstractContextManager[None]:
        """Changes that are committed meanwhile prepare what is said, and do not do it yet."""
        return self._caused(doing=None)

    @contextlib.contextmanager
    def gathering(self, *, refusable: bool = True) -> Iterator[Change]:
        """Changes of agents that are committed meanwhile hold in memory at once, and are stored
        with this one when all is said; after an error none of them ever was. What is not
        ``refusable`` is noted.

        Not to be awaited in: others change things then.
        """
        whole, undoing = Change(), Undoing()
        try:
            with self._caused(gathered=(whole, undoing)):
                yield whole
            if refusable:
                self.commit(whole)
        except BaseException:
            for undo in reversed(undoing):
                undo()
            raise
        if not refusable:
            self.note(whole)

    @contextlib.contextmanager
    def _caused(self, **by: Any) -> Iterator[None]:
        before, self.cause = self.cause, self.cause._replace(**by)
        try:
            yield
        finally:
            self.cause = before

    def told(self, change: Change) -> list[dict[str, Any]]:
        """The events that a change would bring, before it is committed."""
        events = [fields for _, file, fields in change.lines if file == EVENTS]
        demand = self.cause.demand
        if demand is not None and not demand.told:
            events.append(demand.event)
        return events

    @property
    def actor(self) -> str:
        """The name of who acts now, as in ``by`` of events."""
        caller, doing = self.cause.caller, self.cause.doing
        if doing is not None and doing.by:
            return doing.by
        return self.describe(caller) if caller is not None else RUNTIME

    def describe(self, caller: Caller) -> str:
        """``operator uid:N``, or ``agent:NAME run:ID`` without the run if there is none."""
        if caller.agent is None:
            return f"operator uid:{caller.uid}"
        agent = self._registry.recall(caller.agent)
        if agent is None:
            return RUNTIME
        return f"agent:{agent.name}" + (f" run:{agent.run.id}" if agent.run.id else "")

    def stop_reason(self, agent: Agent, by: str = "") -> str:
        """Why an agent, or a command of it, is stopped by who acts now, or was by who is named as
        in ``by`` of events."""
        who = (by or self.actor).partition(" ")[0]
        if who == "operator":
            return "operator_stop"
        return "self_stop" if who == f"agent:{agent.name}" else "supervisor_stop"
