"""What the kernel must forget after a change, and which files poll(2) reports as changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from ctxfs.files import agent as agent_files
from ctxfs.files import root as root_files
from ctxfs.files import session as session_files
from ctxfs.files import task as task_files
from ctxfs.files.spaces import places_of
from ctxfs.tree.base import Base
from ctxfs.tree.items import ItemPlane
from ctxfs.tree.planes import Plane
from runtime.ids import AgentIndex, SessionIndex
from runtime.records.change import Subscriber
from runtime.records.items import Item, Message, Task
from runtime.records.model import Agent

_O = TypeVar("_O")


class Forgetting(Subscriber):
    """Finds the rows that show what changed, and tells the caches of their inodes."""

    def __init__(self, base: Base, planes: Iterable[Plane[Any]]) -> None:
        self._runtime = base.runtime
        self._reasons = base.reasons
        self._cache = base.cache
        self._durable = base.durable
        self._spaces = base.spaces
        #: those of records below every agent, by the kind of record
        self._of_items = {
            plane.cls.kind: plane for plane in planes if isinstance(plane, ItemPlane)
        }

    def agent_changed(self, index: AgentIndex, names: Iterable[str]) -> None:
        wanted = set(names)
        self._rows_changed(agent_files.PLANE, index, wanted)
        self._rows_changed(session_files.CHANNEL, index, wanted)
        agent = self._runtime.agents.registry.get(index)
        if agent is None:
            return
        if "reason" in wanted and agent.reason.startswith("start_failed: "):
            # nobody waited for it: its start was answered at once
            self._reasons.note_late(agent.incarnation, f"agent/{agent.name}.d/ctl", agent.reason)
        if agent.parent is not None and wanted & {"status", "handoff.md", "result.md"}:
            # the parent's handle shows it
            handle = self._runtime.agents.items.named(agent.parent, Task, agent.name)
            if handle is not None and handle.child == index:
                self._rows_changed(task_files.PLANE, handle.index, {"status", "title"})
        if wanted & {"uid", "gid", "owner"}:
            self._cache.forget_pages(agent_files.PLANE.inodes(index))
            for place in places_of(agent):
                space = self._spaces.known(place)
                if space is not None:
                    self._durable.forget_owner(space)

    def session_changed(self, index: SessionIndex, names: Iterable[str]) -> None:
        self._rows_changed(session_files.PLANE, index, set(names))

    def agent_listed(self, agent: Agent) -> None:
        """Once an agent is gone, has the kernel ask anew for what it knows of it."""
        if self._runtime.agents.registry.get(agent.index) is not None:
            return
        self._spaces.drop(places_of(agent))
        self._gone(agent_files.PLANE, agent.index)
        self._gone(agent_files.CHILD, agent.index)
        root = root_files.PLANE
        directory = root.inode(0, root.number_of("agent"))
        own = agent_files.PLANE.inode(agent.index, agent_files.PLANE.top)
        self._cache.forget_name(directory, agent.name + ".d", own)
        if agent.parent is not None:
            children = agent_files.PLANE.inode(agent.parent, agent_files.PLANE.number_of("child"))
            link = agent_files.CHILD.inode(agent.index, agent_files.CHILD.top)
            self._cache.forget_name(children, agent.name, link)

    def _gone(self, plane: Plane[_O], index: int) -> None:
        """The next request for any row of an object is to come here."""
        for inode in plane.inodes(index):
            self._cache.forget_attributes(inode)

    def item_changed(self, item: Item, names: Iterable[str]) -> None:
        if isinstance(item, Message):
            self.agent_changed(item.agent, ("queue",))
        plane = self._of_items.get(item.kind)
        if plane is not None:
            self._rows_changed(plane, item.index, set(names))

    def item_listed(self, item: Item) -> None:
        if isinstance(item, Message):
            self.agent_changed(item.agent, ("queue",))
        plane = self._of_items.get(item.kind)
        if plane is not None and self._runtime.agents.items.get(item.index) is None:
            self._gone(plane, item.index)
            directory = agent_files.PLANE.number_of(plane.name)
            self._cache.forget_name(
                agent_files.PLANE.inode(item.agent, directory),
                item.name,
                plane.inode(item.index, plane.top),
            )

    def _rows_changed(self, plane: Plane[_O], index: int, names: set[str]) -> None:
        numbers = {n for name in names for n in plane.depending.get(name, ())}
        for number in numbers:
            if plane.rows[number - 1].polled:
                self._cache.poller.changed(plane.inode(index, number))
        self._cache.forget_pages(plane.inode(index, number) for number in numbers)
