"""Plain operations on files of agents, with nothing but the system calls inside, against the same
on tmpfs, in a minimal filesystem, and with a database."""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Final

from bench.agents import agent, await_steady, directory_of, fresh_name, make, turn_agent
from bench.measure import Side, Sides
from bench.reference.minimal import FILES
from bench.setting import MakeSides, Setting

#: agents in the row ``list``; each has three names there
LISTED: Final = 1000


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


def public(setting: Setting, stack: ExitStack) -> str:
    """The directory of an agent that was started: one that may still turn private is looked
    up for each caller, whatever its files are."""
    name, _ = stack.enter_context(turn_agent(setting))
    directory = directory_of(setting, name)
    await_steady(directory)
    return directory


def new(setting: Setting, stack: ExitStack) -> str:
    """The directory of an agent that was not started, and may turn private."""
    directory = make(setting, fresh_name(), b"true\n")
    stack.callback(os.rmdir, directory)
    return directory


def stat_sides(find: Callable[[Setting, ExitStack], str]) -> MakeSides:
    def sides(setting: Setting, stack: ExitStack) -> Sides:
        def side(name: str, where: str) -> Side:
            path = f"{where}/status"
            return Side(name=name, call=lambda: os.stat(path))

        references = [side(name, where) for name, where in _copies(setting, "bench", stack)]
        return side("ctxfs", find(setting, stack)), references

    return sides


def read_sides(file: str, find: Callable[[Setting, ExitStack], str] = public) -> MakeSides:
    def sides(setting: Setting, stack: ExitStack) -> Sides:
        directory = find(setting, stack)
        references = [
            Side(name=name, call=_read(f"{where}/{file}"))
            for name, where in _copies(setting, "bench", stack)
        ]
        return Side(name="ctxfs", call=_read(f"{directory}/{file}")), references

    return sides


def commit_sides(setting: Setting, stack: ExitStack) -> Sides:
    directory = public(setting, stack)
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


def list_sides(setting: Setting, stack: ExitStack) -> Sides:
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
