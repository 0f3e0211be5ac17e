"""FIFOs that block their readers until something has ended."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from runtime.ids import WaitFileName
from runtime.kernel.waits import Waits

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="the FIFOs are 0444: only root opens them for writing"
)

T = WaitFileName("t")


@pytest.fixture
def waits(tmp_path: Path) -> Waits:
    return Waits(tmp_path)


class Reader:
    """A thread that reads a file to its end."""

    def __init__(self, path: str | Path) -> None:
        self.read: bytes | None = None
        self._path = path
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with open(self._path, "rb") as file:
            self.read = file.read()

    async def wait_returned(self) -> None:
        await trio.to_thread.run_sync(self._thread.join, 5)
        assert self.read == b""


def test_a_wait_is_a_fifo_that_nobody_may_write(waits: Waits) -> None:
    waits.create(T)
    found = waits.path(T).stat()
    assert stat.S_ISFIFO(found.st_mode)
    assert found.st_mode & 0o777 == 0o444


def test_a_fifo_left_by_an_earlier_daemon_is_kept(waits: Waits) -> None:
    waits.create(T)
    before = waits.path(T).stat().st_ino
    waits.create(T)
    assert waits.path(T).stat().st_ino == before


def test_a_released_wait_is_an_empty_file(waits: Waits) -> None:
    waits.create(T)
    waits.release(T)
    assert stat.S_ISREG(waits.path(T).stat().st_mode)
    assert waits.path(T).read_bytes() == b""


def test_releasing_twice_is_releasing_once(waits: Waits) -> None:
    waits.create(T)
    waits.release(T)
    waits.release(T)
    assert waits.path(T).read_bytes() == b""


def test_releasing_what_is_not_there_does_nothing(waits: Waits, tmp_path: Path) -> None:
    waits.release(T)
    assert list(tmp_path.iterdir()) == []


def test_a_removed_wait_is_gone(waits: Waits, tmp_path: Path) -> None:
    waits.create(T)
    waits.remove(T)
    waits.remove(T)
    assert list(tmp_path.iterdir()) == []


@needs_root
def test_every_reader_returns_at_the_end(waits: Waits) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waits.run)
            waits.create(T)
            readers = [Reader(waits.path(T)) for _ in range(20)]
            waits.release(T)
            for reader in readers:
                await reader.wait_returned()
            nursery.cancel_scope.cancel()

    trio.run(main)


@needs_root
def test_a_reader_between_look_up_and_open_returns_too(waits: Waits) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waits.run)
            waits.create(T)
            looked_up = os.open(waits.path(T), os.O_PATH)
            try:
                waits.release(T)
                await Reader(f"/proc/self/fd/{looked_up}").wait_returned()
            finally:
                os.close(looked_up)
            nursery.cancel_scope.cancel()

    trio.run(main)


@needs_root
def test_readers_of_a_removed_wait_return(waits: Waits) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waits.run)
            waits.create(T)
            held = os.open(waits.path(T), os.O_PATH)
            try:
                readers = [Reader(f"/proc/self/fd/{held}") for _ in range(3)]
                waits.remove(T)
                for reader in readers:
                    await reader.wait_returned()
            finally:
                os.close(held)
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_nothing_is_held_open_in_the_end(waits: Waits) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waits.run)
            await wait_all_tasks_blocked()
            before = descriptors()
            for token in (WaitFileName("a"), WaitFileName("b")):
                waits.create(token)
                waits.release(token)
            assert descriptors() == before + 2
            await trio.sleep(10)  # of a clock that does not wait
            assert descriptors() == before
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
