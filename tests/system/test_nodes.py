"""Links to other machines: what ctx nodes and ctx peer show, and what becomes of a link."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.worlds.daemon import Daemon, daemon_of, end_process, wait_until
from tests.worlds.nodes import Lead, lead_of, node, peer, two


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Lead, Daemon]]:
    # daemons are back within the lease, also on a machine that is busy
    with two(lease="30s") as made:
        yield made


def test_a_node_is_reached(pair: tuple[Lead, Daemon]) -> None:
    lead, _ = pair
    status, said = lead.check("n2")
    assert status == 0 and "two runs ctxd" in said and "calls this machine one" in said, said
    row = lead.rows()["n2"]
    assert (row["state"], row["host.node"], row["alias"], row["error"]) == ("up", "two", "one", "")
    listed = lead.daemon.ctx("nodes").stdout
    assert listed.splitlines()[1].split()[:2] == ["n2", "up"], listed


def test_its_command_has_no_rights_towards_the_daemon(pair: tuple[Lead, Daemon]) -> None:
    lead, _ = pair
    lead.check("n2")
    (engine,) = lead.engines()
    status = Path(f"/proc/{engine}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["NoNewPrivs"] == "1" and int(fields["CapBnd"], 16) == 0
    assert os.readlink(f"/proc/{engine}/cwd") == "/"
    fds = sorted(map(int, os.listdir(f"/proc/{engine}/fd")))
    assert [os.readlink(f"/proc/{engine}/fd/{fd}")[:7] for fd in fds[:3]] == ["socket:"] * 3


@pytest.mark.parametrize(("how", "of"), [
    ("kill", "host"),
    ("reexec", "lead"),
    pytest.param("kill", "lead", marks=pytest.mark.long),
    pytest.param("reexec", "host", marks=pytest.mark.long),
])
def test_a_link_outlives_daemons(pair: tuple[Lead, Daemon], of: str, how: str) -> None:
    lead, host = pair
    daemon = lead.daemon if of == "lead" else host
    lead.use("n2")
    known, engines = (host.state / "peers.json").read_text(), lead.engines()
    if how == "kill":
        daemon.restart()
    else:
        assert daemon.ctx("reexec").returncode == 0
    lead.use("n2")
    assert (lead.engines() == engines) is (how == "reexec"), "the link is kept"
    assert json.loads(known)["leads"].keys() == _leads(host).keys(), "the same registration"


def _leads(host: Daemon) -> dict[str, object]:
    found = json.loads((host.state / "peers.json").read_text())["leads"]
    assert isinstance(found, dict)
    return found


def test_whoever_kills_a_command_breaks_no_link_for_long(pair: tuple[Lead, Daemon]) -> None:
    lead, _ = pair
    lead.check("n2")
    (engine,) = lead.engines()
    end_process(engine)
    wait_until(lambda: lead.engines() not in ([], [engine]), "another command")
    lead.wait("up")


def test_the_newer_connection_of_a_lead_ends_the_older(pair: tuple[Lead, Daemon]) -> None:
    lead, host = pair
    lead.use("n2")
    (known,) = _leads(host)
    hello = {"op": "hello", "version": 1, "as": known, "name": "one", "owner": "root",
             "ttl": 5.0, "grace": 5.0, "sent": 0, "got": 0, "seen": ""}  # fmt: skip
    (engine,) = lead.engines()
    with _connected(host) as peer_of:
        peer_of.sendall(b'{"op":"peer"}\n' + json.dumps(hello).encode() + b"\n")
        assert peer_of.recv(1000).startswith(b"ctxfs-peer 1 3\n")
        wait_until(lambda: engine not in lead.engines(), "the older connection is over")
    lead.wait("up")


def _connected(host: Daemon) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(10)
    made.connect(str(host.runtime / "ctxd.sock"))
    return made


@pytest.mark.parametrize(
    "said",
    [
        b"hello\n",
        b'{"op":"put","n":1,"agent":"a"}\n',
        b'{"op":"hello","version":9,"as":"","sent":0,"got":0,"seen":""}\n',
        b'{"op":"hello","version":1,"as":"","sent":0,"got":0,"seen":"","name":"x"}\n',
        b'{"op":"hello","version":1,"as":"","sent":0,"got":0,"seen":"","name":"../x","ttl":5}\n',
        b"\xff" * 300_000,
    ],
)
def test_a_stranger_is_not_served(pair: tuple[Lead, Daemon], said: bytes) -> None:
    _, host = pair
    with _connected(host) as stranger:
        stranger.sendall(b'{"op":"peer"}\n')
        assert stranger.recv(100) == b"ctxfs-peer 1 3\n"
        try:
            stranger.sendall(said)
            while stranger.recv(1 << 16):
                pass
        except ConnectionError:
            pass
    assert host.ctx("ping").returncode == 0


def test_an_agent_is_no_peer(pair: tuple[Lead, Daemon]) -> None:
    _, host = pair
    directory = host.finish("intruder", "sh -c 'ctx peer < /dev/null 2>&1; echo $?'")
    said = (directory / "out").read_text()
    assert said.splitlines()[-1] == "13" and "ctxfs-peer" not in said, said


def test_what_is_wrong_is_said() -> None:
    with ExitStack() as stack:
        closed = stack.enter_context(daemon_of(config="placed: {allow: false}\n"))
        away = stack.enter_context(daemon_of())
        nodes = {
            "closed": node(peer(closed)),
            "away": node(peer(away)),
            "shell": node(["/bin/sh", "-c", "echo not me; echo oh no >&2; exit 3"]),
            "missing": node(["/nothing"]),
            "others": node(["/bin/true"], users={"nobody": "nobody"}),
        }
        lead = stack.enter_context(lead_of(nodes))
        away.kill()
        status, said = lead.check()
        lines = dict(line.removeprefix("FAIL ").split(": ", 1) for line in said.splitlines())
        assert status == 1
        assert "this machine runs no agents of others: placed.allow is false" in lines["closed"]
        assert "Connection refused" in lines["away"] or "ctxd" in lines["away"], lines["away"]
        assert lines["shell"] == "not me: oh no"
        assert "/nothing: No such file or directory" in lines["missing"]
        assert "others" not in lines
        status, said = lead.check("others")
        assert status == 2 and "root has no login there" in said, said
        status, said = lead.check("none")
        assert status == 2 and "no such node for you; there is away, closed" in said, said


@pytest.mark.long
def test_a_connection_on_which_nothing_comes_is_closed() -> None:
    with two() as (lead, host):
        lead.use("n2")
        (engine,) = lead.engines()
        os.kill(engine, signal.SIGSTOP)
        wait_until(lambda: engine not in lead.engines(), "it is closed after a lease")
        lead.wait("up")
        assert host.ctx("ping").returncode == 0


def test_a_node_is_forgotten() -> None:
    with two() as (lead, host):
        lead.use("n2")
        known = _leads(host).keys()
        assert lead.daemon.ctx("nodes", "forget", "n2").returncode == 0
        lead.use("n2")
        assert len(_leads(host).keys() - known) == 1, "it is another lead now"
        done = lead.daemon.ctx("nodes", "forget", "n3")
        assert done.returncode == 1 and '"n3": there is no such node' in done.stderr, done
