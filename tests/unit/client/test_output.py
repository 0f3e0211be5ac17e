"""What is written to pipes, files and terminals."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from client import output
from tests.unit.client.fakes import FakeRoot, Run


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
    environment = {"CTX_ROOT": str(root.path), "LANG": "C.UTF-8"}
    process = spawned("result", "x", stdout=theirs, env=environment)
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


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0B"), (1023, "1023B"), (1024, "1.0KiB"), (10 * 1024, "10KiB"), (5 << 30, "5.0GiB")],
)
def test_size(count: int, expected: str) -> None:
    assert output.size(count) == expected


HEADER = ("NAME", "STATUS", "TEXT")
ROWS = [("a", "busy", "x" * 40), ("日本語", "dead", ""), ("b\x1b", "idle", "short")]


def test_a_table_fits_into_a_width() -> None:
    lines = output.screen_table(HEADER, ROWS, 40, colored=False)
    assert lines[1] == "a       busy    " + "x" * 23 + "…"
    assert lines[2] == "日本語  dead    -", "characters that take two columns each"
    assert lines[3].startswith("b\\x1b")
    for width in range(1, 60):
        lines = output.screen_table(HEADER, ROWS, width, colored=False)
        assert max(map(output.places, lines)) <= width


def test_colors_repeat_what_words_say() -> None:
    colored = output.screen_table(HEADER, ROWS, 0, colored=True)
    plain = [line.rstrip() for line in output.screen_table(HEADER, ROWS, 0, colored=False)]
    assert [re.sub("\x1b\\[[0-9;]*m", "", line) for line in colored] == plain
    assert "\x1b[1;32mbusy\x1b[0m" in colored[1]
    assert output.table(HEADER, ROWS)[3].split() == plain[3].split()


def on_terminal(spawned: Any, *argv: str, width: int = 80, **env: str) -> str:
    """What the client shows on a terminal of its own."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environment = {"PATH": os.environ["PATH"], "CTX_ROOT": os.environ["CTX_ROOT"], **env}
    process = spawned(*argv, stdout=theirs, env=environment)
    os.close(theirs)
    said = b""
    with suppress(OSError):  # EIO: nobody has the other side open any more
        while data := os.read(ours, 4096):
            said += data
    os.close(ours)
    assert process.wait() == 0
    return said.decode()


@pytest.mark.parametrize(
    ("argv", "env", "colored"),
    [
        ([], {"TERM": "xterm"}, True),
        ([], {"TERM": "dumb"}, False),
        ([], {}, False),
        ([], {"TERM": "xterm", "NO_COLOR": "1"}, False),
        ([], {"TERM": "xterm", "NO_COLOR": ""}, True),
        (["--color=always"], {"NO_COLOR": "1"}, True),
        (["--color", "never"], {"TERM": "xterm"}, False),
    ],
)
def test_when_colors_are_shown(
    root: FakeRoot, spawned: Any, argv: list[str], env: dict[str, Any], colored: bool
) -> None:
    root.agent("x", status="busy")
    root.list_agents()
    shown = on_terminal(spawned, "ps", *argv, width=80, **env)
    assert ("\x1b[" in shown) == colored


def test_a_pipe_gets_colors_only_if_asked(root: FakeRoot, run: Run) -> None:
    root.agent("x", status="busy")
    assert "\x1b" not in run("ps")[1] + run("tree")[1]
    try:
        assert "\x1b" in run("ps", "--color=always")[1]
    finally:
        output.STDOUT.color = output.STDERR.color = "auto"


def test_tables_are_cut_on_a_terminal_only(root: FakeRoot, spawned: Any, run: Run) -> None:
    root.agent("x", status="dead", outcome="error", reason="start_failed:" + "long " * 30)
    root.list_agents()
    shown = on_terminal(spawned, "ps", "-a", width=50)
    assert all(len(line) <= 50 for line in shown.split("\r\n")) and "…" in shown
    assert "long " * 30 in run("ps", "-a")[1]


def test_without_utf8_a_terminal_gets_ascii(root: FakeRoot, spawned: Any) -> None:
    directory = root.agent("x", status="busy")
    root.agent("y", status="busy", parent="agent:x")
    root.list_agents()
    (directory / "result.md").write_text("é")
    assert on_terminal(spawned, "tree", LC_ALL="C").splitlines() == ["x  busy", "`- y  busy"]
    assert "└─ y" in on_terminal(spawned, "tree", LC_ALL="C.UTF-8")
    assert "└─ y" in on_terminal(spawned, "tree", LANG="C"), "Python takes it for C.UTF-8"
    assert on_terminal(spawned, "get", "x", "result.md", LC_ALL="POSIX") == "\\xe9"
