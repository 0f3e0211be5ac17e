"""The task plane: managed executions of an agent's, and handles of supervised children
(ABI section 8). What runs them is ``runtime.taskruns``."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runtime.authority.identity import Caller
from runtime.change import Change
from runtime.errors import (
    DeniedError,
    ForbiddenError,
    MalformedError,
    QuotaError,
    TakenError,
    WrongStateError,
)
from runtime.lifecycle import Status
from runtime.model import Agent, Outcome
from runtime.names import check_name, dump_json, quote
from runtime.output import Output
from runtime.planes import TASK_MOVES, Task, TaskEvent, TaskStatus

if TYPE_CHECKING:
    from runtime.agents import Agents

COMMAND: Final = "command_task"
CHILD: Final = "child_agent_task"
#: of each end of an output that does not fit
_PREVIEW_PART: Final = 4000

_OF_OUTCOME: Final = {
    Outcome.DONE.value: TaskEvent.COMPLETE,
    Outcome.ERROR.value: TaskEvent.FAIL,
    Outcome.CANCELLED.value: TaskEvent.CANCEL,
    Outcome.INTERRUPTED.value: TaskEvent.INTERRUPT,
}
_OF_STATUS: Final = {
    Status.NEW: TaskStatus.QUEUED,
    Status.STOPPING: TaskStatus.CANCELLING,
}


class TaskPlane:
    """The tasks of all agents."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents

    # looking

    def of(self, agent: Agent) -> list[Task]:
        return self._agents.items.of(agent.index, Task)

    def find(self, agent: Agent, name: str) -> Task | None:
        return self._agents.items.named(agent.index, Task, name)

    def agent_of(self, task: Task) -> Agent | None:
        return self._agents.recall(task.agent)

    def child_of(self, task: Task) -> Agent | None:
        """The child that a handle supervises, None for a command."""
        return self._agents.recall(task.child) if task.child else None

    def status(self, task: Task) -> str:
        """The status as it is shown: that of a handle is its child's, until it has ended."""
        child = self.child_of(task)
        if child is None or task.status in TASK_MOVES.terminal:
            return task.status.shown
        return _OF_STATUS.get(child.status, TaskStatus.RUNNING).shown

    def is_over(self, task: Task) -> bool:
        return task.status in TASK_MOVES.terminal

    def title(self, task: Task) -> str:
        """A handle's is the first line of its child's task."""
        child = self.child_of(task)
        if child is None:
            return task.title
        text = self._agents.read_document(child, "handoff.md").decode(errors="replace")
        return next((line.strip() for line in text.splitlines() if line.strip()), "")[:200]

    def directory(self, agent: Agent, task: Task) -> Path:
        """Where the output of a command is kept."""
        return self._agents.directory(agent) / "task" / task.name

    def output_size(self, task: Task) -> int:
        child = self.child_of(task)
        return len(self.output_of_child(child)) if child is not None else self._kept(task).size

    def read_output(self, task: Task, offset: int, length: int) -> bytes:
        child = self.child_of(task)
        if child is not None:
            return self.output_of_child(child)[offset : offset + length]
        return self._kept(task).read(offset, length)

    def _kept(self, task: Task) -> Output:
        agent = self.agent_of(task)
        assert agent is not None
        return Output(self.directory(agent, task))

    def output_of_child(self, child: Agent) -> bytes:
        """Its latest reply; once it is dead, its result."""
        if child.status is Status.DEAD:
            return self._agents.read_document(child, "result.md")
        session = self._agents.session(child.session)
        if session is None:
            return b""
        try:
            return (self._agents.session_directory(session) / "latest.md").read_bytes()
        except FileNotFoundError:
            return b""

    def preview(self, task: Task) -> str:
        """Head and tail of the output, at most 8 KiB, saying what was left out."""
        size = self.output_size(task)
        if size <= 2 * _PREVIEW_PART:
            return self.read_output(task, 0, size).decode(errors="replace")
        head = self.read_output(task, 0, _PREVIEW_PART).decode(errors="ignore")
        tail = self.read_output(task, size - _PREVIEW_PART, _PREVIEW_PART).decode(errors="ignore")
        left = size - len(head.encode()) - len(tail.encode())
        text = f"{head}\n[{left} bytes left out: see output]\n{tail}"
        return text.encode()[: 8 << 10].decode(errors="ignore")

    def wait_path(self, task: Task) -> Path:
        child = self.child_of(task)
        token = child.wait_token if child is not None else task.wait_token
        return self._agents.waits.path(token)

    # changing

    def check_may(self, caller: Caller, agent: Agent) -> None:
        """``DeniedError`` unless the caller is a party that may use the environment."""
        self._agents.identity.check_party(caller, agent, "tasks")
        actor = self._agents.get(caller.agent) if caller.agent is not None else None
        if actor is not None and "local_environment" not in self._agents.authority.families(actor):
            raise DeniedError(
                f"{quote(actor.name)} is a {actor.profile}, which lacks local_environment"
            )

    def make(self, caller: Caller, agent: Agent, name: str) -> Task:
        """A command that is not started yet.

        ``DeniedError``, ``MalformedError``, ``TakenError``, ``WrongStateError``, ``QuotaError``.
        """
        self.check_may(caller, agent)
        check_name(name)
        if self.find(agent, name) is not None:
            raise TakenError(f"the task {quote(name)} exists; choose another name or rmdir it")
        self._check_live(agent)
        config = self._agents.config
        if sum(not task.child for task in self.of(agent)) >= config.tasks:
            raise QuotaError(f"{config.tasks} tasks are there already: rmdir ended ones")
        token = secrets.token_hex(16)
        task = Task(agent=agent.index, name=name, wait_token=token)
        self._agents.waits.create(token)
        change = Change()
        change.make(task)
        try:
            self._agents.commit(change)
        except BaseException:
            self._agents.waits.remove(token)
            raise
        return task

    @staticmethod
    def _check_live(agent: Agent) -> None:
        if not agent.accepts_children:
            raise WrongStateError(
                f"{quote(agent.name)} is {agent.status}: tasks belong to an agent that lives"
            )

    def set(self, task: Task, **values: Any) -> None:
        """Fields of a command, until it is started."""
        self.check_settable(task)
        self._put(task, values)

    def check_settable(self, task: Task) -> None:
        if task.child:
            raise ForbiddenError(
                f"{quote(task.name)} is the handle of an agent: its files say what it does"
            )
        if task.status is not TaskStatus.MADE:
            raise WrongStateError(f"the task {quote(task.name)} was started already")

    def _put(self, task: Task, values: dict[str, Any]) -> None:
        change = Change()
        change.put(task, **values)
        self._agents.commit(change)

    def start(self, caller: Caller, agent: Agent, task: Task) -> None:
        """Queues a command; it runs as soon as its agent's cell is there."""
        self.check_may(caller, agent)
        to = TASK_MOVES.move(task.status, TaskEvent.START)
        self._check_live(agent)
        for owner in (*self._agents.ancestors(agent), agent):
            if owner.frozen:
                raise WrongStateError(f"{quote(owner.name)} is paused: resume it first")
        if not task.cmd.strip():
            raise MalformedError("cmd is empty: write the command there first")
        self._put(task, {"status": to})

    def stop(self, caller: Caller, agent: Agent, task: Task, *, kill: bool) -> None:
        """Asks a command to end."""
        self.check_may(caller, agent)
        to = TASK_MOVES.move(task.status, TaskEvent.KILL if kill else TaskEvent.STOP)
        if to in TASK_MOVES.terminal:
            change = Change()
            self.end(change, agent, task, TaskEvent.CANCEL)
            self._agents.commit(change)
            self._agents.waits.release(task.wait_token)
            return
        self._put(task, {"status": to, "given_up": task.given_up or kill})

    def remove(self, caller: Caller, agent: Agent, task: Task) -> None:
        """Takes an ended task away, and what it wrote."""
        self._agents.identity.check_party(caller, agent, "tasks")
        if not self.is_over(task) and task.status is not TaskStatus.MADE:
            raise WrongStateError(f"the task {quote(task.name)} is {self.status(task)}: stop it")
        if task.child and not self.is_over(task):
            raise WrongStateError(f"{quote(task.name)} is the handle of an agent: rmdir that")
        change = Change()
        change.drop(task)
        self._agents.commit(change)
        if not task.child:
            self.forget(agent, task)

    def forget(self, agent: Agent, task: Task) -> None:
        """Files of a command that is not known any more."""
        self._agents.waits.remove(task.wait_token)
        self._agents.trash.discard(self.directory(agent, task))

    # ending

    def end(
        self,
        change: Change,
        agent: Agent,
        task: Task,
        event: TaskEvent,
        *,
        exit_text: str = "",
    ) -> None:
        """A task is over: its status, its event, a message, and the waits on it."""
        status = TASK_MOVES.move(change.peek(task, "status"), event)
        change.put(task, status=status, exit=exit_text, pid=0, ended=time.time())
        change.event(
            agent.session,
            "task.end",
            agent.name,
            task=task.name,
            status=status.value,
            exit=exit_text,
        )
        facts = {
            "task": task.name,
            "kind": task.task_kind,
            "title": self.title(task),
            "status": status.value,
            "exit": exit_text,
        }
        self._agents.messages.notify(
            change,
            agent,
            text=dump_json(facts),
            provenance="task_result",
            sender=f"task:{task.name}",
        )
        self._agents.waiting.resource_over(change, agent, "task", task.name, dump_json(facts))

    def add_ends(self, change: Change, agent: Agent, event: TaskEvent) -> None:
        """The cell is gone, and with it every command."""
        for task in self.of(agent):
            if not task.child and change.peek(task, "status") not in TASK_MOVES.terminal:
                self.end(change, agent, task, event)

    # handles

    def make_handle(self, change: Change, parent: Agent, child: Agent) -> None:
        """The parent's handle of a child that it supervises, in place of an earlier one."""
        self.drop_handle(change, parent, child.name)
        change.make(
            Task(
                agent=parent.index,
                name=child.name,
                task_kind=CHILD,
                child=child.index,
            )
        )

    def check_handle(self, parent: Agent, name: str) -> None:
        """``TakenError`` if a command of the parent has the name of a child to be."""
        task = self.find(parent, name)
        if task is not None and not task.child:
            raise TakenError(f"{quote(parent.name)} has a task {quote(name)}: choose another name")

    def drop_handle(self, change: Change, parent: Agent, name: str) -> None:
        task = self.find(parent, name)
        if task is not None and task.child:
            change.drop(task)

    def child_ended(self, change: Change, parent: Agent, child: Agent, outcome: Outcome) -> None:
        """The handle ends with its child."""
        task = self.find(parent, child.name)
        if task is not None and task.child == child.index and not self.is_over(task):
            if task.status is TaskStatus.MADE:
                change.put(task, status=TaskStatus.RUNNING)
            self.end(change, parent, task, _OF_OUTCOME[outcome.value])
