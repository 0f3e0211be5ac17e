"""The messages between this daemon and those of other machines, in the store.

What is to be said to the other side is stored in the transaction of the change that causes it, and
kept until the other side has done it; what the other side said is noted as done in the transaction
of its effect. So each has its effect once, whatever dies when (``runtime.peers.peering``).

What else is known of a registration holds in memory at once. On a full disk it is stored with
whatever is stored next: so nothing that follows from it is stored before.

A registration is called by its *key* here, which is made of the bits that its two sides know, and
says nothing of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from runtime.errors import NoSpaceError
from runtime.kernel.inotify import Wakeup
from runtime.peers.peering import BrokenLinkError
from runtime.peers.streams import Kept, Stream
from runtime.records.change import Change, Posted, Subscriber, Undoing
from runtime.records.journal import Journal
from runtime.records.store import Store
from runtime.texts.names import dump_json

#: the first letter of the key of a registration at a node, and of a lead here
NODE = "n"
LEAD = "l"


#: of what the other side says, that holds in memory as long as the disk is full
LATE_MAX = 1024


def check_late(journal: Journal, key: str) -> None:
    """On a full disk no more is heard of who says very much; ``BrokenLinkError``."""
    if journal.is_late:
        late = sum(each[0] == key for change in journal.late for each in change.done)
        if late >= LATE_MAX:
            raise BrokenLinkError(f"the disk here is full, and {late} messages wait for room")


def key_of(kind: str, known: str) -> str:
    """The key of a registration of one ``kind``."""
    return kind + hashlib.blake2b(known.encode(), digest_size=8).hexdigest()


def _is_end(posted: Posted) -> bool:
    return posted.op in ("ended", "dead")


class Post(Subscriber):
    """The streams of all registrations."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._streams: dict[str, Stream] = {}
        #: what else is known of a registration, as JSON values
        self._data: dict[str, dict[str, Any]] = {}
        #: told when there is something to say
        self._wakeups: dict[str, Wakeup] = {}
        #: up to where the other side has done messages, if the store does not have that yet
        self._acknowledged: dict[str, int] = {}
        #: registrations that are over, and those of which something changed, which the store does
        #: not know yet
        self._gone: set[str] = set()
        self._unstored: set[str] = set()
        rows = store.execute("SELECT key, done, mark, got, seen, data FROM peers").fetchall()
        for key, done, mark, got, seen, data in rows:
            kept = store.execute(
                "SELECT number, agent, line, mark FROM posts WHERE key=? ORDER BY number", key
            )
            messages = (Kept(*row) for row in kept)
            self._streams[key] = Stream(messages, first=(done, mark), got=(got, seen))
            self._data[key] = json.loads(data)

    def keys(self, kind: str) -> Iterator[str]:
        """The registrations of one kind."""
        return (key for key in list(self._streams) if key[0] == kind)

    def stream(self, key: str) -> Stream:
        """Both streams of a registration, which is made if it is new."""
        if key not in self._streams:
            self._streams[key], self._data[key] = Stream(), {}
            self._changed(key)
        return self._streams[key]

    def data(self, key: str) -> dict[str, Any]:
        """All else that is known of a registration, which ``note`` changes."""
        return self._data.get(key, {})

    def note(self, key: str, **values: Any) -> None:
        """More that is known of a registration: stored at once if there is room, or with the
        transaction at hand."""
        self.stream(key)
        before, self._data[key] = self._data[key], {**self._data[key], **values}
        if self._data[key] != before or key in self._unstored:
            self._changed(key)

    def is_stored(self, key: str) -> bool:
        """Whether what is known of a registration survives a crash."""
        return key not in self._unstored

    def _changed(self, *keys: str) -> None:
        self._unstored.update(keys)
        if not self._store.is_in_transaction:  # or it is stored by ``posting``
            with suppress(NoSpaceError):
                with self._store.transaction():
                    self._store_known()
                self._gone, self._unstored = set(), set()

    def _store_known(self) -> None:
        """Inside a transaction."""
        for key in self._gone:
            self._store.execute("DELETE FROM posts WHERE key=?", key)
            self._store.execute("DELETE FROM peers WHERE key=?", key)
        for key in self._unstored:
            self._store.execute("INSERT OR IGNORE INTO peers (key) VALUES (?)", key)
            text = dump_json(self._data[key])
            self._store.execute("UPDATE peers SET data=? WHERE key=?", text, key)

    def wakeup(self, key: str) -> Wakeup:
        """Told when there is something to say to the other side."""
        return self._wakeups.get(key) or Wakeup()  # that nobody waits for

    def tell(self, key: str, said: Wakeup) -> None:
        """From now on ``said`` is told of that, as of a new connection."""
        self._wakeups[key] = said
        said.notify()

    def acknowledged(self, key: str, number: int) -> None:
        """The other side has done messages up to this one: they need not be stored."""
        if key in self._streams:
            self._acknowledged[key] = number

    def forget(self, key: str) -> None:
        """A registration is over, and nothing of it is left."""
        for known in (self._streams, self._data, self._wakeups, self._acknowledged):
            known.pop(key, None)
        self._gone.add(key)
        self._unstored.discard(key)
        self._changed()

    # Subscriber

    def posting(self, change: Change, undoing: Undoing) -> None:
        for key in (*(each[0] for each in change.done), *(each.key for each in change.posts)):
            self.stream(key)
        if self._gone or self._unstored:
            self._store_known()
            undoing.append(partial(self._restore, self._gone, self._unstored))
            self._gone, self._unstored = set(), set()
        for key, number, line in change.done:
            stream = self.stream(key)
            undoing.append(stream.done(number, line))
            where = "UPDATE peers SET got=?, seen=? WHERE key=?"
            self._store.execute(where, stream.got, stream.seen, key)
            self.wakeup(key).notify()
        # what an agent does last is said before its end, which the same change may record
        for each in sorted(change.posts, key=_is_end):
            stream = self.stream(each.key)
            kept = stream.record(each.op, each.agent, **each.said)
            undoing.append(stream.take_back)
            self._store.execute("INSERT INTO posts VALUES (?,?,?,?,?)", each.key, *kept)
            self._let_go(each.key)
            self.wakeup(each.key).notify()

    def _restore(self, gone: set[str], unstored: set[str]) -> None:
        self._gone |= gone
        self._unstored |= unstored & self._data.keys()

    def _let_go(self, key: str) -> None:
        """Inside a transaction: of messages that the other side has done."""
        number = self._acknowledged.pop(key, None)
        if number is not None:
            done, mark = self._streams[key].first
            self._store.execute("DELETE FROM posts WHERE key=? AND number<=?", key, done)
            where = "UPDATE peers SET done=?, mark=? WHERE key=?"
            self._store.execute(where, done, mark, key)
