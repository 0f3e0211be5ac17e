"""Everything that the rows run on, made for one bench and removed after it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final

from bench.measure import Sides
from runtime.errors import StartupError
from runtime.kernel import linux
from runtime.kernel.cgroups import Cgroup, find_root

_START_SECONDS: Final = 30.0
_END_SECONDS: Final = 60.0
#: names and attributes are kept as long as ctxd lets the kernel keep them
_TIMEOUT: Final = "3600"


class SettingError(Exception):
    """The bench cannot run here; one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where things are. The filesystems are mounted side by side, at one depth."""

    base: Path
    #: what the daemon makes its cgroups below
    cgroup: Cgroup
    #: pid of ctxd, a child of this process; 0 until it runs
    daemon: int = 0

    @property
    def ctx(self) -> Path:
        return self.base / "ctx"

    @property
    def tmpfs(self) -> Path:
        return self.base / "tmp"

    @property
    def minimal(self) -> Path:
        return self.base / "min"

    @property
    def kept(self) -> Path:
        """The minimal filesystem whose pages the kernel keeps."""
        return self.base / "kep"

    @property
    def backing(self) -> Path:
        """A directory of the filesystem that has the daemon's state."""
        return self.base / "bak"

    @property
    def state(self) -> Path:
        """On the same filesystem as the daemon's state: for databases to compare with."""
        return self.base / "db"


#: a row's sides; what undoes what they need is put on the stack
MakeSides = Callable[[Setting, ExitStack], Sides]


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
        connection.connect(str(path))
        return True
    return False


def _read_until_ready(
    errors: IO[bytes], process: subprocess.Popen[bytes], path: Path | None
) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        errors.seek(0)
        text = errors.read().decode(errors="replace")
        if "ready" in text.splitlines() or (path and _listens(path)):
            return
        if process.poll() is not None:
            raise SettingError(f"{process.args!r} ended: {text.strip() or process.returncode}")
        time.sleep(0.01)
    raise SettingError(f"{process.args!r} was not ready in {_START_SECONDS:g} seconds")


@contextmanager
def serving(
    command: list[str], errors: Path, path: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A server that says ``ready`` on standard error, or listens at a socket; ended by its pid with
    SIGTERM."""
    with open(errors, "w+b", buffering=0) as file:
        # ends with the bench even if that is killed; Ctrl-C reaches the bench alone
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,
            cwd=Path(__file__).parent.parent,
        )
        try:
            _read_until_ready(file, process, path)
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _unmount_below(base: Path) -> None:
    """What a server that was killed left mounted."""
    for entry in reversed(linux.read_mounts()):
        if Path(entry.point).is_relative_to(base):
            with contextlib.suppress(OSError):
                linux.unmount(Path(entry.point), linux.MNT_DETACH)


def _remove_cgroup(group: Cgroup) -> None:
    if not group.exists():
        return
    group.kill()
    deadline = time.monotonic() + _START_SECONDS
    while group.populated() and time.monotonic() < deadline:
        time.sleep(0.01)
    group.remove()


def _remove_tree(base: Path) -> None:
    _unmount_below(base)
    shutil.rmtree(base, ignore_errors=True)


def _raise_interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _own_cgroup(suffix: str) -> Cgroup:
    try:
        return Cgroup(find_root(Path(f"ctxbench-{os.getpid()}{suffix}"))[0])
    except StartupError as error:
        raise SettingError(str(error)) from None


def installed(program: str) -> str:
    path = Path(sys.executable).parent / program
    if not path.exists():
        raise SettingError(f"{path} is missing: run make setup")
    return str(path)


@contextmanager
def _with_daemon(setting: Setting, config: str = "") -> Iterator[Setting]:
    settings = setting.base / "config.yaml"
    settings.write_text(config)
    command = [installed("ctxd"), "--mount", str(setting.ctx), "--cgroup", str(setting.cgroup.path)]
    command += ["--state", str(setting.base / "state"), "--runtime", str(setting.base / "run")]
    command += ["--config", str(settings), "--log-level", "warning"]
    with serving(command, setting.base / "ctxd.log") as ctxd:
        yield replace(setting, daemon=ctxd.pid)


@contextmanager
def another_daemon(setting: Setting, config: str = "") -> Iterator[Setting]:
    """One that nobody used before, with nothing but its own mount, state, cgroup and settings."""
    base = Path(tempfile.mkdtemp(prefix="another-", dir=setting.base))
    with ExitStack() as stack:
        stack.callback(_remove_tree, base)
        base.chmod(0o755)
        cgroup = _own_cgroup(f"-{base.name}")
        stack.callback(_remove_cgroup, cgroup)
        own = Setting(base=base, cgroup=cgroup)
        yield stack.enter_context(_with_daemon(own, config))


@contextmanager
def prepared(*, many: int) -> Iterator[Setting]:
    """Starts ctxd and the filesystems to compare with, mounts a tmpfs. Raises ``SettingError``."""
    if os.geteuid() != 0:
        raise SettingError("the bench needs root: it mounts filesystems and starts ctxd")
    signal.signal(signal.SIGTERM, _raise_interrupt)
    with ExitStack() as stack:
        cgroup = _own_cgroup("")
        setting = Setting(base=Path(tempfile.mkdtemp(prefix="ctxbench-")), cgroup=cgroup)
        stack.callback(_remove_tree, setting.base)
        # agents have another uid and reach what they share with the daemon by its path
        setting.base.chmod(0o755)
        for directory in (
            setting.tmpfs,
            setting.minimal,
            setting.kept,
            setting.backing,
            setting.state,
        ):
            directory.mkdir()
        linux.mount("ctxbench", setting.tmpfs, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV)
        stack.callback(_remove_cgroup, cgroup)
        for name, point, words in (
            ("minimal", setting.minimal, ["--many", str(many)]),
            ("minimal", setting.kept, ["--keep-cache"]),
        ):
            server = [sys.executable, "-m", f"bench.reference.{name}", str(point)]
            server += ["--timeout", _TIMEOUT, *words]
            stack.enter_context(serving(server, setting.base / f"{point.name}.log"))
        yield stack.enter_context(_with_daemon(setting))
