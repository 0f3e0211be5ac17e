"""Asks in the records: deadlines, waits, restarts, accounts, and what is kept."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
import trio.testing

from runtime.agents.parts import Agents
from runtime.authority.accounts import Resource
from runtime.errors import MissingError, QuotaError, WrongStateError
from runtime.kernel import clock
from runtime.records.items import Ask, AskStatus, Message, Wait
from runtime.records.model import Agent
from tests.worlds.records import ROOT, World, inside


@pytest.fixture
def agent(world: World) -> Agent:
    made = world.live(world.agents.births.create(ROOT, "x"))
    world.agents.journal.update(made, mode="turn")
    return made


def asked(world: World, agent: Agent, name: str = "q", **fields: str) -> Ask:
    asks = world.agents.asks
    ask = asks.make(inside(agent), agent, name)
    with world.agents.journal.changing() as change:
        for field, text in fields.items():
            asks.update(change, agent, ask, field, text)
        asks.begin(change, agent, ask, "May I?")
    return ask


def wait_for(world: World, agent: Agent, on: str, name: str = "w") -> Wait:
    waiting = world.agents.waiting
    wait = waiting.make(inside(agent), agent, name)
    waiting.arm(inside(agent), agent, wait, on)
    return wait


def told(agents: Agents, agent: Agent) -> list[dict[str, Any]]:
    texts = (message.text for message in agents.items.of(agent.index, Message))
    return [json.loads(text) for text in texts]


async def _until_due(agents: Agents) -> None:
    """What is due by now has come."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(agents.asks.moments.run)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("default", ["", "no"])
def test_at_the_deadline_the_default_is_the_answer(
    world: World, agent: Agent, default: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = asked(world, agent, options="yes\nno\n", default=default, deadline="1h")
    wait = wait_for(world, agent, "answer q")
    trio.run(_until_due, world.agents)
    assert ask.status is AskStatus.OPEN
    later = clock.up() + 3601
    monkeypatch.setattr(clock, "up", lambda: later)
    trio.run(_until_due, world.agents)
    assert (ask.status, ask.by) == (AskStatus.EXPIRED, "runtime")
    payload = {"ask": "q", "status": "expired", "answer": default, "note": "", "by": "runtime"}
    assert json.loads(wait.payload) == payload
    assert told(world.agents, agent)[0]["payload"] == payload


def test_a_deadline_counts_while_no_daemon_runs(
    world: World, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(world, agent, "soon", deadline="10s", default="no")
    asked(world, agent, "late", deadline="10h")
    later = clock.up() + 11
    monkeypatch.setattr(clock, "up", lambda: later)
    agents = world.reopen()
    again = agents.registry.named("x")
    assert again is not None
    trio.run(_until_due, agents)
    assert {ask.name: ask.status for ask in agents.asks.known(again)} == {
        "soon": AskStatus.EXPIRED, "late": AskStatus.OPEN,
    }  # fmt: skip
    assert agents.asks.find(again, "soon").answer == "no\n"


def test_what_is_open_stays_open_and_is_answered_by_the_next_daemon(
    world: World, agent: Agent
) -> None:
    asked(world, agent, detail="x" * 5000)
    wait_for(world, agent, "answer q")
    agents = world.reopen()
    again = agents.registry.named("x")
    assert again is not None
    (ask,) = agents.asks.seen_by(ROOT)
    assert (ask.question, ask.detail) == ("May I?", "x" * 5000)
    assert agents.accounts.use(again.owner, Resource.ASKS) == 1
    with agents.journal.acting(ROOT):
        agents.asks.answer(ROOT, again, ask, "yes\nslowly\n")
    assert agents.accounts.use(again.owner, Resource.ASKS) == 0
    payload = {"ask": "q", "status": "answered", "answer": "yes", "note": "slowly",
               "by": "operator uid:0"}  # fmt: skip
    assert told(agents, again)[0]["payload"] == payload
    after = world.reopen()
    answered = after.items.all(Ask)[0]
    assert (answered.status, answered.answer, answered.by) == (
        AskStatus.ANSWERED, "yes\nslowly\n", "operator uid:0"
    )  # fmt: skip
    with pytest.raises(WrongStateError, match=r'answered by operator uid:0 at .*: "yes"'):
        after.asks.answer(ROOT, after.registry.named("x"), answered, "no")  # type: ignore[arg-type]


def test_the_answer_to_a_form_is_an_object(world: World, agent: Agent) -> None:
    form = '{"type":"object","properties":{"n":{"type":"integer"}}}'
    ask = asked(world, agent, form=form)
    wait = wait_for(world, agent, "answer q")
    world.agents.asks.answer(ROOT, agent, ask, '{"n": 3}')
    assert json.loads(wait.payload)["answer"] == {"n": 3}


def test_a_wait_is_told_at_once_of_what_is_over_and_of_what_goes(
    world: World, agent: Agent
) -> None:
    ask = asked(world, agent)
    wait = wait_for(world, agent, "answer q")
    world.agents.asks.remove(agent, ask)
    assert json.loads(wait.payload)["status"] == "withdrawn"
    new = world.agents.asks.make(inside(agent), agent, "n")
    wait = wait_for(world, agent, "answer n", "v")
    world.agents.asks.remove(agent, new)
    assert json.loads(wait.payload)["status"] == "withdrawn"
    over = asked(world, agent, "o")
    world.agents.asks.answer(ROOT, agent, over, "yes")
    wait = wait_for(world, agent, "answer o", "u")
    assert json.loads(wait.payload)["answer"] == "yes"
    with pytest.raises(MissingError, match='"x" has no ask "none"'):
        wait_for(world, agent, "answer none", "t")


def test_only_the_last_that_are_over_are_kept(world: World, agent: Agent) -> None:
    asks = world.agents.asks
    stays = asked(world, agent, "stays")
    for n in range(70):
        asks.answer(ROOT, agent, asked(world, agent, f"n{n}"), "yes")
    assert [ask.name for ask in asks.known(agent)] == ["stays", *(f"n{n}" for n in range(6, 70))]
    assert stays.status is AskStatus.OPEN
    files = {file.name for file in (world.path / "wait").iterdir()}
    assert files >= {ask.wait_token for ask in asks.known(agent)}
    assert len(files) == 66  # one of the agent


@pytest.mark.settings(asks=3, ended=1)
def test_the_setting_for_others_that_have_ended_is_not_for_asks(world: World, agent: Agent) -> None:
    for n in range(3):
        ask = asked(world, agent, f"n{n}")
        world.agents.asks.answer(ROOT, agent, ask, "yes")
    for n in range(3):
        asked(world, agent, f"m{n}")
    with pytest.raises(QuotaError, match="has 3 asks that have not ended"):
        asked(world, agent, "more")


def test_a_caller_that_waits_hears_of_the_end(world: World, agent: Agent) -> None:
    ask = asked(world, agent)
    heard = []

    async def main() -> None:
        async def wait() -> None:
            await world.agents.asks.wait_over(ask)
            heard.append(ask.status)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            assert not heard
            world.agents.asks.answer(ROOT, agent, ask, "yes")

    trio.run(main)
    assert heard == [AskStatus.ANSWERED]
