"""The rows: what is timed, and what it is compared with."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from bench.agents import (
    agent,
    await_end,
    await_steady,
    check_done,
    directory_of,
    fresh_name,
    make,
    running_agent,
    send,
    start,
    turn_agent,
    whole_life,
    write,
)
from bench.clients import FEW as CALM
from bench.clients import mcp_sides, ps_sides, spawn_sides
from bench.durable import agent_clone_pairs, agent_sides, clone_pairs, create_sides
from bench.many import FEW, MANY, measure_many
from bench.measure import Pair, Part, Ratio, Side, compare, compare_episodes
from bench.reference.commands import child_agent, finish, in_turn, inside, root_agent, spawn
from bench.reference.minimal import FILES
from bench.reference.supervisors import crun, s6
from bench.setting import Setting
from bench.sizes import size_pairs
from bench.trees import idling, killed_cgroup, killed_parent, killed_plain, running_tree, settle

#: agents in the row ``crowd``
CROWD: Final = 100
#: agents in the row ``supervised-300``
SUPERVISED: Final = 300
#: agents in the row ``list``; each has three names there
LISTED: Final = 1000

#: children of the smaller and of the larger tree that is ended
SMALL: Final = 100
LARGE: Final = 1000
#: children of one that is ended before, untimed
WARMING: Final = 5

Sides = tuple[Side, list[Side]]
MakeSides = Callable[[Setting, ExitStack], Sides]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison, or several of what is timed together."""

    name: str
    doc: str
    #: of the row's name, where things are, and the number of rounds
    measure: Callable[[str, Setting, int], list[Ratio]]
    #: part of the rounds that it gets, for rows whose single call is long
    share: float = 1.0


def _in_batches(sides: MakeSides) -> Callable[[str, Setting, int], list[Ratio]]:
    """``sides`` makes the subject and its references, and puts on the stack what undoes them."""

    def measure(row: str, setting: Setting, rounds: int) -> list[Ratio]:
        with ExitStack() as stack:
            subject, references = sides(setting, stack)
            return compare(row, subject, references, rounds)

    return measure


# plain file operations, with nothing but the system calls inside


def _read(path: str) -> Callable[[], object]:
    def call() -> None:
        fd = os.open(path, os.O_RDONLY)
        os.read(fd, 4096)
        os.close(fd)

    return call


def _overwrite(path: str, values: Iterator[bytes]) -> Callable[[], object]:
    def call() -> None:
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
        os.write(fd, next(values))
        os.close(fd)

    return call


def _values() -> Iterator[bytes]:
    """JSON objects of one length, no two after each other the same."""
    for number in itertools.cycle(range(10)):
        yield json.dumps({"number": number}).encode() + b"\n"


# what is compared with agents


def _copies(setting: Setting, name: str, stack: ExitStack) -> list[tuple[str, str]]:
    """(filesystem, directory) of an agent's files on tmpfs and in the minimal filesystems."""
    copy = setting.tmpfs / "agent" / f"{name}.d"
    copy.mkdir(parents=True, exist_ok=True)
    for file, data in FILES.items():
        (copy / file).write_bytes(data)
    return [
        ("tmpfs", str(copy)),
        ("minimal", f"{setting.minimal}/agent/bench.d"),
        ("minimal, kept", f"{setting.kept}/agent/bench.d"),
    ]


def _bare(setting: Setting) -> Callable[[], int]:
    """Starts ``true`` in the namespaces and the view of a root agent, with nothing around them."""
    command = [*root_agent(setting.base / "run" / "root"), "true"]
    return lambda: spawn(command)


def _entered(pid: int) -> Callable[[], None]:
    """``true`` run by nsenter in the cell with this PID 1."""
    command = [*inside(pid), "true"]
    return lambda: finish(spawn(command))


# the rows


def _public(setting: Setting, stack: ExitStack) -> str:
    """The directory of an agent that was started: one that may still turn private is looked
    up for each caller, whatever its files are."""
    name, _ = stack.enter_context(turn_agent(setting))
    directory = directory_of(setting, name)
    await_steady(directory)
    return directory


def _new(setting: Setting, stack: ExitStack) -> str:
    """The directory of an agent that was not started, and may turn private."""
    directory = make(setting, fresh_name(), b"true\n")
    stack.callback(os.rmdir, directory)
    return directory


def _stat_sides(find: Callable[[Setting, ExitStack], str]) -> MakeSides:
    def sides(setting: Setting, stack: ExitStack) -> Sides:
        def side(name: str, where: str) -> Side:
            path = f"{where}/status"
            return Side(name=name, call=lambda: os.stat(path))

        references = [side(name, where) for name, where in _copies(setting, "bench", stack)]
        return side("ctxfs", find(setting, stack)), references

    return sides


def _read_sides(file: str, find: Callable[[Setting, ExitStack], str] = _public) -> MakeSides:
    def sides(setting: Setting, stack: ExitStack) -> Sides:
        directory = find(setting, stack)
        references = [
            Side(name=name, call=_read(f"{where}/{file}"))
            for name, where in _copies(setting, "bench", stack)
        ]
        return Side(name="ctxfs", call=_read(f"{directory}/{file}")), references

    return sides


def _commit_sides(setting: Setting, stack: ExitStack) -> Sides:
    directory = _public(setting, stack)
    values = _values()
    places = _copies(setting, "bench", stack)
    references = [
        Side(name=name, call=_overwrite(f"{where}/meta.json", values)) for name, where in places
    ]
    overwrite = _overwrite(f"{places[0][1]}/meta.json", values)
    database = sqlite3.connect(setting.state / "reference.db", isolation_level=None)
    stack.callback(database.close)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=NORMAL")
    database.execute("CREATE TABLE control (idx INTEGER PRIMARY KEY, data TEXT NOT NULL)")
    database.execute("INSERT INTO control VALUES (1, '')")

    def write_and_commit() -> None:
        overwrite()
        database.execute("BEGIN IMMEDIATE")
        database.execute("UPDATE control SET data=? WHERE idx=1", (next(values).decode(),))
        database.execute("COMMIT")

    references.append(Side(name="tmpfs+sqlite", call=write_and_commit))
    return Side(name="ctxfs", call=_overwrite(f"{directory}/meta.json", values)), references


def _run_sides(setting: Setting, stack: ExitStack) -> Sides:
    bare = _bare(setting)
    reference = Side(name="bwrap", call=lambda: finish(bare()))
    return Side(name="agent", call=lambda: whole_life(setting)), [reference]


def _child_sides(setting: Setting, stack: ExitStack) -> Sides:
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


def _turn_sides(setting: Setting, stack: ExitStack) -> Sides:
    name, pid = stack.enter_context(turn_agent(setting))
    connection = stack.enter_context(socket.socket(socket.AF_UNIX))
    connection.connect(f"{setting.ctx}/agent/{name}.sock")
    bare = _bare(setting)
    references = [
        Side(name="nsenter", call=_entered(pid)),
        Side(name="bwrap", call=lambda: finish(bare())),
    ]
    return Side(name="message", call=lambda: send(connection, fresh_name())), references


def _task_sides(setting: Setting, stack: ExitStack) -> Sides:
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


def _supervised(size: int) -> MakeSides:
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


def _crowd_sides(setting: Setting, stack: ExitStack) -> Sides:
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


def _list_sides(setting: Setting, stack: ExitStack) -> Sides:
    for _ in range(LISTED):
        stack.enter_context(agent(setting, fresh_name()))
    listed = f"{setting.ctx}/agent"
    copy = setting.tmpfs / "many"
    copy.mkdir()
    for name in os.listdir(listed):
        (copy / name).touch()

    def side(name: str, path: str) -> Side:
        return Side(name=name, call=lambda: os.listdir(path))

    references = [side("tmpfs", str(copy)), side("minimal", f"{setting.minimal}/many")]
    return side("ctxfs", listed), references


def _measure_clone(row: str, setting: Setting, rounds: int) -> list[Ratio]:
    with ExitStack() as stack:
        return compare_episodes(clone_pairs(row, setting, stack), rounds)


def _measure_agent_clone(row: str, setting: Setting, rounds: int) -> list[Ratio]:
    with ExitStack() as stack:
        return compare_episodes(agent_clone_pairs(row, setting, stack), rounds)


def _measure_sizes(row: str, setting: Setting, rounds: int) -> list[Ratio]:
    return compare_episodes(size_pairs(setting), rounds)


def _end_pairs(setting: Setting, size: int, *, suffix: str = "") -> list[Pair]:
    parent, kill = killed_parent(setting, size), killed_cgroup(setting, size)
    return [
        Pair(
            row=f"end-{time}{suffix}",
            subject=Part(name="parent", episode=parent, time=time),
            reference=Part(name="cgroup.kill", episode=kill, time="gone"),
        )
        for time in ("gone", "recorded")
    ]


def _end(row: str, setting: Setting, rounds: int) -> list[Ratio]:
    killed_parent(setting, WARMING).run()
    pairs = _end_pairs(setting, SMALL)
    plain = Part(name="plain processes", episode=killed_plain(setting, SMALL), time="gone")
    pairs.append(replace(pairs[0], reference=plain))
    return compare_episodes(pairs, rounds)


def _end_large(row: str, setting: Setting, rounds: int) -> list[Ratio]:
    small, large = _end_pairs(setting, SMALL), _end_pairs(setting, LARGE, suffix=f"-{LARGE}")
    growths = [
        (f"{less.row}-growth", more.subject, less.subject)
        for more, less in zip(large, small, strict=True)
    ]
    growths.append(("end-kill-growth", large[0].reference, small[0].reference))
    for name, more, less in growths:
        large.append(
            Pair(
                row=name,
                subject=replace(more, name=f"1 of {LARGE}", time=f"{more.time}/child"),
                reference=replace(less, name=f"1 of {SMALL}", time=f"{less.time}/child"),
            )
        )
    killed_parent(setting, WARMING).run()
    return compare_episodes(large, rounds)


def _idle(row: str, setting: Setting, rounds: int) -> list[Ratio]:
    def pairs(name: str) -> list[Pair]:
        used = Part(name=name, episode=idling(setting, name), time="cpu")
        return [Pair(row=row, subject=used, reference=replace(used, name="one CPU", time="wall"))]

    settle()
    found = compare_episodes(pairs("0 agents"), rounds)
    with running_tree(setting, LARGE):
        settle()
        return found + compare_episodes(pairs(f"{LARGE} agents"), rounds)


ROWS: Final = (
    Row(
        name="stat",
        doc="stat(2) of an agent's status, names and attributes cached, against the same path "
        "on tmpfs and in the minimal filesystem",
        measure=_in_batches(_stat_sides(_public)),
    ),
    Row(
        name="stat-new",
        doc="the same of an agent that was not started: its names are looked up for each caller",
        measure=_in_batches(_stat_sides(_new)),
    ),
    Row(
        name="read-control",
        doc="open, read, close of exec, whose pages ctxfs lets the kernel keep and the minimal "
        "filesystem does not, against the same on tmpfs and there",
        measure=_in_batches(_read_sides("exec")),
    ),
    Row(
        name="read-status",
        doc="the same of status, which can be polled and is therefore rendered at every read",
        measure=_in_batches(_read_sides("status")),
    ),
    Row(
        name="read-new",
        doc="the same of an agent that was not started: its name is looked up at every read",
        measure=_in_batches(_read_sides("status", _new)),
    ),
    Row(
        name="commit",
        doc="open to replace, write, close of meta.json, which ctxfs commits durably, against a "
        "file on tmpfs, a file in the minimal filesystem's memory, and a file on tmpfs plus a "
        "commit to a SQLite database (WAL, synchronous=NORMAL) beside the daemon's",
        measure=_in_batches(_commit_sides),
    ),
    Row(
        name="run",
        doc="mkdir, exec=true, start, wait, rmdir of an agent, against bubblewrap with the same "
        "namespaces, view and ids run to its end",
        measure=_in_batches(_run_sides),
    ),
    Row(
        name="spawn",
        doc="ctx spawn --wait --rm of true, against the same by files, as in run, and against "
        "podman run --rm, without network and cgroups, where it is installed",
        measure=_in_batches(spawn_sides),
    ),
    Row(
        name="ps",
        doc=f"ctx ps of {CALM} agents, against the start of Python",
        measure=_in_batches(ps_sides),
    ),
    Row(
        name="mcp",
        doc="ctx mcp until its first answer, against Python until its first line",
        measure=_in_batches(mcp_sides),
    ),
    Row(
        name="child",
        doc="the same of a child in its parent's cell, against nsenter and bubblewrap in there",
        measure=_in_batches(_child_sides),
    ),
    Row(
        name="turn",
        doc="a message to a turn agent and its reply, a run of true, against true run by nsenter "
        "in the same cell, and against bubblewrap with a new one",
        measure=_in_batches(_turn_sides),
    ),
    Row(
        name="task",
        doc="mkdir, cmd=true, start, wait, rmdir of a task, against true run by nsenter in there",
        measure=_in_batches(_task_sides),
    ),
    Row(
        name="crowd",
        doc=f"{CROWD} agents made, started, waited for and removed together, against as many "
        "bubblewraps started and waited for together, and started by xargs, one per processor",
        measure=_in_batches(_crowd_sides),
        share=0.2,
    ),
    Row(
        name="supervised",
        doc="the same as run, against true in a container of crun with the view of an agent, and "
        "against true that s6-supervise sees through, where they are installed",
        measure=_in_batches(_supervised(1)),
    ),
    Row(
        name=f"supervised-{SUPERVISED}",
        doc=f"{SUPERVISED} agents made, started, waited for and removed together, against as "
        "many of these at once",
        measure=_in_batches(_supervised(SUPERVISED)),
        share=0.2,
    ),
    Row(
        name="list",
        doc=f"listing agent/ with {LISTED} agents, three names each, against as many files in a "
        "directory on tmpfs and in the minimal filesystem",
        measure=_in_batches(_list_sides),
    ),
    Row(
        name="end",
        doc=f"end-gone, end-recorded: SIGKILL to the program of an agent with {SMALL} children, "
        "until the last process is gone and until every end is recorded, against one write to "
        "cgroup.kill above such a tree, the daemon stopped, until the last process is gone; "
        f"end-gone also against cgroup.kill of {SMALL} plain processes in {SMALL} cgroups",
        measure=_end,
        share=0.34,
    ),
    Row(
        name="end-large",
        doc=f"the same with {LARGE} children; and ...-growth: the time for one of {LARGE} children "
        f"against that for one of {SMALL}, and the same of cgroup.kill",
        measure=_end_large,
        share=0.2,
    ),
    Row(
        name="idle",
        doc=f"CPU time of the daemon, its helpers, and all agents, with no agent and with {LARGE} "
        "that do nothing, against one CPU",
        measure=_idle,
        share=0.2,
    ),
    Row(
        name="many",
        doc=f"life-{MANY}: mkdir, exec=true, start, wait, rmdir of an agent among {MANY} agents, "
        f"against the same among {FEW} in another daemon; ps-{MANY}: ctx ps there, against Python "
        "that prints one file of as many bytes",
        measure=measure_many,
        share=0.2,
    ),
    Row(
        name="shared-create",
        doc="create, write, close of a file in data of shared/SPACE by root, against the same in "
        "the same directory by its path in the backing filesystem",
        measure=_in_batches(create_sides),
    ),
    Row(
        name="shared-clone",
        doc="git clone of a repository of 100 files into there, against the same",
        measure=_measure_clone,
        share=0.34,
    ),
    Row(
        name="shared-agent",
        doc="create, write, close of a file in a space by root in an agent's view, against the "
        "same in the same directory by its path in the backing filesystem",
        measure=_in_batches(agent_sides),
    ),
    Row(
        name="shared-agent-clone",
        doc="git clone of a repository of 100 files into there, against the same",
        measure=_measure_agent_clone,
        share=0.34,
    ),
    Row(
        name="sizes",
        doc="size-cell: memory (PSS) of what runs beside the program of an agent that does "
        "nothing, against that of bubblewrap; size-daemon: the daemon's memory of an agent that is "
        "new, and that runs; size-disk: room on disk of one that never ran; all four also or only "
        "against what they once were",
        measure=_measure_sizes,
        share=0.2,
    ),
)
