"""The record of a run, as its monitor writes it (monitor.c), read as a whole.

A run outlives the daemon that started it, so that its monitor may be older than this daemon, or
younger. A record says first in which version of the form it is written; one that says nothing is
of version 0. Lines of a kind that is not known are passed over, whatever the version. A version
that is higher than ours says that known lines mean something else: such a run counts as lost.

The record is in the runtime directory, not on the disk of the state: a full disk cannot lose an
end. A monitor creates it exclusively. If a crash interrupted a start, the next daemon starts again
only if there is no record, so never twice. Everything that a daemon knows of a run is in the
record (by inotify) and in the cgroup, so the same code leads an agent that it started and one that
it adopted. An exit status is a claim: an agent is dead when its cgroup is empty and everything it
owns is dead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from runtime.cell.inlet import Inlet
from runtime.cell.viewers import VIEWERS_EVER
from runtime.cell.windows import HANGUP
from runtime.kernel import linux
from runtime.records.items import Task, TaskCue, TaskStatus
from runtime.records.model import Outcome
from runtime.texts.names import escape

log = logging.getLogger("ctxd.record")

#: the highest that is understood; the same as RECORD_VERSION of monitor.c
VERSION: Final = 1
#: why an agent ends whose lease is over (``runtime.cell.leases``)
LEASE_OVER: Final = "lease_over"
_NUMBER: Final = re.compile(r"[0-9]{1,20}")
_COMPLAINT_MAX: Final = 300
#: a dozen lines, none longer than 600 bytes (monitor.c), and two for each viewer ever
_RECORD_MAX: Final = (1 << 14) + 64 * VIEWERS_EVER


@dataclass(slots=True)
class RunRecord:
    """Pids are the host's, 0 if not (yet) known; times nanoseconds since the epoch."""

    version: int = 0
    monitor: int = 0
    chain: int = 0
    keeper: int = 0
    program: int = 0
    started: int = 0
    failed: str = ""
    #: its keeper holds the cell, whatever becomes of the program, if there is one
    held: bool = False
    exit_code: int | None = None
    signal: int | None = None
    ended: int = 0
    #: the two by CLOCK_BOOTTIME, 0 if an older monitor wrote it
    started_up: int = 0
    ended_up: int = 0
    #: the agent's window was closed before it had ended, or a viewer with which it ends
    hung_up: bool = False
    #: its lease was over before it had ended, or begun
    lease_over: bool = False
    #: the program has a terminal, which the monitor serves
    terminal: bool = False
    #: the uids of viewers that are there, by their numbers; why others have left
    viewers: dict[int, int] = field(default_factory=dict)
    left: dict[int, str] = field(default_factory=dict)
    #: nobody can tell what became of it: its keeper was killed, or this daemon is too old
    lost: bool = False
    finished: bool = False

    @property
    def understood(self) -> bool:
        """Whether this daemon knows what its monitor writes; if not, it says nothing but lost."""
        return self.version <= VERSION

    @property
    def over(self) -> bool:
        """Whether the program has ended or never began."""
        return bool(self.ended or self.lost or self.failed or self.finished)

    @property
    def goes_on(self) -> bool:
        """Whether the program, or what its keeper holds, has not ended."""
        return not (self.finished or (self.ended and not self.held))

    @property
    def cut_short(self) -> tuple[Outcome, str] | None:
        """Outcome and reason of what its monitor ends, with or without a daemon."""
        if self.lease_over:
            return Outcome.INTERRUPTED, LEASE_OVER
        return (Outcome.CANCELLED, HANGUP) if self.hung_up else None

    @property
    def lasted(self) -> int:
        """How long the program ran, whatever became of the wall clock."""
        if self.started_up and self.ended_up:
            return self.ended_up - self.started_up
        return self.ended - self.started

    def ended_before(self, other: RunRecord) -> bool:
        """Whether its program ended no later than another one that has ended."""
        if self.ended_up and other.ended_up:
            return self.ended_up <= other.ended_up
        return self.ended <= other.ended

    @property
    def next_viewer(self) -> int:
        """A number that no viewer of the run had."""
        return 1 + max(*self.viewers, *self.left, 0, 0)

    @property
    def exit(self) -> str:
        """How the program ended, as reasons say it; empty if it has not, or nobody knows."""
        if self.exit_code is not None:
            return f"exit:{self.exit_code}"
        return "" if self.signal is None else f"signal:{self.signal}"

    @property
    def settled(self) -> bool:
        """Whether it is known if the program began, or that there need be none."""
        return bool(self.started or self.held or self.over)


def read_record(path: Path) -> RunRecord:
    """The record in ``path``; an empty one if there is none. A torn last line is left out."""
    record = RunRecord()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return record
    try:
        text = os.read(fd, _RECORD_MAX).decode(errors="replace")
    finally:
        os.close(fd)
    for line in text.split("\n")[:-1]:
        word, _, rest = line.partition(" ")
        numbers = [int(n) for n in rest.split() if _NUMBER.fullmatch(n)]
        match word, numbers:
            case "version", [version] if version > VERSION:
                return RunRecord(version=version, lost=True)
            case "version", [version]:
                record.version = version
            case "monitor", [pid]:
                record.monitor = pid
            case "chain", [pid]:
                record.chain = pid
            case "keeper", [pid]:
                record.keeper = pid
            case "start", [pid, when]:
                record.program, record.started = pid, when
            case "began", [up]:
                record.started_up = up
            case "ceased", [up]:
                record.ended_up = up
            case "failed", _:
                record.failed = record.failed or escape(rest)
            case "hold", []:
                record.held = True
            case "hangup", [_]:
                record.hung_up |= record.goes_on
            case "lease", [_]:
                record.lease_over |= record.goes_on
            case "terminal", []:
                record.terminal = True
            case "viewer", [number, uid]:
                record.viewers[number] = uid
            case "left", [number] if record.viewers.pop(number, None) is not None:
                record.left[number] = escape(rest.partition(" ")[2])
            case "exit", [code, when]:
                record.exit_code, record.ended = code, when
            case "signal", [number, when]:
                record.signal, record.ended = number, when
            case "lost", [_]:
                record.lost = True
            case "end", _:
                record.finished = True
                record.left.update(dict.fromkeys(record.viewers, "ended"))
                record.viewers.clear()
            case _:
                continue
    return record


class Facts:
    """The facts of one program, as its monitor records them, and the way to its standard input."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: says whose they are: an agent's cell, its run or its task
        self.key = path.name
        self.inlet = Inlet(path.parents[1] / "monitor" / path.name)
        self._complained = False
        #: the record as it was when its file had this inode and this size
        self._known: tuple[tuple[int, int], RunRecord] | None = None

    def exist(self) -> bool:
        """Whether there is a monitor, or was one."""
        return self.path.exists()

    def read(self) -> RunRecord:
        """Those that are known by now."""
        if self._known is not None and self._known[1].finished:
            return self._known[1]  # the last that a monitor writes
        try:
            st = os.stat(self.path)
        except FileNotFoundError:
            return RunRecord()
        version = (st.st_ino, st.st_size)  # nobody ever changes what it has
        if self._known is not None and self._known[0] == version:
            return self._known[1]
        record = read_record(self.path)
        self._known = version, record
        if not record.understood and not self._complained:
            self._complained = True
            log.error(
                "%s: a newer ctxd began this run: its record has version %d, and this ctxd reads "
                "versions up to %d: it counts the run as lost, and ends it",
                self.path,
                record.version,
                VERSION,
            )
        return record

    def has_monitor(self) -> bool:
        return linux.is_alive(self.read().monitor)

    def has_keeper(self) -> bool:
        return linux.is_alive(self.read().keeper)

    def leave_cell(self) -> None:
        """The monitor is not to end the cell if it dies."""
        with contextlib.suppress(FileNotFoundError):
            self.path.chmod(0o400)

    def forget(self) -> None:
        """Nobody asks any more."""
        self.path.unlink(missing_ok=True)
        self.inlet.remove()


def judge(record: RunRecord, *, oom: bool, complaint: str) -> tuple[Outcome, str]:
    """Outcome and reason of a program that nobody stopped.

    ``oom`` says that the kernel killed in its cgroup for memory, ``complaint``
    what was said last on standard error: by the steps into the cell, if the
    program never began.
    """
    if record.failed:
        return Outcome.ERROR, f"start_failed: {record.failed}"
    if record.signal == signal.SIGKILL and oom:
        return Outcome.ERROR, "oom"
    if record.exit:
        return Outcome.DONE if record.exit_code == 0 else Outcome.ERROR, record.exit
    if not record.started and not record.held:
        return Outcome.ERROR, f"start_failed: {complaint[:_COMPLAINT_MAX] or 'no reason was given'}"
    # its PID 1 was killed from outside, and everything with it
    return Outcome.ERROR, f"signal:{int(signal.SIGKILL)}"


def judge_task(task: Task, record: RunRecord) -> tuple[TaskCue, str]:
    """The end of a command, as its monitor has it; and the text of its exit."""
    text = record.exit
    if task.status is TaskStatus.CANCELLING or record.hung_up:
        # SIGKILL to its leaf reaches who would tell of it, too
        killed = bool(record.started and record.finished)
        return TaskCue.CANCELLED, text or (f"signal:{int(signal.SIGKILL)}" if killed else "")
    if record.exit_code == 0:
        return TaskCue.DONE, text
    # a failure before the exec is in the output, and is not an interruption
    known = bool(text or record.failed or not (record.monitor or record.lost))
    return (TaskCue.ERROR if known else TaskCue.INTERRUPTED), text
