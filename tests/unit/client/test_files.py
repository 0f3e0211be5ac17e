"""Long files, read ahead and whole lines at a time; times."""

from __future__ import annotations

import errno
import os
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from client import files
from client.exits import Failure
from client.files import timestamp
from client.root import SOME, Root

LONG = [b"x" * length for length in (0, 1, 70, SOME - 1, SOME, SOME + 1, 3 * files.LARGE)]


def lines_of(path: Path) -> list[str]:
    """What is read, which is whole lines."""
    found: list[str] = []
    for some in Root(str(path.parent)).lines(path.name):
        found += some.split("\n")
    return found


@pytest.mark.parametrize("end", [b"\n", b""])
@pytest.mark.parametrize("lines", [[b"one"], [b"one", b"\xe2\x82\xac"] * 60_000, LONG, LONG[::-1]])
def test_the_lines_of_a_file_are_all_and_whole(
    tmp_path: Path, lines: list[bytes], end: bytes
) -> None:
    (tmp_path / "long").write_bytes(b"\n".join(lines) + end)
    expected = [line.decode() for line in lines]
    while not end and not expected[-1]:
        expected.pop()
    assert lines_of(tmp_path / "long") == expected
    (tmp_path / "long").write_bytes(b"")
    assert lines_of(tmp_path / "long") == []


def test_a_long_file_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows is asked for while what came first is looked at."""
    (tmp_path / "long").write_bytes(b"x" * 3 * files.BLOCK)
    read, number, second = os.read, iter(range(9)), threading.Event()

    def told(fd: int, size: int) -> bytes:
        if next(number) == 1:
            second.set()
        return read(fd, files.BLOCK)

    monkeypatch.setattr(os, "read", told)
    pieces = files.read_ahead(str(tmp_path / "long"))
    assert next(pieces) == b"x" * files.BLOCK
    assert second.wait(30)
    assert list(pieces) == [b"x" * files.BLOCK] * 2


def test_a_read_ahead_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "long").write_bytes(b"line\n" * files.LARGE)
    read = os.read
    left = iter(range(2))

    def fail(fd: int, size: int) -> bytes:
        if next(left, None) is None:
            raise OSError(errno.EAGAIN, "later")
        return read(fd, size)

    others = set(threading.enumerate())
    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "read", fail)
    with pytest.raises(Failure) as caught:
        lines_of(tmp_path / "long")
    assert caught.value.number == errno.EAGAIN
    for thread in set(threading.enumerate()) - others:
        thread.join(30)
    assert set(os.listdir("/proc/self/fd")) <= before
    with pytest.raises(Failure) as caught:
        lines_of(tmp_path / "none")
    assert caught.value.number == errno.ENOENT


def test_times_are_those_of_the_calendar() -> None:
    day = datetime(1970, 1, 1, 23, 59, 58, 123000, tzinfo=UTC)
    while day.year < 2110:
        text = day.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        assert timestamp(text) == pytest.approx(day.timestamp(), abs=1e-5)
        assert timestamp(text[:19] + "Z") == int(day.timestamp())
        day += timedelta(days=1)


@pytest.mark.parametrize("text", ["", "-", "never", "2026-11-21", "2026-11-21T1", "\xff" * 30])
def test_what_is_no_time_is_0(text: str) -> None:
    assert timestamp(text) == 0
