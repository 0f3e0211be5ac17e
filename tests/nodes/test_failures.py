"""The failure table of ctxfs-nodes(7), by wires and by ssh over cables: what is seen at the lead,
and when the last process is gone at the host. After each scene all nodes say what is so."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.peers.lease import bound
from tests.worlds.cabled import three_by_ssh
from tests.worlds.daemon import Daemon, end_process, read, wait_dead, wait_status, wait_until, write
from tests.worlds.fates import lose_machine
from tests.worlds.nodes import CTX
from tests.worlds.pairs import GRACE, LATE, STUBBORN, Pair, Took, end_of, pair_of
from tests.worlds.stages import PROGRAMS
from tests.worlds.three import three_of

#: by which way, and the lease: of a connection, and of one that daemons are back in, also on a
#: machine that is busy
_BRIEF = [("wire", 5.0), ("ssh", 8.0)]
_LONG = [("wire", 20.0), ("ssh", 20.0)]


@contextmanager
def _pair(way: str, lease: float, took: Took) -> Iterator[Pair]:
    three = three_of(n2=f"{lease:g}s") if way == "wire" else three_by_ssh(lease)
    with pair_of(three, lease, took) as made:
        yield made


@pytest.fixture(params=_BRIEF, ids=lambda param: param[0])
def pair(request: pytest.FixtureRequest, took: Took) -> Iterator[Pair]:
    way, lease = request.param
    with _pair(way, lease, took) as made:
        yield made


@pytest.fixture
def wired(took: Took) -> Iterator[Pair]:
    way, lease = _BRIEF[0]
    with _pair(way, lease, took) as made:
        yield made


@pytest.fixture(params=_LONG, ids=lambda param: param[0])
def patient(request: pytest.FixtureRequest, took: Took) -> Iterator[Pair]:
    way, lease = request.param
    with _pair(way, lease, took) as made:
        yield made


def test_a_cut_is_an_end_in_time(pair: Pair) -> None:
    idle, stubborn = pair.busy(), pair.busy(STUBBORN)
    paused = pair.busy(STUBBORN)
    write(paused / "ctl", "pause")
    wait_status(paused, "paused")
    began = time.monotonic()
    pair.cut()
    pair.gone_in_time(began, idle, stubborn, paused)
    pair.lost_in_time(began, idle, stubborn, paused)
    pair.heal()
    pair.works()


@pytest.mark.parametrize("how", ["hold up", "hold down"])
def test_one_direction_that_is_lost_is_an_end_in_time(wired: Pair, how: str) -> None:
    idle, stopped = wired.busy(), wired.busy(STUBBORN)
    began = time.monotonic()
    wired.cut(how)
    write(stopped / "ctl", "stop")
    wired.gone_in_time(began, idle, stopped)
    wired.heal()
    for each in (idle, stopped):
        wait_dead(each, timeout=wired.patience)
    assert end_of(idle) in (("interrupted", "runtime_lost"), ("interrupted", "lease_over"))
    outcomes = ("cancelled",) if how == "hold down" else ("cancelled", "interrupted")
    assert end_of(stopped)[0] in outcomes, "as the host says, if it is heard again"
    wired.works()


def test_a_cut_that_heals_in_time_is_not_noticed(patient: Pair) -> None:
    directory = patient.busy("sleep 1000; echo went")
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
    assert end_of(directory)[0] == "done" and read(directory, "out") == "went\n"
    types = [event["type"] for event in patient.daemon.events(directory.name.removesuffix(".d"))]
    assert types.count("run.start") == types.count("run.end") == 1, types
    patient.works()


def test_a_stop_over_a_cut_wire(pair: Pair) -> None:
    directory = pair.busy()
    began = time.monotonic()
    pair.cut()
    write(directory / "ctl", "stop")
    wait_status(directory, "stopping")
    pair.gone_in_time(began, directory)
    wait_dead(directory, timeout=pair.patience)
    outcome, reason = end_of(directory)
    assert outcome == "cancelled" and reason.endswith(",unconfirmed"), reason
    pair.heal()
    pair.works()


def test_a_lead_that_is_gone_for_a_lease(pair: Pair) -> None:
    directory = pair.busy()
    began = time.monotonic()
    pair.daemon.kill()
    pair.gone_in_time(began, directory)
    pair.daemon.start()
    wait_dead(directory, timeout=pair.patience)
    assert end_of(directory) == ("interrupted", "lease_over")
    pair.works()


def _family(pair: Pair) -> list[Path]:
    """An agent at the node, and children of every mode that it has there, one of them paused."""
    kids = {
        "once": "sleep 1000",
        "turn": PROGRAMS["turn"],
        "resident": PROGRAMS["resident"],
        "stubborn": f"sh -c {shlex.quote(STUBBORN)}",
        "paused": "sleep 1000",
    }
    lines = ["cd $CTX_ROOT/agent"]
    for name, program in kids.items():
        lines += [f"mkdir {name}.d", f"printf %s\\\\n {shlex.quote(program)} > {name}.d/exec"]
        if name in ("turn", "resident"):
            lines.append(f"echo {name} > {name}.d/mode")
        lines.append(f"echo start > {name}.d/ctl")
    boss = pair.daemon.make("family")
    write(boss / "placement", "node=n2")
    write(boss / "policy", "".join(f"allow family_t {line}\n" for line in (
        "agent:* create", "tool:* execute")))  # fmt: skip
    write(boss / "exec", f"sh -c {shlex.quote('; '.join((*lines, 'sleep 1000')))}")
    write(boss / "ctl", "start")
    wait_status(boss, "busy")
    found = [pair.hosts["n2"].agent_dir(name) for name in kids]
    for each in found:
        wait_until(each.exists, "it is made")
        wait_status(each, "busy", "ready", "idle")
    write(found[-1] / "ctl", "pause")
    wait_status(found[-1], "paused")
    return [boss, *found]


def test_cells_of_every_mode_end_without_a_daemon(pair: Pair) -> None:
    boss, *kids = _family(pair)
    host = pair.hosts["n2"]
    cells = host.cgroup.child("user-0", "agent-family@one")
    inside = cells.processes()
    began = time.monotonic()
    host.kill()
    pair.cut()
    pair.gone_in_time(began, boss)
    assert not cells.populated()
    assert inside
    pair.heal()
    host.start()
    wait_dead(boss, timeout=pair.patience)
    assert end_of(boss) == ("interrupted", "lease_over")
    assert not [each for each in kids if each.exists() and read(each, "status") != "dead\n"]
    pair.works()


def test_a_host_whose_daemon_is_gone_for_a_lease(pair: Pair) -> None:
    idle, stubborn = pair.busy(), pair.busy(STUBBORN)
    host = pair.hosts["n2"]
    began = time.monotonic()
    host.kill()
    pair.gone_in_time(began, idle, stubborn)
    host.start()
    for each in (idle, stubborn):
        wait_dead(each, timeout=pair.patience)
        assert end_of(each) == ("interrupted", "lease_over")
    pair.works()


def test_a_node_that_is_switched_off(pair: Pair) -> None:
    directory = pair.busy()
    host = pair.hosts["n2"]
    pair.cut()
    began = time.monotonic()
    host.kill()
    lose_machine(host)
    pair.lost_in_time(began, directory)
    host.start()
    pair.heal()
    pair.works()


def test_a_host_that_boots_again_in_time(patient: Pair) -> None:
    directory, host = patient.busy(), patient.hosts["n2"]
    began = time.monotonic()
    host.kill()
    lose_machine(host)
    host.start()
    wait_dead(directory)
    patient.took("known to have ended", time.monotonic() - began, patient.lost)
    assert end_of(directory) == ("interrupted", "reboot")
    patient.works()


def test_a_host_that_is_shut_down(patient: Pair) -> None:
    directory, host = patient.busy(STUBBORN), patient.hosts["n2"]
    began = time.monotonic()
    os.kill(host.pid, signal.SIGTERM)
    assert host.has_ended(patient.patience)
    assert not patient.runs(directory)
    patient.took("last process gone", time.monotonic() - began, GRACE)
    assert read(directory, "status") in ("busy\n", "stopping\n", "dead\n")
    host.kill()
    host.start()
    wait_dead(directory)
    assert end_of(directory) == ("cancelled", "shutdown")
    patient.works()


@pytest.mark.parametrize("of", ["lead", "host", "both"])
def test_daemons_that_come_back_in_time(patient: Pair, of: str) -> None:
    directory = patient.busy("sleep 1000; echo went")
    daemons = {"lead": [patient.daemon], "host": [patient.hosts["n2"]]}
    for daemon in {**daemons, "both": daemons["lead"] + daemons["host"]}[of]:
        daemon.restart()
    patient.lead.wait("up")
    patient.go(directory)
    wait_dead(directory)
    assert (end_of(directory)[0], read(directory, "out")) == ("done", "went\n")
    patient.works()


def _boss(pair: Pair) -> tuple[Path, Path]:
    """An agent here whose child is at the node."""
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
    return boss, kid


def test_a_parent_dies_behind_a_cut(pair: Pair) -> None:
    """It is dead when its child is, or is known to be lost."""
    boss, kid = _boss(pair)
    began = time.monotonic()
    pair.cut()
    end_process(int(read(boss, "pid")))
    wait_status(boss, "stopping")
    pair.gone_in_time(began, kid)
    assert read(boss, "status") == "stopping\n"
    wait_dead(boss, timeout=pair.patience)
    assert read(kid, "status") == "dead\n"
    pair.heal()
    pair.works()


def test_ends_over_a_link_that_is_up(pair: Pair) -> None:
    for verb in ("stop", "kill"):
        directory = pair.busy()
        began = time.monotonic()
        write(directory / "ctl", verb)
        pair.gone(directory)
        pair.took(f"last process gone after {verb}", time.monotonic() - began, GRACE)
        wait_dead(directory)
        assert end_of(directory) == ("cancelled", "operator_stop")
    boss, kid = _boss(pair)
    began = time.monotonic()
    end_process(int(read(boss, "pid")))
    pair.gone(kid)
    pair.took("last process gone after its parent", time.monotonic() - began, GRACE)
    wait_dead(boss)
    assert end_of(kid) == ("cancelled", "parent_dead")
    pair.works()


def test_a_monitor_that_is_killed(pair: Pair) -> None:
    directory = pair.busy()
    for monitor in pair.hosts["n2"].monitors():
        end_process(monitor)
    pair.gone(directory)
    wait_dead(directory, timeout=pair.patience)
    assert end_of(directory) == ("interrupted", "runtime_lost")
    pair.works()


def _copied(daemon: Daemon) -> Path:
    """Its state, as a backup of the disk has it."""
    daemon.kill()
    kept = daemon.base / "kept"
    subprocess.run(["cp", "-a", daemon.state, kept], check=True)
    daemon.start()
    return kept


def _put_back(daemon: Daemon, kept: Path) -> None:
    daemon.kill()
    shutil.rmtree(daemon.state)
    os.rename(kept, daemon.state)
    daemon.start()


@pytest.mark.parametrize("of", ["lead", "host"])
def test_a_disk_that_is_put_back(patient: Pair, of: str) -> None:
    patient.lead.use("n2")
    daemon = patient.daemon if of == "lead" else patient.hosts["n2"]
    before, ended = patient.busy(), patient.busy()
    kept = _copied(daemon)
    patient.lead.wait_reached()
    after = patient.busy()
    write(ended / "ctl", "stop")
    wait_dead(ended)
    assert end_of(ended) == ("cancelled", "operator_stop")
    began = time.monotonic()
    _put_back(daemon, kept)
    for each in (before, ended, after):
        patient.gone(each)
    assert time.monotonic() - began < bound(patient.lease, GRACE) + LATE
    # what had ended lives again at the lead, where nobody is let go by that end
    for each in (before, after) if of == "host" else (ended, before):
        wait_dead(each, timeout=patient.patience)
        assert end_of(each) == ("interrupted", "runtime_lost")
    patient.works()


def _lose_state(daemon: Daemon) -> None:
    """What is left of it is another machine of the same address."""
    kept = daemon.state / "ssh"
    daemon.kill()
    for each in daemon.state.iterdir():
        if each != kept:
            shutil.rmtree(each) if each.is_dir() else each.unlink()
    daemon.start()


def test_a_host_whose_disk_is_lost(pair: Pair) -> None:
    idle, stubborn = pair.busy(), pair.busy(STUBBORN)
    began = time.monotonic()
    _lose_state(pair.hosts["n2"])
    pair.gone_in_time(began, idle, stubborn)
    pair.lost_in_time(began, idle, stubborn)
    pair.works()


def test_a_lead_whose_disk_is_lost(pair: Pair) -> None:
    idle, stubborn = pair.busy(), pair.busy(STUBBORN)
    began = time.monotonic()
    _lose_state(pair.daemon)
    pair.gone_in_time(began, idle, stubborn)
    assert not idle.exists()
    pair.works()


@pytest.mark.parametrize("cut", [False, True])
def test_a_lead_that_is_shut_down(patient: Pair, cut: bool) -> None:
    directory = patient.busy()
    if cut:
        patient.cut()
    daemon = patient.daemon
    assert daemon.process is not None
    os.kill(daemon.pid, signal.SIGTERM)
    assert daemon.has_ended(patient.patience)
    patient.gone(directory)
    patient.heal()
    daemon.kill()
    daemon.start()
    wait_dead(directory)
    outcome, reason = end_of(directory)
    assert outcome == "cancelled" and reason == ("shutdown,unconfirmed" if cut else "shutdown")
    patient.works()


@pytest.mark.parametrize("of", ["lead", "host"])
def test_a_daemon_is_executed_again_while_much_is_said(patient: Pair, of: str) -> None:
    size = 20 << 20
    directory = patient.place(f"yes 0123456 | head -c {size}; echo end", limits="log_max=64M")
    wait_status(directory, "busy", "dead")
    daemon = patient.daemon if of == "lead" else patient.hosts["n2"]
    assert daemon.ctx("reexec").returncode == 0
    wait_dead(directory)
    assert end_of(directory)[0] == "done"
    said = (directory / "out").read_bytes()
    assert said == b"0123456\n" * (size // 8) + b"end\n"


def test_a_placed_agent_ends_with_a_client_that_does_not_come_back(patient: Pair) -> None:
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
