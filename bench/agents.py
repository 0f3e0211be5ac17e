"""Agents for the rows, made and used through the files of the mount."""

from __future__ import annotations

import errno
import itertools
import json
import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.setting import Setting

_START_SECONDS: Final = 120.0
#: longer than any status has to last for the kernel to keep its pages
_STEADY_SECONDS: Final = 2.0
_numbers: Final = itertools.count(1)


def fresh_name() -> str:
    """Used once: a name keeps its history, and the row would measure how that grows."""
    return f"b{next(_numbers)}"


def write(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def directory_of(setting: Setting, name: str) -> str:
    return f"{setting.ctx}/agent/{name}.d"


def make(setting: Setting, name: str, command: bytes) -> str:
    directory = directory_of(setting, name)
    os.mkdir(directory)
    write(f"{directory}/exec", command)
    return directory


def start(directory: str) -> None:
    fd = os.open(f"{directory}/ctl", os.O_WRONLY)
    try:
        os.write(fd, b"start\n")
    finally:
        os.close(fd)


def await_end(directory: str) -> None:
    fd = os.open(f"{directory}/wait", os.O_RDONLY)
    try:
        while os.read(fd, 4096):
            pass
    finally:
        os.close(fd)


def check_done(directory: str) -> None:
    """A row about agents that end well must not time agents that fail."""
    reason = Path(directory, "reason").read_text()
    if reason != "exit:0\n":
        raise RuntimeError(f"an agent of the bench ended with {reason.strip() or 'nothing'}")


def whole_life(setting: Setting) -> None:
    """From mkdir to rmdir of an agent whose program is ``true``."""
    directory = make(setting, fresh_name(), b"true\n")
    start(directory)
    await_end(directory)
    check_done(directory)
    os.rmdir(directory)


def _kill(directory: str) -> None:
    try:
        Path(directory, "ctl").write_text("kill\n")
    except OSError as error:
        if error.errno != errno.EBUSY:  # dead already
            raise


def await_busy(directory: str, wanted: bytes = b"busy\n") -> None:
    """Until its program runs, or it has another status, woken by poll(2)."""
    deadline = time.monotonic() + _START_SECONDS
    fd = os.open(f"{directory}/status", os.O_RDONLY)
    try:
        changed = select.poll()
        changed.register(fd, select.POLLPRI)
        while (status := os.pread(fd, 64, 0)) != wanted:
            if status == b"dead\n":
                reason = Path(directory, "reason").read_text().strip()
                raise RuntimeError(f"an agent of the bench did not run on: {reason}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{directory} is {status.decode().strip()}")
            changed.poll(1000)
    finally:
        os.close(fd)


def await_steady(directory: str) -> None:
    """Until its status has not changed for a while: only then its pages are kept."""
    age = time.time() - os.stat(f"{directory}/status").st_mtime
    time.sleep(max(0.0, _STEADY_SECONDS - age))


@contextmanager
def agent(setting: Setting, name: str) -> Iterator[str]:
    directory = make(setting, name, b"true\n")
    try:
        yield directory
    finally:
        os.rmdir(directory)


@contextmanager
def running_agent(setting: Setting, **files: bytes) -> Iterator[tuple[str, int]]:
    """(name, pid of its program) of an agent that runs until it is left, with what it owns."""
    name = fresh_name()
    directory = make(setting, name, b"sleep infinity\n")
    for file, data in files.items():
        write(f"{directory}/{file}", data)
    try:
        start(directory)
        await_busy(directory)
        yield name, int(Path(directory, "pid").read_text())
    finally:
        _kill(directory)
        await_end(directory)
        os.rmdir(directory)


@contextmanager
def turn_agent(setting: Setting) -> Iterator[tuple[str, int]]:
    """(name, pid of the PID 1 of its cell) of an agent with ``true`` for each message."""
    name = fresh_name()
    directory = make(setting, name, b"true\n")
    try:
        write(f"{directory}/mode", b"turn\n")
        start(directory)
        await_busy(directory, b"idle\n")
        cell = Path(Path(directory, "cgroup").read_text().strip(), "cell", "own", "cgroup.procs")
        yield name, max(map(int, cell.read_text().split()))
    finally:
        _kill(directory)
        await_end(directory)
        os.rmdir(directory)


def send(connection: socket.socket, ident: str) -> None:
    """A message, and its reply up to ``done``."""
    connection.sendall(json.dumps({"op": "send", "id": ident, "input": "x"}).encode() + b"\n")
    said = b""
    while b'"done"' not in said:
        said += connection.recv(65536)
    if b'"processed"' not in said:
        raise RuntimeError(f"a message of the bench ended with {said.decode()}")
