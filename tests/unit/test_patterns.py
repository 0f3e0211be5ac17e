"""Regular expressions mean the same to every Python that is supported."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HOUSE = Path(__file__).resolve().parents[2]
#: Python before 3.11.5, such as that of Debian 12, goes on as if a possessive part had matched
#: that had only begun to
POSSESSIVE = re.compile(r"[+*?}]\+|\(\?>")


@pytest.mark.parametrize("package", ["client", "contrib", "ctxfs"])
def test_no_pattern_is_possessive(package: str) -> None:
    wrong: list[str] = []
    for path in sorted((HOUSE / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("re."):
                continue
            pattern = ast.unparse(node.args[0]) if node.args else ""
            if POSSESSIVE.search(re.sub(r"\\+.|\[[^]]*\]", "x", pattern)):
                wrong.append(f"{path.relative_to(HOUSE)}:{node.lineno}")
    assert not wrong
