"""Agents at another machine, of which an earlier version leads or hosts them at first, and another
one speaks otherwise than this."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from runtime.peers.peering import VERSIONS
from tests.upgrade.older import HOUSE, Executed, Successor
from tests.upgrade.test_upgrade import check_numbers
from tests.worlds.daemon import end_process, read, wait_dead, wait_status, wait_until, write
from tests.worlds.nodes import PARENT, Lead, node

_OLDER = Path(os.environ["CTXFS_OLDER"])
_POLICY = "".join(f"allow boss_t {each}\n"
                  for each in ("agent:* create", "tool:* execute", "node:n2 place"))  # fmt: skip


@dataclass
class Pair:
    """Two daemons that have not been started."""

    lead: Successor
    host: Successor

    @property
    def link(self) -> Lead:
        return Lead(self.lead)

    def place(self, name: str, program: str) -> Path:
        directory = self.lead.make(name, f"sh -c '{program}'", placement="node=n2")
        write(directory / "ctl", "start")
        return directory

    def there(self, directory: Path) -> Path:
        return self.host.agent_dir(f"{directory.name.removesuffix('.d')}@one")

    def works(self) -> None:
        self.link.wait_reached()
        again = self.place("again", "cat; echo again")
        wait_dead(again)
        assert (read(again, "outcome"), read(again, "out")) == ("done\n", "again\n"), read(
            again, "reason"
        )
        again.rmdir()


@contextmanager
def pair(lead: type[Successor], host: type[Successor], *, of: Path = _OLDER) -> Iterator[Pair]:
    """By which version each is started, is said later; the client at the host is of ``of``."""
    there = host(of, "node_name: two\n")
    command = [str(of / ".venv/bin/ctx"), "--root", str(there.root), "peer"]
    nodes = json.dumps({"n2": node(command, lease="60s")})
    here = lead(of, f"node_name: one\nnodes: {nodes}\n")
    try:
        yield Pair(here, there)
    finally:
        for each in (here, there):
            each.abandon()
            each.close()


def _start(daemon: Successor, *, old: bool) -> None:
    if old and not isinstance(daemon, Executed):
        daemon.start_older()
    else:
        daemon.start()


def _become_this(daemon: Successor, *, old: bool) -> None:
    """This version goes on, by the way of the daemon; where it runs already, it is begun anew."""
    if isinstance(daemon, Executed):
        assert daemon.execute_this()["type"] == "reexec"
    elif old:
        daemon.kill_older()
        daemon.start()
    else:
        daemon.restart()


@pytest.mark.parametrize("way", [Successor, Executed])
@pytest.mark.parametrize("old", ["lead", "host", "both"])
def test_placed_agents_go_on(old: str, way: type[Successor]) -> None:
    """One end is of the older version, and of this one later; then both are begun anew."""
    with pair(way, way) as both:
        olds = {"lead": old != "host", "host": old != "lead"}
        for name, daemon in (("host", both.host), ("lead", both.lead)):
            if isinstance(daemon, Executed) and not olds[name]:
                daemon.become_this()
            _start(daemon, old=olds[name])
        if '"peer"' not in (_OLDER / "runtime/sockets/operations.py").read_text():
            pytest.skip("the older version has no links")
        _check_all(both, olds)


def _check_all(both: Pair, olds: dict[str, bool]) -> None:
    on = both.place("on", "echo up; sleep 1000; echo went; echo whole > $CTX_SELF/result.md")
    paused = both.place("paused", "sleep 1000")
    boss = both.lead.make("boss", f"sh -c '{PARENT.format('kid')}'", policy=_POLICY)
    write(boss / "ctl", "start")
    kid = both.lead.agent_dir("kid")
    wait_until(kid.exists, "it is made")
    for each in (on, paused, kid):
        wait_status(each, "busy")
    wait_until(lambda: read(on, "out") == "up\n", "it is heard")
    write(paused / "ctl", "pause")
    wait_status(paused, "paused")
    before = {each: read(both.there(each), "pid") for each in (on, paused, kid)}
    ended = both.place("ended", "echo said")
    wait_dead(ended)

    for name, daemon in (("lead", both.lead), ("host", both.host)):
        if olds[name]:
            _become_this(daemon, old=True)
            both.link.wait_reached()
            assert {each: read(both.there(each), "pid") for each in before} == before, name
    for daemon in (both.lead, both.host):
        _become_this(daemon, old=False)
        both.link.wait_reached()
    assert {each: read(both.there(each), "pid") for each in before} == before
    assert [read(each, "status") for each in (on, paused, kid)] == ["busy\n", "paused\n", "busy\n"]

    _end_sleep(both, on)
    wait_dead(on)
    assert [read(on, file) for file in ("outcome", "out", "result.md")] == [
        "done\n", "up\nwent\n", "whole\n",
    ]  # fmt: skip
    types = [event["type"] for event in both.lead.events("on")]
    assert types.count("run.start") == types.count("run.end") == 1, types
    write(paused / "ctl", "resume")
    wait_status(paused, "busy")
    write(paused / "ctl", "stop")
    wait_dead(paused)
    end_process(int(read(boss, "pid")))
    for each in (boss, kid):
        wait_dead(each)
    assert read(kid, "reason") == "parent_dead\n"
    assert (read(ended, "outcome"), read(ended, "out")) == ("done\n", "said\n")
    for name in ("on", "paused", "kid", "ended"):
        check_numbers(both.lead, name)
    both.works()


def _end_sleep(both: Pair, directory: Path) -> None:
    """Has its program go on."""
    for pid in both.host.processes_of(both.there(directory).name.removesuffix(".d"), "sleep"):
        end_process(pid)


# a daemon that speaks otherwise, which is this one, changed

_PEERING = "runtime/peers/peering.py"
_SPEAKS = f"VERSIONS: Final = ({VERSIONS[0]}, {VERSIONS[1]})"


@contextmanager
def changed(of: str, file: str, before: str, after: str) -> Iterator[tuple[Pair, Executed]]:
    with pair(Executed, Executed, of=HOUSE) as both:
        other = both.lead if of == "lead" else both.host
        assert isinstance(other, Executed)
        other.alter(file, before, after)
        both.host.start()
        both.lead.start()
        yield both, other


@pytest.mark.parametrize("of", ["lead", "host"])
def test_without_a_common_version_nothing_starts(of: str) -> None:
    low, high = VERSIONS[1] + 1, VERSIONS[1] + 2
    ours, theirs = f"{VERSIONS[0]}-{VERSIONS[1]}", f"{low}-{high}"
    said = f"speaks {theirs}, here {ours}" if of == "host" else f"speaks {ours}, here {theirs}"
    with changed(of, _PEERING, _SPEAKS, f"VERSIONS: Final = ({low}, {high})") as (both, other):
        status, told = both.link.check("n2")
        assert status == 1 and told.startswith(f"FAIL n2: {said}"), told
        refused = both.place("refused", "true")
        wait_dead(refused)
        assert read(refused, "outcome") == "error\n"
        assert read(refused, "reason").startswith(f"start_failed: n2: {said}")
        assert both.link.state() == "refused"
        assert other.execute_this()["type"] == "reexec"
        both.works()


@pytest.mark.parametrize("of", ["lead", "host"])
def test_the_greatest_common_version_is_spoken(of: str) -> None:
    after = f"VERSIONS: Final = ({VERSIONS[0]}, {VERSIONS[1] + 1})"
    with changed(of, _PEERING, _SPEAKS, after) as (both, _):
        both.works()
        assert both.link.rows()["n2"]["version"] == VERSIONS[1]


@pytest.mark.parametrize("of", ["lead", "host"])
def test_what_is_unknown_in_a_message_is_ignored(of: str) -> None:
    before = '"agent": agent, **said}'
    after = '"agent": agent, **said, **({} if op == "put" or op == "bound" else {"later": [1]})}'
    with changed(of, "runtime/peers/streams.py", before, after) as (both, other):
        said, more = "(dump_json(said).encode()", '(dump_json({**said, "later": 1}).encode()'
        other.alter(_PEERING, said, more)
        other.restart()
        both.works()
        paused = both.place("paused", "sleep 1000")
        wait_status(paused, "busy")
        write(paused / "ctl", "pause")
        wait_status(paused, "paused")
        write(paused / "ctl", "stop")
        wait_dead(paused)


def test_what_is_unknown_in_what_an_agent_may_is_refused() -> None:
    before, after = '"takes": supervisor', '"later": 1, "takes": supervisor'
    with changed("lead", "runtime/peers/bounds.py", before, after) as (both, _):
        refused = both.place("refused", "true")
        wait_dead(refused)
        assert read(refused, "reason") == (
            'start_failed: n2: put has "later", which is not known here\n'
        )
