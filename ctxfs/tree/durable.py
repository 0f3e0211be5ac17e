"""Real files behind the tree: ``artifact/``, ``episode/``, ``home/UID/data`` and ``shared/``.

A node is reached through its parent's descriptor (O_PATH), one name at a time,
so that no link is ever followed with the daemon's rights. Descriptors are kept
for the nodes used last; what is opened again has to be the same file as before.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Final
from weakref import WeakSet

from ctxfs.caching import Cache
from ctxfs.disks import Work
from ctxfs.tree.inodes import DURABLE, REAL
from ctxfs.tree.nodes import Attributes, Call, NewAttributes, Node, OpenFile
from ctxfs.tree.realfiles import OpenRealFile, truncating_by_path
from ctxfs.tree.spaces import DIRECTORY, Place, Space, gone_space
from runtime.authority.disk import ENTRY_SIZE, Share
from runtime.caller import Caller
from runtime.errors import (
    CrossingError,
    CtxError,
    ForbiddenError,
    GoneError,
    IsADirectoryNodeError,
    MissingError,
    NotADirectoryNodeError,
    NotEmptyError,
    TakenError,
    UnsupportedError,
)
from runtime.ids import Incarnation
from runtime.kernel import linux
from runtime.kernel.handover import Descriptors
from runtime.texts.names import quote

#: above every computed inode number
_FIRST: Final = 1 << 62
_KINDS: Final = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK)
_ENTRY: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_DESCRIPTORS: Final = 512
#: how many of a chain of directories are kept open when it is opened again, and
#: how many earlier names of a file are tried. One operation opens three such
#: chains at most, so that what it uses is not closed under it by _DESCRIPTORS.
_CHAIN: Final = 128
_ALIASES: Final = 1
_SHOWN: Final = 200
#: of a directory without entries, in bytes
_EMPTY_SIZE: Final = 4096
#: nanoseconds after which another change has another time of change, on any filesystem
_TICK: Final = 20_000_000


#: what errors of real files are called here
_ERRORS: Final[dict[int | None, type[CtxError]]] = {
    errno.ENOENT: MissingError,
    errno.EEXIST: TakenError,
    errno.ENOTEMPTY: NotEmptyError,
    errno.ENOTDIR: NotADirectoryNodeError,
    errno.EISDIR: IsADirectoryNodeError,
}


def _translate(error: OSError, name: str) -> CtxError | OSError:
    cls = _ERRORS.get(error.errno)
    return cls(f"{quote(name)}: {(error.strerror or '').lower()}") if cls else error


def _kept(mode: int) -> int:
    """The bits of a mode, with its kind, that the backing is given. The mount ignores those of
    set-id programs; and the backing must not have them, where another mount shows it. Of a
    directory, set-group-ID says to whom belongs what is made there."""
    return mode & (0o3777 if stat.S_ISDIR(mode) else 0o1777)


def _is_channel(mode: int) -> bool:
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _reopen(fd: int, flags: int) -> int:
    """Opens the file of an O_PATH descriptor. The kernel has let the caller in, or it has
    it open since before the mode was set; without root the modes count for the daemon, too."""
    path = f"/proc/self/fd/{fd}"
    try:
        return os.open(path, flags)
    except PermissionError:
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        os.chmod(path, mode | 0o600)
        try:
            return os.open(path, flags)
        finally:
            os.chmod(path, mode)


class DurableNode(Node):
    """One real file, directory or link, by its parent and its name in there.

    ``key`` are the device and inode number of the backing, None of the root of a space that is
    not on the disk yet (``Space.ensure``). ``aliases`` are other
    places where a file with several links was seen. ``gone`` says that nothing
    has to be looked for by name any more. ``openings`` are its open descriptors, and
    ``charged`` tells whether its bytes count in its space: also without a name, as long as
    somebody has it open or refers to it.
    """

    large = True

    def __init__(
        self,
        table: Durable,
        space: Space,
        inode: int,
        key: tuple[int, int] | None,
        parent: DurableNode | None,
        name: str,
    ) -> None:
        self.table = table
        self.space = space
        self.inode = inode
        self.key = key
        self.parent = parent
        self.name = name
        self.aliases: tuple[tuple[DurableNode | None, str], ...] = ()
        self.gone = False
        #: when the file was made, known since its last descriptor was closed: its inode number
        #: may be another file's since
        self.born: int | None = None
        #: the daemon has made it another file
        self.taken = False
        self.lookups = 0
        self.openings: list[int] = []
        #: what it was when it was made: the kernel asks in the same request
        self.present: os.stat_result | None = None
        #: when the file was changed last, as it was when the kernel may have got pages of it;
        #: None if it was changed since, or may be with the same time
        self.paged: int | None = None
        self.charged = True
        #: its bytes on the disk are given back when nobody has it open any more
        self.owed = False

    @property
    def fd(self) -> int:
        """Its descriptor; good for this operation, not to be closed."""
        return self.table.descriptor(self)

    @property
    def path(self) -> str:
        parts: list[str] = []
        length = 0
        node = self
        while node.parent is not None and length <= _SHOWN:
            parts.append(node.name)
            length += len(node.name) + 1
            node = node.parent
        if node.parent is None:
            parts.append(self.space.path)
        text = "/".join(reversed(parts))
        return text if len(text) <= _SHOWN else f"…{text[-_SHOWN:]}"

    @property
    def incarnation(self) -> Incarnation | None:
        return self.space.incarnation

    def attributes(self) -> Attributes:
        if self.table.is_absent(self):
            return self._of_absent()
        st, self.present = self.present or os.fstat(self.fd), None
        uid, gid = self.space.owner() or (st.st_uid, st.st_gid)
        return Attributes(
            inode=self.inode,
            mode=st.st_mode,
            uid=uid,
            gid=gid,
            size=st.st_size,
            links=st.st_nlink,
            real=st,
            # who may use a channel is asked at each look-up
            entry_timeout=0.0 if _is_channel(st.st_mode) else self.space.timeout,
            attr_timeout=self.space.timeout,
        )

    def _of_absent(self) -> Attributes:
        uid, gid = self.space.owner() or (0, 0)
        return Attributes(
            inode=self.inode,
            mode=stat.S_IFDIR | self.space.mode,
            uid=uid,
            gid=gid,
            size=_EMPTY_SIZE,
            links=2,
            mtime=self.space.created,
        )

    def ensure(self) -> None:
        """Goes before what changes it; ``NoSpaceError``."""
        if self.table.is_absent(self) and self.space.ensure is not None:
            self.space.ensure()

    def remembered(self) -> None:
        self.lookups += 1

    def changed(self) -> None:
        self.table.cache.forget_attributes(self.inode)

    def resizing(self, fd: int, size: int) -> AbstractContextManager[None]:
        if self.space.total is None or not self.charged:
            return nullcontext()
        return self.space.resizing(fd, size)

    def lookup(self, call: Call, name: str) -> Node:
        self.space.may_read(call.caller)
        node = self.table.find(self, name)
        if _is_channel(os.fstat(node.fd).st_mode):
            # the kernel opens it without asking, and data go both ways
            try:
                self.space.may_write(call.caller)
            except CtxError:
                self.table.forget(node.inode, 0)
                raise
        return node

    def list(self, call: Call) -> Iterator[str]:
        self.space.may_read(call.caller)
        if self.table.is_absent(self):
            return
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            entries = os.scandir(fd)
        finally:
            os.close(fd)
        with entries:
            for entry in entries:
                yield entry.name

    def open(self, call: Call, flags: int) -> OpenFile:
        self.space.may_read(call.caller)
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            self.space.may_write(call.caller)
        return self._opened(call, flags)

    def _opened(self, call: Call, flags: int) -> OpenRealFile:
        mode = stat.S_IFMT(os.fstat(self.fd).st_mode)
        if mode == stat.S_IFDIR:
            raise IsADirectoryNodeError(f"{self.path} is a directory")
        if mode != stat.S_IFREG:
            raise ForbiddenError(f"{self.path} is opened by the kernel alone")
        wanted = os.O_RDONLY if flags & os.O_ACCMODE == os.O_RDONLY else os.O_RDWR
        if flags & os.O_TRUNC:
            wanted = os.O_RDWR
        return self._opened_as(call, _reopen(self.fd, wanted | os.O_CLOEXEC), flags)

    def _opened_as(self, call: Call, fd: int, flags: int) -> OpenRealFile:
        opened = self.reopened(call.caller, fd, flags)
        opened.begin()
        return opened

    def reopened(self, caller: Caller, fd: int, flags: int) -> _OpenDurable:
        """As it was open in the daemon before."""
        opened = _OpenDurable(
            self,
            caller,
            fd,
            flags,
            limit=self.space.limit,
            share=self.space.share,
            may_read=lambda: self.space.may_read(caller),
            may_write=lambda: self.space.may_write(caller),
        )
        self.openings.append(fd)
        return opened

    def keeps_pages(self, fd: int) -> bool:
        """Whether what the kernel has of the file is what is in it, also if another mount shows
        it; asked when it is opened."""
        changed = os.fstat(fd).st_ctime_ns
        kept = self.paged == changed
        if not kept:
            # else the kernel reads as much as the file had when it was last asked
            self.changed()
        self.paged = changed if time.time_ns() - changed > _TICK else None
        return kept

    def create(self, call: Call, name: str, mode: int, flags: int) -> tuple[Node, OpenFile]:
        self._check_making(call)
        access = os.O_RDONLY if flags & os.O_ACCMODE == os.O_RDONLY else os.O_RDWR
        mode = stat.S_IFREG | mode & 0o7777
        try:
            with self._making_as(call):
                fd = os.open(
                    name, access | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _kept(mode),
                    dir_fd=self.fd,
                )
        except FileExistsError:
            if flags & os.O_EXCL:
                raise TakenError(f"{quote(name)}: file exists") from None
            # it came another way: the kernel looks it up, and opens it
            raise GoneError(f"{quote(name)} is there already") from None
        except OSError as error:
            raise _translate(error, name) from None
        st = self._made(fd, call, mode)
        node = self.table.known(self.space, fd, st, self, name)
        node.present = st
        return node, node._opened_as(call, fd, flags)

    def _touch(self, name: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        os.close(os.open(name, flags, 0o600, dir_fd=self.fd))

    def mkdir(self, call: Call, name: str, mode: int) -> Node:
        mode |= stat.S_IFDIR
        return self._make(call, name, lambda: os.mkdir(name, 0o700, dir_fd=self.fd), mode)

    def mknod(self, call: Call, name: str, mode: int) -> Node:
        if stat.S_ISREG(mode):
            return self._make(call, name, lambda: self._touch(name), mode)
        if not self.space.links:
            raise ForbiddenError("only files and directories can be created here")
        if not _is_channel(mode):
            raise ForbiddenError("devices cannot be created here")
        kind = stat.S_IFMT(mode)
        return self._make(
            call, name, lambda: os.mknod(name, kind | 0o600, dir_fd=self.fd), mode
        )

    def symlink(self, call: Call, name: str, target: str) -> Node:
        if not self.space.links:
            raise ForbiddenError("only files and directories can be created here")
        return self._make(call, name, lambda: os.symlink(target, name, dir_fd=self.fd))

    def link(self, call: Call, name: str, target: Node) -> Node:
        if not isinstance(target, DurableNode):
            raise ForbiddenError("only files of this space can be linked here")
        if target.space is not self.space:
            raise CrossingError("a hard link cannot lead to another space: copy the file")
        if not self.space.links:
            raise ForbiddenError("only files and directories can be created here")
        source = f"/proc/self/fd/{target.fd}"
        node = self._make(
            call,
            name,
            lambda: os.link(source, name, dst_dir_fd=self.fd, follow_symlinks=True),
            new=False,
        )
        target._altered()
        return node

    def _make(
        self,
        call: Call,
        name: str,
        action: Callable[[], None],
        mode: int | None = None,
        *,
        new: bool = True,
    ) -> DurableNode:
        """Has ``action`` make an entry, a ``new`` file or another link to one; ``mode`` is with
        its kind."""
        self._check_making(call)
        try:
            with self._making_as(call):
                action()
        except OSError as error:
            raise _translate(error, name) from None
        node = self.table.find(self, name)
        if new:
            node.present = self._made(node.fd, call, mode)
        else:
            self._noted()
        return node

    def _check_making(self, call: Call) -> None:
        self.space.may_write(call.caller)
        self.space.check_room()
        self.space.check_disk(call.caller, ENTRY_SIZE)
        self.ensure()

    def _noted(self) -> None:
        """There is one more entry."""
        self.space.note(1)
        self.space.note_disk(ENTRY_SIZE)
        self._altered()

    def _altered(self) -> None:
        """The kernel asked for what changed its attributes, and knows that they did."""
        if not self.space.links:
            self.changed()

    def _making_as(self, call: Call) -> AbstractContextManager[None]:
        """Where files belong to who makes them, nothing is given away by its name afterwards: a
        process that has the tree by a line of its mount table could put another file there."""
        return linux.making_as(call.uid, call.gid) if self.space.owner() is None else nullcontext()

    def _made(self, fd: int, call: Call, mode: int | None) -> os.stat_result:
        """What has just been made gets its ``mode``, with its kind; None of a link."""
        self._noted()
        st = os.fstat(fd)
        if mode is None:
            return st
        # an inherited set-group-ID bit stays
        wanted = _kept(mode) | st.st_mode & stat.S_ISGID
        own = st.st_uid == (call.uid if self.space.owner() is None else 0) or os.geteuid() != 0
        if not own or stat.S_IFMT(st.st_mode) != stat.S_IFMT(mode):
            return st  # somebody put it there since
        # the caller's umask has been applied already, the daemon's must not be
        if stat.S_IMODE(st.st_mode) != wanted:
            os.chmod(f"/proc/self/fd/{fd}", wanted)
            st = os.fstat(fd)
        return st

    def unlink(self, call: Call, name: str) -> None:
        self.space.may_write(call.caller)
        self.space.count()
        target = self.table.find(self, name)
        try:
            with self._removing_as(call):
                os.unlink(name, dir_fd=self.fd)
        except OSError as error:
            self.table.forget(target.inode, 0)
            raise _translate(error, name) from None
        self._lost(target)

    def rmdir(self, call: Call, name: str) -> None:
        self.space.may_write(call.caller)
        target = self.table.find(self, name)
        try:
            with self._removing_as(call):
                os.rmdir(name, dir_fd=self.fd)
        except OSError as error:
            self.table.forget(target.inode, 0)
            raise _translate(error, name) from None
        self._lost(target)

    def _removing_as(self, call: Call, *others: DurableNode) -> AbstractContextManager[None]:
        """Whose a file is in a sticky directory the kernel has asked of the mount, a moment ago:
        another process may have put another file there since by a line of its mount table."""
        if self.space.owner() is not None or not any(
            os.fstat(directory.fd).st_mode & stat.S_ISVTX for directory in (self, *others)
        ):
            return nullcontext()
        return linux.removing_as(call.uid)

    def _lost(self, target: DurableNode) -> None:
        """An entry of this directory has been removed."""
        self.space.note(-1)
        target._altered()
        self._altered()
        st = os.fstat(target.fd)
        if stat.S_ISDIR(st.st_mode) or st.st_nlink == 0:
            # who has it open has its bytes on the disk still
            target.owed = bool(target.openings)
            self.space.note_disk(-ENTRY_SIZE - (0 if target.owed else st.st_blocks * 512))
            self.table.remove(target)
        self.table.forget(target.inode, 0)

    def rename(self, call: Call, name: str, target: Node, new_name: str, flags: int = 0) -> None:
        self.space.may_write(call.caller)
        if not isinstance(target, DurableNode):
            target.receive(call, self, name, new_name)
            self.changed()
            return
        if target.space is not self.space:
            raise CrossingError("a file cannot be renamed into another space: copy it")
        self.space.count()
        target.ensure()
        replaced: DurableNode | None = None
        with suppress(MissingError):
            replaced = self.table.find(target, new_name)
        if replaced is not None and flags & linux.RENAME_NOREPLACE:
            raise TakenError(f"{quote(new_name)} already exists")
        node = self.table.find(self, name)
        if node is replaced:
            return  # rename(2) does nothing with two links to one file
        try:
            with self._removing_as(call, target):
                linux.rename(self.fd, name, target.fd, new_name, flags)
        except OSError as error:
            for each in (node, replaced):
                if each is not None:
                    self.table.forget(each.inode, 0)
            raise _translate(error, name) from None
        self._altered()
        node.parent, node.name = target, new_name
        if replaced is not None and flags & linux.RENAME_EXCHANGE:
            replaced.parent, replaced.name = self, name
            self.table.forget(replaced.inode, 0)
        elif replaced is not None:
            target._lost(replaced)
        target._altered()
        self.table.forget(node.inode, 0)

    def readlink(self) -> str:
        return os.readlink("", dir_fd=self.fd)

    def truncating(self, call: Call, size: int) -> Work[None]:
        self.space.may_write(call.caller)
        return truncating_by_path(lambda: self._opened(call, os.O_WRONLY), size)

    def set_attributes(self, call: Call, changes: NewAttributes) -> None:
        self.space.may_write(call.caller)
        self.ensure()
        present = self.attributes()
        path = f"/proc/self/fd/{self.fd}"
        owned = self.space.owner() is not None
        if owned and (
            changes.uid not in (None, present.uid) or changes.gid not in (None, present.gid)
        ):
            raise ForbiddenError(f"the owner of {self.path} cannot be changed")
        if not owned:
            self._check_owner(call, present, changes)
        if not owned and (changes.uid is not None or changes.gid is not None):
            ids = (-1 if v is None else v for v in (changes.uid, changes.gid))
            os.chown(path, *ids)
        if changes.mode is not None and not stat.S_ISLNK(present.mode):
            os.chmod(path, _kept(stat.S_IFMT(present.mode) | changes.mode))
        if changes.atime is not None or changes.mtime is not None:
            linux.set_times(self.fd, changes.atime, changes.mtime)
        self._altered()

    def _check_owner(self, call: Call, present: Attributes, changes: NewAttributes) -> None:
        """``ForbiddenError``. The kernel has compared the caller with the owner that it was told,
        however long ago: for a descriptor it does not ask again."""
        if os.geteuid() != 0 or call.uid in (0, present.uid):
            return
        # who may write takes the set-id bits off by it
        mode = present.mode if changes.mode is None else changes.mode
        if changes.uid is not None or changes.gid is not None or (mode ^ present.mode) & 0o1777:
            raise ForbiddenError(f"{self.path} belongs to uid {present.uid}")

    # extended attributes: the kernel has looked at the mode for those of users

    def _xattr_path(self) -> str:
        """``UnsupportedError`` where there are none: what they take is on no space's account."""
        if not self.space.links:
            raise UnsupportedError(f"{self.space.path} has no extended attributes")
        return f"/proc/self/fd/{self.fd}"

    def xattr(self, call: Call, name: str) -> bytes:
        self.space.may_read(call.caller)
        return os.getxattr(self._xattr_path(), name)

    def xattrs(self, call: Call) -> Sequence[str]:
        self.space.may_read(call.caller)
        return os.listxattr(self._xattr_path()) if self.space.links else []

    def set_xattr(self, call: Call, name: str, value: bytes) -> None:
        self.space.may_write(call.caller)
        path = self._xattr_path()
        before = os.stat(path).st_blocks
        self.space.check_disk(call.caller, len(value))
        os.setxattr(path, name, value)
        self.space.note_disk((os.stat(path).st_blocks - before) * 512)
        self.changed()

    def remove_xattr(self, call: Call, name: str) -> None:
        self.space.may_write(call.caller)
        os.removexattr(self._xattr_path(), name)
        self.changed()


class _OpenDurable(OpenRealFile):
    """An open durable file.

    The kernel keeps pages of what can be mapped, which needs the right to read. What is open for
    writing alone is written without them: for a write into pages the kernel first asks for an
    attribute of the file (security.capability), at each one.
    """

    node: DurableNode

    def __init__(
        self,
        node: DurableNode,
        caller: Caller,
        fd: int,
        flags: int,
        *,
        limit: int,
        share: Share | None,
        may_read: Callable[[], None],
        may_write: Callable[[], None],
    ) -> None:
        treatment = DURABLE if node.space.links else REAL
        direct = not treatment.pages or flags & os.O_ACCMODE == os.O_WRONLY
        super().__init__(
            node,
            caller,
            fd,
            limit=limit,
            # of pages, the kernel says where they belong
            append=direct and bool(flags & os.O_APPEND),
            share=share,
            may_read=may_read,
            may_write=may_write,
            changed=self._written,
        )
        self.direct = direct
        self.exact = node.space.links

    def begin(self) -> None:
        """It is opened by a process, which the kernel is told of."""
        self.keep = not self.direct and self.node.keeps_pages(self.fd)

    def _written(self) -> None:
        if not self.exact:
            self.node.changed()
        self.node.paged = None
        cache, inode = self.node.table.cache, self.node.inode
        if self.direct and cache.has_pages(inode):
            # another process may have read a page while it was written past it
            cache.forget_pages((inode,))

    def read(self, offset: int, size: int) -> bytes | None:
        if not self.direct:
            self.node.table.cache.note_pages(self.node.inode)
        return super().read(offset, size)

    def unwritten(self) -> None:
        if not self.direct:
            # what the kernel has in its pages is not in the file
            cache = self.node.table.cache
            cache.note_pages(self.node.inode)
            cache.forget_pages((self.node.inode,))

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        return {**super().save(descriptors), "keep": self.keep}

    def restore(self, saved: dict[str, Any]) -> None:
        self.keep = saved["keep"]

    def resizing(self, size: int) -> AbstractContextManager[None]:
        return self.node.resizing(self.fd, size)

    def _close(self) -> None:
        self.node.openings.remove(self.fd)
        if self.node.owed and not self.node.openings:
            self.node.owed = False
            self.node.space.note_disk(-os.fstat(self.fd).st_blocks * 512)
        self.node.table.close(self.node, self.fd)


_FIELDS: Final = ("inode", "name", "gone", "born", "taken", "lookups", "paged", "charged", "owed")


class _Descriptors:
    """Open descriptors of nodes: the ones used last, no more than a number.

    ``close`` closes those that are too many.
    """

    def __init__(self, limit: int, close: Callable[[DurableNode, int], None]) -> None:
        self._limit = limit
        self._close = close
        self._fds: OrderedDict[DurableNode, int] = OrderedDict()

    def get(self, node: DurableNode) -> int | None:
        fd = self._fds.get(node)
        if fd is not None:
            self._fds.move_to_end(node)
        return fd

    def put(self, node: DurableNode, fd: int) -> None:
        self._fds[node] = fd
        if len(self._fds) > self._limit:
            self._close(*self._fds.popitem(last=False))

    def items(self) -> Iterator[tuple[DurableNode, int]]:
        """Those used longest ago first."""
        return iter(self._fds.items())

    def take(self, node: DurableNode) -> int | None:
        """No longer kept here; the caller has to close it."""
        return self._fds.pop(node, None)


class Durable:
    """The real nodes that the kernel knows, by device and inode number of the backing."""

    def __init__(self, cache: Cache, close: Callable[[int], None]) -> None:
        self.cache = cache
        self._close = close
        self._next = _FIRST
        self._nodes: dict[int, DurableNode] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        #: roots that were not on the disk when the kernel got them
        self._absent: dict[tuple[str, Incarnation | None], DurableNode] = {}
        self._open = _Descriptors(_DESCRIPTORS, self.close)
        #: of nodes without a name: they cannot be opened again
        self._removed = _Descriptors(_DESCRIPTORS, self.close)
        #: the same, and those that are open
        self._unnamed = WeakSet[DurableNode]()

    # in the next daemon

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        """All nodes that are known, with their descriptors, as a JSON value."""
        nodes: list[DurableNode] = []
        numbers: dict[DurableNode, int] = {}
        left = [*self._nodes.values(), *self._unnamed]
        while left:
            node = left.pop()
            if node not in numbers:
                numbers[node] = len(nodes)
                nodes.append(node)
                left += filter(None, (node.parent, *(parent for parent, _ in node.aliases)))
        spaces = list(dict.fromkeys(node.space for node in nodes))
        places = {space: number for number, space in enumerate(spaces)}

        def number_of(node: DurableNode | None) -> int | None:
            return numbers[node] if node is not None else None

        def kept(held: _Descriptors) -> list[tuple[int, int]]:
            return [(numbers[node], descriptors.keep(fd)) for node, fd in held.items()
                    if node in numbers]  # fmt: skip

        return {
            "next": self._next,
            "spaces": [space.save() for space in spaces],
            "nodes": [
                {
                    **{name: getattr(node, name) for name in _FIELDS},
                    "key": node.key,
                    "space": places[node.space],
                    "parent": number_of(node.parent),
                    "aliases": [(number_of(parent), name) for parent, name in node.aliases],
                    "listed": self._nodes.get(node.inode) is node,
                    "numbered": node.key is not None and self._numbers.get(node.key) == node.inode,
                    "absent": self._absent.get((node.space.path, node.space.incarnation)) is node,
                    "unnamed": node in self._unnamed,
                }
                for node in nodes
            ],
            "open": kept(self._open),
            "removed": kept(self._removed),
        }

    def restore(self, saved: dict[str, Any], space_at: Callable[[Place], Space | None]) -> None:
        """In a table that has no nodes yet; ``space_at`` finds a space, unless it is gone."""
        self._next = saved["next"]
        spaces = []
        for each in saved["spaces"]:
            space = space_at(tuple(each["place"])) or gone_space(each)
            space.restore(each)
            spaces.append(space)
        nodes = []
        for each in saved["nodes"]:
            key = tuple(each["key"]) if each["key"] is not None else None
            node = DurableNode(self, spaces[each["space"]], each["inode"], key, None, each["name"])
            for name in _FIELDS:
                setattr(node, name, each[name])
            nodes.append(node)
        for node, each in zip(nodes, saved["nodes"], strict=True):
            node.parent = nodes[each["parent"]] if each["parent"] is not None else None
            node.aliases = tuple(
                (nodes[parent] if parent is not None else None, name)
                for parent, name in each["aliases"]
            )
            if each["listed"]:
                self._nodes[node.inode] = node
            if each["numbered"] and node.key is not None:
                self._numbers[node.key] = node.inode
            if each["absent"]:
                self._absent[node.space.path, node.space.incarnation] = node
            if each["unnamed"]:
                self._unnamed.add(node)
        for held, pairs in ((self._open, saved["open"]), (self._removed, saved["removed"])):
            for number, fd in pairs:
                held.put(nodes[number], fd)

    def known_node(self, inode: int) -> DurableNode | None:
        """The node of an inode number, whatever has become of the file."""
        return self._nodes.get(inode)

    def unnamed(self) -> dict[int, int]:
        """Bytes on the disk of files without a name, by owner: no directory shows them."""
        found = Counter[int]()
        for node in self._unnamed:
            fds = [*node.openings, self._removed.get(node)]
            fd = next((each for each in fds if each is not None), None)
            if fd is not None and node.space.share is not None:
                found[node.space.share.owner()] += os.fstat(fd).st_blocks * 512
        return dict(found)

    @staticmethod
    def owns(inode: int) -> bool:
        return _FIRST <= inode < 3 << 61

    def get(self, inode: int) -> DurableNode:
        """The node of an inode number that the kernel has been given; ``GoneError``."""
        node = self._nodes.get(inode)
        if node is None or node.taken:
            raise GoneError("the file is gone")
        if self.is_absent(node):
            return node
        try:
            self.descriptor(node)
        except MissingError as error:
            raise GoneError(error.sentence) from None
        return node

    def root(self, space: Space) -> DurableNode:
        """The root directory of a space, which keeps its inode number when it is made."""
        place = space.path, space.incarnation
        absent = self._absent.get(place)
        if absent is not None and not self.is_absent(absent):
            absent = None
            del self._absent[place]
        if absent is None and (space.ensure is None or space.root().is_dir()):
            return self._node(space, self._open_root(space), None, "")
        if absent is None:
            absent = DurableNode(self, space, self._next, None, None, "")
            self._next += 1
            self._nodes[absent.inode] = self._absent[place] = absent
        absent.space = space
        return absent

    def is_absent(self, node: DurableNode) -> bool:
        """Whether it is not on the disk yet."""
        if node.key is None:
            with suppress(MissingError):
                self.descriptor(node)
        return node.key is None

    def find(self, directory: DurableNode, name: str) -> DurableNode:
        """One entry of a directory, without following links."""
        try:
            fd = os.open(name, _ENTRY, dir_fd=directory.fd)
        except OSError as error:
            raise _translate(error, name) from None
        if stat.S_IFMT(os.fstat(fd).st_mode) not in _KINDS:
            os.close(fd)
            raise ForbiddenError(f"{quote(name)} is a device, which is not shown here")
        return self._node(directory.space, fd, directory, name)

    def _node(self, space: Space, fd: int, parent: DurableNode | None, name: str) -> DurableNode:
        node = self.known(space, fd, os.fstat(fd), parent, name)
        if self._open.get(node) is None:
            self._open.put(node, fd)
        else:
            os.close(fd)
        return node

    def known(
        self,
        space: Space,
        fd: int,
        st: os.stat_result,
        parent: DurableNode | None,
        name: str,
    ) -> DurableNode:
        """The node of what was found in a directory by this name."""
        key = (st.st_dev, st.st_ino)
        inode = self._numbers.get(key)
        if inode is not None and self._is_another(self._nodes[inode], fd):
            self.remove(self._nodes[inode])
            inode = None
        if inode is None:
            inode = self._next
            self._next += 1
            node = DurableNode(self, space, inode, key, parent, name)
            self._nodes[inode] = node
            self._numbers[key] = inode
            return node
        node = self._nodes[inode]
        before = (node.parent, node.name)
        if before != (parent, name):
            several = st.st_nlink > 1 and not stat.S_ISDIR(st.st_mode)
            node.aliases = (before, *node.aliases)[:_ALIASES] if several else ()
            node.parent, node.name = parent, name
        node.space = space
        return node

    # descriptors

    def descriptor(self, node: DurableNode) -> int:
        """The descriptor of a node; ``MissingError`` if it is not there any more."""
        if node.gone:
            fd = self._removed.get(node)
            if fd is None and node.openings:
                fd = node.openings[-1]
            if fd is None:
                raise MissingError(f"{node.path} was removed")
            return fd
        fd = self._open.get(node)
        if fd is None and node.openings:
            fd = node.openings[-1]
        while fd is None:
            try:
                fd = self._reopen(node)
            except MissingError:
                if not node.aliases:
                    raise
                (node.parent, node.name), *rest = node.aliases
                node.aliases = tuple(rest)
        return fd

    def _reopen(self, node: DurableNode) -> int:
        """Opens what is closed of the chain from the root down to a node."""
        chain: list[DurableNode] = []
        at = node
        while (fd := self._open.get(at)) is None and at.parent is not None:
            chain.append(at)
            at = at.parent
        if fd is None:
            fd = self._checked(at, self._open_root(at.space))
            self._open.put(at, fd)
        passed: int | None = None
        try:
            while chain:
                at = chain.pop()
                try:
                    below = os.open(at.name, _ENTRY, dir_fd=fd)
                except (FileNotFoundError, NotADirectoryError):
                    raise _replaced_or_removed(at) from None
                fd = self._checked(at, below)
                if passed is not None:
                    os.close(passed)
                passed = fd
                if len(chain) < _CHAIN:
                    self._open.put(at, fd)
                    passed = None
        finally:
            if passed is not None:
                os.close(passed)
        return fd

    @staticmethod
    def _open_root(space: Space) -> int:
        try:
            return os.open(space.root(), os.O_PATH | DIRECTORY)
        except OSError as error:
            raise _translate(error, space.path) from None

    @staticmethod
    def _checked(node: DurableNode, fd: int) -> int:
        """The descriptor, if it is of the same file as before."""
        st = os.fstat(fd)
        if node.key is None:
            node.key = st.st_dev, st.st_ino
            node.table._numbers[node.key] = node.inode
        another = (st.st_dev, st.st_ino) != node.key or node.table._is_another(node, fd)
        if node.gone or another:
            os.close(fd)
            raise _replaced_or_removed(node)
        return fd

    def _is_open(self, node: DurableNode) -> bool:
        return bool(node.openings) or self._open.get(node) is not None

    def _is_another(self, node: DurableNode, fd: int) -> bool:
        """Whether the inode number of a node is another file's now: of this descriptor. As long
        as the node has a descriptor of its own, nobody else gets the number."""
        born = None if self._is_open(node) else node.born
        return born is not None and linux.birth_time(fd) != born

    # forgetting

    def remove(self, node: DurableNode) -> None:
        """Its last name is gone: another file may get its inode number.

        A process that has it open may still ask for its attributes, unless very many do.
        """
        fd = self._open.take(node)
        if fd is not None:
            self._removed.put(node, fd)
        node.gone = True
        if not node.taken:
            self._unnamed.add(node)
        self._unnumber(node)

    def take_out(self, node: DurableNode) -> None:
        """It has left its space for a place of the daemon's, with all its bytes."""
        size = os.fstat(node.fd).st_size
        node.space.note(-1)
        node.space.give_back(size)
        node.charged = False
        node.taken = True
        self.remove(node)
        self.forget(node.inode, 0)

    def close(self, node: DurableNode, fd: int) -> None:
        """Closes a descriptor. The last one of a removed file frees the file's bytes."""
        if node.gone and node.charged and not node.openings and self._removed.get(node) is None:
            node.charged = False
            st = os.fstat(fd)
            if stat.S_ISREG(st.st_mode):
                node.space.give_back(st.st_size)
        lasts = node.inode in self._nodes and not node.gone
        if lasts and node.born is None and not self._is_open(node):
            node.born = linux.birth_time(fd)
        self._close(fd)

    def _unnumber(self, node: DurableNode) -> None:
        if node.key is not None and self._numbers.get(node.key) == node.inode:
            del self._numbers[node.key]
        place = node.space.path, node.space.incarnation
        if self._absent.get(place) is node:
            del self._absent[place]

    def forget_owner(self, space: Space) -> None:
        """The owner of every node of a space is another one."""
        for node in self._nodes.values():
            if node.space is space:
                node.changed()

    def forget(self, inode: int, count: int) -> None:
        """The kernel gives references up; with 0, drops a node that it never got."""
        node = self._nodes.get(inode)
        if node is None:
            return
        node.lookups -= count
        if node.lookups <= 0:
            del self._nodes[inode]
            self._unnumber(node)
            for descriptors in (self._open, self._removed):
                fd = descriptors.take(node)
                if fd is not None:
                    self.close(node, fd)


def _replaced_or_removed(node: DurableNode) -> MissingError:
    return MissingError(f"{node.path} was replaced or removed")
