"""What a lead makes of agents that are placed at a node."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from runtime.agents.workspace import Worktree, WorktreeState
from runtime.errors import AgainError, CtxError, NoSpaceError, QuotaError, TooLongError
from runtime.ids import AgentIndex
from runtime.peers import leading
from runtime.peers.contents import digests
from runtime.peers.peering import BrokenLinkError
from runtime.peers.post import Post
from runtime.peers.streams import MESSAGE_MAX, UNDONE_BYTES, UNDONE_MAX
from runtime.records.change import Change, Subscriber
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.records.nodes import Node
from runtime.texts.limits import RUNNING
from tests.worlds.memory import Machine
from tests.worlds.placed import LOST, NODES, Far, Lone, daemons, on_lead
from tests.worlds.records import ROOT, World, full, inside, world_in


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with world_in(tmp_path, nodes=NODES) as made:
        yield made


def agent_of(lead: Lone, name: str = "x") -> Agent:
    agent = lead.world.agents.registry.named(name)
    assert agent is not None
    return agent


def test_an_agent_is_put_started_and_its_end_is_told(world: World) -> None:
    async def act(lead: Lone) -> None:
        lead.far.open()
        agent = lead.start(lead.make())
        assert (agent.status, agent.node, agent.peer) == (Status.STARTING, "n2", lead.far.key)
        put, start = lead.far.told
        assert (put["op"], start["op"]) == ("put", "start")
        assert (put["agent"], put["name"], put["run"]) == (agent.incarnation, "x", 1)
        assert put["config"]["exec"] == "program"
        lead.far.acknowledge()
        await lead.far.runs(agent)
        assert agent.status is Status.BUSY
        await lead.far.ends(agent)
        await lead.be(agent, Status.DEAD)
        assert (agent.outcome, agent.reason, agent.usage) == ("done", "exit:0", {"cpu_usec": 5})
        assert lead.far.ops == ["forget"]
        kinds = [event["type"] for event in lead.events(agent)]
        assert kinds.count("run.start") == kinds.count("run.end") == 1
        (started,) = lead.events(agent, "run.start")
        assert (started["node"], started["origin"]) == ("n2", 12)
        await lead.until(lambda: not lead.supervisor._live_cells)

    on_lead(world, act)


class Counting(Subscriber):
    """How many facts each transaction has that has any."""

    def __init__(self) -> None:
        self.done: list[int] = []

    def posting(self, change: Change, undoing: Any) -> None:
        self.done += [len(change.done)] if change.done else []


def test_facts_that_come_together_are_one_transaction(world: World) -> None:
    async def act(lead: Lone) -> None:
        counting = Counting()
        lead.far.open()
        x, y = lead.start(lead.make("x")), lead.start(lead.make("y"))
        lead.far.acknowledge()
        lead.world.agents.journal.subscribe(counting)
        facts = [
            lead.far.fact("state", x, status="busy"),
            lead.far.fact("event", x, type="run.start", run="r1", pid=7, origin=12),
            lead.far.fact("state", y, status="busy"),
            lead.far.fact("state", x, status="paused"),
            lead.far.fact("event", x, type="run.end", run="r1", outcome="done", reason="exit:0"),
            lead.far.fact("ended", x, outcome="done", reason="exit:0", usage={}),
            lead.far.fact("dead", x),
        ]
        await lead.far.hear(*facts)
        assert counting.done == [7] and lead.post.stream(lead.far.key).got == facts[-1].number
        assert (x.status, x.cause, y.status) == (
            Status.STOPPING, ("done", "exit:0"), Status.BUSY,
        )  # fmt: skip
        told = [event["status"] for event in lead.events(x, "agent.status")]
        assert told == ["starting", "busy", "paused", "stopping"]
        await lead.be(x, Status.DEAD)
        assert (x.outcome, x.reason, lead.far.ops) == ("done", "exit:0", ["forget"])

    on_lead(world, act)


def test_facts_before_one_that_is_wrong_hold(world: World) -> None:
    async def act(lead: Lone) -> None:
        lead.far.open()
        agent = lead.start(lead.make())
        facts = [
            lead.far.fact("state", agent, status="busy"),
            lead.far.fact("state", agent, status="asleep"),
            lead.far.fact("ended", agent, outcome="done", reason="exit:0", usage={}),
        ]
        with pytest.raises(BrokenLinkError, match="asleep"):
            await lead.far.hear(*facts)
        assert lead.post.stream(lead.far.key).got == facts[0].number
        assert agent.status is Status.BUSY and "ended" not in agent.heard

    on_lead(world, act)


def test_what_has_ended_is_dead_when_nothing_of_it_runs(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = await lead.running()
        await lead.far.say("ended", agent, outcome="error", reason="exit:3")
        await lead.be(agent, Status.STOPPING)
        await trio.sleep(1)
        assert agent.status is Status.STOPPING
        assert lead.far.ops == []
        await lead.far.say("dead", agent)
        await lead.be(agent, Status.DEAD)
        assert (agent.outcome, agent.reason) == ("error", "exit:3")
        # its host did not tell of the end of its run
        assert [event["reason"] for event in lead.events(agent, "run.end")] == ["exit:3"]

    on_lead(world, act)


@pytest.mark.parametrize("kill", [False, True])
def test_a_stop_is_told_and_its_end_is_the_hosts_to_say(world: World, kill: bool) -> None:
    async def act(lead: Lone) -> None:
        agent = await lead.running()
        lead.stop(agent, kill=kill)
        assert agent.status is Status.STOPPING
        (told,) = lead.far.told
        assert told["verb"] == ("kill" if kill else "stop")
        assert (told["outcome"], told["reason"]) == ("cancelled", "operator_stop")
        assert told["by"] == "operator uid:0"
        await trio.sleep(20)
        assert agent.status is Status.STOPPING
        lead.stop(agent, kill=True)
        assert lead.far.ops == (["kill"] if kill else ["stop", "kill"])
        await lead.far.ends(agent, "cancelled", "operator_stop")
        await lead.be(agent, Status.DEAD)
        assert (agent.outcome, agent.reason) == ("cancelled", "operator_stop")
        assert lead.events(agent, "agent.stop")[-1]["by"] == "operator uid:0"

    on_lead(world, act)


@pytest.mark.parametrize("late", [False, True])
def test_a_kill_does_not_wait_for_what_it_gave_back(world: World, late: bool) -> None:
    async def act(lead: Lone) -> None:
        agent = await lead.running()
        if not late:
            lead.stop(agent, kill=True)
        files = {"result.md": [5, 0o644]}
        await lead.far.say("ended", agent, outcome="done", reason="exit:0", files=files)
        await lead.far.say("dead", agent)
        await trio.sleep(1)
        assert agent.status is Status.STOPPING
        lead.stop(agent, kill=True)
        await lead.be(agent, Status.DEAD)
        assert (agent.outcome, agent.reason) == ("done", "exit:0,incomplete")

    on_lead(world, act)


def test_the_end_that_the_host_saw_first_is_the_end(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = await lead.running()
        lead.stop(agent)
        await lead.far.ends(agent)
        await lead.be(agent, Status.DEAD)
        assert (agent.outcome, agent.reason) == ("done", "exit:0")

    on_lead(world, act)


def test_a_stop_is_stored_in_the_transaction_of_its_cause(world: World) -> None:
    async def first(lead: Lone) -> None:
        parent = await lead.parent()
        await lead.running(parent=parent)
        commits: list[str] = []

        class Look(Subscriber):
            def posting(self, change: Change, undoing: Any) -> None:
                commits.extend(each.said.get("verb", each.op) for each in change.posts)
                commits.append("committed")

        world.agents.journal.subscribe(Look())
        lead.stop(parent)
        assert commits[:2] == ["stop", "committed"]

    async def second(lead: Lone) -> None:
        """The daemon died at once."""
        assert lead.far.ops[2:] == ["stop"]
        assert agent_of(lead).status is Status.STOPPING

    daemons(world, first, second)


def test_a_parent_is_dead_when_its_placed_children_are(world: World) -> None:
    async def act(lead: Lone) -> None:
        parent = await lead.parent()
        child = await lead.running(parent=parent)
        lead.machine.ended(lead.cell(parent), code=0)
        await lead.be(parent, Status.STOPPING)
        assert (lead.far.told[0]["reason"], lead.far.told[0]["orphaned"]) == ("parent_dead", True)
        await trio.sleep(30)
        assert (parent.status, child.status) == (Status.STOPPING, Status.STOPPING)
        await lead.far.ends(child, "cancelled", "parent_dead")
        await lead.be(parent, Status.DEAD)
        assert (child.outcome, child.reason) == ("cancelled", "parent_dead")
        assert (parent.outcome, parent.reason) == ("done", "exit:0")

    on_lead(world, act)


def test_a_killed_parent_has_its_children_killed(world: World) -> None:
    async def act(lead: Lone) -> None:
        parent = await lead.parent()
        await lead.running(parent=parent)
        lead.stop(parent, kill=True)
        assert lead.far.ops == ["kill"]

    on_lead(world, act)


def test_what_nobody_vouches_for_is_lost(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = await lead.running()
        begun = trio.current_time()
        assert lead.far.ask()["op"] == "grant"
        lead.far.close()
        await lead.be(agent, Status.DEAD, seconds=LOST)
        assert trio.current_time() - begun > LOST - 10
        assert (agent.outcome, agent.reason) == ("interrupted", "runtime_lost")
        assert [event["reason"] for event in lead.events(agent, "run.end")] == ["runtime_lost"]
        # and if it comes back
        lead.far.open()
        answer = lead.far.ask()
        assert answer["op"] == "over"
        assert lead.lead.needs("n2", 0)
        before = agent.reason, len(lead.events(agent))
        await lead.far.ends(agent)
        assert (agent.reason, len(lead.events(agent))) == before
        await lead.far.over(answer["upto"])
        assert lead.far.ask()["op"] == "grant"
        lead.far.acknowledge()
        assert not lead.lead.needs("n2", 0)

    on_lead(world, act)


def test_nothing_is_granted_once_it_is_said_that_it_is_lost(world: World) -> None:
    """By no later daemon either."""
    said: list[str] = []

    async def first(lead: Lone) -> None:
        class Look(Subscriber):
            def agent_changed(self, index: AgentIndex, names: Iterable[str]) -> None:
                changed = world.agents.registry.get(index)
                if changed is not None and changed.heard.get("lost"):
                    said.append(lead.far.ask()["op"])

        world.agents.journal.subscribe(Look())
        agent = await lead.running()
        await lead.be(agent, Status.DEAD, seconds=LOST)
        assert said[0] == "over"

    async def second(lead: Lone) -> None:
        await lead.supervisor.recover()
        assert lead.wanted == [("n2", 0)]
        assert lead.far.ask()["op"] == "over"

    daemons(world, first, second)


def test_a_loss_is_recorded_by_the_next_daemon(world: World) -> None:
    async def first(lead: Lone) -> None:
        agent = await lead.running()
        lead.lead._lose(lead.far.key)
        assert agent.status is Status.BUSY

    async def second(lead: Lone) -> None:
        await lead.supervisor.recover()
        await lead.be(agent_of(lead), Status.DEAD)
        assert agent_of(lead).reason == "runtime_lost"

    daemons(world, first, second)


def test_whoever_asks_for_a_lease_puts_the_loss_off(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = await lead.running()
        for _ in range(10):
            lead.far.ask()
            await trio.sleep(LOST / 3)
        assert agent.status is Status.BUSY

    on_lead(world, act)


def test_an_end_that_nobody_has_confirmed_is_called_so(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent, other = await lead.running(), await lead.running("y")
        lead.stop(agent)
        await lead.far.say("ended", other, outcome="done", reason="exit:0")
        lead.far.close()
        await lead.be(agent, Status.DEAD, seconds=LOST)
        assert (agent.outcome, agent.reason) == ("cancelled", "operator_stop,unconfirmed")
        await lead.be(other, Status.DEAD)
        assert (other.outcome, other.reason) == ("done", "exit:0,incomplete")

    on_lead(world, act)


def test_what_is_placed_anew_is_not_lost_with_what_was(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = await lead.running()
        lead.far.close()
        await lead.be(agent, Status.DEAD, seconds=LOST)
        await trio.sleep(2 * LOST)
        lead.far.open()
        other = lead.start(lead.make("y"))
        assert other.away
        await trio.sleep(LOST / 2)
        assert other.live

    on_lead(world, act)


def test_the_next_daemon_goes_on(world: World) -> None:
    async def first(lead: Lone) -> None:
        await lead.running()

    async def second(lead: Lone) -> None:
        await lead.supervisor.recover()
        agent = agent_of(lead)
        assert agent.status is Status.BUSY
        assert lead.wanted == [("n2", 0)]
        lead.far.stream = lead.post.stream(lead.far.key)  # as far as the lead has heard it
        lead.far.stream = type(lead.far.stream)(first=(lead.far.stream.got, ""))
        lead.far.open()
        await lead.far.ends(agent)
        await lead.be(agent, Status.DEAD)
        assert (agent.outcome, agent.reason) == ("done", "exit:0")

    daemons(world, first, second)


def test_what_was_heard_is_done_by_the_next_daemon(world: World) -> None:
    async def first(lead: Lone) -> None:
        agent = await lead.running()
        lead.nursery.cancel_scope.cancel()  # nobody leads it any more
        with trio.CancelScope(shield=True):
            await lead.far.ends(agent)
        assert agent.live

    async def second(lead: Lone) -> None:
        await lead.supervisor.recover()
        await lead.be(agent_of(lead), Status.DEAD)
        assert agent_of(lead).reason == "exit:0"
        assert lead.far.ops[2:] == ["forget"]

    daemons(world, first, second)


def test_a_reboot_of_the_lead_ends_what_is_owned_only(world: World) -> None:
    async def first(lead: Lone) -> None:
        parent = await lead.parent()
        await lead.running(parent=parent)
        await lead.running("y")

    async def second(lead: Lone) -> None:
        await lead.supervisor.recover()
        parent, child, root = (agent_of(lead, name) for name in ("boss", "x", "y"))
        assert (parent.status, child.status) == (Status.STOPPING, Status.STOPPING)
        assert root.status is Status.BUSY
        assert [(each["agent"], each["verb"]) for each in lead.far.told[4:]] == [
            (child.incarnation, "stop")
        ]
        assert [event["reason"] for event in lead.events(parent, "run.end")] == ["reboot"]
        await trio.sleep(20)
        assert parent.status is Status.STOPPING
        lead.far.stream = type(lead.far.stream)(first=(lead.post.stream(lead.far.key).got, ""))
        await lead.far.ends(child, "cancelled", "parent_dead")
        await lead.be(parent, Status.DEAD)
        assert (parent.outcome, parent.reason) == ("interrupted", "reboot")
        assert root.status is Status.BUSY

    async def third(lead: Lone) -> None:
        """Once more, before its child has ended."""
        await lead.supervisor.recover()
        parent = agent_of(lead, "boss")
        assert parent.status is Status.STOPPING
        await lead.be(parent, Status.DEAD, seconds=LOST)
        assert agent_of(lead, "x").reason == "parent_dead,unconfirmed"
        assert len(lead.events(parent, "run.end")) == 1

    async def nothing(lead: Lone) -> None:
        await lead.supervisor.recover()

    daemons(world, first, second, boots=True)
    world.reopen()
    with world_in(world.path / "again", nodes=NODES) as again:
        daemons(again, first, nothing, third, boots=True)


def test_a_registration_that_is_over_is_lost_after_the_bound(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = await lead.running()
        lead.lead.parted(lead.far.key)
        lead.stop(agent)
        assert lead.far.ops == []  # who would be told is not there
        await lead.be(agent, Status.DEAD, seconds=LOST)
        assert agent.reason == "operator_stop,unconfirmed"
        await lead.until(lambda: lead.far.key not in lead.lead._grants)
        assert lead.world.store.execute("SELECT count(*) FROM peers").fetchone() == (0,)

    on_lead(world, act)


def test_a_host_that_has_booted_need_not_be_told_what_is_over(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = await lead.running()
        lead.far.close()
        await lead.be(agent, Status.DEAD, seconds=LOST)
        lead.far.boot = "another"
        lead.far.open()
        assert lead.far.ask()["op"] == "grant"

    on_lead(world, act)


def test_a_stop_before_the_link_is_open_is_obeyed_at_once(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = lead.start(lead.make())
        assert (agent.status, agent.node, agent.away) == (Status.STARTING, "n2", False)
        await trio.sleep(1)
        assert lead.wanted == [("n2", 0)]
        begun = trio.current_time()
        lead.stop(agent)
        await lead.be(agent, Status.DEAD)
        assert trio.current_time() - begun < 1
        assert (agent.outcome, agent.reason) == ("cancelled", "operator_stop")
        lead.far.open()
        await trio.sleep(1)
        assert lead.far.ops == []

    on_lead(world, act)


def test_an_agent_is_put_when_the_link_opens(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = lead.start(lead.make())
        await trio.sleep(10)
        lead.far.close("connection refused")
        await trio.sleep(10)
        assert agent.status is Status.STARTING
        lead.far.open()
        await lead.until(lambda: agent.away)
        assert lead.far.ops == ["put", "start"]

    on_lead(world, act)


@pytest.mark.parametrize("refused", [False, True])
def test_a_node_that_cannot_be_reached_is_the_end_of_a_start(world: World, refused: bool) -> None:
    async def act(lead: Lone) -> None:
        agent = lead.start(lead.make())
        await trio.sleep(1)
        lead.far.close("no such key", refused=refused)
        begun = trio.current_time()
        await lead.be(agent, Status.DEAD, seconds=40)
        assert (trio.current_time() - begun < 1) is refused
        assert (agent.outcome, agent.reason) == ("error", "start_failed: n2: no such key")

    on_lead(world, act)


def test_a_start_that_waits_for_a_link_survives_the_daemon(world: World) -> None:
    async def first(lead: Lone) -> None:
        lead.start(lead.make())
        await trio.sleep(1)

    async def second(lead: Lone) -> None:
        await lead.supervisor.recover()
        lead.far.open()
        await lead.until(lambda: agent_of(lead).away)
        assert lead.far.ops == ["put", "start"]

    daemons(world, first, second)


def test_a_host_refuses_a_start(world: World) -> None:
    async def act(lead: Lone) -> None:
        lead.far.open()
        agent = lead.start(lead.make())
        await lead.far.say("refused", agent, of="put", code="EACCES", sentence="placed.allow")
        await lead.far.say("refused", agent, of="start", code="ENOENT", sentence="no agent x")
        await lead.be(agent, Status.DEAD)
        assert (agent.outcome, agent.reason) == ("error", "start_failed: n2: placed.allow")
        assert lead.events(agent, "run.end") == []

    on_lead(world, act)


def test_a_host_cannot_start_a_program(world: World) -> None:
    async def act(lead: Lone) -> None:
        lead.far.open()
        agent = lead.start(lead.make())
        await lead.far.say("ended", agent, outcome="error", reason="start_failed: no program")
        await lead.far.say("dead", agent)
        await lead.be(agent, Status.DEAD)
        assert agent.reason == "start_failed: n2: no program"

    on_lead(world, act)


def test_verbs_change_a_status_when_the_host_says_so(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = await lead.running()
        with world.agents.journal.acting(ROOT, agent, verb="pause"):
            lead.supervisor.pause(agent)
        assert (agent.status, lead.far.ops) == (Status.BUSY, ["pause"])
        assert lead.far.told[0]["by"] == "operator uid:0"
        lost = ["network:x", "shared:y"]
        by = "operator uid:0@one"
        await lead.far.say("state", agent, status="paused", lost=lost, by=by)
        assert lead.events(agent, "agent.status")[-1]["by"] == "operator uid:0"
        assert agent.status is Status.PAUSED
        assert agent.heard["refused"][1] == "n2: not offered there: network:x shared:y"
        assert lead.machine.frozen == set()
        lead.supervisor.resume(agent)
        assert lead.far.ops == ["pause", "resume"]
        await lead.far.say("state", agent, status="busy")
        lead.supervisor.abort(agent, None)
        assert lead.far.ops == ["pause", "resume", "abort"]
        await lead.far.say("refused", agent, of="verb", verb="abort", code="ESRCH", sentence="no")
        assert agent.heard["refused"][1] == "n2: abort: no"
        await lead.be(agent, Status.BUSY)
        # between two runs, and the next one
        await lead.far.say("state", agent, status="paused", run="")
        assert agent.run.id == ""
        await lead.far.say("state", agent, status="busy", run="r2")
        assert agent.run.id == "r2"
        with pytest.raises(BrokenLinkError):
            await lead.far.say("state", agent, status="busy", run="r1")

    on_lead(world, act)


@pytest.mark.parametrize(
    ("by", "shown"),
    [
        ("operator uid:7", "operator uid:7@n2"),
        ("agent:kid@one run:r1", "agent:kid@one run:r1@n2"),
        ("agent:x@one run:r1", "agent:x run:r1"),
        ("operator uid:7@one", "operator uid:7@one@n2"),  # who has asked for nothing
        ("runtime", "runtime"),
    ],
)
def test_whoever_ends_it_there_is_named(world: World, by: str, shown: str) -> None:
    async def act(lead: Lone) -> None:
        agent = await lead.running()
        said = {"outcome": "cancelled", "reason": "operator_stop", "by": by}
        await lead.far.say("ended", agent, **said)
        await lead.be(agent, Status.STOPPING)
        await lead.far.say("dead", agent)
        await lead.be(agent, Status.DEAD)
        assert {event["by"] for event in lead.events(agent)[-2:]} == {shown}

    on_lead(world, act)


def test_long_documents_are_not_read_in_the_loop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(lead: Lone) -> None:
        lead.far.open()
        text = b"x" * (1 << 20)
        agent = lead.make()
        world.agents.documents.write(agent, "handoff.md", text)
        threads = []

        def noted(paths: dict[str, Path]) -> dict[str, tuple[int, str]]:
            threads.append(threading.current_thread())
            return digests(paths)

        monkeypatch.setattr(leading, "digests", noted)
        lead.start(agent)
        assert (agent.status, lead.far.ops) == (Status.STARTING, [])
        await lead.until(lambda: lead.far.ops == ["put", "start"])
        assert lead.far.told[0]["files"] == {
            "handoff.md": [len(text), hashlib.sha256(text).hexdigest()]
        }
        assert threads and threading.main_thread() not in threads

    on_lead(world, act)


def test_what_a_daemon_left_of_parcels_goes(world: World) -> None:
    async def first(lead: Lone) -> None:
        agent = await lead.running()
        await lead.far.ends(agent)
        await lead.be(agent, Status.DEAD)
        (world.agents.documents.directory(agent) / "parcel").mkdir(parents=True)

    async def second(lead: Lone) -> None:
        await lead.supervisor.recover()
        assert not (world.agents.documents.directory(agent_of(lead)) / "parcel").exists()

    daemons(world, first, second)


def test_a_paused_parent_has_its_children_frozen(world: World) -> None:
    async def act(lead: Lone) -> None:
        parent = await lead.parent()
        child = await lead.running(parent=parent)
        lead.supervisor.pause(parent)
        assert (lead.far.ops, child.status) == (["freeze"], Status.BUSY)
        lead.supervisor.resume(parent)
        assert lead.far.ops == ["freeze", "thaw"]

    on_lead(world, act)


def test_what_a_node_does_not_do_piles_up_to_a_bound(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = await lead.running()
        for _ in range(UNDONE_MAX):
            lead.supervisor.pause(agent)
        with pytest.raises(AgainError, match="n2"):
            lead.supervisor.pause(agent)
        with pytest.raises(AgainError, match="n2"):
            world.agents.journal.update(agent, limits={"pids.max": "5"})
        assert agent.limits == {}
        lead.stop(agent)
        lead.stop(agent, kill=True)
        assert lead.far.ops[-2:] == ["stop", "kill"]
        for _ in range(3):
            lead.stop(agent, kill=True)
        assert lead.far.ops[-2:] == ["stop", "kill"]
        lead.far.acknowledge()
        lead.stop(agent, kill=True)
        assert lead.far.ops == ["kill"]

    on_lead(world, act)


def test_a_registration_that_is_over_is_forgotten_though_the_disk_is_full(world: World) -> None:
    async def act(lead: Lone) -> None:
        lead.far.open()
        with full(world.store):
            lead.lead.parted(lead.far.key)
            await lead.until(lambda: not lead.lead.knows(lead.far.key))
            again = Far(lead.lead, lead.post, "others")
            again.open()
        lead.make("y")  # whatever is stored next
        stored = Post(world.store)
        assert stored.data(lead.far.key) == {} and stored.data(again.key)["node"] == "n2"

    on_lead(world, act)


def test_long_texts_pile_up_to_a_bound(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = await lead.running()
        stream = lead.post.stream(lead.far.key)
        with pytest.raises(AgainError, match="n2"):
            for n in range(UNDONE_MAX):
                lines = (f"allow x_t agent:{n}-{i}-{'x' * 90}* create\n" for i in range(200))
                world.agents.journal.update(agent, policy="".join(lines))
        assert stream.size <= UNDONE_BYTES + MESSAGE_MAX
        lead.stop(agent)
        assert lead.far.ops[-1] == "stop"

    on_lead(world, act)


def test_limits_and_less_authority_go_along(world: World) -> None:
    async def act(lead: Lone) -> None:
        parent = await lead.parent()
        child = await lead.running(parent=parent)
        world.agents.journal.update(child, limits={"timeout": "5m"})
        world.agents.journal.update(child, limits={"grace": "5s"})
        assert [each["op"] for each in lead.far.told] == ["limits", "limits"]
        assert lead.far.told[0]["limits"] == {"timeout": "5m"}
        assert lead.far.told[1]["limits"] == {"grace": "5s", "timeout": "max"}
        world.agents.journal.update(parent, limits={"pids.max": "9"})
        assert lead.far.told[-1]["op"] == "bound"
        assert lead.far.told[-1]["limits"] == {"pids.max": "9"}
        world.agents.journal.update(parent, policy="")
        assert lead.far.told[-1]["policy"] == ""
        count = len(lead.far.told)
        world.agents.journal.update(parent, policy="# nothing\n")
        assert len(lead.far.told) == count

    on_lead(world, act)


def test_what_it_uses_is_asked_for_when_somebody_looks(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = await lead.running()
        meter = lead.supervisor.meter
        for _ in range(3):
            found = await meter.usage(agent, 0)
        assert (list(found), lead.far.ops) == (["wall_msec"], ["usage"])
        await lead.far.say("usage", agent, usage={"cpu_usec": 7, "wall_msec": 1})
        await trio.sleep(40)
        found = await meter.usage(agent, 0)
        assert (found["cpu_usec"], found["wall_msec"] > 1) == (7, True)
        assert lead.far.ops == ["usage", "usage"]

    on_lead(world, act)


def test_a_child_waits_for_its_turn(world: World) -> None:
    async def act(lead: Lone) -> None:
        parent = await lead.parent()
        world.agents.journal.update(parent, limits={RUNNING: "1"})
        one = await lead.running(parent=parent)
        two = lead.start(lead.make("y", parent=parent))
        await trio.sleep(1)
        assert (two.status, two.node, two.reason) == (Status.STARTING, "", "queued")
        await lead.far.ends(one)
        await lead.until(lambda: two.away)
        assert lead.far.ops == ["forget", "put", "start"]

    on_lead(world, act)


def test_a_shutdown_waits_for_nodes_and_no_longer(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent, other = await lead.running(), await lead.running("y")
        begun = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lead.supervisor.shut_down)
            await trio.sleep(1)
            assert lead.far.ops == ["stop", "stop"]
            await lead.far.ends(other, "cancelled", "shutdown")
        assert 10 < trio.current_time() - begun < 20
        assert (agent.outcome, agent.reason) == ("cancelled", "shutdown,unconfirmed")
        assert (other.outcome, other.reason) == ("cancelled", "shutdown")
        assert lead.far.ask()["op"] == "over"

    on_lead(world, act)


WRONG = [
    ("state", {"status": "dead"}),
    ("state", {"status": "stopping"}),
    ("state", {"status": 7}),
    ("state", {"status": "busy", "run": "r01x"}),
    ("state", {"status": "busy", "run": 2}),
    ("state", {"status": "busy", "reason": "x" * 2000}),
    ("event", {"type": 3}),
    ("event", {"type": "run.end", "reason": ["x"]}),
    ("event", {"type": "run.end", "usage": {"cpu_usec": "much"}}),
    ("event", {"type": "run.end", "usage": {"cpu\nusec": 1}}),
    ("event", {"type": "run.end", "reason": "", "by": "x" * 2000}),
    ("report", {"text": 5, "id": "a"}),
    ("report", {"text": "x", "id": "a b"}),
    ("report", {"text": "x" * (64 << 10) + "x", "id": "a"}),
    ("usage", {"usage": {"cpu_usec": -1}}),
    ("usage", {"usage": 4}),
    ("ended", {"outcome": "splendid", "reason": ""}),
    ("ended", {"outcome": "done", "reason": 4}),
    ("ended", {"outcome": "done", "reason": "", "out": -4}),
    ("refused", {"of": "put", "sentence": {}}),
]


@pytest.mark.parametrize(("op", "said"), WRONG)
def test_whatever_is_wrong_ends_the_link(world: World, op: str, said: dict[str, Any]) -> None:
    async def act(lead: Lone) -> None:
        agent = await lead.running()
        before = agent.dump(), lead.post.stream(lead.far.key).got
        with pytest.raises(BrokenLinkError):
            await lead.far.say(op, agent, **said)
        assert (agent.dump(), lead.post.stream(lead.far.key).got) == before

    on_lead(world, act)


def test_a_host_tells_of_what_was_put_there_only(world: World) -> None:
    async def act(lead: Lone) -> None:
        await lead.running()
        parent = await lead.parent()
        for agent in (parent, lead.make("z")):
            with pytest.raises(BrokenLinkError):
                await lead.far.say("ended", agent, outcome="done", reason="")
            lead.far.stream.take_back()
            assert "ended" not in agent.heard

    on_lead(world, act)


def test_of_events_those_are_told_that_nothing_else_tells(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = await lead.running()
        count = len(lead.events(agent))
        for kind in ("task.start", "agent.stop", "agent.create", "nonsense"):
            await lead.far.say("event", agent, type=kind, by="operator uid:0")
        assert len(lead.events(agent)) == count
        bys = ("operator uid:7", "agent:x@one run:r1", "agent:y", "runtime", "")
        for by in bys:
            await lead.far.say("event", agent, type="agent.limit", limit="pids.max", by=by)
        told = [event["by"] for event in lead.events(agent, "agent.limit")]
        assert told == ["operator uid:7@n2", "agent:x run:r1", "agent:y@n2", "runtime", "runtime"]

    on_lead(world, act)


def test_a_report_is_the_supervisors(world: World) -> None:
    async def act(lead: Lone) -> None:
        parent = await lead.parent()
        child = await lead.running(parent=parent)
        world.agents.journal.update(parent, mode="turn")
        await lead.far.say("report", child, id="one", run="r1", text="half done")
        (message,) = world.agents.messages.pending(parent)
        assert (message.text, message.sender, message.provenance) == (
            "half done", "agent:x", "child"
        )  # fmt: skip
        (event,) = lead.events(child, "agent.report")
        assert (event["by"], event["to"]) == ("agent:x run:r1", "agent:boss")
        world.agents.journal.update(parent, mode="once")
        await lead.far.say("report", child, id="two", run="r1", text="more")
        assert len(lead.events(child, "agent.report")) == 2

    on_lead(world, act)


def test_what_the_disk_has_no_room_for_is_not_acknowledged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(lead: Lone) -> None:
        agent = await lead.running()
        got = lead.post.stream(lead.far.key).got
        message = None
        with monkeypatch.context() as patch:
            patch.setattr(lead.world.agents.journal, "_commit", full)
            message = await lead.far.say("event", agent, type="run.end", run="r1", reason="x")
            await lead.far.say("ended", agent, outcome="done", reason="exit:0")
            assert lead.post.stream(lead.far.key).got == got
            await lead.far.hear(message)  # on another connection
        lead.world.agents.journal._commit_late()
        assert lead.post.stream(lead.far.key).got == got + 2
        assert len(lead.events(agent, "run.end")) == 1

    def full(change: Any) -> None:
        raise NoSpaceError("the disk is full")

    on_lead(world, act)


@pytest.mark.parametrize("kill", [False, True])
def test_a_stop_that_is_not_stored_yet_holds_grants_up(
    world: World, monkeypatch: pytest.MonkeyPatch, kill: bool
) -> None:
    """A full disk at the lead does not let a child outlive its parent."""

    def full(change: Any) -> None:
        raise NoSpaceError("the disk is full")

    async def act(lead: Lone) -> None:
        agent = await lead.running()
        sent = lead.post.stream(lead.far.key).sent
        assert lead.far.ask()["after"] == sent
        with monkeypatch.context() as patch:
            patch.setattr(lead.world.agents.journal, "_commit", full)
            lead.stop(agent, kill=kill)
            assert (agent.status, lead.far.ops) == (Status.STOPPING, [])
            assert lead.far.ask()["after"] > sent
        with monkeypatch.context() as patch:  # it fails later, too
            patch.setattr(lead.post, "_let_go", full)
            with pytest.raises(NoSpaceError):
                lead.world.agents.journal._commit_late()
        lead.world.agents.journal._commit_late()
        assert lead.far.ops == ["kill" if kill else "stop"]
        assert lead.far.ask()["after"] == sent + 1

    on_lead(world, act)


def test_what_a_node_has_to_be_told_is_not_too_long(world: World) -> None:
    async def act(lead: Lone) -> None:
        lead.far.open()
        agent = lead.make(env="A=" + "x" * (130 << 10))
        with pytest.raises(TooLongError, match="placement: what a node has to be told"):
            lead.start(agent)
        assert agent.status is Status.NEW
        lead.far.close()
        lead.start(agent)
        await trio.sleep(1)
        lead.far.open()
        await lead.be(agent, Status.DEAD)
        assert agent.reason.startswith("start_failed: placement: ")

    on_lead(world, act)


def test_nodes_are_chosen_by_their_share(tmp_path: Path) -> None:
    command, users = ("/ctx", "peer"), {"root": "root"}
    nodes = {
        "a1": Node(command=command, users=users, max=2),
        "a2": Node(command=command, users=users, max=4),
        "b1": Node(command=command, users=users),
        "a3": Node(command=command, users={"somebody": "else"}),
    }

    async def act(lead: Lone) -> None:
        world, chosen = lead.world, []
        for number in range(6):
            agent = lead.start(lead.make(f"x{number}", placement="node=a*\n"))
            chosen.append(agent.node)
        assert chosen == ["a1", "a2", "a2", "a1", "a2", "a2"]
        with pytest.raises(QuotaError, match="a1 has 2 of 2"):
            lead.start(lead.make("y", placement="node=a*\n"))
        with pytest.raises(CtxError, match="a3"):
            lead.start(lead.make("z", placement="node=a3\n"))
        lead.lead.closed("b1", 0, "it is off")
        assert lead.start(lead.make("v", placement="node=*\n")).node == "b1"
        parent = await lead.parent()
        child = world.agents.births.create(inside(world.may_create(parent)), "child")
        world.agents.journal.update(child, placement="node=b1\n", exec="x")
        with pytest.raises(CtxError, match="node:b1 place"):
            lead.start(child)

    with world_in(tmp_path, nodes=nodes) as world:
        on_lead(world, act, Machine())


def with_worktree(lead: Lone, agent: Agent) -> None:
    made = Worktree(name="x", root="/r", common="/r/.git", base="a" * 40, node="n2")
    lead.world.agents.journal.update(agent, worktree=made.dump(), worktree_made=True)


LEFT = {"commit": "b" * 40, "path": "/there", "keep": 86400.0, "why": ""}


@pytest.mark.parametrize("size", [1 << 31, 1 << 62])
def test_a_pack_that_is_too_large_is_not_asked_for(world: World, size: int) -> None:
    async def act(lead: Lone) -> None:
        agent = await lead.running()
        with_worktree(lead, agent)
        files = {"worktree.pack": [size, 0]}
        left = {**LEFT, "size": size}
        said = {"outcome": "done", "reason": "exit:0", "files": files, "worktree": left}
        await lead.far.say("ended", agent, **said)
        await lead.far.say("dead", agent)
        await lead.be(agent, Status.DEAD)
        assert (agent.outcome, agent.reason) == ("done", "exit:0"), "all else has come"
        found, path = lead.lead.left_of(agent)
        assert path is None and "more than artifact_max" in found.why
        assert found.where("n2") == 'kept at n2 for 1 days, in "/there"'
        told = lead.far.told[-1]
        assert (told["op"], told["keep"]) == ("forget", True)
        kept = Worktree.load(agent.worktree or {})
        taken = replace(kept, state=WorktreeState.FETCHED)
        lead.world.agents.journal.update(agent, worktree=taken.dump())
        told = lead.far.told[-1]
        assert (told["op"], told["keep"]) == ("forget", False), "nobody wants it any more"

    on_lead(world, act)


def test_what_a_lost_agent_committed_is_said_to_be_there(world: World) -> None:
    async def act(lead: Lone) -> None:
        agent = await lead.running()
        with_worktree(lead, agent)
        left = {**LEFT, "commit": "", "size": 0}
        await lead.far.say("state", agent, status="starting", worktree=left)
        await lead.far.say("state", agent, status="busy")
        await lead.be(agent, Status.DEAD, seconds=LOST)
        assert agent.reason == "runtime_lost"
        found, path = lead.lead.left_of(agent)
        assert (found.why, found.path) == ("n2 has not said what it committed", "/there")
        assert path is None and lead.far.told[-1]["keep"]

    on_lead(world, act)


@pytest.mark.parametrize("said", [None, {"commit": "HEAD"}, {"size": -1}])
def test_a_host_that_says_a_wrong_worktree_is_not_heard(world: World, said: Any) -> None:
    async def act(lead: Lone) -> None:
        agent = await lead.running()
        with_worktree(lead, agent)
        said_of_it = {**LEFT, **said} if said else {"commit": 1}
        with pytest.raises(BrokenLinkError):
            more = {"outcome": "done", "reason": "", "worktree": said_of_it}
            await lead.far.say("ended", agent, **more)
        assert agent.status is Status.BUSY

    on_lead(world, act)
