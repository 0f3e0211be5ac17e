"""One inotify descriptor for everything that is watched."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from runtime.kernel import linux
from runtime.kernel.inotify import Wakeup, Watcher


def run(test: Callable[[Watcher], Awaitable[None]]) -> None:
    """Runs ``test`` beside a serving watcher, for at most some seconds."""

    async def main() -> None:
        with trio.fail_after(30):
            with closing(Watcher()) as watcher:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(watcher.run)
                    await test(watcher)
                    nursery.cancel_scope.cancel()

    trio.run(main)


def append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"x")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.touch()
    return path


def test_a_change_is_told(file: Path) -> None:
    async def test(watcher: Watcher) -> None:
        wakeup = Wakeup()
        with watcher.watching(file, wakeup):
            append(file)
            await wakeup.wait_changed()

    run(test)


def test_a_change_before_the_wait_is_not_missed(file: Path) -> None:
    async def test(watcher: Watcher) -> None:
        wakeup = Wakeup()
        with watcher.watching(file, wakeup):
            append(file)
            await wait_all_tasks_blocked()
            await wakeup.wait_changed()

    run(test)


def test_a_change_that_was_told_is_not_told_again(file: Path) -> None:
    async def test(watcher: Watcher) -> None:
        wakeup = Wakeup()
        with watcher.watching(file, wakeup):
            append(file)
            await wakeup.wait_changed()
            await wait_all_tasks_blocked()
            with trio.move_on_after(0) as scope:
                await wakeup.wait_changed()
            assert scope.cancelled_caught

    run(test)


def test_everyone_who_watches_a_file_is_told(file: Path) -> None:
    async def test(watcher: Watcher) -> None:
        one, two = Wakeup(), Wakeup()
        with watcher.watching(file, one), watcher.watching(file, two):
            append(file)
            await one.wait_changed()
            await two.wait_changed()

    run(test)


def test_one_who_stops_watching_does_not_end_it_for_others(file: Path) -> None:
    async def test(watcher: Watcher) -> None:
        one, two = Wakeup(), Wakeup()
        with watcher.watching(file, one):
            with watcher.watching(file, two):
                pass
            append(file)
            await one.wait_changed()

    run(test)


def test_one_may_watch_several_files(file: Path, tmp_path: Path) -> None:
    async def test(watcher: Watcher) -> None:
        other = tmp_path / "other"
        other.touch()
        wakeup = Wakeup()
        with watcher.watching(file, wakeup), watcher.watching(other, wakeup):
            append(other)
            await wakeup.wait_changed()
            append(file)
            await wakeup.wait_changed()

    run(test)


def test_a_change_of_another_file_is_not_told(file: Path, tmp_path: Path) -> None:
    async def test(watcher: Watcher) -> None:
        other = tmp_path / "other"
        other.touch()
        mine, others = Wakeup(), Wakeup()
        with watcher.watching(file, mine), watcher.watching(other, others):
            append(other)
            await others.wait_changed()
            with trio.move_on_after(0) as scope:
                await mine.wait_changed()
            assert scope.cancelled_caught

    run(test)


def test_a_file_that_is_not_there_cannot_be_watched(tmp_path: Path) -> None:
    async def test(watcher: Watcher) -> None:
        with pytest.raises(FileNotFoundError), watcher.watching(tmp_path / "none", Wakeup()):
            raise AssertionError("not reached")

    run(test)


def test_watching_a_file_that_is_removed_ends_quietly(file: Path) -> None:
    """The kernel has ended the watch, but its event was not read yet."""

    async def test(watcher: Watcher) -> None:
        with watcher.watching(file, Wakeup()):
            file.unlink()

    run(test)


def test_watching_a_removed_file_of_which_was_told_ends_quietly(file: Path, tmp_path: Path) -> None:
    async def test(watcher: Watcher) -> None:
        other = tmp_path / "other"
        other.touch()
        wakeup = Wakeup()
        with watcher.watching(file, Wakeup()):
            file.unlink()
            with watcher.watching(other, wakeup):
                append(other)
                await wakeup.wait_changed()

    run(test)


def test_a_file_made_anew_is_watched_anew(file: Path) -> None:
    async def test(watcher: Watcher) -> None:
        old, new = Wakeup(), Wakeup()
        with watcher.watching(file, old):
            append(file)
            await old.wait_changed()
            file.unlink()
            file.touch()
            with watcher.watching(file, new):
                append(file)
                await new.wait_changed()
            await wait_all_tasks_blocked()

    run(test)


def test_the_removal_of_a_file_is_a_change(file: Path) -> None:
    async def test(watcher: Watcher) -> None:
        wakeup = Wakeup()
        with watcher.watching(file, wakeup):
            file.unlink()
            await wakeup.wait_changed()

    run(test)


def test_a_watch_may_end_after_the_watcher_was_cancelled(file: Path) -> None:
    """Both end at a shutdown, in any order."""

    async def main() -> None:
        with closing(Watcher()) as watcher:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watcher.run)
                with watcher.watching(file, Wakeup()), trio.CancelScope(shield=True):
                    nursery.cancel_scope.cancel()
                    await wait_all_tasks_blocked()

    trio.run(main)


def test_the_descriptor_is_closed_in_the_end(file: Path) -> None:
    def watching() -> set[int]:
        """Descriptors of inotify: what others are is opened and closed by other threads, too."""
        found = set()
        for fd in map(int, os.listdir("/proc/self/fd")):
            with suppress(FileNotFoundError):
                if os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:inotify":
                    found.add(fd)
        return found

    before = watching()

    async def test(watcher: Watcher) -> None:
        with watcher.watching(file, Wakeup()):
            assert watching() - before

    run(test)
    assert watching() <= before


def test_a_cause_of_ones_own_is_told_too() -> None:
    async def main() -> None:
        wakeup = Wakeup()
        wakeup.notify()
        wakeup.notify()
        await wakeup.wait_changed()

    trio.run(main)


def test_events_with_names_are_parsed() -> None:
    one = b"\x01\0\0\0\x02\0\0\0\0\0\0\0\x10\0\0\0" + b"name".ljust(16, b"\0")
    two = b"\x02\0\0\0\x00\x80\0\0\0\0\0\0\0\0\0\0"
    assert linux.parse_inotify(one + two + b"\x03\0") == [(1, 2), (2, linux.IN_IGNORED)]


def test_everybody_looks_again_when_the_kernel_dropped_changes(
    file: Path, tmp_path: Path
) -> None:
    """The queue of inotify(7) is as long as fs.inotify.max_queued_events."""
    longest = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    other = tmp_path / "other"
    other.touch()

    async def test(watcher: Watcher) -> None:
        wakeup, others = Wakeup(), Wakeup()
        with watcher.watching(file, wakeup), watcher.watching(other, others):
            await wait_all_tasks_blocked()
            with open(file, "ab", buffering=0) as one, open(other, "ab", buffering=0) as two:
                # each in turn: equal events that follow each other are one
                for _ in range(longest // 2 + 1):
                    one.write(b"x")
                    two.write(b"x")
            third = Wakeup()
            dropped = tmp_path / "dropped"
            dropped.touch()
            with watcher.watching(dropped, third):
                append(dropped)  # of this the kernel says nothing
                await third.wait_changed()

    run(test)


def test_who_waits_on_a_held_wakeup_is_told_once_all_have_let_go() -> None:
    async def main() -> None:
        wakeup, woken = Wakeup(), trio.Event()

        async def wait() -> None:
            await wakeup.wait_changed()
            woken.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            wakeup.hold()
            wakeup.hold()
            wakeup.notify()
            wakeup.let_go()
            await wait_all_tasks_blocked()
            assert not woken.is_set()
            wakeup.let_go()
            with trio.fail_after(30):
                await woken.wait()
            # of what was told just before, too
            woken = trio.Event()
            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            wakeup.notify()
            wakeup.hold()
            await wait_all_tasks_blocked()
            assert not woken.is_set()
            wakeup.let_go()
            with trio.fail_after(30):
                await woken.wait()
            nursery.cancel_scope.cancel()

    trio.run(main)
