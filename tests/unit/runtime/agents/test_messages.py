"""Messages: who is refused what, their order and ends, and replies on their way."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.agents import messages as messages_module
from runtime.agents.messages import check_id
from runtime.authority.accounts import TimeAccounts
from runtime.authority.loop import Gentle
from runtime.errors import (
    DeniedError,
    MalformedError,
    QuotaError,
    TakenError,
    TooLongError,
    WrongStateError,
)
from runtime.ids import ItemIndex, MessageId, RunId
from runtime.life.residents import _line, _parse
from runtime.life.streams import Streams, Tail
from runtime.records.change import Change
from runtime.records.items import PRIORITIES, Message, MessageStatus
from runtime.records.lifecycle import Status
from runtime.records.model import Agent, Outcome
from runtime.records.run import Run, RunStatus, Said
from tests.worlds.records import ROOT, World, add_end, inside, operator, world_in

USER = operator(1000)
RUNNING = Run(id=RunId("r1"), status=RunStatus.RUNNING)


pytestmark = pytest.mark.settings(messages=4, frame_max=64)


@pytest.fixture
def agent(world: World) -> Agent:
    return spoken_to(world, "coder")


def spoken_to(world: World, name: str, mode: str = "turn", status: Status = Status.IDLE) -> Agent:
    agent = world.agents.births.create(USER, name)
    world.agents.journal.update(agent, mode=mode, run=RUNNING)
    return world.live(agent, status)


def send(world: World, agent: Agent, text: str = "hello", **more: Any) -> Message:
    return world.agents.messages.send(USER, agent, text, **more)


def queue(world: World, agent: Agent) -> list[str]:
    return [m.text for m in world.agents.messages.pending(agent)]


def told(world: World, agent: Agent) -> list[dict[str, Any]]:
    """The events of messages so far, without ids and times."""
    lines = [json.loads(line) for line in world.lines(agent)]
    return [
        {key: value for key, value in event.items() if key not in ("id", "ts", "agent", "by")}
        for event in lines
        if event["type"].startswith("message.")
    ]


def deliver(world: World, agent: Agent, message: Message, run: str = "r1") -> None:
    with world.agents.journal.changing() as change:
        world.agents.messages.deliver(change, agent, message, RunId(run))


def end(
    world: World, agent: Agent, message: Message, status: str = "processed", **more: str
) -> None:
    with world.agents.journal.changing() as change:
        world.agents.messages.end(change, agent, message, MessageStatus(status), **more)


# cancelling


def test_what_waits_is_dropped_when_it_is_cancelled(world: World, agent: Agent) -> None:
    message = send(world, agent)
    world.agents.messages.cancel(agent, message)
    assert (message.status, message.reason) == ("dropped", "message_cancelled")
    assert queue(world, agent) == []
    assert agent.run == RUNNING


def test_a_run_is_ended_when_its_message_is_cancelled(world: World, agent: Agent) -> None:
    message = send(world, agent)
    deliver(world, agent, message)
    with world.agents.journal.acting(USER):
        world.agents.messages.cancel(agent, message)
    assert message.status == "running", "it ends with the run"
    ending = Run(
        id=RUNNING.id, status=RunStatus.ENDING, cause="message_cancelled",
        caused_by="operator uid:1000",
    )  # fmt: skip
    assert agent.run == ending
    world.agents.messages.cancel(agent, message)
    assert agent.run == ending, "the first cause counts"


@pytest.mark.parametrize(
    ("status", "after"), [(Status.BUSY, Status.READY), (Status.PAUSED, Status.PAUSED)]
)
def test_a_resident_program_goes_on_when_its_message_is_cancelled(
    world: World, status: Status, after: Status
) -> None:
    agent = spoken_to(world, "voice", "resident", Status.BUSY)
    message = send(world, agent)
    deliver(world, agent, message)
    world.agents.journal.update(agent, status=status, paused_from="busy")
    world.agents.messages.cancel(agent, message)
    assert (message.status, message.reason) == ("aborted", "message_cancelled")
    assert (agent.status, agent.run) == (after, RUNNING)
    assert agent.paused_from == ("ready" if status is Status.PAUSED else "busy")


def test_a_program_that_takes_cancels_is_told_to_end_its_message(world: World) -> None:
    agent = spoken_to(world, "voice", "resident", Status.BUSY)
    message = send(world, agent)
    deliver(world, agent, message)
    world.agents.journal.update(agent, said=Said(takes_cancel=True))
    with world.agents.journal.acting(USER):
        world.agents.messages.cancel(agent, message)
    assert (message.status, agent.status) == ("running", Status.BUSY)
    assert agent.run.cancelling
    assert (agent.run.cause, agent.run.caused_by) == ("message_cancelled", "operator uid:1000")
    world.agents.messages.cancel(agent, message)
    assert (message.status, agent.status) == ("aborted", Status.READY)
    assert agent.run == RUNNING


def test_a_message_whose_run_is_being_aborted_is_not_let_off(world: World) -> None:
    agent = spoken_to(world, "voice", "resident", Status.BUSY)
    message = send(world, agent)
    deliver(world, agent, message)
    aborting = replace(RUNNING, status=RunStatus.CANCELLING, cause="operator_aborted")
    world.agents.journal.update(agent, said=Said(takes_cancel=True), run=aborting)
    world.agents.messages.cancel(agent, message)
    assert (message.status, agent.run) == ("running", aborting)
    waits = send(world, agent)
    world.agents.messages.cancel(agent, waits)
    assert (waits.status, agent.run) == ("dropped", aborting)


@pytest.mark.parametrize("ending", [
    {"frozen": True}, {"run": Run(id=RunId("r1"), status=RunStatus.ENDING, cause="x")},
])  # fmt: skip
def test_what_cannot_answer_is_not_told_to(world: World, ending: dict[str, Any]) -> None:
    agent = spoken_to(world, "voice", "resident", Status.BUSY)
    message = send(world, agent)
    deliver(world, agent, message)
    world.agents.journal.update(agent, said=Said(takes_cancel=True), **ending)
    before = agent.run
    world.agents.messages.cancel(agent, message)
    assert (message.status, agent.run) == ("aborted", before)


# sending


def test_all_that_waits_for_one_owners_agents_is_bounded(tmp_path: Path) -> None:
    with world_in(tmp_path, owner_disk_max=150_000) as world:
        one, two = spoken_to(world, "one"), spoken_to(world, "two")
        first = send(world, one, "x" * 50_000)
        send(world, two, "x" * 30_000)
        for agent in (one, two):
            with pytest.raises(QuotaError, match="owner_disk_max"):
                send(world, agent, "x" * 60_000)
        world.reopen()
        again = [world.agents.registry.named(name) for name in ("one", "two")]
        assert again[0] is not None and again[1] is not None
        one, two = again[0], again[1]
        found = world.agents.messages.find(one, first.name)
        assert found is not None
        deliver(world, one, found)
        with pytest.raises(QuotaError, match="owner_disk_max"):
            send(world, two, "x" * 75_000)
        end(world, one, found)
        send(world, two, "x" * 75_000)


def test_a_message_is_queued_told_and_shown(world: World, agent: Agent) -> None:
    message = send(world, agent, "fix the tést", priority="next", name="q-1")
    assert told(world, agent) == [
        {"type": "message.queued", "message": "q-1", "from": "operator uid:1000",
         "provenance": "operator", "priority": "next"},
    ]  # fmt: skip
    (row,) = world.agents.messages.lines(agent)
    shown = json.loads(row)
    assert list(shown) == ["id", "ts", "from", "provenance", "priority", "text"]
    assert shown.pop("ts").endswith("Z")
    assert shown == {"id": "q-1", "from": "operator uid:1000", "provenance": "operator",
                     "priority": "next", "text": "fix the tést"}  # fmt: skip
    assert message.status is MessageStatus.QUEUED


def test_an_empty_queue_is_an_empty_file(world: World, agent: Agent) -> None:
    assert not list(world.agents.messages.lines(agent))


def test_messages_without_an_id_get_one_each(world: World, agent: Agent) -> None:
    names = {send(world, agent).name for _ in range(4)}
    assert len(names) == 4
    assert all(check_id(name) for name in names)


@pytest.mark.parametrize(
    "text", ["a", "x" * 128, "".join(map(chr, range(33, 127))), "--", "../etc", '{"a":1}']
)
def test_what_is_an_id(text: str) -> None:
    assert check_id(text) == text


@pytest.mark.parametrize("text", ["", " ", "a b", "a\n", "\n", "\x7f", "ä", "x" * 129, "a\0", "\t"])
def test_what_is_no_id(world: World, agent: Agent, text: str) -> None:
    with pytest.raises(MalformedError, match="is not an id; use 1 to 128 printable ASCII"):
        check_id(text)
    if text:  # an empty one is none, and made up
        with pytest.raises(MalformedError):
            send(world, agent, name=text)
    assert queue(world, agent) == []


@pytest.mark.parametrize("priority", ["", "urgent", "Normal", "normal ", "normal\n", "next,normal"])
def test_what_is_no_priority(world: World, agent: Agent, priority: str) -> None:
    with pytest.raises(MalformedError, match="; use interject, next, normal, background"):
        send(world, agent, priority=priority)
    assert told(world, agent) == []


@pytest.mark.parametrize("text", ["x" * 64, "ä" * 32, ""])
def test_a_message_may_be_as_long_as_a_frame(world: World, agent: Agent, text: str) -> None:
    send(world, agent, text)
    assert queue(world, agent) == [text]


@pytest.mark.parametrize("text", ["x" * 65, "ä" * 33])
def test_a_longer_message_is_too_long(world: World, agent: Agent, text: str) -> None:
    with pytest.raises(TooLongError, match="at most 64 bytes"):
        send(world, agent, text)
    assert queue(world, agent) == []


def test_so_many_wait_and_no_more(world: World, agent: Agent) -> None:
    sent = [send(world, agent) for _ in range(4)]
    with pytest.raises(QuotaError, match="4 messages wait"):
        send(world, agent)
    deliver(world, agent, sent[0])
    send(world, agent)  # the one that is worked on does not wait
    with pytest.raises(QuotaError):
        send(world, agent)
    end(world, agent, sent[1], "dropped")
    send(world, agent)
    assert len(told(world, agent)) == 7


def test_one_change_cannot_queue_more_than_that_either(world: World, agent: Agent) -> None:
    with pytest.raises(QuotaError), world.agents.journal.changing() as change:
        for _ in range(5):
            world.agents.messages.queue(
                change, agent, text="", sender="s", provenance="operator"
            )
    assert queue(world, agent) == []


def test_notices_are_owed_and_have_no_maximum(world: World, agent: Agent) -> None:
    for _ in range(4):
        send(world, agent)
    with world.agents.journal.changing() as change:
        for _ in range(3):
            world.agents.messages.notify(change, agent, text="{}", provenance="wait")
    assert len(queue(world, agent)) == 7


@pytest.mark.parametrize(
    ("mode", "status", "takes"),
    [(mode, status, mode != "once" and status not in (Status.STOPPING, Status.DEAD))
     for mode in ("once", "turn", "resident") for status in Status],
)  # fmt: skip
def test_who_takes_messages(world: World, mode: str, status: Status, takes: bool) -> None:
    agent = spoken_to(world, "x", mode, status)
    if takes:
        send(world, agent)
        return
    word = "once agent" if mode == "once" else f"is {status}"
    with pytest.raises(WrongStateError, match=word):
        send(world, agent)
    assert queue(world, agent) == []


@pytest.mark.parametrize("mode", ["once", "turn"])
@pytest.mark.parametrize("status", Status)
def test_who_gets_notices(world: World, mode: str, status: Status) -> None:
    agent = spoken_to(world, "x", mode, status)
    with world.agents.journal.changing() as change:
        world.agents.messages.notify(change, agent, text="{}", provenance="wait")
    live = status not in (Status.NEW, Status.STOPPING, Status.DEAD)
    assert len(queue(world, agent)) == (mode == "turn" and live)


def test_an_agent_that_ends_in_the_same_change_gets_no_notice(world: World, agent: Agent) -> None:
    with world.agents.journal.changing() as change:
        change.set(agent, status=Status.STOPPING)
        world.agents.messages.notify(change, agent, text="{}", provenance="wait")
    assert queue(world, agent) == []


def test_what_is_refused_is_judged_in_this_order(world: World, agent: Agent) -> None:
    once = spoken_to(world, "once", "once")
    long, bad = "x" * 65, "no id"
    with pytest.raises(MalformedError, match="unknown priority"):
        send(world, once, long, priority="urgent", name=bad)
    with pytest.raises(WrongStateError):
        send(world, once, long, name=bad)
    for _ in range(4):
        send(world, agent)
    with pytest.raises(TooLongError):
        send(world, agent, long, name=bad)
    with pytest.raises(QuotaError):
        send(world, agent, name=bad)


def test_what_somebody_is_to_the_agent_is_the_provenance(world: World, agent: Agent) -> None:
    child = world.agents.births.create(inside(world.may_create(agent)), "child")
    world.agents.journal.update(child, mode="turn")
    world.live(child, Status.IDLE)
    writer = world.live(world.agents.births.create(USER, "writer"))
    world.agents.journal.update(writer, policy="allow writer_t agent:coder write\n")
    assert send(world, agent).provenance == "operator"
    assert world.agents.messages.send(ROOT, agent, "").sender == "operator uid:0"
    by_writer = world.agents.messages.send(inside(writer), agent, "")
    assert (by_writer.provenance, by_writer.sender) == ("agent", "agent:writer")
    by_parent = world.agents.messages.send(inside(agent), child, "")
    assert (by_parent.provenance, by_parent.sender) == ("supervisor", "agent:coder")


def test_a_private_child_hears_its_supervisor_only(world: World, agent: Agent) -> None:
    child = world.agents.births.create(inside(world.may_create(agent)), "child")
    world.agents.journal.update(child, mode="turn")
    for caller in (ROOT, USER, inside(child), operator(4242)):
        with pytest.raises(DeniedError, match="the creator and supervised children may"):
            world.agents.messages.send(caller, child, "")
    with pytest.raises(DeniedError, match="operators, supervised children and agents with"):
        world.agents.messages.send(operator(4242), agent, "")
    assert queue(world, child) == queue(world, agent) == []


# ids


@pytest.mark.parametrize("asked", ["", "somebody"])
def test_an_id_is_taken_while_its_message_waits_or_is_worked_on(
    world: World, agent: Agent, asked: str
) -> None:
    message = send(world, agent, name="1", asked=asked)
    for status in (MessageStatus.QUEUED, MessageStatus.RUNNING):
        if message.status is not status:
            deliver(world, agent, message)
        with pytest.raises(TakenError, match='"1" is the id of another message'):
            send(world, agent, name="1")
    end(world, agent, message)
    if asked:
        with pytest.raises(TakenError):
            send(world, agent, name="1")
    else:
        send(world, agent, name="1")


def test_an_id_is_of_its_session(world: World, agent: Agent) -> None:
    send(world, agent, "one", name="1", asked="x")
    world.agents.births.switch_session(agent, "second")
    send(world, agent, "two", name="1", asked="x")
    found = world.agents.messages.find(agent, MessageId("1"))
    assert found is not None
    assert found.text == "two"
    assert queue(world, agent) == ["one", "two"]
    world.agents.births.switch_session(agent, "default")
    with pytest.raises(TakenError):
        send(world, agent, name="1")


def test_the_end_is_told_in_the_session_that_the_message_is_of(world: World, agent: Agent) -> None:
    message = send(world, agent, name="1")
    world.agents.births.switch_session(agent, "second")
    end(world, agent, message, "dropped")
    assert told(world, agent) == []
    world.agents.births.switch_session(agent, "default")
    assert [e["type"] for e in told(world, agent)] == ["message.queued", "message.end"]


# the order


def test_the_order_is_of_priorities_then_of_age(world: World, agent: Agent) -> None:
    for text, priority in (("d", "background"), ("c", "normal"), ("a", "interject"), ("b", "next")):
        send(world, agent, text, priority=priority)
    assert queue(world, agent) == ["a", "b", "c", "d"]
    assert [json.loads(r)["text"] for r in world.agents.messages.lines(agent)] == [
        *("a", "b", "c", "d")
    ]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(PRIORITIES), max_size=4))
def test_of_one_priority_the_oldest_is_first(
    tmp_path_factory: pytest.TempPathFactory, priorities: list[str]
) -> None:
    with world_in(tmp_path_factory.mktemp("order")) as world:
        agent = spoken_to(world, "x")
        for number, priority in enumerate(priorities):
            send(world, agent, str(number), priority=priority)
        order = sorted(range(len(priorities)), key=lambda n: (PRIORITIES.index(priorities[n]), n))
        assert queue(world, agent) == [str(n) for n in order]
        world.reopen()
        assert queue(world, agent) == [str(n) for n in order]


def test_the_delegated_task_is_before_all_others_and_may_be_long(world: World) -> None:
    agent = spoken_to(world, "x", status=Status.NEW)
    for _ in range(4):
        send(world, agent, "impatient", priority="interject")
    with world.agents.journal.changing() as change:
        world.agents.messages.queue_first(
            change, agent, text="task " * 100, sender="agent:p", provenance="delegation"
        )
    assert queue(world, agent)[0] == "task " * 100
    world.reopen()
    assert queue(world, agent)[0] == "task " * 100
    (first, *_) = world.agents.messages.lines(agent)
    assert (json.loads(first)["provenance"], json.loads(first)["priority"]) == (
        *("delegation", "interject"),
    )


# ends


@pytest.mark.parametrize("status", ["processed", "failed", "aborted"])
def test_an_end_is_told_once_with_its_run_and_reason(
    world: World, agent: Agent, status: str
) -> None:
    message = send(world, agent, name="1", asked="x")
    deliver(world, agent, message, "r7")
    assert world.agents.messages.current(agent) is message
    assert queue(world, agent) == []
    end(world, agent, message, status, reply="so", reason="why")
    assert told(world, agent)[1:] == [
        {"type": "message.end", "message": "1", "outcome": status, "run": "r7", "reason": "why"}
    ]
    assert world.agents.messages.current(agent) is None
    assert (message.reply, message.reason, message.text) == ("so", "why", "")


def test_a_dropped_one_has_no_run(world: World, agent: Agent) -> None:
    message = send(world, agent, name="1")
    end(world, agent, message, "dropped")
    assert told(world, agent)[1:] == [
        {"type": "message.end", "message": "1", "outcome": "dropped"}
    ]


def test_one_that_nobody_asked_for_is_gone_with_its_end(world: World, agent: Agent) -> None:
    kept, gone = send(world, agent, name="1", asked="x"), send(world, agent, name="2")
    for message in (kept, gone):
        end(world, agent, message, "dropped")
    assert world.agents.messages.find(agent, MessageId("1")) is kept
    assert world.agents.messages.find(agent, MessageId("2")) is None
    world.reopen()
    assert [m.name for m in world.agents.items.of(agent.index, Message)] == ["1"]


def test_so_many_ended_ones_are_remembered(
    world: World, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages_module, "_REMEMBERED", 3)
    for number in range(6):
        end(world, agent, send(world, agent, name=str(number), asked="x"), "dropped")
    found = [m.name for m in world.agents.items.of(agent.index, Message)]
    assert found == ["3", "4", "5"]
    world.reopen()
    assert [m.name for m in world.agents.items.of(agent.index, Message)] == found


def test_those_are_forgotten_that_ended_first(
    world: World, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages_module, "_REMEMBERED", 2)
    late = send(world, agent, name="late", priority="background", asked="x")
    for number in range(3):
        end(world, agent, send(world, agent, name=str(number), asked="x"), "dropped")
    before = time.time()
    while time.time() == before:  # clocks have a grain
        pass
    end(world, agent, late, "dropped", reply="at last")
    end(world, agent, send(world, agent, name="3", asked="x"), "dropped")
    found = {m.name for m in world.agents.items.of(agent.index, Message)}
    assert found == {"late", "3"}


def test_the_end_of_an_agent_ends_all_of_its_messages(world: World, agent: Agent) -> None:
    running = send(world, agent, name="1", asked="x")
    deliver(world, agent, running)
    for name in ("2", "3"):
        send(world, agent, name=name)
    world.agents.journal.update(agent, status=Status.STOPPING)
    change = Change()
    add_end(world.agents, change, agent, Outcome.ERROR, "exit:3")
    world.agents.journal.note(change)
    assert [(e["message"], e["outcome"], e["reason"]) for e in told(world, agent)[3:]] == [
        ("1", "failed", "exit:3"),
        ("2", "dropped", "exit:3"),
        ("3", "dropped", "exit:3"),
    ]
    assert queue(world, agent) == []


def test_one_that_ends_in_the_same_change_ends_once(world: World, agent: Agent) -> None:
    running = send(world, agent, name="1")
    deliver(world, agent, running)
    with world.agents.journal.changing() as change:
        world.agents.messages.end(change, agent, running, MessageStatus.PROCESSED)
        world.agents.messages.add_ends(change, agent, "exit:0")
    assert [e["outcome"] for e in told(world, agent) if "outcome" in e] == ["processed"]


def test_what_waits_is_there_after_a_crash(world: World, agent: Agent) -> None:
    sent = [send(world, agent, name=str(n)) for n in range(3)]
    deliver(world, agent, sent[0])
    world.reopen()
    current = world.agents.messages.current(agent)
    assert current is not None
    assert (current.name, current.run) == ("0", "r1")
    assert [m.name for m in world.agents.messages.pending(agent)] == ["1", "2"]


# streams


def gentle() -> Gentle:
    """Of owners that have all the time."""
    return Gentle(TimeAccounts(1.0))


def test_whoever_listens_hears_of_a_piece() -> None:
    stream = Streams(gentle()).of(ItemIndex(1))
    count = stream.changed.count
    stream.add("x")
    trio.run(stream.changed.after, count)


def test_a_stream_holds_the_reply_so_far_up_to_a_maximum() -> None:
    stream = Streams(gentle()).of(ItemIndex(1))
    for piece in ("one ", "two"):
        stream.add(piece)
    assert stream.text == "one two"
    stream.add("x" * (600 << 10))
    assert len(stream.text) == 512 << 10
    stream.add("more")
    assert stream.text.endswith("x")


def test_a_message_has_one_stream_until_its_end(world: World, agent: Agent) -> None:
    streams = Streams(gentle())
    world.agents.journal.subscribe(streams)
    message, other = send(world, agent, asked="x"), send(world, agent)
    stream = streams.of(message.index)
    assert streams.of(message.index) is stream
    assert streams.of(other.index) is not stream
    deliver(world, agent, message)
    assert streams.of(message.index) is stream

    async def ending() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.changed.after, stream.changed.count)
            await trio.testing.wait_all_tasks_blocked()
            end(world, agent, message, reply="all of it")
            assert message.reply == "all of it", "recorded before anybody is told"

    trio.run(ending)
    assert streams.of(message.index) is not stream, "it is let go"


# tails


def test_a_tail_is_what_comes_after_a_position(tmp_path: Path) -> None:
    (tmp_path / f"{0:020d}").write_bytes(b"before|after")
    tail = Tail(tmp_path, 7)
    assert (tail.read(), tail.position) == (b"after", 12)
    assert tail.read() == b""
    with open(tmp_path / f"{0:020d}", "ab") as file:
        file.write(b" this")
    assert (tail.read(), tail.position) == (b" this", 17)


def test_a_tail_reads_a_block_at_a_time(tmp_path: Path) -> None:
    (tmp_path / f"{0:020d}").write_bytes(b"x" * (100 << 10))
    tail = Tail(tmp_path, 0)
    assert [len(tail.read()) for _ in range(3)] == [64 << 10, 36 << 10, 0]


def test_a_tail_goes_on_behind_what_was_dropped(tmp_path: Path) -> None:
    (tmp_path / f"{100:020d}").write_bytes(b"late")
    tail = Tail(tmp_path, 3)
    assert (tail.read(), tail.position) == (b"late", 104)


@given(st.text(max_size=20), st.data())
def test_characters_come_whole(
    tmp_path_factory: pytest.TempPathFactory, text: str, data: st.DataObject
) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=4)))
    directory = tmp_path_factory.mktemp("tail")
    tail, found, done = Tail(directory, 0), "", 0
    for cut in (*cuts, len(raw)):
        with open(directory / f"{0:020d}", "ab") as file:
            file.write(raw[done:cut])
        done = cut
        found += tail.text()
        assert text.startswith(found)
    assert found == text


def test_what_is_no_text_is_replaced(tmp_path: Path) -> None:
    (tmp_path / f"{0:020d}").write_bytes(b"a\xffb")
    assert Tail(tmp_path, 0).text() == "a\N{REPLACEMENT CHARACTER}b"


# lines of resident programs


def test_a_message_is_one_line_to_a_resident_program(world: World, agent: Agent) -> None:
    message = send(world, agent, "two\nlines ä", name="1")
    data = _line(message)
    assert data.count(b"\n") == 1
    assert data.endswith(b"}\n")
    assert json.loads(data) == {"type": "message", "id": "1", "from": "operator uid:1000",
                                "provenance": "operator", "text": "two\nlines ä"}  # fmt: skip


REPLIES: dict[str, tuple[str, Any, str] | None] = {
    '{"type":"delta","id":"1","text":"a"}': ("delta", "1", "a"),
    '{"type":"message","id":"1","text":"ä"}': ("message", "1", "ä"),
    ' {"text":"e","type":"error"}\r': ("error", None, "e"),
    '{"type":"message"}': ("message", None, ""),
    '{"type":"message","id":null,"more":{"a":[1]}}': ("message", None, ""),
    '{"type":"message","id":7,"text":"a"}': ("message", 7, "a"),
    "": None,
    "plain output": None,
    "[]": None,
    "null": None,
    '"message"': None,
    "{}": None,
    '{"type":"message","text":"a"} and more': None,
    '{"type":"message","text":7}': None,
    '{"type":"message","text":null}': None,
    '{"type":"start"}': None,
    '{"type":["message"]}': None,
    '{"type":{"a":1}}': None,
    '{"type":"message","text":NaN}': None,
    '{"type":"message","text":"\\ud800"}': None,
    '{"type":"message","a":' + "[" * 100 + "]" * 100 + "}": None,
    '{"type":"message","a":' + "9" * 10_000 + "}": None,
}


@pytest.mark.parametrize("line", REPLIES)
def test_what_a_resident_program_says(line: str) -> None:
    expected = REPLIES[line]
    found = _parse(line.encode())
    if expected is None:
        assert found is None
    else:
        assert found == dict(zip(("type", "id", "text"), expected, strict=True))


def test_what_is_no_text_is_no_reply() -> None:
    assert _parse(b'{"type":"message","text":"\xff"}') is None


@given(st.binary(max_size=60))
def test_nothing_that_it_says_is_an_error(line: bytes) -> None:
    found = _parse(line)
    assert found is None or set(found) == {"type", "id", "text"}


