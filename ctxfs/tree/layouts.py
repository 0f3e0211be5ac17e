"""Layouts: the kinds of objects that the tree has, each with its rows.

A plane says once where its objects are, which agent they belong to and who sees them. An
inode number is computed from the plane, the index of the object and the number of the row
(``numbers``), so that ten thousand agents cost no objects.

A layout holds everything in which kinds of objects differ. To add one, list it in
``ctxfs.filesystem.LAYOUTS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from ctxfs.caching import FOREVER
from ctxfs.tree.base import Base
from ctxfs.tree.numbers import ROWS
from ctxfs.tree.rows import Row
from runtime.records.model import Agent

_O = TypeVar("_O")


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout(Generic[_O]):
    """One kind of objects. Inode numbers are made of its ``number`` and that of the row, for
    which ``numbers.ROWS`` has the name of the row; ``LookupError`` where it has not.

    ``find`` gets the object of an index, for one of its rows; None once that is gone. ``path``
    tells where its directory is, from the root, ``agent`` whose authority decides, if it belongs
    to any, and ``created`` when it was made, if that is not when its agent was. The directory of an
    object that belongs to no agent is shown to belong to its ``owner``, else to the daemon.

    A name is looked up for each caller if it is ``asked`` for: not all may see it, and nothing
    above it hides it already. One that is ``unsettled`` may still become such a name. In a
    ``closed`` layout a caller finds only what it may read. When a control of a ``told`` layout is
    written, that is an event of its agent. The object of a ``removable`` one goes by
    rmdir(2) of its directory, with all that is there by itself.
    """

    number: int
    name: str
    rows: tuple[Row[_O], ...]
    find: Callable[[Base, int, Row[_O]], _O | None]
    path: Callable[[Base, _O], str]
    agent: Callable[[Base, _O], Agent | None] = lambda base, obj: None
    created: Callable[[_O], float | None] = lambda obj: None
    owner: Callable[[_O], tuple[int, int] | None] = lambda obj: None
    asked: Callable[[_O, Row[_O]], bool] = lambda obj, row: False
    unsettled: Callable[[_O, Row[_O]], bool] = lambda obj, row: False
    closed: bool = False
    told: bool = False
    removable: bool = False

    # rows

    def __post_init__(self) -> None:
        known, names = ROWS[self.name], [row.key for row in self.rows]
        if missing := [name for name in names if name not in known]:
            raise LookupError(f"add {missing} at the end of {self.name!r} in ctxfs/tree/numbers.py")

    @cached_property
    def numbered(self) -> dict[int, Row[_O]]:
        """The rows by number, in their order."""
        known = {name: number for number, name in enumerate(ROWS[self.name], 1)}
        return {known[row.key]: row for row in self.rows}

    @cached_property
    def top(self) -> int:
        """The number of the object's own directory, or of what stands for it."""
        return next(number for number, row in self.numbered.items() if row.top)

    @cached_property
    def numbers(self) -> dict[tuple[str, str], int]:
        """The numbers of what is in the object's directory, by directory in that and name."""
        return {
            (row.within, row.name): number
            for number, row in self.numbered.items()
            if row.is_inside
        }

    @cached_property
    def depending(self) -> dict[str, list[int]]:
        """The numbers of the rows that show a field."""
        found: dict[str, list[int]] = {}
        for number, row in self.numbered.items():
            for name in (row.name, *row.depends):
                found.setdefault(name, []).append(number)
        return found

    def number_of(self, name: str, within: str = "") -> int:
        return self.numbers[within, name]

    @cached_property
    def beside(self) -> dict[str, int]:
        """The numbers of the names that are shown next to the object's own, by suffix."""
        return {
            row.name: number for number, row in self.numbered.items() if row.path is not None
        }

    def row(self, name: str, within: str = "") -> Row[_O]:
        return self.numbered[self.number_of(name, within)]

    def within(self, directory: str) -> Iterator[tuple[int, Row[_O]]]:
        """Numbers and rows of what is in a directory of the object's."""
        for number, row in self.numbered.items():
            if row.is_inside and row.within == directory:
                yield number, row

    # inodes

    def inode(self, index: int, number: int) -> int:
        return (index << 16) | (self.number << 8) | number

    def inodes(self, index: int) -> list[int]:
        """The inode numbers of all rows of an object."""
        first = self.inode(index, 0)
        return [first + number for number in self.numbered]

    def path_of(self, base: Base, obj: _O, row: Row[_O]) -> str:
        """Where a row is, for reasons."""
        if row.path is not None:
            return row.path(obj)
        names = () if row.top else (row.within, row.name)
        return "/".join(filter(None, (self.path(base, obj), *names)))

    def keeps(self, obj: _O, row: Row[_O]) -> float:
        """How long the kernel may keep a row's name without asking again."""
        if not row.kept or self.asked(obj, row) or self.unsettled(obj, row):
            return 0.0
        return FOREVER


def only_top(obj: object, row: Row[Any]) -> bool:
    """Asked for are the objects themselves: they are not there for all."""
    return row.top


def split_inode(inode: int) -> tuple[int, int, int]:
    """(layout's number, index, row's number) of a computed inode number."""
    return (inode >> 8) & 0xFF, inode >> 16, inode & 0xFF
