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
from tests.worlds.daemon import TIMEOUT
from tests.worlds.tree import OWN_CONTEXT, Mounted, complete, refused

LARGE = 3 << 20
HOME = f"home/{os.getuid()}/data"


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
    """A large file of an operator's home, as it is on the disk."""
    inode = mounted.inode(HOME)
    info, _ = complete(mounted.ops.create, inode, b"file", 0o644, os.O_WRONLY, OWN_CONTEXT)
    complete(mounted.ops.release, info.fh)
    path = mounted.world.state / "tree" / HOME.removesuffix("/data") / "file"
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
        inode = mounted.inode(f"{HOME}/file")
    complete(mounted.ops.setattr, inode, entry, cast(Any, fields), fh, OWN_CONTEXT)


def test_a_large_file_is_cut_off_by_a_thread(
    mounted: Mounted, real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    fh = mounted.open(f"{HOME}/file", os.O_WRONLY | os.O_TRUNC)
    assert (watched.taken(), real.stat().st_size) == ([("ftruncate", False)], 0)
    fill(real)
    set_size(mounted, 7, fh)
    assert (watched.taken(), real.stat().st_size) == ([("ftruncate", False)], 7)
    fill(real)
    set_size(mounted, 5)
    assert (watched.taken(), real.stat().st_size) == ([("ftruncate", False)], 5)
    set_size(mounted, 3, fh)
    assert (watched.taken(), real.stat().st_size) == ([("ftruncate", True)], 3), "it is small"
    mounted.close(fh)


def test_a_close_has_nothing_to_write(mounted: Mounted, real: Path) -> None:
    """What was written is in the file already: close(2) is answered without a turn."""
    fh = mounted.open(f"{HOME}/file", os.O_WRONLY)
    assert complete(mounted.ops.write, fh, 0, b"new") == 3
    assert real.read_bytes()[:3] == b"new"
    before = mounted.base.requests
    complete(mounted.ops.flush, fh)
    assert mounted.base.requests == before
    complete(mounted.ops.release, fh)


def test_documents_are_cut_off_by_path_too(mounted: Mounted) -> None:
    mounted.make("x")
    mounted.put("agent/x.d/handoff.md", "hello world")
    inode = mounted.inode("agent/x.d/handoff.md")
    for size, text in ((5, "hello"), (0, "")):
        set_size(mounted, size, inode=inode)
        assert mounted.get("agent/x.d/handoff.md") == text
    with refused("EFBIG"):
        set_size(mounted, 1 << 40, inode=inode)


def test_other_changes_of_a_file_wait_for_the_thread_that_cuts_it_off(
    mounted: Mounted, real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They ask the kernel for the same lock. What is counted of the file is right, too."""
    may, begun, real_cut = threading.Event(), threading.Event(), os.ftruncate
    home, inode = mounted.inode(HOME), mounted.inode(f"{HOME}/file")

    def slow(fd: int, size: int) -> None:
        begun.set()
        may.wait(10)
        real_cut(fd, size)

    complete(mounted.ops.link, inode, home, b"second", OWN_CONTEXT)
    monkeypatch.setattr(os, "ftruncate", slow)
    monkeypatch.setattr("ctxfs.disks._SETTLED_SECONDS", TIMEOUT)
    ended: list[str] = []
    entry = pyfuse3.EntryAttributes()
    entry.st_mode = 0o600
    mode = SimpleNamespace(
        update_mode=True,
        **{f"update_{name}": False for name in ("atime", "mtime", "size", "uid", "gid")},
    )

    async def do(name: str, operation: Callable[..., Any], *args: Any) -> None:
        await operation(*args, OWN_CONTEXT)
        ended.append(name)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(do, "cut", mounted.ops.open, inode, os.O_WRONLY | os.O_TRUNC)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(do, "chmod", mounted.ops.setattr, inode, entry, mode, None)
            nursery.start_soon(do, "link", mounted.ops.link, inode, home, b"other")
            await trio.testing.wait_all_tasks_blocked()
            args = (home, b"file", home, b"renamed", 0)
            nursery.start_soon(do, "rename", mounted.ops.rename, *args)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(do, "unlink", mounted.ops.unlink, home, b"second")
            nursery.start_soon(do, "look-up", mounted.ops.lookup, home, b"file")
            await trio.testing.wait_all_tasks_blocked()
            assert begun.wait(10)
            assert ended == ["look-up"]
            may.set()

    trio.run(main)
    assert set(ended) == {"look-up", "cut", "chmod", "link", "rename", "unlink"}
    assert sorted(os.listdir(real.parent)) == ["other", "renamed"]


def test_a_large_file_is_closed_by_a_thread(
    mounted: Mounted, real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it still has a name or not, and whoever is the last to have it open."""
    watched = Watched(monkeypatch)
    open_before, home = mounted.open(f"{HOME}/file"), mounted.inode(HOME)
    mounted.close(mounted.open(f"{HOME}/file", os.O_WRONLY))
    assert watched.taken() == []
    inode = mounted.inode(f"{HOME}/file")
    complete(mounted.ops.unlink, home, b"file", OWN_CONTEXT)
    mounted.close(open_before)
    complete(mounted.ops.forget, [(inode, 100)])
    assert watched.taken() == []
    close_all(mounted)
    assert set(watched.taken()) == {("close", False)}


def test_a_document_that_is_replaced_is_closed_by_a_thread(
    mounted: Mounted, real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, home = Watched(monkeypatch), mounted.inode(HOME)
    inode = mounted.inode(f"{HOME}/file")
    complete(mounted.ops.mknod, home, b"new", 0o100644, 0, OWN_CONTEXT)
    complete(mounted.ops.rename, home, b"new", home, b"file", 0, OWN_CONTEXT)
    complete(mounted.ops.forget, [(inode, 100)])
    assert watched.taken() == []
    assert real.stat().st_size == 0
    close_all(mounted)
    assert watched.taken() == [("close", False)]


def test_what_is_not_in_memory_is_read_by_a_thread(
    mounted: Mounted, real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    fh = mounted.open(f"{HOME}/file")
    assert mounted.read(fh, 0, 100) == b"x" * 100
    assert watched.taken() == []

    def cold(*args: Any) -> int:
        raise BlockingIOError(11, "not in memory")

    monkeypatch.setattr(os, "preadv", cold)
    assert mounted.read(fh, LARGE - 3, 100) == b"xxx"
    assert watched.taken() == [("pread", False)]
    with mounted.agents.journal.changing() as change:
        # so many that they are in a file
        change.move(mounted.make("x"), Cue.START, reason="x" * 2048)
    events = mounted.open("home/0/agent/x/session/default/events.jsonl")
    assert b"agent.create" in mounted.read(events)
    assert watched.taken() == [("pread", False)]
    mounted.close(events)
    mounted.close(fh)


def test_who_writes_much_is_left_to_threads(
    mounted: Mounted, real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxfs.disks.time.monotonic", lambda: 1000.0)
    monkeypatch.setattr("ctxfs.disks._MUCH", 100)
    watched = Watched(monkeypatch)
    fh = mounted.open(f"{HOME}/file", os.O_WRONLY)
    for offset in (0, 60):
        assert mounted.write(fh, b"y" * 60, offset) == 60
    assert watched.taken() == [("pwrite", True), ("pwrite", False)]
    assert real.read_bytes()[:121] == b"y" * 120 + b"x"
    mounted.close(fh)


def test_a_refused_cut_opens_nothing(
    mounted: Mounted, real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, size: int) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    def descriptors() -> int:
        """Of this file: other tests have left some, which come and go."""
        return sum(path.resolve() == real for path in Path("/proc/self/fd").iterdir())

    mounted.inode(f"{HOME}/file")  # which it is reached by, from now on
    before = descriptors()
    monkeypatch.setattr(os, "ftruncate", full)
    with refused("EIO"):
        mounted.open(f"{HOME}/file", os.O_WRONLY | os.O_TRUNC)
    close_all(mounted)
    assert descriptors() == before
    assert not mounted.ops._open_files
    assert mounted.base.runtime.accounts.used(Resource.DESCRIPTORS) == 0
