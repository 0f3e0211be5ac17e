"""Control state in SQLite (WAL), and the outbox that makes history exact.

A change and the events that tell of it are one transaction; the events go
from the outbox to their append-only files afterwards, again after a crash,
each once (``runtime.records.history``).

After a crash the daemon compares the outbox with the end of each file and completes the file. So
every state has its event, no event appears twice, and no line is torn. fsync(2) by who may write a
file syncs the WAL.

A row leaves out every field that has its default: so the defaults are part of the state's format.
An agent that never ran has rows, about a kilobyte, and no files. The first events of a session are
in the table ``held``, and go through the outbox to the file in the transaction of the event that
needs one: a reader sees the same bytes before and after.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from runtime.errors import NoSpaceError, StartupError
from runtime.ids import AgentIndex, CallId, Incarnation, ItemIndex, SessionIndex
from runtime.records.items import KINDS, LONG_ABOVE, Item, LongText
from runtime.records.model import Agent, Session
from runtime.records.schema import STEPS
from runtime.records.stored import dump_row, shortened
from runtime.texts.names import dump_json

_RESERVE: Final = 512 << 10
#: what is written between two checkpoints, and how long the WAL may be after one, in bytes
_CHECKPOINT: Final = 4 << 20
_WAL_MAX: Final = 64 << 20
#: about how many pages a change of one row writes to the WAL, with its indexes
_PAGES_OF_A_ROW: Final = 2
_PAGE: Final = 4096
_DISK_ERRORS: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
#: fields that have columns of their own, and change
_COLUMNS: Final = {
    "agents": frozenset({"parent_session", "channel", "removed"}),
    "sessions": frozenset({"owner", "removed"}),
}
_T = TypeVar("_T")
_LONG: Final = frozenset(name for cls in KINDS.values() for name in cls.long)


class Pending(NamedTuple):
    """Lines on their way to a history file, with newlines between them; ``path`` is relative
    to the state directory."""

    seq: int
    path: str
    line: str


class Store:
    """The database. Every write is inside ``transaction``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reserve = path.with_name("reserve")
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._depth = 0
        self._delivered = 0
        #: the last number that an event got
        self.last = 0
        #: about how much the WAL has that no checkpoint has seen, in bytes
        self._written = 0
        self._rows = 0
        #: is called when that is much
        self.crowded: Callable[[], None] = lambda: None
        for pragma in (
            "journal_mode=WAL",
            # the WAL reaches the disk at fsync(2), see sync(); a crash of the daemon loses nothing
            "synchronous=NORMAL",
            # a checkpoint syncs: see checkpoint()
            "wal_autocheckpoint=0",
            "foreign_keys=ON",
            # KiB: the kernel has the pages of the file as well
            "cache_size=-256",
        ):
            self._db.execute(f"PRAGMA {pragma}")
        try:
            self._bring_up_to_date()
            self.last = self.value(int, "SELECT MAX(seq) FROM outbox") or 0
        except BaseException:
            self._db.close()
            raise

    def _bring_up_to_date(self) -> None:
        """Makes the database, or does what was added since the version that wrote it."""
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        _check_version(self._path, version)
        if version == len(STEPS):
            return
        with self.transaction():
            for statements, then in STEPS[version:]:
                for statement in statements.split(";"):
                    self._db.execute(statement)
                then(self)
            self._db.execute(f"PRAGMA user_version={len(STEPS)}")

    def close(self) -> None:
        self._db.close()

    def keep_reserve(self) -> None:
        """Holds some room back, so that on a full disk something can still be removed."""
        if self._reserve.exists():
            return
        fd = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, _RESERVE)
        except OSError:
            self.release_reserve()
        finally:
            os.close(fd)

    def release_reserve(self) -> None:
        self._reserve.unlink(missing_ok=True)

    @property
    def is_in_transaction(self) -> bool:
        return self._depth > 0

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing; nested ones join the outermost. ``NoSpaceError`` on a full disk."""
        if self._depth:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
            return
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._depth = 1
            try:
                yield
                if self._delivered:
                    self._db.execute("DELETE FROM outbox WHERE seq <= ?", (self._delivered,))
                    self.post(Pending(self._delivered, "", ""))
                self._db.execute("COMMIT")
                self._delivered = 0
                self._note_written()
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            finally:
                self._depth = 0
        except sqlite3.OperationalError as error:
            self.crowded()  # on a full disk, a checkpoint makes room in the log
            raise _translated(error) from None

    def _note_written(self) -> None:
        rows = self._db.total_changes
        self._written += (rows - self._rows + 1) * _PAGES_OF_A_ROW * _PAGE
        self._rows = rows
        if self._written > _CHECKPOINT:
            self.crowded()

    def checkpoint(self) -> None:
        """Moves what the WAL has to the database, in any thread: it waits for the disk.

        Writers go on meanwhile; only a WAL that grew very long for that reason keeps them
        waiting for its last pages, and never for who reads the database. ``NoSpaceError`` on a
        disk that is full or fails: all is in the WAL still, as when SQLite is busy, after which
        the next commit tells again that it is crowded.
        """
        self._written = 0
        try:
            # it would keep writers out while it waits for a reader, such as a backup, to end
            with closing(sqlite3.connect(self._path, isolation_level=None, timeout=0)) as db:
                db.execute("PRAGMA synchronous=NORMAL")
                db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                if os.stat(f"{self._path}-wal").st_size > _WAL_MAX:
                    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise _translated(error) from None
            self._written = _CHECKPOINT

    def sync(self) -> None:
        """Makes everything committed survive a power loss."""
        fd = os.open(f"{self._path}-wal", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def insert(self, table: str, **values: Any) -> int:
        """The number of a new row of a table."""
        marks = ",".join("?" * len(values))
        cursor = self._db.execute(
            f"INSERT INTO {table} ({','.join(values)}) VALUES ({marks})", (*values.values(),)
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def put(self, table: str, index: int, **values: Any) -> None:
        """Columns of a row."""
        self._db.execute(
            f"UPDATE {table} SET {'=?,'.join(values)}=? WHERE idx=?", (*values.values(), index)
        )

    def value(self, make: Callable[[Any], _T], question: str, *values: Any) -> _T | None:
        """The value that is made of the first column of the first row; None if there is none, or
        nothing in it."""
        row = self.execute(question, *values).fetchone()
        return make(row[0]) if row and row[0] is not None else None

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        return self._db.execute(statement, values)

    # agents

    def insert_agent(self, agent: Agent) -> AgentIndex:
        values = agent.dump()
        row = _row("agents", values, _dump_agent(values))
        return AgentIndex(self.insert("agents", name=agent.name, **row))

    def put_agent(
        self, index: AgentIndex, values: dict[str, Any], changed: Iterable[str] | None = None
    ) -> None:
        """Writes an agent, of which these fields ``changed``, or all may have."""
        self.put("agents", index, **_row("agents", values, _dump_agent(values), changed))

    def load_agents(self) -> list[Agent]:
        """Every agent that has not been removed."""
        rows = self._db.execute("SELECT idx, data FROM agents WHERE removed=0 ORDER BY idx")
        return [Agent.load(AgentIndex(index), json.loads(data)) for index, data in rows]

    def find_agent(self, index: AgentIndex) -> Agent | None:
        values = self.value(json.loads, "SELECT data FROM agents WHERE idx=?", index)
        return Agent.load(index, values) if values else None

    def kept_incarnations(self) -> set[Incarnation]:
        """Removed agents whose documents stay: in a channel, or with a session."""
        rows = self._db.execute(
            "SELECT json_extract(data, '$.incarnation') FROM agents WHERE removed=1 "
            "AND (parent_session IN (SELECT idx FROM sessions) OR json_extract(data, '$.archived'))"
        )
        return {Incarnation(incarnation) for (incarnation,) in rows}

    @contextmanager
    def _beside(self) -> Iterator[sqlite3.Connection]:
        """Another connection, for reading; ``OSError`` from it for whatever goes wrong."""
        try:
            with closing(sqlite3.connect(self._path)) as db:
                yield db
        except sqlite3.Error as error:
            raise OSError(f"{self._path}: {error}") from None

    def holders(self, incarnations: Collection[str]) -> dict[str, tuple[int, str]]:
        """Owner and name of these agents, removed ones included, by incarnation.

        For other threads: by a connection of its own. ``OSError`` if it cannot be read.
        """
        with self._beside() as db:
            rows = db.execute(
                "SELECT json_extract(data, '$.incarnation') AS incarnation, "
                "json_extract(data, '$.owner'), name FROM agents "
                "WHERE incarnation IN (SELECT value FROM json_each(?))",
                (json.dumps(list(incarnations)),),
            )
            return {incarnation: (owner, name) for incarnation, owner, name in rows}

    # items of the planes

    def insert_item(self, item: Item) -> ItemIndex:
        index = ItemIndex(self.insert("items", agent=item.agent, kind=item.kind, data="{}"))
        self.put_item(index, item.record())
        return index

    def put_item(self, index: ItemIndex, values: dict[str, Any]) -> None:
        """Writes all fields of an item. A ``LongText`` text is in the store already and stays."""
        short = dict(values)
        elsewhere = []
        for name in _LONG & values.keys():
            value = values[name]
            if isinstance(value, LongText):
                short[name] = value.length
            elif isinstance(value, str) and len(value) > LONG_ABOVE:
                short[name] = len(value)
                self._db.execute("REPLACE INTO texts VALUES (?,?,?)", (index, name, value))
            else:
                continue
            elsewhere.append(name)
        marks = ",".join("?" * len(elsewhere))
        self._db.execute(
            f"DELETE FROM texts WHERE item=? AND field NOT IN ({marks})", (index, *elsewhere)
        )
        self.put("items", index, data=dump_row(short))

    def read_text(self, index: ItemIndex, field: str) -> str:
        """A long text of an item; empty if the item was removed."""
        question = "SELECT text FROM texts WHERE item=? AND field=?"
        return self.value(str, question, index, field) or ""

    def delete_item(self, index: ItemIndex) -> None:
        self._db.execute("DELETE FROM texts WHERE item=?", (index,))
        self._db.execute("DELETE FROM items WHERE idx=?", (index,))

    def delete_items(self, agent: AgentIndex) -> None:
        """All items of one agent."""
        self._db.execute(
            "DELETE FROM texts WHERE item IN (SELECT idx FROM items WHERE agent=?)", (agent,)
        )
        self._db.execute("DELETE FROM items WHERE agent=?", (agent,))

    def load_items(self) -> list[Item]:
        """The items of agents that have not been removed, oldest first."""
        rows = self._db.execute("SELECT idx, kind, data FROM items ORDER BY idx")
        return [
            KINDS[kind].load(ItemIndex(index), json.loads(data), self.read_text)
            for index, kind, data in rows
        ]

    # names

    def name_owner(self, name: str) -> int | None:
        return self.value(int, "SELECT owner FROM names WHERE name=?", name)

    def claim_name(self, name: str, owner: int) -> None:
        self._db.execute(
            "INSERT INTO names VALUES (?,?,0) "
            "ON CONFLICT (name) DO UPDATE SET owner=excluded.owner",
            (name, owner),
        )

    def release_name(self, name: str) -> None:
        self._db.execute("DELETE FROM names WHERE name=?", (name,))

    def runs(self, name: str) -> int:
        """The number of a name's last run; they go on over incarnations."""
        return self.value(int, "SELECT runs FROM names WHERE name=?", name) or 0

    def put_runs(self, name: str, number: int) -> None:
        self._db.execute("UPDATE names SET runs=? WHERE name=?", (number, name))

    # sessions (the questions are in ``runtime.records.sessions``)

    def insert_session(self, session: Session) -> SessionIndex:
        record = session.record()
        row = _row("sessions", record, dump_json(record))
        names = {"agent": session.agent, "name": session.name}
        return SessionIndex(self.insert("sessions", **names, **row))

    def put_session(self, session: Session, changed: Iterable[str] | None = None) -> None:
        """Writes a session, of which these fields ``changed``, or all may have."""
        record = session.record()
        row = _row("sessions", record, dump_json(record), changed)
        self.put("sessions", session.index, **row)

    def held_sizes(self) -> dict[tuple[int, str], tuple[int, int]]:
        """How many sessions there are, and the bytes that are held for them, by owner and agent.

        For other threads: by a connection of its own. ``OSError`` if it cannot be read.
        """
        with self._beside() as db:
            rows = db.execute(
                "SELECT owner, agent, COUNT(*), TOTAL(LENGTH(CAST(lines AS BLOB))) FROM sessions "
                "LEFT JOIN held ON session=idx GROUP BY owner, agent"
            )
            return {(owner, agent): (count, int(size)) for owner, agent, count, size in rows}

    # answers (the questions are in ``runtime.agents.answers``)

    def put_answer(
        self, caller: str, name: CallId, call: str, made: float, output: dict[str, Any] | None
    ) -> int:
        """Stores the answer of a call; None for one of which it is not known yet. Returns its
        bytes."""
        text = dump_json(output) if output is not None else ""
        self._db.execute(
            "REPLACE INTO answers (caller, id, call, made, answer) VALUES (?,?,?,?,?)",
            (caller, name, call, made, text),
        )
        return len(text.encode())

    # outbox

    def number(self, count: int) -> int:
        """The last one of so many numbers for lines.

        They are never used twice, and grow whatever the clock does: they are its microseconds
        where that is more, so that a backup that is put back has none of them used again.
        """
        self.last = max(self.last + count, time.time_ns() // 1000)
        return self.last

    def post(self, row: Pending) -> None:
        """One line, or several with newlines between them; ``seq`` is the number of the last.

        Events are posted, and held, as the log of their owner has them (``runtime.records.fleet``).
        """
        self._db.execute("INSERT INTO outbox VALUES (?,?,?)", row)

    def undelivered(self) -> list[Pending]:
        rows = self._db.execute(
            "SELECT seq, path, line FROM outbox WHERE path != '' ORDER BY seq"
        )
        return [Pending(*row) for row in rows]

    def synced(self) -> int:
        """The number up to which all lines are on the disk (``delivered``)."""
        return self.value(int, "SELECT seq FROM outbox WHERE path=''") or 0

    def held(self) -> Iterator[str]:
        """The events that are held, by session."""
        return (lines for (lines,) in self._db.execute("SELECT lines FROM held"))

    def delivered(self, seq: int) -> None:
        """Notes that the outbox is done up to ``seq``; the next transaction empties it, but for
        that number."""
        self._delivered = max(self._delivered, seq)


def check_state(path: Path) -> None:
    """Reads a database without changing it, as a daemon would that takes it over; a state that is
    not there is fine. ``StartupError`` if this program cannot read it."""
    if not path.exists():
        return
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            _check_version(path, version)
            if version == len(STEPS):
                for table, cls in (("agents", Agent), ("sessions", Session)):
                    for index, data in db.execute(f"SELECT idx, data FROM {table}"):
                        cls.load(index, json.loads(data))
                for index, kind, data in db.execute("SELECT idx, kind, data FROM items"):
                    KINDS[kind].load(ItemIndex(index), json.loads(data), lambda *_: "")
    except (sqlite3.Error, ValueError, KeyError, TypeError) as error:
        raise StartupError(f"{path}: cannot read it: {error}") from None


def _check_version(path: Path, version: int) -> None:
    if version > len(STEPS):
        raise StartupError(
            f"{path}: written by a newer ctxd (schema {version}; this one reads "
            f"{len(STEPS)} and older); start the newer ctxd, or use another --state"
        )


def _translated(error: sqlite3.OperationalError) -> Exception:
    """``NoSpaceError`` for a full disk. SQLite reports some failures to make or grow a file as
    other errors of the disk."""
    if error.sqlite_errorcode & 0xFF in _DISK_ERRORS:
        return NoSpaceError("the disk under the daemon's state is full")
    return error


def _row(
    table: str, values: Mapping[str, Any], data: str, changed: Iterable[str] | None = None
) -> dict[str, Any]:
    """The columns of a row: those in indices, which are pages that a commit writes as well, only
    if they ``changed``."""
    columns = _COLUMNS[table]
    if changed is not None and columns.isdisjoint(changed):
        return {"data": data}
    return {**{name: values[name] for name in columns}, "data": data}


def _dump_agent(values: dict[str, Any]) -> str:
    return dump_row(shortened(Agent, values))
