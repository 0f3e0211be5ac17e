"""A daemon of an ordinary user, on a machine such as ordinary users have.

What a bare machine may lack is there in a mount namespace: shared mounts, as
systemd makes them; a name for the user; FUSE and its connections for everybody;
a way to the interpreter. Nothing of that shows outside.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest

from tests.worlds.daemon import Daemon
from tests.worlds.preloaded import become_user
from tests.worlds.whose import ROOTLESS

T = TypeVar("T")
#: none of those that ctxfs itself has (contrib/systemd/sysusers.conf)
UID: Final = 61099
IDS: Final = ("setpriv", "--reuid", str(UID), "--regid", str(UID), "--clear-groups")

#: $1 where its own things are, $2 the uid, $3 propagation, $4 whether fusectl is there,
#: $5 directories that are closed to others, then "--" and what is needed of them
_MACHINE: Final = """
mount --make-rprivate /
mkdir "$1" && mount -t tmpfs -o mode=755 none "$1"
mknod -m 666 "$1/fuse" c 10 229 && mount --bind "$1/fuse" /dev/fuse
cp /etc/passwd "$1/passwd"
echo "ordinary:x:$2:$2::/:/bin/sh" >> "$1/passwd"
mount --bind "$1/passwd" /etc/passwd
umount /sys/fs/fuse/connections 2>/dev/null || true
if [ "$4" = yes ]; then mount -t fusectl none /sys/fs/fuse/connections; fi
own=$1 propagation=$3 number=0
shift 4
closed=
while [ "$1" != -- ]; do closed="$closed $1"; shift; done
shift
for needed in "$@"; do
    number=$((number + 1))
    mkdir "$own/$number" && mount --bind "$needed" "$own/$number"
done
for directory in $closed; do mount -t tmpfs -o mode=755 none "$directory"; done
number=0
for needed in "$@"; do
    number=$((number + 1))
    mkdir -p "$needed" && mount --bind "$own/$number" "$needed"
done
mount "--make-r$propagation" /
echo made
exec cat
"""


def as_user(function: Callable[[], T], *, machine: int | None = None) -> T:
    """What a function returns or raises in a process of the user, in the mount
    namespace of another process."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _become_user(function, machine, write_end)
    os.close(write_end)
    with open(read_end, "rb") as answer:
        data = answer.read()
    os.waitpid(pid, 0)
    outcome, error, trace = pickle.loads(data)
    if error is not None:
        error.add_note(trace)
        raise error
    return outcome  # type: ignore[no-any-return]


def _become_user(function: Callable[[], Any], machine: int | None, write_end: int) -> None:
    answer: tuple[Any, BaseException | None, str]
    try:
        become_user(machine, UID)
        os.chdir("/")
        answer = function(), None, ""
    except BaseException as error:
        answer = None, error, traceback.format_exc()
    try:
        data = pickle.dumps(answer)
    except Exception:
        data = pickle.dumps((None, AssertionError(answer[2] or repr(answer[0])), answer[2]))
    try:
        with open(write_end, "wb") as file:
            file.write(data)
    finally:
        os._exit(0)


def delegate(*cgroups: Path) -> None:
    """What an administrator does: makes cgroups for the user."""
    for path in cgroups:
        path.mkdir()
        for owned in (path, *map(path.joinpath, ("cgroup.procs", "cgroup.subtree_control"))):
            os.chown(owned, UID, UID)


def make_machine(
    own: Path, propagation: str = "shared", fusectl: str = "yes"
) -> subprocess.Popen[bytes]:
    """A process whose mounts they are; ends with its input."""
    checkout = Path(__file__).parents[2]
    needed = []
    closed = set()
    for path in {Path(sys.base_prefix), Path(sys.prefix).resolve(), checkout}:
        ways = (p for p in (*reversed(path.parents), path) if not p.stat().st_mode & 0o001)
        if (first := next(ways, None)) is not None:
            closed.add(str(first))
            needed.append(str(path))
    machine = subprocess.Popen(
        [
            *("unshare", "--mount", "--propagation", "private", "sh", "-euc", _MACHINE, "sh"),
            *(str(own), str(UID), propagation, fusectl, *sorted(closed), "--", *sorted(needed)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert machine.stdout is not None
    assert machine.stdout.readline() == b"made\n"
    return machine


def on_machine(
    machine: subprocess.Popen[bytes], *command: str, cgroup: Path | None = None,
    ids: Sequence[str] = IDS,
) -> list[str]:
    """What becomes a command of the user there, in a cgroup."""
    enter = ["nsenter", f"--mount=/proc/{machine.pid}/ns/mnt", "--"]
    if cgroup is not None:
        enter += ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(cgroup)]
    return [*enter, *ids, *command]


class OrdinaryDaemon(Daemon):
    """One ctxd of an ordinary user, with the places and the cgroup that it finds itself."""

    rootless = True

    def __init__(self, *, config: str = "", propagation: str = "shared", fusectl: str = "yes"):
        if ROOTLESS:
            pytest.skip("needs root: it makes a machine for a user")
        super().__init__()
        self.home = self.base / "home"
        self.run_dir = self.base / "run-user"
        for path in (self.home, self.run_dir):
            path.mkdir(mode=0o700)
            os.chown(path, UID, UID)
        self.runtime = self.run_dir / "ctxfs"
        self.root = self.run_dir / "ctx"
        self.state = self.home / ".local" / "state" / "ctxfs"
        self.own = self.cgroup.child("daemon")
        self.arguments = []
        self.env = {
            "HOME": str(self.home),
            "XDG_RUNTIME_DIR": str(self.run_dir),
            "XDG_STATE_HOME": "",
            "XDG_CONFIG_HOME": "",
        }
        if config:
            file = self.home / ".config" / "ctxfs" / "config.yaml"
            file.parent.mkdir(parents=True)
            file.write_text(config)
        delegate(self.cgroup.path, self.cgroup.path / "daemon")
        self._machine = make_machine(self.base / "machine", propagation, fusectl)
        self.user = self._machine.pid, UID

    def _placed(self, command: list[str]) -> list[str]:
        return command

    def _leave(self) -> None:
        """It is delegated, and stays."""

    def command(self, *more: str) -> list[str]:
        return self.run_as_user(*super().command(*more), cgroup=self.cgroup.path / "daemon")

    def run_as_user(
        self, *command: str, cgroup: Path | None = None, ids: Sequence[str] = IDS
    ) -> list[str]:
        """What becomes a command of the user on that machine, in a cgroup."""
        return on_machine(self._machine, *command, cgroup=cgroup, ids=ids)

    def do(self, function: Callable[[], T]) -> T:
        """What a function returns or raises in a process of the user, outside of all agents."""
        return as_user(function, machine=self._machine.pid)

    def is_mounted(self) -> bool:
        """Whether the filesystem is, on the user's machine; without a request to it."""
        mounts = Path(f"/proc/{self._machine.pid}/mountinfo").read_text()
        return f" {self.runtime}/root/ctx " in mounts

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._machine.communicate()
            self.cgroup.remove()


class AskedDaemon(OrdinaryDaemon):
    """One whose user runs the client."""

    def ctx(self, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
        return self.do(lambda: super(AskedDaemon, self).ctx(*arguments, **more))


class HomeDaemon(AskedDaemon):
    """One whose user has a home, with what ssh(1) looks for there."""

    def __init__(self, *, config: str = "") -> None:
        super().__init__(config=config)
        self.keys = self.home / ".ssh"
        self.keys.mkdir(mode=0o700)
        os.chown(self.keys, UID, UID)
        # ssh(1) looks for it there, rather than in HOME
        named = f"sed 's|^ordinary.*|ordinary:x:{UID}:{UID}::{self.home}:/bin/sh|' /etc/passwd"
        script = f'new=$({named}) && echo "$new" > /etc/passwd'
        enter = ["nsenter", f"--mount=/proc/{self._machine.pid}/ns/mnt"]
        subprocess.run([*enter, "sh", "-c", script], check=True)

    def note(self, name: str, text: str) -> None:
        """A file in the user's ``~/.ssh``."""
        (self.keys / name).write_text(text)
        os.chown(self.keys / name, UID, UID)


@contextmanager
def ordinary_daemon(**options: Any) -> Iterator[OrdinaryDaemon]:
    daemon = OrdinaryDaemon(**options)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.close()
