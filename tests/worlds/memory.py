"""A machine in memory: programs run on it as a test says, and no process anywhere.

It is a port as ``runtime.cell.port`` is one. What becomes of a program is told by the test: it was
``born`` when it was started, it ``began`` or its cell is ``held``, it ``ended``, its place is
``empty``, or it is ``lost``.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import trio

from runtime.authority.loop import Gentle
from runtime.cell.cell import Command, Places
from runtime.cell.inlet import Inlet
from runtime.cell.port import Execution, Host, LiveCell, Port
from runtime.cell.record import VERSION, Facts, RunRecord
from runtime.cell.sources import Looker
from runtime.cell.starting import Starter
from runtime.cell.viewers import Viewer
from runtime.ids import BootId
from runtime.kernel.cgroups import Cgroup
from runtime.kernel.inotify import Wakeup, Watcher
from runtime.kernel.processes import Census, Used
from runtime.kernel.processes import Place as Looked
from runtime.life.elsewhere import Elsewhere
from runtime.life.streams import Streams
from runtime.life.supervisor import Supervisor
from runtime.records.model import Agent
from runtime.texts.mounts import Source
from tests.worlds.hosts import host_with
from tests.worlds.records import World


def places_in(world: World) -> Places:
    return Places(mount=Path("/ctx"), state=world.state, runtime=world.path / "run")


class MemoryInlet(Inlet):
    """Takes what is written, as much as there is room for."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"))
        self.taken = b""
        self.room = 1 << 20

    def put(self, data: bytes, *, message: int = 0, line: int = 0, offset: int = 0) -> int:
        taken = data[: self.room]
        self.taken += taken
        return len(taken)


class MemoryFacts(Facts):
    def __init__(self, key: str) -> None:
        super().__init__(Path("/nowhere/record") / key)
        self.inlet: MemoryInlet = MemoryInlet()
        self.record: RunRecord | None = None
        self.alive = False

    def exist(self) -> bool:
        return self.record is not None

    def read(self) -> RunRecord:
        return self.record or RunRecord()

    def has_monitor(self) -> bool:
        return self.alive

    has_keeper = has_monitor

    def leave_cell(self) -> None:
        """Nothing here ends with another thing."""

    def forget(self) -> None:
        self.record, self.alive = None, False


class MemoryPlace(Cgroup):
    """Where programs are, by its path on the machine."""

    def __init__(self, machine: Machine, path: str) -> None:
        super().__init__(path)
        self.machine = machine

    def child(self, *names: str) -> MemoryPlace:
        return MemoryPlace(self.machine, "/".join((str(self), *names)))

    def children(self) -> list[Cgroup]:
        head = f"{self}/"
        below = {path.removeprefix(head).split("/")[0] for path in self.machine.crowds
                 if path.startswith(head)}  # fmt: skip
        return [self.child(name) for name in sorted(below)]

    def populated(self) -> bool:
        return any(self.machine.within(self))

    def freeze(self, frozen: bool) -> None:
        (self.machine.frozen.add if frozen else self.machine.frozen.discard)(str(self))

    def kill(self) -> None:
        if not self.machine.crowded:
            self.machine.killed(self)

    def read(self, file: str) -> str | None:
        return None


class _NoFiles:
    def watching(self, path: Path, wakeup: Wakeup) -> AbstractContextManager[None]:
        return nullcontext()

    def watching_present(self, wakeup: Wakeup, *paths: Path) -> AbstractContextManager[None]:
        return nullcontext()


class Machine(Port):
    """``obedient`` programs end when they are told to. Where it is ``crowded``, what is killed
    waits for a processor until somebody hurries it."""

    def __init__(self, *, obedient: bool = True, crowded: bool = False) -> None:
        self.crowded = crowded
        #: how often something was hurried
        self.hurries = 0
        self.boot = BootId("this boot")
        self.watcher = cast(Watcher, _NoFiles())
        self.obedient = obedient
        self.frozen: set[str] = set()
        #: the signals that ended programs, by their keys
        self.signals: dict[str, int] = {}
        #: the programs that are in a place
        self.crowds: dict[str, Execution] = {}
        self._facts: dict[str, MemoryFacts] = {}
        self._watching: list[tuple[str, Wakeup]] = []
        self._pids = iter(range(1000, 1 << 20))
        #: what monitors have of viewers, by the key of the program and their number
        self.viewers: dict[tuple[str, int], Viewer] = {}
        #: what viewers were told, by the key of their program
        self.told: list[tuple[str, str]] = []
        #: set when another program is born
        self.births = Wakeup()

    # what a test tells

    def born(self, execution: Execution) -> None:
        facts = cast(MemoryFacts, execution.facts)
        facts.record, facts.alive = RunRecord(version=VERSION, monitor=next(self._pids)), True
        self.crowds[str(execution.leaf)] = execution
        if execution.first_viewer is not None:
            with execution.first_viewer.end:
                self._taken(execution, execution.first_viewer)
            execution.first_viewer = None
        self.births.notify()
        self._tell()

    def began(self, execution: Execution) -> int:
        pid = next(self._pids)
        self._say(execution, program=pid, started=1)
        return pid

    def held(self, execution: Execution) -> None:
        self._say(execution, held=True, keeper=next(self._pids))

    def lease_over(self, cell: LiveCell, **facts: Any) -> None:
        self._say(cell, lease_over=True, **facts)

    def ended(
        self, execution: Execution, *, code: int | None = None, signal: int | None = None
    ) -> None:
        if signal is not None:
            self.signals[execution.facts.key] = signal
        self._say(execution, exit_code=code, signal=signal, ended=2, finished=True)
        cast(MemoryFacts, execution.facts).alive = False
        self.empty(execution)

    def empty(self, execution: Execution) -> None:
        self.crowds.pop(str(execution.leaf), None)
        self._tell()

    def lost(self, execution: Execution) -> None:
        cast(MemoryFacts, execution.facts).alive = False
        self.empty(execution)

    def _say(self, execution: Execution, **facts: Any) -> None:
        kept = cast(MemoryFacts, execution.facts)
        kept.record = replace(kept.read(), **facts)
        self._tell()

    def _tell(self) -> None:
        for _, wakeup in tuple(self._watching):
            wakeup.notify()

    def within(self, place: Cgroup) -> Iterator[Execution]:
        """The programs in a place and below it."""
        return (each for path, each in self.crowds.items() if f"{path}/".startswith(f"{place}/"))

    # the port

    def place(self, path: str) -> MemoryPlace:
        return MemoryPlace(self, f"/{path}")

    def facts(self, key: str) -> MemoryFacts:
        return self._facts.setdefault(key, MemoryFacts(key))

    @contextmanager
    def _told(self, what: str, wakeup: Wakeup) -> Iterator[None]:
        entry = what, wakeup
        self._watching.append(entry)
        try:
            yield
        finally:
            self._watching.remove(entry)

    def watching_facts(self, execution: Execution) -> AbstractContextManager[None]:
        return self._told(execution.facts.key, execution.changed)

    def watching_place(self, place: Cgroup, wakeup: Wakeup) -> AbstractContextManager[None]:
        return self._told(str(place), wakeup)

    async def watch_monitor(self, execution: Execution) -> None:
        with self.watching_facts(execution):
            await execution.until(lambda: not execution.facts.has_monitor())
        execution.monitor_gone = True
        execution.changed.notify()

    async def signal(self, owner: int, number: int, execution: Execution) -> int:
        return await self._signal(number, [execution.leaf])

    async def signal_cells(self, owner: int, number: int, cells: Collection[LiveCell]) -> None:
        await self._signal(number, [leaf for each in cells for leaf in each.leaves()])

    async def _signal(self, number: int, places: Iterable[Cgroup]) -> int:
        await trio.lowlevel.checkpoint()
        there = [each for place in places for each in self.within(place)]
        for each in there if number and self.obedient else ():
            self.ended(each, signal=number)
        return len(there)

    def killed(self, place: Cgroup) -> None:
        for execution in list(self.within(place)):
            self.ended(execution, signal=signal.SIGKILL)

    async def hurry(self, owner: int, place: Cgroup) -> None:
        self.hurries += 1
        self.killed(place)

    # their terminals

    def view(self, execution: Execution, viewer: Viewer, grace: float) -> None:
        if not cast(MemoryFacts, execution.facts).alive:
            raise BrokenPipeError("the run is over")
        self._taken(execution, viewer)

    def _taken(self, execution: Execution, viewer: Viewer) -> None:
        """The monitor has its end, and tells that."""
        key = execution.facts.key, viewer.visit.number
        self.viewers[key] = replace(viewer, end=viewer.end.dup())
        record = execution.record()
        self._say(execution, viewers={**record.viewers, viewer.visit.number: viewer.visit.uid})

    def left(self, execution: Execution, number: int, reason: str, **facts: Any) -> None:
        """The monitor tells that a viewer has left."""
        self.viewers.pop((execution.facts.key, number)).end.close()
        record = execution.record()
        there = {each: uid for each, uid in record.viewers.items() if each != number}
        self._say(execution, viewers=there, left={**record.left, number: reason}, **facts)

    def tell_viewers(self, execution: Execution, text: str) -> None:
        self.told.append((execution.facts.key, text))

    name_end = tell_viewers

    def hold(self, live_cell: LiveCell) -> bool:
        self._say(live_cell, held=True)
        return True

    def release(self, live_cell: LiveCell) -> bool:
        self.ended(live_cell)
        return True

    def open_keeper(self, live_cell: LiveCell) -> int:
        raise ProcessLookupError

    def remove(self, owner: int, place: Cgroup, *, wanted: bool = False) -> None:
        place.kill()

    async def removed(self) -> None:
        await trio.lowlevel.checkpoint()

    @property
    def counts_memory(self) -> bool:
        return True

    def check_limits(self, limits: dict[str, str]) -> None:
        """Whatever is limited can be."""

    def apply_limits(self, place: Cgroup, limits: dict[str, str]) -> None:
        """Nothing is used."""

    def spent(self, place: Cgroup) -> dict[str, int]:
        return {"cpu_usec": 0, "memory_peak": 0}

    @staticmethod
    def memory(place: Cgroup) -> int:
        return 0

    def all_places(self) -> Iterator[Cgroup]:
        yield from (each.leaf for each in self.crowds.values())

    def remove_strays(self, living: set[str], known: set[str]) -> None:
        for key in self._facts.keys() - known:
            del self._facts[key]


class MemoryStarter(Starter):
    """Starts programs on a machine in memory."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    async def launch(self, live_cell: LiveCell, terminal: tuple[int, int] | None = None) -> None:
        await trio.lowlevel.checkpoint()
        self._machine.born(live_cell)

    async def enter(
        self, live_cell: LiveCell, execution: Execution, command: Command
    ) -> None:
        await trio.lowlevel.checkpoint()
        self._machine.born(execution)


class EveryPath(Looker):
    def __init__(self) -> None:
        """Every path is there."""

    async def look(self, agent: Agent, paths: Iterable[str]) -> dict[str, Source]:
        return {path: Source(path, "1:1") for path in paths}


class _NoProcess(Census):
    def __init__(self) -> None:
        """There is none."""

    async def memory(
        self, owner: int, places: Any, kind: str = "usage", *, processes: bool = True
    ) -> list[Used]:
        return [Used(0, 0, 0) for _ in places]

    async def describe(self, owner: int, places: Iterable[Looked], asker: int) -> bytes:
        return b""


def supervisor_on(
    machine: Machine,
    world: World,
    nursery: trio.Nursery,
    kind: type[Supervisor] = Supervisor,
    elsewhere: Callable[[Host], Elsewhere] = lambda host: Elsewhere(),
) -> Supervisor:
    """The supervisor of the agents of a world, whose programs run on a machine in memory."""
    host = host_with(agents=world.agents, places=places_in(world), nursery=nursery, port=machine)
    streams = Streams(Gentle(world.agents.accounts.time))
    return kind(host, MemoryStarter(machine), _NoProcess(), streams, elsewhere(host))
