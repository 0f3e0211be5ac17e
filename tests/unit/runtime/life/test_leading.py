"""What is the same for all programs that are led."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from runtime.cell.execution import Execution, LiveCell
from runtime.cell.record import RunRecord
from runtime.errors import QuotaError
from runtime.ids import AgentIndex, Incarnation
from runtime.kernel.cgroups import Cgroup
from runtime.kernel.inotify import Watcher
from runtime.life import leading
from runtime.life.leading import Lead, Leader
from runtime.records.model import Agent
from tests.worlds.daemon import TIMEOUT
from tests.worlds.hosts import host_with


class Led(Lead):
    """Nothing that ends once the kernel has refused that as often as ``refusals`` says."""

    def __init__(self, path: Path, watcher: Watcher, *, refusals: int = 0) -> None:
        self.execution = Execution(Cgroup(path / "leaf"), path / "record")
        leader = Leader(host_with(watcher=watcher), cast(Any, None), cast(Any, None))
        agent = Agent(
            index=AgentIndex(1), incarnation=Incarnation("i"), name="x", owner=1, uid=1, gid=1
        )
        live_cell = LiveCell(Cgroup(path), path / "cell", holds_cell=True)
        super().__init__(leader, agent, live_cell, self.execution, self.execution.wakeup)
        self.refusals = refusals
        self.unwanted, self.gone, self.tries, self.looks = True, False, 0, 0
        self.cannot_start: Exception | None = None

    async def start(self) -> None:
        if self.cannot_start is not None:
            raise self.cannot_start

    def look(self, record: RunRecord) -> None:
        self.looks += 1

    def hand_over(self, *, ended: bool) -> bool:
        return False

    def has_ended(self, record: RunRecord) -> bool:
        return self.error is not None

    def is_unwanted(self, record: RunRecord) -> bool:
        return self.unwanted

    def is_gone(self, record: RunRecord) -> bool:
        return self.gone

    def deadline(self) -> float:
        return trio.current_time()

    def be_late(self) -> None:
        self.unwanted = True

    async def terminate(self) -> None:
        self.tries += 1
        if self.tries <= self.refusals:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.gone = True
        self.execution.wakeup.notify()


def lead(path: Path, kind: type[Led] = Led, **how: Any) -> Led:
    """One that is led to its end."""

    async def main() -> Led:
        watcher = Watcher()
        try:
            led = kind(path, watcher, refusals=how.pop("refusals", 0))
            for name, value in how.items():
                setattr(led, name, value)
            with trio.fail_after(TIMEOUT):
                await led.lead()
            return led
        finally:
            watcher.close()

    return trio.run(main)


def test_an_end_that_the_kernel_refuses_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading, "_RETRY_SECONDS", 0.0)
    assert lead(tmp_path, refusals=3).tries == 4


def test_a_program_that_takes_too_long_is_ended_once(tmp_path: Path) -> None:
    assert lead(tmp_path, unwanted=False).tries == 1


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "too many"), QuotaError("no\nroom")])
def test_a_program_that_cannot_start_has_ended(tmp_path: Path, error: Exception) -> None:
    led = lead(tmp_path, cannot_start=error, gone=True, unwanted=False)
    assert led.error is error
    assert led.failure == str(error).replace("\n", "\\n")
    assert led.execution.launched.is_set() and not led.execution.monitored
    assert (led.looks, led.tries) == (1, 0)


def test_a_cgroup_that_is_empty_once_it_is_watched_is_not_waited_for(tmp_path: Path) -> None:
    """Its last process may go between the look and the watch, after which nothing changes."""

    class Late(Led):
        def is_gone(self, record: RunRecord) -> bool:
            return self.looks > 1

        def deadline(self) -> float:
            return math.inf

        async def terminate(self) -> None:
            raise AssertionError("there is nothing to end")

    assert lead(tmp_path, Late).looks == 2
