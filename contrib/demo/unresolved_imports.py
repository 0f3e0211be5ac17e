"""A child's task: compile errors, and imports that neither the project nor Python provides."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from task import python_files, run


def survey(project: Path, count: int) -> str:
    errors = []
    missing: dict[str, set[str]] = defaultdict(set)
    files = python_files(project)
    own = {path.name for path in project.iterdir() if path.is_dir()} | {p.stem for p in files}
    for path in files:
        name = str(path.relative_to(project))
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, OSError) as error:
            errors.append(f"- {name}: {error}\n")
            continue
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for top in {full.split(".")[0] for full in names}:
                if top not in sys.stdlib_module_names and top not in own:
                    missing[top].add(name)
    rows = [f"- {top}: imported by {len(users)} files\n" for top, users in
            sorted(missing.items(), key=lambda item: -len(item[1]))[:count]]
    return (
        f"## Compile errors: {len(errors)} of {len(files)} files\n\n{''.join(errors[:count])}"
        f"\n## Imports from outside the project and the standard library\n\n{''.join(rows)}"
    )


run(survey)
