"""A pytest hook for conftest.py: a failure comes with what the units said."""

from __future__ import annotations

import subprocess
from collections.abc import Generator

import pytest

from tests.systemd.service import AGENTS, DAEMON, SECONDS


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        said = subprocess.run(
            ["journalctl", "-u", DAEMON, "-u", AGENTS, "-o", "short-precise", "-n", "60"],
            capture_output=True, text=True, timeout=SECONDS, check=False,
        ).stdout
        report.sections.append(("journal", said))
    return report
