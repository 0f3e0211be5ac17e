"""Runs inside a cell that is held: of turn agents one for each message, of resident ones
the program that stays, of once agents those after an abort (ctxfs-programs(7), Runs).

A cell that is to outlive a run is *held*: for turn and resident agents from the start, for a once
agent when its run is aborted. Its keeper starts no program, or stays after its program ended. A
run enters the cell as a child's cell enters its parent's::

    daemon -> monitor -> enter -> runner -> program

The runner is the keeper's program in another role: it is not PID 1, starts and reports on the
program, and ends nothing. It is the last step before every program of a cell, so one filter of
system calls covers all of them. Each run has a leaf cgroup and a monitor with its own record. So
has each task: a task is a run that no message begins and no run's end ends. The daemon ends what a
run leaves in its leaf before it records the run, since the cell stays.

A run and its message begin in one transaction and end in one, so that neither exists without the
other. The store alone determines the next run, and a new daemon finds it there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import trio

from runtime import crashpoints
from runtime.agents import visits
from runtime.authority.accounts import Payer
from runtime.cell import cell
from runtime.cell.cell import Command
from runtime.cell.port import Host, LiveCell, Part, Port, about, guarded
from runtime.cell.record import RunRecord
from runtime.errors import NoSpaceError
from runtime.kernel import clock, orders
from runtime.kernel.inotify import Wakeup
from runtime.life.conclusions import begin_run, conclude_run, judge_run, see_run
from runtime.life.following import Follower, Following, screen_of
from runtime.life.residents import Resident, give_up
from runtime.life.streams import Stream, Streams, Tail
from runtime.records.change import RUNTIME, Change
from runtime.records.items import BY_ABORT, Message
from runtime.records.lifecycle import Cue, Status
from runtime.records.model import Outcome
from runtime.records.run import RunCue

log = logging.getLogger("ctxd.runs")

_RETRY_SECONDS: Final = 1.0
_REPEAT_SECONDS: Final = 0.2


class Runs(Part):
    """Follows the runs of agents whose cell is held, and hands them their messages."""

    def __init__(self, host: Host, follower: Follower, streams: Streams) -> None:
        super().__init__(host)
        self._follower = follower
        self._streams = streams

    async def serve(self, live_cell: LiveCell) -> None:
        """Run after run, until the agent is ending."""
        try:
            await self._serve(live_cell)
        except Exception:
            log.exception("%s: a bug in ctxfs; its processes are killed", live_cell.agent.name)
            live_cell.node.kill()

    async def _serve(self, live_cell: LiveCell) -> None:
        agent = live_cell.agent
        while live_cell.goes_on and not live_cell.lost:
            count = live_cell.changed.count
            if agent.run.id and (not agent.runs_first or agent.run.ending):
                await _FollowingRun(self._follower, live_cell, self._streams).run()
                continue
            try:
                begun = self._begin(live_cell)
            except NoSpaceError as error:
                what = "%s: the next run cannot begin yet: %s"
                log.error(what, agent.name, error, extra=about(agent))
                await trio.sleep(_RETRY_SECONDS)
                continue
            if not begun and self._is_left(live_cell):
                await _hold(self._port, live_cell)
            elif not begun:
                await live_cell.changed.after(count)
        if live_cell.run is not None:
            live_cell.run.note_launched()  # if it was not, nobody does it any more

    @staticmethod
    def _is_left(live_cell: LiveCell) -> bool:
        """Whether the cell has lost its first run and does not know yet that it goes on: its
        PID 1 was frozen then, or its program was gone first."""
        agent = live_cell.agent
        if agent.how.holds_cell or agent.run.id or agent.frozen:
            return False
        if agent.status is not Status.STARTING:
            return False
        record = live_cell.record()
        return bool(record.started) and not record.held and live_cell.facts.has_keeper()

    # beginning

    def _begin(self, live_cell: LiveCell) -> bool:
        """Commits that there is a next run, or that it is waited for; False if nothing is due."""
        agent, record = live_cell.agent, live_cell.record()
        if not record.held or record.finished or not live_cell.facts.has_keeper():
            return False  # no cell yet, or no more: that is the agent's end
        message = None
        if agent.how.run_per_message:
            is_heard = self._streams.are_heard(agent)
            message = next(iter(self._agents.messages.pending(agent) if is_heard else ()), None)
            if agent.status is Status.STARTING and (message is None or agent.paused_from):
                idle = Change()
                idle.move(agent, Cue.IDLING)
                self._agents.journal.note(idle)
                return True
            if message is None or agent.status not in (Status.STARTING, Status.IDLE):
                return False
        elif agent.status is not Status.STARTING:
            return False
        change = Change()
        run = begin_run(change, self._agents, agent)
        if message is not None:
            self._agents.messages.deliver(change, agent, message, run)
            change.move(agent, Cue.RUNNING, run=run)
        self._agents.journal.commit(change)
        crashpoints.reach("run.committed")
        return True


async def _hold(port: Port, live_cell: LiveCell) -> None:
    """Until the cell is known to go on without its program. The signal is repeated, since an
    agent that signals its own PID 1 may hide it."""

    def is_known() -> bool:
        return live_cell.monitor_gone or live_cell.record().held

    while not is_known() and port.hold(live_cell):
        with trio.move_on_after(_REPEAT_SECONDS):
            await live_cell.until(is_known)


def _told(message: Message | None) -> tuple[tuple[str, str], ...]:
    """The variables that tell a program of the message that it works on."""
    if message is None:
        return ()
    return (
        ("CTX_MESSAGE", message.name),
        ("CTX_FROM", message.sender),
        ("CTX_PROVENANCE", message.provenance),
    )


class _FollowingRun(Following):
    """Follows the current run of an agent."""

    launched = "run.launched"

    def __init__(self, follower: Follower, live_cell: LiveCell, streams: Streams) -> None:
        execution = live_cell.run_at_hand()
        super().__init__(follower, live_cell, execution)
        self._streams = streams
        self._message = self._agents.messages.current(self._agent)
        #: it is the program that the cell began with
        self._is_first = execution is live_cell

    def command(self) -> Command | None:
        agent = self._agent
        if self._is_first or agent.run.ending:
            return None
        directory = self._agents.documents.directory(agent)
        return Command(
            words=tuple(cell.program(agent)),
            cwd=cell.working_directory(self._agents, agent),
            run=agent.run.id,
            env=_told(self._message) if agent.how.run_per_message else (),
            out=directory / "out",
            log=directory / "log",
            reply=directory / "reply" if agent.how.converses else None,
            open_input=None if agent.how.converses or agent.tty else self._open_input,
            fed=agent.how.converses,
            leads=not agent.how.run_per_message,
            terminal=screen_of(agent),
        )

    def _open_input(self) -> int:
        """The standard input of the program."""
        agent = self._agent
        if not agent.how.run_per_message:
            return self._follower.starter.open_handoff(agent)
        text = self._message.text if self._message is not None else ""
        # a text file, as shells read them
        lines = text if text.endswith("\n") else text + "\n"
        return orders.sealed_file("message", lines.encode())

    def beside(self, nursery: trio.Nursery) -> None:
        super().beside(nursery)
        agent, message = self._agent, self._message
        if message is not None:
            self._streams.of(message.index).changed.notify()
        if message is not None and message.asked and agent.how.run_per_message:
            out = self._agents.documents.directory(agent) / "out"
            stream = self._streams.of(message.index)
            tail = Tail(out, agent.said.output_start)

            def hear() -> bool:
                text = tail.text()
                if text:
                    stream.add(text)
                return bool(text) and not stream.full

            who = Payer(agent.owner, agent.name)
            account = self._agents.accounts.time
            self._live_cell.hear_rest = partial(self._streams.hear_rest, who, account, hear)
            nursery.start_soon(self._pump, out, stream, who, hear)
        if agent.how.converses:
            host, inlet = self._follower.host, self._execution.facts.inlet
            resident = Resident(host, self._streams, self._live_cell, inlet)
            nursery.start_soon(resident.serve)

    async def _pump(self, out: Path, stream: Stream, who: Payer, hear: Callable[[], bool]) -> None:
        """Hears the output of a run as it grows; what is left in the end is heard then."""
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        wakeup = Wakeup()
        with self._port.watcher.watching(out, wakeup):
            while not stream.full:
                # a program that writes faster than this is read must not have the loop alone
                while await self._streams.gentle.do(who, hear):
                    pass
                await wakeup.wait_changed()

    def look(self, record: RunRecord) -> None:
        agent, windows = self._agent, self._follower.windows
        windows.look(agent, None, record)
        if record.hung_up:
            windows.hang_up(agent, None)
        if agent.run.aborting and self.has_ended(record):
            give_up(self._agents, agent)  # what was told to end a message ended with it
        if agent.run.pid or not record.started:
            return
        change = Change()
        see_run(change, agent, record)
        if agent.status is Status.STARTING:
            change.move(agent, agent.how.begun)
        self._agents.journal.note(change)
        crashpoints.reach("run.running")

    def hand_over(self, *, ended: bool) -> bool:
        agent = self._agent
        if super().hand_over(ended=ended):
            return True
        if not ended or agent.run.ending or agent.how.run_per_message:
            return False
        self._follower.ender.end(agent, *self._outcome())  # the program is the agent
        return True

    def _outcome(self) -> tuple[Outcome, str]:
        """The outcome and the reason of a run whose program has ended."""
        run = self._agent.run
        if run.ending:
            return Outcome.CANCELLED, run.cause
        if self.failure:
            return Outcome.ERROR, f"start_failed: {self.failure}"
        return judge_run(self._agents, self._agent, self._live_cell, self._execution)

    def is_unwanted(self, record: RunRecord) -> bool:
        return self._agent.run.ending

    def is_gone(self, record: RunRecord) -> bool:
        if not self._is_first:
            return super().is_gone(record)
        known = self.has_ended(record) or self._execution.settled
        return known and self._execution.emptied

    async def terminate(self) -> None:
        with guarded(self._agent, OSError):
            if self._agent.run.cause == BY_ABORT:
                self._port.name_end(self._execution, "aborted")
            if not self._is_first:
                self._execution.facts.leave_cell()
            elif not self._agent.frozen:
                await _hold(self._port, self._live_cell)
            await super().terminate()

    async def follow(self) -> None:
        await super().follow()
        if self._live_cell.goes_on and self._live_cell.hear_rest is not None:
            await self._live_cell.hear_rest()

    def conclude(self) -> None:
        """Records a run after which the agent goes on."""
        crashpoints.reach("run.ended")
        agent, execution = self._agent, self._execution
        record, run = execution.record(), agent.run
        change = Change(by=run.caused_by if run.ending else RUNTIME)
        outcome, reason = self._outcome()
        usage = {} if self._is_first else self._port.spent(execution.leaf)
        conclude_run(change, self._agents, agent, record, outcome, reason, usage, last=False)
        change.run(agent, RunCue.OVER)
        visits.end(change, agent)
        between = agent.how.between
        if agent.status is Status.BUSY and run.ending and run.cause == BY_ABORT:
            change.move(agent, Cue.ABORT, reason=BY_ABORT)
        if change.peek_agent(agent, "status") is Status.PAUSED:
            change.set(agent, paused_from=between.value)
        elif agent.status is Status.BUSY and between is Status.IDLE:
            change.move(agent, Cue.IDLING)
        self._tell_log(agent, f"{run.id} ended: {outcome} {reason}")
        self._agents.journal.note(change)
        crashpoints.reach("run.recorded")
        self._live_cell.hear_rest = None
        if not self._is_first:  # with which the agent would be over
            self._follower.clear(self._live_cell, execution)
        why = about(agent, run=run.id, reason=reason)
        log.info("%s: %s: %s (%s)", agent.name, run.id, outcome, reason, extra=why)

    def left(self) -> float:
        """In mode ``turn``; the lead of the cell keeps the time of other agents."""
        agent = self._agent
        timeout = self._agents.settings.timeout(agent)
        if timeout is None or not agent.how.run_per_message:
            return super().left()
        return timeout - clock.since(agent.run.started, agent.run.started_up)

    def be_late(self) -> None:
        agent = self._agent
        if not agent.run.ending:  # the first cause wins
            change = Change()
            by = self._agents.journal.actor
            change.run(agent, RunCue.END, cause="timeout", caused_by=by)
            self._agents.journal.note(change)
