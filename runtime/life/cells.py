"""Following the cell of an agent: until the agent, and all that it owns, is over."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack

import trio

from runtime import crashpoints
from runtime.cell.execution import LiveCell
from runtime.cell.record import RunRecord
from runtime.cell.relays import Networks
from runtime.life.conclusions import judge_agent, see_run
from runtime.life.following import Follower, Following
from runtime.life.worktrees import Worktrees
from runtime.records.change import Change
from runtime.records.lifecycle import Cue, Status
from runtime.records.model import Outcome


class FollowingCell(Following):
    """Follows the cell of a live agent. ``serve`` begins the programs inside it."""

    def __init__(
        self,
        follower: Follower,
        live_cell: LiveCell,
        *,
        worktrees: Worktrees,
        networks: Networks,
        serve: Callable[[LiveCell], None],
        launch: bool,
    ) -> None:
        super().__init__(follower, live_cell, live_cell)
        self._worktrees = worktrees
        self._ender = follower.ender
        self._networks = networks
        self._serve = serve
        self._is_new = launch

    async def start(self) -> None:
        if self._is_new:
            await self._worktrees.make(self._agent)
            await self._follower.starter.launch(self._live_cell)

    def watch_empty(self, watches: ExitStack) -> None:
        live_cell = self._live_cell
        watches.enter_context(self._port.watching_place(live_cell.node, live_cell.changed))

    def beside(self, nursery: trio.Nursery) -> None:
        # the monitor is reaped whenever it ends
        self._nursery.start_soon(self._port.watch_monitor, self._live_cell)
        # and so is a relay
        self._nursery.start_soon(self._networks.lead, self._live_cell)
        self._serve(self._live_cell)

    def look(self, record: RunRecord) -> None:
        agent, live_cell = self._agent, self._live_cell
        if self.is_unwanted(record):
            return
        if record.held and not live_cell.settled:
            live_cell.note_settled()
            live_cell.changed.notify()
        own = agent.runs_first
        ends = record.over and (record.finished or (own and not agent.run.ending))
        # A parent that ended before this agent is the cause, however late we look.
        causes = [
            above
            for ancestor in self._agents.registry.ancestors(agent)
            if ends
            and (above := self._live_cells.get(ancestor.index)) is not None
            and _ended_before(above, record)
        ]
        change = Change()
        if own and agent.status is Status.STARTING and record.started:
            see_run(change, agent, record)
            change.move(agent, Cue.RUNNING)
            if causes or not ends or self.error is not None:  # else both in one transaction
                self._agents.journal.note(change)
                change = Change()
                crashpoints.reach("start.running")
        if self.error is not None:
            self._ender.end(agent, Outcome.ERROR, f"start_failed: {self.failure}")
        elif ends:
            for above in causes:
                self._ender.end(above.agent, *judge_agent(self._agents, above))
            self._ender.end(agent, *judge_agent(self._agents, live_cell), change=change)
        elif live_cell.monitor_gone:
            self._ender.end(agent, Outcome.INTERRUPTED, "runtime_lost")

    def hand_over(self, *, ended: bool) -> bool:
        return False

    def has_ended(self, record: RunRecord) -> bool:
        return False  # every end of an agent is a status, and looked for by ``is_unwanted``

    def is_unwanted(self, record: RunRecord) -> bool:
        return self._agent.status in (Status.STOPPING, Status.DEAD)

    async def terminate(self) -> None:
        """The end of an agent is led together with all that it owns (``Ender``)."""

    def is_gone(self, record: RunRecord) -> bool:
        """Whether the end that was begun is complete, down to the last descendant."""
        agent, live_cell = self._agent, self._live_cell
        if agent.status is Status.DEAD or live_cell.unkillable:
            return True
        if live_cell.node.populated():
            return False
        # a new descendant has not been cancelled yet
        below = self._agents.registry.each_descendant(agent)
        if any(member.live or member.status is Status.NEW for member in below):
            return False
        return all(each.monitor_gone or each.record().finished for each in live_cell.programs())

    def deadline(self) -> float:
        """The agent's ``timeout``; in mode ``turn`` that is one of each run."""
        timeout = self._agents.settings.timeout(self._agent)
        if timeout is None or self._agent.how.run_per_message:
            return math.inf
        return trio.current_time() + self._agent.started + timeout - time.time()

    def be_late(self) -> None:
        self._ender.end(self._agent, Outcome.CANCELLED, "timeout")


def _ended_before(above: LiveCell, record: RunRecord) -> bool:
    """Whether an owner's run ended no later than one below it."""
    owner = above.record()
    if owner.ended:
        return not record.ended or owner.ended <= record.ended
    # Nothing tells when: its PID 1 or its monitor was killed, and what was below
    # died of that, unless it exited by itself.
    gone = not (above.facts.has_keeper() and above.facts.has_monitor())
    return record.exit_code is None and bool(owner.keeper) and gone
