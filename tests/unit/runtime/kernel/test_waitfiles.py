"""FIFOs that block their readers until something has ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import trio

from runtime.cell.cell import native
from runtime.ids import WaitFileName
from runtime.kernel.waitfiles import WaitFiles
from tests.worlds.daemon import TIMEOUT
from tests.worlds.held import held
from tests.worlds.natives import Children

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="the FIFOs are 0444: only root opens them for writing"
)

T = WaitFileName("t")
OWNER = 4000
FAMILY = 7
#: of a family, as in release.c
SLEEPERS = 16


@pytest.fixture
def wait_files(tmp_path: Path) -> WaitFiles:
    for name in ("wait", "released"):
        (tmp_path / name).mkdir()
    return WaitFiles(tmp_path / "wait", tmp_path / "released", native("release"))


class Counting(Children):
    """Counts what is started."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    async def ask(self, *args: Any, **more: Any) -> bytes:
        self.count += 1
        return await super().ask(*args, **more)


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

    async def wait_blocked(self) -> None:
        """Until the kernel's open sleeps."""
        kernel = Path(f"/proc/self/task/{self._thread.native_id}/wchan")
        while "fifo_open" not in kernel.read_text():
            await trio.sleep(0.001)

    async def wait_returned(self) -> None:
        await trio.to_thread.run_sync(self._thread.join, TIMEOUT)
        assert self.read == b""


def test_a_wait_is_a_fifo_that_nobody_may_write(wait_files: WaitFiles) -> None:
    wait_files.create(T, OWNER, FAMILY)
    found = wait_files.path(T).stat()
    assert stat.S_ISFIFO(found.st_mode)
    assert found.st_mode & 0o777 == 0o444


def test_a_fifo_left_by_an_earlier_daemon_is_kept(wait_files: WaitFiles) -> None:
    wait_files.create(T, OWNER, FAMILY)
    before = wait_files.path(T).stat().st_ino
    wait_files.create(T, OWNER, FAMILY)
    assert wait_files.path(T).stat().st_ino == before


def test_an_end_that_is_not_so_any_more_blocks_again(wait_files: WaitFiles) -> None:
    """An earlier state was put back, and the machine was not started again."""
    wait_files.create(T, OWNER, FAMILY)
    wait_files.release(T)
    wait_files.create(T, OWNER, FAMILY)
    found = wait_files.path(T).stat()
    assert stat.S_ISFIFO(found.st_mode) and found.st_mode & 0o777 == 0o444


def test_an_end_that_is_still_so_is_kept(wait_files: WaitFiles) -> None:
    wait_files.create(T, OWNER, FAMILY)
    wait_files.release(T)
    before = wait_files.path(T).stat().st_ino
    wait_files.create(T, OWNER, FAMILY, over=True)
    assert wait_files.path(T).stat().st_ino == before


def test_what_ended_before_the_machine_was_started_is_released(wait_files: WaitFiles) -> None:
    wait_files.create(T, OWNER, FAMILY, over=True)
    wait_files.release(T)
    assert wait_files.path(T).read_bytes() == b""


def test_a_released_wait_is_an_empty_file(wait_files: WaitFiles) -> None:
    wait_files.create(T, OWNER, FAMILY)
    wait_files.release(T)
    assert stat.S_ISREG(wait_files.path(T).stat().st_mode)
    assert wait_files.path(T).read_bytes() == b""


def test_releasing_twice_is_releasing_once(wait_files: WaitFiles) -> None:
    wait_files.create(T, OWNER, FAMILY)
    wait_files.release(T)
    wait_files.release(T)
    assert wait_files.path(T).read_bytes() == b""


def test_releasing_what_is_not_there_does_nothing(wait_files: WaitFiles, tmp_path: Path) -> None:
    wait_files.release(T)
    assert list((tmp_path / "wait").iterdir()) == []


def test_a_removed_wait_is_gone(wait_files: WaitFiles, tmp_path: Path) -> None:
    wait_files.create(T, OWNER, FAMILY)
    wait_files.remove(T)
    wait_files.remove(T)
    assert list((tmp_path / "wait").iterdir()) == []


@needs_root
def test_every_reader_returns_at_the_end(wait_files: WaitFiles) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_files.run, Children())
            wait_files.create(T, OWNER, FAMILY)
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
            nursery.start_soon(wait_files.run, Children())
            wait_files.create(T, OWNER, FAMILY)
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
            nursery.start_soon(wait_files.run, Children())
            wait_files.create(T, OWNER, FAMILY)
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


def test_readers_of_a_release_that_a_dead_daemon_left_return(
    wait_files: WaitFiles, tmp_path: Path
) -> None:
    wait_files.create(T, OWNER, FAMILY)
    held = os.open(wait_files.path(T), os.O_PATH)
    wait_files.release(T)
    again = WaitFiles(tmp_path / "wait", tmp_path / "released", native("release"))

    async def main() -> None:
        reader = Reader(f"/proc/self/fd/{held}")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(again.run, Children())
            await reader.wait_returned()
            while again.released():
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()

    trio.run(main)
    os.close(held)


def test_how_long_one_is_kept_is_counted_by_a_clock_that_nobody_sets(
    wait_files: WaitFiles, tmp_path: Path
) -> None:
    """So the time is in the name: what the kernel notes of a file is one of the wall clock."""
    wait_files.create(T, OWNER, FAMILY)
    wait_files.release(T)
    released = tmp_path / "released" / str(OWNER)
    (name,) = os.listdir(released)
    family, since, token = name.split(".")
    assert 0 <= time.monotonic_ns() // 1_000_000 - int(since) < 60_000
    (released / name).rename(released / f"{family}.{int(since) - 60_000}.{token}")
    subprocess.run(wait_files.command(OWNER, 60), check=True, timeout=60)
    assert not wait_files.released()


def test_a_crowd_of_ends_starts_few_programs(wait_files: WaitFiles) -> None:
    started = Counting()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_files.run, started)
            tokens = [WaitFileName(f"t{number}") for number in range(300)]
            for token in tokens:
                wait_files.create(token, OWNER, FAMILY)
            readers = [Reader(wait_files.path(token)) for token in tokens]
            for token in tokens:
                wait_files.release(token)
                await trio.sleep(0.001)
            for reader in readers:
                await reader.wait_returned()
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert started.count < 10


def programs(wait_files: WaitFiles) -> list[str]:
    """The processes of an owner's program, as they run and sleep."""
    words = "\0".join(wait_files.command(OWNER)) + "\0"
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cmdline").read_bytes() == words.encode():
                found.append(process.name)
    return found


@needs_root
def test_who_holds_a_fifo_holds_up_only_its_readers(wait_files: WaitFiles) -> None:
    async def main(stack: contextlib.ExitStack) -> None:
        wait_files.create(T, OWNER, FAMILY)
        with held(wait_files.path(T), what="write"):
            waits = Reader(wait_files.path(T))
            await waits.wait_blocked()
            wait_files.release(T)
            for number in range(3):  # also if the program is killed, and started again
                program = stack.enter_context(subprocess.Popen(wait_files.command(OWNER)))
                await released_at_once(wait_files, f"{number}")
                while len(programs(wait_files)) < 3:  # one sleeps, one works, one waits for it
                    await trio.sleep(0.01)
                program.kill()
                while len(programs(wait_files)) > 1:
                    await trio.sleep(0.01)
            assert len(programs(wait_files)) == 1, "one sleeps there, and no more"
            assert waits.read is None
        subprocess.run(wait_files.command(OWNER), check=True, timeout=30)
        await waits.wait_returned()
        assert not wait_files.released()
        assert not programs(wait_files)

    with contextlib.ExitStack() as stack:
        trio.run(main, stack)


@needs_root
def test_a_family_that_holds_many_holds_up_no_other(wait_files: WaitFiles) -> None:
    async def main() -> None:
        tokens = [WaitFileName(f"held{number}") for number in range(70)]
        for token in tokens:
            wait_files.create(token, OWNER, FAMILY)
        with held(*map(wait_files.path, tokens), what="write"):
            for token in tokens:
                wait_files.release(token)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_files.run, Children())
                while len(programs(wait_files)) < SLEEPERS + 2:  # one works, one waits for it
                    await trio.sleep(0.01)
                await released_at_once(wait_files, "other", FAMILY + 1)
                # one that did not get the processor was taken for one that sleeps, and ends
                while len(programs(wait_files)) > SLEEPERS + 2:
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()
        subprocess.run(wait_files.command(OWNER, 0), check=True, timeout=30)
        assert not wait_files.released()

    trio.run(main)


async def released_at_once(wait_files: WaitFiles, name: str, family: int = FAMILY) -> None:
    tokens = [WaitFileName(f"{name}.{number}") for number in range(10)]
    for token in tokens:
        wait_files.create(token, OWNER, family)
    readers = [Reader(wait_files.path(token)) for token in tokens]
    for token in tokens:
        wait_files.release(token)
    for reader in readers:
        await reader.wait_returned()


def test_the_mode_never_changes(wait_files: WaitFiles) -> None:
    """Nobody may write to it, and release others before the end: also not at the end."""
    wait_files.create(T, OWNER, FAMILY)
    held = os.open(wait_files.path(T), os.O_PATH)
    wait_files.release(T)
    assert subprocess.run(wait_files.command(OWNER, 0), check=False).returncode == 0
    assert not wait_files.released()
    assert stat.S_IMODE(os.stat(f"/proc/self/fd/{held}").st_mode) == 0o444
    os.close(held)


@needs_root
def test_an_ordinary_user_lets_go_who_waits(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    script = """
import os, subprocess, sys, threading
os.setgid(4321), os.setuid(4321)
os.mkdir("released")
os.mkfifo("fifo", 0o444)
try:
    os.open("fifo", os.O_WRONLY | os.O_NONBLOCK)
except PermissionError:
    pass
reader = threading.Thread(target=lambda: open("fifo").read(), daemon=True)
reader.start()
os.link("fifo", "released/fifo")
while reader.is_alive():
    subprocess.run(["./release", "released", "0"], check=True)
    os.path.exists("released/fifo") or os.link("fifo", "released/fifo")
"""
    shutil.copy(native("release"), tmp_path)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, timeout=60,
                          stderr=subprocess.PIPE, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
