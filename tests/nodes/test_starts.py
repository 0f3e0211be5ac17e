"""Starts at nodes that cannot be: what is wrong is said in time, and a stop waits for nothing."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.worlds.daemon import Daemon, daemon_of, read, wait_dead, wait_status, write
from tests.worlds.nodes import CTX, Lead, lead_of, node, peer
from tests.worlds.strangers import FalseHost, false_host, false_lead

#: after a start, and a moment on a machine that is busy
_SECONDS, _LATE = 40.0, 10.0
_SHELL = ["/bin/sh", "-c"]
#: nodes that are reached by no daemon, and what is said of each
_WRONG: Final = {
    "silent": (["/bin/sleep", "1000"], " 30 s"),
    "missing": (["/nothing"], "/nothing: No such file or directory"),
    "uninstalled": ([*_SHELL, "ctx-of-nobody peer"], "not found"),
    "unreachable": (
        [*_SHELL, "echo ssh: connect to host n2 port 22: No route to host >&2; exit 255"],
        "is the machine up",
    ),
    "denied": (
        [*_SHELL, "echo 'me@n2: Permission denied (publickey).' >&2; exit 255"],
        "is to be in authorized_keys of that one",
    ),
    "unknown": (
        ["/usr/sbin/runuser", "-u", "nobody-there", "--", "ctx", "peer"],
        "user nobody-there does not exist or",
    ),
    "later": ([*_SHELL, "echo ctxfs-peer 7 9; cat"], ": install a later ctxfs here"),
    "stranger": ([*_SHELL, "echo ctxfs-peer 1 2; echo hello; cat"], "no frame"),
}  # fmt: skip


@pytest.fixture(scope="module")
def host() -> Iterator[Daemon]:
    with daemon_of(config="node_name: two\n") as made:
        yield made


@pytest.fixture(scope="module")
def liar() -> Iterator[FalseHost]:
    with false_host() as made:
        yield made


@pytest.fixture(scope="module")
def lead(host: Daemon, liar: FalseHost) -> Iterator[Lead]:
    with ExitStack() as stack:
        closed = stack.enter_context(daemon_of(config="placed: {allow: false}\n"))
        dead = stack.enter_context(daemon_of())
        nodes = {name: node(command) for name, (command, _) in _WRONG.items()}
        nodes |= {"n2": node(peer(host)), "closed": node(peer(closed)), "dead": node(peer(dead))}
        nodes["liar"] = node(liar.command, lease="30s")
        made = stack.enter_context(lead_of(nodes, "node_name: one\n"))
        dead.kill()
        yield made


def _start(lead: Lead, name: str, where: str, **files: str) -> Path:
    return lead.daemon.run(name, files.pop("exec", "true"), placement=f"node={where}", **files)


def test_why_a_node_cannot_be_used_is_said_in_time(lead: Lead) -> None:
    """A stop is obeyed before that, at once."""
    said = {name: said for name, (_, said) in _WRONG.items()}
    said |= {"closed": "placed.allow is false", "dead": "died"}
    began = time.monotonic()
    wait = {name: _start(lead, f"wait-{name}", name) for name in said}
    stop = [_start(lead, f"stop-{name}", name) for name in said]
    at = time.monotonic()
    for each in stop:
        if read(each, "status") != "dead\n":
            write(each / "ctl", "stop")
            wait_dead(each)
            assert (read(each, "outcome"), read(each, "reason")) == (
                "cancelled\n", "operator_stop\n"
            )  # fmt: skip
    assert time.monotonic() - at < _LATE, "all of them"
    for name, each in wait.items():
        wait_dead(each, timeout=_SECONDS + _LATE)
        assert read(each, "outcome") == "error\n"
        reason = read(each, "reason")
        assert reason.startswith(f"start_failed: {name}: ") and said[name] in reason, reason
    assert time.monotonic() - began < _SECONDS + _LATE


def test_what_its_host_does_not_have_is_said(lead: Lead) -> None:
    for name, files, why in (
        ("program", {"exec": "/no/such"}, "/no/such: no such program in the agent's view"),
        ("source", {"mount": "node:recipes/none /r ro\n"}, '"node:recipes/none" does not'),
    ):
        directory = _start(lead, name, "n2", **files)
        wait_dead(directory)
        reason = read(directory, "reason")
        assert reason.startswith("start_failed: n2: ") and why in reason, reason
    works = _start(lead, "works", "n2", exec="sleep 1000")
    wait_status(works, "busy")
    write(works / "ctl", "kill")
    wait_dead(works)


def test_who_says_anything_else_is_a_line_in_the_log(
    lead: Lead, host: Daemon, liar: FalseHost
) -> None:
    """For each minute; the link ends each time, and nobody else notices."""
    there = _start(lead, "there", "n2", exec="sleep 1000")
    wait_status(there, "busy")
    since = lead.rows()["n2"]["since"]
    began = time.monotonic()
    check = [str(CTX), "--root", str(lead.daemon.root), "nodes", "check", "liar"]
    for _ in range(4):
        # who waits for the link has it opened at once
        with subprocess.Popen(check, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as waits:
            wire = liar.meet()
            wire.raw(b"\x1b[31mhello\n")
            while wire.next() is not None:
                pass
            wire.socket.close()
            waits.kill()
        lead.wait("refused", "liar")
        assert lead.rows()["liar"]["error"].startswith("no frame: ")
        with false_lead(host) as stranger:
            stranger.say("bytes", agent="x", file="out", offset=0, length=5)
            while stranger.next() is not None:
                pass
    minutes = 1 + int((time.monotonic() - began) / 60)
    for log, start, why in (
        (lead.daemon.log, "link of uid 0 to liar: refused: ", "no frame: "),
        (host.log, "a lead of uid 0: ", "5 bytes, of 0 that were asked for"),
    ):
        lines = [line for line in log.read_text().splitlines() if start in line]
        assert 1 <= len(lines) <= minutes and why in lines[0], lines
    assert read(there, "status") == "busy\n" and lead.rows()["n2"]["since"] == since
    other = _start(lead, "other", "n2")
    wait_dead(other)
    assert read(other, "outcome") == "done\n"
    assert lead.daemon.finish("local", "echo local").is_dir()
    write(there / "ctl", "kill")
    wait_dead(there)
