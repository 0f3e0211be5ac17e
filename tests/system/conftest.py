"""One daemon for the tests of a module that need none of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import Daemon, daemon_of


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Daemon]:
    with daemon_of() as running:
        yield running
