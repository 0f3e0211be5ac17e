"""These tests run in the machine that ``make test-vm`` boots, and are collected only there."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.systemd.journal import pytest_runtest_makereport as pytest_runtest_makereport
from tests.systemd.service import Service

#: the tests of each boot, the number of which is on the kernel's command line
FILES = {
    "1": ["test_limits.py", "test_quotas.py"],
    "2": ["test_after_cut.py", "test_clocks.py"],
    "3": ["test_after_busy_cut.py", "test_disk_errors.py"],
}
_wanted = FILES.get(os.environ.get("CTXFS_VM", ""), [])
collect_ignore = [file for files in FILES.values() for file in files if file not in _wanted]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """ctxd.service, started; starting it is slow here, so it is one for all tests of a module."""
    running = Service()
    running.start()
    yield running
    running.stop()
