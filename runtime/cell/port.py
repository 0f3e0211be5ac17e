"""The port to the machine on which programs run, for those who begin, follow and end them.

Here that is cgroups and the records of monitors; ``runtime.life`` knows neither. What becomes of a
program is told by its ``Facts``: it was born, it began or is held, it ended, nothing of it is
left, or it is lost. An ``Execution`` is a program as the daemon knows it in memory, from its start
to its recorded end. A place (``Execution.leaf``, ``LiveCell.node``) can be frozen and killed, and
says whether somebody is there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import trio

from runtime.agents.parts import Agents
from runtime.cell.cell import Places
from runtime.cell.record import Facts, RunRecord
from runtime.cell.viewers import Viewer
from runtime.cell.windows import HANG_UP_GRACE, Ends
from runtime.errors import UnsupportedError
from runtime.ids import AgentIndex
from runtime.kernel import cgroups, linux, output
from runtime.kernel.cgroups import Cgroup, Hierarchy
from runtime.kernel.daemonlog import because_of
from runtime.kernel.inotify import Wakeup, Watcher
from runtime.kernel.lanes import Lanes
from runtime.kernel.spawn import Spawner
from runtime.kernel.sweeper import Sweeper
from runtime.records.model import Agent
from runtime.texts.limits import COST, RUNNING, TOKENS, network_of

log = logging.getLogger("ctxd.port")

#: of ``cpu.max``, in microseconds
_CPU_PERIOD: Final = 100_000

#: cells that are signalled at once, if each of them is by itself
_SIGNALLED_AT_ONCE: Final = 256

#: what ``Port.place`` gives
Place = Cgroup


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
        #: the PID of what keeps its cell, 0 until that is known
        self.keeper = 0
        #: is handed to its monitor before that begins
        self.first_viewer: Viewer | None = None
        #: what it runs under, if it ends by itself when that is over (``runtime.cell.leases``)
        self.lease: int | None = None

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
            self.keeper = record.keeper
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
        #: of an agent that is away, what is not known of its end: a word
        self.doubt = ""
        #: bytes that its processes and those of all it owns were seen to use together, at most
        self.memory_peak = 0
        #: its socket answers
        self.reachable = False
        #: it was sent SIGKILL, after which nothing is gentle
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


class Port:
    """The cgroups of agents, and the monitors of their programs."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        watcher: Watcher,
        spawner: Spawner,
        sweeper: Sweeper,
        places: Places,
    ) -> None:
        #: what starts programs uses these, too
        self.hierarchy = hierarchy
        self.watcher = watcher
        self.spawner = spawner
        self.sweeper = sweeper
        self._places = places
        #: by owner and signal, the cells that are to be signalled
        self._asked = defaultdict[tuple[int, int], list[list[LiveCell]]](list)
        self._signalling = Lanes[tuple[int, int]]()
        #: the boot of the machine, which no program outlives
        self.boot = linux.boot_id()

    def place(self, path: str) -> Cgroup:
        """Where an agent and all that it owns are, by its record."""
        return self.hierarchy.root.child(path)

    # facts

    def facts(self, key: str) -> Facts:
        """The facts of a program, by whose it is."""
        return Facts(self._places.records / key)

    def watching_facts(self, execution: Execution) -> AbstractContextManager[None]:
        """While that is told by ``execution.changed``."""
        return self.watcher.watching_present(execution.changed, execution.facts.path)

    def watching_place(self, place: Cgroup, wakeup: Wakeup) -> AbstractContextManager[None]:
        """While it is told that the last process of a place is gone, or one is there again."""
        return self.watcher.watching_present(wakeup, f"{place}/cgroup.events")

    async def wait_empty(self, place: Cgroup) -> None:
        """Until no process is left in a place, or it is gone."""
        wakeup = Wakeup()
        with self.watching_place(place, wakeup):
            await wakeup.until(lambda: not place.populated())

    async def watch_monitor(self, execution: Execution) -> None:
        """Until the monitor of a program, whichever daemon started it, is gone."""
        monitor = execution.record().monitor
        with contextlib.suppress(OSError):
            if monitor:
                fd = os.pidfd_open(monitor)
                try:
                    # a pid may have been given to another process since
                    if self.hierarchy.holds_monitors(cgroups.path_of(monitor) or ""):
                        await trio.lowlevel.wait_readable(fd)
                finally:
                    os.close(fd)
        if monitor:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(monitor, os.WNOHANG)  # ours to reap, unless adopted
        execution.monitor_gone = True
        execution.changed.notify()

    async def wait_settled(self, execution: Execution) -> None:
        """Until it is known whether a program began: only then can SIGTERM reach it."""
        if execution.settled:
            return
        await execution.until(lambda: execution.launched)
        if execution.facts.exist():
            with self.watching_facts(execution):
                await execution.until(
                    lambda: execution.monitor_gone or execution.over or execution.record().settled
                )

    # their terminals

    def view(self, execution: Execution, viewer: Viewer, grace: float) -> None:
        """Hands a viewer to the monitor of a program; if that is to end with it, it may take so
        many seconds, but not many. ``OSError``: the program is over."""
        execution.facts.inlet.show(viewer, min(grace, HANG_UP_GRACE))

    def tell_viewers(self, execution: Execution, text: str) -> None:
        """Tells all viewers of a program something, if it has any."""
        execution.facts.inlet.tell(b"n", text)

    def name_end(self, execution: Execution, text: str) -> None:
        """Viewers are to be told this of the end of a program, whatever that does."""
        execution.facts.inlet.tell(b"x", text)

    # what is done to programs

    async def signal(self, owner: int, number: int, execution: Execution) -> int:
        """Signals what is left of a program, but nothing that leads to it; how many processes
        there are. ``CtxError``, ``OSError``."""
        left = await self.sweeper.signal(owner, number, [execution.leaf], execution.spared())
        await self._hang_up(owner, number, [execution])
        return left

    async def signal_cells(self, owner: int, number: int, cells: Collection[LiveCell]) -> None:
        """Signals all programs of cells, together with others that wait for their turn as well."""
        key, own = (owner, number), list(cells)
        asked = self._asked[key]
        asked.append(own)
        async with self._signalling.turn(key):
            if own not in asked:
                return  # it went with another
            asked.remove(own)
            group = [own]
            while asked and sum(map(len, group)) + len(asked[0]) <= _SIGNALLED_AT_ONCE:
                group.append(asked.pop(0))
            try:
                await self._signal_cells(owner, number, chain.from_iterable(group))
            except BaseException:
                asked += group[1:]  # each finds out by itself
                raise

    async def _signal_cells(self, owner: int, number: int, cells: Iterable[LiveCell]) -> None:
        # a later life may have the path of one that is over
        there = [each for each in cells if not each.over]
        places = [leaf for each in there for leaf in each.leaves()]
        programs = [program for each in there for program in each.programs()]
        spared = [pid for each in programs for pid in each.spared()]
        await self.sweeper.signal(owner, number, places, spared)
        await self._hang_up(owner, number, programs)

    async def hang_up(self, owner: int, cells: Iterable[LiveCell]) -> None:
        """SIGHUP to all programs of cells that have a terminal. ``CtxError``, ``OSError``."""
        programs = [program for each in cells for program in each.programs()]
        await self._hang_up(owner, signal.SIGTERM, programs)

    async def _hang_up(self, owner: int, number: int, programs: Iterable[Execution]) -> None:
        """SIGHUP after SIGTERM to programs with a terminal: an interactive shell ignores SIGTERM,
        and would forget a SIGHUP that comes before (readline(3))."""
        told = [each for each in programs if number == signal.SIGTERM and each.record().terminal]
        if told:
            spared = [pid for each in told for pid in each.spared()]
            leaves = [each.leaf for each in told]
            await self.sweeper.signal(owner, signal.SIGHUP, leaves, spared)

    async def hurry(self, owner: int, place: Cgroup) -> None:
        """Has what was killed end as soon as others would. ``CtxError``, ``OSError``."""
        await self.sweeper.hurry(owner, place)

    @staticmethod
    def thaw(place: Cgroup) -> None:
        """Thaws processes that are ended anyway; SIGKILL reaches frozen ones too."""
        try:
            place.freeze(False)
        except OSError as error:
            log.error("%s: cannot thaw it: %s", place.path, error.strerror)

    def open_keeper(self, live_cell: LiveCell) -> int:
        """A pidfd of the PID 1 of a cell; ``ProcessLookupError`` if that is gone."""
        keeper = live_cell.record().keeper
        if not keeper:
            raise ProcessLookupError
        fd = os.pidfd_open(keeper)
        # a pid may have been given to another process since
        if not live_cell.leaf.holds(cgroups.path_of(keeper) or ""):
            os.close(fd)
            raise ProcessLookupError
        return fd

    def _tell_keeper(self, live_cell: LiveCell, number: int) -> bool:
        try:
            fd = self.open_keeper(live_cell)
        except OSError:
            return False
        try:
            signal.pidfd_send_signal(fd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)
        return True

    def hold(self, live_cell: LiveCell) -> bool:
        """A cell is not to end with its first program (keeper.c); False if it is over."""
        return self._tell_keeper(live_cell, signal.SIGUSR1)

    def release(self, live_cell: LiveCell) -> bool:
        """A cell is to end as soon as nothing else is in it (keeper.c); False if it is over."""
        return self._tell_keeper(live_cell, signal.SIGHUP)

    def remove(self, owner: int, place: Cgroup, *, wanted: bool = False) -> None:
        """Kills what is left in a place, and removes it, soon; ``wanted`` says that it may be
        made anew at any moment."""
        self.sweeper.remove(owner, place, wanted=wanted)

    async def removed(self) -> None:
        """Returns when nothing is to be removed any more."""
        await self.sweeper.drained()

    # what they use

    @property
    def counts_memory(self) -> bool:
        """Whether the kernel counts the memory of places."""
        return "memory" in self.hierarchy.controllers

    def check_limits(self, limits: dict[str, str]) -> None:
        """``UnsupportedError`` where the machine lacks the controller of a limit. Keys without one
        are not the kernel's."""
        for key, value in limits.items():
            controller, _, rest = key.partition(".")
            if key in (RUNNING, TOKENS, COST) or network_of(key) is not None:
                continue
            if rest and value != "max" and controller not in self.hierarchy.controllers:
                raise UnsupportedError(
                    f"{key}: the {controller} controller is not available in cgroup v2 here; "
                    "boot with systemd.unified_cgroup_hierarchy=1 (see ctx doctor)"
                )

    def apply_limits(self, place: Cgroup, limits: dict[str, str]) -> None:
        """Limits what an agent and all that it owns use, if it has a place now."""
        for key, value in limits.items():
            controller, _, rest = key.partition(".")
            if rest and controller in self.hierarchy.controllers and place.exists():
                if key == "cpu.max" and " " not in value:
                    value = f"{value} {_CPU_PERIOD}"
                place.write(key, value)

    def spent(self, place: Cgroup) -> dict[str, int]:
        """Processor time, and the peak of the memory where that is counted."""
        found = {"cpu_usec": place.keys("cpu.stat").get("usage_usec")}
        if self.counts_memory:
            found["memory_peak"] = place.number("memory.peak")
        return {key: value for key, value in found.items() if value is not None}

    @staticmethod
    def memory(place: Cgroup) -> int:
        """Bytes that are used now, where they are counted."""
        return place.number("memory.current") or 0

    # what nobody follows

    def all_places(self) -> Iterator[Cgroup]:
        """Those of all agents that no other agent owns."""
        yield from map(Cgroup, self.hierarchy.root.path.glob("user-*/agent-*"))

    def remove_strays(self, living: set[str], known: set[str]) -> None:
        """Removes places of no agent, and facts that nobody has a key of: left by a crash between
        two steps."""
        for directory in (self._places.records, self._places.monitors):
            for path in directory.iterdir():
                if path.name not in known:
                    path.unlink(missing_ok=True)
        for user in self.hierarchy.root.path.glob("user-*"):
            owner = int(user.name.removeprefix("user-"))
            self._remove_strays(owner, Cgroup(user), user.name, living)

    def _remove_strays(self, owner: int, base: Cgroup, path: str, living: set[str]) -> None:
        for node in base.children():
            if node.path.name == "monitor":
                continue
            below = f"{path}/{node.path.name}"
            if below in living:
                self._remove_strays(owner, node.child("child"), f"{below}/child", living)
            else:
                node.kill()
                self.remove(owner, node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine, and what lives on it."""

    agents: Agents
    places: Places
    nursery: trio.Nursery
    port: Port
    live_cells: LiveCells = field(default_factory=LiveCells)
    ends: Ends = field(default_factory=Ends)


class Part:
    """Whoever works on it."""

    def __init__(self, host: Host) -> None:
        self._agents = host.agents
        self._places = host.places
        self._nursery = host.nursery
        self._live_cells = host.live_cells
        self._ends = host.ends
        self._port = host.port

    def _tell_log(self, agent: Agent, *lines: str) -> None:
        """Lines of the agent's own log, if there is room for them."""
        directory = self._agents.documents.directory(agent) / "log"
        with contextlib.suppress(OSError):
            for line in lines:
                output.append_line(directory, line, self._agents.settings.log_max(agent))


def about(agent: Agent, *, run: str = "", reason: str = "") -> dict[str, Any]:
    """``extra`` of a line of the daemon's log that is about one agent."""
    return because_of(agent.owner, agents=[agent.name], run=run, reason=reason)


@contextlib.contextmanager
def guarded(agent: Agent, *expected: type[Exception]) -> Iterator[None]:
    """A bug in the care of one agent ends neither the daemon nor the care of others."""
    try:
        yield
    except expected:
        raise
    except Exception:
        log.exception("%s: a bug in ctxfs", agent.name)
