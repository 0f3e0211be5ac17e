"""What the kernel is told to forget."""

from __future__ import annotations

import errno

import pyfuse3
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from ctxfs.caching import Cache

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
