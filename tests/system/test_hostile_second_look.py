"""What somebody tried who had not built it: each attack got in once, or was close to it."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator

import pytest

from runtime.kernel import linux
from runtime.kernel.cgroups import Cgroup
from tests.system.hostile.guarded import BESIDE, guarded
from tests.worlds.daemon import (
    AGENT_UID,
    Daemon,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)

IDS = {"uid": str(AGENT_UID), "gid": str(AGENT_UID)}


@pytest.fixture(scope="module")
def daemon(shared_daemon: Daemon) -> Iterator[Daemon]:
    with guarded(shared_daemon, bystanders=BESIDE):
        (shared_daemon.base / "scripts").mkdir()
        yield shared_daemon


def script(daemon: Daemon, name: str, text: str) -> str:
    """A command that runs this in a sandbox, where nobody can change it."""
    (daemon.base / "scripts" / f"{name}.sh").write_text(text)
    return f"sh /scripts/{name}.sh"


def scripts(daemon: Daemon) -> str:
    return f"{daemon.base}/scripts /scripts ro\n"


# it replaces links and directories of the root, each by one of its own, with what the shell
# has: without /lib64 no other program starts
REPLACES = r"""
exec 2>&1
printf '#!/bin/sh\necho forged >> /run/ran\n' > /run/forged; chmod 755 /run/forged
python3 -IS - "$CTX_ROOT" <<'END'
import os, sys
os.makedirs("/run/bin")
os.link("/run/forged", "/run/bin/ctx")
for path in (sys.argv[1], "/bin", "/lib", "/lib64", "/var/run", "/opt"):
    try:
        if os.path.islink(path):
            os.unlink(path)
        os.symlink("/run", path)
        print("replaced", path, flush=True)
    except OSError as error:
        print(path, error.strerror, flush=True)
END
"""
SHOWS = "ls -A / /run /var; for at in /bin /lib /lib64 /var/run $CTX_ROOT; do readlink $at; done"


@pytest.mark.parametrize("policy", ["", "allow boss_t agent:* create,detach"])
def test_a_child_changes_nothing_of_what_its_parent_starts_programs_by(
    daemon: Daemon, policy: str
) -> None:
    """Both had one root filesystem, with the link to the loader in it: what a child put there
    ran as its parent, with all that it may, and as its siblings."""
    kid, shows = script(daemon, "kid", REPLACES), script(daemon, "shows", SHOWS)
    detach = "echo root > $name.d/parent" if policy else ":"
    family = script(daemon, "boss", (
        f"{shows} > /tmp/before\ncd $CTX_ROOT/agent\n"
        f"name=kid; mkdir kid.d; echo '{kid}' > kid.d/exec; {detach}; echo start > kid.d/ctl\n"
        f"cat kid.d/wait; {shows} > /tmp/after; cmp /tmp/before /tmp/after && echo the same\n"
        f"name=sib; mkdir sib.d; echo '{shows}' > sib.d/exec; {detach}\n"
        "echo start > sib.d/ctl; cat sib.d/wait; cat sib.d/out\n"
    ))
    files = {"policy": f"allow boss_t agent:* create\n{policy}"} if policy else {}
    boss = daemon.finish("boss", family, mount=scripts(daemon), **IDS, **files)
    said = read(boss, "out")
    assert "replaced /lib64\n" in read(daemon.agent_dir("kid"), "out"), said + read(boss, "log")
    assert said.startswith("the same\n"), said + read(boss, "log")
    assert read(daemon.agent_dir("sib"), "reason") == "exit:0\n"
    assert "usr/lib64\n" in said and "ran\n" not in said, said
    for name in ("sib", "kid", "boss"):
        daemon.agent_dir(name).rmdir()


def test_no_crash_of_an_agents_is_given_to_a_program_of_the_host(daemon: Daemon) -> None:
    """Where core_pattern is a pipe, the kernel runs it as root, outside of every agent, with what
    the agent was; a limit of 0 does not keep it from that, 1 does (core(5))."""
    (daemon.base / "scripts" / "core.py").write_text(
        "import ctypes, resource\n"
        "prlimit = ctypes.CDLL(None, use_errno=True).prlimit\n"
        "none, was = (ctypes.c_ulong * 2)(0, 0), (ctypes.c_ulong * 2)(7, 7)\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "print(resource.getrlimit(resource.RLIMIT_CORE))\n"
        "print(prlimit(0, resource.RLIMIT_CORE, none, None), end=' ')\n"
        "print(*resource.getrlimit(resource.RLIMIT_CORE))\n"
        "print(prlimit(0, resource.RLIMIT_CORE, None, was), *was)\n"
        "resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))\n"
        "print(*resource.getrlimit(resource.RLIMIT_STACK))\n"
    )
    agent = daemon.finish("crashing", "python3 -IS /scripts/core.py", mount=scripts(daemon), **IDS)
    said = read(agent, "out").splitlines()
    assert said == ["(1, 1)", "0 1 1", "0 1 1", f"{1 << 20} {1 << 20}"], read(agent, "log")


@pytest.mark.needs_root("only root sees what these have open")
def test_no_process_of_a_cell_has_a_directory_open(daemon: Daemon) -> None:
    """By one of the host's, or of its parent's view, it would be out of its own."""
    busy = script(daemon, "busy", (
        "cd $CTX_ROOT/agent; mkdir below.d; echo 'sleep 1000' > below.d/exec\n"
        "echo start > below.d/ctl; exec sleep 1000\n"
    ))
    agent = daemon.run("holding", busy, mount=scripts(daemon), mode="turn", **IDS)
    wait_status(agent, "idle")
    write(agent / "inbox", "begin")
    below = daemon.agent_dir("below")
    wait_until(below.exists, "the child is made")
    wait_status(below, "busy")
    (node,) = daemon.cgroup.path.glob("user-*/agent-holding")

    def name_of(pid: int) -> str:
        with open(f"/proc/{pid}/comm") as comm:
            return comm.read().strip()

    # each has executed its last program, which is after the status
    wait_until(lambda: len(daemon.processes_of("holding", "sleep")) == 2, "both sleep")
    names = set()
    for pid in Cgroup(node).processes():
        names.add(name_of(pid))
        for fd in os.listdir(f"/proc/{pid}/fd"):
            mode = os.stat(f"/proc/{pid}/fd/{fd}").st_mode
            assert not stat.S_ISDIR(mode), f"{names} {fd}"
    assert names == {"enter", "view", "keeper", "sleep"}
    write(agent / "ctl", "kill")
    wait_dead(agent)


@pytest.mark.needs_root("it mounts")
def test_what_is_mounted_later_comes_into_no_view(daemon: Daemon) -> None:
    """It was writable in what an agent has read-only, devices included, where the host's mounts
    are shared among namespaces, as systemd makes them."""
    disks = daemon.base / "disks"
    (disks / "new").mkdir(parents=True)
    linux.mount("none", disks, "tmpfs", 0, "mode=0755")
    try:
        subprocess.run(["mount", "--make-shared", str(disks)], check=True)
        (disks / "new").mkdir()
        waits = script(daemon, "disks", (
            "cd $CTX_ROOT/agent; mkdir sees.d; echo 'sh /scripts/sees.sh' > sees.d/exec\n"
            "echo start > sees.d/ctl; sh /scripts/sees.sh; cat sees.d/wait sees.d/out\n"
        ))
        script(daemon, "sees", (
            "while ! test -e /scripts/mounted; do sleep 0.02; done\n"
            "grep -c '/disks/new ' /proc/self/mountinfo; echo mine > /disks/new/written\n"
        ))
        agent = daemon.run("disks", waits, **IDS, mount=f"{scripts(daemon)}{disks} /disks ro")
        sees = daemon.agent_dir("sees")
        wait_until(sees.exists, "the child is made")
        wait_status(sees, "busy")
        linux.mount("none", disks / "new", "tmpfs", 0, "mode=0777")
        (daemon.base / "scripts" / "mounted").touch()
        wait_dead(agent)
        assert read(agent, "out") == "0\n0\n", read(agent, "log")
        assert not (disks / "new" / "written").exists()
    finally:
        subprocess.run(["umount", "-R", str(disks)], check=True)


# what lies below a cover, and what is read-only, in namespaces where it is root itself
UNCOVERS = r"""
exec 2>/dev/null
umount /desk/hidden; cat /desk/hidden/secret
mount -o remount,bind,rw /scripts; echo > /scripts/written
mount -t tmpfs none /tmp; mkdir /tmp/at /tmp/upper /tmp/work
mount --bind /desk /tmp/at && cat /tmp/at/hidden/secret
mount --rbind /desk /tmp/at; umount -l /tmp/at/hidden; cat /tmp/at/hidden/secret; umount -l /tmp/at
mount -t overlay none -o lowerdir=/desk,upperdir=/tmp/upper,workdir=/tmp/work /tmp/at
cat /tmp/at/hidden/secret
mount --move /desk/hidden /tmp/at && cat /desk/hidden/secret
cd /desk/hidden/.. && cat hidden/secret
pivot_root /desk /desk && cat /hidden/secret
echo tried
"""


def test_what_covers_something_stays_where_an_agent_is_root_itself(daemon: Daemon) -> None:
    desk = daemon.base / "desk"
    (desk / "hidden").mkdir(parents=True)
    (desk / "hidden" / "secret").write_text("the secret\n")
    for path in (desk, desk / "hidden", desk / "hidden" / "secret"):
        os.chown(path, AGENT_UID, AGENT_UID)
    uncovers = script(daemon, "uncovers", UNCOVERS)
    both = script(daemon, "both", (
        f"unshare -Urm {uncovers}\ncd $CTX_ROOT/agent; mkdir too.d\n"
        f"echo 'unshare -Urm {uncovers}' > too.d/exec; echo start > too.d/ctl\n"
        "cat too.d/wait; cat too.d/out\n"
    ))
    agent = daemon.finish("uncovering", both, **IDS,
                          mount=f"{scripts(daemon)}{desk} /desk rw\n- /desk/hidden hide")
    assert read(agent, "out") == "tried\ntried\n", read(agent, "log")
    assert not (daemon.base / "scripts" / "written").exists()
