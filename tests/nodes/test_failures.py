"""The failure table of ctxfs-nodes(7), by wires and by ssh over cables: what is seen at the lead,
and when the last process is gone at the host. After each scene all nodes say what is so."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from runtime.peers.lease import bound
from tests.worlds.cabled import three_by_ssh
from tests.worlds.daemon import Daemon, end_process, read, wait_dead, wait_status, wait_until, write
from tests.worlds.everywhere import Everywhere
from tests.worlds.fates import lose_machine
from tests.worlds.invariants import Operator
from tests.worlds.nodes import CTX
from tests.worlds.stages import PROGRAMS
from tests.worlds.three import Three, three_of

_GRACE = 0.3
#: what the lead reckons with (runtime.peers.leading.GRACE)
_MOST_GRACE = 10.0
#: beyond lease and grace, on a machine that is busy; and beyond what is promised to nobody
_LATE, _LATER = 2.0, 20.0
_STUBBORN = "trap : TERM; while :; do sleep 1; done"
#: by which way, and the lease: of a connection, and of one that daemons are back in, also on a
#: machine that is busy
_BRIEF = [("wire", 5.0), ("ssh", 8.0)]
_LONG = [("wire", 20.0), ("ssh", 20.0)]
_Took = Callable[[str, float, float], None]


@dataclass(kw_only=True)
class Pair(Three):
    """A lead and a host."""

    lease: float
    everywhere: Everywhere
    took: _Took

    @property
    def lost(self) -> float:
        """Seconds until the lead says that all is lost."""
        return bound(self.lease, _MOST_GRACE)

    @property
    def patience(self) -> float:
        return self.lost + 30


@contextmanager
def _pair(way: str, lease: float, took: _Took) -> Iterator[Pair]:
    three = three_of(n2=f"{lease:g}s") if way == "wire" else three_by_ssh(lease)
    with three as made, closing(Everywhere(made, lease)) as everywhere:
        yield Pair(made.lead, made.hosts, made.wires, lease=lease, everywhere=everywhere, took=took)


@pytest.fixture(params=_BRIEF, ids=lambda param: param[0])
def pair(request: pytest.FixtureRequest, took: _Took) -> Iterator[Pair]:
    way, lease = request.param
    with _pair(way, lease, took) as made:
        yield made


@pytest.fixture
def wired(took: _Took) -> Iterator[Pair]:
    way, lease = _BRIEF[0]
    with _pair(way, lease, took) as made:
        yield made


@pytest.fixture(params=_LONG, ids=lambda param: param[0])
def patient(request: pytest.FixtureRequest, took: _Took) -> Iterator[Pair]:
    way, lease = request.param
    with _pair(way, lease, took) as made:
        yield made


def _end(directory: Path) -> tuple[str, str]:
    assert read(directory, "status") == "dead\n"
    return read(directory, "outcome").strip(), read(directory, "reason").strip()


def _busy(pair: Pair, program: str = "sleep 1000") -> Path:
    directory = pair.place(program)
    wait_status(directory, "busy")
    return directory


def _gone_in_time(pair: Pair, began: float, *directories: Path) -> None:
    """No process is left when the lease and the grace are over."""
    for each in directories:
        pair.gone(each)
    seconds, most = time.monotonic() - began, pair.lease + _GRACE
    pair.took("last process gone", seconds, most)
    assert seconds < most + _LATE


def _lost_in_time(pair: Pair, began: float, *directories: Path) -> None:
    """The lead says so, and not before it can be sure."""
    for each in directories:
        wait_dead(each, timeout=pair.patience)
        assert _end(each) == ("interrupted", "runtime_lost")
    seconds = time.monotonic() - began
    pair.took("known to be lost", seconds, pair.lost)
    assert bound(pair.lease, _GRACE) < seconds < pair.lost + _LATER


def _works(pair: Pair) -> None:
    """The node is in use, and each says what is so, of itself and of the other."""
    pair.lead.wait_reached()
    again = pair.place("echo again")
    wait_dead(again)
    assert read(again, "out") == "again\n"
    alive = [each.name for each in pair.hosts["n2"].cgroup.path.glob("user-*/agent-*")
             if "populated 1" in (each / "cgroup.events").read_text()]  # fmt: skip
    assert not alive, alive
    pair.everywhere.agree()
    pair.everywhere.look_back(Operator(pair.daemon))


def _stop(pair: Pair, how: str = "stop") -> None:
    made = pair.wires["n2"]
    made.stop() if how == "stop" else made.say(how)


def _go_on(pair: Pair) -> None:
    pair.wires["n2"].go_on()
    pair.wires["n2"].say("go")


def test_a_cut_is_an_end_in_time(pair: Pair) -> None:
    idle, stubborn = _busy(pair), _busy(pair, _STUBBORN)
    paused = _busy(pair, _STUBBORN)
    write(paused / "ctl", "pause")
    wait_status(paused, "paused")
    began = time.monotonic()
    _stop(pair)
    _gone_in_time(pair, began, idle, stubborn, paused)
    _lost_in_time(pair, began, idle, stubborn, paused)
    _go_on(pair)
    _works(pair)


@pytest.mark.parametrize("how", ["hold up", "hold down"])
def test_one_direction_that_is_lost_is_an_end_in_time(wired: Pair, how: str) -> None:
    idle, stopped = _busy(wired), _busy(wired, _STUBBORN)
    began = time.monotonic()
    _stop(wired, how)
    write(stopped / "ctl", "stop")
    _gone_in_time(wired, began, idle, stopped)
    _go_on(wired)
    for each in (idle, stopped):
        wait_dead(each, timeout=wired.patience)
    assert _end(idle) in (("interrupted", "runtime_lost"), ("interrupted", "lease_over"))
    outcomes = ("cancelled",) if how == "hold down" else ("cancelled", "interrupted")
    assert _end(stopped)[0] in outcomes, "as the host says, if it is heard again"
    _works(wired)


def test_a_cut_that_heals_in_time_is_not_noticed(patient: Pair) -> None:
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


def test_a_stop_over_a_cut_wire(pair: Pair) -> None:
    directory = _busy(pair)
    began = time.monotonic()
    _stop(pair)
    write(directory / "ctl", "stop")
    wait_status(directory, "stopping")
    _gone_in_time(pair, began, directory)
    wait_dead(directory, timeout=pair.patience)
    outcome, reason = _end(directory)
    assert outcome == "cancelled" and reason.endswith(",unconfirmed"), reason
    _go_on(pair)
    _works(pair)


def test_a_lead_that_is_gone_for_a_lease(pair: Pair) -> None:
    directory = _busy(pair)
    began = time.monotonic()
    pair.daemon.kill()
    _gone_in_time(pair, began, directory)
    pair.daemon.start()
    wait_dead(directory, timeout=pair.patience)
    assert _end(directory) == ("interrupted", "lease_over")
    _works(pair)


def _family(pair: Pair) -> list[Path]:
    """An agent at the node, and children of every mode that it has there, one of them paused."""
    kids = {
        "once": "sleep 1000",
        "turn": PROGRAMS["turn"],
        "resident": PROGRAMS["resident"],
        "stubborn": f"sh -c {shlex.quote(_STUBBORN)}",
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
    _stop(pair)
    _gone_in_time(pair, began, boss)
    assert not cells.populated()
    assert inside
    _go_on(pair)
    host.start()
    wait_dead(boss, timeout=pair.patience)
    assert _end(boss) == ("interrupted", "lease_over")
    assert not [each for each in kids if each.exists() and read(each, "status") != "dead\n"]
    _works(pair)


def test_a_host_whose_daemon_is_gone_for_a_lease(pair: Pair) -> None:
    idle, stubborn = _busy(pair), _busy(pair, _STUBBORN)
    host = pair.hosts["n2"]
    began = time.monotonic()
    host.kill()
    _gone_in_time(pair, began, idle, stubborn)
    host.start()
    for each in (idle, stubborn):
        wait_dead(each, timeout=pair.patience)
        assert _end(each) == ("interrupted", "lease_over")
    _works(pair)


def test_a_node_that_is_switched_off(pair: Pair) -> None:
    directory = _busy(pair)
    host = pair.hosts["n2"]
    _stop(pair)
    began = time.monotonic()
    host.kill()
    lose_machine(host)
    _lost_in_time(pair, began, directory)
    host.start()
    _go_on(pair)
    _works(pair)


def test_a_host_that_boots_again_in_time(patient: Pair) -> None:
    directory, host = _busy(patient), patient.hosts["n2"]
    began = time.monotonic()
    host.kill()
    lose_machine(host)
    host.start()
    wait_dead(directory)
    patient.took("known to have ended", time.monotonic() - began, patient.lost)
    assert _end(directory) == ("interrupted", "reboot")
    _works(patient)


def test_a_host_that_is_shut_down(patient: Pair) -> None:
    directory, host = _busy(patient, _STUBBORN), patient.hosts["n2"]
    began = time.monotonic()
    os.kill(host.pid, signal.SIGTERM)
    assert host.has_ended(patient.patience)
    assert not patient.runs(directory)
    patient.took("last process gone", time.monotonic() - began, _GRACE)
    assert read(directory, "status") in ("busy\n", "stopping\n", "dead\n")
    host.kill()
    host.start()
    wait_dead(directory)
    assert _end(directory) == ("cancelled", "shutdown")
    _works(patient)


@pytest.mark.parametrize("of", ["lead", "host", "both"])
def test_daemons_that_come_back_in_time(patient: Pair, of: str) -> None:
    directory = _busy(patient, "sleep 1000; echo went")
    daemons = {"lead": [patient.daemon], "host": [patient.hosts["n2"]]}
    for daemon in {**daemons, "both": daemons["lead"] + daemons["host"]}[of]:
        daemon.restart()
    patient.lead.wait("up")
    patient.go(directory)
    wait_dead(directory)
    assert (_end(directory)[0], read(directory, "out")) == ("done", "went\n")
    _works(patient)


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
    _stop(pair)
    end_process(int(read(boss, "pid")))
    wait_status(boss, "stopping")
    _gone_in_time(pair, began, kid)
    assert read(boss, "status") == "stopping\n"
    wait_dead(boss, timeout=pair.patience)
    assert read(kid, "status") == "dead\n"
    _go_on(pair)
    _works(pair)


def test_ends_over_a_link_that_is_up(pair: Pair) -> None:
    for verb in ("stop", "kill"):
        directory = _busy(pair)
        began = time.monotonic()
        write(directory / "ctl", verb)
        pair.gone(directory)
        pair.took(f"last process gone after {verb}", time.monotonic() - began, _GRACE)
        wait_dead(directory)
        assert _end(directory) == ("cancelled", "operator_stop")
    boss, kid = _boss(pair)
    began = time.monotonic()
    end_process(int(read(boss, "pid")))
    pair.gone(kid)
    pair.took("last process gone after its parent", time.monotonic() - began, _GRACE)
    wait_dead(boss)
    assert _end(kid) == ("cancelled", "parent_dead")
    _works(pair)


def test_a_monitor_that_is_killed(pair: Pair) -> None:
    directory = _busy(pair)
    for monitor in pair.hosts["n2"].monitors():
        end_process(monitor)
    pair.gone(directory)
    wait_dead(directory, timeout=pair.patience)
    assert _end(directory) == ("interrupted", "runtime_lost")
    _works(pair)


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
    before, ended = _busy(patient), _busy(patient)
    kept = _copied(daemon)
    patient.lead.wait_reached()
    after = _busy(patient)
    write(ended / "ctl", "stop")
    wait_dead(ended)
    assert _end(ended) == ("cancelled", "operator_stop")
    began = time.monotonic()
    _put_back(daemon, kept)
    for each in (before, ended, after):
        patient.gone(each)
    assert time.monotonic() - began < bound(patient.lease, _GRACE) + _LATE
    # what had ended lives again at the lead, where nobody is let go by that end
    for each in (before, after) if of == "host" else (ended, before):
        wait_dead(each, timeout=patient.patience)
        assert _end(each) == ("interrupted", "runtime_lost")
    _works(patient)


def _lose_state(daemon: Daemon) -> None:
    """What is left of it is another machine of the same address."""
    kept = daemon.state / "ssh"
    daemon.kill()
    for each in daemon.state.iterdir():
        if each != kept:
            shutil.rmtree(each) if each.is_dir() else each.unlink()
    daemon.start()


def test_a_host_whose_disk_is_lost(pair: Pair) -> None:
    idle, stubborn = _busy(pair), _busy(pair, _STUBBORN)
    began = time.monotonic()
    _lose_state(pair.hosts["n2"])
    _gone_in_time(pair, began, idle, stubborn)
    _lost_in_time(pair, began, idle, stubborn)
    _works(pair)


def test_a_lead_whose_disk_is_lost(pair: Pair) -> None:
    idle, stubborn = _busy(pair), _busy(pair, _STUBBORN)
    began = time.monotonic()
    _lose_state(pair.daemon)
    _gone_in_time(pair, began, idle, stubborn)
    assert not idle.exists()
    _works(pair)


@pytest.mark.parametrize("cut", [False, True])
def test_a_lead_that_is_shut_down(patient: Pair, cut: bool) -> None:
    directory = _busy(patient)
    if cut:
        _stop(patient)
    daemon = patient.daemon
    assert daemon.process is not None
    os.kill(daemon.pid, signal.SIGTERM)
    assert daemon.has_ended(patient.patience)
    patient.gone(directory)
    _go_on(patient)
    daemon.kill()
    daemon.start()
    wait_dead(directory)
    outcome, reason = _end(directory)
    assert outcome == "cancelled" and reason == ("shutdown,unconfirmed" if cut else "shutdown")
    _works(patient)


@pytest.mark.parametrize("of", ["lead", "host"])
def test_a_daemon_is_executed_again_while_much_is_said(patient: Pair, of: str) -> None:
    size = 20 << 20
    directory = patient.place(f"yes 0123456 | head -c {size}; echo end", limits="log_max=64M")
    wait_status(directory, "busy", "dead")
    daemon = patient.daemon if of == "lead" else patient.hosts["n2"]
    assert daemon.ctx("reexec").returncode == 0
    wait_dead(directory)
    assert _end(directory)[0] == "done"
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
