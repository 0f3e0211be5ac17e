"""One daemon for the tests of a module that need none of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import Daemon, daemon_of
from tests.system.hostile.guarded import Guard, guarded


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Daemon]:
    with daemon_of() as running:
        yield running


@pytest.fixture
def guard(daemon: Daemon) -> Iterator[Guard]:
    """The whole test is an attack."""
    with guarded(daemon) as made:
        yield made


@pytest.fixture
def guard_alone(daemon: Daemon) -> Iterator[Guard]:
    """So is this one, which takes a moment."""
    with guarded(daemon, bystanders=False) as made:
        yield made
