"""The filesystem as the kernel would call it, without a kernel: real rows, a machine in memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyfuse3
import pytest
import trio

from ctxfs.errnos import name_of
from ctxfs.filesystem import ROOT_INODE, Filesystem
from ctxfs.operations import Operations
from runtime.authority.identity import Identity
from runtime.authority.loop import Gentle, LoopMeter
from runtime.caller import Caller
from runtime.cell.cell import native
from runtime.cell.treework import Trees
from runtime.errors import WrongStateError
from runtime.ids import RunId
from runtime.life.streams import Streams
from runtime.life.supervisor import Supervisor
from runtime.peers.hosting import Hosting
from runtime.peers.post import Post
from runtime.peers.registrations import Registrations
from runtime.records.items import Task
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.records.run import Run, RunStatus
from runtime.records.visits import Visit
from runtime.runtime import Runtime
from runtime.sockets.replay import Replays
from runtime.sockets.request import Services
from runtime.sockets.server import Sockets
from tests.worlds.memory import EveryPath, Machine, MemoryFacts, places_in, supervisor_on
from tests.worlds.natives import Children
from tests.worlds.records import ROOT, World, operator, world_in

CONTEXT = pyfuse3.RequestContext()
#: the same of whoever runs the tests, to whom real files can be given
OWN_CONTEXT = cast(
    pyfuse3.RequestContext,
    SimpleNamespace(uid=os.getuid(), gid=os.getgid(), pid=0, umask=0),
)


class FixedIdentity(Identity):
    """Takes every caller for the one that the test says."""

    caller: Caller = ROOT

    def resolve(self, uid: int, gid: int, pid: int) -> Caller:
        return self.caller


class Noted(Supervisor):
    """Remembers the verbs that it was told."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.said: list[tuple[str, str]] = []

    def start(self, agent: Agent, visit: Visit | None = None) -> None:
        super().start(agent, visit)
        self.said.append(("start", agent.name))

    def stop(self, agent: Agent, *, kill: bool) -> None:
        super().stop(agent, kill=kill)
        reason = self._agents.journal.stop_reason(agent)
        self.said.append(("kill" if kill else reason, agent.name))

    def fetch(self, task: Task) -> None:
        self.said.append(("fetch", task.name))


class _Nobody:
    """Stands for a nursery: what an operation begins goes on after the test."""

    def start_soon(self, *_: object) -> None:
        """It never does."""


class Waiter:
    """Stands for pyfuse3's handle of a process in poll(2)."""

    def __init__(self) -> None:
        self.notified = 0

    def notify(self) -> None:
        self.notified += 1


def complete(operation: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    return trio.run(operation, *args)


@contextmanager
def refused(name: str) -> Iterator[None]:
    """The operation fails with this errno."""
    with pytest.raises(pyfuse3.FUSEError) as caught:
        yield
    assert errno.errorcode[caught.value.errno] == name


class Mounted:
    """Paths and descriptors over ``Operations``. Without a nursery nothing goes on by itself."""

    def __init__(
        self, world: World, nursery: trio.Nursery | None = None, machine: Machine | None = None
    ) -> None:
        self.world = world
        self.identity = FixedIdentity(
            registry=world.agents.registry,
            authority=world.agents.authority,
            hierarchy=cast(Any, world.hierarchy),
            privilege=world.agents.privilege,
        )
        world.agents.identity = self.identity
        self.agents = world.agents
        self.machine = machine or Machine()
        beside = nursery or cast(trio.Nursery, _Nobody())
        self.supervisor = cast(Noted, supervisor_on(self.machine, world, beside, Noted))
        places = places_in(world)
        runtime = SimpleNamespace(
            agents=world.agents,
            config=world.config,
            accounts=world.agents.accounts,
            binder=SimpleNamespace(pid=-1),
            places=places,
            trees=Trees(
                places, native("tree"), Children(), world.agents.spaces, world.agents.disk.look
            ),
            supervisor=self.supervisor,
            links=SimpleNamespace(counted=dict),
            looker=EveryPath(),
            hierarchy=SimpleNamespace(root=SimpleNamespace(path=Path("/cg")), mount=Path("/cg")),
            loop=LoopMeter(),
            status=lambda: {
                **{"version": "0", "state": "ready", "uptime": "1", "controllers": ""},
                **{"cgroup": "/cg", "mount": "/ctx", "limits": "depth=8,grace=5s"},
            },
        )
        self.fs = Filesystem(cast(Runtime, runtime))
        self.base = self.fs.base
        self.ops = Operations(self.fs)

    def unmount(self) -> None:
        """The kernel forgets all that it knew."""
        for inode, count in list(self.base.cache._known.items()):
            complete(self.ops.forget, [(inode, count)])

    @contextmanager
    def as_(self, caller: Caller) -> Iterator[None]:
        before, self.identity.caller = self.identity.caller, caller
        try:
            yield
        finally:
            self.identity.caller = before

    def live(self, agent: Agent, status: Status = Status.BUSY, run: str = "") -> Agent:
        """One that runs on the machine."""
        self.world.live(agent, status)
        if run:
            self.agents.journal.update(agent, run=Run(id=RunId(run), status=RunStatus.RUNNING))
        self.machine.born(self.supervisor._make_live_cell(agent))
        return agent

    def run_task(self, agent: Agent, name: str) -> MemoryFacts:
        """A command that runs on the machine beside an agent; what is known of it."""
        execution = self.supervisor._live_cells[agent.index].command(name)
        self.machine.born(execution)
        return self.machine.facts(execution.facts.key)

    def make(self, name: str, caller: Caller = ROOT) -> Agent:
        with self.as_(caller):
            complete(self.ops.mkdir, self.inode("agent"), f"{name}.d".encode(), 0o755, CONTEXT)
        return self.agent(name)

    def agent(self, name: str) -> Agent:
        agent = self.agents.registry.named(name)
        assert agent is not None, f"no agent {name}"
        return agent

    def inode(self, path: str) -> int:
        inode = ROOT_INODE
        for part in filter(None, path.split("/")):
            inode = complete(self.ops.lookup, inode, os.fsencode(part), CONTEXT).st_ino
        return inode

    def stat(self, path: str) -> pyfuse3.EntryAttributes:
        found: pyfuse3.EntryAttributes = complete(self.ops.getattr, self.inode(path), CONTEXT)
        return found

    def open(self, path: str, flags: int = os.O_RDONLY) -> int:
        return int(complete(self.ops.open, self.inode(path), flags, CONTEXT).fh)

    def read(self, fh: int, offset: int = 0, size: int = 1 << 20) -> bytes:
        return cast(bytes, complete(self.ops.read, fh, offset, size))

    def write(self, fh: int, data: bytes, offset: int = 0) -> int:
        return cast(int, complete(self.ops.write, fh, offset, data))

    def flush(self, fh: int) -> None:
        complete(self.ops.flush, fh)

    def close(self, fh: int) -> None:
        try:
            self.flush(fh)
        finally:
            complete(self.ops.release, fh)

    def get(self, path: str) -> str:
        """What ``cat`` prints."""
        fh, text = self.open(path), b""
        try:
            while part := self.read(fh, len(text)):
                text += part
            return text.decode()
        finally:
            self.close(fh)

    def put(self, path: str, text: str | bytes, flags: int = os.O_TRUNC) -> None:
        """What ``printf TEXT > PATH`` does, or ``>>`` with O_APPEND."""
        data = text if isinstance(text, bytes) else text.encode()
        fh = self.open(path, os.O_WRONLY | flags)
        try:
            self.write(fh, data)
        finally:
            self.close(fh)

    def list(self, path: str) -> list[str]:
        fh = complete(self.ops.opendir, self.inode(path), CONTEXT)
        names = self.ops.opened.listings[fh].names
        complete(self.ops.releasedir, fh)
        return names

    @property
    def reason(self) -> str:
        """The last rejection of the present caller."""
        return self.base.reasons.of_caller(self.identity.caller)


async def _nothing(*_: object) -> None:
    pass


async def _refuse(*_: object) -> Any:
    raise WrongStateError("ctxd is starting")


def sockets_of(mounted: Mounted, nursery: trio.Nursery, **given: Any) -> Sockets:
    """All sockets of a daemon, which say no more than what is given."""
    agents = mounted.agents
    services = Services(
        agents=agents,
        streams=Streams(Gentle(agents.accounts.time)),
        windows=mounted.supervisor.windows,
        replays=Replays(agents.sessions),
        links=cast(
            Any,
            SimpleNamespace(of=lambda _: [], opened=_refuse, setting=dict, forget=_nothing),
        ),
        hosting=Hosting(
            agents,
            Registrations(mounted.base.runtime.places.state),
            Post(agents.store),
            cast(Any, None),
        ),
        refusals=mounted.base.reasons.recent,
        reexecute=_refuse,
        complaints=_refuse,
        version="0",
        **{"status": dict, "call_tool": _refuse, "say": _refuse, **given},
    )
    return Sockets(
        services,
        places=mounted.base.runtime.places,
        binder=cast(Any, None),
        nursery=nursery,
        code=name_of,
        refused=mounted.base.reasons.note,
    )


@contextmanager
def mounted_in(path: Path, **settings: Any) -> Iterator[Mounted]:
    with world_in(path, **settings) as world:
        made = Mounted(world)
        yield made
        made.unmount()


USER = operator(1000)
STRANGER = operator(4242)
