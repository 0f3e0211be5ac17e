"""``/ctx/agents``: one line for each agent that the caller may list."""

from __future__ import annotations

import itertools
import json
import os
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from ctxfs.files.agents import KEYS
from ctxfs.keptlines import LINE_MAX, UNREAD_SECONDS, KeptLines
from runtime.ids import RunId
from runtime.records.items import PRIORITIES
from runtime.records.lifecycle import Cue, Status
from runtime.records.run import Run
from runtime.texts.names import timestamp
from tests.worlds.records import ROOT, inside
from tests.worlds.tree import CONTEXT, STRANGER, USER, Mounted, Waiter, complete, mounted_in

FIELDS = ("owner", "status", "outcome", "reason", "parent", "supervisor", "profile", "mode", "run")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    with mounted_in(tmp_path) as mounted:
        yield mounted


def rows(mounted: Mounted) -> list[dict[str, Any]]:
    return [json.loads(line) for line in mounted.get("agents").splitlines()]


def row(mounted: Mounted, name: str) -> dict[str, Any]:
    return next(row for row in rows(mounted) if row["name"] == name)


def test_a_line_has_the_values_of_the_files(mounted: Mounted) -> None:
    boss = mounted.world.may_create(mounted.world.live(mounted.make("boss", USER)))
    kid = mounted.make("kid", inside(boss))
    for agent in (boss, kid):
        mounted.agents.journal.update(agent, mode="turn", run=Run(pid=7 if agent is boss else 0))
    mounted.put("agent/boss.d/inbox", "one\n")
    with mounted.as_(USER):
        found = rows(mounted)
        assert [row["name"] for row in found] == ["boss", "kid"]
        for row in found:
            assert row.keys() == KEYS.keys() - {"tty", "viewers"}
            for name in FIELDS:
                assert str(row[name]) == mounted.get(f"agent/{row['name']}.d/{name}").rstrip("\n")
            assert row["queue"] == len(mounted.get(f"agent/{row['name']}.d/queue").splitlines())
            assert row["session"] == "default"
        assert [row["queue"] for row in found] == [1, 0]
        assert [row["pid"] for row in found] == [7, None]
        assert found[1]["created_at"] == timestamp(kid.created)
    assert mounted.stat("agents").st_size == 0


def test_every_change_is_in_the_next_line(mounted: Mounted) -> None:
    agent = mounted.make("x", USER)
    before = row(mounted, "x")
    assert before["since"] == before["created_at"]

    def differs() -> set[str]:
        nonlocal before
        last, before = before, row(mounted, "x")
        return {key for key in before if before[key] != last[key]}

    journal = mounted.agents.journal
    assert differs() == set()
    mounted.put("agent/x.d/mode", "turn\n")
    assert differs() == {"mode"}
    mounted.put("agent/x.d/owner", "2000\n")
    assert differs() == {"owner"}
    agent.created -= 10
    with journal.changing() as change:
        change.move(agent, Cue.START)
    assert differs() == {"status", "since", "created_at"}
    journal.update(agent, status=Status.IDLE, run=Run(id=RunId("r1"), pid=3))
    assert differs() == {"status", "run", "pid"}
    for priority in PRIORITIES:
        mounted.agents.messages.send(ROOT, agent, "hello", priority=priority)
        assert differs() == {"queue"}
    journal.update(agent, outcome="done", reason="exit:0")
    assert differs() == {"outcome", "reason"}


def test_a_line_is_kept_until_it_changes(mounted: Mounted) -> None:
    kept = mounted.base.kept_lines
    agents = [mounted.make(name, USER) for name in ("a", "b")]
    mounted.world.live(agents[0])
    assert len(kept) == 0
    for caller, lines in ((ROOT, 2), (USER, 2), (STRANGER, 4), (inside(agents[0]), 4)):
        with mounted.as_(caller):
            mounted.get("agents")
        assert len(kept) == lines
    first, second = (kept.of(True)[agent.index] for agent in agents)
    mounted.agents.journal.update(agents[0], mode="turn")
    assert len(kept) == 2
    mounted.get("agents")
    assert kept.of(True)[agents[0].index] != first
    assert kept.of(True)[agents[1].index] is second
    mounted.agents.removals.remove(agents[1])
    mounted.get("agents")
    assert kept.of(True).keys() == {agents[0].index}
    mounted.agents.journal.update(agents[0], reason="x" * LINE_MAX)
    assert row(mounted, "a")["reason"] == "x" * LINE_MAX
    assert len(kept) == 0


def test_what_nobody_reads_is_not_kept() -> None:
    trio.run(read_and_leave, clock=trio.testing.MockClock(autojump_threshold=0))


async def read_and_leave() -> None:
    kept = KeptLines()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kept.run)
        kept.keep(True, 1, b"line\n")  # type: ignore[arg-type]
        for _ in range(5):
            kept.of(True)
            await trio.sleep(0.9 * UNREAD_SECONDS)
            assert len(kept) == 1
        await trio.sleep(2 * UNREAD_SECONDS)
        assert len(kept) == 0
        kept.keep(True, 1, b"line\n")  # type: ignore[arg-type]
        kept.of(True)
        await trio.sleep(2.1 * UNREAD_SECONDS)
        assert len(kept) == 0
        nursery.cancel_scope.cancel()


def test_a_list_that_changes_while_it_is_read_is_of_whole_lines(mounted: Mounted) -> None:
    count = 400
    agents = [mounted.make(f"a{n}", USER) for n in range(count)]
    fh = mounted.open("agents")
    text = mounted.read(fh)
    assert 0 < text.count(b"\n") < count  # one read is short of the whole
    mounted.agents.journal.update(agents[0], mode="turn")
    mounted.agents.journal.update(agents[-1], mode="turn")
    mounted.agents.removals.remove(agents[-2])
    mounted.make("late", USER)
    while more := mounted.read(fh, len(text)):
        text += more
    found = [json.loads(line) for line in text.splitlines()]
    # what was read stays as it was, what comes is as it is now
    assert [row["name"] for row in found] == [f"a{n}" for n in range(count) if n != count - 2]
    assert [found[0]["mode"], found[-1]["mode"]] == ["once", "turn"]
    assert json.loads(mounted.read(fh).splitlines()[0])["mode"] == "turn"
    # kept lines cost little: one read gives all of them
    assert mounted.read(fh).count(b"\n") == count
    mounted.close(fh)


def test_who_finds_few_of_many_reads_them_all(mounted: Mounted) -> None:
    boss = mounted.world.may_create(mounted.world.live(mounted.make("boss", USER)))
    for n in range(250):
        mounted.make(f"kid{n}", inside(boss))
    mounted.make("last", USER)
    with mounted.as_(STRANGER):
        assert [row["name"] for row in rows(mounted)] == ["boss", "last"]
    with mounted.as_(inside(boss)):
        assert len(rows(mounted)) == 252


def test_pollers_are_told_at_most_ten_times_a_second(mounted: Mounted) -> None:
    agent = mounted.make("x", USER)
    fh, waiter = mounted.open("agents", os.O_RDONLY), Waiter()
    inode = mounted.inode("agents")

    async def poll() -> int:
        return int(await mounted.ops.poll(inode, fh, cast(Any, waiter), CONTEXT))

    async def change_often() -> list[tuple[float, int]]:
        told: list[tuple[float, int]] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mounted.base.cache.poller.run)
            await mounted.ops.read(fh, 0, 1 << 20)
            assert await poll() == select.POLLIN
            for number in range(300):
                mounted.agents.journal.update(agent, mode=("once", "turn")[number % 2])
                await trio.sleep(0.01)
                if (events := await poll()) & select.POLLPRI:
                    told.append((trio.current_time(), waiter.notified))
                    await mounted.ops.read(fh, 0, 1 << 20)
                    await poll()
                else:
                    assert events == select.POLLIN
            nursery.cancel_scope.cancel()
        return told

    told = trio.run(change_often, clock=trio.testing.MockClock(autojump_threshold=0))
    times = [when for when, _ in told]
    assert 28 <= len(told) <= 31
    assert min(b - a for a, b in itertools.pairwise(times)) > 0.09
    assert [number for _, number in told] == list(range(1, len(told) + 1))
    complete(mounted.ops.release, fh)
