"""Trees of agents: how long their end takes, and what they cost while idle."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from bench.agents import await_busy, directory_of, fresh_name, make, running_agent, start, write
from bench.measure import Episode, Pair, Part, Ratio, compare_episodes, undisturbed
from bench.reference.commands import spawn
from bench.setting import Setting
from runtime.kernel import cgroups

#: children of the smaller and of the larger tree that is ended
SMALL: Final = 100
LARGE: Final = 1000
#: children of one that is ended before, untimed
_WARMING: Final = 5
_EMPTY_SECONDS: Final = 60.0
#: longer than worker threads wait for more work before they end
_SETTLE_SECONDS: Final = 11.0
_IDLE_SECONDS: Final = 3.0
#: clock_getcpuclockid(3): the CPU-time clock of a process, made of its pid
_CPUCLOCK_SCHED: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A root agent and its children, all busy. Directories, but for what is named otherwise."""

    root: Path
    #: pid of the root agent's program
    pid: int
    children: tuple[Path, ...]
    cgroup: Path
    #: the FIFO behind the root agent's ``wait``, found without the daemon
    wait: Path


@contextmanager
def running_tree(setting: Setting, size: int) -> Iterator[Tree]:
    """Started by the operator; whatever is left of it at the end is killed and removed."""
    with running_agent(setting) as (name, pid):
        children = []
        for _ in range(size):
            children.append(make(setting, fresh_name(), b"sleep infinity\n"))
            write(f"{children[-1]}/parent", f"agent:{name}\n".encode())
        for child in children:
            start(child)
        for child in children:
            await_busy(child)
        root = Path(directory_of(setting, name))
        yield Tree(
            root=root,
            pid=pid,
            children=tuple(map(Path, children)),
            cgroup=Path((root / "cgroup").read_text().strip()),
            wait=(root / "wait").readlink(),
        )


# the end


def _populated(events: int) -> bool:
    try:
        return b"populated 1" in os.pread(events, 4096, 0)
    except OSError as error:
        if error.errno == errno.ENODEV:  # removed already
            return False
        raise


@contextmanager
def _watching(cgroup: Path) -> Iterator[int]:
    """A descriptor that poll(2) knows to be read: only a later change wakes it."""
    events = os.open(cgroup / "cgroup.events", os.O_RDONLY)
    try:
        if not _populated(events):
            raise RuntimeError(f"{cgroup} is empty before its end is timed")
        yield events
    finally:
        os.close(events)


def _await_empty(events: int) -> None:
    deadline = time.monotonic() + _EMPTY_SECONDS
    changed = select.poll()
    changed.register(events, select.POLLPRI)
    while _populated(events):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes of a tree live {_EMPTY_SECONDS:g} s after its end")
        changed.poll(1000)


def _await_recorded(tree: Tree) -> None:
    with open(tree.wait, "rb", buffering=0) as fifo:
        fifo.read()


def _check_ended(tree: Tree) -> None:
    """What the time is claimed for: every status, channel and event is there."""
    wrong: Counter[str] = Counter()

    def expect(path: Path, wanted: str) -> None:
        found = path.read_text().strip()
        if found != wanted:
            wrong[f"{path.parent.name}/{path.name} is {found!r}, not {wanted!r}"] += 1

    channels = tree.root / "session" / "context" / "child"
    for file, wanted in (("status", "dead"), ("outcome", "error"), ("reason", "signal:9")):
        expect(tree.root / file, wanted)
    for child in tree.children:
        for file, wanted in (
            ("status", "dead"),
            ("outcome", "cancelled"),
            ("reason", "parent_dead"),
        ):
            expect(child / file, wanted)
        expect(channels / child.stem / "status", "cancelled")
    lines = (tree.root / "session" / "events.jsonl").read_text().splitlines()
    told = Counter(
        event["child"]
        for event in map(json.loads, lines)
        if event["type"] == "agent.child.cancel" and event["reason"] == "parent_dead"
    )
    if told != Counter(child.stem for child in tree.children):
        wrong[f"{told.total()} agent.child.cancel for {len(tree.children)} children"] += 1
    if wrong:
        first = next(iter(wrong))
        raise RuntimeError(f"a tree was not ended as it should be ({wrong.total()}): {first}")


def _per_child(times: dict[str, float], size: int) -> dict[str, float]:
    return times | {f"{name}/child": taken / size for name, taken in times.items()}


def killed_parent(setting: Setting, size: int) -> Episode:
    """SIGKILL to the root agent's program: ``gone`` and ``recorded``, the same ``/child``."""

    def run() -> dict[str, float]:
        with running_tree(setting, size) as tree:
            with _watching(tree.cgroup) as events, undisturbed():
                begin = time.perf_counter_ns()
                os.kill(tree.pid, signal.SIGKILL)
                _await_empty(events)
                gone = time.perf_counter_ns()
                _await_recorded(tree)
                recorded = time.perf_counter_ns()
            _check_ended(tree)
            return _per_child({"gone": gone - begin, "recorded": recorded - begin}, size)

    return Episode(name=f"parent-{size}", run=run)


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    """A child of this process, stopped. Nothing here may use its mount meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        # all of its threads: reported only then
        state = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if state is None or state.si_code != os.CLD_STOPPED:
            raise RuntimeError("ctxd ended while the bench used it")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def killed_cgroup(setting: Setting, size: int) -> Episode:
    """One write to ``cgroup.kill`` above the same tree, the daemon stopped: ``gone``."""

    def run() -> dict[str, float]:
        with running_tree(setting, size) as tree:
            kill = os.open(tree.cgroup / "cgroup.kill", os.O_WRONLY)
            try:
                with _watching(tree.cgroup) as events, _stopped(setting.daemon), undisturbed():
                    begin = time.perf_counter_ns()
                    os.write(kill, b"1")
                    _await_empty(events)
                    gone = time.perf_counter_ns()
            finally:
                os.close(kill)
            _await_recorded(tree)
            return _per_child({"gone": gone - begin}, size)

    return Episode(name=f"kill-{size}", run=run)


def killed_plain(setting: Setting, size: int) -> Episode:
    """One write to ``cgroup.kill`` above processes without a cell, each in its cgroup: ``gone``."""

    def run() -> dict[str, float]:
        with ExitStack() as stack:
            top = setting.cgroup.child(fresh_name())
            top.path.mkdir()
            stack.callback(top.remove)
            pids = []
            for number in range(size):
                own = top.path / str(number)
                own.mkdir()
                pids.append(spawn(["sleep", "infinity"]))
                stack.callback(os.waitpid, pids[-1], 0)
                stack.callback(os.kill, pids[-1], signal.SIGKILL)
                (own / "cgroup.procs").write_text(str(pids[-1]))
            with _watching(top.path) as events, undisturbed():
                begin = time.perf_counter_ns()
                top.kill()
                _await_empty(events)
                gone = time.perf_counter_ns()
        return _per_child({"gone": gone - begin}, size)

    return Episode(name=f"plain-{size}", run=run)


# idling


def _cpu_time(setting: Setting) -> int:
    """Nanoseconds of CPU used so far by the daemon, its helpers, and all in its cgroups."""
    used = setting.cgroup.keys("cpu.stat")["usage_usec"] * 1000
    inside = "/" + str(setting.cgroup.path.relative_to(cgroups.unified_mount() or "/"))
    for pid in (setting.daemon, *_children(setting.daemon)):
        path = cgroups.path_of(pid)
        if path is not None and not path.startswith(f"{inside}/"):
            with suppress(OSError):  # it has ended since
                used += cpu_clock(pid)
    return used


def cpu_clock(pid: int) -> int:
    """Nanoseconds of processor time that a process has used."""
    return time.clock_gettime_ns(~pid << 3 | _CPUCLOCK_SCHED)


def _children(pid: int) -> list[int]:
    """All threads' children."""
    found = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(word) for word in listed.read_text().split()]
    return found


def idling(setting: Setting, name: str) -> Episode:
    """CPU time that is used while nobody does anything: ``cpu``, in ``wall`` of time."""

    def run() -> dict[str, float]:
        begin, before = time.perf_counter_ns(), _cpu_time(setting)
        time.sleep(_IDLE_SECONDS)
        after, end = _cpu_time(setting), time.perf_counter_ns()
        return {"cpu": after - before, "wall": end - begin}

    return Episode(name=name, run=run)


def settle() -> None:
    """Until what the work before needed, threads say, has gone."""
    time.sleep(_SETTLE_SECONDS)


# the rows


def _end_pairs(setting: Setting, size: int, *, suffix: str = "") -> list[Pair]:
    parent, kill = killed_parent(setting, size), killed_cgroup(setting, size)
    return [
        Pair(
            row=f"end-{time}{suffix}",
            subject=Part(name="parent", episode=parent, time=time),
            reference=Part(name="cgroup.kill", episode=kill, time="gone"),
        )
        for time in ("gone", "recorded")
    ]


def measure_end(row: str, setting: Setting, rounds: int) -> list[Ratio]:
    killed_parent(setting, _WARMING).run()
    pairs = _end_pairs(setting, SMALL)
    plain = Part(name="plain processes", episode=killed_plain(setting, SMALL), time="gone")
    pairs.append(replace(pairs[0], reference=plain))
    return compare_episodes(pairs, rounds)


def measure_end_large(row: str, setting: Setting, rounds: int) -> list[Ratio]:
    small, large = _end_pairs(setting, SMALL), _end_pairs(setting, LARGE, suffix=f"-{LARGE}")
    growths = [
        (f"{less.row}-growth", more.subject, less.subject)
        for more, less in zip(large, small, strict=True)
    ]
    growths.append(("end-kill-growth", large[0].reference, small[0].reference))
    for name, more, less in growths:
        large.append(
            Pair(
                row=name,
                subject=replace(more, name=f"1 of {LARGE}", time=f"{more.time}/child"),
                reference=replace(less, name=f"1 of {SMALL}", time=f"{less.time}/child"),
            )
        )
    killed_parent(setting, _WARMING).run()
    return compare_episodes(large, rounds)


def measure_idle(row: str, setting: Setting, rounds: int) -> list[Ratio]:
    def pairs(name: str) -> list[Pair]:
        used = Part(name=name, episode=idling(setting, name), time="cpu")
        return [Pair(row=row, subject=used, reference=replace(used, name="one CPU", time="wall"))]

    settle()
    found = compare_episodes(pairs("0 agents"), rounds)
    with running_tree(setting, LARGE):
        settle()
        return found + compare_episodes(pairs(f"{LARGE} agents"), rounds)
