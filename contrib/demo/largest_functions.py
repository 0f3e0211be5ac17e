"""A child's task: the largest functions, by syntax tree."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from task import python_files, run


def survey(project: Path, count: int) -> str:
    found = []
    for path in python_files(project):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, OSError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                found.append((lines, f"{path.relative_to(project)}:{node.lineno}", node.name))
    rows = [f"- {lines:4} lines  {name}  ({place})\n" for lines, place, name in
            sorted(found, reverse=True)[:count]]
    return f"## Largest of {len(found)} functions\n\n{''.join(rows)}"


run(survey)
