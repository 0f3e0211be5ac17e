"""contrib/examples: the resident programs, and the commands of its README with stand-ins."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.worlds.daemon import TIMEOUT, Daemon, read, wait_status, wait_until, write

EXAMPLES = Path(__file__).parents[2] / "contrib" / "examples"
RESIDENTS = ("python3 /examples/resident.py", "sh /examples/resident.sh")


class Peer:
    """Somebody who speaks to an agent's socket."""

    def __init__(self, daemon: Daemon, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(TIMEOUT)
        self._socket.connect(str(daemon.root / "agent" / f"{name}.sock"))
        self._lines = self._socket.makefile("r", encoding="utf-8")

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self._lines.close()
        self._socket.close()

    def ask(self, **request: str) -> None:
        self._socket.sendall((json.dumps(request) + "\n").encode())

    def frame(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._lines.readline())
        return found

    def reply(self) -> list[dict[str, Any]]:
        """All frames up to the last one about a message."""
        frames = [self.frame()]
        while frames[-1]["type"] not in ("done", "error"):
            frames.append(self.frame())
        return frames

    def send(self, name: str, text: str) -> list[dict[str, Any]]:
        self.ask(op="send", id=name, input=text)
        return self.reply()


def resident(daemon: Daemon, program: str, pace: str = "0") -> Path:
    agent = daemon.run("counter", program, mode="resident", env=f"PACE={pace}",
                       mount=f"{EXAMPLES} /examples ro")
    wait_status(agent, "ready")
    return agent


def said(frames: list[dict[str, Any]]) -> str:
    return "".join(frame["text"] for frame in frames if frame["type"] == "delta")


@pytest.mark.parametrize("program", RESIDENTS)
def test_residents_answer_message_after_message(daemon: Daemon, program: str) -> None:
    agent = resident(daemon, program)
    pid = read(agent, "pid")
    with Peer(daemon, "counter") as peer:
        frames = peer.send("one", "two words")
        assert said(frames) == "two words "
        assert [f for f in frames if f["type"] != "delta"] == [
            {"type": "start", "id": "one", "run": "r1"},
            {"type": "message", "id": "one", "text": "2 words, 2 in all"},
            {"type": "done", "id": "one", "status": "processed"},
        ]
        frames = peer.send("none", " \n\t")
        reason = "there are no words in this message"
        assert frames[-1] == {"type": "done", "id": "none", "status": "failed", "reason": reason}
        text = 'a "quoted"\tword,\na \\n that is none, \u00fc, *, \x01 and "id":"x"'
        assert said(peer.send('odd"id\\', text)) == " ".join(text.split()) + " "
        assert peer.send("one", "not read") == frames_without_deltas("one", "2 words, 2 in all")
    count = 2 + len(text.split())
    assert read(agent, "session/latest.md") == f"{len(text.split())} words, {count} in all"
    assert (read(agent, "pid"), read(agent, "run")) == (pid, "r1\n")
    assert read(agent, "out") == "", "replies are no output"


def frames_without_deltas(name: str, text: str) -> list[dict[str, Any]]:
    return [
        {"type": "start", "id": name, "run": "r1"},
        {"type": "message", "id": name, "text": text},
        {"type": "done", "id": name, "status": "processed"},
    ]


@pytest.mark.parametrize("program", RESIDENTS)
def test_residents_are_aborted_and_go_on(daemon: Daemon, program: str) -> None:
    agent = resident(daemon, program, pace="0.05")
    with Peer(daemon, "counter") as peer, Peer(daemon, "counter") as other:
        peer.ask(op="send", id="long", input="word " * 100_000)
        assert [peer.frame()["type"] for _ in range(3)] == ["start", "delta", "delta"]
        other.ask(op="send", id="next", input="after that")
        wait_until(lambda: "after that" in read(agent, "queue"), "the second message waits")
        write(agent / "ctl", "abort r1")
        end = peer.reply()[-1]
        assert end == {
            "type": "done", "id": "long", "status": "aborted", "reason": "operator_aborted",
        }  # fmt: skip
        assert read(agent, "status") == "paused\n"
        wait_until(lambda: not read(agent, "run"), "the run is recorded")
        write(agent / "ctl", "resume")
        frames = other.reply()
        assert frames[0] == {"type": "start", "id": "next", "run": "r2"}
        assert frames[-2]["text"] == "2 words, 2 in all", "it is another process"
    wait_status(agent, "ready")


@pytest.mark.parametrize("program", RESIDENTS)
def test_residents_do_not_miss_a_daemon_that_is_killed(daemon: Daemon, program: str) -> None:
    agent = resident(daemon, program, pace="0.01")
    write(agent / "inbox", "word " * 100)
    wait_status(agent, "busy")
    daemon.restart()
    with Peer(daemon, "counter") as peer:
        assert peer.send("next", "one more")[-2]["text"] == "2 words, 102 in all"
    assert read(agent, "run") == "r1\n"


def commands() -> dict[str, str]:
    """The commands of the README, by the name of the agent."""
    text = (EXAMPLES / "README.md").read_text()
    found = {}
    for block in re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        name = re.search(r"ctx (?:spawn|run) (\S+)", block)
        assert name is not None
        found[name[1]] = block
    return found


STUB = """#!/bin/sh
printf '%s: ' "${0##*/}"
printf '<%s>' "$@"
echo
echo "key $ANTHROPIC_API_KEY$CODEX_API_KEY$GEMINI_API_KEY"
pwd
touch seen && echo "may write"
grep -c . /proc/net/route
cat
"""
#: beside what its standard input is
ARGUMENTS = {
    "claude-once": "<-p><--dangerously-skip-permissions>",
    "codex-once": "<exec><--sandbox><danger-full-access><--skip-git-repo-check><->",
    "gemini-once": "<--yolo><-p><Do what standard input asks for.>",
    "claude-turn": "<-p><--dangerously-skip-permissions><--model><sonnet>",
    "codex-turn": "<exec><--sandbox><danger-full-access><--skip-git-repo-check>"
    "<--model><gpt-5><->",
    "gemini-turn": "<--yolo><--model><gemini-2.5-pro><-p><Do what standard input asks for.>",
}
#: the same of a second message
GOING_ON = {
    "claude-turn": ARGUMENTS["claude-turn"] + "<--continue>",
    "codex-turn": ARGUMENTS["codex-turn"].replace("<->", "<resume><--last><->"),
    "gemini-turn": ARGUMENTS["gemini-turn"].replace("<-p>", "<--resume><latest><-p>"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_commands_of_the_readme(daemon: Daemon, name: str) -> None:
    cli, _, mode = name.partition("-")
    tools, source = daemon.base / "tools", daemon.base / "source"
    for directory in (tools, source):
        directory.mkdir()
    source.chmod(0o777)
    (tools / cli).write_text(STUB)
    (tools / "ctx").write_text(f'#!/bin/sh\nexec {sys.executable} -IS {daemon.root}/bin/ctx "$@"\n')
    for program in tools.iterdir():
        program.chmod(0o755)
    keys = {f"{word}_API_KEY": "k-123" for word in ("ANTHROPIC", "CODEX", "GEMINI")}
    result = subprocess.run(
        ["sh", "-ec", commands()[name]],
        env={"CTX_ROOT": str(daemon.root), "PATH": f"{tools}:{os.environ['PATH']}",
             "tools": str(tools), **keys},
        cwd=source, text=True, capture_output=True, timeout=TIMEOUT, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    routes = len(Path("/proc/net/route").read_text().splitlines())
    surroundings = ["key k-123", "/src", "may write", str(routes)]
    if mode == "once":
        assert result.stdout.splitlines() == [
            f"{cli}: {ARGUMENTS[name]}", *surroundings, "Say what the last commit is about.",
        ]  # fmt: skip
        assert not daemon.agent_dir(name).exists()
        return
    assert result.stdout.splitlines() == [
        f"{cli}: {ARGUMENTS[name]}", *surroundings, "What does this project do?",
        f"{cli}: {GOING_ON[name]}", *surroundings, "And how is it tested?",
    ]  # fmt: skip
    assert read(daemon.agent_dir(name), "limits").count("timeout=10m") == 1
    assert read(daemon.agent_dir(name), "status") == "idle\n"


def test_every_command_of_the_readme_is_tested() -> None:
    assert commands().keys() == ARGUMENTS.keys()
