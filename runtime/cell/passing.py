"""The descriptors that the steps into a cell find, in the order in which ``Plan`` counts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from runtime.cell.cell import Places, Plan
from runtime.kernel import orders, seqpackets


def open_program(places: Places, name: str, *, rootless: bool) -> int:
    """A descriptor to execute one of the programs by.

    Nobody who executes it can read it, so that no agent can trace what it becomes
    (PR_SET_DUMPABLE in prctl(2)). Without root the file is the agents' own uid's: it is a
    sealed copy then, which they cannot change even if they get at it.
    """
    path = places.program(name)
    if not rootless:
        return os.open(path, os.O_PATH | os.O_CLOEXEC)
    fd = orders.sealed_file(name, path.read_bytes())
    try:
        os.fchmod(fd, 0o111)
    except OSError:
        os.close(fd)
        raise
    return fd


@contextmanager
def passed_files(
    prepared: Plan,
    places: Places,
    parent_cell: int | None,
    *,
    rootless: bool,
    hand: Path | None = None,
) -> Iterator[list[int]]:
    """The descriptors that the steps find from 4 on, in order.

    ``parent_cell`` is a pidfd of the parent's keeper, ``hand`` where the cell's own keeper hands
    out what it listens on.
    """
    with ExitStack() as stack:
        opened: list[int] = []

        def add(fd: int) -> None:
            stack.callback(os.close, fd)
            opened.append(fd)

        add(orders.memory_file("spec", prepared.spec))
        if prepared.networks:
            assert hand is not None
            add(seqpackets.listen(hand))
        add(open_program(places, "keeper", rootless=rootless))
        if prepared.view:
            add(orders.memory_file("view", orders.message(prepared.view)))
        for name in prepared.programs[1:]:
            add(open_program(places, name, rootless=rootless))
        if prepared.stage:
            add(orders.memory_file("stage", prepared.stage))
        if parent_cell is not None:
            opened.append(parent_cell)
        if prepared.lend:
            add(orders.memory_file("lend", prepared.lend))
        yield opened
