"""Named places at which the daemon can be made to die, to show that it may.

``CTXD_CRASH_AT=NAME`` or ``NAME:COUNT`` in the daemon's environment kills it with
SIGKILL when it is there (for the COUNTth time). Without it nothing happens.
"""

from __future__ import annotations

import os
import signal
from typing import Final

from runtime.errors import StartupError

#: the instants of each thing that the daemon does in several steps
_INSTANTS: Final = {
    "create": "waitfile inserted announced",
    "write": "committed",
    "outbox": "appended",
    "events": "appended",
    "start": "committed planned launched running",
    "run": "committed launched running ended recorded",
    "message": "queued delivered written ended",
    "report": "queued",
    "resident": "greeted",
    "session": "switched",
    "abort": "committed told late killed",
    "task": "queued launched running recorded",
    "relay": "planned started told gone",
    "worktree": "planned made unpacked packed received fetched removed",
    "finish": "shed conversation recorded removed released",
    "cancel": "marked more thawed signalled killed",
    "pause": "frozen committed",
    "resume": "thawed committed",
    "restart": "recorded due",
    "reset": "committed",
    "remove": "committed forgotten more",
    "terminal": "handed hungup",
    "wait": "armed due fired",
    "ask": "answered",
    "link": "planned started greeted",
    "peer": "greeted registered put done told",
    "lead": "heard",
    "adopt": "led lost ended cleaned",
    "reexec": "held saved executed restored",
}
POINTS: Final = tuple(
    f"{what}.{instant}" for what, instants in _INSTANTS.items() for instant in instants.split()
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
