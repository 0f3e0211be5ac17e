"""What is cheap to ask and was dear to answer: one call held the event loop for seconds.

Each attack is made by several at once on a real mount. Meanwhile a bystander of the same
daemon is read, written to and stopped, and afterwards the daemon's own measure tells the
longest step of its loop, in time of the processor.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.worlds.daemon import Daemon, read, wait_dead, wait_status, write

#: of one step; 50 ms is held by tests/adapter/test_cost.py, on a machine that does little else
LONGEST: Final = 0.25
PERMS: Final = "create,start,stop,read,write"


def longest_step(daemon: Daemon) -> float:
    for line in (daemon.root / "metrics").read_text().splitlines():
        if line.startswith("ctxfs_loop_step_longest_seconds "):
            return float(line.split()[1])
    raise AssertionError("the loop is not measured")


def policies(daemon: Daemon, number: int) -> None:
    """As many rules as a control holds, compared at each read, after each mkdir of anybody."""
    agent = daemon.agent_dir(f"ruled{number}")
    agent.mkdir(exist_ok=True)
    label = read(agent, "label").strip()
    text = "".join(f"allow {label} agent:{number}{n:x}* {PERMS}\n" for n in range(255))
    (agent / "policy").write_text(text)
    with pytest.raises(OSError, match="Errno 122"):
        (agent / "policy").write_text(text + f"allow {label} tool:a execute\n" * 2
                                      + f"allow {label} tool:b execute\n")
    other = daemon.agent_dir(f"other{number}")
    other.mkdir()
    assert len((agent / "policy.effective").read_text()) > 10_000
    other.rmdir()


def references(daemon: Daemon, number: int) -> None:
    """Sixteen mebibytes of references to its inputs, looked at by line, again at close."""
    agent = daemon.agent_dir(f"reader{number}")
    agent.mkdir(exist_ok=True)
    data = b'{"path":"/a"}\n' * (1 << 17)
    with open(agent / "input.jsonl", "wb") as file:
        file.write(data)
    assert (agent / "input.jsonl").stat().st_size == len(data)


def frames(daemon: Daemon, number: int) -> None:
    """Frames of a mebibyte, full of brackets, quotes and numbers."""
    for body in ("[" * 1_000_000, '"",' * 330_000, "1e1," * 250_000, "[[]]," * 200_000):
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(daemon.root / "ctxd.sock"))
            peer.sendall(b'{"op":"ping","x":[' + body.encode() + b"0]}\n")
            answer = json.loads(peer.makefile("rb").readline())
            assert answer["code"] in ("EINVAL", "EMSGSIZE")


def lookers(daemon: Daemon, number: int) -> None:
    """stat(2) of all that is rendered, over and over."""
    session = daemon.agent_dir("bystander") / "session" / "context"
    for _ in range(50):
        for name in ("status", "metrics", "error"):
            assert os.stat(daemon.root / name).st_size == 0
        assert (session / "pack.md").stat().st_size == 0


def resumers(daemon: Daemon, number: int) -> None:
    """Many who follow one history, all of whom are told of each event."""
    path = str(daemon.root / "agent" / "bystander.sock")
    with contextlib.ExitStack() as peers:
        for _ in range(8):
            peer = peers.enter_context(socket.socket(socket.AF_UNIX))
            with contextlib.suppress(OSError):  # the bystander has ended
                peer.connect(path)
                peer.sendall(b'{"op":"resume","after":"e999999"}\n' * 16)


@pytest.mark.usefixtures("guard")
@pytest.mark.parametrize("attack", [
    policies, lookers, *(pytest.param(each, marks=pytest.mark.long)
                         for each in (references, frames, resumers))
])  # fmt: skip
def test_nobody_waits_for_what_one_call_costs(
    daemon: Daemon, attack: Callable[[Daemon, int], None]
) -> None:
    bystander = daemon.run("bystander", "sleep 1000")
    wait_status(bystander, "busy")
    done = threading.Event()
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            while not done.is_set():
                attack(daemon, number)
        except BaseException as error:
            failures.append(error)

    attackers = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for attacker in attackers:
        attacker.start()
    took: list[float] = []
    try:
        deadline = time.monotonic() + 1.2
        while time.monotonic() < deadline:
            begun = time.monotonic()
            assert read(bystander, "status") == "busy\n"
            write(bystander / "limits", "grace=1s")
            took.append(time.monotonic() - begun)
        begun = time.monotonic()
        write(bystander / "ctl", "kill")
        took.append(time.monotonic() - begun)
        wait_dead(bystander)
    finally:
        done.set()
        for attacker in attackers:
            attacker.join()
    assert not failures
    assert longest_step(daemon) < LONGEST
    took.sort()
    assert took[len(took) // 2] < 3.0


@pytest.mark.usefixtures("guard_beside")
def test_one_write_of_thousands_of_messages_is_one_change(daemon: Daemon, tmp_path: Path) -> None:
    line = '{"role":"user","content":""}'
    script = f"yes '{line}' | head -n 4681 > /tmp/m; cat /tmp/m >> $CTX_SELF/session/messages.jsonl"
    agent = daemon.finish("writer", f"sh -c {json.dumps(script)}")
    messages = (agent / "session" / "messages.jsonl").read_text().splitlines()
    kept = [json.loads(text) for text in messages]
    assert [message["id"] for message in kept] == [f"m{n}" for n in range(1, 4682)]
    assert longest_step(daemon) < LONGEST
