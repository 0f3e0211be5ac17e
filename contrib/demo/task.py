"""Shared by the demo's children: reading the handoff, writing the result."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path


def read_handoff() -> dict[str, str]:
    """Return the ``Key: value`` lines of the handoff on standard input."""
    pairs = (line.partition(": ") for line in sys.stdin)
    return {key: value.strip() for key, _, value in pairs}


def python_files(project: Path) -> list[Path]:
    """Return the Python files of the project, without generated ones."""
    return sorted(
        path
        for path in project.rglob("*.py")
        if not any(part.startswith(".") or part == "build" for part in path.parts)
    )


def run(survey: Callable[[Path, int], str]) -> None:
    """Write the survey as the agent's result; repeat it forever with ``Keep: yes``."""
    handoff = read_handoff()
    project = Path(handoff["Project"])
    while True:
        text = survey(project, int(handoff["Count"]))
        Path(os.environ["CTX_SELF"], "result.md").write_text(text)
        if handoff.get("Keep") != "yes":
            return
        time.sleep(0.2)
