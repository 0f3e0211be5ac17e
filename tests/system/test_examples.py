"""contrib/examples: the resident programs."""

from __future__ import annotations

import json
import socket
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
