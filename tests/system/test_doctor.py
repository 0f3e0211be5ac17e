"""Machines that lack something: ctxd refuses to start, and ctx doctor says the same and fails."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil
import pytest

from runtime.kernel import cgroups
from tests.worlds.daemon import TIMEOUT, Daemon, wait_until

_CTX: Final = str(Path(sys.executable).with_name("ctx"))

#: what a mount namespace is made into; $1 is an empty directory
#: a directory with all of this machine, into which chroot(8) leads
_CHROOT: Final = """
for path in /*; do
    if [ -L "$path" ]; then cp -P "$path" "$new/"
    elif [ -d "$path" ]; then mkdir "$new$path"; mount --rbind "$path" "$new$path"
    fi
done
set -- chroot "$new" "$@"
"""
#: what a machine is made into, in a mount namespace, with $cgroup, where cgroup v2 is mounted, an
#: empty cgroup $other, and the empty directory $new; then what ctxd and the doctor say
_MACHINES: Final = {
    "no device": (
        "mount -t tmpfs none /dev; mknod /dev/null c 1 3",
        "/dev/fuse is missing: load the module (modprobe fuse), or give it to the container "
        "(podman run --device /dev/fuse)",
    ),
    "no cgroups": ("umount -a -t cgroup2", "no cgroup v2 hierarchy is mounted: "),
    "read-only cgroups": (
        "mount -o remount,bind,ro $cgroup",
        "not permitted to use this cgroup (Read-only file system): ",
    ),
    "other cgroups": ("mount --bind $other $cgroup", " in /proc/self/cgroup is not below "),
    "masked proc": (
        "mount --bind $new /proc/fs",
        "cannot make a sandbox here (the agent's view: proc: Operation not permitted): ",
    ),
    "no rights": (
        "less=-sys_admin,-sys_ptrace\n"
        'set -- setpriv --bounding-set=$less --inh-caps=$less "$@"',
        "root has no SYS_PTRACE, SYS_ADMIN here (capabilities(7)): start ctxd with them; in a "
        "container: podman run --cap-add SYS_PTRACE,SYS_ADMIN",
    ),
    "chroot": (_CHROOT, "/ is not a mount point, as in a chroot(8): "),
    "bound chroot": ("mount --bind $new $new\n" + _CHROOT, "cannot make a sandbox here ("),
    "no mtab": (
        "cp /etc/passwd $new; mount --bind $new /etc\n"
        'set -- unshare --user --map-user=1 --map-group=1 "$@"',
        "/etc/mtab is missing, without which fusermount3 unmounts nothing",
    ),
}


@pytest.fixture
def stopped() -> Iterator[Daemon]:
    """A daemon that has not been started."""
    daemon = Daemon()
    yield daemon
    shutil.rmtree(daemon.base, ignore_errors=True)


#: in every run of the tests
_OFTEN = ("no device", "masked proc")


@pytest.mark.parametrize("machine", [
    pytest.param(machine, marks=[] if machine in _OFTEN else pytest.mark.long)
    for machine in _MACHINES
])
def test_the_doctor_fails_where_ctxd_does(stopped: Daemon, tmp_path: Path, machine: str) -> None:
    becomes, complaint = _MACHINES[machine]
    tmp_path.chmod(0o755)
    mount = cgroups.unified_mount()
    assert mount is not None
    other = cgroups.Cgroup(mount / f"{stopped.cgroup.path.name}-other")
    other.create(())
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "CTX_ROOT": str(stopped.root)}
    environment |= {"cgroup": str(mount), "other": str(other)}
    try:
        for command in (stopped.command(), [_CTX, "doctor"]):
            new = tmp_path / str(len(command))
            new.mkdir(mode=0o755)
            done = subprocess.run(
                ["unshare", "--mount", "--propagation", "private",
                 "sh", "-euc", f'{becomes}\nexec "$@"', "sh", *command],
                capture_output=True, text=True, timeout=2 * TIMEOUT, check=False,
                env={**environment, "new": str(new)},
            )  # fmt: skip
            assert done.returncode == 1, done
            if command[0] == _CTX:
                failed = [line for line in done.stdout.split("\n") if line.startswith("FAIL  ")]
                assert any(complaint in line for line in failed), done.stdout
            else:
                assert done.stderr.startswith("ctxd: ") and complaint in done.stderr
                assert done.stderr.count("\n") == 1
    finally:
        other.remove()


#: only who is not root mounts by it
_WITHOUT: Final = 'mount --bind /dev/null "$(command -v fusermount3)" && exec "$@"'


@pytest.mark.parametrize(
    "before",
    [
        pytest.param([], id="with all"),
        pytest.param(
            ["unshare", "--mount", "sh", "-c", _WITHOUT, "sh"], id="without fusermount3",
            marks=pytest.mark.skipif(Daemon.rootless, reason="needs root"),
        ),
    ],
)  # fmt: skip
def test_the_doctor_tries_a_ctxd_and_an_agent(stopped: Daemon, before: list[str]) -> None:
    environment = {**os.environ, "CTX_ROOT": str(stopped.root)}
    done = subprocess.run(
        [*before, _CTX, "doctor"],
        capture_output=True, text=True, timeout=2 * TIMEOUT, check=False, env=environment,
    )  # fmt: skip
    assert "ok    ctxd starts here, and runs an agent and a child of it\n" in done.stdout
    assert done.returncode == 0 and "FAIL" not in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_the_ctxd_of_a_doctor_that_is_ended(
    stopped: Daemon, number: signal.Signals
) -> None:
    environment = {**os.environ, "CTX_ROOT": str(stopped.root)}
    mount = cgroups.unified_mount()
    assert mount is not None
    with subprocess.Popen([_CTX, "doctor"], stdout=subprocess.DEVNULL, env=environment,
                          process_group=0) as doctor:  # fmt: skip
        tried: list[psutil.Process] = []

        def has_begun() -> bool:
            with contextlib.suppress(psutil.Error):  # one of them has ended meanwhile
                children = psutil.Process(doctor.pid).children(recursive=True)
                tried[:] = [each for each in children if "--mount" in each.cmdline()]
            return bool(tried)

        wait_until(has_begun, "a ctxd is tried", 4 * TIMEOUT)
        words = tried[0].cmdline()
        place = Path(words[words.index("--mount") + 1]).parent
        os.killpg(doctor.pid, number)
    wait_until(lambda: not place.exists(), "its directory is gone", 4 * TIMEOUT)
    assert not tried[0].is_running()
    assert not (mount / place.name).exists()
