"""Leading one program, from wherever it is until nothing of it is left.

The same for cells, for the runs inside them, for the commands of tasks and for the runtime's
own: what differs is said by a ``Lead``.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import ClassVar, Final

import trio

from runtime import crashpoints
from runtime.cell.cell import Command
from runtime.cell.execution import Execution, LiveCell
from runtime.cell.host import Host, Part
from runtime.cell.record import RunRecord
from runtime.cell.starting import Starter
from runtime.errors import CtxError
from runtime.kernel.cgroups import Cgroup
from runtime.kernel.inotify import Wakeup
from runtime.life.ending import Ender, watch_monitor
from runtime.records.model import Agent
from runtime.texts.names import escape

log = logging.getLogger("ctxd.leading")

_RETRY_SECONDS: Final = 0.5
#: how often a program is looked at though nothing changed, in seconds
_LOOK_AGAIN: Final = 3600.0


class Leader(Part):
    """What it takes to lead a program."""

    def __init__(self, host: Host, starter: Starter, ender: Ender) -> None:
        super().__init__(host)
        self.host = host
        self.starter = starter
        self.ender = ender

    def watching(self, wakeup: Wakeup, *paths: Path) -> AbstractContextManager[None]:
        """While changes of these files, as far as they exist, are told to ``wakeup``."""
        return self._watcher.watching_present(wakeup, *paths)

    async def watch_monitor(self, execution: Execution) -> None:
        await watch_monitor(self._hierarchy, execution)

    def clear(self, agent: Agent, execution: Execution) -> None:
        """What a program that is over leaves goes: its cgroup, its record, its socket."""
        execution.over.set()
        self._sweeper.remove(agent.owner, execution.leaf)
        execution.record_path.unlink(missing_ok=True)
        execution.inlet.remove()


class Lead(Part, ABC):
    """How one program is led: what differs from program to program, and what does not."""

    def __init__(
        self,
        leader: Leader,
        agent: Agent,
        live_cell: LiveCell,
        execution: Execution,
        wakeup: Wakeup,
    ) -> None:
        super().__init__(leader.host)
        self._leader = leader
        self._agent = agent
        self._live_cell = live_cell
        self._execution = execution
        self._wakeup = wakeup
        #: why it could not be started
        self.error: CtxError | OSError | None = None

    # what differs

    @abstractmethod
    async def start(self) -> None:
        """Starts it, unless a daemon has; ``CtxError`` or ``OSError`` if it cannot be."""

    @abstractmethod
    def look(self, record: RunRecord) -> None:
        """Something of it has changed: it may have begun, or somebody may want it to end."""

    @abstractmethod
    def is_unwanted(self, record: RunRecord) -> bool:
        """Whether it is to end though its program has not."""

    @abstractmethod
    async def terminate(self) -> None:
        """Ends its processes, as far as any are left."""

    def has_ended(self, record: RunRecord) -> bool:
        """Whether its program has ended, or never began."""
        return bool(self.error or record.over or self._execution.monitor_gone)

    def hand_over(self, *, ended: bool) -> bool:
        """Whether somebody else leads it from here on."""
        return not self._live_cell.goes_on(self._agent)

    def is_gone(self, record: RunRecord) -> bool:
        """Whether nothing of it is left: its monitor, if there is one, has heard it to its end."""
        execution = self._execution
        return record.finished or (execution.monitor_gone and not execution.leaf.populated())

    def deadline(self) -> float:
        """When it has taken too long, on the clock of the event loop."""
        return trio.current_time() + _LOOK_AGAIN

    def be_late(self) -> None:
        """It has taken too long."""

    async def wait_changed(self) -> None:
        """Until it is to be looked at again."""
        await self._wakeup.wait_changed()

    def cgroup(self) -> Cgroup:
        """The cgroup whose last process is waited for."""
        return self._execution.leaf

    def beside(self, nursery: trio.Nursery) -> None:
        """Starts what goes on while it runs, and is cancelled at the end.

        The first program of a cell has the monitor of the cell, which the lead of the cell
        watches.
        """
        if self._execution is not self._live_cell:
            nursery.start_soon(self._leader.watch_monitor, self._execution)

    # what does not

    @property
    def failure(self) -> str:
        """Why it could not be started, as a text on one line; empty if it was."""
        return escape(str(self.error)) if self.error is not None else ""

    async def lead(self) -> None:
        """Returns when nothing of it is left, or somebody else leads it."""
        execution = self._execution
        try:
            await self.start()
        except (CtxError, OSError) as error:
            self.error = error
        execution.monitored = execution.record_path.exists()
        execution.launched.set()
        with ExitStack() as watches:
            watches.enter_context(self._leader.watching(self._wakeup, execution.record_path))
            async with trio.open_nursery() as nursery:
                self.beside(nursery)
                await self._until_gone(nursery, watches)
                if nursery.child_tasks:
                    nursery.cancel_scope.cancel()

    async def _until_gone(self, nursery: trio.Nursery, watches: ExitStack) -> None:
        execution = self._execution
        watched = terminating = False
        while True:
            record = execution.record()
            ended = self.has_ended(record)
            if self.hand_over(ended=False):
                return
            if record.started and not execution.settled:
                execution.note_settled()
            self.look(record)
            if self.hand_over(ended=ended):
                return
            unwanted = self.is_unwanted(record)
            if (ended or unwanted) and self.is_gone(record):
                return
            if (ended or unwanted) and not watched:
                # only now it matters who is in there; its last process may be gone already
                watched = True
                events = self.cgroup().path / "cgroup.events"
                watches.enter_context(self._leader.watching(self._wakeup, events))
                continue
            if (ended or unwanted) and not terminating:
                terminating = True
                nursery.start_soon(self._end)
            deadline = trio.current_time() + _LOOK_AGAIN if terminating else self.deadline()
            with trio.move_on_at(deadline) as scope:
                await self.wait_changed()
            if scope.cancelled_caught and not terminating:
                self.be_late()

    async def _end(self) -> None:
        """Until the kernel lets it: what it refuses for want of something, it may do later."""
        while True:
            try:
                await self.terminate()
                return
            except OSError as error:
                log.error("%s: cannot end it yet: %s", self._execution.leaf.path, error.strerror)
                await trio.sleep(_RETRY_SECONDS)


class EnteringLead(Lead):
    """One program that enters an agent's cell."""

    #: the instant after its start (``runtime.crashpoints``), if it has a name
    launched: ClassVar[str] = ""

    @abstractmethod
    def command(self) -> Command | None:
        """The command to start if no daemon has; None for none."""

    async def start(self) -> None:
        if not self._execution.record_path.exists() and (command := self.command()) is not None:
            starter = self._leader.starter
            await starter.enter(self._agent, self._live_cell, self._execution, command)
            if self.launched:
                crashpoints.reach(self.launched)
