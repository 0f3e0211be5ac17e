"""These tests run in the machine that ``make test-systemd`` boots, and are collected only there."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.systemd.journal import pytest_runtest_makereport as pytest_runtest_makereport
from tests.systemd.service import Service

#: the tests of each boot of the machine, the number of which it has in its environment
FILES = {
    "1": (
        *("test_unit.py", "test_watched.py", "test_reexecution.py", "test_user_unit.py"),
        *("test_proxy_unit.py", "test_web_unit.py", "test_webhook_unit.py"),
    ),
    "2": ("test_after_reboot.py", "test_package.py"),
}
_wanted = FILES.get(os.environ.get("CTXFS_MACHINE", ""), ())
collect_ignore = [file for files in FILES.values() for file in files if file not in _wanted]


@pytest.fixture
def service() -> Iterator[Service]:
    """ctxd.service, started."""
    running = Service()
    running.start()
    yield running
    running.stop()
