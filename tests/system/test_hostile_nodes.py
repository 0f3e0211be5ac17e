"""What the other side of a link, or who took over the command of one, can do to others: nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.system.hostile.guarded import guarded
from tests.worlds.daemon import MARK, daemon_of, read, wait_until, write
from tests.worlds.nodes import CTX, lead_of, node
from tests.worlds.strangers import Wire, false_host, false_lead

#: each success is a line of a file
_TAKEN = """\
import ctypes, os, signal, socket, sys, time
where, own = sys.argv[1], os.getpid()
state, control, root = open(f"{where}/told").read().split()
libc = ctypes.CDLL(None, use_errno=True)
open(f"{where}/{own}", "w").close()
while not (others := [int(n) for n in os.listdir(where) if n.isdigit() and int(n) != own]):
    time.sleep(0.01)
other = others[0]

def attempt(what, call, *arguments):
    try:
        if call(*arguments) != -1:
            said.write(f"{what}\\n")
    except OSError:
        pass

def look(path):
    return os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1)

def lead(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.connect(path)
        made.sendall(b'{"op":"peer"}\\n')
        return 0 if made.recv(100).startswith(b"ctxfs-peer") else -1

with open(f"{where}/said-{own}", "w") as said:
    attempt("own", look, f"/proc/{own}/environ")
    for name in ("mem", "environ", "maps", "map_files"):
        attempt(name, look, f"/proc/{other}/{name}")
    for name in ("cwd", "fd/0"):
        attempt(name, os.readlink, f"/proc/{other}/{name}")
    attempt("ptrace", libc.ptrace, 16, other, 0, 0)
    attempt("descriptor", libc.syscall, 438, os.pidfd_open(other), 0, 0)
    attempt("signal", os.kill, other, signal.SIGCONT)
    for path in (state, f"{state}/peers.json", f"{state}/ctxfs.db", f"{root}/agent/x.d/out"):
        attempt(path, look, path)
    attempt("peer", lead, control)
os.rename(f"{where}/said-{own}", f"{where}/done-{own}")
time.sleep(1000)
"""


@pytest.mark.needs_root("without root, commands of links are the user's own programs")
def test_the_command_of_a_link_reaches_no_other_and_nothing_of_the_daemon() -> None:
    """Both have one account, and a stranger may have taken over either (S2)."""
    with tempfile.TemporaryDirectory(prefix=f"{MARK}-", dir="/tmp") as directory, ExitStack() as on:
        where = Path(directory)
        where.chmod(0o777)
        script = where / "taken.py"
        script.write_text(_TAKEN)
        command = ["/usr/bin/python3", "-ISu", str(script), directory]
        lead = on.enter_context(lead_of({name: {**node(command), "as": "link"} for name in "ab"}))
        daemon = lead.daemon
        daemon.make("x")
        (where / "told").write_text(f"{daemon.state} {daemon.runtime}/ctxd.sock {daemon.root}")
        for name in "ab":
            check = subprocess.Popen(
                [CTX, "--root", daemon.root, "nodes", "check", name], stdout=subprocess.DEVNULL
            )
            on.callback(check.wait)
            on.callback(check.kill)
        wait_until(lambda: len([*where.glob("done-*")]) == 2, "both have tried all")
        for path in where.glob("done-*"):
            assert path.read_text() == "own\n"


@pytest.mark.needs_root("without root, keys are the user's own")
def test_no_agent_reads_a_key() -> None:
    """Neither in its sandbox, nor with its uid outside of it (S1)."""
    with daemon_of() as daemon:
        directory = daemon.state / "ssh"
        directory.mkdir(mode=0o700)
        (directory / "key").write_text("secret")
        (directory / "key").chmod(0o600)
        (daemon.state / "peers.json").write_text('{"hosts":{},"leads":{}}')
        script = f"cat {directory}/key {daemon.state}/peers.json; ls {daemon.state}"
        said = read(daemon.finish("x", f"sh -c '{script}'"), "out")
        assert "secret" not in said and "hosts" not in said
        own = ["setpriv", "--reuid=4343", "--regid=4343", "--clear-groups", "sh", "-c", script]
        done = subprocess.run(own, capture_output=True, text=True, check=False)
        assert "secret" not in done.stdout and "hosts" not in done.stdout


# floods

#: it writes the same again and again, and reads whatever comes
_FLOOD = """\
import os, socket, sys, threading
s = socket.socket(fileno=int(sys.argv[1]))
s.settimeout(None)
data = sys.stdin.buffer.read()
def read():
    while s.recv(1 << 16): pass
threading.Thread(target=read, daemon=True).start()
try:
    if sys.argv[2] == "again":
        while True: s.sendall(data)
    s.sendall(data)
    s.recv(1)
except OSError:
    pass
"""


@contextmanager
def _flooding(wires: list[Wire], data: bytes, *, again: bool) -> Iterator[None]:
    """Each connection says this all the while, or once if it has numbers."""
    programs = []
    try:
        for wire in wires:
            fd = wire.socket.fileno()
            words = [sys.executable, "-ISc", _FLOOD, str(fd), "again" if again else "once"]
            program = subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=[fd])
            programs.append(program)
            assert program.stdin
            program.stdin.write(data)
            program.stdin.close()
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def _lines(op: str, count: int, **said: Any) -> bytes:
    return b"".join(
        json.dumps({"op": op, "n": 1 + number, **said}).encode() + b"\n" for number in range(count)
    )


def _said_again(agent: str, said: list[dict[str, Any]], *before: dict[str, Any]) -> bytes:
    """A text of a MiB, and then messages of that text alone, one after the other."""
    part = "\u00e9" * 50_000
    parts = [{"op": "text", "at": at, "text": part} for at in range(0, 1_000_000, 100_000)]
    again = [{**each, "at": 1_000_000, "text": ""} for _ in range(10_000) for each in said]
    frames = enumerate((*before, *parts, *again), 1)
    lines = (json.dumps({"n": n, "agent": agent, **each}, ensure_ascii=False) for n, each in frames)
    return "\n".join(lines).encode() + b"\n"


_TURN = {
    **{"exec": "true", "life": "owned", "mode": "turn", "label": "x_t", "limits": {}},
    "policy": "allow x_t tool:* execute\n",
}
_PUT = {
    **{"op": "put", "name": "x", "session": "default", "run": 1, "supervisor": "operator"},
    **{"takes": False, "files": {}, "config": _TURN},
    "bound": {"policy": _TURN["policy"], "families": [], "depth": 1, "limits": {}},
}
_OPERATION = {"op": "message", "id": "m", "from": "operator", "provenance": "operator",
              "priority": "normal"}  # fmt: skip
_FACT = {**_OPERATION, "from": "agent:kid", "provenance": "child"}
_OF_LEADS = {
    "texts": (_said_again("d" * 16, [_OPERATION], _PUT), False),
    "operations": (_lines("forget", 100_000, agent="a" * 16), False),
    "refused": (_lines("usage", 100_000, agent="a" * 16), False),
    "repeated": (_lines("forget", 1, agent="a" * 16) * 1000, True),
    "over": (b'{"op":"over","upto":5}\n' * 1000, True),
    "wants": (b'{"op":"want","agent":"x","file":"out","offset":0,"credit":1}\n' * 100, True),
    "hellos": (b"", False),
}


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.parametrize("kind", _OF_LEADS)
def test_leads_that_never_stop_delay_nobody(kind: str) -> None:
    """Sixteen of them, whose uid pays for all (S3)."""
    data, again = _OF_LEADS[kind]
    with daemon_of() as host, ExitStack() as stack:
        wires = [stack.enter_context(false_lead(host, name=f"l{n}")) for n in range(16)]
        with guarded(host):
            if data:
                stack.enter_context(_flooding(wires, data, again=again))
            known, ended = wires[0].hello["as"], time.monotonic() + 2.0
            while time.monotonic() < ended:
                if kind == "hellos":
                    with false_lead(host, name="l0", **{"as": known, "got": 9}) as wire:
                        known = wire.hello["as"]
                else:
                    time.sleep(0.05)


_OF_HOSTS: dict[str, Callable[[str], tuple[bytes, bool]]] = {
    "facts": lambda agent: (_lines("usage", 100_000, agent=agent, usage={"cpu_usec": 1}), False),
    "events": lambda agent: (
        _lines("event", 100_000, agent=agent, type="agent.control", file="x"), False),
    "strangers": lambda agent: (_lines("dead", 100_000, agent="b" * 16), False),
    "grown": lambda agent: (
        json.dumps({"op": "grown", "agent": agent, "file": "out", "length": 1 << 62}).encode()
        + b"\n", True),
    "asks": lambda agent: (b'{"op":"ask","ask":1}\n', True),
    "texts": lambda agent: (_said_again(
        agent, [{**_FACT, "status": word} for word in ("queued", "dropped")]), False),
    "deltas": lambda agent: (
        json.dumps({"op": "delta", "agent": agent, "id": "m", "at": 0, "text": "x" * 8000}).encode()
        + b"\n", True),
}  # fmt: skip


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.parametrize("kind", _OF_HOSTS)
def test_a_host_that_never_stops_delays_nobody(kind: str) -> None:
    """Whoever has agents there pays for what is heard from there (S3)."""
    with (
        false_host() as far,
        lead_of({"n2": node(far.command, lease="30s")}) as lead,
        ExitStack() as stack,
    ):
        directory = lead.daemon.run("x", "true", placement="node=n2\n", mode="turn")
        wire = far.meet(version=2)
        agent = wire.op("put")["agent"]
        wire.op("start")
        data, again = _OF_HOSTS[kind](agent)
        with guarded(lead.daemon):
            stack.enter_context(_flooding([wire], data, again=again))
            time.sleep(2.0)
        write(directory / "ctl", "kill")
        wire.socket.close()
