"""Named places at which the daemon can be made to die, to show that it may.

``CTXD_CRASH_AT=NAME`` or ``NAME:COUNT`` in the daemon's environment kills it with
SIGKILL when it is there (for the COUNTth time). Without it nothing happens.
"""

from __future__ import annotations

import os
import signal
from typing import Final

from runtime.errors import StartupError

POINTS: Final = (
    "create.waitfile",
    "create.inserted",
    "create.announced",
    "write.committed",
    "outbox.appended",
    "start.committed",
    "start.planned",
    "start.launched",
    "start.running",
    "run.committed",
    "run.launched",
    "run.running",
    "run.ended",
    "run.recorded",
    "message.queued",
    "report.queued",
    "message.delivered",
    "message.written",
    "message.ended",
    "resident.greeted",
    "session.switched",
    "abort.committed",
    "abort.told",
    "abort.late",
    "abort.killed",
    "task.queued",
    "task.launched",
    "task.running",
    "task.recorded",
    "relay.planned",
    "relay.started",
    "relay.told",
    "relay.gone",
    "worktree.planned",
    "worktree.made",
    "worktree.fetched",
    "worktree.removed",
    "finish.shed",
    "finish.conversation",
    "finish.recorded",
    "finish.removed",
    "finish.released",
    "cancel.marked",
    "cancel.more",
    "cancel.thawed",
    "cancel.signalled",
    "cancel.killed",
    "pause.frozen",
    "pause.committed",
    "resume.thawed",
    "resume.committed",
    "restart.recorded",
    "restart.due",
    "reset.committed",
    "remove.committed",
    "remove.forgotten",
    "remove.more",
    "wait.armed",
    "wait.due",
    "wait.fired",
    "adopt.led",
    "adopt.lost",
    "adopt.ended",
    "adopt.cleaned",
    "reexec.held",
    "reexec.saved",
    "reexec.executed",
    "reexec.restored",
)
_VARIABLE: Final = "CTXD_CRASH_AT"

_wanted = ""
_left = 0


def arm() -> None:
    """Reads the environment, once, at start; ``StartupError`` for a name that is none."""
    global _wanted, _left
    name, _, count = os.environ.get(_VARIABLE, "").partition(":")
    if name and name not in POINTS:
        raise StartupError(f"{_VARIABLE}: unknown place {name!r}; use one of: {', '.join(POINTS)}")
    if count and not (count.isascii() and count.isdigit() and int(count)):
        raise StartupError(f"{_VARIABLE}: {count!r} is not a count")
    _wanted, _left = name, int(count or 1)


def reach(name: str) -> None:
    """The daemon is at this place."""
    global _left
    if name != _wanted:
        return
    _left -= 1
    if not _left:
        os.kill(os.getpid(), signal.SIGKILL)
