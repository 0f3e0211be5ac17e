"""The tree: from inode numbers and names to nodes, and what ties the planes together."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from ctxfs.caching import FOREVER, Cache
from ctxfs.disks import Disks, Work
from ctxfs.durable import Durable, DurableNode, Space
from ctxfs.files import agent as agent_files
from ctxfs.files import root as root_files
from ctxfs.files import session as session_files
from ctxfs.files import task as task_files
from ctxfs.files import tool as tool_files
from ctxfs.files import waiting as waiting_files
from ctxfs.files import work as work_files
from ctxfs.handles import FileHandle, truncating_by_path
from ctxfs.nodes import Call, Node
from ctxfs.program import program
from ctxfs.reasons import Reasons
from ctxfs.rows import ITEM, ItemPlane, Kind, Plane, Row, RowNode, Table, inode_number, split_inode
from runtime.caller import CONTROLLERS, INSIDERS, NOBODY, OPERATORS, PARTIES, Caller, Role
from runtime.cell import working_directory, workspace
from runtime.change import Watching
from runtime.errors import (
    CtxError,
    DeniedError,
    ForbiddenError,
    GoneError,
    MalformedError,
    MissingError,
    NotEmptyError,
    QuotaError,
    TakenError,
    WrongStateError,
)
from runtime.items import Item, Message, Task
from runtime.lifecycle import Status
from runtime.model import Agent
from runtime.names import check_name, quote
from runtime.output import Output
from runtime.runtime import Runtime
from runtime.sockets import DAEMON_BIND_NAME

ROOT_INODE: Final = 1
#: the planes of records below every agent, by the kind of record
_PLANES: Final = {
    plane.cls.kind: plane for plane in (task_files.PLANE, work_files.PLANE, waiting_files.PLANE)
}
_ITEM_PLANES: Final[dict[int, ItemPlane]] = {
    plane.table.plane: plane for plane in _PLANES.values()
}
#: rows that a session shows when their agent is gone
_OUTLIVING: Final = frozenset(
    agent_files.TABLE.number(name)
    for name in {*session_files.DOCUMENTS, *session_files.ARCHIVED}
)
_DIRECTORIES: Final = tuple(plane.name for plane in _PLANES.values())


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
        self._spaces: dict[str, Space] = {}
        runtime.agents.journal.watch(self)

    # inodes

    def node(self, inode: int) -> Node:
        """The node of an inode number that the kernel has been given; ``GoneError``.

        The kernel may have come here by a name that it kept: told that the inode is
        gone, it walks the path again and asks for each name anew.
        """
        if self.durable.owns(inode):
            return self.durable.get(inode)
        if inode == ROOT_INODE:
            return self._root(root_files.ROOT_NUMBER)
        plane, index, number = split_inode(inode)
        node = self._resolve(plane, index, number)
        if node is None:
            raise GoneError("what was here is gone")
        return node

    def has(self, node: RowNode) -> bool:
        """Whether what a row belongs to is still there."""
        return self._resolve(node.table.plane, node.index, node.number) is not None

    def _resolve(self, plane: int, index: int, number: int) -> Node | None:
        agents = self.runtime.agents
        if plane == Plane.ROOT:
            return self._root(number)
        if plane in (Plane.AGENT, Plane.CHILD):
            agent = agents.registry.get(index)
            table = agent_files.TABLE if plane == Plane.AGENT else agent_files.CHILD_TABLE
            if agent is None and plane == Plane.AGENT and number in _OUTLIVING:
                agent = agents.registry.recall(index)
            return RowNode(self, table, index, agent, number) if agent is not None else None
        if plane == Plane.CHANNEL:
            agent = agents.registry.recall(index)
            if agent is None:
                return None
            return RowNode(self, session_files.CHANNEL_TABLE, index, agent, number)
        if plane == Plane.SESSION:
            session = agents.sessions.get(index)
            if session is None:
                return None
            return RowNode(self, session_files.TABLE, index, session, number)
        if plane == Plane.HOME:
            return RowNode(self, root_files.HOME_TABLE, index, index, number)
        if plane == Plane.HISTORY:
            session = agents.sessions.get(index)
            if session is None:
                return None
            key = (session.owner, session.agent)
            return RowNode(self, root_files.HISTORY_TABLE, index, key, number)
        if plane == Plane.TOOL:
            return tool_files.node_of(self, index, number)
        of_items = _ITEM_PLANES.get(plane)
        item = agents.items.get(index)
        if (
            of_items is not None
            and isinstance(item, of_items.cls)
            and agents.registry.get(item.agent) is not None
        ):
            return RowNode(self, of_items.table, index, item, number)
        return None

    @property
    def root(self) -> Node:
        return self._root(root_files.ROOT_NUMBER)

    def _root(self, number: int) -> RowNode:
        node = RowNode(self, root_files.TABLE, 0, None, number)
        if number == root_files.ROOT_NUMBER:
            node.inode = ROOT_INODE
        return node

    # names

    def lookup_in(self, directory: RowNode, call: Call, name: str) -> Node:
        """The entry of a row's directory; ``MissingError`` or ``DeniedError``."""
        row = directory.row
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
            and node.table.plane is Plane.SESSION
            and not node.may_read(call.caller)
        ):
            raise DeniedError(f"the caller may not see {node.path}")
        return node

    def _member(self, directory: RowNode, call: Call, name: str) -> Node | None:
        if directory.table.plane is Plane.ROOT and directory.inode == ROOT_INODE and name == "self":
            return self._self_link(call)
        number = directory.table.by_name.get((_inside(directory), name))
        if number is None or name == "":
            holder = self._holder(directory)
            return self._shared_document(holder[0], name, holder[1]) if holder else None
        node = RowNode(self, directory.table, directory.index, directory.obj, number)
        if self._may_see(node, call):
            return self._real(node)
        raise DeniedError(f"the caller may not see {node.row.name}")

    def list_in(self, directory: RowNode, call: Call) -> Iterator[str]:
        row = directory.row
        if row.entries is not None:
            yield from row.entries(self, directory.obj, call)
        if directory.inode == ROOT_INODE and call.caller.agent is not None:
            yield "self"
        for number, inner in directory.table.within(_inside(directory)):
            node = RowNode(self, directory.table, directory.index, directory.obj, number)
            if inner.name and self._may_see(node, call):
                yield inner.name
        holder = self._holder(directory)
        if holder is not None:
            yield from holder[1]

    def _holder(self, directory: RowNode) -> tuple[Agent, tuple[str, ...]] | None:
        """Whose documents a directory shows beside its own rows, and which."""
        if directory.row.name:
            return None
        if directory.table.plane is Plane.CHANNEL:
            return directory.obj, session_files.DOCUMENTS
        if directory.table.plane is Plane.SESSION:
            agent = self.runtime.agents.registry.recall(directory.obj.incarnation)
            if agent is not None and agent.archived:
                return agent, session_files.ARCHIVED
        return None

    def _may_see(self, node: RowNode, call: Call) -> bool:
        if not self._gated(node) or node.may_read(call.caller):
            return True
        return bool(node.roles(call.caller) & node.writing_roles)

    def _real(self, node: RowNode) -> Node:
        """Directories of real files are nodes of their own kind."""
        row = node.row
        if row.kind is Kind.DIRECTORY:
            if node.table.plane is Plane.AGENT and row.name == "artifact":
                return self.artifacts(node.obj)
            if node.table.plane is Plane.SESSION and row.name == "episode":
                return self.durable.root(self._episodes(node.obj))
            if node.table.plane is Plane.HOME and row.name == "data":
                return self._data(node.index)
        return node

    def _gated(self, node: RowNode) -> bool:
        """Whether this name is looked up per caller: not all may see it, and
        nothing above it hides it already."""
        row = node.row
        if node.table.plane is Plane.AGENT:
            agent: Agent = node.obj
            if row.within == "agent":
                return agent.private
            if row.within in _DIRECTORIES:
                return False  # their directory is
            # below a private name all is for those who know it, but for what is delegated
            return row.delegated if agent.private else not row.public
        planes = (Plane.HISTORY, Plane.SESSION, Plane.CHANNEL)
        return node.table.plane in planes and row.name == ""

    def entry_timeout(self, node: RowNode) -> float:
        """How long the kernel may keep the name without asking again."""
        row = node.row
        if row.within in ("self", "trigger", "tool") or self._gated(node):
            return 0.0
        if node.table.plane is Plane.AGENT:
            # connect(2) does not walk again when it comes to a socket that is gone
            if row.within == "agent" and row.name != ".d":
                return 0.0
            # it may still become a private one: nothing has to be forgotten then
            if node.obj.status is Status.NEW and (row.within == "agent" or not row.public):
                return 0.0
        return FOREVER

    def _self_link(self, call: Call) -> Node | None:
        caller = call.caller
        agent = self.runtime.agents.registry.get(caller.agent) if caller.agent is not None else None
        if agent is None:
            return None
        number = agent_files.TABLE.number("self", "self")
        return RowNode(self, agent_files.TABLE, agent.index, agent, number)

    def agent_entry(self, name: str) -> RowNode | None:
        """NAME, NAME.sock or NAME.d in ``/ctx/agent``."""
        for suffix in (".d", ".sock", ""):
            if name.endswith(suffix):
                agent = self.runtime.agents.registry.named(name.removesuffix(suffix))
                if agent is None:
                    return None
                number = agent_files.TABLE.number(suffix, "agent")
                return RowNode(self, agent_files.TABLE, agent.index, agent, number)
        return None

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

    def describe(self, node: RowNode) -> str:
        """Where a row is, for reasons."""
        plane, row, obj = node.table.plane, node.row, node.obj
        within = f"{row.within}/" if row.within and row.within in ("bin", "context") else ""
        if plane is Plane.AGENT:
            if row.within == "agent":
                return f"agent/{obj.name}{row.name}"
            inner = f"{row.within}/" if row.within in _DIRECTORIES else ""
            return f"agent/{obj.name}.d/{inner}{row.name}"
        if plane in _ITEM_PLANES:
            if row.within == "trigger":
                return "trigger"  # its name is a secret
            base = f"agent/{self.agent_with(obj).name}.d/{_ITEM_PLANES[plane].name}/{obj.name}"
            return f"{base}/{row.name}".rstrip("/")
        if plane is Plane.CHILD:
            return f"agent/{obj.name}.d"
        if plane is Plane.SESSION:
            base = f"home/{obj.owner}/agent/{obj.agent}/session/{obj.name}"
            return f"{base}/{within}{row.name}".rstrip("/")
        if plane is Plane.CHANNEL:
            return f"context/child/{obj.channel}/{row.name}".rstrip("/")
        if plane is Plane.HOME:
            return f"home/{obj}/{row.name}".rstrip("/")
        if plane is Plane.HISTORY:
            return f"home/{obj[0]}/agent/{obj[1]}/{row.name}".rstrip("/")
        if plane is Plane.TOOL:
            return f"tool/{obj.name}{row.name if row.within else f'.d/{row.name}'}"
        return "" if row.name == "/" else f"{within}{row.name}"

    # authority of nodes

    def agent_of(self, node: RowNode) -> Agent | None:
        plane = node.table.plane
        if plane in (Plane.AGENT, Plane.CHILD, Plane.CHANNEL):
            agent: Agent = node.obj
            return agent
        if plane is Plane.SESSION:
            return self.runtime.agents.registry.recall(node.obj.incarnation)
        if plane in _ITEM_PLANES:
            return self.agent_with(node.obj)
        return None

    def agent_with(self, item: Item) -> Agent:
        """The agent that a record belongs to; it may have been removed since."""
        agent = self.runtime.agents.registry.recall(item.agent)
        if agent is None:
            raise MissingError("what was here is gone, with its agent")
        return agent

    def root_roles(self, caller: Caller) -> Role:
        if not caller.known:
            return Role.NONE
        if caller.agent is None:
            master = self.runtime.agents.identity.is_master(caller)
            return (OPERATORS if master else Role.OPERATOR) | Role.ANYONE
        return Role.ANYONE

    # agents

    def make_agent(self, call: Call, name: str) -> Node:
        if not name.endswith(".d"):
            raise MalformedError(f"{quote(name)}: create an agent with mkdir agent/NAME.d")
        agent = self.runtime.agents.births.create(call.caller, name.removesuffix(".d"))
        node = self.agent_entry(f"{agent.name}.d")
        assert node is not None
        return node

    def remove_agent(self, call: Call, name: str) -> None:
        node = self.agent_entry(name) if name.endswith(".d") else None
        if node is None or node.agent is None or not self.visible(node.agent, call):
            raise MissingError(f"there is no agent directory {quote(name)}")
        if not self.runtime.agents.identity.roles(call.caller, node.agent) & CONTROLLERS:
            raise DeniedError(f"the caller may not remove {quote(node.agent.name)}")
        self.runtime.agents.removals.remove(node.agent)

    def child_link(self, child: Agent) -> Node:
        return RowNode(self, agent_files.CHILD_TABLE, child.index, child, 1)

    def bound_socket(self, directory: RowNode, name: str) -> Node:
        """MKNOD by the binder: the socket is bound under a name nobody lists."""
        if directory.inode == ROOT_INODE and name == DAEMON_BIND_NAME:
            return self._root(root_files.TABLE.number("ctxd.sock"))
        word = name.removeprefix(".bind-")
        agent = self.runtime.agents.registry.get(int(word)) if word.isdigit() else None
        if agent is None:
            raise ForbiddenError("nodes cannot be created here")
        number = agent_files.TABLE.number(".sock", "agent")
        return RowNode(self, agent_files.TABLE, agent.index, agent, number)

    def truncate_row(self, node: RowNode, call: Call, size: int) -> None:
        """truncate(2) by path: of a control it changes nothing, of a history it is refused."""
        node.check_writer(call.caller)
        if node.row.opener is None or node.row.commit is not None:
            return
        handle = node.open(call, os.O_WRONLY)
        try:
            handle.truncate(size)
        finally:
            handle.release()

    def cutting(self, node: RowNode, call: Call, size: int) -> Work[None] | None:
        """truncate(2) by path of a document; None for all other rows."""
        node.check_writer(call.caller)
        if node.row.opener is None or node.row.commit is not None:
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

    # documents

    def artifacts(self, agent: Agent) -> Node:
        """``artifact/``, one directory under both of its names."""

        def may_read(caller: Caller) -> None:
            if not self.runtime.agents.identity.roles(caller, agent) & INSIDERS:
                raise DeniedError("the caller may not read these artifacts")

        def may_write(caller: Caller) -> None:
            if not self.runtime.agents.identity.roles(caller, agent) & Role.SELF:
                raise DeniedError("only the agent itself may write artifacts")
            if agent.status is Status.DEAD:
                raise WrongStateError("artifacts cannot be written after the agent is dead")

        space = Space(
            path=f"agent/{agent.name}.d/artifact",
            root=lambda: self.runtime.agents.documents.path(agent, "artifact"),
            owner=lambda: (agent.uid, agent.gid),
            links=False,
            limit=self.runtime.config.document_max,
            files=self.runtime.config.files,
            total=self.runtime.config.artifact_max,
            incarnation=agent.incarnation,
            may_read=may_read,
            may_write=may_write,
            share=self.runtime.agents.disk.share(agent),
        )
        if self.runtime.agents.registry.get(agent.index) is None:
            return self.durable.root(space)  # nothing is written there any more
        return self.durable.root(self._known(f"artifact:{agent.incarnation}", space))

    def _known(self, key: str, space: Space) -> Space:
        """One object for one space, so that it can be compared, while it is written.

        Its limits are those of the configuration as it is now.
        """
        known = self._spaces.setdefault(key, space)
        known.limit, known.files, known.total = space.limit, space.files, space.total
        return known

    def _episodes(self, session: Any) -> Space:
        agents = self.runtime.agents

        def roles(caller: Caller) -> Role:
            agent = agents.registry.recall(session.incarnation)
            return agents.identity.roles(caller, agent) if agent is not None else Role.NONE

        def may_read(caller: Caller) -> None:
            if not roles(caller) & (OPERATORS | Role.SELF | Role.SESSION_READER):
                raise DeniedError("the caller may not read this session")

        def may_write(caller: Caller) -> None:
            if not roles(caller) & Role.SELF:
                raise DeniedError("only the agent itself may write episodes")

        def owner() -> tuple[int, int]:
            agent = agents.registry.recall(session.incarnation)
            return (agent.uid, agent.gid) if agent is not None else (0, 0)

        space = Space(
            path=f"home/{session.owner}/agent/{session.agent}/session/{session.name}/context/episode",
            root=lambda: agents.sessions.directory(session) / "context" / "episode",
            owner=owner,
            links=False,
            limit=self.runtime.config.document_max,
            files=self.runtime.config.files,
            total=self.runtime.config.artifact_max,
            incarnation=None,
            may_read=may_read,
            may_write=may_write,
            share=agents.disk.share(session),
        )
        if agents.registry.get(session.incarnation) is None:
            return space
        return self._known(f"episode:{session.index}", space)

    def take_result(self, agent: Agent, call: Call, source: Node, name: str, new_name: str) -> None:
        """rename(2) of a file in ``artifact/`` over ``result.md``."""
        own = self._spaces.get(f"artifact:{agent.incarnation}")
        if (
            new_name != "result.md"
            or not isinstance(source, DurableNode)
            or source.space is not own
        ):
            raise ForbiddenError("only files of artifact/ can be renamed here, over result.md")
        node = self.durable.find(source, name)
        if node.is_directory():
            raise ForbiddenError("result.md is a file")
        document = self.runtime.agents.documents.path(agent, "result.md")
        own.count()
        os.rename(name, document, src_dir_fd=source.fd)
        self.durable.take_out(node)
        # The kernel believes that the name is the renamed file's now, until it asks that.
        node.changed()
        self.agent_changed(agent.index, ("result.md",))

    def _shared_document(self, agent: Agent, name: str, names: tuple[str, ...]) -> Node | None:
        """A document elsewhere than in its agent's directory: the same inode."""
        if name not in names:
            return None
        if name == "artifact":
            return self.artifacts(agent)
        return RowNode(self, agent_files.TABLE, agent.index, agent, agent_files.TABLE.number(name))

    def channel(self, index: int) -> Node:
        child = self.runtime.agents.registry.recall(index)
        return RowNode(
            self,
            session_files.CHANNEL_TABLE,
            index,
            child,
            session_files.CHANNEL_TABLE.number("", "channel"),
        )

    # homes and spaces

    def home(self, uid: int) -> Node:
        return RowNode(
            self, root_files.HOME_TABLE, uid, uid, root_files.HOME_TABLE.number("", "home")
        )

    def homes(self) -> list[int]:
        base = self.runtime.places.state / "home"
        return [int(name) for name in os.listdir(base) if name.isdigit()]

    def _data(self, uid: int) -> Node:
        path = self.runtime.places.state / "home" / str(uid) / "data"
        if not path.is_dir():
            path.mkdir(parents=True, mode=0o700)
            os.chown(path, uid, -1)
        space = Space(
            path=f"home/{uid}/data",
            root=lambda: path,
            owner=lambda: None,
            links=True,
            limit=2**63 - 1,
            files=None,
            total=None,
            incarnation=None,
            may_read=self._check_known,
            may_write=self._check_known,
            share=self.runtime.agents.disk.share_of(uid),
        )
        return self.durable.root(self._known(f"data:{uid}", space))

    def _check_known(self, caller: Caller) -> None:
        if not self.runtime.agents.identity.still(caller):
            raise DeniedError("the caller is gone, and its rights with it")

    def history_of(self, uid: int, name: str) -> Node | None:
        found = self.runtime.agents.sessions.first(uid, name)
        if found is None:
            return None
        number = root_files.HISTORY_TABLE.number("", "history")
        return RowNode(self, root_files.HISTORY_TABLE, found, (uid, name), number)

    def history_visible(self, uid: int, name: str, call: Call) -> bool:
        agent = self.runtime.agents.registry.named(name)
        if agent is not None and agent.owner == uid:
            roles = self.runtime.agents.identity.roles(call.caller, agent)
            return not agent.private or bool(roles & (INSIDERS | Role.SESSION_READER))
        # of removed agents: the names of other users' private ones are not told
        caller = call.caller
        return caller.known and (caller.agent is not None or caller.uid in (0, uid))

    def session_node(self, index: int) -> Node:
        session = self.runtime.agents.sessions.get(index)
        return RowNode(
            self, session_files.TABLE, index, session, session_files.TABLE.number("", "session")
        )

    def remove_session(self, key: tuple[int, str], call: Call, name: str) -> None:
        index = self.runtime.agents.sessions.named(*key, name)
        session = self.runtime.agents.sessions.get(index) if index is not None else None
        if session is None:
            raise MissingError(f"there is no session {quote(name)}")
        caller = call.caller
        if caller.agent is not None or not caller.known or caller.uid not in (0, key[0]):
            raise DeniedError("only operators may remove sessions")
        self.runtime.agents.removals.remove_session(session)

    def spaces(self) -> list[str]:
        return sorted(os.listdir(self.runtime.places.state / "shared"))

    def space(self, name: str) -> DurableNode:
        agents = self.runtime.agents

        def check(caller: Caller, perm: str) -> None:
            self._check_known(caller)
            agent = agents.registry.get(caller.agent) if caller.agent is not None else None
            if agent is not None and not agents.authority.allows(agent, "shared", name, perm):
                raise DeniedError(f"shared:{name} {perm} is not in the agent's effective policy")

        space = Space(
            path=f"shared/{name}",
            root=lambda: self.runtime.places.state / "shared" / name,
            owner=lambda: None,
            links=True,
            limit=2**63 - 1,
            files=None,
            total=None,
            incarnation=None,
            may_read=lambda caller: check(caller, "read"),
            may_write=lambda caller: check(caller, "write"),
            share=agents.disk.share_of(self.space_owner(name)),
        )
        return self.durable.root(self._known(f"shared:{name}", space))

    def space_owner(self, name: str) -> int:
        """The uid of whoever made it; ``MissingError``."""
        try:
            return os.lstat(self.runtime.places.state / "shared" / name).st_uid
        except FileNotFoundError:
            raise MissingError(f"there is no space {quote(name)}") from None

    def _check_spaces(self, caller: Caller) -> None:
        limit = self.runtime.config.spaces
        if self.runtime.agents.identity.is_master(caller):
            return  # limits are against the others
        if sum(self.space_owner(name) == caller.uid for name in self.spaces()) >= limit:
            raise QuotaError(f"uid {caller.uid} has {limit} spaces, the configured maximum")

    def make_space(self, call: Call, name: str, mode: int) -> Node:
        path = self.runtime.places.state / "shared" / check_name(name)
        self._check_spaces(call.caller)
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            raise TakenError(f"the space {quote(name)} already exists") from None
        os.chown(path, call.uid, call.gid)
        os.chmod(path, mode & 0o1777)
        return self.space(name)

    def remove_space(self, name: str) -> None:
        path = self.runtime.places.state / "shared" / name
        if any(path.iterdir()):
            raise NotEmptyError(f"the space {quote(name)} is not empty")
        node = self.space(name)
        path.rmdir()
        self.durable.remove(node)
        self.durable.forget(node.inode, 0)
        self._spaces.pop(f"shared:{name}", None)

    # Watching

    def agent_changed(self, index: int, names: Iterable[str]) -> None:
        wanted = set(names)
        self._rows_changed(agent_files.TABLE, index, wanted)
        self._rows_changed(session_files.CHANNEL_TABLE, index, wanted)
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
                self._rows_changed(task_files.TABLE, handle.index, {"status", "title"})
        if wanted & {"uid", "gid", "owner"}:
            self.cache.forget_pages(
                inode_number(Plane.AGENT, index, n) for n in range(1, len(agent_files.ROWS) + 1)
            )
            for key in _space_keys(agent):
                if key in self._spaces:
                    self.durable.forget_owner(self._spaces[key])

    def session_changed(self, index: int, names: Iterable[str]) -> None:
        self._rows_changed(session_files.TABLE, index, set(names))

    def agent_listed(self, agent: Agent) -> None:
        """What the kernel knows of an agent that is gone is asked for anew."""
        if self.runtime.agents.registry.get(agent.index) is not None:
            return
        for key in _space_keys(agent):
            self._spaces.pop(key, None)
        self._gone(agent_files.TABLE, agent.index)
        self._gone(agent_files.CHILD_TABLE, agent.index)
        directory = inode_number(Plane.ROOT, 0, root_files.TABLE.number("agent"))
        own = inode_number(Plane.AGENT, agent.index, agent_files.TABLE.number(".d", "agent"))
        self.cache.forget_name(directory, agent.name + ".d", own)
        if agent.parent is not None:
            children = inode_number(Plane.AGENT, agent.parent, agent_files.TABLE.number("child"))
            link = inode_number(Plane.CHILD, agent.index, 1)
            self.cache.forget_name(children, agent.name, link)

    def _gone(self, table: Table, index: int) -> None:
        """The next request for any row of an object is to come here."""
        for number in range(1, len(table.rows) + 1):
            self.cache.forget_attributes(inode_number(table.plane, index, number))

    def item_changed(self, item: Item, names: Iterable[str]) -> None:
        if isinstance(item, Message):
            self.agent_changed(item.agent, ("queue",))
        plane = _PLANES.get(item.kind)
        if plane is not None:
            self._rows_changed(plane.table, item.index, set(names))

    def item_listed(self, item: Item) -> None:
        if isinstance(item, Message):
            self.agent_changed(item.agent, ("queue",))
        plane = _PLANES.get(item.kind)
        if plane is not None and self.runtime.agents.items.get(item.index) is None:
            self._gone(plane.table, item.index)
            number = agent_files.TABLE.number(plane.name)
            own = inode_number(plane.table.plane, item.index, plane.table.number("", ITEM))
            self.cache.forget_name(
                inode_number(Plane.AGENT, item.agent, number), item.name, own
            )

    def _rows_changed(self, table: Table, index: int, names: set[str]) -> None:
        numbers = {n for name in names for n in table.depending.get(name, ())}
        pages = []
        for number in numbers:
            inode = inode_number(table.plane, index, number)
            row: Row = table.rows[number - 1]
            if row.polled:
                self.cache.poller.changed(inode)
            if row.volatile or row.polled or row.opener is not None:
                self.cache.forget_attributes(inode)
            else:
                pages.append(inode)
        if pages:
            self.cache.forget_pages(pages)


def _space_keys(agent: Agent) -> tuple[str, str]:
    """What the spaces are known by that go with an agent."""
    return f"artifact:{agent.incarnation}", f"episode:{agent.session}"


def _inside(directory: RowNode) -> str:
    """What rows of this directory have as ``within``: plain names below a plane's own."""
    row = directory.row
    return row.name if row.within in ("", "context") and row.name not in ("", "/") else ""
