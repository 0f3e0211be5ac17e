"""What the port has done to programs."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path

import trio

from runtime.cell.port import Execution
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
