"""What agents cost while nobody uses them: memory and room on disk."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Final

from bench.agents import agent, fresh_name, running_agent
from bench.measure import Episode, Pair, Part
from bench.reference.commands import root_agent, spawn
from bench.setting import Setting, another_daemon

#: agents that are made and not started
_NEW: Final = 1000
#: agents that run
_RUNNING: Final = 100
#: made, run and removed before anything is measured
_WARMING: Final = 10
_START_SECONDS: Final = 30.0


def _pss(pid: int) -> int:
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
                memory, room = _pss(fresh.daemon), _room(state)
                for _ in range(_NEW):
                    stack.enter_context(agent(fresh, fresh_name()))
                found["daemon, new"] = (_pss(fresh.daemon) - memory) / _NEW
                found["disk, new"] = (_room(state) - room) / _NEW
                before, memory = _inside(fresh.cgroup.path), _pss(fresh.daemon)
                programs = {
                    stack.enter_context(running_agent(fresh))[1] for _ in range(_RUNNING)
                }
                found["daemon, running"] = (_pss(fresh.daemon) - memory) / _RUNNING
                besides = _inside(fresh.cgroup.path) - before - programs - {fresh.daemon}
                found["besides"] = sum(map(_pss, besides)) / _RUNNING
        return found

    return Episode(name="agents", run=run)


def _below(pid: int) -> Iterator[int]:
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for word in listed.read_text().split():
            yield int(word)
            yield from _below(int(word))


@contextmanager
def _bubblewrap(setting: Setting) -> Iterator[int]:
    pid = spawn([*root_agent(setting.base / "run" / "root"), "sleep", "infinity"])
    try:
        yield pid
    finally:
        # of those inside the first is PID 1 there, whose end is the end of all
        for process in reversed([pid, *_below(pid)]):
            os.kill(process, 9)
        os.waitpid(pid, 0)


def bubblewraps_size(setting: Setting) -> Episode:
    """Bytes of memory of one bubblewrap besides its program."""

    def run() -> dict[str, float]:
        with ExitStack() as stack:
            pids = [stack.enter_context(_bubblewrap(setting)) for _ in range(_RUNNING)]
            deadline = time.monotonic() + _START_SECONDS
            total = 0
            for pid in pids:
                processes: dict[int, str] = {}
                while "sleep" not in processes.values():
                    if time.monotonic() > deadline:
                        raise RuntimeError("a bubblewrap of the bench did not start its program")
                    time.sleep(0.01)
                    processes = {
                        each: Path(f"/proc/{each}/comm").read_text().strip()
                        for each in (pid, *_below(pid))
                    }
                total += sum(_pss(each) for each, name in processes.items() if name != "sleep")
        return {"besides": total / _RUNNING}

    return Episode(name="bwraps", run=run)


def _constant(size: int) -> Part:
    """What was measured once. Room, unlike time, is the same on another machine."""
    name = f"{size >> 10} KiB"
    return Part(name=name, episode=Episode(name=name, run=lambda: {"size": size}), time="size")


def size_pairs(setting: Setting) -> list[Pair]:
    agents, bare = agents_sizes(setting), bubblewraps_size(setting)

    def pair(row: str, side: str, size: str, reference: Part) -> Pair:
        subject = Part(name=side, episode=agents, time=size)
        return Pair(row=row, subject=subject, reference=reference, unit="bytes")

    return [
        pair("size-cell", "idle", "besides", Part(name="bwrap", episode=bare, time="besides")),
        pair("size-cell", "idle", "besides", _constant(260 << 10)),
        pair("size-daemon", "new", "daemon, new", _constant(3 << 10)),
        pair("size-daemon", "running", "daemon, running", _constant(22 << 10)),
        pair("size-disk", "new", "disk, new", _constant(34 << 10)),
    ]
