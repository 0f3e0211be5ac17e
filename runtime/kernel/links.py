"""Links in a directory of the system, and where they lead.

Only uid 0's are told, and each is followed once: where it leads is a path, which nobody has looked
at. A directory is read in the way of the loop, so what was found is good for a second, and later
as long as no directory in it has changed.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Found:
    """The paths to which links lead, the directories in which they are, and when each changed."""

    paths: tuple[str, ...]
    directories: dict[str, int]


_found: Final[dict[str, tuple[_Found, float]]] = {}


def targets(top: str) -> tuple[str, ...]:
    """The paths outside of a directory, without ``..``, to which links in it lead."""
    found, until = _found.get(top) or (None, 0.0)
    now = time.monotonic()
    if now >= until or found is None:
        if found is None or any(_changed(path) != at for path, at in found.directories.items()):
            found = _look(top)
        _found[top] = found, now + _SECONDS
    return found.paths


def _changed(directory: str) -> int:
    try:
        return os.stat(directory, follow_symlinks=False).st_mtime_ns
    except OSError:
        return 0


def _look(top: str) -> _Found:
    """Looks through a directory and those below it."""
    paths: set[str] = set()
    directories: dict[str, int] = {}
    waiting = [top]
    while waiting:
        directory = waiting.pop()
        directories[directory] = _changed(directory)
        with suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif entry.is_symlink() and entry.stat(follow_symlinks=False).st_uid == 0:
                    path = os.path.normpath(os.path.join(directory, os.readlink(entry.path)))
                    # as POSIX has it, two slashes may mean something else
                    paths.add("/" + path.lstrip("/"))
    outside = sorted(path for path in paths if not path.startswith(f"{top}/"))
    return _Found(tuple(outside), directories)
