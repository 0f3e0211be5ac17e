"""What an agent wrote, its end first, and its result."""

from __future__ import annotations

import json
import os
import resource
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from client import following, output
from client.root import Root
from tests.unit.client.fakes import EVENT, FakeRoot, Run, eventually, has_open


def test_result(root: FakeRoot, run: Run) -> None:
    root.agent("a", status="dead", outcome="done", reason="exit:0", result="all well")
    root.agent("b", status="dead", outcome="error", reason="oom")
    root.agent("c", status="busy", result="so far")
    assert run("result", "a") == (0, "all well", "")
    assert run("result", "b") == (0, "", "ctx: b ended without a result: error oom\n")
    assert run("result", "c") == (1, "so far", "ctx: c has not finished: its status is busy\n")


def test_now(root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    context = root.agent("a") / "session" / "context"
    context.mkdir()
    (context / "now.md").write_text("# Now\n")
    assert run("now", "a") == (0, "# Now\n", "")
    assert run("now", "b")[0] != 0


def test_log(root: FakeRoot, run: Run) -> None:
    root.agent("a", status="dead", out="1\n2\n3\n", log="x\ny")
    root.agent("b", status="dead", out="only\n")
    assert run("log", "a")[1] == "==> log <==\nx\ny\n==> out <==\n1\n2\n3\n"
    assert run("log", "b")[1] == "only\n"
    assert run("log", "--out", "a")[1] == "1\n2\n3\n"
    assert run("log", "--err", "a")[1] == "x\ny"
    assert run("log", "--out", "--err", "a") == run("log", "a")


@pytest.mark.parametrize("text", ["", "\n", "a", "a\nb\nc\n", "a\nb\nc", "long\n" * 40_000])
@pytest.mark.parametrize("lines", [0, 1, 2, 50_000])
def test_last_lines(root: FakeRoot, run: Run, text: str, lines: int) -> None:
    root.agent("a", status="dead", out=text)
    expected = "".join(text.splitlines(keepends=True)[-lines:]) if lines else ""
    assert run("log", "--out", "-n", str(lines), "a")[1] == expected


def test_log_follows_until_the_end(root: FakeRoot, spawned: Any) -> None:
    directory = root.agent("a", status="busy", out="1\n")
    process = spawned("log", "-f", "a")
    assert process.stdout.readline() == b"1\n"
    with (directory / "log").open("a") as log:
        log.write("oops\n")
    heading = [process.stdout.readline() for _ in range(3)]
    assert heading == [b"\n", b"==> log <==\n", b"oops\n"]
    with (directory / "out").open("a") as out:
        out.write("2\n")
    root.end("a", "done", "exit:0")
    assert process.communicate()[0] == b"\n==> out <==\n2\n"
    assert process.returncode == 0


@pytest.mark.parametrize(
    "words",
    [["log", "-f", "a"], ["logs", "-f"], ["attach", "a"], ["events", "-f", "a"],
     ["task", "output", "-a", "a", "-f", "t"]],
)  # fmt: skip
def test_what_is_followed_ends_with_its_reader(
    root: FakeRoot, spawned: Any, words: list[str]
) -> None:
    """As in `ctx log -f a | grep -m 1 ready`, of an agent that says nothing more for long."""
    events = json.dumps(EVENT) + "\n"
    root.agent("a", status="busy", mode="once", out="1\n", events=events)  # takes no input
    root.list_agents()
    task = root.part("task", "t", of="a", status="running")
    (task / "output").write_text("1\n")
    process = spawned(*words)
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=10) == 141
    assert process.stderr.read() == b""


@pytest.mark.parametrize("words", [["logs", "-f"], ["wait"]])
def test_very_many_agents_are_followed(root: FakeRoot, spawned: Any, words: list[str]) -> None:
    """Each takes descriptors, of which a shell usually has 1024."""
    names = [f"a{number}" for number in range(20)]
    for name in names:
        root.agent(name, status="busy", out=f"{name}\n")

    def few() -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, most))

    process = spawned(*words, *names, preexec_fn=few)
    eventually(lambda: all(has_open(process, root.path / "agent" / f"{name}.d" / "wait")
                           for name in names))  # fmt: skip
    for name in names:
        root.end(name, "done", "exit:0")
    assert (process.communicate()[1], process.returncode) == (b"", 0)


def test_log_tells_that_the_agent_is_gone(root: FakeRoot, spawned: Any) -> None:
    directory = root.agent("a", status="busy", out="1\n")
    process = spawned("log", "-f", "a")
    assert process.stdout.readline() == b"1\n"
    eventually(lambda: has_open(process, directory / "wait"))
    fifo = os.open(directory / "wait", os.O_RDWR | os.O_NONBLOCK)
    shutil.rmtree(directory)
    os.close(fifo)
    said = b"ctx: a was removed or reset: its last output may be missing\n"
    assert process.communicate()[1] == said
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("content", "lines", "shown"),
    [
        (b"", 3, b""),
        (b"a\nb\nc\n", 2, b"b\nc\n"),
        (b"a\nb\nc", 2, b"b\nc"),
        (b"a\nb\nc\n", 0, b""),
        (b"a\nb\nc\n", 9, b"a\nb\nc\n"),
        (b"\n\n\n", 1, b"\n"),
        (b"no newline", 1, b"no newline"),
        (b"x" * 200_000 + b"\n" + b"y" * 200_000 + b"\n", 1, b"y" * 200_000 + b"\n"),
        (b"x" * 65535 + b"\n" + b"y" * 65536, 1, b"y" * 65536),
    ],
)
def test_the_last_lines_are_found_from_the_end(
    tmp_path: Path, content: bytes, lines: int, shown: bytes
) -> None:
    (tmp_path / "log").write_bytes(content)
    tail = following.Tail(Root(str(tmp_path)), "log", output.STDOUT, lines)
    assert b"".join(tail.chunks()) == shown
    os.close(tail.fd)


def test_a_long_line_costs_no_memory_to_skip(tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb") as log:
        for _ in range(64):
            log.write(b"x" * (1 << 20))
    root = Root(str(tmp_path))
    tracemalloc.start()
    try:
        tail = following.Tail(root, "log", output.STDOUT, 10)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    os.close(tail.fd)
    assert tail.offset == 0
    assert most < 1 << 20
