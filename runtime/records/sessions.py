"""The sessions of all names: where they are, and what the store has of them.

Below the state, ``home/UID/agent/NAME/SESSION/`` is made with the first file in it, and
``events.jsonl`` in it when the session has more than 2 KiB of events. The disk account counts the
events that the store holds, and a fixed amount for each session.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from runtime.errors import NoSpaceError
from runtime.ids import NO_SESSION, AgentIndex, SessionIndex
from runtime.kernel.trash import Trash
from runtime.records.fleet import path_of, plain
from runtime.records.model import Agent, Session
from runtime.records.registry import Registry
from runtime.records.spaces import tree_of_worktree
from runtime.records.store import Pending, Store
from runtime.texts.names import free_number


class Sessions:
    """Sessions by number, and by owner, agent's name and session's name."""

    def __init__(self, *, store: Store, registry: Registry, trash: Trash, state: Path) -> None:
        self._store = store
        self._registry = registry
        self._trash = trash
        self._state = state
        #: is told of the directories that are made for an owner
        self.made: Callable[[int], None] = lambda owner: None
        #: sessions of agents that have not been removed
        self._loaded: dict[SessionIndex, Session] = {}

    # looking up

    def get(self, index: SessionIndex) -> Session | None:
        session = self._loaded.get(index)
        if session is None:
            session = self.find(index)
            if session is not None and self._registry.get(session.agent_index) is not None:
                self._loaded[index] = session
        return session

    def load(self, index: SessionIndex) -> Session:
        """One that must be there; ``LookupError``."""
        session = self.get(index)
        if session is None:
            raise LookupError(f"session {index} is not in the store")
        return session

    def name_of(self, agent: Agent) -> str:
        """The name of an agent's current session; empty if it was removed."""
        session = self.get(agent.session)
        return session.name if session is not None else ""

    def find(self, index: SessionIndex) -> Session | None:
        values = self._store.value(json.loads, "SELECT data FROM sessions WHERE idx=?", index)
        return Session.load(index, values) if values else None

    def of(self, owner: int, agent: str) -> list[tuple[str, SessionIndex]]:
        """(name, number) of all sessions of a name."""
        return self._store.execute(
            "SELECT name, idx FROM sessions WHERE owner=? AND agent=? ORDER BY idx", owner, agent
        ).fetchall()

    def named(self, owner: int, agent: str, name: str) -> SessionIndex | None:
        """The number of one of them: there may be a great many."""
        question = "SELECT idx FROM sessions WHERE owner=? AND agent=? AND name=?"
        return self._store.value(SessionIndex, question, owner, agent, name)

    def first(self, owner: int, agent: str) -> SessionIndex | None:
        """The number of the oldest."""
        question = "SELECT MIN(idx) FROM sessions WHERE owner=? AND agent=?"
        return self._store.value(SessionIndex, question, owner, agent)

    def any(self, owner: int, agent: str) -> bool:
        """Whether a name has sessions. Asks for no oldest, which would have to be searched among
        thousands of lives."""
        question = "SELECT 1 FROM sessions WHERE owner=? AND agent=? LIMIT 1"
        return self._store.value(bool, question, owner, agent) is not None

    def agents(self, owner: int) -> list[str]:
        """The names that have sessions of an owner's."""
        question = "SELECT DISTINCT agent FROM sessions WHERE owner=? ORDER BY agent"
        return [name for (name,) in self._store.execute(question, owner)]

    def owners(self) -> list[int]:
        question = "SELECT DISTINCT owner FROM sessions ORDER BY owner"
        return [owner for (owner,) in self._store.execute(question)]

    def channels(self, session: SessionIndex) -> list[tuple[str, AgentIndex]]:
        """(name, number of the child) of what a session gave to children, below its
        ``context/child``."""
        return self._store.execute(
            "SELECT channel, idx FROM agents WHERE parent_session=? ORDER BY idx", session
        ).fetchall()

    def find_channel(self, session: SessionIndex, channel: str) -> AgentIndex | None:
        question = "SELECT idx FROM agents WHERE parent_session=? AND channel=?"
        return self._store.value(AgentIndex, question, session, channel)

    # where they are

    def path(self, session: Session) -> str:
        """Relative to the state directory."""
        return f"home/{session.owner}/agent/{session.agent}/{session.name}"

    def directory(self, session: Session) -> Path:
        """It is there once something of the session is written to a file."""
        return self._state / self.path(session)

    def ensure(self, session: Session) -> Path:
        """Its directory, made with what is in it: for what is about to be written;
        ``NoSpaceError``."""
        directory = self.directory(session)
        if ensure_directory(directory / "context" / "episode", session.created, mode=0o700):
            self.made(session.owner)
        return directory

    # the durable homes, which are part of a name's history

    def homes(self, owner: int, agent: str) -> Path:
        """All durable homes that an owner's agents of one name have."""
        return self._state / f"tree/agent/{owner}/{agent}"

    def home(self, agent: Agent) -> str:
        """The one of an agent, relative to the directory of all durable trees.

        It is that of the name, the uid, and the family: an agent may make children of any name,
        and what it has one of them leave there must not wait for an operator's agent of that
        name, nor for another's child.
        """
        family: list[str] = []
        index = agent.parent
        while index is not None and (above := self._registry.recall(index)) is not None:
            family.insert(0, above.name)
            index = above.parent
        digest = hashlib.sha256("/".join(family).encode()).hexdigest()[:32]
        name = f"{agent.uid}-{digest}" if family else str(agent.uid)
        return f"agent/{agent.owner}/{agent.name}/{name}"

    def worktree(self, agent: Agent) -> str:
        """Where the files of an agent of another machine and their repository are, in the same way:
        of one life alone."""
        return tree_of_worktree(agent.owner, agent.name, agent.incarnation)

    def discard_homes(self, owner: int, agent: str) -> None:
        """Takes them away, with all that is in them."""
        self._trash.discard(self.homes(owner, agent), owner)

    def held(self, session: Session) -> bytes | None:
        """All of ``events.jsonl`` as long as the store holds it; None if that is a file."""
        return None if session.held is None else self.lines(session.index).encode()

    def open_events(self, session: Session) -> BinaryIO:
        """``events.jsonl``, as it is now if the store holds it; ``FileNotFoundError``."""
        held = self.held(session)
        if held is None:
            return open(self.directory(session) / "events.jsonl", "rb")
        memory = os.memfd_create("events")
        os.pwrite(memory, held, 0)
        return open(memory, "rb")

    # changing, inside a transaction that the caller has begun

    def make(self, agent: Agent, wanted: str = "") -> SessionIndex:
        """A new session of an agent, named as wanted or by default; returns its number."""
        name = wanted or "default"
        if self.named(agent.owner, agent.name, name) is not None:
            name = self._free(agent.owner, agent.name)
        now = time.time()
        session = Session(
            index=NO_SESSION,
            owner=agent.owner,
            agent=agent.name,
            name=name,
            agent_index=agent.index,
            created=now,
            updated=now,
            held=0,
        )
        # left over only where an earlier daemon made it and did not come to the commit
        self._trash.discard(self.directory(session), session.owner)
        if not self.any(agent.owner, agent.name) and not agent.guest:
            # of a history that was removed, or given to another owner
            self.discard_homes(agent.owner, agent.name)
        session.index = self._store.insert_session(session)
        self._loaded[session.index] = session
        return session.index

    def _free(self, owner: int, agent: str) -> str:
        """A free name ``default.NUMBER``; 1 stands for the first, which has no number."""
        number = free_number(
            lambda n: n == 1 or self.named(owner, agent, f"default.{n}") is not None
        )
        return f"default.{number}"

    def retire_channel(self, session: SessionIndex | None, channel: str) -> None:
        """The channel of an earlier child of this name becomes NAME~1, NAME~2, …"""
        if session is None:
            return
        earlier = self.find_channel(session, channel)
        # As this transaction has it: memory follows when it is committed.
        old = self._store.find_agent(earlier) if earlier is not None else None
        if old is None:
            return
        number = free_number(
            lambda n: self.find_channel(session, f"{channel}~{n}") is not None
        )
        # Only a removed agent leaves its name, so no record in memory changes with it.
        self._store.put_agent(old.index, {**old.dump(), "channel": f"{channel}~{number}"})

    def erase(self, session: Session) -> None:
        """Deletes its row, and releases the name after the last session of it."""
        if held := self.release(session.index).removesuffix("\n"):
            # the disk may not have them in the log yet
            self._store.post(Pending(self._store.number(1), path_of(session.owner), held))
        self.delete(session.index)
        if (
            self._store.name_owner(session.agent) == session.owner
            and not self.any(session.owner, session.agent)
        ):
            self._store.release_name(session.agent)

    def delete(self, index: SessionIndex) -> None:
        self._store.execute("DELETE FROM sessions WHERE idx=?", index)
        self._store.execute("DELETE FROM held WHERE session=?", index)

    def hold(self, index: SessionIndex, lines: str) -> None:
        """More events of a session that has no file of them."""
        self._store.execute(
            "INSERT INTO held VALUES (?,?) "
            "ON CONFLICT (session) DO UPDATE SET lines=lines || excluded.lines",
            index,
            lines,
        )

    def lines(self, index: SessionIndex) -> str:
        """The events of a session that has no file of them."""
        return plain(self._held(index))

    def _held(self, index: SessionIndex) -> str:
        return self._store.value(str, "SELECT lines FROM held WHERE session=?", index) or ""

    def release(self, index: SessionIndex) -> str:
        """They are held no longer; returns them as they were held."""
        lines = self._held(index)
        self._store.execute("DELETE FROM held WHERE session=?", index)
        return lines

    def forget(self, index: SessionIndex) -> None:
        """Not in memory any more."""
        self._loaded.pop(index, None)


def ensure_directory(path: Path, created: float, *, mode: int = 0o755) -> bool:
    """Whether it had to be made, with what is above it; ``NoSpaceError`` on a full disk.

    It was shown as empty before, and as changed when it was created: so it still is. Where this
    fails half-way, what was made is empty, and is used the next time.
    """
    if path.is_dir():
        return False
    try:
        path.mkdir(parents=True, exist_ok=True, mode=mode)
        when = int(created * 1e9)
        os.utime(path, ns=(when, when))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NoSpaceError("the disk under the daemon's state is full") from None
    return True
