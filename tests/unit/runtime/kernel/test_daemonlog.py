"""The daemon's log: bounded, told what was left out, and never waited for."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.kernel.daemonlog import DaemonLog, Rates, because_of
from runtime.kernel.systemd import Journal


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def logging_to(fd: int, clock: Clock, owner_rate: int = 50) -> Iterator[logging.Logger]:
    log = logging.Logger("ctxd.test")
    journal = DaemonLog(fd, owner_rate=owner_rate, clock=clock)
    log.addHandler(journal)
    try:
        yield log
    finally:
        journal.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_end, write_end = os.pipe()
    yield read_end, write_end
    os.close(read_end)
    os.close(write_end)


def test_rates_admit_so_many_in_a_second_and_count_the_rest(clock: Clock) -> None:
    rates = Rates(clock)
    assert [rates.admit("x", 2) for _ in range(4)] == [
        (True, 0), (True, 0), (False, 0), (False, 0),
    ]  # fmt: skip
    assert rates.admit("y", 2) == (True, 0)
    assert rates.counting
    assert rates.over() == {}
    clock.now += 1
    assert rates.admit("x", 2) == (True, 2)
    assert not rates.counting


def test_what_was_too_much_is_told_when_the_second_is_over(clock: Clock) -> None:
    rates = Rates(clock)
    for _ in range(5):
        rates.admit("x", 1)
    clock.now += 1
    assert rates.over() == {"x": 4}
    assert rates.over() == {}


def test_many_callers_cost_bounded_memory(clock: Clock) -> None:
    rates = Rates(clock)
    for number in range(10_000):
        rates.admit(f"caller {number}", 1)
    assert len(rates._windows) <= 4096


def test_a_caller_has_ten_lines_a_second_and_others_theirs(
    pipe: tuple[int, int], clock: Clock
) -> None:
    with logging_to(pipe[1], clock) as log:
        for number in range(1000):
            log.warning("refused %d", number, extra=because_of(1000, "agent:flood"))
        log.warning("refused to another", extra=because_of(1000, "agent:quiet"))
        clock.now += 1
        log.warning("refused again", extra=because_of(1000, "agent:flood"))
    said = os.read(pipe[0], 1 << 16).decode()
    assert len(re.findall("refused [0-9]", said)) == 10
    assert "refused to another\n" in said
    assert "… 990 more: ctxd.test agent:flood\n" in said
    assert said.endswith("refused again\n")


def test_an_owner_has_its_lines_whichever_of_its_agents_cause_them(
    pipe: tuple[int, int], clock: Clock
) -> None:
    with logging_to(pipe[1], clock, owner_rate=20) as log:
        for number in range(1000):
            log.warning("ended", extra=because_of(1000, f"agent:a{number}"))
        log.warning("ended", extra=because_of(1001, "agent:b"))
    said = os.read(pipe[0], 1 << 16).decode()
    assert said.count("ended") == 21


def test_what_nobody_answers_for_is_bounded_by_its_place(
    pipe: tuple[int, int], clock: Clock
) -> None:
    with logging_to(pipe[1], clock) as log:
        for _ in range(1000):
            log.error("again")
        log.error("something else")
    said = os.read(pipe[0], 1 << 16).decode()
    assert said.count("again") == 20
    assert "something else\n" in said


def test_a_line_is_plain_and_short(pipe: tuple[int, int], clock: Clock) -> None:
    with logging_to(pipe[1], clock) as log:
        log.warning("%s", "\x1b[2J\nE ctxd: forged \u202e" + "x" * 100_000)
    said = os.read(pipe[0], 1 << 20).decode()
    assert said.startswith(r"W ctxd.test: \x1b[2J\nE ctxd: forged \u202e")
    assert said.count("\n") == 1
    assert len(said) < 1100


def test_where_an_error_was_raised_is_told(pipe: tuple[int, int], clock: Clock) -> None:
    with logging_to(pipe[1], clock) as log:
        try:
            raise ValueError("why\x1b")
        except ValueError:
            log.exception("a bug")
    said = os.read(pipe[0], 1 << 16).decode()
    assert "E ctxd.test: a bug\n  Traceback" in said
    assert said.endswith("  ValueError: why\\x1b\n")


def test_nobody_who_reads_holds_up_nobody_who_writes(clock: Clock) -> None:
    read_end, write_end = os.pipe()
    try:
        with logging_to(write_end, clock) as log:
            for _ in range(50):
                clock.now += 1
                for number in range(10):
                    log.warning("%s", "x" * 900, extra=because_of(number, "caller"))
            for _ in range(3000):
                clock.now += 1
                log.warning("%s", "y" * 900)
            data = b""
            while b"lines dropped: nobody read them" not in data:
                clock.now += 1
                log.warning("now")  # as soon as there is room for it, it tells of the others
                data = data[-100:] + os.read(read_end, 1 << 16)
    finally:
        os.close(read_end)
        os.close(write_end)


def test_who_went_away_ends_nothing(clock: Clock) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        with logging_to(write_end, clock) as log:
            log.warning("to nobody")
            log.warning("to nobody")
    finally:
        os.close(write_end)


class FakeJournal:
    """A socket as that of systemd-journald, and what came to it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "socket"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._socket.settimeout(10)

    def entry(self) -> list[tuple[str, bytes]]:
        """The fields of the next one, read as the protocol says."""
        data, fields = self._socket.recv(1 << 20), []
        while data:
            line, _, rest = data.partition(b"\n")
            name, equals, value = line.partition(b"=")
            if not equals:
                size = int.from_bytes(rest[:8], "little")
                value, rest = rest[8 : 8 + size], rest[8 + size + 1 :]
            fields.append((name.decode(), value))
            data = rest
        return fields

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def journald(tmp_path: Path) -> Iterator[FakeJournal]:
    fake = FakeJournal(tmp_path)
    yield fake
    fake.close()


@contextmanager
def logging_to_journal(
    path: Path, fd: int, clock: Clock
) -> Iterator[tuple[logging.Logger, DaemonLog]]:
    log = logging.Logger("ctxd.test")
    journal = Journal(path)
    handler = DaemonLog(fd, owner_rate=50, journal=journal, clock=clock)
    log.addHandler(handler)
    try:
        yield log, handler
    finally:
        handler.close()
        journal.close()


def test_the_journal_gets_fields(
    pipe: tuple[int, int], clock: Clock, journald: FakeJournal
) -> None:
    with logging_to_journal(journald.path, pipe[1], clock) as (log, handler):
        why = because_of(7, agents=["coder", "coder", "", "other"], run="r2", reason="exit:3")
        log.warning("coder: %s", "done", extra=why)
        handler.say("ctxd: no", logging.ERROR)
        assert journald.entry() == [
            ("MESSAGE", b"ctxd.test: coder: done"),
            ("SYSLOG_IDENTIFIER", b"ctxd"),
            ("PRIORITY", b"4"),
            ("LOGGER", b"ctxd.test"),
            ("CTX_AGENT", b"coder"),
            ("CTX_AGENT", b"other"),
            ("CTX_RUN", b"r2"),
            ("CTX_REASON", b"exit:3"),
        ]
        assert journald.entry()[0:3] == [
            ("MESSAGE", b"ctxd: no"), ("SYSLOG_IDENTIFIER", b"ctxd"), ("PRIORITY", b"3"),
        ]  # fmt: skip
    os.set_blocking(pipe[0], False)
    with pytest.raises(BlockingIOError):
        os.read(pipe[0], 1)


@pytest.mark.parametrize(
    "reason", ["x\nCTX_AGENT=root", "\n", "a=b\n\0\n\n", "=\nMESSAGE\n\1\0\0\0\0\0\0\0y\n"]
)
def test_no_value_makes_another_field(
    pipe: tuple[int, int], clock: Clock, journald: FakeJournal, reason: str
) -> None:
    with logging_to_journal(journald.path, pipe[1], clock) as (log, _):
        log.info("%s", reason, extra=because_of(7, agents=["coder"], reason=reason))
        fields = journald.entry()
        assert [name for name, _ in fields] == [
            "MESSAGE", "SYSLOG_IDENTIFIER", "PRIORITY", "LOGGER", "CTX_AGENT", "CTX_REASON",
        ]  # fmt: skip
        assert fields[-1][1] == reason.encode()
        assert b"\n" not in fields[0][1]


def test_fields_are_bounded(pipe: tuple[int, int], clock: Clock, journald: FakeJournal) -> None:
    with logging_to_journal(journald.path, pipe[1], clock) as (log, _):
        log.info("%s", "m" * 100_000, extra=because_of(7, reason="r" * 100_000))
        fields = dict(journald.entry())
        assert len(fields["CTX_REASON"]) == 512
        assert len(fields["MESSAGE"]) < 1100


def test_without_a_journal_the_lines_go_to_the_descriptor(
    pipe: tuple[int, int], clock: Clock, tmp_path: Path
) -> None:
    with logging_to_journal(tmp_path / "none", pipe[1], clock) as (log, _):
        log.info("hello", extra=because_of(7, agents=["coder"]))
    assert os.read(pipe[0], 1000) == b"I ctxd.test: hello\n"


def test_a_journal_that_comes_back_gets_the_lines_after_that(
    clock: Clock, journald: FakeJournal, tmp_path: Path
) -> None:
    """While it was gone, the stream that it had behind standard error was broken as well."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    away = tmp_path / "away"
    journald.path.rename(away)
    with logging_to_journal(journald.path, write_end, clock) as (log, handler):
        log.warning("lost")
        with handler._changed:
            assert handler._changed.wait_for(lambda: not handler.waiting, 10)
        away.rename(journald.path)
        log.warning("kept")
        assert dict(journald.entry())["MESSAGE"] == b"ctxd.test: kept"
    os.close(write_end)


def test_only_the_stream_of_the_journal_is_the_journal(pipe: tuple[int, int]) -> None:
    found = os.fstat(pipe[1])
    here = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
    journal = Journal.behind(pipe[1], here)
    assert journal is not None
    journal.close()
    with open(os.devnull, "rb") as other:
        assert Journal.behind(other.fileno(), here) is None
    for text in ("", "x:y", "1", f"{found.st_dev}:{found.st_ino + 1}"):
        assert Journal.behind(pipe[1], {"JOURNAL_STREAM": text}) is None
    assert Journal.behind(pipe[1], {}) is None


def test_one_agent_has_ten_lines_a_second_and_others_theirs(
    pipe: tuple[int, int], clock: Clock
) -> None:
    with logging_to(pipe[1], clock) as log:
        for name in ["busy"] * 30 + ["quiet"] * 3:
            log.info("%s", name, extra=because_of(7, agents=[name]))
    lines = os.read(pipe[0], 1 << 16).decode().splitlines()
    assert lines.count("I ctxd.test: busy") == 10
    assert lines.count("I ctxd.test: quiet") == 3
