"""What the daemon knows in memory of one run, from its start to its recorded end."""

from __future__ import annotations

import contextlib
from pathlib import Path

import trio

from runtime.cgroups import Cgroup
from runtime.inotify import Changes, Watcher
from runtime.record import Record, read_record


class Following:
    """One run of a live agent: its cgroup, and the record that its monitor writes."""

    def __init__(self, node: Cgroup, record_path: Path) -> None:
        self.node = node
        self.leaf = node.child("run")
        self.record_path = record_path
        self.changes = Changes()
        #: set when the monitor runs, or it is certain that none will
        self.launched = trio.Event()
        self.monitored = False
        self.monitor_gone = False
        self.unkillable = False
        #: known to have begun or failed; before that SIGTERM cannot reach the program
        self.settled = False
        self._spared: set[int] | None = None
        #: somebody wants it dead, so that it is not started again
        self.given_up = False
        #: set when the end of the run is recorded, or nobody follows it any more
        self.over = trio.Event()

    def record(self) -> Record:
        return read_record(self.record_path)

    def spared(self) -> set[int]:
        """Pids of the cell's own PID 1 and of the steps that led there."""
        if self._spared is None:
            record = self.record()
            found = {record.chain, record.keeper, _parent_pid(record.keeper)}
            if not self.settled:
                return found
            self._spared = found
        return self._spared

    def note_settled(self) -> None:
        """The program began: what surrounds it stays as it is until the end."""
        self.settled = True
        self.spared()

    async def wait_settled(self, watcher: Watcher) -> None:
        """Until it is known whether the program began: only then can SIGTERM reach it."""
        if self.settled:
            return
        await self.launched.wait()
        if not self.monitored or self.over.is_set():
            return
        changes = Changes()
        with (
            contextlib.suppress(FileNotFoundError),
            watcher.watching(self.record_path, changes),
        ):
            while not self.record().settled:
                if self.monitor_gone or self.over.is_set():
                    return
                await changes.wait_changed()


class Followed(dict[int, Following]):
    """The runs that are followed, by the agent's index."""


def _parent_pid(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0
