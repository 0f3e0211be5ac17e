"""Attacks, and who stands beside them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.system.hostile.guarded import BESIDE, COSTS, Guard, guarded
from tests.worlds.daemon import Daemon


@pytest.fixture
def guard(daemon: Daemon) -> Iterator[Guard]:
    """The whole test is an attack, beside which others work: it is marked ``alone``."""
    with guarded(daemon) as made:
        yield made


@pytest.fixture
def guard_beside(daemon: Daemon) -> Iterator[Guard]:
    """So is this one, which holds up nobody: what it leaves is looked at, and who works beside
    it where that can be measured."""
    with guarded(daemon, bystanders=BESIDE) as made:
        yield made


@pytest.fixture
def guard_after(daemon: Daemon) -> Iterator[Guard]:
    """So is this one, which fills what everybody shares, or takes a moment."""
    with guarded(daemon, bystanders=False) as made:
        yield made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What attacks cost those who worked beside them, the worst first: of make test-hostile."""
    if BESIDE and COSTS:
        terminalreporter.section("99th percentiles of bystanders, in milliseconds")
        terminalreporter.write_line(f"{'ratio':>6} {'without':>8} {'attack':>8}")
        for line in sorted(COSTS, key=lambda line: -float(line.split()[0])):
            terminalreporter.write_line(line)
