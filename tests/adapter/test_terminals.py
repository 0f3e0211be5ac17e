"""Files and operations of terminals, without a kernel: what may be written, who may look."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from runtime.caller import Caller
from runtime.errors import NotRunningError
from runtime.life.windows import Wanted
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.records.run import Run, RunStatus
from runtime.records.visits import Visit
from runtime.sockets.connection import Connection, Server
from runtime.sockets.operations import DAEMON_OPERATIONS, OPERATIONS
from runtime.sockets.request import Request
from tests.worlds.daemon import TIMEOUT
from tests.worlds.records import ROOT, inside, world_in
from tests.worlds.tree import STRANGER, USER, Mounted, mounted_in, refused, sockets_of

X = "agent/x.d"
SIZES = ("80x24", "1x1", "1000x1000", "")
NO_SIZES = (
    "80", "0x0", "0x24", "80x0", "9999x9999", "1001x24", "80x1001", "80X24", "80x24x1", " 80x24",
    "080x24", "-1x24", "text", "８0x24",
)  # fmt: skip


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    with mounted_in(tmp_path) as mounted:
        mounted.make("x", USER)
        yield mounted


def with_task(mounted: Mounted) -> str:
    mounted.world.live(mounted.agent("x"))
    with mounted.agents.journal.acting(ROOT):
        mounted.agents.tasks.make(ROOT, mounted.agent("x"), "t")
    return f"{X}/task/t"


@pytest.mark.parametrize("below", ["", "task/t/"])
@pytest.mark.parametrize("text", SIZES)
def test_a_size_is_columns_and_rows(mounted: Mounted, below: str, text: str) -> None:
    if below:
        with_task(mounted)
    path = f"{X}/{below}tty"
    assert mounted.get(path) == ""
    mounted.put(path, f"{text}\n")
    assert mounted.get(path) == (f"{text}\n" if text else "")


@pytest.mark.parametrize("below", ["", "task/t/"])
@pytest.mark.parametrize("text", NO_SIZES)
def test_nothing_else_is(mounted: Mounted, below: str, text: str) -> None:
    if below:
        with_task(mounted)
    path = f"{X}/{below}tty"
    with refused("EINVAL"):
        mounted.put(path, f"{text}\n")
    assert "COLSxROWS" in mounted.reason
    assert mounted.get(path) == ""


@pytest.mark.parametrize("mode", ["turn", "resident"])
def test_a_terminal_is_for_mode_once_whichever_is_written_first(
    mounted: Mounted, mode: str
) -> None:
    mounted.put(f"{X}/tty", "80x24\n")
    with refused("EINVAL"):
        mounted.put(f"{X}/mode", f"{mode}\n")
    assert "mode" in mounted.reason and "tty" in mounted.reason
    mounted.put(f"{X}/tty", "")
    mounted.put(f"{X}/mode", f"{mode}\n")
    with refused("EINVAL"):
        mounted.put(f"{X}/tty", "80x24\n")
    assert f"mode is {mode}" in mounted.reason and "tty" in mounted.reason
    mounted.put(f"{X}/tty", "\n")
    mounted.put(f"{X}/mode", "once\n")
    mounted.put(f"{X}/tty", "80x24\n")


def test_a_command_types_at_a_terminal_or_gets_input(mounted: Mounted) -> None:
    task = with_task(mounted)
    mounted.put(f"{task}/tty", "80x24\n")
    with refused("EINVAL"):
        mounted.put(f"{task}/accepts_input", "1\n")
    assert "accepts_input" in mounted.reason and "tty" in mounted.reason
    mounted.put(f"{task}/accepts_input", "0\n")
    mounted.put(f"{task}/tty", "\n")
    mounted.put(f"{task}/accepts_input", "1\n")
    with refused("EINVAL"):
        mounted.put(f"{task}/tty", "80x24\n")
    assert "accepts_input" in mounted.reason and "tty" in mounted.reason


def test_it_is_said_before_the_start(mounted: Mounted) -> None:
    mounted.world.live(mounted.agent("x"))
    with refused("EBUSY"):
        mounted.put(f"{X}/tty", "80x24\n")


def test_agents_tells_who_has_one_and_how_many_look(mounted: Mounted) -> None:
    def row() -> dict[str, Any]:
        return dict(json.loads(mounted.get("agents")))

    assert not {"tty", "viewers"} & row().keys()
    mounted.put(f"{X}/tty", "80x24\n")
    assert (row()["tty"], row()["viewers"]) == ("80x24", 0)
    visits = tuple(Visit(number=n, uid=0) for n in (1, 2))
    mounted.agents.journal.update(mounted.agent("x"), viewers=visits)
    assert row()["viewers"] == 2
    with mounted.as_(STRANGER):
        assert not {"tty", "viewers"} & row().keys()


def test_metrics_tell_how_many_there_are(mounted: Mounted) -> None:
    agent = mounted.live(mounted.agent("x"), run="r1")
    assert "ctxfs_terminals 0\n" in mounted.get("metrics")
    run = Run(id=agent.run.id, status=RunStatus.RUNNING, pid=7)
    visits = (Visit(number=1, uid=0),)
    mounted.agents.journal.update(agent, tty="80x24", run=run, viewers=visits)
    text = mounted.get("metrics")
    assert "ctxfs_terminals 1\n" in text and "ctxfs_viewers 1\n" in text


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    with world_in(tmp_path) as world:
        agent = world.agents.births.create(ROOT, "x")
        visit = Visit(number=3, uid=1000, looks=True, hangs_up=True)
        world.agents.journal.update(agent, tty="80x24", viewers=(visit,))
        world.live(agent)
        task = world.agents.tasks.make(ROOT, agent, "t")
        with world.agents.journal.changing() as change:
            change.put(task, tty="100x30", viewers=(visit,), window="end", maker=1000)
        after = world.reopen()
        again = after.registry.named("x")
        assert again is not None
        [read] = after.tasks.known(again)
        assert (again.tty, again.viewers) == ("80x24", (visit,))
        assert (read.tty, read.viewers) == ("100x30", (visit,))
        assert (read.window, read.maker) == ("end", 1000)


# the operation


Ask = Callable[..., Awaitable[tuple[dict[str, Any], list[socket.socket]]]]


class Asking:
    """Whoever asks at ``ctxd.sock``."""

    def __init__(self, mounted: Mounted, nursery: trio.Nursery, stack: ExitStack) -> None:
        self.mounted, self.stack = mounted, stack
        self.sockets = sockets_of(mounted, nursery)

    async def ask(
        self, caller: Caller, **fields: Any
    ) -> tuple[dict[str, Any], list[socket.socket]]:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        ours.setblocking(False)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(theirs))
        with self.mounted.as_(caller), ours, trio.fail_after(TIMEOUT):
            identity = self.mounted.agents.identity
            before, identity.resolve_peer = identity.resolve_peer, lambda _: caller  # type: ignore
            try:
                await self.sockets._admit(Server(), stream)
            finally:
                identity.resolve_peer = before  # type: ignore[method-assign]
            ours.send(json.dumps({"op": "terminal", **fields}).encode() + b"\n")
            await trio.lowlevel.wait_readable(ours)
            data, fds, _, _ = socket.recv_fds(ours, 1 << 16, 4)
        ends = [self.stack.enter_context(socket.socket(fileno=fd)) for fd in fds]
        return json.loads(data), ends


def asking(mounted: Mounted, act: Callable[[Asking], Awaitable[None]]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            with ExitStack() as stack:
                await act(Asking(mounted, nursery, stack))
            nursery.cancel_scope.cancel()
        windows = mounted.supervisor.windows
        for key, _ in windows._ends.items():
            windows._ends.drop(key)
        for viewer in mounted.machine.viewers.values():
            viewer.end.close()

    trio.run(main)


def running(mounted: Mounted, **fields: Any) -> Agent:
    mounted.agents.journal.update(mounted.agent("x"), **{"tty": "80x24", **fields})
    agent = mounted.live(mounted.agent("x"), run="r1")
    live_cell = mounted.supervisor._live_cells[agent.index]
    live_cell.run_at_hand().note_launched()
    mounted.machine.born(live_cell.run_at_hand())
    return agent


def test_an_operator_joins(mounted: Mounted) -> None:
    async def act(peer: Asking) -> None:
        agent = running(mounted)
        said, [end] = await peer.ask(USER, agent="x", look=True, size="100x30")
        assert said == {"type": "terminal", "agent": "x", "run": "r1", "viewer": 1}
        assert end.type == socket.SOCK_SEQPACKET
        [viewer] = mounted.machine.viewers.values()
        assert viewer.visit == Visit(number=1, uid=1000, looks=True)
        assert viewer.screen == (100, 30)
        assert agent.viewers == (Visit(number=1, uid=1000, looks=True),)
        viewer.end.send(b"o$ ")
        assert end.recv(10) == b"o$ "
        assert not mounted.supervisor.windows._unsent

    asking(mounted, act)


def test_an_operator_starts_what_is_new(mounted: Mounted) -> None:
    async def act(peer: Asking) -> None:
        mounted.agents.journal.update(mounted.agent("x"), exec="program", tty="80x24")
        said, ends = await peer.ask(USER, agent="x", start=True, hangup=True, remove=True)
        assert said == {"type": "terminal", "agent": "x", "run": "r1", "viewer": 1}
        assert len(ends) == 1 and mounted.supervisor.said == [("start", "x")]
        again, ends = await peer.ask(USER, agent="x", start=True)
        assert (again["code"], ends) == ("EBUSY", [])

    asking(mounted, act)


def test_the_viewer_takes_the_place_of_a_window(mounted: Mounted) -> None:
    async def act(peer: Asking) -> None:
        agent = mounted.agent("x")
        mounted.agents.journal.update(agent, exec="program", tty="80x24")
        windows, who = mounted.supervisor.windows, mounted.agents.identity.payer(USER)
        with windows.make(agent, who, remove=True):
            assert agent.window == "remove"
            await peer.ask(USER, agent="x", start=True, hangup=True)
            assert agent.window == ""
            assert [key.viewer for key, _ in windows._ends.items()] == [1]

    asking(mounted, act)


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"agent": "x", "look": 1}, "EINVAL", "look: write true or false"),
        ({"agent": "x", "start": "yes"}, "EINVAL", "start: write true or false"),
        ({"agent": "x", "hangup": None}, "EINVAL", "hangup: write true or false"),
        ({"agent": "x", "remove": 0}, "EINVAL", "remove: write true or false"),
        ({"agent": "x", "size": "big"}, "EINVAL", "COLSxROWS"),
        ({"agent": "x", "size": 80}, "EINVAL", "COLSxROWS"),
        ({"agent": "x", "size": "0x0"}, "EINVAL", "COLSxROWS"),
        ({"agent": "x", "task": "none"}, "ENOENT", "no task"),
        ({"agent": "x", "task": 7}, "EINVAL", "task"),
        ({"agent": "none"}, "ENOENT", "no such agent"),
        ({}, "ENOENT", "write the name of an agent"),
    ],
)
def test_what_is_malformed_or_is_not_there(
    mounted: Mounted, fields: dict[str, Any], code: str, words: str
) -> None:
    async def act(peer: Asking) -> None:
        running(mounted)
        said, ends = await peer.ask(USER, **fields)
        assert (said["type"], said["code"], ends) == ("error", code, [])
        assert words in said["message"]

    asking(mounted, act)


def test_it_is_nobody_elses(mounted: Mounted) -> None:
    async def act(peer: Asking) -> None:
        agent = running(mounted)
        said, ends = await peer.ask(STRANGER, agent="x")
        assert (said["code"], ends) == ("ENOENT", [])
        said, ends = await peer.ask(inside(agent), agent="x")
        assert (said["code"], ends) == ("EACCES", [])
        assert agent.viewers == ()

    assert "terminal" not in OPERATIONS, "agents do not reach it by a socket of theirs"
    asking(mounted, act)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"status": Status.NEW}, "EBUSY"),
        ({"status": Status.DEAD}, "ESRCH"),
        ({"tty": ""}, "EOPNOTSUPP"),
    ],
)
def test_when_it_is_refused(mounted: Mounted, fields: dict[str, Any], code: str) -> None:
    async def act(peer: Asking) -> None:
        agent = running(mounted)
        mounted.agents.journal.update(agent, **fields)
        said, ends = await peer.ask(USER, agent="x")
        assert (said["code"], ends) == (code, [])
        assert ("ctx enter x" in said["message"]) is (code == "EOPNOTSUPP")

    asking(mounted, act)


def test_the_ninth_is_refused(mounted: Mounted) -> None:
    async def act(peer: Asking) -> None:
        running(mounted)
        for number in range(1, 9):
            said, _ = await peer.ask(USER, agent="x")
            assert said["viewer"] == number
        said, ends = await peer.ask(USER, agent="x")
        assert (said["code"], ends) == ("EDQUOT", [])

    asking(mounted, act)


def test_a_daemon_that_is_executed_again_sends_what_was_opened_before(mounted: Mounted) -> None:
    sent: list[dict[str, Any]] = []

    async def hand(frame: dict[str, Any], descriptor: int, asked: Any) -> None:
        sent.append(frame)
        assert os.fstat(descriptor)

    async def act(peer: Asking) -> None:
        agent, progress = running(mounted), dict[str, Any]()
        who = mounted.agents.identity.payer(USER)
        windows = mounted.supervisor.windows
        await windows.view(USER, who, agent, None, Wanted(), progress)
        request = Request(
            fields={"op": "terminal", "agent": "x", "size": "no size, which was looked at before"},
            progress=progress,
            services=peer.sockets._services,
            connection=cast(Connection, SimpleNamespace(hand=hand, server=Server(), caller=USER)),
        )
        handler = DAEMON_OPERATIONS["terminal"].handler
        await handler(request)
        assert sent == [{"type": "terminal", "agent": "x", "run": "r1", "viewer": 1}]
        assert len(agent.viewers) == 1
        with pytest.raises(NotRunningError):
            await handler(request)  # it was sent, and is closed here

    asking(mounted, act)
