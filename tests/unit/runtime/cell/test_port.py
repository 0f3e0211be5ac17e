"""What the port has done to programs."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from runtime.cell.port import Execution, Port
from runtime.cell.record import Facts
from runtime.kernel.cgroups import Cgroup
from runtime.kernel.inotify import Wakeup
from tests.worlds.hosts import host_with


class Noting:
    """Stands for the helper that signals: what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, list[str]]] = []

    async def signal(
        self, owner: int, number: int, cgroups: Iterable[Cgroup], spared: Iterable[int]
    ) -> int:
        await trio.lowlevel.checkpoint()
        self.told.append((number, [str(each) for each in cgroups]))
        return len(self.told)


def execution(directory: Path, name: str, record: str) -> Execution:
    path = directory / "record" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(record)
    return Execution(Cgroup(f"/{name}"), Facts(path), Wakeup())


def test_a_program_with_a_terminal_is_hung_up_after_sigterm(tmp_path: Path) -> None:
    """One signal of several: readline(3) remembers the last one."""
    noting = Noting()
    port = host_with(sweeper=noting).port

    async def told(number: int, record: str) -> list[tuple[int, list[str]]]:
        noting.told.clear()
        assert await port.signal(7, number, execution(tmp_path, "run", record)) == 1
        return noting.told

    async def main() -> None:
        term, hup = (signal.SIGTERM, ["/run"]), (signal.SIGHUP, ["/run"])
        assert await told(signal.SIGTERM, "monitor 1\nterminal\n") == [term, hup]
        assert await told(signal.SIGTERM, "monitor 1\n") == [term]
        kill = (signal.SIGKILL, ["/run"])
        assert await told(signal.SIGKILL, "monitor 1\nterminal\n") == [kill]

    trio.run(main)


class Sweeps:
    """A sweeper that answers when it is let go; ``told`` has the places of each order."""

    def __init__(self) -> None:
        self.told: list[list[str]] = []
        self.go = trio.Event()
        self.error: Exception | None = None

    async def signal(self, owner: int, number: int, places: Any, spared: Any) -> int:
        self.told.append(list(places))
        await self.go.wait()
        if self.error is not None and "b" in self.told[-1]:
            raise self.error
        return 0


def _cell(name: str, *, over: bool = False) -> Any:
    return SimpleNamespace(over=over, leaves=lambda: [name], programs=lambda: [])


@pytest.mark.parametrize("fails", [False, True])
def test_cells_that_wait_are_signalled_together(fails: bool) -> None:
    sweeps, failed = Sweeps(), []
    port = Port(*cast(Any, (None, None, None, sweeps, None)))
    sweeps.error = OSError("no") if fails else None

    async def ask(*names: str, owner: int = 7) -> None:
        try:
            await port.signal_cells(owner, 15, [_cell(name, over=name == "x") for name in names])
        except OSError:
            failed.append(names)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for names in (("a",), ("b", "x"), ("c",), ("d", "e")):
                nursery.start_soon(partial(ask, *names))
                await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(partial(ask, "other", owner=8))
            await trio.testing.wait_all_tasks_blocked()
            assert sweeps.told == [["a"], ["other"]]
            sweeps.go.set()

    trio.run(main)
    if not fails:
        assert sweeps.told[2:] == [["b", "c", "d", "e"]] and not failed
    else:  # each finds out by itself
        assert sweeps.told[2:] == [["b", "c", "d", "e"], ["c", "d", "e"]]
        assert failed == [("b", "x")]
