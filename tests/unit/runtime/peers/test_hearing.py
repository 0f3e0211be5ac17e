"""Messages of a lead to its agents here."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import trio
import trio.testing

from runtime.errors import QuotaError
from runtime.kernel import output
from runtime.peers import telling
from runtime.peers.peering import DELTA_MAX, Delta
from runtime.peers.words import TEXT_MAX
from runtime.records.items import REPORTED
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from tests.worlds.leads import A, B, Leader, Site, at_site, put
from tests.worlds.memory import Machine
from tests.worlds.records import World


async def placed(site: Site, lead: Leader, **more: Any) -> Agent:
    """A turn guest that has a cell."""
    await lead.say("put", **put(config={"mode": "turn"}, **more))
    await lead.say("start")
    assert lead.refusals == []
    agent = site.guest()
    await site.until(lambda: agent.index in site.supervisor._live_cells)
    return agent


async def idle(site: Site, lead: Leader, **more: Any) -> Agent:
    agent = await placed(site, lead, **more)
    await site.until(lambda: site.cell(agent).facts.exist())
    site.machine.held(site.cell(agent))
    await site.be(agent, Status.IDLE, Status.BUSY)
    return agent


async def send(lead: Leader, name: str = "m", text: str = "hi", **more: Any) -> None:
    said = {"from": "operator", "provenance": "operator", "priority": "normal", **more}
    await lead.say("message", id=name, text=text, **said)


async def run_of(site: Site, agent: Agent) -> Any:
    """The run at hand, whose program runs."""
    await site.until(lambda: bool(agent.run.id) and not agent.run.pid)
    run = site.cell(agent).run_at_hand()
    await site.until(lambda: run.facts.exist())
    site.machine.began(run)
    await site.until(lambda: bool(agent.run.pid))
    return run


def prints(site: Site, agent: Agent, text: str) -> None:
    directory = site.agents.documents.directory(agent) / "out"
    output.append(directory, text.encode(), 1 << 30)


async def answered(site: Site, lead: Leader, agent: Agent, text: str = "", code: int = 0) -> None:
    run = await run_of(site, agent)
    prints(site, agent, text)
    site.machine.ended(run, code=code)
    await site.until(lambda: not agent.run.id)
    await lead.go_on()


def heard(lead: Leader) -> list[tuple[str, str]]:
    return [(each["id"], each["status"]) for each in lead.told("message")]


def test_a_message_is_worked_on_and_its_end_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(site: Site, lead: Leader) -> None:
        agent = await idle(site, lead)
        await lead.go_on()
        lead.facts.clear()
        await send(lead, **{"from": "agent:boss", "provenance": "agent"})
        await site.until(lambda: site.agents.messages.current(agent) is not None)
        message = site.agents.messages.current(agent)
        assert message is not None
        assert (message.sender, message.text, message.asked) == ("agent:boss@one", "hi", "")
        await answered(site, lead, agent, "hello")
        assert lead.told("message")[-1]["text"] == "hello"
        assert [(each["op"], each.get("status", each.get("type"))) for each in lead.facts] == [
            ("state", "busy"), ("message", "running"), ("event", "run.start"),
            ("event", "run.end"), ("message", "processed"), ("state", "idle"),
        ]  # fmt: skip
        (own,) = [line for line in site.world.lines(agent, "messages.jsonl") if "hello" in line]
        assert '"told":true' in own

    at_site(world, monkeypatch, act)


def test_the_task_is_the_first_once_all_of_it_is_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(site: Site, lead: Leader) -> None:
        files = {"handoff.md": [5, hashlib.sha256(b"hello").hexdigest()]}
        first = {"id": "t", "from": "agent:boss", "provenance": "delegation"}
        agent = await placed(site, lead, files=files, first=first)
        await send(lead, "m", "later", priority="interject")
        assert [each.name for each in site.agents.messages.pending(agent)] == ["m"]
        await lead.give({(A, "handoff.md"): b"hello"})
        await site.until(lambda: site.cell(agent).facts.exist())
        told = [(each.name, each.text) for each in site.agents.messages.pending(agent)]
        assert told == [("t", "hello"), ("m", "later")]
        assert agent.guest["first"] == {}

    at_site(world, monkeypatch, act)


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [
        ({"provenance": "child"}, "EINVAL", "provenance"),
        ({"provenance": "task_result"}, "EINVAL", "provenance"),
        ({"from": "uid:0"}, "EINVAL", "operator or agent:NAME"),
        ({"from": "agent:x@two"}, "EINVAL", "name"),
        ({"priority": "soon"}, "EINVAL", "priority"),
        ({"id": "a b"}, "EINVAL", "not an id"),
        ({"text": 5}, "EINVAL", "text"),
        ({"at": 5}, "EINVAL", "without what was before"),
        ({"asks": 1}, "EINVAL", "asks"),
        ({"more": 1}, "EINVAL", "more"),
    ],
)
def test_what_no_lead_sends_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], code: str, words: str
) -> None:
    async def act(site: Site, lead: Leader) -> None:
        agent = await idle(site, lead)
        fields = {"id": "m", "from": "operator", "provenance": "operator", "priority": "normal",
                  "text": "hi", **said}  # fmt: skip
        await lead.say("message", **fields)
        ((given, sentence),) = lead.refusals
        assert given == code and words in sentence, sentence
        assert lead.told("refused")[0]["id"] == fields["id"]
        assert site.agents.messages.pending(agent) == []

    at_site(world, monkeypatch, act)


def test_a_lead_speaks_to_its_own_agents_that_take_messages(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(site: Site, lead: Leader) -> None:
        await lead.say("put", **put())
        for op in ("message", "text", "cancel", "session"):
            await lead.say(op, B, id="m", name="s", at=0, text="x", priority="normal",
                           provenance="operator", **{"from": "operator"})  # fmt: skip
        assert [code for code, _ in lead.refusals] == ["ENOENT"] * 4
        await send(lead)
        assert lead.refusals[4] == ("EBUSY", lead.refusals[4][1])
        assert "is a once agent" in lead.refusals[4][1]

    at_site(world, monkeypatch, act)


def test_long_texts_come_and_go_in_parts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(site: Site, lead: Leader) -> None:
        agent = await idle(site, lead)
        await lead.say("text", at=0, text="a" * 100_000)
        await lead.say("text", at=100_000, text="b" * 100_000)
        await send(lead, text="c", at=200_000)
        await site.until(lambda: site.agents.messages.current(agent) is not None)
        message = site.agents.messages.current(agent)
        assert message is not None and message.text == "a" * 100_000 + "b" * 100_000 + "c"
        await answered(site, lead, agent, "\x01" * 60_000)
        *parts, last = [f for f in lead.facts if f["op"] == "text"] + lead.told("message")[-1:]
        assert len(parts) > 2 and last["status"] == "processed"
        assert "".join(each["text"] for each in (*parts, last)) == "\x01" * 60_000
        for wrong in ({"at": TEXT_MAX, "text": "x"}, {"at": 300_000, "text": "x"}, {"at": "0"}):
            await lead.say("text", **wrong)
        assert [code for code, _ in lead.refusals] == ["EMSGSIZE", "EINVAL", "EINVAL"]

    at_site(world, monkeypatch, act)


def test_who_does_not_hear_is_told_the_beginning(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telling, "STREAM_BYTES", 0)

    async def act(site: Site, lead: Leader) -> None:
        agent = await idle(site, lead)
        await send(lead)
        await answered(site, lead, agent, "x" * 300_000)
        (last,) = lead.told("message")[-1:]
        assert last["text"].startswith("xxx") and len(last["text"]) < 5000
        assert last["text"].endswith("[more is in the history of its host]")

    at_site(world, monkeypatch, act)


def test_messages_are_cancelled_and_runs_aborted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(site: Site, lead: Leader) -> None:
        agent = await idle(site, lead)
        for name in ("m", "o"):
            await send(lead, name)
        await run_of(site, agent)
        await lead.say("cancel", id="o")
        assert heard(lead)[-1] == ("o", "dropped")
        await lead.say("cancel", id="o")
        await lead.say("verb", verb="abort", run="r9")
        assert [code for code, _ in lead.refusals] == ["ENOENT", "ESTALE"]
        await lead.say("verb", verb="abort", run=agent.run.id)
        assert agent.run.ending and lead.refusals[2:] == []
        await site.be(agent, Status.PAUSED)
        await lead.go_on()
        assert heard(lead)[-1] == ("m", "aborted") and lead.statuses[-1] == "paused"
        await send(lead, "p")
        await lead.say("verb", verb="resume")
        run = await run_of(site, agent)
        await lead.say("cancel", id="p")
        site.machine.ended(run, code=0)
        await site.be(agent, Status.IDLE)
        await lead.go_on()
        assert heard(lead)[-1] == ("p", "aborted")

    at_site(world, monkeypatch, act)


def test_pieces_of_a_reply_go_to_who_reads(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(site: Site, lead: Leader) -> None:
        agent = await idle(site, lead)
        pieces: list[Delta] = []
        hear = lead._hear

        def look(event: Any) -> None:
            if isinstance(event, Delta):
                pieces.append(event)
            hear(event)

        monkeypatch.setattr(lead, "_hear", look)
        await send(lead, asks=True)
        await run_of(site, agent)
        message = site.agents.messages.current(agent)
        assert message is not None
        stream = site.supervisor.streams.of(message.index)
        stream.add("one ")
        await site.until(lambda: bool(lead.host._control))
        await lead.go_on()
        assert pieces == [Delta(A, "m", 0, "one ")]
        lead.connect(site)
        await lead.go_on()
        stream.add("x" * 20 * DELTA_MAX)
        await site.until(lambda: len(lead.host._control) >= 8)
        assert len(lead.host._control) == 8, "who does not read is not told"
        for _ in range(5):
            await lead.go_on()
            await trio.sleep(1)
        assert pieces[1].at == 0, "a new connection has all of it"
        assert "".join(each.text for each in pieces[1:]) == stream.text

    at_site(world, monkeypatch, act)


def test_notices_of_its_own_are_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(site: Site, lead: Leader) -> None:
        agent = await idle(site, lead)
        with site.agents.journal.changing() as change:
            site.agents.messages.notify(
                change, agent, text="it failed", provenance="task_result", sender="task:t"
            )
        await answered(site, lead, agent)
        queued, begun, ended = lead.told("message")
        assert (queued["from"], queued["provenance"], queued["text"]) == (
            "task:t", "task_result", "it failed",
        )  # fmt: skip
        assert (begun["status"], ended["status"]) == ("running", "processed")

    at_site(world, monkeypatch, act)


def test_a_session_is_switched_between_messages(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(site: Site, lead: Leader) -> None:
        agent = await idle(site, lead)
        await lead.say("session", name="second")
        assert [each["name"] for each in lead.told("session")] == ["second"]
        await send(lead)
        run = await run_of(site, agent)
        for name in ("third", "../x"):
            await lead.say("session", name=name)
        assert [code for code, _ in lead.refusals] == ["EBUSY", "EINVAL"]
        site.machine.ended(run, code=0)
        await site.be(agent, Status.IDLE)
        assert site.agents.sessions.load(agent.session).name == "second"

    at_site(world, monkeypatch, act)


def test_a_reboot_ends_a_guest_whatever_its_mode(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = Leader(1000)

    async def first(site: Site, lead: Leader) -> None:
        await idle(site, lead)

    async def second(site: Site, lead: Leader) -> None:
        agent = site.guest()
        assert (agent.status, agent.reason) == (Status.DEAD, "reboot")

    machine = Machine()
    at_site(world, monkeypatch, first, machine, leader)
    world.reopen()
    after = Machine()
    after.boot = machine.boot.__class__("another boot")
    at_site(world, monkeypatch, second, after, leader)


def test_a_guest_that_is_not_heard_waits_and_is_ended_at_last(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What becomes of it is kept in memory until then, on nobody's account."""
    monkeypatch.setattr("runtime.peers.streams.UNDONE_MAX", 16)

    async def act(site: Site, lead: Leader) -> None:
        agent, messages = await idle(site, lead), site.agents.messages
        for number in range(9):
            await send(lead, f"m{number}")
        undone = site.post.stream(lead.key).undone
        while undone[A] < 16:
            run, at_hand = await run_of(site, agent), agent.run.id
            site.machine.ended(run, code=0)
            await site.until(lambda before=at_hand: agent.run.id != before)  # type: ignore[misc]
        await trio.testing.wait_all_tasks_blocked()
        assert agent.status is Status.IDLE and messages.pending(agent)
        with (
            pytest.raises(QuotaError, match=r"have not come to .one. yet"),
            site.agents.journal.changing() as change,
        ):
            messages.queue(change, agent, text="r", sender="agent:kid", provenance=REPORTED)
        await lead.go_on()
        await site.until(lambda: bool(agent.run.id))

        for _ in range(200):
            with site.agents.journal.changing() as change:
                messages.notify(change, agent, text="over", provenance="wait")
            await trio.lowlevel.checkpoint()
        await site.be(agent, Status.STOPPING, Status.DEAD)
        assert agent.outcome in ("", "interrupted") and undone[A] < 2 * 4 * 16 + 20

    at_site(world, monkeypatch, act)


def test_a_text_is_of_one_message(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that is refused, too."""

    async def act(site: Site, lead: Leader) -> None:
        agent = await idle(site, lead)
        for name, why in (("m", ""), ("m", "is the id of another"), ("n", "what was before")):
            if name == "m":
                await lead.say("text", at=0, text="long ")
            await send(lead, name, "one", at=5)
            assert why in lead.refusals[-1][1] if why else lead.refusals == []
        messages = site.agents.messages
        there = (messages.current(agent), *messages.pending(agent))
        assert [each.text for each in there if each] == ["long one"]

    at_site(world, monkeypatch, act)
