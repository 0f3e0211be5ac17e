"""Where a restore cuts histories off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from client import backup


def line(number: int, text: str = "") -> bytes:
    return json.dumps({"id": f"e{number}", "text": text}, separators=(",", ":")).encode() + b"\n"


def cut(tmp_path: Path, data: bytes, last: int) -> bytes:
    path = tmp_path / "events.jsonl"
    path.write_bytes(data)
    backup.cut_history(str(path), b'{"id":"e', last)
    return path.read_bytes()


@pytest.mark.parametrize("last", [0, 1, 5, 9, 10, 11, 1000])
def test_what_is_newer_is_cut_off(tmp_path: Path, last: int) -> None:
    rows = [line(number, "x" * (number * 13 % 50)) for number in range(1, 11)]
    assert cut(tmp_path, b"".join(rows), last) == b"".join(rows[:last])


@pytest.mark.parametrize("torn", [b"{", b'{"id":"e3","te', b'{"id":"e2"', b"\0\0\0", b"\n", b"x\n"])
def test_what_is_not_a_whole_line_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    whole = line(1) + line(2)
    assert cut(tmp_path, whole + torn, 2) == whole


def test_ids_in_texts_are_no_ids(tmp_path: Path) -> None:
    data = line(1) + line(2, '"id":"e1"') + line(3, '{"id":"e1"}')
    assert cut(tmp_path, data, 1) == line(1)


def test_an_empty_and_a_missing_history(tmp_path: Path) -> None:
    assert cut(tmp_path, b"", 3) == b""
    backup.cut_history(str(tmp_path / "none"), b'{"id":"e', 3)
    assert not (tmp_path / "none").exists()


def test_the_history_behind_a_link_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(line(1) + line(2))
    (tmp_path / "link").symlink_to("other")
    with pytest.raises(OSError):
        backup.cut_history(str(tmp_path / "link"), b'{"id":"e', 1)
    assert (tmp_path / "other").read_bytes() == line(1) + line(2)
