"""The monitor's record, whole, torn, or full of what nobody wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.cell.port import Execution
from runtime.cell.record import LEASE_OVER, VERSION, Facts, RunRecord, read_record
from runtime.cell.viewers import VIEWERS_EVER
from runtime.kernel.cgroups import Cgroup
from runtime.kernel.inotify import Wakeup
from runtime.life.conclusions import LOST, judge_run
from runtime.records.model import Outcome
from tests.worlds.records import World, operator

WHOLE = (
    "monitor 10\nchain 11\nkeeper 12\nbegan 100\nstart 13 1000\nceased 1100\nexit 3 2000\n"
    "end 3000\n",
    RunRecord(
        monitor=10,
        chain=11,
        keeper=12,
        program=13,
        started=1000,
        exit_code=3,
        ended=2000,
        started_up=100,
        ended_up=1100,
        finished=True,
    ),
)


def read(directory: Path, text: str | bytes) -> RunRecord:
    path = directory / "record"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_record(path)


def test_a_whole_record(tmp_path: Path) -> None:
    text, record = WHOLE
    assert read(tmp_path, text) == record


def test_no_record_is_an_empty_one(tmp_path: Path) -> None:
    record = read_record(tmp_path / "none")
    assert record == RunRecord()
    assert not record.over
    assert not record.settled


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    text, _ = WHOLE
    for length in range(len(text)):
        whole_lines = text[:length].rpartition("\n")[0]
        expected = read(tmp_path, whole_lines + "\n" if whole_lines else "")
        assert read(tmp_path, text[:length]) == expected


@pytest.mark.parametrize(
    "line",
    [
        "",
        "monitor",
        "monitor x",
        "monitor -1",
        "monitor ٣",
        "unknown 1 2",
        "exit",
        "exit 1",
        "exit x 5",
        "signal 9",
        "start 5",
        " monitor 99",
        "MONITOR 99",
        "\0\0\0",
        "term",
    ],
)
def test_a_line_that_says_nothing_known_changes_nothing(tmp_path: Path, line: str) -> None:
    assert read(tmp_path, f"monitor 10\n{line}\nchain 11\n") == RunRecord(monitor=10, chain=11)


def test_bytes_that_are_no_text_change_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, b"monitor 10\n\xff\xfe\nchain 11\n") == RunRecord(monitor=10, chain=11)


def test_a_signal(tmp_path: Path) -> None:
    record = read(tmp_path, "start 13 1000\nsignal 9 2000\n")
    assert (record.signal, record.exit_code, record.ended) == (9, None, 2000)
    assert record.over


def test_a_held_cell(tmp_path: Path) -> None:
    record = read(tmp_path, "keeper 12\nstart 13 1000\nhold\nexit 0 2000\n")
    assert (record.held, record.exit_code, record.finished) == (True, 0, False)
    assert not read(tmp_path, "keeper 12\n").held


SET_BACK = "began 100\nstart 13 5000\nceased 1100\nexit 0 2000\n"


def test_how_long_a_program_ran_is_counted_by_a_clock_that_nobody_sets(tmp_path: Path) -> None:
    assert read(tmp_path, SET_BACK).lasted == 1000
    # of a monitor of an older version
    assert read(tmp_path, "start 13 1000\nexit 0 3000\n").lasted == 2000


def test_which_ended_first_is_told_by_a_clock_that_nobody_sets(tmp_path: Path) -> None:
    first, second = read(tmp_path, "ceased 1000\nexit 0 5000\n"), read(tmp_path, SET_BACK)
    assert first.ended_before(second) and not second.ended_before(first)
    older = read(tmp_path, "exit 0 3000\n")
    assert older.ended_before(first) and not older.ended_before(second)


def test_the_first_failure_is_the_one_that_counts(tmp_path: Path) -> None:
    record = read(tmp_path, "failed no such program: x 5\nfailed later\n")
    assert record.failed == "no such program: x 5"
    assert record.over
    assert record.settled


@pytest.mark.parametrize(
    ("text", "over", "settled"),
    [
        ("monitor 1\nchain 2\n", False, False),
        ("keeper 3\n", False, False),
        ("start 4 5\n", False, True),
        ("start 4 5\nterm\n", False, True),
        ("keeper 3\nhold\n", False, True),
        ("exit 0 6\n", True, True),
        ("end 7\n", True, True),
    ],
)
def test_what_is_known_by_when(tmp_path: Path, text: str, over: bool, settled: bool) -> None:
    record = read(tmp_path, text)
    assert (record.over, record.settled) == (over, settled)


@given(data=st.binary(max_size=200))
def test_garbage_is_read_without_an_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    record = read(tmp_path_factory.getbasetemp(), data)
    assert record.ended >= 0


# versions


def test_what_says_no_version_is_of_version_0(tmp_path: Path) -> None:
    text, record = WHOLE
    assert read(tmp_path, text).version == 0
    assert record.understood


def test_a_version_that_is_known_changes_nothing(tmp_path: Path) -> None:
    text, record = WHOLE
    for version in range(VERSION + 1):
        found = read(tmp_path, f"version {version}\n{text}")
        assert found == replace(record, version=version)
        assert found.understood


def test_lines_of_a_new_kind_need_no_new_version(tmp_path: Path) -> None:
    text, record = WHOLE
    found = read(tmp_path, f"version {VERSION}\nweather 5 6\n{text}")
    assert found == replace(record, version=VERSION)


@pytest.mark.parametrize("line", ["version", "version x", "version -1", "version 1 2"])
def test_a_version_that_is_none_changes_nothing(tmp_path: Path, line: str) -> None:
    assert read(tmp_path, f"{line}\nmonitor 10\n") == RunRecord(monitor=10)


def test_nothing_is_believed_of_a_newer_version(tmp_path: Path) -> None:
    text, _ = WHOLE
    record = read(tmp_path, f"version {VERSION + 1}\n{text}")
    assert record == RunRecord(version=VERSION + 1, lost=True)
    assert not record.understood
    # it is not said that all of its output is there
    assert (record.over, record.settled, record.finished) == (True, True, False)


def test_a_run_of_a_newer_monitor_is_lost_and_that_is_logged_once(
    tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "record"
    path.write_text(f"version {VERSION + 1}\nmonitor 10\nexit 0 2000\n")
    execution = Execution(Cgroup(tmp_path / "leaf"), Facts(path), Wakeup())
    agent = world.agents.births.create(operator(1000), "x")
    assert execution.lost
    assert judge_run(world.agents, agent, execution, execution) == LOST
    (line,) = caplog.messages
    assert line.startswith(f"{path}: a newer ctxd began this run: its record has version")


def test_a_known_record_is_not_complained_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "record"
    path.write_text(f"version {VERSION}\nmonitor 10\nexit 0 2000\n")
    assert not Execution(Cgroup(tmp_path / "leaf"), Facts(path), Wakeup()).lost
    assert caplog.messages == []


def test_viewers_come_and_leave(tmp_path: Path) -> None:
    text = "version 1\nmonitor 10\nterminal\nviewer 1 1000\nviewer 7 0\nleft 1 detached\n"
    record = read(tmp_path, text)
    assert record.terminal
    assert (record.viewers, record.left, record.next_viewer) == ({7: 0}, {1: "detached"}, 8)
    record = read(tmp_path, text + "left 9 closed\nend 5\n")
    assert (record.viewers, record.left) == ({}, {1: "detached", 7: "ended"})
    assert RunRecord().next_viewer == 1


def test_a_lease_that_is_over_is_why_it_ends(tmp_path: Path) -> None:
    """Whatever its end looks like, and whoever hangs up then; but not of what had ended."""
    over = Outcome.INTERRUPTED, LEASE_OVER
    began = "monitor 10\nkeeper 12\nstart 13 1000\n"
    for end in ("", "exit 0 2000\nend 3000\n", "hangup 6\nsignal 9 2000\n", "lost 7\nend 3000\n"):
        assert read(tmp_path, f"{began}lease 5\n{end}").cut_short == over
    assert read(tmp_path, "monitor 10\nlease 5\nfailed it was over\nend 6\n").cut_short == over
    assert read(tmp_path, f"{began}hold\nexit 0 4\nlease 5\n").cut_short == over
    for end in ("exit 0 4\n", "exit 0 4\nend 5\n", "end 5\n"):
        assert read(tmp_path, f"{began}{end}lease 5\n").cut_short is None


def test_a_record_of_the_most_viewers_is_read_whole(tmp_path: Path) -> None:
    """And soon: it is read in one step of the loop."""
    most = range(1, VIEWERS_EVER + 1)
    lines = "".join(f"viewer {n} 4294967294\nleft {n} detached\n" for n in most)
    record = read(tmp_path, f"monitor 10\n{lines}hangup 5\nexit 3 2000\nend 3000\n")
    assert len(record.left) == VIEWERS_EVER
    assert (record.hung_up, record.exit_code, record.finished) == (True, 3, True)
