"""What the runtime's core is built on in these tests: a real store, no cgroups."""

from __future__ import annotations

import functools
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

from runtime.agents.parts import Agents
from runtime.agents.planes import Plane
from runtime.authority.guard import Act
from runtime.caller import Caller
from runtime.cell.cell import native
from runtime.ids import AgentIndex, SessionIndex
from runtime.kernel.cgroups import Hierarchy
from runtime.kernel.privilege import ROOT as ROOT_PRIVILEGE
from runtime.kernel.privilege import Privilege
from runtime.kernel.waitfiles import WaitFiles
from runtime.records.change import Change, Subscriber
from runtime.records.config import Config
from runtime.records.lifecycle import Cue, Status
from runtime.records.model import Agent, Outcome
from runtime.records.run import Cell
from runtime.records.spaces import Spaces
from runtime.records.store import Store

ROOT = Caller(0, 0, 0)


def operator(uid: int) -> Caller:
    return Caller(uid, uid, 0)


def inside(agent: Agent) -> Caller:
    """A process of the agent."""
    return Caller(agent.uid, agent.gid, 0, agent.index, agent.incarnation)


def rmdir(plane: Plane[Any], caller: Caller, agent: Agent, name: str) -> None:
    """Has a record removed if the guard of its kind allows it, as rmdir(2) does."""
    facts, item = plane._facts, plane.find(agent, name)
    plane._kind.removing.check(Act.REMOVE, name, facts, caller, agent, item)
    plane.remove(agent, item)


class FakeHierarchy:
    """Says of every process that it is ``below``, a path below the daemon's root."""

    def __init__(self) -> None:
        self.below: str | None = None

    def agent_path(self, path: str) -> str | None:
        return self.below

    def is_own(self, path: str) -> bool:
        return self.below is not None


class Told(Subscriber):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.agents: list[tuple[AgentIndex, set[str]]] = []
        self.sessions: list[tuple[SessionIndex, set[str]]] = []
        self.listed: list[str] = []

    def agent_changed(self, index: AgentIndex, names: Iterable[str]) -> None:
        self.agents.append((index, set(names)))

    def session_changed(self, index: SessionIndex, names: Iterable[str]) -> None:
        self.sessions.append((index, set(names)))

    def agent_listed(self, agent: Agent) -> None:
        self.listed.append(agent.name)


def add_end(
    agents: Agents, change: Change, agent: Agent, outcome: Outcome, reason: str = "why"
) -> None:
    """The end of an agent, whatever it is: by a verb if it is new, else as if it was lost."""
    cue = Cue.STOP if agent.status is Status.NEW else Cue.LOST
    agents.ends.record(change, agent, cue, outcome, reason)


def cancel_new(agents: Agents, agent: Agent, reason: str = "operator_stop") -> None:
    change = Change()
    agents.ends.record(change, agent, Cue.STOP, Outcome.CANCELLED, reason)
    agents.journal.note(change)


@functools.cache
def _new_store() -> bytes:
    """The file of a store that has nothing: making one takes ten times as long as copying it."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "ctxfs.db")
        Store(path).close()
        return path.read_bytes()


def store_in(state: Path) -> Store:
    """That of a state, new if there is none."""
    path = state / "ctxfs.db"
    if not path.exists():
        path.write_bytes(_new_store())
    store = Store(path)
    store._db.execute("PRAGMA synchronous=OFF")  # no test loses power
    return store


class World:
    """Agents over a store in a directory; ``reopen`` is what a new daemon sees."""

    def __init__(
        self, path: Path, *, privilege: Privilege = ROOT_PRIVILEGE, **settings: Any
    ) -> None:
        self.path = path
        self.privilege = privilege
        self.state = path / "state"
        for directory in (
            *(self.state / name for name in ("home", "trash", "tree/home")),
            path / "wait",
            path / "released",
            path / "room",
        ):
            directory.mkdir(parents=True, exist_ok=True)
        self.config = Config(**settings)
        self.hierarchy = FakeHierarchy()
        self.wait_files = WaitFiles(path / "wait", path / "released", native("release"))
        self.store = store_in(self.state)
        self.agents = self._load()
        self.told = Told()
        self.agents.journal.subscribe(self.told)

    def _load(self) -> Agents:
        return Agents(
            spaces=Spaces(self.store),
            config=self.config,
            store=self.store,
            hierarchy=cast(Hierarchy, self.hierarchy),
            wait_files=self.wait_files,
            state=self.state,
            rooms=self.path / "room",
            mount=Path("/ctx"),
            privilege=self.privilege,
        )

    def reopen(self) -> Agents:
        """As after a crash: nothing in memory is kept."""
        self.close()
        self.store = store_in(self.state)
        self.agents = self._load()
        return self.agents

    def close(self) -> None:
        """What is open, as when a daemon dies."""
        self.agents.fleet.close()
        self.store.close()

    def live(self, agent: Agent, status: Status = Status.BUSY) -> Agent:
        cell = Cell(cgroup=self.agents.registry.node_path(agent))
        self.agents.documents.ensure(agent)
        self.agents.journal.update(agent, status=status, cell=cell)
        return agent

    def may_create(self, agent: Agent) -> Agent:
        """A live agent whose policy lets it make agents; a child's does not by default."""
        text = f"allow {agent.label} agent:* create\n"
        self.agents.journal.update(agent, policy=agent.policy + text)
        return agent

    def lines(self, agent: Agent, file: str = "events.jsonl") -> list[str]:
        session = self.agents.sessions.get(agent.session)
        assert session is not None
        if file == "events.jsonl":
            with self.agents.sessions.open_events(session) as events:
                return events.read().decode().splitlines()
        path = self.agents.sessions.directory(session) / file
        return path.read_text().splitlines() if path.exists() else []


@contextmanager
def full(store: Store) -> Iterator[None]:
    """Meanwhile the disk has no room for anything."""
    real = store._db

    def execute(statement: str, values: Any = ()) -> sqlite3.Cursor:
        if statement.split()[0] in ("INSERT", "UPDATE", "DELETE", "COMMIT"):
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return real.execute(statement, values)

    with mock.patch.object(store, "_db", mock.Mock(wraps=real, execute=execute)) as db:
        type(db).in_transaction = property(lambda _: real.in_transaction)
        type(db).total_changes = property(lambda _: real.total_changes)
        yield


@contextmanager
def world_in(
    path: Path, *, privilege: Privilege = ROOT_PRIVILEGE, **settings: Any
) -> Iterator[World]:
    made = World(path, privilege=privilege, **settings)
    try:
        yield made
    finally:
        made.close()
