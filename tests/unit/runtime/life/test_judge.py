"""What became of a program, told from its record."""

from __future__ import annotations

import pytest

from runtime.cell.record import RunRecord, judge


@pytest.mark.parametrize(
    ("record", "oom", "outcome", "reason"),
    [
        (RunRecord(started=1, exit_code=0, ended=2), False, "done", "exit:0"),
        (RunRecord(started=1, exit_code=0, ended=2), True, "done", "exit:0"),
        (RunRecord(started=1, exit_code=137, ended=2), True, "error", "exit:137"),
        (RunRecord(started=1, signal=9, ended=2), False, "error", "signal:9"),
        (RunRecord(started=1, signal=9, ended=2), True, "error", "oom"),
        (RunRecord(started=1, signal=11, ended=2), True, "error", "signal:11"),
        (RunRecord(started=1, finished=True), False, "error", "signal:9"),
        (RunRecord(finished=True), False, "error", "start_failed: bwrap: no such source"),
        (
            RunRecord(started=1, failed="x: not there", exit_code=127, ended=2),
            False,
            "error",
            "start_failed: x: not there",
        ),
    ],
)
def test_ends_are_told_apart(record: RunRecord, oom: bool, outcome: str, reason: str) -> None:
    assert judge(record, oom=oom, complaint="bwrap: no such source") == (outcome, reason)


def test_a_start_that_failed_in_silence_says_so() -> None:
    reason = judge(RunRecord(finished=True), oom=False, complaint="")[1]
    assert reason.endswith("no reason was given")
