"""The way of events to their files: from the outbox of the store, each once, whatever dies when.

An event goes to the log of its owner, and to the history of its session, if the store does not hold
it. The store has it as the log has, in the outbox or where it is held.

A line stays in the outbox until its file is synced: a loss of power may keep either of two writes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from typing import Final

import trio

from runtime import crashpoints
from runtime.kernel.inotify import Wakeup
from runtime.records.fleet import DIRECTORY, Fleet, held_since, logged, plain
from runtime.records.history import History
from runtime.records.store import Pending, Store

log = logging.getLogger("ctxd.journal")

#: changes whose lines are in their files, and in the store until these are synced
OUTBOX_MAX: Final = 1000


class Outbox:
    """Moves what the store holds to the histories, in order, and syncs both."""

    def __init__(self, store: Store, history: History, fleet: Fleet) -> None:
        self._store = store
        self._history = history
        self._fleet = fleet
        #: on their way
        self.left: list[Pending] = []
        #: files to which a write failed
        self._cut: set[str] = set()
        #: up to where the outbox is in the histories, and where it was synced last; the rows since
        self._appended = self._synced = self._unsynced = 0
        self._syncing = trio.Lock()
        self._crowded = Wakeup()
        self._complete()

    def _complete(self) -> None:
        """Completes files by what an earlier daemon, or the disk, did not get there."""
        rows = self._store.undelivered()
        self.left = [
            row._replace(line=plain(row.line))
            for row in rows
            if self._kind(row.path) is self._history
        ]
        for path, wanted in self._by_file().items():
            with contextlib.suppress(FileNotFoundError):  # of a history since removed
                self._history.complete(path, wanted)
        self.left.clear()
        held = held_since(self._store.synced(), self._store.held())
        for path, wanted in logged((*(row.line for row in rows), *held)).items():
            self._fleet.complete(path, wanted)
        if rows:
            self._appended = rows[-1].seq
        self._unsynced = len(rows)
        # a loss of power may have kept lines whose rows it took
        self._store.last = max(self._store.last, self._fleet.last(None))

    def _kind(self, path: str) -> History | Fleet:
        return self._fleet if path.startswith(f"{DIRECTORY}/") else self._history

    def _by_file(self) -> dict[str, list[str]]:
        lines: dict[str, list[str]] = {}
        for pending in self.left:
            lines.setdefault(pending.path, []).append(pending.line)
        return lines

    def deliver(self, more: Iterable[Pending] = ()) -> bool:
        """Whether nothing is left: what could not be written waits for the next time."""
        self.left += more
        self._unsynced += 1
        for path, wanted in self._by_file().items():
            kind = self._kind(path)
            try:
                if path in self._cut:
                    kind.complete(path, wanted)
                else:
                    kind.append(path, wanted)
            except FileNotFoundError:
                log.warning("history %s was removed: dropping its events", path)
            except OSError as error:
                log.error("cannot write history %s: %s; trying again later", path, error.strerror)
                self._cut.add(path)  # some of it may be there already
                continue
            crashpoints.reach("events.appended" if kind is self._fleet else "outbox.appended")
            self._cut.discard(path)
        if self.left and not self._cut:
            self._appended = self.left[-1].seq
        self.left = [each for each in self.left if each.path in self._cut]
        if self._unsynced > OUTBOX_MAX:
            self._crowded.notify()
        return not self.left

    async def run(self) -> None:
        """Nobody may ever ask for fsync(2): now and then the disk is synced beside the loop."""
        while True:
            await self._crowded.wait_changed()
            async with self._syncing:
                appended, self._unsynced = self._appended, 0
                try:
                    await self._history.synced(with_all=True)
                except OSError as error:
                    log.error("cannot sync the disk: %s; trying again later", error.strerror)
                else:
                    self._note_synced(appended)

    def _note_synced(self, appended: int) -> None:
        self._synced = max(self._synced, appended)
        self._store.delivered(self._synced)

    async def synced(self) -> None:
        """Returns when everything acknowledged so far survives a loss of power; ``OSError``.

        One caller at a time waits for the disk, beside the loop: a second one that did not
        wait for the first would return before the lines that the first took are synced.
        """
        async with self._syncing:
            appended, self._unsynced = self._appended, 0
            await self._history.synced()
            self._note_synced(appended)
            await trio.to_thread.run_sync(self._store.sync)
