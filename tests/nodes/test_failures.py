"""The failure table of ctxfs-nodes(7), by wires and deaths: what is seen at the lead, and when the
last process is gone at the host."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.peers.lease import bound
from tests.worlds.daemon import Daemon, end_process, read, wait_dead, wait_status, wait_until, write
from tests.worlds.fates import lose_machine
from tests.worlds.nodes import CTX, LEASE
from tests.worlds.three import Three, three_of

_LEASE, _GRACE = 5.0, 0.3
_PATIENT = 20.0
#: what the lead reckons with (runtime.peers.leading.GRACE)
_MOST_GRACE = 10.0
#: beyond lease and grace, on a machine that is busy
_LATE = 2.0
#: beyond what the lead says
_LONG = bound(_PATIENT, _MOST_GRACE) + 30
_STUBBORN = "trap : TERM; while :; do sleep 1; done"


@pytest.fixture
def pair() -> Iterator[Three]:
    with three_of(n2=LEASE) as made:
        yield made


@pytest.fixture
def patient() -> Iterator[Three]:
    """Where daemons are back before the lease is over, also on a machine that is busy."""
    with three_of(n2=f"{_PATIENT:g}s") as made:
        yield made


def _end(directory: Path) -> tuple[str, str]:
    return read(directory, "outcome").strip(), read(directory, "reason").strip()


def _busy(pair: Three, program: str = "sleep 1000") -> Path:
    directory = pair.place(program)
    wait_status(directory, "busy")
    return directory


def _gone_in_time(pair: Three, began: float, *directories: Path) -> None:
    """No process is left when the lease and the grace are over."""
    for each in directories:
        pair.gone(each)
    assert time.monotonic() - began < _LEASE + _GRACE + _LATE


def _works(pair: Three) -> None:
    """The node is in use, and runs nothing that its lead does not know of."""
    pair.lead.wait_reached()
    again = pair.place("echo again")
    wait_dead(again)
    assert read(again, "out") == "again\n"
    alive = [each.name for each in pair.hosts["n2"].cgroup.path.glob("user-*/agent-*")
             if "populated 1" in (each / "cgroup.events").read_text()]  # fmt: skip
    assert not alive, alive


@pytest.mark.parametrize("how", ["stop", "hold up", "hold down"])
def test_a_cut_is_an_end_in_time(pair: Three, how: str) -> None:
    idle, stubborn = _busy(pair), _busy(pair, _STUBBORN)
    paused = _busy(pair, _STUBBORN)
    write(paused / "ctl", "pause")
    wait_status(paused, "paused")
    began = time.monotonic()
    made = pair.wires["n2"]
    made.stop() if how == "stop" else made.say(how)
    _gone_in_time(pair, began, idle, stubborn, paused)
    if how == "stop":
        for each in (idle, stubborn, paused):
            wait_dead(each, timeout=_LONG)
            assert _end(each) == ("interrupted", "runtime_lost")
        assert time.monotonic() - began > bound(_LEASE, _GRACE), "not before it could be sure"
    made.go_on()
    made.say("go")
    for each in (idle, stubborn, paused):
        wait_dead(each, timeout=_LONG)
    assert _end(idle) in (("interrupted", "runtime_lost"), ("interrupted", "lease_over"))
    _works(pair)


def test_a_cut_that_heals_in_time_is_not_noticed(patient: Three) -> None:
    directory = _busy(patient, "sleep 1000; echo went")
    for _ in range(5):
        patient.wires["n2"].say("close")
        patient.lead.wait("up")
    for engine in patient.lead.engines():
        end_process(engine)
    patient.lead.wait("up")
    for end in patient.wires["n2"].ends():
        end_process(end)
    patient.lead.wait("up")
    patient.go(directory)
    wait_dead(directory)
    assert _end(directory)[0] == "done" and read(directory, "out") == "went\n"
    types = [event["type"] for event in patient.daemon.events(directory.name.removesuffix(".d"))]
    assert types.count("run.start") == types.count("run.end") == 1, types
    _works(patient)


def test_a_stop_over_a_cut_wire(pair: Three) -> None:
    directory = _busy(pair)
    began = time.monotonic()
    pair.wires["n2"].stop()
    write(directory / "ctl", "stop")
    wait_status(directory, "stopping")
    _gone_in_time(pair, began, directory)
    wait_dead(directory, timeout=_LONG)
    outcome, reason = _end(directory)
    assert outcome == "cancelled" and reason.endswith(",unconfirmed"), reason
    pair.wires["n2"].go_on()
    _works(pair)


def test_a_lead_that_is_gone_for_a_lease(pair: Three) -> None:
    directory = _busy(pair)
    began = time.monotonic()
    pair.daemon.kill()
    _gone_in_time(pair, began, directory)
    pair.daemon.start()
    wait_dead(directory, timeout=_LONG)
    assert _end(directory) == ("interrupted", "lease_over")
    _works(pair)


def test_a_host_whose_daemon_is_gone_for_a_lease(pair: Three) -> None:
    idle, stubborn = _busy(pair), _busy(pair, _STUBBORN)
    host = pair.hosts["n2"]
    began = time.monotonic()
    host.kill()
    _gone_in_time(pair, began, idle, stubborn)
    host.start()
    for each in (idle, stubborn):
        wait_dead(each, timeout=_LONG)
        assert _end(each) == ("interrupted", "lease_over")
    _works(pair)


def test_a_node_that_is_switched_off(pair: Three) -> None:
    directory = _busy(pair)
    host = pair.hosts["n2"]
    pair.wires["n2"].stop()
    host.kill()
    lose_machine(host)
    began = time.monotonic()
    wait_dead(directory, timeout=_LONG)
    assert _end(directory) == ("interrupted", "runtime_lost")
    assert time.monotonic() - began < bound(_LEASE, _MOST_GRACE) + _LATE
    host.start()
    pair.wires["n2"].go_on()
    _works(pair)


@pytest.mark.parametrize("of", ["lead", "host", "both"])
def test_daemons_that_come_back_in_time(patient: Three, of: str) -> None:
    directory = _busy(patient, "sleep 1000; echo went")
    daemons = {"lead": [patient.daemon], "host": [patient.hosts["n2"]]}
    for daemon in {**daemons, "both": daemons["lead"] + daemons["host"]}[of]:
        daemon.restart()
    patient.lead.wait("up")
    patient.go(directory)
    wait_dead(directory)
    assert (_end(directory)[0], read(directory, "out")) == ("done", "went\n")
    _works(patient)


def test_a_parent_dies_behind_a_cut(pair: Three) -> None:
    """It is dead when its child is, or is known to be lost."""
    boss = pair.daemon.make("boss")
    lines = ("agent:* create", "tool:* execute", "node:n2 place")
    write(boss / "policy", "".join(f"allow boss_t {line}\n" for line in lines))
    script = (
        'cd "$CTX_ROOT/agent" && mkdir kid.d && echo "node=n2" > kid.d/placement &&'
        ' echo "sleep 1000" > kid.d/exec && echo start > kid.d/ctl && sleep 1000'
    )
    write(boss / "exec", f"sh -c '{script}'")
    write(boss / "ctl", "start")
    kid = pair.daemon.agent_dir("kid")
    wait_until(kid.exists, "it is made")
    wait_status(kid, "busy")
    began = time.monotonic()
    pair.wires["n2"].stop()
    end_process(int(read(boss, "pid")))
    wait_status(boss, "stopping")
    _gone_in_time(pair, began, kid)
    assert read(boss, "status") == "stopping\n"
    wait_dead(boss, timeout=_LONG)
    assert read(kid, "status") == "dead\n"
    pair.wires["n2"].go_on()
    _works(pair)


def test_a_monitor_that_is_killed(pair: Three) -> None:
    directory = _busy(pair)
    for monitor in pair.hosts["n2"].monitors():
        end_process(monitor)
    pair.gone(directory)
    wait_dead(directory, timeout=_LONG)
    assert _end(directory) == ("interrupted", "runtime_lost")
    _works(pair)


def _copied(daemon: Daemon) -> Path:
    """Its state, as a backup of the disk has it."""
    daemon.kill()
    kept = daemon.base / "kept"
    shutil.copytree(daemon.state, kept, symlinks=True)
    daemon.start()
    return kept


def _put_back(daemon: Daemon, kept: Path) -> None:
    daemon.kill()
    shutil.rmtree(daemon.state)
    os.rename(kept, daemon.state)
    daemon.start()


@pytest.mark.parametrize("of", ["lead", "host"])
def test_a_disk_that_is_put_back(patient: Three, of: str) -> None:
    patient.lead.use("n2")
    daemon = patient.daemon if of == "lead" else patient.hosts["n2"]
    before = _busy(patient)
    kept = _copied(daemon)
    patient.lead.wait_reached()
    after = _busy(patient)
    began = time.monotonic()
    _put_back(daemon, kept)
    for each in (before, after):
        patient.gone(each)
    assert time.monotonic() - began < bound(_PATIENT, _GRACE) + _LATE
    for each in (before, after) if of == "host" else (before,):
        wait_dead(each, timeout=_LONG)
        assert _end(each) == ("interrupted", "runtime_lost")
    _works(patient)


@pytest.mark.parametrize("cut", [False, True])
def test_a_lead_that_is_shut_down(patient: Three, cut: bool) -> None:
    directory = _busy(patient)
    if cut:
        patient.wires["n2"].stop()
    daemon = patient.daemon
    assert daemon.process is not None
    os.kill(daemon.pid, signal.SIGTERM)
    assert daemon.has_ended(_LONG)
    patient.gone(directory)
    patient.wires["n2"].go_on()
    daemon.kill()
    daemon.start()
    wait_dead(directory)
    outcome, reason = _end(directory)
    assert outcome == "cancelled" and reason == ("shutdown,unconfirmed" if cut else "shutdown")
    _works(patient)


@pytest.mark.parametrize("of", ["lead", "host"])
def test_a_daemon_is_executed_again_while_much_is_said(patient: Three, of: str) -> None:
    size = 20 << 20
    directory = patient.place(f"yes 0123456 | head -c {size}; echo end", limits="log_max=64M")
    wait_status(directory, "busy", "dead")
    daemon = patient.daemon if of == "lead" else patient.hosts["n2"]
    assert daemon.ctx("reexec").returncode == 0
    wait_dead(directory)
    assert _end(directory)[0] == "done"
    said = (directory / "out").read_bytes()
    assert said == b"0123456\n" * (size // 8) + b"end\n"


def test_a_placed_agent_ends_with_a_client_that_does_not_come_back(patient: Three) -> None:
    name = f"x{next(patient.numbers)}"
    words = ["run", name, "--node", "n2", "--message", "go", "--", "sleep", "1000"]
    with subprocess.Popen([CTX, "--root", patient.daemon.root, *words]) as client:
        directory = patient.daemon.agent_dir(name)
        wait_until(directory.exists, "it is made")
        wait_status(directory, "busy")
        patient.daemon.kill()
        client.kill()
    patient.daemon.start()
    wait_until(lambda: not directory.exists(), "nobody wants it", timeout=120)
