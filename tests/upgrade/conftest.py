"""These tests need an earlier version: ``make test-upgrade`` builds it, and only there they run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.upgrade.older import Successor

_OLDER = os.environ.get("CTXFS_OLDER", "")
collect_ignore = [] if _OLDER else ["test_upgrade.py"]


@pytest.fixture
def daemon() -> Iterator[Successor]:
    """None of both runs yet."""
    made = Successor(Path(_OLDER))
    try:
        yield made
    finally:
        made.abandon()
        made.close()
