"""Running programs as the daemon knows them in memory, from their start to their recorded end."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from runtime.cell.inlet import Inlet
from runtime.cell.record import VERSION, RunRecord, read_record
from runtime.ids import AgentIndex
from runtime.kernel import cgroups, linux
from runtime.kernel.cgroups import Cgroup
from runtime.kernel.inotify import Wakeup
from runtime.records.model import Agent

log = logging.getLogger("ctxd.execution")


class Execution:
    """One monitored program in a leaf cgroup: a cell with its first run, a later run, a task.

    What becomes known of it, and whatever else may matter to those who follow it, is told by
    ``changed``; they look here what is so.
    """

    def __init__(self, leaf: Cgroup, record_path: Path, changed: Wakeup) -> None:
        self.leaf = leaf
        self.record_path = record_path
        #: the way to its standard input, if it is fed
        self.inlet = Inlet(record_path.parents[1] / "monitor" / record_path.name)
        self.changed = changed
        #: the monitor runs, or it is certain that none will
        self.launched = False
        self.monitored = False
        self.monitor_gone = False
        #: known to have begun or failed; before that SIGTERM cannot reach the program
        self.settled = False
        #: nothing is left of a program whose cell goes on
        self.emptied = False
        #: it is not to have the rest of its grace
        self.impatient = False
        #: its end is recorded, or nobody leads it any more
        self.over = False
        self._spared: set[int] | None = None
        self._complained = False
        #: the record as it was when its file had this inode and this size
        self._known: tuple[tuple[int, int], RunRecord] | None = None

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Returns when something is so that ``changed`` tells of."""
        await self.changed.until(is_so)

    def note_launched(self) -> None:
        """Its monitor runs if it has begun a record, else none will."""
        self.monitored = self.monitored or self.record_path.exists()
        self.launched = True
        self.changed.notify()

    def note_over(self) -> None:
        self.over = True
        self.changed.notify()

    async def wait_over(self) -> None:
        await self.until(lambda: self.over)

    def record(self) -> RunRecord:
        try:
            st = os.stat(self.record_path)
        except FileNotFoundError:
            return RunRecord()
        version = (st.st_ino, st.st_size)  # nobody ever changes what it has
        if self._known is not None and self._known[0] == version:
            return self._known[1]
        record = read_record(self.record_path)
        self._known = version, record
        if not record.understood and not self._complained:
            self._complained = True
            log.error(
                "%s: a newer ctxd began this run: its record has version %d, and this ctxd reads "
                "versions up to %d: it counts the run as lost, and ends it",
                self.record_path,
                record.version,
                VERSION,
            )
        return record

    def was_out_of_memory(self) -> bool:
        """Whether the kernel killed a process of it for the memory that it used."""
        return self.leaf.keys("memory.events").get("oom_kill", 0) > 0

    def spared(self) -> set[int]:
        """Pids of what leads to the program and waits for it, the cell's own PID 1 included."""
        if self._spared is None:
            record = self.record()
            found = {record.chain, record.keeper, linux.parent_of(record.keeper)}
            if not self.settled:
                return found
            self._spared = found
        return self._spared

    def note_settled(self) -> None:
        """The program began: what surrounds it stays as it is until the end."""
        self.settled = True
        self.spared()


class LiveCell(Execution):
    """A live agent: its cgroup, its cell, and what has entered that."""

    def __init__(self, agent: Agent, node: Cgroup, record_path: Path) -> None:
        self._holds_cell = agent.how.holds_cell
        # a held cell must outlive its runs: what holds it is in a leaf of its own
        super().__init__(node.child("cell" if self._holds_cell else "run"), record_path, Wakeup())
        self.agent = agent
        self.node = node
        self.unkillable = False
        #: bytes that its processes and those of all it owns were seen to use together, at most
        self.memory_peak = 0
        #: its socket answers
        self.reachable = False
        #: somebody leads the runs that enter the cell
        self.served = False
        #: somebody wants it dead, so that it is not started again
        self.given_up = False
        #: the current run, if it has entered the cell
        self.run: Execution | None = None
        self.tasks: dict[str, Execution] = {}
        #: takes what a resident program has said and nobody has heard yet
        self.hear_rest: Callable[[], Awaitable[None]] | None = None

    async def wait_reachable(self) -> None:
        await self.until(lambda: self.reachable)

    @property
    def goes_on(self) -> bool:
        """Whether runs and commands in the cell begin and end by themselves: not once the
        agent is ending, even if it is started again by now, in another cell."""
        return self.agent.accepts_children and not self.over

    def run_in(self, records: Path) -> Execution:
        """The current run of its agent, which may be the cell's first program."""
        if self.agent.runs_first:
            return self
        record_path = records / f"{self.agent.incarnation}-{self.agent.run.id}"
        if self.run is None or self.run.record_path != record_path:
            self.run = Execution(self.run_leaf, record_path, self.changed)
        return self.run

    def task_in(self, records: Path, name: str) -> Execution:
        """The execution of a command; made when it is first asked for."""
        execution = self.tasks.get(name)
        if execution is None:
            leaf = self.node.child("task", cgroups.leaf_name(name))
            record_path = records / f"{self.agent.incarnation}-task-{name}"
            execution = self.tasks[name] = Execution(leaf, record_path, Wakeup())
        return execution

    @property
    def run_leaf(self) -> Cgroup:
        """Where runs enter: they can be killed, and watched until it is empty, without the cell."""
        return self.node.child("run" if self._holds_cell else "again")

    def leaves(self) -> tuple[Cgroup, ...]:
        """Wherever its programs may be."""
        return tuple(self.node.child(name) for name in ("run", "again", "task"))

    def own_commands(self) -> list[Cgroup]:
        """Places of the runtime's own commands; no task has such a name."""
        found = self.node.child("task").children()
        return [leaf for leaf in found if leaf.path.name.startswith(".")]

    def entered(self) -> Iterator[Execution]:
        """The programs that have entered the cell."""
        if self.run is not None:
            yield self.run
        yield from self.tasks.values()

    def programs(self) -> tuple[Execution, ...]:
        """The cell, and what has entered it or is about to."""
        return self, *self.entered()

    def open_keeper(self) -> int:
        """A pidfd of the PID 1 of its cell; ``ProcessLookupError`` if that is gone."""
        keeper = self.record().keeper
        if not keeper:
            raise ProcessLookupError
        fd = os.pidfd_open(keeper)
        # a pid may have been given to another process since
        if not self.leaf.holds(cgroups.path_of(keeper) or ""):
            os.close(fd)
            raise ProcessLookupError
        return fd

    def signal_keeper(self, number: int) -> bool:
        """Tells the cell's PID 1 something (keeper.c); False if there is none any more."""
        try:
            fd = self.open_keeper()
        except OSError:
            return False
        try:
            signal.pidfd_send_signal(fd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)
        return True

    def hold(self) -> bool:
        """The cell is not to end with its first program (keeper.c)."""
        return self.signal_keeper(signal.SIGUSR1)

    def release(self) -> bool:
        """The cell is to end as soon as nothing else is in it (keeper.c)."""
        return self.signal_keeper(signal.SIGHUP)


class LiveCells(dict[AgentIndex, LiveCell]):
    """The cells of live agents, by the agent's index."""
