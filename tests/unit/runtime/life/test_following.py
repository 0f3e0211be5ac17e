"""What is the same for all programs that are followed."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from runtime.cell.port import Execution, LiveCell
from runtime.cell.record import Facts, RunRecord
from runtime.errors import QuotaError
from runtime.ids import AgentIndex, Incarnation
from runtime.kernel.cgroups import Cgroup
from runtime.kernel.inotify import Wakeup, Watcher
from runtime.life import following
from runtime.life.following import Follower, Following
from runtime.records.model import Agent
from tests.worlds.daemon import TIMEOUT
from tests.worlds.hosts import host_with


class Followed(Following):
    """Nothing that ends once the kernel has refused that as often as ``refusals`` says."""

    def __init__(self, path: Path, watcher: Watcher, *, refusals: int = 0) -> None:
        self.execution = Execution(Cgroup(path / "leaf"), Facts(path / "record"), Wakeup())
        nobody = cast(Any, None)
        follower = Follower(host_with(watcher=watcher), nobody, nobody, nobody)
        agent = Agent(
            index=AgentIndex(1), incarnation=Incarnation("i"), name="x", owner=1, uid=1, gid=1
        )
        live_cell = LiveCell(agent, Cgroup(path), lambda key: Facts(path / key))
        super().__init__(follower, live_cell, self.execution)
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

    def left(self) -> float:
        return 0.0

    def be_late(self) -> None:
        self.unwanted = True

    async def terminate(self) -> None:
        self.tries += 1
        if self.tries <= self.refusals:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.gone = True


def follow(path: Path, kind: type[Followed] = Followed, **how: Any) -> Followed:
    """One that is followed to its end."""

    async def main() -> Followed:
        watcher = Watcher()
        try:
            found = kind(path, watcher, refusals=how.pop("refusals", 0))
            for name, value in how.items():
                setattr(found, name, value)
            with trio.fail_after(TIMEOUT):
                await found.follow()
            return found
        finally:
            watcher.close()

    return trio.run(main)


def test_an_end_that_the_kernel_refuses_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_RETRY_SECONDS", 0.0)
    assert follow(tmp_path, refusals=3).tries == 4


def test_a_program_that_takes_too_long_is_ended_once(tmp_path: Path) -> None:
    assert follow(tmp_path, unwanted=False).tries == 1


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "too many"), QuotaError("no\nroom")])
def test_a_program_that_cannot_start_has_ended(tmp_path: Path, error: Exception) -> None:
    found = follow(tmp_path, cannot_start=error, gone=True, unwanted=False)
    assert found.error is error
    assert found.failure == str(error).replace("\n", "\\n")
    assert found.execution.launched and not found.execution.facts.exist()
    assert (found.looks, found.tries) == (1, 0)


def test_a_cgroup_that_is_empty_once_it_is_watched_is_not_waited_for(tmp_path: Path) -> None:
    """Its last process may go between the look and the watch, after which nothing changes."""

    class Late(Followed):
        def is_gone(self, record: RunRecord) -> bool:
            return self.looks > 1

        def left(self) -> float:
            return math.inf

        async def terminate(self) -> None:
            raise AssertionError("there is nothing to end")

    assert follow(tmp_path, Late).looks == 2
