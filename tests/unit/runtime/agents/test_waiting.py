"""Waits: what each may become, what fires them, and that it happens once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from runtime.agents import messages, moments, waiting
from runtime.agents.conditions import Payload
from runtime.agents.planes import armed_for
from runtime.errors import (
    CtxError,
    DeniedError,
    MalformedError,
    MissingError,
    NoSpaceError,
    QuotaError,
    TakenError,
    WrongStateError,
)
from runtime.ids import BootId, RunId, TriggerToken
from runtime.records.change import Change
from runtime.records.items import (
    Message,
    MessageStatus,
    Task,
    TaskStatus,
    Wait,
    WaitStatus,
    Work,
)
from runtime.records.lifecycle import LIVE, Status
from runtime.records.model import Agent, Outcome
from runtime.texts.names import parse_moment, timestamp
from tests.worlds.records import ROOT, World, add_end, cancel_new, inside, operator, rmdir, world_in

USER = operator(1000)
NOON = 1_800_000_000.0


class Clock:
    """What the waiting plane takes for the time: ``set`` is what the wall clock was set by."""

    LOOK_AGAIN = 60.0
    SET_SECONDS = 0.1

    def __init__(self) -> None:
        self.now = NOON
        self.set = 0.0

    def wall(self) -> float:
        return self.now + self.set

    def up(self) -> float:
        return self.now - NOON + 1000

    def ahead(self) -> float:
        return self.wall() - self.up()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (waiting, moments):
        monkeypatch.setattr(module, "clock", clock)
    return clock


pytestmark = pytest.mark.settings(waits=8)


@pytest.fixture
def agent(world: World) -> Agent:
    return made_live(world, "coder")


def made_live(world: World, name: str, parent: Agent | None = None) -> Agent:
    caller = inside(world.may_create(parent)) if parent is not None else USER
    agent = world.live(world.agents.births.create(caller, name))
    world.agents.journal.update(agent, mode="turn")
    return agent


def make(world: World, agent: Agent, name: str, **fields: str) -> Wait:
    wait = world.agents.waiting.make(USER, agent, name)
    for field, text in fields.items():
        world.agents.waiting.set(agent, wait, field, text)
    return wait


def armed(world: World, agent: Agent, name: str, on: str, **fields: str) -> Wait:
    wait = make(world, agent, name, **fields)
    world.agents.waiting.arm(USER, agent, wait, on)
    return wait


def work_item(world: World, agent: Agent, name: str = "w") -> Work:
    return world.agents.work.make(USER, agent, name)


def told(world: World, agent: Agent) -> list[dict[str, Any]]:
    """The events of waits so far, without ids and times."""
    lines = [json.loads(line) for line in world.lines(agent)]
    return [
        {key: value for key, value in event.items() if key not in ("id", "ts", "agent", "by")}
        for event in lines
        if event["type"].startswith("wait.")
    ]


def notices(world: World, agent: Agent) -> list[dict[str, Any]]:
    """What the agent was told by messages, oldest first."""
    messages = world.agents.items.of(agent.index, Message)
    found = [m for m in messages if m.provenance == "wait"]
    for message in found:
        assert message.text.endswith("}\n")
        assert message.text.count("\n") == 1
        assert message.sender == "wait:" + json.loads(message.text)["wait"]
    return [json.loads(message.text) for message in found]


def ended(world: World, *agents: Agent, batch: bool = True) -> None:
    """Recorded as dead, in one change or each in its own."""
    for together in (agents,) if batch else tuple((agent,) for agent in agents):
        change = Change()
        for agent in together:
            part = Change(change)
            add_end(world.agents, part, agent, Outcome.DONE, "exit:0")
            change.add(part)
        world.agents.journal.note(change)


def settle(world: World) -> None:
    """The plane's own task runs until it sleeps."""

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.agents.waiting.moments.run)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    trio.run(run)


# finding them


def test_armed_ones_are_found_by_what_they_are_for(world: World, agent: Agent) -> None:
    for name in ("w", "v"):
        work_item(world, agent, name)
    plane = world.agents.waiting
    waits = {n: make(world, agent, f"x{n}", work="wv"[n % 2]) for n in range(8)}
    for n, wait in waits.items():
        if n != 7:
            plane.arm(USER, agent, wait, ("message", "trigger", "timer 1h")[n % 3])
    plane.set(agent, waits[0], "work", "v")
    plane.set(agent, waits[1], "work", "")
    with world.agents.journal.changing() as change:
        plane.cancel(change, agent, waits[3])
    rmdir(plane, USER, agent, "x4")
    for again in (False, True):
        agents = world.reopen() if again else world.agents
        there = agents.registry.named("coder")
        assert there is not None
        change = Change()
        with_status = agents.waiting.armed(change, there)
        assert [wait.name for wait in with_status] == ["x0", "x1", "x2", "x5", "x6"]
        for field, value in (("on", "message"), ("on", "trigger"), ("work", "w"), ("work", "v")):
            found = {w.name for w in armed_for(agents.items, change, there, field, value)}
            assert found == {w.name for w in with_status if getattr(w, field) == value}
        change.put(with_status[0], status=WaitStatus.CANCELLED)
        change.put(with_status[1], work="w")
        assert {w.name for w in armed_for(agents.items, change, there, "work", "v")} == {"x5"}
        found = {w.name for w in armed_for(agents.items, change, there, "work", "w")}
        assert found == {"x1", "x2", "x6"}


@pytest.mark.parametrize(("on", "most"), [("message", 64), ("task slow", 16)])
def test_there_is_a_maximum_of_waits_for_the_same(tmp_path: Path, on: str, most: int) -> None:
    with world_in(tmp_path) as world:
        agent = made_live(world, "coder")
        world.agents.tasks.make(USER, agent, "slow")
        waits = [armed(world, agent, f"x{n}", on) for n in range(most)]
        one_more = make(world, agent, "more")
        with pytest.raises(QuotaError, match="cancel one first"):
            world.agents.waiting.arm(USER, agent, one_more, on)
        assert one_more.status is WaitStatus.NEW
        world.agents.waiting.arm(USER, agent, one_more, "trigger")
        rmdir(world.agents.waiting, USER, agent, waits[0].name)
        armed(world, agent, "last", on)


def test_the_removal_of_a_new_child_fires_the_waits_on_it_once(
    world: World, agent: Agent
) -> None:
    child = world.agents.births.create(inside(world.may_create(agent)), "kid")
    waits = [armed(world, agent, on.split()[0], on) for on in ("child kid", "task kid")]
    world.agents.removals.remove(child)
    assert [wait.status for wait in waits] == [WaitStatus.FIRED] * 2
    fired = [event["wait"] for event in told(world, agent) if event["type"] == "wait.fired"]
    assert sorted(fired) == ["child", "task"]
    assert sorted(notice["wait"] for notice in notices(world, agent)) == ["child", "task"]


# the table


@contextmanager
def brought_to(world: World, agent: Agent, at: str) -> Iterator[Wait]:
    wait = make(world, agent, "x")
    if at != "new":
        world.agents.waiting.arm(USER, agent, wait, "trigger")
    change = Change()
    plane = world.agents.waiting
    moves: dict[str, Callable[[], None]] = {
        "fired": lambda: plane.fire(change, agent, wait, "now"),
        "cancelled": lambda: plane.cancel(change, agent, wait),
        "expired": lambda: plane.expire(change, agent, wait),
    }
    if at in moves:
        moves[at]()
    world.agents.journal.commit(change)
    assert wait.status == at
    yield wait


@pytest.mark.parametrize("at", WaitStatus)
def test_a_wait_is_armed_once(world: World, agent: Agent, at: str) -> None:
    with brought_to(world, agent, at) as wait:
        for arm in (partial(world.agents.waiting.begin, Change()), world.agents.waiting.arm):
            if at == "new":
                arm(USER, agent, wait, "message")
                continue
            with pytest.raises(WrongStateError, match=f"the wait is {at}"):
                arm(USER, agent, wait, "message")
        assert wait.status == ("armed" if at == "new" else at)


@pytest.mark.parametrize("at", WaitStatus)
@pytest.mark.parametrize(("field", "text"), [("work", "w"), ("deadline", "1h"), ("work", "")])
def test_what_may_be_said_until_it_is_over(
    world: World, agent: Agent, at: str, field: str, text: str
) -> None:
    work_item(world, agent)
    with brought_to(world, agent, at) as wait:
        for say in (partial(world.agents.waiting.update, Change()), world.agents.waiting.set):
            if at in ("new", "armed"):
                say(agent, wait, field, text)
                continue
            with pytest.raises(WrongStateError, match=f'"x" has ended: its status is {at}'):
                say(agent, wait, field, text)


@pytest.mark.parametrize("at", WaitStatus)
def test_every_wait_can_be_removed(world: World, agent: Agent, at: str) -> None:
    with brought_to(world, agent, at) as wait:
        cancelled = sum(event["type"] == "wait.cancelled" for event in told(world, agent))
        rmdir(world.agents.waiting, USER, agent, "x")
        after = sum(event["type"] == "wait.cancelled" for event in told(world, agent))
        assert after - cancelled == (1 if at == "armed" else 0)
        assert world.agents.items.of(agent.index, Wait) == []
        with pytest.raises(MissingError):
            rmdir(world.agents.waiting, USER, agent, "x")
        with pytest.raises(MissingError, match="was removed"):
            world.agents.waiting.arm(USER, agent, wait, "message")
        with pytest.raises(MissingError, match="was removed"):
            world.agents.waiting.set(agent, wait, "work", "")
        with pytest.raises(MissingError, match="no longer valid"):
            world.agents.waiting.trigger(wait, "late")
    assert world.reopen().items.all(Wait) == []


# making


def test_a_wait_begins_new_and_empty(world: World, agent: Agent) -> None:
    wait = world.agents.waiting.make(inside(agent), agent, "x")
    assert (wait.status, wait.on, wait.work, wait.deadline, wait.payload) == ("new", *[""] * 4)
    assert told(world, agent) == []


@pytest.mark.parametrize("name", ["", ".", "a/b", "current", "x.d", "x.sock", "ä", "x" * 65])
def test_what_is_no_name_is_refused(world: World, agent: Agent, name: str) -> None:
    with pytest.raises(MalformedError):
        make(world, agent, name)


def test_a_name_is_given_once_and_there_are_so_many(world: World, agent: Agent) -> None:
    for number in range(8):
        make(world, agent, f"x{number}")
    with pytest.raises(TakenError, match='already has a wait "x0"'):
        make(world, agent, "x0")
    with pytest.raises(QuotaError, match="has 8 waits"):
        make(world, agent, "more")
    rmdir(world.agents.waiting, USER, agent, "x3")
    make(world, agent, "more")


@pytest.mark.parametrize("at", Status)
def test_waits_are_made_and_armed_below_agents_that_go_on(
    world: World, agent: Agent, at: Status
) -> None:
    before = make(world, agent, "before")
    world.agents.journal.update(agent, status=at)
    if at in LIVE and at is not Status.STOPPING:
        make(world, agent, "x")
        world.agents.waiting.arm(USER, agent, before, "timer 1h")
        return
    with pytest.raises(WrongStateError, match=f'"coder" is {at}'):
        make(world, agent, "x")
    with pytest.raises(WrongStateError, match=f'"coder" is {at}'):
        world.agents.waiting.arm(USER, agent, before, "timer 1h")
    assert before.status == "new"


# what is written


@pytest.mark.parametrize(
    ("on", "error"),
    [
        ("", MalformedError),
        ("nothing", MalformedError),
        ("timer", MalformedError),
        ("timer soon", MalformedError),
        ("timer 30", MalformedError),
        ("timer 30s 30s", MalformedError),
        ("timer -1s", MalformedError),
        ("timer 1.5h", MalformedError),
        ("timer 999999999d", MalformedError),
        ("timer 2030-13-01T00:00:00Z", MalformedError),
        ("timer 2030-02-30T00:00:00Z", MalformedError),
        ("timer 2030-01-01T00:00:00", MalformedError),
        ("timer 2030-01-01", MalformedError),
        ("timer ٣0s", MalformedError),
        ("Timer 30s", MalformedError),
        ("message x", MalformedError),
        ("trigger x", MalformedError),
        ("task", MalformedError),
        ("child", MalformedError),
        ("child a b", MalformedError),
        ("reply", MalformedError),
        ("reply none", MalformedError),
        ("reply none m n", MalformedError),
        ("task none", MissingError),
        ("child none", MissingError),
        ("child coder", MissingError),
    ],
)
def test_a_wait_for_nothing_is_refused(
    world: World, agent: Agent, on: str, error: type[CtxError]
) -> None:
    wait = make(world, agent, "x")
    before = wait.dump()
    for arm in (partial(world.agents.waiting.begin, Change()), world.agents.waiting.arm):
        with pytest.raises(error) as caught:
            arm(USER, agent, wait, on)
        assert caught.value.sentence
    assert wait.dump() == before
    assert told(world, agent) == []


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("500ms", NOON + 0.5),
        ("30s", NOON + 30),
        ("2d", NOON + 172_800),
        ("2027-01-15T08:00:00Z", NOON),
        ("2027-01-15T08:00:00.250Z", NOON + 0.25),
        ("2027-01-15t10:00:00+02:00", NOON),
        ("9999-12-30T23:59:59Z", 253402214399.0),
    ],
)
def test_moments(text: str, moment: float) -> None:
    assert parse_moment(text, NOON) == pytest.approx(moment)


@pytest.mark.parametrize("text", ["", "now", "30", "9999-12-31T00:00:00Z", "9999999999d", "1h "])
def test_what_is_no_moment(text: str) -> None:
    with pytest.raises(MalformedError):
        parse_moment(text, NOON)


def test_a_deadline_is_a_moment_and_a_work_item_is_there(world: World, agent: Agent) -> None:
    wait = make(world, agent, "x")
    item = work_item(world, agent)
    with pytest.raises(MalformedError, match="is not a time"):
        world.agents.waiting.set(agent, wait, "deadline", "soon")
    with pytest.raises(MissingError, match='has no work item "none"'):
        world.agents.waiting.set(agent, wait, "work", "none")
    world.agents.work.set(agent, item, "status", "cancelled")
    with pytest.raises(WrongStateError, match='"w" has ended: its status is cancelled'):
        world.agents.waiting.set(agent, wait, "work", "w")
    assert (wait.work, wait.deadline) == ("", "")


def test_arming_looks_at_the_work_item_again(world: World, agent: Agent) -> None:
    item = work_item(world, agent)
    wait = make(world, agent, "x", work="w")
    world.agents.work.set(agent, item, "status", "cancelled")
    with pytest.raises(WrongStateError, match='"w" has ended: its status is cancelled'):
        world.agents.waiting.arm(USER, agent, wait, "message")
    rmdir(world.agents.work, USER, agent, "w")
    with pytest.raises(MissingError):
        world.agents.waiting.arm(USER, agent, wait, "message")
    assert (wait.status, told(world, agent)) == ("new", [])


def test_agents_without_the_family_make_no_tokens(
    world: World, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    families = ("core", "local_environment")
    monkeypatch.setattr(world.agents.authority, "families", lambda agent: families)
    wait = make(world, agent, "x")
    for arm in (partial(world.agents.waiting.begin, Change()), world.agents.waiting.arm):
        with pytest.raises(DeniedError, match="external_trigger"):
            arm(inside(agent), agent, wait, "trigger")
    world.agents.waiting.arm(inside(agent), agent, wait, "timer 1h")
    second = make(world, agent, "y")
    world.agents.waiting.arm(USER, agent, second, "trigger")
    assert second.status == "armed"


def test_arming_is_told(world: World, agent: Agent) -> None:
    work_item(world, agent)
    armed(world, agent, "x", " timer\t1h ")
    armed(world, agent, "y", "trigger", work="w")
    assert told(world, agent) == [
        {"type": "wait.armed", "wait": "x", "on": "timer 1h"},
        {"type": "wait.armed", "wait": "y", "on": "trigger", "work": "w"},
    ]


def test_a_work_item_is_blocked_from_then_on(world: World, agent: Agent) -> None:
    first, second = work_item(world, agent, "first"), work_item(world, agent, "second")
    wait = make(world, agent, "x", work="first")
    assert first.status == "open"
    world.agents.waiting.arm(USER, agent, wait, "trigger")
    assert first.status == "blocked"
    world.agents.waiting.set(agent, wait, "work", "second")
    assert (first.status, second.status) == ("open", "blocked")
    world.agents.waiting.set(agent, wait, "work", "")
    assert (first.status, second.status) == ("open", "open")


# firing


def test_a_fired_wait_tells_the_agent_and_lets_its_work_go(world: World, agent: Agent) -> None:
    item = work_item(world, agent)
    wait = armed(world, agent, "x", "trigger", work="w")
    world.agents.waiting.trigger(wait, "go \U0001f600\n")
    assert (wait.status, wait.payload, item.status) == ("fired", "go \U0001f600\n", "open")
    assert notices(world, agent) == [
        {"wait": "x", "on": "trigger", "status": "fired", "work": "w", "payload": "go \U0001f600\n"}
    ]
    assert told(world, agent)[1:] == [
        {"type": "wait.fired", "wait": "x", "on": "trigger", "work": "w"}
    ]


def test_a_token_is_good_once(world: World, agent: Agent) -> None:
    wait = armed(world, agent, "x", "trigger")
    assert world.agents.waiting.with_token(wait.token) is wait
    world.agents.waiting.trigger(wait, "first")
    assert world.agents.waiting.with_token(wait.token) is None
    with pytest.raises(MissingError, match="no longer valid"):
        world.agents.waiting.trigger(wait, "second")
    assert (wait.payload, len(notices(world, agent))) == ("first", 1)


def test_only_armed_triggers_have_good_tokens(world: World, agent: Agent) -> None:
    waits = [
        make(world, agent, "new"),
        armed(world, agent, "timer", "timer 1h"),
        armed(world, agent, "message", "message"),
    ]
    removed = armed(world, agent, "removed", "trigger")
    rmdir(world.agents.waiting, USER, agent, "removed")
    for wait in (*waits, removed):
        assert world.agents.waiting.with_token(wait.token) is None
        with pytest.raises(MissingError):
            world.agents.waiting.trigger(wait, "x")
    assert world.agents.waiting.with_token(TriggerToken("")) is None


def test_tokens_are_128_bits_and_differ(world: World, agent: Agent) -> None:
    tokens = {make(world, agent, f"x{number}").token for number in range(8)}
    assert len(tokens) == 8
    assert all(len(token) == 32 and int(token, 16) >= 0 for token in tokens)


def test_tokens_are_in_no_event_message_or_log(
    world: World, agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        wait = armed(world, agent, "x", "trigger")
        world.agents.waiting.trigger(wait, "go")
        with pytest.raises(MissingError) as caught:
            world.agents.waiting.trigger(wait, "again")
    said = [*world.lines(agent), json.dumps(notices(world, agent)), str(caught.value), caplog.text]
    assert not any(wait.token in text for text in said)


def test_a_token_survives_a_crash_and_a_used_one_does_not(world: World, agent: Agent) -> None:
    used, good = armed(world, agent, "x", "trigger"), armed(world, agent, "y", "trigger")
    world.agents.waiting.trigger(used, "go")
    agents = world.reopen()
    assert agents.waiting.with_token(used.token) is None
    again = agents.waiting.with_token(good.token)
    assert again is not None
    agents.waiting.trigger(again, "go")
    assert world.reopen().waiting.with_token(good.token) is None


def test_a_full_disk_does_not_use_the_token(
    world: World, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = armed(world, agent, "x", "trigger")

    def full(*_: object) -> None:
        raise NoSpaceError("full")

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "put_item", full)
        with pytest.raises(NoSpaceError):
            world.agents.waiting.trigger(wait, "go")
    assert (wait.status, notices(world, agent)) == ("armed", [])
    world.agents.waiting.trigger(wait, "go")


def test_once_agents_are_not_told_but_their_waits_fire(world: World, agent: Agent) -> None:
    world.agents.journal.update(agent, mode="once")
    item = work_item(world, agent)
    wait = armed(world, agent, "x", "trigger", work="w")
    world.agents.waiting.trigger(wait, "go")
    assert (wait.status, item.status, notices(world, agent)) == ("fired", "open", [])


# children and tasks


def of_child(agent: Agent, name: str, status: str, reason: str) -> dict[str, Any]:
    """What the end of a child that wrote nothing is told with."""
    return {
        "task": name, "kind": "child_agent_task", "title": "", "status": status,
        "exit": reason if reason.startswith("exit:") else "", "reason": reason,
        "preview": "", "truncated": False,
        "output_path": f"/ctx/agent/{agent.name}.d/task/{name}/output",
        "agent": name, "result": "", "refs": [], "artifacts": [],
    }  # fmt: skip


def test_the_end_of_a_child_fires_its_waits(world: World, agent: Agent) -> None:
    kid, other = made_live(world, "kid", agent), made_live(world, "other", agent)
    waits = [armed(world, agent, name, "child kid") for name in ("x", "y")]
    kept = armed(world, agent, "z", "child other")
    ended(world, kid)
    payload = of_child(agent, "kid", "completed", "exit:0")
    assert [wait.status for wait in waits] == ["fired", "fired"]
    assert [json.loads(wait.payload) for wait in waits] == [payload, payload]
    assert kept.status == "armed"
    assert [n["payload"] for n in notices(world, agent)] == [payload, payload]
    ended(world, other)
    assert kept.status == "fired"


@pytest.mark.parametrize("batch", [True, False])
def test_children_that_end_together_fire_each_once(
    world: World, agent: Agent, batch: bool
) -> None:
    kids = [made_live(world, name, agent) for name in ("kid", "kim")]
    item = work_item(world, agent)
    waits = [armed(world, agent, f"x-{kid.name}", f"child {kid.name}", work="w") for kid in kids]
    ended(world, *kids, batch=batch)
    assert [wait.status for wait in waits] == ["fired", "fired"]
    assert item.status == "open"
    assert [n["wait"] for n in notices(world, agent)] == ["x-kid", "x-kim"]
    assert [e["wait"] for e in told(world, agent) if e["type"] == "wait.fired"] == [
        "x-kid",
        "x-kim",
    ]


@pytest.mark.parametrize("parent_first", [True, False])
def test_a_family_that_ends_together(world: World, agent: Agent, parent_first: bool) -> None:
    kid = made_live(world, "kid", agent)
    wait = armed(world, agent, "x", "child kid")
    world.agents.journal.update(agent, status=Status.STOPPING)
    ended(world, *((agent, kid) if parent_first else (kid, agent)))
    assert wait.status == ("cancelled" if parent_first else "fired")
    assert notices(world, agent) == []
    assert len(told(world, agent)) == 2


def test_a_child_that_never_ran_ends_too(world: World, agent: Agent) -> None:
    kid = world.agents.births.create(inside(world.may_create(agent)), "kid")
    wait = armed(world, agent, "x", "child kid")
    cancel_new(world.agents, kid, "operator_stop")
    assert wait.status == "fired"
    assert json.loads(wait.payload) == of_child(agent, "kid", "cancelled", "operator_stop")


def test_a_child_that_is_given_to_another_is_waited_for_no_more(
    world: World, agent: Agent
) -> None:
    kid = world.agents.births.create(inside(world.may_create(agent)), "kid")
    wait = armed(world, agent, "x", "child kid")
    world.agents.births.adopt(kid, None)
    assert wait.status == "fired"
    assert json.loads(wait.payload) == of_child(agent, "kid", "cancelled", "")


# replies of children


@pytest.fixture
def kid(world: World, agent: Agent) -> Agent:
    return made_live(world, "kid", agent)


def asked(world: World, agent: Agent, kid: Agent, text: str = "why?", name: str = "") -> Message:
    return world.agents.messages.send(inside(agent), kid, text, name=name)


def answered(
    world: World, kid: Agent, message: Message, status: str = "processed", **more: str
) -> None:
    with world.agents.journal.changing() as change:
        if status != "dropped":
            world.agents.messages.deliver(change, kid, message, RunId("r1"))
        world.agents.messages.end(change, kid, message, MessageStatus(status), **more)


def reply_of(wait: Wait) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(wait.payload)
    return found


@pytest.mark.parametrize(
    ("status", "more"),
    [
        ("processed", {"reply": "so"}),
        ("failed", {"reason": "exit:3"}),
        ("aborted", {"reason": "message_cancelled"}),
        ("dropped", {"reason": "message_cancelled"}),
    ],
)
def test_the_end_of_a_message_fires_the_waits_for_its_reply(
    world: World, agent: Agent, kid: Agent, status: str, more: dict[str, str]
) -> None:
    first, second = asked(world, agent, kid), asked(world, agent, kid)
    any_reply = armed(world, agent, "any", "reply kid")
    waits = [armed(world, agent, m.name, f"reply kid {m.name}") for m in (first, second)]
    answered(world, kid, second, status, **more)
    payload = {
        "child": "kid", "message": second.name, "outcome": status,
        "run": "" if status == "dropped" else "r1", "reason": more.get("reason", ""),
        "reply": more.get("reply", ""), "truncated": False,
        "path": "/ctx/agent/coder.d/task/kid/output" if "reply" in more else "",
    }  # fmt: skip
    assert [wait.status for wait in (any_reply, *waits)] == ["fired", "armed", "fired"]
    assert reply_of(any_reply) == reply_of(waits[1]) == payload
    assert [n["payload"] for n in notices(world, agent)] == [payload, payload]
    answered(world, kid, first, "processed")
    assert [wait.status for wait in waits] == ["fired", "fired"]
    assert len(notices(world, agent)) == 3, "each fires once"


def test_only_what_the_agent_itself_sent_counts(world: World, agent: Agent, kid: Agent) -> None:
    wait = armed(world, agent, "x", "reply kid")
    other = made_live(world, "other")
    plane = world.agents.messages
    with world.agents.journal.changing() as change:
        for sender, who in ((f"agent:{other.name}", "somebody"), ("operator uid:1000", "")):
            plane.queue(change, kid, text="x", sender=sender, provenance="agent", asked=who)
        plane.notify(change, kid, text="{}", provenance="task_result", sender="task:t")
    sent = plane.pending(kid)
    for message in sent:
        answered(world, kid, message, reply="no")
    assert wait.status == "armed"
    for name in (message.name for message in sent):
        with pytest.raises(MissingError, match="sent no message"):
            armed(world, agent, f"of-{name}", f"reply kid {name}")


def test_a_task_is_a_message_too(world: World, agent: Agent) -> None:
    kid = world.agents.births.create(inside(world.may_create(agent)), "kid")
    world.agents.journal.update(kid, mode="turn")
    wait = armed(world, agent, "x", "reply kid")
    world.live(kid)
    with world.agents.journal.changing() as change:
        world.agents.messages.queue_first(
            change, kid, text="look", sender=kid.lineage.split(" ")[0], provenance="delegation")
    answered(world, kid, world.agents.messages.pending(kid)[0], reply="seen")
    assert (wait.status, reply_of(wait)["reply"]) == ("fired", "seen")


@pytest.mark.parametrize("again", [False, True])
def test_an_ended_message_fires_at_once(
    world: World, agent: Agent, kid: Agent, again: bool
) -> None:
    message = asked(world, agent, kid)
    answered(world, kid, message, reply="so")
    before = armed(world, agent, "later", "reply kid")
    agents = world.reopen() if again else world.agents
    parent = agents.registry.named("coder")
    assert parent is not None
    wait = agents.waiting.make(USER, parent, "x")
    agents.waiting.arm(USER, parent, wait, f"reply kid {message.name}")
    assert (wait.status, reply_of(wait)["reply"], reply_of(wait)["run"]) == ("fired", "so", "r1")
    assert before.status == "armed", "it is for the next"


def test_ended_messages_of_the_parent_are_remembered_up_to_a_number(
    world: World, agent: Agent, kid: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_REMEMBERED", 2)
    sent = [asked(world, agent, kid) for _ in range(4)]
    for message in sent:
        answered(world, kid, message)
    assert world.agents.items.of(kid.index, Message) == sent[2:]
    with pytest.raises(MissingError, match="ended long ago"):
        armed(world, agent, "x", f"reply kid {sent[0].name}")


@pytest.mark.parametrize("pending", [False, True])
def test_the_end_of_the_child_fires_the_waits_for_its_replies(
    world: World, agent: Agent, kid: Agent, pending: bool
) -> None:
    waits = [armed(world, agent, "x", "reply kid")]
    message = asked(world, agent, kid) if pending else None
    if message is not None:
        waits.append(armed(world, agent, "y", f"reply kid {message.name}"))
        with world.agents.journal.changing() as change:
            world.agents.messages.deliver(change, kid, message, RunId("r1"))
    ended(world, kid)
    waits.append(armed(world, agent, "late", "reply kid"))
    over = {"child": "kid", "message": "", "outcome": "done", "run": "", "reason": "exit:0",
            "reply": "", "truncated": False, "path": ""}  # fmt: skip
    failed = over if message is None else {
        **over, "message": message.name, "outcome": "failed", "run": "r1"}
    assert [reply_of(wait) for wait in waits] == [failed] * (len(waits) - 1) + [over]
    assert len(notices(world, agent)) == len(waits)


@pytest.mark.parametrize("on", ["child kid", "reply kid", "task kid"])
def test_a_child_that_is_taken_back_is_waited_for_no_longer(
    world: World, agent: Agent, on: str
) -> None:
    """Its files were being written; another process of its parent was quick."""
    kid = world.agents.births.create(inside(world.may_create(agent)), "kid")
    world.agents.journal.update(kid, mode="turn")
    wait = armed(world, agent, "x", on)
    world.agents.removals.unmake(kid)
    assert wait.status == "fired"
    (notice,) = notices(world, agent)
    assert notice["wait"] == "x"


def test_a_child_that_is_given_away_answers_another(world: World, agent: Agent) -> None:
    kid = world.agents.births.create(inside(world.may_create(agent)), "kid")
    world.agents.journal.update(kid, mode="turn")
    message = asked(world, agent, kid)
    waits = [armed(world, agent, "x", "reply kid"),
             armed(world, agent, "y", f"reply kid {message.name}")]
    world.agents.births.adopt(kid, None)
    assert [wait.status for wait in waits] == ["fired", "fired"]
    assert {reply_of(wait)["message"] for wait in waits} == {""}
    answered(world, kid, message)
    assert len(notices(world, agent)) == 2


@pytest.mark.parametrize(
    ("size", "shown", "left"),
    [(8192, 8192, 0), (8193, 8000, 193), (100_000, 8000, 92_000)],
)
@pytest.mark.parametrize("unit", ["x", "\U0001f600"])
def test_of_a_long_reply_head_and_tail_are_shown(
    world: World, agent: Agent, kid: Agent, size: int, shown: int, left: int, unit: str
) -> None:
    wide = len(unit.encode())
    reply = unit * (size // wide) + "y" * (size % wide)
    wait = armed(world, agent, "x", "reply kid")
    answered(world, kid, asked(world, agent, kid), reply=reply)
    found = reply_of(wait)
    assert found["truncated"] == bool(left)
    assert len(found["reply"].encode()) <= 8192
    if not left:
        assert found["reply"] == reply
        return
    head, note, tail = found["reply"].split("\n")
    assert note == f"[{size - len((head + tail).encode())} bytes left out: see path]"
    assert reply.startswith(head)
    assert reply.endswith(tail)
    assert shown - 8 < len((head + tail).encode()) <= shown


def test_a_child_without_a_handle_has_no_path_for_its_reply(
    world: World, agent: Agent, kid: Agent
) -> None:
    world.agents.births.set_life(kid, "detached", "public_named")
    world.agents.tasks.make(USER, agent, "kid")  # what it writes is no reply
    wait = armed(world, agent, "x", "reply kid")
    answered(world, kid, asked(world, agent, kid), reply="so")
    assert (reply_of(wait)["reply"], reply_of(wait)["path"]) == ("so", "")
    wait = armed(world, agent, "y", "reply kid")
    answered(world, kid, asked(world, agent, kid), reply="x" * 8193)
    assert "\n[193 bytes left out]\n" in reply_of(wait)["reply"], "it is nowhere to be seen"


def test_only_children_that_take_messages_are_asked(
    world: World, agent: Agent, kid: Agent
) -> None:
    world.agents.journal.update(kid, mode="once")
    for number, on in enumerate(("reply kid", "reply kid m", "reply none", "reply coder m")):
        wait = make(world, agent, f"x{number}")
        for arm in (partial(world.agents.waiting.begin, Change()), world.agents.waiting.arm):
            with pytest.raises(MalformedError, match=r"once agent|has no child"):
                arm(USER, agent, wait, on)
        assert wait.status == "new"


def test_few_wait_for_one_message(world: World, agent: Agent, kid: Agent) -> None:
    on = f"reply kid {asked(world, agent, kid).name}"
    for number in range(4):
        armed(world, agent, f"x{number}", on)
    with pytest.raises(QuotaError, match="cancel one first"):
        armed(world, agent, "more", on)
    world.agents.waiting.arm(
        USER, agent, world.agents.waiting.find(agent, "more"), "reply kid")


def test_what_is_over_already_fires_at_once(world: World, agent: Agent, clock: Clock) -> None:
    kid = made_live(world, "kid", agent)
    ended(world, kid)
    change = Change()
    change.make(Task(agent=agent.index, name="t", status=TaskStatus.FAILED, exit="exit:3"))
    world.agents.messages.queue(change, agent, text="hi", sender="op", provenance="operator")
    world.agents.journal.commit(change)
    item = work_item(world, agent)
    payloads = {}
    past = timestamp(NOON - 3600)
    for number, on in enumerate(("child kid", "task t", "message", f"timer {past}", "timer 0s")):
        wait = armed(world, agent, f"x{number}", on, work="w")
        assert wait.status == "fired"
        payloads[on] = json.loads(wait.payload)
        assert [e["type"] for e in told(world, agent)[-2:]] == ["wait.armed", "wait.fired"]
        assert item.status == "open"
    assert payloads["child kid"] == of_child(agent, "kid", "completed", "exit:0")
    task = payloads["task t"]
    assert (task["task"], task["status"], task["exit"]) == ("t", "failed", "exit:3")
    assert payloads["message"]["provenance"] == "operator"
    assert payloads[f"timer {past}"] == {"due": past}
    assert payloads["timer 0s"] == {"due": timestamp(NOON)}
    assert len(notices(world, agent)) == 5


def test_the_end_of_a_task_fires_its_waits(world: World, agent: Agent) -> None:
    change = Change()
    task = Task(agent=agent.index, name="t", status=TaskStatus.RUNNING)
    change.make(task)
    world.agents.journal.commit(change)
    item = work_item(world, agent)
    wait = armed(world, agent, "x", "task t", work="w")
    assert item.status == "blocked"
    for _ in range(2):
        change = Change()
        change.put(task, status=TaskStatus.COMPLETED)
        world.agents.waiting.resource_over(change, agent, "task", "t", lambda: {"task": "t"})
        world.agents.journal.commit(change)
    assert (wait.status, item.status) == ("fired", "open")
    assert [n["payload"] for n in notices(world, agent)] == [{"task": "t"}]


# messages


def send(world: World, agent: Agent, *provenances: str) -> None:
    change = Change()
    for provenance in provenances:
        world.agents.messages.queue(
            change, agent, text="hi", sender="someone", provenance=provenance
        )
    world.agents.journal.commit(change)


@pytest.mark.parametrize("provenance", ["operator", "supervisor", "agent", "delegation"])
def test_a_message_fires_waits_for_messages(world: World, agent: Agent, provenance: str) -> None:
    waits = [armed(world, agent, name, "message") for name in ("x", "y")]
    send(world, agent, provenance)
    assert [wait.status for wait in waits] == ["fired", "fired"]
    payload = json.loads(waits[0].payload)
    assert (payload["provenance"], payload["from"]) == (provenance, "someone")
    assert world.agents.messages.find(agent, payload["message"]) is not None


@pytest.mark.parametrize("provenance", ["wait", "task_result"])
def test_answers_do_not(world: World, agent: Agent, provenance: str) -> None:
    send(world, agent, provenance)
    wait = armed(world, agent, "x", "message")
    send(world, agent, provenance)
    assert wait.status == "armed"


def test_two_messages_of_one_change_fire_a_wait_once(world: World, agent: Agent) -> None:
    wait = armed(world, agent, "x", "message")
    send(world, agent, "operator", "agent")
    assert (wait.status, len(notices(world, agent))) == ("fired", 1)
    assert json.loads(wait.payload)["provenance"] == "operator"


# timers and deadlines


def test_timers_fire_when_they_are_due(world: World, agent: Agent, clock: Clock) -> None:
    item = work_item(world, agent)
    later = armed(world, agent, "later", "timer 2m")
    sooner = armed(world, agent, "sooner", "timer 1m", work="w")
    settle(world)
    assert (sooner.status, later.status) == ("armed", "armed")
    clock.now = NOON + 60
    settle(world)
    assert (sooner.status, later.status, item.status) == ("fired", "armed", "open")
    assert json.loads(sooner.payload) == {"due": timestamp(NOON + 60)}
    clock.now = NOON + 121
    settle(world)
    assert later.status == "fired"
    assert [n["wait"] for n in notices(world, agent)] == ["sooner", "later"]


# those that stay armed


def read_all(world: World, agent: Agent) -> list[Any]:
    """What the agent was told, which it has read now."""
    found = notices(world, agent)
    for message in world.agents.messages.pending(agent):
        with world.agents.journal.changing() as change:
            world.agents.messages.deliver(change, agent, message, RunId("r1"))
            world.agents.messages.end(change, agent, message, MessageStatus.PROCESSED)
    return [each["payload"] for each in found]


def test_a_timer_is_due_again_and_again(world: World, agent: Agent, clock: Clock) -> None:
    item = work_item(world, agent)
    wait = armed(world, agent, "x", "timer every 10m until 25m", work="w")
    settle(world)
    assert read_all(world, agent) == []
    clock.now = NOON + 600
    settle(world)
    (notice,) = notices(world, agent)
    assert notice == {
        "wait": "x", "on": "timer every 10m until 25m", "status": "armed", "work": "w",
        "payload": {"due": timestamp(NOON + 600), "missed": 0},
    }  # fmt: skip
    assert (wait.status, item.status) == ("armed", "blocked")
    assert json.loads(wait.payload) == read_all(world, agent)[0]
    clock.now = NOON + 1201
    settle(world)
    assert read_all(world, agent) == [{"due": timestamp(NOON + 1200), "missed": 0}]
    assert (wait.status, item.status) == ("fired", "open"), "no other time is before its end"
    clock.now = NOON + 7200
    settle(world)
    assert read_all(world, agent) == []
    kinds = [event["type"] for event in told(world, agent)]
    assert kinds == ["wait.armed", "wait.fired", "wait.fired"]


def test_times_that_nobody_was_told_of_are_told_once(
    world: World, agent: Agent, clock: Clock
) -> None:
    armed(world, agent, "x", "timer every 10m")
    clock.now = NOON + 3700  # no daemon ran
    for _ in range(2):
        world.reopen()
        settle(world)
    again = world.agents.registry.named("coder")
    assert again is not None
    assert [n["payload"] for n in notices(world, again)] == [
        {"due": timestamp(NOON + 3600), "missed": 5}
    ]
    for more in (4200, 4800):  # the agent has not read it yet
        clock.now = NOON + more
        settle(world)
    assert len(read_all(world, again)) == 1
    clock.now = NOON + 5400
    settle(world)
    assert read_all(world, again) == [{"due": timestamp(NOON + 5400), "missed": 2}]


def test_what_was_missed_ends_with_its_end(world: World, agent: Agent, clock: Clock) -> None:
    wait = armed(world, agent, "x", "timer every 10m until 25m")
    clock.now = NOON + 86400
    settle(world)
    assert read_all(world, agent) == [{"due": timestamp(NOON + 1200), "missed": 1}]
    assert wait.status == "fired"


@pytest.mark.parametrize("how", ["rmdir", "deadline", "end"])
def test_a_timer_that_is_due_again_ends(
    world: World, agent: Agent, clock: Clock, how: str
) -> None:
    wait = armed(world, agent, "x", "timer every 10m", deadline="15m")
    clock.now = NOON + 600
    settle(world)
    read_all(world, agent)
    if how == "rmdir":
        rmdir(world.agents.waiting, USER, agent, "x")
    elif how == "end":
        ended(world, agent)
    clock.now = NOON + 3600
    settle(world)
    assert wait.status == {"deadline": "expired"}.get(how, "cancelled")
    told_last = [n["status"] for n in notices(world, agent)]
    assert told_last == (["expired"] if how == "deadline" else [])


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("timer every", "use timer every DURATION"),
        ("timer every 10m until", "use timer every DURATION"),
        ("timer every 10m for 1h", "use timer every DURATION"),
        ("timer every 9s", '"9s" is less than 10s'),
        ("timer every 2030-01-01T00:00:00Z", "is not a duration"),
        ("timer every 10m until 5m", '"5m" is before the timer is due'),
        ("triggers x", "wrong arguments; use triggers"),
    ],
)
def test_what_is_no_wait_that_stays_armed(
    world: World, agent: Agent, clock: Clock, line: str, match: str
) -> None:
    with pytest.raises(MalformedError, match=match):
        armed(world, agent, "x", line)


@pytest.mark.settings(waits=32)
def test_an_agent_has_few_timers_that_are_due_again(world: World, agent: Agent) -> None:
    for number in range(16):
        armed(world, agent, f"x{number}", f"timer every {10 + number}m")
    with pytest.raises(QuotaError, match="16 waits for 'timer every'"):
        armed(world, agent, "more", "timer every 1h")
    armed(world, agent, "once", "timer 1h")
    rmdir(world.agents.waiting, USER, agent, "x3")
    armed(world, agent, "again", "timer every 1h")


def test_each_write_to_a_token_of_triggers_is_one_message(world: World, agent: Agent) -> None:
    item = work_item(world, agent)
    wait = armed(world, agent, "x", "triggers", work="w")
    plane = world.agents.waiting
    for text in ("one\n", "two\n"):
        assert plane.with_token(wait.token) is wait
        plane.trigger(wait, text)
    assert (wait.status, wait.payload, item.status) == ("armed", "two\n", "blocked")
    assert read_all(world, agent) == ["one\n", "two\n"]
    agents = world.reopen()
    again = agents.waiting.with_token(wait.token)
    assert again is not None
    agents.waiting.trigger(again, "three")
    there = agents.registry.named("coder")
    assert there is not None
    assert read_all(world, there) == ["three"]
    rmdir(agents.waiting, USER, there, "x")
    assert agents.waiting.with_token(wait.token) is None


def test_events_that_nobody_reads_are_bounded(world: World, agent: Agent) -> None:
    wait = armed(world, agent, "x", "triggers")
    for number in range(64):
        world.agents.waiting.trigger(wait, f"{number}")
    with pytest.raises(QuotaError, match="64 events that were written to this token are unread"):
        world.agents.waiting.trigger(wait, "more")
    read_all(world, agent)
    world.agents.waiting.trigger(wait, "more")
    assert read_all(world, agent) == ["more"]


def test_a_deadline_expires_a_wait(world: World, agent: Agent, clock: Clock) -> None:
    item = work_item(world, agent)
    wait = armed(world, agent, "x", "trigger", deadline="1m", work="w")
    clock.now = NOON + 60
    settle(world)
    assert (wait.status, item.status) == ("expired", "open")
    assert notices(world, agent) == [
        {
            "wait": "x",
            "on": "trigger",
            "status": "expired",
            "work": "w",
            "payload": {"deadline": timestamp(NOON + 60)},
        }
    ]
    assert told(world, agent)[1:] == [
        {"type": "wait.expired", "wait": "x", "on": "trigger", "work": "w"}
    ]
    with pytest.raises(MissingError):
        world.agents.waiting.trigger(wait, "too late")


def test_a_deadline_counts_from_the_arming_or_from_its_writing(
    world: World, agent: Agent, clock: Clock
) -> None:
    first = make(world, agent, "first", deadline="1m")
    clock.now += 3600
    world.agents.waiting.arm(USER, agent, first, "trigger")
    second = armed(world, agent, "second", "trigger")
    clock.now += 30
    world.agents.waiting.set(agent, second, "deadline", "1m")
    clock.now += 30
    settle(world)
    assert (first.status, second.status) == ("expired", "armed")
    clock.now += 30
    settle(world)
    assert second.status == "expired"


def test_a_deadline_can_be_moved_and_taken_away(world: World, agent: Agent, clock: Clock) -> None:
    wait = armed(world, agent, "x", "trigger", deadline="1m")
    world.agents.waiting.set(agent, wait, "deadline", "2m")
    clock.now = NOON + 60
    settle(world)
    assert wait.status == "armed"
    world.agents.waiting.set(agent, wait, "deadline", "")
    clock.now = NOON + 7200
    settle(world)
    assert wait.status == "armed"


@pytest.mark.parametrize(
    ("timer", "deadline", "status"),
    [("1m", "2m", "fired"), ("2m", "1m", "expired"), ("1m", "1m", "fired")],
)
def test_of_timer_and_deadline_the_first_counts(
    world: World, agent: Agent, clock: Clock, timer: str, deadline: str, status: str
) -> None:
    wait = armed(world, agent, "x", f"timer {timer}", deadline=deadline)
    clock.now = NOON + 3600
    settle(world)
    assert wait.status == status
    assert len(notices(world, agent)) == 1


def test_what_was_due_while_there_was_no_daemon_comes_at_the_next_start(
    world: World, agent: Agent, clock: Clock
) -> None:
    armed(world, agent, "timer", "timer 1m")
    armed(world, agent, "deadline", "trigger", deadline="2m")
    armed(world, agent, "later", "timer 2h")
    clock.now = NOON + 3600
    for _ in range(2):  # and only at that one
        world.reopen()
        settle(world)
        again = world.agents.registry.named("coder")
        assert again is not None
        statuses = {w.name: w.status.value for w in world.agents.items.of(again.index, Wait)}
        assert statuses == {"timer": "fired", "deadline": "expired", "later": "armed"}
        assert [n["wait"] for n in notices(world, again)] == ["timer", "deadline"]
        fired = [e for e in told(world, again) if e["type"] != "wait.armed"]
        assert [(e["type"], e["wait"]) for e in fired] == [
            ("wait.fired", "timer"),
            ("wait.expired", "deadline"),
        ]


def test_a_new_wait_wakes_whoever_sleeps_until_a_later_one(world: World, agent: Agent) -> None:
    armed(world, agent, "later", "timer 1h")
    sooner = make(world, agent, "sooner")

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.agents.waiting.moments.run)
            await trio.testing.wait_all_tasks_blocked()
            world.agents.waiting.arm(USER, agent, sooner, "timer 10ms")
            with trio.fail_after(30):
                while sooner.status != "fired":
                    await trio.sleep(0.001)
            nursery.cancel_scope.cancel()

    trio.run(run)


def _at(seconds: float) -> str:
    return f"timer {timestamp(NOON + seconds)}"


def test_a_clock_that_is_set_is_looked_at_again(world: World, agent: Agent, clock: Clock) -> None:
    """Set forward after the sleep has begun: the sleep is bounded, and so it is after a suspension
    of the machine, during which the loop's clock stood still."""
    wait = armed(world, agent, "x", _at(30 * 86400))
    suspended = armed(world, agent, "y", "timer 1h")

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.agents.waiting.moments.run)
            await trio.testing.wait_all_tasks_blocked()
            clock.set = 40.0 * 86400
            await trio.sleep(61)
            assert (wait.status, suspended.status) == ("fired", "armed")
            clock.now += 3600
            await trio.sleep(61)
            nursery.cancel_scope.cancel()

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))
    assert suspended.status == "fired"


@pytest.mark.parametrize("jump", [-3600.0, 30 * 86400.0])
def test_what_was_said_as_a_duration_takes_that_long_whatever_the_clock_is_set_to(
    world: World, agent: Agent, clock: Clock, jump: float
) -> None:
    timer = armed(world, agent, "timer", "timer 2m")
    late = armed(world, agent, "late", "trigger", deadline="2m")
    clock.set = jump
    later = make(world, agent, "later", deadline="2m")
    world.agents.waiting.arm(USER, agent, later, "trigger")
    clock.now += 119
    settle(world)
    assert {timer.status, late.status, later.status} == {WaitStatus.ARMED}
    clock.now += 2
    settle(world)
    assert [timer.status, late.status, later.status] == ["fired", "expired", "expired"]


@pytest.mark.parametrize("jump", [-3600.0, 30 * 86400.0])
def test_what_recurs_keeps_its_period_whatever_the_clock_is_set_to(
    world: World, agent: Agent, clock: Clock, jump: float
) -> None:
    wait = armed(world, agent, "x", "timer every 10m until 25m")
    clock.set = jump
    told = []
    for passed in (599, 601, 1199, 1201, 1501):
        clock.now = NOON + passed
        settle(world)
        told.append(wait.due - NOON)
    assert told == [600, 1200, 1200, 1200, 1200]
    assert wait.status == "fired"


@pytest.mark.parametrize(("jump", "status"), [(-3600.0, "armed"), (3600.0, "fired")])
def test_a_time_is_one_of_the_wall_clock(
    world: World, agent: Agent, clock: Clock, jump: float, status: str
) -> None:
    wait = armed(world, agent, "x", _at(1800))
    clock.set = jump
    settle(world)
    assert wait.status == status


@pytest.mark.parametrize(("passed", "status"), [(30, "armed"), (61, "fired")])
def test_after_a_boot_a_duration_goes_on_by_the_wall_clock(
    world: World, agent: Agent, clock: Clock, passed: int, status: str
) -> None:
    wait = armed(world, agent, "x", "timer 1m")
    with world.agents.journal.changing() as change:
        change.put(wait, boot=BootId("another"), due_up=1e9)
    clock.now += passed
    settle(world)
    assert wait.status == status


def test_moments_of_what_was_cancelled_do_not_pile_up(
    world: World, agent: Agent, clock: Clock
) -> None:
    kept = armed(world, agent, "kept", "timer 1h")
    plane = world.agents.waiting
    plane.moments._crowded = 16
    for _ in range(40):
        armed(world, agent, "x", "timer 30d", deadline="40d")
        rmdir(plane, USER, agent, "x")
    assert len(plane.moments._moments) <= 1024
    plane.moments._crowded = 16
    armed(world, agent, "y", "timer 30d")
    assert len(plane.moments._moments) == 2
    clock.now = NOON + 3600
    settle(world)
    assert kept.status == "fired"


def test_a_full_disk_does_not_keep_a_timer_from_firing_once(
    world: World, agent: Agent, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = work_item(world, agent)
    wait = armed(world, agent, "x", "timer 1m", work="w")
    clock.now = NOON + 60

    def full(*_: object) -> None:
        raise NoSpaceError("full")

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "put_item", full)
        settle(world)
    assert (wait.status, item.status) == ("fired", "open")
    settle(world)
    world.agents.journal.update(agent, model="there is room again")
    assert len(notices(world, agent)) == 1
    assert [e["type"] for e in told(world, agent)] == ["wait.armed", "wait.fired"]
    again = world.reopen().registry.named("coder")
    assert again is not None
    assert world.agents.waiting.find(again, "x").status == "fired"


def test_a_bug_in_one_wait_does_not_keep_the_others(
    world: World, agent: Agent, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = armed(world, agent, "bad", "timer 1m"), armed(world, agent, "good", "timer 1m")
    fire = world.agents.waiting.fire

    def broken(change: Change, agent: Agent, wait: Wait, payload: Payload) -> None:
        if wait is bad:
            raise ZeroDivisionError
        fire(change, agent, wait, payload)

    monkeypatch.setattr(world.agents.waiting, "fire", broken)
    clock.now = NOON + 60
    settle(world)
    assert (bad.status, good.status) == ("armed", "fired")


# the end of the agent


def test_the_end_of_an_agent_cancels_its_waits(world: World, agent: Agent, clock: Clock) -> None:
    token = armed(world, agent, "x", "trigger")
    timer = armed(world, agent, "y", "timer 1m")
    new = make(world, agent, "z")
    ended(world, agent)
    assert (token.status, timer.status, new.status) == ("cancelled", "cancelled", "new")
    assert [e["type"] for e in told(world, agent)[2:]] == ["wait.cancelled", "wait.cancelled"]
    assert world.agents.waiting.with_token(token.token) is None
    clock.now = NOON + 60
    settle(world)
    assert timer.status == "cancelled"
    assert notices(world, agent) == []


def test_a_removed_agent_leaves_no_waits(world: World, agent: Agent, clock: Clock) -> None:
    wait = armed(world, agent, "x", "trigger", deadline="1m")
    ended(world, agent)
    world.agents.removals.remove(agent)
    assert world.agents.items.get(wait.index) is None
    assert world.agents.items.with_token(wait.token) is None
    clock.now = NOON + 60
    settle(world)
    assert world.reopen().items.all(Wait) == []


def test_a_paused_agent_finds_the_message_when_it_goes_on(
    world: World, agent: Agent, clock: Clock
) -> None:
    armed(world, agent, "x", "timer 1m")
    world.agents.journal.update(agent, status=Status.PAUSED)
    clock.now = NOON + 60
    settle(world)
    assert [n["wait"] for n in notices(world, agent)] == ["x"]


def test_whoever_may_writes_for_another(world: World, agent: Agent) -> None:
    kid = made_live(world, "kid", agent)
    for number, caller in enumerate((ROOT, USER, inside(agent), inside(kid))):
        wait = world.agents.waiting.make(caller, kid, f"x{number}")
        world.agents.waiting.arm(caller, kid, wait, "trigger")
        assert wait.status == "armed"
