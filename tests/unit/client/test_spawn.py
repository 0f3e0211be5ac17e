"""Programs as agents: `spawn` and `run`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client import main, making, sockets
from client.exits import Failure
from client.following import Concluded, Tail
from client.output import STDOUT
from client.root import Root
from runtime.texts.names import split_command
from tests.unit.client.fakes import (
    DONE,
    START,
    FakeAgent,
    FakeRoot,
    Obeying,
    Run,
    eventually,
    message,
    set_status,
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("/a", "/a\t/a\tro\t-"),
        ("/a:rw", "/a\t/a\trw\t-"),
        ("/a:/b", "/a\t/b\tro\t-"),
        ("/a:/b:hide", "/a\t/b\thide\t-"),
        ("/a b/../c d:/e f:rw", "/c d\t/e f\trw\t-"),
        ("sub", "{cwd}/sub\t{cwd}/sub\tro\t-"),
        (".:/src:rw", "{cwd}\t/src\trw\t-"),
        ("shared:data:/t:rw", "shared:data\t/t\trw\t-"),
        ("shared:data:/t", "shared:data\t/t\tro\t-"),
        ("home::/h:ro", "home:\t/h\tro\t-"),
        ("shared:/t", "{cwd}/shared\t/t\tro\t-"),
        ("node:recipes/a b:/t", "node:recipes/a b\t/t\tro\t-"),
    ],
)
def test_mount_line(text: str, line: str) -> None:
    assert making.mount_line(text) == line.format(cwd=os.getcwd())


@given(st.lists(st.binary().map(lambda data: data.replace(b"\0", b"")), max_size=4))
def test_an_exec_line_carries_every_argument(arguments: list[bytes]) -> None:
    line = making.command_of([os.fsdecode(argument) for argument in arguments])
    line.encode()  # which is UTF-8
    assert "\n" not in line
    assert [os.fsencode(word) for word in split_command(line)] == arguments


def test_an_exec_line_can_be_read() -> None:
    words = ["claude", "-p", "Don't stop:\n\t1. plan\n"]
    assert making.command_of(words) == r"claude -p $'Don\'t stop:\n\x091. plan\n'"


@pytest.mark.parametrize("option", ["--env", "--cwd", "--model", "--limit"])
def test_no_option_writes_a_second_line(root: FakeRoot, run: Run, option: str) -> None:
    status, _, err = run("spawn", "x", option, "A=1\nB=2", "--", "true")
    assert status == 2
    assert "A=1\\nB=2' has a newline, which a line of " in err
    assert os.listdir(root.path / "agent") == []


@pytest.mark.usefixtures("made_agents_are_full")
def test_spawn_writes_everything(root: FakeRoot, run: Run) -> None:
    argv = ["spawn", "x", "--parent", "p", "--mount", "/a:/b:rw", "--mount", "/c"]
    argv += ["--env", "A=1", "--env", "B=2", "--cwd", "/w"]
    argv += ["--life", "temp", "--restart", "no", "--limit", "grace=1s", "--timeout", "10m"]
    argv += ["--handoff", "-", "--", "echo", "--wait", "it's", ""]
    assert run(*argv, stdin=b"the task") == (0, "x\n", "")
    directory = root.path / "agent" / "x.d"
    expected = {
        "parent": "agent:p\n",
        "mount": "/a\t/b\trw\t-\n/c\t/c\tro\t-\n",
        "env": "A=1\nB=2\n",
        "cwd": "/w\n",
        "life": "temp\n",
        "restart": "no\n",
        "limits": "grace=1s\ntimeout=10m\n",
        "exec": "echo --wait 'it'\"'\"'s' ''\n",
        "handoff.md": "the task",
        "ctl": "start\n",
    }
    assert {file: (directory / file).read_text() for file in expected} == expected


@pytest.mark.usefixtures("made_agents_are_full")
@pytest.mark.parametrize("kind", ["file", "ended pipe", "open pipe"])
def test_spawn_leaves_a_list_to_the_loop_that_reads_it(
    root: FakeRoot, tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    (tmp_path / "list").write_text("b\nc\n")
    reader, writer = os.pipe()
    os.write(writer, b"b\nc\n")
    if kind == "file":
        reader = os.open(tmp_path / "list", os.O_RDONLY)
    elif kind == "ended pipe":
        os.close(writer)
    saved = os.dup(0)
    os.dup2(reader, 0)
    try:
        assert main.main(["spawn", "a", "--", "cat"]) == 0
        assert os.read(0, 10) == b"b\nc\n"
    finally:
        os.dup2(saved, 0)
    assert capfd.readouterr().out == "a\n"
    assert (root.path / "agent/a.d/handoff.md").read_text() == ""


@pytest.mark.usefixtures("made_agents_are_full")
def test_spawn_says_so_where_it_read_its_input_before(root: FakeRoot, run: Run) -> None:
    said = "ctx: standard input is not read: for the task of the agent, say --handoff -\n"
    assert run("spawn", "x", "--", "cat", stdin=b"the task") == (0, "x\n", said)
    assert run("spawn", "y", "--", "cat") == (0, "y\n", "")
    assert run("spawn", "z", "--handoff", "do it", "--", "cat", stdin=b"") == (0, "z\n", "")
    texts = [(root.path / f"agent/{name}.d/handoff.md").read_text() for name in "xyz"]
    assert texts == ["", "", "do it"]


@pytest.fixture(autouse=True)
def tied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The agents that have windows."""
    owners: list[str] = []

    def open_window(root: Root, owner: str) -> int:
        owners.append(owner)
        return -1

    monkeypatch.setattr(sockets, "open_window", open_window)
    return owners


@pytest.mark.usefixtures("made_agents_are_full")
def test_spawn_waits(root: FakeRoot, run: Run) -> None:
    directory = root.path / "agent" / "x.d"

    def live() -> None:
        eventually(lambda: (directory / "ctl").exists() and (directory / "ctl").read_text() > "\n")
        (directory / "out").write_text("to stdout\n")
        (directory / "log").write_text("to stderr\n")
        root.end("x", "error", "exit:3")

    thread = threading.Thread(target=live)
    thread.start()
    result = run("spawn", "x", "--wait", "--rm", "--", "true")
    thread.join()
    assert result == (3, "to stdout\n", "to stderr\n")
    assert not directory.exists()


@pytest.fixture
def turning(root: FakeRoot, made_agents_are_full: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a started agent answer with these frames, once a connection has been tried in vain."""

    def prepare(*frames: dict[str, Any]) -> tuple[Obeying, list[FakeAgent]]:
        fakes: list[FakeAgent] = []
        connect = sockets.connect

        def try_first(*args: Any) -> Any:
            try:
                return connect(*args)
            finally:
                if not fakes:
                    fakes.append(FakeAgent(root, *frames))
                    set_status(root, "idle")

        monkeypatch.setattr(sockets, "connect", try_first)
        verbs = {
            "start": lambda: set_status(root, "starting"),
            "stop": lambda: root.end("x", "done", "self_stop"),
        }
        return Obeying(root, monkeypatch, **verbs), fakes

    return prepare


def test_run_at_a_node_talks(root: FakeRoot, run: Run, turning: Any) -> None:
    turning(START, message("four"), {**DONE, "status": "processed"})
    argv = ("run", "x", "--node", "gpu*", "--keep", "--message", "hi", "--", "cat")
    assert run(*argv) == (0, "four\n", "")
    directory = root.path / "agent" / "x.d"
    files = {file: (directory / file).read_text() for file in ("placement", "mode")}
    assert files == {"placement": "node=gpu*\n", "mode": "turn\n"}


def test_run_leaves_nothing_behind(
    root: FakeRoot, run: Run, turning: Any, tied: list[str]
) -> None:
    obeying, fakes = turning(START, message("four"), {**DONE, "status": "processed"})
    argv = ["run", "x", "--env", "A=1", "--", "cat", "-"]
    assert run(*argv, stdin=b"two and two?\n") == (0, "four\n", "")
    assert obeying.written == ["start", "stop"]
    assert fakes[0].requests[0]["input"] == "two and two?\n"
    assert os.listdir(root.path / "agent") == ["x.sock"]
    assert tied == ["agent/x.d"]


def test_run_keeps_what_it_is_told_to(
    root: FakeRoot, run: Run, turning: Any, tied: list[str]
) -> None:
    obeying, _ = turning(START, message("four"), DONE)
    argv = ["run", "--keep", "x", "--message", "two and two?", "--model", "small", "--", "cat"]
    assert run(*argv, stdin=b"not read") == (0, "four\n", "")
    assert obeying.written == ["start"]
    directory = root.path / "agent" / "x.d"
    expected = {"mode": "turn\n", "exec": "cat\n", "model": "small\n", "handoff.md": ""}
    assert {file: (directory / file).read_text() for file in expected} == expected
    (root.path / "agent" / "x.sock").unlink()
    fake = FakeAgent(root, START, message("five"), DONE)
    assert run("run", "x", "--message", "and one?", "--", "cat") == (0, "five\n", "")
    assert fake.requests[0]["input"] == "and one?"
    assert obeying.written == ["start"] and directory.exists()
    assert tied == []
    refused = run("run", "x", "--message", "?", "--", "dog")
    assert refused == (1, "", "ctx: x already exists and executes: cat\n")


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ({"status": "failed", "reason": "exit:3"}, 3),
        ({"status": "failed", "reason": "signal:9"}, 137),
        ({"status": "failed", "reason": "start_failed:no such file"}, 126),
        ({"status": "failed", "reason": "timeout"}, 124),
        ({"status": "failed"}, 1),
        ({"status": "aborted", "reason": "operator_aborted"}, 130),
        ({"type": "error", "code": "EACCES", "message": "no"}, 13),
    ],
)
def test_run_exits_as_the_program_did(
    root: FakeRoot, run: Run, turning: Any, end: dict[str, Any], status: int
) -> None:
    turning(START, {**DONE, **end})
    assert run("run", "x", "--mode", "resident", "--message", "hi", "--", "cat")[0] == status
    assert not (root.path / "agent" / "x.d").exists()


@pytest.mark.usefixtures("made_agents_are_full")
def test_run_of_what_cannot_start(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    Obeying(
        root,
        monkeypatch,
        start=lambda: root.end("x", "error", "start_failed:no such file"),
        stop=lambda: None,
    )
    said = "ctx: x: error start_failed:no such file\n"
    assert run("run", "x", "--message", "hi", "--", "cat") == (126, "", said)
    assert os.listdir(root.path / "agent") == []


def test_the_log_that_tells_of_an_end_is_shown_after_all_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Even if both are written while they are copied."""
    for name in ("out", "log"):
        (tmp_path / name).write_text("")
    out, log = (Tail(Root(str(tmp_path)), name, STDOUT) for name in ("out", "log"))
    read = out.chunks

    def chunks() -> Iterator[bytes]:
        yield from read()
        (tmp_path / "out").write_text("the last\n")
        (tmp_path / "log").write_text("it ended\n")

    out.chunks = chunks  # type: ignore[method-assign]
    run = Concluded([out, log])
    run.pump()
    run.pump()
    run.close()
    assert capfd.readouterr().out == "the last\nit ended\n"


@pytest.mark.usefixtures("made_agents_are_full")
def test_an_agent_whose_directory_cannot_be_held_is_removed(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Root, owner: str) -> None:
        raise Failure("too many open files")

    monkeypatch.setattr(Root, "hold", refuse)
    assert run("spawn", "x", "--", "true") == (1, "", "ctx: too many open files\n")
    assert not list((root.path / "agent").iterdir())


@pytest.mark.parametrize("command", ["new x", "spawn x -- true", "work new -a boss it"])
@pytest.mark.usefixtures("made_agents_are_full")
def test_ctrl_c_while_something_is_made_leaves_nothing(
    command: str, root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.agent("boss")
    mkdir = os.mkdir

    def make(path: Any, mode: int = 0o777) -> None:
        mkdir(path, mode)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(os, "mkdir", make)
    assert run(*command.split())[0] == 130
    assert os.listdir(root.path / "agent") == ["boss.d"]
    assert os.listdir(root.path / "agent/boss.d/work") == ["current"]
