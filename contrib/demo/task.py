"""What the demo's children share: a handoff on standard input, a result as a plain file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path


def read_handoff() -> dict[str, str]:
    """The ``Key: value`` lines of the handoff."""
    pairs = (line.partition(": ") for line in sys.stdin)
    return {key: value.strip() for key, _, value in pairs}


def python_files(project: Path) -> list[Path]:
    """The sources, without what set-up made."""
    return sorted(
        path
        for path in project.rglob("*.py")
        if not any(part.startswith(".") or part == "build" for part in path.parts)
    )


def run(survey: Callable[[Path, int], str]) -> None:
    """Writes the survey as the agent's result; again and again if told to keep at it."""
    handoff = read_handoff()
    project = Path(handoff["Project"])
    while True:
        text = survey(project, int(handoff["Count"]))
        Path(os.environ["CTX_SELF"], "result.md").write_text(text)
        if handoff.get("Keep") != "yes":
            return
        time.sleep(0.2)
