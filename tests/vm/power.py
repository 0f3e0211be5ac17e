"""What the tests of the power cuts have in common."""

from __future__ import annotations

import json
import os
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn

from tests.worlds.models import Metered, metered

STATE = Path("/var/lib/ctxfs")
#: written and not synced, so that a power cut takes it
UNSYNCED = STATE / "unsynced"

#: what was acknowledged before the cut; on another disk than the state
ACKNOWLEDGED = Path("/opt/ctxfs/acknowledged")

CONFIG: Final = Path("/etc/ctxfs/config.yaml")


@contextmanager
def models() -> Iterator[Metered]:
    """A meter, and the configuration of a ctxd that starts beside it: neither survives a boot."""
    directory = Path("/run/models")
    directory.mkdir()
    with metered(directory) as made:
        CONFIG.parent.mkdir(exist_ok=True)
        network = f"{{socket: {made.socket}, port: 8080, header: counters}}"
        CONFIG.write_text(f"networks: {{models: {network}}}\n")
        yield made
    CONFIG.unlink()


def write_synced(path: Path, text: str) -> None:
    """As a careful program does: what this returned for is on the disk."""
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(fd, text.encode())
        os.fsync(fd)
    finally:
        os.close(fd)


def append_synced(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        assert os.write(fd, data) == len(data)
        os.fsync(fd)
    finally:
        os.close(fd)


def durable_trees(root: Path) -> list[Path]:
    """A directory in each tree of real files, which a test makes."""
    return [root / "shared/power/data/power", root / "home/0/data/power"]


def version(number: int) -> bytes:
    """A file of several blocks, each line of which names its version."""
    return f"{number:07}\n".encode() * 2048


def sync(path: Path) -> None:
    """As ``sync PATH`` does: by a descriptor of its own, for reading."""
    subprocess.run(["sync", str(path)], check=True)


def cut() -> NoReturn:
    """The machine is reset: nothing is unmounted, nothing synced, nobody told."""
    UNSYNCED.write_text("lost\n")
    os.write(1, b"@@ cut\n")
    if os.isatty(1):
        termios.tcdrain(1)
    with open("/proc/sysrq-trigger", "w") as trigger:
        trigger.write("b")
        trigger.flush()
    raise AssertionError("the machine goes on")


def damaged(root: Path) -> str:
    """What is wrong in the histories of root's agents, one a line."""
    found = []
    histories = sorted(root.glob("home/0/agent/*/session/*/*.jsonl"))
    assert histories
    for path in histories:
        text = path.read_text()
        if "\0" in text:
            found.append(f"{path}: NUL bytes after {text.partition(chr(0))[0][-60:]!r}")
        elif text and not text.endswith("\n"):
            found.append(f"{path}: torn: {text[-60:]!r}")
        else:
            ids = [json.loads(line)["id"] for line in text.splitlines()]
            twice = sorted({i for i in ids if ids.count(i) > 1})
            found += [f"{path}: {', '.join(twice)} twice: {text}"] if twice else []
    return "\n".join(found)
