"""Recording ends: what became of a run, and whether another follows.

Ends that are due when the recorder comes round go into few transactions: a tree of a thousand
agents costs one commit for each eight, not a thousand.

A parent has ended when all that it owns is recorded. Only then does the daemon remove records and
tell the waiting callers; a helper removes the cgroups soon afterwards, since an agent may hold
their locks. The same transaction decides whether another run follows. What one change must tell is
bounded at the request: at most 16 waits may wait for the same task or child, and 64 for a message.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final

import trio

from runtime import crashpoints
from runtime.agents import visits
from runtime.cell import networks
from runtime.cell.port import Host, LiveCell, Part, about
from runtime.cell.record import RunRecord
from runtime.cell.relays import Networks
from runtime.cell.spending import Spending
from runtime.kernel import clock
from runtime.life.conclusions import conclude_away, conclude_run
from runtime.life.metering import Meter
from runtime.life.residents import Listener
from runtime.life.streams import Streams
from runtime.records.change import RUNTIME, Change
from runtime.records.items import TaskCue
from runtime.records.lifecycle import Cue, Status
from runtime.records.model import Agent, Outcome
from runtime.records.run import RunCue

log = logging.getLogger("ctxd.recording")

#: the back-off doubles from the first to the last; a run that lasts as long as
#: the last begins anew with the first
_FIRST_BACK_OFF: Final = 1.0
_LAST_BACK_OFF: Final = 60.0
#: ends that are recorded in one transaction; others are served before the next ones
_AT_ONCE: Final = 8


class Recorder(Part):
    """Records runs that are over, in batches, and lets go of what they held."""

    def __init__(
        self, host: Host, meter: Meter, streams: Streams, relays: Networks, spending: Spending
    ) -> None:
        super().__init__(host)
        self._relays = relays
        self._meter = meter
        self._spending = spending
        self._streams = streams
        #: adds to the change that records the end of an agent what else that leads to
        self.conclude_with: Callable[[Change, Agent], None] = lambda change, agent: None
        self._due: list[LiveCell] = []
        self._wake = trio.Event()
        #: whether agents are started again that want to be
        self.restarting = True
        #: since the start: agents that were started again, and ends by their outcome
        self.restarts = 0
        self.ends: Counter[str] = Counter()

    def add(self, live_cell: LiveCell) -> None:
        """An agent that is over, with everything below it; ``live_cell.over`` tells when done."""
        self._due.append(live_cell)
        self._wake.set()

    async def hear_rest(self, live_cell: LiveCell) -> None:
        """Ends the message whose reply was complete before the end but had not been read yet."""
        agent = live_cell.agent
        is_here = agent.how.converses and agent.run.id and not agent.away
        if live_cell.hear_rest is None and is_here:
            live_cell.hear_rest = Listener(self._agents, self._streams, agent).hear_all
        if live_cell.hear_rest is not None:
            await live_cell.hear_rest()

    async def shed(self, live_cell: LiveCell) -> None:
        """Ends most records of an agent that is over, a little at a time, if there are many: the
        rest end with the agent, in one change."""
        agent = live_cell.agent
        outcome, reason = self._end_of(live_cell)
        everything = not self._restarts(live_cell, outcome)
        while True:
            change = Change(by=agent.caused_by or RUNTIME)
            if not self._agents.ends.record_some(change, agent, reason, everything=everything):
                return
            self._agents.journal.note(change)
            crashpoints.reach("finish.shed")
            await trio.lowlevel.checkpoint()

    @staticmethod
    def _end_of(live_cell: LiveCell) -> tuple[Outcome, str]:
        assert live_cell.agent.cause is not None
        outcome, reason = live_cell.agent.cause
        doubt = "unkillable" if live_cell.unkillable else live_cell.doubt
        return Outcome(outcome), f"{reason},{doubt}" if doubt else reason

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            due, self._due = self._due, []
            for begin in range(0, len(due), _AT_ONCE):
                self._record(due[begin : begin + _AT_ONCE])
                await trio.lowlevel.checkpoint()

    def _record(self, due: list[LiveCell]) -> None:
        change = Change()
        for live_cell in due:
            agent = live_cell.agent
            part = Change(change, by=agent.caused_by or RUNTIME)
            try:
                self._conclude(part, live_cell)
            except Exception:
                log.exception("%s: a bug in ctxfs", agent.name)
                part = Change(change, by=RUNTIME)
                self._agents.ends.record(
                    part, agent, Cue.ENDED, Outcome.INTERRUPTED, "runtime_lost"
                )
            change.add(part)
        crashpoints.reach("finish.conversation")
        self._agents.journal.note(change)
        for live_cell in due:
            live_cell.note_over()

    def _conclude(self, change: Change, live_cell: LiveCell) -> None:
        """Steps 7 and 8: the session, the channel, the events."""
        agent = live_cell.agent
        outcome, reason = self._end_of(live_cell)
        usage = self._meter.final(live_cell) if not agent.away else agent.usage
        directory = self._places.networks
        if networks.counters(directory, agent).spent() is not None:
            networks.keep_last(change, self._agents.registry, directory, agent)
            told, what = self._relays.tell_limit(change, agent)
            for each in told:
                self._tell_log(each, what)
            self._spending.look(agent)
        # between two runs there is none that ends with the agent
        if agent.away:
            conclude_away(change, self._agents, agent, outcome, reason)
        else:
            record = live_cell.run_at_hand().record() if agent.run.id else RunRecord()
            conclude_run(change, self._agents, agent, record, outcome, reason, usage, last=True)
        line = f"{agent.run.id or 'it'} ended: {outcome} {reason}"
        if self._restarts(live_cell, outcome):
            self._agents.tasks.add_ends(change, agent, TaskCue.CANCELLED, reason)
            self._add_restart(change, agent, reason, line)
            self.restarts += 1
        else:
            self.ends[outcome] += 1
            # in the record: the log of most agents has no other line, and needs no file
            change.set(agent, last_line=line)
            self._agents.ends.record(change, agent, Cue.ENDED, outcome, reason)
        change.set(agent, usage=usage)
        if change.peek_agent(agent, "status") is Status.DEAD:
            self.conclude_with(change, agent)
        why = about(agent, run=agent.run.id, reason=reason)
        log.info("%s: %s (%s)", agent.name, outcome, reason, extra=why)

    def _restarts(self, live_cell: LiveCell, outcome: Outcome) -> bool:
        """Whether it is started again: not what somebody ended, or killed while it ended."""
        agent = live_cell.agent
        if not self.restarting or live_cell.unkillable:
            return False
        wanted = {
            "always": (Outcome.DONE, Outcome.ERROR),
            "on-failure": (Outcome.ERROR,),
        }.get(agent.restart, ())
        if agent.parent is not None or outcome not in wanted:
            return False
        if agent.caused_by not in ("", RUNTIME):
            return False
        return self._restart_number(agent) <= self._agents.settings.config.restart_max

    @staticmethod
    def _restart_number(agent: Agent) -> int:
        lasted = clock.since(agent.started, agent.started_up)
        return 1 if lasted >= _LAST_BACK_OFF else agent.restarts + 1

    def _add_restart(self, change: Change, agent: Agent, reason: str, ended: str) -> None:
        number = self._restart_number(agent)
        delay = min(_FIRST_BACK_OFF * 2 ** (number - 1), _LAST_BACK_OFF)
        change.set(
            agent,
            cause=None,
            cell=agent.cell.gone(),
            paused_from="",
            frozen=False,
            restarts=number,
            restart_at=clock.wall() + delay,
            restart_up=clock.up() + delay,
        )
        change.run(agent, RunCue.OVER)
        visits.end(change, agent)
        change.move(agent, Cue.RESTARTING, reason=f"restart:{number}", after=reason)
        maximum = self._agents.settings.config.restart_max
        self._tell_log(agent, ended, f"restart {number} of {maximum} in {delay:g} s")

    def clear(self, agent: Agent) -> None:
        """Clears away what an end that is recorded leaves: its cgroup, and its record."""
        live_cell = self._live_cells[agent.index]
        crashpoints.reach("finish.recorded")
        for execution in live_cell.entered():
            execution.facts.forget()
            execution.note_over()
        if not (live_cell.unkillable or agent.away):
            self._port.remove(agent.owner, live_cell.node)
        self._spending.look(agent)
        networks.remove(
            self._agents.registry, self._places.networks, agent, live_cell.facts.key
        )
        self._spending.forget(agent)
        crashpoints.reach("finish.removed")
        live_cell.facts.forget()
        if agent.live:  # it will be started again
            crashpoints.reach("restart.recorded")
