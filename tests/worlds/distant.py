"""A machine at the other end of ssh(1), which is this one: sshd(8) for each connection, without a
port, and a key that nobody else has."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.worlds.daemon import MARK

_SSHD: Final = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
#: where sshd confines what is not let in yet; the package makes it when its service starts
_EMPTY: Final = Path("/run/sshd")
_NOBODY: Final = 65534
_CONFIG: Final = """\
HostKey {0}/host
AuthorizedKeysFile {0}/user.pub
PidFile none
PermitRootLogin yes
StrictModes no
UsePAM no
PrintMotd no
PrintLastLog no
LogLevel ERROR
SetEnv HOME=/nonexistent PS1=distant$
"""


class Distant:
    """``command`` is what a user of this machine types to be root there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.chmod(0o755)
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", directory / name],
                           check=True)
        # of a key that is another user's, ssh(1) does not ask who else may read it
        os.chown(directory / "user", _NOBODY, _NOBODY)
        (directory / "user").chmod(0o644)
        (directory / "config").write_text(_CONFIG.format(directory))
        self.serves = [str(_SSHD), "-i", "-f", str(directory / "config")]

    def command(self, *options: str) -> list[str]:
        """``ssh`` with options, to which a command may be added."""
        fixed = ("LogLevel=ERROR", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null",
                 f"IdentityFile={self.directory}/user", "IdentitiesOnly=yes",
                 "BatchMode=yes")
        return ["ssh", "-F", "none", *(f"-o{each}" for each in fixed), *options, "root@127.0.0.1"]

    @property
    def here(self) -> list[str]:
        """The same, from where the tests are."""
        return self.command(f"-oProxyCommand={' '.join(self.serves)}")

    @contextmanager
    def listening(self) -> Iterator[Path]:
        """A socket whose connections are to it, for the network of a cell."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path := self.directory / "socket"))
            path.chmod(0o666)
            listener.listen()
            served: list[subprocess.Popen[bytes]] = []

            def serve() -> None:
                while True:
                    try:
                        connection, _ = listener.accept()
                    except OSError:
                        return
                    with connection:
                        fd = connection.fileno()
                        served.append(subprocess.Popen(self.serves, stdin=fd, stdout=fd, stderr=fd))

            thread = threading.Thread(target=serve)
            thread.start()
            try:
                yield path
            finally:
                listener.shutdown(socket.SHUT_RDWR)
                thread.join()
                for each in served:
                    each.wait()


@contextmanager
def distant() -> Iterator[Distant]:
    """Such a machine; without sshd(8) the test is skipped, aloud."""
    if _SSHD is None:
        pytest.skip("needs sshd: apt-get install openssh-server")
    _EMPTY.mkdir(mode=0o755, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{MARK}-", dir="/tmp") as directory:
        yield Distant(Path(directory))
