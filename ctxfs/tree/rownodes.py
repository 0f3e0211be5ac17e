"""A row of one object, as a node of the tree: opened, looked up, listed, made and removed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from typing import TypeVar

from ctxfs.disks import Work
from ctxfs.tree.members import Member
from ctxfs.tree.nodes import Attributes, Call, NewAttributes, Node, OpenFile
from ctxfs.tree.openfiles import open_row, open_to_write
from ctxfs.tree.realfiles import truncating_by_path
from ctxfs.tree.rows import Directory, Document, File, Link, Opened
from runtime.authority.guard import Act
from runtime.errors import DeniedError, ForbiddenError, MissingError
from runtime.texts.names import quote

_O = TypeVar("_O")


class RowNode(Member[_O]):
    """What can be done with a row of one object."""

    # opening

    def open(self, call: Call, flags: int) -> OpenFile:
        row = self.row
        if not isinstance(row, File):
            return super().open(call, flags)
        accmode = flags & os.O_ACCMODE
        if accmode != os.O_WRONLY and not self.may_read(call.caller):
            raise DeniedError(f"the caller may not read {row.name}")
        if accmode != os.O_RDONLY or flags & os.O_TRUNC:
            self.check_writer(call.caller)
        return open_row(self, row, call.caller, flags)

    def truncating(self, call: Call, size: int) -> Work[None] | None:
        row, caller = self.row, call.caller
        self.check_writer(caller)
        if not isinstance(row, Document):
            return None
        return truncating_by_path(lambda: open_to_write(self, row, caller, os.O_WRONLY), size)

    def set_attributes(self, call: Call, changes: NewAttributes) -> None:
        super().set_attributes(call, changes)
        if changes.size is not None:
            self._truncate(call, changes.size)
        timed = changes.atime is not None or changes.mtime is not None
        if timed and not self.roles(call.caller) & self.row.guard.who:
            raise ForbiddenError(f"the times of {self.path} cannot be changed")

    def _truncate(self, call: Call, size: int) -> None:
        """truncate(2) by path: of a control it changes nothing, of a history it is refused."""
        self.check_writer(call.caller)
        if isinstance(self.row, Opened):
            opened = self.open(call, os.O_WRONLY)
            try:
                opened.truncate(size)
            finally:
                opened.release()

    def readlink(self) -> str:
        if not isinstance(self.row, Link):
            return super().readlink()
        return self.row.target(self.base, self.obj)

    async def followed(self, call: Call) -> None:
        if isinstance(self.row, Link) and self.row.ready is not None:
            await self.row.ready(self.base, self.obj, call)

    # names

    def lookup(self, call: Call, name: str) -> Node:
        """An entry of the directory; ``MissingError`` or ``DeniedError``."""
        row = self.row
        if not isinstance(row, Directory):
            return super().lookup(call, name)
        if not name.isascii():
            raise MissingError(f"{quote(name)}: names here must be ASCII")
        node = row.find(self.base, self.obj, call, name) if row.find is not None else None
        if node is None:
            node = self._inside(call, name)
        if node is None:
            raise MissingError(
                f"{quote(self.shown(name))}: no such file or directory in {self.path or '/'}"
            )
        if isinstance(node, RowNode) and node.layout.closed and not node.may_read(call.caller):
            raise DeniedError(f"the caller may not see {node.path}")
        return node

    def _inside(self, call: Call, name: str) -> Node | None:
        """What a row of the object's that is within this one says that the name is."""
        number = self.layout.numbers.get((self._within, name))
        if number is None:
            return None
        node = RowNode(self.base, self.layout, self.index, self.obj, number)
        row = node.row
        if not node._may_be_seen(call):
            raise DeniedError(f"the caller may not see {row.name}")
        if isinstance(row, Directory) and row.folder is not None:
            return self.base.folders.root(row.folder, self.obj)
        return node

    def list(self, call: Call) -> Iterator[str]:
        if not isinstance(self.row, Directory):
            return super().list(call)
        if not self.may_read(call.caller):
            raise DeniedError(f"the caller may not list {self.path or '/'}")
        return self._names(self.row, call)

    def telling(self) -> Callable[[str], Attributes | None]:
        tell = self.row.tell if isinstance(self.row, Directory) else None
        return super().telling() if tell is None else tell(self.base)

    def _names(self, row: Directory[_O], call: Call) -> Iterator[str]:
        if row.entries is not None:
            yield from row.entries(self.base, self.obj, call)
        for number, inner in self.layout.within(self._within):
            node = RowNode(self.base, self.layout, self.index, self.obj, number)
            if inner.listed and node._may_be_seen(call):
                yield inner.name

    @property
    def _within(self) -> str:
        """What the rows of this directory are ``within``."""
        return "" if self.row.top else self.row.name

    def _may_be_seen(self, call: Call) -> bool:
        if not self.layout.asked(self.obj, self.row) or self.may_read(call.caller):
            return True
        return self.is_writer(call.caller)

    def shown(self, name: str) -> str:
        secret = isinstance(self.row, Directory) and self.row.secret
        return "(a secret)" if secret else name

    # making and removing

    @property
    def instead(self) -> str:
        name = self.row.instead if isinstance(self.row, Directory) else ""
        return f": use {self.path}/{name}" if name else ""

    def mkdir(self, call: Call, name: str, mode: int) -> Node:
        making = self.row.make if isinstance(self.row, Directory) else None
        if making is None:
            return super().mkdir(call, name, mode)
        agents, roles = self.base.runtime.agents, self.roles(call.caller)
        what = self._named(name)
        making.guard.check_who(Act.MAKE, what, agents, roles, self.agent)
        with agents.journal.acting(call.caller):
            return making.act(self.base, self.obj, call, name, mode)

    def create(self, call: Call, name: str, mode: int, flags: int) -> tuple[Node, OpenFile]:
        if isinstance(self.row, Directory) and self.row.secret:
            # as a shell opens one that was there: it is gone, rather than never to be made
            raise MissingError(
                f"{quote(self.shown(name))}: no such file in {self.path}; it may have been used"
            )
        return super().create(call, name, mode, flags)

    def rmdir(self, call: Call, name: str) -> None:
        removing = self.row.remove if isinstance(self.row, Directory) else None
        if removing is None:
            return super().rmdir(call, name)
        removing.remove(self.base, self.obj, call.caller, name, self._named(name))

    def _named(self, name: str) -> str:
        return f"{self.path}/{name}".lstrip("/")

    def mknod(self, call: Call, name: str, mode: int) -> Node:
        """The binder binds each socket under a name that nobody lists."""
        bind = self.row.bind if isinstance(self.row, Directory) else None
        node: Node | None = None
        if bind is not None and call.is_binder and stat.S_ISSOCK(mode):
            node = bind(self.base, self.obj, name)
        return node if node is not None else super().mknod(call, name, mode)

    def receive(self, call: Call, source: Node, name: str, new_name: str) -> None:
        receive = self.row.receive if isinstance(self.row, Directory) else None
        if receive is None:
            raise ForbiddenError(f"nothing can be renamed into {self.path or '/'}")
        receive(self.base, self.obj, call, source, name, new_name)
