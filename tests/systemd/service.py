"""ctxd as systemd runs it, with the ways of tests/worlds/daemon.py of using it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from runtime.kernel import linux
from runtime.kernel.cgroups import Cgroup
from tests.worlds.daemon import TIMEOUT, Daemon, end_process, wait_until

DAEMON = "ctxd.service"
AGENTS = "ctxd-agents.service"
#: the program that the unit runs
CHECKOUT = Path("/opt/ctxfs")
#: for whatever is waited for; an emulated machine is slow
SECONDS = 4 * TIMEOUT if "CTXFS_VM" in os.environ else TIMEOUT


def systemctl(*arguments: str) -> str:
    """What it prints; it waits until the job is done."""
    done = subprocess.run(["systemctl", *arguments], capture_output=True, text=True,
                          timeout=SECONDS, check=False)
    assert done.returncode == 0, f"systemctl {' '.join(arguments)}: {done.stderr}"
    return done.stdout


class Service(Daemon):
    """ctxd.service, where its unit puts things."""

    def __init__(self) -> None:
        self.root = Path("/ctx")
        self.state = Path("/var/lib/ctxfs")
        self.runtime = Path("/run/ctxfs")
        self.cgroup = Cgroup(Path("/sys/fs/cgroup/system.slice", AGENTS))

    def show(self, name: str) -> str:
        return systemctl("show", "--value", "--property", name, DAEMON).strip()

    @property
    def pid(self) -> int:
        return int(self.show("MainPID"))

    def start(self) -> None:
        """Returns when systemd was told READY=1."""
        systemctl("reset-failed")  # what is counted against StartLimitBurst=
        systemctl("start", DAEMON)

    def stop(self) -> int:
        systemctl("stop", DAEMON)
        return int(self.show("ExecMainStatus"))

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone, and systemd is yet to start another."""
        end_process(pid := self.pid)
        wait_until(lambda: self.pid != pid, "systemd sees that ctxd is gone",
                   SECONDS)

    def wait_restarted(self, restarts: int) -> None:
        """Until systemd has started it that often by itself."""
        wanted = ("active", f"{restarts}")
        wait_until(
            lambda: (self.show("ActiveState"), self.show("NRestarts")) == wanted,
            f"systemd restarts ctxd (restart {restarts})",
            SECONDS,
        )

    def restart(self) -> None:
        """A crash, after which systemd starts it again by itself."""
        before = int(self.show("NRestarts"))
        self.kill()
        self.wait_restarted(before + 1)

    def mounts(self) -> list[str]:
        """Where the filesystem is mounted, and whatever else of the daemon's is."""
        points = [entry.point for entry in linux.read_mounts()]
        return [p for p in points if p == str(self.root) or p.startswith(f"{self.runtime}/")]
