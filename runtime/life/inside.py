"""Commands of the runtime's own inside an agent's cell: with the agent's rights and view, in
its cgroup. Who runs one waits no longer than it likes."""

from __future__ import annotations

import itertools
import shutil
from typing import Final

from runtime.cell.cell import Command
from runtime.cell.execution import LiveCell
from runtime.cell.host import Host, Part
from runtime.errors import WrongStateError
from runtime.kernel.output import Segments
from runtime.life.following import Follower, Following
from runtime.records.model import Agent
from runtime.texts.names import quote

_OUTPUT_MAX: Final = 256 << 10


class Inside(Part):
    """Runs commands where an agent is."""

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
        self, agent: Agent, words: list[str], cwd: str, env: dict[str, str]
    ) -> tuple[int, str]:
        """(exit status, what it wrote), 128 and the number after a signal. If this is cancelled,
        the command is killed.

        ``WrongStateError`` if the agent has no cell.
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
            words=tuple(words), cwd=cwd, run=agent.run.id, out=directory, env=tuple(env.items())
        )
        # what it leaves is killed at once
        execution.impatient = True
        following = Following(self._follower, live_cell, execution, command)
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
