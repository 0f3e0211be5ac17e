"""Bytes of real files: who waits for whom, and what needs no waiting."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from ctxfs.disks import Disks, _close_all, read_cached
from ctxfs.tree.realfiles import OpenRealFile
from runtime.authority.accounts import Payer, Reserve
from runtime.caller import Caller


def who(name: str, owner: int = 1000, reserve: Reserve = Reserve.NONE) -> Caller:
    return cast(Caller, Payer(owner, name, reserve))


@pytest.fixture
def beside() -> Disks:
    return Disks(lambda caller: cast(Payer, caller))


class Held:
    """Works that go on when they are let, by name."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        #: those that a thread has begun
        self.run: list[str] = []
        self._may: dict[str, threading.Event] = {}

    @contextmanager
    def work(self, name: str) -> Iterator[Callable[[], str]]:
        self.begun.append(name)
        may = self._may.setdefault(name, threading.Event())

        def act() -> str:
            self.run.append(name)
            return name if may.wait(10) else "late"

        yield act
        self.ended.append(name)

    def let(self, name: str) -> None:
        self._may[name].set()


def under_way(
    beside: Disks, asked: Sequence[tuple[str, Caller, int | None]], let: str = ""
) -> list[set[str]]:
    """Which works are begun and not ended: when all were asked for, and after each of ``let``.
    Without a file it is a read."""
    held, seen = Held(), []

    async def ask(name: str, caller: Caller, file: int | None) -> None:
        if file is None:
            await beside.read(caller, held.work(name))
        else:
            await beside.change(caller, held.work(name), file)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for each in asked:
                nursery.start_soon(ask, *each)
                await trio.testing.wait_all_tasks_blocked()
            seen.append(set(held.begun))
            with trio.fail_after(30):
                for name in let:
                    held.let(name)
                    while name not in held.ended:
                        await trio.sleep(0)
                    await trio.testing.wait_all_tasks_blocked()
                    seen.append(set(held.begun) - set(held.ended))
                while len(held.ended) < len(asked):
                    for name in held.begun:
                        held.let(name)
                    await trio.sleep(0)

    trio.run(main)
    return seen


@pytest.mark.parametrize("file", [None, 5])
def test_an_agent_waits_for_itself_alone(beside: Disks, file: int | None) -> None:
    asked = [("a", who("one"), file), ("b", who("one"), file), ("c", who("two"), file and 6)]
    assert under_way(beside, asked, "a") == [{"a", "c"}, {"b", "c"}]


@pytest.mark.parametrize("files", [[None] * 5, [1, 2, 3, 4, 5]])
def test_agents_of_an_owner_have_two_threads(
    beside: Disks, files: Sequence[int | None]
) -> None:
    asked = [(name, who(name), file) for name, file in zip("abc", files, strict=False)]
    asked += [("d", who("d", owner=1001), files[3]), ("e", who("e", reserve=Reserve.OWNER), None)]
    assert under_way(beside, asked, "b") == [{"a", "b", "d", "e"}, {"a", "c", "d", "e"}]


def test_no_read_waits_for_a_change_of_the_same_agent(beside: Disks) -> None:
    """What it is to write may be in a page that has to be read first."""
    asked = [("a", who("one"), 5), ("b", who("one"), 6), ("c", who("one"), None)]
    assert under_way(beside, asked, "c") == [{"a", "c"}, {"a"}]
    asked = [("a", who("one"), None), ("b", who("one"), None), ("c", who("one"), 5)]
    assert under_way(beside, asked, "c") == [{"a", "c"}, {"a"}]


def test_a_file_is_changed_by_one_at_a_time(beside: Disks) -> None:
    asked = [("a", who("one"), 5), ("b", who("two"), 5), ("c", who("three", owner=1001), 6)]
    assert under_way(beside, asked, "a") == [{"a", "c"}, {"b", "c"}]


def test_who_waits_for_its_turn_keeps_nobody_from_a_file(beside: Disks) -> None:
    asked = [("a", who("one"), 5), ("b", who("one"), 6), ("c", who("two", owner=1001), 6)]
    assert under_way(beside, asked, "ac") == [{"a", "c"}, {"c"}, {"b"}]


def test_what_a_work_raises_is_raised_and_its_turn_goes_on(beside: Disks) -> None:
    @contextmanager
    def refused() -> Iterator[Callable[[], None]]:
        raise PermissionError
        yield

    @contextmanager
    def failing() -> Iterator[Callable[[], bytes]]:
        yield lambda: os.pread(-1, 1, 0)

    async def main() -> None:
        with pytest.raises(PermissionError):
            await beside.change(who("one"), refused(), 5)
        with pytest.raises(OSError, match="descriptor"):
            await beside.change(who("one"), failing(), 5)
        with trio.fail_after(30):
            await beside.change(who("one"), nullcontext(lambda: None), 5)

    trio.run(main)


def test_what_is_in_memory_is_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 100)
    with path.open("rb") as file:
        fd = file.fileno()
        for offset, size in ((0, 10), (300, 5000), (25_590, 100), (25_600, 10), (99_999, 10)):
            assert read_cached(fd, size, offset) == os.pread(fd, size, offset)


def test_what_is_not_in_memory_is_not_waited_for(tmp_path: Path) -> None:
    """A page of a file that the kernel has dropped."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * (8 << 20))
    with path.open("rb") as file:
        fd = file.fileno()
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.pread(fd, 1, 0)
        if read_cached(fd, 4096, 7 << 20) is not None:
            pytest.skip(f"{tmp_path}: its filesystem keeps all of a file in memory")
        assert read_cached(fd, 8 << 20, 0) is None, "a part of it is not enough"
        os.pread(fd, 8 << 20, 0)
        assert read_cached(fd, 8 << 20, 0) == b"x" * (8 << 20)


def opened_on(path: Path) -> OpenRealFile:
    node = SimpleNamespace(
        check_writing=lambda caller: None, changed=lambda: None, closed=os.close
    )
    return OpenRealFile(
        cast(Any, node),
        cast(Any, None),
        os.open(path, os.O_RDWR | os.O_CREAT),
        limit=1 << 20,
        append=False,
        share=cast(Any, SimpleNamespace(writing=lambda *_: nullcontext())),
    )


def test_a_file_stays_open_while_a_thread_works_on_it(tmp_path: Path) -> None:
    """Its descriptor would be another file's."""
    opened = opened_on(tmp_path / "file")
    with opened.writing(0, b"text") as act:
        opened.release()
        other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
        assert other != opened.fd
        assert act() == 4
    assert (tmp_path / "file").read_bytes() == b"text"
    assert (tmp_path / "other").read_bytes() == b""
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(opened.fd)
    os.close(other)


def test_what_is_large_is_closed_beside_the_loop(beside: Disks, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * (2 << 20))
    (tmp_path / "small").write_bytes(b"x")
    large, small = (os.open(tmp_path / name, os.O_RDONLY) for name in ("large", "small"))
    beside.close(small)
    beside.close(large)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(small)
    assert os.fstat(large).st_size == 2 << 20

    trio.run(close_beside, beside)
    assert not is_open(large)


def test_what_waits_to_be_closed_is_bounded(
    beside: Disks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hole takes nothing of the disk, but its pages may be in memory."""
    monkeypatch.setattr("ctxfs.disks._CLOSING_MAX", 2)
    hole = tmp_path / "hole"
    hole.touch()
    os.truncate(hole, 2 << 20)
    opened = [os.open(hole, os.O_RDONLY) for _ in range(3)]
    for fd in opened:
        beside.close(fd)

    def kept() -> list[int]:
        """Other threads may have files of the same numbers."""
        found = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in opened if is_open(fd)}
        return [fd for fd, path in found.items() if path == str(hole)]

    assert kept() == opened[:2]
    real_close = os.close

    def close(fd: int) -> None:
        mine = fd in opened  # other threads close files meanwhile
        real_close(fd)
        if mine:
            raise OSError(errno.EIO, "the disk is broken")

    with monkeypatch.context() as patch:
        patch.setattr("ctxfs.disks.os.close", close)
        _close_all({opened[0], opened[1]})
    assert not kept(), "an error of one keeps no other open"


def is_open(fd: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}")


async def close_beside(beside: Disks) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(beside.run)
        await trio.testing.wait_all_tasks_blocked()
        await beside._closing.idle()  # a thread that is late would be left behind
        nursery.cancel_scope.cancel()
