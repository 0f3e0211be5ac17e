"""make test-systemd: boots a systemd of its own, runs the tests of this directory in it twice.

The machine is a systemd-nspawn container on an overlay of this machine's root, with the checkout
and its units installed. It is rebooted between the two runs. Everything is removed at the end;
should this program be killed, the kernel ends the machine with it.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from runtime.kernel.cgroups import Cgroup, unified_mount

CHECKOUT: Final = Path(__file__).resolve().parents[2]
PREFIX: Final = "ctxfs-machine-"
BOOT_SECONDS: Final = 60.0
TEST_SECONDS: Final = 420.0
_IN_MACHINE: Final = ("env", "-i", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                      "LANG=C.UTF-8")


class MachineError(Exception):
    """One sentence, with what the console said."""


class Machine:
    def __init__(self, base: Path, hierarchy: Path) -> None:
        self.name = f"{PREFIX}{os.getpid()}"
        self.console = base / "console"
        self.cgroup = Cgroup(hierarchy / self.name)
        self._hierarchy = hierarchy
        self._notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notices.bind(str(base / "notify"))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.cgroup.path.mkdir()
        # What is on other filesystems than the root is not in the overlay.
        binds = [sys.base_prefix] if os.stat(sys.base_prefix).st_dev != os.stat("/").st_dev else []
        with self.console.open("wb") as console:
            self._process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL"),
                    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
                    *("--propagation", "private", "sh", str(Path(__file__).with_name("boot.sh"))),
                    *(self.name, str(self.cgroup.path), str(self._hierarchy), str(CHECKOUT)),
                    *(sys.prefix, *binds),
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={**os.environ, "NOTIFY_SOCKET": str(self._notices.getsockname())},
                start_new_session=True,
            )
        self.wait_booted()

    def wait_booted(self) -> None:
        """Until its systemd says so, by way of systemd-nspawn."""
        deadline = time.monotonic() + BOOT_SECONDS
        assert self._process is not None
        try:
            while (notice := self._hear(self._process, deadline)) is not None:
                if b"READY=1" in notice:
                    return
            what = "ended"
        except TimeoutError:
            what = f"did not boot within {BOOT_SECONDS:.0f} s"
        said = self.console.read_text(errors="replace")
        raise MachineError(f"the machine {what}; it said:\n{said[-4000:]}")

    def _hear(self, process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
        """What the machine's systemd says next, such as after each reload: it stands still until
        that is heard. None once a process has ended."""
        ended = os.pidfd_open(process.pid)
        notices = self._notices.fileno()
        try:
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([notices, ended], [], [], left)
        finally:
            os.close(ended)
        if not ready:
            raise TimeoutError
        return self._notices.recv(4096) if notices in ready else None

    def command(self, *command: str) -> list[str]:
        """What runs a command in the machine's namespaces."""
        init = self.cgroup.child("payload", "init.scope").processes()[0]
        return ["nsenter", "--target", str(init), "--all", "--root", "--wd", *_IN_MACHINE, *command]

    def reboot(self) -> None:
        # what "systemctl reboot" comes to, without a login manager in between
        how = ("--no-block", "--job-mode=replace-irreversibly", "start", "reboot.target")
        # its systemd says READY=1 after each reload of the units as well
        while select.select([self._notices], [], [], 0)[0]:
            self._notices.recv(4096)
        subprocess.run(self.command("systemctl", *how), check=True, timeout=BOOT_SECONDS)
        self.wait_booted()

    def test(self, boot: int, arguments: list[str]) -> int:
        """pytest's exit status; a service, because an operator is in a cgroup of the machine."""
        run = ("systemd-run", "--quiet", "--pipe", "--wait", "--collect")
        where = ("--property=WorkingDirectory=/opt/ctxfs", f"--setenv=CTXFS_MACHINE={boot}")
        python = ("/opt/ctxfs/.venv/bin/python", "-m", "pytest", "-p", "no:cacheprovider")
        running = subprocess.Popen(
            self.command(*run, *where, *python, "-v", "tests/systemd", *arguments),
            stdin=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + TEST_SECONDS
        try:
            while self._hear(running, deadline) is not None:
                pass
        except TimeoutError:
            running.kill()
            raise MachineError(f"the tests took longer than {TEST_SECONDS:.0f} s") from None
        finally:
            running.wait()
        return running.returncode

    def close(self) -> None:
        """The kernel ends every process in it, and the mounts go with the last one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
        self._notices.close()
        remove(self.cgroup)


def remove(cgroup: Cgroup) -> None:
    """Whatever is in it."""
    if not cgroup.exists():
        return
    cgroup.kill()
    deadline = time.monotonic() + 10
    while not cgroup.remove():
        if time.monotonic() > deadline:
            raise MachineError(f"{cgroup.path} has processes that do not end")
        _wait_empty(cgroup)


def _wait_empty(cgroup: Cgroup) -> None:
    with (cgroup.path / "cgroup.events").open() as events:
        poller = select.poll()
        poller.register(events, select.POLLPRI)
        if "populated 1" in events.read():
            poller.poll(1000)


def remove_stale(hierarchy: Path) -> None:
    """What runs that were killed left: nobody is in it any more."""
    for path in (*hierarchy.glob(f"{PREFIX}*"), *Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        if Path("/proc", path.name.removeprefix(PREFIX).partition("-")[0]).exists():
            continue
        if hierarchy in path.parents:
            remove(Cgroup(path))
        else:
            shutil.rmtree(path)


@contextmanager
def machine() -> Iterator[Machine]:
    hierarchy = unified_mount()
    if hierarchy is None:
        raise MachineError("no cgroup v2 hierarchy is mounted")
    remove_stale(hierarchy)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-") as base:
        made = Machine(Path(base), hierarchy)
        try:
            made.start()
            yield made
        finally:
            made.close()


def main(arguments: list[str]) -> int:
    def interrupted(number: int, _: object) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        print("make test-systemd needs root and /dev/fuse", file=sys.stderr)
        return 1
    try:
        with machine() as booted:
            status = booted.test(1, arguments)
            if status == 0:
                booted.reboot()
                status = booted.test(2, arguments)
            return status
    except (MachineError, subprocess.TimeoutExpired) as error:
        print(f"make test-systemd: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
