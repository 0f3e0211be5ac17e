"""What is written to pipes, files and terminals."""

from __future__ import annotations

import fcntl
import os
import pty
import subprocess
from pathlib import Path
from typing import Any

import pytest

from client import output
from tests.unit.client.fakes import FakeRoot


@pytest.mark.parametrize(
    ("text", "keep", "expected"),
    [
        ("plain ü 日本", "", "plain ü 日本"),
        ("a\x1b[31mb", "", "a\\x1b[31mb"),
        ("a\nb\tc\rd", "", "a\\nb\\tc\\rd"),
        ("a\nb\tc\rd", "\n\t", "a\nb\tc\\rd"),
        ("\x7f\x9b\u202e\u2028", "", "\\x7f\\x9b\\u202e\\u2028"),
        ("\ud800", "", "\\ud800"),
    ],
)
def test_escape(text: str, keep: str, expected: str) -> None:
    assert output.escape(text, keep) == expected


def test_contents_are_exact_for_pipes(root: FakeRoot, program: Path) -> None:
    root.agent("x", status="dead")
    data = b"\x1b[31m\xff\x00 no newline"
    (root.path / "agent/x.d/result.md").write_bytes(data)
    process = subprocess.run([program, "result", "x"], capture_output=True)
    assert (process.returncode, process.stdout, process.stderr) == (0, data, b"")


def test_contents_are_escaped_on_a_terminal(root: FakeRoot, spawned: Any) -> None:
    root.agent("x", status="dead")
    (root.path / "agent/x.d/result.md").write_bytes("é\x1b[31m\ttab\n".encode() + b"\xff")
    ours, theirs = pty.openpty()
    process = spawned("result", "x", stdout=theirs)
    assert process.wait() == 0
    os.close(theirs)
    fcntl.fcntl(ours, fcntl.F_SETFL, os.O_NONBLOCK)
    shown = os.read(ours, 4096).decode()
    os.close(ours)
    assert "é\\x1b[31m" in shown and "\\xff" in shown and "\x1b" not in shown


def test_a_closed_pipe_ends_quietly(root: FakeRoot, spawned: Any) -> None:
    root.agent("x", status="dead", out="line\n" * 100_000)
    process = spawned("log", "x")
    process.stdout.close()
    assert process.wait() == 141
    assert process.stderr.read() == b""
