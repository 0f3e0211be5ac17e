"""The tour of ctxfs(7), taken as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.worlds.daemon import TIMEOUT, Daemon

PAGE = Path(__file__).parents[2] / "man" / "ctxfs.7"


def steps() -> list[tuple[str, str]]:
    """(command, what it says) of each prompt; lines that a quotation goes on in belong to it."""
    section = PAGE.read_text().partition(".Sh TOUR\n")[2].partition("\n.Sh ")[0]
    text = "".join(re.findall(r"^\.Bd -literal.*?\n(.*?)^\.Ed$", section, re.M | re.S))
    found = []
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        command, _, said = part.partition("\n")
        while command.count("'") % 2:
            more, _, said = said.partition("\n")
            command += f"\n{more}"
        found.append((command, said))
    return found


def test_the_tour_shows_what_the_page_says(daemon: Daemon) -> None:
    (change, _), *rest = steps()
    assert change == "cd /ctx/agent" and len(rest) > 25
    for command, said in rest:
        command = command.replace("/ctx/", f"{daemon.root}/")
        env = {"PATH": f"{daemon.root}/bin:{os.environ['PATH']}", "CTX_ROOT": str(daemon.root)}
        done = subprocess.run(
            ["bash", "-c", command], cwd=daemon.root / "agent", env={**env, "LANG": "C.UTF-8"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            stdin=subprocess.DEVNULL, timeout=TIMEOUT,
        )  # fmt: skip
        assert done.stdout == said, command
