"""Real files behind the tree: ``artifact/``, ``episode/``, ``home/UID/data`` and ``shared/``.

Every node the kernel knows is held open (O_PATH), so that nothing is resolved
by path twice and no link is ever followed with the daemon's rights.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ctxfs.caching import Cache
from ctxfs.handles import FileHandle
from ctxfs.nodes import Attributes, Call, Changes, Handle, Node
from runtime.authority.identity import Caller
from runtime.errors import (
    CtxError,
    ForbiddenError,
    IsADirectoryNodeError,
    MissingError,
    NotADirectoryNodeError,
    NotEmptyError,
    TakenError,
)
from runtime.names import quote

#: above every computed inode number
_FIRST: Final = 1 << 62
_RENAME_NOREPLACE: Final = 1
_KINDS: Final = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """One tree of real files and its rules.

    ``owner`` replaces the real owner of every node; None shows it as it is.
    ``may_read`` and ``may_write`` raise for a caller who may not.
    """

    path: str
    root: Path
    owner: tuple[int, int] | None
    links: bool
    limit: int
    incarnation: str | None
    may_read: Callable[[Caller], None]
    may_write: Callable[[Caller], None]
    sync_more: Callable[[], None]


def _translate(error: OSError, name: str) -> CtxError | OSError:
    classes: dict[int | None, type[CtxError]] = {
        errno.ENOENT: MissingError,
        errno.EEXIST: TakenError,
        errno.ENOTEMPTY: NotEmptyError,
        errno.ENOTDIR: NotADirectoryNodeError,
        errno.EISDIR: IsADirectoryNodeError,
    }
    cls = classes.get(error.errno)
    return cls(f"{quote(name)}: {(error.strerror or '').lower()}") if cls else error


class DurableNode(Node):
    """One real file, directory or link."""

    def __init__(self, table: Durable, space: Space, inode: int, fd: int, name: str) -> None:
        self.table = table
        self.space = space
        self.inode = inode
        self.fd = fd
        self.name = name
        self.lookups = 0

    @property
    def path(self) -> str:
        return f"{self.space.path}/{self.name}" if self.name else self.space.path

    @property
    def incarnation(self) -> str | None:
        return self.space.incarnation

    def attributes(self) -> Attributes:
        st = os.fstat(self.fd)
        uid, gid = self.space.owner or (st.st_uid, st.st_gid)
        return Attributes(
            inode=self.inode,
            mode=st.st_mode,
            uid=uid,
            gid=gid,
            size=st.st_size,
            links=st.st_nlink,
            mtime=st.st_mtime,
        )

    def remembered(self) -> None:
        self.lookups += 1

    def changed(self) -> None:
        self.table.cache.forget_attributes(self.inode)

    def lookup(self, call: Call, name: str) -> Node:
        self.space.may_read(call.caller)
        return self.table.find(self, name)

    def list(self, call: Call) -> Iterator[str]:
        self.space.may_read(call.caller)
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield from sorted(os.listdir(fd))
        finally:
            os.close(fd)

    def open(self, call: Call, flags: int) -> Handle:
        self.space.may_read(call.caller)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            self.space.may_write(call.caller)
        return self._handle(call, flags)

    def _handle(self, call: Call, flags: int) -> Handle:
        mode = stat.S_IFMT(os.fstat(self.fd).st_mode)
        if mode == stat.S_IFDIR:
            raise IsADirectoryNodeError(f"{self.path} is a directory")
        wanted = os.O_RDONLY if flags & os.O_ACCMODE == os.O_RDONLY else os.O_RDWR
        wanted |= (flags & os.O_TRUNC) | os.O_CLOEXEC
        fd = os.open(f"/proc/self/fd/{self.fd}", wanted)
        if flags & os.O_TRUNC:
            self.changed()
        caller = call.caller
        return FileHandle(
            self,
            caller,
            fd,
            limit=self.space.limit,
            append=bool(flags & os.O_APPEND),
            may_read=lambda: self.space.may_read(caller),
            may_write=lambda: self.space.may_write(caller),
            changed=self.changed,
            sync_more=self.space.sync_more,
        )

    def create(self, call: Call, name: str, mode: int, flags: int) -> tuple[Node, Handle]:
        node = self._make(call, name, lambda: self._touch(name), mode)
        return node, node._handle(call, flags & ~os.O_TRUNC)

    def _touch(self, name: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        os.close(os.open(name, flags, 0o600, dir_fd=self.fd))

    def mkdir(self, call: Call, name: str, mode: int) -> Node:
        return self._make(call, name, lambda: os.mkdir(name, 0o700, dir_fd=self.fd), mode)

    def mknod(self, call: Call, name: str, mode: int) -> Node:
        if not stat.S_ISREG(mode):
            raise ForbiddenError("only files and directories are made here")
        return self._make(call, name, lambda: self._touch(name), mode & 0o777)

    def symlink(self, call: Call, name: str, target: str) -> Node:
        if not self.space.links:
            raise ForbiddenError("only files and directories are made here")
        return self._make(call, name, lambda: os.symlink(target, name, dir_fd=self.fd))

    def link(self, call: Call, name: str, target: Node) -> Node:
        if not isinstance(target, DurableNode) or target.space is not self.space:
            raise ForbiddenError("hard links stay inside their space")
        if not self.space.links or target.attributes().uid != call.uid:
            raise ForbiddenError("hard links are made to one's own files only")
        source = f"/proc/self/fd/{target.fd}"
        node = self._make(
            call, name, lambda: os.link(source, name, dst_dir_fd=self.fd, follow_symlinks=True)
        )
        target.changed()
        return node

    def _make(
        self, call: Call, name: str, action: Callable[[], None], mode: int | None = None
    ) -> DurableNode:
        self.space.may_write(call.caller)
        try:
            action()
        except OSError as error:
            raise _translate(error, name) from None
        if self.space.owner is None:
            os.chown(name, call.uid, call.gid, dir_fd=self.fd, follow_symlinks=False)
        self.changed()
        node = self.table.find(self, name)
        if mode is not None:
            # the caller's umask has been applied already, the daemon's must not be
            os.chmod(f"/proc/self/fd/{node.fd}", mode & 0o1777)
        return node

    def unlink(self, call: Call, name: str) -> None:
        self.space.may_write(call.caller)
        target = self.table.find(self, name)
        try:
            os.unlink(name, dir_fd=self.fd)
        except OSError as error:
            raise _translate(error, name) from None
        target.changed()
        self.changed()

    def rmdir(self, call: Call, name: str) -> None:
        self.space.may_write(call.caller)
        try:
            os.rmdir(name, dir_fd=self.fd)
        except OSError as error:
            raise _translate(error, name) from None
        self.changed()

    def rename(self, call: Call, name: str, target: Node, new_name: str, *, replace: bool) -> None:
        self.space.may_write(call.caller)
        if not isinstance(target, DurableNode) or target.space is not self.space:
            receive = getattr(target, "receive", None)
            if receive is None:
                raise ForbiddenError("renaming stays inside a space")
            receive(call, self, name, new_name)
            self.changed()
            return
        try:
            if not replace:
                try:
                    os.stat(new_name, dir_fd=target.fd, follow_symlinks=False)
                except FileNotFoundError:
                    pass
                else:
                    raise TakenError(f"{quote(new_name)} exists")
            os.rename(name, new_name, src_dir_fd=self.fd, dst_dir_fd=target.fd)
        except OSError as error:
            raise _translate(error, name) from None
        self.changed()
        target.changed()

    def readlink(self) -> str:
        return os.readlink("", dir_fd=self.fd)

    def set_attributes(self, call: Call, changes: Changes) -> None:
        self.space.may_write(call.caller)
        path = f"/proc/self/fd/{self.fd}"
        is_link = stat.S_ISLNK(os.fstat(self.fd).st_mode)
        if changes.uid is not None or changes.gid is not None:
            if self.space.owner is not None:
                raise ForbiddenError(f"the owner of {self.path} is given, not set")
            ids = (-1 if v is None else v for v in (changes.uid, changes.gid))
            os.chown(path, *ids)
        if changes.mode is not None and not is_link:
            # no set-user-ID files: the mount would ignore them, the backing must not
            os.chmod(path, changes.mode & 0o1777)
        if changes.size is not None:
            os.truncate(path, changes.size)
        if changes.times is not None and not is_link:
            os.utime(path, ns=changes.times)
        self.changed()


class Durable:
    """The real nodes that the kernel knows, by device and inode number of the backing."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self._next = _FIRST
        self._nodes: dict[int, DurableNode] = {}
        self._numbers: dict[tuple[int, int], int] = {}

    @staticmethod
    def owns(inode: int) -> bool:
        return inode >= _FIRST

    def get(self, inode: int) -> DurableNode:
        try:
            return self._nodes[inode]
        except KeyError:
            raise MissingError("the file is gone") from None

    def root(self, space: Space) -> DurableNode:
        """The root directory of a space."""
        fd = os.open(space.root, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        return self._node(space, fd, "")

    def find(self, directory: DurableNode, name: str) -> DurableNode:
        """One entry of a directory, without following links."""
        flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, dir_fd=directory.fd)
        except OSError as error:
            raise _translate(error, name) from None
        if stat.S_IFMT(os.fstat(fd).st_mode) not in _KINDS:
            os.close(fd)
            raise ForbiddenError(f"{quote(name)} is neither file, directory nor link")
        return self._node(directory.space, fd, f"{directory.name}/{name}".lstrip("/"))

    def _node(self, space: Space, fd: int, name: str) -> DurableNode:
        st = os.fstat(fd)
        key = (st.st_dev, st.st_ino)
        inode = self._numbers.get(key)
        if inode is not None:
            os.close(fd)
            node = self._nodes[inode]
            node.name, node.space = name, space
            return node
        inode = self._next
        self._next += 1
        node = DurableNode(self, space, inode, fd, name)
        self._nodes[inode] = node
        self._numbers[key] = inode
        return node

    def forget(self, inode: int, count: int) -> None:
        """The kernel gives references up; with 0, drops a node that it never got."""
        node = self._nodes.get(inode)
        if node is None:
            return
        node.lookups -= count
        if node.lookups <= 0:
            st = os.fstat(node.fd)
            del self._nodes[inode]
            self._numbers.pop((st.st_dev, st.st_ino), None)
            os.close(node.fd)
