"""Following one program, from wherever it is until nothing of it is left.

Everything is learned from what outlives the daemon, the monitor's record and the cgroup, so that a
program that was adopted after a crash is followed by the same code. Cells, runs in them, commands
of tasks and the runtime's own are followed alike; what they have in common is in ``Following``, and
a command of the runtime's own has nothing else.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import ClassVar, Final

import trio

from runtime import crashpoints
from runtime.cell.cell import Command
from runtime.cell.execution import Execution, LiveCell
from runtime.cell.host import Host, Part
from runtime.cell.record import RunRecord
from runtime.cell.starting import Starter
from runtime.errors import CtxError
from runtime.life.ending import Ender
from runtime.texts.names import escape

log = logging.getLogger("ctxd.following")

_RETRY_SECONDS: Final = 0.5
#: how often a program is looked at though nothing changed, in seconds
_LOOK_AGAIN: Final = 3600.0


class Follower(Part):
    """All that it takes to follow a program."""

    def __init__(self, host: Host, starter: Starter, ender: Ender) -> None:
        super().__init__(host)
        self.host = host
        self.starter = starter
        self.ender = ender

    def clear(self, live_cell: LiveCell, execution: Execution) -> None:
        """Clears away what a program that is over leaves: its cgroup, its record, its socket."""
        execution.note_over()
        live_cell.forget(execution)
        self._port.remove(live_cell.agent.owner, execution.leaf)
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

    async def start(self) -> None:
        """Starts it, unless a daemon has; ``CtxError`` or ``OSError`` if it cannot be."""
        if not self._execution.facts.exist() and (command := self.command()) is not None:
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

    def deadline(self) -> float:
        """When it has taken too long, on the clock of the event loop."""
        return trio.current_time() + _LOOK_AGAIN

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
            deadline = trio.current_time() + _LOOK_AGAIN if terminating else self.deadline()
            with trio.move_on_at(deadline) as scope:
                await execution.changed.after(count)
            if scope.cancelled_caught and not terminating:
                self.be_late()

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
