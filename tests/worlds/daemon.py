"""A daemon of a test's own: its mount, state, runtime directory and cgroup."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from glob import glob
from pathlib import Path
from typing import Any, Final, TypeVar

from runtime.kernel.cgroups import Cgroup
from tests.worlds.membership import WATCH, Place
from tests.worlds.preloaded import PRELOADED, Forked
from tests.worlds.readiness import readable
from tests.worlds.whose import AGENT_UID as AGENT_UID
from tests.worlds.whose import HIERARCHY, IDS, ROOTLESS

T = TypeVar("T")
TIMEOUT = 30.0
#: seconds after which it is looked again
_LONGEST: Final = 0.25
#: in the name of everything that this run of the tests makes
MARK = f"ctxtest-{os.getpid()}"
_numbers = itertools.count(1)
#: daemons that were begun and not stopped since
begun: list[Daemon] = []
#: the tests in which nobody could tell who was in a daemon's cgroup, and it was looked who is
sampled: set[str] = set()


def wait_until(
    condition: Callable[[], object], what: str, timeout: float = TIMEOUT, interval: float = 0.005
) -> None:
    """For what gives no event to wait for; fails with a name.

    It looks again after ``interval`` seconds, and later after a tenth of what it has waited: each
    look costs the processor, which others need, and may be a request to the daemon.
    """
    begun = time.monotonic()
    while not condition():
        waited = time.monotonic() - begun
        if waited > timeout:
            raise AssertionError(f"not within {timeout} s: {what}")
        select.select([], [], [], max(interval, min(waited / 10, _LONGEST)))


class _Removals:
    """Directories that are removed beside the tests: of a file that has reached the disk each
    takes almost a millisecond, in which this process would wait and do nothing."""

    def __init__(self) -> None:
        self._begun: list[subprocess.Popen[bytes]] = []

    def begin(self, directory: Path) -> None:
        self._begun = [each for each in self._begun if each.poll() != 0]
        self._begun.append(subprocess.Popen(["rm", "-r", "--", str(directory)],
                                            stdin=subprocess.DEVNULL))

    def wait(self) -> None:
        """Until all are gone; fails if one cannot be removed."""
        while self._begun:
            each = self._begun.pop()
            assert each.wait(TIMEOUT) == 0, f"not removed: {each.args!r}"


#: of this run of the tests
REMOVALS: Final = _Removals()


class Daemon:
    """One ctxd. Start, stop and kill it as often as the test needs."""

    rootless = ROOTLESS
    #: whether its command is executed: the whole way, which costs three times as much
    executed = False
    #: what is run, and has a ``main``
    module = "ctxfs.daemon"
    #: for ``become_user``, of one that is not executed
    user: tuple[int, int] | None = None

    def __init__(self, *, config: str = "", env: Mapping[str, str] | None = None) -> None:
        #: added to the environment of the daemon, at each start
        self.env = dict(env or {})
        self.base = Path(tempfile.mkdtemp(prefix=f"{MARK}-", dir="/tmp"))
        self.base.chmod(0o755)
        self.root = self.base / "ctx"
        self.state = self.base / "state"
        self.runtime = self.base / "run"
        assert HIERARCHY is not None
        name = f"{MARK}-{next(_numbers)}"
        self.cgroup = Cgroup(HIERARCHY / name)
        #: the daemon's own, with nothing else of the machine in it
        self.own = Cgroup(HIERARCHY / f"{name}-own")
        self.log = self.base / "log"
        self.arguments = [
            *("--mount", str(self.root), "--state", str(self.state)),
            *("--runtime", str(self.runtime), "--cgroup", str(self.cgroup.path)),
        ]
        if config:
            (self.base / "config.yaml").write_text(config)
            self.arguments += ["--config", str(self.base / "config.yaml")]
        self.process: subprocess.Popen[bytes] | Forked | None = None
        #: what the kernel tells of its cgroups
        self.place: Place | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def command(self, *more: str) -> list[str]:
        return [sys.executable, "-W", "error", "-m", self.module, *self.arguments, *more]

    def start(self) -> None:
        """Returns when the daemon has said ``ready``."""
        said = self._begin()
        assert b"ready\n" in said, f"the daemon did not get ready: {said.decode()}"

    def start_or_die(self) -> bool:
        """Like ``start``; False if the daemon was killed before it was ready."""
        if b"ready\n" in self._begin():
            return True
        self.wait_killed()
        return False

    def _placed(self, command: list[str]) -> list[str]:
        """What becomes this command in the daemon's own cgroup."""
        self.own.path.mkdir(exist_ok=True)
        return ["sh", "-c", 'echo 0 > "$0/cgroup.procs" && exec "$@"', str(self.own.path), *command]

    def _leave(self) -> None:
        wait_until(self.own.remove, "nothing is left in the daemon's own cgroup")

    def strangers(self) -> list[str]:
        """What is in the daemon's own cgroup besides ctxd, binder and guard."""
        found = []
        ours = [str(self.runtime / "root" / "bin" / name) for name in ("binder", "guard")]
        for pid in self.own.processes():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                program = os.readlink(f"/proc/{pid}/exe")
                if pid != self.pid and program not in ours and alive(pid):
                    found.append(f"{pid} {program}")
        return found

    def guards(self) -> list[int]:
        """Those that end its connection to the kernel if it cannot; one, but for a moment."""
        found = []
        for pid in self.own.processes():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                stat = Path(f"/proc/{pid}/stat").read_text()
                parent = int(stat.rpartition(")")[2].split()[1])
                program = os.readlink(f"/proc/{pid}/exe")
                if program.endswith("/bin/guard") and parent == self.pid and alive(pid):
                    found.append(pid)
        return found

    def descriptors(self) -> list[str]:
        """What those of the daemon are, but for the real files that were used last, of which it
        keeps up to 512, for those in /proc of the 16 threads that asked last, and for the FIFOs of
        agents that have ended: it holds each for a second, however many there are
        (tests/unit/runtime/kernel/test_waits.py)."""
        found = []
        for fd in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(fd))
        kept = (*(f"{self.state}/{name}/" for name in ("agent", "home", "shared")),
                f"{self.runtime}/root/wait/")
        return [path for path in found if not path.startswith(kept)
                and not re.fullmatch("(/proc)?/[0-9]+/cgroup", path)]

    def kept(self, kind: str = "") -> int:
        """Bytes in the files of the state, or of its directories of that name; files and
        directories may be removed meanwhile."""
        size = 0
        for directory, _, names in os.walk(self.state):
            if kind in ("", os.path.basename(directory)):
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        size += os.lstat(os.path.join(directory, name)).st_size
        return size

    def check_own_cgroup(self) -> None:
        """Fails if anything else was in there since the last time, or a process of an agent in
        no agent's leaf. Where not everything was told it fails if anything stays there."""
        assert self.place is not None
        found = self.place.take()
        assert not found, "; ".join(found)
        if not self.place.is_blind():
            return
        self.place.look_again()
        sampled.add(os.environ.get("PYTEST_CURRENT_TEST", "no test").partition(" ")[0])
        if self.process is None:
            return
        # what is on its way has a moment to go
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.strangers(), "only ctxd is in its cgroup")
        assert not (found := self.strangers()), f"in the daemon's own cgroup: {found}"

    def _spawn(self, stderr: int) -> subprocess.Popen[bytes] | Forked:
        """The daemon, in a session of its own as a service, and told to the watch."""
        assert self.place is not None
        environment = {**os.environ, **self.env}
        if self.executed:
            process = subprocess.Popen(self._placed(self.command()), stderr=stderr,
                                       env=environment, start_new_session=True)
            self.place.pid = process.pid
            return process
        self.own.path.mkdir(exist_ok=True)
        forked = PRELOADED.fork(Daemon.command(self), environment, self.own.path, stderr,
                                self.user)
        WATCH.is_forked(self.place, forked.pid)
        PRELOADED.go()
        return forked

    def _begin(self) -> bytes:
        """What the daemon says until it is ready, or dead."""
        said = b""
        with open(self.log, "ab") as written, open(self.log, "rb") as log:
            log.seek(0, os.SEEK_END)
            # a reader that never waits: who does not read a pipe holds up who writes into it
            tee = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=written)
            if self.place is None:
                self.place = Place(WATCH, root=self.cgroup.path, own=self.own.path,
                                   programs=self.runtime / "root" / "bin", rootless=self.rootless)
                begun.append(self)
            assert tee.stdin is not None
            with tee.stdin, WATCH.beginning(self.place):
                self.process = self._spawn(tee.stdin.fileno())
            self._tee = tee

            def is_over() -> bool:
                nonlocal said
                ended = self.has_ended()
                said += log.read()
                return b"ready\n" in said or ended

            with contextlib.suppress(AssertionError):  # told by who asked
                wait_until(is_over, "it is ready")
        self.place.ready = b"ready\n" in said
        return said

    def _reap(self) -> int:
        assert self.process is not None
        status = self.process.wait(TIMEOUT)
        self.process = None
        try:
            self._tee.wait(0.2)  # the last words, too
        except subprocess.TimeoutExpired:  # what outlives it has its standard error
            self._tee.kill()
            self._tee.wait()
        assert self.place is not None
        found = self.place.take()
        assert not found, "; ".join(found)
        return status

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        assert self.process is not None and self.place is not None
        try:
            self.check_own_cgroup()
        finally:
            self.process.terminate()
            try:
                status = self._reap()
            finally:
                begun.remove(self)
                WATCH.forget(self.place)
                self.place = None
                self._leave()
        return status

    def kill(self) -> None:
        """SIGKILL: whatever it was doing."""
        assert self.process is not None
        self.process.kill()
        self._reap()

    def has_ended(self, timeout: float = 0.0) -> bool:
        """Whether the process ends in this time, by whatever."""
        process = self.process
        if process is None:
            return True
        try:
            fd = os.pidfd_open(process.pid)
        except ProcessLookupError:  # another thread has reaped it
            return True
        try:
            return bool(readable([fd], timeout))
        finally:
            os.close(fd)

    def wait_killed(self, timeout: float = TIMEOUT) -> None:
        """Until the daemon has been killed by SIGKILL, not by this process."""
        assert self.has_ended(timeout), f"the daemon was not killed within {timeout} s"
        status = self._reap()
        said = self.log.read_text(errors="replace")
        assert status == -signal.SIGKILL, f"the daemon ended with {status}:\n{said}"

    def abort(self) -> None:
        """Ends the kernel's connection to it, as its user can."""
        device = os.stat(self.root).st_dev
        if self.rootless:
            Path(f"/sys/fs/fuse/connections/{os.minor(device)}/abort").write_text("1")
        else:  # it is mounted elsewhere too, so that this fails, and aborts
            subprocess.run(["umount", "-f", str(self.runtime / "root" / "ctx")], check=False,
                           stderr=subprocess.DEVNULL)

    def restart(self) -> None:
        """After a crash."""
        self.kill()
        self.start()

    def close(self) -> None:
        """Stops, and removes what even a killed daemon left."""
        if self.process is None:
            self.start()
        status = self.stop()
        said = self.log.read_text(errors="replace")
        REMOVALS.begin(self.base)
        assert status == 0, f"SIGTERM ended the daemon with {status}:\n{said}"

    def monitors(self) -> list[int]:
        """Pids of the monitors, of whosever agents."""
        leaves = self.cgroup.path.glob("user-*/monitor")
        return [pid for leaf in leaves for pid in Cgroup(leaf).processes()]

    def processes_of(self, agents: str, program: str = "") -> list[int]:
        """What runs of agents whose names match, whatever the daemon says; of one program.

        Cgroups may be removed meanwhile, at which Path.glob fails.
        """
        paths = glob(f"{self.cgroup}/user-*/agent-{agents}")
        pids = [pid for path in paths for pid in Cgroup(path).processes()]
        return [pid for pid in pids if program in ("", name_of(pid))]

    # using it

    def path(self, *parts: str) -> Path:
        return self.root.joinpath(*parts)

    def agent_dir(self, name: str) -> Path:
        return self.root / "agent" / f"{name}.d"

    def make(self, name: str, command: str = "", handoff: str = "", **files: str) -> Path:
        """A new agent with some of its files written. Without root its owner is the user."""
        directory = self.agent_dir(name)
        directory.mkdir()
        for file, text in files.items():
            if file not in IDS:
                write(directory / file, text)
        if command:
            write(directory / "exec", command)
        if handoff:
            write(directory / "handoff.md", handoff)
        return directory

    def run(self, name: str, command: str, handoff: str = "", **files: str) -> Path:
        """A started agent."""
        directory = self.make(name, command, handoff, **files)
        write(directory / "ctl", "start")
        return directory

    def finish(self, name: str, command: str, handoff: str = "", **files: str) -> Path:
        """An agent that has run to its end."""
        directory = self.run(name, command, handoff, **files)
        wait_dead(directory)
        return directory

    def events(self, name: str) -> list[dict[str, Any]]:
        text = (self.agent_dir(name) / "session" / "events.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def error(self) -> str:
        return (self.root / "error").read_text()

    def ctx(self, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
        """The client, as a user runs it."""
        return subprocess.run(
            [sys.executable, "-IS", str(self.root / "bin" / "ctx"), *arguments],
            env={"CTX_ROOT": str(self.root), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
            text=True,
            capture_output=True,
            timeout=TIMEOUT,
            check=False,
            **{"stdin": subprocess.DEVNULL, **more},
        )


@contextmanager
def running(daemon: Daemon) -> Iterator[Daemon]:
    """Starts it, and takes away all that it made, also if it did not get ready in time."""
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.close()


def daemon_of(**options: Any) -> AbstractContextManager[Daemon]:
    return running(Daemon(**options))


def discarded(state: Path) -> list[Path]:
    """What is to be removed."""
    return list((state / "trash").glob("*/*"))


def write(path: Path, text: str) -> None:
    """What ``echo TEXT > FILE`` does; errors at write and close are raised."""
    data = text if text.endswith("\n") else text + "\n"
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(fd, data.encode())
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)


def refusal(path: Path, text: str) -> str:
    """The errno's name with which a write is refused."""
    try:
        write(path, text)
    except OSError as error:
        assert error.errno is not None
        return "EOPNOTSUPP" if error.errno == errno.EOPNOTSUPP else errno.errorcode[error.errno]
    return "accepted"


def wait_dead(directory: Path, timeout: float = TIMEOUT) -> None:
    """Waits as ``cat wait`` does, with a limit."""
    result = subprocess.run(["cat", str(directory / "wait")], timeout=timeout, check=False)
    assert result.returncode == 0, f"{directory}/wait could not be read"


def wait_status(directory: Path, *wanted: str, timeout: float = TIMEOUT) -> str:
    """Waits with poll(2) on ``status`` until it is one of ``wanted``."""
    fd = os.open(directory / "status", os.O_RDONLY)
    poller = select.poll()
    poller.register(fd, select.POLLPRI | select.POLLERR)
    deadline = time.monotonic() + timeout
    try:
        while (status := os.pread(fd, 100, 0).decode().strip()) not in wanted:
            left = deadline - time.monotonic()
            assert left > 0, f"{directory.name} is {status}, not {wanted}"
            poller.poll(left * 1000)
        return status
    finally:
        os.close(fd)


def persist(act: Callable[[], T]) -> T:
    """What it returns; done again while it is refused with EAGAIN: on a busy machine a look at
    processes, or a tree that is being made, takes longer than a request may wait."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            return act()
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        select.select([], [], [], 0.01)


def read(directory: Path, file: str) -> str:
    def told() -> bytes:
        with open(directory / file, "rb", buffering=0) as opened:
            if (data := opened.read()) is None:
                raise BlockingIOError(errno.EAGAIN, "try again", str(directory / file))
            return data

    return io.StringIO(persist(told).decode(), newline=None).read()


def name_of(pid: int) -> str | None:
    """The name by which the kernel knows it; None if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except (FileNotFoundError, ProcessLookupError):
        return None


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def end_process(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)
