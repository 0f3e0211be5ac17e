"""A docstring can be read alone: it does not begin in the middle of a sentence."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

HOUSE = Path(__file__).resolve().parents[2]
MODULES = sorted(
    path
    for folder in ("client", "ctxfs", "runtime", "contrib/generate")
    for path in (HOUSE / folder).rglob("*.py")
)
#: "What is open", "The same, without root": half of a sentence whose other half is elsewhere
HALF = re.compile(r"(Of|The same|Who|What)\b")


def begun(tree: ast.Module) -> Iterator[str]:
    """The first line of each docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield (ast.get_docstring(node) or "").partition("\n")[0]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(HOUSE)))
def test_docstrings_can_be_read_alone(path: Path) -> None:
    assert not [line for line in begun(ast.parse(path.read_text())) if HALF.match(line)]


def test_half_a_sentence_is_seen() -> None:
    assert all(map(HALF.match, ("What is open.", "The same, without root.", "Of a text.")))
    assert not any(map(HALF.match, ("Offers a file.", "The samefile.", "Whoever asks.")))
    assert len(MODULES) > 150
