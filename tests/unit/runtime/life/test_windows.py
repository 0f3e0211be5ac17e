"""Terminals on a machine in memory: who comes, who goes, and what ends with them."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from runtime.agents.visits import CLOSED, DETACHED, ENDED
from runtime.authority.accounts import Payer, Reserve, Resource
from runtime.cell.port import Execution, LiveCell
from runtime.errors import (
    AgainError,
    CtxError,
    NotRunningError,
    QuotaError,
    UnsupportedError,
    WrongStateError,
)
from runtime.kernel.handover import Descriptors, read_back, written
from runtime.life.windows import Wanted
from runtime.records.items import Message, Task, TaskStatus
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from tests.unit.runtime.life.test_lives import Stage, on_stage
from tests.worlds.memory import Machine
from tests.worlds.records import ROOT, World, inside, operator

SCREEN = (100, 30)
WINDOW = Wanted(starts=True, hangs_up=True, removes=True, screen=SCREEN)
KEPT = Wanted(starts=True, hangs_up=True)
JOINED = Wanted()


class Lobby(Stage):
    """Viewers, as the operator's client has them."""

    def __init__(self, world: World, machine: Machine, nursery: trio.Nursery) -> None:
        super().__init__(world, machine, nursery)
        self.held = ExitStack()

    def make(self, name: str = "x", **more: Any) -> Agent:
        agents = self.world.agents
        with agents.journal.acting(ROOT):
            agent = agents.births.create(ROOT, name)
        agents.journal.update(agent, **{"exec": "program", "tty": "80x24", **more})
        return agent

    def make_task(self, agent: Agent, caller: Any = ROOT, **more: Any) -> Task:
        agents = self.world.agents
        with agents.journal.acting(caller):
            task = agents.tasks.make(caller, agent, "enter-1")
        agents.tasks.set(task, **{"cmd": "bash", "tty": "80x24", **more})
        return task

    async def open(
        self, agent: Agent, wanted: Wanted, task: Task | None = None, caller: Any = ROOT
    ) -> tuple[int, socket.socket]:
        windows, progress = self.supervisor.windows, dict[str, Any]()
        who = self.world.agents.identity.payer(caller)
        await windows.view(caller, who, agent, task, wanted, progress)
        with windows.sending(agent, task, progress["viewer"]) as end:
            return progress["viewer"], self.held.enter_context(end.dup())

    async def busy(self, wanted: Wanted = WINDOW, **more: Any) -> tuple[Agent, socket.socket]:
        agent = self.make(**more)
        _, end = await self.open(agent, wanted)
        cell = self.cell(agent)
        await self.until(cell.facts.exist)
        self.machine.began(cell)
        await self.be(agent, Status.BUSY)
        return agent, end

    def visits(self, agent: Agent) -> list[tuple[Any, ...]]:
        """What its history tells of viewers."""
        come, gone = (self.events(agent, f"terminal.{end}") for end in ("attach", "leave"))
        told = sorted((*come, *gone), key=lambda event: int(event["id"][1:]))
        return [
            (event["viewer"], *(event[key] for key in ("run", "task", "reason") if key in event))
            for event in told
        ]

    def connections(self, uid: int = 0) -> int:
        return self.world.agents.accounts.use(uid, Resource.CONNECTIONS)

    def is_there(self, name: str = "x") -> bool:
        return self.world.agents.registry.named(name) is not None

    def close(self) -> None:
        """What a daemon has open goes with it; what monitors have does not."""
        windows = self.supervisor.windows
        for key, _ in windows._ends.items():
            windows._ends.drop(key)
        for end in windows._unsent.values():
            end.close()


@pytest.fixture(autouse=True)
def viewers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Monitors end with the test."""
    machines = []
    made = Machine.__init__

    def make(self: Machine, **more: Any) -> None:
        made(self, **more)
        machines.append(self)

    monkeypatch.setattr(Machine, "__init__", make)
    yield
    for machine in machines:
        for viewer in machine.viewers.values():
            viewer.end.close()


def in_lobby(
    world: World, act: Callable[[Lobby], Awaitable[None]], machine: Machine | None = None
) -> None:
    async def main(lobby: Lobby) -> None:
        with lobby.held:
            try:
                await act(lobby)
            finally:
                lobby.close()

    machine = machine or Machine()
    on_stage(world, main, machine, kind=Lobby)


# coming


def test_who_starts_it_is_there_before_the_program_is(world: World) -> None:
    async def act(lobby: Lobby) -> None:
        agent = lobby.make()
        number, end = await lobby.open(agent, WINDOW)
        assert (number, agent.status) == (1, Status.STARTING)
        assert [(v.number, v.hangs_up, v.removes) for v in agent.viewers] == [(1, True, True)]
        cell = lobby.cell(agent)
        await lobby.until(cell.facts.exist)
        viewer = lobby.machine.viewers[cell.facts.key, 1]
        visit = viewer.visit
        assert (viewer.screen, visit.hangs_up, visit.looks) == (SCREEN, True, False)
        end.send(b"iabc")
        assert viewer.end.recv(10) == b"iabc"
        assert lobby.visits(agent) == [(1, agent.run.id)]
        [event] = lobby.events(agent, "terminal.attach")
        assert (event["by"], event["look"]) == ("operator uid:0", False)
        assert [event["verb"] for event in lobby.events(agent, "agent.control")] == ["start"]
        assert lobby.connections() == 1

    in_lobby(world, act)


def test_others_join_and_leave_and_each_is_told_once(world: World) -> None:
    async def act(lobby: Lobby) -> None:
        agent, _ = await lobby.busy()
        cell, run = lobby.cell(agent), agent.run.id
        number, _ = await lobby.open(agent, Wanted(looks=True))
        assert number == 2 and lobby.machine.viewers[cell.facts.key, 2].visit.looks
        assert (lobby.supervisor.windows.viewers, lobby.supervisor.windows.terminals) == (2, 1)
        lobby.machine.left(cell, 2, DETACHED)
        await lobby.until(lambda: len(agent.viewers) == 1)
        assert lobby.connections() == 1
        number, _ = await lobby.open(agent, JOINED)
        assert number == 3, "no number is given twice"
        lobby.machine.ended(cell, code=0)
        await lobby.until(lambda: not lobby.is_there())
        assert lobby.visits(agent) == [
            (1, run), (2, run), (2, DETACHED), (3, run), (1, ENDED), (3, ENDED),
        ]  # fmt: skip
        assert lobby.connections() == lobby.supervisor.windows.viewers == 0

    in_lobby(world, act)


def test_what_is_on_a_terminal_is_no_result(world: World) -> None:
    async def act(lobby: Lobby) -> None:
        agent, _ = await lobby.busy(KEPT)
        documents = world.agents.documents
        out = documents.directory(agent) / "out"
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{0:020}").write_text("a prompt")
        lobby.machine.ended(lobby.cell(agent), code=0)
        await lobby.be(agent, Status.DEAD)
        assert documents.read(agent, "result.md") == b""

    in_lobby(world, act)


@pytest.mark.parametrize(
    ("fields", "wanted", "error", "words"),
    [
        ({"tty": ""}, JOINED, UnsupportedError, "ctx enter x"),
        ({"tty": ""}, WINDOW, UnsupportedError, "ctx enter x"),
        ({}, JOINED, WrongStateError, "is new: start it first"),
        ({"status": Status.DEAD}, JOINED, NotRunningError, "is dead"),
        ({"status": Status.DEAD}, WINDOW, WrongStateError, "dead"),
        ({"status": Status.PAUSED}, JOINED, WrongStateError, "has no run now"),
    ],
)
def test_when_nobody_may_look(
    world: World, fields: dict[str, Any], wanted: Wanted, error: type[CtxError], words: str
) -> None:
    async def act(lobby: Lobby) -> None:
        agent = lobby.make(**fields)
        with pytest.raises(error, match=words):
            await lobby.open(agent, wanted)
        assert (agent.viewers, lobby.connections()) == ((), 0)
        agent.status = Status.NEW

    in_lobby(world, act)


def test_whoever_starts_it_twice_is_refused_and_the_first_one_stays(world: World) -> None:
    async def act(lobby: Lobby) -> None:
        agent, _ = await lobby.busy()
        with pytest.raises(WrongStateError):
            await lobby.open(agent, WINDOW)
        assert len(agent.viewers) == lobby.connections() == 1
        lobby.machine.ended(lobby.cell(agent), code=0)
        await lobby.until(lambda: not lobby.is_there())
        assert lobby.connections() == 0

    in_lobby(world, act)


def test_eight_may_look(world: World) -> None:
    async def act(lobby: Lobby) -> None:
        agent, _ = await lobby.busy()
        for _ in range(7):
            await lobby.open(agent, JOINED)
        with pytest.raises(QuotaError, match="8 look at"):
            await lobby.open(agent, JOINED)
        assert len(agent.viewers) == lobby.connections() == 8
        lobby.machine.left(lobby.cell(agent), 3, CLOSED)
        await lobby.until(lambda: len(agent.viewers) == 7)
        await lobby.open(agent, JOINED)

    in_lobby(world, act)


@pytest.mark.settings(owner_connections=10)
def test_viewers_are_connections_of_who_looks(world: World) -> None:
    async def act(lobby: Lobby) -> None:
        accounts = world.agents.accounts
        agent, _ = await lobby.busy()
        world.agents.journal.update(agent, owner=1000)
        who = Payer(1000, reserve=Reserve.OWNER)
        for _ in range(9):
            accounts.charged(who, Resource.CONNECTIONS, 1)
        await lobby.open(agent, JOINED, caller=operator(1000))
        with pytest.raises(QuotaError, match="connections of uid 1000"):
            await lobby.open(agent, JOINED, caller=operator(1000))
        assert lobby.connections(1000) == 10
        assert len(agent.viewers) == 2

    in_lobby(world, act)


@pytest.mark.parametrize(
    ("refused", "error", "words"),
    [
        (BrokenPipeError, NotRunningError, "has just ended"),
        (BlockingIOError, AgainError, "try again"),
    ],
)
def test_whoever_finds_no_monitor_is_told_so_and_nothing_is_left(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    refused: type[OSError],
    error: type[CtxError],
    words: str,
) -> None:
    def refuse(*_: Any) -> None:
        raise refused

    async def act(lobby: Lobby) -> None:
        agent, _ = await lobby.busy()
        monkeypatch.setattr(lobby.machine, "view", refuse)
        with pytest.raises(error, match=words):
            await lobby.open(agent, JOINED)
        assert (len(agent.viewers), lobby.connections()) == (1, 1)

    in_lobby(world, act)


# hanging up


def test_a_viewer_that_closes_hangs_up(world: World) -> None:
    async def act(lobby: Lobby) -> None:
        agent, _ = await lobby.busy()
        lobby.machine.left(lobby.cell(agent), 1, CLOSED, hung_up=True)
        await lobby.until(lambda: not lobby.is_there())
        assert (agent.outcome, agent.reason) == ("cancelled", "hangup")
        assert lobby.visits(agent)[1:] == [(1, CLOSED)]

    in_lobby(world, act)


def test_one_that_leaves_does_not_and_the_agent_stays_when_it_is_over(world: World) -> None:
    async def act(lobby: Lobby) -> None:
        agent, _ = await lobby.busy()
        lobby.machine.left(lobby.cell(agent), 1, DETACHED)
        await lobby.until(lambda: not agent.viewers)
        assert agent.status is Status.BUSY
        lobby.machine.ended(lobby.cell(agent), code=3)
        await lobby.be(agent, Status.DEAD)
        assert (agent.reason, lobby.is_there()) == ("exit:3", True)

    in_lobby(world, act)


def test_one_that_leaves_just_before_the_end_has_left(world: World) -> None:
    async def act(lobby: Lobby) -> None:
        agent, _ = await lobby.busy()
        cell = lobby.cell(agent)
        lobby.machine.left(cell, 1, DETACHED, exit_code=0, ended=2, finished=True)
        lobby.machine.lost(cell)
        await lobby.be(agent, Status.DEAD)
        assert lobby.is_there()
        assert lobby.visits(agent)[1:] == [(1, DETACHED)]

    in_lobby(world, act)


@pytest.mark.parametrize("restart", ["no", "always"])
def test_a_hang_up_is_no_failure_and_keeps_the_agent(world: World, restart: str) -> None:
    async def act(lobby: Lobby) -> None:
        agent, _ = await lobby.busy(KEPT, restart=restart)
        lobby.machine.left(lobby.cell(agent), 1, CLOSED, hung_up=True)
        await lobby.be(agent, Status.DEAD)
        assert (agent.outcome, agent.reason, lobby.is_there()) == ("cancelled", "hangup", True)

    in_lobby(world, act)


def test_a_restart_is_another_terminal(world: World) -> None:
    async def act(lobby: Lobby) -> None:
        agent, _ = await lobby.busy(WINDOW, restart="always")
        lobby.machine.ended(lobby.cell(agent), code=0)
        await lobby.until(lambda: agent.restarts == 1 and bool(agent.run.id))
        assert (agent.viewers, agent.window, lobby.connections()) == ((), "", 0)
        cell = lobby.cell(agent)
        await lobby.until(cell.facts.exist)
        lobby.machine.began(cell)
        await lobby.be(agent, Status.BUSY)
        number, _ = await lobby.open(agent, JOINED)
        assert number == 1

    in_lobby(world, act)


def test_what_is_paused_tells_and_what_is_aborted_has_another_terminal(world: World) -> None:
    async def act(lobby: Lobby) -> None:
        agent, _ = await lobby.busy()
        key = lobby.cell(agent).facts.key
        lobby.supervisor.pause(agent)
        await lobby.open(agent, JOINED)
        lobby.supervisor.resume(agent)
        assert lobby.machine.told == [(key, "paused"), (key, "paused"), (key, "resumed")]
        lobby.supervisor.abort(agent, None)
        cell = lobby.cell(agent)
        lobby.machine._say(cell, signal=9, ended=2)  # and its cell goes on
        lobby.machine.empty(cell)
        await lobby.be(agent, Status.PAUSED)
        await lobby.until(lambda: not agent.run.id)
        assert lobby.machine.told[3:] == [(key, "aborted")]
        assert agent.viewers == () and lobby.is_there()
        with pytest.raises(WrongStateError, match="no run now"):
            await lobby.open(agent, JOINED)
        lobby.supervisor.resume(agent)
        await lobby.until(lambda: bool(agent.run.id))
        run: Execution = lobby.cell(agent).run_at_hand()
        await lobby.until(run.facts.exist)
        lobby.machine.began(run)
        await lobby.be(agent, Status.BUSY)
        await lobby.open(agent, Wanted(hangs_up=True))
        assert lobby.machine.viewers.keys() >= {(run.facts.key, 1)}
        lobby.machine.left(run, 1, CLOSED, hung_up=True)
        await lobby.be(agent, Status.DEAD)
        assert (agent.outcome, agent.reason) == ("cancelled", "hangup")

    in_lobby(world, act, Machine(obedient=False))


# before there is a terminal


def test_who_waits_for_a_turn_and_closes_hangs_up(world: World) -> None:
    async def act(lobby: Lobby) -> None:
        agent, end = await queued(lobby)
        lobby.held.close()
        await lobby.until(lambda: not lobby.is_there("kid"))
        assert (agent.outcome, agent.reason) == ("cancelled", "hangup")
        assert end.fileno() == -1

    in_lobby(world, act)


def test_who_waits_for_a_turn_may_leave(world: World) -> None:
    async def act(lobby: Lobby) -> None:
        agent, end = await queued(lobby)
        end.send(b"i...")
        end.send(b"d")
        lobby.held.close()
        await lobby.until(lambda: not agent.viewers)
        assert (agent.status, agent.window) == (Status.STARTING, "")
        assert lobby.visits(agent)[1:] == [(1, DETACHED)]

    in_lobby(world, act)


def test_who_waits_for_a_turn_is_told_of_the_end(world: World) -> None:
    async def act(lobby: Lobby) -> None:
        agent, end = await queued(lobby)
        with world.agents.journal.acting(ROOT):
            lobby.supervisor.stop(agent, kill=False)
        await lobby.until(lambda: not lobby.is_there("kid"))
        assert (end.recv(100), end.recv(100)) == (b"x failed operator_stop", b"")

    in_lobby(world, act)


async def queued(lobby: Lobby) -> tuple[Agent, socket.socket]:
    """A child that waits for its turn, and somebody who waits for its terminal."""
    agents = lobby.world.agents
    boss = await lobby.begin(limits={"children.running": "1"}, policy="allow x_t agent:* create\n")
    lobby.machine.began(lobby.cell(boss))
    await lobby.be(boss, Status.BUSY)
    for name in ("first", "kid"):
        kid = agents.births.create(inside(boss), name)
        agents.journal.update(kid, exec="program", tty="80x24")
        if name == "first":
            lobby.supervisor.start(kid)
            await lobby.until(lobby.cell(kid).facts.exist)
            lobby.machine.began(lobby.cell(kid))
            await lobby.be(kid, Status.BUSY)
    _, end = await lobby.open(kid, WINDOW)
    assert kid.waits_its_turn and lobby.visits(kid) == [(1, "")]
    return kid, end


def test_who_leaves_while_it_is_launched_is_heard_by_its_monitor_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two who read what it says would each have a part of that."""

    async def act(lobby: Lobby) -> None:
        starter, go = lobby.supervisor._follower.starter, trio.Event()
        launch = starter.launch

        async def wait(live_cell: LiveCell, *more: Any) -> None:
            await go.wait()
            await launch(live_cell, *more)

        monkeypatch.setattr(starter, "launch", wait)
        agent = lobby.make()
        _, end = await lobby.open(agent, WINDOW)
        await wait_all_tasks_blocked()
        for packet in (b"i...", b"d"):
            end.send(packet)
        lobby.held.close()
        await wait_all_tasks_blocked()
        assert lobby.visits(agent) == [(1, "r1")]
        go.set()
        await lobby.until(lambda: bool(lobby.machine.viewers))
        [viewer] = lobby.machine.viewers.values()
        assert [viewer.end.recv(100) for _ in range(3)] == [b"i...", b"d", b""]
        assert agent.status is Status.STARTING

    in_lobby(world, act)


def test_what_cannot_be_launched_is_told_to_who_started_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(lobby: Lobby) -> None:
        starter = lobby.supervisor._follower.starter

        async def refuse(*_: Any) -> None:
            raise UnsupportedError("no room")

        monkeypatch.setattr(starter, "launch", refuse)
        agent = lobby.make()
        _, end = await lobby.open(agent, KEPT)
        await lobby.be(agent, Status.DEAD)
        assert (end.recv(100), end.recv(100)) == (b"x failed no room", b"")
        assert agent.reason == "start_failed: no room"

    in_lobby(world, act)


# tasks


@pytest.mark.parametrize("who", ["operator", "agent"])
@pytest.mark.parametrize("viewer", ["removes", "stays", "none"])
def test_a_shell_of_an_operators_leaves_nothing(world: World, who: str, viewer: str) -> None:
    async def act(lobby: Lobby) -> None:
        agent = await lobby.begin(mode="turn")
        lobby.machine.held(lobby.cell(agent))
        await lobby.be(agent, Status.IDLE)
        caller = ROOT if who == "operator" else inside(agent)
        task = lobby.make_task(agent, caller)
        directory = world.agents.results.directory(agent, task)
        if viewer == "none":
            world.agents.tasks.start(caller, agent, task)
        else:
            wanted = Wanted(starts=True, removes=viewer == "removes")
            number, _ = await lobby.open(agent, wanted, task)
            assert number == 1 and task.status is TaskStatus.QUEUED
        execution = lobby.cell(agent).command(task.name)
        await lobby.until(execution.facts.exist)
        lobby.machine.began(execution)
        await lobby.until(lambda: task.status is TaskStatus.RUNNING)
        directory.mkdir(parents=True, exist_ok=True)
        assert lobby.supervisor.windows.terminals == 1
        lobby.machine.ended(execution, code=0)
        await lobby.until(lambda: task.over)
        stays = who == "agent" and viewer != "removes"
        there = world.agents.items.named(agent.index, Task, task.name) is task
        assert (there, directory.exists()) == (stays, stays)
        notices = world.agents.items.of(agent.index, Message)
        assert len(notices) == (who == "agent")
        assert agent.status is (Status.IDLE if who == "operator" else agent.status)

    in_lobby(world, act)


@pytest.mark.parametrize("removes", [False, True])
def test_a_task_is_hung_up_alone(world: World, removes: bool) -> None:
    async def act(lobby: Lobby) -> None:
        agent = await lobby.begin(mode="turn")
        lobby.machine.held(lobby.cell(agent))
        await lobby.be(agent, Status.IDLE)
        task = lobby.make_task(agent, inside(agent))
        wanted = Wanted(starts=True, hangs_up=True, removes=removes)
        await lobby.open(agent, wanted, task)
        execution = lobby.cell(agent).command(task.name)
        await lobby.until(execution.facts.exist)
        lobby.machine.began(execution)
        await lobby.until(lambda: task.status is TaskStatus.RUNNING)
        lobby.machine.left(execution, 1, CLOSED, hung_up=True)
        await lobby.until(lambda: task.over)
        assert (task.status, task.reason) == (TaskStatus.CANCELLED, "hangup")
        assert (world.agents.items.named(agent.index, Task, task.name) is task) is not removes
        assert agent.accepts_children

    in_lobby(world, act)


def test_a_task_without_a_terminal_names_what_opens_one(world: World) -> None:
    async def act(lobby: Lobby) -> None:
        agent, _ = await lobby.busy()
        task = lobby.make_task(agent, tty="")
        with pytest.raises(UnsupportedError, match="ctx enter x"):
            await lobby.open(agent, JOINED, task)
        world.agents.tasks.set(task, tty="80x24")
        with pytest.raises(WrongStateError, match="not started"):
            await lobby.open(agent, JOINED, task)

    in_lobby(world, act)


# the next daemon


def again(
    world: World, before: Callable[[Lobby], Awaitable[None]],
    after: Callable[[Lobby], Awaitable[None]],
) -> None:  # fmt: skip
    """What the machine has goes on; the second daemon begins as after a crash."""
    machine = Machine()
    in_lobby(world, before, machine)
    world.reopen()

    async def second(lobby: Lobby) -> None:
        await lobby.supervisor.recover()
        await after(lobby)

    in_lobby(world, second, machine)


def found(lobby: Lobby, name: str = "x") -> Agent:
    agent = lobby.world.agents.registry.named(name)
    assert agent is not None
    return agent


def test_the_next_daemon_knows_viewers_and_charges_them(world: World) -> None:
    async def before(lobby: Lobby) -> None:
        agent, _ = await lobby.busy()
        await lobby.open(agent, JOINED)

    async def after(lobby: Lobby) -> None:
        agent = found(lobby)
        assert [visit.number for visit in agent.viewers] == [1, 2]
        assert lobby.connections() == 2
        cell = lobby.cell(agent)
        number, _ = await lobby.open(agent, JOINED)
        assert number == 3
        lobby.machine.left(cell, 1, CLOSED, hung_up=True)
        await lobby.until(lambda: not lobby.is_there())
        assert lobby.connections() == 0

    again(world, before, after)


def test_what_was_hung_up_meanwhile_is_ended_by_the_next_one(world: World) -> None:
    async def before(lobby: Lobby) -> None:
        await lobby.busy()

    async def after(lobby: Lobby) -> None:
        await lobby.until(lambda: not lobby.is_there())

    machine = Machine()
    in_lobby(world, before, machine)
    [cell] = [each for each in machine.crowds.values()]
    machine.left(cell, 1, CLOSED, hung_up=True)
    world.reopen()

    async def second(lobby: Lobby) -> None:
        agent = found(lobby)
        await lobby.supervisor.recover()
        await after(lobby)
        assert (agent.outcome, agent.reason) == ("cancelled", "hangup")

    in_lobby(world, second, machine)


@pytest.mark.parametrize("wanted", [WINDOW, Wanted(starts=True, removes=True)])
def test_whoever_had_no_monitor_is_gone_with_the_daemon(world: World, wanted: Wanted) -> None:
    async def before(lobby: Lobby) -> None:
        agent, progress = lobby.make(), dict[str, Any]()
        who = world.agents.identity.payer(ROOT)
        await lobby.supervisor.windows.view(ROOT, who, agent, None, wanted, progress)

    async def after(lobby: Lobby) -> None:
        agent = None
        if wanted.hangs_up:
            await lobby.until(lambda: not lobby.is_there())
        else:
            agent = found(lobby)
            assert (agent.viewers, agent.status) == ((), Status.STARTING)
        assert lobby.connections() == 0

    again(world, before, after)


def test_both_ends_pass_to_a_daemon_that_is_executed_again(world: World) -> None:
    kept: dict[str, Any] = {}

    async def before(lobby: Lobby) -> None:
        windows, progress = lobby.supervisor.windows, dict[str, Any]()
        _, kept["waits"] = await queued(lobby)
        other, who = lobby.make("other"), world.agents.identity.payer(ROOT)
        await windows.view(ROOT, who, other, None, KEPT, progress)
        assert windows.save(Descriptors()) == [], "as versions without terminals have it"
        saved = read_back(b"".join(written(windows.save_viewers(Descriptors()))))
        for each in (*saved["waiting"], *saved["unsent"]):
            each[3] = os.dup(each[3])
        kept["saved"] = saved
        kept["waits"] = kept["waits"].dup()

    async def after(lobby: Lobby) -> None:
        other, windows = found(lobby, "other"), lobby.supervisor.windows
        with windows.sending(other, None, 1) as end:
            end.send(b"d")
        await lobby.until(lambda: lobby.cell(other).facts.exist())
        assert lobby.machine.viewers[lobby.cell(other).facts.key, 1].end.recv(10) == b"d"
        kid, first = found(lobby, "kid"), found(lobby, "first")
        assert [visit.number for visit in kid.viewers] == [1] and kid.waits_its_turn
        lobby.machine.ended(lobby.cell(first), code=0)
        await lobby.until(lambda: bool(kid.run.id) and lobby.cell(kid).facts.exist())
        viewer = lobby.machine.viewers[lobby.cell(kid).facts.key, 1]
        assert (viewer.screen, viewer.visit.hangs_up) == (SCREEN, True)
        viewer.end.send(b"o$ ")
        assert kept["waits"].recv(10) == b"o$ "
        assert lobby.connections() == 2

    machine = Machine()
    in_lobby(world, before, machine)
    world.reopen()

    async def second(lobby: Lobby) -> None:
        lobby.supervisor.windows.take_over_viewers(kept["saved"])
        await lobby.supervisor.recover()
        with kept["waits"]:
            await after(lobby)

    in_lobby(world, second, machine)


def test_what_waits_for_an_agent_that_is_gone_is_closed(world: World) -> None:
    async def act(lobby: Lobby) -> None:
        ours, theirs = socket.socketpair()
        with ours:
            saved = {"waiting": [[999, "", 1, theirs.detach(), None]], "unsent": []}
            lobby.supervisor.windows.take_over_viewers(saved)
            assert ours.recv(1) == b""

    in_lobby(world, act)
