"""The table of the kernel's locks: it has a row for each operation, and handlers keep to it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pyfuse3
import pytest

import ctxfs
from ctxfs import operations
from ctxfs.locks import TABLE, Lock, Over, Wait
from ctxfs.operations import Operations

PACKAGE = Path(inspect.getfile(ctxfs)).parent
#: what handlers reach; sockets and tools are answered in tasks of their own
REACHED = [PACKAGE / "filesystem.py", *PACKAGE.glob("tree/*.py")]
#: what the boundary awaits around each handler
BOUNDARY = {"self._pace.admit", "self._pace.timed"}
#: where something that a row lists is begun or goes on
INSIDE = {"self._base.runtime.looker.look", "self.row.ready", "self._row.gather"}
WAITS = {wait.call: wait for row in TABLE.values() for wait in row.waits}
OPERATIONS = [
    name
    for name, value in vars(pyfuse3.Operations).items()
    if inspect.iscoroutinefunction(value)
]


def awaited(tree: ast.AST) -> Iterator[str]:
    """What each ``await`` calls."""
    for node in ast.walk(tree):
        assert not isinstance(node, ast.AsyncWith | ast.AsyncFor), ast.unparse(node)
        if isinstance(node, ast.Await):
            assert isinstance(node.value, ast.Call)
            yield ast.unparse(node.value.func)


def handlers() -> Iterator[tuple[str, set[str]]]:
    """Of each function of the adapter what it awaits."""
    for node in ast.walk(ast.parse(Path(inspect.getfile(operations)).read_text())):
        if isinstance(node, ast.AsyncFunctionDef):
            yield node.name, set(awaited(node))


def test_each_operation_has_a_row() -> None:
    assert set(OPERATIONS) == set(TABLE)


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_never_asked_again_has_no_handler(name: str) -> None:
    """The one of pyfuse3 answers ENOSYS."""
    assert (name in vars(Operations)) is TABLE[name].asked


def test_a_handler_waits_for_nothing_but_what_its_row_lists() -> None:
    found = dict(handlers())
    assert found.pop("guarded") == BOUNDARY
    for name, calls in found.items():
        listed = {wait.call for wait in TABLE[name.removeprefix("_")].waits} if calls else set()
        assert calls == listed, name
    inside = {call for path in REACHED for call in awaited(ast.parse(path.read_text()))}
    assert inside == INSIDE


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_every_wait_is_bounded_or_says_why(wait: Wait) -> None:
    assert wait.reason
    assert wait.bound is None or wait.bound <= 1.0


@pytest.mark.parametrize("name", OPERATIONS)
def test_with_a_lock_nothing_is_late(name: str) -> None:
    """Nor does it take its turn, but for what only who has the same file open waits for."""
    row = TABLE[name]
    if row.lock is not Lock.NONE and row.asked:
        assert row.over is not Over.LATE or name in ("read", "getattr")
        assert not row.turn or name in ("read", "write")
