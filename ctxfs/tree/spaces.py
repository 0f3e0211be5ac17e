"""Spaces: trees of real files, each with its rules; a kind of them is a row."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, NoReturn, TypeVar

from ctxfs.caching import FOREVER
from runtime.authority.disk import Share
from runtime.authority.guard import Act, Guard
from runtime.caller import Caller, Role
from runtime.errors import MissingError, QuotaError
from runtime.ids import Incarnation
from runtime.records.model import Agent
from runtime.runtime import Runtime

_O = TypeVar("_O")

#: how a directory is opened without following links
DIRECTORY: Final = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_UNLIMITED: Final = 2**63 - 1
#: what is changed by another way than the filesystem is seen after this time
LENT_SECONDS: Final = 1.0
#: what tells a space from all others: the name of its row, and its key
Place = tuple[str, str]
_NOWHERE: Final[Place] = ("", "")


@dataclass(eq=False, slots=True, kw_only=True)
class Space:
    """One tree of real files and its rules.

    ``owner`` tells whom every node is shown to belong to; None if to its real owner.
    ``links`` says whether there is all that a filesystem has, and not only files and
    directories: links, FIFOs, sockets, extended attributes.
    ``limit`` is the size of one file, ``files`` is how many files and directories there
    may be, and ``total`` how many bytes all files may have together: their sizes as stat(2)
    tells them, holes included.
    ``may_read`` and ``may_write`` raise for a caller who may not.
    A space that has an ``ensure`` need not be on the disk before something is made in it: it is
    shown with ``mode``, and as changed when it was ``created``.
    """

    path: str
    root: Callable[[], Path]
    ensure: Callable[[], object] | None = None
    mode: int = 0o700
    created: float = 0.0
    owner: Callable[[], tuple[int, int] | None]
    links: bool
    limit: int
    files: int | None
    total: int | None
    incarnation: Incarnation | None
    may_read: Callable[[Caller], None]
    may_write: Callable[[Caller], None]
    #: of its owner's disk account
    share: Share | None = None
    #: seconds for which the kernel may keep names and attributes
    timeout: float = FOREVER
    #: what tells it from all others
    place: Place = _NOWHERE
    #: what there is; None until it is counted
    _entries: int | None = field(default=None, init=False)
    _bytes: int = field(default=0, init=False)

    def save(self) -> dict[str, Any]:
        """For the next daemon."""
        return {"place": self.place, "path": self.path, "incarnation": self.incarnation,
                "entries": self._entries, "bytes": self._bytes}  # fmt: skip

    def restore(self, saved: dict[str, Any]) -> None:
        self._entries, self._bytes = saved["entries"], saved["bytes"]

    def count(self) -> None:
        """Looks once at all there is, before any of it changes."""
        if self._entries is None and (self.files is not None or self.total is not None):
            if self.ensure is not None and not self.root().is_dir():
                self._entries, self._bytes = 0, 0
            else:
                self._entries, self._bytes = _measure(self.root())

    def check_room(self) -> None:
        """``QuotaError`` if one more entry would be too many."""
        self.count()
        if self.files is not None and self._entries is not None and self._entries >= self.files:
            raise QuotaError(
                f"{self.path} has {self._entries} files and directories, "
                "the configured maximum (files): remove some first"
            )

    def check_disk(self, caller: Caller, size: int) -> None:
        """``QuotaError`` if so many more bytes are too much for the owner's disk account."""
        if self.share is not None:
            self.share.check(caller, size)

    def note_disk(self, change: int) -> None:
        """There are more or fewer bytes on the disk now."""
        if self.share is not None:
            self.share.note(change)

    def note(self, change: int) -> None:
        """There are more or fewer entries now."""
        if self._entries is not None:
            self._entries += change

    @contextmanager
    def resizing(self, fd: int, size: int) -> Iterator[None]:
        """While a file becomes longer or shorter; ``QuotaError`` if that were too much.

        Nothing else may change this file in between.
        """
        self.count()
        before = os.fstat(fd).st_size
        more = max(0, size - before)
        if self.total is not None and more and self._bytes + more > self.total:
            raise QuotaError(
                f"{self.path} has {self._bytes} of at most {self.total} bytes (artifact_max)"
            )
        # other files may grow meanwhile
        self._bytes += more
        try:
            yield
        finally:
            self._bytes += os.fstat(fd).st_size - before - more

    def give_back(self, size: int) -> None:
        """A file of this size is not there any more."""
        if self._entries is not None:
            self._bytes -= size


def gone_space(saved: dict[str, Any]) -> Space:
    """In place of one whose object was removed while its files were open."""
    path = saved["path"]

    def refuse(*_: object) -> NoReturn:
        raise MissingError(f"{path} was removed")

    return Space(path=path, root=refuse, owner=lambda: (0, 0), links=False, limit=0, files=None,
                 total=None, incarnation=saved["incarnation"], may_read=refuse, may_write=refuse,
                 place=tuple(saved["place"]))  # fmt: skip


def _measure(root: Path) -> tuple[int, int]:
    """How many entries are below a directory, and the bytes of the files among them.

    One descriptor is enough at any depth.
    """
    count = size = 0
    left: list[list[str]] = []
    fd = os.open(root, os.O_RDONLY | DIRECTORY)
    try:
        while True:
            with os.scandir(fd) as entries:
                directories = []
                for entry in entries:
                    count += 1
                    if entry.is_dir(follow_symlinks=False):
                        directories.append(entry.name)
                    elif entry.is_file(follow_symlinks=False):
                        size += entry.stat(follow_symlinks=False).st_size
            left.append(directories)
            while not left[-1]:
                left.pop()
                if not left:
                    return count, size
                _change_to(fd, "..")
            _change_to(fd, left[-1].pop())
    finally:
        os.close(fd)


def _change_to(fd: int, name: str) -> None:
    """The descriptor of a directory now leads to an entry of it."""
    other = os.open(name, os.O_RDONLY | DIRECTORY, dir_fd=fd)
    os.dup2(other, fd, inheritable=False)
    os.close(other)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceRow(Generic[_O]):
    """One kind of spaces; the functions get the space's object.

    ``key`` tells the spaces of a kind apart, and ``find`` finds the object by it. ``root`` is where
    the files really are, ``owner`` whom they are shown to belong to, None if to their real owner.
    ``links`` says whether there is more than files and directories, as of ``Space``. ``ensure``
    makes the root of a space that need not be there before. A ``bounded`` space has as many files,
    of as many bytes, as is configured; any other is bounded by its owner's account of the disk,
    which is its ``share``, alone. ``lasting`` tells whether something may still be written: then
    all open files share one count. The guards judge what a caller is to ``agent``. In a space
    without an agent every caller that still lives is ``ANYONE``, and mode bits decide the rest.
    """

    name: str
    key: Callable[[_O], str]
    find: Callable[[Runtime, str], _O | None]
    path: Callable[[_O], str]
    root: Callable[[Runtime, _O], Path]
    ensure: Callable[[Runtime, _O], object] | None = None
    mode: int = 0o700
    created: Callable[[_O], float] = lambda obj: 0.0
    owner: Callable[[Runtime, _O], tuple[int, int] | None]
    share: Callable[[Runtime, _O], Share]
    agent: Callable[[Runtime, _O], Agent | None]
    read: Guard[_O]
    write: Guard[_O]
    lasting: Callable[[Runtime, _O], bool] = lambda runtime, obj: True
    incarnation: Callable[[_O], Incarnation | None] = lambda obj: None
    links: bool
    bounded: bool

    def of(self, runtime: Runtime, obj: _O) -> Space:
        """The space of an object, with the limits of the configuration as it is now."""
        config, agents, ensure = runtime.config, runtime.agents, self.ensure

        def check(guard: Guard[_O], act: Act, caller: Caller) -> None:
            agent = self.agent(runtime, obj)
            if agent is not None:
                roles = agents.identity.roles(caller, agent)
            else:
                roles = Role.ANYONE if agents.identity.still(caller) else Role.NONE
            guard.check(act, self.path(obj), agents, caller, roles, agent, obj)

        return Space(
            path=self.path(obj),
            root=lambda: self.root(runtime, obj),
            ensure=None if ensure is None else lambda: ensure(runtime, obj),
            mode=self.mode,
            created=self.created(obj),
            owner=lambda: self.owner(runtime, obj),
            links=self.links,
            limit=config.document_max if self.bounded else _UNLIMITED,
            files=config.files if self.bounded else None,
            total=config.artifact_max if self.bounded else None,
            incarnation=self.incarnation(obj),
            # agents may change what is not bounded by a mount line, too, and nobody is told
            timeout=FOREVER if self.bounded else LENT_SECONDS,
            may_read=lambda caller: check(self.read, Act.READ, caller),
            may_write=lambda caller: check(self.write, Act.WRITE, caller),
            share=self.share(runtime, obj),
            place=self.place(obj),
        )

    def place(self, obj: _O) -> Place:
        return self.name, self.key(obj)


class Spaces:
    """The spaces that may change: one object for each, so that they can be compared."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: dict[Place, Space] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, row: SpaceRow[_O], obj: _O) -> Space:
        space = row.of(self._runtime, obj)
        if not row.lasting(self._runtime, obj):
            return space
        known = self._known.setdefault(row.place(obj), space)
        known.limit, known.files, known.total = space.limit, space.files, space.total
        return known

    def found(self, row: SpaceRow[_O], key: str) -> Space | None:
        """The space of a kind with this key; None if its object is gone."""
        obj = row.find(self._runtime, key)
        return self.of(row, obj) if obj is not None else None

    def known(self, place: Place) -> Space | None:
        return self._known.get(place)

    def drop(self, places: Iterable[Place]) -> None:
        """They are gone."""
        for place in places:
            self._known.pop(place, None)

    def remove(self, space: Space) -> None:
        """It is gone, and another one may get its key: what is open in it is not that one's."""
        self.drop([space.place])
        space.place = _NOWHERE
