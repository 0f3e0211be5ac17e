"""Running commands of the task plane inside their agents' cells."""

from __future__ import annotations

import contextlib
import logging
import os

import trio

from runtime import cell, crashpoints, output
from runtime.agents import Agents
from runtime.cell import Command, Places
from runtime.change import RUNTIME, Change
from runtime.daemonlog import because_of
from runtime.ending import Ender, guarded, terminate
from runtime.errors import CtxError, WrongStateError
from runtime.following import Execution, Following
from runtime.inotify import Watcher
from runtime.items import Task, TaskEvent, TaskStatus
from runtime.model import Agent
from runtime.names import escape, parse_env_line, quote
from runtime.record import Record
from runtime.starting import Starter

log = logging.getLogger("ctxd.taskruns")


def execution_of(places: Places, agent: Agent, following: Following, task: Task) -> Execution:
    """What is known of a command, made with the first question for it."""
    execution = following.tasks.get(task.name)
    if execution is None:
        record_path = places.records / f"{agent.incarnation}-task-{task.name}"
        execution = Execution(following.task_leaf(task.name), record_path)
        following.tasks[task.name] = execution
    return execution


class TaskRuns:
    """Starts commands, follows them, and records their ends."""

    def __init__(
        self,
        *,
        agents: Agents,
        watcher: Watcher,
        places: Places,
        starter: Starter,
        ender: Ender,
    ) -> None:
        self._agents = agents
        self._watcher = watcher
        self._places = places
        self._starter = starter
        self._ender = ender

    async def follow(self, agent: Agent, following: Following, task: Task) -> None:
        """One command, from wherever it is to its recorded end, or that of its agent."""
        execution = execution_of(self._places, agent, following, task)
        with guarded(agent):
            failure = await self._launch(agent, following, task, execution)
            async with trio.open_nursery() as nursery:
                with contextlib.ExitStack() as watches:
                    for path in (execution.record_path, execution.leaf.path / "cgroup.events"):
                        with contextlib.suppress(OSError):
                            watches.enter_context(self._watcher.watching(path, execution.changes))
                    nursery.start_soon(self._ender.watch_monitor, execution)
                    await self._until_over(
                        agent, following, task, execution, nursery, failure
                    )
                    nursery.cancel_scope.cancel()
            if following.goes_on(agent):
                self._conclude(agent, following, task, execution, failure)

    async def _launch(
        self, agent: Agent, following: Following, task: Task, execution: Execution
    ) -> str:
        """Starts it, if no daemon has; returns why it could not be."""
        failure = ""
        if not execution.record_path.exists() and task.status is TaskStatus.QUEUED:
            try:
                await self._starter.enter(
                    agent, following, execution, self._command(agent, task)
                )
                crashpoints.reach("task.launched")
            except (CtxError, OSError) as error:
                failure = escape(str(error))
        execution.launched.set()
        execution.monitored = execution.record_path.exists()
        return failure

    def _command(self, agent: Agent, task: Task) -> Command:
        lines = [line for line in task.env.split("\n") if line]
        name = f"task-{task.name}"
        return Command(
            words=("/bin/sh", "-c", task.cmd),
            cwd=task.cwd or cell.working_directory(self._agents, agent),
            run=agent.run,
            out=self._agents.tasks.directory(agent, task),
            env=tuple(parse_env_line(line) for line in lines),
            open_input=(
                (lambda: cell.open_input(self._places, agent, name))
                if task.accepts_input
                else None
            ),
        )

    async def _until_over(
        self,
        agent: Agent,
        following: Following,
        task: Task,
        execution: Execution,
        nursery: trio.Nursery,
        failure: str,
    ) -> None:
        impatient = trio.Event()
        terminating = False
        while following.goes_on(agent):
            record = execution.record()
            if record.started and not execution.settled:
                execution.note_settled()
                self._note_start(agent, task, record)
            if task.given_up:
                impatient.set()
            ended = bool(failure or record.over or execution.monitor_gone)
            gone = execution.monitor_gone and not execution.leaf.populated()
            if ended and (record.finished or gone):
                return
            stopping = task.status is TaskStatus.CANCELLING and record.settled
            if (ended or stopping) and not terminating:
                terminating = True
                grace = 0.0 if agent.frozen else self._agents.settings.grace(agent)
                nursery.start_soon(terminate, execution, grace, impatient)
            await execution.changes.wait_changed()

    def _note_start(self, agent: Agent, task: Task, record: Record) -> None:
        if task.pid:
            return  # an earlier daemon did
        change = Change(by=task.by)
        change.put(task, pid=record.program, started=record.started / 1e9)
        if task.status is TaskStatus.QUEUED:
            change.step(task, TaskEvent.RUN)
        change.event(
            agent.session, "task.start", agent.name, task=task.name, pid=record.program
        )
        self._agents.journal.note(change)
        crashpoints.reach("task.running")

    def _conclude(
        self,
        agent: Agent,
        following: Following,
        task: Task,
        execution: Execution,
        failure: str,
    ) -> None:
        record = execution.record()
        event, exit_text = _judge(task, record)
        reason = failure or record.failed
        if reason and event is TaskEvent.FAIL:
            with contextlib.suppress(OSError):
                directory = self._agents.tasks.directory(agent, task)
                output.append_line(directory, reason, self._agents.settings.log_max(agent))
        change = Change(by=task.by if event is TaskEvent.CANCEL else RUNTIME)
        self._agents.tasks.end(change, agent, task, event, exit_text=exit_text)
        self._agents.journal.note(change)
        crashpoints.reach("task.recorded")
        following.tasks.pop(task.name, None)
        execution.over.set()
        execution.leaf.remove()
        execution.record_path.unlink(missing_ok=True)
        cell.remove_input(self._places, execution.record_path)
        why = because_of(agent.owner)
        log.info("%s: task %s: %s %s", agent.name, task.name, task.status, exit_text, extra=why)

    def write_input(self, agent: Agent, task: Task, data: bytes) -> int:
        """Bytes for the standard input of a command; how many there was room for.

        ``WrongStateError`` if it does not run, or does not read.
        """
        if task.status is not TaskStatus.RUNNING:
            raise WrongStateError(f"the task {quote(task.name)} is {task.status.shown}")
        path = cell.input_path(self._places, agent, f"task-{task.name}")
        try:
            fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            raise WrongStateError(f"the task {quote(task.name)} has just ended") from None
        try:
            return os.write(fd, data)
        except BlockingIOError:
            raise WrongStateError(
                f"the task {quote(task.name)} does not read its input: what it was given is "
                "as much as it can be"
            ) from None
        finally:
            os.close(fd)


def _judge(task: Task, record: Record) -> tuple[TaskEvent, str]:
    """What became of a command, as its monitor has it."""
    text = ""
    if record.exit_code is not None:
        text = f"exit:{record.exit_code}"
    elif record.signal is not None:
        text = f"signal:{record.signal}"
    if task.status is TaskStatus.CANCELLING:
        return TaskEvent.CANCEL, text
    if record.exit_code == 0:
        return TaskEvent.COMPLETE, text
    # a failure before the exec is in the output, and is not an interruption
    known = bool(text or record.failed or not (record.monitor or record.lost))
    return (TaskEvent.FAIL if known else TaskEvent.INTERRUPT), text

