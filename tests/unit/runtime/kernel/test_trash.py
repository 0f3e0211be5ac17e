"""Trees are taken away at once and removed beside the loop."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

from runtime.cell.cell import native
from runtime.kernel import linux
from runtime.kernel.trash import Trash
from tests.worlds.daemon import wait_until
from tests.worlds.held import held
from tests.worlds.natives import walker_of

OWNER = 1000


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "trash"
    made.mkdir()
    return made


async def wait_empty(directory: Path) -> None:
    """Until nothing is left in it (inotify(7): each removal is an event)."""
    removed = 0x200
    fd = linux.inotify_init()
    try:
        for owner in directory.iterdir():
            linux.inotify_add_watch(fd, owner, removed)
        with trio.fail_after(10):
            while any(map(os.listdir, directory.iterdir())):
                await trio.lowlevel.wait_readable(fd)
                os.read(fd, 65536)
    finally:
        os.close(fd)


def run_until_empty(trash: Trash, directory: Path) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trash.run, walker_of(directory.parent))
            await wait_empty(directory)
            nursery.cancel_scope.cancel()

    trio.run(main)


def make_tree(path: Path) -> None:
    deep = path.joinpath(*["d"] * 50)
    deep.mkdir(parents=True)
    (deep / "file").write_text("x")
    (path / "link").symlink_to("/etc")
    (path / "closed").mkdir(mode=0)


def test_what_is_discarded_is_gone_at_once(tmp_path: Path, directory: Path) -> None:
    make_tree(tmp_path / "tree")
    Trash(directory).discard(tmp_path / "tree", OWNER)
    assert not (tmp_path / "tree").exists()
    assert len(os.listdir(directory / str(OWNER))) == 1


def test_what_is_not_there_is_discarded_already(tmp_path: Path, directory: Path) -> None:
    Trash(directory).discard(tmp_path / "none", OWNER)
    assert os.listdir(directory / str(OWNER)) == []


def test_trees_are_removed_and_links_are_not_followed(tmp_path: Path, directory: Path) -> None:
    trash = Trash(directory)
    kept = tmp_path / "kept"
    kept.write_text("x")
    make_tree(tmp_path / "tree")
    (tmp_path / "tree" / "out").symlink_to(kept)
    trash.discard(tmp_path / "tree", OWNER)
    (tmp_path / "file").touch()
    trash.discard(tmp_path / "file", OWNER)
    run_until_empty(trash, directory)
    assert kept.exists()


def test_what_an_earlier_daemon_left_is_removed(directory: Path) -> None:
    make_tree(directory / "left")
    run_until_empty(Trash(directory), directory)


def wait_sleeping(pid: int) -> None:
    stat = Path(f"/proc/{pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "D", "it waits")


def test_who_holds_what_is_removed_does_not_hold_up_who_discards(
    tmp_path: Path, directory: Path
) -> None:
    """Nor if two remove it, one of which an earlier daemon began."""
    own = directory / str(OWNER)
    (own / "discarded" / "home").mkdir(parents=True)
    words = [str(native("walk")), "remove", str(OWNER), "20", str(tmp_path), f"trash/{OWNER}"]
    with ExitStack() as stack, held(own / "discarded" / "home"):
        for _ in range(2):
            wait_sleeping(stack.enter_context(subprocess.Popen(words)).pid)
        assert stack.enter_context(subprocess.Popen(["mkdir", own / "more"])).wait(10) == 0
    assert os.listdir(own) in ([], ["more"])
