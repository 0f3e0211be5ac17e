"""The examples of ctxfs-policy(5), run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.worlds.daemon import Daemon

PAGE = Path(__file__).parents[2] / "man" / "ctxfs-policy.5"


def examples() -> list[tuple[str, str]]:
    """(command, what it says) of every line that begins with a prompt."""
    found: list[tuple[str, str]] = []
    text = PAGE.read_text().partition(".Sh EXAMPLES")[2]
    for block in re.findall(r"^\.Bd -literal.*?\n(.*?)^\.Ed$", text, re.M | re.S):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, said = part.partition("\n")
            found.append((command, said))
    return found


def test_the_examples_do_what_the_page_says(daemon: Daemon) -> None:
    client = f"{sys.executable} -IS {daemon.root}/bin/ctx"
    environment = {"CTX_ROOT": str(daemon.root), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    commands = examples()
    assert len(commands) > 10
    for command, said in commands:
        done = subprocess.run(
            ["bash", "-c", re.sub(r"^ctx ", f"{client} ", command)],
            cwd=daemon.root / "agent",
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=30,
        )
        # an interactive shell does not number its lines
        assert done.stdout.replace("bash: line 1: ", "bash: ") == said, command
