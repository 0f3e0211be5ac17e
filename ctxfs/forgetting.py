"""After a change: forgetting in the kernel's caches, and the files that poll(2) reports as
changed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TypeVar

from ctxfs.files import agent as agent_files
from ctxfs.files import agents as agents_file
from ctxfs.files import ask as ask_files
from ctxfs.files import placement as placement_files
from ctxfs.files import root as root_files
from ctxfs.files import session as session_files
from ctxfs.files import task as task_files
from ctxfs.files.folders import ARTIFACT, EPISODE
from ctxfs.tree.base import Base
from ctxfs.tree.items import ItemLayout
from ctxfs.tree.layouts import Layout
from runtime.ids import AgentIndex, SessionIndex
from runtime.records.change import Subscriber
from runtime.records.items import Ask, AskStatus, Item, Message, Task
from runtime.records.model import Agent, Session

_O = TypeVar("_O")


@lru_cache(maxsize=1024)
def _rows_showing(
    layout: Layout[Any], names: frozenset[str]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of the rows that show one of these, polled ones first: the same changes
    come again and again."""
    numbers = {number for name in names for number in layout.depending.get(name, ())}
    polled = {number for number in numbers if layout.numbered[number].polled}
    return tuple(polled), tuple(numbers - polled)


class Forgetting(Subscriber):
    """Finds the rows that show what changed, and tells the caches of their inodes."""

    def __init__(self, base: Base, layouts: Iterable[Layout[Any]]) -> None:
        self._runtime = base.runtime
        self._cache = base.cache
        self._folders = base.folders
        self._kept_lines = base.kept_lines
        root = root_files.LAYOUT
        self._list = root.inode(0, root.number_of(agents_file.ROW.name))
        self._asks = root.inode(0, root.number_of(ask_files.LIST.name))
        self._nodes = root.inode(0, root.number_of(placement_files.LIST.name))
        base.agents.nodes.changed = self._nodes_changed
        self._events = root.number_of("events")
        #: the files that other agents may write by policy
        self._told = [agent_files.LAYOUT.number_of(name) for name in ("ctl", "inbox")]
        #: those of records below every agent, by the kind of record
        self._of_items = {
            layout.cls.kind: layout for layout in layouts if isinstance(layout, ItemLayout)
        }

    def agent_changed(self, index: AgentIndex, names: Iterable[str]) -> None:
        wanted = frozenset(names)
        if wanted & agents_file.DEPENDS:
            self._line_changed(index)
        self._rows_changed(agent_files.LAYOUT, index, wanted)
        self._rows_changed(session_files.CHANNEL, index, wanted)
        agent = self._runtime.agents.registry.get(index)
        if agent is None:
            return
        if agent.node and wanted & {"node", "status"}:
            self._nodes_changed()
        if agent.parent is not None and wanted & {"status", "handoff.md", "result.md"}:
            # the parent's handle shows it
            handle = self._runtime.agents.items.named(agent.parent, Task, agent.name)
            if handle is not None and handle.child == index:
                self._rows_changed(task_files.LAYOUT, handle.index, frozenset(("status", "title")))
        if wanted & {"policy_of_root", "gid"}:
            # whom it may tell what to do (``Reach``)
            others = (each for each in self._runtime.agents.registry if each.gid != agent.gid)
            self._cache.forget_attributes_of(
                agent_files.LAYOUT.inode(other.index, number)
                for other in others
                for number in self._told
            )
        if wanted & {"uid", "gid", "owner"}:
            self._cache.forget_pages(agent_files.LAYOUT.inodes(index))
            self._folders.changed_owner(ARTIFACT, ARTIFACT.key(agent))
            self._folders.changed_owner(EPISODE, str(agent.session))

    def session_changed(self, index: SessionIndex, names: Iterable[str]) -> None:
        self._rows_changed(session_files.LAYOUT, index, frozenset(names))

    def history_grew(self, session: Session, size: int) -> None:
        self._logs_grew(session.owner, None)

    def caught_up(self) -> None:
        self._logs_grew(*(log.owner for log in self._runtime.agents.fleet.logs(None)), None)

    def _logs_grew(self, *owners: int | None) -> None:
        """There is more in ``events`` for these, and for root (None)."""
        for owner in owners:
            readers = root_files.LAYOUT.inode(root_files.reader_of(owner), self._events)
            if self._cache.poller.is_awaited(readers):
                self._cache.poller.changed_again(readers)

    def agent_listed(self, agent: Agent) -> None:
        """Once an agent is gone, has the kernel ask anew for what it knows of it."""
        self._line_changed(agent.index)
        if self._runtime.agents.registry.get(agent.index) is not None:
            return
        self._gone(agent_files.LAYOUT, agent.index)
        self._gone(agent_files.CHILD, agent.index)
        self._gone(agent_files.SUPERVISOR, agent.index)
        root = root_files.LAYOUT
        directory = root.inode(0, root.number_of("agent"))
        own = agent_files.LAYOUT.inode(agent.index, agent_files.LAYOUT.top)
        self._cache.forget_name(directory, agent.name + ".d", own)
        if agent.parent is not None:
            children = agent_files.LAYOUT.inode(agent.parent, agent_files.LAYOUT.number_of("child"))
            link = agent_files.CHILD.inode(agent.index, agent_files.CHILD.top)
            self._cache.forget_name(children, agent.name, link)

    def _line_changed(self, index: AgentIndex) -> None:
        """The line of an agent in ``agents`` is another one, or there is none any more."""
        self._kept_lines.drop(index)
        self._cache.poller.changed_again(self._list)

    def _nodes_changed(self) -> None:
        """The file ``nodes`` says something else."""
        self._cache.poller.changed_again(self._nodes)

    def _gone(self, layout: Layout[_O], index: int) -> None:
        """The next request for any row of an object is to come here."""
        self._cache.forget_attributes_of(layout.inodes(index))

    def item_changed(self, item: Item, names: Iterable[str]) -> None:
        if isinstance(item, Message):
            # one with a run was delivered, or has ended
            self.agent_changed(item.agent, ("queue", "message") if item.run else ("queue",))
        elif isinstance(item, Ask) and item.status is not AskStatus.NEW:
            self.agent_changed(item.agent, (ask_files.LAYOUT.name,))
            self._cache.poller.changed_again(self._asks)
        layout = self._of_items.get(item.kind)
        if layout is not None:
            self._rows_changed(layout, item.index, frozenset(names))

    def item_listed(self, item: Item) -> None:
        if isinstance(item, Message):
            self.agent_changed(item.agent, ("queue",))
        layout = self._of_items.get(item.kind)
        if layout is not None and self._runtime.agents.items.get(item.index) is None:
            self._gone(layout, item.index)
            directory = agent_files.LAYOUT.number_of(layout.name)
            self._cache.forget_name(
                agent_files.LAYOUT.inode(item.agent, directory),
                item.name,
                layout.inode(item.index, layout.top),
            )

    def _rows_changed(self, layout: Layout[_O], index: int, names: frozenset[str]) -> None:
        polled, plain = _rows_showing(layout, names)
        for number in polled:
            self._cache.forget_polled(layout.inode(index, number))
        self._cache.forget_pages(layout.inode(index, number) for number in plain)
