"""Agents of one owner that want to stop, slow down or fill the daemon for all others."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.system.hostile.guarded import Guard
from tests.worlds.daemon import Daemon, read, wait_until
from tests.worlds.whose import OTHER

PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
OWNER = OTHER
#: that an attack goes on, in seconds
LONG_ENOUGH = 1.5


def attacker(daemon: Daemon, name: str, program: str, **files: str) -> Path:
    """An agent of an owner of its own that runs a program of Python, and says when it does."""
    directory = daemon.base / "attack"
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.py").write_text(program)
    agent = daemon.run(name, f"{PYTHON} /attack/{name}.py", owner=OWNER,
                       mount=f"{directory} /attack ro", **files)
    wait_until(lambda: "attacks" in read(agent, "out"), f"{name} attacks")
    return agent


def let_it_go_on(guard: Guard) -> None:
    time.sleep(LONG_ENOUGH)  # what is measured is time


#: many connections, each with frames on their way that cost most and say nothing
FRAMES = """
import json, os, socket, threading
path = f"{os.environ['CTX_ROOT']}/agent/{os.environ['CTX_AGENT']}.sock"
costly = [
    {"op": "send", "id": 1, "input": "x" * 200000},
    {"op": "tool", "name": "no-such", "input": [[0] * 10] * 900},
    {"op": "why", "verb": "read", "object": "agent:nobody"},
]
data = b"".join(json.dumps(each).encode() + b"\\n" for each in costly)
def flood():
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(path)
                threading.Thread(target=drain, args=(peer,), daemon=True).start()
                while True:
                    peer.sendall(data)
        except OSError:
            pass
def drain(peer):
    try:
        while peer.recv(1 << 20):
            pass
    except OSError:
        pass
for _ in range(20):
    threading.Thread(target=flood, daemon=True).start()
print("attacks", flush=True)
threading.Event().wait()
"""


def time_used(daemon: Daemon, owner: str = OWNER) -> int:
    """Of an owner's account of the loop's time, in thousandths of what may be used at once."""
    rows = json.loads(daemon.ctx("quota", "--json").stdout)
    return next(int(row["use"]) for row in rows
                if (str(row["owner"]), row["account"]) == (owner, "time"))


@pytest.mark.long
@pytest.mark.needs_root("who works beside it is on the same account")
@pytest.mark.settings(owner_time=0.05)
def test_frames_on_many_connections_are_on_their_owners_time(daemon: Daemon, guard: Guard) -> None:
    attacker(daemon, "frames", FRAMES)
    wait_until(lambda: time_used(daemon) > 1000, "its owner is over its account")
    let_it_go_on(guard)
