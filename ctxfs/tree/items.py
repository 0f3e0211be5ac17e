"""The layouts of planes, the items below each agent: tasks, work items, waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ctxfs.tree.base import Base
from ctxfs.tree.layouts import Layout
from ctxfs.tree.nodes import Call, Node
from ctxfs.tree.rownodes import found, node_of
from ctxfs.tree.rows import Directory, Making, Removing, Row, Target
from runtime.agents.parts import Agents
from runtime.agents.planes import Plane, PlaneKind
from runtime.caller import Caller
from runtime.errors import MissingError
from runtime.ids import ItemIndex
from runtime.records.items import Item
from runtime.records.model import Agent

_I = TypeVar("_I", bound=Item)


def agent_with(base: Base, item: Item) -> Agent:
    """The agent that a record belongs to; it may have been removed since."""
    agent = base.agents.registry.recall(item.agent)
    if agent is None:
        raise MissingError("this object was removed with its agent")
    return agent


@dataclass(frozen=True, kw_only=True, eq=False)
class ItemLayout(Layout[_I]):
    """A plane of records below each agent, such as ``work``, in a directory of its name.

    ``kind`` says who makes and removes records, and ``records`` does it.
    """

    kind: PlaneKind[_I]
    records: Callable[[Agents], Plane[_I]]

    @property
    def cls(self) -> type[_I]:
        return self.kind.cls

    def directory(self, doc: str) -> Directory[Agent]:
        """The row of the records' directory in the agent's own."""

        def find(base: Base, agent: Agent, call: Call, name: str) -> Node | None:
            return found(base, self, base.agents.items.named(agent.index, self.cls, name))

        def make(base: Base, agent: Agent, call: Call, name: str, mode: int) -> Node:
            item = self.records(base.agents).make(call.caller, agent, name)
            return node_of(base, self, item.index, item)

        def target(base: Base, agent: Agent, caller: Caller, name: str) -> Target[_I]:
            item = self.records(base.agents).find(agent, name)
            return Target(obj=item, agent=agent)

        def remove(base: Base, agent: Agent, caller: Caller, item: _I) -> None:
            self.records(base.agents).remove(agent, item)

        removing: Removing[Agent, _I] = Removing(
            guard=self.kind.removing, find=target, act=remove
        )
        return Directory(
            name=self.name, find=find, guard=self.kind.making,
            entries=lambda base, agent, call: (
                item.name for item in base.agents.items.of(agent.index, self.cls)
            ),
            make=Making(guard=self.kind.making, act=make),
            remove=removing,
            doc=doc,
        )  # fmt: skip


def item_layout(
    number: int,
    name: str,
    rows: tuple[Row[_I], ...],
    kind: PlaneKind[_I],
    records: Callable[[Agents], Plane[_I]],
) -> ItemLayout[_I]:
    def find(base: Base, index: int, row: Row[_I]) -> _I | None:
        item = base.agents.items.get(ItemIndex(index))
        if isinstance(item, kind.cls) and base.agents.registry.get(item.agent) is not None:
            return item
        return None

    return ItemLayout(
        number=number, name=name, rows=rows, kind=kind, records=records, find=find,
        path=lambda base, item: f"agent/{agent_with(base, item).name}.d/{name}/{item.name}",
        agent=agent_with, created=lambda item: item.created, removable=True,
    )  # fmt: skip
