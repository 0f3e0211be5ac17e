"""Verbs, and waiting for the end of agents."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from typing import Any

import pytest

from client import events, loop, verbs
from client.root import Root
from tests.unit.client.fakes import EVENT, FakeRoot, Run, eventually, has_open, is_asleep


@pytest.mark.parametrize("verb", ["start", "stop", "kill", "pause", "resume", "reset"])
def test_verbs(root: FakeRoot, run: Run, verb: str) -> None:
    directories = [root.agent(name, status="busy") for name in ("a", "b")]
    assert run(verb, "a", "nope", "b") == (1, "", 'ctx: no agent "nope"\n')
    assert run(verb, "a", "b")[0] == 0
    assert {(directory / "ctl").read_text() for directory in directories} == {verb + "\n"}


def test_stop_waits(root: FakeRoot, spawned: Any) -> None:
    directory = root.agent("a", status="busy")
    process = spawned("stop", "--wait", "a")
    eventually(lambda: has_open(process, directory / "wait"))
    assert process.poll() is None
    assert (directory / "ctl").read_text() == "stop\n"
    root.end("a", "cancelled", "operator_stop")
    assert process.wait() == 0


def test_wait_for_the_dead(root: FakeRoot, run: Run) -> None:
    root.agent("a", status="dead", outcome="done", reason="exit:0")
    root.agent("b", status="dead", outcome="error", reason="exit:3")
    assert run("wait", "a") == (0, "a done exit:0\n", "")
    status, out, _ = run("wait", "a", "b", "a")
    assert (status, sorted(out.splitlines())) == (1, ["a done exit:0", "b error exit:3"])
    assert run("wait", "a", "nope") == (1, "", 'ctx: no agent "nope"\n')


def test_wait_for_the_living(root: FakeRoot, spawned: Any) -> None:
    directories = [root.agent(name, status="busy") for name in ("a", "b")]
    process = spawned("wait", "a", "b")
    eventually(lambda: all(has_open(process, path / "wait") for path in directories))
    root.end("b", "done", "exit:0")
    assert process.stdout.readline() == b"b done exit:0\n"
    assert process.poll() is None
    root.end("a", "done", "self_stop")
    assert process.communicate() == (b"a done self_stop\n", b"")
    assert process.returncode == 0


def test_wait_for_any(root: FakeRoot, run: Run) -> None:
    for name, status in (("a", "busy"), ("b", "idle"), ("c", "dead")):
        root.agent(name, status=status)
    root.list_agents()
    assert run("wait", "--any") == (0, "c dead\n", "")
    assert run("wait", "--any", "--status", "dead,idle") == (0, "b idle\n", "")
    assert run("wait", "--any", "--status", "busy,idle", "b", "c") == (0, "b idle\n", "")
    assert verbs.states({"status": "busy", "asks": 1}) == {"busy", "asking"}
    assert verbs.states({"status": "busy", "asks": 0}) == {"busy"}
    code, out, _ = run("wait", "--any", "--json", "c")
    assert (code, json.loads(out)["status"]) == (0, "dead")
    assert run("wait", "--any", "-t", "10ms", "--status", "paused,new", "a") == (
        124, "", "ctx: no agent was paused or new in time\n",
    )  # fmt: skip
    assert run("wait", "--any", "a", "nope") == (1, "", 'ctx: no agent "nope"\n')


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--any", "--status", "ended"], '"ended" is not a status: '),
     (["--status", "idle", "a"], "add --any"), ([], "ctx wait --any")],
)  # fmt: skip
def test_wait_says_what_is_wrong(
    root: FakeRoot, run: Run, words: list[str], says: str
) -> None:
    root.agent("a", status="busy")
    root.list_agents()
    status, out, err = run("wait", *words)
    assert (status, out) == (2, "")
    assert says in err


STOP = {"id": "e7", "type": "agent.stop", "status": "error", "reason": "exit:3"}


def test_the_end_of_one_that_is_gone_is_in_its_session(root: FakeRoot, spawned: Any) -> None:
    directory = root.agent("a", status="busy", life="temp")
    session = root.path / "home" / "0" / "agent" / "a" / "session" / "default"
    session.parent.mkdir(parents=True)
    (directory / "session").rename(session)
    (directory / "session").symlink_to("../../home/0/agent/a/session/default")
    process = spawned("wait", "a")
    eventually(lambda: has_open(process, directory / "wait"))
    (session / "events.jsonl").write_text(f"{json.dumps(EVENT)}\n{json.dumps(STOP)}\n")
    fifo = os.open(directory / "wait", os.O_RDWR | os.O_NONBLOCK)
    shutil.rmtree(directory)
    os.close(fifo)
    assert process.communicate() == (b"a error exit:3\n", b"")
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("status", "outcome"), [("done\n", "done"), ("cancelled\n", "cancelled"), ("pending\n", "")]
)
def test_the_end_of_a_child_that_is_gone_is_in_the_channel(
    root: FakeRoot, status: str, outcome: str
) -> None:
    channel = root.path / "self" / "session" / "context" / "child" / "kid"
    channel.mkdir(parents=True)
    (channel / "status").write_text(status)
    assert events.ending(Root(str(root.path)), "kid") == (outcome, "")


def test_wait_times_out(root: FakeRoot, run: Run) -> None:
    root.agent("a", status="busy")
    root.agent("b", status="dead", outcome="done", reason="exit:0")
    expected = (124, "b done exit:0\n", "ctx: did not end in time: a\n")
    assert run("wait", "-t", "20ms", "a", "b") == expected


def test_a_wait_may_be_longer_than_one_poll(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.agent("a", status="busy")
    root.agent("b", status="dead", outcome="done", reason="exit:0")
    assert run("wait", "-t", "999999999d", "b") == (0, "b done exit:0\n", "")
    monkeypatch.setattr(loop, "LONGEST", 0.01)
    began = time.monotonic()
    assert run("wait", "-t", "30ms", "a")[0] == 124
    assert time.monotonic() - began >= 0.03


def test_wait_is_interrupted(root: FakeRoot, spawned: Any) -> None:
    directory = root.agent("a", status="busy")
    process = spawned("wait", "a")
    eventually(lambda: has_open(process, directory / "wait") and is_asleep(process))
    process.send_signal(signal.SIGINT)
    assert process.communicate() == (b"", b"")
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("outcome", "reason", "status"),
    [
        ("done", "exit:0", 0),
        ("done", "self_stop", 0),
        ("error", "exit:3", 3),
        ("error", "signal:9", 137),
        ("error", "signal:15,unkillable", 143),
        ("error", "oom", 137),
        ("error", "start_failed:no such file", 126),
        ("error", "exit:many", 1),
        ("cancelled", "operator_stop", 130),
        ("cancelled", "parent_dead", 130),
        ("cancelled", "timeout", 124),
        ("cancelled", "timeout,unkillable", 124),
        ("interrupted", "reboot", 1),
        ("", "", 1),
    ],
)
def test_exit_status(outcome: str, reason: str, status: int) -> None:
    assert events.exit_status(outcome, reason) == status


def test_abort_and_session(root: FakeRoot, run: Run) -> None:
    directory = root.agent("x", status="busy")
    for argv, line in (
        (["abort", "x"], "abort"),
        (["abort", "x", "--run", "r7"], "abort r7"),
        (["session", "x", "other"], "session other"),
    ):
        assert run(*argv) == (0, "", "")
        assert (directory / "ctl").read_text() == line + "\n"
