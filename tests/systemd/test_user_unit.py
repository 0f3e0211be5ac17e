"""The units of contrib/systemd/user: ctxd without root, below a user's own systemd."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.systemd.service import SECONDS, systemctl
from tests.worlds.daemon import (
    TIMEOUT,
    Daemon,
    alive,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.ordinary import UID, as_user

HOME = Path("/home/ordinary")
RUN = Path(f"/run/user/{UID}")
APPS = Path(f"/sys/fs/cgroup/user.slice/user-{UID}.slice/user@{UID}.service/app.slice")
ENVIRONMENT = {
    "HOME": str(HOME),
    "XDG_RUNTIME_DIR": str(RUN),
    "PATH": "/usr/local/bin:/usr/bin:/bin",
}
UNITS = Path(__file__).parents[2] / "contrib" / "systemd" / "user"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=SECONDS, capture_output=True)


def as_ordinary(*command: str, check: bool = True) -> str:
    """What a command of the user says, standard error too."""
    done = subprocess.run(
        command, user=UID, group=UID, extra_groups=[], timeout=SECONDS, check=False,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
    assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stdout}"
    return done.stdout


class UserService(Daemon):
    """ctxd.service of the user."""

    def __init__(self) -> None:
        self.root = RUN / "ctx"

    def show(self, name: str) -> str:
        return as_ordinary("systemctl", "--user", "show", "-P", name, "ctxd").strip()

    @property
    def pid(self) -> int:
        return int(self.show("MainPID"))


@pytest.fixture(scope="module")
def user() -> Iterator[UserService]:
    _run("groupadd", "-g", str(UID), "ordinary")
    _run("useradd", "-u", str(UID), "-g", str(UID), "-d", str(HOME), "-m", "ordinary")
    # as it is elsewhere: udev opens the device to all; the interpreter may be root's
    _run("mknod", "-m", "666", "/dev/fuse.open", "c", "10", "229")
    _run("mount", "--bind", "/dev/fuse.open", "/dev/fuse")
    Path("/root").chmod(0o755)
    units = HOME / ".config" / "systemd" / "user"
    as_ordinary("mkdir", "-p", str(units))
    as_ordinary("cp", *map(str, UNITS.iterdir()), str(units))
    Path("/etc/systemd/system/systemd-logind.service").unlink()  # masked in this machine
    systemctl("daemon-reload")
    systemctl("start", f"user@{UID}.service")
    as_ordinary("systemctl", "--user", "enable", "--now", "ctxd")
    yield UserService()
    systemctl("stop", f"user@{UID}.service")
    assert not list(RUN.glob("ctx*"))


def test_agents_outlive_a_crash_in_the_cgroup_of_their_unit(user: UserService) -> None:
    until = "while ! grep -q go $CTX_SELF/meta.json 2>/dev/null; do sleep 0.05; done; echo seen"

    def begin() -> tuple[int, str]:
        agent = user.run("survivor", f"sh -c '{until}'")
        wait_status(agent, "busy", timeout=SECONDS)
        return int(read(agent, "pid")), read(agent, "cgroup").strip()

    pid, cgroup = as_user(begin)
    assert cgroup == f"{APPS}/ctxd-agents.service/user-{UID}/agent-survivor"
    os.kill(user.pid, 9)
    wait_until(
        lambda: (user.show("ActiveState"), user.show("NRestarts")) == ("active", "1"),
        "systemd restarts ctxd", SECONDS, 0.1,
    )
    assert alive(pid)

    def finish() -> str:
        agent = user.agent_dir("survivor")
        write(agent / "meta.json", '{"go": true}')
        wait_dead(agent, SECONDS)
        return read(agent, "out")

    assert as_user(finish) == "seen\n", "the sandbox finds the filesystem again"


def test_an_orderly_stop_and_start(user: UserService) -> None:
    def begin() -> None:
        wait_status(user.run("sleeper", "sleep 1000"), "busy", timeout=SECONDS)

    as_user(begin)
    as_ordinary("systemctl", "--user", "stop", "ctxd")
    assert not user.root.is_symlink()
    as_ordinary("systemctl", "--user", "start", "ctxd")
    assert as_user(lambda: read(user.agent_dir("sleeper"), "reason")) == "shutdown\n"


def test_stopping_the_agents_unit_ends_all(user: UserService) -> None:
    def begin() -> int:
        agent = user.run("last", "sleep 1000")
        wait_status(agent, "busy", timeout=SECONDS)
        return int(read(agent, "pid"))

    pid = as_user(begin)
    as_ordinary("systemctl", "--user", "stop", "ctxd-agents")
    assert not alive(pid)
    assert user.show("ActiveState") == "inactive"


def test_a_scope_of_its_own_is_enough(user: UserService) -> None:
    scope = ("systemd-run", "--user", "--scope", "--quiet", "-p", "Delegate=yes", "ctxd")
    assert "no cgroup is delegated" in as_ordinary("ctxd", check=False)
    daemon = subprocess.Popen(
        scope, user=UID, group=UID, extra_groups=[], stderr=subprocess.PIPE, text=True,
        env=ENVIRONMENT,
    )
    assert daemon.stderr is not None
    assert daemon.stderr.readline() == "ready\n"
    daemon.terminate()
    assert daemon.wait(TIMEOUT) == 0
    daemon.stderr.close()
