"""Command lines without anything of ctxfs: the sandbox of an agent, made by others' programs.

They say again what the product says about its cells, on purpose: a reference that read it there
would change with it, and its ratio would tell nothing of the change.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Final

#: uid and gid of an agent that root made, where nobody has another for it
AGENT_ID: Final = 61000
#: directories of the host that an agent sees, read-only
BASE_VIEW: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc")


def bubblewrap(*view: str) -> list[str]:
    """Namespaces of a cell, but for the network, and this view; its program is to follow."""
    command = ["bwrap", "--unshare-user", "--unshare-pid", "--unshare-ipc"]
    return [*command, "--unshare-uts", "--unshare-cgroup-try", "--new-session", *view]


def root_agent(shared: Path) -> list[str]:
    """Ids, namespaces and view of a root agent; ``shared`` is what it has of the filesystem."""
    view = ["--unshare-net"]
    for entry in BASE_VIEW:
        if os.path.islink(entry):
            view += ["--symlink", os.readlink(entry), entry]
        else:
            view += ["--ro-bind-try", entry, entry]
    view += ["--dir", "/run", "--dir", "/var", "--symlink", "../run", "/var/run"]
    view += ["--tmpfs", "/var/tmp", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    view += ["--perms", "0700", "--dir", "/tmp/home"]
    view += ["--bind", str(shared), str(shared)]
    drop = ["setpriv", "--reuid", str(AGENT_ID), "--regid", str(AGENT_ID), "--clear-groups"]
    drop += ["--no-new-privs", "--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all"]
    return [*drop, *bubblewrap(*view)]


def at_terminal(shared: Path, program: list[str]) -> list[str]:
    """A root agent at the terminal of script(1), with which it ends."""
    command = [word for word in root_agent(shared) if word != "--new-session"]
    return ["script", "-qec", shlex.join([*command, "--die-with-parent", *program]), "/dev/null"]


def inside(pid: int) -> list[str]:
    """Enters the cell that this process is in; a program is to follow."""
    command = ["nsenter", "-t", str(pid), "-U", "-m", "-u", "-i", "-n", "-p"]
    return [*command, "-S", str(AGENT_ID), "-G", str(AGENT_ID)]


def child_agent(pid: int) -> list[str]:
    """A child's cell inside the cell of its parent."""
    view = ["--bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    return [*inside(pid), *bubblewrap(*view, "--perms", "0700", "--dir", "/tmp/home")]


def in_turn(command: list[str], numbers: Path, abreast: int | None) -> list[str]:
    """The command once for each line of a file, which it gets as a word, some at a time."""
    return ["xargs", "-a", str(numbers), "-n", "1", "-P", str(abreast or 1), *command]


def print_with_python(file: Path) -> list[str]:
    """The start of Python, and what a file holds."""
    program = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())"
    return [sys.executable, "-c", program, str(file)]


def spawn(command: list[str], quiet: bool = False) -> int:
    """Starts it, with nothing to read and nowhere to write, and returns its pid.

    One that is ``quiet`` does not even tell of errors.
    """
    fds = (0, 1, 2) if quiet else (0, 1)
    null = [(os.POSIX_SPAWN_OPEN, fd, "/dev/null", os.O_RDWR, 0) for fd in fds]
    return os.posix_spawnp(command[0], command, {"PATH": os.defpath}, file_actions=null)


def finish(pid: int) -> None:
    """Waits for its end, which has to be a good one."""
    _, status = os.waitpid(pid, 0)
    if status != 0:
        raise RuntimeError(f"a reference failed with wait status {status}")
