"""Planes: the kinds of objects that the tree has, each with its rows.

What an object of a plane is, where it is, whose it is and who sees it is said once, by
the plane. An inode number is computed of the plane, the index of the object and the
place of the row, so that ten thousand agents cost no objects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ctxfs.caching import FOREVER
from ctxfs.tree.nodes import Call, Node
from ctxfs.tree.rownodes import RowNode
from ctxfs.tree.rows import Directory, Making, Removing, Row, Target
from runtime.agents import planes
from runtime.caller import Caller
from runtime.errors import MissingError
from runtime.records.items import Item
from runtime.records.model import Agent

if TYPE_CHECKING:
    from ctxfs.filesystem import Filesystem
    from runtime.agents.parts import Agents


@dataclass(frozen=True, kw_only=True, eq=False)
class Plane(ABC):
    """One kind of objects. ``number`` is its part of inode numbers; of a row, its place.

    In a ``closed`` plane nothing is found by whoever may not read it. That a control of a
    ``told`` plane was written is an event of its agent's.
    """

    number: int
    name: str
    rows: tuple[Row, ...]
    closed: bool = False
    told: bool = False

    # what each plane says of its objects

    @abstractmethod
    def find(self, fs: Filesystem, index: int, row: Row) -> Any | None:
        """The object of an index, for one of its rows; None once that is gone."""

    @abstractmethod
    def path(self, fs: Filesystem, obj: Any) -> str:
        """Where the object's directory is, from the root."""

    def agent(self, fs: Filesystem, obj: Any) -> Agent | None:
        """The agent whose authority decides; None for what is of no agent."""
        return None

    def asked(self, obj: Any, row: Row) -> bool:
        """Whether a name is looked up for each caller: not all may see it, and nothing
        above it hides it already."""
        return False

    def unsettled(self, obj: Any, row: Row) -> bool:
        """Whether a name that all may see may still become one that not all may."""
        return False

    # rows

    @cached_property
    def top(self) -> int:
        """The number of the object's own directory, or of what stands for it."""
        return next(number for number, row in enumerate(self.rows, 1) if row.top)

    @cached_property
    def numbers(self) -> dict[tuple[str, str], int]:
        """Of what is in the object's directory, by directory in that and name."""
        return {
            (row.within, row.name): number
            for number, row in enumerate(self.rows, 1)
            if row.is_inside
        }

    @cached_property
    def depending(self) -> dict[str, list[int]]:
        """The numbers of the rows that show a field."""
        found: dict[str, list[int]] = {}
        for number, row in enumerate(self.rows, 1):
            for name in (row.name, *row.depends):
                found.setdefault(name, []).append(number)
        return found

    def number_of(self, name: str, within: str = "") -> int:
        return self.numbers[within, name]

    def beside(self, suffix: str) -> int:
        """The number of the name that is shown next to the object's own, with a suffix."""
        return next(
            number
            for number, row in enumerate(self.rows, 1)
            if row.path is not None and row.name == suffix
        )

    def row(self, name: str, within: str = "") -> Row:
        return self.rows[self.number_of(name, within) - 1]

    def within(self, directory: str) -> Iterator[tuple[int, Row]]:
        """Numbers and rows of what is in a directory of the object's."""
        for number, row in enumerate(self.rows, 1):
            if row.is_inside and row.within == directory:
                yield number, row

    # inodes

    def inode(self, index: int, number: int) -> int:
        return (index << 16) | (self.number << 8) | number

    def inodes(self, index: int) -> Iterator[int]:
        """Of all rows of an object."""
        return (self.inode(index, number) for number in range(1, len(self.rows) + 1))

    def node(self, fs: Filesystem, index: int, obj: Any, number: int = 0) -> RowNode:
        """A row of an object; without a number, its directory."""
        return RowNode(fs, self, index, obj, number or self.top)

    def path_of(self, fs: Filesystem, obj: Any, row: Row) -> str:
        """Where a row is, for reasons."""
        if row.path is not None:
            return row.path(obj)
        names = () if row.top else (row.within, row.name)
        return "/".join(filter(None, (self.path(fs, obj), *names)))

    def keeps(self, obj: Any, row: Row) -> float:
        """How long the kernel may keep a row's name without asking again."""
        if not row.kept or self.asked(obj, row) or self.unsettled(obj, row):
            return 0.0
        return FOREVER


def split_inode(inode: int) -> tuple[int, int, int]:
    """(plane's number, index, row's number) of a computed inode number."""
    return (inode >> 8) & 0xFF, inode >> 16, inode & 0xFF


def agent_with(fs: Filesystem, item: Item) -> Agent:
    """The agent that a record belongs to; it may have been removed since."""
    agent = fs.runtime.agents.registry.recall(item.agent)
    if agent is None:
        raise MissingError("what was here is gone, with its agent")
    return agent


@dataclass(frozen=True, kw_only=True, eq=False)
class ItemPlane(Plane):
    """A plane of records below each agent, such as ``work``: its name is that of the directory.

    ``kind`` says who makes and removes them, ``records`` does that.
    """

    cls: type[Item]
    kind: type[planes.Plane[Any]]
    records: Callable[[Agents], planes.Plane[Any]]

    def find(self, fs: Filesystem, index: int, row: Row) -> Item | None:
        agents = fs.runtime.agents
        item = agents.items.get(index)
        if isinstance(item, self.cls) and agents.registry.get(item.agent) is not None:
            return item
        return None

    def path(self, fs: Filesystem, item: Item) -> str:
        return f"agent/{agent_with(fs, item).name}.d/{self.name}/{item.name}"

    def agent(self, fs: Filesystem, item: Item) -> Agent:
        return agent_with(fs, item)

    def directory(self, doc: str) -> Directory:
        """The row of the records' directory in the agent's own."""

        def entries(fs: Filesystem, agent: Agent, call: Call) -> Iterator[str]:
            for item in fs.runtime.agents.items.of(agent.index, self.cls):
                yield item.name

        def find(fs: Filesystem, agent: Agent, call: Call, name: str) -> Node | None:
            item = fs.runtime.agents.items.named(agent.index, self.cls, name)
            return self.node(fs, item.index, item) if item is not None else None

        def make(fs: Filesystem, agent: Agent, call: Call, name: str, mode: int) -> Node:
            item: Item = self.records(fs.runtime.agents).make(call.caller, agent, name)
            return self.node(fs, item.index, item)

        def target(fs: Filesystem, agent: Agent, caller: Caller, name: str) -> Target:
            agents = fs.runtime.agents
            item: Item = self.records(agents).find(agent, name)
            return Target(obj=item, roles=agents.identity.roles(caller, agent), agent=agent)

        def remove(fs: Filesystem, agent: Agent, caller: Caller, item: Item) -> None:
            self.records(fs.runtime.agents).remove(caller, agent, item.name)

        return Directory(
            name=self.name, entries=entries, find=find, guard=self.kind.making,
            make=Making(guard=self.kind.making, act=make),
            remove=Removing(guard=self.kind.removing, find=target, act=remove),
            doc=doc,
        )  # fmt: skip
