"""Starting processes: the only module that does.

A process is born in the cgroup that it is given, gets an environment and descriptors, and
inherits nothing else. Its program is one of the host or of ours, named by an absolute path;
no path is looked up in the view of an agent.

A caller outside of every agent is an operator, so the cgroup in which a process is born decides
what it may do. The daemon's own cgroup has only the daemon, binder and guard, and nothing else
even briefly: in every test that runs a daemon, tests/worlds/membership.py looks who was there, by
the kernel's events. The launcher serves owners in turn: however many starts an owner requests,
another owner waits for one of each.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import trio

from runtime.errors import KernelError
from runtime.kernel import orders
from runtime.kernel.cgroups import Cgroup
from runtime.kernel.lanes import Lanes
from runtime.texts.names import escape

_ANSWER_MAX: Final = 64
#: a launcher that does not answer is given up
_SECONDS: Final = 30.0


class Process:
    """A child of the daemon."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    async def wait(self) -> int:
        """Its exit status when it has ended, minus the number of a signal."""
        if self._status is None:
            with self._held() as fd:
                await trio.lowlevel.wait_readable(fd)
        return self._reap()

    def wait_now(self, seconds: float | None = None) -> int | None:
        """Its exit status, waited for in the way of everything else; None if it has not ended in
        time."""
        if self._status is None:
            with self._held() as fd:
                poller = select.poll()  # select(2) knows no descriptor above 1023
                poller.register(fd, select.POLLIN)
                if not poller.poll(None if seconds is None else seconds * 1000):
                    return None
        return self._reap()

    async def end(self, seconds: float) -> int | None:
        """Its status, if it ends in this time by itself, or then because of SIGTERM; else None.

        One that has asked somebody for something, such as a place in a queue, takes that back when
        it gets the signal. Killed at once it would leave it.
        """
        with trio.move_on_after(seconds):
            return await self.wait()
        self.kill(signal.SIGTERM)
        with trio.move_on_after(seconds):
            return await self.wait()
        return None

    def kill(self, number: int = signal.SIGKILL) -> None:
        # a child that nobody has waited for keeps its pid
        if self._status is None:
            os.kill(self.pid, number)

    @contextlib.contextmanager
    def _held(self) -> Iterator[int]:
        fd = os.pidfd_open(self.pid)
        try:
            yield fd
        finally:
            os.close(fd)

    def _reap(self) -> int:
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status


class Spawner:
    """Starts processes by a helper (launcher.c), which lives in a cgroup of its own.

    The daemon's main thread makes it and calls all of it that is not awaited: processes are
    told when that thread ends.
    """

    def __init__(self, program: Path, home: Cgroup) -> None:
        self._program = program
        self.home = home
        self._one_at_a_time = trio.Lock()
        #: of one owner no more than one waits for that: others come in between any two
        self._turns = Lanes[int]()
        self._begin()

    def _begin(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(_SECONDS)
        with theirs:
            self._launcher = subprocess.Popen(
                [str(self._program), str(theirs.fileno()), str(self.home.path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={},
            )
        # it has moved to its cgroup
        _parse(self._channel.recv(_ANSWER_MAX))

    async def start(
        self,
        leaf: Cgroup,
        words: Sequence[str | Path],
        *,
        owner: int,
        env: Mapping[str, str] | None = None,
        fds: Sequence[int | None] = (None, None, None),
    ) -> Process:
        """Starts a program in ``leaf`` for an owner, in its turn. It finds ``fds`` from 0 on, in
        this order, where None stands for /dev/null. ``OSError`` if it cannot be started."""
        async with self._turns.turn(owner), self._one_at_a_time:
            # not cancelled between question and answer: the next one would get it
            with trio.CancelScope(shield=True):
                self._ask(leaf, words, env or {}, fds)
                await trio.lowlevel.wait_readable(self._channel)
                answer = self._channel.recv(_ANSWER_MAX)
        return Process(_parse(answer))

    def start_now(
        self,
        leaf: Cgroup,
        words: Sequence[str | Path],
        *,
        fds: Sequence[int | None] = (None, None, None),
    ) -> Process:
        """Starts a program in the way of everything else: before the daemon serves, and after."""
        self._ask(leaf, words, {}, fds)
        return Process(_parse(self._channel.recv(_ANSWER_MAX)))

    def run_now(self, words: Sequence[str | Path], *fds: int, seconds: float | None = None) -> str:
        """The words of a helper, which finds ``fds`` from 3 on; ``KernelError`` with its complaint
        if it fails, or has not ended in time."""
        with contextlib.ExitStack() as stack:
            told = [os.memfd_create(name, os.MFD_CLOEXEC) for name in ("said", "complained")]
            for fd in told:
                stack.callback(os.close, fd)
            process = self.start_now(self.home, words, fds=[None, *told, *fds])
            status = process.wait_now(seconds)
            if status is None:
                process.kill()
            said, complained = (os.pread(fd, os.fstat(fd).st_size, 0) for fd in told)
        if status != 0:
            raise KernelError(complaint(complained) or "a process holds what it needs")
        return said.decode()

    def _ask(
        self,
        leaf: Cgroup,
        words: Sequence[str | Path],
        env: Mapping[str, str],
        fds: Sequence[int | None],
    ) -> None:
        data = orders.message(str(leaf), [f"{key}={env[key]}" for key in env], words)
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        try:
            passed = [null if fd is None else fd for fd in fds]
            try:
                socket.send_fds(self._channel, [data], passed)
            except (BrokenPipeError, ConnectionResetError):
                # somebody has killed it
                self._end()
                self._begin()
                socket.send_fds(self._channel, [data], passed)
        finally:
            os.close(null)

    def _end(self) -> None:
        self._channel.close()
        self._launcher.wait()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """While nothing is being started, and nothing is begun to be."""
        async with self._one_at_a_time:
            yield

    def close(self) -> None:
        """Closes the launcher; whatever was started goes on."""
        self._end()


async def reap_children(pids: Sequence[int]) -> None:
    """Waits for children that this program did not start, but the one that was executed before it
    in the same process."""

    async def reap(pid: int) -> None:
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                await trio.lowlevel.wait_readable(fd)
            finally:
                os.close(fd)
            os.waitpid(pid, os.WNOHANG)

    async with trio.open_nursery() as nursery:
        for pid in pids:
            nursery.start_soon(reap, pid)


def own_children() -> list[int]:
    """Pids of the children of this process, those that have ended too."""
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as listed:
            found += map(int, listed.read().split())
    return found


def complaint(said: bytes) -> str:
    """The words of a program of ours, as one line without the name that it begins with."""
    return escape(" ".join(said.decode(errors="replace").split())).removeprefix("ctxfs: ")


def _parse(answer: bytes) -> int:
    """The pid in an answer of the launcher; ``OSError``."""
    pid, _, error = answer.decode().partition(" ")
    if not error:
        raise BrokenPipeError("the launcher is gone")
    if int(error):
        raise OSError(int(error), os.strerror(int(error)))
    return int(pid)


def run_alone(words: Sequence[str | Path]) -> tuple[int, str]:
    """(exit status, what it said) of a program of the host that is run before there are
    cgroups, when there are no agents either."""
    done = subprocess.run(
        [str(word) for word in words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={},
        text=True,
        errors="replace",
        check=False,
    )
    return done.returncode, done.stdout.strip()
