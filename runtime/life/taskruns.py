"""Running commands of the task plane inside their agents' cells."""

from __future__ import annotations

import contextlib
import logging
import signal

import trio

from runtime import crashpoints
from runtime.agents.tasks import stop_reason
from runtime.cell import cell
from runtime.cell.cell import Command, Places
from runtime.cell.execution import Execution, LiveCell
from runtime.cell.host import Host, Part
from runtime.cell.record import RunRecord
from runtime.errors import WrongStateError
from runtime.kernel import output
from runtime.kernel.daemonlog import because_of
from runtime.life.conclusions import LOST, is_lost
from runtime.life.ending import guarded
from runtime.life.leading import EnteringLead, Leader
from runtime.records.change import RUNTIME, Change
from runtime.records.items import Task, TaskCue, TaskStatus
from runtime.records.model import Agent
from runtime.texts.names import parse_env_line, quote

log = logging.getLogger("ctxd.taskruns")


def execution_of(places: Places, agent: Agent, live_cell: LiveCell, task: Task) -> Execution:
    """The execution of a command; made when it is first asked for."""
    execution = live_cell.tasks.get(task.name)
    if execution is None:
        record_path = places.records / f"{agent.incarnation}-task-{task.name}"
        execution = Execution(live_cell.task_leaf(task.name), record_path)
        live_cell.tasks[task.name] = execution
    return execution


class TaskRuns(Part):
    """Starts commands, leads them, and records their ends."""

    def __init__(self, host: Host, leader: Leader) -> None:
        super().__init__(host)
        self._leader = leader

    async def lead(self, agent: Agent, live_cell: LiveCell, task: Task) -> None:
        """Leads one command from its present state to its recorded end, or the agent's."""
        execution = execution_of(self._places, agent, live_cell, task)
        with guarded(agent):
            led = _LedTask(self._leader, agent, live_cell, execution, task)
            await led.lead()
            # with its monitor a cell ends, and so does what runs inside: that is the agent's end
            if live_cell.goes_on(agent) and not is_lost(live_cell):
                self._conclude(agent, live_cell, task, execution, led.failure)

    def _conclude(
        self,
        agent: Agent,
        live_cell: LiveCell,
        task: Task,
        execution: Execution,
        failure: str,
    ) -> None:
        record = execution.record()
        cue, exit_text = _judge(task, record)
        reason = failure or record.failed
        if reason and cue is TaskCue.FAIL:
            with contextlib.suppress(OSError):
                directory = self._agents.tasks.directory(agent, task)
                output.append_line(directory, reason, self._agents.settings.log_max(agent))
        change = Change(by=task.by if cue is TaskCue.CANCEL else RUNTIME)
        self._agents.tasks.end(
            change, agent, task, cue, exit_text=exit_text, reason=_why(agent, task, cue, reason)
        )
        self._agents.journal.note(change)
        crashpoints.reach("task.recorded")
        live_cell.tasks.pop(task.name, None)
        self._leader.clear(agent, execution)
        why = because_of(agent.owner, agents=[agent.name], reason=exit_text)
        log.info("%s: task %s: %s %s", agent.name, task.name, task.status, exit_text, extra=why)

    def write_input(self, live_cell: LiveCell, task: Task, data: bytes) -> int:
        """Bytes for the standard input of a command; how many there was room for.

        ``WrongStateError`` if it does not run, or does not read.
        """
        if task.status is not TaskStatus.RUNNING:
            raise WrongStateError(f"the task {quote(task.name)} is {task.status.shown}")
        try:
            taken = live_cell.tasks[task.name].inlet.put(data)
        except (LookupError, OSError):
            raise WrongStateError(
                f"the task {quote(task.name)} reads no more input: it has just ended, or has "
                "closed it"
            ) from None
        if data and not taken:
            raise WrongStateError(
                f"the task {quote(task.name)} does not read its input, and the pipe is "
                "full: write again when it has read"
            )
        return taken


class _LedTask(EnteringLead):
    """A command of an agent's."""

    launched = "task.launched"

    def __init__(
        self,
        leader: Leader,
        agent: Agent,
        live_cell: LiveCell,
        execution: Execution,
        task: Task,
    ) -> None:
        super().__init__(leader, agent, live_cell, execution, execution.wakeup)
        self._task = task
        #: set when it is not to have the rest of its grace
        self._impatient = trio.Event()

    def command(self) -> Command | None:
        agent, task = self._agent, self._task
        if task.status is not TaskStatus.QUEUED:
            return None
        lines = [line for line in task.env.split("\n") if line]
        return Command(
            words=("/bin/sh", "-c", task.cmd),
            cwd=task.cwd or cell.working_directory(self._agents, agent),
            run=agent.run,
            out=self._agents.tasks.directory(agent, task),
            env=tuple(parse_env_line(line) for line in lines),
            fed=task.accepts_input,
        )

    def look(self, record: RunRecord) -> None:
        agent, task = self._agent, self._task
        if task.given_up:
            self._impatient.set()
        if task.pid or not record.started:
            return
        change = Change(by=task.by)
        change.put(task, pid=record.program, started=record.started / 1e9)
        if task.status is TaskStatus.QUEUED:
            change.step(task, TaskCue.RUN)
        change.tell(agent, "task.start", task=task.name, pid=record.program)
        self._agents.journal.note(change)
        crashpoints.reach("task.running")

    def is_unwanted(self, record: RunRecord) -> bool:
        # before it has begun or failed SIGTERM cannot reach it
        return self._task.status is TaskStatus.CANCELLING and record.settled

    async def terminate(self) -> None:
        agent = self._agent
        grace = 0.0 if agent.frozen else self._agents.settings.grace(agent)
        await self._leader.ender.terminate(agent, self._execution, grace, self._impatient)


def _why(agent: Agent, task: Task, cue: TaskCue, failure: str) -> str:
    """The reason of an end that its exit does not tell, as of an agent."""
    if cue is TaskCue.CANCEL:
        return stop_reason(agent, task.by)
    if cue is TaskCue.INTERRUPT:
        return LOST[1]
    return f"start_failed: {failure}" if cue is TaskCue.FAIL and failure else ""


def _judge(task: Task, record: RunRecord) -> tuple[TaskCue, str]:
    """What became of a command, as its monitor has it."""
    text = ""
    if record.exit_code is not None:
        text = f"exit:{record.exit_code}"
    elif record.signal is not None:
        text = f"signal:{record.signal}"
    if task.status is TaskStatus.CANCELLING:
        # SIGKILL to its leaf reaches who would tell of it, too
        killed = bool(record.started and record.finished)
        return TaskCue.CANCEL, text or (f"signal:{int(signal.SIGKILL)}" if killed else "")
    if record.exit_code == 0:
        return TaskCue.COMPLETE, text
    # a failure before the exec is in the output, and is not an interruption
    known = bool(text or record.failed or not (record.monitor or record.lost))
    return (TaskCue.FAIL if known else TaskCue.INTERRUPT), text

