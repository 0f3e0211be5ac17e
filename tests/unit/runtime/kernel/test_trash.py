"""Trees are taken away at once and removed beside the loop."""

from __future__ import annotations

import errno
import os
import secrets
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

from runtime.kernel import linux
from runtime.kernel.trash import Trash
from tests.worlds.held import held
from tests.worlds.natives import walker_of

OWNER = 1000


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "trash").mkdir()
    return tmp_path


def marks(state: Path) -> list[Path]:
    return list((state / "trash").glob("*/*"))


def run_until_empty(trash: Trash, state: Path) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trash.run, walker_of(state))
            await wait_for(lambda: not marks(state))
            nursery.cancel_scope.cancel()

    trio.run(main)


async def wait_for(found: Callable[[], bool]) -> None:
    with trio.fail_after(30):
        while not found():
            await trio.sleep(0.01)


def make_tree(path: Path) -> None:
    deep = path.joinpath(*["d"] * 50)
    deep.mkdir(parents=True)
    (deep / "file").write_text("x")
    (path / "link").symlink_to("/etc")
    (path / "closed").mkdir(mode=0)


def test_the_name_of_what_is_discarded_is_free_at_once(state: Path) -> None:
    make_tree(state / "tree")
    Trash(state).discard(state / "tree", OWNER)
    (mark,) = marks(state)
    assert mark.parent.name == str(OWNER)
    assert sorted(os.listdir(state)) == sorted([os.readlink(mark), "trash"])


def test_what_is_not_there_is_discarded_already(state: Path) -> None:
    Trash(state).discard(state / "none", OWNER)
    assert not marks(state)


def test_what_a_program_removes_meanwhile_is_discarded_already(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of an earlier daemon goes on after that, and the next one looks at what is left."""
    trash = Trash(state)
    with monkeypatch.context() as seen:
        seen.setattr(os.path, "lexists", lambda path: True)
        trash.discard(state / "gone", OWNER)
    run_until_empty(trash, state)


def test_what_is_discarded_on_a_full_disk_is_removed_all_the_same(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "symlink_to", full)
    trash = Trash(state)
    (state / "file").touch()
    trash.discard(state / "file", OWNER)
    assert len(os.listdir(state)) == 2

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trash.run, walker_of(state))
            await wait_for(lambda: os.listdir(state) == ["trash"])
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_trees_and_files_are_removed_and_links_are_not_followed(state: Path) -> None:
    trash = Trash(state)
    kept = state / "kept"
    kept.write_text("x")
    make_tree(state / "tree")
    (state / "tree" / "out").symlink_to(kept)
    (state / "file").touch()
    (state / "link").symlink_to("kept")
    for name in ("tree", "file", "link"):
        trash.discard(state / name, OWNER)
    run_until_empty(trash, state)
    assert sorted(os.listdir(state)) == ["kept", "trash"]


def test_what_an_earlier_daemon_left_is_removed(state: Path) -> None:
    make_tree(state / "tree")
    Trash(state).discard(state / "tree", OWNER)
    make_tree(state / "trash" / secrets.token_hex(8))  # of version 0.2
    run_until_empty(Trash(state), state)
    assert os.listdir(state) == ["trash"] and os.listdir(state / "trash") == [str(OWNER)]


def sleeping() -> int:
    """Children that wait for a lock."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            found += Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "D"
    return found


@pytest.fixture
def own(state: Path) -> Iterator[Path]:
    """A filesystem with nobody else's renames."""
    linux.mount("none", state, "tmpfs", 0)
    try:
        (state / "trash").mkdir()
        yield state
    finally:
        linux.unmount(state, linux.MNT_DETACH)


def test_who_holds_what_is_removed_and_what_is_moved_holds_up_nobody(own: Path) -> None:
    """Who moves what somebody holds has a lock that any rename between two directories takes."""
    name, moved = own / "homes" / "name", own / "tree" / "a" / "moved"
    (name / "home").mkdir(parents=True)
    moved.mkdir(parents=True)
    (own / "tree" / "b").mkdir()
    trash = Trash(own)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trash.run, walker_of(own))
            trash.discard(name, OWNER)
            await wait_for(lambda: sleeping() == 1)
            stack.enter_context(subprocess.Popen(["mv", moved, own / "tree" / "b"]))
            await wait_for(lambda: sleeping() == 2)
            name.mkdir()
            trash.discard(name, OWNER)
            nursery.cancel_scope.cancel()

    with ExitStack() as stack, held(name / "home"), held(moved):
        trio.run(main)
