"""The processes in cgroups, as a helper tells of them (census.c).

What procfs says of a process may wait for a lock of that process. So the daemon itself does not
look there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runtime.kernel import orders
from runtime.kernel.cgroups import Cgroup
from runtime.kernel.helpers import Helpers
from runtime.texts.names import dump_json

#: milliseconds and processes after which no more is looked at
_MS: Final = 600
MOST: Final = 4096
_MOST_COUNTED: Final = 16384
#: seconds after which nobody waits for the answer
SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where an agent's processes are. ``spared`` are PIDs of what surrounds its programs; until
    all have ``begun``, some of those are not known. ``keeper`` is PID 1 of its cell, or 0."""

    agent: str
    keeper: int
    leaves: tuple[Cgroup, ...]
    spared: frozenset[int]
    begun: bool = True


@dataclass(frozen=True, slots=True)
class Used:
    """Bytes that the processes of a place use, shared pages in parts (PSS), how many processes
    they are, and bytes of the files that the cell has in memory."""

    memory: int
    processes: int
    files: int


class Census:
    """Asks who is there, in the turn of an owner: he has one answer of a kind at a time."""

    def __init__(self, program: Path, helpers: Helpers) -> None:
        self._program = program
        self._helpers = helpers

    async def describe(self, owner: int, places: Iterable[Place], asker: int) -> bytes:
        """JSON Lines of the processes in these places, for a process or thread that asks.

        Keys: ``agent``, ``pid`` (in the asker's namespace), ``name``, ``state``, ``cpu`` (seconds),
        ``memory`` (bytes, PSS), ``age`` (seconds), ``command``. What cannot be had is null. A place
        where a program has not begun yet is left out. ``CtxError``, ``OSError``.
        """
        begun = [place for place in places if place.begun]
        if not begun:
            return b""
        told = ("list", _MS, MOST, asker, *_words(begun))
        return await self._helpers.tell(owner, "usage", self._program, *told, seconds=SECONDS)

    async def memory(
        self, owner: int, places: Sequence[Place], kind: str = "usage", *, processes: bool = True
    ) -> list[Used]:
        """Tells what each place uses; without ``processes``, nobody looks at the memory of those.
        ``CtxError``, ``OSError``."""
        told = ("memory", _MS, _MOST_COUNTED * processes, *_words(places))
        said = await self._helpers.tell(owner, kind, self._program, *told, seconds=SECONDS)
        return [Used(*map(int, line.split())) for line in said.splitlines()]


def _words(places: Sequence[Place]) -> tuple[orders.Order, orders.Order]:
    """SPARED and PLACES of census.c."""
    spared = sorted(frozenset().union(*(place.spared for place in places)))
    told = [[dump_json(each.agent), str(each.keeper), *map(str, each.leaves)] for each in places]
    return spared, told
