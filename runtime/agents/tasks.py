"""The task plane: managed executions of an agent's, and handles of supervised children
(ctxfs-tasks(5), Tasks). What runs them is ``runtime.life.following``."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any, Final

from runtime import crashpoints
from runtime.agents import visits
from runtime.agents.messages import Messages, notice_of
from runtime.agents.planes import AwaitedPlane, PlaneKind, why_taken
from runtime.agents.results import CHILD, EndFacts, Results, exit_of
from runtime.agents.waiting import WaitingPlane
from runtime.agents.workspace import Worktree, WorktreeState
from runtime.authority.facts import Facts
from runtime.authority.guard import TAKING, Act, Guard, Unless, unless
from runtime.authority.upkeep import Upkeep
from runtime.caller import PARTIES, Caller
from runtime.errors import (
    DeniedError,
    ForbiddenError,
    MalformedError,
    NotEmptyError,
    TakenError,
    WrongStateError,
)
from runtime.records.change import Change
from runtime.records.items import (
    DELEGATION,
    TASK_MOVES,
    Item,
    Message,
    MessageStatus,
    Task,
    TaskCue,
    TaskStatus,
)
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.records.visits import Visit
from runtime.texts.names import dump_json, quote

_OF_STATUS: Final = {Status.NEW: TaskStatus.QUEUED, Status.STOPPING: TaskStatus.CANCELLING}


@unless("the caller is an agent that lacks the family local_environment", DeniedError)
def _lacking(facts: Facts, caller: Caller, _: Agent | Task) -> str:
    actor = facts.registry.calling(caller)
    if actor is None or "local_environment" in facts.authority.families(actor):
        return ""
    return f"{quote(actor.name)} is a {actor.profile}, which lacks local_environment"


@unless("it is the handle of a child", ForbiddenError)
def _handle(facts: Facts, caller: Caller, task: Task) -> str:
    if not task.child:
        return ""
    return f"{quote(task.name)} is the handle of an agent: write the files of the agent"


@unless("it was started", WrongStateError)
def _started(facts: Facts, caller: Caller, task: Task) -> str:
    if task.status is TaskStatus.MADE:
        return ""
    return f"the task {quote(task.name)} was already started"


@unless("it is the handle of a child that has not ended", WrongStateError)
def _supervising(facts: Facts, caller: Caller, task: Task) -> str:
    if not task.child or task.over:
        return ""
    return f"{quote(task.name)} is the handle of an agent: rmdir the agent"


def _worktree_of(child: Agent | None) -> Worktree | None:
    if child is None or child.worktree is None or not child.worktree_made:
        return None
    return Worktree.load(child.worktree)


def _child_of(facts: Facts, task: Task) -> Agent | None:
    return facts.registry.recall(task.child) if task.child else None


@unless("its worktree is kept", NotEmptyError)
def _kept(facts: Facts, caller: Caller, task: Task) -> str:
    found = _worktree_of(_child_of(facts, task))
    if found is None or found.state is not WorktreeState.KEPT:
        return ""
    return f"the worktree of {quote(task.name)} is kept: {found.reason}"


def why_fetching(child: Agent | None) -> str:
    """Why what an agent committed cannot be touched: it is being taken over."""
    worktree = _worktree_of(child)
    if child is None or worktree is None or worktree.state is not WorktreeState.FETCHING:
        return ""
    return f"the worktree of {quote(child.name)} is being fetched"


def why_unfetched(child: Agent) -> str:
    """Why what an agent committed would be lost with it: nobody has taken it over."""
    worktree = _worktree_of(child)
    if worktree is None or worktree.state is WorktreeState.FETCHED:
        return ""
    what = f"the worktree of {quote(child.name)} is {worktree.state}"
    return f"{what}: {worktree.reason}" if worktree.reason else f"{what}: fetch it first"


@unless("its worktree is being fetched", WrongStateError)
def _fetching(facts: Facts, caller: Caller, task: Task) -> str:
    return why_fetching(_child_of(facts, task))


@unless("it has no worktree", MalformedError)
def _bare(facts: Facts, caller: Caller, task: Task) -> str:
    child = _child_of(facts, task)
    if child is not None and child.worktree is not None:
        return ""
    return f"{quote(task.name)} has no worktree"


@unless("its worktree is not made yet", WrongStateError)
def _unmade(facts: Facts, caller: Caller, task: Task) -> str:
    child = _child_of(facts, task)
    if child is None or child.worktree_made:
        return ""
    return f"the worktree of {quote(task.name)} does not exist yet"


@unless("its child is stopping", WrongStateError)
def _ending(facts: Facts, caller: Caller, task: Task) -> str:
    child = _child_of(facts, task)
    if child is None or child.status is not Status.STOPPING:
        return ""
    return f"{quote(task.name)} is stopping: it is fetched at its end"


def why_no_handle(facts: Facts, parent: Agent, name: str) -> str:
    """Why there cannot be a handle of this name: a command of the parent has it."""
    task = facts.items.named(parent.index, Task, name)
    return why_taken(parent, "task", name) if task is not None and not task.child else ""


@unless("its agent, or what that runs in, is paused", WrongStateError)
def _frozen(facts: Facts, caller: Caller, task: Task) -> str:
    agent = facts.registry.get(task.agent)
    for owner in (*facts.registry.ancestors(agent), agent) if agent is not None else ():
        if owner.frozen:
            return f"{quote(owner.name)} is paused: resume it first"
    return ""


def _unless_moved(text: str, cue: TaskCue) -> Unless[Task]:
    """Refuses a verb that the table of statuses does not have."""

    @unless(text, WrongStateError)
    def unmoved(facts: Facts, caller: Caller, task: Task) -> str:
        if (task.status, cue) in TASK_MOVES.table:
            return ""
        return TASK_MOVES.refusal(task.status, cue).sentence

    return unmoved


@unless("it runs", WrongStateError)
def _running(facts: Facts, caller: Caller, task: Task) -> str:
    if task.over or task.status is TaskStatus.MADE:
        return ""
    return f"the task {quote(task.name)} is {task.status.shown}: stop it"


def accepts_input(facts: Facts, task: Task) -> bool:
    """Whether something can be written to it; a child takes messages, unless it is ``once``."""
    child = _child_of(facts, task)
    return child.how.holds_cell if child is not None else task.accepts_input


@unless("accepts_input is 0", DeniedError)
def _no_input(facts: Facts, caller: Caller, task: Task) -> str:
    if accepts_input(facts, task):
        return ""
    return f"the task {quote(task.name)} takes no input: accepts_input is 0"


@unless("it has ended", WrongStateError)
def _over(facts: Facts, caller: Caller, task: Task) -> str:
    return f"the task {quote(task.name)} is {task.status.shown}" if task.over else ""


#: its files are written, its input is; a command is started, stopped, killed; a child's worktree
#: is fetched
WRITING: Final = Guard(who=PARTIES, unless=(_handle, _started))
INPUT: Final = Guard(who=PARTIES, unless=(_no_input, _over))
STARTING: Final = Guard(
    who=PARTIES,
    when=TAKING,
    unless=(_lacking, _unless_moved("it was started", TaskCue.START), _frozen),
)
STOPPING: Final = Guard(
    who=PARTIES,
    unless=(_lacking, _unless_moved("it was stopped, or has ended", TaskCue.STOP)),
)
KILLING: Final = Guard(
    who=PARTIES, unless=(_lacking, _unless_moved("it has ended", TaskCue.KILL))
)
FETCHING: Final = Guard(who=PARTIES, unless=(_lacking, _bare, _unmade, _fetching, _ending))
TASKS: Final = PlaneKind(
    cls=Task,
    what="task",
    remedy="rmdir or TaskRemove",
    relief="wait until one has ended, or end one with ctl or TaskStop",
    limit=lambda config: config.tasks,
    making=Guard(who=PARTIES, when=TAKING, unless=(_lacking,)),
    removing=Guard(who=PARTIES, unless=(_lacking, _supervising, _kept, _fetching, _running)),
    writing=WRITING,
)


class TaskPlane(AwaitedPlane[Task]):
    """The tasks of all agents."""

    def __init__(
        self,
        facts: Facts,
        *,
        results: Results,
        messages: Messages,
        waiting: WaitingPlane,
        upkeep: Upkeep,
    ) -> None:
        super().__init__(facts, TASKS)
        self._results = results
        self._messages = messages
        self._waiting = waiting
        self._upkeep = upkeep

    # Subscriber

    def item_listed(self, item: Item) -> None:
        """A task that is removed is taken away, with what it wrote."""
        super().item_listed(item)
        if not isinstance(item, Task) or self._is_there(item):
            return
        agent = self._registry.get(item.agent)
        if agent is not None and not item.child:
            self._trash.discard(self._results.directory(agent, item), agent.owner)

    # looking

    def status(self, task: Task) -> str:
        """The status as it is shown; a handle shows its child's until it has ended."""
        child = self._results.child_of(task)
        if child is None or task.over:
            return task.status.shown
        if child.waits_its_turn:
            return TaskStatus.QUEUED.shown
        return _OF_STATUS.get(child.status, TaskStatus.RUNNING).shown

    def facts(self, agent: Agent, task: Task) -> dict[str, Any]:
        """The facts that the end of a task was told with, as they are now."""
        return self._results.of_task(Change(), agent, task)

    def worktree(self, task: Task) -> str:
        """A description of the worktree of a handle's child."""
        found = _worktree_of(self._results.child_of(task))
        return found.describe() if found is not None else ""

    def wait_path(self, task: Task) -> Path:
        child = self._results.child_of(task)
        token = child.wait_token if child is not None else task.wait_token
        return self._wait_files.path(token)

    # changing

    def check_command(
        self, guard: Guard[Task], verb: str, caller: Caller, agent: Agent, task: Task
    ) -> None:
        """Whether a caller may say a verb to one of an agent's tasks, and whether it is there."""
        roles = self._identity.roles(caller, agent)
        guard.check_who(Act.SAY, verb, self._facts, roles, agent)
        self.check_there(task)
        guard.check_object(self._facts, caller, task)
        guard.check_when(Act.SAY, verb, agent)

    def _counts(self, item: Task) -> bool:
        return not item.child

    def _check_room(self, agent: Agent) -> None:
        self._messages.check_room(agent)

    def _added(self, change: Change, agent: Agent, item: Task) -> None:
        super()._added(change, agent, item)
        item.made_to_start = self._journal.cause.starts
        caller = self._journal.cause.caller
        item.maker = caller.uid if caller is not None and caller.agent is None else None

    def _removing(self, change: Change, agent: Agent, item: Task) -> None:
        child = self._results.child_of(item)
        if child is not None and child.worktree is not None and child.worktree_made:
            self._discard_worktree(change, agent, child)
        self._gone(change, agent, item)

    def _gone(self, change: Change, agent: Agent, task: Task) -> None:
        """Fires the waits on it, which would otherwise never fire, or takes back notices of it."""
        self._messages.discard_notices(change, agent, task)
        if not task.over:
            facts = cache(
                lambda: self._results.of_task(change, agent, task, TaskStatus.CANCELLED)
            )
            self._waiting.resource_over(change, agent, "task", task.name, facts)

    def take_back(self) -> None:
        """Commands that an earlier daemon made to start and did not start
        (``Journal.starting``)."""
        for task in self._items.all(Task):
            if task.status is TaskStatus.MADE and task.made_to_start:
                agent = self._registry.get(task.agent)
                assert agent is not None
                self.remove(agent, task)

    def set(self, task: Task, **values: Any) -> None:
        """Fields of a command, until it is started."""
        self.check_open(task)
        with self._journal.changing() as change:
            change.put(task, **values)

    def start(
        self, caller: Caller, agent: Agent, task: Task, visit: Visit | None = None
    ) -> None:
        """Queues a command; it runs as soon as its agent's cell is there. With a ``visit``
        somebody looks at its terminal from then on."""
        self.check_command(STARTING, "start", caller, agent, task)
        if not task.cmd.strip():
            raise MalformedError("cmd is empty: write the command to it first")
        self._upkeep.check_task(agent, task)
        with self._journal.changing() as change:
            change.step(task, TaskCue.START)
            change.put(task, by=self._journal.actor)
            if visit is not None:
                visits.come(change, agent, task, visit)
        crashpoints.reach("task.queued")

    def stop(self, caller: Caller, agent: Agent, task: Task, *, kill: bool) -> None:
        """Asks a command to end."""
        cue, guard = (TaskCue.KILL, KILLING) if kill else (TaskCue.STOP, STOPPING)
        self.check_command(guard, cue.value, caller, agent, task)
        with self._journal.changing() as change:
            if task.status is TaskStatus.MADE:  # nothing of it runs
                self.end(change, agent, task, cue, reason=self._journal.stop_reason(agent))
                return
            change.step(task, cue)
            change.put(task, given_up=task.given_up or kill, by=self._journal.actor)

    # ending

    def end(
        self,
        change: Change,
        agent: Agent,
        task: Task,
        cue: TaskCue,
        *,
        exit_text: str = "",
        reason: str = "",
        facts: EndFacts | None = None,
    ) -> None:
        """A task is over: its status, its event, a message, and the waits on it. ``facts`` are
        what is told of it, if somebody else is told the same."""
        status = change.step(task, cue)
        reason = reason or exit_text
        change.put(task, exit=exit_text, reason=reason, pid=0, ended=time.time())
        change.tell(agent, "task.end", task=task.name, status=status.value, exit=exit_text)
        facts = facts or cache(lambda: self._results.of_task(change, agent, task))
        # a shell that somebody opened for himself
        is_session = bool(task.tty) and task.maker is not None
        if self._messages.takes_notices(change, agent) and not is_session:
            self._messages.notify(
                change,
                agent,
                text=dump_json(facts()),
                provenance="task_result",
                sender=notice_of(task),
            )
        self._waiting.resource_over(change, agent, "task", task.name, facts)
        unwanted = visits.end(change, agent, task) or change.peek(task, "window") == "remove"
        if unwanted or is_session:
            change.drop(task)

    def end_told(self, caller: Caller, agent: Agent, task: Task) -> None:
        """Tells the agent no more of the end of a command, if it was answered with that, as
        wait(2) returns a child."""
        if caller.agent == agent.index:
            change = Change()
            with self._journal.acting(caller):
                self._messages.discard_notices(change, agent, task, "answered")
                self._journal.note(change)

    def add_ends(self, change: Change, agent: Agent, cue: TaskCue, reason: str) -> None:
        """The cell is gone, and with it every command."""
        for task in self.unfinished(change, agent):
            self.end(change, agent, task, cue, reason=reason)

    def unfinished(self, change: Change, agent: Agent) -> list[Task]:
        """Its commands that are not over, oldest first."""
        return [
            task
            for task in self.known(agent)
            if not task.child and not change.is_over(task)
        ]

    # handles

    def make_handle(self, change: Change, parent: Agent, child: Agent) -> None:
        """The parent's handle of a child that it supervises, in place of an earlier one."""
        self.drop_handle(change, parent, child)
        handle = Task(agent=parent.index, name=child.name, task_kind=CHILD, child=child.index)
        change.make_handle(handle, child)

    def check_handle(self, parent: Agent, name: str) -> None:
        """``TakenError`` if a command of the parent has the name of a child to be."""
        if why := why_no_handle(self._facts, parent, name):
            raise TakenError(why)

    def drop_handle(self, change: Change, parent: Agent, child: Agent) -> None:
        """The handle of a child, or of an earlier one of its name.

        It stays while its worktree is kept.
        """
        task = self._items.named(parent.index, Task, child.name)
        if task is None or not task.child:
            return
        if task.child == child.index and child.worktree is not None and child.worktree_made:
            if Worktree.load(child.worktree).state is WorktreeState.KEPT:
                return
            self._discard_worktree(change, parent, child)
        change.drop(task)
        self._gone(change, parent, task)

    def _discard_worktree(self, change: Change, parent: Agent, child: Agent) -> None:
        """Has it taken away after the change is committed (``runtime.life.worktrees``)."""
        change.set(
            parent, discards=(*change.peek_agent(parent, "discards"), child.worktree)
        )
        change.set(child, worktree=None, worktree_made=False)

    def keep_worktree(self, change: Change, agent: Agent, why: str) -> None:
        """An agent ends: of its worktree nothing was taken over, unless that is recorded."""
        found = _worktree_of(agent)
        if found is None or found.state not in (WorktreeState.OPEN, WorktreeState.FETCHING):
            return
        change.set(agent, worktree=found.kept(why).dump())
        task = self.handle_of(agent)
        if task is not None:
            change.put(task, worktree=WorktreeState.KEPT.value)

    def child_started(self, change: Change, child: Agent, moment: float) -> None:
        """The handle, if it has one, starts with its child."""
        parent, task = self._registry.parent_of(child), self.handle_of(child)
        if parent is None or task is None or task.over or task.started:
            return  # or it goes on after a reboot
        change.put(task, started=moment)
        change.tell(parent, "task.start", task=task.name, pid="")

    def child_goes_on(
        self, change: Change, child: Agent, message: Message, status: MessageStatus, reason: str
    ) -> None:
        """A message to a child has ended, and the child has not. If that was its task, and was not
        done, its parent is told as of a failed run: unless it waited for that, or ended it."""
        parent, task = self._registry.parent_of(child), self.handle_of(child)
        if status is MessageStatus.PROCESSED or message.provenance != DELEGATION:
            return
        if parent is None or task is None or not child.accepts_children:
            return
        by_parent = child.run.caused_by.partition(" ")[0] == f"agent:{parent.name}"
        if by_parent or self._waiting.tells(change, parent, child, message):
            return
        shown = TaskStatus.FAILED if status is MessageStatus.FAILED else TaskStatus.CANCELLED
        facts = self._results.of_failed(change, parent, child, shown, reason)
        self._messages.notify(
            change,
            parent,
            text=dump_json({**facts, "message": message.name}),
            provenance="task_result",
            sender=notice_of(task),
        )

    def child_over(
        self, change: Change, parent: Agent, child: Agent, outcome: str, reason: str
    ) -> None:
        """A child has ended, and its handle with it; without an outcome it is its parent's child
        no more. What the parent waits for comes."""
        facts = cache(lambda: self._results.of_child(change, parent, child))
        task = self.handle_of(child)
        if outcome and task is not None and not task.over:
            if change.peek(task, "status") is TaskStatus.MADE:
                change.step(task, TaskCue.FOLLOW)
            cue, exit_text = TaskCue(outcome), exit_of(reason)
            self.end(
                change, parent, task, cue, exit_text=exit_text, reason=reason, facts=facts
            )
        self._waiting.child_over(change, parent, child, facts, outcome, reason)

    def handle_of(self, child: Agent) -> Task | None:
        """The handle by which its parent supervises a child, if it does."""
        parent = self._registry.parent_of(child)
        task = self._items.named(parent.index, Task, child.name) if parent is not None else None
        return task if task is not None and task.child == child.index else None
