"""Files and verbs as rows: everything about a control file is said once, here.

Lookup, listing, mode bits, permission checks and the table of ctxfs(5) all
come from the row.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from ctxfs.caching import FOREVER
from ctxfs.disks import Work
from ctxfs.handles import ControlHandle, RowHandle
from ctxfs.inodes import CONTROL, NAMED, PUBLIC, Owner, Treatment
from ctxfs.nodes import Attributes, Call, Changes, Handle, Node
from runtime import planes
from runtime.authority.mounts import Source
from runtime.caller import INSIDERS, PARTIES, Caller, Role
from runtime.errors import (
    CtxError,
    DeniedError,
    ForbiddenError,
    IsADirectoryNodeError,
    MalformedError,
    MissingError,
    TooLargeError,
    TooLongError,
    WrongStateError,
)
from runtime.items import Item
from runtime.lifecycle import LIVE, Status
from runtime.model import Agent

if TYPE_CHECKING:
    from ctxfs.filesystem import Filesystem
    from runtime.agents import Agents


class Plane(IntEnum):
    """What kind of object an inode belongs to; the index says which one."""

    ROOT = 0
    AGENT = 1
    CHILD = 2
    SESSION = 3
    CHANNEL = 4
    HOME = 5
    HISTORY = 6
    TASK = 7
    WORK = 8
    WAITING = 9
    TOOL = 10


class Kind(Enum):
    FILE = stat.S_IFREG
    DIRECTORY = stat.S_IFDIR
    LINK = stat.S_IFLNK
    SOCKET = stat.S_IFSOCK


ANY_STATUS: Final = frozenset(Status)
NEW: Final = frozenset({Status.NEW})
NOT_BUSY: Final = ANY_STATUS - {Status.STARTING, Status.BUSY, Status.STOPPING}
NOT_TERMINAL: Final = ANY_STATUS - {Status.DEAD}

#: functions of a row get the filesystem and the row's object first
Render = Callable[["Filesystem", Any, Caller], "str | bytes | Iterator[str]"]
Check = Callable[["Filesystem", Any, Caller, str], None]
CheckFound = Callable[["Filesystem", Any, Caller, str, Mapping[str, Source]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One file, directory, link or socket of a plane.

    ``public`` rows of a public agent are open to all. ``write`` says who may
    write, ``when`` in which statuses of the agent; ``writable`` raises while the
    row's object takes nothing. ``check`` sees each complete line at
    write(2), ``first`` makes that the first line only, ``whole`` all of them together,
    ``commit`` gets the whole value at flush; ``single`` rows hold one value on one line.
    ``volatile`` values change by themselves and are never cached; ``polled`` ones work
    with poll(2). ``generated`` ones are made anew for each reader and cost what they
    cost: as in procfs their size is 0, so that stat(2) makes nothing. ``store`` takes a
    document as bytes whose lines were checked as they were written, in place of ``commit``.
    ``within`` names the directory row that a row is listed in. The names in a
    ``secret`` directory are told to nobody, in no reason either.
    """

    name: str
    doc: str = ""
    kind: Kind = Kind.FILE
    mode: int = 0o444
    default: str = ""
    within: str = ""
    public: bool = False
    read: Role = INSIDERS
    write: Role = Role.NONE
    when: frozenset[Status] = ANY_STATUS
    writable: Callable[[Filesystem, Any], None] | None = None
    secret: bool = False
    render: Render | None = None
    check: Check | None = None
    commit: Check | None = None
    store: Callable[[Filesystem, Any, Caller, bytes], None] | None = None
    single: bool = False
    first: bool = False
    whole: bool = False
    document: bool = False
    delegated: bool = False
    merges: bool = False
    volatile: bool = False
    generated: bool = False
    polled: bool = False
    depends: tuple[str, ...] = ()
    opener: Callable[[Filesystem, RowNode, Call, int], Handle] | None = None
    size: Callable[[Filesystem, Any], int] | None = None
    mtime: Callable[[Filesystem, Any], float] | None = None
    entries: Callable[[Filesystem, Any, Call], Iterator[str]] | None = None
    find: Callable[[Filesystem, Any, Call, str], Node | None] | None = None
    target: Callable[[Filesystem, Any], str] | None = None
    make: Callable[[Filesystem, Any, Call, str, int], Node] | None = None
    remove: Callable[[Filesystem, Any, Call, str], None] | None = None
    receive: Callable[[Filesystem, Any, Call, Node, str, str], None] | None = None
    #: paths in complete lines that a helper looks at before they are taken; what is checked of
    #: them then; and the commit of the whole, in place of ``commit``
    paths: Callable[[Filesystem, Any, Caller, str], list[str]] | None = None
    check_found: CheckFound | None = None
    commit_found: CheckFound | None = None

    @property
    def treatment(self) -> Treatment:
        """What the kernel may do with it without asking."""
        if self.kind is not Kind.FILE:
            return NAMED
        changes = (
            self.volatile or self.generated or self.polled or self.opener is not None
        )
        return PUBLIC if self.public and not changes else CONTROL

    def too_long(self, limit: int) -> CtxError:
        if self.document:
            return TooLargeError(f"a document may have at most {limit} bytes (document_max)")
        return TooLongError(f"a control may have at most {limit} bytes")


@lru_cache(maxsize=1024)
def group_of(uid: int) -> int | None:
    """The primary group of a user, looked up once; None if it has no name."""
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        return None


class Table:
    """The rows of one plane. Numbers are positions, from 1, and make inode numbers."""

    def __init__(self, plane: Plane, rows: tuple[Row, ...]) -> None:
        self.plane = plane
        self.rows = rows
        self.by_name = {(row.within, row.name): number for number, row in enumerate(rows, 1)}
        self.depending: dict[str, list[int]] = {}
        for number, row in enumerate(rows, 1):
            for name in (row.name, *row.depends):
                self.depending.setdefault(name, []).append(number)

    def number(self, name: str, within: str = "") -> int:
        return self.by_name[within, name]

    def within(self, directory: str) -> Iterator[tuple[int, Row]]:
        return ((n, row) for n, row in enumerate(self.rows, 1) if row.within == directory)


def inode_number(plane: Plane, index: int, number: int) -> int:
    """Computed, so that agents cost no objects: index, plane, row."""
    return (index << 16) | (plane << 8) | number


def split_inode(inode: int) -> tuple[int, int, int]:
    """(plane, index, row number) of a computed inode number."""
    return (inode >> 8) & 0xFF, inode >> 16, inode & 0xFF


class RowNode(Node):
    """A row of one object."""

    def __init__(self, fs: Filesystem, table: Table, index: int, obj: Any, number: int) -> None:
        self.fs = fs
        self.table = table
        self.index = index
        self.obj = obj
        self.number = number
        self.row = table.rows[number - 1]
        self.inode = inode_number(table.plane, index, number)

    @property
    def path(self) -> str:
        return self.fs.describe(self)

    @property
    def agent(self) -> Agent | None:
        """The agent whose authority decides."""
        return self.fs.agent_of(self)

    @property
    def incarnation(self) -> str | None:
        agent = self.agent
        return agent.incarnation if agent is not None else None

    @property
    def cached(self) -> bool:
        """Whether the kernel keeps pages of it: everybody with an open descriptor reads them.

        So only of what nobody can lose the right to read: public values of an agent
        that cannot turn private any more, and of the filesystem itself.
        """
        agent = self.agent
        fixed = agent is None or not (agent.private or agent.status is Status.NEW)
        return self.row.treatment.pages and fixed

    # attributes

    def attributes(self) -> Attributes:
        row = self.row
        uid, gid, mode = self._ownership()
        return Attributes(
            inode=self.inode,
            mode=row.kind.value | mode,
            uid=uid,
            gid=gid,
            size=self._size(),
            links=2 if row.kind is Kind.DIRECTORY else 1,
            mtime=self._mtime(),
            entry_timeout=self.fs.entry_timeout(self),
            attr_timeout=0.0 if row.volatile else FOREVER,
        )

    def _ownership(self) -> tuple[int, int, int]:
        """Uid, gid and mode bits; the daemon decides beyond them who may."""
        mode, agent = self.row.mode, self.agent
        privilege = self.fs.runtime.agents.privilege
        if agent is None:
            return privilege.uid, privilege.gid, mode
        own = (0, privilege.uid)
        if self.row.treatment.owner is Owner.AGENT:
            if self.row.write and agent.owner not in (0, agent.uid):
                mode |= 0o022 | (mode & 0o400) >> 3 | (mode & 0o400) >> 6
            return agent.uid, agent.gid, mode
        needed = mode & 0o600
        if agent.uid not in own or agent.owner not in own:
            mode |= needed >> 3
        if agent.owner not in own and group_of(agent.owner) != agent.gid:
            mode |= needed >> 6
        return privilege.uid, agent.gid, mode

    def _size(self) -> int:
        row = self.row
        if row.generated:
            return 0
        if row.size is not None:
            return row.size(self.fs, self.obj)
        if row.target is not None:
            return len(os.fsencode(row.target(self.fs, self.obj)))
        if row.render is not None:
            return len(self.render(self.fs.nobody))
        return 0

    def _mtime(self) -> float:
        if self.row.mtime is not None:
            return self.row.mtime(self.fs, self.obj)
        if isinstance(self.obj, Item):
            return self.obj.created
        agent = self.agent
        return agent.created if agent is not None else self.fs.started

    def render(self, caller: Caller) -> bytes:
        assert self.row.render is not None
        return b"".join(self.pieces(caller))

    def pieces(self, caller: Caller) -> Iterator[bytes]:
        """What ``render`` makes, of something long one piece after the other."""
        assert self.row.render is not None
        text = self.row.render(self.fs, self.obj, caller)
        if isinstance(text, bytes):
            yield text
        elif isinstance(text, str):
            yield text.encode()
        else:
            for piece in text:
                yield piece.encode()

    # permission

    def roles(self, caller: Caller) -> Role:
        agent = self.agent
        if agent is None:
            return self.fs.root_roles(caller)
        return self.fs.runtime.agents.identity.roles(caller, agent)

    @property
    def _delegated(self) -> bool:
        """A private child's task is between it and its creator."""
        agent = self.agent
        return (
            self.row.delegated
            and agent is not None
            and agent.private
            and self.fs.runtime.agents.registry.parent_of(agent) is not None
        )

    @property
    def writing_roles(self) -> Role:
        return Role.CREATOR if self._delegated else self.row.write

    def may_read(self, caller: Caller) -> bool:
        agent = self.agent
        roles = self.roles(caller)
        if self.row.public and (agent is None or not agent.private):
            return bool(roles)
        return bool(roles & self.row.read)

    def check_there(self) -> None:
        """``MissingError`` once the object is gone: who has opened a row of it keeps the row."""
        if not self.fs.has(self):
            raise MissingError(f"the object of this {self.row.name} is gone: open the file again")

    def check_writer(self, caller: Caller) -> None:
        """Identity first, then the state: ``DeniedError`` or ``WrongStateError``.

        ``MissingError`` if it was opened before what it belongs to was removed, or reset.
        """
        row = self.row
        if not row.write:
            raise ForbiddenError(f"{row.name} cannot be written")
        roles = self.roles(caller)
        if not roles & self.writing_roles:
            who = "its creator" if self._delegated else writers(row)
            raise DeniedError(f"the caller may not write {row.name}; {who} may")
        agent = self.agent
        if agent is not None and agent.status not in row.when:
            raise WrongStateError(
                f"{row.name} can be written {statuses(row)}; the agent is {agent.status}"
            )
        self.check_there()
        if row.writable is not None:
            row.writable(self.fs, self.obj)

    # opening

    def open(self, call: Call, flags: int) -> Handle:
        row = self.row
        if row.kind is Kind.DIRECTORY:
            raise IsADirectoryNodeError(f"{self.path} is a directory")
        accmode = flags & os.O_ACCMODE
        if accmode != os.O_WRONLY and not self.may_read(call.caller):
            raise DeniedError(f"the caller may not read {row.name}")
        if accmode != os.O_RDONLY or flags & os.O_TRUNC:
            self.check_writer(call.caller)
        if row.opener is not None:
            return row.opener(self.fs, self, call, flags)
        if accmode == os.O_RDONLY:
            return RowHandle(self.fs, self, call.caller, writing=False)
        config = self.fs.runtime.config
        limit = config.document_max if row.document else config.control_max
        return ControlHandle(self.fs, self, call.caller, flags, limit)

    def check_line(self, caller: Caller, line: str) -> None:
        if self.row.check is not None:
            self.row.check(self.fs, self.obj, caller, line)

    def commit(self, caller: Caller, text: str) -> None:
        assert self.row.commit is not None
        with self._acting(caller):
            self.row.commit(self.fs, self.obj, caller, text)

    def _acting(self, caller: Caller) -> AbstractContextManager[None]:
        """Around the commit: what follows is the caller's doing, and a control tells of it."""
        agents, row = self.fs.runtime.agents, self.row
        if self.table.plane is Plane.AGENT and row.opener is None and not row.document:
            return agents.journal.acting(caller, self.obj, file=row.name)
        return agents.journal.acting(caller)

    def store(self, caller: Caller, data: bytes) -> None:
        """A document whose lines have been checked."""
        assert self.row.store is not None
        self.row.store(self.fs, self.obj, caller, data)

    # directories

    def lookup(self, call: Call, name: str) -> Node:
        if self.row.kind is not Kind.DIRECTORY:
            return super().lookup(call, name)
        return self.fs.lookup_in(self, call, name)

    def list(self, call: Call) -> Iterator[str]:
        if self.row.kind is not Kind.DIRECTORY:
            return super().list(call)
        if not self.may_read(call.caller):
            raise DeniedError(f"the caller may not list {self.path or '/'}")
        return self.fs.list_in(self, call)

    def readlink(self) -> str:
        if self.row.target is None:
            return super().readlink()
        return self.row.target(self.fs, self.obj)

    def mkdir(self, call: Call, name: str, mode: int) -> Node:
        if self.row.make is None:
            return super().mkdir(call, name, mode)
        with self.fs.runtime.agents.journal.acting(call.caller):
            return self.row.make(self.fs, self.obj, call, name, mode)

    def rmdir(self, call: Call, name: str) -> None:
        if self.row.remove is None:
            return super().rmdir(call, name)
        with self.fs.runtime.agents.journal.acting(call.caller):
            self.row.remove(self.fs, self.obj, call, name)

    def mknod(self, call: Call, name: str, mode: int) -> Node:
        if call.is_binder and stat.S_ISSOCK(mode):
            return self.fs.bound_socket(self, name)
        return super().mknod(call, name, mode)

    def shown(self, name: str) -> str:
        return "(a secret)" if self.row.secret else name

    def receive(self, call: Call, source: Node, name: str, new_name: str) -> None:
        """A real file is renamed into this directory."""
        if self.row.receive is None:
            raise ForbiddenError(f"nothing can be renamed into {self.path or '/'}")
        self.row.receive(self.fs, self.obj, call, source, name, new_name)

    def truncating(self, call: Call, size: int) -> Work[None] | None:
        return self.fs.cutting(self, call, size)

    def set_attributes(self, call: Call, changes: Changes) -> None:
        super().set_attributes(call, changes)
        if changes.size is not None:
            self.fs.truncate_row(self, call, changes.size)
        if changes.times is not None and not self.roles(call.caller) & self.row.write:
            raise ForbiddenError(f"the times of {self.path} cannot be changed")


_WHO: Final = (
    (Role.CREATOR, "its creator"),
    (Role.OPERATOR, "operators"),
    (Role.SELF, "the agent itself"),
    (Role.STARTER, "agents with policy start"),
    (Role.STOPPER, "agents with policy stop"),
    (Role.WRITER, "agents with policy write"),
)


def writers(row: Row) -> str:
    """Who may write, for reasons and the manual."""
    if row.write & Role.ANYONE:
        return "everybody"
    if row.write == Role.ROOT:
        return "operators with uid 0"
    names = [text for role, text in _WHO if role & row.write]
    return " and ".join(names) if names else "nobody"


def statuses(row: Row) -> str:
    """When it may be written, for reasons and the manual."""
    if row.when == ANY_STATUS:
        return "in any status"
    if len(row.when) > len(ANY_STATUS) / 2:
        left = [s.value for s in Status if s not in row.when]
        return "unless " + " or ".join(left)
    return "while " + " or ".join(s.value for s in Status if s in row.when)


def one_line(text: str) -> str:
    """The value of a control that holds one: without its newline; ``MalformedError``."""
    value = text.removesuffix("\n")
    if "\n" in value:
        raise MalformedError("write one value, on one line")
    return value


#: what the row of an item's own directory is ``within``
ITEM: Final = "item"


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemPlane:
    """A plane of records below each agent, such as ``work``: ``name`` is its directory.

    ``table`` shows one record; ``records`` makes, finds and removes them.
    """

    name: str
    cls: type[Item]
    table: Table
    records: Callable[[Agents], planes.Plane[Any]]

    def node(self, fs: Filesystem, item: Item) -> RowNode:
        return RowNode(fs, self.table, item.index, item, self.table.number("", ITEM))

    def row(self, doc: str, **more: Any) -> Row:
        """The directory in the agent's own."""

        def entries(fs: Filesystem, agent: Agent, call: Call) -> Iterator[str]:
            for item in fs.runtime.agents.items.of(agent.index, self.cls):
                yield item.name

        def find(fs: Filesystem, agent: Agent, call: Call, name: str) -> Node | None:
            item = fs.runtime.agents.items.named(agent.index, self.cls, name)
            return self.node(fs, item) if item is not None else None

        def make(fs: Filesystem, agent: Agent, call: Call, name: str, mode: int) -> Node:
            item: Item = self.records(fs.runtime.agents).make(call.caller, agent, name)
            return self.node(fs, item)

        def remove(fs: Filesystem, agent: Agent, call: Call, name: str) -> None:
            self.records(fs.runtime.agents).remove(call.caller, agent, name)

        return Row(
            name=self.name, kind=Kind.DIRECTORY, mode=0o755, write=PARTIES, when=LIVE,
            entries=entries, find=find, make=make, remove=remove, doc=doc, **more,
        )  # fmt: skip
