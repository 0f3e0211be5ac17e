"""The tree: from inode numbers and names to nodes, and what ties the planes together."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from ctxfs.caching import Cache
from ctxfs.disks import Disks, Work
from ctxfs.files import agent as agent_files
from ctxfs.files import root as root_files
from ctxfs.files import session as session_files
from ctxfs.files import task as task_files
from ctxfs.files import tool as tool_files
from ctxfs.files import waiting as waiting_files
from ctxfs.files import work as work_files
from ctxfs.files.spaces import SpaceRow, Spaces
from ctxfs.program import program
from ctxfs.reasons import Reasons
from ctxfs.tree.durable import Durable, DurableNode
from ctxfs.tree.handles import FileHandle, truncating_by_path
from ctxfs.tree.nodes import Call, Node
from ctxfs.tree.planes import ItemPlane, Plane, split_inode
from ctxfs.tree.rownodes import RowNode
from ctxfs.tree.rows import Directory, Opened, Row
from runtime.caller import INSIDERS, NOBODY, OPERATORS, PARTIES, Caller, Role
from runtime.cell.cell import working_directory, workspace
from runtime.errors import CtxError, DeniedError, ForbiddenError, GoneError, MissingError
from runtime.kernel.output import Output
from runtime.records.change import Watching
from runtime.records.items import Item, Message, Task
from runtime.records.model import Agent
from runtime.runtime import Runtime
from runtime.sockets import DAEMON_BIND_NAME
from runtime.texts.names import quote

ROOT_INODE: Final = 1
PLANES: Final = (
    root_files.PLANE,
    agent_files.PLANE,
    agent_files.CHILD,
    session_files.PLANE,
    session_files.CHANNEL,
    root_files.HOME,
    root_files.HISTORY,
    task_files.PLANE,
    work_files.PLANE,
    waiting_files.PLANE,
    tool_files.PLANE,
)
_BY_NUMBER: Final = {plane.number: plane for plane in PLANES}
#: those of records below every agent, by the kind of record
_OF_ITEMS: Final = {plane.cls.kind: plane for plane in PLANES if isinstance(plane, ItemPlane)}


class Filesystem(Watching):
    """What ``/ctx`` looks like. Knows the runtime; knows no FUSE requests."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime: Runtime = runtime
        self.reasons = Reasons(runtime.agents)
        self.cache = Cache()
        self.disks = Disks(runtime.agents.identity.payer)
        self.durable = Durable(self.cache, self.disks.close)
        self.nobody = NOBODY
        self.started = time.time()
        #: how many of the kernel's were answered
        self.requests = 0
        self.client_program: bytes = program()
        self.spaces = Spaces(self)
        runtime.agents.journal.watch(self)

    # inodes

    def node(self, inode: int) -> Node:
        """The node of an inode number that the kernel has been given; ``GoneError``.

        The kernel may have come here by a name that it kept: told that the inode is
        gone, it walks the path again and asks for each name anew.
        """
        if self.durable.owns(inode):
            return self.durable.get(inode)
        node = self._resolve(*split_inode(inode))
        if node is None:
            raise GoneError("what was here is gone")
        return node

    def has(self, node: RowNode) -> bool:
        """Whether what a row belongs to is still there."""
        return node.plane.find(self, node.index, node.row) is not None

    def _resolve(self, plane_number: int, index: int, number: int) -> RowNode | None:
        plane = _BY_NUMBER.get(plane_number)
        if plane is None or not 1 <= number <= len(plane.rows):
            return None
        obj = plane.find(self, index, plane.rows[number - 1])
        return plane.node(self, index, obj, number) if obj is not None else None

    @property
    def root(self) -> Node:
        return self.node(ROOT_INODE)

    def tree(self, row: SpaceRow, obj: Any) -> DurableNode:
        """The root directory of a space of real files."""
        return self.durable.root(self.spaces.of(row, obj))

    # names

    def lookup_in(self, directory: RowNode, row: Directory, call: Call, name: str) -> Node:
        """The entry of a row's directory; ``MissingError`` or ``DeniedError``."""
        if not name.isascii():
            raise MissingError(f"{quote(name)}: names here must be ASCII")
        node = row.find(self, directory.obj, call, name) if row.find is not None else None
        if node is None:
            node = self._member(directory, call, name)
        if node is None:
            raise MissingError(
                f"{quote(directory.shown(name))}: no such file or directory in "
                f"{directory.path or '/'}"
            )
        if (
            isinstance(node, RowNode)
            and node.plane.closed
            and not node.may_read(call.caller)
        ):
            raise DeniedError(f"the caller may not see {node.path}")
        return node

    def _member(self, directory: RowNode, call: Call, name: str) -> Node | None:
        plane = directory.plane
        number = plane.numbers.get((_inside(directory.row), name))
        if number is None:
            return None
        node = plane.node(self, directory.index, directory.obj, number)
        if not self._may_see(node, call):
            raise DeniedError(f"the caller may not see {node.row.name}")
        space = node.row.space if isinstance(node.row, Directory) else None
        return node if space is None else self.tree(space, node.obj)

    def list_in(self, directory: RowNode, row: Directory, call: Call) -> Iterator[str]:
        plane = directory.plane
        if row.entries is not None:
            yield from row.entries(self, directory.obj, call)
        for number, inner in plane.within(_inside(row)):
            if self._may_see(plane.node(self, directory.index, directory.obj, number), call):
                yield inner.name

    def _may_see(self, node: RowNode, call: Call) -> bool:
        if not node.plane.asked(node.obj, node.row) or node.may_read(call.caller):
            return True
        return bool(node.roles(call.caller) & node.writing_roles)

    def visible(self, agent: Agent, call: Call) -> bool:
        """Whether the caller may know of the agent."""
        if not agent.private:
            return True
        return bool(self.runtime.agents.identity.roles(call.caller, agent) & INSIDERS)

    def listed(self, agent: Agent, call: Call) -> bool:
        """Whether the caller finds the agent by listing; who may read it must know its name."""
        if not agent.private:
            return True
        caller = call.caller
        if caller.agent is not None and caller.agent not in (agent.index, agent.parent):
            return False  # whatever its policy says: that would have to be looked at for each
        return bool(self.runtime.agents.identity.roles(caller, agent) & PARTIES)

    # authority of nodes

    def root_roles(self, caller: Caller) -> Role:
        if not caller.known:
            return Role.NONE
        if caller.agent is None:
            master = self.runtime.agents.identity.is_master(caller)
            return (OPERATORS if master else Role.OPERATOR) | Role.ANYONE
        return Role.ANYONE

    def bound_socket(self, directory: RowNode, name: str) -> Node:
        """MKNOD by the binder: the socket is bound under a name nobody lists."""
        if directory.inode == ROOT_INODE and name == DAEMON_BIND_NAME:
            plane = root_files.PLANE
            return plane.node(self, 0, directory.obj, plane.number_of("ctxd.sock"))
        word = name.removeprefix(".bind-")
        agent = self.runtime.agents.registry.get(int(word)) if word.isdigit() else None
        if agent is None:
            raise ForbiddenError("nodes cannot be created here")
        return agent_files.entry(self, agent, ".sock")

    def truncate_row(self, node: RowNode, call: Call, size: int) -> None:
        """truncate(2) by path: of a control it changes nothing, of a history it is refused."""
        node.check_writer(call.caller)
        if not isinstance(node.row, Opened):
            return
        handle = node.open(call, os.O_WRONLY)
        try:
            handle.truncate(size)
        finally:
            handle.release()

    def cutting(self, node: RowNode, call: Call, size: int) -> Work[None] | None:
        """truncate(2) by path of a document; None for all other rows."""
        node.check_writer(call.caller)
        if not isinstance(node.row, Opened):
            return None
        first = node.open(call, os.O_WRONLY)
        first.release()
        if not isinstance(first, FileHandle):
            return None

        def opening() -> FileHandle:
            handle = node.open(call, os.O_WRONLY)
            assert isinstance(handle, FileHandle)
            return handle

        return truncating_by_path(opening, size)

    async def settled(self, directory: Node, name: str) -> None:
        """Returns when no thread changes the real file of this name; ``OverTimeError``."""
        if not self.disks.busy or not isinstance(directory, DurableNode):
            return
        try:
            inode = self.durable.find(directory, name).inode
        except (CtxError, OSError):
            return  # whoever asked for more is told so by what it does
        self.durable.forget(inode, 0)
        await self.disks.settled(inode)

    def output_directory(self, agent: Agent, name: str) -> Path:
        return self.runtime.agents.documents.directory(agent) / name

    def output(self, agent: Agent, name: str) -> Output:
        return Output(self.output_directory(agent, name))

    def working_directory(self, agent: Agent) -> str:
        return working_directory(self.runtime.agents, agent)

    def workspace(self, agent: Agent) -> str | None:
        """The workspace in force, None if there is none."""
        return workspace(self.runtime.agents, agent)

    # Watching

    def agent_changed(self, index: int, names: Iterable[str]) -> None:
        wanted = set(names)
        self._rows_changed(agent_files.PLANE, index, wanted)
        self._rows_changed(session_files.CHANNEL, index, wanted)
        agent = self.runtime.agents.registry.get(index)
        if agent is None:
            return
        if "reason" in wanted and agent.reason.startswith("start_failed: "):
            # nobody waited for it: its start was answered at once
            self.reasons.note_late(agent.incarnation, f"agent/{agent.name}.d/ctl", agent.reason)
        if agent.parent is not None and wanted & {"status", "handoff.md", "result.md"}:
            # the parent's handle shows it
            handle = self.runtime.agents.items.named(agent.parent, Task, agent.name)
            if handle is not None and handle.child == index:
                self._rows_changed(task_files.PLANE, handle.index, {"status", "title"})
        if wanted & {"uid", "gid", "owner"}:
            self.cache.forget_pages(agent_files.PLANE.inodes(index))
            for space in self.spaces.of_agent(agent):
                self.durable.forget_owner(space)

    def session_changed(self, index: int, names: Iterable[str]) -> None:
        self._rows_changed(session_files.PLANE, index, set(names))

    def agent_listed(self, agent: Agent) -> None:
        """What the kernel knows of an agent that is gone is asked for anew."""
        if self.runtime.agents.registry.get(agent.index) is not None:
            return
        self.spaces.drop_agent(agent)
        self._gone(agent_files.PLANE, agent.index)
        self._gone(agent_files.CHILD, agent.index)
        root = root_files.PLANE
        directory = root.inode(0, root.number_of("agent"))
        own = agent_files.PLANE.inode(agent.index, agent_files.PLANE.top)
        self.cache.forget_name(directory, agent.name + ".d", own)
        if agent.parent is not None:
            children = agent_files.PLANE.inode(agent.parent, agent_files.PLANE.number_of("child"))
            link = agent_files.CHILD.inode(agent.index, agent_files.CHILD.top)
            self.cache.forget_name(children, agent.name, link)

    def _gone(self, plane: Plane, index: int) -> None:
        """The next request for any row of an object is to come here."""
        for inode in plane.inodes(index):
            self.cache.forget_attributes(inode)

    def item_changed(self, item: Item, names: Iterable[str]) -> None:
        if isinstance(item, Message):
            self.agent_changed(item.agent, ("queue",))
        plane = _OF_ITEMS.get(item.kind)
        if plane is not None:
            self._rows_changed(plane, item.index, set(names))

    def item_listed(self, item: Item) -> None:
        if isinstance(item, Message):
            self.agent_changed(item.agent, ("queue",))
        plane = _OF_ITEMS.get(item.kind)
        if plane is not None and self.runtime.agents.items.get(item.index) is None:
            self._gone(plane, item.index)
            directory = agent_files.PLANE.number_of(plane.name)
            self.cache.forget_name(
                agent_files.PLANE.inode(item.agent, directory),
                item.name,
                plane.inode(item.index, plane.top),
            )

    def _rows_changed(self, plane: Plane, index: int, names: set[str]) -> None:
        numbers = {n for name in names for n in plane.depending.get(name, ())}
        for number in numbers:
            if plane.rows[number - 1].polled:
                self.cache.poller.changed(plane.inode(index, number))
        self.cache.forget_pages(plane.inode(index, number) for number in numbers)


def _inside(row: Row) -> str:
    """What the rows of a directory are ``within``."""
    return "" if row.top else row.name
