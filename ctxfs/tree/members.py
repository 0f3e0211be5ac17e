"""A row of one object: where it is, what stat(2) shows of it, and who may use it."""

from __future__ import annotations

import pwd
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Generic, TypeVar

from ctxfs.caching import FOREVER, STEADY_SECONDS
from ctxfs.tree.base import Base
from ctxfs.tree.inodes import Treatment
from ctxfs.tree.layouts import Layout
from ctxfs.tree.nodes import Attributes, Node
from ctxfs.tree.rows import Control, Inlet, Kind, PathControl, Rendered, Shown
from runtime.authority.guard import Act
from runtime.caller import NOBODY, Caller, Role
from runtime.errors import DeniedError, ForbiddenError, MissingError
from runtime.ids import Incarnation
from runtime.records.lifecycle import Status
from runtime.records.model import Agent

_O = TypeVar("_O")


@lru_cache(maxsize=1024)
def group_of(uid: int) -> int | None:
    """The primary group of a user, looked up once; None if it has no name."""
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        return None


class Member(Node, Generic[_O]):
    """One row of one object; without a number, the object's directory.

    Open files keep it, and ask it again at each use.
    """

    def __init__(
        self, base: Base, layout: Layout[_O], index: int, obj: _O, number: int = 0
    ) -> None:
        number = number or layout.top
        self.base = base
        self.layout = layout
        self.index = index
        self.obj = obj
        self.row = layout.numbered[number]
        self.inode = layout.inode(index, number)

    @property
    def path(self) -> str:
        return self.layout.path_of(self.base, self.obj, self.row)

    @property
    def instead(self) -> str:
        row, where = self.row, self.path
        if row.kind is not Kind.DIRECTORY:
            where = where.rpartition("/")[0]
        return f": use {f'{where}/{row.instead}'.lstrip('/')}" if row.instead else ""

    @property
    def agent(self) -> Agent | None:
        """The agent whose authority decides."""
        return self.layout.agent(self.base, self.obj)

    @property
    def incarnation(self) -> Incarnation | None:
        agent = self.agent
        return agent.incarnation if agent is not None else None

    @property
    def cached(self) -> bool:
        """Whether the kernel keeps pages of it: everybody with an open descriptor reads them.

        So only of what nobody can lose the right to read: public values of an agent
        that cannot turn private any more, and of the filesystem itself.
        """
        row = self.row
        if row.treatment is not Treatment.PUBLIC or not self._fixed:
            return False
        return not row.polled or time.time() - self._mtime(self.agent) >= STEADY_SECONDS

    @property
    def _fixed(self) -> bool:
        agent = self.agent
        return agent is None or not (agent.private or agent.status is Status.NEW)

    # attributes

    def attributes(self) -> Attributes:
        row, agent = self.row, self.agent
        uid, gid, mode = self._ownership(agent)
        value = None
        if row.polled and row.treatment is Treatment.PUBLIC and self._fixed:
            value = self.render(NOBODY)
        return Attributes(
            self.inode,
            row.kind | mode,
            uid,
            gid,
            row.size_of(self.base, self.obj) if value is None else len(value),
            2 if row.kind is Kind.DIRECTORY else 1,
            self._mtime(agent),
            None,
            self.layout.keeps(self.obj, row),
            0.0 if row.volatile else FOREVER,
            value,
        )

    def _ownership(self, agent: Agent | None) -> tuple[int, int, int]:
        """Uid, gid and mode bits; the daemon decides beyond them who may."""
        row = self.row
        mode = row.mode
        privilege = self.base.agents.privilege
        if agent is None:
            owner = self.layout.owner(self.obj) if row.top else None
            return *(owner or (privilege.uid, privilege.gid)), mode
        if row.treatment is Treatment.NAMED:
            if agent.owner not in (0, agent.uid) and row.guard.who:
                mode |= 0o022 | (mode & 0o400) >> 3 | (mode & 0o400) >> 6
            return agent.uid, agent.gid, mode
        own = (0, privilege.uid)
        needed = mode & 0o600
        if agent.uid not in own or agent.owner not in own:
            mode |= needed >> 3
        other = agent.owner not in own and group_of(agent.owner) != agent.gid
        if other or self.base.reach.opens(agent, row.guard.who):
            mode |= needed >> 6
        return privilege.uid, agent.gid, mode

    def _mtime(self, agent: Agent | None) -> float:
        known = self.row.time_of(self.base, self.obj)
        if known is None:
            known = self.layout.created(self.obj)
        if known is not None:
            return known
        return agent.created if agent is not None else self.base.started

    def watched(self, caller: Caller) -> tuple[int, int]:
        """The inode whose changes poll(2) tells a caller of, and its version now."""
        row = self.row
        if isinstance(row, Shown) and row.followed is not None:
            index, version = row.followed(self.base, caller)
            return self.layout.inode(index, self.layout.number_of(row.name, row.within)), version
        return self.inode, self.base.cache.poller.version(self.inode)

    # content

    def render(self, caller: Caller) -> bytes:
        return b"".join(self.pieces(caller))

    def pieces(self, caller: Caller) -> Iterator[bytes]:
        """The content that ``render`` makes, of something long one piece after the other."""
        assert isinstance(self.row, Rendered)
        return self.row.pieces(self.base, self.obj, caller)

    # permission

    def roles(self, caller: Caller) -> Role:
        agent = self.agent
        if agent is None:
            return self.base.agents.identity.root_roles(caller)
        return self.base.agents.identity.roles(caller, agent)

    @property
    def writing_roles(self) -> Role:
        return self.row.guard.wanted(self.base.agents, self.agent)

    def is_writer(self, caller: Caller) -> bool:
        return bool(self.roles(caller) & self.writing_roles)

    def may_read(self, caller: Caller) -> bool:
        agent = self.agent
        roles = self.roles(caller)
        if self.row.public and (agent is None or not agent.private):
            return bool(roles)
        if isinstance(self.row, Inlet) and roles & self.writing_roles:
            return True
        return bool(roles & self.row.read)

    def check_alive(self, caller: Caller) -> None:
        """``DeniedError`` once the process that opened the file is gone."""
        if not self.base.agents.identity.still(caller):
            raise DeniedError("the agent that opened this file has ended, and its rights with it")

    def check_reader(self, caller: Caller) -> None:
        self.check_alive(caller)
        if not self.may_read(caller):
            raise DeniedError(f"the caller may not read {self.row.name} any more")

    def check_writing(self, caller: Caller) -> None:
        self.check_alive(caller)
        self.check_writer(caller)

    def check_there(self) -> None:
        """``MissingError`` once the object is gone: open files of its rows are left."""
        if self.layout.find(self.base, self.index, self.row) is None:
            raise MissingError(f"the object of this {self.row.name} is gone: open the file again")

    def check_writer(self, caller: Caller) -> None:
        """Identity first, then the state: ``DeniedError`` or ``WrongStateError``.

        ``MissingError`` if the object was removed, or reset, since the file was opened.
        """
        row, guard, agent = self.row, self.row.guard, self.agent
        agents = self.base.agents
        if not guard.who:
            raise ForbiddenError(f"{row.name} cannot be written{self.instead}")
        guard.check_who(Act.WRITE, row.name, agents, self.roles(caller), agent)
        if agent is not None:
            guard.check_when(Act.WRITE, row.name, agent)
        self.check_there()
        guard.check_object(agents, caller, self.obj)

    def acting(self, caller: Caller) -> AbstractContextManager[None]:
        """Around a commit: what follows is the caller's doing, and a control tells of it."""
        journal, agent = self.base.agents.journal, self.agent
        if self.layout.told and agent is not None and isinstance(self.row, Control | PathControl):
            return journal.acting(caller, agent, file=self.row.name)
        return journal.acting(caller)
