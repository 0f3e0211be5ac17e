"""What agents were told and have answered, and people who wait for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.worlds.daemon import read, wait_until
from tests.worlds.three import Three

#: answers in pieces; what begins so waits until it is cancelled
RESIDENT: Final = """
import json, sys
def say(**said):
    print(json.dumps(said), flush=True)
say(type="hello", takes=["cancel"])
for line in sys.stdin:
    said = json.loads(line)
    if said["type"] == "cancel":
        say(type="error", id=said["id"], text="cancelled")
        continue
    if said["text"].startswith("wait"):
        say(type="delta", id=said["id"], text="wai")
        continue
    say(type="delta", id=said["id"], text="you ")
    say(type="message", id=said["id"], text="you said " + said["text"])
"""


def lines(directory: Path, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read(directory, file).splitlines()]


def ends(directory: Path) -> list[tuple[str, str]]:
    """Outcomes and reasons of its messages, in their order."""
    told = lines(directory, "session/events.jsonl")
    ended = [each for each in told if each["type"] == "message.end"]
    return [(each["outcome"], each.get("reason", "")) for each in ended]


def wait_ends(directory: Path, count: int) -> list[tuple[str, str]]:
    wait_until(lambda: len(ends(directory)) >= count, f"{count} messages have ended")
    return ends(directory)


def conversation(directory: Path) -> list[tuple[str, str]]:
    said = lines(directory, "session/messages.jsonl")
    return [(each["role"], each["content"].strip()) for each in said]


@contextmanager
def sending(three: Three, directory: Path, text: str) -> Iterator[subprocess.Popen[str]]:
    """``ctx send`` in the background."""
    name = directory.name.removesuffix(".d")
    root = three.daemon.root
    environment = {"CTX_ROOT": str(root), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-IS", str(root / "bin" / "ctx"), "send", name, text]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    ) as send:  # fmt: skip
        try:
            yield send
        finally:
            send.kill()
