"""A process that has imported ctxd, and forks into one when it is told to.

Most of what a daemon's start costs is the interpreter and its imports: 0.25 of 0.35 s of the
processor, a thousand times in a run of the tests. What is done here by fork(2) instead of
execve(2) is the same otherwise: its session, cgroup, environment, arguments and descriptors are
its own, and it runs ``main`` and leaves by it as ``python -m ctxfs.daemon`` does; a daemon of an
ordinary user has that user's ids and mounts, too. The tests of starting
(tests/system/test_startup.py) execute it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import ctxfs.daemon  # noqa: F401 - what is forked has it
from ctxfs.program import program
from tests.worlds.readiness import readable

_STATUS: Final = struct.Struct("=i")
_CLONE_NEWNS: Final = 0x20000
_PR_SET_DUMPABLE: Final = 4
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
#: what a daemon is told fits
_MOST: Final = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """What a daemon is to be; its descriptors come beside it."""

    command: list[str]
    environment: dict[str, str]
    cgroup: str
    #: a process whose mounts it has, and the uid; else those of the tests
    user: tuple[int, int] | None


class Forked:
    """A daemon; what the tests use of ``subprocess.Popen``."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._status = status
        self._lock = threading.Lock()
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        with self._lock:
            if self.returncode is None:
                with suppress(ProcessLookupError):  # it has ended by itself
                    signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Its status, as ``Popen`` tells it."""
        with self._lock:
            if self.returncode is None:
                if not readable([self._status], timeout):
                    raise subprocess.TimeoutExpired("ctxd", timeout or 0.0)
                told = os.read(self._status, _STATUS.size)
                assert told, "the process that daemons are forked from is gone"
                self.returncode = _STATUS.unpack(told)[0]
                os.close(self._status)
                os.close(self._pidfd)
            return self.returncode


class Preloaded:
    """One for all daemons of this process; begins with the first of them."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._go = -1

    def fork(
        self, command: Sequence[str], environment: Mapping[str, str], cgroup: Path, stderr: int,
        user: tuple[int, int] | None,
    ) -> Forked:
        """It does nothing until ``go``, so that it can be watched before."""
        with self._lock:
            if self._process is None:
                self._start()
            waits, self._go = os.pipe()
            status, told = os.pipe()
            order = _Order(command=list(command), environment=dict(environment),
                           cgroup=str(cgroup), user=user)
            socket.send_fds(self._socket, [pickle.dumps(order)], [stderr, waits, told])
            os.close(waits)
            os.close(told)
            answer = self._socket.recv(_STATUS.size)
            assert answer, "the process that daemons are forked from is gone"
            return Forked(_STATUS.unpack(answer)[0], status)

    def go(self) -> None:
        """For the last that was forked."""
        os.close(self._go)

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            )

    def stop(self) -> None:
        if self._process is not None:
            self._socket.close()
            self._process.wait()
            self._process = None


#: of this run of the tests
PRELOADED: Final = Preloaded()


def become_user(machine: int | None, uid: int) -> None:
    """Has the mounts of another process, if there is one, and the ids of a user, from now on."""
    if machine is not None:
        fd = os.open(f"/proc/{machine}/ns/mnt", os.O_RDONLY)
        if _LIBC.setns(fd, _CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(fd)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    # as after execve(2): its files in /proc are its own
    _LIBC.prctl(_PR_SET_DUMPABLE, 1)


# the process itself


def _serve(orders: socket.socket) -> None:
    """Returns when nobody is left who could order anything; leaves by ``SystemExit`` in what
    it forked."""
    #: by descriptor of the process: its pid, and where its status is told
    forked: dict[int, tuple[int, int]] = {}
    while True:
        for ready in readable([orders.fileno(), *forked]):
            if ready == orders.fileno():
                data, fds, _, _ = socket.recv_fds(orders, _MOST, 3)
                if not data:
                    return
                stderr, waits, told = fds
                pid = os.fork()
                if pid == 0:
                    orders.close()
                    _become(pickle.loads(data), stderr, waits)
                os.close(stderr)
                os.close(waits)
                forked[os.pidfd_open(pid)] = pid, told
                orders.send(_STATUS.pack(pid))
            else:
                pid, told = forked.pop(ready)
                os.close(ready)
                _, status = os.waitpid(pid, 0)
                with suppress(BrokenPipeError):  # nobody asks any more
                    os.write(told, _STATUS.pack(os.waitstatus_to_exitcode(status)))
                os.close(told)


def _become(order: _Order, stderr: int, waits: int) -> NoReturn:
    os.setsid()
    os.dup2(stderr, 2)
    Path(order.cgroup, "cgroup.procs").write_text("0")
    os.read(waits, 1)
    os.closerange(3, 1 << 16)
    if order.user is not None:
        become_user(*order.user)
    os.environ.clear()
    os.environ.update(order.environment)
    # as ``python -W error -m MODULE`` finds them
    sys.orig_argv[:] = order.command
    name, *arguments = order.command[order.command.index("-m") + 1:]
    module = importlib.import_module(name)
    sys.argv[:] = [str(module.__file__), *arguments]
    sys.exit(module.main())


if __name__ == "__main__":
    program()  # kept: each daemon would compile the client anew
    gc.collect()
    gc.freeze()  # or each daemon's first collection would copy all of these pages
    with socket.socket(fileno=int(sys.argv[1])) as told:
        _serve(told)
