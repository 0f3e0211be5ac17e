"""A lead that says what a test says, and the daemon of its host, as far as that runs guests."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from itertools import count
from typing import Any, Final, cast

import pytest
import trio
import trio.testing

from ctxfs.placing import Placing
from runtime.cell import leases
from runtime.cell.port import LiveCell
from runtime.peers import guests
from runtime.peers.guests import Guests
from runtime.peers.lease import Grants
from runtime.peers.peering import Acknowledged, Bytes, Hello, Host, Lead, Message, Over, Want
from runtime.peers.post import LEAD, Post, key_of
from runtime.peers.streams import Stream
from runtime.records.lifecycle import Status
from runtime.records.model import FAMILIES, Agent
from tests.worlds.daemon import TIMEOUT
from tests.worlds.jumping import run_jumping
from tests.worlds.memory import Machine, places_in
from tests.worlds.records import World
from tests.worlds.tree import Mounted

SECONDS: Final = 30.0
#: incarnations of agents of leads
A, B = "a" * 16, "b" * 16


def _now() -> float:
    return 1000 + trio.current_time()


def put(**more: Any) -> dict[str, Any]:
    """What ``put`` says, and ``config`` of it beside the program."""
    config = {
        **{"exec": "true", "life": "owned", "mode": "once", "label": "x_t", "limits": {}},
        **{"policy": "allow x_t tool:* execute\n", **more.pop("config", {})},
    }
    bound = {
        **{"policy": config["policy"], "families": list(FAMILIES), "depth": 2, "limits": {}},
        **more.pop("bound", {}),
    }
    said = {"name": "x", "session": "default", "run": 3, "supervisor": "agent:boss", "takes": True}
    return {**said, "config": config, "bound": bound, "files": {}, **more}


class Site:
    """A daemon that runs agents of leads, on a machine that outlives it."""

    def __init__(self, world: World, machine: Machine, nursery: trio.Nursery | None = None) -> None:
        self.world = world
        self.machine = machine
        for directory in (*(world.state / name for name in ("agent", "home", "trash")),
                          places_in(world).networks, places_in(world).leases):  # fmt: skip
            directory.mkdir(parents=True, exist_ok=True)
        self.mounted = Mounted(world, nursery, machine)
        self.agents = world.agents
        self.post = Post(world.store)
        self.supervisor = self.mounted.supervisor
        self.guests = Guests(self.supervisor._host, self.post, self.supervisor)
        self.guests.putting.files = Placing(self.mounted.base)
        self.agents.journal.subscribe(self.post)

    def guest(self, name: str = "x@one") -> Agent:
        return self.mounted.agent(name)

    def cell(self, agent: Agent) -> LiveCell:
        return self.supervisor._live_cells[agent.index]

    async def until(self, is_so: Callable[[], bool]) -> None:
        with trio.fail_after(100 * TIMEOUT):
            while not is_so():
                await trio.testing.wait_all_tasks_blocked()
                if not is_so():
                    await trio.sleep(1)

    async def be(self, agent: Agent, *statuses: Status) -> None:
        await self.until(lambda: agent.status in statuses)


class Leader:
    """A lead, with what its disk has; ``facts`` are those that it was told."""

    def __init__(self, uid: int, name: str = "one") -> None:
        self.uid = uid
        self.name = name
        self.known = f"known by {name}"
        self.stream = Stream()
        self.grants = Grants(SECONDS, 5.0, 0.0)
        self.facts: list[dict[str, Any]] = []
        self.overs: list[int] = []
        self.wants: list[Want] = []
        #: whether it answers who asks for a lease
        self.vouches = True

    @property
    def key(self) -> str:
        return key_of(LEAD, self.known)

    def connect(self, site: Site) -> None:
        """As ``Hosting`` does with a hello."""
        self.site = site
        self.lead = Lead({"as": self.known, "name": self.name}, self.stream, self.grants)
        self.host = Host()
        self.wants.clear()
        site.post.note(self.key, uid=self.uid, alias=self.name, seconds=SECONDS)

    def grant(self) -> None:
        """The lease is granted, whatever is said."""
        lease, now = self.site.guests.lease(self.key), _now()
        lease.ask(1, now)
        lease.granted(1, 0, now)
        self.site.guests.leased(self.key, self.host)

    async def exchange(self, now: float) -> None:
        """Until neither has anything to say."""
        while data := self.host.outgoing():
            for event in self.lead.feed(data, now):
                self._hear(event)
            await self._say(now)

    async def _say(self, now: float) -> None:
        while data := self.lead.outgoing():
            for event in self.host.feed(data, now):
                if isinstance(event, Hello):
                    stream = self.site.post.stream(self.key)
                    lease = self.site.guests.lease(self.key)
                    assert stream.fits(event.said)
                    self.host.go_on({"as": self.known}, stream, lease, event)
                    self.site.guests.opened(self.key, self.host)
                elif isinstance(event, Want | Bytes):
                    self.site.guests.supplies.hear(self.key, self.host, event)
                elif isinstance(event, Acknowledged):
                    self.site.guests.telling.heard(self.key)
                elif isinstance(event, Message | Over):
                    await self.site.guests.hear(self.key, self.uid, self.host, event)
            self.site.guests.leased(self.key, self.host)

    def _hear(self, event: Any) -> None:
        if isinstance(event, Hello):
            self.lead.go_on(event)
        elif isinstance(event, Message):
            self.stream.done(event.number, event.line)
            self.facts.append({key: event.said[key] for key in event.said if key != "n"})
        elif isinstance(event, Over):
            self.overs.append(event.upto)
        elif isinstance(event, Want):
            self.wants.append(event)

    async def give(self, texts: Mapping[tuple[str, str], bytes]) -> None:
        """The bytes that the host lacks of these files, until it wants none of them."""
        await trio.testing.wait_all_tasks_blocked()
        await self.go_on()
        while wanted := [want for want in self.wants if (want.agent, want.file) in texts]:
            for want in wanted:
                self.wants.remove(want)
                data = texts[want.agent, want.file][want.offset :][: want.credit]
                self.lead.give(want.agent, want.file, want.offset, data)
            await self.go_on()
            await trio.testing.wait_all_tasks_blocked()
            await self.go_on()

    async def say(self, op: str, agent: str = A, **said: Any) -> None:
        """An operation, and what comes back at once."""
        self.stream.record(op, agent, **said)
        await self.go_on()

    async def go_on(self) -> None:
        """Whatever there is to say is said; the host asks for its lease if it is time."""
        now = _now()
        await self._say(now)
        await self.exchange(now)
        if self.vouches:
            self.host.tick(now)
            await self.exchange(now)

    def told(self, op: str) -> list[dict[str, Any]]:
        return [fact for fact in self.facts if fact["op"] == op]

    @property
    def statuses(self) -> list[str]:
        return [fact["status"] for fact in self.told("state")]

    @property
    def refusals(self) -> list[tuple[str, str]]:
        return [(fact["code"], fact["sentence"]) for fact in self.told("refused")]


def at_site(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[Site, Leader], Awaitable[None]],
    made: Machine | None = None,
    leader: Leader | None = None,
) -> None:
    """The clock jumps to what is waited for, and is that of leases as well."""
    machine = made or Machine()

    async def main() -> None:
        monkeypatch.setattr(guests, "now", _now)
        # no two moments are the same
        more = count()
        monkeypatch.setattr(leases, "_now", lambda: int(_now() * 1e9) + next(more))
        async with trio.open_nursery() as nursery:
            site = Site(world, machine, nursery)
            lead = leader or Leader(1000)
            machine.frozen.clear()
            await site.supervisor.recover()
            site.guests.go_on()
            lead.connect(site)
            await lead.exchange(_now())
            await act(site, lead)
            nursery.cancel_scope.cancel()

    run_jumping(main)


def events(site: Site, agent: Agent) -> list[dict[str, Any]]:
    return [cast(dict[str, Any], json.loads(line)) for line in site.world.lines(agent)]
