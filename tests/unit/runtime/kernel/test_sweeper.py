"""Signals to what is in cgroups that agents were in, and their removal."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trio
import trio.testing

from runtime.cell.cell import native
from runtime.errors import UnansweredError
from runtime.kernel import sweeper as module
from runtime.kernel.cgroups import Cgroup, unified_mount
from runtime.kernel.helpers import Helpers
from runtime.kernel.spawn import Spawner
from runtime.kernel.sweeper import Sweeper
from tests.worlds.daemon import TIMEOUT, wait_until

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or unified_mount() is None, reason="needs root and cgroup v2"
)

_numbers = itertools.count()
OWNER = 1000


@pytest.fixture
def top() -> Iterator[Cgroup]:
    mount = unified_mount()
    assert mount is not None
    top = Cgroup(mount / f"ctxtest-{os.getpid()}-sweeper-{next(_numbers)}")
    top.child("helper").path.mkdir(parents=True)
    yield top
    assert top.remove_when_empty(TIMEOUT)


def swept(top: Cgroup, act: Callable[[Sweeper], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(TIMEOUT):
            async with trio.open_nursery() as nursery:
                sweeper = Sweeper(native("sweep"), Helpers(spawner, nursery), nursery)
                await act(sweeper)
                nursery.cancel_scope.cancel()

    spawner = Spawner(native("launcher"), top.child("helper"))
    try:
        trio.run(main)
    finally:
        spawner.close()


@contextmanager
def asleep(cgroup: Cgroup, script: str = "exec sleep 1000") -> Iterator[subprocess.Popen[str]]:
    """A process in a cgroup."""
    with subprocess.Popen(
        ["sh", "-c", f"echo $$ > {cgroup}/cgroup.procs; {script}"], text=True
    ) as process:
        try:
            pid = str(process.pid)
            wait_until(lambda: pid in (cgroup.read("cgroup.procs") or "").split(), "it is there")
            yield process
        finally:
            process.kill()


def test_a_leaf_has_room_for_a_dozen_of_an_agents_own(top: Cgroup) -> None:
    leaf = top.child("run")
    leaf.make_own(())
    below = leaf.own().path
    made = 0
    with pytest.raises(OSError, match="temporarily unavailable"):
        while True:
            below = below / "d"
            below.mkdir()
            made += 1
    assert made == 12


def test_what_is_deeper_than_a_path_may_be_long_is_removed(top: Cgroup) -> None:
    node, names = top.child("agent-x"), ["d" * 250] * 40
    node.path.mkdir()
    fd = os.open(node.path, os.O_RDONLY)
    for name in names:
        os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    for number in range(200):
        os.mkdir(str(number), dir_fd=fd)
    os.close(fd)

    async def act(sweeper: Sweeper) -> None:
        await sweeper.removed(OWNER, node)
        assert not node.exists()
        await sweeper.removed(OWNER, node)
        assert not sweeper._left, "nothing is kept of what is gone"

    swept(top, act)


def test_removals_are_one_order_until_somebody_waits(
    top: Cgroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GATHER_SECONDS", 2 * TIMEOUT)
    orders = []

    async def act(sweeper: Sweeper) -> None:
        tell = sweeper._helpers.tell

        async def told(*order: Any, **how: Any) -> bytes:
            orders.append(order)
            return await tell(*order, **how)

        monkeypatch.setattr(sweeper._helpers, "tell", told)
        for node in map(top.child, ("agent-x", "agent-y", "agent-z")):
            node.path.mkdir()
            sweeper.remove(OWNER, node)
            await trio.testing.wait_all_tasks_blocked()
        assert not orders
        await sweeper.removed(OWNER, top.child("agent-y"))
        assert len(orders) == 1
        assert not any(top.child(name).exists() for name in ("agent-x", "agent-z"))

    swept(top, act)


def test_what_is_left_in_it_is_killed(top: Cgroup) -> None:
    node = top.child("agent-x", "run")
    node.path.mkdir(parents=True)
    with asleep(node, "trap '' TERM; while :; do sleep 1; done"):
        swept(top, lambda sweeper: sweeper.removed(OWNER, top.child("agent-x")))
    assert not node.exists()


def test_what_cannot_be_removed_is_tried_again_and_holds_up_nothing_else(
    top: Cgroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here rmdir(2) is refused, for a mount is on it in the helpers' mount namespace."""
    monkeypatch.setattr(module, "_LEFT_SECONDS", 0.3)
    held, free = top.child("held"), top.child("free")
    held.path.mkdir()
    free.path.mkdir()
    subprocess.run(["mount", "--bind", held.path, held.path], check=True)

    async def act(sweeper: Sweeper) -> None:
        try:
            with pytest.raises(UnansweredError, match="cannot be removed yet"):
                await sweeper.removed(OWNER, held)
            monkeypatch.undo()
            await sweeper.removed(OWNER, free)
        finally:
            subprocess.run(["umount", held.path], check=True)
        await sweeper.drained()
        assert not held.exists()

    swept(top, act)


def test_what_was_removed_too_late_may_be_made_anew(
    top: Cgroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody who waits for it goes on before a helper has said so, and no later one looks again."""
    monkeypatch.setattr(module, "_LEFT_SECONDS", 0.1)
    node, orders, is_over = top.child("agent-x"), [], trio.Event()
    node.path.mkdir()

    async def act(sweeper: Sweeper) -> None:
        async def told(*order: Any, **how: Any) -> bytes:
            orders.append(order)
            node.path.rmdir()
            await is_over.wait()
            raise UnansweredError("not done within 10 s")

        monkeypatch.setattr(sweeper._helpers, "tell", told)
        with pytest.raises(UnansweredError, match="cannot be removed yet"):
            await sweeper.removed(OWNER, node)
        is_over.set()
        await sweeper.removed(OWNER, node)
        node.path.mkdir()
        await sweeper.drained()
        assert node.exists() and len(orders) == 1

    swept(top, act)


def test_a_signal_reaches_all_but_the_spared(top: Cgroup) -> None:
    leaf = top.child("run")
    below = leaf.child("a", "b")
    below.path.mkdir(parents=True)
    with asleep(leaf) as spared, asleep(leaf) as one, asleep(below) as other:
        wait_until(lambda: len(leaf.processes()) == 3, "all are there")

        async def act(sweeper: Sweeper) -> None:
            assert await sweeper.signal(OWNER, 0, [leaf, top.child("none")], [spared.pid]) == 2
            await sweeper.signal(OWNER, signal.SIGTERM, [leaf], [spared.pid])

        below.freeze(True)
        swept(top, act)
        assert one.wait(TIMEOUT) == other.wait(TIMEOUT) == -signal.SIGTERM, "the frozen one, too"
        assert spared.poll() is None


def test_threaded_cgroups_are_no_obstacle(top: Cgroup) -> None:
    """The processes in one are listed by the cgroup above it only."""
    leaf = top.child("run")
    threaded = leaf.child("threads")
    threaded.path.mkdir(parents=True)
    threaded.write("cgroup.type", "threaded")
    with asleep(leaf) as process:
        threaded.write("cgroup.threads", str(process.pid))
        with pytest.raises(OSError, match="not supported"):
            threaded.read("cgroup.procs")

        async def act(sweeper: Sweeper) -> None:
            assert await sweeper.signal(OWNER, signal.SIGKILL, [leaf], []) >= 0
            await sweeper.removed(OWNER, leaf)

        swept(top, act)
        assert process.wait(TIMEOUT) == -signal.SIGKILL


def test_more_processes_than_are_held_at_once_are_signalled(top: Cgroup) -> None:
    leaf = top.child("run")
    leaf.path.mkdir()
    many = "exec perl -e 'for (1..700) { fork or (sleep(1000), exit) } sleep(1000)'"
    with asleep(leaf, many):
        wait_until(lambda: len(leaf.processes()) == 701, "they are there")

        async def act(sweeper: Sweeper) -> None:
            await sweeper.signal(OWNER, signal.SIGKILL, [leaf], [])

        swept(top, act)
        wait_until(lambda: not leaf.populated(), "all have ended")


def test_what_waits_behind_others_waits_no_longer_than_they_do(top: Cgroup) -> None:
    group = top.child("group").child("below")
    group.path.mkdir(parents=True)
    with asleep(group, "exec nice -n 19 chrt --idle 0 sleep 1000") as process:
        wait_until(lambda: os.sched_getscheduler(process.pid) == os.SCHED_IDLE, "it waits")

        async def hurry(sweeper: Sweeper) -> None:
            await sweeper.hurry(OWNER, top.child("group"))

        swept(top, hurry)
        assert os.sched_getscheduler(process.pid) == os.SCHED_OTHER
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 0
