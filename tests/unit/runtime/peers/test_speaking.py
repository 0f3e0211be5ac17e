"""What a lead says to agents at a node, and makes of what their host says of that."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio.testing

from runtime.errors import AgainError, UnsupportedError
from runtime.peers import streams
from runtime.peers.lease import Grants
from runtime.peers.peering import BrokenLinkError, Delta
from runtime.peers.peering import Lead as Peer
from runtime.peers.peering import Message as Heard
from runtime.peers.streams import UNDONE_MAX, Stream
from runtime.peers.words import TEXT_MAX
from runtime.records.items import Message, MessageStatus
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from tests.worlds.placed import LOST, NODES, Lone, daemons, on_lead
from tests.worlds.records import ROOT, World, world_in


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with world_in(tmp_path, nodes=NODES) as made:
        yield made


async def idle(lead: Lone, **more: Any) -> Agent:
    """A turn agent at the node, which waits for messages."""
    lead.far.open()
    agent = lead.start(lead.make(**{"mode": "turn", **more}))
    await lead.far.say("state", agent, status="idle", run="")
    lead.far.acknowledge()
    assert agent.status is Status.IDLE
    return agent


def send(lead: Lone, agent: Agent, text: str = "hi", **more: Any) -> Message:
    return lead.world.agents.messages.send(ROOT, agent, text, **more)


async def begin(lead: Lone, agent: Agent, name: str, run: str = "r1") -> None:
    await lead.far.say("state", agent, status="busy", run=run)
    await lead.far.say("message", agent, id=name, status="running")


async def end(lead: Lone, agent: Agent, name: str, status: str = "processed", **said: Any) -> None:
    await lead.far.say("message", agent, id=name, status=status, **said)
    await lead.far.say("state", agent, status="idle", run="")


def ended(lead: Lone, agent: Agent) -> list[tuple[str, str, str]]:
    told = lead.events(agent, "message.end")
    return [(each["message"], each["outcome"], each.get("reason", "")) for each in told]


def said(lead: Lone, agent: Agent) -> list[tuple[str, str]]:
    lines = lead.world.lines(agent, "messages.jsonl")
    return [(each["role"], each["content"]) for each in map(json.loads, lines)]


def test_a_message_is_told_and_its_reply_comes(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = await idle(lead)
        message = send(lead, agent, name="m", priority="next", asked="me")
        (told,) = lead.far.told
        assert told == {"op": "message", "n": told["n"], "agent": agent.incarnation, "id": "m",
                        "from": "operator", "provenance": "operator", "priority": "next",
                        "text": "hi", "asks": True}  # fmt: skip
        assert message.status is MessageStatus.QUEUED
        await begin(lead, agent, "m")
        assert (message.status, message.run) == (MessageStatus.RUNNING, "r1")
        assert lead.world.agents.messages.current(agent) is message
        await end(lead, agent, "m", text="hello")
        assert (message.status, message.reply) == (MessageStatus.PROCESSED, "hello")
        assert (agent.status, agent.run.id) == (Status.IDLE, "")
        assert said(lead, agent) == [("user", "hi"), ("assistant", "hello")]
        assert ended(lead, agent) == [("m", "processed", "")]

    on_lead(world, act)


def test_the_task_and_what_waits_go_along(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = lead.make(mode="turn")
        lead.world.agents.documents.write(agent, "handoff.md", b"a task")
        lead.start(agent)
        for number in range(2):
            send(lead, agent, f"{number}", name=f"m{number}")
        lead.world.agents.messages.cancel(agent, send(lead, agent, name="never"))
        assert ended(lead, agent) == [("never", "dropped", "message_cancelled")]
        lead.far.open()
        await lead.until(lambda: agent.away)
        put, *more, start = lead.far.told
        assert (put["op"], start["op"], put["run"]) == ("put", "start", 1)
        assert put["first"]["from"] == put["first"]["provenance"] == "operator"
        assert [each["id"] for each in more] == ["m0", "m1"]
        lead.far.acknowledge()
        await begin(lead, agent, put["first"]["id"])
        await end(lead, agent, put["first"]["id"], text="done")
        assert said(lead, agent) == [("user", "a task"), ("assistant", "done")]

    on_lead(world, act)


def test_a_long_text_goes_and_comes_in_parts(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = await idle(lead)
        text = "\x01é" * 150_000
        send(lead, agent, text, name="m")
        *parts, last = lead.far.told
        assert {each["op"] for each in parts} == {"text"} and last["op"] == "message"
        assert "".join(each["text"] for each in (*parts, last)) == text
        assert last["at"] == len("".join(each["text"] for each in parts).encode())
        await begin(lead, agent, "m")
        for _ in range(2):  # one that comes again changes nothing
            await lead.far.say("text", agent, at=0, text="ab")
            await lead.far.say("text", agent, at=2, text="é")
        await end(lead, agent, "m", text="d", at=4)
        assert said(lead, agent)[1] == ("assistant", "abéd")

    on_lead(world, act)


@pytest.mark.parametrize(
    "wrong",
    [
        [("message", {"id": "m", "status": "processed", "text": "x"})],
        [("message", {"id": "m", "status": "queued", "provenance": "operator"})],
        [("message", {"id": "m", "status": "running"}),
         ("message", {"id": "o", "status": "running"})],
        [("message", {"id": "m", "status": "running"}),
         ("message", {"id": "m", "status": "dropped"})],
        [("message", {"id": "m", "status": "running"}),
         ("message", {"id": "m", "status": "processed", "text": "x", "at": 3})],
        [("message", {"id": "m", "status": "asleep"})],
        [("message", {"id": ["m"], "status": "running "})],
        [("message", {"id": "m"})],
        [("text", {"at": 1, "text": "x"})],
        [("text", {"at": -1, "text": "x"})],
        [("text", {"at": 0, "text": 5})],
        [("text", {"at": TEXT_MAX, "text": "x"})],
    ],
)  # fmt: skip
def test_what_no_host_says_ends_the_link(world: World, wrong: list[Any]) -> None:
    async def act(lead: Lone) -> None:
        agent = await idle(lead)
        for name in ("m", "o"):
            send(lead, agent, name=name)
        *before, (op, fields) = wrong
        for first, more in before:
            await lead.far.say(first, agent, **more)
        with pytest.raises(BrokenLinkError):
            await lead.far.say(op, agent, **fields)
        assert ended(lead, agent) == []

    on_lead(world, act)


def test_a_host_answers_for_its_own_agents_once(world: World) -> None:
    async def act(lead: Lone) -> None:
        one, other = await idle(lead), await idle(lead, name="y")
        for each in (one, other):
            send(lead, each, name="m")
        await begin(lead, one, "m")
        await end(lead, one, "m", text="first")
        for status in ("running", "processed", "failed", "aborted", "dropped"):
            await lead.far.say("message", one, id="m", status=status, text="second")
            await lead.far.say("message", one, id="unknown", status=status, text="third")
        assert said(lead, one) == [("user", "hi"), ("assistant", "first")]
        assert ended(lead, one) == [("m", "processed", "")] and ended(lead, other) == []
        assert [each.status for each in lead.world.agents.messages.pending(other)] == ["queued"]
        await lead.far.say("session", one, name="unasked")
        assert lead.world.agents.sessions.load(one.session).name == "default"

    on_lead(world, act)


def test_pieces_of_a_reply_pass_by_who_listens(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = await idle(lead)
        message = send(lead, agent, name="m", asked="me")

        async def piece(at: int, text: str, name: str = "m") -> str:
            await lead.far.hear(Delta(agent.incarnation, name, at, text))
            return lead.streams.of(message.index).text

        assert await piece(0, "early") == ""
        await begin(lead, agent, "m")
        assert await piece(0, "ab") == "ab"
        assert await piece(0, "abc") == "abc", "a new connection tells all again"
        assert await piece(4, "lost") == await piece(0, "x") == "abc"
        assert await piece(3, "of another", "o") == "abc"
        for number in range(100):
            await piece(3 + number * 8000, "x" * 8000)
        assert len(lead.streams.of(message.index).text) == 512 << 10, "it is bounded"
        await end(lead, agent, "m", text="whole")
        assert message.reply == "whole"
        other = send(lead, agent, name="o", asked="me")
        await begin(lead, agent, "o", "r2")
        stream = lead.streams.of(other.index)
        await lead.far.hear(Delta(agent.incarnation, "o", 0, "ab"))
        await end(lead, agent, "o", "failed", text="abcd", reason="exit:3")
        assert stream.text == "abcd", "what did not come before"

    on_lead(world, act)


def test_a_cancel_and_an_abort_go_along(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = await idle(lead)
        message = send(lead, agent, name="m")
        await begin(lead, agent, "m")
        lead.far.acknowledge()
        with lead.world.agents.journal.acting(ROOT):
            lead.world.agents.messages.cancel(agent, message)
            lead.supervisor.abort(agent, None)
        cancel, abort = lead.far.told
        assert (cancel["op"], cancel["id"]) == ("cancel", "m")
        assert (abort["verb"], abort["run"]) == ("abort", "r1")
        assert message.status is MessageStatus.RUNNING
        await end(lead, agent, "m", "aborted", reason="message_cancelled")
        assert ended(lead, agent) == [("m", "aborted", "message_cancelled")]
        await lead.far.say("refused", agent, of="verb", verb="abort", sentence="no such run")
        await lead.far.say("refused", agent, of="cancel", id="m", sentence="none is left")
        assert agent.heard["refused"][1] == "n2: abort: no such run"

    on_lead(world, act)


def test_what_a_host_does_not_take_is_dropped(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = await idle(lead)
        send(lead, agent, name="m")
        await lead.far.say("refused", agent, of="message", id="m", sentence="too many\x07")
        assert ended(lead, agent) == [("m", "dropped", "n2: too many\\x07")]
        assert agent.heard["refused"][1].startswith("n2: message: too many")

    on_lead(world, act)


def test_a_node_is_not_told_more_than_it_does(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(lead: Lone) -> None:
        agent = await idle(lead)
        monkeypatch.setattr(streams, "UNDONE_MAX", 2)
        message = send(lead, agent)
        lead.world.agents.messages.cancel(agent, message)
        for late in (lambda: send(lead, agent), lambda: lead.supervisor.switch(agent, "s"),
                     lambda: lead.world.agents.messages.cancel(agent, message)):  # fmt: skip
            with pytest.raises(AgainError, match="n2 has not done 2 things"):
                late()
        assert len(lead.world.agents.messages.pending(agent)) == 1
        monkeypatch.setattr(streams, "UNDONE_MAX", UNDONE_MAX)
        for _ in range(2):
            send(lead, agent, "x" * 900_000)
        with pytest.raises(AgainError):
            send(lead, agent)
        lead.stop(agent)
        assert lead.far.ops[-1] == "stop", "what ends it is always said"

    on_lead(world, act)


def test_its_host_queues_notices(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = await idle(lead)
        told = {"id": "t", "status": "queued", "from": "task:build", "provenance": "task_result",
                "priority": "normal"}  # fmt: skip
        for _ in range(2):
            await lead.far.say("message", agent, **told, text="it failed")
        (notice,) = lead.world.agents.messages.pending(agent)
        assert (notice.sender, notice.text) == ("task:build@n2", "it failed")
        assert lead.far.ops == []
        await begin(lead, agent, "t")
        await end(lead, agent, "t", text="I see")
        assert said(lead, agent) == [("user", "it failed"), ("assistant", "I see")]
        for number in range(2000):  # as many as may wait here
            await lead.far.say("message", agent, **{**told, "id": f"n{number}"})
        most = world.agents.settings.config.messages
        assert len(lead.world.agents.messages.pending(agent)) == most

    on_lead(world, act)


def test_a_message_is_lost_with_its_agent(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = await idle(lead)
        for name in ("m", "o"):
            send(lead, agent, name=name)
        await begin(lead, agent, "m")
        lead.far.close()
        await lead.be(agent, Status.DEAD, seconds=LOST)
        assert ended(lead, agent) == [
            ("m", "failed", "runtime_lost"), ("o", "dropped", "runtime_lost"),
        ]  # fmt: skip
        before = said(lead, agent)
        await end(lead, agent, "m", text="late")
        assert said(lead, agent) == before == [("user", "hi")]

    on_lead(world, act)


def test_another_daemon_goes_on(world: World) -> None:
    async def first(lead: Lone) -> None:
        agent = await idle(lead)
        send(lead, agent, "x" * 300_000, name="m")
        await lead.far.say("state", agent, status="busy", run="r1")
        await lead.far.say("message", agent, id="m", status="running")
        await lead.far.say("text", agent, at=0, text="long ")

    async def second(lead: Lone) -> None:
        agent = lead.world.agents.registry.named("x")
        assert agent is not None
        assert lead.far.ops[-3:] == ["text", "text", "message"]
        await end(lead, agent, "m", text="reply", at=5)
        assert said(lead, agent)[1] == ("assistant", "long reply")

    daemons(world, first, second)


def test_a_session_is_the_hosts_to_switch(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = await idle(lead)

        def session() -> str:
            return lead.world.agents.sessions.load(agent.session).name

        lead.supervisor.switch(agent, "second")
        assert lead.far.told[0]["name"] == "second" and session() == "default"
        await lead.far.say("session", agent, name="third")
        assert session() == "default"
        await lead.far.say("session", agent, name="second")
        assert session() == "second" and "session" not in agent.heard
        await lead.far.say("session", agent, name="default")
        assert session() == "second", "it was not asked"
        lead.supervisor.switch(agent, "default")
        await lead.far.say("refused", agent, of="session", sentence="it is busy")
        assert agent.heard["refused"][1] == "n2: session: it is busy"
        await lead.far.say("session", agent, name="default")
        assert session() == "second"

    on_lead(world, act)


def test_an_older_host_runs_agents_once(world: World) -> None:
    async def act(lead: Lone) -> None:
        lead.far.version = 1
        lead.far.open()
        with pytest.raises(UnsupportedError, match="mode turn: ctxd at n2 is an earlier one"):
            lead.start(lead.make(mode="turn"))
        lead.start(lead.make("once"))
        assert lead.far.ops == ["put", "start"]

    on_lead(world, act)


def test_no_more_waits_for_a_node_than_is_told_at_once(world: World) -> None:
    """All of it is, in one step and in memory, when an agent is put there."""

    async def act(lead: Lone) -> None:
        early, late = lead.make("early", mode="turn"), lead.make("late", mode="turn", placement="")
        for _ in range(2):
            send(lead, early, "x" * 600_000)
            send(lead, late, "x" * 600_000)
        with pytest.raises(AgainError, match="3 messages of 1200001 characters"):
            send(lead, early, "x")
        send(lead, late, "x")
        world.agents.journal.update(late, placement="node=n2\n")
        lead.start(early)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(AgainError, match="3 messages"):
            send(lead, early, "x")
        lead.far.open()
        await lead.until(lambda: "start" in lead.far.ops)
        assert lead.far.ops.count("message") == 2
        with pytest.raises(AgainError, match="3 messages"):
            lead.start(late)
        assert late.status is Status.NEW

    on_lead(world, act)


def test_what_is_told_of_messages_is_heard_one_by_one(world: World) -> None:
    """Each may have a text of two MiB."""
    lead = Peer({"as": ""}, Stream(), Grants(1.0, 1.0, 0.0))
    for op, most in (("message", 1), ("session", 1), ("state", 16)):
        assert lead.at_once(Heard(1, op, "x", {"at": 1 << 20}, b"")) == most


def test_a_text_is_of_one_message(world: World) -> None:
    """Or a host that has said one has any number of long ones heard with a few bytes."""

    async def act(lead: Lone) -> None:
        agent = await idle(lead)
        mirrored = {
            **{"status": "queued", "from": "agent:kid", "provenance": "child"},
            **{"priority": "normal", "at": 5},
        }
        await lead.far.say("text", agent, at=0, text="long ")
        await lead.far.say("message", agent, id="m", text="one", **mirrored)
        (message,) = lead.world.agents.messages.pending(agent)
        assert message.text == "long one"
        with pytest.raises(BrokenLinkError, match="without what was before"):
            await lead.far.say("message", agent, id="n", text="two", **mirrored)

    on_lead(world, act)
