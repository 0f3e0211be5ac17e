"""Following one program, from wherever it is until nothing of it is left.

Everything is learned from what outlives the daemon, the monitor's record and the cgroup, so that a
program that was adopted after a crash is followed by the same code. What all programs have in
common is in ``Following``: cells, commands of tasks and the runtime's own are here, and runs in
cells in ``runtime.life.runs``.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import shutil
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar, Final

import trio

from runtime import crashpoints
from runtime.cell import cell
from runtime.cell.cell import Command
from runtime.cell.port import Execution, Host, LiveCell, Part, about
from runtime.cell.record import RunRecord, judge_task
from runtime.cell.relays import Networks
from runtime.cell.starting import Starter
from runtime.cell.windows import HANG_UP_GRACE, HANGUP
from runtime.errors import CtxError, WrongStateError
from runtime.kernel import clock, output
from runtime.kernel.output import Segments
from runtime.life.conclusions import LOST, judge_agent, see_run
from runtime.life.ending import Ender
from runtime.life.windows import Windows
from runtime.life.worktrees import Worktrees
from runtime.records.change import RUNTIME, Change
from runtime.records.items import Task, TaskCue, TaskStatus
from runtime.records.lifecycle import Cue, Status
from runtime.records.model import Agent, Outcome
from runtime.texts.names import escape, parse_env_line, parse_screen, quote

log = logging.getLogger("ctxd.following")

_RETRY_SECONDS: Final = 0.5
#: how often a program is looked at though nothing changed, in seconds
_LOOK_AGAIN: Final = 3600.0
#: the same of one that is to be gone: the kernel may tell more than a second later that a cgroup
#: is empty, since a worker does that for the whole machine
_FIRST_LOOK: Final = 0.02
_LAST_LOOK: Final = 5.0
#: bytes of what a command of the runtime's own says
_OUTPUT_MAX: Final = 256 << 10


def screen_of(whose: Agent | Task) -> tuple[int, int] | None:
    """The size at first of the terminal of a program, if it has one."""
    return parse_screen(whose.tty) if whose.tty else None


async def _at_once(live_cell: LiveCell) -> None:
    """Waits for nothing."""


class Follower(Part):
    """All that it takes to follow a program."""

    def __init__(self, host: Host, starter: Starter, ender: Ender, windows: Windows) -> None:
        super().__init__(host)
        self.host = host
        self.starter = starter
        self.ender = ender
        self.windows = windows
        #: awaited before anything of a cell begins; it may be ended meanwhile
        self.ready: Callable[[LiveCell], Awaitable[None]] = _at_once
        #: the relays beside cells
        self.networks = Networks(host)

    def clear(self, live_cell: LiveCell, execution: Execution) -> None:
        """Clears away what a program that is over leaves: its cgroup, its record, its socket."""
        execution.note_over()
        live_cell.forget(execution)
        self._port.remove(live_cell.agent.owner, execution.leaf, wanted=True)  # by the next run
        execution.facts.forget()


class Following(Part):
    """Follows one program that enters a cell. Nobody stops it; what is left of it when it has
    ended is killed."""

    #: the instant after its start (``runtime.crashpoints``), if it has a name
    launched: ClassVar[str] = ""

    def __init__(
        self,
        follower: Follower,
        live_cell: LiveCell,
        execution: Execution,
        command: Command | None = None,
    ) -> None:
        super().__init__(follower.host)
        self._follower = follower
        self._agent = live_cell.agent
        self._live_cell = live_cell
        self._execution = execution
        self._command = command
        #: why it could not be started
        self.error: CtxError | OSError | None = None

    # what differs from program to program

    def command(self) -> Command | None:
        """The command to start if no daemon has; None for none."""
        return self._command

    def task(self) -> Task | None:
        """The task that it is, or else it is a run of its agent."""
        return None

    async def start(self) -> None:
        """Starts it, unless a daemon has; ``CtxError`` or ``OSError`` if it cannot be."""
        if not self._execution.facts.exist() and (command := self.command()) is not None:
            with self._follower.windows.launching(self._execution, self._agent, self.task()):
                await self._follower.starter.enter(self._live_cell, self._execution, command)
            if self.launched:
                crashpoints.reach(self.launched)

    def look(self, record: RunRecord) -> None:
        """Something of it has changed: it may have begun, or somebody may want it to end."""

    def is_unwanted(self, record: RunRecord) -> bool:
        """Whether it is to end though its program has not."""
        return False

    def has_ended(self, record: RunRecord) -> bool:
        """Whether its program has ended, or never began."""
        return bool(self.error or record.over or self._execution.monitor_gone)

    def hand_over(self, *, ended: bool) -> bool:
        """Whether somebody else leads it from here on."""
        return not self._live_cell.goes_on

    def is_gone(self, record: RunRecord) -> bool:
        """Whether nothing of it is left: its monitor, if there is one, has heard it to its end."""
        execution = self._execution
        if not self.has_ended(record) and not execution.settled:
            return False  # a frozen program reports nothing, but can be killed
        return record.finished or (execution.monitor_gone and not execution.leaf.populated())

    def is_impatient(self) -> bool:
        """Whether it is not to have the rest of its grace."""
        return self._execution.impatient

    def grace(self) -> float:
        """How long it may take to end, in seconds: frozen, it would not."""
        return 0.0 if self._agent.frozen else self._agents.settings.grace(self._agent)

    async def terminate(self) -> None:
        """Ends its processes, as far as any are left."""
        await self._follower.ender.terminate(
            self._live_cell, self._execution, self.grace(), self.is_impatient
        )

    def left(self) -> float:
        """Seconds until it has taken too long."""
        return math.inf

    def be_late(self) -> None:
        """It has taken too long."""

    def watch_empty(self, watches: ExitStack) -> None:
        """Has it told when its last process is gone."""
        execution = self._execution
        watches.enter_context(self._port.watching_place(execution.leaf, execution.changed))

    def conclude(self) -> None:
        """Records its end; its agent goes on."""

    def beside(self, nursery: trio.Nursery) -> None:
        """Starts what goes on while it runs, and is cancelled at the end.

        The first program of a cell has the monitor of the cell, which is watched for the cell.
        """
        if self._execution is not self._live_cell:
            nursery.start_soon(self._port.watch_monitor, self._execution)

    # what does not

    @property
    def failure(self) -> str:
        """Why it could not be started, as a text on one line; empty if it was."""
        return escape(str(self.error)) if self.error is not None else ""

    async def run(self) -> None:
        """Follows it to its recorded end, or that of its agent."""
        await self.follow()
        # with its monitor a cell ends, and so does what runs inside: that is the agent's end
        if self._live_cell.goes_on and not self._live_cell.lost:
            self.conclude()

    async def follow(self) -> None:
        """Returns when nothing of it is left, or somebody else leads it."""
        execution = self._execution
        try:
            await self.start()
        except (CtxError, OSError) as error:
            self.error = error
        execution.note_launched()
        with ExitStack() as watches:
            watches.enter_context(self._port.watching_facts(execution))
            async with trio.open_nursery() as nursery:
                self.beside(nursery)
                await self._until_gone(nursery, watches)
                if nursery.child_tasks:
                    nursery.cancel_scope.cancel()

    async def _until_gone(self, nursery: trio.Nursery, watches: ExitStack) -> None:
        execution = self._execution
        watched = terminating = False
        pause = _FIRST_LOOK
        while True:
            count = execution.changed.count
            record = execution.record()
            ended = self.has_ended(record)
            if self.hand_over(ended=False):
                return
            if record.started and not execution.settled:
                execution.note_settled()
            self.look(record)
            if self.hand_over(ended=ended):
                return
            over = ended or self.is_unwanted(record)
            if over and self.is_gone(record):
                return
            if over and not watched:
                # only now it matters who is in there; its last process may be gone already
                watched = True
                self.watch_empty(watches)
                continue
            if over and not terminating:
                terminating = True
                nursery.start_soon(self._end)
            left = pause if terminating else self.left()
            if terminating:
                pause = min(2 * pause, _LAST_LOOK)
            elif left <= 0:
                self.be_late()
            longest = _LOOK_AGAIN if math.isinf(left) else clock.LOOK_AGAIN
            with trio.move_on_after(max(0.0, min(left, longest))):
                await execution.changed.after(count)

    async def _end(self) -> None:
        """Until the kernel lets it: what it refuses for want of something, it may do later."""
        while True:
            try:
                await self.terminate()
                break
            except OSError as error:
                log.error("%s: cannot end it yet: %s", self._execution.leaf.path, error.strerror)
                await trio.sleep(_RETRY_SECONDS)
        self._execution.changed.notify()


class FollowingCell(Following):
    """Follows the cell of a live agent. ``serve`` begins the programs inside it."""

    def __init__(
        self,
        follower: Follower,
        live_cell: LiveCell,
        *,
        worktrees: Worktrees,
        serve: Callable[[LiveCell], None],
    ) -> None:
        super().__init__(follower, live_cell, live_cell)
        self._worktrees = worktrees
        self._ender = follower.ender
        self._serve = serve

    async def start(self) -> None:
        # nothing was launched if no monitor has begun a record
        if self._agent.status is not Status.STARTING or self._execution.facts.exist():
            return
        await self._follower.ready(self._live_cell)
        if self._agent.status is Status.STARTING:
            with self._follower.windows.launching(self._live_cell, self._agent, None):
                await self._worktrees.make(self._agent)
                await self._follower.starter.launch(self._live_cell, screen_of(self._agent))

    def watch_empty(self, watches: ExitStack) -> None:
        live_cell = self._live_cell
        watches.enter_context(self._port.watching_place(live_cell.node, live_cell.changed))

    def beside(self, nursery: trio.Nursery) -> None:
        # the monitor is reaped whenever it ends
        self._nursery.start_soon(self._port.watch_monitor, self._live_cell)
        # and so is a relay
        self._nursery.start_soon(self._follower.networks.lead, self._live_cell)
        self._serve(self._live_cell)

    def look(self, record: RunRecord) -> None:
        agent, live_cell = self._agent, self._live_cell
        if agent.runs_first:
            self._follower.windows.look(agent, None, record)
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
        elif record.hung_up:
            self._follower.windows.hang_up(agent, None)
        elif record.lease_over:
            self._ender.end(agent, *judge_agent(self._agents, live_cell))
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

    def left(self) -> float:
        """Until the agent's ``timeout``; in mode ``turn`` that is one of each run."""
        timeout = self._agents.settings.timeout(self._agent)
        if timeout is None or self._agent.how.run_per_message:
            return math.inf
        return timeout - clock.since(self._agent.started, self._agent.started_up)

    def be_late(self) -> None:
        self._ender.end(self._agent, Outcome.CANCELLED, "timeout")


def _ended_before(above: LiveCell, record: RunRecord) -> bool:
    """Whether an owner's run ended no later than one below it."""
    owner = above.record()
    if owner.ended:
        return not record.ended or owner.ended_before(record)
    # Nothing tells when: its PID 1 or its monitor was killed, and what was below
    # died of that, unless it exited by itself.
    gone = not (above.facts.has_keeper() and above.facts.has_monitor())
    return record.exit_code is None and bool(owner.keeper) and gone


class FollowingTask(Following):
    """Follows a command of an agent's."""

    launched = "task.launched"

    def __init__(self, follower: Follower, live_cell: LiveCell, task: Task) -> None:
        execution = live_cell.command(task.name)
        super().__init__(follower, live_cell, execution)
        self._task = task

    def task(self) -> Task | None:
        return self._task

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
            terminal=screen_of(task),
        )

    def look(self, record: RunRecord) -> None:
        agent, task = self._agent, self._task
        self._follower.windows.look(agent, task, record)
        if record.hung_up or task.window:
            self._follower.windows.hang_up(agent, task)
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

    def grace(self) -> float:
        return min(super().grace(), HANG_UP_GRACE if self._task.window else math.inf)

    def conclude(self) -> None:
        agent, task, record = self._agent, self._task, self._execution.record()
        cue, exit_text = judge_task(task, record)
        reason = self.failure or record.failed
        if reason and cue is TaskCue.ERROR:
            with contextlib.suppress(OSError):
                directory = self._agents.results.directory(agent, task)
                output.append_line(directory, reason, self._agents.settings.log_max(agent))
        change = Change(by=task.by if cue is TaskCue.CANCELLED else RUNTIME)
        self._agents.tasks.end(
            change, agent, task, cue, exit_text=exit_text, reason=self._why(cue, reason)
        )
        self._agents.journal.note(change)
        crashpoints.reach("task.recorded")
        self._follower.clear(self._live_cell, self._execution)
        why = about(agent, reason=exit_text)
        log.info("%s: task %s: %s %s", agent.name, task.name, task.status, exit_text, extra=why)

    def _why(self, cue: TaskCue, failure: str) -> str:
        """The reason of an end that its exit does not tell, as of an agent."""
        if cue is TaskCue.CANCELLED:
            if self._task.window:
                return HANGUP
            return self._agents.journal.stop_reason(self._agent, self._task.by)
        if cue is TaskCue.INTERRUPTED:
            return LOST[1]
        return f"start_failed: {failure}" if cue is TaskCue.ERROR and failure else ""


class FollowingApart(Following):
    """Follows a command of the runtime's own in a cell like the one of its agent."""

    async def start(self) -> None:
        if (command := self.command()) is not None:
            starter = self._follower.starter
            await starter.launch_apart(self._live_cell, self._execution, command)

    def hand_over(self, *, ended: bool) -> bool:
        return False


class Inside(Part):
    """Runs commands of the runtime's own where an agent is, or would be."""

    def __init__(self, host: Host, follower: Follower) -> None:
        super().__init__(host)
        self._follower = follower
        self._numbers = itertools.count(1)

    def end_left(self, live_cell: LiveCell) -> None:
        """Ends commands of an earlier daemon, which alone knew what for: they are done again, or
        not at all."""
        for place in live_cell.own_commands():
            place.kill()
            self._port.remove(live_cell.agent.owner, place)

    async def run(
        self,
        agent: Agent,
        words: list[str],
        cwd: str,
        env: dict[str, str],
        *,
        out: Path | None = None,
        most: int = 0,
        open_input: Callable[[], int] | None = None,
        lease: int | None = None,
    ) -> tuple[int, str]:
        """(exit status, what it wrote), 128 and the number after a signal; bytes pass as
        ``RunFiles`` says. If this is cancelled, the command is killed.

        With a ``lease`` it runs under that in a cell of its own, as of the agent, which has none
        now. ``WrongStateError`` if the agent has no cell otherwise.
        """
        live_cell = self._live_cells.get(agent.index)
        if live_cell is None:
            raise WrongStateError(f"{quote(agent.name)} has no cell: it is {agent.status}")
        # no task has such a name; one of an earlier daemon may be there still
        name = f".{next(self._numbers)}"
        while live_cell.command(name).facts.exist():
            live_cell.tasks.pop(name)
            name = f".{next(self._numbers)}"
        execution = live_cell.command(name)
        directory = self._agents.documents.directory(agent) / "task" / name
        # what one of an earlier daemon said
        shutil.rmtree(directory, ignore_errors=True)
        command = Command(
            words=tuple(words),
            cwd=cwd,
            run=agent.run.id,
            out=out or directory,
            log=directory if out else None,
            env=tuple(env.items()),
            open_input=open_input,
            most=most,
        )
        # what it leaves is killed at once
        execution.impatient = True
        execution.lease = lease
        kind = Following if lease is None else FollowingApart
        following = kind(self._follower, live_cell, execution, command)
        try:
            await following.follow()
            if following.error is not None:
                raise following.error
            record = execution.record()
            if record.failed and record.exit_code is None:
                return 127, record.failed
            text = Segments(directory).read(0, _OUTPUT_MAX).decode(errors="replace")
            code = record.exit_code
            return (128 + (record.signal or 9) if code is None else code), text
        finally:
            execution.leaf.kill()
            self._follower.clear(live_cell, execution)
            shutil.rmtree(directory, ignore_errors=True)
