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
from runtime.kernel.waitfiles import WaitFiles

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="the FIFOs are 0444: only root opens them for writing"
)

T = WaitFileName("t")


@pytest.fixture
def wait_files(tmp_path: Path) -> WaitFiles:
    return WaitFiles(tmp_path)


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


def test_a_wait_is_a_fifo_that_nobody_may_write(wait_files: WaitFiles) -> None:
    wait_files.create(T)
    found = wait_files.path(T).stat()
    assert stat.S_ISFIFO(found.st_mode)
    assert found.st_mode & 0o777 == 0o444


def test_a_fifo_left_by_an_earlier_daemon_is_kept(wait_files: WaitFiles) -> None:
    wait_files.create(T)
    before = wait_files.path(T).stat().st_ino
    wait_files.create(T)
    assert wait_files.path(T).stat().st_ino == before


def test_a_released_wait_is_an_empty_file(wait_files: WaitFiles) -> None:
    wait_files.create(T)
    wait_files.release(T)
    assert stat.S_ISREG(wait_files.path(T).stat().st_mode)
    assert wait_files.path(T).read_bytes() == b""


def test_releasing_twice_is_releasing_once(wait_files: WaitFiles) -> None:
    wait_files.create(T)
    wait_files.release(T)
    wait_files.release(T)
    assert wait_files.path(T).read_bytes() == b""


def test_releasing_what_is_not_there_does_nothing(wait_files: WaitFiles, tmp_path: Path) -> None:
    wait_files.release(T)
    assert list(tmp_path.iterdir()) == []


def test_a_removed_wait_is_gone(wait_files: WaitFiles, tmp_path: Path) -> None:
    wait_files.create(T)
    wait_files.remove(T)
    wait_files.remove(T)
    assert list(tmp_path.iterdir()) == []


@needs_root
def test_every_reader_returns_at_the_end(wait_files: WaitFiles) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_files.run)
            wait_files.create(T)
            readers = [Reader(wait_files.path(T)) for _ in range(20)]
            wait_files.release(T)
            for reader in readers:
                await reader.wait_returned()
            nursery.cancel_scope.cancel()

    trio.run(main)


@needs_root
def test_a_reader_between_look_up_and_open_returns_too(wait_files: WaitFiles) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_files.run)
            wait_files.create(T)
            looked_up = os.open(wait_files.path(T), os.O_PATH)
            try:
                wait_files.release(T)
                await Reader(f"/proc/self/fd/{looked_up}").wait_returned()
            finally:
                os.close(looked_up)
            nursery.cancel_scope.cancel()

    trio.run(main)


@needs_root
def test_readers_of_a_removed_wait_return(wait_files: WaitFiles) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_files.run)
            wait_files.create(T)
            held = os.open(wait_files.path(T), os.O_PATH)
            try:
                readers = [Reader(f"/proc/self/fd/{held}") for _ in range(3)]
                wait_files.remove(T)
                for reader in readers:
                    await reader.wait_returned()
            finally:
                os.close(held)
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_nothing_is_held_open_in_the_end(wait_files: WaitFiles) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_files.run)
            await wait_all_tasks_blocked()
            before = descriptors()
            for token in (WaitFileName("a"), WaitFileName("b")):
                wait_files.create(token)
                wait_files.release(token)
            assert descriptors() == before + 2
            await trio.sleep(10)  # of a clock that does not wait
            assert descriptors() == before
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
