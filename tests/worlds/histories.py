"""Histories and logs as they are kept, whether the daemon lives or not."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterator
from contextlib import closing, suppress
from pathlib import Path

from runtime.records.fleet import plain

_HELD = "SELECT owner, agent, name, lines FROM sessions JOIN held ON session=idx"
_POSTED = (
    "SELECT path, line FROM outbox JOIN sessions "
    "ON path = 'home/' || owner || '/agent/' || agent || '/' || name || '/events.jsonl' "
    "ORDER BY seq"
)


def kept_histories(state: Path) -> dict[Path, bytes]:
    """Each history by its path, also what the store holds of one that has no file yet.

    Read twice, before and after the files: meanwhile a history may get its file. Between the two,
    what is to be in it is in the outbox alone.
    """
    found, posted = _held(state)
    for name in ("events.jsonl", "messages.jsonl"):
        for path in state.glob(f"home/*/agent/*/*/{name}"):
            if path.parent.name[0] == ".":
                continue  # it is being removed
            with suppress(FileNotFoundError):  # it was, as the copy of another machine's agent
                found[path] = max(found.get(path, b""), path.read_bytes(), key=len)
    for some in (posted, *_held(state)):
        for path, data in some.items():
            found.setdefault(path, data)
    return found


def _held(state: Path) -> tuple[dict[Path, bytes], dict[Path, bytes]]:
    """The histories that the store holds, and what is on its way to files, at one moment."""
    # read-only, or the last to close it would write the log of a dead daemon to the database
    with closing(sqlite3.connect(f"file:{state}/ctxfs.db?mode=ro", uri=True)) as database:
        database.execute("BEGIN")
        held = {
            state / f"home/{owner}/agent/{agent}/{session}/events.jsonl": plain(lines).encode()
            for owner, agent, session, lines in database.execute(_HELD)
        }
        posted: dict[Path, bytes] = {}
        for path, line in database.execute(_POSTED):
            posted[state / path] = posted.get(state / path, b"") + plain(line).encode() + b"\n"
        return held, posted


def kept_logs(state: Path) -> dict[int, list[bytes]]:
    """The lines of all logs, by owner; what is not a whole line is the last one."""
    return {
        int(log.name): b"".join(
            path.read_bytes() for path in sorted(log.iterdir(), key=lambda path: int(path.name))
        ).splitlines(keepends=True)
        for log in state.glob("events/*")
    }


def mistold(
    state: Path, histories: dict[Path, bytes], earlier: Collection[Path] = ()
) -> Iterator[str]:
    """What is wrong with the logs: a line that is torn, out of order, there twice, or not there
    though a history has it that was read before, and is not of an ``earlier`` session."""
    seen: set[int] = set()
    told: set[tuple[str, str, bytes]] = set()
    whole = all((state / f"events/{owner}/0").exists() for owner in kept_logs(state))
    for owner, lines in kept_logs(state).items():
        last = 0
        for line in lines:
            if not line.endswith(b"\n"):
                yield f"the log of {owner} ends in the middle of a line: {line[-100:]!r}"
                continue
            event = json.loads(line)
            number, key = event["seq"], (event["agent"], event["session"], _plain(line))
            if number <= last or number in seen:
                yield f"the log of {owner} has {number} after {last}, or twice"
            if key in told:
                yield f"the log of {owner} has {event['id']} of {event['agent']} twice: {line!r}"
            last = number
            seen.add(number)
            told.add(key)
    for path, history in histories.items():
        if path.name == "events.jsonl" and whole and path.parent not in earlier:
            agent, session = path.parts[-3:-1]
            for line in history.splitlines(keepends=True):
                if (agent, session, line) not in told:
                    yield f"no log has what {path} has: {line!r}"


def _plain(line: bytes) -> bytes:
    return plain(line.decode()).encode()
