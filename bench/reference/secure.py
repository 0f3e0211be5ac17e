"""ssh(1) to this machine, which is a machine at its other end: a sshd(8) of the bench's own, and a
key that nobody else has."""

from __future__ import annotations

import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

#: where sshd confines what is not let in yet; the package makes it when its service starts
_EMPTY: Final = Path("/run/sshd")
_CONFIG: Final = """\
Port {1}
ListenAddress 127.0.0.1
HostKey {0}/host
AuthorizedKeysFile {0}/user.pub
PidFile none
PermitRootLogin yes
StrictModes no
UsePAM no
PrintMotd no
LogLevel ERROR
"""


def is_installed() -> bool:
    return bool(shutil.which("ssh") and _sshd())


def _sshd() -> str | None:
    return shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")


@contextmanager
def distant(directory: Path) -> Iterator[Callable[[list[str]], list[str]]]:
    """Makes of a command the one that runs it there, as root; the keys are in ``directory``."""
    _EMPTY.mkdir(mode=0o755, exist_ok=True)
    for name in ("host", "user"):
        words = ["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", str(directory / name)]
        subprocess.run(words, check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    (directory / "config").write_text(_CONFIG.format(directory, port))
    with subprocess.Popen([str(_sshd()), "-D", "-f", str(directory / "config")]) as process:
        try:
            _await(port)
            yield partial(_ssh, directory, port)
        finally:
            process.terminate()


def _await(port: int) -> None:
    for _ in range(1000):
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.01)
    raise RuntimeError("sshd does not listen")


def _ssh(directory: Path, port: int, command: list[str]) -> list[str]:
    options = {
        "Port": port,
        "IdentityFile": f"{directory}/user",
        "IdentitiesOnly": "yes",
        "StrictHostKeyChecking": "no",
        "UserKnownHostsFile": "/dev/null",
        "BatchMode": "yes",
        "LogLevel": "ERROR",
    }
    given = [f"-o{name}={value}" for name, value in options.items()]
    words = [str(shutil.which("ssh")), "-T", "-F", "none", *given]
    return [*words, "root@127.0.0.1", shlex.join(command)]
