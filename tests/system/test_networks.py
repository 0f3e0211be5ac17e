"""One API instead of a network: a cell reaches what its operator named, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from runtime.cell import networks
from runtime.kernel.cgroups import Cgroup
from runtime.records.config import FALLBACK_RELAY_ID
from tests.worlds.daemon import (
    MARK,
    TIMEOUT,
    Daemon,
    alive,
    read,
    refusal,
    running,
    wait_dead,
    wait_status,
    wait_until,
    write,
)

PORT: Final = 8081
#: a process in a cell that does what it is told, one line at a time
_TOLD: Final = """
import array, errno, json, os, resource, socket, struct, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
asked = socket.socket(socket.AF_UNIX)
asked.connect(sys.argv[1])
lines, known = asked.makefile("rw"), globals()
def tcp(port=PORT):
    return socket.create_connection(("127.0.0.1", port), 30)
def local(path="/run/ctx/net/api"):
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(30)
    made.connect(path)
    return made
def rest(s):
    data = b""
    while part := s.recv(65536):
        data += part
    return data
for line in lines:
    try:
        try:
            said = eval(json.loads(line), known)
        except SyntaxError:
            said = exec(json.loads(line), known)
        said = said.decode("latin-1") if isinstance(said, bytes) else said
        said = said if isinstance(said, str | int | list | dict | None) else repr(said)
        lines.write(json.dumps({"said": said}) + "\\n")
    except OSError as error:
        lines.write(json.dumps({"errno": errno.errorcode.get(error.errno, str(error))}) + "\\n")
    lines.flush()
"""


class Api:
    """What an operator's socket leads to. The test is the server: it takes each connection."""

    def __init__(self, path: Path, kept: contextlib.ExitStack) -> None:
        self.path = path
        self._kept = kept
        self.socket = kept.enter_context(socket.socket(socket.AF_UNIX))
        self.socket.bind(str(path))
        path.chmod(0o666)
        self.socket.listen(4096)
        self.socket.settimeout(TIMEOUT)

    def accept(self) -> socket.socket:
        found = self._kept.enter_context(self.socket.accept()[0])
        found.settimeout(TIMEOUT)
        return found

    def nobody(self) -> bool:
        """Whether nobody has come."""
        self.socket.setblocking(False)
        try:
            self.socket.accept()[0].close()
        except BlockingIOError:
            return True
        finally:
            self.socket.settimeout(TIMEOUT)
        return False


class Inside:
    """A process of an agent's that the test tells what to do."""

    def __init__(self, data: Path, name: str, kept: contextlib.ExitStack) -> None:
        self._kept = kept
        self._listening = kept.enter_context(socket.socket(socket.AF_UNIX))
        self._listening.bind(str(data / f"{name}.sock"))
        (data / f"{name}.sock").chmod(0o666)
        self._listening.listen()
        self._listening.settimeout(TIMEOUT)
        #: what an agent runs to be one
        self.command = f"python3 /mnt/told.py /mnt/{name}.sock"

    def arrive(self) -> None:
        asked = self._kept.enter_context(self._listening.accept()[0])
        asked.settimeout(TIMEOUT)
        self._lines = self._kept.enter_context(asked.makefile("rw"))

    def do(self, code: str) -> Any:
        self._lines.write(json.dumps(code) + "\n")
        self._lines.flush()
        answer = json.loads(self._lines.readline())
        if "errno" in answer:
            return answer["errno"]
        return answer["said"]


class World:
    """A daemon with the network ``api``, and agents that do what they are told."""

    def __init__(
        self, daemon: Daemon, api: Api, data: Path, kept: contextlib.ExitStack
    ) -> None:
        self.daemon = daemon
        self.api = api
        self.data = data
        self._kept = kept

    def inside(self, name: str) -> Inside:
        return Inside(self.data, name, self._kept)

    def run(self, name: str, *lines: str, **files: str) -> tuple[Path, Inside]:
        """A running root agent with these lines in its policy."""
        text = "".join(f"{line}\n" for line in lines).replace("LABEL", f"{name}_t")
        inside = self.inside(name)
        agent = self.daemon.run(
            name, inside.command, mount=f"{self.data} /mnt rw", policy=text, **files
        )
        inside.arrive()
        return agent, inside

    def child(self, parent: str, name: str, *lines: str, **files: str) -> tuple[Path, Inside]:
        text = "".join(f"{line}\n" for line in lines).replace("LABEL", f"{name}_t")
        inside = self.inside(name)
        agent = self.daemon.make(name, parent=f"agent:{parent}", policy=text, **files)
        write(agent / "exec", inside.command)
        write(agent / "ctl", "start")
        inside.arrive()
        return agent, inside

    def relays(self, agent: Path) -> list[int]:
        """Pids of the agent's own."""
        cgroup = read(agent, "cgroup").strip()
        return Cgroup(Path(cgroup, "net")).processes() if cgroup else []

    def usage(self, agent: Path) -> dict[str, int]:
        pairs = (line.split("=") for line in read(agent, "usage").splitlines())
        return {
            key.removeprefix("net.api."): int(value)
            for key, value in pairs
            if key.startswith("net.api.")
        }

    def connect(self, inside: Inside, how: str = "tcp()", name: str = "s") -> socket.socket:
        """The server's end of a new connection, which is ``name`` for the agent."""
        inside.do(f"{name} = {how}")
        return self.api.accept()


LINE: Final = "allow LABEL network:api connect"


def config_of(api: Api, more: str = "") -> str:
    return f"networks: {{api: {{socket: {api.path}, port: {PORT}}}}}\n{more}"


@contextlib.contextmanager
def world_of(make: Callable[[str], Daemon], more: str = "") -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix=f"{MARK}-", dir="/tmp") as directory:
        base = Path(directory)
        base.chmod(0o755)
        data = base / "data"
        data.mkdir()
        data.chmod(0o777)
        (data / "told.py").write_text(_TOLD.replace("PORT", str(PORT)))
        with contextlib.ExitStack() as kept:
            api = Api(base / "api.sock", kept)
            daemon = kept.enter_context(running(make(config_of(api, more))))
            yield World(daemon, api, data, kept)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    mark = request.node.get_closest_marker("settings")
    more = "".join(f"{key}: {value}\n" for key, value in (mark.kwargs if mark else {}).items())
    with world_of(lambda config: Daemon(config=config), more) as made:
        yield made


def ask(server: socket.socket, inside: Inside, name: str = "s") -> None:
    """Bytes pass in both directions."""
    inside.do(f"{name}.sendall(b'ping')")
    assert server.recv(10) == b"ping"
    server.sendall(b"pong")
    assert inside.do(f"{name}.recv(10)") == "pong"


def gone(inside: Inside, name: str = "s") -> bool:
    """Whether the agent's end of a connection is closed, abruptly or not."""
    return inside.do(f"{name}.recv(10)") in ("", "ECONNRESET")


def refused(inside: Inside, how: str = "tcp()") -> bool:
    """Whether a new connection is closed at once, perhaps before it is made for the agent."""
    return inside.do(f"s = {how}") == "ECONNRESET" or gone(inside)


# what it reaches


def test_a_network_is_reached_by_port_and_by_socket(world: World) -> None:
    agent, inside = world.run("a", LINE)
    assert inside.do("os.environ['CTX_NET_API']") == f"http://127.0.0.1:{PORT}"
    for how in ("tcp()", "local()"):
        server = world.connect(inside, how)
        ask(server, inside)
        # each direction ends by itself
        inside.do("s.shutdown(socket.SHUT_WR)")
        assert server.recv(10) == b""

        def send(server: socket.socket = server) -> None:
            with server:
                server.sendall(b"x" * 300_000)

        # what is on the way need not have room for all of it
        sends = threading.Thread(target=send)
        sends.start()
        assert inside.do("len(rest(s))") == 300_000
        sends.join()
        inside.do("s.close()")
    assert world.usage(agent) == {"connections": 2, "sent": 8, "received": 600_008}
    (relay,) = world.relays(agent)
    status = Path(f"/proc/{relay}/status").read_text()
    assert f"Uid:\t{FALLBACK_RELAY_ID}\t{FALLBACK_RELAY_ID}\t" in status
    assert "CapEff:\t0000000000000000" in status and "NoNewPrivs:\t1" in status
    write(agent / "ctl", "stop")
    wait_dead(agent)
    assert world.usage(agent) == {"connections": 2, "sent": 8, "received": 600_008}
    assert not alive(relay)
    assert os.listdir(world.daemon.runtime / "net") == ["owner-0"]


def test_an_abrupt_end_is_passed_on(world: World) -> None:
    _, inside = world.run("a", LINE)
    server = world.connect(inside)
    ask(server, inside)
    inside.do("s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))")
    inside.do("s.close()")
    assert server.recv(10) == b"", "a Unix socket knows no other end"
    server = world.connect(inside)
    ask(server, inside)
    inside.do("s.sendall(b'more')")
    assert server.recv(4, socket.MSG_PEEK) == b"more"
    server.close()  # with data that nobody has read
    assert inside.do("s.recv(10)") == "ECONNRESET"


def test_runs_and_tasks_of_a_held_cell_have_it_too(world: World) -> None:
    inside = world.inside("t")
    agent = world.daemon.run(
        "t", inside.command, mode="turn", mount=f"{world.data} /mnt rw",
        policy="allow t_t network:api connect",
    )
    write(agent / "inbox", "go")
    inside.arrive()
    for how in ("tcp()", "local()"):
        ask(world.connect(inside, how), inside)
    other = world.inside("task")
    (agent / "task" / "k").mkdir()
    write(agent / "task" / "k" / "cmd", other.command)
    write(agent / "task" / "k" / "ctl", "start")
    other.arrive()
    assert other.do("os.environ['CTX_NET_API']") == f"http://127.0.0.1:{PORT}"
    for how in ("tcp()", "local()"):
        ask(world.connect(other, how), other)


def test_with_the_hosts_network_there_is_the_socket_only(world: World) -> None:
    _, inside = world.run("a", LINE, "allow LABEL network:default connect")
    assert inside.do("os.environ.get('CTX_NET_API')") is None
    assert inside.do("tcp()") == "ECONNREFUSED"
    ask(world.connect(inside, "local()"), inside)


def test_a_cell_with_the_root_of_the_host_has_a_network_too(world: World) -> None:
    _, inside = world.run("a", LINE, iso="shared")
    for how in ("tcp()", "local()"):
        ask(world.connect(inside, how), inside)
    assert os.listdir(networks.DIRECTORY) == [], "its own are not the host's"


def test_nothing_else_is_reached(world: World) -> None:
    agent, inside = world.run("a", LINE)
    with socket.socket() as host, socket.socket(socket.AF_UNIX) as abstract:
        host.bind(("127.0.0.1", 0))
        host.listen()
        name = f"{MARK}-abstract"
        abstract.bind(f"\0{name}")
        abstract.listen()
        tried = {
            "its own loopback": f"tcp({host.getsockname()[1]})",
            "an unused port": f"tcp({PORT + 1})",
            "a privileged port": "tcp(80)",
            "an abstract socket": f"local('\\0{name}')",
            "link-local": "socket.create_connection(('169.254.169.254', 80), 30)",
            "link-local IPv6": "socket.create_connection(('fe80::1%1', 80), 30)",
            "a host": "socket.create_connection(('192.0.2.1', 443), 30)",
            "a name server": "socket.socket(type=socket.SOCK_DGRAM).connect(('192.0.2.1', 53))",
            "the operator's socket": f"local({str(world.api.path)!r})",
            "the keeper's": f"local({str(world.daemon.runtime / 'net')!r})",
        }
        said = {what: inside.do(code) for what, code in tried.items()}
    assert said == {
        "its own loopback": "ECONNREFUSED",
        "an unused port": "ECONNREFUSED",
        "a privileged port": "ECONNREFUSED",
        "an abstract socket": "ECONNREFUSED",
        "link-local": "ENETUNREACH",
        "link-local IPv6": "ENETUNREACH",
        "a host": "ENETUNREACH",
        "a name server": "ENETUNREACH",
        "the operator's socket": "ENOENT",
        "the keeper's": "ENOENT",
    }
    names = "[line.split(':')[0].strip() for line in open('/proc/net/dev')][2:]"
    assert inside.do(names) == ["lo"]
    assert inside.do("os.listdir('/run/ctx/net')") == ["api"]
    assert world.api.nobody()
    # nor is there anything else to find out
    assert inside.do("os.listdir('/proc/1/fd')") == "EACCES"
    assert str(world.api.path) not in inside.do("dict(os.environ)").values()
    assert str(world.api.path) not in read(agent, "log") + read(agent, "out")


#: what a process may try to get into the cgroup of the relay, which has other rights than it
JOIN = """\
import ctypes
def join():
    libc = ctypes.CDLL(None)
    libc.unshare(0x12020000)  # user, mounts and cgroup: what may be mounted is its own to decide
    os.makedirs("/tmp/cg", exist_ok=True)
    libc.mount(b"none", b"/tmp/cg", b"cgroup2", 0, None)
    joined = []
    for top in ("/sys/fs/cgroup", "/tmp/cg", "/proc/1/root/sys/fs/cgroup"):
        for path, _, files in os.walk(top):
            for file in {"cgroup.procs", "cgroup.threads", "tasks"} & {*files}:
                try:
                    with open(f"{path}/{file}", "w") as procs:
                        procs.write(str(os.getpid()))
                    joined.append(f"{path}/{file}")
                except OSError:
                    pass
    return joined
def apart():
    out, into = os.pipe()
    if not os.fork():
        os.write(into, json.dumps(join()).encode())
        os._exit(0)
    os.wait()
    return json.loads(os.read(out, 65536))
"""


def test_nothing_of_the_cell_gets_into_the_relays_cgroup(world: World) -> None:
    agent, inside = world.run("a", LINE)
    ask(world.connect(inside), inside)  # the program may be there before its relay
    [relay] = world.relays(agent)
    inside.do(f"exec({JOIN!r}, globals())")
    for tried in ("apart()", "join()"):
        assert inside.do(tried) == [], tried
    # what it starts is where it is, also when it is told to go elsewhere
    inside.do("[os.fork() or threading.Event().wait() for _ in range(20)]")
    assert world.relays(agent) == [relay]
    # nor are the relay's processes within its reach
    assert inside.do(f"os.kill({relay}, 9)") in ("ESRCH", "EPERM")
    ask(world.connect(inside), inside)


def test_a_child_without_the_line_reaches_nothing(world: World) -> None:
    _, over = world.run("boss", LINE, "allow LABEL agent:* create")
    kid, under = world.child("boss", "kid")
    assert under.do("os.environ.get('CTX_NET_API')") is None
    assert under.do("tcp()") == "ECONNREFUSED"
    assert under.do("local()") == "ENOENT"
    # the directory can be handed to it, as a descriptor
    over.do("box = socket.socket(socket.AF_UNIX); box.bind('/mnt/box'); box.listen()")
    over.do("os.chmod('/mnt/box', 0o777)")
    under.do("box = local('/mnt/box')")
    over.do("given = box.accept()[0]; fd = os.open('/run/ctx/net', os.O_PATH)")
    over.do("socket.send_fds(given, [b'x'], [fd])")
    under.do("fd = socket.recv_fds(box, 1, 1)[1][0]")
    over.do("os.chmod('/run/ctx/net/api', 0o777)")
    assert refused(under, "local(f'/proc/self/fd/{fd}/api')")
    assert world.api.nobody()
    ask(world.connect(over, "local()"), over)
    assert world.usage(kid) == {}
    write(kid / "ctl", "kill")
    wait_dead(kid)
    # nor as a mount
    other = world.daemon.make("other", parent="agent:boss")
    for source in ("/run/ctx/net", "/run/ctx/net/api"):
        assert refusal(other / "mount", f"{source} /net rw") == "EACCES"
    write(other / "mount", "/run /other rw")
    write(other / "policy", "")
    third = world.inside("third")
    write(other / "exec", third.command)
    write(other / "ctl", "start")
    third.arrive()
    assert refused(third, "local('/other/ctx/net/api')")
    assert world.api.nobody()


def test_a_childs_line_is_its_own_network_and_counts_above(world: World) -> None:
    boss, over = world.run("boss", "delegate LABEL network:api connect")
    assert over.do("tcp()") == "ECONNREFUSED"
    kid, under = world.child("boss", "kid", LINE)
    for how in ("tcp()", "local()"):
        ask(world.connect(under, how), under)
    assert world.usage(kid) == world.usage(boss) == {"connections": 2, "sent": 8, "received": 8}
    assert world.relays(boss) == [] and len(world.relays(kid)) == 1
    write(kid / "ctl", "kill")
    wait_dead(kid)
    assert world.usage(boss)["sent"] == 8
    assert refusal(world.daemon.make("more", parent="agent:boss") / "policy",
                   "allow more_t network:other connect") == "EACCES"


# what is taken away


@contextlib.contextmanager
def streaming(*servers: socket.socket) -> Iterator[None]:
    """While they send without pause, until nobody takes it any more."""
    stop = threading.Event()

    def stream(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not stop.is_set():
                server.sendall(b"x" * 1000)

    threads = [threading.Thread(target=stream, args=(server,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(TIMEOUT)


def test_a_line_that_is_taken_away_closes_what_is_open(world: World) -> None:
    boss, over = world.run("boss", LINE, "allow LABEL agent:* create")
    kid, under = world.child("boss", "kid", LINE)
    servers = [world.connect(over), world.connect(under), world.connect(under, "local()", "t")]
    ask(servers[0], over)
    ask(servers[1], under)
    with streaming(*servers):
        write(boss / "policy", "allow boss_t agent:* create")
        for inside, name in ((over, "s"), (under, "s"), (under, "t")):
            assert isinstance(inside.do(f"rest({name})"), str), "it has ended"
    for inside in (over, under):
        for how in ("tcp()", "local()"):
            assert refused(inside, how)
    assert world.api.nobody()
    assert "network:api is closed" in read(kid, "log")


@pytest.mark.alone
def test_it_is_closed_within_a_second(world: World) -> None:
    agent, inside = world.run("a", LINE)
    server = world.connect(inside)
    with streaming(server):
        write(agent / "policy", "")
        begun = time.monotonic()
        inside.do("rest(s)")
        assert time.monotonic() - begun < 1.0


@pytest.mark.parametrize("how", ["paused", "stopped"])
def test_it_is_closed_though_its_relay_does_nothing(world: World, how: str) -> None:
    agent, inside = world.run("a", LINE)
    server = world.connect(inside)
    ask(server, inside)
    (relay,) = world.relays(agent)
    if how == "paused":
        write(agent / "ctl", "pause")
        wait_status(agent, "paused")
    else:
        os.kill(relay, signal.SIGSTOP)
    write(agent / "policy", "")
    assert server.recv(10) == b""
    if how == "paused":
        write(agent / "ctl", "resume")
    assert gone(inside)
    wait_until(lambda: world.relays(agent) not in ([], [relay]), "it is replaced")
    assert refused(inside)


def test_the_hosts_network_is_kept_and_a_name_is_not(world: World) -> None:
    agent, inside = world.run("a", "allow LABEL network:* connect")
    server = world.connect(inside, "local()")
    assert refusal(agent / "policy", LINE.replace("LABEL", "a_t")) == "EBUSY"
    write(agent / "policy", "allow a_t network:default connect")
    assert server.recv(10) == b""


def test_a_network_leaves_with_the_configuration_and_comes_back(world: World) -> None:
    agent, inside = world.run("a", LINE)
    server = world.connect(inside)
    path = world.daemon.base / "config.yaml"
    path.write_text("")
    os.kill(world.daemon.pid, signal.SIGHUP)
    assert server.recv(10) == b""
    assert refused(inside, "tcp()")
    path.write_text(config_of(world.api))
    os.kill(world.daemon.pid, signal.SIGHUP)
    wait_until(lambda: "network:api is open again" in read(agent, "log"), "it is open again")
    ask(world.connect(inside), inside)


# limits


def test_over_its_limit_it_is_closed_and_says_so(world: World) -> None:
    agent, inside = world.run("a", LINE, limits="net.api.max=1000")
    server = world.connect(inside)
    ask(server, inside)
    server.sendall(b"x" * 2000)
    assert len(inside.do("s.recv(10)")) == 10
    assert inside.do("rest(s)") == "ECONNRESET"
    assert world.usage(agent) == {"connections": 1, "sent": 4, "received": 996}
    sentence = "network:api: net.api.max=1000 is used up: its connections are closed"
    wait_until(lambda: sentence in read(agent, "log"), "it is told in the log")
    assert sentence in read(agent, "error")
    assert refused(inside, "tcp()")
    write(agent / "limits", "net.api.max=1M")
    ask(world.connect(inside), inside)
    assert read(agent, "log").count(sentence) == 1


def test_a_limit_is_one_of_the_subtree(world: World) -> None:
    boss, over = world.run("boss", LINE, "allow LABEL agent:* create", limits="net.api.max=100")
    kid, under = world.child("boss", "kid", LINE, limits="net.api.max=1M")
    servers = world.connect(over), world.connect(under)
    ask(servers[0], over)
    servers[1].sendall(b"x" * 200)
    assert under.do("rest(s)") == "ECONNRESET"
    assert gone(over), "the limit is its own, too"
    assert 'net.api.max=100 of "boss" is used up' in _log(kid, "used up")
    assert "net.api.max=100 is used up" in _log(boss, "used up")
    write(kid / "ctl", "kill")
    wait_dead(kid)
    _, again = world.child("boss", "again", LINE)
    assert refused(again, "tcp()"), "another child has no more"


def _log(agent: Path, wanted: str) -> str:
    wait_until(lambda: wanted in read(agent, "log"), f"{wanted} in its log")
    return read(agent, "log")


def test_a_socket_that_nobody_serves_is_told(world: World) -> None:
    agent, inside = world.run("a", LINE)
    world.api.path.unlink()
    assert refused(inside, "tcp()")
    sentence = f"network:api: cannot connect to {world.api.path}: No such file or directory"
    assert sentence in _log(agent, "cannot connect")
    assert sentence in read(agent, "error")


# crashes


def test_a_stream_goes_on_without_the_daemon(world: World) -> None:
    agent, inside = world.run("a", LINE)
    server = world.connect(inside)
    ask(server, inside)
    (relay,) = world.relays(agent)
    world.daemon.kill()
    ask(server, inside)
    world.connect(inside, "local()", "t")
    world.daemon.start()
    ask(server, inside)
    assert world.relays(agent) == [relay], "it is taken over"
    assert world.usage(agent) == {"connections": 2, "sent": 12, "received": 12}
    write(agent / "policy", "")
    assert server.recv(10) == b""


def test_what_was_taken_away_before_a_crash_is_closed_after_it(world: World) -> None:
    """The daemon dies between the commit and what it tells the relay."""
    agent, inside = world.run("a", LINE)
    server = world.connect(inside)
    ask(server, inside)
    incarnation = read(agent, "incarnation").strip()
    write(agent / "policy", "")
    assert server.recv(10) == b""
    world.daemon.kill()
    # as it was before it was told
    counters = world.daemon.runtime / "net" / incarnation
    with open(counters, "r+b") as file:
        at = networks.position(0, "closed")
        file.seek(at)
        assert file.read(8) == (1).to_bytes(8, "little")
        file.seek(at)
        file.write(bytes(8))
    ask(world.connect(inside), inside)
    world.daemon.start()
    assert gone(inside)


def test_a_relay_that_is_killed_is_replaced(world: World) -> None:
    agent, inside = world.run("a", LINE)
    server = world.connect(inside)
    ask(server, inside)
    (relay,) = world.relays(agent)
    os.kill(relay, signal.SIGKILL)
    assert server.recv(10) == b""
    # who connects meanwhile waits
    ask(world.connect(inside), inside)
    (other,) = world.relays(agent)
    assert other != relay
    world.daemon.kill()
    os.kill(other, signal.SIGKILL)
    inside.do("s = tcp()")
    world.daemon.start()
    ask(world.api.accept(), inside)
    assert world.usage(agent)["connections"] == 3


def test_a_paused_agent_is_not_served(world: World) -> None:
    agent, inside = world.run("a", LINE)
    server = world.connect(inside)
    write(agent / "ctl", "pause")
    wait_status(agent, "paused")
    server.sendall(b"later")
    write(agent / "ctl", "resume")
    assert inside.do("s.recv(10)") == "later"
    write(agent / "ctl", "pause")
    write(agent / "ctl", "kill")
    wait_dead(agent)


def test_each_life_has_its_own(world: World) -> None:
    agent, inside = world.run("a", LINE)
    ask(world.connect(inside), inside)
    write(agent / "ctl", "stop")
    wait_dead(agent)
    write(agent / "ctl", "reset")
    write(agent / "ctl", "start")
    inside.arrive()
    ask(world.connect(inside), inside)
    assert world.usage(agent)["connections"] == 1


def test_where_no_socket_can_be_the_start_says_so(world: World) -> None:
    agent = world.daemon.make("a", "true", policy="allow a_t network:api connect",
                              mount="- /run hide")
    write(agent / "ctl", "start")
    wait_dead(agent)
    assert "mount target /run/ctx" in read(agent, "reason")


# hostile agents


@pytest.mark.settings(owner_connections=300)
def test_thousands_of_connections_are_bounded(world: World) -> None:
    agent, inside = world.run("a", LINE)
    _, other = world.run("b", LINE)
    inside.do(
        "def more():\n"
        "    made = []\n"
        "    for _ in range(3000):\n"
        "        s = socket.socket()\n"
        "        s.setblocking(False)\n"
        "        s.connect_ex(('127.0.0.1', PORT))\n"
        "        made.append(s)\n"
        "    return made\n".replace("PORT", str(PORT))
    )
    inside.do("many = more()")
    taken = [world.api.accept() for _ in range(256)]
    # an own limit for each, one of the owner for both
    servers = [world.connect(other, name=f"s{i}") for i in range(44)]
    ask(servers[0], other, "s0")
    assert world.api.nobody()
    other.do("w = tcp()")
    assert world.api.nobody()
    (relay,) = world.relays(agent)
    assert len(os.listdir(f"/proc/{relay}/fd")) < 600
    servers[1].close()
    other.do("s1.close()")
    ask(world.api.accept(), other, "w")
    # which a killed relay has no more of
    os.kill(relay, signal.SIGKILL)
    for each in taken:
        each.close()
    inside.do("[s.close() for s in many]")
    inside.do("del many")
    for number in range(100):
        world.connect(other, name=f"u{number}")


def test_a_slow_reader_holds_up_nobody_and_takes_no_memory(world: World) -> None:
    agent, inside = world.run("a", LINE)
    servers = [world.connect(inside, name=f"s{i}") for i in range(100)]
    for server in servers:
        server.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                server.send(b"x" * 65536)
    (relay,) = world.relays(agent)
    pages = int(Path(f"/proc/{relay}/statm").read_text().split()[1])
    assert pages * os.sysconf("SC_PAGE_SIZE") < 8 << 20
    spent = _cpu(relay)
    ask(world.connect(inside), inside)
    assert _cpu(relay) - spent < 50
    # half-open: it says no more, and reads nothing
    for number in range(100):
        inside.do(f"s{number}.shutdown(socket.SHUT_WR)")
    ask(world.connect(inside), inside)
    write(agent / "ctl", "kill")
    wait_dead(agent)


@pytest.mark.long
def test_a_busy_socket_holds_up_no_other_network() -> None:
    """Those that wait for it, and gave up, held all connections that the agent may have."""
    with world_of(lambda config: Daemon(config=config)) as world, contextlib.ExitStack() as kept:
        other = Api(world.api.path.with_name("other.sock"), kept)
        (world.daemon.base / "config.yaml").write_text(
            f"networks: {{api: {{socket: {world.api.path}, port: {PORT}}}, "
            f"other: {{socket: {other.path}, port: {PORT + 1}}}}}\n"
        )
        os.kill(world.daemon.pid, signal.SIGHUP)
        wait_until(lambda: "network.other" in world.daemon.path("status").read_text(), "it is read")
        agent, inside = world.run("a", LINE, "allow LABEL network:other connect")
        world.api.socket.listen(0)
        inside.do(
            "def more(made):\n"
            "    s = socket.socket()\n"
            "    s.setblocking(False)\n"
            "    s.connect_ex(('127.0.0.1', PORT))\n"
            "    made.append(s)\n".replace("PORT", str(PORT))
        )
        inside.do("many = []; [more(many) for _ in range(300)]")
        inside.do("waits = local()")
        sentence = f"network:api: cannot connect to {world.api.path}: Resource temporarily"
        assert sentence in _log(agent, "cannot connect")
        inside.do("[s.close() for s in many]")
        for number in range(100):
            inside.do(f"o{number} = tcp({PORT + 1})")
            server = other.accept()
            server.sendall(b"here")
            assert inside.do(f"o{number}.recv(10)") == "here"
        assert world.usage(agent)["connections"] < 10
        # and when there is room again, whoever still waits is served
        inside.do("waits.sendall(b'me')")
        while (server := world.api.accept()).recv(10) != b"me":
            server.close()
        server.sendall(b"you")
        assert inside.do("waits.recv(10)") == "you"
        wait_until(lambda: not _trouble(world, agent), "nothing is wrong any more")


def test_programs_use_a_forward_proxy_which_knows_whose_they_are() -> None:
    with world_of(lambda config: Daemon(config=config)) as world:
        web = "header: proxy, kind: http_proxy"
        (world.daemon.base / "config.yaml").write_text(
            f"networks: {{api: {{socket: {world.api.path}, port: {PORT}, {web}}}, "
            f"more: {{socket: {world.api.path}.more, port: {PORT + 1}, {web}}}}}\n"
        )
        os.kill(world.daemon.pid, signal.SIGHUP)
        status = world.daemon.path("status")
        wait_until(lambda: "kind.more=http_proxy" in status.read_text(), "it is read")
        agent, inside = world.run("a", LINE, "allow LABEL network:more connect")
        inside.do("import urllib.request")
        ask = "urllib.request.urlopen('http://list.test/x', timeout=30).read().decode()"
        inside.do(f"got = []; t = threading.Thread(target=lambda: got.append({ask})); t.start()")
        server = world.api.accept()
        said = b""
        while not said[52:].endswith(b"\r\n\r\n"):
            said += server.recv(1000)
        incarnation = bytes.fromhex(read(agent, "incarnation").strip())
        assert said[16:32] == bytes.fromhex("fd63747866730000") + incarnation
        assert said[52:].startswith(b"GET http://list.test/x HTTP/1.1\r\n")
        server.sendall(b"HTTP/1.0 200 OK\r\n\r\nhere")
        server.close()
        assert inside.do("t.join() or got") == ["here"]
        sentence = "network:api is its proxy, HTTPS_PROXY and HTTP_PROXY: the first of api, more"
        assert sentence in read(agent, "log")
        _, plain = world.run("b", LINE, "allow LABEL network:default connect")
        assert plain.do("[name for name in os.environ if name.upper().endswith('_PROXY')]") == []


def _trouble(world: World, agent: Path) -> int:
    incarnation = read(agent, "incarnation").strip()
    counters = networks.Counters(world.daemon.runtime / "net" / incarnation)
    return sum(line.trouble for line in counters.lines())


def _cpu(pid: int) -> int:
    """Ticks of the processor."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
