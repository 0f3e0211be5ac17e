"""What runs in cgroups: read from procfs by psutil, beside the event loop.

A process is identified by its PID and its start time, so that another one that gets the PID
meanwhile is not taken for it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import psutil

from runtime.kernel.cgroups import Cgroup
from runtime.texts.names import dump_json, escape

#: seconds and processes after which no more is read
SECONDS: Final = 1.0
MOST: Final = 4096
#: characters of a command line
_COMMAND_MAX: Final = 1024
#: <linux/nsfs.h>
_NS_GET_PARENT: Final = 0xB702


@dataclass(frozen=True, slots=True)
class Place:
    """Where an agent's processes are. ``spared`` are PIDs of what surrounds its programs."""

    agent: str
    leaves: tuple[Cgroup, ...]
    spared: frozenset[int]


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
    ``memory`` (bytes, PSS), ``age`` (seconds), ``command``. What cannot be had is null. Takes at
    most ``SECONDS`` and tells of ``MOST`` processes.
    """
    deadline = time.monotonic() + SECONDS
    namespace = Namespace(asker)
    lines: list[str] = []
    for agent, pid in _found(places):
        if len(lines) == MOST or time.monotonic() > deadline:
            break
        facts = _facts(pid)
        if facts is not None:
            lines.append(dump_json({"agent": agent, "pid": namespace.number(pid), **facts}) + "\n")
    return "".join(lines)


def memory(places: Iterable[Place]) -> tuple[int, int]:
    """Bytes that the processes in these places use together, shared pages in parts (PSS), and how
    many processes they are. Takes at most ``SECONDS``."""
    deadline = time.monotonic() + SECONDS
    used = count = 0
    for _, pid in _found(places):
        count += 1
        if time.monotonic() < deadline:
            try:
                used += psutil.Process(pid).memory_full_info().pss
            except (psutil.Error, OSError):
                continue  # gone, or not to be looked into
    return used, count


def _found(places: Iterable[Place]) -> Iterator[tuple[str, int]]:
    for place in places:
        for leaf in place.leaves:
            try:
                pids = leaf.processes()
            except OSError:
                continue  # out of descriptors, say: what cannot be had is not told
            for pid in pids:
                if pid not in place.spared:
                    yield place.agent, pid


def _facts(pid: int) -> dict[str, Any] | None:
    """None if it is gone, or another process has its PID by now."""
    facts: dict[str, Any] = dict.fromkeys(("name", "state", "cpu", "memory", "age", "command"))
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            facts["name"] = escape(process.name())
            facts["state"] = process.status()
            times = process.cpu_times()
            facts["cpu"] = round(times.user + times.system, 2)
            facts["age"] = max(0, int(time.time() - process.create_time()))
            try:
                facts["command"] = escape(" ".join(process.cmdline()))[:_COMMAND_MAX]
                facts["memory"] = process.memory_full_info().pss
            except (psutil.AccessDenied, OSError):
                pass  # of a process that may not be looked into
        return facts if process.is_running() else None
    except (psutil.Error, OSError):
        return None
