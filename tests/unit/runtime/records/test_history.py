"""Histories: whole lines, each once, whatever interrupted the writer."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from runtime.records.history import History
from runtime.texts.names import dump_json

LINE = '{"id":"e1","type":"agent.create"}'


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file grows beyond ``size``: the write that would is cut (RLIMIT_FSIZE)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path)


def test_lines_are_appended_in_order(tmp_path: Path, history: History) -> None:
    for line in ("1", "2", "ä"):
        history.append("events", [line])
    assert (tmp_path / "events").read_bytes() == "1\n2\nä\n".encode()


def test_a_history_is_the_daemons_own(tmp_path: Path, history: History) -> None:
    history.append("events", [LINE])
    assert (tmp_path / "events").stat().st_mode & 0o777 == 0o600


def test_a_history_in_a_directory_that_is_gone_is_an_error(history: History) -> None:
    with pytest.raises(FileNotFoundError):
        history.append("none/events", [LINE])


@pytest.mark.parametrize("before", ["", "0\n", "0\n00\n"])
def test_an_absent_line_is_completed(tmp_path: Path, history: History, before: str) -> None:
    (tmp_path / "events").write_text(before)
    history.complete("events", [LINE])
    assert (tmp_path / "events").read_text() == before + LINE + "\n"


def test_a_present_line_is_not_written_again(tmp_path: Path, history: History) -> None:
    (tmp_path / "events").write_text(f"0\n{LINE}\n2\n")
    history.complete("events", [LINE])
    assert (tmp_path / "events").read_text() == f"0\n{LINE}\n2\n"


@pytest.mark.parametrize("length", range(1, len(LINE) + 1))
def test_a_torn_line_is_continued(tmp_path: Path, history: History, length: int) -> None:
    (tmp_path / "events").write_text("0\n" + LINE[:length])
    history.complete("events", [LINE])
    assert (tmp_path / "events").read_text() == f"0\n{LINE}\n"


def test_a_torn_line_inside_a_character_is_continued(tmp_path: Path, history: History) -> None:
    line = '{"text":"ä"}'
    (tmp_path / "events").write_bytes(line.encode()[: line.encode().index("ä".encode()) + 1])
    history.complete("events", [line])
    assert (tmp_path / "events").read_text() == line + "\n"


def test_a_file_that_was_never_begun_is_made(tmp_path: Path, history: History) -> None:
    history.complete("events", [LINE])
    assert (tmp_path / "events").read_text() == LINE + "\n"


@given(
    texts=st.lists(st.text(max_size=8), min_size=1, max_size=5),
    cut=st.integers(0, 200),
)
def test_completing_makes_every_line_there_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], cut: int
) -> None:
    """However much of the outbox an earlier daemon had written, in order."""
    directory = tmp_path_factory.getbasetemp()
    numbered = [dump_json({"id": f"e{number}", "text": text}) for number, text in enumerate(texts)]
    whole = "".join(f"{line}\n" for line in numbered).encode()
    (directory / "model").write_bytes(whole[:cut])
    History(directory).complete("model", numbered)
    assert (directory / "model").read_bytes() == whole


def test_a_very_long_line_is_not_written_twice(tmp_path: Path, history: History) -> None:
    """A result of control characters grows sixfold when it is written as JSON."""
    line = '{"id":"m1","content":"' + "\\u0001" * (512 << 10) + '"}'
    history.append("events", [line])
    history.complete("events", [line])
    assert (tmp_path / "events").stat().st_size == len(line) + 1


def test_a_very_long_torn_line_is_continued(tmp_path: Path, history: History) -> None:
    line = '{"id":"m1","content":"' + "\\u0001" * (512 << 10) + '"}'
    (tmp_path / "events").write_text("0\n" + line[:-100])
    history.complete("events", [line])
    assert (tmp_path / "events").stat().st_size == len(line) + 3


def test_a_write_that_the_disk_cut_is_an_error(tmp_path: Path, history: History) -> None:
    with full_disk(10), pytest.raises(OSError) as caught:
        history.append("events", [LINE])
    assert caught.value.errno == errno.EFBIG
    assert (tmp_path / "events").read_text() == LINE[:10]


def test_completing_on_a_full_disk_is_an_error_too(tmp_path: Path, history: History) -> None:
    """A line that was not written must not be taken for delivered."""
    with full_disk(10), pytest.raises(OSError):
        history.complete("events", [LINE])
    history.complete("events", [LINE])
    assert (tmp_path / "events").read_text() == LINE + "\n"


@pytest.mark.parametrize(
    "rest",
    [b"\0" * 50, b'{"id":"e9","ty\0\0\0', b"\0\0{", b'{"something":"else'],
    ids=["zeros", "torn and zeros", "zeros and more", "torn and unknown"],
)
@pytest.mark.parametrize("there", [True, False])
def test_what_a_loss_of_power_left_is_cut_off(
    tmp_path: Path, history: History, rest: bytes, there: bool
) -> None:
    begin = b"0\n" + ((LINE + "\n").encode() if there else b"")
    (tmp_path / "events").write_bytes(begin + rest)
    history.complete("events", [LINE])
    assert (tmp_path / "events").read_text() == f"0\n{LINE}\n"


def test_a_file_of_zeros_begins_anew(tmp_path: Path, history: History) -> None:
    (tmp_path / "events").write_bytes(b"\0" * 4096)
    history.complete("events", [LINE, "second"])
    assert (tmp_path / "events").read_text() == f"{LINE}\nsecond\n"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("", 0),
        ('{"id":"e7","ts":"x"}\n', 7),
        ('{"id":"e7"}\n{"id":"m12","content":"{\\"id\\":\\"e99\\""}\n', 12),
        ("no json\n", 0),
    ],
)
def test_the_last_number(tmp_path: Path, history: History, text: str, number: int) -> None:
    (tmp_path / "events").write_text(text)
    assert history.last_number("events") == number
    assert history.last_number("none") == 0


def test_syncing_syncs_what_was_written_since(
    tmp_path: Path, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    history.append("events", [LINE])
    history.append("gone", [LINE])
    (tmp_path / "gone").unlink()
    trio.run(history.synced)
    trio.run(history.synced)
    assert synced == [str(tmp_path / "events")]
