"""No room for what placed agents give back, or make: on the disk, or on the account of an owner."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from tests.worlds.daemon import (
    Daemon,
    daemon_of,
    read,
    refusal,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.nodes import LEASE, Lead, node, peer
from tests.worlds.small import empty, fill, on_small_disk
from tests.worlds.three import SETTINGS, Three, wake
from tests.worlds.wires import wire

#: what an agent prints, and writes; more than a window of what is asked for at once
_MADE: Final = {"out": 150_000, "artifact/a": 40_000, "artifact/b": 150_000, "result.md": 1000}
_PROGRAM: Final = "sleep 1000; " + "; ".join(
    f"seq {last}" + ("" if name == "out" else f" > $CTX_SELF/{name}")
    for name, last in _MADE.items()
)
_MOST: Final = 4 << 20
#: where a lease may not be over, also on a machine that is busy
_LONGER: Final = "10s"


def _numbers(last: int) -> str:
    return "".join(f"{number}\n" for number in range(1, last + 1))


def _fill_account(daemon: Daemon) -> None:
    """Root writes, whom no account keeps from it."""
    (daemon.make("filler") / "handoff.md").write_text("x" * _MOST)


def _empty_account(daemon: Daemon) -> None:
    (daemon.agent_dir("filler") / "handoff.md").write_text("")


@dataclass(kw_only=True)
class _Short(Three):
    """A lead and a host, one of which has little room."""

    small: Daemon
    fill: Callable[[Daemon], None]
    empty: Callable[[Daemon], None]
    seen: str = field(default="", init=False)

    def about(self, directory: Path) -> Mapping[str, str]:
        return dict(line.split("=", 1) for line in read(directory, "node").splitlines())

    def wait_asked(self, directory: Path) -> None:
        """Until the host has asked for its lease once more."""
        seen = self.about(directory)["seen"]
        wait_until(lambda: self.about(directory)["seen"] > seen, "the host asks for its lease")

    def rests(self, directory: Path) -> bool:
        """Whether nothing comes of an agent's files meanwhile."""
        before = self.wires["n2"].say("count")["down"]
        self.wait_asked(directory)
        return bool(self.wires["n2"].say("count")["down"] - before < 1000)


@contextmanager
def _short(where: str, what: str) -> Iterator[_Short]:
    disk = what == "disk"
    settings = SETTINGS if disk else f"{SETTINGS}owner_disk_max: {_MOST}\n"
    size = "8m" if disk else "32m"

    def run(config: str, side: str) -> Daemon:
        if side != where:
            return stack.enter_context(daemon_of(config=config + SETTINGS))
        return stack.enter_context(on_small_disk(Daemon(config=config + settings), size))

    with ExitStack() as stack:
        host = run("node_name: two\n", "host")
        made = stack.enter_context(wire(f"{host.base}/wire", peer(host)))
        nodes = {"n2": node(made.command, lease=LEASE if where == "lead" else _LONGER)}
        lead = run(f"node_name: one\nnodes: {json.dumps(nodes)}\n", "lead")
        yield _Short(
            Lead(lead), {"n2": host}, {"n2": made},
            small=lead if where == "lead" else host,
            fill=fill if disk else _fill_account,
            empty=empty if disk else _empty_account,
        )  # fmt: skip


@pytest.mark.parametrize("what", ["disk", "account"])
def test_what_comes_back_waits_for_room_at_the_lead(what: str) -> None:
    with _short("lead", what) as short:
        directory = short.place(_PROGRAM)
        wait_status(directory, "busy")
        short.fill(short.small)
        short.go(directory)
        wait_dead(short.there(directory))
        wait_until(lambda: int(short.about(directory)["fetch"]), "it is told how much there is")
        wait_until(lambda: short.rests(directory), "nothing is asked for")
        short.daemon.restart()
        short.lead.wait("up")
        wait_until(lambda: int(short.about(directory)["fetch"]), "it is told again")
        wait_until(lambda: short.rests(directory), "nothing is asked for")
        assert read(directory, "status") == "stopping\n"
        assert read(short.there(directory), "outcome") == "done\n", "its host keeps all"
        short.empty(short.small)
        wait_dead(directory)
        assert (read(directory, "outcome"), read(directory, "reason")) == ("done\n", "exit:0\n")
        for name, last in _MADE.items():
            assert read(directory, name) == _numbers(last), name
        name = directory.name.removesuffix(".d")
        types = [event["type"] for event in short.daemon.events(name)]
        assert types.count("run.start") == types.count("run.end") == 1, types


@pytest.mark.parametrize("what", ["disk", "account"])
def test_a_host_without_room_is_as_this_machine_would_be(what: str) -> None:
    with _short("host", what) as short:
        host = short.small
        agent, stopped, other = map(short.place, (_PROGRAM, "sleep 1000", "sleep 1000"))
        local, late = host.run("local", f"sh -c '{_PROGRAM}'"), host.make("late", "true")
        for each in (agent, stopped, other, local):
            wait_status(each, "busy")
        short.fill(host)
        assert refusal(late / "ctl", "start") in ("EDQUOT", "ENOSPC")
        placed_late = short.place("true")
        short.go(agent)
        wake(host, "local")
        wait_dead(local)
        there = {}
        if what == "disk":  # its end is told when that is stored
            wait_dead(short.there(agent))
            there = _given(short.there(agent))
        write(stopped / "ctl", "stop")
        short.gone(stopped)
        for _ in range(4 if what == "disk" else 1):  # for longer than a lease
            short.wait_asked(other)
        assert read(other, "status") == "busy\n"
        short.empty(host)
        for each in (agent, stopped, placed_late):
            wait_dead(each)
        for name in ("outcome", "reason"):
            assert read(agent, name) == read(local, name)
        assert read(stopped, "reason") == "operator_stop\n"
        assert read(placed_late, "reason").startswith("start_failed: n2: the "), "as its ctl says"
        found = _given(agent)
        assert found == there or not there, "what it gave at its host"
        assert found["artifact/b"] < len(_numbers(_MADE["artifact/b"])), "there was no room"
        assert read(other, "status") == "busy\n"


def _given(directory: Path) -> dict[str, int]:
    """How much there is of what it should have made."""
    sizes = {}
    for name in _MADE:
        with suppress(FileNotFoundError):
            sizes[name] = (directory / name).stat().st_size
    return {**dict.fromkeys(_MADE, 0), **sizes}
