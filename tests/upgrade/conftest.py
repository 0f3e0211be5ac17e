"""These tests need an earlier version: ``make test-upgrade`` builds it, and only there they run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.upgrade.older import Executed, Successor

_OLDER = os.environ.get("CTXFS_OLDER", "")
collect_ignore = [] if _OLDER else ["test_placed.py", "test_upgrade.py"]


@pytest.fixture
def daemon() -> Iterator[Successor]:
    """None of both runs yet."""
    made = Successor(Path(_OLDER))
    try:
        yield made
    finally:
        made.abandon()
        made.close()


@pytest.fixture
def executed() -> Iterator[Executed]:
    """Does not run yet."""
    made = Executed(Path(_OLDER))
    try:
        yield made
    finally:
        made.close()
