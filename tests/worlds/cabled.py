"""A lead of root's, and a host at the other end of a cable, which ssh(1) leads to."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.worlds.apart import Cable, DaemonIn, Network, Sshd, make_key, network, sshd_in
from tests.worlds.daemon import Daemon, daemon_of, end_process, running
from tests.worlds.nodes import Lead
from tests.worlds.three import Three

#: somebody without rights who is known to this machine
LINK_USER: Final = "nobody"
#: as whom root is at n3, where there is no such user
NOBODY: Final = "nobody-there"


@dataclass
class Far:
    lead: Lead
    host: Daemon
    where: Network
    cable: Cable
    sshd: Sshd

    # as a wire (tests.worlds.wires)

    def stop(self) -> None:
        self.cable.pull()

    def go_on(self) -> None:
        self.cable.plug()

    def say(self, word: str) -> None:
        """``go`` or ``close``."""
        if word == "close":
            for pid in self.ends():
                end_process(pid)

    def ends(self) -> list[int]:
        return self.sshd.peers()


@contextmanager
def far_by_ssh(lease: float, *, is_prepared: bool = True) -> Iterator[Far]:
    """Root has followed the manual, unless it is not prepared."""
    with ExitStack() as stack:
        here, there = stack.enter_context(network()), stack.enter_context(network())
        cable = Cable(here, there)
        host = stack.enter_context(daemon_of(config="node_name: two\ngrace: 300ms\n"))
        sshd = stack.enter_context(sshd_in(there, cable.there))
        node = {"ssh": cable.there, "users": {"root": "root"}, "lease": f"{lease:g}s"}
        config = f"node_name: one\ngrace: 300ms\nlink_user: {LINK_USER}\n"
        if is_prepared:
            unknown = {**node, "users": {"root": NOBODY}}
            config += f"nodes: {json.dumps({'n2': node, 'n3': unknown})}\n"
        daemon = DaemonIn(here, config)
        if is_prepared:
            _prepare(daemon, sshd, host.root)
        stack.enter_context(running(daemon))
        yield Far(Lead(daemon), host, here, cable, sshd)


def _prepare(daemon: Daemon, sshd: Sshd, root: Path) -> None:
    """A key for the daemon, which is let in, and the key of the host."""
    owned = pwd.getpwnam(LINK_USER).pw_uid
    directory = daemon.state / "ssh"
    directory.mkdir(parents=True, mode=0o700)
    key = make_key(directory / "key", uid=owned)
    (directory / "known_hosts").write_text(sshd.known)
    os.chown(directory, owned, owned)
    sshd.authorize(key, root)


@contextmanager
def three_by_ssh(lease: float) -> Iterator[Three]:
    """One host, whose wire is the cable."""
    with far_by_ssh(lease) as far:
        yield Three(far.lead, {"n2": far.host}, {"n2": far})
