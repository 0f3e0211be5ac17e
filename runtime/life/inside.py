"""Commands of the runtime's own inside an agent's cell: with the agent's rights and view, in
its cgroup, and no longer than a while."""

from __future__ import annotations

import itertools
import math
import shutil
from pathlib import Path
from typing import Final

import trio

from runtime.cell.cell import Command
from runtime.cell.execution import Execution, LiveCell
from runtime.cell.host import Host, Part
from runtime.cell.record import RunRecord
from runtime.errors import UnsupportedError, WrongStateError
from runtime.kernel.output import Segments
from runtime.life.leading import EnteringLead, Leader
from runtime.records.model import Agent
from runtime.texts.names import quote

#: an agent's view may hold up a command; it is not waited for longer
_SECONDS: Final = 60.0
_OUTPUT_MAX: Final = 256 << 10


class Inside(Part):
    """Runs commands where an agent is."""

    def __init__(self, host: Host, leader: Leader) -> None:
        super().__init__(host)
        self._leader = leader
        self._numbers = itertools.count(1)

    def end_left(self, agent: Agent, live_cell: LiveCell) -> None:
        """Of an earlier daemon, which alone knew what for: it is done again, or not at all."""
        for leaf in live_cell.node.child("task").children():
            if leaf.path.name.startswith("."):
                leaf.kill()
                self._sweeper.remove(agent.owner, leaf)

    async def run(
        self, agent: Agent, words: list[str], cwd: str, env: dict[str, str]
    ) -> tuple[int, str]:
        """(exit status, what it wrote), 128 and the number after a signal.

        ``WrongStateError`` if the agent has no cell; ``UnsupportedError`` if it did not
        end in time.
        """
        live_cell = self._live_cells.get(agent.index)
        if live_cell is None:
            raise WrongStateError(f"{quote(agent.name)} has no cell: it is {agent.status}")
        # no task has such a name; one of an earlier daemon may be there still
        name = f".{next(self._numbers)}"
        while (self._places.records / f"{agent.incarnation}-task-{name}").exists():
            name = f".{next(self._numbers)}"
        execution = Execution(
            live_cell.task_leaf(name), self._places.records / f"{agent.incarnation}-task-{name}"
        )
        directory = self._agents.documents.directory(agent) / "task" / name
        # what one of an earlier daemon said
        shutil.rmtree(directory, ignore_errors=True)
        live_cell.tasks[name] = execution
        try:
            command = Command(
                words=tuple(words), cwd=cwd, run=agent.run, out=directory, env=tuple(env.items())
            )
            led = _LedCommand(self._leader, agent, live_cell, execution, command)
            await led.lead()
            if led.error is not None:
                raise led.error
            if led.late:
                raise UnsupportedError(
                    f"{words[0]} did not end within {_SECONDS:g} s: it was killed"
                )
            return _judge(execution.record(), directory)
        finally:
            execution.launched.set()
            execution.leaf.kill()
            live_cell.tasks.pop(name, None)
            self._leader.clear(agent, execution)
            shutil.rmtree(directory, ignore_errors=True)


class _LedCommand(EnteringLead):
    """A command of the runtime's own. ``Inside.run`` kills the processes that it leaves."""

    def __init__(
        self,
        leader: Leader,
        agent: Agent,
        live_cell: LiveCell,
        execution: Execution,
        command: Command,
    ) -> None:
        super().__init__(leader, agent, live_cell, execution, execution.wakeup)
        self._command = command
        self._deadline = math.inf
        #: it has taken too long
        self.late = False

    def command(self) -> Command | None:
        return self._command

    async def start(self) -> None:
        await super().start()
        self._deadline = trio.current_time() + _SECONDS

    def look(self, record: RunRecord) -> None:
        pass

    def is_unwanted(self, record: RunRecord) -> bool:
        return False

    def has_ended(self, record: RunRecord) -> bool:
        # it is heard to its end: what it said counts
        return bool(self.error or record.finished or self._execution.monitor_gone)

    def is_gone(self, record: RunRecord) -> bool:
        return self.has_ended(record)

    async def terminate(self) -> None:
        pass

    def hand_over(self, *, ended: bool) -> bool:
        return self.late

    def deadline(self) -> float:
        return self._deadline

    def be_late(self) -> None:
        self.late = True


def _judge(record: RunRecord, directory: Path) -> tuple[int, str]:
    """(exit status, what it wrote) of a command that has ended."""
    text = Segments(directory).read(0, _OUTPUT_MAX).decode(errors="replace")
    if record.exit_code is not None:
        return record.exit_code, text
    if record.failed:
        return 127, record.failed
    return 128 + (record.signal or 9), text
