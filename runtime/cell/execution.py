"""Running programs as the daemon knows them in memory, from their start to their recorded end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

from runtime.cell.record import Facts, RunRecord
from runtime.ids import AgentIndex
from runtime.kernel import cgroups, linux
from runtime.kernel.cgroups import Cgroup
from runtime.kernel.inotify import Wakeup
from runtime.records.model import Agent


class Execution:
    """One monitored program in a leaf cgroup: a cell with its first run, a later run, a task.

    What becomes known of it, and whatever else may matter to those who follow it, is told by
    ``changed``; they look here what is so.
    """

    def __init__(self, leaf: Cgroup, facts: Facts, changed: Wakeup) -> None:
        self.leaf = leaf
        self.facts = facts
        self.changed = changed
        #: the monitor runs, or it is certain that none will
        self.launched = False
        self.monitor_gone = False
        #: known to have begun or failed; before that SIGTERM cannot reach the program
        self.settled = False
        #: nothing is left of a program whose cell goes on
        self.emptied = False
        #: it is not to have the rest of its grace
        self.impatient = False
        #: somebody follows it; of a cell, the runs that enter it
        self.served = False
        #: its end is recorded, or nobody leads it any more
        self.over = False
        self._spared: set[int] | None = None

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Returns when something is so that ``changed`` tells of."""
        await self.changed.until(is_so)

    def note_launched(self) -> None:
        """Its monitor runs if there are facts, else none will."""
        self.launched = True
        self.changed.notify()

    def note_over(self) -> None:
        self.over = True
        self.changed.notify()

    async def wait_over(self) -> None:
        await self.until(lambda: self.over)

    def record(self) -> RunRecord:
        return self.facts.read()

    @property
    def lost(self) -> bool:
        """Whether nobody can tell what became of it: its monitor was killed, or writes what this
        daemon does not know."""
        # in this order: the last that a monitor does is to record the end
        gone = not self.facts.has_monitor()
        record = self.record()
        return not record.understood or (gone and bool(record.monitor) and not record.over)

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

    def __init__(self, agent: Agent, node: Cgroup, facts_of: Callable[[str], Facts]) -> None:
        self._holds_cell = agent.how.holds_cell
        self._facts_of = facts_of
        # a held cell must outlive its runs: what holds it is in a leaf of its own
        leaf = node.child("cell" if self._holds_cell else "run")
        facts = facts_of(f"{agent.incarnation}-{agent.cell.id}")
        super().__init__(leaf, facts, Wakeup())
        self.agent = agent
        self.node = node
        self.unkillable = False
        #: bytes that its processes and those of all it owns were seen to use together, at most
        self.memory_peak = 0
        #: its socket answers
        self.reachable = False
        #: somebody wants it dead, so that it is not started again
        self.given_up = False
        #: somebody helps what was killed to its end
        self.hurried = False
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

    def run_at_hand(self) -> Execution:
        """The current run of its agent, which may be the cell's first program."""
        if self.agent.runs_first:
            return self
        key = f"{self.agent.incarnation}-{self.agent.run.id}"
        if self.run is None or self.run.facts.key != key:
            self.run = Execution(self.run_leaf, self._facts_of(key), self.changed)
        return self.run

    def command(self, name: str) -> Execution:
        """The execution of a command; made when it is first asked for."""
        execution = self.tasks.get(name)
        if execution is None:
            leaf = self.node.child("task", cgroups.leaf_name(name))
            facts = self._facts_of(f"{self.agent.incarnation}-task-{name}")
            execution = self.tasks[name] = Execution(leaf, facts, Wakeup())
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

    def forget(self, execution: Execution) -> None:
        """A program that had entered is over."""
        if self.run is execution:
            self.run = None
        self.tasks = {name: each for name, each in self.tasks.items() if each is not execution}

    def entered(self) -> Iterator[Execution]:
        """The programs that have entered the cell."""
        if self.run is not None:
            yield self.run
        yield from self.tasks.values()

    def programs(self) -> tuple[Execution, ...]:
        """The cell, and what has entered it or is about to."""
        return self, *self.entered()


class LiveCells(dict[AgentIndex, LiveCell]):
    """The cells of live agents, by the agent's index."""
