"""Reports: who gets them, what is refused, what is told of them, and which are remembered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtime.errors import (
    DeniedError,
    MalformedError,
    QuotaError,
    TakenError,
    TooLongError,
    UnsupportedError,
    WrongStateError,
)
from runtime.ids import MessageId, RunId
from runtime.records.change import Change
from runtime.records.items import Message, MessageStatus, Report
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.records.run import Run
from tests.worlds.records import ROOT, World, inside, operator

USER = operator(1000)

pytestmark = pytest.mark.settings(messages=4)


def made(world: World, name: str, parent: Agent | None = None, mode: str = "turn") -> Agent:
    caller = USER if parent is None else inside(world.may_create(parent))
    agent = world.agents.births.create(caller, name)
    world.agents.journal.update(agent, mode=mode)
    return world.live(agent)


@pytest.fixture
def boss(world: World) -> Agent:
    return made(world, "boss")


@pytest.fixture
def child(world: World, boss: Agent) -> Agent:
    return made(world, "child", boss)


def report(world: World, agent: Agent, text: str = "half is done", name: str = "") -> str:
    return world.agents.messages.report(inside(agent), agent, text, name=name)


def queue(world: World, agent: Agent) -> list[Message]:
    return world.agents.messages.pending(agent)


def told(world: World, agent: Agent) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in world.lines(agent)]
    return [event for event in events if event["type"] == "agent.report"]


def test_a_report_is_a_message_and_an_event(world: World, boss: Agent, child: Agent) -> None:
    world.agents.journal.update(child, run=Run(id=RunId("r7")))
    name = report(world, child)
    (message,) = queue(world, boss)
    assert (message.name, message.text, message.sender, message.provenance, message.priority) == (
        name, "half is done", "agent:child", "child", "normal",
    )  # fmt: skip
    (event,) = told(world, child)
    assert event.pop("id") and event.pop("ts") and event.pop("by") == "agent:child run:r7"
    assert event == {"type": "agent.report", "agent": "child", "run": "r7", "to": "agent:boss",
                     "message": name, "text": "half is done"}  # fmt: skip
    assert told(world, boss) == []
    (kept,) = world.agents.messages.reports(boss)
    assert (kept.child, kept.text, kept.run) == ("child", "half is done", "r7")
    assert kept.created > 0


def test_a_terminal_that_shows_events_obeys_none_of_them(world: World, child: Agent) -> None:
    report(world, child, "漢 \x9b5i\u202e\x7f\x1b[5i")
    assert all(line.isprintable() for line in world.lines(child))
    assert told(world, child)[0]["text"] == "漢 \x9b5i\u202e\x7f\x1b[5i"


def test_a_message_to_ones_supervisor_is_a_report(
    world: World, boss: Agent, child: Agent
) -> None:
    world.agents.journal.update(child, policy="allow child_t agent:boss write\n")
    sent = world.agents.messages.send(
        inside(child), boss, "look", priority="interject", name="m", asked="child"
    )
    assert (sent.provenance, sent.priority, sent.name) == ("child", "normal", "m")
    assert [event["message"] for event in told(world, child)] == ["m"]
    with pytest.raises(MalformedError, match="priority"):
        world.agents.messages.send(inside(child), boss, "look", priority="urgent")


def test_below_a_private_parent_too(world: World, boss: Agent, child: Agent) -> None:
    grandchild = made(world, "grandchild", child)
    report(world, grandchild)
    world.agents.messages.send(inside(grandchild), child, "and more")
    assert [message.provenance for message in queue(world, child)] == ["child", "child"]
    with pytest.raises(DeniedError):  # its supervisor's supervisor is another
        world.agents.messages.send(inside(grandchild), boss, "")
    assert queue(world, boss) == []


def test_a_detached_child_has_no_supervisor(world: World, boss: Agent) -> None:
    loner = made(world, "loner", boss)
    world.agents.journal.update(loner, life="detached", profile="public_named")
    report(world, loner)
    assert [event["to"] for event in told(world, loner)] == ["none"]
    with pytest.raises(DeniedError):
        world.agents.messages.send(inside(loner), boss, "")
    assert not queue(world, boss)
    assert not world.agents.messages.reports(boss)


def test_of_a_root_agent_the_event_is_all(world: World, boss: Agent) -> None:
    name = report(world, boss)
    (event,) = told(world, boss)
    assert (event["to"], event["message"]) == ("operator", name)
    assert not queue(world, boss)
    assert not world.agents.messages.reports(boss)


def test_only_the_agent_itself_reports(world: World, boss: Agent, child: Agent) -> None:
    for caller in (ROOT, USER, inside(boss)):
        with pytest.raises(DeniedError, match="the agent itself may"):
            world.agents.messages.report(caller, child, "")
    assert not told(world, child)
    assert not queue(world, boss)


@pytest.mark.parametrize("status", Status)
def test_when_a_supervisor_is_told(world: World, boss: Agent, status: Status) -> None:
    child = made(world, "child", boss)
    boss.status = status
    if status not in (Status.STOPPING, Status.DEAD):
        report(world, child)
        return
    with pytest.raises(WrongStateError, match=f'the supervisor "boss" is {status}'):
        report(world, child)
    with pytest.raises(WrongStateError):
        world.agents.messages.send(inside(child), boss, "")
    assert not told(world, child)
    assert not queue(world, boss)


def test_an_agent_that_is_ending_still_reports(world: World, boss: Agent, child: Agent) -> None:
    child.status = Status.STOPPING
    report(world, child)
    assert len(queue(world, boss)) == 1


def test_a_once_supervisor_reads_results(world: World) -> None:
    boss = made(world, "boss", mode="once")
    child = made(world, "child", boss)
    for send in (
        lambda: report(world, child),
        lambda: world.agents.messages.send(inside(child), boss, ""),
    ):
        with pytest.raises(UnsupportedError, match=r"once agent.*write result\.md"):
            send()
    assert told(world, child) == []


def test_reports_and_messages_take_no_room_from_each_other(
    world: World, boss: Agent, child: Agent
) -> None:
    for _ in range(4):
        report(world, child)
        world.agents.messages.send(USER, boss, "")
    with pytest.raises(QuotaError, match='4 reports wait for "boss"'):
        report(world, child)
    with pytest.raises(QuotaError, match="4 messages wait"):
        world.agents.messages.send(USER, boss, "")
    assert len(told(world, child)) == len(world.agents.messages.reports(boss)) == 4


@pytest.mark.parametrize("text", ["x" * 65_536, "ä" * 32_768])
def test_the_longest_report(world: World, boss: Agent, child: Agent, text: str) -> None:
    report(world, child, text)
    assert queue(world, boss)[0].text == text
    (event,) = told(world, child)
    assert event["text"] == text[: 8192 // len(text[0].encode())]
    (kept,) = world.agents.messages.reports(boss)
    assert kept.text == text[: 1500 // len(text[0].encode())]
    for send in (
        lambda: report(world, child, text + "x"),
        lambda: report(world, boss, text + "x"),
        lambda: world.agents.messages.send(inside(child), boss, text + "x"),
    ):
        with pytest.raises(TooLongError, match="at most 65536 bytes"):
            send()
    assert len(told(world, child)) == 1


@pytest.mark.settings(messages=100)
def test_the_last_ten_are_kept(world: World, boss: Agent, child: Agent) -> None:
    other = made(world, "other", boss)
    for number in range(12):
        report(world, (child, other)[number % 2], f"report {number}")
    texts = [f"report {number}" for number in range(2, 12)]
    assert [kept.text for kept in world.agents.messages.reports(boss)] == texts
    agents = world.reopen()
    again = agents.registry.named("boss")
    assert again is not None
    assert [kept.text for kept in agents.messages.reports(again)] == texts


def test_an_id_said_again_is_not_reported_again(world: World, boss: Agent, child: Agent) -> None:
    assert report(world, child, name="1") == report(world, child, "other", name="1") == "1"
    assert len(queue(world, boss)) == len(told(world, child)) == 1
    change = Change()
    (message,) = queue(world, boss)
    world.agents.messages.deliver(change, boss, message, RunId("r1"))
    world.agents.messages.end(change, boss, message, MessageStatus.PROCESSED)
    world.agents.journal.commit(change)
    assert report(world, child, name="1") == "1"
    assert queue(world, boss) == []


def test_no_child_takes_the_id_of_anothers_report(world: World, boss: Agent, child: Agent) -> None:
    messages, other = world.agents.messages, made(world, "other", boss)
    assert report(world, child, "squat", name="1") == "1"
    assert messages.send(inside(other), boss, "honest", name="1", asked=inside(other).key)
    assert messages.send(USER, boss, "do it", name="1", asked=USER.key)
    assert [message.text for message in queue(world, boss)] == ["squat", "honest", "do it"]
    # each caller means its own one; what is not a report has its id alone in the session
    for caller, text in ((inside(child), "squat"), (inside(other), "honest"), (ROOT, "do it")):
        found = messages.meant(caller, boss, MessageId("1"))
        assert found is not None and found.text == text
    with pytest.raises(TakenError):
        messages.send(ROOT, boss, "again", name="1", asked=ROOT.key)
    # a later child of the same name is another one
    world.agents.journal.update(other, status=Status.DEAD)
    world.agents.removals.remove(other)
    report(world, made(world, "other", boss), "more", name="1")
    assert queue(world, boss)[-1].text == "more"


def test_nor_is_one_that_nobody_receives(
    world: World, boss: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.agents.reports._KEPT_IDS", 3)
    for name in ("1", "1", "2", "", "3", "1"):
        report(world, boss, name=name)
    assert [event["message"] for event in told(world, boss) if len(event["message"]) == 1] == [
        "1", "2", "3",
    ]  # fmt: skip
    assert len(told(world, boss)) == 4
    report(world, boss, name="4")
    assert [r.name for r in world.agents.items.of(boss.index, Report)] == ["2", "3", "4"]
    agents = world.reopen()
    again = agents.registry.named("boss")
    assert again is not None
    agents.messages.report(inside(again), again, "", name="4")
    assert len(told(world, again)) == 5
    with pytest.raises(MalformedError, match="is not an id"):
        agents.messages.report(inside(again), again, "", name="a b")


@pytest.mark.settings(owner_disk_max=100_000)
def test_what_nobody_receives_is_on_an_account(world: World, boss: Agent) -> None:
    with pytest.raises(QuotaError, match="owner_disk_max"):
        for _ in range(100):
            report(world, boss, "x" * 8192)
    assert 1 < len(told(world, boss)) < 10
