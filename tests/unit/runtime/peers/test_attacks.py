"""What no host says: it ends the link, and nothing of any agent changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from runtime.errors import MalformedError, QuotaError
from runtime.peers.hello import told_of_itself
from runtime.peers.peering import BrokenLinkError
from runtime.records.lifecycle import Status
from runtime.records.settings import PLACED_GRACE
from tests.worlds.placed import NODES, Lone, on_lead
from tests.worlds.records import World, full, world_in

_HELLO: dict[str, Any] = {"version": 1, "alias": "one", "node": "two", "networks": ["web"]}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with world_in(tmp_path, nodes=NODES) as made:
        yield made


@pytest.mark.parametrize(
    ("op", "said"),
    [
        ("state", {"status": "dead"}),
        ("state", {"status": "stopping"}),
        ("state", {"status": ["busy"]}),
        ("state", {"status": "busy", "run": "r2147483647"}),
        ("state", {"status": "busy", "run": "../../r1"}),
        ("state", {"status": "busy", "run": "r\u00b2"}),
        ("state", {"status": "busy", "run": 1}),
        ("state", {"status": "busy", "reason": "x" * 5000}),
        ("event", {"type": "run.end", "usage": {"cpu_usec": -1}}),
        ("event", {"type": "run.end", "usage": {"cpu_usec": 10**300}}),
        ("event", {"type": "run.end", "usage": {"cpu usec\n": 1}}),
        ("event", {"type": "run.start", "origin": "x"}),
        ("event", {"type": "run.start", "run": []}),
        ("event", {"type": "run.start", "pid": 10**300}),
        ("event", {"type": "agent.limit", "used": -1}),
        ("event", {"type": "agent.limit", "max": 1e300}),
        ("usage", {"usage": {str(number): 1 for number in range(200)}}),
        ("usage", {"usage": [1]}),
        ("report", {"id": "a b", "text": "hi"}),
        ("report", {"id": "x", "text": 5}),
        ("report", {"id": "x", "text": "x" * 100_000}),
        ("ended", {"outcome": "splendid", "reason": ""}),
        ("ended", {"outcome": "done", "out": -1}),
        ("ended", {"outcome": "done", "out": 1 << 70}),
    ],
)
def test_what_no_host_says_ends_the_link(world: World, op: str, said: dict[str, Any]) -> None:
    async def act(lone: Lone) -> None:
        agent = await lone.running()
        run, lines = agent.run.id, len(lone.events(agent))
        with pytest.raises(BrokenLinkError):
            await lone.far.say(op, agent, **said)
        assert (agent.status, agent.run.id) == (Status.BUSY, run)
        assert len(lone.events(agent)) == lines

    on_lead(world, act)


@pytest.mark.parametrize(
    "said",
    [
        {"alias": {"a": 1}},
        {"node": "x" * 10_000},
        {"networks": 5},
        {"networks": [["web"]]},
        {"shared": ["x"] * 10_000},
        {"lease_max": "long"},
        {"lease_max": True},
        {"lease_max": 10**400},
        {"boot": [1]},
        {"product": None},
    ],
)
def test_what_a_host_says_of_itself_is_words(said: dict[str, Any]) -> None:
    with pytest.raises(MalformedError):
        told_of_itself({**_HELLO, **said})


def test_words_of_a_host_do_nothing_to_a_terminal() -> None:
    assert told_of_itself({**_HELLO, "node": "\x1b[31m", "shared": ["\x07"]})["node"] == "\\x1b[31m"


def test_a_host_fills_no_disk_and_no_log(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first of what it tells is kept although there is no room: ends are among it."""
    monkeypatch.setattr("runtime.peers.replica._BEYOND_MAX", 1000)

    async def act(lone: Lone) -> None:
        agent = await lone.running()
        full = QuotaError("no room")
        for _ in range(2):  # there is room again
            before = len(lone.events(agent))
            with mock.patch.object(world.agents.disk, "check", side_effect=full):
                for number in range(50):
                    await lone.far.say("event", agent, type="agent.control", file=str(number))
            assert 5 < len(lone.events(agent)) - before < 15
            await lone.far.say("event", agent, type="agent.control", file="room")
            assert lone.events(agent)[-1]["file"] == "room"
        assert len([line for line in caplog.messages if "is not told" in line]) == 1

    with caplog.at_level("INFO"):
        on_lead(world, act)


def test_a_host_that_says_very_much_to_a_full_disk_is_not_heard(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.peers.post.LATE_MAX", 20)

    async def act(lone: Lone) -> None:
        agent = await lone.running()
        with full(world.store), pytest.raises(BrokenLinkError, match="full"):
            for _ in range(50):
                await lone.far.say("usage", agent, usage={"cpu_usec": 1})
        assert len(world.agents.journal.late) == 20

    on_lead(world, act)


def test_no_grace_is_longer_than_hosts_aretold_of_itself(world: World) -> None:
    async def act(lone: Lone) -> None:
        agent = await lone.running(limits={"grace": "1h"})
        assert world.agents.settings.grace(agent) == PLACED_GRACE
        at_home = lone.make("y", placement="", limits={"grace": "1h"})
        assert world.agents.settings.grace(at_home) == 3600

    on_lead(world, act)
