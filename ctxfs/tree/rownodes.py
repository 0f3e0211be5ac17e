"""A row of one object, as a node of the tree: opened, looked up, listed, made and removed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any, Final, Protocol, TypeVar

from ctxfs.tree import rows
from ctxfs.tree.base import Base
from ctxfs.tree.histories import OpenByPath, OpenHistory
from ctxfs.tree.layouts import Layout
from ctxfs.tree.members import Member
from ctxfs.tree.nodes import Attributes, Call, NewAttributes, Node, OpenFile
from ctxfs.tree.openfiles import (
    OpenControl,
    OpenGathered,
    OpenInlet,
    OpenOutput,
    OpenRow,
    OpenVerbs,
)
from ctxfs.tree.realfiles import OpenRealFile
from runtime.authority.guard import Act
from runtime.caller import Caller
from runtime.errors import DeniedError, ForbiddenError, MissingError
from runtime.texts.names import quote

_O = TypeVar("_O")


class _Indexed(Protocol):
    @property
    def index(self) -> int: ...


_I = TypeVar("_I", bound=_Indexed)


class RowNode(Member[_O]):
    """The row of one object; ``node_of`` makes it, of the class that its kind has."""

    def may_be_seen(self, caller: Caller) -> bool:
        if not self.layout.asked(self.obj, self.row) or self.may_read(caller):
            return True
        return self.is_writer(caller)

    def set_attributes(self, call: Call, changes: NewAttributes) -> None:
        super().set_attributes(call, changes)
        timed = changes.atime is not None or changes.mtime is not None
        if timed and not self.roles(call.caller) & self.row.guard.who:
            raise ForbiddenError(f"the times of {self.path} cannot be changed")


class FileNode(RowNode[_O]):
    """A file, which is opened as its kind says."""

    row: rows.File[_O]

    def open(self, call: Call, flags: int) -> OpenFile:
        accmode = flags & os.O_ACCMODE
        if accmode != os.O_WRONLY and not self.may_read(call.caller):
            raise DeniedError(f"the caller may not read {self.row.name}")
        if accmode != os.O_RDONLY or flags & os.O_TRUNC:
            self.check_writer(call.caller)
        return open_row(self, call.caller, flags)

    def changed(self) -> None:
        if isinstance(self.row, rows.Document):
            self.row.written(self.base, self.obj)

    def closed(self, fd: int) -> None:
        self.base.disks.close(fd)


class LinkNode(RowNode[_O]):
    """A symbolic link."""

    row: rows.Link[_O]

    def readlink(self) -> str:
        return self.row.target(self.base, self.obj)

    async def followed(self, call: Call) -> None:
        if self.row.ready is not None:
            await self.row.ready(self.base, self.obj, call)


class DirectoryNode(RowNode[_O]):
    """A directory: the rows that are within it, and what its own row finds beside them."""

    row: rows.Directory[_O]

    # names

    def lookup(self, call: Call, name: str) -> Node:
        """An entry of the directory; ``MissingError`` or ``DeniedError``."""
        row = self.row
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
        """The node of a name, by a row of the object's that is within this one."""
        number = self.layout.numbers.get((self._within, name))
        if number is None:
            return None
        node = node_of(self.base, self.layout, self.index, self.obj, number)
        row = node.row
        if not node.may_be_seen(call.caller):
            raise DeniedError(f"the caller may not see {row.name}")
        if isinstance(row, rows.Directory) and row.folder is not None:
            return self.base.folders.root(row.folder, self.obj)
        return node

    def list(self, call: Call) -> Iterator[str]:
        if not self.may_read(call.caller):
            raise DeniedError(f"the caller may not list {self.path or '/'}")
        return self._names(call)

    def _names(self, call: Call) -> Iterator[str]:
        if self.row.entries is not None:
            yield from self.row.entries(self.base, self.obj, call)
        for number, inner in self.layout.within(self._within):
            node = node_of(self.base, self.layout, self.index, self.obj, number)
            if inner.listed and node.may_be_seen(call.caller):
                yield inner.name

    def telling(self) -> Callable[[str], Attributes | None]:
        return super().telling() if self.row.tell is None else self.row.tell(self.base)

    @property
    def _within(self) -> str:
        """The directory that its rows are ``within``."""
        return "" if self.row.top else self.row.name

    def shown(self, name: str) -> str:
        return "(a secret)" if self.row.secret else name

    # making and removing

    def mkdir(self, call: Call, name: str, mode: int) -> Node:
        making = self.row.make
        if making is None:
            return super().mkdir(call, name, mode)
        agents, roles = self.base.agents, self.roles(call.caller)
        what = self._named(name)
        making.guard.check_who(Act.MAKE, what, agents, roles, self.agent)
        with agents.journal.acting(call.caller):
            return making.act(self.base, self.obj, call, name, mode)

    def unmakable(self, what: str, name: str = "") -> ForbiddenError:
        """Whoever mistypes the name of a control makes a file."""
        known = [row.name for _, row in self.layout.within(self._within) if row.listed]
        like = get_close_matches(name, known, n=1)
        if not like:
            return super().unmakable(what, name)
        return ForbiddenError(f"{self._named(name)} is no file; did you mean {like[0]}?")

    def create(self, call: Call, name: str, mode: int, flags: int) -> tuple[Node, OpenFile]:
        if self.row.secret:
            # as a shell opens one that was there: it is gone, rather than never to be made
            raise MissingError(
                f"{quote(self.shown(name))}: no such file in {self.path}; it may have been used"
            )
        return super().create(call, name, mode, flags)

    def unremovable(self, name: str) -> ForbiddenError:
        """It goes with the directory of its object, if that can be removed."""
        if not self.layout.removable:
            return super().unremovable(name)
        whole = self.layout.path(self.base, self.obj)
        return ForbiddenError(f"{name} cannot be removed alone: rmdir {whole} removes all of it")

    def rmdir(self, call: Call, name: str) -> None:
        if self.row.remove is None:
            return super().rmdir(call, name)
        self.row.remove.remove(self.base, self.obj, call.caller, name, self._named(name))

    def _named(self, name: str) -> str:
        return f"{self.path}/{name}".lstrip("/")

    def mknod(self, call: Call, name: str, mode: int) -> Node:
        """The binder binds each socket under a name that nobody lists."""
        node: Node | None = None
        if self.row.bind is not None and call.is_binder and stat.S_ISSOCK(mode):
            node = self.row.bind(self.base, self.obj, name)
        return node if node is not None else super().mknod(call, name, mode)

    def receive(self, call: Call, source: Node, name: str, new_name: str) -> None:
        if self.row.receive is None:
            return super().receive(call, source, name, new_name)
        self.row.receive(self.base, self.obj, call, source, name, new_name)


_CLASSES: Final[dict[rows.Kind, type[RowNode[Any]]]] = {
    rows.Kind.FILE: FileNode,
    rows.Kind.DIRECTORY: DirectoryNode,
    rows.Kind.LINK: LinkNode,
    rows.Kind.SOCKET: RowNode,
}


def node_of(
    base: Base, layout: Layout[_O], index: int, obj: _O, number: int = 0
) -> RowNode[_O]:
    """The node of a row; without a number, of the object's own directory."""
    return _CLASSES[layout.numbered[number or layout.top].kind](base, layout, index, obj, number)


def found(base: Base, layout: Layout[_I], obj: _I | None) -> RowNode[_I] | None:
    """The node of what was looked for, by its index; None if nothing was found."""
    return node_of(base, layout, obj.index, obj) if obj is not None else None


# what opens which kind of row


def open_row(node: FileNode[_O], caller: Caller, flags: int) -> OpenFile:
    """A row, opened; the caller may open it like this."""
    match row := node.row:
        case rows.Verbs():
            return OpenVerbs(node, row, caller)
        case rows.Staged() if flags & os.O_ACCMODE != os.O_RDONLY:
            return OpenControl(node, row, caller, flags)
        case rows.Rendered():
            return OpenRow(node, caller, writing=False)
        case rows.Document():
            return _open_document(node, row, caller, flags)
        case rows.History():
            return OpenHistory(node, row, caller, flags)
        case rows.Output():
            return OpenOutput(node, row, caller)
        case rows.Gathered():
            return OpenGathered(node, row, caller)
        case rows.Inlet():
            return OpenInlet(node, row, caller)
    raise NotImplementedError(type(row).__name__)


def reopen_row(
    node: FileNode[_O], caller: Caller, flags: int, saved: dict[str, Any]
) -> OpenFile:
    """One that was open in the daemon before, as it was there: nobody asks whether it may be.

    ``LookupError`` if it is of another kind now.
    """
    flags &= ~(os.O_TRUNC | os.O_CREAT | os.O_EXCL)
    row = node.row
    opened: OpenFile
    if isinstance(row, rows.Document):
        fd = saved.get("fd")
        opened = OpenByPath(node, row, caller) if fd is None else _in_place(
            node, row, caller, flags, fd
        )
    else:
        opened = open_row(node, caller, flags)
    # version 0.2 had a kind for bytes
    kind = "OpenInlet" if saved["kind"] == "OpenFeed" else saved["kind"]
    if type(opened).__name__ != kind:
        raise LookupError(f"{row.name} is a {type(opened).__name__} now")
    opened.restore(saved)
    return opened


def _open_document(
    node: Member[_O], row: rows.Document[_O], caller: Caller, flags: int
) -> OpenFile:
    """The file behind a row, made if it is not there yet; who only reads does not make it."""
    wanted = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
        row.ensure(node.base, node.obj)
        wanted |= os.O_RDWR | os.O_CREAT
    try:
        fd = os.open(row.real(node.base, node.obj), wanted, 0o644)
    except FileNotFoundError:
        if wanted & os.O_CREAT:
            raise
        return OpenByPath(node, row, caller)
    return _in_place(node, row, caller, flags, fd)


def _in_place(
    node: Member[_O], row: rows.Document[_O], caller: Caller, flags: int, fd: int
) -> OpenRealFile:
    limit, append = node.base.runtime.config.document_max, bool(flags & os.O_APPEND)
    share = row.share(node.base, node.obj)
    return OpenRealFile(
        node, caller, fd, limit=limit, append=append, share=share, text=row.text
    )
