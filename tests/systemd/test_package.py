"""The package of make deb, from its installation to its removal.

The tests are the chapters of one story, in this order.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from runtime.kernel.cgroups import Cgroup
from tests.systemd.service import AGENTS, CHECKOUT, DAEMON, SECONDS, Service, systemctl
from tests.worlds.daemon import alive, read, wait_dead, wait_status, wait_until, write
from tests.worlds.reexecution import TURN, all_that_goes_on, clients_of

STATE: Final = "/var/lib/ctxfs"
#: whose daemon is there, too, when the package goes
USER: Final = 4321
#: where what is installed, kept or running could leave files
PLACES: Final = ("/etc", "/lib", "/root", "/run", "/usr", "/var")
#: of dpkg, of systemd, the cache of the linker, and of shells of the machine below
THEIRS: Final = re.compile(
    r"/var/(cache|log|lib/(apt|dpkg|systemd|PackageKit))/|/run/(systemd|log|credentials|dbus)/"
    r"|/root/\.[a-z_]+_history|/etc/ld\.so\.cache|(?!.*ctxfs).*/__pycache__(/|$)"
)
#: ends when the operator writes "go" into its meta.json, which it can see when /ctx works
UNTIL_GO: Final = "while ! grep -q go $CTX_SELF/meta.json 2>/dev/null; do sleep 0.05; done"


def run(*command: str, path: str = "/usr/sbin:/usr/bin:/sbin:/bin") -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=4 * SECONDS,
        check=False, env={"PATH": path, "LANG": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"},
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


def apt(*arguments: str) -> str:
    return run("apt-get", "-y", "--no-install-recommends", *arguments)


def there() -> set[str]:
    """All paths that could be of ctxfs, or be left by it."""
    found = {path for path in ("/ctx",) if os.path.lexists(path)}
    for place in PLACES:
        for directory, names, files in os.walk(place):
            paths = {os.path.join(directory, name) for name in (*names, *files)}
            found |= {path for path in paths if not THEIRS.match(path)}
    return found


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """The machine without what the other tests had put there, and the unit of the package."""
    systemctl("stop", AGENTS)
    # also those of the proxies, which name the unit of the daemon
    systemctl("stop", "ctxfs-*")
    for unit in list(Path("/etc/systemd/system").rglob("ctx*")):
        if unit.is_dir():
            shutil.rmtree(unit)
        else:
            unit.unlink(missing_ok=True)
    for wanted in Path("/etc/systemd/system").glob("*.wants"):
        if not any(wanted.iterdir()):
            wanted.rmdir()
    Path("/usr/local/bin/ctxd").unlink()
    for directory in (STATE, "/etc/ctxfs"):
        shutil.rmtree(directory, ignore_errors=True)
    # of images for containers: that packages may stop no service
    Path("/usr/sbin/policy-rc.d").unlink(missing_ok=True)
    systemctl("daemon-reload")
    yield Service()


@pytest.fixture(scope="module")
def before(service: Service) -> set[str]:
    return there()


@pytest.fixture(scope="module")
def first() -> Path:
    (package,) = CHECKOUT.glob("ctxfs_*.deb")
    return package


@pytest.fixture(scope="module")
def second(first: Path) -> Path:
    """A later version of the package, the daemon of which says so."""
    with tempfile.TemporaryDirectory() as work:
        run("dpkg-deb", "--raw-extract", str(first), work)
        control = Path(work, "DEBIAN/control")
        control.write_text(re.sub("(?m)^Version: .*", "Version: 9.0", control.read_text()))
        (version,) = Path(work).glob("usr/lib/ctxfs/lib/*/site-packages/runtime/runtime.py")
        text = version.read_text()
        assert 'VERSION = "0.2.0"' in text
        version.write_text(text.replace('VERSION = "0.2.0"', 'VERSION = "9.0"'))
        package = CHECKOUT / "second.deb"
        run("dpkg-deb", "--root-owner-group", "--build", work, str(package))
    return package


def version(service: Service) -> str:
    """Which daemon answers; nothing while none does."""
    try:
        found = re.search(r"(?m)^version=(.*)", (service.root / "status").read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def test_installing_and_enabling_is_all(service: Service, before: set[str], first: Path) -> None:
    apt("install", str(first))
    assert service.show("ActiveState") == "inactive", "an administrator says when"
    assert service.show("UnitFileState") == "disabled"
    systemctl("enable", "--now", "ctxd")
    assert service.show("UnitFileState") == "enabled"
    assert "ExecStart={ path=/usr/bin/ctxd ;" in systemctl("show", "--property=ExecStart", DAEMON)
    said = run("ctx", "spawn", "hello", "--wait", "--rm", "--", "echo", "hello")
    assert said.startswith("hello\n")
    for user, uid in (("ctxfs", 61000), ("ctxfs-link", 61002)):
        assert pwd.getpwnam(user)[2:4] == (uid, uid)
    # the first was there already
    for user in ("ctxfs-relay", "ctxfs-meter", "ctxfs-web", "ctxfs-hook"):
        assert pwd.getpwnam(user).pw_shell == "/usr/sbin/nologin"
    assert run("ctx", "spawn", "who", "--wait", "--rm", "--", "id", "-un").startswith("ctxfs\n")
    assert Path(STATE).stat().st_mode & 0o777 == 0o700
    assert run("ctxd", "--version") == "ctxd 0.2.0\n"
    recipes = run("ctx", "agents")
    assert {"claude", "codex", "gemini"} <= set(recipes.split())


def test_no_agent_ends_by_an_upgrade(service: Service, second: Path, tmp_path: Path) -> None:
    """And nobody who reads and sends without pause meets an error."""
    agent = service.run("survivor", f"sh -c '{UNTIL_GO}; echo found > $CTX_SELF/result.md'")
    parent = service.run("parent", "sh -c 'ctx spawn child -- sleep 1000; sleep 1000'")
    child = service.agent_dir("child")
    wait_until(child.exists, "the child is made")
    agents = (agent, parent, child)
    for one in agents:
        wait_status(one, "busy")
    turn = service.run("taking-turns", TURN, mode="turn")
    wait_status(turn, "idle")
    pids, main = [read(one, "pid") for one in agents], service.pid
    waiting = subprocess.Popen(["cat", str(agent / "wait")])
    try:
        with (
            all_that_goes_on(service, tmp_path, times=1),
            clients_of(service, child, "taking-turns") as clients,
        ):
            clients.go_on(20)
            apt("install", str(second))
            assert version(service) == "9.0", "the daemon of the second package answers"
            clients.go_on(20)
        assert service.pid == main
        assert [read(one, "pid") for one in agents] == pids
        assert [read(one, "status") for one in agents] == ["busy\n"] * 3
        assert waiting.poll() is None
        write(agent / "meta.json", '{"go": true}')
        assert waiting.wait(SECONDS) == 0
    finally:
        waiting.kill()
        waiting.wait()
    wait_dead(agent)
    assert read(agent, "result.md") == "found\n"
    types = [event["type"] for event in service.events("survivor")]
    assert types.count("run.start") == types.count("run.end") == 1
    assert service.show("UnitFileState") == "enabled"


def test_removal_ends_the_agents_and_leaves_their_histories(
    service: Service, before: set[str]
) -> None:
    pids = [int(read(service.agent_dir(name), "pid")) for name in ("parent", "child")]
    main = service.pid
    cgroups = [Cgroup(Path("/sys/fs/cgroup/system.slice", unit)) for unit in (DAEMON, AGENTS)]
    apt("remove", "ctxfs")
    assert not any(alive(pid) for pid in (*pids, main))
    assert service.mounts() == []
    wait_until(lambda: not any(cgroup.exists() for cgroup in cgroups), "their cgroups are gone")
    new = there() - before
    # that it is enabled is a setting, which goes when the package is purged
    enabled = Path("/etc/systemd/system/multi-user.target.wants/ctxd.service")
    new -= {str(enabled), str(enabled.parent)}
    assert {path for path in new if not f"{path}/".startswith(f"{STATE}/")} == set()
    assert {path.name for path in Path(STATE, "home/0/agent").iterdir()} >= {"survivor"}


def test_the_next_installation_goes_on_with_the_histories(service: Service, first: Path) -> None:
    apt("install", str(first))
    systemctl("enable", "--now", "ctxd")
    wait_dead(parent := service.agent_dir("parent"))
    assert read(parent, "outcome") == "cancelled\n"
    assert read(parent, "reason") == "shutdown\n"
    assert read(service.agent_dir("child"), "reason") == "parent_dead\n"


def test_purging_leaves_nothing(service: Service, before: set[str]) -> None:
    Path("/etc/ctxfs").mkdir()
    Path("/etc/ctxfs/config.yaml").write_text("children: 77\n")
    apt("purge", "ctxfs")
    assert service.mounts() == []
    assert there() - before == set()
    # the directory that daemons of other tests have made
    assert before - there() <= {"/ctx"}
    units = systemctl("list-units", "--all", "--plain", "--no-legend", "ctxd*")
    assert units == "", "systemd knows none of its units"


@pytest.fixture
def account() -> Iterator[dict[str, str]]:
    """A user whose systemd runs, by the environment."""
    run("useradd", "--uid", str(USER), "--create-home", "packaged")
    # as udev has it elsewhere
    run("mknod", "-m", "666", "/dev/fuse.open", "c", "10", "229")
    run("mount", "--bind", "/dev/fuse.open", "/dev/fuse")
    systemctl("start", f"user@{USER}.service")
    yield {"HOME": "/home/packaged", "XDG_RUNTIME_DIR": f"/run/user/{USER}", "PATH": "/usr/bin"}
    systemctl("stop", f"user@{USER}.service")
    run("umount", "/dev/fuse")
    os.unlink("/dev/fuse.open")
    run("userdel", "--remove", "packaged")


def test_daemons_of_users_end_with_the_package(
    service: Service, first: Path, account: dict[str, str]
) -> None:
    def as_them(*command: str) -> str:
        return subprocess.run(
            command, user=USER, group=USER, extra_groups=[], env=account, timeout=SECONDS,
            check=True, stdout=subprocess.PIPE, text=True,
        ).stdout  # fmt: skip

    apt("install", str(first))
    as_them("systemctl", "--user", "start", "ctxd")
    as_them("ctx", "spawn", "theirs", "--", "sleep", "1000")
    main = int(as_them("systemctl", "--user", "show", "-P", "MainPID", "ctxd"))
    wait_until(lambda: as_them("ctx", "get", "theirs", "status") == "busy\n", "it runs")
    agent = int(as_them("ctx", "get", "theirs", "pid"))
    apt("purge", "ctxfs")
    assert not alive(main) and not alive(agent)
    assert os.path.exists("/home/packaged/.local/state/ctxfs/ctxfs.db"), "it is theirs"
