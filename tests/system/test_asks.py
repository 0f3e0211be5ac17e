"""Asking people from inside of a sandbox, and answering: by commands, as somebody types them."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.system.test_permits import (
    BASH,
    asking_by_mcp,
    bridged,
    decision,
    hooked,
    reply,
    request_of,
)
from tests.worlds.daemon import TIMEOUT, Daemon, read, wait_dead, wait_until, write

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


def by_command(daemon: Daemon) -> Iterator[None]:
    ask(daemon, "coder", '-o allow "May I?"')
    yield
    assert said(daemon, "coder") == ["allow", "exit 0"]


def by_hook(daemon: Daemon) -> Iterator[None]:
    agent = hooked(daemon, "coder", "ctx hook claude < /gate/ask", ask=request_of(BASH))
    yield
    assert decision(agent)["behavior"] == "allow"


def by_tool(daemon: Daemon) -> Iterator[None]:
    asking_by_mcp(daemon, "coder", BASH)
    yield
    assert json.loads(said(daemon, "coder")[-1])["behavior"] == "allow"


def by_bridge(daemon: Daemon) -> Iterator[None]:
    with bridged(daemon, "coder", "--permit", "ask") as agent:
        write(agent / "inbox", "ask edit")
        yield
        assert reply(agent) == "id-allow_once"


@pytest.mark.parametrize("way", [
    by_command, pytest.param(by_hook, marks=pytest.mark.long),
    pytest.param(by_tool, marks=pytest.mark.long), by_bridge,
])
def test_ctxd_is_killed_at_both_ends_of_an_answer(
    daemon: Daemon, way: Callable[[Daemon], Iterator[None]]
) -> None:
    """Between question and answer; and between answer and reply: its operator is not told, the
    agent is, by the next one."""
    with contextmanager(way)(daemon):
        is_open(daemon, "coder")
        daemon.env["CTXD_CRASH_AT"] = "ask.answered"
        daemon.restart()
        (row,) = json.loads(daemon.ctx("asks", "--json").stdout)
        word = next(w for line in row["options"] if "allow" in (w := line.split()[0]))
        word = {"id-allow_always": "id-allow_once"}.get(word, word)
        assert daemon.ctx("answer", "coder", word).returncode == 69
        daemon.wait_killed()
        del daemon.env["CTXD_CRASH_AT"]
        daemon.start()
        again = daemon.ctx("answer", f"coder/{row['ask']}", word)
        assert again.returncode == 1 and "is over: answered by operator" in again.stderr
    ends = [event for event in daemon.events("coder") if event["type"] == "ask.end"]
    assert [(end["status"], end["by"]) for end in ends] == [("answered", "operator uid:0")]
    assert json.loads(daemon.ctx("asks", "-a", "--json").stdout) == []


_HOSTILE = """
import errno, os, socket
q = os.environ["CTX_SELF"] + "/ask/q"
os.mkdir(q)
with open(q + "/question", "w") as file:
    file.write("May I?")
answer, own = q + "/answer", os.open(q + "/answer", os.O_RDONLY)
with socket.socket(socket.AF_UNIX) as peer:
    peer.connect("/gate/socket")
    _, (passed,), _, _ = socket.recv_fds(peer, 1, 1)
tries = {
    "write": lambda: os.open(answer, os.O_WRONLY),
    "append": lambda: os.open(answer, os.O_WRONLY | os.O_APPEND),
    "both": lambda: os.open(answer, os.O_RDWR),
    "truncate": lambda: os.truncate(answer, 0),
    "link": lambda: os.link(answer, q + "/x"),
    "link out": lambda: os.link(answer, os.environ["HOME"] + "/x"),
    "rename": lambda: os.rename(q + "/detail", answer),
    "rename it": lambda: os.rename(q, q + "2"),
    "unlink": lambda: os.unlink(answer),
    "chmod": lambda: (os.chmod(answer, 0o666), os.open(answer, os.O_WRONLY)),
    "chown": lambda: os.chown(answer, os.getuid(), -1),
    "other way": lambda: os.open(f"/proc/{os.getppid()}/root{answer}", os.O_WRONLY),
}
for name, fd in ("own", own), ("passed", passed):
    tries[name + " written"] = lambda fd=fd: os.write(fd, b"yes")
    tries[name + " again"] = lambda fd=fd: os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
    tries[name + " grown"] = lambda fd=fd: os.ftruncate(fd, 4)
for name, way in tries.items():
    try:
        way()
        print(name, "is possible")
    except OSError as error:
        assert error.errno not in (errno.EIO, errno.EINTR), (name, error)
print(len(tries), open(q + "/status").read().strip(), flush=True)
"""


def test_who_asks_finds_no_way_to_answer(daemon: Daemon) -> None:
    """Not by an open file that an operator passes, either, if it was opened for reading."""
    gate = daemon.base / "gate"
    gate.mkdir()
    (gate / "program").write_text(_HOSTILE)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(gate / "socket"))
        (gate / "socket").chmod(0o777)
        listener.listen()
        listener.settimeout(TIMEOUT)
        agent = daemon.run("coder", "python3 /gate/program", mount=f"{gate} /gate ro")
        peer, _ = listener.accept()
        with peer, open(agent / "ask/q/answer") as passed:
            socket.send_fds(peer, [b"."], [passed.fileno()])
            assert said(daemon, "coder") == ["18 open"], read(agent, "log")


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
