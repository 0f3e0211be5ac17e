"""How long ends took, beside their bounds: a table after all tests."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import pytest

#: of this process, and of those that ran tests for it: (what ended, how, seconds, bound)
_TOOK: Final[list[tuple[str, str, float, float]]] = []
#: told by a process that ran tests for another one
_KEY: Final = "took"


@pytest.fixture
def took(request: pytest.FixtureRequest) -> Callable[[str, float, float], None]:
    """Notes how long an end took, beside its bound."""
    name = request.node.name.removeprefix("test_")
    return lambda what, seconds, bound: _TOOK.append((what, name, seconds, bound))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What shares machines is run by one process; what mostly waits, by any."""
    made: Any = import_module("xdist.scheduler").LoadScopeScheduling(config, log)
    made._split_scope = _scope
    return made


def _scope(nodeid: str) -> str:
    module = nodeid.partition("::")[0]
    return nodeid if module.endswith(("test_failures.py", "test_full.py")) else module


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output[_KEY] = _TOOK


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _TOOK.extend(tuple(each) for each in getattr(node, "workeroutput", {}).get(_KEY, ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _TOOK:
        terminalreporter.section("how long ends took, and their bounds, in seconds")
        for what, name, seconds, bound in sorted(_TOOK):
            terminalreporter.write_line(f"{seconds:8.2f} {bound:8.2f}  {what}: {name}")
