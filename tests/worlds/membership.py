"""Who is where, told by the kernel at each fork and exec: nothing is sampled.

The proc connector (CONFIG_PROC_EVENTS) reports every fork(2) and exec(2) of the machine, to
one ``Watch`` for all tests of a run. Each daemon of the tests has a ``Place`` in it as long as it
runs. A violation is

- a program in the daemon's own cgroup that is none of its house: ctxd, binder, guard, and the
  launcher before it moves;
- a process below the daemon's root with the ids of an agent or its owner, and in no agent's
  leaf. What of the daemon's programs looks at an operator's paths there has such ids, too.

For each exec the cgroup of the process is looked up at once. A fork is looked at only if its
parent is below a daemon and in no agent's leaf: out of a leaf nobody leads but root, and whoever
is elsewhere has to be moved, by root too, and is seen when it executes something.
A process that is gone by then is judged by what was last known of it. A child of the daemon's
own may be placed elsewhere by the launcher, and is not judged if it is gone at once, unless the
daemon is long ready, and alive. It is gone, too, if its pid is that of one that began after what is
told: on a busy machine that may be told when all pids were used once more, some of them by
threads of the daemon.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from runtime.kernel.cgroups import unified_mount
from tests.worlds.readiness import readable
from tests.worlds.whose import HIERARCHY

_NETLINK_CONNECTOR: Final = 11
_CN_IDX_PROC: Final = 1
_LISTEN: Final = 1
_IGNORE: Final = 2
_FORK: Final = 1
EXEC: Final = 2
_SO_ATTACH_FILTER: Final = 26
_SO_RCVBUFFORCE: Final = 33
#: netlink header, connector header; then the event: what it is, a processor, the time, pids
EVENT: Final = struct.Struct("=20x16xI4xQIIII")
#: a burst of 80,000 events fits, for a machine that is too busy to let this one look
_BUFFER: Final = 64 << 20
#: what the daemon starts to stay with it
_HOUSE: Final = ("binder", "guard", "launcher")
#: what these are called: by their files, then by themselves
_HOUSE_NAMES: Final = frozenset({*_HOUSE, *(f"ctx-{name}" for name in _HOUSE)})
#: of an ordinary user's daemon: libfuse mounts by fusermount3, in the daemon's own process, which
#: has mount(8) and umount(8) note it
_MOUNTING: Final = ("fusermount3", "fusermount", "mount", "umount")
#: nobody's: who tries at the daemon's start whether a sandbox can be made
_NOBODY: Final = 65534
#: in which proc(5) tells when a process began, in nanoseconds
_TICK: Final = 10**9 // os.sysconf("SC_CLK_TCK")
#: of the machine's first PID namespace (linux/proc_ns.h)
_FIRST_PIDS: Final = 0xEFFFFFFC


def _filter() -> bytes:
    """Lets through what is looked at, forks of whole processes and execs: a program of
    struct sock_filter, for which numbers are in the network's order."""
    told, child_thread, child = 36, 60, 64
    fork, exec_ = (socket.htonl(what) for what in (_FORK, EXEC))
    load, equal, equal_x, to_x, answer = 0x20, 0x15, 0x1D, 0x07, 0x06
    steps = (
        (load, 0, 0, told),
        (equal, 5, 0, exec_),
        (equal, 0, 5, fork),
        (load, 0, 0, child_thread),
        (to_x, 0, 0, 0),
        (load, 0, 0, child),
        (equal_x, 0, 1, 0),
        (answer, 0, 0, 0xFFFFFFFF),
        (answer, 0, 0, 0),
    )
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


class Unavailable(Exception):
    """The kernel does not tell."""


class Place:
    """One daemon's cgroups."""

    def __init__(
        self, watch: Watch, *, root: Path, own: Path, programs: Path, rootless: bool
    ) -> None:
        self.root, self.own = map(_relative, (root, own))
        self._house = frozenset(str(programs / name) for name in _HOUSE)
        self._programs = f"{programs}/"
        self._rootless = rootless
        self._watch = watch
        self._lost = watch.lost
        #: the daemon, once it has begun
        self.pid: int | None = None
        self.ready = False
        self._found: list[str] = []

    def violations(self) -> list[str]:
        """What was seen until now, and was not taken. What the kernel could not tell is a
        violation too."""
        self._watch.look()
        lost = ["events were lost: the machine was faster than this"] if self.is_blind() else []
        return [*self._found, *lost]

    def take(self) -> list[str]:
        """What was seen since this was asked last."""
        self._watch.look()
        found, self._found = self._found, []
        return found

    def is_blind(self) -> bool:
        """Whether not everything was told since ``look_again``."""
        return not self._watch.is_on or self._watch.lost != self._lost

    def look_again(self) -> None:
        self._lost = self._watch.lost

    # called by the watch

    def was_forked(self, pid: int, parent: int, path: str) -> None:
        program = _program(pid)
        if path == self.own:
            # a copy of the daemon is about to be the launcher
            copied = parent == self.pid and program == _PYTHON
            if program and not self._may_stay(program) and not copied:
                self._found.append(f"{program} began in the daemon's own cgroup")
        else:
            self._check_ids(pid, program, path, "began")

    def has_executed(self, pid: int, path: str, gone: bool) -> None:
        if pid == self.pid:
            return  # it begins anew
        program = "" if gone else _program(pid)
        if path != self.own:
            self._check_ids(pid, program, path, "ran")
        elif not program:
            # one that has exited has a name, and no file any more; one that was waited for, too,
            # perhaps since its cgroup was looked up, has neither
            name = "" if gone else _name(pid)
            if self._rootless and name in _MOUNTING:
                return
            if name in _HOUSE_NAMES and not self._daemon_lives():
                return  # it went with its daemon before it was looked at
            seen = bool(name) and not gone
            if seen or (self.ready and not self._rootless and self._daemon_lives()):
                self._found.append(f"{name or pid} ran in the daemon's own cgroup")
        elif not self._may_stay(program):
            self._found.append(f"{program} ran in the daemon's own cgroup")

    def _may_stay(self, program: str) -> bool:
        return program in self._house or (
            self._rootless and os.path.basename(program) in _MOUNTING
        )

    def _check_ids(self, pid: int, program: str, path: str, verb: str) -> None:
        # an ordinary user's agents have the daemon's, and commands of links those of an account
        linked = path.removeprefix(self.root).startswith("/link/")
        if self._rootless or linked or not program or program.startswith(self._programs):
            return
        with suppress(FileNotFoundError, ProcessLookupError):
            if (uid := os.stat(f"/proc/{pid}").st_uid) not in (0, _NOBODY):
                self._found.append(f"{program} (uid {uid}) {verb} in {path}, in no agent's leaf")

    def _daemon_lives(self) -> bool:
        with suppress(OSError):
            stat = Path(f"/proc/{self.pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] not in "ZX"
        return False


class Watch:
    """Looks at all places, from ``start()`` to ``stop()``, by a thread that is always there
    and, so that what happened is known, by whoever asks."""

    def __init__(self, buffer: int = _BUFFER) -> None:
        self._buffer = buffer
        self._lock = threading.RLock()
        #: by the first directory of the cgroups that are theirs
        self._places: dict[str, Place] = {}
        #: cgroups of processes below a daemon, some of them long gone
        self._known: dict[int, str] = {}
        self.is_on = False
        #: how often the machine was faster than this
        self.lost = 0
        #: why nothing is told, if it is not
        self.why_not = ""

    def start(self) -> None:
        """``Unavailable`` where the proc connector cannot be listened to."""
        # In a container the kernel answers nothing, or, if somebody outside listens too, tells
        # what it tells them.
        if os.stat("/proc/self/ns/pid").st_ino != _FIRST_PIDS:
            raise Unavailable("no proc connector: not in the machine's first PID namespace")
        try:
            self._socket = socket.socket(
                socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_CONNECTOR
            )
            with suppress(PermissionError):
                self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, self._buffer)
            program = _filter()
            kept = ctypes.create_string_buffer(program, len(program))
            self._socket.setsockopt(
                socket.SOL_SOCKET, _SO_ATTACH_FILTER,
                struct.pack("HP", len(program) // 8, ctypes.addressof(kept)),
            )
            self._socket.bind((0, _CN_IDX_PROC))
            self._order(_LISTEN)
            self._check_told()
        except OSError as error:
            raise Unavailable(f"no proc connector: {error.strerror}") from None
        self._wake, self._told = os.pipe()
        self.is_on = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if not self.is_on:
            return
        self.is_on = False
        os.write(self._told, b".")
        self._thread.join()
        with suppress(OSError):
            self._order(_IGNORE)
        self._socket.close()
        for fd in (self._wake, self._told):
            os.close(fd)

    def start_once(self) -> None:
        """If it can be had; ``why_not`` says so."""
        with self._lock:
            if not self.is_on and not self.why_not:
                try:
                    self.start()
                except Unavailable as error:
                    self.why_not = str(error)

    @contextmanager
    def beginning(self, place: Place) -> Iterator[None]:
        """Nothing is judged until the pid of the place's daemon is known."""
        self.start_once()
        with self._lock:
            place.pid, place.ready = None, False
            for path in (place.root, place.own):
                self._places[_first(path)] = place
            yield

    def is_forked(self, place: Place, pid: int) -> None:
        """The place's daemon, which executes nothing to be one: what it forks is looked at."""
        with self._lock:
            self.look()  # its own fork, by somebody who is nowhere
            place.pid = pid
            self._known[pid] = place.own

    def forget(self, place: Place) -> None:
        """It is over."""
        with self._lock:
            names = {_first(path) for path in (place.root, place.own)}
            for name in names:
                self._places.pop(name, None)
            self._known = {p: c for p, c in self._known.items() if _first(c) not in names}

    def _order(self, what: int) -> None:
        body = struct.pack("=IIIIHHI", _CN_IDX_PROC, 1, 0, 0, 4, 0, what)
        header = struct.pack("=IHHII", 16 + len(body), 3, 0, 0, os.getpid())  # NLMSG_DONE
        self._socket.send(header + body)

    def _check_told(self) -> None:
        """A fork of our own must be told, or nothing is."""
        pid = silent = 0
        while True:
            if not pid:
                pid = os.posix_spawn("/bin/true", ["true"], {})
                os.waitpid(pid, 0)
            if not readable([self._socket.fileno()], 1):
                silent += 1
                if silent == 5:
                    raise OSError(0, "it is silent")
                # The kernel says once that it drops events, until all that it kept are read.
                pid = 0
                continue
            try:
                what, _, *numbers = EVENT.unpack_from(self._socket.recv(4096))
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                pid = 0  # of a busy machine there may be too much at once
                continue
            if what == _FORK and numbers[3] == pid:
                return

    def _run(self) -> None:
        with suppress(OSError):  # this thread: what is looked at late is gone
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        waiting = [self._socket.fileno(), self._wake]
        while self._wake not in readable(waiting):
            self.look()

    def look(self) -> None:
        """At all that has happened."""
        with self._lock:
            while self.is_on:
                try:
                    event = self._socket.recv(4096, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return
                except OSError:  # ENOBUFS: what was known of who may be wrong now
                    self.lost += 1
                    self._known.clear()
                    continue
                self.tell(event.ljust(EVENT.size, b"\0"))

    def tell(self, event: bytes) -> None:
        """What has happened, as the kernel says it."""
        what, when, *numbers = EVENT.unpack_from(event)
        with self._lock:
            if what == _FORK:
                self._forked(numbers[3], numbers[1], when)
            else:
                self._executed(numbers[1], when)

    def _forked(self, pid: int, parent: int, when: int) -> None:
        above = self._known.get(parent)
        if above is None:
            self._known.pop(pid, None)  # of another one that had this pid
            return
        if "/agent-" in above:
            self._known[pid] = above
            return
        path = self._find(pid, when)
        if path is None:
            place = self._places.get(_first(above))
            if place is None or place.pid == parent:
                self._known.pop(pid, None)
            else:
                self._known[pid] = above
            return
        if (place := self._note(pid, path)) is not None:
            place.was_forked(pid, parent, path)

    def _executed(self, pid: int, when: int) -> None:
        if not self._places:
            return  # without opening a file: a test may be counting those of this process
        found = self._find(pid, when)
        path = self._known.get(pid, "") if found is None else found
        if (place := self._note(pid, path)) is not None:
            place.has_executed(pid, path, found is None)

    def _find(self, pid: int, when: int) -> str | None:
        """The v2 cgroup of a process to which something happened at a time; None if it is gone."""
        path = _path_of(pid)
        is_looked_at = path is not None and _first(path) in self._places
        return None if is_looked_at and _began(pid) > when else path

    def _note(self, pid: int, path: str) -> Place | None:
        """The place that is to judge; None for what is somewhere else, or in an agent's leaf."""
        place = self._places.get(_first(path))
        if place is None:
            self._known.pop(pid, None)
            return None
        self._known[pid] = path
        return None if "/agent-" in path else place


def _relative(path: Path) -> str:
    """To the hierarchy's root."""
    mount = unified_mount()
    assert mount is not None
    return f"/{path.relative_to(mount)}".removesuffix("/.")


#: in which all daemons have theirs
_ABOVE: Final = f"{_relative(HIERARCHY)}/" if HIERARCHY is not None else "/"


def _first(path: str) -> str:
    return path.removeprefix(_ABOVE).partition("/")[0]


#: what a daemon is
_PYTHON: Final = os.path.realpath(sys.executable)


def _path_of(pid: int) -> str | None:
    """The v2 cgroup of a process; None if it is gone.

    By nothing of ``os``: this is asked at every exec of the machine, in a thread beside tests
    that put others in the place of os.open and os.close.
    """
    with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/cgroup", "rb") as file:
        for line in file.read().splitlines():
            if line.startswith(b"0::"):
                return os.fsdecode(line[3:]).removesuffix(" (deleted)")
    return None


def _began(pid: int) -> int:
    """When a process or thread began, by the clock of the kernel's events, or a tick before, in
    nanoseconds; 0 if it is gone."""
    awake = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    asleep = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - awake
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[19]) * _TICK - asleep
    return 0


def _program(pid: int) -> str:
    """The file that a process executes; empty if it is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return os.readlink(f"/proc/{pid}/exe").removesuffix(" (deleted)")
    return ""


def _name(pid: int) -> str:
    """Also of one that has ended, and was not waited for."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


#: of this run of the tests; begins with the first daemon
WATCH: Final = Watch()
