"""make test-clients: installs real command lines, and has them be agents of a scripted model.

They come from npm, in pinned versions, since what they say and accept changes weekly, into a
directory of the checkout that git ignores: 1.2 GB. Nothing of them is run while they are
installed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.clients import BIN, DIRECTORY, MODULES, PACKAGES, PROGRAMS, machine

#: what claude-agent-acp needs; Gemini CLI needs 20, and Debian 12 has 18
NODE = 22


def packages() -> dict[str, str]:
    """What to install, with node itself where this machine has none that will do."""
    found = {name.format(machine()): version.format(machine())
             for name, version in PACKAGES.items()}  # fmt: skip
    said = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    number = re.search("[0-9]+", said)
    if number is None or int(number[0]) < NODE:
        found[f"node-linux-{machine()}"] = "22.12.0"
    return found


def install() -> None:
    """Installs what is not there in this version, and links the programs."""
    wanted = json.dumps({"private": True, "dependencies": packages()}, indent=2)
    there = DIRECTORY / "package.json"
    complete = DIRECTORY / "complete"
    if not complete.exists() or complete.read_text() != wanted:
        DIRECTORY.mkdir(exist_ok=True)
        complete.unlink(missing_ok=True)
        there.write_text(wanted)
        begun = time.monotonic()
        subprocess.run(
            ["npm", "install", "--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund"],
            cwd=DIRECTORY, check=True,
        )  # fmt: skip
        complete.write_text(wanted)
        print(f"installed in {time.monotonic() - begun:.0f} s")
    shutil.rmtree(BIN, ignore_errors=True)
    BIN.mkdir()
    for name, path in PROGRAMS.items():
        (BIN / name).symlink_to(MODULES / path.format(machine()))
    node = MODULES / f"node-linux-{machine()}" / "bin" / "node"
    if node.exists():
        (BIN / "node").symlink_to(node)


def sizes() -> None:
    for name in PACKAGES:
        path = MODULES / name.format(machine())
        size = sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
        print(f"{name.format(machine()):40} {size / 1e6:5.0f} MB")


def main() -> int:
    install()
    sizes()
    os.environ["CTXFS_CLIENTS"] = "1"
    return subprocess.call(
        [sys.executable, "-m", "pytest", "-v", "-s", str(Path(__file__).parent), *sys.argv[1:]]
    )


if __name__ == "__main__":
    sys.exit(main())
