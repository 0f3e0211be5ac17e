"""Who is where, told by the kernel at each fork and exec: nothing is sampled.

The proc connector (CONFIG_PROC_EVENTS) reports every fork(2) and exec(2) of the machine.
For each the cgroup of the process is looked up at once. One that is gone by then is judged
by what was last known of its parent; but a child of the daemon's own is placed by the
launcher, and one that is gone at once is not judged.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.cgroups import path_of

_NETLINK_CONNECTOR = 11
_CN_IDX_PROC = 1
_LISTEN, _IGNORE = 1, 2
_FORK, _EXEC, _EXIT = 1, 2, 0x80000000
#: netlink header, connector header, then the event
_HEADERS = 16 + 20
_BUFFER = 8 << 20
#: what may be in the daemon's cgroup, by the name in /proc/PID/comm
HOUSE = frozenset({"ctx-binder", "ctx-guard", "ctx-launcher"})
#: of an ordinary user's daemon: libfuse mounts by it, in the daemon's own process
_MOUNTING = frozenset({"fusermount3", "fusermount"})


class Unavailable(Exception):
    """The kernel does not tell."""


class Membership:
    """Watches the cgroups of one daemon: ``start()``, then ``violations()`` at any time,
    then ``stop()``.

    ``root`` is the root of the daemon's cgroups, ``daemon`` its pid, ``uids`` those of its
    agents that nobody else on the machine has. A violation is a process in the daemon's own
    cgroup that is none of its house, or one with an agent's uid outside of every agent's
    leaf and below the daemon.
    """

    def __init__(self, *, root: Path, daemon: int, uids: frozenset[int] = frozenset()) -> None:
        self._root = "/" + str(root).partition("/sys/fs/cgroup/")[2].removeprefix("unified/")
        self._daemon = daemon
        self._uids = uids
        self._own = path_of(daemon) or ""
        self._found: list[str] = []
        self._seen: dict[int, str] = {}
        self._lost = False
        self._ready = threading.Event()
        self._wake, self._told = os.pipe()

    def start(self) -> None:
        """``Unavailable`` where the proc connector cannot be listened to."""
        try:
            self._socket = socket.socket(
                socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_CONNECTOR
            )
            self._socket.bind((0, _CN_IDX_PROC))
            # more than the default, which bursts of a loaded machine fill
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, 33, _BUFFER)  # SO_RCVBUFFORCE
            self._order(_LISTEN)
            self._check_told()
        except OSError as error:
            raise Unavailable(f"no proc connector: {error.strerror}") from None
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _order(self, what: int) -> None:
        body = struct.pack("=IIIIHHI", _CN_IDX_PROC, 1, 0, 0, 4, 0, what)
        header = struct.pack("=IHHII", 16 + len(body), 3, 0, 0, os.getpid())  # NLMSG_DONE
        self._socket.send(header + body)

    def _check_told(self) -> None:
        """A fork of our own must be told, or nothing is."""
        pid = os.posix_spawn("/bin/true", ["true"], {})
        os.waitpid(pid, 0)
        while True:
            if not select.select([self._socket], [], [], 5)[0]:
                raise OSError(0, "it is silent")
            event = self._parse(self._socket.recv(4096))
            if event is not None and event[1] == pid:
                return

    @staticmethod
    def _parse(data: bytes) -> tuple[int, int, int] | None:
        """(what, pid, parent) of an event of a whole process; None for others."""
        what, _, _, *numbers = struct.unpack_from("=IIQIIII", data.ljust(80, b"\0"), _HEADERS)
        if what == _FORK:
            parent, _, thread, pid = numbers
            return (what, pid, parent) if thread == pid else None
        if what in (_EXEC, _EXIT):
            thread, pid = numbers[:2]
            return (what, pid, 0) if thread == pid else None
        return None

    def _watch(self) -> None:
        with contextlib.suppress(OSError):  # this thread: what is looked at late is gone
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        while True:
            waiting: list[socket.socket | int] = [self._socket, self._wake]
            readable, _, _ = select.select(waiting, [], [])
            if self._socket in readable:
                try:
                    event = self._parse(self._socket.recv(4096))
                except OSError:  # ENOBUFS: the machine was faster
                    self._lost = True
                    continue
                if event is not None:
                    self._look(*event)
            elif self._wake in readable:
                return

    def _look(self, what: int, pid: int, parent: int) -> None:
        if what == _EXIT:
            self._seen.pop(pid, None)
            return
        path = path_of(pid)
        if path is None:
            path = "" if parent == self._daemon else self._seen.get(parent or pid, "")
        self._seen[pid] = path
        if pid == self._daemon:
            return
        name, uid = _describe(pid)
        verb = "ran" if what == _EXEC else "began"
        if self._own and path == self._own and self._own != "/":
            # a copy of the daemon is about to be the launcher, and only that
            started = what == _FORK and name in ("ctxd", "python", "python3", "")
            if name not in HOUSE | _MOUNTING and not started and name not in _house_files():
                self._found.append(f"{name or pid} {verb} in the daemon's own cgroup")
        elif uid in self._uids and self._is_ours(parent or pid) and not self._in_leaf(path):
            self._found.append(f"{name or pid} (uid {uid}) {verb} in {path}, in no agent's leaf")

    def _is_ours(self, pid: int) -> bool:
        """Whether the cgroup of a process is below the daemon's root."""
        return (path_of(pid) or self._seen.get(pid, "")).startswith(f"{self._root}/")

    def _in_leaf(self, path: str) -> bool:
        below = path.removeprefix(f"{self._root}/")
        return below != path and "/agent-" in below

    def violations(self) -> list[str]:
        """What was seen until now. What the kernel could not tell is a violation too."""
        lost = ["events were lost: the machine was faster than this"] if self._lost else []
        return [*self._found, *lost]

    def stop(self) -> None:
        os.write(self._told, b".")
        self._thread.join()
        with contextlib.suppress(OSError):
            self._order(_IGNORE)
        self._socket.close()
        for fd in (self._wake, self._told):
            os.close(fd)


def _house_files() -> frozenset[str]:
    """Names that these have between exec and their first instructions."""
    return frozenset({"binder", "guard", "launcher"})


def _describe(pid: int) -> tuple[str, int]:
    """(name, uid) of a process; empty and -1 if it is gone."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        return name, os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return "", -1


@contextlib.contextmanager
def watched(
    root: Path, daemon: int, uids: frozenset[int] = frozenset()
) -> Iterator[Membership]:
    """A watch that is stopped in the end; the test is skipped aloud where there is none."""
    watch = Membership(root=root, daemon=daemon, uids=uids)
    try:
        watch.start()
    except Unavailable as error:
        pytest.skip(f"membership is not watched: {error}")
    try:
        yield watch
    finally:
        watch.stop()
