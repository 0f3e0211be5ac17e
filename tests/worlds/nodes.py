"""Several daemons on this machine, as if each were a machine: a lead, and hosts at its nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from tests.worlds.daemon import Daemon, daemon_of, wait_until

#: as short as it may be: what waits for an end of it takes as long
LEASE: Final = "5s"
CTX: Final = Path(sys.executable).with_name("ctx")
#: what a shell does that places a child at n2, which is called so
PARENT: Final = (
    'cd "$CTX_ROOT/agent" && mkdir {0}.d && echo "node=n2" > {0}.d/placement &&'
    ' echo "sleep 1000" > {0}.d/exec && echo start > {0}.d/ctl && sleep 1000'
)


def peer(host: Daemon) -> list[str]:
    """The command that leads to a daemon."""
    return [str(CTX), "--root", str(host.root), "peer"]


def node(command: list[str], **more: Any) -> dict[str, Any]:
    """A node of whoever runs the tests."""
    users = {"root": "root"} if not Daemon.rootless else None
    return {
        "command": command,
        "as": "owner",
        "lease": LEASE,
        **({"users": users} if users else {}),
        **more,
    }


def through(command: list[str], script: str) -> list[str]:
    """A shell that has the command as ``"$@"``."""
    return ["/bin/sh", "-c", script, "node", *command]


class Lead:
    """A daemon with nodes."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon

    def rows(self) -> dict[str, dict[str, Any]]:
        done = self.daemon.ctx("nodes", "--json")
        assert done.returncode == 0, done.stderr
        return {row["name"]: row for row in json.loads(done.stdout)}

    def state(self, name: str = "n2") -> str:
        return str(self.rows()[name]["state"])

    def check(self, *names: str) -> tuple[int, str]:
        done = self.daemon.ctx("nodes", "check", *names)
        return done.returncode, done.stdout + done.stderr

    def use(self, name: str) -> None:
        """Has the link opened."""
        status, said = self.check(name)
        assert status == 0, said

    def is_reached(self, name: str = "n2") -> bool:
        """Whether the link is up, now that somebody has waited for it."""
        with suppress(subprocess.TimeoutExpired):
            self.check(name)
        return self.state(name) == "up"

    def wait_reached(self, name: str = "n2") -> None:
        """After whatever else has to be over, for minutes."""
        wait_until(lambda: self.is_reached(name), f"{name} is reached", timeout=120)

    def wait(self, state: str, name: str = "n2") -> None:
        wait_until(lambda: self.state(name) == state, f"the link to {name} is {state}")

    def engines(self) -> list[int]:
        """The pids of the commands, but of those that try what a key is for."""
        found = []
        for file in self.daemon.cgroup.path.glob("link/*/cgroup.procs"):
            if ".check-" in file.parent.name:
                continue
            with suppress(OSError):  # it is gone
                found += [int(pid) for pid in file.read_text().split()]
        return found


@contextmanager
def lead_of(nodes: Mapping[str, Any], config: str = "") -> Iterator[Lead]:
    """A daemon with these nodes."""
    with daemon_of(config=f"nodes: {json.dumps(nodes)}\n{config}") as daemon:
        yield Lead(daemon)


@contextmanager
def two(config: str = "", *, script: str = "", lease: str = LEASE) -> Iterator[tuple[Lead, Daemon]]:
    """A lead, and a host at its node n2, which is reached by a script if there is one."""
    with ExitStack() as stack:
        host = stack.enter_context(daemon_of(config=f"node_name: two\n{config}"))
        command = through(peer(host), script) if script else peer(host)
        lead = stack.enter_context(lead_of({"n2": node(command, lease=lease)}, "node_name: one\n"))
        yield lead, host
