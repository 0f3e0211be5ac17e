"""The agents' sockets, spoken to like any other stream socket."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.worlds.daemon import Daemon, daemon_of, read, wait_dead, wait_status, wait_until, write


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
    answer = connection.ask({"op": "tool", "name": "AgentList", "id": "1"})
    assert answer == {"type": "tool", "id": "1", "output": {"agents": [], "left": 0}}
    why = {"op": "why", "verb": "read", "object": "agent:x"}
    unnamed, unknown = connection.ask(why), connection.ask({**why, "agent": "ghost"})
    assert (unnamed["code"], unknown["code"]) == ("ENOENT", "ENOENT")
    assert "write the name of an agent" in unnamed["message"]
    assert '"ghost": no such agent, or the caller is not its operator' in unknown["message"]
    assert connection.ask({"op": "audit", "agent": "ghost"})["code"] == "ENOENT"
    daemon.make("None")
    refusals = connection.ask({"op": "audit"})["refusals"]
    assert len(refusals) == 3, "an audit without a name is of no agent"
    connection.close()


def test_a_verb_at_the_socket_is_that_of_ctl(daemon: Daemon) -> None:
    agent = daemon.run("told", "sleep 1000")
    wait_status(agent, "busy")
    connection = Peer(daemon.runtime / "ctxd.sock")
    said = {"op": "ctl", "agent": "told"}
    assert connection.ask({**said, "line": "pause"}) == {"type": "ctl"}
    assert read(agent, "status") == "paused\n"
    refused = connection.ask({**said, "line": "pause"})
    assert (refused["code"], "the agent is paused" in refused["message"]) == ("EBUSY", True)
    assert " EBUSY agent/told.d/ctl: " in read(agent, "error")
    assert daemon.error() == read(agent, "error")
    assert connection.ask({**said, "line": "resume\nkill"})["code"] == "EINVAL"
    assert connection.ask({**said, "line": ""})["code"] == "EINVAL"
    assert connection.ask({"op": "ctl", "line": "kill"})["code"] == "ENOENT"
    assert connection.ask({**said, "agent": "none", "line": "kill"})["code"] == "ENOENT"
    assert connection.ask({**said, "task": "none", "line": "kill"})["code"] == "ENOENT"
    assert connection.ask({**said, "line": "kill"}) == {"type": "ctl"}
    wait_dead(agent)
    connection.close()


def test_an_agent_says_verbs_at_its_own_socket(daemon: Daemon) -> None:
    """Not at the daemon's, which is not in its view."""
    script = daemon.base / "programs" / "say.sh"
    script.parent.mkdir()
    script.parent.chmod(0o755)
    script.write_text(
        "cd $CTX_SELF/task; mkdir t; echo sleep 1000 > t/cmd; echo start > t/ctl; "
        "ctx task kill t && echo killed; ctx kill told || echo no; "
        f"ls {daemon.runtime}/ctxd.sock || echo unseen; ctx stop $CTX_AGENT && sleep 1000"
    )
    daemon.run("told", "sleep 1000")
    agent = daemon.run("teller", "sh /programs/say.sh",
                       mount=f"{script.parent} /programs ro")
    wait_dead(agent)
    assert read(agent, "out").splitlines()[-3:] == ["killed", "no", "unseen"], read(agent, "log")
    assert read(agent, "reason") == "self_stop\n"
    assert read(daemon.agent_dir("told"), "status") == "busy\n"


def test_the_socket_beside_the_mount_is_there_after_a_crash_and_goes_in_the_end(
    daemon: Daemon,
) -> None:
    agent = daemon.run("told", "sleep 1000")
    wait_status(agent, "busy")
    connection = Peer(daemon.runtime / "ctxd.sock")
    assert daemon.ctx("reexec").returncode == 0
    assert connection.ask({"op": "ping"}) == {"type": "pong"}
    connection.close()
    daemon.kill()
    daemon.start()
    assert daemon.ctx("kill", "told").returncode == 0
    wait_dead(agent)
    daemon.stop()
    assert not (daemon.runtime / "ctxd.sock").exists()


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


#: what another user does: argv[1] is a socket
STRANGER = """
import json, socket, sys
def connect():
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(20)
    peer.connect(sys.argv[1])
    return peer
def receive(peer):
    try:
        line = peer.makefile("rb").readline()
    except ConnectionResetError:
        line = b""
    return json.loads(line) if line else None
def ask(peer, data):
    try:
        peer.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        pass
    return receive(peer)
PING = b'{"op": "ping"}\\n'
"""


@contextlib.contextmanager
def stranger(path: object, program: str) -> Iterator[subprocess.Popen[str]]:
    """A helper that runs ``program`` as another user; it goes on after a line of input."""
    python = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
    with subprocess.Popen(
        ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", python, "-c",
         STRANGER + program, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.fixture
def small() -> Iterator[Daemon]:
    with daemon_of(config="owner_connections: 8\nowner_memory_max: 192K\n") as daemon:
        wait_status(daemon.run("sleeper", "sleep 1000"), "busy")
        wait_status(daemon.run("other", "sleep 1000"), "busy")
        yield daemon


def test_one_user_has_so_many_connections_over_all_sockets(small: Daemon) -> None:
    program = """
peers = [connect() for _ in range(8)]
answers = [ask(peer, PING)["type"] for peer in peers]
refused = [connect() for _ in range(40)]
frames = [receive(peer) for peer in refused]
ends = [receive(peer) for peer in refused]
sys.argv[1] = sys.argv[1].replace("sleeper", "other")
print(json.dumps([answers, [f and f["code"] for f in frames], ends, receive(connect())["code"]]),
      flush=True)
input()
peers.pop().close()
while (answer := ask(connect(), PING))["type"] != "pong":
    pass
print(json.dumps(answer), flush=True)
input()
"""
    with stranger(small.root / "agent" / "sleeper.sock", program) as process:
        answers, codes, ends, elsewhere = told(process)
        assert answers == ["pong"] * 8
        assert codes == ["EDQUOT"] * 40
        assert ends == [None] * 40
        assert elsewhere == "EDQUOT"
        with contextlib.ExitStack() as stack:
            peers = [stack.enter_context(peer(small, "sleeper")) for _ in range(20)]
            assert [p.ask({"op": "ping"}) for p in peers] == [{"type": "pong"}] * 20
        go_on(process)
        assert told(process) == {"type": "pong"}


def test_a_peer_that_left_does_not_count(small: Daemon) -> None:
    program = """
for _ in range(30):
    for _ in range(8):
        peer = connect()
        peer.sendall(b'{"op": "wait"}\\n' + PING)
        receive(peer)
        peer.close()
while (answer := ask(connect(), PING))["type"] != "pong":
    pass
print(json.dumps(answer), flush=True)
"""
    with stranger(small.root / "agent" / "sleeper.sock", program) as process:
        assert told(process) == {"type": "pong"}


def test_a_peer_that_only_stopped_sending_is_answered(sleeper: Daemon) -> None:
    with peer(sleeper, "sleeper") as connection:
        connection.socket.sendall(b'{"op": "wait"}')  # the end ends the line
        connection.socket.shutdown(socket.SHUT_WR)
        with peer(sleeper, "sleeper") as other:
            assert other.ask({"op": "ping"}) == {"type": "pong"}
        write(sleeper.agent_dir("sleeper") / "ctl", "kill")
        answer = connection.receive()
        assert answer is not None
        assert answer["type"] == "wait"


def test_so_many_operations_of_a_connection_wait(sleeper: Daemon) -> None:
    with peer(sleeper, "sleeper") as connection:
        connection.send(*[{"op": "wait"}] * 16)
        answer = connection.ask({"op": "wait", "id": "17"})
        assert (answer["type"], answer["code"], answer["id"]) == ("error", "EDQUOT", "17")
        assert connection.ask({"op": "ping"}) == {"type": "pong"}
        with peer(sleeper, "sleeper") as other:
            other.send({"op": "wait"})
            # a request that is unread when the agent ends is not answered
            assert other.ask({"op": "ping"}) == {"type": "pong"}
            write(sleeper.agent_dir("sleeper") / "ctl", "kill")
            for waiting, count in ((connection, 16), (other, 1)):
                answers = [waiting.receive() for _ in range(count)]
                assert [a and a["type"] for a in answers] == ["wait"] * count
                assert waiting.receive() is None


def test_an_operation_that_is_done_leaves_its_place(sleeper: Daemon) -> None:
    with peer(sleeper, "sleeper") as connection:
        for _ in range(50):
            answer = connection.ask({"op": "resume", "after": "m3"})
            assert answer["code"] == "EINVAL"


def test_unfinished_frames_are_bounded_over_all_connections(small: Daemon) -> None:
    program = """
peers = [connect() for _ in range(4)]
for peer in peers[:3]:
    ask(peer, PING + b"x" * 35000)
frame = ask(peers[3], b"x" * 35000)
print(json.dumps([frame["code"], receive(peers[3])]), flush=True)
input()
peers.pop(0).close()
while ask(connect(), b"x" * 35000 + b"\\n")["code"] != "EINVAL":
    pass
print(json.dumps("again"), flush=True)
"""
    with stranger(small.root / "agent" / "sleeper.sock", program) as process:
        assert told(process) == ["EDQUOT", None]
        with peer(small, "sleeper") as connection:
            answer = connection.ask(b"x" * 30000 + b"\n")
            assert answer["code"] == "EINVAL", "what others hold is not charged to root"
        go_on(process)
        assert told(process) == "again"


def test_operations_that_wait_are_bounded_by_what_they_hold(small: Daemon) -> None:
    program = """
connection = connect()
frame = json.dumps({"op": "wait", "id": "i" * 20000}).encode()
for _ in range(14):
    connection.sendall(frame + b"\\n")
    answer = ask(connection, PING)
    if answer is None or answer["type"] == "error":
        break
print(json.dumps(answer and answer["code"]), flush=True)
"""
    with stranger(small.root / "agent" / "sleeper.sock", program) as process:
        assert told(process) == "EDQUOT"
