"""Measuring and removing trees that somebody holds and changes meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import trio

from runtime.authority.disk import ENTRY_SIZE
from runtime.cell.cell import native
from runtime.kernel import orders
from runtime.kernel.walker import Measured, Removed
from tests.worlds.natives import walker_of

SIZE = 1 << 20
OWNER = 1000
WHY_NOT = "" if native("walk").exists() else "walk is not compiled: make programs"
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def write(path: Path, size: int = SIZE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)


def measure(top: Path, *names: str) -> list[Measured]:
    return trio.run(walker_of(top).measure, OWNER, names)


def remove(top: Path, name: str) -> Removed:
    while (done := trio.run(walker_of(top).remove, OWNER, [name])) == [Removed.MORE]:
        pass
    [how] = done
    return how


def deep_below(path: Path, depth: int) -> int:
    """A directory so far below, and longer than a path may be."""
    fd = os.open(path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d" * 100, dir_fd=fd)
        below = os.open("d" * 100, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    return fd


def test_a_tree_is_measured_in_what_it_takes(tmp_path: Path) -> None:
    write(tmp_path / "a" / "file")
    write(tmp_path / "a" / "b" / "file")
    os.truncate(tmp_path / "a" / "file", 100 * SIZE)
    found, none = measure(tmp_path, "a", "none")
    assert 2 * SIZE <= found.bytes < 3 * SIZE, "holes take nothing"
    assert found.entries == 3
    assert not found.partial
    assert none == Measured(0, 0)


def test_two_links_to_a_file_take_it_once(tmp_path: Path) -> None:
    write(tmp_path / "a" / "file")
    [before] = measure(tmp_path, "a")
    os.link(tmp_path / "a" / "file", tmp_path / "a" / "link")
    [after] = measure(tmp_path, "a")
    assert abs(after.bytes - before.bytes) <= ENTRY_SIZE


def test_what_is_many_uids_and_closed_is_measured_and_removed(tmp_path: Path) -> None:
    """With the owner's uid, which has no rights there, where there are several uids at all."""
    write(tmp_path / "a" / "closed" / "file")
    if os.getuid() == 0:
        os.chown(tmp_path / "a" / "closed" / "file", 5, 5)
        os.chown(tmp_path / "a" / "closed", 5, 5)
    os.chmod(tmp_path / "a" / "closed", 0)
    tmp_path.chmod(0o700)
    [found] = measure(tmp_path, "a")
    assert found.bytes >= SIZE
    assert not found.partial
    assert (tmp_path / "a" / "closed").stat().st_mode & 0o777 == 0, "it stays as it is"
    assert remove(tmp_path, "a") is Removed.DONE
    assert not (tmp_path / "a").exists()


def test_nothing_is_too_deep(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    fd = deep_below(tmp_path / "a", 10_000)
    deep = os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=fd)
    os.write(deep, b"x" * SIZE)
    os.close(deep)
    os.close(fd)
    [found] = measure(tmp_path, "a")
    assert found.bytes >= SIZE + 10_000 * ENTRY_SIZE
    assert (found.entries, found.partial) == (10_001, False)
    assert remove(tmp_path, "a") is Removed.DONE
    assert not (tmp_path / "a").exists()


@pytest.mark.long
def test_large_directories_are_removed_whole(tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / "a" / "directories" / str(number) / "below").mkdir(parents=True)
        write(tmp_path / "a" / "files" / str(number), 1)
    [found] = measure(tmp_path, "a")
    assert (found.entries, found.partial) == (2 + 3000 * 3, False)
    assert remove(tmp_path, "a") is Removed.DONE
    assert not (tmp_path / "a").exists()


def test_links_and_other_mounts_lead_nowhere(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "kept")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "b").symlink_to("elsewhere")
    [found, through] = measure(tmp_path, "a", "b")
    assert found.bytes < SIZE
    assert through.bytes == 0
    assert remove(tmp_path, "a") is Removed.DONE
    assert remove(tmp_path, "b") is Removed.DONE
    assert sorted(os.listdir(tmp_path)) == ["elsewhere"]
    assert (tmp_path / "elsewhere" / "kept").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="mounts, as root")
def test_a_mount_is_not_entered(tmp_path: Path) -> None:
    script = dedent(
        """
        import subprocess, sys
        from pathlib import Path
        import trio
        from tests.worlds.natives import walker_of
        top = Path(sys.argv[1])
        (top / "a" / "mounted").mkdir(parents=True)
        (top / "other").mkdir()
        (top / "other" / "kept").write_bytes(b"x" * (1 << 20))
        subprocess.run(["mount", "--bind", top / "other", top / "a" / "mounted"], check=True)
        [found] = trio.run(walker_of(top).measure, 1000, ["a"])
        print(found.bytes < 1 << 20, trio.run(walker_of(top).remove, 1000, ["a"])[0])
        """
    )
    command = ["unshare", "--mount", sys.executable, "-c", script, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=os.getcwd())
    assert said.stdout == "True stuck\n"
    assert (tmp_path / "other" / "kept").exists()


def test_what_takes_too_long_is_told_as_far_as_it_came(tmp_path: Path) -> None:
    for number in range(200):
        write(tmp_path / "a" / str(number), 1)
    (tmp_path / "b").mkdir()
    names = orders.memory_file("names", orders.message(["a", "b"]))
    answer = os.memfd_create("answer")
    words = [native("walk"), "measure", str(OWNER), "0", tmp_path, str(names), str(answer)]
    subprocess.run([str(word) for word in words], pass_fds=[names, answer], check=True)
    size, rest = os.pread(answer, 1000, 0).decode().split()
    assert int(size) > 0
    assert rest.endswith("+")
    answer = os.memfd_create("answer")
    os.lseek(names, 0, os.SEEK_SET)
    words[1], words[-1] = "remove", str(answer)
    subprocess.run([str(word) for word in words], pass_fds=[names, answer], check=True)
    assert os.pread(answer, 1000, 0) == b"more\n"


def test_what_is_moved_meanwhile_is_not_left(tmp_path: Path) -> None:
    """A directory of the middle goes elsewhere again and again: the walk ends, and has removed
    nothing outside of its tree."""
    (tmp_path / "a").mkdir()
    write(tmp_path / "kept" / "file")
    os.close(deep_below(tmp_path / "a", 200))
    top = tmp_path / "a" / ("d" * 100)
    below, away = top / ("d" * 100), tmp_path / "kept" / "x"
    stop = trio.Event()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(move)
            for _ in range(20):
                await walker_of(tmp_path).measure(OWNER, ["a"])
            while await walker_of(tmp_path).remove(OWNER, ["a"]) != [Removed.DONE]:
                pass
            stop.set()

    async def move() -> None:
        while not stop.is_set():
            for source, target in ((below, away), (away, below)):
                try:
                    os.rename(source, target)
                except OSError:
                    continue
            await trio.sleep(0)

    trio.run(main)
    assert (tmp_path / "kept" / "file").exists()


def test_damaged_orders_are_refused() -> None:
    said = subprocess.run([native("walk"), "measure", "x"], capture_output=True, check=False)
    assert said.returncode == 2
    assert said.stderr.startswith(b"usage: walk measure UID")
