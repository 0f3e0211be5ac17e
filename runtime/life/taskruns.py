"""Running commands of the task plane inside their agents' cells."""

from __future__ import annotations

import contextlib
import logging

from runtime import crashpoints
from runtime.agents.tasks import stop_reason
from runtime.cell import cell
from runtime.cell.cell import Command
from runtime.cell.execution import LiveCell
from runtime.cell.host import about
from runtime.cell.record import RunRecord
from runtime.kernel import output
from runtime.life.conclusions import LOST, judge_task
from runtime.life.following import Follower, Following
from runtime.records.change import RUNTIME, Change
from runtime.records.items import Task, TaskCue, TaskStatus
from runtime.records.model import Agent
from runtime.texts.names import parse_env_line

log = logging.getLogger("ctxd.taskruns")


class FollowingTask(Following):
    """Follows a command of an agent's."""

    launched = "task.launched"

    def __init__(self, follower: Follower, live_cell: LiveCell, task: Task) -> None:
        execution = live_cell.command(task.name)
        super().__init__(follower, live_cell, execution)
        self._task = task

    def command(self) -> Command | None:
        agent, task = self._agent, self._task
        if task.status is not TaskStatus.QUEUED:
            return None
        lines = [line for line in task.env.split("\n") if line]
        return Command(
            words=("/bin/sh", "-c", task.cmd),
            cwd=task.cwd or cell.working_directory(self._agents, agent),
            run=agent.run.id,
            out=self._agents.results.directory(agent, task),
            env=tuple(parse_env_line(line) for line in lines),
            fed=task.accepts_input,
        )

    def look(self, record: RunRecord) -> None:
        agent, task = self._agent, self._task
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

    def is_impatient(self) -> bool:
        return self._task.given_up

    def conclude(self) -> None:
        agent, task, record = self._agent, self._task, self._execution.record()
        cue, exit_text = judge_task(task, record)
        reason = self.failure or record.failed
        if reason and cue is TaskCue.FAIL:
            with contextlib.suppress(OSError):
                directory = self._agents.results.directory(agent, task)
                output.append_line(directory, reason, self._agents.settings.log_max(agent))
        change = Change(by=task.by if cue is TaskCue.CANCEL else RUNTIME)
        self._agents.tasks.end(
            change, agent, task, cue, exit_text=exit_text, reason=_why(agent, task, cue, reason)
        )
        self._agents.journal.note(change)
        crashpoints.reach("task.recorded")
        self._follower.clear(self._live_cell, self._execution)
        why = about(agent, reason=exit_text)
        log.info("%s: task %s: %s %s", agent.name, task.name, task.status, exit_text, extra=why)


def _why(agent: Agent, task: Task, cue: TaskCue, failure: str) -> str:
    """The reason of an end that its exit does not tell, as of an agent."""
    if cue is TaskCue.CANCEL:
        return stop_reason(agent, task.by)
    if cue is TaskCue.INTERRUPT:
        return LOST[1]
    return f"start_failed: {failure}" if cue is TaskCue.FAIL and failure else ""
