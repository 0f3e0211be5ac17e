"""Links over wires that are slow, held and cut, in one direction or both."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.worlds.daemon import Daemon, alive, daemon_of, wait_until
from tests.worlds.nodes import LEASE, Lead, lead_of, node, peer
from tests.worlds.ordinary import AskedDaemon
from tests.worlds.wires import Wire, wire

_LEASE_SECONDS = 5.0


@dataclass
class Wired:
    lead: Lead
    host: Daemon
    wire: Wire


@contextmanager
def _wired() -> Iterator[Wired]:
    with ExitStack() as stack:
        host = stack.enter_context(daemon_of(config="node_name: two\n"))
        made = stack.enter_context(wire(f"{host.base}/wire", peer(host)))
        lead = stack.enter_context(lead_of({"n2": node(made.command)}, "node_name: one\n"))
        yield Wired(lead, host, made)


@pytest.fixture(scope="module")
def wired() -> Iterator[Wired]:
    with _wired() as made:
        yield made


@pytest.mark.parametrize("how", ["stop", "hold up", "hold down"])
def test_a_cut_without_a_word_is_noticed_by_both(wired: Wired, how: str) -> None:
    wired.lead.use("n2")
    (engine,), (end,) = wired.lead.engines(), wired.wire.ends()
    began = time.monotonic()
    wired.wire.stop() if how == "stop" else wired.wire.say(how)
    try:
        wait_until(lambda: engine not in wired.lead.engines(), "the lead has given it up")
        assert time.monotonic() - began > _LEASE_SECONDS / 2, "not before it could know"
        wait_until(lambda: wired.lead.state() == "down", "it is said")
        # whose parent cannot take note of its end while it is stopped
        wait_until(lambda: not alive(end), "the host has given it up")
    finally:
        wired.wire.go_on()
        wired.wire.say("go")
    wired.lead.use("n2")
    wait_until(lambda: len(wired.wire.ends()) == 1, "one connection is left")
    assert wired.host.ctx("ping").returncode == 0


def test_a_slow_wire_keeps_its_link(wired: Wired) -> None:
    wired.wire.say("delay 1")
    wired.lead.daemon.restart()
    wired.lead.use("n2")
    row, engines = wired.lead.rows()["n2"], wired.lead.engines()
    assert row["trip"] >= 2.0, "there and back"

    def seen() -> bool:
        return bool(wired.lead.rows()["n2"]["seen"] > row["seen"] + 1.5 * _LEASE_SECONDS)

    wait_until(seen, "it is heard of after a lease")
    assert wired.lead.engines() == engines
    wired.wire.say("go")


def test_a_link_that_flaps_comes_back_each_time(wired: Wired) -> None:
    for _ in range(10):
        wired.lead.use("n2")
        wired.wire.say("close")
    wired.lead.use("n2")
    wait_until(lambda: len(wired.wire.ends()) == 1, "one connection is left")
    kept = json.loads((wired.host.state / "peers.json").read_text())["leads"]
    assert len(kept) == 1, "by one registration"


@pytest.mark.parametrize("of", ["lead", "host", "both"])
def test_daemons_die_while_the_wire_is_cut(wired: Wired, of: str) -> None:
    wired.lead.use("n2")
    known = (wired.host.state / "peers.json").read_text()
    daemons = {"lead": [wired.lead.daemon], "host": [wired.host]}
    daemons["both"] = daemons["lead"] + daemons["host"]
    wired.wire.stop()
    for daemon in daemons[of]:
        daemon.kill()
    for daemon in daemons[of]:
        daemon.start()
    wired.wire.go_on()
    wired.lead.use("n2")
    there = json.loads((wired.host.state / "peers.json").read_text())
    assert there["leads"].keys() == json.loads(known)["leads"].keys()
    wait_until(lambda: len(wired.wire.ends()) == 1, "one connection is left")


def _configure(lead: Lead, nodes: dict[str, object]) -> None:
    text = f"node_name: one\nnodes: {json.dumps(nodes)}\n"
    (lead.daemon.base / "config.yaml").write_text(text)
    os.kill(lead.daemon.pid, signal.SIGHUP)


def test_a_node_that_is_no_longer_configured_keeps_its_link(wired: Wired) -> None:
    wired.lead.use("n2")
    engines = wired.lead.engines()
    nodes: dict[str, object] = {"n2": node(wired.wire.command)}
    _configure(wired.lead, {"other": node(["/bin/false"])})
    wait_until(lambda: "n2" not in wired.lead.rows(), "it is not there to be used")
    status, said = wired.lead.check("n2")
    assert status == 2 and "no such node for you; there is other" in said, said
    assert wired.lead.engines() == engines
    _configure(wired.lead, nodes)
    wait_until(lambda: "n2" in wired.lead.rows(), "it is there again")
    wired.lead.use("n2")
    assert wired.lead.engines() == engines, "the link is the same"


def test_a_node_whose_command_has_changed_is_reached_by_the_new_one(wired: Wired) -> None:
    wired.lead.use("n2")
    engines = wired.lead.engines()
    _configure(wired.lead, {"n2": node(["/bin/sh", "-c", "echo changed >&2; exit 1"])})
    status, said = wired.lead.check("n2")
    assert status == 0 and wired.lead.engines() == engines, said
    wired.wire.say("close")
    wait_until(lambda: "changed" in wired.lead.rows()["n2"]["error"], "the new one was run")
    _configure(wired.lead, {"n2": node(wired.wire.command)})
    wired.lead.use("n2")


def test_a_command_that_does_not_end_with_its_link_is_asked_to(tmp_path: Path) -> None:
    """It may have to take back what it asked an engine for."""
    tmp_path.chmod(0o777)
    asked = tmp_path / "asked"
    script = f"trap 'echo > {asked}; exit' TERM; echo ctxfs-peer 9 9; while :; do sleep 0.1; done"
    with lead_of({"n2": node(["/bin/sh", "-c", script])}) as lead:
        status, said = lead.check("n2")
        assert status == 1 and "speaks 9-9" in said, said
        wait_until(asked.exists, "it was asked to end")
        wait_until(lambda: not lead.engines(), "it is gone")


#: nodes, and how often the link to each is cut
_NODES, _CUTS = 20, 50
#: bytes after which it is: at once, within the hello, after it
_AFTER = (0, 20, 400)


def test_a_thousand_cuts_leave_nothing() -> None:
    chance = random.Random(1)
    with ExitStack() as stack:
        host = stack.enter_context(daemon_of(config="node_name: two\n"))
        wires = {
            f"n{number}": stack.enter_context(wire(f"{host.base}/wire{number}", peer(host)))
            for number in range(_NODES)
        }
        nodes = {name: node(each.command) for name, each in wires.items()}
        lead = stack.enter_context(lead_of(nodes, "node_name: one\n"))
        lead.use("n0")
        before = len(host.descriptors()), len(lead.daemon.descriptors())
        wanted, checked = dict.fromkeys(wires, 0), 0.0
        cuts = dict.fromkeys(wires, 0)
        while min(cuts.values()) < _CUTS:
            if time.monotonic() > checked + 20:
                with suppress(subprocess.TimeoutExpired):  # they are wanted
                    lead.check()
                checked = time.monotonic()
            for name, each in wires.items():
                passed = each.say("count")
                if passed["open"] and passed["down"] >= wanted[name] and cuts[name] < _CUTS:
                    passed = each.say("close")
                    cuts[name] += 1
                    wanted[name] = passed["down"] + chance.choice(_AFTER)
            time.sleep(0.02)
        for name in wires:
            lead.wait_reached(name)
        wait_until(lambda: all(len(each.ends()) == 1 for each in wires.values()),
                   "one connection is left of each", timeout=_LEASE_SECONDS)  # fmt: skip
        assert len(lead.engines()) == _NODES
        kept = json.loads((host.state / "peers.json").read_text())["leads"]
        assert len(kept) <= 64, "the most that there may be"
        for each in wires.values():
            each.say("close")
        after = len(host.descriptors()), len(lead.daemon.descriptors())
        assert after[0] <= before[0] + 4 * _NODES and after[1] <= before[1] + 8 * _NODES
        # nobody connects any more, and nobody ends what is connected but the host
        for each in wires.values():
            each.stop()
        lead.daemon.kill()
        ends = [pid for each in wires.values() for pid in each.ends()]
        wait_until(lambda: not any(map(alive, ends)), "none is left", timeout=_LEASE_SECONDS + 2)
        lead.daemon.start()


def test_a_user_connects_no_more_often_than_configured() -> None:
    """As fast as it needs to, and then once in a minute: sites block who opens many sessions."""
    most = 5
    with ExitStack() as stack:
        host = stack.enter_context(daemon_of(config="node_name: two\n"))
        made = stack.enter_context(wire(f"{host.base}/wire", peer(host)))
        nodes = {"n2": {"command": made.command, "lease": LEASE}}
        config = f"node_name: one\nconnections: {most}\nnodes: {json.dumps(nodes)}\n"
        daemon = AskedDaemon(config=config)
        stack.callback(daemon.close)
        daemon.start()
        lead = Lead(daemon)
        lead.use("n2")
        began = time.monotonic()
        for _ in range(most - 1):
            made.say("close")
            lead.use("n2")
        assert made.say("close")["opened"] == most

        # whoever wants it, however often
        assert not lead.is_reached()
        assert made.say("count")["opened"] == most
        lead.wait_reached()
        assert made.say("count")["opened"] == most + 1
        assert time.monotonic() - began > 60
