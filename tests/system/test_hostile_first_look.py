"""What held everybody up once, or filled what everybody shares: each by a call or two.

Each attack needs nothing but what an agent could do from the beginning.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.worlds.daemon import Daemon, read, wait_dead, wait_status, write

pytestmark = pytest.mark.settings(grace="300ms")

#: seconds that an operator's request may wait on a machine that is busy
PATIENCE: Final = 1.0
#: of the daemon's processor for one thing that was asked for
COST: Final = 0.5
#: seconds in which whoever does next to nothing has started and ended
STARTED: Final = 8.0
REFERENCE: Final = '{"path":"artifact/a","summary":"s"}'


@pytest.fixture
def daemon(daemon: Daemon) -> Daemon:
    wait_status(daemon.run("bystander", "sleep 1000"), "busy")
    return daemon


def cost(daemon: Daemon, attack: Callable[[], object]) -> float:
    """Seconds of processor time that the daemon had for it: a busy machine changes little."""

    def used() -> float:
        fields = Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = used()
    attack()
    return used() - before


def held_up(daemon: Daemon, attack: Callable[[], object]) -> float:
    """Seconds that an operator's request took at most, while this was done."""
    bystander = daemon.agent_dir("bystander")
    failures: list[BaseException] = []

    def run() -> None:
        try:
            attack()
        except BaseException as error:
            failures.append(error)

    attacker = threading.Thread(target=run)
    attacker.start()
    slowest = 0.0
    while attacker.is_alive():
        begun = time.monotonic()
        write(bystander / "meta.json", "{}")
        assert read(bystander, "status") == "busy\n"
        slowest = max(slowest, time.monotonic() - begun)
        attacker.join(0.01)
    assert not failures
    return slowest


def run_to_end(agent: Path) -> None:
    write(agent / "ctl", "start")
    wait_dead(agent)


def rules(agent: Path, kind: str) -> None:
    """As many as are taken."""
    label = read(agent, "label").strip()
    for count in (400, 50):
        lines = (f"{kind} {label} agent:{n:x}* create,start,stop,read,write\n"
                 for n in range(count))
        with contextlib.suppress(OSError):
            (agent / "policy").write_text("".join(lines))
            return


def test_policies_of_a_family_are_cheap_to_compare(daemon: Daemon) -> None:
    """Again whenever somebody has made an agent."""
    boss = daemon.make("boss", "sleep 1000")
    rules(boss, "delegate")
    write(boss / "ctl", "start")
    wait_status(boss, "busy")
    kid = daemon.make("kid", parent="agent:boss")

    def attack() -> None:
        rules(kid, "allow")
        daemon.agent_dir("another").mkdir()
        assert (kid / "policy.effective").read_text().count("agent:") >= 50

    assert cost(daemon, attack) < COST


def test_what_children_gave_back_is_not_rendered_to_tell_its_size(daemon: Daemon) -> None:
    boss = daemon.run("boss", "sleep 1000")
    wait_status(boss, "busy")
    script = f"yes '{REFERENCE}' | head -n 30000 > /tmp/r; cat /tmp/r > $CTX_SELF/refs.jsonl"
    kid = daemon.make("kid", f"sh -c {shlex.quote(script)}", parent="agent:boss")
    write(kid / "ctl", "start")
    wait_dead(kid)
    assert (kid / "refs.jsonl").stat().st_size > 1 << 20, read(kid, "log")
    pack = boss / "session" / "context" / "pack.md"

    def attack() -> None:
        for _ in range(40):
            os.stat(pack)

    assert cost(daemon, attack) < COST


@pytest.mark.alone
def test_a_child_with_all_the_hidden_paths_there_may_be_starts(daemon: Daemon) -> None:
    boss = daemon.run("boss", "sleep 1000")
    wait_status(boss, "busy")
    kid = daemon.make("kid", "true", parent="agent:boss")
    for count in (4500, 2048):
        with contextlib.suppress(OSError):
            write(kid / "mount", "".join(f"- /{n:x} hide\n" for n in range(count)))
            break
    begun = time.monotonic()
    assert held_up(daemon, lambda: run_to_end(kid)) < PATIENCE
    assert time.monotonic() - begun < STARTED


@pytest.mark.long
@pytest.mark.alone
def test_large_frames_on_many_connections_hold_nobody_up(daemon: Daemon) -> None:
    frame = b'{"op":"ping","x":[' + b"[[]]," * 200_000 + b"0]}\n"

    def attack() -> None:
        with contextlib.ExitStack() as peers:
            made = [peers.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(8)]
            for peer in made:
                peer.connect(str(daemon.root / "ctxd.sock"))
                threading.Thread(target=peer.sendall, args=(frame,)).start()
            for peer in made:
                assert peer.recv(1000)

    assert held_up(daemon, attack) < PATIENCE


@pytest.mark.long
@pytest.mark.alone
def test_thousands_of_messages_in_one_write_hold_nobody_up(daemon: Daemon) -> None:
    script = (
        """yes '{"role":"user","content":""}' | head -n 4500 > /tmp/m; """
        "dd if=/tmp/m bs=1M oflag=append conv=notrunc of=$CTX_SELF/session/messages.jsonl"
    )
    writer = daemon.make("writer", f"sh -c {shlex.quote(script)}")
    assert held_up(daemon, lambda: run_to_end(writer)) < PATIENCE
    assert (writer / "session" / "messages.jsonl").read_text().count("\n") >= 500


@pytest.mark.alone
def test_a_long_document_holds_nobody_up(daemon: Daemon) -> None:
    agent = daemon.make("reader")
    data = b'{"path":"/a"}\n' * 150_000
    assert held_up(daemon, lambda: (agent / "input.jsonl").write_bytes(data)) < PATIENCE
