"""Agents that a lead puts here, on a machine in memory."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import trio.testing

from runtime.caller import Caller
from runtime.cell.port import LiveCell
from runtime.errors import QuotaError, TooLongError, UnsupportedError, WrongStateError
from runtime.peers.hosting import Hosting
from runtime.peers.peering import BrokenLinkError, Message, Over
from runtime.peers.post import LEAD, Post, key_of
from runtime.peers.registrations import Registrations
from runtime.peers.streams import MESSAGE_MAX, UNDONE_BYTES, UNDONE_MAX
from runtime.records.change import Change, Subscriber
from runtime.records.config import Config
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.records.nodes import Placed
from runtime.texts import policy
from tests.worlds.leads import A, B, Leader, Site, at_site, put
from tests.worlds.memory import Machine
from tests.worlds.records import World, full, inside, world_in

UID = 1000
C = "c" * 16
DIGEST = hashlib.sha256(b"hello").hexdigest()


WORKTREE = {"workspace": "worktree"}


def worktree(size: int = 5, name: str = "x", **more: Any) -> dict[str, Any]:
    """What ``put`` says more of an agent with a worktree."""
    given = {"base": "a" * 40, "config": {}, "differs": {}, **more}
    files = {"worktree.pack": [size, DIGEST]}
    return {"name": name, "config": WORKTREE, "files": files, "worktree": given}


async def busy(site: Site, lead: Leader, **more: Any) -> Agent:
    """A guest whose program runs."""
    await lead.say("put", **put(**more))
    assert lead.refusals == []
    await lead.say("start")
    agent = site.guest()
    await site.until(lambda: site.cell(agent).facts.exist())
    site.machine.began(site.cell(agent))
    await site.be(agent, Status.BUSY)
    return agent


async def told(site: Site, lead: Leader, agent: Agent) -> dict[str, Any]:
    """How a guest ended, as its lead was told."""
    await site.be(agent, Status.DEAD)
    await site.until(lambda: bool(agent.guest.get("told")))
    await lead.go_on()
    (ended,) = lead.told("ended")
    assert lead.facts[-1] == {"op": "dead", "agent": agent.incarnation}
    return ended


def test_a_life_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(site: Site, lead: Leader) -> None:
        agent = await busy(site, lead)
        assert (agent.incarnation, agent.owner, agent.run.id) == (A, UID, "r3")
        assert (agent.private, agent.parent) == (True, None)
        site.machine.ended(site.cell(agent), code=0)
        ended = await told(site, lead, agent)
        assert (ended["outcome"], ended["reason"]) == ("done", "exit:0")
        assert lead.statuses == ["busy"]
        happened = [fact["type"] for fact in lead.told("event")]
        assert happened == ["run.start", "run.end"]
        lines = [json.loads(line) for line in site.world.lines(agent)]
        ids = {f"e{fact['origin']}": fact["type"] for fact in lead.told("event")}
        assert {line["id"]: line["type"] for line in lines if line["id"] in ids} == ids
        await lead.say("forget")
        await site.until(lambda: site.agents.registry.named("x@one") is None)
        assert site.agents.registry.holder("x@one") is None, "the name is free again"
        assert not site.agents.sessions.any(UID, "x@one"), "its history is the lead's"
        assert lead.refusals == []
        await lead.say("put", B, **put(run=4))
        assert site.guest().incarnation == B and lead.refusals == []

    at_site(world, monkeypatch, act)


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [
        ({"more": 1}, "EINVAL", "more"),
        ({"config": {"uid": "0"}}, "EINVAL", "uid"),
        ({"bound": {"more": []}}, "EINVAL", "more"),
        ({"name": "../x"}, "EINVAL", "name"),
        ({"name": "x@two"}, "EINVAL", "name"),
        ({"session": "a/b"}, "EINVAL", "name"),
        ({"run": "3"}, "EINVAL", "run"),
        ({"takes": "yes"}, "EINVAL", "takes"),
        ({"supervisor": "uid:0"}, "EINVAL", "operator or agent:NAME"),
        ({"supervisor": "agent:boss@two"}, "EINVAL", "name"),
        ({"config": {"mode": "often"}}, "EINVAL", "once"),
        ({"config": {"iso": "shared"}}, "EOPNOTSUPP", "sandbox"),
        ({"config": {"life": "detached"}}, "EOPNOTSUPP", "owned"),
        ({"config": {"workspace": "explicit_root:/etc"}}, "EOPNOTSUPP", "inherit"),
        ({"config": {"exec": "a 'b"}}, "EINVAL", "quot"),
        ({"config": {"env": "1=2\n"}}, "EINVAL", "1=2"),
        ({"config": {"meta": "[" * 70}}, "EINVAL", ""),
        ({"config": {"label": "a b"}}, "EINVAL", "label"),
        ({"config": {"label": "x_t\n", "policy": ""}, "bound": {"policy": ""}}, "EINVAL", "one"),
        ({"config": {"policy": "allow x_t network: connect\n"}}, "EINVAL", "object"),
        ({"config": {"limits": {"memory.max": "much"}}}, "EINVAL", "much"),
        ({"config": {"limits": {"memory": "1"}}}, "EINVAL", "memory"),
        ({"config": {"model": "m"}}, "EACCES", "model:m"),
        ({"config": {"mount": "/etc /etc ro\n"}}, "EINVAL", "node:recipes"),
        ({"config": {"mount": "home: /h rw\n"}}, "EINVAL", "node:recipes"),
        ({"config": {"mount": "node:recipes/../.. /x ro\n"}}, "EINVAL", ".."),
        ({"config": {"mount": "node:recipes /x rw\n"}}, "EINVAL", "ro"),
        ({"config": {"mount": "node:recipes /x ro\n" * 2}}, "EINVAL", "twice"),
        ({"config": {"mount": "x /x hide\n" * 2049}}, "EDQUOT", "2048"),
        ({"files": {"result.md": [1, "0" * 64]}}, "EINVAL", "handoff.md"),
        ({"files": {"../x": [1, "0" * 64]}}, "EINVAL", "handoff.md"),
        ({"files": {"handoff.md": [-1, "0" * 64]}}, "EINVAL", "SHA-256"),
        ({"files": {"handoff.md": [1, "0"]}}, "EINVAL", "SHA-256"),
        ({"files": {"handoff.md": 5}}, "EINVAL", "SHA-256"),
        ({"files": {"handoff.md": [1 << 40, "0" * 64]}}, "EFBIG", "at most"),
        ({"config": WORKTREE}, "EINVAL", "worktree.pack"),
        ({"files": {"worktree.pack": [1, "0" * 64]}}, "EINVAL", "workspace worktree"),
        (worktree(1 << 40), "EFBIG", "at most"),
        (worktree(base="HEAD"), "EINVAL", "base"),
        (worktree(config={"core.hooksPath": "/x"}), "EINVAL", "config"),
        (worktree(name="a..b"), "EINVAL", "branch"),
        ({"bound": {"depth": -1}}, "EINVAL", "depth"),
        ({"bound": {"policy": "deny all\n"}}, "EINVAL", "policy line"),
    ],
)
def test_what_is_wrong_is_refused_whole(
    world: World, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], code: str, words: str
) -> None:
    async def act(site: Site, lead: Leader) -> None:
        await lead.say("put", **put(**said))
        ((given, sentence),) = lead.refusals
        assert given == code and words in sentence
        assert list(site.agents.registry) == [], "nothing is left of it"
        await lead.say("start")
        await lead.say("verb", verb="stop", by="agent:boss", reason="r", outcome="cancelled")
        assert [code for code, _ in lead.refusals[1:]] == ["ENOENT", "ENOENT"]
        for op in ("freeze", "thaw", "forget"):
            await lead.say(op)
        await lead.say("put", B, **put())
        assert site.guest().incarnation == B and len(lead.refusals) == 3

    at_site(world, monkeypatch, act)


@pytest.mark.parametrize("incarnation", ["", "A" * 16, "a" * 15, "../../etc/passwd"])
def test_an_incarnation_is_no_path(
    world: World, monkeypatch: pytest.MonkeyPatch, incarnation: str
) -> None:
    async def act(site: Site, lead: Leader) -> None:
        await lead.say("put", incarnation, **put())
        assert [code for code, _ in lead.refusals] == ["EINVAL"]

    at_site(world, monkeypatch, act)


def test_nobody_elses_agent_is_touched(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(site: Site, lead: Leader) -> None:
        own = site.agents.births.create(Caller(UID, UID, 0, groups=()), "x")
        await lead.say("put", own.incarnation, **put())
        assert [code for code, _ in lead.refusals] == ["EEXIST"]
        await lead.say("put", **put())
        agent = site.guest()
        other = Leader(UID, "two")
        other.connect(site)
        await other.go_on()
        for incarnation in (own.incarnation, A):
            await other.say("verb", incarnation, verb="kill", by="", reason="", outcome="")
            await other.say("limits", incarnation, limits={"pids.max": "1"})
            await other.say("forget", incarnation)
            await other.say("start", incarnation)
        assert {code for code, _ in other.refusals} == {"ENOENT"}
        assert (own.status, agent.status) == (Status.NEW, Status.NEW)
        assert agent.limits == {}

    at_site(world, monkeypatch, act)


def test_no_more_than_placed_max(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(site: Site, lead: Leader) -> None:
        await lead.say("put", **put())
        await lead.say("put", B, **put(name="y"))
        assert [code for code, _ in lead.refusals] == ["EDQUOT"]
        site.world.agents.settings.config = Config(placed=Placed(allow=False))
        await lead.say("put", B, **put(name="y"))
        assert [code for code, _ in lead.refusals] == ["EDQUOT", "EACCES"]

    with world_in(tmp_path, placed=Placed(max=1)) as world:
        at_site(world, monkeypatch, act)


# starting


def test_nothing_starts_before_the_first_grant(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(site: Site, lead: Leader) -> None:
        lead.vouches = False
        await lead.say("put", **put())
        await lead.say("start")
        agent = site.guest()
        await site.until(lambda: agent.index in site.supervisor._live_cells)
        for _ in range(3):
            await lead.go_on()
            await site.until(lambda: True)
        assert agent.status is Status.STARTING and not site.cell(agent).facts.exist()
        lead.vouches = True
        await lead.go_on()
        await site.until(lambda: site.cell(agent).facts.exist())
        assert site.cell(agent).lease == site.guests.number(lead.key)

    at_site(world, monkeypatch, act)


def test_a_start_waits_for_documents_and_a_stop_does_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(site: Site, lead: Leader) -> None:
        for incarnation, name in ((A, "x"), (B, "y"), (C, "z")):
            files = {"handoff.md": [5, DIGEST if name != "z" else "0" * 64]}
            await lead.say("put", incarnation, **put(name=name, files=files))
            await lead.say("start", incarnation)
        first, second, third = site.guest(), site.guest("y@one"), site.guest("z@one")
        await lead.say("verb", verb="stop", by="agent:boss", reason="why", outcome="cancelled")
        await told(site, lead, first)
        assert (first.outcome, first.reason) == ("cancelled", "why")
        assert second.status is Status.STARTING and not site.cell(second).facts.exist()
        await lead.give({(B, "handoff.md"): b"hello", (C, "handoff.md"): b"HELLO"})
        await site.until(lambda: site.cell(second).facts.exist())
        assert site.agents.documents.read(second, "handoff.md") == b"hello"
        await site.be(third, Status.DEAD)
        assert third.reason.startswith("start_failed: handoff.md is not what its lead said")

    at_site(world, monkeypatch, act)


# verbs


class Counting(Subscriber):
    """How many operations each transaction has that has any; how many ends, and which facts."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.dead: list[int] = []
        self.said: list[list[str]] = []

    def posting(self, change: Change, undoing: Any) -> None:
        ended = [values.get("status") for _, values in change.agents.values()].count(Status.DEAD)
        self.done += [len(change.done)] if change.done else []
        self.dead += [ended] if ended else []
        self.said += [[each.op for each in change.posts]] if change.posts else []


async def both_busy(site: Site, lead: Leader) -> list[Agent]:
    """Two guests whose programs run."""
    agents = []
    for incarnation, name in ((A, "x"), (B, "y")):
        await lead.say("put", incarnation, **put(name=name))
        await lead.say("start", incarnation)
        agents.append(agent := site.guest(f"{name}@one"))
        await site.until(site.cell(agent).facts.exist)
        site.machine.began(site.cell(agent))
        await site.be(agent, Status.BUSY)
    return agents


async def say_together(
    site: Site, lead: Leader, op: str, *said: tuple[str, dict[str, Any]]
) -> None:
    """Operations that come in one piece."""
    kept = [lead.stream.record(op, incarnation, **more) for incarnation, more in said]
    came = [Message(each.number, op, each.agent, json.loads(each.line), each.line) for each in kept]
    await site.guests.hear(lead.key, lead.uid, lead.host, *came)
    assert site.post.stream(lead.key).got == kept[-1].number


def test_ends_that_come_together_are_one_transaction(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting()

    async def act(site: Site, lead: Leader) -> None:
        agents = await both_busy(site, lead)
        site.agents.journal.subscribe(counting)
        said = {"by": "agent:boss", "reason": "why", "outcome": "cancelled"}
        verbs = ((A, "stop"), (C, "stop"), (A, "stop"), (B, "kill"))
        ends = [(each, {"verb": verb, **said}) for each, verb in verbs]
        await say_together(site, lead, "verb", *ends)
        assert counting.done == [4]
        assert [agent.status for agent in agents] == [Status.STOPPING] * 2
        assert [agent.cause for agent in agents] == [("cancelled", "why")] * 2
        facts = [json.loads(fact.line) for fact in site.post.stream(lead.key).kept]
        assert [(fact["agent"], fact["code"]) for fact in facts if fact["op"] == "refused"] == [
            (C, "ENOENT"),
            (A, "EBUSY"),
        ]

    at_site(world, monkeypatch, act)


@pytest.mark.parametrize("owner", [UID, UID + 1])
def test_who_is_told_to_end_while_others_are_is_recorded_when_all_of_the_owner_have(
    world: World, monkeypatch: pytest.MonkeyPatch, owner: int
) -> None:
    counting = Counting()

    async def act(site: Site, lead: Leader) -> None:
        agents, signal = await both_busy(site, lead), site.machine.signal_cells
        site.agents.journal.update(agents[1], owner=owner)

        async def slowly(owner: int, number: int, cells: Collection[LiveCell]) -> None:
            for _ in range(20):
                await trio.lowlevel.checkpoint()
            await signal(owner, number, cells)

        monkeypatch.setattr(site.machine, "signal_cells", slowly)
        site.agents.journal.subscribe(counting)
        said = {"verb": "stop", "by": "agent:boss", "reason": "why", "outcome": "cancelled"}
        for incarnation in (A, B):
            await say_together(site, lead, "verb", (incarnation, said))
            for _ in range(5):
                await trio.lowlevel.checkpoint()
        for agent in agents:
            await site.be(agent, Status.DEAD)
        assert counting.dead == ([2] if owner == UID else [1, 1])

    at_site(world, monkeypatch, act)


@pytest.mark.parametrize("gives", [False, True])
def test_an_end_is_told_in_the_transaction_that_records_it(
    world: World, monkeypatch: pytest.MonkeyPatch, gives: bool
) -> None:
    """Or in a later one, if it gives back what has to be looked at."""
    counting = Counting()

    async def act(site: Site, lead: Leader) -> None:
        agent = await busy(site, lead)
        if gives:
            site.agents.documents.ensure(agent)
            (site.agents.documents.path(agent, "artifact") / "a").write_bytes(b"a")
        site.agents.journal.subscribe(counting)
        site.machine.ended(site.cell(agent), code=0)
        ended = await told(site, lead, agent)
        assert [fact["op"] for fact in lead.facts[-3:]] == ["event", "ended", "dead"]
        assert ended["outcome"] == "done" and ended["usage"]["wall_msec"] >= 0
        assert ended["files"] == ({"artifact/a": [1, 0o644]} if gives else {})
        facts = [set(each) for each in counting.said if "ended" in each]
        assert facts == [{"ended", "dead"} if gives else {"event", "ended", "dead"}]

    at_site(world, monkeypatch, act)


def test_what_is_forgotten_together_goes_in_one_transaction(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting()

    async def act(site: Site, lead: Leader) -> None:
        for agent in await both_busy(site, lead):
            site.machine.ended(site.cell(agent), code=0)
            await site.be(agent, Status.DEAD)
        await site.until(lambda: all(each.guest.get("told") for each in site.agents.registry))
        site.agents.journal.subscribe(counting)
        await say_together(site, lead, "forget", (A, {}), (B, {}))
        assert counting.done == [2] and list(site.agents.registry) == []
        assert not any(site.agents.sessions.any(UID, f"{name}@one") for name in "xy")
        await say_together(site, lead, "forget", (A, {}), (B, {}))
        agent = await busy(site, lead, run=9)
        counting.done.clear()
        await say_together(site, lead, "forget", (A, {}), (B, {}), (A, {}))
        assert counting.done == [1, 1, 1] and agent.status is Status.STOPPING
        await lead.go_on()
        assert lead.refusals == []

    at_site(world, monkeypatch, act)


def test_verbs_are_obeyed_and_what_does_not_fit_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(site: Site, lead: Leader) -> None:
        def verb(verb: str, **more: str) -> Any:
            said = {"by": "agent:boss", "reason": "", "outcome": "", **more}
            return lead.say("verb", verb=verb, **said)

        agent = await busy(site, lead)
        await verb("pause")
        assert lead.statuses[-1] == "paused" and site.machine.frozen
        assert lead.told("state")[-1]["by"] == "agent:boss@one", "who wanted it, and where"
        await verb("pause")
        await verb("resume")
        assert agent.status is Status.BUSY and not site.machine.frozen
        await verb("reset")
        await verb("stop", outcome="well")
        assert [code for code, _ in lead.refusals] == ["EBUSY", "EINVAL", "EINVAL"]
        assert lead.told("refused")[0]["verb"] == "pause"
        await verb("stop", outcome="cancelled", reason="supervisor_stop")
        ended = await told(site, lead, agent)
        assert (ended["outcome"], ended["reason"]) == ("cancelled", "supervisor_stop")
        assert lead.statuses == ["busy", "paused", "busy"]

    at_site(world, monkeypatch, act)


def test_what_is_frozen_above_keeps_its_status(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, lead = Machine(), Leader(UID)

    async def act(site: Site, lead: Leader) -> None:
        agent = await busy(site, lead)
        await lead.say("freeze")
        assert machine.frozen and agent.status is Status.BUSY
        caller = Caller(UID, UID, 0, groups=())
        with site.agents.journal.acting(caller):
            site.supervisor.pause(agent)
            site.supervisor.resume(agent)
        assert machine.frozen, "who resumes it here does not resume what is above it"

    at_site(world, monkeypatch, act, machine, lead)
    world.reopen()

    async def after(site: Site, lead: Leader) -> None:
        assert machine.frozen
        await lead.say("thaw")
        assert not machine.frozen
        assert site.guest().status is Status.BUSY and lead.statuses[-1] == "busy"

    at_site(world, monkeypatch, after, machine, lead)


def test_what_starts_waits_while_it_is_frozen_above(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(site: Site, lead: Leader) -> None:
        await lead.say("put", **put())
        await lead.say("freeze")
        await lead.say("start")
        agent = site.guest()
        await site.until(lambda: agent.index in site.supervisor._live_cells)
        await lead.go_on()
        assert not site.cell(agent).facts.exist()
        await lead.say("thaw")
        await site.until(lambda: site.cell(agent).facts.exist())

    at_site(world, monkeypatch, act)


# rights


def test_a_bound_only_narrows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = "allow x_t tool:* execute\nallow x_t model:* use\nallow x_t network:* connect\n"

    async def act(site: Site, lead: Leader) -> None:
        given = put(
            config={"policy": wide, "limits": {"pids.max": "100"}},
            bound={"policy": wide, "limits": {"pids.max": "50", "memory.max": "1G"}},
        )
        await lead.say("put", **given)
        agent = site.guest()
        assert lead.refusals == []
        assert agent.limits == {"pids.max": "50", "memory.max": str(1 << 30)}
        allows = site.agents.authority.allows
        assert allows(agent, "model", "m", "use")
        assert allows(agent, "network", "open", "connect"), "the host offers it"
        assert not allows(agent, "network", "other", "connect")
        assert not allows(agent, "network", "default", "connect")
        assert agent.guest["lost"] == []
        less = "allow x_t tool:Read execute\nallow x_t model:* use\n"
        await lead.say("bound", policy=less, depth=0, families=["core"], limits={"pids.max": "9"})
        assert lead.refusals == []
        assert policy.parse(agent.policy, "x_t") == policy.parse(less, "x_t")
        assert agent.limits == {"pids.max": "9", "memory.max": str(1 << 30)}
        assert site.agents.authority.families(agent) == ("core",)
        more = "allow x_t tool:* execute\nallow x_t network:* connect\n"
        await lead.say("bound", policy=more, depth=9, families=["authority_expansion"], limits={})
        assert agent.policy == "allow x_t tool:Read execute\n"
        assert site.agents.authority.families(agent) == ()
        assert agent.guest["bound"]["depth"] == 0
        assert agent.limits == {"pids.max": "9", "memory.max": str(1 << 30)}
        await lead.say("bound", policy=more, depth=9, families=[], limits={}, power=1)
        assert [code for code, _ in lead.refusals] == ["EINVAL"]
        await lead.say("limits", limits={"pids.max": "5", "timeout": "1h"})
        assert agent.limits["pids.max"] == "5" and agent.limits["timeout"] == "1h"
        await lead.say("limits", limits={"memory.max": "1K"})
        assert agent.limits == {"pids.max": "9", "memory.max": "1024"}

    with world_in(tmp_path, placed=Placed(networks=("open",))) as world:
        at_site(world, monkeypatch, act)


def test_a_network_whose_use_is_limited_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = (
        "allow x_t network:* connect\nallow x_t shared:s* read,write\n"
        "allow x_t shared:other read\n"
    )

    async def act(site: Site, lead: Leader) -> None:
        limits = {"net.one.max": "1M"}
        await lead.say("put", **put(config={"policy": wide, "limits": limits},
                                    bound={"policy": wide}))  # fmt: skip
        agent = site.guest()
        assert lead.refusals == [] and agent.limits == {}
        lines = set(agent.policy.splitlines())
        assert lines == {"allow x_t network:two connect", "allow x_t shared:some read,write"}
        assert agent.guest["lost"] == ["shared:other"]
        await lead.say("limits", limits={"net.two.max": "1M"})
        assert agent.policy == "allow x_t shared:some read,write\n"

    placed = Placed(networks=("one", "two"), shared=("some", "another"))
    with world_in(tmp_path, placed=placed) as world:
        at_site(world, monkeypatch, act)


def test_it_reaches_what_it_makes_and_nothing_else(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = "allow x_t agent:* create,read,stop,write\nallow x_t session:* read\n"

    async def act(site: Site, lead: Leader) -> None:
        own = site.agents.births.create(Caller(UID, UID, 0, groups=()), "own")
        agent = await busy(site, lead, config={"policy": wide}, bound={"policy": wide, "depth": 1})
        births, authority = site.agents.births, site.agents.authority
        child = births.create(inside(agent), "child")
        assert authority.reaches(agent, child, "agent", "stop")
        assert not authority.reaches(agent, own, "agent", "stop")
        assert not authority.reaches(agent, own, "session", "read")
        site.world.live(site.world.may_create(child))
        with pytest.raises(QuotaError, match="deeper"):
            births.create(inside(child), "grandchild")

    at_site(world, monkeypatch, act)


# reports


def test_reports_are_facts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(site: Site, lead: Leader) -> None:
        agent = await busy(site, lead)
        messages, caller = site.agents.messages, inside(agent)
        assert site.agents.registry.supervisor(agent) == "agent:boss@one"
        messages.report(caller, agent, "half of it", name="id")
        messages.report(caller, agent, "half of it", name="id")
        await lead.go_on()
        (report,) = lead.told("report")
        assert (report["id"], report["run"], report["text"]) == ("id", "r3", "half of it")
        with pytest.raises(TooLongError):
            messages.report(caller, agent, "\1" * 60000)
        said: dict[str, Any] = {"reason": "parent_dead", "outcome": "cancelled", "orphaned": True}
        await lead.say("verb", verb="stop", by="agent:boss run:r1", **said)
        assert (agent.status, agent.caused_by) == (Status.STOPPING, "agent:boss run:r1@one")
        with pytest.raises(WrongStateError, match="boss@one"):
            messages.report(caller, agent, "late")

    at_site(world, monkeypatch, act)


def test_who_takes_no_messages_gets_no_reports(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(site: Site, lead: Leader) -> None:
        agent = await busy(site, lead, takes=False)
        with pytest.raises(UnsupportedError, match="boss@one"):
            site.agents.messages.report(inside(agent), agent, "hello")

    at_site(world, monkeypatch, act)


def test_a_root_agent_reports_to_operators(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(site: Site, lead: Leader) -> None:
        agent = await busy(site, lead, supervisor="operator", takes=False)
        assert site.agents.registry.supervisor(agent) == "operator"
        site.agents.messages.report(inside(agent), agent, "hello")
        await lead.go_on()
        assert [report["text"] for report in lead.told("report")] == ["hello"]

    at_site(world, monkeypatch, act)


def test_a_lead_that_is_away_is_not_told_without_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(site: Site, lead: Leader) -> None:
        agent = await busy(site, lead)
        undone = site.post.stream(lead.key).undone
        while undone[A] < UNDONE_MAX:
            site.agents.messages.report(inside(agent), agent, "more")
        with pytest.raises(QuotaError, match="one"):
            site.agents.messages.report(inside(agent), agent, "too much")
        assert undone[A] == UNDONE_MAX
        site.machine.ended(site.cell(agent), code=0)
        await site.until(lambda: bool(agent.guest.get("told")))
        last = site.post.stream(lead.key).kept[-1]
        assert json.loads(last.line)["op"] == "dead"

    at_site(world, monkeypatch, act)


def test_a_full_disk_keeps_no_guest_alive_and_ends_no_daemon(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(site: Site, lead: Leader) -> None:
        agent = await busy(site, lead)
        lead.vouches = False
        with full(world.store):
            await site.be(agent, Status.DEAD)
            assert site.guests.number(lead.key) == 0
            await site.guests.hear(lead.key, UID, lead.host, Over(50))
            await trio.testing.wait_all_tasks_blocked()
            await lead.exchange(0.0)
            assert lead.overs == [], "nothing is said that a crash can undo"
        site.agents.journal.update(agent, label="y_t")  # whatever is stored next
        assert Post(world.store).data(lead.key)["upto"] == 50
        await site.guests.hear(lead.key, UID, lead.host, Over(50))
        await trio.testing.wait_all_tasks_blocked()
        await lead.exchange(0.0)
        assert lead.overs == [50]

    at_site(world, monkeypatch, act)


def test_who_says_very_much_to_a_full_disk_is_not_heard(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.peers.post.LATE_MAX", 20)

    async def act(site: Site, lead: Leader) -> None:
        other = Leader(UID, "two")
        other.connect(site)
        await other.go_on()
        with full(world.store), pytest.raises(BrokenLinkError, match="full"):
            for _ in range(50):
                await lead.say("thaw", B)
        assert len(site.agents.journal.late) == 20
        with full(world.store):
            await other.say("thaw", B)
        assert len(site.agents.journal.late) == 21, "others are heard"

    at_site(world, monkeypatch, act)


def test_long_reports_take_no_more_memory_than_short_ones(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(site: Site, lead: Leader) -> None:
        agent = await busy(site, lead)
        stream, kept = site.post.stream(lead.key), 0
        with pytest.raises(QuotaError, match="one"):
            while kept < UNDONE_MAX:
                kept += 1
                site.agents.messages.report(inside(agent), agent, "x" * 60_000)
        assert stream.size <= UNDONE_BYTES + MESSAGE_MAX
        await lead.go_on()
        assert stream.size == 0 and len(lead.told("report")) == kept - 1
        site.agents.messages.report(inside(agent), agent, "again")

    at_site(world, monkeypatch, act)


def test_who_calls_agents_lost_again_and_again_is_answered_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(site: Site, lead: Leader) -> None:
        await busy(site, lead)
        tasks = site.guests._nursery.child_tasks
        before = len(tasks)
        for upto in range(100, 300):
            await site.guests.hear(lead.key, UID, lead.host, Over(upto // 2))
        assert len(tasks) <= before + 3
        site.machine.ended(site.cell(site.guest()), code=0)
        await site.until(lambda: not site.guests._called_lost)
        await lead.go_on()
        assert lead.overs == [149]

    at_site(world, monkeypatch, act)


# leases and ends


def test_without_its_lead_it_ends_with_the_lease(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = Leader(UID)

    async def act(site: Site, lead: Leader) -> None:
        agent = await busy(site, lead)
        first = site.guests.number(lead.key)
        lead.vouches = False
        await site.be(agent, Status.DEAD)
        assert (agent.outcome, agent.reason) == ("interrupted", "lease_over")
        assert site.guests.number(lead.key) == 0
        await site.until(lambda: bool(agent.guest.get("told")))
        lead.vouches = True
        await lead.go_on()
        await lead.say("put", B, **put(name="y"))
        await lead.say("start", B)
        await site.until(lambda: site.cell(site.guest("y@one")).facts.exist())
        assert site.guests.number(lead.key) != first, "another lease"
        assert lead.told("ended")[0]["reason"] == "lease_over"

    at_site(world, monkeypatch, act, leader=lead)


def test_what_is_lost_is_killed_at_once_and_never_begins(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(site: Site, lead: Leader) -> None:
        agent = await busy(site, lead)
        lead.stream.record("put", B, **put(name="y"))
        lead.stream.record("start", B)
        lead.grants.over = lead.stream.sent
        lead.connect(site)
        await lead.go_on()
        await site.be(agent, Status.DEAD)
        assert site.machine.signals[f"{A}-r3"] == 9
        assert (agent.outcome, agent.reason) == ("interrupted", "lease_over")
        await site.until(lambda: not site.supervisor._live_cells)
        await lead.go_on()
        assert site.agents.registry.named("y@one") is None
        assert set(lead.overs) == {lead.grants.over}
        assert [code for code, _ in lead.refusals] == ["ESRCH", "ENOENT"]
        lead.grants.over = None
        await lead.say("put", C, **put(name="z"))
        assert site.guest("z@one") and len(lead.refusals) == 2

    at_site(world, monkeypatch, act)


def test_a_registration_that_is_over_takes_all_along(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(site: Site, lead: Leader) -> None:
        agent = await busy(site, lead)
        site.guests.part(lead.key)
        await site.be(agent, Status.DEAD)
        await site.until(lambda: not site.supervisor._live_cells)
        assert list(site.post.keys("l")) == [], "nobody is told"

    at_site(world, monkeypatch, act)


def test_leads_that_had_nothing_here_for_long_are_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def act(site: Site, lead: Leader) -> None:
        registrations = Registrations(tmp_path)
        hosting = Hosting(site.agents, registrations, site.post, site.guests)
        old, _ = registrations.lead(UID, "", "old")
        new, _ = registrations.lead(UID, "", "new")
        using, _ = registrations.lead(UID, "", "using")
        for known, days in ((old, 8), (new, 6), (using, 8)):
            seen = time.time() - days * 86400
            site.post.note(key_of(LEAD, known), uid=UID, alias="x", seconds=30.0, seen=seen)
        site.post.note(key_of(LEAD, "nobody's"), uid=UID, alias="x", seconds=30.0)
        lead.known = using
        lead.connect(site)
        site.post.note(lead.key, seen=0.0)
        await busy(site, lead)
        hosting._forget_old()
        assert registrations.leads() == [new, using]
        keys = {key_of(LEAD, known) for known in (new, using)}
        assert {*site.post.keys(LEAD)} & {key_of(LEAD, old), *keys} == keys
        assert key_of(LEAD, "nobody's") not in site.post.keys(LEAD)
        rows = world.store.execute("SELECT key FROM peers").fetchall()
        assert keys <= {key for (key,) in rows} and len(rows) == len([*site.post.keys(LEAD)])

    at_site(world, monkeypatch, act)


def test_who_is_forgotten_while_it_lives_is_killed_and_goes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(site: Site, lead: Leader) -> None:
        await busy(site, lead)
        await lead.say("forget")
        await site.until(lambda: site.agents.registry.named("x@one") is None)
        await lead.go_on()
        assert lead.told("ended") == []

    at_site(world, monkeypatch, act)


def test_who_cannot_be_taken_away_is_not_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(agent: Agent) -> None:
        raise WrongStateError("it cannot be removed")

    async def act(site: Site, lead: Leader) -> None:
        agent = await busy(site, lead)
        site.machine.ended(site.cell(agent), code=0)
        await told(site, lead, agent)
        with monkeypatch.context() as patch, trio.fail_after(100):
            patch.setattr(site.guests, "_take_away", fail)
            with pytest.raises(WrongStateError, match='1 agents of "one" are still here, such as'):
                await site.guests.forget_lead("one", UID)
        await site.guests.forget_lead("one", UID)
        assert site.agents.registry.named("x@one") is None and not site.guests._leaving

    at_site(world, monkeypatch, act)


# the next daemon


def test_the_next_daemon_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, lead = Machine(), Leader(UID)

    async def before(site: Site, lead: Leader) -> None:
        await busy(site, lead)
        await lead.say("put", B, **put(name="y", files={"handoff.md": [5, DIGEST]}))
        await lead.say("start", B)

    at_site(world, monkeypatch, before, machine, lead)
    world.reopen()

    async def after(site: Site, lead: Leader) -> None:
        agent, other = site.guest(), site.guest("y@one")
        assert (agent.status, other.status) == (Status.BUSY, Status.STARTING)
        await lead.give({(B, "handoff.md"): b"hello"})
        await site.until(lambda: site.cell(other).facts.exist())
        site.machine.ended(site.cell(agent), code=0)
        await site.be(agent, Status.DEAD)

    at_site(world, monkeypatch, after, machine, lead)
    world.reopen()

    async def last(site: Site, lead: Leader) -> None:
        await site.until(lambda: bool(site.guest().guest.get("told")))
        await lead.go_on()
        assert [fact["outcome"] for fact in lead.told("ended")] == ["done"], "once"
        assert len(lead.told("dead")) == 1

    at_site(world, monkeypatch, last, machine, lead)


def test_a_put_that_was_half_done_is_done_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = Leader(UID)

    async def before(site: Site, lead: Leader) -> None:
        def die(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(site.guests.putting.files, "write", die)
        lead.stream.record("put", A, **put())
        with pytest.raises(KeyboardInterrupt):
            await lead.go_on()

    at_site(world, monkeypatch, before, leader=lead)
    assert world.reopen().registry.named("x@one") is None

    async def after(site: Site, lead: Leader) -> None:
        assert lead.refusals == []
        assert site.guest().is_guest

    at_site(world, monkeypatch, after, leader=lead)


def test_a_reboot_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, lead = Machine(), Leader(UID)

    async def before(site: Site, lead: Leader) -> None:
        await busy(site, lead)

    at_site(world, monkeypatch, before, machine, lead)
    world.reopen()
    rebooted = Machine()
    rebooted.boot = type(machine.boot)("another boot")

    async def after(site: Site, lead: Leader) -> None:
        ended = await told(site, lead, site.guest())
        assert (ended["outcome"], ended["reason"]) == ("interrupted", "reboot")

    at_site(world, monkeypatch, after, rebooted, lead)


def test_what_nobody_uses_goes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(site: Site, lead: Leader) -> None:
        agent = await busy(site, lead)
        top = world.state / f"tree/agent/{UID}"
        names = ("x@one", "y@one", f"x@one~{A}", f"x@one~{C}", "y@two", "own")
        for name in names:
            (top / name / "work").mkdir(parents=True)

        def there() -> set[str]:
            return {path.name for path in top.iterdir() if path.name[0] != "."}

        keeping = site.guests.keeping
        await keeping.clear(time.time() - 100)
        assert there() == {*names}, "it was used not long ago"
        keeping.forget(UID + 1, "one")
        keeping.forget(UID, "one", B)
        await site.until(lambda: not keeping._forgotten)
        assert there() == {*names}, "it is another's"
        keeping.forget(UID, "one", B)
        keeping.forget(UID, "one", C)
        await site.until(lambda: there() == {*names} - {f"x@one~{C}"})
        os.utime(top / "x@one", (0, 0))
        await keeping.clear(time.time() + 100)
        assert there() == {"x@one", f"x@one~{A}", "own"}, "an agent has it"
        site.machine.ended(site.cell(agent), code=0)
        await told(site, lead, agent)
        guest = {**agent.guest, "kept": True, "unpacked": True}
        old = {"guest": guest, "ended": agent.ended - 8 * 86400}
        world.agents.journal.update(agent, **old)
        await keeping.clear(agent.ended - 1)
        assert site.agents.registry.named("x@one") is agent
        await keeping.clear(agent.ended + 1)
        assert site.agents.registry.named("x@one") is None, "its lead is not heard of any more"
        assert there() == {"x@one", f"x@one~{A}", "own"}, "that counts as used"
        await keeping.clear(time.time() + 100)
        assert there() == {"own"}

    at_site(world, monkeypatch, act)
