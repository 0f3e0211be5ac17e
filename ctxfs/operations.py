"""The pyfuse3 adapter: inodes and requests in, attributes, bytes and errnos out.

Nothing is decided here. Every operation goes through one boundary, which
keeps the reason for the caller and turns any error into an errno: pyfuse3 ends
the daemon on everything else.

The way of a request: the kernel, this module, ``Filesystem.node`` for the inode, a node
(``tree.rownodes``, ``tree.folders``), the functions of its row (``files``), ``runtime``. An inode
number is computed from object, layout and row, so that ten thousand agents cost rows in a table
and no objects.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import pyfuse3
import trio
from pyfuse3 import (
    EntryAttributes,
    FileHandleT,
    FileInfo,
    FileNameT,
    FUSEError,
    InodeT,
    ReaddirToken,
    RequestContext,
    SetattrFields,
    StatvfsData,
)

from ctxfs.errnos import errno_of
from ctxfs.filesystem import ROOT_INODE, Filesystem
from ctxfs.handshake import Handshake
from ctxfs.locks import TABLE
from ctxfs.opened import Opened
from ctxfs.pace import Meant, Pace
from ctxfs.scheduler import Scheduler
from ctxfs.tree.nodes import Attributes, Call, Listing, NewAttributes, Node, OpenFile
from runtime.authority.accounts import Charge, Payer, Resource
from runtime.errors import (
    CtxError,
    GoneError,
    MalformedError,
    MissingError,
    OverTimeError,
    QuotaError,
)
from runtime.kernel import linux

log = logging.getLogger("ctxd.operations")

_P = ParamSpec("_P")
_R = TypeVar("_R")
#: Requests served at once: as good as unlimited, so that those that wait hold up no others.
WORKERS: Final = 1_000_000
#: of the requests at hand, when the mount does not answer
_TOLD_MAX: Final = 100


def _boundary(
    method: Callable[Concatenate[Operations, _P], Coroutine[Any, Any, _R]],
) -> Callable[Concatenate[Operations, _P], Coroutine[Any, Any, _R]]:
    """Everything that an operation raises becomes an errno, with its reason kept.

    Its time is measured, and who used too much is answered late, or told to try again.
    """
    name = method.__name__.removeprefix("_")
    row = TABLE[name]

    async def guarded(self: Operations, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        who, key = self._payer(args), id(args)
        self._at_hand[key] = (name, args, who, time.monotonic())
        self._base.requests += 1
        try:
            meant = partial(self._meant, args)
            await self._pace.admit(row, who, meant, args[-1], reads=name == "read")
            return await self._pace.timed(who, method(self, *args, **kwargs))
        except FUSEError:
            raise
        except Exception as error:
            self.note(error, name, args)
            raise FUSEError(errno_of(error)) from None
        finally:
            del self._at_hand[key]
            if self._waited is not None and not self._at_hand:
                self._waited.set()
                self._waited = None

    guarded.__doc__ = method.__doc__
    return guarded


def _name(name: FileNameT) -> str:
    return os.fsdecode(name)


class Operations(pyfuse3.Operations):
    """One mounted filesystem."""

    supports_dot_lookup = False
    enable_writeback_cache = False

    def __init__(self, fs: Filesystem, handshake: Handshake | None = None) -> None:
        super().__init__()
        self._fs = fs
        self._base = fs.base
        self.opened = Opened(fs)
        self.scheduler = Scheduler(fs.base.runtime.loop, handshake)
        self._pace = Pace(fs.base.runtime, self.scheduler)
        #: set once no request is at hand, if somebody waits for that
        self._waited: trio.Event | None = None
        #: before the daemon's socket is there: who lists the root can hold the lock that this takes
        self.beginning = False
        #: requests that are not answered yet: operation, arguments, payer, since when
        self._at_hand: dict[int, tuple[str, Sequence[Any], Payer | None, float]] = {}
        self._base.at_hand = self._at_hand

    # plumbing

    def at_hand(self) -> list[str]:
        """The requests that are being answered, oldest first, for the log; called by any
        thread."""
        now = time.monotonic()
        lines = []
        for operation, args, who, begun in sorted(
            list(self._at_hand.values()), key=lambda request: request[3]
        )[:_TOLD_MAX]:
            ctx = next((a for a in args if isinstance(a, RequestContext)), None)
            by = f"file {args[0]}"
            if ctx is not None:
                by = f"pid {ctx.pid} uid {ctx.uid}"
            elif opened := self.opened.files.get(args[0]):
                by += f" that pid {opened.caller.pid} uid {opened.caller.uid} opened"
            on = who.name if who is not None else "unknown"
            lines.append(f"{operation} {args[0]} of {by} ({on}), {now - begun:.1f} s old")
        return lines

    @property
    def is_idle(self) -> bool:
        return not self._at_hand

    def idle(self) -> trio.Event:
        """It is set once no request is at hand."""
        waited = self._waited or trio.Event()
        if self._at_hand:
            self._waited = waited
        else:
            waited.set()
        return waited

    def _payer(self, args: Sequence[Any]) -> Payer | None:
        """Whose account a request is on."""
        ctx = args[-1]
        if isinstance(ctx, RequestContext):
            return self._pace.payer_of(ctx.uid, ctx.gid, ctx.pid)
        return self.opened.payer(args[0])

    def _meant(self, args: Sequence[Any], operation: str = "") -> Meant:
        if not isinstance(args[-1], RequestContext):
            opened = self.opened.by_whom(args[0])
            return Meant(opened[1] if opened is not None else None, self.opened.files.get(args[0]))
        if isinstance(args[0], RequestContext):
            return Meant(None)  # statfs
        try:
            # of a link, the directory that it is made in
            return Meant(self._fs.node(args[1] if operation == "link" else args[0]), name=args[1])
        except CtxError:
            return Meant(None)

    def _call(self, ctx: RequestContext) -> Call:
        return Call(self._base.runtime, ctx.uid, ctx.gid, ctx.pid)

    def note(self, error: Exception, operation: str, args: Sequence[Any]) -> None:
        """Keeps the reason for the refused caller. Missing names are not rejections."""
        if isinstance(error, GoneError):
            return  # the kernel comes again, or is told of the name
        if errno_of(error) == errno.ENOENT and operation in ("lookup", "getattr"):
            return
        meant, ctx = self._meant(args, operation), args[-1]
        node, file = meant.node, meant.file
        if file is None and not isinstance(ctx, RequestContext):
            return  # of a directory that is open
        try:
            caller = file.caller if file is not None else self._call(ctx).caller
        except OSError:
            return
        path = node.path if node is not None else ""
        names = [_name(a) for a in args if isinstance(a, bytes)]
        if names and operation not in ("write", "symlink"):
            name = node.shown(names[0]) if node is not None else names[0]
            path = f"{path}/{name}".lstrip("/")
        self._base.reasons.note(error, caller, path, node.incarnation if node is not None else None)

    def _attributes(self, node: Node) -> EntryAttributes:
        attributes = node.attributes()
        if attributes.value is not None:
            self._base.cache.note_told(node.inode, attributes.value)
        return _entry(attributes)

    def _remembered(self, node: Node) -> EntryAttributes:
        entry = self._attributes(node)
        self._base.cache.note_known(node.inode)
        return entry

    def _file_info(self, opened: OpenFile, flags: int, charge: Charge) -> FileInfo:
        opened.flags = flags
        number = FileHandleT(self.opened.add(opened, charge))
        return FileInfo(fh=number, direct_io=opened.direct, keep_cache=opened.keep)

    # names and attributes

    @_boundary
    async def lookup(
        self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        call = self._call(ctx)
        if name == b".." or name == b".":
            raise MissingError("no such name")
        return self._remembered(self._fs.node(parent_inode).lookup(call, _name(name)))

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        for inode, count in inode_list:
            self._base.cache.note_forgotten(inode, count)
            if not self._base.cache.is_known(inode):
                self._base.folders.forget(inode)

    @_boundary
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        return self._attributes(self._fs.node(inode))

    @_boundary
    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        node, call = self._fs.node(inode), self._call(ctx)
        if fields.update_size:
            opened = self.opened.files.get(fh) if fh is not None else None
            by_path = self.opened.for_once(node, call)
            with by_path if opened is None else nullcontext(opened) as file:
                cutting = file.truncating(attr.st_size)
                if cutting is not None:
                    await self._base.disks.change(call.caller, cutting, inode)
                else:
                    file.truncate(attr.st_size)
        changes = NewAttributes(
            mode=attr.st_mode & 0o7777 if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            atime=attr.st_atime_ns if fields.update_atime else None,
            mtime=attr.st_mtime_ns if fields.update_mtime else None,
        )
        if changes != NewAttributes():
            mark = self._base.cache.mark()
            node.set_attributes(call, changes)
            await self._base.cache.settled(mark)
        return self._attributes(node)

    @_boundary
    async def readlink(self, inode: InodeT, ctx: RequestContext) -> FileNameT:
        node = self._fs.node(inode)
        await node.followed(self._call(ctx))
        return FileNameT(os.fsencode(node.readlink()))

    # making and removing

    @_boundary
    async def mkdir(
        self, parent_inode: InodeT, name: FileNameT, mode: int, ctx: RequestContext
    ) -> EntryAttributes:
        node = self._fs.node(parent_inode).mkdir(self._call(ctx), _name(name), mode)
        return self._remembered(node)

    @_boundary
    async def mknod(
        self, parent_inode: InodeT, name: FileNameT, mode: int, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        node = self._fs.node(parent_inode).mknod(self._call(ctx), _name(name), mode)
        return self._remembered(node)

    @_boundary
    async def symlink(
        self, parent_inode: InodeT, name: FileNameT, target: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        raise self._fs.node(parent_inode).unmakable("links")

    @_boundary
    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        raise self._fs.node(new_parent_inode).unmakable("links")

    @_boundary
    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        self._fs.node(parent_inode).unlink(self._call(ctx), _name(name))

    @_boundary
    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        self._fs.node(parent_inode).rmdir(self._call(ctx), _name(name))

    @_boundary
    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: FileNameT,
        parent_inode_new: InodeT,
        name_new: FileNameT,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        if flags not in (0, linux.RENAME_NOREPLACE, linux.RENAME_EXCHANGE):
            raise MalformedError(
                "unknown flags of renameat2(2); use RENAME_NOREPLACE, RENAME_EXCHANGE or none"
            )
        source, target = self._fs.node(parent_inode_old), self._fs.node(parent_inode_new)
        source.rename(self._call(ctx), _name(name_old), target, _name(name_new), flags)

    # files

    @_boundary
    async def open(self, inode: InodeT, flags: int, ctx: RequestContext) -> FileInfo:
        call = self._call(ctx)
        with self.opened.opening(call.caller) as charge:
            opened = self._fs.node(inode).open(call, flags)
            try:
                cutting = opened.truncating(0) if flags & os.O_TRUNC else None
                if cutting is not None:
                    await self._base.disks.change(call.caller, cutting, inode)
            except BaseException:
                opened.release()
                raise
        return self._file_info(opened, flags, charge)

    @_boundary
    async def create(
        self, parent_inode: InodeT, name: FileNameT, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        parent, call = self._fs.node(parent_inode), self._call(ctx)
        with self.opened.opening(call.caller) as charge:
            node, opened = parent.create(call, _name(name), mode, flags)
        return self._file_info(opened, flags, charge), self._remembered(node)

    @_boundary
    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        opened = self.opened.files[fh]
        data = opened.read(off, size)
        if data is None:
            if opened.gathers:
                data = await opened.gathered(off, size)
            else:
                data = await self._base.disks.read(opened.caller, opened.reading(off, size))
        return data

    @_boundary
    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        opened = self.opened.files[fh]
        data = bytes(buf)
        opened.refused = None
        await opened.prepare(data)
        mark = self._base.cache.mark()
        writing = opened.writing(off, data)
        if writing is not None:
            with self._pace.holding(self._pace.payer(opened.caller), data):
                written = await self._base.disks.change(
                    opened.caller, writing, opened.node.inode
                )
        else:
            written = opened.write(off, data)
        if opened.settles:
            await self._base.cache.settled(mark)
        elif opened.mark is None:
            opened.mark = mark
        return written

    def flush(self, fh: FileHandleT) -> Coroutine[Any, Any, None]:
        """The kernel asks at each close(2); mostly nothing was written."""
        opened = self.opened.files.get(fh)
        if opened is not None and not opened.flushes:
            return _nothing()
        return self._flush(fh)

    @_boundary
    async def _flush(self, fh: FileHandleT) -> None:
        opened = self.opened.files[fh]
        await opened.prepare(b"\n")
        mark, opened.mark = opened.mark, None
        if mark is None:
            mark = self._base.cache.mark()
        if opened.refused is not None and not opened.unfinished:
            raise opened.refused
        try:
            opened.flush()
        except CtxError as error:
            opened.refused = error
            raise
        finally:
            if opened.direct:
                self._base.cache.forget_attributes(opened.node.inode)
        await self._base.cache.settled(mark)

    @_boundary
    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        opened = self.opened.files[fh]
        if opened.lasts:
            await self._pace.synced(opened.caller, opened.syncing())

    async def release(self, fh: FileHandleT) -> None:
        self.opened.close(fh)

    @_boundary
    async def poll(
        self,
        inode: InodeT,
        fh: FileHandleT,
        poll_handle: pyfuse3.PollHandle | None,
        ctx: RequestContext,
    ) -> int:
        ready = self.opened.files[fh].poll(poll_handle)
        return _READY if ready is None else ready

    # directories

    @_boundary
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        call = self._call(ctx)
        node = self._fs.node(inode)
        if self.beginning and inode == ROOT_INODE and not call.is_binder:
            raise OverTimeError("ctxd begins: try again")
        with self.opened.opening(call.caller) as charge:
            listing = Listing(node, call)
            listing.restart()
            memory = self.opened.charge(call.caller, Resource.MEMORY, listing.size)
        return FileHandleT(self.opened.add(listing, charge, memory))

    @_boundary
    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        listing = self.opened.listings[fh]
        directory, call, cache = listing.directory, listing.call, self._base.cache
        if start_id == 0 and listing.begun:
            listing.restart()  # rewinddir(3)
            self.opened.resized(fh, listing)
        listing.begun = True
        tell, position, told = directory.telling(), start_id, list[int]()
        try:
            # of what is behind the names that are known, no position was told
            while position < len(listing.names) or (
                position == len(listing.names) and not told and self.opened.more(fh, listing)
            ):
                name, node = listing.names[position], None
                position += 1
                try:
                    attributes = tell(name)
                    if attributes is None:
                        node = directory.lookup(call, name)
                        attributes = node.attributes()
                except QuotaError:
                    if told:
                        break  # the next reply says so
                    raise
                except (CtxError, OSError):
                    continue  # gone since the directory was opened
                inode, entry = attributes.inode, _entry(attributes)
                if not pyfuse3.readdir_reply(token, os.fsencode(name), entry, position):
                    if not cache.is_known(inode):
                        self._base.folders.forget(inode)
                    break
                told.append(inode)
                if node is not None and attributes.value is not None:
                    cache.note_told(inode, attributes.value)
        finally:
            cache.note_listed(told)

    async def releasedir(self, fh: FileHandleT) -> None:
        self.opened.close(fh)

    @_boundary
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        real = os.statvfs(self._base.runtime.places.state)
        data = StatvfsData()
        for name in ("bsize", "frsize", "blocks", "bfree", "bavail", "files", "ffree", "favail"):
            setattr(data, f"f_{name}", getattr(real, f"f_{name}"))
        data.f_namemax = 255
        return data


async def _nothing() -> None:
    pass


_READY: Final = 0x1 | 0x4  # POLLIN | POLLOUT: always, like a regular file


def _entry(attributes: Attributes) -> EntryAttributes:
    made = EntryAttributes()
    entry: Any = made  # the types of its numbers are functions, each as long as a number set here
    entry.st_ino = attributes.inode
    entry.st_mode = attributes.mode
    entry.st_uid = attributes.uid
    entry.st_gid = attributes.gid
    entry.st_nlink = attributes.links
    size, real = attributes.size, attributes.real
    if real is not None:
        entry.st_size = size
        entry.st_blksize = real.st_blksize
        entry.st_blocks = real.st_blocks
        entry.st_atime_ns = real.st_atime_ns
        entry.st_mtime_ns = real.st_mtime_ns
        entry.st_ctime_ns = real.st_ctime_ns
    else:
        if size:
            entry.st_size = size
            entry.st_blocks = (size + 511) // 512
        when = int(attributes.mtime * 1e9)
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = when
    entry.entry_timeout = attributes.entry_timeout
    entry.attr_timeout = attributes.attr_timeout
    return made
