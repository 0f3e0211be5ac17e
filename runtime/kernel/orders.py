"""Orders of the daemon to its programs: the only writer of what native/orders.h reads.

A program is given strings in an order that both sides know, and where there can be several of
something, their number before them. They are its arguments; or a message, if nobody else may read
them (proc(5) shows arguments to all), or there are too many. A command that a program is to go on
with is a list of its arguments, in which the command after that has its number in turn.

What programs answer has other forms, each told where it is written: it is read by one caller, and
in one case (the record of a run) by later versions of the daemon.

A program reads all its orders before it acts, and does nothing if they are damaged. A process that
outlives the daemon gets no orders later, because the next daemon may be of another version. It
gets signals (the keeper), sees the daemon's FIFO, is sent bytes at a socket (the monitor,
inlet.h), and writes the run's record. Socket and record state their versions.

Programs in C and in Python share numbers, never names of constants: their C libraries number some
of them differently (``SIGRTMIN``), and a test compares all that both name.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import PurePath

Word = str | int | PurePath
#: one, or several, or several lists
Order = Word | Sequence[Word] | Sequence[Sequence[Word]]


def words(*orders: Order) -> list[str]:
    """Orders as arguments of a program."""
    found: list[str] = []
    for order in orders:
        if isinstance(order, Word):
            found.append(order if isinstance(order, str) else str(order))
        else:
            _add_list(found, order)
    text = "".join(found)
    if "\0" in text:  # what follows it would be another order
        raise ValueError(f"an order for a program has a NUL: {text!r}")
    return found


def message(*orders: Order) -> bytes:
    """Orders as a message: the number of all strings, then each of them, ended by a NUL."""
    found = words(*orders)
    return os.fsencode("\0".join([str(len(found)), *found, ""]))


def memory_file(name: str, *parts: bytes) -> int:
    """A descriptor to read a message from (memfd_create(2)): never on a disk."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    begin = 0
    for part in parts:
        written = 0
        while written < len(part):  # the offset stays 0, for who reads it
            written += os.pwrite(fd, part[written:], begin + written)
        begin += written
    return fd


def sealed_file(name: str, *parts: bytes) -> int:
    """A file in memory with these bytes, changed by nobody who opens it anew (F_ADD_SEALS in
    fcntl(2))."""
    fd = memory_file(name, *parts)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _add_list(found: list[str], order: Sequence[Word] | Sequence[Sequence[Word]]) -> None:
    found.append(str(len(order)))
    lists = 0
    for each in order:
        if isinstance(each, str):  # most are
            found.append(each)
        elif isinstance(each, Word):
            found.append(str(each))
        else:
            lists += 1
            _add_list(found, each)
    if lists not in (0, len(order)):  # the number would not count its strings
        raise ValueError(f"words and lists in one list: {order!r}")
