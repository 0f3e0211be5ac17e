"""Links by ssh(1) between networks of their own, whose cables are pulled."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.worlds.apart import Cable, Network, Sshd, make_key, network, sshd_in
from tests.worlds.cabled import LINK_USER, NOBODY, Far, far_by_ssh
from tests.worlds.daemon import (
    TIMEOUT,
    Daemon,
    end_process,
    read,
    running,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.nodes import CTX, LEASE, Lead
from tests.worlds.ordinary import UID, HomeDaemon

#: a connection takes seconds on a machine that is busy
_LEASE_SECONDS, _GRACE_SECONDS = 15.0, 0.3


@pytest.fixture(scope="module")
def far() -> Iterator[Far]:
    with far_by_ssh(_LEASE_SECONDS) as made:
        yield made


def test_a_node_is_reached(far: Far) -> None:
    status, said = far.lead.check("n2")
    assert status == 0 and "two runs ctxd" in said, said


def test_a_link_ends_with_its_cable_and_comes_back(far: Far) -> None:
    far.lead.use("n2")
    wait_until(lambda: len(far.sshd.peers()) == 1, "what tried the key has gone")
    (engine,), (peer,) = far.lead.engines(), far.sshd.peers()
    far.cable.pull()
    try:
        wait_until(lambda: far.lead.state() == "down", "nothing was heard for a lease")
        error = far.lead.rows()["n2"]["error"]
        assert error.startswith(f"nothing was heard for {_LEASE_SECONDS:g} s"), error
        wait_until(lambda: peer not in far.sshd.peers(), "the host has seen it, too")
    finally:
        far.cable.plug()
    far.lead.wait("up")
    assert engine not in far.lead.engines()
    wait_until(lambda: len(far.sshd.peers()) == 1, "one connection is left")


def test_a_cable_that_is_back_in_time_is_not_noticed(far: Far) -> None:
    far.lead.use("n2")
    engines = far.lead.engines()
    for _ in range(5):
        far.cable.pull()
        seen = far.lead.rows()["n2"]["seen"]
        far.cable.plug()
        wait_until(lambda s=seen: far.lead.rows()["n2"]["seen"] > s, "it is heard again")  # type: ignore[misc]
    assert far.lead.engines() == engines


@contextmanager
def _file(path: Path, text: str) -> Iterator[None]:
    before = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(before)


def _complaint(far: Far) -> str:
    """Of a connection that is made anew."""
    for engine in far.lead.engines():
        end_process(engine)
    wait_until(lambda: far.lead.state() != "up", "it is seen")
    status, said = far.lead.check("n2")
    assert status == 1 and said.startswith("FAIL n2: ") and said.count("\n") == 1, said
    return said.removeprefix("FAIL n2: ").strip()


def test_what_is_wrong_is_said(far: Far) -> None:
    far.lead.use("n2")
    ours, theirs = far.lead.daemon.state / "ssh", far.sshd.directory
    other = make_key(theirs / "other")
    keys = f"{ours}/known_hosts"
    with _file(ours / "known_hosts", f"{far.cable.there} {other}"):
        said = _complaint(far)
        assert said.startswith(f"Host key for {far.cable.there} has changed") and keys in said, said
        assert f"\nwarn  node n2: {said}; ctx nodes check" in far.lead.daemon.ctx("doctor").stdout
    with _file(ours / "known_hosts", ""):
        said = _complaint(far)
        assert said.startswith("No ED25519 host key is known for") and keys in said, said
    let_in = (theirs / "authorized_keys").read_text()
    with _file(theirs / "authorized_keys", ""):
        said = _complaint(far)
        assert said.startswith(f"root@{far.cable.there}: Permission denied (publickey"), said
        cure = f": is there such a user? The key in {ours} is to be in authorized_keys of that one"
        assert said.endswith(cure), said
    with _file(theirs / "authorized_keys", let_in.replace(str(CTX), "ctx")):
        said = _complaint(far)
        assert "ctx: command not found: install ctxfs there" in said, said
    # nor does sshd say whether there is such a user
    status, said = far.lead.check("n3")
    assert status == 1 and f"{NOBODY}@{far.cable.there}: Permission denied (publickey" in said, said
    assert said.strip().endswith(cure), said
    far.host.kill()
    said = _complaint(far)
    assert f"the ctxd of {far.host.root} died" in said, said
    far.host.start()
    far.cable.pull()
    said = _complaint(far)
    assert said.startswith("ssh: connect to host") and "is the machine up" in said, said
    far.cable.plug()
    far.lead.wait("up")


def test_a_key_is_for_nothing_but_the_daemon(far: Far) -> None:
    """Whatever is asked for with it, also by whoever has stolen it."""
    key, known = (far.lead.daemon.state / "ssh" / name for name in ("key", "known_hosts"))
    begin = [
        "ssh", "-F", "none", "-oBatchMode=yes", f"-oUserKnownHostsFile={known}", "-i", str(key),
        "-l", "root",
    ]  # fmt: skip
    found = far.lead.daemon.ctx("doctor").stdout
    assert "\nok    node n2 is up\n" in found and "\nok    the key of links in " in found, found
    for words in (["-T", far.cable.there, "id"], ["-T", far.cable.there]):
        with subprocess.Popen(
            far.where.enter([*begin, *words]), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as stolen:
            assert stolen.stdin is not None and stolen.stdout is not None
            assert stolen.stdout.readline().startswith(b"ctxfs-peer ")
            stolen.stdin.close()
            assert stolen.stdout.read() == b""
    forward = ["-N", "-oExitOnForwardFailure=yes", "-R", "10022:127.0.0.1:22", far.cable.there]
    done = subprocess.run(far.where.enter([*begin, *forward]), stdin=subprocess.DEVNULL,
                          capture_output=True, timeout=TIMEOUT, check=False)  # fmt: skip
    assert done.returncode == 255 and b"forwarding failed" in done.stderr, done


def _typed(far: Far, *words: str, answer: str = "") -> tuple[int, str]:
    """What root types at the lead, at a terminal if there is an answer to type."""
    ours, theirs = os.openpty() if answer else (-1, os.open(os.devnull, os.O_RDONLY))
    try:
        if answer:
            os.write(ours, f"{answer}\n".encode())
        ctx = [sys.executable, "-IS", str(far.lead.daemon.root / "bin/ctx"), *words]
        done = subprocess.run(
            far.where.enter(ctx), stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=TIMEOUT, check=False,
            env={"CTX_ROOT": str(far.lead.daemon.root), "PATH": os.environ["PATH"]},
        )  # fmt: skip
        return done.returncode, done.stdout
    finally:
        for fd in {ours, theirs} - {-1}:
            os.close(fd)


def test_what_the_manual_says_is_enough_for_root() -> None:
    with far_by_ssh(_LEASE_SECONDS, is_prepared=False) as far:
        daemon, at = far.lead.daemon, far.cable.there
        add = ("nodes", "add", "n2", at)
        (shown,) = subprocess.run(
            ["ssh-keygen", "-lf", far.sshd.directory / "host.pub"], check=True, text=True,
            stdout=subprocess.PIPE,
        ).stdout.splitlines()  # fmt: skip
        status, said = _typed(far, *add)
        assert status == 2 and "nobody can be asked" in said and shown.split()[1] in said, said
        status, said = _typed(far, *add, "--fingerprint", "SHA256:other")
        assert status == 1 and said.endswith("no key with the fingerprint SHA256:other\n"), said
        status, said = _typed(far, *add, answer="no")
        assert status == 1 and shown.split()[1] in said and "nothing was changed" in said, said
        status, said = _typed(far, *add, answer="yes")
        assert status == 0, said
        (let_in,) = (line for line in said.splitlines() if line.startswith("restrict,"))
        (row,) = (line for line in said.splitlines() if line.startswith("  n2: {"))
        keys = daemon.state / "ssh"
        uid = pwd.getpwnam(LINK_USER).pw_uid
        assert [(each.st_uid, each.st_mode & 0o777) for each in (keys.stat(), (keys / "key").stat())
                ] == [(uid, 0o700), (uid, 0o600)]  # fmt: skip
        there = f"{CTX} --root {far.host.root} peer"
        authorized = far.sshd.directory / "authorized_keys"
        authorized.write_text(let_in.replace("ctx peer", there) + "\n")

        def configure(line: str) -> None:
            config = daemon.base / "config.yaml"
            config.write_text(f"node_name: one\nlink_user: {LINK_USER}\nnodes:\n{line}\n")
            os.kill(daemon.pid, signal.SIGHUP)

        configure(row)
        wait_until(lambda: "root has no login" in far.lead.check("n2")[1], "it is read")
        configure(row.replace("}", ", users: {root: root}}"))
        wait_until(far.lead.rows, "it is read")
        status, said = far.lead.check()
        assert status == 0 and said.startswith("ok n2: two runs ctxd"), said
        assert daemon.ctx("spawn", "there", "--node", "n2", "--", "id", "-u").returncode == 0
        wait_dead(daemon.agent_dir("there"))
        assert read(daemon.agent_dir("there"), "outcome") == "done\n"
        status, said = _typed(far, *add)
        assert status == 1 and "there is such a node already" in said, said
        for words, wrong in (
            (("a b", at), "NAME is made of"),
            (("n3", f"root@{at}"), "ADDRESS is a name or address without a login"),
            (("n3", "--port", "23", at), f"{at}: no ssh answers at port 23"),
        ):
            before = sorted((each.name, each.read_bytes()) for each in keys.iterdir())
            status, said = _typed(far, "nodes", "add", *words)
            assert status in (1, 2) and wrong in said, said
            assert sorted((each.name, each.read_bytes()) for each in keys.iterdir()) == before
        # whoever has a shell by the key is told of
        key = let_in.partition('" ')[2]
        authorized.write_text(
            f'command="case $SSH_ORIGINAL_COMMAND in *peer) exec {there};; esac; '
            f'eval $SSH_ORIGINAL_COMMAND" {key}\n'
        )
        status, said = far.lead.check()
        assert status == 1 and said.startswith("FAIL n2: the key gets a shell there: begin"), said
        assert "\nFAIL  node n2: the key gets a shell there; begin" in daemon.ctx("doctor").stdout
        # and of another key of the host
        other = make_key(far.sshd.directory / "other").split()[:2]
        (keys / "known_hosts").write_text(f"{at} {' '.join(other)}\n")
        status, said = _typed(far, "nodes", "add", "n3", at)
        assert status == 1 and "shows another key than the known one" in said, said


# without root


class UserDaemonIn(HomeDaemon):
    """A daemon of an ordinary user in a network of its own."""

    executed = True

    def __init__(self, where: Network, config: str) -> None:
        super().__init__(config=config)
        self._where = where

    def command(self, *more: str) -> list[str]:
        return self._where.enter(super().command(*more))

    def ssh(self, *words: str) -> int:
        """What the user types; its status."""
        command = self._where.enter(self.run_as_user("ssh", *words))
        return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, timeout=TIMEOUT, check=False).returncode


_OWN_CONFIG: Final = """\
Host *
  IdentityFile {home}/.ssh/id
  UserKnownHostsFile {home}/.ssh/known_hosts
Host hop
  HostName {hop}
  User root
Host far shared
  HostName {far}
  Port {port}
  User ordinary
  ProxyJump hop
Host shared
  ControlPath {home}/.ssh/master
"""
_PORT: Final = 2222


@dataclass
class Own:
    """A user's daemon, and another one of the same user, which is reached over a third machine."""

    lead: Lead
    daemon: UserDaemonIn
    host: HomeDaemon
    cable: Cable
    sshd: Sshd

    def connections(self) -> int:
        return self.sshd.log.read_text().count("Accepted publickey")


@pytest.fixture(scope="module")
def own() -> Iterator[Own]:
    with ExitStack() as stack:
        here, hop, there = (stack.enter_context(network()) for _ in range(3))
        first, second = Cable(here, hop), Cable(hop, there, 2)
        nodes = {name: {"ssh": name, "lease": LEASE} for name in ("far", "shared")}
        daemon = UserDaemonIn(here, f"node_name: own\nnodes: {json.dumps(nodes)}\n")
        host = HomeDaemon(config="node_name: theirs\n")
        with running(host), running(daemon):
            jump = stack.enter_context(sshd_in(hop, first.there))
            ids = host.run_as_user()
            sshd = stack.enter_context(
                sshd_in(there, second.there, ids=ids, uid=UID, port=_PORT)
            )
            key = make_key(daemon.keys / "id", uid=UID)
            (jump.directory / "authorized_keys").write_text(key)
            sshd.authorize(key, host.root)
            daemon.note("known_hosts", jump.known + sshd.known)
            daemon.note("config", _OWN_CONFIG.format(
                home=daemon.home, hop=first.there, far=second.there, port=_PORT
            ))  # fmt: skip
            yield Own(Lead(daemon), daemon, host, second, sshd)
            daemon.ssh("-O", "exit", "shared")


def test_a_user_has_the_ssh_that_the_user_has(own: Own) -> None:
    """With its configuration, keys, and a machine between."""
    status, said = own.lead.check("far")
    assert status == 0 and "theirs runs ctxd" in said, said
    own.cable.pull()
    try:
        wait_until(lambda: own.lead.state("far") == "down", "nothing was heard for a lease")
    finally:
        own.cable.plug()
    own.lead.wait("up", "far")


def test_a_connection_that_is_shared_and_gone_is_not_made(own: Own) -> None:
    before = own.connections()
    status, said = own.lead.check("shared")
    assert status == 1 and f"connect({own.daemon.keys}/master)" in said, said
    assert said.strip().endswith(": log in, no connection is open that is shared"), said
    assert own.daemon.ssh("-f", "-N", "-M", "shared") == 0
    own.lead.use("shared")
    assert own.connections() == before + 1, "it is the user's"
    own.daemon.ssh("-O", "exit", "shared")
    own.lead.wait("down", "shared")
    status, said = own.lead.check("shared")
    assert status == 1 and "log in" in said, said
    assert own.connections() == before + 1


def test_a_user_places_agents_behind_another_machine(own: Own) -> None:
    """And over a connection that is there: none is made for it."""
    assert own.daemon.ssh("-f", "-N", "-M", "shared") == 0
    for name in ("far", "shared"):
        own.lead.use(name)
        before = own.connections()

        def live(name: str = name) -> tuple[str, str]:
            directory = own.daemon.run(name, "sh -c 'id -u; sleep 1000'", placement=f"node={name}")
            wait_until(lambda: read(directory, "out") == f"{UID}\n", "it is heard")
            assert _left(own.host, name)
            write(directory / "ctl", "stop")
            wait_dead(directory)
            return read(directory, "outcome"), read(directory, "reason")

        assert own.daemon.do(live) == ("cancelled\n", "operator_stop\n")
        assert not _left(own.host, name) and own.connections() == before
    own.daemon.ssh("-O", "exit", "shared")


# agents


def _placed(daemon: Daemon, name: str, program: str) -> Path:
    """An agent at n2 that runs."""
    directory = daemon.make(name, program, placement="node=n2")
    write(directory / "ctl", "start")
    wait_status(directory, "busy")
    return directory


def _left(host: Daemon, name: str) -> list[int]:
    """The processes that an agent has at its host."""
    return host.processes_of(f"{name}@*")


def test_an_agent_at_the_other_end_gives_back_what_it_made(far: Far) -> None:
    directory = _placed(far.lead.daemon, "there", "sh -c 'echo up; cat $CTX_SELF/wait'")
    wait_until(lambda: read(directory, "out") == "up\n", "it is heard")
    write(directory / "ctl", "stop")
    wait_dead(directory)
    assert read(directory, "outcome") == "cancelled\n" and not _left(far.host, "there")


def test_an_agent_behind_a_cable_that_is_pulled_is_gone_in_time(far: Far) -> None:
    directory = _placed(far.lead.daemon, "cut", "sh -c 'trap : TERM; while :; do sleep 1; done'")
    far.cable.pull()
    began = time.monotonic()
    try:
        wait_until(lambda: not _left(far.host, "cut"), "nothing of it runs")
        assert time.monotonic() - began < _LEASE_SECONDS + _GRACE_SECONDS + 2
        assert read(directory, "status") == "busy\n"
    finally:
        far.cable.plug()
    wait_dead(directory, timeout=90)
    assert read(directory, "outcome") == "interrupted\n"
    assert read(directory, "reason") in ("lease_over\n", "runtime_lost\n")


def test_an_agent_outlives_what_led_to_it(far: Far) -> None:
    directory = _placed(far.lead.daemon, "on", "sh -c 'sleep 1000; echo went'")
    pids = _left(far.host, "on")
    for _ in range(2):
        for engine in far.lead.engines():
            end_process(engine)
        wait_until(lambda: not far.lead.engines(), "it is gone")
        far.lead.wait("up")
    assert _left(far.host, "on") == pids
    write(directory / "ctl", "kill")
    wait_dead(directory)
    assert not _left(far.host, "on")
