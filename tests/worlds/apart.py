"""Networks of their own, as of several machines; cables that can be pulled; sshd(8) there."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

import pytest

from runtime.kernel.cgroups import Cgroup
from tests.worlds.daemon import MARK, TIMEOUT, Daemon, wait_until
from tests.worlds.nodes import CTX
from tests.worlds.whose import HIERARCHY

_SSHD: Final = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
#: where sshd confines what is not let in yet; the package makes it when its service starts
_EMPTY: Final = Path("/run/sshd")
_CONFIG: Final = """\
ListenAddress {address}
Port {port}
HostKey {directory}/host
AuthorizedKeysFile {directory}/authorized_keys
PidFile none
PermitRootLogin yes
StrictModes no
UsePAM no
PrintMotd no
PrintLastLog no
SetEnv HOME=/nonexistent
"""
_numbers = itertools.count(1)


class Network:
    """A network of its own, as long as its process lives."""

    def __init__(self) -> None:
        keep = "ip link set lo up && echo up && exec cat"
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", keep], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == b"up\n"
        self.pid = self._keeper.pid

    def enter(self, command: Sequence[str]) -> list[str]:
        """What becomes a command there."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--", *command]

    def run(self, *command: str) -> None:
        subprocess.run(self.enter(command), check=True, timeout=TIMEOUT)

    def close(self) -> None:
        self._keeper.communicate(timeout=TIMEOUT)


class Cable:
    """Between two networks: the first has the address ``here``, the second ``there``."""

    def __init__(self, first: Network, second: Network, number: int = 1) -> None:
        self._first, self._name = first, f"eth{number}"
        self.here, self.there = (f"10.79.{number}.{last}" for last in (1, 2))
        first.run("ip", "link", "add", self._name, "type", "veth",
                  "peer", "name", self._name, "netns", str(second.pid))  # fmt: skip
        for network, address in ((first, self.here), (second, self.there)):
            network.run("ip", "address", "add", f"{address}/24", "dev", self._name)
            network.run("ip", "link", "set", self._name, "up")

    def pull(self) -> None:
        self._first.run("ip", "link", "set", self._name, "down")

    def plug(self) -> None:
        self._first.run("ip", "link", "set", self._name, "up")


class Enters(Protocol):
    """What leads to another network."""

    def enter(self, command: Sequence[str]) -> list[str]: ...


class DaemonIn(Daemon):
    """A daemon in a network of its own."""

    executed = True

    def __init__(self, where: Enters, config: str) -> None:
        super().__init__(config=config)
        self._where = where

    def command(self, *more: str) -> list[str]:
        return self._where.enter(super().command(*more))


def make_key(file: Path, *, uid: int = 0) -> str:
    """A key of ssh, for this user alone; its public half."""
    subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-C", "test", "-f", file], check=True)
    os.chown(file, uid, uid)
    return file.with_name(f"{file.name}.pub").read_text()


class Sshd:
    """In a network; ``cgroup`` has it and all that it starts."""

    def __init__(self, network: Network, address: str, directory: Path, port: int) -> None:
        self.directory, self.address, self.port = directory, address, port
        self._network = network
        assert HIERARCHY is not None and _SSHD is not None
        self.cgroup = Cgroup(HIERARCHY / f"{MARK}-sshd-{next(_numbers)}")
        self.key = make_key(directory / "host")
        (directory / "authorized_keys").touch()
        config = _CONFIG.format(address=address, port=port, directory=directory)
        (directory / "config").write_text(config)
        self.log = directory / "log"

    @property
    def known(self) -> str:
        """The line of ``known_hosts`` that is true of it."""
        name = self.address if self.port == 22 else f"[{self.address}]:{self.port}"
        return f"{name} {self.key}"

    def authorize(self, key: str, root: Path) -> None:
        """Lets a key in, for nothing but the daemon at ``root``: what ctx nodes(1) tells people."""
        with open(self.directory / "authorized_keys", "a") as file:
            file.write(f'restrict,command="{CTX} --root {root} peer" {key}')

    def start(self, ids: Sequence[str] = ()) -> None:
        assert _SSHD is not None
        self.cgroup.path.mkdir(exist_ok=True)
        sshd = [*ids, _SSHD, "-D", "-e", "-f", str(self.directory / "config")]
        enter = ["sh", "-c", 'echo 0 > "$0/cgroup.procs" && exec "$@"', str(self.cgroup.path)]
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen([*enter, *self._network.enter(sshd)], stderr=log)
        wait_until(lambda: b"listening" in self.log.read_bytes(), "sshd listens")

    def peers(self) -> list[int]:
        """The pids of ``ctx peer``."""
        found = []
        for pid in self.cgroup.processes():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if words[-2:-1] == [b"peer"]:
                found.append(pid)
        return found

    def stop(self) -> None:
        self.cgroup.kill()
        self._process.wait(TIMEOUT)
        wait_until(self.cgroup.remove, "nothing of sshd is left")


@contextmanager
def network() -> Iterator[Network]:
    made = Network()
    try:
        yield made
    finally:
        made.close()


@contextmanager
def sshd_in(where: Network, address: str, *, ids: Sequence[str] = (), uid: int = 0,
            port: int = 22) -> Iterator[Sshd]:  # fmt: skip
    """Without sshd(8) the test is skipped, aloud."""
    if _SSHD is None:
        pytest.skip("needs sshd: apt-get install openssh-server")
    _EMPTY.mkdir(mode=0o755, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{MARK}-", dir="/tmp") as name:
        directory = Path(name)
        made = Sshd(where, address, directory, port)
        for each in (directory, *directory.iterdir()):
            os.chown(each, uid, uid)
        directory.chmod(0o755)
        made.start(ids)
        try:
            yield made
        finally:
            made.stop()
