"""A daemon of a test's own: its mount, state, runtime directory and cgroup."""

from __future__ import annotations

import errno
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.cgroups import Cgroup, unified_mount

TIMEOUT = 30.0
AGENT_UID = 61000
#: in the name of everything that this run of the tests makes
MARK = f"ctxtest-{os.getpid()}"
_numbers = itertools.count(1)


def wait_until(
    condition: Callable[[], object], what: str, timeout: float = TIMEOUT, interval: float = 0.005
) -> None:
    """For what gives no event to wait for; looks often and fails with a name."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what}")
        select.select([], [], [], interval)


class Daemon:
    """One ctxd. Start, stop and kill it as often as the test needs."""

    def __init__(self, *, config: str = "", env: Mapping[str, str] | None = None) -> None:
        #: added to the environment of the daemon, at each start
        self.env = dict(env or {})
        self.base = Path(tempfile.mkdtemp(prefix=f"{MARK}-", dir="/tmp"))
        self.base.chmod(0o755)
        self.root = self.base / "ctx"
        self.state = self.base / "state"
        self.runtime = self.base / "run"
        mount = unified_mount()
        assert mount is not None
        self.cgroup = Cgroup(mount / f"{MARK}-{next(_numbers)}")
        self.log = self.base / "log"
        self.arguments = [
            *("--mount", str(self.root), "--state", str(self.state)),
            *("--runtime", str(self.runtime), "--cgroup", str(self.cgroup.path)),
        ]
        if config:
            (self.base / "config.yaml").write_text(config)
            self.arguments += ["--config", str(self.base / "config.yaml")]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def command(self, *more: str) -> list[str]:
        return [sys.executable, "-W", "error", "-m", "ctxfs.daemon", *self.arguments, *more]

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

    def _begin(self) -> bytes:
        """What the daemon says until it is ready, or dead."""
        read_end, write_end = os.pipe()
        with open(self.log, "ab") as log:
            tee = subprocess.Popen(["tee", "-a", str(self.log)], stdin=subprocess.PIPE,
                                   stdout=write_end, stderr=log)
            os.close(write_end)
            self.process = subprocess.Popen(
                self.command(), stderr=tee.stdin, env={**os.environ, **self.env}
            )
            assert tee.stdin is not None
            tee.stdin.close()
        self._tee = tee
        self._stderr = read_end
        said = b""
        deadline = time.monotonic() + TIMEOUT
        while b"ready\n" not in said:
            left = max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([read_end], [], [], left)
            part = os.read(read_end, 4096) if readable else b""
            if not part:
                break
            said += part
        return said

    def _reap(self) -> int:
        assert self.process is not None
        status = self.process.wait(TIMEOUT)
        self.process = None
        os.close(self._stderr)
        self._tee.terminate()
        self._tee.wait()
        return status

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        assert self.process is not None
        self.process.terminate()
        return self._reap()

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
            return bool(select.select([fd], [], [], timeout)[0])
        finally:
            os.close(fd)

    def wait_killed(self, timeout: float = TIMEOUT) -> None:
        """Until the daemon has been killed by SIGKILL, not by this process."""
        assert self.has_ended(timeout), f"the daemon was not killed within {timeout} s"
        status = self._reap()
        said = self.log.read_text(errors="replace")
        assert status == -signal.SIGKILL, f"the daemon ended with {status}:\n{said}"

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
        shutil.rmtree(self.base)
        assert status == 0, f"SIGTERM ended the daemon with {status}:\n{said}"

    # using it

    def path(self, *parts: str) -> Path:
        return self.root.joinpath(*parts)

    def agent_dir(self, name: str) -> Path:
        return self.root / "agent" / f"{name}.d"

    def make(self, name: str, command: str = "", handoff: str = "", **files: str) -> Path:
        """A new agent with some of its files written."""
        directory = self.agent_dir(name)
        directory.mkdir()
        for file, text in files.items():
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
def daemon_of(**options: Any) -> Iterator[Daemon]:
    daemon = Daemon(**options)
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.close()


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


def read(directory: Path, file: str) -> str:
    return (directory / file).read_text()


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def end_process(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)
