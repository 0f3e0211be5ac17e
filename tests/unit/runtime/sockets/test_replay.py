"""Where in a history a replay begins, without reading what is before it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime.sockets import replay


def history(path: Path, count: int) -> Path:
    file = path / "events.jsonl"
    file.write_text("".join(f'{{"id":"e{n}","x":"{"y" * (n % 97)}"}}\n' for n in range(1, count)))
    return file


@pytest.mark.parametrize("last", [0, 1, 777, 4998, 4999, 10_000])
def test_nothing_that_is_wanted_is_before_where_it_begins(
    tmp_path: Path, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_REPLAY", 1000)
    with open(history(tmp_path, 5000), "rb") as file:
        offset = replay.find_event(file.fileno(), last)
        before = os.pread(file.fileno(), offset, 0)
        assert not before or before.endswith(b"\n")
        assert all(replay._event_number(line) <= last for line in before.splitlines())
        wanted = os.pread(file.fileno(), 1 << 20, offset).splitlines()
        assert sum(replay._event_number(line) <= last for line in wanted) <= 100


def test_a_long_history_is_looked_at_in_few_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_REPLAY", 1000)
    reads: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: reads.append(1) or pread(*args))  # type: ignore[func-returns-value]
    with open(history(tmp_path, 20_000), "rb") as file:
        replay.find_event(file.fileno(), 15_000)
    assert len(reads) <= 20


def test_a_line_longer_than_a_piece_is_sent_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_REPLAY", 10)
    (tmp_path / "h").write_bytes(b'{"id":"e1","x":"' + b"y" * 100 + b'"}\ntorn')
    with open(tmp_path / "h", "rb") as file:
        lines = replay._read_lines(file.fileno(), 0)
        assert lines.endswith(b'"}\n')
        assert replay._read_lines(file.fileno(), len(lines)) == b""
