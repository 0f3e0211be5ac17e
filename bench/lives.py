"""Lives of agents, and runs, turns and tasks of one, against the same without a daemon."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Final

from bench.agents import (
    await_end,
    check_done,
    fresh_name,
    make,
    running_agent,
    send,
    start,
    turn_agent,
    whole_life,
    write,
)
from bench.measure import Side, Sides
from bench.reference.commands import child_agent, finish, in_turn, inside, root_agent, spawn
from bench.reference.supervisors import crun, s6
from bench.setting import MakeSides, Setting

#: agents in the row ``crowd``
CROWD: Final = 100


def _bare(setting: Setting) -> Callable[[], int]:
    """Starts ``true`` in the namespaces and the view of a root agent, with nothing around them."""
    command = [*root_agent(setting.base / "run" / "root"), "true"]
    return lambda: spawn(command)


def _entered(pid: int) -> Callable[[], None]:
    """``true`` run by nsenter in the cell with this PID 1."""
    command = [*inside(pid), "true"]
    return lambda: finish(spawn(command))


def run_sides(setting: Setting, stack: ExitStack) -> Sides:
    bare = _bare(setting)
    reference = Side(name="bwrap", call=lambda: finish(bare()))
    return Side(name="agent", call=lambda: whole_life(setting)), [reference]


def child_sides(setting: Setting, stack: ExitStack) -> Sides:
    parent, pid = stack.enter_context(running_agent(setting))

    def run() -> None:
        directory = make(setting, fresh_name(), b"true\n")
        write(f"{directory}/parent", f"agent:{parent}\n".encode())
        start(directory)
        await_end(directory)
        check_done(directory)
        os.rmdir(directory)

    command = [*child_agent(pid), "true"]
    reference = Side(name="nsenter+bwrap", call=lambda: finish(spawn(command)))
    return Side(name="child", call=run), [reference]


def turn_sides(setting: Setting, stack: ExitStack) -> Sides:
    name, pid = stack.enter_context(turn_agent(setting))
    connection = stack.enter_context(socket.socket(socket.AF_UNIX))
    connection.connect(f"{setting.ctx}/agent/{name}.sock")
    bare = _bare(setting)
    references = [
        Side(name="nsenter", call=_entered(pid)),
        Side(name="bwrap", call=lambda: finish(bare())),
    ]
    return Side(name="message", call=lambda: send(connection, fresh_name())), references


def task_sides(setting: Setting, stack: ExitStack) -> Sides:
    name, pid = stack.enter_context(turn_agent(setting))

    def run() -> None:
        directory = f"{setting.ctx}/agent/{name}.d/task/{fresh_name()}"
        os.mkdir(directory)
        write(f"{directory}/cmd", b"true\n")
        start(directory)
        await_end(directory)
        os.rmdir(directory)

    return Side(name="task", call=run), [Side(name="nsenter", call=_entered(pid))]


def _crowd_of(setting: Setting, size: int) -> None:
    directories = [make(setting, fresh_name(), b"true\n") for _ in range(size)]
    for directory in directories:
        start(directory)
    for directory in directories:
        await_end(directory)
    for directory in directories:
        check_done(directory)
        os.rmdir(directory)


def _see_through(start: Callable[[int], list[int]], size: int) -> None:
    pids = start(size)
    while pids:
        finish(pids.pop())


def supervised(size: int) -> MakeSides:
    """So many lives at once, against those that others supervise, where they are installed."""

    def sides(setting: Setting, stack: ExitStack) -> Sides:
        ways = {
            "crun": crun(setting.base / f"crun-{size}", ["true"]),
            "s6": s6(setting.base / f"s6-{size}", size, ["true"]),
        }
        references = [
            Side(name=name, call=partial(_see_through, start, size))
            for name, start in ways.items()
            if start is not None
        ]
        return Side(name="agents", call=lambda: _crowd_of(setting, size)), references

    return sides


def crowd_sides(setting: Setting, stack: ExitStack) -> Sides:
    def run() -> None:
        _crowd_of(setting, CROWD)

    bare = _bare(setting)

    def run_bare() -> None:
        pids: list[int] = []
        try:
            for _ in range(CROWD):
                pids.append(bare())
        finally:
            # after Ctrl-C too: none may outlive what it uses
            while pids:
                finish(pids.pop())

    numbers = setting.base / "numbers"
    numbers.write_text("".join(f"{number}\n" for number in range(CROWD)))
    abreast = in_turn([*root_agent(setting.base / "run" / "root"), "true"], numbers, os.cpu_count())
    references = [
        Side(name="bwraps", call=run_bare),
        Side(name=f"xargs -P{os.cpu_count()}", call=lambda: finish(spawn(abreast))),
    ]
    return Side(name="agents", call=run), references
