"""The elements of the tree: nodes, open files and the calls on them.

Nothing here knows FUSE's requests or errnos: ``operations`` translates.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from ctxfs.caching import FOREVER, Waiter
from ctxfs.disks import Work
from runtime.caller import Caller
from runtime.errors import (
    CtxError,
    DeniedError,
    ForbiddenError,
    GoneError,
    IsADirectoryNodeError,
    MalformedError,
    MissingError,
    NotADirectoryNodeError,
)
from runtime.ids import Incarnation
from runtime.kernel.handover import Descriptors, Handed
from runtime.runtime import Runtime


class Call:
    """One request and who makes it; resolved only where a decision needs it."""

    def __init__(self, runtime: Runtime, uid: int, gid: int, pid: int) -> None:
        self._runtime = runtime
        self.uid = uid
        self.gid = gid
        self.pid = pid
        self._caller: Caller | None = None

    @classmethod
    def of(cls, runtime: Runtime, caller: Caller) -> Call:
        """For a caller that is known already, and asks without a request of the kernel."""
        call = cls(runtime, caller.uid, caller.gid, caller.pid)
        call._caller = caller
        return call

    @property
    def caller(self) -> Caller:
        if self._caller is None:
            resolve = self._runtime.agents.identity.resolve
            self._caller = resolve(self.uid, self.gid, self.pid)
            if not self._caller.known and self.is_binder:
                # it looks up the directory that it was told to bind in
                self._caller = Caller(self.uid, self.gid, self.pid)
        return self._caller

    @property
    def is_binder(self) -> bool:
        """The daemon's helper that binds the sockets."""
        own = self._runtime.agents.privilege.uid
        return self.uid == own and self.pid == self._runtime.binder.pid


@dataclass(slots=True)
class Attributes:
    """As in stat(2); timeouts say how long the kernel may keep name and attributes."""

    inode: int
    mode: int
    uid: int = 0
    gid: int = 0
    size: int = 0
    links: int = 1
    mtime: float = 0.0
    #: of a real file: what else there is to know
    real: os.stat_result | None = None
    entry_timeout: float = FOREVER
    attr_timeout: float = FOREVER
    #: what has this size, of a value that can be polled and whose pages may be kept
    value: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewAttributes:
    """The attributes beside the size that setattr is to set; None where it is to set nothing."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    #: nanoseconds since 1970
    atime: int | None = None
    mtime: int | None = None


class OpenFile(Handed):
    """One open file; it passes on what node, caller and flags do not say."""

    #: how the kernel treats the pages (FOPEN_DIRECT_IO, FOPEN_KEEP_CACHE)
    direct = True
    keep = False
    #: whether ``gathered`` is to be awaited, and not ``reading`` to be done
    gathers = False
    #: whether ``flush`` has anything to do
    flushes = True
    #: whether a write is answered only when the pages of what it changed are dropped; else the
    #: next flush is, and ``mark`` is what ``Cache.mark`` was before the first such write
    settles = True
    mark: int | None = None
    #: why the last flush failed, said by each that follows until something is written: the one
    #: that failed may be of a process that was forked meanwhile, and that nobody asks
    refused: CtxError | None = None
    #: those of open(2)
    flags = 0

    def __init__(self, node: Node, caller: Caller) -> None:
        self.node = node
        self.caller = caller

    def read(self, offset: int, size: int) -> bytes | None:
        """None if that would wait for the disk: then ``reading`` does it."""
        raise ForbiddenError("this file is not open for reading")

    def reading(self, offset: int, size: int) -> Work[bytes]:
        raise NotImplementedError(type(self).__name__)

    async def gathered(self, offset: int, size: int) -> bytes:
        raise NotImplementedError(type(self).__name__)

    def write(self, offset: int, data: bytes) -> int:
        raise ForbiddenError("this file is not open for writing")

    def writing(self, offset: int, data: bytes) -> Work[int] | None:
        """The work of writing a real file, which is not written by ``write``."""
        return None

    async def prepare(self, data: bytes) -> None:
        """Does what a write of this needs that takes a while, but not long; raises as it would."""

    def truncate(self, size: int) -> None:
        """Cuts off the staged text of a control: alone this changes nothing."""

    def truncating(self, size: int) -> Work[None] | None:
        """The work of cutting off a real file, which ``truncate`` and ``open`` do not; None if it
        is empty and stays so."""
        return None

    def flush(self) -> None:
        """close(2) of one of its descriptors."""

    @property
    def lasts(self) -> bool:
        """Whether fsync(2) has something to do: who may only read has nothing to make last."""
        return self.node.is_writer(self.caller)

    def syncing(self) -> Callable[[], None] | None:
        """fsync(2): commits what is staged, and returns the rest, if any, for a thread."""
        return None

    def poll(self, waiter: Waiter | None) -> int | None:
        """Ready events; None where poll(2) means nothing."""
        return None

    def release(self) -> None:
        """The last descriptor is gone."""

    # in the next daemon

    @property
    def unfinished(self) -> bool:
        """Whether something was written that ``flush`` would commit."""
        return False

    def last_text(self) -> bytes:
        """All that can be read of an object that is gone."""
        return b""


#: read of a directory at once
_NAMES: Final = 1024
#: what a name takes beside its letters, about
_NAME_SIZE: Final = 64
#: what as many names take at most
MORE_SIZE: Final = _NAMES * (255 + _NAME_SIZE)


@dataclass
class Listing(Handed):
    """An open directory: its names as they were when it was opened, or read from its beginning.

    A position in it is that of a name, for as long as it is open. The next daemon reads the names
    that are left by itself: there may be many.
    """

    HANDED = ("begun", "size")

    directory: Node
    call: Call
    names: list[str] = field(default_factory=list)
    #: where more names come from
    _source: Iterator[str] | None = None
    #: whether names were asked for since they were read
    begun: bool = False
    #: about what it holds of memory, in bytes
    size: int = 0

    def restart(self) -> None:
        """Reads the first names."""
        self.names, self.begun, self.size = [], False, 0
        self._source = self.directory.list(self.call)
        self.more()

    @property
    def ended(self) -> bool:
        """Whether there are no more names than it has."""
        return self._source is None

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        names = os.fsencode("\0".join(self.names))
        return {**super().save(descriptors), "names": names, "ended": self.ended}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Names keep their positions, so the others come after them."""
        super().restore(saved)
        names = os.fsdecode(saved["names"])
        self.names = names.split("\0") if names else []
        self._source = None if saved["ended"] else self._others()

    def _others(self) -> Iterator[str]:
        known = set(self.names)
        return (name for name in self.directory.list(self.call) if name not in known)

    def more(self) -> bool:
        """Reads some more names: of a real directory, which may be large, not all at once. Others
        may change while nobody looks."""
        if self._source is None:
            return False
        more = list(islice(self._source, _NAMES if self.directory.large else None))
        if not self.directory.large or len(more) < _NAMES:
            self._source = None
        self.names += more
        self.size += sum(len(name) + _NAME_SIZE for name in more)
        return bool(more)


def _without_telling(name: str) -> None:
    return None


class Node:
    """One object of the tree. What it does not override, it refuses."""

    inode: int
    #: whether it may have any number of entries
    large = False

    @property
    def path(self) -> str:
        """For reasons: where it is, from the root."""
        return ""

    @property
    def instead(self) -> str:
        """For reasons, where things can be made if not in it."""
        return ""

    @property
    def incarnation(self) -> Incarnation | None:
        """The incarnation of the agent whose file it is."""
        return None

    def attributes(self) -> Attributes:
        raise NotImplementedError(type(self).__name__)

    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.attributes().mode)

    def shown(self, name: str) -> str:
        """A name in it as reasons may tell it."""
        return name

    def lookup(self, call: Call, name: str) -> Node:
        raise NotADirectoryNodeError(f"{self.path} is not a directory")

    def list(self, call: Call) -> Iterator[str]:
        """The names in it that this caller may see."""
        raise NotADirectoryNodeError(f"{self.path} is not a directory")

    def telling(self) -> Callable[[str], Attributes | None]:
        """For a listing: what finds the attributes of a name without a node, if that is enough;
        None if ``lookup`` has to. It is used in one step of the loop."""
        return _without_telling

    def open(self, call: Call, flags: int) -> OpenFile:
        if self.is_directory():
            raise IsADirectoryNodeError(f"{self.path} is a directory")
        raise ForbiddenError(f"{self.path} cannot be opened")

    def readlink(self) -> str:
        raise MalformedError(f"{self.path} is not a symbolic link")

    async def followed(self, call: Call) -> None:
        """Returns when what a link leads to is there."""

    def is_writer(self, caller: Caller) -> bool:
        """Whether he may write it, now or in another status."""
        return False

    # of what is open: a node of real files has all of these

    def check_reader(self, caller: Caller) -> None:
        """At every read: who opened it still lives, and still may."""
        raise NotImplementedError(type(self).__name__)

    def check_writing(self, caller: Caller) -> None:
        """At every write: who opened it still lives, and still may."""
        raise NotImplementedError(type(self).__name__)

    def changed(self) -> None:
        """Something was written to it."""
        raise NotImplementedError(type(self).__name__)

    def closed(self, fd: int) -> None:
        """A descriptor of it is needed no longer."""
        raise NotImplementedError(type(self).__name__)

    # making and removing

    def unmakable(self, what: str, name: str = "") -> ForbiddenError:
        return ForbiddenError(f"{what} cannot be created in {self.path or '/'}{self.instead}")

    def mkdir(self, call: Call, name: str, mode: int) -> Node:
        raise self.unmakable("directories")

    def create(self, call: Call, name: str, mode: int, flags: int) -> tuple[Node, OpenFile]:
        raise self.unmakable("files", name)

    def mknod(self, call: Call, name: str, mode: int) -> Node:
        raise self.unmakable("nodes")

    def unremovable(self, name: str) -> ForbiddenError:
        return ForbiddenError(f"{self.shown(name)} cannot be removed from {self.path or '/'}")

    def rmdir(self, call: Call, name: str) -> None:
        raise self.unremovable(name)

    def unlink(self, call: Call, name: str) -> None:
        raise self.unremovable(name)

    def rename(self, call: Call, name: str, target: Node, new_name: str, flags: int = 0) -> None:
        """With the flags of renameat2(2)."""
        raise ForbiddenError(f"{self.shown(name)} cannot be renamed")

    def receive(self, call: Call, source: Node, name: str, new_name: str) -> None:
        """A real file is renamed into this directory, from another space."""
        raise ForbiddenError(f"nothing can be renamed into {self.path or '/'}")

    def set_attributes(self, call: Call, changes: NewAttributes) -> None:
        """chmod(2), chown(2), utimensat(2).

        To set a value to what it is already is allowed: editors do so after writing.
        """
        present = self.attributes()
        for wanted, have in (
            (changes.mode, present.mode & 0o7777),
            (changes.uid, present.uid),
            (changes.gid, present.gid),
        ):
            if wanted is not None and wanted != have:
                raise ForbiddenError(f"mode and owner of {self.path} cannot be changed")


class GoneNode(Node):
    """The node that an open file or directory is left with when its object is gone, in the next
    daemon."""

    def __init__(self, inode: int, path: str) -> None:
        self.inode = inode
        self._path = path

    @property
    def path(self) -> str:
        return self._path

    def attributes(self) -> Attributes:
        raise GoneError("this object was removed")

    def lookup(self, call: Call, name: str) -> Node:
        raise MissingError("the directory was removed")

    def list(self, call: Call) -> Iterator[str]:
        return iter(())


class OpenGone(OpenFile):
    """An open file of an object that is gone: with its last text, if it is known, for who may
    still read it."""

    HANDED = ("_text", "_unfinished")

    def __init__(
        self,
        node: Node,
        caller: Caller,
        text: bytes | None,
        still: Callable[[Caller], bool],
        *,
        unfinished: bool = False,
    ) -> None:
        super().__init__(node, caller)
        self._text = text
        self._still = still
        self._unfinished = unfinished

    def read(self, offset: int, size: int) -> bytes:
        if not self._still(self.caller):
            raise DeniedError("the agent that opened this file has ended, and its rights with it")
        if self._text is None:
            raise MissingError("the object of this file is gone: open the file again")
        return self._text[offset : offset + size]

    def write(self, offset: int, data: bytes) -> int:
        raise MissingError("the object of this file is gone: open the file again")

    def flush(self) -> None:
        if self._unfinished:
            self._unfinished = False
            raise MissingError("the object of this file is gone: open the file again")

    @property
    def unfinished(self) -> bool:
        return self._unfinished

    def last_text(self) -> bytes:
        return self._text or b""
