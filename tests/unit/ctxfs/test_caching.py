"""What the kernel is told to forget."""

from __future__ import annotations

import errno
import threading
from typing import Any, cast

import pyfuse3
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from ctxfs.caching import Cache
from tests.worlds.daemon import TIMEOUT
from tests.worlds.tree import Waiter

INODE = 42


class Kernel:
    """Does not know the inode at first, so often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, late: int) -> None:
        self.late = late
        self.told = 0
        monkeypatch.setattr(pyfuse3, "invalidate_inode", self.invalidate_inode)

    def invalidate_inode(self, inode: int, attr_only: bool = False) -> None:
        assert (inode, attr_only) == (INODE, True)
        self.told += 1
        if self.told <= self.late:
            raise OSError(errno.ENOENT, "it does not know the inode")


def forgotten(cache: Cache, meanwhile: float = 200.0) -> None:
    """The attributes of the inode, and so many seconds afterwards."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cache.run)
            cache.forget_attributes(INODE)
            await trio.sleep(meanwhile)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))


@pytest.fixture
def cache() -> Cache:
    made = Cache()
    made.mounted = True
    made.note_known(INODE)
    return made


def test_the_kernel_is_told_once_if_it_knows_the_inode(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(monkeypatch, 0)
    forgotten(cache)
    assert kernel.told == 1


def test_it_is_told_again_until_it_knows_the_inode(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(monkeypatch, 5)
    forgotten(cache)
    assert kernel.told == 6


def test_it_is_not_told_again_of_what_it_dropped(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(monkeypatch, 1000)
    cache.forget_attributes(INODE)
    cache.note_forgotten(INODE, 1)
    forgotten(cache)
    assert kernel.told == 1


def test_it_is_told_a_limited_number_of_times(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(monkeypatch, 1000)
    forgotten(cache)
    told = kernel.told
    assert 10 < told < 100
    forgotten(cache)
    assert kernel.told > told, "of the next change"


class Reading:
    """A kernel in which a read into a page is in progress until it is answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answered = threading.Event()
        self.asked = threading.Event()
        self.order: list[str] = []
        monkeypatch.setattr(pyfuse3, "invalidate_inode", self.invalidate_inode)
        # who waits for it waits to the end
        monkeypatch.setattr("ctxfs.caching.NOTIFICATION_SECONDS", TIMEOUT)

    def invalidate_inode(self, inode: int, attr_only: bool = False) -> None:
        if attr_only:
            self.order.append("attributes")
            return
        self.asked.set()
        assert self.answered.wait(30)
        self.order.append("pages")


def test_pollers_are_told_when_the_page_is_gone(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, waiter = Reading(monkeypatch), Waiter()
    version = cache.poller.version(INODE)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cache.run)
            cache.note_pages(INODE)
            cache.poller.wait(INODE, 1, cast(Any, waiter))
            mark = cache.mark()
            cache.forget_polled(INODE)
            assert kernel.order == ["attributes"], "at once"
            await trio.to_thread.run_sync(kernel.asked.wait)
            assert (waiter.notified, cache.poller.version(INODE)) == (0, version)
            kernel.answered.set()
            await cache.settled(mark)
            await wait_all_tasks_blocked()
            assert (waiter.notified, cache.poller.version(INODE)) == (1, version + 1)
            assert kernel.order == ["attributes", "pages"]
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_change_while_pages_go_is_told_after_it_has_gone_too(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Reading(monkeypatch)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cache.run)
            cache.note_pages(INODE)
            cache.forget_polled(INODE)
            await trio.to_thread.run_sync(kernel.asked.wait)
            mark = cache.mark()
            cache.forget_polled(INODE)
            kernel.answered.set()
            await cache.settled(mark)
            await wait_all_tasks_blocked()
            assert cache.poller.version(INODE) == 2
            assert kernel.order.count("pages") == 2
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_pollers_are_told_at_once_where_there_is_no_page(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, waiter = Reading(monkeypatch), Waiter()
    cache.poller.wait(INODE, 1, cast(Any, waiter))
    cache.forget_polled(INODE)
    assert (waiter.notified, kernel.order) == (1, ["attributes"])


def test_what_the_kernel_dropped_has_no_pages(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    Reading(monkeypatch)
    cache.note_pages(INODE)
    cache.note_told(INODE, b"idle\n")
    cache.note_forgotten(INODE, 1)
    assert cache.told(INODE) is None
    cache.forget_polled(INODE)
    assert cache.poller.version(INODE) == 1
