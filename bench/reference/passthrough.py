"""A pyfuse3 filesystem that passes everything on to a directory: what the way there costs.

An inode is an O_PATH descriptor of the file behind it, so that no path is
resolved twice, and renames, hard links and removed files need no care. Calls
run where the request is read: nothing is judged, nothing is handed to threads.
Runs as a process of its own:

    python -m bench.reference.passthrough MOUNTPOINT --directory PATH [--timeout SECONDS]
"""

from __future__ import annotations

import argparse
import errno
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyfuse3
from pyfuse3 import (
    EntryAttributes,
    FileHandleT,
    FileInfo,
    FileNameT,
    FUSEError,
    InodeT,
    ModeT,
    ReaddirToken,
    RequestContext,
    SetattrFields,
    StatvfsData,
)

from bench.reference.serving import serve


@contextmanager
def _answering() -> Iterator[None]:
    """What the directory's filesystem refuses is refused alike."""
    try:
        yield
    except OSError as error:
        raise FUSEError(error.errno or errno.EIO) from None


class Passthrough(pyfuse3.Operations):
    """The files of one directory, with the rights of whoever started it."""

    supports_dot_lookup = False
    enable_writeback_cache = False

    def __init__(self, directory: str, timeout: float) -> None:
        super().__init__()
        self._timeout = timeout
        root = os.open(directory, os.O_PATH | os.O_DIRECTORY)
        found = os.fstat(root)
        self._paths: dict[int, int] = {pyfuse3.ROOT_INODE: root}
        self._identities: dict[int, tuple[int, int]] = {
            pyfuse3.ROOT_INODE: (found.st_dev, found.st_ino)
        }
        self._numbers = {identity: number for number, identity in self._identities.items()}
        self._lookups: dict[int, int] = {pyfuse3.ROOT_INODE: 1}
        self._next = int(pyfuse3.ROOT_INODE) + 1
        #: of directories being listed: what was there when they were opened
        self._listed: dict[int, list[str]] = {}

    def _path(self, inode: int) -> str:
        return f"/proc/self/fd/{self._paths[inode]}"

    def _attributes(self, inode: int, found: os.stat_result) -> EntryAttributes:
        entry = EntryAttributes()
        for field in (
            "st_mode",
            "st_nlink",
            "st_uid",
            "st_gid",
            "st_rdev",
            "st_size",
            "st_blksize",
            "st_blocks",
            "st_atime_ns",
            "st_mtime_ns",
            "st_ctime_ns",
        ):
            setattr(entry, field, getattr(found, field))
        entry.st_ino = InodeT(inode)
        entry.entry_timeout = entry.attr_timeout = self._timeout
        return entry

    def _known(self, parent: int, name: bytes) -> EntryAttributes:
        """One more look-up of a name, for which the kernel will once send a ``forget``."""
        path = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._paths[parent])
        found = os.fstat(path)
        identity = (found.st_dev, found.st_ino)
        number = self._numbers.get(identity)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._numbers[identity], self._identities[number] = number, identity
            self._paths[number], self._lookups[number] = path, 0
        else:
            os.close(path)
        self._lookups[number] += 1
        return self._attributes(number, found)

    async def lookup(
        self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        with _answering():
            return self._known(parent_inode, name)

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        for inode, count in inode_list:
            self._lookups[inode] -= count
            if self._lookups[inode] == 0 and inode != pyfuse3.ROOT_INODE:
                del self._lookups[inode]
                del self._numbers[self._identities.pop(inode)]
                os.close(self._paths.pop(inode))

    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        with _answering():
            return self._attributes(inode, os.fstat(self._paths[inode]))

    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        path = self._path(inode)
        with _answering():
            if fields.update_size:
                os.truncate(path if fh is None else fh, attr.st_size)
            if fields.update_mode:
                os.chmod(path, attr.st_mode & 0o7777)
            if fields.update_uid or fields.update_gid:
                os.chown(
                    path,
                    attr.st_uid if fields.update_uid else -1,
                    attr.st_gid if fields.update_gid else -1,
                )
            if fields.update_atime or fields.update_mtime:
                # without one of them the other keeps what it is: UTIME_OMIT is not in os.utime
                now = os.fstat(self._paths[inode])
                accessed = attr.st_atime_ns if fields.update_atime else now.st_atime_ns
                modified = attr.st_mtime_ns if fields.update_mtime else now.st_mtime_ns
                os.utime(path, ns=(accessed, modified))
            return self._attributes(inode, os.fstat(self._paths[inode]))

    async def readlink(self, inode: InodeT, ctx: RequestContext) -> FileNameT:
        with _answering():
            return FileNameT(os.readlink(b"", dir_fd=self._paths[inode]))

    # names

    def _own(self, parent: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        os.chown(name, ctx.uid, ctx.gid, dir_fd=self._paths[parent], follow_symlinks=False)
        return self._known(parent, name)

    async def mkdir(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, ctx: RequestContext
    ) -> EntryAttributes:
        with _answering():
            os.mkdir(name, mode & 0o7777 & ~ctx.umask, dir_fd=self._paths[parent_inode])
            return self._own(parent_inode, name, ctx)

    async def symlink(
        self, parent_inode: InodeT, name: FileNameT, target: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        with _answering():
            os.symlink(target, name, dir_fd=self._paths[parent_inode])
            return self._own(parent_inode, name, ctx)

    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        with _answering():
            os.link(
                self._path(inode),
                new_name,
                dst_dir_fd=self._paths[new_parent_inode],
                follow_symlinks=True,
            )
            return self._known(new_parent_inode, new_name)

    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: FileNameT,
        parent_inode_new: InodeT,
        name_new: FileNameT,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        if flags:
            raise FUSEError(errno.EINVAL)
        with _answering():
            os.rename(
                name_old,
                name_new,
                src_dir_fd=self._paths[parent_inode_old],
                dst_dir_fd=self._paths[parent_inode_new],
            )

    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        with _answering():
            os.unlink(name, dir_fd=self._paths[parent_inode])

    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        with _answering():
            os.rmdir(name, dir_fd=self._paths[parent_inode])

    # contents

    async def open(self, inode: InodeT, flags: int, ctx: RequestContext) -> FileInfo:
        with _answering():
            # the kernel appends by itself: it says where each write is to go
            opened = os.open(self._path(inode), flags & ~(os.O_APPEND | os.O_NOFOLLOW))
        return FileInfo(fh=FileHandleT(opened))

    async def create(
        self,
        parent_inode: InodeT,
        name: FileNameT,
        mode: ModeT,
        flags: int,
        ctx: RequestContext,
    ) -> tuple[FileInfo, EntryAttributes]:
        with _answering():
            opened = os.open(
                name,
                flags & ~os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW,
                mode & 0o7777 & ~ctx.umask,
                dir_fd=self._paths[parent_inode],
            )
            try:
                os.fchown(opened, ctx.uid, ctx.gid)
                return FileInfo(fh=FileHandleT(opened)), self._known(parent_inode, name)
            except BaseException:
                os.close(opened)
                raise

    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        with _answering():
            return os.pread(fh, size, off)

    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        with _answering():
            return os.pwrite(fh, buf, off)

    async def flush(self, fh: FileHandleT) -> None:
        """Answered, as a filesystem has to that reports errors at close(2)."""

    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        with _answering():
            (os.fdatasync if datasync else os.fsync)(fh)

    async def release(self, fh: FileHandleT) -> None:
        os.close(fh)

    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        with _answering():
            names = os.listdir(self._path(inode))
            handle = os.open(self._path(inode), os.O_RDONLY | os.O_DIRECTORY)
        self._listed[handle] = names
        return FileHandleT(handle)

    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        found = os.fstat(fh)
        parent = self._numbers[(found.st_dev, found.st_ino)]
        names = self._listed[fh]
        for position in range(start_id, len(names)):
            name = os.fsencode(names[position])
            try:
                entry = self._known(parent, name)
            except OSError:  # removed since
                continue
            if not pyfuse3.readdir_reply(token, FileNameT(name), entry, position + 1):
                await self.forget([(entry.st_ino, 1)])
                break

    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        await self.fsync(fh, datasync)

    async def releasedir(self, fh: FileHandleT) -> None:
        del self._listed[fh]
        os.close(fh)

    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        found = os.fstatvfs(self._paths[pyfuse3.ROOT_INODE])
        answer = StatvfsData()
        for field in (
            "f_bsize",
            "f_frsize",
            "f_blocks",
            "f_bfree",
            "f_bavail",
            "f_files",
            "f_ffree",
            "f_favail",
            "f_namemax",
        ):
            setattr(answer, field, getattr(found, field))
        return answer


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.reference.passthrough", description=__doc__.split("\n")[0]
    )
    parser.add_argument("point", metavar="MOUNTPOINT", help="an empty directory")
    parser.add_argument("--directory", metavar="PATH", required=True, help="what is shown")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=0.0,
        help="how long the kernel may keep names and attributes (default: 0)",
    )
    arguments = parser.parse_args(argv)
    # one descriptor for each file that the kernel knows
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    serve(Passthrough(arguments.directory, arguments.timeout), arguments.point, "passthrough")
    return 0


if __name__ == "__main__":
    sys.exit(main())
