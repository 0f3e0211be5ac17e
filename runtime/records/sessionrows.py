"""The rows of sessions, and of what they gave to children."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from runtime.ids import AgentIndex, SessionIndex
from runtime.records.model import Session
from runtime.records.store import Store
from runtime.texts.names import dump_json

#: fields that have columns of their own, and change
_COLUMNS: Final = frozenset({"owner", "removed"})


class SessionRows:
    """Questions to the store, and what is changed inside a transaction."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def insert(self, session: Session) -> SessionIndex:
        columns = {"agent": session.agent, "name": session.name, **_columns_of(session, _COLUMNS)}
        return SessionIndex(self._store.insert("sessions", **columns))

    def put(self, session: Session, changed: Iterable[str] = _COLUMNS) -> None:
        """Writes a session; if only fields without a column ``changed``, nothing but the row
        itself."""
        self._store.put("sessions", session.index, **_columns_of(session, changed))

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
        return self._store.value(str, "SELECT lines FROM held WHERE session=?", index) or ""

    def release(self, index: SessionIndex) -> str:
        """They are held no longer."""
        lines = self.lines(index)
        self._store.execute("DELETE FROM held WHERE session=?", index)
        return lines

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


def _columns_of(session: Session, changed: Iterable[str]) -> dict[str, Any]:
    columns = () if _COLUMNS.isdisjoint(changed) else _COLUMNS
    values = {name: getattr(session, name) for name in columns}
    return {**values, "data": dump_json(session.record())}
