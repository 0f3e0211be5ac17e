"""Where paths lead: when a helper may be asked at all."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from runtime.cell.port import LiveCells
from runtime.cell.sources import Looker
from runtime.records.model import Agent
from runtime.texts.mounts import Source
from tests.worlds.hosts import host_with
from tests.worlds.records import World, inside, operator


class Cell:
    """Of a program that runs, and that its monitor has not told of yet."""

    def __init__(self) -> None:
        self.told = trio.Event()
        self.node = SimpleNamespace(child=lambda _: None)


class Port:
    """Of a machine on which it is."""

    async def wait_settled(self, cell: Cell) -> None:
        await cell.told.wait()

    def open_keeper(self, cell: Cell) -> int:
        if not cell.told.is_set():
            raise ProcessLookupError
        return os.open("/dev/null", os.O_RDONLY)


@pytest.fixture
def child(world: World) -> Agent:
    parent = world.live(world.agents.births.create(operator(1000), "x"))
    return world.agents.births.create(inside(parent), "c")


def looker(world: World, child: Agent, cell: Cell, monkeypatch: pytest.MonkeyPatch) -> Looker:
    async def ask(self: Looker, asker: object, paths: list[str], *_: object) -> dict[str, Source]:
        return {path: Source(path, "1:2") for path in paths}

    monkeypatch.setattr(Looker, "_ask", ask)
    parent = world.agents.registry.parent_of(child)
    assert parent is not None
    anything = cast(Any, SimpleNamespace(own=Path("/")))
    cells = LiveCells({parent.index: cast(Any, cell)})
    port = cast(Any, Port())
    host = host_with(agents=world.agents, places=anything, live_cells=cells, port=port)
    return Looker(host, cast(Any, None))


def test_a_program_may_write_a_path_before_its_monitor_has_told_of_its_cell(
    world: World, child: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell()
    looking = looker(world, child, cell, monkeypatch)

    async def main() -> dict[str, Source]:
        found: dict[str, Source] = {}

        async def look() -> None:
            found.update(await looking.look(child, ["/data"]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            await trio.testing.wait_all_tasks_blocked()
            assert not found
            cell.told.set()
        return found

    assert trio.run(main) == {"/data": Source("/data", "1:2")}


def test_it_waits_no_longer_than_a_look_may_take(
    world: World, child: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking = looker(world, child, Cell(), monkeypatch)
    clock = trio.testing.MockClock(autojump_threshold=0)
    assert trio.run(looking.look, child, ["/data"], clock=clock) == {}
    assert clock.current_time() == pytest.approx(1.0)
