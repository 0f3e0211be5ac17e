"""What waits for the disk, or takes long, is done by a thread and not by the event loop."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyfuse3
import pytest
import trio
import trio.testing

from runtime.authority.accounts import Resource
from runtime.records.lifecycle import Cue
from tests.worlds.records import ROOT, inside
from tests.worlds.tree import CONTEXT, Mounted, complete, refused

LARGE = 3 << 20
A = "agent/x.d/artifact"


class Watched:
    """Calls of some functions of ``os``: whether the event loop's thread made them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, bool]] = []
        for name in ("ftruncate", "pwrite", "pread"):
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name), lambda fd: True))
        monkeypatch.setattr(os, "close", self._watched("close", os.close, _is_costly))

    def _watched(
        self, name: str, function: Callable[..., Any], wanted: Callable[[int], bool]
    ) -> Callable[..., Any]:
        loop = threading.get_ident()

        def call(fd: int, *args: Any) -> Any:
            if wanted(fd):
                self.calls.append((name, threading.get_ident() == loop))
            return function(fd, *args)

        return call

    def taken(self) -> list[tuple[str, bool]]:
        calls, self.calls = self.calls, []
        return calls


def _is_costly(fd: int) -> bool:
    """To close: O_PATH descriptors are, if no name is left."""
    st = os.fstat(fd)
    is_path = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_PATH
    return st.st_blocks * 512 >= LARGE and not (is_path and st.st_nlink)


@pytest.fixture
def mounted(mounted: Mounted) -> Iterator[Mounted]:
    """As an agent finds it that runs."""
    agent = mounted.world.live(mounted.make("x"))
    with mounted.as_(inside(agent)):
        yield mounted
    close_all(mounted)


def close_all(mounted: Mounted) -> None:
    """What was left to threads to be closed."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mounted.base.disks.run)
            await trio.testing.wait_all_tasks_blocked()
            await mounted.base.disks._closing.idle()  # a thread that is late would be left behind
            nursery.cancel_scope.cancel()

    trio.run(main)


@pytest.fixture
def real(mounted: Mounted) -> Path:
    """A large file of the agent's, as it is on the disk."""
    info, _ = complete(
        mounted.ops.create, mounted.inode(A), b"file", 0o644, os.O_WRONLY, CONTEXT
    )
    complete(mounted.ops.release, info.fh)
    path = mounted.agents.documents.path(mounted.agent("x"), "artifact") / "file"
    fill(path)
    return path


def fill(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(b"x" * LARGE)


def set_size(
    mounted: Mounted, size: int, fh: int | None = None, inode: int | None = None
) -> None:
    entry = pyfuse3.EntryAttributes()
    entry.st_size = size
    names = ("atime", "mtime", "mode", "uid", "gid")
    fields = SimpleNamespace(update_size=True, **{f"update_{name}": False for name in names})
    if inode is None:
        inode = mounted.inode(f"{A}/file")
    complete(mounted.ops.setattr, inode, entry, cast(Any, fields), fh, CONTEXT)


def test_a_large_file_is_cut_off_by_a_thread(
    mounted: Mounted, real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    fh = mounted.open(f"{A}/file", os.O_WRONLY | os.O_TRUNC)
    assert (watched.taken(), real.stat().st_size) == ([("ftruncate", False)], 0)
    fill(real)
    set_size(mounted, 7, fh)
    assert (watched.taken(), real.stat().st_size) == ([("ftruncate", False)], 7)
    fill(real)
    set_size(mounted, 5)
    assert (watched.taken(), real.stat().st_size) == ([("ftruncate", False)], 5)
    mounted.close(fh)


def test_a_close_has_nothing_to_write(mounted: Mounted, real: Path) -> None:
    """What was written is in the file already: close(2) is answered without a turn."""
    fh = mounted.open(f"{A}/file", os.O_WRONLY)
    assert complete(mounted.ops.write, fh, 0, b"new") == 3
    assert real.read_bytes()[:3] == b"new"
    before = mounted.base.requests
    complete(mounted.ops.flush, fh)
    assert mounted.base.requests == before
    complete(mounted.ops.release, fh)


def test_documents_are_cut_off_by_path_too(mounted: Mounted) -> None:
    mounted.put("agent/x.d/result.md", "hello world")
    inode = mounted.inode("agent/x.d/result.md")
    for size, text in ((5, "hello"), (0, "")):
        set_size(mounted, size, inode=inode)
        assert mounted.get("agent/x.d/result.md") == text
    with refused("EFBIG"):
        set_size(mounted, 1 << 40, inode=inode)


def test_a_large_file_is_closed_by_a_thread(
    mounted: Mounted, real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it still has a name or not, and whoever is the last to have it open."""
    watched = Watched(monkeypatch)
    open_before, home = mounted.open(f"{A}/file"), mounted.inode(A)
    mounted.close(mounted.open(f"{A}/file", os.O_WRONLY))
    assert watched.taken() == []
    inode = mounted.inode(f"{A}/file")
    complete(mounted.ops.unlink, home, b"file", CONTEXT)
    mounted.close(open_before)
    assert watched.taken() == []
    close_all(mounted)
    assert set(watched.taken()) == {("close", False)}
    with refused("ESTALE"):
        complete(mounted.ops.getattr, inode, CONTEXT)


@pytest.mark.parametrize("over", [A, "agent/x.d"])
def test_what_is_replaced_is_closed_by_a_thread(
    mounted: Mounted, real: Path, monkeypatch: pytest.MonkeyPatch, over: str
) -> None:
    artifact, where, name = mounted.inode(A), mounted.inode(over), b"file"
    if over != A:
        name = b"result.md"
        mounted.put("agent/x.d/result.md", b"x" * LARGE)
        close_all(mounted)
    watched = Watched(monkeypatch)
    complete(mounted.ops.mknod, artifact, b"new", 0o100644, 0, CONTEXT)
    complete(mounted.ops.rename, artifact, b"new", where, name, 0, CONTEXT)
    assert watched.taken() == []
    assert (mounted.get(f"{over}/{name.decode()}"), mounted.list(A)) == (
        "", ["file"],
    )
    close_all(mounted)
    assert watched.taken() == [("close", False)]


def test_what_is_not_in_memory_is_read_by_a_thread(
    mounted: Mounted, real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    fh = mounted.open(f"{A}/file")
    assert mounted.read(fh, 0, 100) == b"x" * 100
    assert watched.taken() == []

    def cold(*args: Any) -> int:
        raise BlockingIOError(11, "not in memory")

    monkeypatch.setattr(os, "preadv", cold)
    assert mounted.read(fh, LARGE - 3, 100) == b"xxx"
    assert watched.taken() == [("pread", False)]
    with mounted.as_(ROOT):
        other = mounted.make("y")
    with mounted.agents.journal.changing() as change:
        # so many that they are in a file
        change.move(other, Cue.START, reason="x" * 2048)
    with mounted.as_(ROOT):
        events = mounted.open("home/0/agent/y/session/default/events.jsonl")
    assert b"agent.create" in mounted.read(events)
    assert watched.taken() == [("pread", False)]
    mounted.close(events)
    mounted.close(fh)


def test_what_changes_a_file_is_left_to_threads(
    mounted: Mounted, real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    fh = mounted.open(f"{A}/file", os.O_WRONLY)
    assert mounted.write(fh, b"y") == 1
    assert watched.taken() == [("pwrite", False)]
    mounted.close(fh)
    mounted.close(mounted.open("agent/x.d/result.md", os.O_WRONLY | os.O_TRUNC))
    assert watched.taken() == [], "there was nothing to cut off"


def test_a_write_waits_for_no_page_that_it_is_made_from(
    mounted: Mounted, real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's other files are read while one of them is written, however long that takes."""
    may, begun, write = threading.Event(), threading.Event(), os.pwrite

    def slow(fd: int, data: bytes, offset: int) -> int:
        begun.set()
        may.wait(10)
        return write(fd, data, offset)

    def cold(*args: Any) -> int:
        raise BlockingIOError(11, "not in memory")

    writing, reading = mounted.open(f"{A}/file", os.O_WRONLY), mounted.open(f"{A}/file")
    monkeypatch.setattr(os, "pwrite", slow)
    monkeypatch.setattr(os, "preadv", cold)
    ended: list[str] = []

    async def do(name: str, operation: Callable[..., Any], *args: Any) -> None:
        await operation(*args)
        ended.append(name)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(do, "write", mounted.ops.write, writing, 0, b"y")
            while not begun.is_set():
                await trio.sleep(0)
            nursery.start_soon(do, "read", mounted.ops.read, reading, 0, 10)
            with trio.fail_after(30):
                while not ended:
                    await trio.sleep(0)
            assert ended == ["read"]
            may.set()

    trio.run(main)
    for fh in (writing, reading):
        mounted.close(fh)


def test_a_refused_cut_opens_nothing(
    mounted: Mounted, real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, size: int) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    def descriptors() -> int:
        """Of this file: other tests have left some, which come and go."""
        return sum(path.resolve() == real for path in Path("/proc/self/fd").iterdir())

    mounted.inode(f"{A}/file")  # which it is reached by, from now on
    before, used = descriptors(), mounted.agents.accounts.used(Resource.DESCRIPTORS)
    monkeypatch.setattr(os, "ftruncate", full)
    with refused("EIO"):
        mounted.open(f"{A}/file", os.O_WRONLY | os.O_TRUNC)
    close_all(mounted)
    assert descriptors() == before
    assert not mounted.ops.opened.files
    assert mounted.agents.accounts.used(Resource.DESCRIPTORS) == used
