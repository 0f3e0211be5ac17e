"""Measuring and removing trees that agents may hold, lock and change: by a program of ours.

It is given up after a time (``runtime.kernel.helpers``), and gives up itself before.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from runtime.errors import UnansweredError
from runtime.kernel import orders
from runtime.kernel.helpers import Helpers

#: what a walk may take, in seconds; then it says what it has
_WALK: Final = 20
#: what a program that is held up may take before it is killed
_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Measured:
    """The measure of a tree; ``partial`` if it may have more."""

    bytes: int
    entries: int
    partial: bool = False


class Removed(StrEnum):
    """How far a tree was removed."""

    DONE = "done"
    MORE = "more"
    #: something in it cannot be removed
    STUCK = "stuck"


class Walker:
    """Walks trees below ``top``, as their owners; one tree after the other for each owner."""

    def __init__(self, helpers: Helpers, program: Path, top: Path) -> None:
        self._helpers = helpers
        self._program = program
        self._top = top

    async def measure(self, owner: int, trees: Sequence[str], *project: int) -> list[Measured]:
        """The measures of the first of these trees, as many as were taken in time; one that is not
        there has nothing. ``CtxError`` or ``OSError`` if none could be looked at.

        With a project of the filesystem's quotas all that is in them is given to that: what is
        not ``partial`` has nothing else, and will get nothing else.
        """
        verb = "bound" if project else "measure"
        return list(map(_measured, await self._ask("measure", verb, owner, trees, *project)))

    async def remove(self, owner: int, trees: Sequence[str]) -> list[Removed]:
        """How far the first of these trees and files were removed, as many as it came to in time;
        ``CtxError`` or ``OSError``."""
        return [Removed(line) for line in await self._ask("remove", "remove", owner, trees)]

    async def _ask(
        self, kind: str, verb: str, owner: int, trees: Sequence[str], *more: int
    ) -> list[str]:
        """The whole lines that the program wrote."""
        words = orders.words(self._program, verb, owner, _WALK, self._top, 3, 4, *more)
        names, answer = orders.message(trees), os.memfd_create("answer", os.MFD_CLOEXEC)
        try:
            with suppress(UnansweredError):  # what it wrote before is true
                await self._helpers.ask(
                    owner, kind, words, seconds=_SECONDS, message=names, fds=[answer]
                )
            said = os.pread(answer, os.fstat(answer).st_size, 0).decode()
        finally:
            os.close(answer)
        return said.split("\n")[:-1]


def _measured(line: str) -> Measured:
    size, _, entries = line.partition(" ")
    return Measured(int(size), int(entries.rstrip("+")), entries.endswith("+"))
