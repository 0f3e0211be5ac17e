"""What runs in cgroups: read from procfs by psutil, beside the event loop.

A process is identified by its PID and its start time, and its cgroup is asked for its PIDs again
afterwards, so that another process that gets the PID meanwhile is never taken for it.

What a process says of itself may be of any size: its command line is a part of its memory that it
chooses (prctl(2), PR_SET_MM_MAP), of terabytes if it wants. No more of that is read than is told.
psutil would read all of it, even for the name of a process.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TypeVar

import psutil

from runtime.kernel.cgroups import Cgroup
from runtime.texts.names import dump_json, escape

_T = TypeVar("_T")

#: seconds and processes after which no more is read
SECONDS: Final = 1.0
MOST: Final = 4096
#: bytes of a command line that are read, and characters of it that are told
_COMMAND_MAX: Final = 1024
#: the same of a name, which the kernel cuts off sooner
_NAME_MAX: Final = 64
#: bytes of smaps_rollup that are read: it has about 30 lines
_ROLLUP_MAX: Final = 8192
#: of its threads, that are looked at
_THREADS: Final = 2
#: <linux/nsfs.h>
_NS_GET_PARENT: Final = 0xB702


@dataclass(frozen=True, slots=True)
class Place:
    """Where an agent's processes are. ``spared`` are PIDs of what surrounds its programs; until
    all have ``begun``, some of those are not known."""

    agent: str
    leaves: tuple[Cgroup, ...]
    spared: frozenset[int]
    begun: bool = True


class Namespace:
    """The PID namespace of a process, in which others may have numbers, too."""

    def __init__(self, pid: int) -> None:
        """``pid`` is a process or a thread; 0 for none, in which nothing has a number."""
        self._depth = len(_numbers(pid))
        self._inode = _inode(pid)

    def number(self, pid: int) -> int | None:
        """What a process is called there; None if it is not there."""
        numbers = _numbers(pid)
        above = len(numbers) - self._depth
        if not self._depth or above < 0:
            return None
        try:
            fd = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            for _ in range(above):
                parent = fcntl.ioctl(fd, _NS_GET_PARENT)
                os.close(fd)
                fd = parent
            return numbers[self._depth - 1] if os.fstat(fd).st_ino == self._inode else None
        except OSError:
            return None
        finally:
            os.close(fd)


def _numbers(pid: int) -> list[int]:
    """The PIDs of a process from the daemon's namespace down to its own; none if it is gone."""
    try:
        with open(f"/proc/{pid}/status") as lines:
            for line in lines:
                if line.startswith("NSpid:"):
                    return [int(word) for word in line.split()[1:]]
    except OSError:
        pass
    return []


def _inode(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return 0


def describe(places: Iterable[Place], asker: int) -> str:
    """JSON Lines of the processes in these places, for a process or thread that asks.

    Keys: ``agent``, ``pid`` (in the asker's namespace), ``name``, ``state``, ``cpu`` (seconds),
    ``memory`` (bytes, PSS), ``age`` (seconds), ``command``. What cannot be had is null. A place
    where a program has not begun yet is left out. Takes at most ``SECONDS`` and tells of ``MOST``
    processes.
    """
    deadline = time.monotonic() + SECONDS
    namespace = Namespace(asker)
    lines: list[str] = []
    for agent, leaf, pids in _found(place for place in places if place.begun):
        told: list[tuple[psutil.Process, str]] = []
        for pid in pids:
            if len(lines) + len(told) == MOST or time.monotonic() > deadline:
                break
            try:
                process = psutil.Process(pid)
                facts = {"agent": agent, "pid": namespace.number(pid), **_facts(process)}
            except (psutil.Error, OSError):
                continue  # gone
            told.append((process, dump_json(facts) + "\n"))
        lines += _still(leaf, told)
    return "".join(lines)


def memory(
    places: Iterable[Place], pause: Callable[[], None] | None = None
) -> tuple[int, int]:
    """Bytes that the processes in these places use together, shared pages in parts (PSS), and how
    many processes they are. Takes at most ``SECONDS``, of the processor if it is to ``pause``
    before each process."""
    clock = time.monotonic if pause is None else time.thread_time
    deadline = clock() + SECONDS
    used = count = 0
    for _, leaf, pids in _found(places):
        count += len(pids)
        read: list[tuple[psutil.Process, int]] = []
        for pid in pids:
            if clock() > deadline:
                break
            if pause is not None:
                pause()
            try:
                process = psutil.Process(pid)
                read.append((process, _pss(_speaker(process).pid)))
            except (psutil.Error, OSError):
                continue  # gone, or not to be looked into
        used += sum(_still(leaf, read))
    return used, count


def _found(places: Iterable[Place]) -> Iterator[tuple[str, Cgroup, list[int]]]:
    """Agents, their leaves, and the PIDs in each that are not spared."""
    for place in places:
        for leaf in place.leaves:
            pids = [pid for pid in _listed(leaf) if pid not in place.spared]
            if pids:
                yield place.agent, leaf, pids


def _listed(leaf: Cgroup) -> list[int]:
    try:
        return leaf.processes()
    except OSError:
        return []  # out of descriptors, say: what cannot be had is not told


def _still(leaf: Cgroup, found: list[tuple[psutil.Process, _T]]) -> list[_T]:
    """What was found of processes that have been the same ones since, and in this leaf: a PID that
    was listed may be another process's, of anybody, by the time that it is looked at."""
    there = set(_listed(leaf)) if found else set()
    return [each for process, each in found if process.pid in there and process.is_running()]


def _facts(process: psutil.Process) -> dict[str, Any]:
    """``psutil.Error`` or ``OSError`` if it is gone."""
    facts: dict[str, Any] = dict.fromkeys(("name", "state", "cpu", "memory", "age", "command"))
    speaker = _speaker(process)
    with process.oneshot():
        facts["name"] = _said(process.pid, "comm", _NAME_MAX)
        facts["state"] = speaker.status()
        times = process.cpu_times()
        facts["cpu"] = round(times.user + times.system, 2)
        facts["age"] = max(0, int(time.time() - process.create_time()))
        try:
            facts["command"] = _said(speaker.pid, "cmdline", _COMMAND_MAX)
            facts["memory"] = _pss(speaker.pid)
        except OSError:
            pass  # of a process that may not be looked into
    return facts


def _speaker(process: psutil.Process) -> psutil.Process:
    """What tells of its memory: once its first thread has ended, one of the others that go on."""
    if process.status() == psutil.STATUS_ZOMBIE:
        with os.scandir(f"/proc/{process.pid}/task") as threads:
            for thread in islice(threads, _THREADS):
                if int(thread.name) != process.pid:
                    return psutil.Process(int(thread.name))
    return process


def _pss(pid: int) -> int:
    """Bytes of memory, shared pages in parts; ``OSError``.

    psutil reads all of smaps instead where this fails once, which may be tens of megabytes.
    """
    with open(f"/proc/{pid}/smaps_rollup", "rb", buffering=0) as facts:
        for line in facts.read(_ROLLUP_MAX).splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) << 10
    return 0  # one without memory


def _said(pid: int, file: str, most: int) -> str:
    """The beginning of what a file of procfs says of a process, as one line without controls."""
    with open(f"/proc/{pid}/{file}", "rb", buffering=0) as said:
        text = said.read(most).decode(errors="replace")
    return escape(text.rstrip("\0\n").replace("\0", " "))[:most]
