"""Programs of the attacks, each compiled once in a run."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

_FLAGS: Final = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror")


@functools.cache
def _directory() -> Path:
    made = tempfile.mkdtemp(prefix="ctxcompiled-")
    atexit.register(shutil.rmtree, made)
    return Path(made)


@functools.cache
def _compiled(flags: tuple[str, ...], sources: tuple[Path, ...]) -> Path:
    made = _directory() / str(_compiled.cache_info().currsize)
    subprocess.run(["cc", *_FLAGS, *flags, "-o", str(made), *map(str, sources)], check=True,
                   timeout=60)
    return made


def compile_to(path: Path, *sources: Path, flags: tuple[str, ...] = ("-static",)) -> Path:
    """Puts what these are compiled to at a path, which is the test's own."""
    return Path(shutil.copy(_compiled(flags, sources), path))
