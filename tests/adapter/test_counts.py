"""The functions that a commit, a life and an end call, their transactions, and steps of tasks.

The daemon's time is spent in calls of functions, evenly: so their number says what something costs,
on a busy machine too. Programs run on a machine in memory. What the tests call themselves does not
count, nor what trio's loop and other packages do, nor threads.

Another number is written down here, and in the message of the commit that causes it, with why.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest
import trio
import trio.testing

from runtime.cell.port import LiveCell
from runtime.records.change import Change
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from tests.worlds.daemon import TIMEOUT
from tests.worlds.jumping import run_jumping
from tests.worlds.records import ROOT, World, inside
from tests.worlds.tree import CONTEXT, USER, Mounted, mounted_in
from tests.worlds.uncollected import uncollected

#: by which part each number may be another one
TOLERANCE: Final = 0.1
TIMES: Final = 3
CHILDREN: Final = 20
#: agents that ask, and events that are told after all others
ASKERS: Final = 10
EVENTS: Final = 1500
#: of tests, of packages, and made by packages at run time
_UNCOUNTED: Final = ("/tests/", "/site-packages/", "<attrs")


class Counting(trio.abc.Instrument):
    """Counts what the daemon does: calls of functions, transactions, steps of its tasks."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def _note_call(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_call"):
            self.found["calls"] += _counts(frame.f_code.co_filename)

    def _note_statement(self, text: str) -> None:
        self.found["transactions"] += text == "COMMIT"

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        code = getattr(task.coro, "cr_code", None)
        self.found["steps"] += code is not None and _counts(code.co_filename)

    @contextmanager
    def on(self, world: World) -> Iterator[None]:
        self.found.clear()
        world.store._db.set_trace_callback(self._note_statement)
        trio.lowlevel.add_instrument(self)
        sys.setprofile(self._note_call)
        try:
            yield
        finally:
            sys.setprofile(None)
            trio.lowlevel.remove_instrument(self)
            world.store._db.set_trace_callback(None)


def _counts(file: str) -> bool:
    return not any(part in file for part in _UNCOUNTED)


class Shell:
    """The requests of somebody who writes to the files of agents and reads them."""

    def __init__(self, mounted: Mounted, agents: int) -> None:
        self.mounted = mounted
        self.machine = mounted.machine
        self.ops: Any = mounted.ops
        self.agents = agents
        self.counting = Counting()

    async def open(self, name: str, file: str, flags: int) -> int:
        directory = await self.ops.lookup(self.agents, f"{name}.d".encode(), CONTEXT)
        found = await self.ops.lookup(directory.st_ino, file.encode(), CONTEXT)
        return int((await self.ops.open(found.st_ino, flags, CONTEXT)).fh)

    async def close(self, fh: int) -> None:
        await self.ops.flush(fh)
        await self.ops.release(fh)

    async def write(self, name: str, file: str, text: str) -> None:
        fh = await self.open(name, file, os.O_WRONLY | os.O_TRUNC)
        await self.ops.write(fh, 0, text.encode())
        await self.close(fh)

    async def read(self, name: str, file: str) -> bytes:
        fh = await self.open(name, file, os.O_RDONLY)
        data: bytes = await self.ops.read(fh, 0, 4096)
        await self.close(fh)
        return data

    async def make(self, name: str) -> Agent:
        await self.ops.mkdir(self.agents, f"{name}.d".encode(), 0o755, CONTEXT)
        await self.write(name, "exec", "true\n")
        return self.mounted.agent(name)

    async def remove(self, name: str) -> None:
        await self.ops.rmdir(self.agents, f"{name}.d".encode(), CONTEXT)

    def cell(self, agent: Agent) -> LiveCell:
        return self.mounted.supervisor._live_cells[agent.index]

    async def start(self, agent: Agent) -> None:
        """Returns when its program runs."""
        await self.write(agent.name, "ctl", "start\n")
        await until(lambda: self.cell(agent).facts.exist())
        self.machine.began(self.cell(agent))
        await until(lambda: agent.status is Status.BUSY)


async def until(is_so: Callable[[], bool]) -> None:
    with trio.fail_after(TIMEOUT):
        while not is_so():
            await trio.testing.wait_all_tasks_blocked()
            if not is_so():
                await trio.sleep(1)


async def commit(shell: Shell) -> None:
    await shell.make("x")
    await shell.write("x", "meta.json", '{"number": 0}\n')
    with shell.counting.on(shell.mounted.world):
        await shell.write("x", "meta.json", '{"number": 1}\n')
    await shell.remove("x")


async def live(shell: Shell) -> None:
    with shell.counting.on(shell.mounted.world):
        agent = await shell.make("x")
        await shell.start(agent)
        shell.machine.ended(shell.cell(agent), code=0)
        await until(lambda: agent.status is Status.DEAD)
        assert await shell.read("x", "reason") == b"exit:0\n"
        await shell.remove("x")


async def end_many(shell: Shell) -> None:
    parent = await shell.make("x")
    await shell.start(parent)
    births = shell.mounted.agents.births
    children = [births.create(inside(parent), f"k{number}") for number in range(CHILDREN)]
    for child in children:
        await shell.start(child)
    with shell.counting.on(shell.mounted.world):
        await shell.write("x", "ctl", "kill\n")
        await until(lambda: all(each.status is Status.DEAD for each in (parent, *children)))
    for child in reversed(children):
        await shell.remove(child.name)
    await shell.remove("x")


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other Pythons count otherwise")
@pytest.mark.parametrize(
    ("act", "calls", "transactions", "steps"),
    [(commit, 739, 1, 0), (live, 6290, 7, 12), (end_many, 41_227, 5, 77)],
)
def test_what_is_done_takes_as_many_calls_as_before(
    world: World,
    act: Callable[[Shell], Awaitable[None]],
    calls: int,
    transactions: int,
    steps: int,
) -> None:
    async def main() -> list[Counter[str]]:
        async with trio.open_nursery() as nursery:
            mounted = Mounted(world, nursery)
            agents = (await mounted.ops.lookup(1, b"agent", CONTEXT)).st_ino
            shell, found = Shell(mounted, agents), []
            await act(shell)  # what is kept from the first time on
            for _ in range(TIMES):
                await act(shell)
                found.append(shell.counting.found.copy())
            nursery.cancel_scope.cancel()
        return found

    with uncollected():
        found = run_jumping(main)
    wanted = {"calls": calls, "transactions": transactions, "steps": steps}
    middle = {name: statistics.median(each[name] for each in found) for name in wanted}
    assert middle == pytest.approx(wanted, rel=TOLERANCE)


@pytest.mark.parametrize("many", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_root_reads_asks_and_events_among_many_agents_as_among_few(
    tmp_path: Path, many: int
) -> None:
    """As many lines are shown; what others there are is not looked at."""
    found = {count: _reads(tmp_path / str(count), count) for count in (ASKERS, many)}
    for file, calls in found[many].items():
        assert calls <= 1.2 * found[ASKERS][file], file


def _reads(directory: Path, count: int) -> dict[str, int]:
    """By file, the calls of a read, with so many agents of which some ask."""
    directory.mkdir()
    with mounted_in(directory) as mounted:
        agents, asks, change = mounted.agents, mounted.agents.asks, Change()
        made = [agents.births.create(USER, f"a{number}") for number in range(count)]
        for agent in made[:ASKERS]:
            me = inside(mounted.world.live(agent))
            asks.begin(change, agent, asks.make(me, agent, "q"), "May I?")
        for _ in range(EVENTS):
            change.tell(made[0], "agent.report", text="x" * 200)
        agents.journal.commit(change)
        counting, found = Counting(), dict[str, int]()
        for file, lines in (("asks", ASKERS), ("events", 700)):
            with mounted.as_(ROOT):
                assert lines <= mounted.get(file).count("\n") <= EVENTS
                sys.setprofile(counting._note_call)
                try:
                    mounted.get(file)
                finally:
                    sys.setprofile(None)
            found[file] = counting.found.pop("calls")
        return found
