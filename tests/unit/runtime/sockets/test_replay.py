"""Where in a history a replay begins, without reading what is before it."""

from __future__ import annotations

import os
import tracemalloc
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from runtime.records.history import find_line, read_lines
from runtime.sockets.connection import Connection
from runtime.sockets.replay import Replays, Wanted, _event_number
from tests.unit.runtime.sockets.test_connection import in_trio, pair_in


def history(path: Path, count: int) -> Path:
    file = path / "events.jsonl"
    file.write_text("".join(f'{{"id":"e{n}","x":"{"y" * (n % 97)}"}}\n' for n in range(1, count)))
    return file


@pytest.mark.parametrize("last", [0, 1, 777, 4998, 4999, 10_000])
def test_nothing_that_is_wanted_is_before_where_it_begins(tmp_path: Path, last: int) -> None:
    with open(history(tmp_path, 5000), "rb") as file:
        offset = find_line(file.fileno(), last, _event_number, 1000)
        before = os.pread(file.fileno(), offset, 0)
        assert not before or before.endswith(b"\n")
        assert all(_event_number(line) <= last for line in before.splitlines())
        wanted = os.pread(file.fileno(), 1 << 20, offset).splitlines()
        assert sum(_event_number(line) <= last for line in wanted) <= 100


def test_a_long_history_is_looked_at_in_few_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: reads.append(1) or pread(*args))  # type: ignore[func-returns-value]
    with open(history(tmp_path, 20_000), "rb") as file:
        find_line(file.fileno(), 15_000, _event_number, 1000)
    assert len(reads) <= 20


def test_a_line_longer_than_a_piece_is_sent_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "h").write_bytes(b'{"id":"e1","x":"' + b"y" * 100 + b'"}\ntorn')
    with open(tmp_path / "h", "rb") as file:
        lines = read_lines(file.fileno(), 0, 10)
        assert lines.endswith(b'"}\n')
        assert read_lines(file.fileno(), len(lines), 10) == b""


def _of_a_log(connection: Connection, path: Path) -> partial[Any]:
    reader: Any = SimpleNamespace(
        owner=None,
        after=1,
        rest=0.0,
        lost=lambda: 0,
        read=lambda: [b"%0300d" % number for number in range(400)],
    )
    replays = Replays(SimpleNamespace())  # type: ignore[arg-type]
    return partial(replays.follow, connection, reader, Wanted((), ()), {}, forever=True)


def _of_a_session(connection: Connection, path: Path) -> partial[Any]:
    def open_events(session: Any) -> BinaryIO:
        return path.open("rb")

    replays: Any = Replays(SimpleNamespace(open_events=open_events))  # type: ignore[arg-type]
    return partial(replays.send, connection, SimpleNamespace(index=1), None, trio.Event(), {})


@pytest.mark.parametrize("follow", [_of_a_log, _of_a_session])
@in_trio
async def test_lines_that_nobody_reads_are_kept_once_and_charged(
    tmp_path: Path, follow: Any
) -> None:
    file = history(tmp_path, 20_000)
    async with pair_in(tmp_path) as pair, trio.open_nursery() as nursery:
        before = pair.connection._memory.amount
        tracemalloc.start()
        try:
            for _ in range(16):
                nursery.start_soon(follow(pair.connection, file))
            await wait_all_tasks_blocked()
            charged = pair.connection._memory.amount - before
            assert charged > 1 << 20
            assert tracemalloc.get_traced_memory()[0] < 1.5 * charged
        finally:
            tracemalloc.stop()
            nursery.cancel_scope.cancel()
