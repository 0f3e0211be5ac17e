"""``/ctx/events`` and the operation ``events``: what happened to whose agents, told to whom."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pyfuse3
import pytest
import trio
import trio.testing

from ctxfs.files import root
from runtime.caller import Caller
from runtime.records.change import Change
from runtime.records.history import History
from runtime.records.model import Agent
from runtime.sockets.connection import Server
from runtime.sockets.server import Sockets
from tests.worlds.daemon import TIMEOUT
from tests.worlds.records import ROOT, inside, operator
from tests.worlds.tree import (
    CONTEXT,
    STRANGER,
    USER,
    Mounted,
    Waiter,
    complete,
    mounted_in,
    refused,
    sockets_of,
)

OTHER = operator(1001)
FOLLOWERS = 100


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    with mounted_in(tmp_path, events_max=1 << 20) as mounted:
        yield mounted


def happen(mounted: Mounted, agent: Agent, text: str = "x") -> None:
    change = Change()
    change.tell(agent, "agent.report", text=text)
    mounted.agents.journal.commit(change)


def shown(mounted: Mounted, caller: Caller) -> list[dict[str, Any]]:
    with mounted.as_(caller):
        return [json.loads(line) for line in mounted.get("events").splitlines()]


# the file


def test_each_sees_what_happened_to_his_agents(mounted: Mounted) -> None:
    for name, caller in (("x", USER), ("y", OTHER), ("z", ROOT)):
        happen(mounted, mounted.make(name, caller))
    assert [event["agent"] for event in shown(mounted, USER)] == ["x", "x"]
    assert [event["agent"] for event in shown(mounted, OTHER)] == ["y", "y"]
    assert [event["agent"] for event in shown(mounted, ROOT)] == ["x", "x", "y", "y", "z", "z"]
    assert shown(mounted, STRANGER) == []
    assert mounted.stat("events").st_size == 0


def test_an_agent_sees_nothing(mounted: Mounted) -> None:
    agent = mounted.world.live(mounted.make("x", USER))
    fh = mounted.open("events")
    with mounted.as_(inside(agent)):
        with refused("EACCES"):
            mounted.open("events")
        # what a descriptor shows is what its opener may see
        assert mounted.read(fh)
    mounted.close(fh)


def test_what_is_removed_stays_told(mounted: Mounted) -> None:
    agent = mounted.make("x", USER)
    with mounted.as_(USER):
        mounted.put("agent/x.d/ctl", "stop\n")
        before = shown(mounted, USER)
        complete(mounted.ops.rmdir, mounted.inode("agent"), b"x.d", CONTEXT)
    assert shown(mounted, USER)[: len(before)] == before
    assert before[-1]["agent"] == agent.name


def test_it_shows_the_end_of_much(mounted: Mounted) -> None:
    agent = mounted.make("x", USER)
    for number in range(1000):
        happen(mounted, agent, f"{number} " + "x" * 500)
    events = shown(mounted, ROOT)
    size = sum(len(json.dumps(event, separators=(",", ":"))) + 1 for event in events)
    assert root._EVENTS_SHOWN - 1000 < size <= root._EVENTS_SHOWN
    last = int(events[-1]["text"].split()[0])
    assert last == 999
    assert [int(event["text"].split()[0]) for event in events] == list(
        range(1000 - len(events), 1000)
    )


def test_poll_tells_each_of_what_he_may_see(mounted: Mounted) -> None:
    agents = {caller: mounted.make(f"x{caller.uid}", caller) for caller in (USER, OTHER)}

    async def main() -> None:
        poller, waiters, files = mounted.base.cache.poller, {}, {}
        inode = await mounted.ops.lookup(1, b"events", CONTEXT)
        for caller in (USER, OTHER, ROOT):
            with mounted.as_(caller):
                fh = (await mounted.ops.open(inode.st_ino, os.O_RDONLY, CONTEXT)).fh
            await mounted.ops.read(fh, 0, 1 << 20)
            files[caller], waiters[caller] = fh, Waiter()

        async def ready(caller: Caller) -> bool:
            handle = cast(pyfuse3.PollHandle, waiters[caller])
            found = await mounted.ops.poll(inode.st_ino, files[caller], handle, CONTEXT)
            return bool(found & select.POLLPRI)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(poller.run)
            await trio.testing.wait_all_tasks_blocked()
            for caller in files:
                await ready(caller)
                await mounted.ops.read(files[caller], 0, 1 << 20)
                assert not await ready(caller)
            happen(mounted, agents[USER])
            with trio.fail_after(TIMEOUT):
                while not (waiters[USER].notified and waiters[ROOT].notified):
                    await trio.sleep(0.01)
            assert not waiters[OTHER].notified
            assert [await ready(caller) for caller in files] == [True, False, True]
            nursery.cancel_scope.cancel()
        for fh in files.values():
            await mounted.ops.release(fh)

    trio.run(main)


def test_poll_tells_of_what_had_no_room_on_the_disk(
    mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last number that root has seen is another owner's, and stays the last one."""
    first, second = mounted.make("x", USER), mounted.make("y", OTHER)
    write, poller = History.write, mounted.base.cache.poller

    def full(self: History, fd: int, path: str, lines: Iterable[str]) -> int:
        if f"events/{USER.uid}" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, fd, path, lines)

    monkeypatch.setattr(History, "write", full)
    happen(mounted, first)
    happen(mounted, second)
    inode = complete(mounted.ops.lookup, 1, b"events", CONTEXT).st_ino
    with mounted.as_(ROOT):
        fh = complete(mounted.ops.open, inode, os.O_RDONLY, CONTEXT).fh

    def seen() -> list[str]:
        lines = complete(mounted.ops.read, fh, 0, 1 << 20).splitlines()
        return [event["agent"] for event in map(json.loads, lines) if "text" in event]

    def ready(waiter: Waiter) -> bool:
        handle = cast(pyfuse3.PollHandle, waiter)
        return bool(complete(mounted.ops.poll, inode, fh, handle, CONTEXT) & select.POLLPRI)

    waiter = Waiter()
    assert seen() == []
    assert not ready(waiter)
    monkeypatch.undo()
    mounted.agents.journal._deliver()
    for tell in mounted.agents.journal._told["caught_up"]:
        tell()
    for each in poller._again.copy():
        poller.changed(each)
    assert waiter.notified
    assert ready(Waiter())
    assert seen() == ["x", "y"]
    assert not ready(Waiter())
    complete(mounted.ops.release, fh)


# the operation


class Peer:
    """Somebody at the daemon's socket."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._rest = b""

    async def ask(self, **fields: Any) -> None:
        await self.stream.send_all(json.dumps({"op": "events", **fields}).encode() + b"\n")

    async def frame(self) -> dict[str, Any]:
        with trio.fail_after(TIMEOUT):
            while b"\n" not in self._rest:
                some = await self.stream.receive_some(1 << 16)
                assert some, "the daemon hung up"
                self._rest += some
        line, _, self._rest = self._rest.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    async def frames(self, **fields: Any) -> list[dict[str, Any]]:
        """All that is answered, up to the end or an error."""
        await self.ask(**fields)
        found = [await self.frame()]
        while found[-1].get("type") not in ("end", "error"):
            found.append(await self.frame())
        return found


class Sockets_:
    def __init__(self, mounted: Mounted, sockets: Sockets) -> None:
        self.mounted = mounted
        self.sockets = sockets

    @asynccontextmanager
    async def peer(self, caller: Caller) -> AsyncIterator[Peer]:
        ours, theirs = trio.socket.socketpair()
        with self.mounted.as_(caller):
            await self.sockets._admit(Server(), trio.SocketStream(theirs))
        async with trio.SocketStream(ours) as stream:
            yield Peer(stream)


def with_sockets(mounted: Mounted, test: Callable[[Sockets_], Awaitable[None]]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            sockets = sockets_of(mounted, nursery)
            nursery.start_soon(sockets.run)
            await test(Sockets_(mounted, sockets))
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_the_operation_sends_what_the_file_shows_and_where_it_ends(mounted: Mounted) -> None:
    for name, caller in (("x", USER), ("y", OTHER)):
        happen(mounted, mounted.make(name, caller))
    expected = {caller: shown(mounted, caller) for caller in (USER, OTHER, ROOT, STRANGER)}

    async def test(sockets: Sockets_) -> None:
        for caller, events in expected.items():
            async with sockets.peer(caller) as peer:
                *found, end = await peer.frames(after=0)
                assert found == events
                last = events[-1]["seq"] if events else 0
                assert end == {"type": "end", "seq": last}
                # without a place it tells where it would begin
                assert await peer.frames() == [{"type": "end", "seq": last}]
                # and nothing is kept of who has read
                assert not sockets.sockets._replays._appended
                *found, end = await peer.frames(after=last)
                assert found == []
                if events:
                    *found, _ = await peer.frames(after=events[-1]["seq"] - 1)
                    assert found == events[-1:]
                assert await peer.frames(after=2**62) == [{"type": "end", "seq": 2**62}]

    with_sockets(mounted, test)


def test_some_types_and_agents_are_asked_for(mounted: Mounted) -> None:
    for name in ("x", "y"):
        happen(mounted, mounted.make(name, USER))
    last = shown(mounted, USER)[-1]["seq"]

    async def test(sockets: Sockets_) -> None:
        async with sockets.peer(USER) as peer:

            async def told(**fields: Any) -> list[tuple[str, str]]:
                *found, end = await peer.frames(after=0, **fields)
                assert end["seq"] == last
                return [(event["agent"], event["type"]) for event in found]

            report, create = "agent.report", "agent.create"
            assert await told(types=[report]) == [("x", report), ("y", report)]
            assert await told(types=["agent.c*"], agents=["y"]) == [("y", create)]
            assert await told(agents=["x", "z"]) == [("x", create), ("x", report)]
            assert await told(types=["agent.stop", "run.*"]) == []
            assert len(await told(types=["*"])) == len(await told(types=[], agents=[])) == 4

    with_sockets(mounted, test)


@pytest.mark.parametrize(
    "fields",
    [{"after": "e1"}, {"after": -1}, {"after": 1.0}, {"after": True}, {"after": 2**63},
     {"follow": 1}, {"types": "agent.stop"}, {"types": [1]}, {"agents": ["../x"]},
     {"types": ["agent.stop"] * 65}, {"types": ["report"]}, {"types": ["*.report"]},
     {"types": ["agent"]}, {"types": ["agent.stop", ""]}, {"types": ["x*"]}],
)  # fmt: skip
def test_what_is_no_question_is_refused(mounted: Mounted, fields: dict[str, Any]) -> None:
    async def test(sockets: Sockets_) -> None:
        async with sockets.peer(USER) as peer:
            (error,) = await peer.frames(**fields)
            assert error["code"] == "EINVAL"
            assert await peer.frames() == [{"type": "end", "seq": 0}]

    with_sockets(mounted, test)


def test_an_agent_asks_in_vain(mounted: Mounted) -> None:
    agent = mounted.world.live(mounted.make("x", USER))

    async def test(sockets: Sockets_) -> None:
        with contextlib.suppress(trio.BrokenResourceError):
            async with sockets.peer(inside(agent)) as peer:
                (error,) = await peer.frames(after=0)
                assert error["code"] == "EACCES"

    with_sockets(mounted, test)


def test_a_follower_gets_each_event_once(mounted: Mounted) -> None:
    agent, other = mounted.make("x", USER), mounted.make("y", OTHER)

    async def test(sockets: Sockets_) -> None:
        async with sockets.peer(USER) as now, sockets.peer(ROOT) as all_, sockets.peer(USER) as far:
            await now.ask(follow=True)
            await all_.ask(follow=True, after=0, types=["agent.report"])
            await far.ask(follow=True, after=2**62)
            await trio.testing.wait_all_tasks_blocked()
            for number in range(50):
                happen(mounted, other, str(number))
                happen(mounted, agent, str(number))
                if number % 3 == 0:
                    await trio.testing.wait_all_tasks_blocked()
            got = [await now.frame() for _ in range(50)]
            assert [event["text"] for event in got] == [str(number) for number in range(50)]
            got = [await all_.frame() for _ in range(100)]
            assert [event["agent"] for event in got] == ["y", "x"] * 50
            numbers = [event["seq"] for event in got]
            assert numbers == sorted(set(numbers))
            # nothing of the future has come
            assert not far._rest

    with_sockets(mounted, test)


def test_a_slow_reader_is_told_what_it_lost(mounted: Mounted) -> None:
    agent = mounted.make("x", USER)

    async def test(sockets: Sockets_) -> None:
        async with sockets.peer(USER) as slow, sockets.peer(USER) as fast:
            for peer in (slow, fast):
                await peer.ask(after=0, follow=True)
            numbers, lost = list[int](), list[dict[str, Any]]()
            for number in range(3000):
                happen(mounted, agent, f"{number} " + "x" * 1000)
                if number % 10 == 9:
                    await trio.testing.wait_all_tasks_blocked()
                    while len(numbers) < number + 2:
                        event = await fast.frame()
                        assert "seq" in event
                        numbers.append(event["seq"])
            found = list[int]()
            while not found or found[-1] != numbers[-1]:
                frame = await slow.frame()
                if frame["type"] == "lost":
                    lost.append(frame)
                    assert frame["after"] == found[-1]
                else:
                    found.append(frame["seq"])
            # all before, and all from the oldest on
            (gap,) = lost
            here = found.index(next(n for n in found if n > gap["after"]))
            assert found[:here] == numbers[:here]
            assert found[here:] == [n for n in numbers if n >= gap["oldest"]]
            assert len(found) < len(numbers)

    with_sockets(mounted, test)


def test_a_hundred_followers(mounted: Mounted) -> None:
    agent = mounted.make("x", USER)

    async def test(sockets: Sockets_) -> None:
        async with contextlib.AsyncExitStack() as stack:
            peers = [await stack.enter_async_context(sockets.peer(USER)) for _ in range(FOLLOWERS)]
            for peer in peers:
                await peer.ask(follow=True)
            await trio.testing.wait_all_tasks_blocked()
            for number in range(3):
                happen(mounted, agent, str(number))
                for peer in peers:
                    assert (await peer.frame())["text"] == str(number)

    with_sockets(mounted, test)
