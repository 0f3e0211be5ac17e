"""Folders: ``artifact/`` of an agent and ``episode/`` of a session, with what is in them.

They are real directories below the daemon's state that nobody else can open. So nothing changes
but by a request, nothing waits for anybody but the disk, and a name leads to the same file until a
request says otherwise. What the kernel knows of a folder is numbers. The daemon remembers for each
only where it is: in which directory, by its number, and by which name. It opens the way to it when
it is asked, and keeps open only what callers have open. A number costs memory of the folder's owner
until the kernel forgets it.

The event loop changes names itself, for the kernel holds the lock of a directory meanwhile. So
that it does not wait for the disk long, what it removes stays open until a thread closes it, and
what it replaces is exchanged first: some filesystems send a file that replaces another to the disk
at once (ext4, auto_da_alloc).
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ctxfs.caching import Cache
from ctxfs.disks import Disks
from ctxfs.tree.folder import Folder, FolderRow
from ctxfs.tree.nodes import Attributes, Call, NewAttributes, Node, OpenFile
from ctxfs.tree.realfiles import OpenRealFile
from ctxfs.tree.renaming import ENTRY, move, naming, replace
from runtime.authority.disk import ENTRY_SIZE
from runtime.caller import Caller
from runtime.errors import CrossingError, ForbiddenError, GoneError, IsADirectoryNodeError
from runtime.ids import Incarnation
from runtime.kernel import linux
from runtime.kernel.handover import Descriptors
from runtime.records.model import Agent
from runtime.runtime import Runtime
from runtime.texts.names import quote

#: above every computed inode number; version 0.2 gave numbers from here on
_FIRST: Final = 1 << 62
_OWN_FIRST: Final = 3 << 61
_SHOWN: Final = 200
#: of a directory without entries, in bytes
_EMPTY_SIZE: Final = 4096
_DIRECTORY: Final = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: the bits of a mode that the real file gets: nobody runs a file with another's rights
_MODE: Final = 0o1777


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a number is: of the folder itself, or of what has no name any more, ``parent`` is 0."""

    folder: Folder[Any]
    parent: int
    name: str


class Folders:
    """The numbers that the kernel knows of all folders."""

    def __init__(self, runtime: Runtime, cache: Cache, disks: Disks) -> None:
        self._runtime = runtime
        self.cache = cache
        self.disks = disks
        self._next = _OWN_FIRST
        self._folders: dict[tuple[str, str], Folder[Any]] = {}
        self._places: dict[int, _Place] = {}
        #: by directory and name
        self._numbers: dict[tuple[int, str], int] = {}
        #: descriptors of those that callers have open
        self.openings: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    @staticmethod
    def owns(number: int) -> bool:
        return number >= _FIRST

    def knows(self, number: int) -> bool:
        return number in self._places

    def root(self, row: FolderRow[Any], obj: Any) -> FolderNode:
        """The folder of an object."""
        folder = self._folder(row, row.key(obj))
        if folder.number not in self._places:
            self._add(folder.number, _Place(folder, 0, ""))
        return FolderNode(self, folder.number, folder)

    def _folder(self, row: FolderRow[Any], key: str) -> Folder[Any]:
        folder = self._folders.get((row.name, key))
        if folder is None:
            self._next += 1
            folder = Folder(self._runtime, row, key, self._next)
        return folder

    def child(
        self, caller: Caller, directory: FolderNode, name: str, st: os.stat_result
    ) -> FolderNode:
        """The node of what was found in a directory; ``QuotaError`` if its owner has no room for a
        number."""
        number = self._numbers.get((directory.inode, name))
        if number is None:
            directory.folder.check_memory(caller)
            self._next += 1
            number = self._next
            self._add(number, _Place(directory.folder, directory.inode, name))
        return FolderNode(self, number, directory.folder, st)

    def _add(self, number: int, place: _Place) -> None:
        self._places[number] = place
        if place.parent:
            self._numbers[place.parent, place.name] = number
        folder = place.folder
        folder.add(number)
        self._folders[folder.row.name, folder.key] = folder

    def get(self, number: int) -> FolderNode:
        """The node of a number that the kernel has been given; ``GoneError``."""
        place = self._places.get(number)
        if place is None:
            raise GoneError("the file is gone")
        return FolderNode(self, number, place.folder)

    def forget(self, number: int) -> None:
        """The kernel does not know it any more, or never came to."""
        place = self._places.pop(number, None)
        if place is None:
            return
        if self._numbers.get((place.parent, place.name)) == number:
            del self._numbers[place.parent, place.name]
        folder = place.folder
        folder.drop(number)
        if not folder.numbers:
            del self._folders[folder.row.name, folder.key]

    def changed_owner(self, row: FolderRow[Any], key: str) -> None:
        """Everything in a folder is shown to belong to somebody else."""
        folder = self._folders.get((row.name, key))
        if folder is not None:
            self.cache.forget_attributes_of(folder.numbers)

    # where they are

    def way(self, number: int) -> str:
        """From the folder to what is in it; ``GoneError`` if it has no name any more."""
        names = []
        while (place := self._places.get(number)) is not None and place.parent:
            names.append(place.name)
            number = place.parent
        if place is None or number != place.folder.number:
            raise GoneError("the file was removed")
        return "/".join(reversed(names))

    @contextmanager
    def directory(self, node: FolderNode, flags: int = os.O_PATH) -> Iterator[int]:
        """A descriptor of a directory, without following any link; ``FileNotFoundError``."""
        way = self.way(node.inode)
        fd = os.open(node.folder.root, flags | _DIRECTORY)
        try:
            if way:
                top, fd = fd, linux.open_beneath(fd, way, flags | _DIRECTORY)
                os.close(top)
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def held(self, node: FolderNode) -> Iterator[int]:
        """A descriptor of a file or directory, which may be good for no more than its state."""
        openings = self.openings.get(node.inode)
        if openings:
            yield openings[-1]
            return
        place = self._places.get(node.inode)
        if place is None or not place.parent:
            with self.directory(node) as fd:
                yield fd
            return
        with self.directory(self.get(place.parent)) as above:
            fd = os.open(place.name, ENTRY, dir_fd=above)
        try:
            yield fd
        finally:
            os.close(fd)

    def unnamed(self) -> dict[int, int]:
        """Bytes on the disk of files without a name, by owner: no directory shows them."""
        found = Counter[int]()
        for number, fds in self.openings.items():
            place = self._places.get(number)
            if place is not None and not place.parent:
                with suppress(GoneError):
                    found[place.folder.share.whose.owner] += os.fstat(fds[-1]).st_blocks * 512
        return dict(found)

    # names

    def move(self, before: tuple[int, str], after: tuple[int, str]) -> None:
        """Notes that a file got another name; the one that had it gets the first, in exchange."""
        moved, other = self._numbers.pop(before, None), self._numbers.pop(after, None)
        for number, name in ((moved, after), (other, before)):
            if number is not None:
                self._places[number] = _Place(self._places[number].folder, *name)
                self._numbers[name] = number
                self.cache.forget_attributes(number)

    def unname(self, before: tuple[int, str]) -> int | None:
        """Notes that a file has no name any more; returns its number, if the kernel knows it."""
        number = self._numbers.pop(before, None)
        if number is not None:
            self._places[number] = _Place(self._places[number].folder, 0, "")
        return number

    # in the next daemon

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        """Where each number is; what is open its opener keeps."""
        folders = [self._saved(folder, descriptors) for folder in self._folders.values()]
        return {"next": self._next, "folders": folders}

    def _saved(self, folder: Folder[Any], descriptors: Descriptors) -> dict[str, Any]:
        places = [self._places[number] for number in folder.numbers]
        return {
            **folder.save(descriptors),
            "row": folder.row.name,
            "parents": [place.parent for place in places],
            "names": os.fsencode("\0".join(place.name for place in places)),
        }

    def restore(self, saved: Mapping[str, Any], rows: Mapping[str, FolderRow[Any]]) -> None:
        """In a table that has no numbers yet."""
        self._next = saved["next"]
        for each in saved["folders"]:
            folder = Folder(self._runtime, rows[each["row"]], each["key"], each["number"])
            if folder.row.find(self._runtime, folder.key) is None:
                continue
            folder.restore({**each, "numbers": ()})
            names = os.fsdecode(each["names"]).split("\0")
            for number, parent, name in zip(each["numbers"], each["parents"], names, strict=True):
                self._add(number, _Place(folder, parent, name))

    def reopened(
        self, number: int, caller: Caller, saved: dict[str, Any], rows: Mapping[str, FolderRow[Any]]
    ) -> OpenFile | None:
        """The open file of the daemon before; None if its folder is gone."""
        place = self._places.get(number)
        if place is not None:
            folder = place.folder
        else:  # it is the folder's no longer
            row, key = saved["folder"]
            folder = self._folder(rows[row], key)
            if folder.row.find(self._runtime, key) is None:
                return None
        return FolderNode(self, number, folder).opened_as(caller, saved["fd"], saved["flags"])


@dataclass(eq=False)
class FolderNode(Node):
    """A folder, or a file or directory in one."""

    table: Folders
    inode: int
    folder: Folder[Any]
    #: what it was when it was found: the kernel asks in the same request
    present: os.stat_result | None = None
    large = True

    @property
    def path(self) -> str:
        try:
            way = self.table.way(self.inode)
        except GoneError:
            way = "a file without a name"
        text = "/".join(filter(None, (self.folder.path, way)))
        return text if len(text) <= _SHOWN else f"…{text[-_SHOWN:]}"

    @property
    def incarnation(self) -> Incarnation | None:
        obj = self.folder.row.find(self.folder.runtime, self.folder.key)
        return obj.incarnation if isinstance(obj, Agent) else None

    def attributes(self) -> Attributes:
        folder = self.folder
        uid, gid = folder.ids
        st, self.present = self.present, None
        if st is None:
            try:
                with self.table.held(self) as fd:
                    st = os.fstat(fd)
            except FileNotFoundError:
                if self.inode != folder.number:
                    raise GoneError("the file is gone") from None
                return Attributes(
                    inode=self.inode,
                    mode=stat.S_IFDIR | folder.row.mode,
                    uid=uid,
                    gid=gid,
                    size=_EMPTY_SIZE,
                    links=2,
                    mtime=folder.obj.created,
                )
        mode = stat.S_IFMT(st.st_mode) | st.st_mode & _MODE
        return Attributes(
            inode=self.inode, mode=mode, uid=uid, gid=gid, size=st.st_size, links=st.st_nlink,
            real=st,
        )  # fmt: skip

    def changed(self) -> None:
        self.table.cache.forget_attributes(self.inode)

    def lookup(self, call: Call, name: str) -> Node:
        self.folder.may_read(call.caller)
        with naming(name), self.table.directory(self) as fd:
            st = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if not stat.S_ISREG(st.st_mode) and not stat.S_ISDIR(st.st_mode):
            raise ForbiddenError(f"{quote(name)} is neither a file nor a directory")
        return self.table.child(call.caller, self, name, st)

    def list(self, call: Call) -> Iterator[str]:
        self.folder.may_read(call.caller)
        try:
            with self.table.directory(self, os.O_RDONLY) as fd:
                entries = os.scandir(fd)
        except FileNotFoundError:
            return  # nothing was made in it yet
        with entries:
            for entry in entries:
                yield entry.name

    # files

    def is_writer(self, caller: Caller) -> bool:
        return self.folder.is_writer(caller)

    def check_reader(self, caller: Caller) -> None:
        self.folder.may_read(caller)

    def check_writing(self, caller: Caller) -> None:
        self.folder.may_write(caller)

    def open(self, call: Call, flags: int) -> OpenFile:
        self.folder.may_read(call.caller)
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            self.folder.may_write(call.caller)
        access = os.O_RDWR if flags & os.O_TRUNC else flags & os.O_ACCMODE
        with self.table.held(self) as fd:
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                raise IsADirectoryNodeError(f"{self.path} is a directory")
            opened = os.open(f"/proc/self/fd/{fd}", access | os.O_CLOEXEC)
        return self.opened_as(call.caller, opened, flags)

    def opened_as(self, caller: Caller, fd: int, flags: int) -> OpenRealFile:
        return _OpenInFolder(self, caller, fd, append=bool(flags & os.O_APPEND))

    def set_attributes(self, call: Call, changes: NewAttributes) -> None:
        self.folder.may_write(call.caller)
        self.folder.ensure()
        present = self.attributes()
        if changes.uid not in (None, present.uid) or changes.gid not in (None, present.gid):
            raise ForbiddenError(f"the owner of {self.path} cannot be changed")
        with self.table.held(self) as fd:
            path, st = f"/proc/self/fd/{fd}", os.fstat(fd)
            if changes.mode is not None:
                os.chmod(path, changes.mode & _MODE)
            times = (changes.atime, st.st_atime_ns), (changes.mtime, st.st_mtime_ns)
            if any(new is not None for new, _ in times):
                atime, mtime = (now if new is None else new for new, now in times)
                os.utime(path, ns=(atime, mtime))
        self.changed()

    # names

    @contextmanager
    def _changing(self, call: Call, name: str) -> Iterator[int]:
        """A descriptor of this directory, in which a name changes."""
        self.folder.may_write(call.caller)
        self.folder.count()
        with naming(name), self.table.directory(self) as fd:
            yield fd
        self.changed()

    @contextmanager
    def _making(self, call: Call, name: str) -> Iterator[int]:
        """A descriptor of this directory, in which there is one name more afterwards."""
        self.folder.may_write(call.caller)
        self.folder.check_room(call.caller)
        self.folder.ensure()
        with self._changing(call, name) as fd:
            yield fd
        self.folder.note(1, 0, ENTRY_SIZE)

    def create(self, call: Call, name: str, mode: int, flags: int) -> tuple[Node, OpenFile]:
        wanted = flags & os.O_ACCMODE | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._making(call, name) as fd:
            made = os.open(name, wanted, 0o600, dir_fd=fd)
            # the caller's umask has been applied already, the daemon's must not be
            os.fchmod(made, mode & _MODE)
        node = self.table.child(call.caller, self, name, os.fstat(made))
        return node, node.opened_as(call.caller, made, flags)

    def mkdir(self, call: Call, name: str, mode: int) -> Node:
        with self._making(call, name) as fd:
            os.mkdir(name, 0o700, dir_fd=fd)
            os.chmod(name, mode & _MODE, dir_fd=fd)
            st = os.stat(name, dir_fd=fd)
        return self.table.child(call.caller, self, name, st)

    def mknod(self, call: Call, name: str, mode: int) -> Node:
        if not stat.S_ISREG(mode):
            raise ForbiddenError("only files and directories can be created here")
        node, opened = self.create(call, name, mode, os.O_WRONLY)
        opened.release()
        return node

    def unlink(self, call: Call, name: str) -> None:
        with self._changing(call, name) as fd:
            self._remove(os.unlink, fd, name)

    def rmdir(self, call: Call, name: str) -> None:
        with self._changing(call, name) as fd:
            self._remove(os.rmdir, fd, name)

    def _remove(self, remove: Callable[..., None], fd: int, name: str) -> None:
        removed = os.open(name, ENTRY, dir_fd=fd)
        try:
            remove(name, dir_fd=fd)
        except OSError:
            os.close(removed)
            raise
        self._lost(name, removed)

    def _lost(self, name: str, removed: int) -> None:
        """A name has gone, and a descriptor of what it was of is left, which is closed."""
        number = self.table.unname((self.inode, name))
        if number is not None:
            self.table.cache.forget_attributes(number)
        self.folder.note(-1, 0, -ENTRY_SIZE)
        if number not in self.table.openings:
            self._give_back(removed)
        self.table.disks.close(removed)

    def _give_back(self, fd: int) -> None:
        """Nobody can read this file any more."""
        st = os.fstat(fd)
        if stat.S_ISREG(st.st_mode):
            self.folder.note(0, -st.st_size, -st.st_blocks * 512)

    def closed(self, fd: int) -> None:
        """One of its descriptors."""
        openings = self.table.openings[self.inode]
        openings.remove(fd)
        if not openings:
            del self.table.openings[self.inode]
            if self.is_counted and not os.fstat(fd).st_nlink:
                self._give_back(fd)
        self.table.disks.close(fd)

    @property
    def is_counted(self) -> bool:
        """Whether its bytes are the folder's: they are not once it is another file."""
        return self.table.knows(self.inode)

    def rename(self, call: Call, name: str, target: Node, new_name: str, flags: int = 0) -> None:
        if not isinstance(target, FolderNode):
            self.folder.may_write(call.caller)
            target.receive(call, self, name, new_name)
            return
        if target.folder is not self.folder:
            raise CrossingError("a file cannot be renamed into another directory like it: copy it")
        with self._changing(call, name) as fd, self.table.directory(target) as to:
            if target.inode != self.inode:
                replaced = move(fd, name, to, new_name, flags)
            else:
                replaced = replace(fd, name, new_name, flags)
        if replaced is not None:
            target._lost(new_name, replaced)
        self.table.move((self.inode, name), (target.inode, new_name))
        target.changed()

    def give(self, call: Call, name: str, path: Path) -> None:
        """A file in it becomes one of the daemon's own, in place of what is there, and is not the
        folder's any more."""
        with self._changing(call, name) as fd:
            st = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if not stat.S_ISREG(st.st_mode):
                raise ForbiddenError(f"only a file can be renamed over {path.name}")
            to = os.open(path.parent, os.O_PATH | _DIRECTORY)
            try:
                replaced = move(fd, name, to, path.name, 0)
            finally:
                os.close(to)
        if replaced is not None:
            self.table.disks.close(replaced)
        self.folder.note(-1, -st.st_size, 0)
        number = self.table.unname((self.inode, name))
        if number is not None:
            # the kernel takes the new name for this file's until it asks for its attributes
            self.table.forget(number)
            self.table.cache.forget_attributes(number)


class _OpenInFolder(OpenRealFile):
    """An open file of a folder."""

    node: FolderNode

    def __init__(self, node: FolderNode, caller: Caller, fd: int, *, append: bool) -> None:
        folder = node.folder
        limit = folder.runtime.config.document_max
        super().__init__(node, caller, fd, limit=limit, append=append, share=folder.share)
        node.table.openings.setdefault(node.inode, []).append(fd)

    def resizing(self, size: int) -> AbstractContextManager[None]:
        return self.node.folder.resizing(self.fd, size) if self.node.is_counted else nullcontext()

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        folder = self.node.folder
        return {**super().save(descriptors), "folder": (folder.row.name, folder.key)}


def saved_before(saved: dict[str, Any]) -> dict[str, Any]:
    """The value that ``save`` would give, from what version 0.2 saved: more of each file, and of
    other trees, of which no number is known any more."""
    found: dict[int, dict[str, Any]] = {}
    for at, space in enumerate(saved["spaces"]):
        row, key = space["place"]
        if row in ("artifact", "episode"):
            counts = {"entries": space["entries"], "bytes": space["bytes"]}
            found[at] = {"row": row, "key": key, "number": 0, **counts,
                         "numbers": [], "parents": [], "names": []}  # fmt: skip
    nodes = saved["nodes"]
    for node in nodes:
        folder = found.get(node["space"])
        if folder is None or not node["listed"]:
            continue
        above = None if node["gone"] else node["parent"]
        if above is None and not node["gone"]:
            folder["number"] = node["inode"]
        folder["numbers"].append(node["inode"])
        folder["parents"].append(nodes[above]["inode"] if above is not None else 0)
        folder["names"].append(node["name"] if above is not None else "")
    for folder in found.values():
        folder["names"] = os.fsencode("\0".join(folder["names"]))
    known = [folder for folder in found.values() if folder["number"]]
    return {"next": _OWN_FIRST, "folders": known}
