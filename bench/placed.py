"""Agents at another machine, beside agents of that machine's own: a daemon that leads, and one that
is its host, over a pipe."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from typing import Final

from bench.agents import (
    await_busy,
    await_end,
    check_done,
    fresh_name,
    make,
    start,
    write,
)
from bench.measure import Side, Sides
from bench.setting import MakeSides, Setting, another_daemon, installed

#: agents in the row ``placed-100``
MANY: Final = 100
_PLACEMENT: Final = b"node=far\n"


def _two(setting: Setting, stack: ExitStack) -> tuple[Setting, Setting]:
    """A lead, and the host at its node."""
    host = stack.enter_context(another_daemon(setting, "node_name: far\n"))
    command = [installed("ctx"), "--root", str(host.ctx), "peer"]
    nodes = {"far": {"command": command, "as": "owner", "users": {"root": "root"}}}
    config = f"node_name: lead\nnodes: {json.dumps(nodes)}\n"
    return stack.enter_context(another_daemon(setting, config)), host


def _make(setting: Setting, command: bytes, placement: bytes) -> str:
    directory = make(setting, fresh_name(), command)
    if placement:
        write(f"{directory}/placement", placement)
    return directory


def _lives(setting: Setting, count: int, placement: bytes = b"") -> None:
    """So many agents, at once."""
    directories = [_make(setting, b"true\n", placement) for _ in range(count)]
    for each in directories:
        start(each)
    for each in directories:
        await_end(each)
        check_done(each)
        os.rmdir(each)


def life_sides(count: int) -> MakeSides:
    """``true``, from ``mkdir`` to ``rmdir``."""

    def sides(setting: Setting, stack: ExitStack) -> Sides:
        lead, host = _two(setting, stack)
        # keeps the link, and ends before its daemon
        kept = _make(lead, b"sleep infinity\n", _PLACEMENT)
        start(kept)
        stack.callback(os.rmdir, kept)
        stack.callback(await_end, kept)
        stack.callback(write, f"{kept}/ctl", b"kill\n")
        await_busy(kept)
        subject = Side(name="placed", call=lambda: _lives(lead, count, _PLACEMENT))
        return subject, [Side(name="at the host", call=lambda: _lives(host, count))]

    return sides


def read_sides(setting: Setting, stack: ExitStack) -> Sides:
    """open, read, close of status, of an agent that runs."""
    lead, _ = _two(setting, stack)
    sides = []
    for name, placement in (("placed", _PLACEMENT), ("local", b"")):
        directory = _make(lead, b"sleep infinity\n", placement)
        start(directory)
        stack.callback(os.rmdir, directory)
        stack.callback(await_end, directory)
        stack.callback(write, f"{directory}/ctl", b"kill\n")
        await_busy(directory)

        def read(path: str = f"{directory}/status") -> None:
            fd = os.open(path, os.O_RDONLY)
            os.read(fd, 100)
            os.close(fd)

        sides.append(Side(name=name, call=read))
    return sides[0], sides[1:]
