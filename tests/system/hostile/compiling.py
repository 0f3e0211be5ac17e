"""Programs of the attacks, compiled once for all processes of the tests.

They are kept in ``build/attacks``, named by what they are made of; ``make clean`` removes them.
A user who cannot write there keeps them as long as the run.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from tests.worlds.whose import ROOTLESS

_FLAGS: Final = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror")
_KEPT: Final = (Path(tempfile.gettempdir()) if ROOTLESS
                else Path(__file__).parents[3] / "build") / "attacks"


@functools.cache
def _compiled(flags: tuple[str, ...], sources: tuple[Path, ...]) -> Path:
    made_of = hashlib.sha256(repr((_FLAGS, flags)).encode())
    headers = {header for source in sources for header in source.parent.glob("*.h")}
    for path in (*sources, *sorted(headers)):
        made_of.update(path.read_bytes())
    made = _KEPT / f"{sources[0].stem}-{made_of.hexdigest()[:16]}"
    _KEPT.mkdir(parents=True, exist_ok=True)
    with open(made.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers wait, rather than compile it too
        if not made.exists():
            begun = made.with_suffix(".begun")
            subprocess.run(["cc", *_FLAGS, *flags, "-o", str(begun), *map(str, sources)],
                           check=True, timeout=60)
            begun.rename(made)
    return made


def compile_to(path: Path, *sources: Path, flags: tuple[str, ...] = ("-static",)) -> Path:
    """Puts what these are compiled to at a path, which is the test's own."""
    return Path(shutil.copy(_compiled(flags, sources), path))
