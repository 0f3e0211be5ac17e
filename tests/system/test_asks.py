"""Asking people from inside of a sandbox, and answering: by commands, as somebody types them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

from tests.worlds.daemon import Daemon, read, wait_dead, wait_until

pytestmark = pytest.mark.settings(grace="300ms")


def ask(daemon: Daemon, name: str, line: str, **files: str) -> None:
    """An agent that asks, and tells what it was answered."""
    daemon.run(name, f"sh -c {shlex.quote(f'ctx ask {line}; echo exit $?')}", **files)


def is_open(daemon: Daemon, name: str) -> None:
    wait_until(lambda: name in daemon.ctx("asks", "-a").stdout, f"{name} asks")


def said(daemon: Daemon, name: str) -> list[str]:
    wait_dead(daemon.agent_dir(name))
    return read(daemon.agent_dir(name), "out").splitlines()


def test_a_question_is_answered_by_a_command(daemon: Daemon) -> None:
    ask(daemon, "coder", '-o yes -o "no Not today" --detail "to main" "May I push?"')
    is_open(daemon, "coder")
    (row,) = json.loads(daemon.ctx("asks", "--json").stdout)
    assert (row["agent"], row["question"], row["detail"]) == ("coder", "May I push?", "to main\n")
    wrong = daemon.ctx("answer", "coder", "maybe")
    assert wrong.returncode == 1 and '"maybe" is no option; use yes, no' in wrong.stderr
    assert daemon.ctx("answer", "coder", "no", "--note", "later").stdout == ""
    assert said(daemon, "coder") == ["no", "exit 0"]
    assert "ask-1: later" in read(daemon.agent_dir("coder"), "log")
    late = daemon.ctx("answer", "coder/ask-1", "yes")
    assert late.returncode == 1 and "is over: answered by operator" in late.stderr


def test_without_an_answer_the_deadline_tells(daemon: Daemon) -> None:
    ask(daemon, "default", '--deadline 200ms --default no "Now?"')
    ask(daemon, "none", '--deadline 200ms "Now?"')
    assert said(daemon, "default") == ["no", "exit 0"]
    assert said(daemon, "none") == ["exit 124"]


def test_a_question_outlives_the_daemon(daemon: Daemon) -> None:
    ask(daemon, "coder", '"May I?"')
    is_open(daemon, "coder")
    with subprocess.Popen(
        [sys.executable, daemon.root / "bin" / "ctx", "asks", "-f", "--json"],
        env={"CTX_ROOT": str(daemon.root)}, stdout=subprocess.PIPE, text=True,
    ) as follower:  # fmt: skip
        try:
            assert follower.stdout is not None
            assert json.loads(follower.stdout.readline())["agent"] == "coder"
            daemon.kill()
            daemon.start()
            ask(daemon, "other", '"And I?"')
            assert json.loads(follower.stdout.readline())["agent"] == "other"
        finally:
            follower.terminate()
    daemon.ctx("answer", "coder", "you", "may")
    assert said(daemon, "coder") == ["you may", "exit 0"]


def test_an_answer_that_ctxd_dies_of_is_given(daemon: Daemon) -> None:
    """Between the answer and the reply: its operator is not told, the agent is, by the next one."""
    daemon.kill()
    daemon.env["CTXD_CRASH_AT"] = "ask.answered"
    daemon.start()
    ask(daemon, "coder", '-o yes "May I?"')
    is_open(daemon, "coder")
    assert daemon.ctx("answer", "coder", "yes").returncode == 69
    daemon.wait_killed()
    del daemon.env["CTXD_CRASH_AT"]
    daemon.start()
    again = daemon.ctx("answer", "coder/ask-1", "yes")
    assert again.returncode == 1 and "is over: answered by operator" in again.stderr
    assert said(daemon, "coder") == ["yes", "exit 0"]


def test_a_supervisor_answers_its_child(daemon: Daemon) -> None:
    form = '{"type":"object","properties":{"n":{"type":"integer"}}}'
    asking = f"ctx ask --to supervisor --form {shlex.quote(form)} 'How many?'"
    lines = (
        f"ctx spawn kid -- sh -c {shlex.quote(asking)}",
        "until ctx answer kid n=3 2> /dev/null; do sleep 0.05; done",
        "cat $CTX_ROOT/agent/kid.d/wait $CTX_ROOT/agent/kid.d/result.md",
    )
    daemon.run("boss", f"sh -c {shlex.quote('; '.join(lines))}")
    assert said(daemon, "boss") == ["kid", '{"n":3}']
