"""Kept output in segments, compared with the bytes that were written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.kernel.output import Segments, append, append_line, segment_max


def segments(directory: Path, *parts: bytes, start: int = 0) -> None:
    directory.mkdir(exist_ok=True)
    for part in parts:
        (directory / f"{start:020d}").write_bytes(part)
        start += len(part)


def test_nothing_was_written_yet(tmp_path: Path) -> None:
    output = Segments(tmp_path / "none")
    assert (output.size, output.read(0, 10), output.tail(10)) == (0, b"", b"")


def test_one_segment_is_the_file(tmp_path: Path) -> None:
    segments(tmp_path, b"hello\n")
    output = Segments(tmp_path)
    assert output.header == b""
    assert (output.size, output.read(0, 100)) == (6, b"hello\n")


def test_a_read_goes_across_segments(tmp_path: Path) -> None:
    segments(tmp_path, b"abc", b"def", b"", b"ghi")
    output = Segments(tmp_path)
    assert output.read(2, 5) == b"cdefg"
    assert output.read(0, 100) == b"abcdefghi"
    assert output.read(3, 3) == b"def"
    assert output.read(9, 1) == b""


def test_what_was_dropped_is_said_first(tmp_path: Path) -> None:
    segments(tmp_path, b"late\n", start=4096)
    output = Segments(tmp_path)
    assert output.header == b"ctxfs: 4096 bytes of older output dropped (log_max)\n\xe2\x80\xa6"
    assert output.read(0, 1000) == output.header + b"late\n"
    assert output.size == len(output.header) + 5


def test_a_read_may_begin_and_end_inside_the_header(tmp_path: Path) -> None:
    segments(tmp_path, b"late\n", start=7)
    output = Segments(tmp_path)
    whole = output.header + b"late\n"
    assert output.read(3, 4) == whole[3:7]
    assert output.read(len(output.header) - 2, 4) == whole[-7:-3]


def test_a_segment_removed_meanwhile_reads_as_nothing(tmp_path: Path) -> None:
    segments(tmp_path, b"abc", b"def")
    output = Segments(tmp_path)
    (tmp_path / f"{0:020d}").unlink()
    assert output.read(0, 3) == b""
    assert output.read(3, 3) == b"def"


def test_other_names_in_the_directory_are_no_segments(tmp_path: Path) -> None:
    segments(tmp_path, b"abc")
    (tmp_path / "note").write_text("x")
    assert Segments(tmp_path).read(0, 10) == b"abc"


def test_a_view_does_not_change_when_more_is_written(tmp_path: Path) -> None:
    segments(tmp_path, b"abc")
    output = Segments(tmp_path)
    with open(tmp_path / f"{0:020d}", "ab") as file:
        file.write(b"def")
    assert (output.size, output.read(0, 100)) == (3, b"abc")


def test_a_line_of_the_runtimes_own_begins_the_log(tmp_path: Path) -> None:
    append_line(tmp_path / "log", "r1 ended", 1 << 20)
    assert Segments(tmp_path / "log").read(0, 100) == b"ctxfs: r1 ended\n"


def test_a_line_of_the_runtimes_own_goes_to_the_last_segment(tmp_path: Path) -> None:
    segments(tmp_path, b"abc\n", b"def\n")
    append_line(tmp_path, "x", 1 << 20)
    assert Segments(tmp_path).read(0, 100) == b"abc\ndef\nctxfs: x\n"
    assert len(list(tmp_path.iterdir())) == 2


@given(
    parts=st.lists(st.binary(max_size=20), min_size=1, max_size=5),
    dropped=st.integers(0, 3),
    offset=st.integers(0, 150),
    length=st.integers(0, 150),
)
def test_reads_are_those_of_the_bytes_that_are_left(
    tmp_path_factory: pytest.TempPathFactory,
    parts: list[bytes],
    dropped: int,
    offset: int,
    length: int,
) -> None:
    directory = tmp_path_factory.getbasetemp() / "output-model"
    shutil.rmtree(directory, ignore_errors=True)
    # empty segments share their name with the next one: the monitor makes none
    parts = [part for part in parts if part] or [b"x"]
    segments(directory, *parts)
    gone = min(dropped, len(parts) - 1)
    for path in sorted(directory.iterdir())[:gone]:
        path.unlink()
    output = Segments(directory)
    whole = output.header + b"".join(parts[gone:])
    assert bool(output.header) == bool(gone)
    assert output.size == len(whole)
    assert output.read(offset, length) == whole[offset : offset + length]
    assert output.tail(length) == whole[max(0, len(whole) - length) :]


def test_since_goes_on_where_it_was(tmp_path: Path) -> None:
    segments(tmp_path, b"abc", b"def")
    assert Segments(tmp_path).since(0, 4) == (b"abcd", 4)
    assert Segments(tmp_path).since(4, 100) == (b"ef", 6)
    assert Segments(tmp_path).since(6, 100) == (b"", 6)


def test_since_skips_what_was_dropped_and_shows_no_header(tmp_path: Path) -> None:
    segments(tmp_path, b"late", b"r", start=10)
    for position in (0, 9, 10):
        assert Segments(tmp_path).since(position, 100) == (b"later", 15)
    assert Segments(tmp_path).since(12, 2) == (b"te", 14)
    assert Segments(tmp_path).since(15, 100) == (b"", 15)


@pytest.mark.parametrize("position", [0, 7])
def test_since_nothing(tmp_path: Path, position: int) -> None:
    assert Segments(tmp_path / "none").since(position, 10) == (b"", position)


@given(
    parts=st.lists(st.binary(min_size=1, max_size=8), min_size=1, max_size=5),
    start=st.integers(0, 20),
    length=st.integers(1, 10),
)
def test_since_gives_each_byte_once(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], start: int, length: int
) -> None:
    directory = tmp_path_factory.mktemp("since")
    segments(directory, *parts, start=start)
    position, found = 0, b""
    while True:
        data, position = Segments(directory).since(position, length)
        assert len(data) <= length
        if not data:
            break
        found += data
    assert (found, position) == (b"".join(parts), Segments(directory).end)


def test_what_the_daemon_appends_is_limited_as_the_monitors_is(tmp_path: Path) -> None:
    for _ in range(100):
        append(tmp_path, b"x" * 1000, 16384)
    kept = Segments(tmp_path)
    assert len(kept.segments) == 2
    assert sum(segment.size for segment in kept.segments) <= 2 * (segment_max(16384) + 1000)
    assert kept.end == 100_000
    assert kept.since(99_999, 10) == (b"x", 100_000)


@pytest.mark.parametrize("said", [b"", b"one\n", b"one"])
def test_a_last_line_follows_what_is_in_files(tmp_path: Path, said: bytes) -> None:
    if said:
        append(tmp_path / "log", said, 8192)
    output = Segments(tmp_path / "log", last="r1 ended")
    line = b"ctxfs: r1 ended\n"
    whole = said + (b"\n" if said == b"one" else b"") + line
    assert (output.size, output.end) == (len(whole), len(whole))
    assert output.read(0, 100) == whole
    assert output.read(len(whole) - 6, 3) == b"end"
    assert output.tail(len(line)) == line
    assert output.since(len(said), 100) == (whole[len(said) :], len(whole))


def test_a_last_line_follows_a_segment_that_was_just_begun(tmp_path: Path) -> None:
    append(tmp_path, b"x" * 10, 8192)
    (tmp_path / f"{10:020d}").touch()
    assert Segments(tmp_path, last="end").read(0, 100) == b"x" * 10 + b"\nctxfs: end\n"
