"""Agents at another machine, beside agents of that machine's own: a daemon that leads, and one that
is its host, over a pipe."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Final, TypeVar

from bench.agents import (
    await_busy,
    await_end,
    check_done,
    fresh_name,
    make,
    start,
    write,
)
from bench.measure import Episode, Pair, Part, Ratio, Side, Sides, compare_episodes, undisturbed
from bench.reference.pouring import take
from bench.reference.secure import distant, is_installed
from bench.setting import MakeSides, Setting, another_daemon, installed, serving
from bench.trees import cpu_clock
from runtime.peers.lease import Grants
from runtime.peers.peering import Bytes, Event, Hello, Lead
from runtime.peers.streams import Stream

#: agents in the row ``placed-100``, children in ``placed-tree``, agents in ``placed-ps``
MANY: Final = 100
LISTED: Final = 1000
_PLACEMENT: Final = b"node=far\n"
#: bytes that are printed in ``placed-out``
_POURED: Final = 256 << 20
_GIB: Final = 1 << 30
#: stops and round trips of the link of which the median is one
_STOPS: Final = 7
_TRIPS: Final = 25
#: between a start and an end, for what is noted meanwhile
_REST_SECONDS: Final = 0.05
_GONE_MSECONDS: Final = 60_000


_E = TypeVar("_E", bound=Event)
#: from a command to the one that runs it at another machine
Way = Callable[[list[str]], list[str]]


@contextmanager
def _two(setting: Setting, way: Way = list) -> Iterator[tuple[Setting, Setting]]:
    """A lead, and the host at its node, with the link open."""
    with ExitStack() as stack:
        host = stack.enter_context(another_daemon(setting, "node_name: far\n"))
        node = {
            "command": way(peer(host.ctx)),
            "as": "owner",
            "users": {"root": "root"},
            "max": 2000,
        }
        config = f"node_name: lead\nnodes: {json.dumps({'far': node})}\n"
        lead = stack.enter_context(another_daemon(setting, config))
        # keeps the link, and ends before its daemon
        stack.enter_context(_sleeping(lead, _PLACEMENT))
        yield lead, host


def peer(root: Path) -> list[str]:
    return [installed("ctx"), "--root", str(root), "peer"]


def _make(setting: Setting, command: bytes, placement: bytes = b"") -> str:
    directory = make(setting, fresh_name(), command)
    if placement:
        write(f"{directory}/placement", placement)
    return directory


@contextmanager
def _sleeping(setting: Setting, placement: bytes, count: int = 1) -> Iterator[list[str]]:
    """So many agents that do nothing, and are killed at the end."""
    directories = []
    try:
        for _ in range(count):
            directories.append(_make(setting, b"sleep infinity\n", placement))
            start(directories[-1])
        for each in directories:
            await_busy(each)
        yield directories
    finally:
        for each in directories:
            with suppress(OSError):  # it may have ended
                write(f"{each}/ctl", b"kill\n")
        for each in directories:
            await_end(each)
            os.rmdir(each)


def _lives(setting: Setting, count: int, placement: bytes = b"") -> None:
    """So many agents, at once."""
    directories = [_make(setting, b"true\n", placement) for _ in range(count)]
    for each in directories:
        start(each)
    for each in directories:
        await_end(each)
        check_done(each)
        os.rmdir(each)


def life_sides(count: int) -> MakeSides:
    """``true``, from ``mkdir`` to ``rmdir``."""

    def sides(setting: Setting, stack: ExitStack) -> Sides:
        lead, host = stack.enter_context(_two(setting))
        subject = Side(name="placed", call=lambda: _lives(lead, count, _PLACEMENT))
        return subject, [Side(name="at the host", call=lambda: _lives(host, count))]

    return sides


def read_sides(setting: Setting, stack: ExitStack) -> Sides:
    """open, read, close of status, of an agent that runs."""
    lead, _ = stack.enter_context(_two(setting))
    sides = []
    for name, placement in (("placed", _PLACEMENT), ("local", b"")):
        (directory,) = stack.enter_context(_sleeping(lead, placement))

        def read(path: str = f"{directory}/status") -> None:
            fd = os.open(path, os.O_RDONLY)
            os.read(fd, 100)
            os.close(fd)

        sides.append(Side(name=name, call=read))
    return sides[0], sides[1:]


def ps_sides(setting: Setting, stack: ExitStack) -> Sides:
    """``ctx ps`` of agents that run at the node, and of as many that run here."""
    lead, host = stack.enter_context(_two(setting))
    sides = []
    for name, at, placement in (("placed", lead, _PLACEMENT), ("at the host", host, b"")):
        # as many here as the lead has placed there, and no others
        there = stack.enter_context(another_daemon(setting)) if at is host else at
        stack.enter_context(_sleeping(there, placement, LISTED - (there is lead)))
        if there is not lead:
            stack.enter_context(_sleeping(there, b""))
        command = [installed("ctx"), "--root", str(there.ctx), "ps"]

        def show(words: tuple[str, ...] = tuple(command)) -> None:
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)

        sides.append(Side(name=name, call=show))
    return sides[0], sides[1:]


# ends


def _pid(host: Setting, directory: str, placement: bytes) -> int:
    """Of the program of an agent, also of one that is placed there."""
    name = f"{Path(directory).stem}@lead" if placement else Path(directory).stem
    return int((host.ctx / "agent" / f"{name}.d" / "pid").read_text())


def _await_gone(fds: list[int]) -> None:
    ended = select.poll()
    for fd in fds:
        ended.register(fd, select.POLLIN)
    for _ in fds:
        if not (ready := ended.poll(_GONE_MSECONDS)):
            raise RuntimeError("what was to end has not")
        ended.unregister(ready[0][0])


class _Link:
    """A lead at the other end of the link's command, which has no agents."""

    def __init__(self, host: Setting, stack: ExitStack) -> None:
        self._process = stack.enter_context(
            subprocess.Popen(peer(host.ctx), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        stack.callback(self._process.terminate)
        hello = {"name": "bench", "as": "", "owner": 0, "ttl": 30.0, "grace": 1.0}
        grants = Grants(30.0, 1.0, _now())
        self._lead = Lead(hello, Stream(), grants)
        said = self._await(Hello)
        self._lead.go_on(said, new=(Stream(), grants))
        self.ask()  # whatever a link begins with is done

    def ask(self) -> int:
        """Nanoseconds until the host has answered what it need not look for."""
        begin = time.perf_counter_ns()
        self._lead.want("nobody", "out", 0, 1)
        self._await(Bytes)
        return time.perf_counter_ns() - begin

    def _await(self, kind: type[_E]) -> _E:
        ends = self._process.stdin, self._process.stdout
        while True:
            put, got = (end.fileno() for end in ends if end is not None)
            while data := self._lead.outgoing():
                os.write(put, data)
            if not (data := os.read(got, 1 << 16)):
                raise RuntimeError("the link has ended")
            for event in self._lead.feed(data, _now()):
                if isinstance(event, kind):
                    return event


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _stop(setting: Setting, host: Setting, placement: bytes) -> float:
    directory = _make(setting, b"sleep infinity\n", placement)
    start(directory)
    await_busy(directory)
    fd = os.pidfd_open(_pid(host, directory, placement))
    time.sleep(_REST_SECONDS)
    with undisturbed():
        begin = time.perf_counter_ns()
        write(f"{directory}/ctl", b"stop\n")
        _await_gone([fd])
        gone = time.perf_counter_ns() - begin
    await_end(directory)
    os.close(fd)
    os.rmdir(directory)
    return gone


def _kill_parent(setting: Setting, host: Setting, placement: bytes) -> Mapping[str, float]:
    """SIGKILL to the program of an agent with children, until none of these is left."""
    parent = _make(setting, b"sleep infinity\n")
    start(parent)
    await_busy(parent)
    children = []
    for _ in range(MANY):
        children.append(_make(setting, b"sleep infinity\n"))
        write(f"{children[-1]}/parent", f"agent:{Path(parent).stem}\n".encode())
        if placement:
            write(f"{children[-1]}/placement", placement)
    for each in children:
        start(each)
    for each in children:
        await_busy(each)
    fds = [os.pidfd_open(_pid(host, each, placement)) for each in children]
    program = int(Path(parent, "pid").read_text())
    time.sleep(_REST_SECONDS)
    with undisturbed():
        begin = time.perf_counter_ns()
        os.kill(program, signal.SIGKILL)
        _await_gone(fds)
        gone = time.perf_counter_ns() - begin
        await_end(parent)
        ended = time.perf_counter_ns() - begin
    for fd in fds:
        os.close(fd)
    os.rmdir(parent)
    return {"gone": gone, "ended": ended}


def measure_stop(row: str, setting: Setting, rounds: int) -> list[Ratio]:
    with _two(setting) as (lead, host), ExitStack() as stack:
        link = _Link(host, stack)

        def stop_placed() -> Mapping[str, float]:
            trip = median(link.ask() for _ in range(_TRIPS))
            gone = median(_stop(lead, host, _PLACEMENT) for _ in range(_STOPS))
            return {"gone": gone - trip, "trip": trip}

        def stop_local() -> Mapping[str, float]:
            return {"gone": median(_stop(host, host, b"") for _ in range(_STOPS))}

        placed = Episode(name="placed, but one round trip", run=stop_placed)
        local = Episode(name="at the host", run=stop_local)
        trip = Part(name="round trip", episode=placed, time="trip")
        gone = _pair(row, "gone", placed, local)
        pairs = [gone, Pair(row=f"{row}-trip", subject=trip, reference=gone.reference)]
        return compare_episodes(pairs, rounds)


def measure_tree(row: str, setting: Setting, rounds: int) -> list[Ratio]:
    with _two(setting) as (lead, host):
        placed = Episode(name="placed", run=lambda: _kill_parent(lead, host, _PLACEMENT))
        local = Episode(name="at the host", run=lambda: _kill_parent(host, host, b""))
        pairs = [_pair(f"{row}-{what}", what, placed, local) for what in ("gone", "ended")]
        return compare_episodes(pairs, rounds)


def _pair(row: str, what: str, subject: Episode, reference: Episode) -> Pair:
    sides = (Part(name=each.name, episode=each, time=what) for each in (subject, reference))
    return Pair(row=row, subject=next(sides), reference=next(sides))


# bytes


def _print_much(lead: Setting) -> Mapping[str, float]:
    """An agent that prints as fast as it can, until all of that is at its lead."""
    directory = _make(lead, b"head -c %d /dev/zero\n" % _POURED, _PLACEMENT)
    write(f"{directory}/limits", b"log_max=%d\n" % (4 * _POURED))
    used, begin = cpu_clock(lead.daemon), time.perf_counter_ns()
    start(directory)
    await_end(directory)
    took, used = time.perf_counter_ns() - begin, cpu_clock(lead.daemon) - used
    check_done(directory)
    if (size := os.stat(f"{directory}/out").st_size) != _POURED:
        raise RuntimeError(f"{size} bytes have come, of {_POURED}")
    os.rmdir(directory)
    return {"out": took, "cpu": used}


def measure_out(row: str, setting: Setting, rounds: int) -> list[Ratio]:
    found = _measure_out(row, setting, rounds)
    if not is_installed():
        print(f"{row}-ssh: sshd is not installed", file=sys.stderr)
        return found
    keys = setting.base / "keys"
    keys.mkdir()
    with distant(keys) as way:
        return found + _measure_out(f"{row}-ssh", setting, rounds, way)


def _measure_out(row: str, setting: Setting, rounds: int, way: Way = list) -> list[Ratio]:
    with _two(setting, way) as (lead, _), ExitStack() as stack:
        root = lead.base / "poured"
        root.mkdir()
        socket = root / "ctxd.sock"
        words = ["-m", "bench.reference.pouring", str(socket), str(_POURED)]
        stack.enter_context(serving([sys.executable, *words], root / "log", socket))

        def carry() -> Mapping[str, float]:
            begin = time.perf_counter_ns()
            take(way(peer(root)), root / "file", _POURED)
            # a second of processor time for each GiB
            return {"out": time.perf_counter_ns() - begin, "cpu": 1e9 * _POURED / _GIB}

        placed = Episode(name="placed", run=lambda: _print_much(lead))
        bare = Episode(name="the bare link", run=carry)
        second = Part(name="1 s/GiB", episode=bare, time="cpu")
        cpu = Part(name="lead", episode=placed, time="cpu")
        pairs = [
            _pair(row, "out", placed, bare),
            Pair(row=f"{row}-cpu", subject=cpu, reference=second),
        ]
        return compare_episodes(pairs, rounds)
