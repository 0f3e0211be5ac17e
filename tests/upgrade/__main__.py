"""``make test-upgrade``: builds an earlier version, and has this one go on with what it began."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

_HERE = Path(__file__).parent
#: seconds for each step: what is not done then is not going to be
_BUILD = 900
_TESTS = 1200


def build(source: str, scratch: Path) -> Path:
    """The directory of a version with its .venv and programs: that of ``source``, or a clone at
    that commit; ``CalledProcessError`` or ``TimeoutExpired``."""
    place = Path(source).resolve()
    if not place.is_dir():
        place = scratch / "older"
        for words in (
            ["clone", "--quiet", "--shared", ".", str(place)],
            ["-C", str(place), "checkout", "--quiet", "--detach", source],
        ):
            subprocess.run(["git", *words], check=True)
    # by its own rules: what make has set for this version is not for that one
    env = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    command = ["make", "-C", str(place), "setup", "programs"]
    subprocess.run(command, check=True, timeout=_BUILD, env=env, stdout=subprocess.DEVNULL)
    return place


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not arguments[0]:
        print("name the earlier version: make test-upgrade OLD=COMMIT (or a tag, or the "
              "directory of a checkout)", file=sys.stderr)
        return 2
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        print("make test-upgrade needs root and /dev/fuse", file=sys.stderr)
        return 1
    # not below a directory that is closed to agents
    with tempfile.TemporaryDirectory(prefix="ctxupgrade-", dir="/tmp") as scratch:
        try:
            older = build(arguments[0], Path(scratch))
            command = [sys.executable, "-m", "pytest", str(_HERE)]
            env = {**os.environ, "CTXFS_OLDER": str(older)}
            return subprocess.run(command, check=False, timeout=_TESTS, env=env).returncode
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"make test-upgrade: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
