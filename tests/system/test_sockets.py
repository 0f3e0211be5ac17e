"""The agents' sockets, spoken to like any other stream socket."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness import Daemon, read, wait_dead, wait_status, wait_until, write


class Peer:
    def __init__(self, path: object) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30)
        try:
            self.socket.connect(str(path))
        except BaseException:
            self.socket.close()
            raise
        self.file = self.socket.makefile("rb")

    def send(self, *frames: dict[str, Any] | bytes) -> None:
        for frame in frames:
            data = frame if isinstance(frame, bytes) else json.dumps(frame).encode() + b"\n"
            self.socket.sendall(data)

    def receive(self) -> dict[str, Any] | None:
        line = self.file.readline()
        return json.loads(line) if line else None

    def ask(self, frame: dict[str, Any] | bytes) -> dict[str, Any]:
        self.send(frame)
        answer = self.receive()
        assert answer is not None
        return answer

    def close(self) -> None:
        self.file.close()
        self.socket.close()


@contextlib.contextmanager
def peer(daemon: Daemon, name: str) -> Iterator[Peer]:
    connection = Peer(daemon.root / "agent" / f"{name}.sock")
    try:
        yield connection
    finally:
        connection.close()


@pytest.fixture
def sleeper(daemon: Daemon) -> Daemon:
    wait_status(daemon.run("sleeper", "sleep 1000"), "busy")
    return daemon


def test_a_socket_is_there_and_answers_while_the_agent_lives(daemon: Daemon) -> None:
    agent = daemon.make("sleeper", "sleep 1000")
    path = daemon.root / "agent" / "sleeper.sock"
    assert stat.S_ISSOCK(path.stat().st_mode)
    with pytest.raises(ConnectionRefusedError):
        Peer(path)
    write(agent / "ctl", "start")
    wait_status(agent, "busy")
    with peer(daemon, "sleeper") as connection:
        assert connection.ask({"op": "ping"}) == {"type": "pong"}
    write(agent / "ctl", "kill")
    wait_dead(agent)
    wait_until(lambda: _refused(path), "a dead agent's socket refuses")


def _refused(path: object) -> bool:
    try:
        Peer(path).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"not json\n", "EINVAL"),
        (b"[1]\n", "EINVAL"),
        (b'{"op": "fly"}\n', "EINVAL"),
        (b"{}\n", "EINVAL"),
        (b'{"op": 5}\n', "EINVAL"),
        (b"[" * 60000 + b"\n", "EINVAL"),
        (b'{"op": NaN}\n', "EINVAL"),
        (b"\xff\n", "EINVAL"),
        (b'{"op": "resume", "after": "m3"}\n', "EINVAL"),
        (b'{"op": "send", "id": "1", "input": "hi"}\n', "EBUSY"),
        (b'{"op": "cancel", "id": "1"}\n', "ENOENT"),
        (b'{"op": "tool", "name": "X"}\n', "EACCES"),
    ],
)
def test_bad_frames_get_an_error(sleeper: Daemon, frame: bytes, code: str) -> None:
    with peer(sleeper, "sleeper") as connection:
        answer = connection.ask(frame)
        assert (answer["type"], answer["code"]) == ("error", code)
        assert answer["message"]


def test_an_overlong_frame_ends_the_connection(sleeper: Daemon) -> None:
    with peer(sleeper, "sleeper") as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.send(b"x" * (1 << 20) + b"yy\n")
        answer = connection.receive()
        assert answer is not None
        assert answer["code"] == "EMSGSIZE"
        with contextlib.suppress(ConnectionResetError):
            assert connection.receive() is None


def test_frames_in_pieces_and_many_at_once(sleeper: Daemon) -> None:
    with peer(sleeper, "sleeper") as connection:
        for byte in b'{"op": "ping"}\n':
            connection.send(bytes([byte]))
        assert connection.receive() == {"type": "pong"}
        connection.send(*[{"op": "ping", "unknown": 1}] * 100)
        assert [connection.receive() for _ in range(100)] == [{"type": "pong"}] * 100


def test_wait_is_answered_at_the_end(sleeper: Daemon) -> None:
    with peer(sleeper, "sleeper") as connection:
        connection.send({"op": "wait"}, {"op": "ping"})
        assert connection.receive() == {"type": "pong"}
        write(sleeper.agent_dir("sleeper") / "ctl", "kill")
        answer = connection.receive()
        assert answer is not None
        assert (answer["type"], answer["outcome"]) == ("wait", "cancelled")
        assert connection.receive() is None


def test_events_are_replayed_and_streamed(sleeper: Daemon) -> None:
    known = sleeper.events("sleeper")
    with peer(sleeper, "sleeper") as connection:
        connection.send({"op": "resume"})
        for event in known:
            assert connection.receive() == event
        write(sleeper.agent_dir("sleeper") / "ctl", "kill")
        rest = []
        while (told := connection.receive()) is not None:
            rest.append(told)
    assert rest[-1]["type"] == "agent.stop"
    assert known + rest == sleeper.events("sleeper")


def test_resume_after_an_event(sleeper: Daemon) -> None:
    known = sleeper.events("sleeper")
    with peer(sleeper, "sleeper") as connection:
        connection.send({"op": "resume", "after": known[1]["id"]})
        assert connection.receive() == known[2]


def test_a_slow_reader_slows_only_itself(sleeper: Daemon) -> None:
    slow = Peer(sleeper.root / "agent" / "sleeper.sock")
    slow.socket.setblocking(False)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while sent < 64 << 20:
            sent += slow.socket.send(b'{"op": "ping"}\n' * 1000)
    assert sent < 64 << 20, "the daemon does not read on while its answers are not read"
    with peer(sleeper, "sleeper") as other:
        assert other.ask({"op": "ping"}) == {"type": "pong"}
    slow.close()
    write(sleeper.agent_dir("sleeper") / "ctl", "kill")
    wait_dead(sleeper.agent_dir("sleeper"))


def test_a_closed_connection_cancels_nothing(sleeper: Daemon) -> None:
    for _ in range(50):
        Peer(sleeper.root / "agent" / "sleeper.sock").close()
    assert read(sleeper.agent_dir("sleeper"), "status") == "busy\n"


def test_the_daemons_socket_answers_operators(daemon: Daemon) -> None:
    connection = Peer(daemon.root / "ctxd.sock")
    assert connection.ask({"op": "ping"}) == {"type": "pong"}
    assert connection.ask({"op": "status"})["state"] == "ready"
    assert connection.ask({"op": "tool", "name": "AgentList"})["code"] == "EOPNOTSUPP"
    connection.close()


def test_agents_reach_their_own_socket_from_inside(daemon: Daemon) -> None:
    program = (
        "python3 -c 'import os, socket\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        's.connect(os.environ["CTX_SELF"][:-2] + ".sock")\n'
        's.sendall(b"{\\"op\\": \\"ping\\"}\\n")\n'
        "print(s.recv(100))'"
    )
    agent = daemon.finish("selfish", program.replace("\n", "; ").replace("; '", "'"))
    assert "pong" in read(agent, "out"), read(agent, "log")


def test_the_handle_says_that_a_once_agent_takes_no_messages(sleeper: Daemon) -> None:
    handle = sleeper.root / "agent" / "sleeper"
    result = subprocess.run(
        [str(handle), "hello"], capture_output=True, text=True, check=False,
        env={"PATH": os.environ["PATH"]},
    )
    assert result.returncode == 1
    assert "once agent" in result.stderr
    write(sleeper.agent_dir("sleeper") / "ctl", "kill")
    wait_dead(sleeper.agent_dir("sleeper"))
    later = subprocess.run([str(handle), "hello"], capture_output=True, check=False,
                           env={"PATH": os.environ["PATH"]})
    assert later.returncode == 69


def test_a_private_agents_socket_is_not_for_strangers(daemon: Daemon) -> None:
    daemon.run("boss", "sleep 1000")
    child = daemon.make("secret")
    write(child / "parent", "agent:boss")
    write(child / "ctl", "start")
    wait_status(child, "busy")
    result = subprocess.run(
        ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", "ls",
         str(daemon.root / "agent")],
        capture_output=True, text=True, check=True,
    )
    assert result.stdout.split() == ["boss", "boss.d", "boss.sock"]
