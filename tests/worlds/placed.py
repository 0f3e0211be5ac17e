"""A lead whose agents are placed at a node, and a host of which a test says what it says.

The lead is real but for its machine: journal, supervisor, streams. Its clock is that of the test.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
import trio
import trio.testing

from runtime.authority.loop import Gentle
from runtime.cell.port import Host, LiveCell
from runtime.life.streams import Streams
from runtime.life.supervisor import Supervisor
from runtime.peers import leading
from runtime.peers.leading import Leading
from runtime.peers.lease import bound
from runtime.peers.peering import Event, Message, Over
from runtime.peers.post import NODE, Post, key_of
from runtime.peers.streams import Stream
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.records.nodes import Node
from runtime.records.settings import PLACED_GRACE
from tests.worlds.daemon import TIMEOUT
from tests.worlds.jumping import run_jumping
from tests.worlds.memory import Machine, places_in, supervisor_on
from tests.worlds.records import ROOT, World

LEASE = 30.0
NODES = {"n2": Node(command=("/ctx", "peer"), users={"root": "root"}, lease=LEASE)}


class Far:
    """The host at the node n2, as far as its lead knows: both streams, and what it says."""

    def __init__(self, lead: Leading, post: Post, known: str = "bits") -> None:
        self._lead = lead
        self._post = post
        self.key = key_of(NODE, known)
        #: its own side of the streams
        self.stream = Stream()
        self.boot = "boot"
        self.version = 2

    def open(self) -> None:
        """The link is up."""
        self._lead.grants(self.key, "n2", 0, LEASE)
        self._lead.opened(self.key, {"boot": self.boot, "alias": "one", "version": self.version})

    def close(self, why: str = "cut", *, refused: bool = False) -> None:
        self._lead.closed("n2", 0, why, refused=refused)

    @property
    def told(self) -> list[dict[str, Any]]:
        """All operations that it has not said it has done."""
        return [json.loads(kept.line) for kept in self._post.stream(self.key).kept]

    @property
    def ops(self) -> list[str]:
        return [each.get("verb", each["op"]) for each in self.told]

    def acknowledge(self) -> None:
        self._post.stream(self.key).forget(self._post.stream(self.key).sent)

    def ask(self) -> dict[str, Any]:
        """It asks for its lease."""
        grants = self._lead.grants(self.key, "n2", 0, LEASE)
        return grants.answer(1, self._post.stream(self.key).sent, trio.current_time())

    def fact(self, op: str, agent: Agent, **said: Any) -> Message:
        kept = self.stream.record(op, agent.incarnation, **said)
        return Message(kept.number, op, agent.incarnation, json.loads(kept.line), kept.line)

    async def say(self, op: str, agent: Agent, **said: Any) -> Message:
        message = self.fact(op, agent, **said)
        await self.hear(message)
        return message

    async def hear(self, *events: Event) -> None:
        await self._lead.hear(self.key, *events)

    async def over(self, upto: int) -> None:
        await self.hear(Over(upto))

    async def runs(self, agent: Agent) -> None:
        await self.say("state", agent, status="busy")
        await self.say("event", agent, type="run.start", run="r1", pid=7, origin=12)

    async def ends(self, agent: Agent, outcome: str = "done", reason: str = "exit:0") -> None:
        await self.say("event", agent, type="run.end", run="r1", outcome=outcome, reason=reason)
        await self.say("ended", agent, outcome=outcome, reason=reason, usage={"cpu_usec": 5})
        await self.say("dead", agent)


class Lone:
    """A daemon that leads, on a machine that outlives it."""

    def __init__(self, world: World, nursery: trio.Nursery, machine: Machine) -> None:
        self.world = world
        self.machine = machine
        self.nursery = nursery
        for name in ("agent", "home", "trash"):
            (world.state / name).mkdir(exist_ok=True)
        places_in(world).networks.mkdir(parents=True, exist_ok=True)
        self.post = Post(world.store)
        self.wanted: list[tuple[str, int]] = []

        def elsewhere(host: Host) -> Leading:
            self.streams = Streams(Gentle(world.agents.accounts.time))
            world.agents.journal.subscribe(self.streams)
            self.lead = Leading(host, self.post, self.streams)
            self.lead.want = lambda node, owner: self.wanted.append((node, owner))
            return self.lead

        self.supervisor: Supervisor = supervisor_on(machine, world, nursery, elsewhere=elsewhere)
        world.agents.journal.subscribe(self.post)
        self.far = Far(self.lead, self.post)

    def make(self, name: str = "x", parent: Agent | None = None, **more: Any) -> Agent:
        agent = self.world.agents.births.create(ROOT, name)
        if parent is not None:
            self.world.agents.journal.update(agent, parent=parent.index, life="owned")
            self.world.agents.registry.join(agent)
        placed = {"placement": "node=n2\n", "placed_freely": True, "exec": "program", **more}
        self.world.agents.journal.update(agent, **placed)
        return agent

    def start(self, agent: Agent) -> Agent:
        with self.world.agents.journal.acting(ROOT):
            self.supervisor.start(agent)
        return agent

    async def running(self, name: str = "x", **more: Any) -> Agent:
        """An agent that runs at the node, which has done all that it was told."""
        self.far.open()
        agent = self.start(self.make(name, **more))
        await self.far.runs(agent)
        self.far.acknowledge()
        assert agent.status is Status.BUSY
        return agent

    async def parent(self) -> Agent:
        """An agent that runs here."""
        agent = self.start(self.make("boss", placement=""))
        await self.until(lambda: self.cell(agent).facts.exist())
        self.machine.began(self.cell(agent))
        await self.be(agent, Status.BUSY)
        return agent

    def stop(self, agent: Agent, *, kill: bool = False) -> None:
        with self.world.agents.journal.acting(ROOT):
            self.supervisor.stop(agent, kill=kill)

    def cell(self, agent: Agent) -> LiveCell:
        return self.supervisor._live_cells[agent.index]

    async def until(self, is_so: Callable[[], bool], seconds: float = TIMEOUT) -> None:
        with trio.fail_after(seconds):
            while not is_so():
                await trio.testing.wait_all_tasks_blocked()
                if not is_so():
                    await trio.sleep(0.25)

    async def be(self, agent: Agent, *statuses: Status, seconds: float = TIMEOUT) -> None:
        await self.until(lambda: agent.status in statuses, seconds)

    def events(self, agent: Agent, kind: str = "") -> list[dict[str, Any]]:
        lines = map(json.loads, self.world.lines(agent))
        return [event for event in lines if not kind or event["type"] == kind]


#: seconds until something is said to be lost, and more
LOST = bound(LEASE, PLACED_GRACE) + 5


def on_lead(
    world: World, act: Callable[[Lone], Awaitable[None]], machine: Machine | None = None
) -> None:
    """The clock jumps to what is waited for, that of leases too."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await act(Lone(world, nursery, machine or Machine()))
            nursery.cancel_scope.cancel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leading, "now", trio.current_time)
        run_jumping(main)


def daemons(world: World, *acts: Callable[[Lone], Awaitable[None]], boots: bool = False) -> None:
    """One after the other, each of which finds what the one before left."""
    machine = Machine()
    for number, act in enumerate(acts):
        if number:
            world.reopen()
            if boots:
                machine = Machine()
                machine.boot = cast(Any, f"boot {number}")
        on_lead(world, act, machine)
