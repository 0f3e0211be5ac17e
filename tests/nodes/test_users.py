"""Nodes of an ordinary user: the own ssh as it is typed, and what ends when something fails."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.peers.lease import bound
from tests.worlds.daemon import (
    TIMEOUT,
    end_process,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.nodes import PARENT
from tests.worlds.ordinary import UID
from tests.worlds.users import Users, users

_LEASE, _GRACE = 5.0, 0.3
#: beyond lease and grace, on a machine that is busy
_LATE = 2.0
#: beyond what the lead says
_LONG = bound(_LEASE, 10.0) + 30
_LINES = "".join(f"allow boss_t {each}\n"
                 for each in ("agent:* create", "tool:* execute", "node:n2 place"))  # fmt: skip


@pytest.fixture
def both() -> Iterator[Users]:
    with users() as made:
        yield made


@pytest.fixture
def patient() -> Iterator[Users]:
    """Where daemons are back before the lease is over, also on a machine that is busy."""
    with users(lease="60s") as made:
        yield made


def _typed(both: Users, *words: str, **more: str) -> tuple[int, str]:
    """What the user types at the own machine."""
    home = {"HOME": str(both.here.home), "PATH": os.environ["PATH"], **more}
    done = subprocess.run(both.here.run_as_user(*words), stdin=subprocess.DEVNULL, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT,
                          check=False, env=home)  # fmt: skip
    return done.returncode, done.stdout


def _works(both: Users) -> None:
    both.lead.wait_reached()
    again = both.here.agent_dir("again")
    both.here.do(lambda: both.here.run("again", "echo again", placement="node=n2"))
    assert both.end(again) == ("done", "exit:0")
    both.here.do(again.rmdir)
    alive = [each.name for each in both.there.cgroup.path.glob("user-*/agent-*@*")
             if "populated 1" in (each / "cgroup.events").read_text()]  # fmt: skip
    assert not alive, alive


def test_what_the_manual_says_is_enough() -> None:
    """ctxfs-nodes(7), word by word."""
    with users(configured=False) as both:
        status, said = _typed(both, "ssh", "n2", "ctx", "ping")
        assert status == 0, said
        status, said = both.ctx("nodes", "add", "n2", "n2")
        assert status == 0 and 'restrict,command="ctx peer"' in said, said
        (line,) = re.findall("^ +n2: {.*}$", said, re.M)
        both.configure(line)
        status, said = both.ctx("nodes", "check", "n2")
        assert status == 0 and said.startswith("ok n2: two runs ctxd"), said
        assert both.ctx("spawn", "there", "--node", "n2", "--", "id", "-u")[0] == 0
        there = both.here.agent_dir("there")
        read_both = lambda: (read(there, "wait"), read(there, "out"))  # noqa: E731
        assert both.here.do(read_both)[1] == f"{UID}\n"
        assert "there" in both.ctx("ps", "--all")[1]
        both.here.do(there.rmdir)
        assert both.ctx("nodes", "forget", "n2") == (0, "")
        _works(both)


def test_a_daemon_is_no_node_of_itself() -> None:
    with users(itself=True) as both:
        for _ in range(3):
            status, said = both.ctx("nodes", "check", "n2")
            assert status == 1 and "it leads to this ctxd, which is no node of itself" in said, said
        directory = both.here.do(lambda: both.here.run("x", "true", placement="node=n2"))
        outcome, reason = both.end(directory)
        assert (outcome, reason) == (
            "error", "start_failed: n2: it leads to this ctxd, which is no node of itself"
        )  # fmt: skip
        assert (both.here.state / "peers.json").read_text().count('"uid"') == 1


def test_a_key_that_only_the_agent_of_ssh_has() -> None:
    """As one with a passphrase, which nobody types for a daemon."""
    with users() as both:
        here = both.here
        command = here.run_as_user("ssh-agent", "-D", "-a", str(here.run_dir / "agent"))
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as agent:
            try:
                where = {"SSH_AUTH_SOCK": str(here.run_dir / "agent")}
                wait_until(Path(where["SSH_AUTH_SOCK"]).exists, "the agent of ssh is there")
                assert _typed(both, "ssh-add", str(here.keys / "id"), **where)[0] == 0
                # of a key of which there is only the public half, ssh(1) asks the agent
                (here.keys / "id").write_text((here.keys / "id.pub").read_text())
                status, said = both.ctx("nodes", "check", "n2")
                assert status == 1 and "SSH_AUTH_SOCK" in said, said
                here.env |= where
                here.restart()
                _works(both)
                assert here.ctx("reexec").returncode == 0
                _works(both)
            finally:
                agent.kill()


def _family(both: Users) -> tuple[Path, Path]:
    """An agent, and its child at n2."""
    boss, kid = map(both.here.agent_dir, ("boss", "kid"))

    def begin() -> None:
        both.here.make("boss", f"sh -c '{PARENT.format('kid')}'", policy=_LINES)
        write(boss / "ctl", "start")
        wait_until(kid.exists, "it is made")
        wait_status(kid, "busy")

    both.here.do(begin)
    return boss, kid


def test_a_stop_and_a_kill(both: Users) -> None:
    for verb in ("stop", "kill"):
        directory = both.place(verb, "sleep 1000")
        both.here.do(lambda v=verb, d=directory: write(d / "ctl", v))  # type: ignore[misc]
        both.gone(directory)
        assert both.end(directory) == ("cancelled", "operator_stop")
    _works(both)


@pytest.mark.parametrize("cut", [False, True])
def test_a_parent_is_killed(both: Users, cut: bool) -> None:
    boss, kid = _family(both)
    began = time.monotonic()
    if cut:
        both.wire.stop()
    end_process(int(both.here.do(lambda: read(boss, "pid"))))
    both.gone(kid)
    assert time.monotonic() - began < (_LEASE + _GRACE if cut else 1.0) + _LATE
    both.end(boss, _LONG)
    outcome, reason = both.end(kid)
    assert outcome == "cancelled"
    assert reason == ("parent_dead,unconfirmed" if cut else "parent_dead")
    both.wire.go_on()
    _works(both)


def test_the_link_is_cut_for_a_lease(both: Users) -> None:
    directory = both.place("cut", "trap : TERM; while :; do sleep 1; done")
    began = time.monotonic()
    both.wire.stop()
    both.gone(directory)
    assert time.monotonic() - began < _LEASE + _GRACE + _LATE
    both.wire.go_on()
    outcome, reason = both.end(directory, _LONG)
    assert outcome == "interrupted" and reason in ("lease_over", "runtime_lost")
    _works(both)


def test_a_link_that_comes_back_in_time_is_not_noticed(patient: Users) -> None:
    directory = patient.place("on", "sleep 1000; echo went")
    patient.wire.say("close")
    patient.lead.wait("down")
    patient.lead.wait("up")
    for engine in patient.lead.engines():
        end_process(engine)
    patient.lead.wait("up")
    patient.go(directory)
    assert patient.end(directory) == ("done", "exit:0")
    assert patient.said(directory) == "went\n"
    _works(patient)


@pytest.mark.parametrize("how", ["kill", "reexec"])
def test_both_daemons_come_back_in_time(patient: Users, how: str) -> None:
    directory = patient.place("on", "sleep 1000; echo went")
    pids = patient.left(directory)
    if how == "kill":
        for daemon in (patient.here, patient.there):
            daemon.kill()
        for daemon in (patient.there, patient.here):
            daemon.start()
    else:
        for daemon in (patient.here, patient.there):
            assert daemon.ctx("reexec").returncode == 0
    patient.lead.wait("up")
    assert patient.left(directory) == pids
    patient.go(directory)
    assert patient.end(directory) == ("done", "exit:0")
    assert patient.said(directory) == "went\n"
    _works(patient)


def test_both_daemons_are_gone_for_a_lease(both: Users) -> None:
    boss, kid = _family(both)
    root = both.place("root", "trap : TERM; while :; do sleep 1; done")
    began = time.monotonic()
    for daemon in (both.here, both.there):
        daemon.kill()
    for each in (kid, root):
        both.gone(each)
    assert time.monotonic() - began < _LEASE + _GRACE + _LATE
    for daemon in (both.there, both.here):
        daemon.start()
    for each in (kid, root):
        assert both.end(each, _LONG) == ("interrupted", "lease_over")
    assert both.here.do(lambda: read(boss, "status")) == "busy\n"
    both.here.do(lambda: write(boss / "ctl", "kill"))
    both.here.do(lambda: wait_dead(boss))
    _works(both)


def test_a_user_shuts_both_down(both: Users) -> None:
    directory = both.place("x", "sleep 1000")
    assert both.here.stop() == 0
    assert not both.left(directory)
    both.here.start()
    assert both.end(directory) == ("cancelled", "shutdown")
    other = both.place("y", "sleep 1000")
    assert both.there.stop() == 0
    assert not both.left(other)
    both.there.start()
    assert both.end(other) == ("cancelled", "shutdown")
    _works(both)
