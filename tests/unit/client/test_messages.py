"""Messages and their replies: `send`, `chat`, `queue`."""

from __future__ import annotations

import json
import os
import pty
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from client import messages
from tests.unit.client.fakes import (
    DONE,
    START,
    FakeAgent,
    FakeRoot,
    Run,
    delta,
    eventually,
    is_asleep,
    message,
    set_status,
)


@pytest.mark.parametrize(
    ("frames", "out", "status"),
    [
        ([START, message("hello"), DONE], "hello\n", 0),
        ([START, delta("hel"), delta("lo\n"), message("hello\n"), DONE], "hello\n", 0),
        ([START, delta("hel"), message("hello"), DONE], "hello\n", 0),
        ([START, delta("hello\n"), message("hello"), DONE], "hello\n", 0),
        ([START, delta("thinking"), message("hello"), DONE], "thinking\nhello\n", 0),
        ([START, {**delta("not ours"), "id": "other"}, message("a"), DONE], "a\n", 0),
        ([START, {"type": "news"}, message("a"), DONE], "a\n", 0),
        ([START, {**DONE, "status": "processed"}], "", 0),
        ([START, {**DONE, "status": "failed"}], "", 1),
        ([START, {**DONE, "status": "aborted"}], "", 130),
        ([START, {"type": "error", "text": "no"}], "", 1),
        ([START, {"type": "error", "code": "EACCES", "message": "no"}], "", 13),
        ([{"type": "error", "code": "EACCES", "message": "no"}], "", 13),
        ([START, {"type": "error", "code": "ESRCH", "message": "no"}], "", 69),
        ([START, delta("a")], "a\n", 1),
    ],
)
def test_send(root: FakeRoot, run: Run, frames: Any, out: str, status: int) -> None:
    root.agent("x", status="idle")
    fake = FakeAgent(root, *frames)
    result, shown, err = run("send", "--priority", "next", "x", "fix", "it")
    fake.thread.join()
    assert (result, shown) == (status, out)
    assert "Traceback" not in err
    if fake.requests:
        (request,) = fake.requests
        assert len(request.pop("id")) >= 16
        assert request == {"op": "send", "input": "fix it", "priority": "next"}


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ({"status": "failed", "reason": "exit:3"}, 1, "x: failed exit:3"),
        ({"status": "aborted", "reason": "operator_aborted"}, 130, "x: aborted operator_aborted"),
        ({"status": "dropped"}, 130, "x: dropped"),
        ({"type": "error", "code": "EBUSY", "message": "x is dead"}, 1, "x is dead (EBUSY)"),
    ],
)
def test_what_became_of_a_message_is_said(
    root: FakeRoot, run: Run, end: dict[str, Any], status: int, said: str
) -> None:
    root.agent("x", status="idle")
    FakeAgent(root, START, delta("so far"), {**DONE, **end})
    assert run("send", "x", "hi") == (status, "so far\n", f"ctx: {said}\n")


def test_ctrl_c_cancels_the_message(root: FakeRoot, spawned: Any) -> None:
    root.agent("x", status="idle")
    fake = FakeAgent(root, START, delta("so far\n"), {"type": "resumed"}, DONE)
    process = spawned("send", "x", "fix it")
    assert process.stdout.readline() == b"so far\n"
    eventually(lambda: is_asleep(process))
    process.send_signal(signal.SIGINT)
    assert process.communicate()[0] == b""
    assert process.returncode == 130
    assert fake.requests[1] == {"op": "cancel", "id": fake.requests[0]["id"]}


def test_ctrl_c_while_a_message_is_sent_cancels_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(connection: object, *, op: str, **request: object) -> None:
        asked.append(op)
        if op == "send":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(messages, "ask", ask)
    monkeypatch.setattr(messages, "frames", lambda connection: iter([{**DONE, "id": None}]))
    assert messages.converse(Mock(), "x", "hi") == (130, "")
    assert asked == ["send", "cancel"]


def test_not_running(root: FakeRoot, run: Run) -> None:
    root.agent("x", status="dead")
    dead = "ctx: x is not running: its status is dead; see: ctx log x\n"
    assert run("send", "x", "hi")[::2] == (69, dead)
    root.agent("z", status="new", mode="turn")
    new = "ctx: z is not running: its status is new; start it: ctx start z"
    assert run("send", "z", "hi")[::2] == (69, f"{new}\n")
    root.agent("once", status="new", mode="once")
    once = "ctx: once is not running: its status is new; start it: ctx start once"
    once += " (a once agent takes no messages: ctx set once mode=turn)\n"
    assert run("send", "once", "hi")[::2] == (69, once)
    assert run("attach", "once")[::2] == (69, once)
    assert run("send", "y", "hi")[::2] == (69, 'ctx: no agent "y"\n')


@pytest.mark.parametrize("stdin", [b"", b" \n", b"\xff"])
def test_bad_texts(root: FakeRoot, run: Run, stdin: bytes) -> None:
    assert run("send", "x", stdin=stdin)[0] == 2


def test_chat_of_a_pipe(root: FakeRoot, run: Run) -> None:
    root.agent("x", status="idle")
    fake = FakeAgent(root, START, message("yes"), DONE, times=3)
    assert run("chat", "x", stdin=b"one\n\n  two") == (0, "yes\nyes\n", "")
    fake.thread.join()
    assert [request["input"] for request in fake.requests] == ["one", "  two"]


def test_chat_of_a_pipe_goes_on_and_tells_the_first_failure(root: FakeRoot, run: Run) -> None:
    root.agent("x", status="idle")
    failed = {**DONE, "status": "failed", "reason": "exit:3"}
    fake = FakeAgent(root, START, failed, times=3)
    assert run("chat", "x", stdin=b"one\ntwo\n") == (1, "", "ctx: x: failed exit:3\n" * 2)
    assert len(fake.requests) == 2
    (root.path / "agent" / "x.sock").unlink()
    set_status(root, "dead")
    assert run("chat", "x", stdin=b"one\n")[0] == 69


def read_until(fd: int, text: str) -> str:
    """Return what a terminal shows up to a text."""
    shown = ""
    while text not in shown:
        shown += os.read(fd, 4096).decode()
    return shown


def test_chat_at_a_terminal(root: FakeRoot, spawned: Any) -> None:
    root.agent("x", status="idle")
    ours, theirs = pty.openpty()
    fake = FakeAgent(root, START, delta("hm\n"), {"type": "resumed"}, DONE, times=2)
    process = spawned("chat", "x", stdin=theirs, stdout=theirs)
    os.close(theirs)
    read_until(ours, "x> ")
    os.write(ours, b"never sent")
    read_until(ours, "never sent")
    eventually(lambda: is_asleep(process))
    process.send_signal(signal.SIGINT)
    read_until(ours, "x> ")
    os.write(ours, b"question\n")
    read_until(ours, "hm")
    eventually(lambda: is_asleep(process))
    process.send_signal(signal.SIGINT)  # cancels the message alone
    read_until(ours, "x> ")
    assert [request["op"] for request in fake.requests] == ["send", "cancel"]
    assert fake.requests[0]["input"] == "question"
    os.write(ours, b"\x04")
    assert process.wait() == 0
    os.close(ours)
    assert process.stderr.read() == b""


def test_queue(root: FakeRoot, run: Run, inside: Path) -> None:
    queued = {"id": "m1", "ts": "2026-11-21T21:50:00.123Z", "from": "agent:y"}
    queued["provenance"] = "agent"
    line = json.dumps({**queued, "priority": "next", "text": "do\x1b this\nand that"}) + "\n"
    (inside / "queue").write_text(line + "not json\n")
    header, row = run("queue")[1].splitlines()
    assert header.split() == ["ID", "TS", "FROM", "PROVENANCE", "PRIORITY", "TEXT"]
    assert row.split() == [*queued.values(), "next", "do\\x1b", "this…"]
    assert run("queue", "x", "--json") == (0, line + "not json\n", "")
