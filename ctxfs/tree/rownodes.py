"""A row of one object, as a node of the tree."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ctxfs.caching import FOREVER
from ctxfs.disks import Work
from ctxfs.tree.inodes import Owner
from ctxfs.tree.nodes import Attributes, Call, Changes, Handle, Node
from ctxfs.tree.rows import Control, Directory, File, Kind, Link, PathControl, Rendered
from runtime.authority.guard import Act
from runtime.caller import Caller, Role
from runtime.errors import (
    DeniedError,
    ForbiddenError,
    MissingError,
)
from runtime.records.items import Item
from runtime.records.lifecycle import Status
from runtime.records.model import Agent

if TYPE_CHECKING:
    from ctxfs.filesystem import Filesystem
    from ctxfs.tree.planes import Plane


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
            size=row.size_of(self),
            links=2 if row.kind is Kind.DIRECTORY else 1,
            mtime=self._mtime(row.time_of(self)),
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

    def _mtime(self, known: float | None) -> float:
        if known is not None:
            return known
        if isinstance(self.obj, Item):
            return self.obj.created
        agent = self.agent
        return agent.created if agent is not None else self.fs.started

    def render(self, caller: Caller) -> bytes:
        return b"".join(self.pieces(caller))

    def pieces(self, caller: Caller) -> Iterator[bytes]:
        """What ``render`` makes, of something long one piece after the other."""
        assert isinstance(self.row, Rendered)
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
            raise MissingError(f"the object of this {self.row.name} is gone: open the file again")

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
        if not isinstance(row, File):
            return super().open(call, flags)
        accmode = flags & os.O_ACCMODE
        if accmode != os.O_WRONLY and not self.may_read(call.caller):
            raise DeniedError(f"the caller may not read {row.name}")
        if accmode != os.O_RDONLY or flags & os.O_TRUNC:
            self.check_writer(call.caller)
        return row.open(self.fs, self, call, flags)

    def acting(self, caller: Caller) -> AbstractContextManager[None]:
        """Around a commit: what follows is the caller's doing, and a control tells of it."""
        agents = self.fs.runtime.agents
        if self.plane.told and isinstance(self.row, Control | PathControl):
            return agents.journal.acting(caller, self.obj, file=self.row.name)
        return agents.journal.acting(caller)

    # directories

    def lookup(self, call: Call, name: str) -> Node:
        if not isinstance(self.row, Directory):
            return super().lookup(call, name)
        return self.fs.lookup_in(self, self.row, call, name)

    def list(self, call: Call) -> Iterator[str]:
        if not isinstance(self.row, Directory):
            return super().list(call)
        if not self.may_read(call.caller):
            raise DeniedError(f"the caller may not list {self.path or '/'}")
        return self.fs.list_in(self, self.row, call)

    def readlink(self) -> str:
        if not isinstance(self.row, Link):
            return super().readlink()
        return self.row.target(self.fs, self.obj)

    def mkdir(self, call: Call, name: str, mode: int) -> Node:
        making = self.row.make if isinstance(self.row, Directory) else None
        if making is None:
            return super().mkdir(call, name, mode)
        agents, roles = self.fs.runtime.agents, self.roles(call.caller)
        what = self._named(name)
        making.guard.check_who(Act.MAKE, what, agents, roles, self.agent)
        with agents.journal.acting(call.caller):
            return making.act(self.fs, self.obj, call, name, mode)

    def rmdir(self, call: Call, name: str) -> None:
        removing = self.row.remove if isinstance(self.row, Directory) else None
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
        secret = isinstance(self.row, Directory) and self.row.secret
        return "(a secret)" if secret else name

    def receive(self, call: Call, source: Node, name: str, new_name: str) -> None:
        """A real file is renamed into this directory."""
        receive = self.row.receive if isinstance(self.row, Directory) else None
        if receive is None:
            raise ForbiddenError(f"nothing can be renamed into {self.path or '/'}")
        receive(self.fs, self.obj, call, source, name, new_name)

    def truncating(self, call: Call, size: int) -> Work[None] | None:
        return self.fs.cutting(self, call, size)

    def set_attributes(self, call: Call, changes: Changes) -> None:
        super().set_attributes(call, changes)
        if changes.size is not None:
            self.fs.truncate_row(self, call, changes.size)
        if changes.times is not None and not self.roles(call.caller) & self.row.guard.who:
            raise ForbiddenError(f"the times of {self.path} cannot be changed")
