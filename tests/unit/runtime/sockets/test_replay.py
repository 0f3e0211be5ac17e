"""Where in a history a replay begins, without reading what is before it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime.records.history import find_line, read_lines
from runtime.sockets.replay import _event_number


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
