"""The tables of the store, and how a state that an older version wrote gets them.

The number of steps is the version of the state (``runtime.records.stored`` says what needs one).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, Protocol

from runtime.ids import ItemIndex
from runtime.records.run import gathered
from runtime.texts.names import dump_json

_AGENTS: Final = """
CREATE TABLE agents (
    idx INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,
    parent_session INTEGER,
    channel TEXT NOT NULL,
    removed INTEGER NOT NULL,
    data TEXT NOT NULL
);
CREATE INDEX agents_channel ON agents (parent_session, channel);
CREATE INDEX agents_removed ON agents (removed);
CREATE TABLE sessions (
    idx INTEGER PRIMARY KEY AUTOINCREMENT,
    owner INTEGER NOT NULL,
    agent TEXT NOT NULL,
    name TEXT NOT NULL,
    removed INTEGER NOT NULL,
    data TEXT NOT NULL,
    UNIQUE (owner, agent, name)
);
CREATE TABLE names (name TEXT PRIMARY KEY, owner INTEGER NOT NULL, runs INTEGER NOT NULL);
CREATE TABLE outbox (seq INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT NOT NULL, line TEXT NOT NULL);
"""
_ITEMS: Final = """
CREATE TABLE items (
    idx INTEGER PRIMARY KEY AUTOINCREMENT,
    agent INTEGER NOT NULL,
    kind TEXT NOT NULL,
    data TEXT NOT NULL
);
CREATE INDEX items_agent ON items (agent);
"""
#: texts of items that are long, and not in their data
_TEXTS: Final = """
CREATE TABLE texts (
    item INTEGER NOT NULL,
    field TEXT NOT NULL,
    text TEXT NOT NULL,
    PRIMARY KEY (item, field)
);
"""
#: the events of sessions that have no file of them yet: whole lines
_HELD: Final = """
CREATE TABLE held (session INTEGER PRIMARY KEY, lines TEXT NOT NULL);
"""
#: what calls with an id answered, by who made them; an empty answer is of one that has begun
_ANSWERS: Final = """
CREATE TABLE answers (
    idx INTEGER PRIMARY KEY AUTOINCREMENT,
    caller TEXT NOT NULL,
    id TEXT NOT NULL,
    call TEXT NOT NULL,
    made REAL NOT NULL,
    answer TEXT NOT NULL,
    UNIQUE (caller, id)
);
CREATE INDEX answers_made ON answers (made);
"""
#: what of ``tree/space`` is whose, and what it had when it was last measured
_SPACES: Final = """
CREATE TABLE spaces (
    idx INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    data TEXT NOT NULL
);
"""
#: the numbers of rows are those of events (``Store.number``)
_NUMBERED: Final = """
ALTER TABLE outbox RENAME TO older;
CREATE TABLE outbox (seq INTEGER PRIMARY KEY, path TEXT NOT NULL, line TEXT NOT NULL);
INSERT INTO outbox SELECT seq, path, line FROM older;
DROP TABLE older
"""
#: what this daemon and those of other machines say to each other (``runtime.peers.post``): by
#: registration, which messages are done, and those that the other side has not done
_PEERS: Final = """
CREATE TABLE peers (
    key TEXT PRIMARY KEY,
    done INTEGER NOT NULL DEFAULT 0,
    mark TEXT NOT NULL DEFAULT '',
    got INTEGER NOT NULL DEFAULT 0,
    seen TEXT NOT NULL DEFAULT '',
    data TEXT NOT NULL DEFAULT '{}'
);
CREATE TABLE posts (
    key TEXT NOT NULL,
    number INTEGER NOT NULL,
    agent TEXT NOT NULL,
    line BLOB NOT NULL,
    mark TEXT NOT NULL,
    PRIMARY KEY (key, number)
) WITHOUT ROWID;
"""


class Rows(Protocol):
    """The store, to which a step is done (``runtime.records.store``)."""

    def execute(self, statement: str, *values: Any) -> Any: ...

    def put(self, table: str, index: int, **values: Any) -> None: ...

    def put_item(self, index: ItemIndex, values: dict[str, Any]) -> None: ...


def _nothing(store: Rows) -> None:
    """Where a step makes tables, and changes no row."""


def _take_texts_out(store: Rows) -> None:
    for index, data in store.execute("SELECT idx, data FROM items").fetchall():
        store.put_item(ItemIndex(index), json.loads(data))


def _gather_runs(store: Rows) -> None:
    for index, data in store.execute("SELECT idx, data FROM agents").fetchall():
        store.put("agents", index, data=dump_json(gathered(json.loads(data))))


#: from each version to the next (``runtime.records.stored``): all of them make a new database, and
#: those that a state of an older version has not seen bring it up to date
STEPS: Final[tuple[tuple[str, Callable[[Rows], None]], ...]] = (
    (_AGENTS, _nothing),
    (_ITEMS, _nothing),
    # before, items had all their texts with them
    (_TEXTS, _take_texts_out),
    # before, every session had a file of its events, and an agent's row all its fields
    (_HELD, _nothing),
    # before, a call that was said again was made again
    (_ANSWERS, _nothing),
    # before, a space was a directory and no more
    (_SPACES, _nothing),
    # before, a run was fields of its agent
    ("", _gather_runs),
    # before, no agent asked anything: an older daemon does not know such an item
    ("", _nothing),
    # before, events were in the histories of their sessions alone
    (_NUMBERED, _nothing),
    # before, no agent was placed at another machine
    (_PEERS, _nothing),
)
#: the number of the format of the database
SCHEMA: Final = len(STEPS)
