"""Two machines of an ordinary user, with a ctxd of the user's at each, and ssh(1) from one to the
other: over a wire (``wires.py``), and without any port."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests.worlds.apart import make_key
from tests.worlds.daemon import end_process, read, running, wait_dead, wait_status, wait_until
from tests.worlds.nodes import CTX, LEASE, Lead
from tests.worlds.ordinary import UID, HomeDaemon
from tests.worlds.wires import Wire, wire

_SSHD: Final = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
#: what a login sets that systemd(1) has made a session for
_SSHD_CONFIG: Final = """\
HostKey {keys}/host
AuthorizedKeysFile {keys}/authorized_keys
PidFile none
StrictModes no
UsePAM no
PrintMotd no
PrintLastLog no
LogLevel ERROR
SetEnv XDG_RUNTIME_DIR={run} PATH={programs}:/usr/bin:/bin
"""
_SSH_CONFIG: Final = """\
Host n2 {others}
  HostKeyAlias n2
  IdentityFile {keys}/id
  UserKnownHostsFile {keys}/known_hosts
  ProxyCommand {proxy}
{more}
"""
_SETTINGS: Final = "grace: 300ms\n"


@dataclass
class Users:
    """``here`` is the lead, and ``there`` its node n2."""

    here: HomeDaemon
    there: HomeDaemon
    wire: Wire

    @property
    def lead(self) -> Lead:
        return Lead(self.here)

    def ctx(self, *words: str, **more: Any) -> tuple[int, str]:
        done = self.here.ctx(*words, **more)
        return done.returncode, done.stdout + done.stderr

    def configure(self, nodes: str) -> None:
        """What the user adds to ``~/.config/ctxfs/config.yaml``, and has read."""
        config = self.here.home / ".config" / "ctxfs" / "config.yaml"
        config.write_text(f"{config.read_text()}nodes:\n{nodes}\n")
        os.kill(self.here.pid, signal.SIGHUP)
        wait_until(self.lead.rows, "it is read")

    def place(self, name: str, program: str, **files: str) -> Path:
        """A placed agent that runs."""

        def begin() -> Path:
            files.setdefault("placement", "node=n2")
            directory = self.here.run(name, f"sh -c '{program}'", **files)
            wait_status(directory, "busy")
            return directory

        return self.here.do(begin)

    def end(self, directory: Path, timeout: float = 60.0) -> tuple[str, str]:
        """What has become of an agent."""

        def wait() -> tuple[str, str]:
            wait_dead(directory, timeout=timeout)
            return read(directory, "outcome").strip(), read(directory, "reason").strip()

        return self.here.do(wait)

    def said(self, directory: Path) -> str:
        return self.here.do(lambda: read(directory, "out"))

    def left(self, directory: Path, comm: str = "") -> list[int]:
        """The processes of an agent at its host, whatever any ctxd says; of one name."""
        return self.there.processes_of(f"{directory.name.removesuffix('.d')}@*", comm)

    def gone(self, directory: Path) -> None:
        wait_until(lambda: not self.left(directory), "nothing of it runs")

    def go(self, directory: Path) -> None:
        """Has a program go on that waits for a sleep(1) to end."""
        wait_until(lambda: self.left(directory, "sleep"), "it sleeps")
        for pid in self.left(directory, "sleep"):
            end_process(pid)


def _serves(there: HomeDaemon, keys: Path) -> list[str]:
    """sshd(8) of the user's own, who has no other."""
    if _SSHD is None:
        pytest.skip("needs sshd: apt-get install openssh-server")
    keys.mkdir()
    make_key(keys / "host", uid=UID)
    config = keys / "config"
    config.write_text(_SSHD_CONFIG.format(keys=keys, run=there.run_dir, programs=CTX.parent))
    (keys / "authorized_keys").touch()
    for each in (keys, *keys.iterdir()):
        os.chown(each, UID, UID)
    return there.run_as_user(_SSHD, "-i", "-f", str(config))


@contextmanager
def users(*, lease: str = LEASE, more: str = "", others: str = "", configured: bool = True,
          itself: bool = False) -> Iterator[Users]:  # fmt: skip
    """``more`` is added to the user's configuration of ssh, in which ``others`` lead where n2 does.
    With ``itself`` the daemon is its own node."""
    with ExitStack() as stack:
        nodes = f"nodes: {{n2: {{ssh: n2, lease: {lease}}}}}\n" if configured else ""
        here = HomeDaemon(config=f"node_name: one\n{_SETTINGS}{nodes}")
        stack.enter_context(running(here))
        there = here
        if not itself:
            there = HomeDaemon(config=f"node_name: two\n{_SETTINGS}")
            stack.enter_context(running(there))
        keys = there.base / "sshd"
        made = stack.enter_context(wire(f"{there.base}/wire", _serves(there, keys)))
        key = make_key(here.keys / "id", uid=UID)
        (keys / "authorized_keys").write_text(key)
        here.note("known_hosts", f"n2 {(keys / 'host.pub').read_text()}")
        proxy = " ".join(made.command)
        here.note("config", _SSH_CONFIG.format(keys=here.keys, proxy=proxy, others=others,
                                               more=more))  # fmt: skip
        yield Users(here, there, made)
