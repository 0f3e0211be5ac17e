"""Histories as they are kept, whether the daemon lives or not."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

_HELD = "SELECT owner, agent, name, lines FROM sessions JOIN held ON session=idx"


def kept_histories(state: Path) -> dict[Path, bytes]:
    """Each history by its path, also what the store holds of one that has no file yet.

    Read twice, before and after the files: meanwhile a history may get its file.
    """
    found = _held(state)
    for name in ("events.jsonl", "messages.jsonl"):
        for path in state.glob(f"home/*/agent/*/*/{name}"):
            found[path] = max(found.get(path, b""), path.read_bytes(), key=len)
    for path, data in _held(state).items():
        found.setdefault(path, data)
    return found


def _held(state: Path) -> dict[Path, bytes]:
    # read-only, or the last to close it would write the log of a dead daemon to the database
    with closing(sqlite3.connect(f"file:{state}/ctxfs.db?mode=ro", uri=True)) as database:
        return {
            state / f"home/{owner}/agent/{agent}/{session}/events.jsonl": lines.encode()
            for owner, agent, session, lines in database.execute(_HELD)
        }
