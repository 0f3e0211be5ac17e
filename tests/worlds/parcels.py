"""A lead and a host whose agents have files, over a connection that can be cut at any byte."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast
from unittest import mock

import trio

from runtime.cell.cell import Places
from runtime.kernel.handover import Descriptors
from runtime.kernel.inotify import Watcher
from runtime.peers.lease import Grants, Lease
from runtime.peers.parcels import Parcels
from runtime.peers.peering import Bytes, Grown, Hello, Host, Lead, Peering, Want
from runtime.peers.post import Post
from runtime.peers.returns import Returns
from runtime.peers.supplies import Supplies
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from tests.worlds.hosts import host_with
from tests.worlds.jumping import run_jumping
from tests.worlds.records import ROOT, World

#: the keys of the registration at either side
AT_LEAD: Final = "n1"
AT_HOST: Final = "l1"


class Side:
    """A daemon that may begin again."""

    def __init__(self, path: Path, make: type[Parcels], key: str, **settings: Any) -> None:
        self.path = path
        self.key = key
        self._make = make
        self.world = World(path, **settings)
        self._scope = trio.CancelScope()
        self._gone = trio.Event()
        #: of whom all came
        self.done: list[str] = []
        self.peering: Peering | None = None

    async def live(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """A daemon, from its start to its end."""
        self._gone = trio.Event()
        with closing(Watcher()) as watcher, trio.CancelScope() as self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watcher.run)
                self.begin(nursery, watcher)
                task_status.started()
        self._gone.set()

    def begin(self, nursery: trio.Nursery, watcher: Watcher) -> None:
        self.post = Post(self.world.store)
        places = Places(mount=Path("/ctx"), state=self.world.state, runtime=self.path / "run")
        host = host_with(
            agents=self.world.agents, watcher=watcher, places=places, nursery=nursery
        )
        self.parcels: Any = self._make(host, self.post)
        self.parcels.done = lambda agent: self.done.append(agent.name)

    async def end(self) -> None:
        self._scope.cancel()
        await self._gone.wait()

    def agent(self, name: str) -> Agent:
        found = self.world.agents.registry.named(name)
        assert found is not None
        return found

    def directory(self, name: str) -> Path:
        return self.world.agents.documents.directory(self.agent(name))

    def hear(self, event: Any) -> None:
        if isinstance(event, Want | Bytes | Grown):
            assert self.peering is not None
            self.parcels.hear(self.key, self.peering, event)


class Two:
    """Both sides, with agents that run at the host."""

    def __init__(self, path: Path, *, host: Any = None, **settings: Any) -> None:
        (path / "lead").mkdir()
        (path / "host").mkdir()
        self.lead = Side(path / "lead", Returns, AT_LEAD, **settings)
        self.host = Side(path / "host", Supplies, AT_HOST, **(host or {}))
        self.ends: tuple[Lead, Host] | None = None
        self.nursery: trio.Nursery
        #: bytes that still go over the connection; and that went
        self.most: int | None = None
        self.went = 0
        #: of one piece
        self.step = 1 << 16

    def add(self, name: str) -> None:
        """An agent that is placed."""
        lead = self.lead.world.agents.births.create(ROOT, name)
        same = SimpleNamespace(token_hex=lambda size: lead.incarnation)
        with mock.patch("runtime.agents.births.secrets", same):
            host = self.host.world.agents.births.create(ROOT, name)
        self.lead.world.agents.journal.update(
            lead, peer=AT_LEAD, node="n2", status=Status.BUSY
        )
        self.host.world.agents.journal.update(host, peer=AT_HOST, status=Status.BUSY)

    @property
    def returns(self) -> Returns:
        return cast(Returns, self.lead.parcels)

    @property
    def supplies(self) -> Supplies:
        return cast(Supplies, self.host.parcels)

    # lives

    async def restart(self, side: Side) -> None:
        """Another daemon goes on with what is on the disk, and whoever leads the agents says
        again what it knows of them."""
        self.cut()
        await side.end()
        side.world.reopen()
        side.done.clear()
        await self.nursery.start(side.live)
        self.connect()

    # the connection

    def connect(self) -> None:
        self.cut()
        grants = Grants(30.0, 5.0, 0.0)
        said = {"name": "one", "as": "r1", "owner": "root", "ttl": 30.0, "grace": 5.0}
        lead, host = Lead(said, self.lead.post.stream(AT_LEAD), grants), Host()
        self.ends = lead, host
        self.lead.peering, self.host.peering = lead, host

    def cut(self) -> None:
        if self.ends is not None:
            for side, end in zip((self.lead, self.host), self.ends, strict=True):
                side.parcels.closed(side.key, end)
                side.peering = None
        self.ends = None

    def _pass(self) -> bool:
        """Lets both say something; whether anybody did."""
        if self.ends is None:
            return False
        lead, host = self.ends
        passed = False
        for end, other, side in ((lead, host, self.host), (host, lead, self.lead)):
            data = end.outgoing()
            passed |= bool(data)
            if self.most is not None:
                data = data[: self.most - self.went]
            self.went += len(data)
            for at in range(0, len(data), self.step):
                for event in other.feed(data[at : at + self.step], 100.0):
                    if isinstance(event, Hello):
                        self._greet(event, other)
                    side.hear(event)
            if self.most is not None and self.went >= self.most:
                self.cut()
                return True
        return passed

    def _greet(self, hello: Hello, at: Peering) -> None:
        if isinstance(at, Host):
            at.go_on({"as": "r1"}, self.host.post.stream(AT_HOST), Lease(30.0, 0), hello)
            self.host.parcels.opened(AT_HOST, at)
        elif isinstance(at, Lead):
            at.go_on(hello)
            self.lead.parcels.opened(AT_LEAD, at)

    async def run(self, is_so: Callable[[], bool], *, rounds: int = 100_000) -> None:
        """Exchanges until something is so."""
        idle = 0
        for _ in range(rounds):
            if is_so():
                return
            idle = 0 if self._pass() else idle + 1
            await (trio.sleep(0.01) if idle else trio.lowlevel.checkpoint())
            assert idle < 1000, "nothing happens any more"
        raise AssertionError("it does not end")

    async def hand_over(self) -> None:
        """Each daemon executes itself again, with the connection."""
        assert self.ends is not None
        lead, host = self.ends
        said: Any = {"name": "one", "as": "r1"}
        new_lead, new_host = Lead(said, self.lead.post.stream(AT_LEAD), Grants(30, 5, 0)), Host()
        for old, new in ((lead, new_lead), (host, new_host)):
            saved = old.save(Descriptors())
            new._control.clear()
            new._greeted = False
            new.restore(saved)
        self.cut()
        for side in (self.lead, self.host):
            await side.end()
            side.world.reopen()
            side.done.clear()
            await self.nursery.start(side.live)
        new_lead._stream = self.lead.post.stream(AT_LEAD)
        new_host.taken_over(self.host.post.stream(AT_HOST), Lease(30.0, 0))
        self.ends = new_lead, new_host
        self.lead.peering, self.host.peering = self.ends
        self.lead.parcels.opened(AT_LEAD, new_lead)
        self.host.parcels.opened(AT_HOST, new_host)

    # what a guest does

    def write(self, name: str, file: str, data: bytes, *, start: int = 0) -> None:
        """A guest has this file, below its documents."""
        agent = self.host.agent(name)
        self.host.world.agents.documents.ensure(agent)
        path = self.host.world.agents.documents.path(agent, file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def write_session(self, name: str, file: str, data: bytes) -> None:
        """A file of the session of a guest."""
        sessions = self.host.world.agents.sessions
        session = sessions.load(self.host.agent(name).session)
        (sessions.ensure(session) / file).write_bytes(data)

    def say(self, name: str, file: str, data: bytes) -> None:
        """A guest prints something."""
        directory = self.host.directory(name) / file
        directory.mkdir(parents=True, exist_ok=True)
        segments = sorted(directory.iterdir())
        path = segments[-1] if segments else directory / f"{0:020d}"
        with open(path, "ab") as there:
            there.write(data)

    def drop(self, name: str, file: str) -> int:
        """A guest's monitor begins a segment, and drops all before it; the number of its first
        byte."""
        directory = self.host.directory(name) / file
        segments = sorted(directory.iterdir())
        start = int(segments[-1].name) + segments[-1].stat().st_size
        for path in segments:
            path.unlink()
        (directory / f"{start:020d}").touch()
        return start

    async def end(self, *names: str) -> None:
        """The lead hears of the ends of agents."""
        for name in names:
            guest = self.host.agent(name)
            said = {**self.supplies.lengths(guest), "files": await self.supplies.files_of(guest)}
            self.returns.ended(self.lead.agent(name), said)

    def is_complete(self, *names: str) -> bool:
        return all(self.returns.is_complete(self.lead.agent(name)) for name in names)


def in_two(two: Two, act: Callable[[Two], Awaitable[None]]) -> None:
    """Runs something while both daemons live; time passes when nothing else happens."""

    async def main() -> None:
        async with trio.open_nursery() as two.nursery:
            await two.nursery.start(two.lead.live)
            await two.nursery.start(two.host.live)
            two.connect()
            await act(two)
            two.nursery.cancel_scope.cancel()

    try:
        run_jumping(main, 0.002)
    finally:
        two.lead.world.close()
        two.host.world.close()


def tree(root: Path) -> dict[str, bytes]:
    """The files below a directory."""
    found = {}
    for above, _, names in os.walk(os.fsencode(root)):
        for name in names:
            path = os.path.join(above, name)
            with open(path, "rb") as file:
                found[os.fsdecode(os.path.relpath(path, os.fsencode(root)))] = file.read()
    return found
