"""Others' ways to run a program and to see it through: crun(1), podman(1) and s6-supervise.

None is needed; who lacks one is told, and its reference is left out.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from bench.reference.commands import AGENT_ID, BASE_VIEW, spawn

_CLONE_NEWNS: Final = 0x20000
_PATH: Final = "/usr/local/bin:/usr/bin:/bin"
#: its end ends the service, as s6 would start it again
_SERVICE: Final = "#!/bin/sh\ns6-svc -Ox .\nexec "


def _is_there(program: str, package: str) -> bool:
    found = shutil.which(program) is not None
    if not found:
        print(f"bench: without {program} (apt-get install {package})", file=sys.stderr)
    return found


def _configuration(rootfs: Path, program: Sequence[str]) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [{"destination": "/proc", "type": "proc", "source": "proc"}]
    for point in ("/dev", "/tmp", "/var/tmp"):
        (rootfs / point[1:]).mkdir(parents=True)
        mounts.append({"destination": point, "type": "tmpfs", "source": "tmpfs"})
    for entry in BASE_VIEW:
        if os.path.islink(entry):
            (rootfs / entry[1:]).symlink_to(os.readlink(entry))
        elif os.path.isdir(entry):
            bind = {"options": ["rbind", "ro"], "type": "bind", "source": entry}
            mounts.append({"destination": entry, **bind})
    ids = [{"containerID": 0, "hostID": 0, "size": 65536}]
    kinds = ("pid", "network", "ipc", "uts", "mount", "cgroup", "user")
    sets = ("bounding", "effective", "inheritable", "permitted", "ambient")
    process = {
        "terminal": False,
        "user": {"uid": AGENT_ID, "gid": AGENT_ID},
        "args": [*program],
        "env": [f"PATH={_PATH}"],
        "cwd": "/",
        "capabilities": {kind: [] for kind in sets},
        "noNewPrivileges": True,
    }
    spaces = {"namespaces": [{"type": kind} for kind in kinds]}
    return {
        "ociVersion": "1.0.0",
        "process": process,
        "root": {"path": "rootfs", "readonly": False},
        "hostname": "agent",
        "mounts": mounts,
        "linux": {**spaces, "uidMappings": ids, "gidMappings": ids},
    }


def _see_only_cgroup2() -> None:
    """For this thread, and what it starts: crun 1.8 refuses cgroup v1 beside v2."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    for words in (
        ["mount", "--make-rprivate", "/"],
        ["umount", "-R", "/sys/fs/cgroup"],
        ["mount", "-t", "cgroup2", "cgroup2", "/sys/fs/cgroup"],
    ):
        subprocess.run(words, check=True)


def crun(base: Path, program: Sequence[str]) -> Callable[[int], list[int]] | None:
    """Starts the program so many times in containers with the view of an agent.

    What is returned are the crun processes, which end with their containers.
    """
    if not _is_there("crun", "crun"):
        return None
    (base / "rootfs").mkdir(parents=True)
    (base / "config.json").write_text(json.dumps(_configuration(base / "rootfs", program)))
    command = ["crun", "--cgroup-manager=disabled", "--root", str(base / "state"), "run"]
    thread = ThreadPoolExecutor(1, initializer=_see_only_cgroup2)
    # one that was killed keeps its name
    names = (f"c{number}" for number in itertools.count())

    def start(count: int) -> list[int]:
        return [spawn([*command, "-b", str(base), next(names)]) for _ in range(count)]

    return lambda count: thread.submit(start, count).result()


def podman(
    base: Path, program: Sequence[str], stack: ExitStack
) -> Callable[[], int] | None:
    """Starts the program in a container that is removed, without a network and cgroups.

    What is returned is the process of podman, which ends with its container.
    """
    if not _is_there("podman", "podman"):
        return None
    (base / "rootfs").mkdir(parents=True)
    command = ["podman", "--root", str(base / "root"), "--runroot", str(base / "run"), "run",
               "--rm", "--network=none", "--cgroups=disabled", "--log-driver=none",
               "--ulimit=nofile=1024:1024", "--ulimit=nproc=4000:4000"]
    for entry in BASE_VIEW:
        if os.path.islink(entry):
            (base / "rootfs" / entry[1:]).symlink_to(os.readlink(entry))
        elif os.path.isdir(entry):
            command.append(f"--volume={entry}:{entry}:ro")
    command += ["--rootfs", str(base / "rootfs"), *program]
    thread = ThreadPoolExecutor(1, initializer=_see_only_cgroup2)
    stack.callback(shutil.rmtree, base, ignore_errors=True)
    stack.callback(thread.shutdown)
    return lambda: thread.submit(spawn, command).result()


def s6(base: Path, most: int, program: Sequence[str]) -> Callable[[int], list[int]] | None:
    """Supervises the program so many times, without a view, ids or cgroups.

    What is returned are the s6-supervise processes, which end with their programs.
    """
    if not _is_there("s6-supervise", "s6"):
        return None
    for number in range(most):
        directory = base / str(number)
        directory.mkdir(parents=True)
        (directory / "run").write_text(_SERVICE + shlex.join(program) + "\n")
        (directory / "run").chmod(0o755)
    return lambda count: [
        spawn(["s6-supervise", str(base / str(number))]) for number in range(count)
    ]
