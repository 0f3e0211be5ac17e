"""The end of an agent, in its records: its session, its parent, what it had begun."""

from __future__ import annotations

import time
from typing import Final

from runtime.agents import visits
from runtime.agents.asks import AskPlane
from runtime.agents.messages import Messages
from runtime.agents.tasks import TaskPlane
from runtime.agents.waiting import WaitingPlane
from runtime.authority.facts import Facts, Part
from runtime.records.change import Change
from runtime.records.items import TaskCue
from runtime.records.lifecycle import Cue
from runtime.records.model import SESSION_STATES, Agent, Outcome
from runtime.records.run import RunCue

#: records of one agent that end in one change
_AT_ONCE: Final = 64


class Ends(Part):
    """Adds ends to changes that others commit."""

    def __init__(
        self,
        facts: Facts,
        *,
        messages: Messages,
        tasks: TaskPlane,
        waiting: WaitingPlane,
        asks: AskPlane,
    ) -> None:
        super().__init__(facts)
        self._messages = messages
        self._tasks = tasks
        self._waiting = waiting
        self._asks = asks

    def record(
        self, change: Change, agent: Agent, cue: Cue, outcome: Outcome, reason: str
    ) -> None:
        """Adds to ``change`` that a cue makes an agent dead, and what this means for it, its
        session and its parent."""
        self._waiting.cancel_all(change, agent)
        self._asks.withdraw(change, agent, self._asks.still_open(change, agent))
        self._tasks.keep_worktree(change, agent, f"ctxd did not see its end ({reason})")
        change.set(
            agent,
            outcome=outcome.value,
            reason=reason,
            ended=time.time(),
            frozen=False,
            cell=agent.cell.gone(),
        )
        change.run(agent, RunCue.OVER)
        if visits.end(change, agent):
            change.set(agent, window="remove")
        for session in (agent.session, *agent.other_sessions):
            change.set_session(session, state=SESSION_STATES[outcome])
        change.move(agent, cue, outcome=outcome, reason=reason)
        parent = self._registry.parent_of(agent)
        if parent is not None and "parent_dead" in reason and agent.parent_session is not None:
            change.event(
                agent.parent_session,
                "agent.child.cancel",
                parent.name,
                parent=parent.name,
                child=agent.name,
                reason="parent_dead",
            )
        self._messages.add_ends(change, agent, reason)
        lost = outcome is Outcome.INTERRUPTED
        cue_of_tasks = TaskCue.INTERRUPTED if lost else TaskCue.CANCELLED
        self._tasks.add_ends(change, agent, cue_of_tasks, reason)
        change.tell(agent, "agent.stop", status=outcome.value, reason=reason)
        if parent is not None:
            self._tasks.child_over(change, parent, agent, outcome.value, reason)

    def leave(self, change: Change, agent: Agent) -> None:
        """Adds that a ``new`` agent is not its parent's child any more."""
        parent = self._registry.parent_of(agent)
        if parent is not None:
            self._tasks.drop_handle(change, parent, agent)
            self._tasks.child_over(change, parent, agent, "", "")

    def record_some(
        self, change: Change, agent: Agent, reason: str, *, everything: bool
    ) -> bool:
        """Ends some of what ``record`` will end, if it is so much that it would hold up others.

        Without ``everything`` the agent is started again: only its commands end.
        """
        tasks = self._tasks.unfinished(change, agent)
        waits = self._waiting.armed(change, agent) if everything else []
        queued = self._messages.pending(agent) if everything else []
        asks = self._asks.still_open(change, agent) if everything else []
        if len(tasks) + len(waits) + len(queued) + len(asks) <= _AT_ONCE:
            return False
        for wait in waits[:_AT_ONCE]:
            self._waiting.cancel(change, agent, wait)
        self._messages.drop(change, agent, queued[:_AT_ONCE], reason)
        self._asks.withdraw(change, agent, asks[:_AT_ONCE])
        for task in tasks[:_AT_ONCE]:
            self._tasks.end(change, agent, task, TaskCue.CANCELLED, reason=reason)
        return True
