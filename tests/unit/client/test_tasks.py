"""Tasks: commands inside an agent."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.client.fakes import FakeRoot, Obeying, Run, eventually, has_open, refuse


def test_task_list(root: FakeRoot, run: Run, inside: Path) -> None:
    root.part("task", "t-10", kind="command_task", status="running", cmd="make\nmake install")
    root.part("task", "t-9", kind="command_task", status="queued", title="later")
    root.part("task", "kid", kind="child_agent_task", status="completed", exit="exit:0")
    rows = [line.split() for line in run("task", "list")[1].splitlines()]
    assert rows == [
        ["TASK", "KIND", "STATUS", "EXIT", "TITLE"],
        ["t-9", "command_task", "queued", "-", "later"],
        ["t-10", "command_task", "running", "-", "make…"],
    ]
    assert run("task") == run("task", "-a", "x") == run("task", "list")
    assert "kid" in run("task", "list", "--all")[1]
    shown = json.loads(run("task", "--all", "--json")[1])
    assert [(row["name"], row["exit"]) for row in shown] == [
        ("kid", "exit:0"),
        ("t-9", ""),
        ("t-10", ""),
    ]


def test_task_show(root: FakeRoot, run: Run, inside: Path) -> None:
    root.part("task", "t", status="failed", exit="exit:3", preview="one\n\x1btwo\tthree")
    assert run("task", "show", "t")[1] == (
        "name: t\nstatus: failed\nexit: exit:3\npreview:\n  one\n  \\x1btwo\tthree\n"
    )
    facts = json.loads(run("task", "show", "-a", "x", "--json", "t")[1])
    assert facts["exit"] == "exit:3" and facts["preview"] == "one\n\x1btwo\tthree"


@pytest.mark.parametrize(
    "argv",
    [
        ["task", "show", "nope"],
        ["task", "output", "nope"],
        ["task", "stop", "nope"],
        ["task", "wait", "nope"],
        ["task", "rm", "nope"],
        ["task", "input", "nope", "text"],
    ],
)
def test_unknown_tasks(run: Run, inside: Path, argv: list[str]) -> None:
    assert run(*argv) == (1, "", 'ctx: no task "nope"\n')
    assert run(*argv[:2], "-a", "y", *argv[2:]) == (1, "", 'ctx: no agent "y"\n')


@pytest.mark.usefixtures("made_agents_are_full", "inside")
def test_task_start_writes_everything(root: FakeRoot, run: Run) -> None:
    argv = ["task", "start", "--name", "t", "--cwd", "/w", "--env", "A=1", "--env", "B=2"]
    argv += ["--input", "--title", "Tests", "--work", "w1", "--", "make", "-k", "it's"]
    assert run(*argv) == (0, "t\n", "")
    directory = root.path / "agent/x.d/task/t"
    expected = {
        "cwd": "/w\n",
        "env": "A=1\nB=2\n",
        "accepts_input": "1\n",
        "title": "Tests\n",
        "work": "w1\n",
        "cmd": "make -k 'it'\"'\"'s'\n",
        "ctl": "start\n",
    }
    assert {file: (directory / file).read_text() for file in expected} == expected


@pytest.mark.usefixtures("made_agents_are_full")
def test_tasks_get_the_first_free_name(root: FakeRoot, run: Run, inside: Path) -> None:
    for name in ("task-1", "task-3"):
        root.part("task", name, status="running")
    line = "make 2>&1 | tail"
    assert [run("task", "start", "--", line)[1] for _ in range(2)] == ["task-2\n", "task-4\n"]
    assert (inside / "task/task-2/cmd").read_text() == line + "\n"
    assert run("task", "start", "--name", "task-1", "--", "true")[0] == 1


@pytest.mark.usefixtures("made_agents_are_full", "inside")
@pytest.mark.parametrize("name", [[], ["--name", "t"]])
def test_a_refused_task_is_removed_again(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch, name: list[str]
) -> None:
    refuse(monkeypatch, "env", errno.EEXIST)  # an unlikely one, but not that the name is taken
    assert run("task", "start", *name, "--env", "A", "--", "true")[0] == 1
    assert os.listdir(root.path / "agent/x.d/task") == []


@pytest.mark.usefixtures("made_agents_are_full", "inside")
@pytest.mark.parametrize(
    ("end", "exited", "status", "said"),
    [
        ("completed", "exit:0", 0, ""),
        ("failed", "exit:3", 3, ""),
        ("failed", "signal:9", 137, "ctx: task-1: failed signal:9\n"),
        ("cancelled", "signal:15", 130, "ctx: task-1: cancelled signal:15\n"),
        ("interrupted", "", 1, "ctx: task-1: interrupted\n"),
    ],
)
def test_task_start_waits(
    root: FakeRoot,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
    exited: str,
    status: int,
    said: str,
) -> None:
    directory = root.path / "agent/x.d/task/task-1"

    def live() -> None:
        (directory / "output").write_text("made it\n")
        root.record_end(directory, status=end, exit=exited)

    Obeying(root, monkeypatch, start=live)
    assert run("task", "start", "--wait", "--", "make") == (status, "made it\n", said)
    assert directory.exists()


def test_task_verbs(root: FakeRoot, run: Run, inside: Path) -> None:
    directories = [root.part("task", name, status="running") for name in ("a", "b")]
    for verb in ("stop", "kill"):
        assert run("task", verb, "a", "nope", "b") == (1, "", 'ctx: no task "nope"\n')
        assert {(path / "ctl").read_text() for path in directories} == {verb + "\n"}


def test_task_wait(root: FakeRoot, spawned: Any, inside: Path) -> None:
    directories = [root.part("task", name, status="running") for name in ("a", "b")]
    process = spawned("task", "wait", "a", "b")
    eventually(lambda: all(has_open(process, path / "wait") for path in directories))
    root.record_end(directories[1], status="failed", exit="exit:3")
    assert process.stdout.readline() == b"b failed exit:3\n"
    assert process.poll() is None
    root.record_end(directories[0], status="completed", exit="exit:0")
    assert process.communicate() == (b"a completed exit:0\n", b"")
    assert process.returncode == 1


def test_task_wait_for_what_is_over(root: FakeRoot, run: Run, inside: Path) -> None:
    done, _ = (root.part("task", name, status="running") for name in ("a", "b"))
    root.record_end(done, status="completed", exit="exit:0")
    assert run("task", "wait", "-a", "x", "a") == (0, "a completed exit:0\n", "")
    assert run("task", "wait", "-t", "20ms", "b") == (124, "", "ctx: did not end in time: b\n")


def test_task_output(root: FakeRoot, run: Run, spawned: Any, inside: Path) -> None:
    directory = root.part("task", "t", status="running")
    (directory / "output").write_text("1\n2\n3\n")
    assert run("task", "output", "t")[1] == "1\n2\n3\n"
    assert run("task", "output", "-n", "1", "t")[1] == "3\n"
    process = spawned("task", "output", "-f", "t")
    assert [process.stdout.readline() for _ in range(3)] == [b"1\n", b"2\n", b"3\n"]
    with (directory / "output").open("a") as output:
        output.write("4\n")
    root.record_end(directory, status="completed", exit="exit:0")
    assert process.communicate() == (b"4\n", b"")


@pytest.mark.parametrize(
    ("words", "stdin", "written"),
    [
        (["two", "words"], b"", b"two words\n"),
        (["--", "-n"], b"", b"-n\n"),
        ([], b"\xff no newline", b"\xff no newline"),
        (["-"], b"no newline", b"no newline"),
    ],
)
def test_task_input(
    root: FakeRoot, run: Run, inside: Path, words: list[str], stdin: bytes, written: bytes
) -> None:
    directory = root.part("task", "t", status="running")
    assert run("task", "input", "t", *words, stdin=stdin) == (0, "", "")
    assert (directory / "input").read_bytes() == written
