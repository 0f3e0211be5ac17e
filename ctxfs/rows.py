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
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol

from ctxfs.caching import FOREVER
from ctxfs.disks import Work
from ctxfs.handles import ControlHandle, RowHandle
from ctxfs.inodes import CONTROL, NAMED, PUBLIC, Owner, Treatment
from ctxfs.nodes import Attributes, Call, Changes, Handle, Node
from runtime.authority.guard import ANY_STATUS, NEVER, Act, Guard
from runtime.authority.mounts import Source
from runtime.caller import INSIDERS, Caller, Role
from runtime.errors import (
    CtxError,
    DeniedError,
    ForbiddenError,
    IsADirectoryNodeError,
    MalformedError,
    MissingError,
    TooLargeError,
    TooLongError,
)
from runtime.items import Item
from runtime.lifecycle import Status
from runtime.model import Agent

if TYPE_CHECKING:
    from ctxfs.files.spaces import SpaceRow
    from ctxfs.filesystem import Filesystem
    from ctxfs.planes import Plane


class Kind(Enum):
    FILE = stat.S_IFREG
    DIRECTORY = stat.S_IFDIR
    LINK = stat.S_IFLNK
    SOCKET = stat.S_IFSOCK


NEW: Final = frozenset({Status.NEW})
NOT_BUSY: Final = ANY_STATUS - {Status.STARTING, Status.BUSY, Status.STOPPING}
NOT_TERMINAL: Final = ANY_STATUS - {Status.DEAD}

#: functions of a row get the filesystem and the row's object first
Render = Callable[["Filesystem", Any, Caller], "str | bytes | Iterator[str]"]
Check = Callable[["Filesystem", Any, Caller, str], None]
CheckFound = Callable[["Filesystem", Any, Caller, str, Mapping[str, Source]], None]


class LinesCheck(Protocol):
    """Takes complete lines as they are written, each once; raises for what is refused."""

    def take(self, text: str) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """mkdir(2) in a directory. The guard's statuses are judged by ``act``, after the name."""

    guard: Guard
    act: Callable[[Filesystem, Any, Call, str, int], Node]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is removed, what the caller is to it, and the agent whose status counts."""

    obj: Any
    roles: Role
    agent: Agent | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Removing:
    """rmdir(2) in a directory; ``find`` raises ``MissingError``."""

    guard: Guard
    find: Callable[[Filesystem, Any, Caller, str], Target]
    act: Callable[[Filesystem, Any, Caller, Any], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One file, directory, link or socket of a plane.

    ``public`` rows of a public agent are open to all, others are read by ``read``. The
    ``guard`` says who may write, and when. ``check`` sees each complete line at write(2),
    ``first`` makes that the first line only; ``checking`` begins a check of lines that counts
    those before them. ``commit`` gets the whole value at flush; ``single`` rows hold one value
    on one line. ``volatile`` values change by themselves and are never cached; ``polled`` ones
    work with poll(2). ``generated`` ones are made anew for each reader and cost what they cost:
    as in procfs their size is 0, so that stat(2) makes nothing. ``store`` takes a document as
    bytes whose lines were checked as they were written, in place of ``commit``. ``within``
    names the directory row that a row is listed in. The ``top`` row is the object's own
    directory, which another plane lists; what that lists beside it tells its ``path`` from the
    root. What is there for some callers only, or for a moment, is not ``kept``. A directory
    with a ``space`` is one of real files. The names in a ``secret`` directory are told to
    nobody, in no reason either.
    """

    name: str
    doc: str = ""
    kind: Kind = Kind.FILE
    mode: int = 0o444
    default: str = ""
    within: str = ""
    top: bool = False
    path: Callable[[Any], str] | None = None
    kept: bool = True
    space: SpaceRow | None = None
    public: bool = False
    read: Role = INSIDERS
    guard: Guard = NEVER
    secret: bool = False
    render: Render | None = None
    check: Check | None = None
    checking: Callable[[Filesystem, Any, Caller], LinesCheck] | None = None
    commit: Check | None = None
    store: Callable[[Filesystem, Any, Caller, bytes], None] | None = None
    single: bool = False
    first: bool = False
    document: bool = False
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
    make: Making | None = None
    remove: Removing | None = None
    receive: Callable[[Filesystem, Any, Call, Node, str, str], None] | None = None
    #: paths in complete lines that a helper looks at before they are taken; what is checked of
    #: them then; and the commit of the whole, in place of ``commit``
    paths: Callable[[Filesystem, Any, Caller, str], list[str]] | None = None
    check_found: CheckFound | None = None
    commit_found: CheckFound | None = None

    @property
    def is_inside(self) -> bool:
        """Whether it is listed in the directory of its object, or below that."""
        return not self.top and self.path is None

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
            return TooLargeError(f"a document is at most {limit} bytes (document_max)")
        return TooLongError(f"a control takes at most {limit} bytes")


@lru_cache(maxsize=1024)
def group_of(uid: int) -> int | None:
    """The primary group of a user, looked up once; None if it has no name."""
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        return None


class RowNode(Node):
    """A row of one object."""

    def __init__(self, fs: Filesystem, plane: Plane, index: int, obj: Any, number: int) -> None:
        self.fs = fs
        self.plane = plane
        self.index = index
        self.obj = obj
        self.number = number
        self.row = plane.rows[number - 1]
        self.inode = plane.inode(index, number)

    @property
    def path(self) -> str:
        return self.plane.path_of(self.fs, self.obj, self.row)

    @property
    def agent(self) -> Agent | None:
        """The agent whose authority decides."""
        return self.plane.agent(self.fs, self.obj)

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
            entry_timeout=self.plane.keeps(self.obj, row),
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
            if self.row.guard.who and agent.owner not in (0, agent.uid):
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
    def writing_roles(self) -> Role:
        return self.row.guard.wanted(self.fs.runtime.agents, self.agent)

    def may_read(self, caller: Caller) -> bool:
        agent = self.agent
        roles = self.roles(caller)
        if self.row.public and (agent is None or not agent.private):
            return bool(roles)
        return bool(roles & self.row.read)

    def check_there(self) -> None:
        """``MissingError`` once the object is gone: who has opened a row of it keeps the row."""
        if not self.fs.has(self):
            raise MissingError(f"what this {self.row.name} is of is gone: open it again")

    def check_writer(self, caller: Caller) -> None:
        """Identity first, then the state: ``DeniedError`` or ``WrongStateError``.

        ``MissingError`` if it was opened before what it belongs to was removed, or reset.
        """
        row, guard, agent = self.row, self.row.guard, self.agent
        agents = self.fs.runtime.agents
        guard.check_who(Act.WRITE, row.name, agents, self.roles(caller), agent)
        if agent is not None:
            guard.check_when(Act.WRITE, row.name, agent)
        self.check_there()
        guard.check_object(agents, caller, self.obj)

    # opening

    def open(self, call: Call, flags: int) -> Handle:
        row = self.row
        if row.kind is Kind.DIRECTORY:
            raise IsADirectoryNodeError(f"{self.path} is a directory")
        accmode = flags & os.O_ACCMODE
        if accmode != os.O_WRONLY and not self.may_read(call.caller):
            raise DeniedError(f"{row.name} is not yours to read")
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
        if self.plane.told and row.opener is None and not row.document:
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
            raise DeniedError(f"{self.path or '/'} is not yours to list")
        return self.fs.list_in(self, call)

    def readlink(self) -> str:
        if self.row.target is None:
            return super().readlink()
        return self.row.target(self.fs, self.obj)

    def mkdir(self, call: Call, name: str, mode: int) -> Node:
        making = self.row.make
        if making is None:
            return super().mkdir(call, name, mode)
        agents, roles = self.fs.runtime.agents, self.roles(call.caller)
        what = self._named(name)
        making.guard.check_who(Act.MAKE, what, agents, roles, self.agent)
        with agents.journal.acting(call.caller):
            return making.act(self.fs, self.obj, call, name, mode)

    def rmdir(self, call: Call, name: str) -> None:
        removing = self.row.remove
        if removing is None:
            return super().rmdir(call, name)
        agents, caller = self.fs.runtime.agents, call.caller
        found = removing.find(self.fs, self.obj, caller, name)
        removing.guard.check(
            Act.REMOVE, self._named(name), agents, caller, found.roles, found.agent, found.obj
        )
        with agents.journal.acting(caller):
            removing.act(self.fs, self.obj, caller, found.obj)

    def _named(self, name: str) -> str:
        return f"{self.path}/{name}".lstrip("/")

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
        if changes.times is not None and not self.roles(call.caller) & self.row.guard.who:
            raise ForbiddenError(f"the times of {self.path} are given, not set")


def one_line(text: str) -> str:
    """The value of a control that holds one: without its newline; ``MalformedError``."""
    value = text.removesuffix("\n")
    if "\n" in value:
        raise MalformedError("one value is wanted, on one line")
    return value
