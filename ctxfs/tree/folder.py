"""One folder: whose it is, who may use it, what there is in it, and what the kernel knows of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from runtime.authority.accounts import Charge, Payer, Resource
from runtime.authority.disk import ENTRY_SIZE, Share
from runtime.authority.guard import Act, Guard
from runtime.caller import Caller
from runtime.errors import GoneError, QuotaError
from runtime.kernel.handover import Handed
from runtime.records.model import Agent, Session
from runtime.runtime import Runtime

#: what has a folder
_O = TypeVar("_O", bound=Agent | Session)

#: about what a number takes, in the caches of the kernel's knowledge too
NODE_SIZE: Final = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderRow(Generic[_O]):
    """One kind of folders; the functions get the object that has the folder.

    ``key`` tells the folders of a kind apart, and ``find`` finds the object by it; None once that
    is gone. ``root`` is where the directory really is, made by ``ensure`` with what is first made
    in it. Until then it is shown with ``mode``, and as changed when the object was made.
    ``holder`` tells on whose account it is. The guards judge what a caller is to ``agent``, whose
    ids everything is shown with.
    """

    name: str
    key: Callable[[_O], str]
    find: Callable[[Runtime, str], _O | None]
    path: Callable[[_O], str]
    root: Callable[[Runtime, _O], Path]
    ensure: Callable[[Runtime, _O], object]
    mode: int
    holder: Callable[[_O], tuple[int, str]]
    agent: Callable[[Runtime, _O], Agent | None]
    read: Guard[_O]
    write: Guard[_O]


class Folder(Handed, Generic[_O]):
    """One folder, as long as the kernel knows a number of it.

    There are at most ``files`` files and directories, and at most ``artifact_max`` bytes in all
    files together: their sizes as stat(2) tells them, holes included.
    """

    HANDED = ("key", "number", "entries", "bytes", "numbers")

    def __init__(self, runtime: Runtime, row: FolderRow[_O], key: str, number: int) -> None:
        self.runtime = runtime
        self.row = row
        self.key = key
        self.number = number
        #: those that the kernel knows, and what they take
        self.numbers: set[int] = set()
        self._memory: Charge | None = None
        #: what there is; None until it is counted
        self.entries: int | None = None
        self.bytes = 0

    @property
    def obj(self) -> _O:
        """``GoneError`` once it is gone."""
        found = self.row.find(self.runtime, self.key)
        if found is None:
            raise GoneError("what had this file was removed")
        return found

    @property
    def path(self) -> str:
        obj = self.row.find(self.runtime, self.key)
        return self.row.path(obj) if obj is not None else f"{self.row.name} that was removed"

    @property
    def root(self) -> Path:
        return self.row.root(self.runtime, self.obj)

    @property
    def ids(self) -> tuple[int, int]:
        """Uid and gid of everything in it."""
        agent = self.row.agent(self.runtime, self.obj)
        return (agent.uid, agent.gid) if agent is not None else (0, 0)

    @property
    def share(self) -> Share:
        """The share of its owner's disk account."""
        return self.runtime.agents.disk.share(self.obj)

    def ensure(self) -> None:
        """Goes before what is made in it; ``NoSpaceError``."""
        self.row.ensure(self.runtime, self.obj)

    def may_read(self, caller: Caller) -> None:
        self._check(self.row.read, Act.READ, caller)

    def may_write(self, caller: Caller) -> None:
        self._check(self.row.write, Act.WRITE, caller)

    def is_writer(self, caller: Caller) -> bool:
        """In whatever status; nobody writes what is gone."""
        obj = self.row.find(self.runtime, self.key)
        if obj is None:
            return False
        agents, agent = self.runtime.agents, self.row.agent(self.runtime, obj)
        if agent is None:
            return False
        return bool(agents.identity.roles(caller, agent) & self.row.write.wanted(agents, agent))

    def _check(self, guard: Guard[_O], act: Act, caller: Caller) -> None:
        obj, agents = self.obj, self.runtime.agents
        agent = self.row.agent(self.runtime, obj)
        guard.check(act, self.row.path(obj), agents, caller, agent, obj)

    # how much

    def count(self) -> None:
        """Looks once at all there is, before any of it changes."""
        if self.entries is not None:
            return
        self.entries = self.bytes = 0
        left = [str(self.root)]
        while left:
            # what is deeper than a path is long nobody reaches
            with suppress(OSError), os.scandir(left.pop()) as entries:
                for entry in entries:
                    self.entries += 1
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        self.bytes += entry.stat(follow_symlinks=False).st_size

    def check_room(self, caller: Caller) -> None:
        """``QuotaError`` if one more entry would be too many."""
        self.count()
        files = self.runtime.config.files
        if self.entries is not None and self.entries >= files:
            raise QuotaError(
                f"{self.path} has {self.entries} files and directories, "
                "the configured maximum (files): remove some first"
            )
        self.share.check(caller, ENTRY_SIZE)
        self.check_memory(caller)

    def note(self, entries: int, size: int, disk: int) -> None:
        """There are more or fewer entries, bytes of files, and bytes on the disk."""
        if self.entries is not None:
            self.entries += entries
            self.bytes += size
        with suppress(GoneError):
            self.share.note(disk)

    @contextmanager
    def resizing(self, fd: int, size: int) -> Iterator[None]:
        """While a file becomes longer or shorter; ``QuotaError`` if that were too much.

        Nothing else may change this file in between.
        """
        self.count()
        before, total = os.fstat(fd).st_size, self.runtime.config.artifact_max
        more = max(0, size - before)
        if more and self.bytes + more > total:
            raise QuotaError(
                f"{self.path} has {self.bytes} of at most {total} bytes (artifact_max)"
            )
        # other files may grow meanwhile
        self.bytes += more
        try:
            yield
        finally:
            self.bytes += os.fstat(fd).st_size - before - more

    # what the kernel knows

    def check_memory(self, caller: Caller) -> None:
        """``QuotaError`` if its owner has no room for one more number."""
        share = self.share
        self.runtime.accounts.check(
            share.whose.owner, Resource.MEMORY, NODE_SIZE, reserve=share.reserve(caller)
        )

    def add(self, number: int) -> None:
        self.numbers.add(number)
        self._charge()

    def drop(self, number: int) -> None:
        self.numbers.discard(number)
        self._charge()

    def _charge(self) -> None:
        if self._memory is None:
            payer = Payer(*self.row.holder(self.obj))
            self._memory = Charge(self.runtime.accounts, payer, Resource.MEMORY)
        self._memory.set(NODE_SIZE * len(self.numbers))
