"""What agents cost while nobody uses them: memory and room on disk."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Final

from bench.agents import agent, fresh_name, running_agent
from bench.measure import Episode, Pair, Part
from bench.reference.commands import root_agent, spawn
from bench.reference.supervisors import crun, s6
from bench.setting import Setting, another_daemon

#: agents that are made and not started
_NEW: Final = 1000
#: agents that run
_RUNNING: Final = 100
#: made, run and removed before anything is measured
_WARMING: Final = 10
_START_SECONDS: Final = 30.0
#: what the others run; its memory is its own
_PROGRAM: Final = ("sleep", "infinity")


def pss(pid: int) -> int:
    """Bytes of its memory, of what it shares its part."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"process {pid} has no memory")


def _inside(cgroup: Path) -> set[int]:
    return {
        int(word) for file in cgroup.rglob("cgroup.procs") for word in file.read_text().split()
    }


def _room(directory: Path) -> int:
    """Bytes that are taken on disk below the daemon's state.

    Its log of writes is emptied first: that grows with what is written, up to a bound, and not
    with the number of agents.
    """
    with closing(sqlite3.connect(directory / "ctxfs.db")) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    total = 0
    for where, directories, files in os.walk(directory):
        for name in (*directories, *files):
            with suppress(FileNotFoundError):  # the daemon removes trash beside everything
                total += os.lstat(os.path.join(where, name)).st_blocks * 512
    return total


def agents_sizes(setting: Setting) -> Episode:
    """Bytes of one agent, in a daemon of its own: memory that was freed would be used again."""

    def run() -> dict[str, float]:
        found: dict[str, float] = {}
        with another_daemon(setting) as fresh:
            for _ in range(_WARMING):
                with running_agent(fresh):
                    pass
            state = fresh.base / "state"
            with ExitStack() as stack:
                memory, room = pss(fresh.daemon), _room(state)
                for _ in range(_NEW):
                    stack.enter_context(agent(fresh, fresh_name()))
                found["daemon, new"] = (pss(fresh.daemon) - memory) / _NEW
                found["disk, new"] = (_room(state) - room) / _NEW
                before, memory = _inside(fresh.cgroup.path), pss(fresh.daemon)
                programs = {
                    stack.enter_context(running_agent(fresh))[1] for _ in range(_RUNNING)
                }
                found["daemon, running"] = (pss(fresh.daemon) - memory) / _RUNNING
                besides = _inside(fresh.cgroup.path) - before - programs - {fresh.daemon}
                found["besides"] = sum(map(pss, besides)) / _RUNNING
                before |= besides | programs
                at_terminals = {
                    stack.enter_context(running_agent(fresh, tty=b"80x24\n"))[1]
                    for _ in range(_RUNNING)
                }
                besides = _inside(fresh.cgroup.path) - before - at_terminals - {fresh.daemon}
                found["besides, terminal"] = sum(map(pss, besides)) / _RUNNING
        return found

    return Episode(name="agents", run=run)


def _below(pid: int) -> Iterator[int]:
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for word in listed.read_text().split():
            yield int(word)
            yield from _below(int(word))


def _bubblewraps(setting: Setting, count: int) -> list[int]:
    command = [*root_agent(setting.base / "run" / "root"), *_PROGRAM]
    return [spawn(command) for _ in range(count)]


def _besides_program(start: Callable[[], list[int]]) -> float:
    """Bytes of memory of one of these processes and of all below it, but for its program."""
    total = 0
    pids = start()
    try:
        deadline = time.monotonic() + _START_SECONDS
        for pid in pids:
            names: dict[int, str] = {}
            while _PROGRAM[0] not in names.values():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"a reference did not start its program: {names}")
                time.sleep(0.01)
                with suppress(FileNotFoundError):  # one that ended meanwhile
                    names = {
                        each: Path(f"/proc/{each}/comm").read_text().strip()
                        for each in (pid, *_below(pid))
                    }
            total += sum(pss(each) for each, name in names.items() if name != _PROGRAM[0])
    finally:
        for pid in pids:
            # of those inside the first is PID 1 there, whose end is the end of all
            for process in reversed([pid, *_below(pid)]):
                with suppress(ProcessLookupError):  # its supervisor ends by itself
                    os.kill(process, signal.SIGKILL)
            os.waitpid(pid, 0)
    return total / _RUNNING


def _others(setting: Setting) -> list[Part]:
    """What runs a program as others do, where it is installed."""
    starts: dict[str, Callable[[int], list[int]] | None] = {
        "bwrap": partial(_bubblewraps, setting),
        "crun": crun(setting.base / "crun-idle", _PROGRAM),
        "s6": s6(setting.base / "s6-idle", _RUNNING, _PROGRAM),
    }

    def part(name: str, start: Callable[[int], list[int]]) -> Part:
        def run() -> dict[str, float]:
            return {"besides": _besides_program(lambda: start(_RUNNING))}

        return Part(name=name, episode=Episode(name=f"{name}, idle", run=run), time="besides")

    return [part(name, start) for name, start in starts.items() if start is not None]


def _constant(size: int) -> Part:
    """What was measured once. Room, unlike time, is the same on another machine."""
    name = f"{size >> 10} KiB"
    return Part(name=name, episode=Episode(name=name, run=lambda: {"size": size}), time="size")


def size_pairs(setting: Setting) -> list[Pair]:
    agents = agents_sizes(setting)

    def pair(row: str, side: str, size: str, reference: Part) -> Pair:
        subject = Part(name=side, episode=agents, time=size)
        return Pair(row=row, subject=subject, reference=reference, unit="bytes")

    return [
        *(pair("size-cell", "idle", "besides", other) for other in _others(setting)),
        pair("size-cell", "idle", "besides", _constant(260 << 10)),
        pair(
            "size-terminal", "terminal", "besides, terminal",
            Part(name="idle", episode=agents, time="besides"),
        ),
        pair("size-daemon", "new", "daemon, new", _constant(3 << 10)),
        pair("size-daemon", "running", "daemon, running", _constant(22 << 10)),
        pair("size-disk", "new", "disk, new", _constant(34 << 10)),
    ]
