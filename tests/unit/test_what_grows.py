"""The table WHAT GROWS of ctxd(8) has the numbers of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from ctxfs import keptlines, reasons
from runtime.agents import answers, messages, reports
from runtime.kernel import daemonlog
from runtime.records import outbox, store
from runtime.records.config import Config

PAGE: Final = (Path(__file__).parents[2] / "man" / "ctxd.8").read_text()
ROWS: Final = {
    what: (bound, account, at_bound)
    for what, bound, account, at_bound in re.findall(
        "T{\n(.*)\nT}\tT{\n(.*)\nT}\tT{\n(.*)\nT}\tT{\n(.*)\nT}", PAGE
    )
}


@pytest.mark.parametrize(
    ("what", "numbers"),
    [
        ("answers of calls with an id", [answers.KEPT, f"{answers.KEPT_SIZE >> 20}M"]),
        ("ended messages that are remembered",
         [messages._REMEMBERED, f"{messages._REMEMBERED_SIZE >> 20}M"]),
        ("reports that are kept", [reports._KEPT, reports._KEPT_TEXT, reports._KEPT_IDS]),
        ("lines of the file agents", [f"{keptlines.LINE_MAX >> 10}K"]),
        ("ctxfs.db-wal", [f"{store._WAL_MAX >> 20}M", f"{store._CHECKPOINT >> 20}M"]),
        ("events on their way to histories", [outbox.OUTBOX_MAX]),
        ("reserve", [f"{store._RESERVE >> 10}K"]),
        ("refusals in memory",
         [reasons._OF_CALLER, reasons._CALLERS, reasons._OWNERS, f"{reasons._KEPT:,}"]),
        ("log of the daemon",
         [daemonlog.CALLER_RATE, daemonlog._PLACE_RATE, f"{daemonlog._WAITING_MAX >> 20}M"]),
    ],
)  # fmt: skip
def test_numbers_are_those_of_the_code(what: str, numbers: list[object]) -> None:
    bound = ROWS[what][0]
    for number in numbers:
        assert re.search(rf"\b{number}\b", bound), f"{what}: {number} is not in {bound!r}"


def test_settings_that_are_named_exist_and_each_row_is_full() -> None:
    assert len(ROWS) > 20
    named = {word for row in ROWS.values() for word in re.findall(r"\b[a-z]+_[a-z]+\b", row[0])}
    assert named <= set(Config.__dataclass_fields__), named
    for what, row in ROWS.items():
        assert all(row), what
