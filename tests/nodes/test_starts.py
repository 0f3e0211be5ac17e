"""Starts at nodes that cannot be: what is wrong is said in time, and a stop waits for nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.worlds.daemon import daemon_of, read, wait_dead, wait_status, write
from tests.worlds.nodes import Lead, lead_of, node, peer

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
        "is to be in authorized_keys there",
    ),
    "later": ([*_SHELL, "echo ctxfs-peer 7 9; cat"], ": install a later ctxfs here"),
    "stranger": ([*_SHELL, "echo ctxfs-peer 1 2; echo hello; cat"], "no frame"),
}  # fmt: skip


@pytest.fixture(scope="module")
def lead() -> Iterator[Lead]:
    with ExitStack() as stack:
        host = stack.enter_context(daemon_of(config="node_name: two\n"))
        closed = stack.enter_context(daemon_of(config="placed: {allow: false}\n"))
        dead = stack.enter_context(daemon_of())
        nodes = {name: node(command) for name, (command, _) in _WRONG.items()}
        nodes |= {"n2": node(peer(host)), "closed": node(peer(closed)), "dead": node(peer(dead))}
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
        ("source", {"mount": "node:recipes/none /r ro\n"}, "does not exist"),
    ):
        directory = _start(lead, name, "n2", **files)
        wait_dead(directory)
        reason = read(directory, "reason")
        assert reason.startswith("start_failed: n2: ") and why in reason, reason
    works = _start(lead, "works", "n2", exec="sleep 1000")
    wait_status(works, "busy")
    write(works / "ctl", "kill")
    wait_dead(works)
