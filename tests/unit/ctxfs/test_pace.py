"""How requests are paced, and who waits for the disk."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from ctxfs import pace
from ctxfs.locks import TABLE
from ctxfs.pace import Meant, Pace
from ctxfs.scheduler import Scheduler
from runtime.authority import loop
from runtime.authority.accounts import Payer, Reserve, TimeAccounts
from runtime.authority.identity import Identity
from runtime.authority.loop import Gentle, LoopMeter
from runtime.caller import Caller
from runtime.errors import OverTimeError

AGENT = Payer(1000, "a")


def paced(share: float = 0.5) -> Pace:
    accounts = SimpleNamespace(time=TimeAccounts(share))
    agents = SimpleNamespace(identity=SimpleNamespace(payer=lambda caller: AGENT))
    runtime = SimpleNamespace(accounts=accounts, agents=agents)
    return Pace(cast(Any, runtime), Scheduler(LoopMeter()))


async def admit(made: Pace, operation: str = "statfs") -> None:
    await made.admit(TABLE[operation], AGENT, lambda: Meant(None), None, reads=False)


def used_up(made: Pace) -> None:
    made._runtime.accounts.time.pay(AGENT, 10.0)


def test_operators_always_have_time() -> None:
    made = paced()
    used_up(made)
    makes_wait = made._runtime.accounts.time.makes_wait
    assert makes_wait(AGENT)
    for reserve in (Reserve.OWNER, Reserve.MASTER):
        assert not makes_wait(Payer(AGENT.owner, reserve=reserve))
    assert not makes_wait(Payer(1001, "b"))


def test_what_is_refused_says_why() -> None:
    made = paced()
    used_up(made)
    with pytest.raises(OverTimeError, match="uid 1000 have used up their time"):
        trio.run(admit, made, "lookup")


def test_late_is_a_second_at_most() -> None:
    async def main() -> None:
        made = paced()
        used_up(made)
        begun = trio.current_time()
        await admit(made)
        assert 0.0 < trio.current_time() - begun <= 1.0
        assert not made._late._turns._turns, "nothing is kept of who has waited"
        assert not made._late._sleeping

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_those_who_were_late_go_on_one_in_a_pass() -> None:
    """However many of one owner have waited, others are answered between two of them."""
    many = 3 * loop._LATE_MAX
    passes: Counter[int] = Counter()
    now = 0

    async def ask(made: Pace) -> None:
        await admit(made)
        passes[now] += 1
        used_up(made)

    async def count(done: trio.Event) -> None:
        nonlocal now
        while not done.is_set():
            await trio.lowlevel.checkpoint()
            now += 1

    async def main() -> None:
        made, done = paced(), trio.Event()
        used_up(made)
        async with trio.open_nursery() as others:
            others.start_soon(count, done)
            async with trio.open_nursery() as nursery:
                for _ in range(many):
                    nursery.start_soon(ask, made)
            done.set()
        assert not made._late._turns._turns

    trio.run(main)
    assert passes.total() == many
    assert max(passes.values()) <= 2


def test_long_works_of_one_owner_take_a_part_of_the_time_together() -> None:
    accounts = TimeAccounts(1e-6, burst=100.0)
    gentle, other, pieces = Gentle(accounts), Gentle(accounts), Counter[str]()

    def piece(name: str) -> bool:
        until = time.thread_time() + 0.002
        while time.thread_time() < until:
            pass
        pieces[name] += 1
        return True

    async def work(name: str) -> None:
        while await gentle.do(Payer(1000, name), lambda: piece(name)):
            pass

    async def run() -> None:
        begun = time.monotonic(), time.thread_time()
        async with trio.open_nursery() as nursery:
            for name in ("a", "b", "c"):
                nursery.start_soon(work, name)
            while sum(pieces.values()) < 30:
                await trio.sleep(0.001)
            nursery.cancel_scope.cancel()
        passed, used = (time.monotonic() - begun[0], time.thread_time() - begun[1])
        assert passed > 30 * 0.002 * 4
        assert used < passed / 2
        assert max(pieces.values()) - min(pieces.values()) <= 1, "one after the other"
        assert 29 * 0.002 < accounts.used(1000) < used
        assert await other.do(Payer(1000), lambda: 7) == 7

    trio.run(run)


def test_time_is_that_of_the_steps() -> None:
    spent: list[float] = []

    def work() -> None:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass

    async def handler() -> str:
        work()
        await trio.sleep(0.05)
        work()
        return "done"

    async def main() -> str:
        return await loop.Timed(handler(), spent.append)

    assert trio.run(main) == "done"
    assert 0.04 <= sum(spent) < 0.05
    assert len(spent) == 2


def test_what_a_step_raises_is_raised_and_charged() -> None:
    spent: list[float] = []

    async def handler() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("why")

    async def main() -> None:
        with trio.move_on_after(0):
            await loop.Timed(handler(), spent.append)

    with pytest.raises(ValueError, match="why"):
        trio.run(main)
    assert len(spent) == 2


def test_only_so_many_wait_for_the_disk() -> None:
    made = paced()
    for _ in range(pace._SYNCS_MAX):
        made._syncs.enter_anyway(AGENT.owner)

    async def main() -> None:
        await made.synced(Caller(1000, 1000, 1), None)

    with pytest.raises(OverTimeError, match=r"fsync\(2\) of uid 1000 are waiting"):
        trio.run(main)


def test_who_binds_sockets_is_on_no_account_of_agents() -> None:
    """It has the uid of the daemon, whose agents may have used up their time."""
    made = paced()
    runtime, own = cast(Any, made._runtime), SimpleNamespace(uid=0, is_master=lambda uid: uid == 0)
    runtime.binder, runtime.agents.privilege = SimpleNamespace(pid=7), own
    identity = SimpleNamespace(_registry={}, _privilege=own)
    runtime.agents.identity = SimpleNamespace(
        # as of all that is in the daemon's own cgroup
        resolve=lambda uid, gid, pid: Caller(uid, gid, pid, known=False),
        payer=lambda caller: Identity.payer(cast(Any, identity), caller),
    )
    assert made.payer_of(0, 0, 7) == Payer(0, reserve=Reserve.MASTER)
    assert made.payer_of(0, 0, 8) == Payer(0, "unknown callers")
