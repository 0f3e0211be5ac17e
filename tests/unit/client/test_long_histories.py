"""Commands whose user's memory an agent cannot fill by a history, which may be long."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.unit.client.fakes import FakeRoot
from tests.unit.client.test_reports import history, line, present

LONG = 40 << 20
#: runs a command, then tells the most memory that it had, in KiB
MEASURED = """
import sys
from client.main import main
assert main(sys.argv[1:]) == 0
lines = open("/proc/self/status").read().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("VmHWM:")), file=sys.stderr)
"""


@pytest.fixture
def long(root: FakeRoot) -> FakeRoot:
    """A root with the history of an agent that reports without pause."""
    present(root, "a")
    made = {"id": "e1", "ts": "2026-11-21T21:50:00.000Z", "type": "agent.create", "agent": "a"}
    several = line("a", 1, "r" * 8000) * 128
    text = json.dumps(made) + "\n" + several * (LONG // len(several))
    history(root, "a", text)
    return root


@pytest.mark.parametrize("words", ["events a", "events --json a", "reports", "timeline a"])
def test_a_long_history_takes_no_memory(long: FakeRoot, words: str) -> None:
    command = [sys.executable, "-c", MEASURED, "--root", str(long.path), *words.split()]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True)
    assert int(done.stderr) < LONG >> 10, "less than the history"
