"""What each owner has on the disk below the daemon's state.

It is measured beside the event loop, now and then and soon after much was written; what
requests wrote since is added at once. Removing makes room at once, too. So is measured what
the filesystem has left: of what owners have and that, a tenth is kept for root.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from runtime.authority.accounts import Accounts, Charge, Payer, Reserve, Resource
from runtime.caller import Caller
from runtime.records.model import Agent, Session

log = logging.getLogger("ctxd.disk")

_SECONDS: Final = 30.0
#: measuring may take this part of the time
_PART: Final = 10
#: about how long it takes at a time
_PORTION_SECONDS: Final = 0.005
#: of an account, written since it was measured: then it is measured again soon
_MUCH: Final = 32
_SOON_SECONDS: Final = 1.0
#: what an entry costs though its file is empty, in bytes
ENTRY_SIZE: Final = 512
#: about what the rows of an incarnation and its session take in the store, and the directories
#: that either gets with its first file
INCARNATION_SIZE: Final = 2 << 10
DIRECTORIES_SIZE: Final = 4 * ((4 << 10) + ENTRY_SIZE)
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: directories of one tree that are open at once while it is measured
_OPEN: Final = 32
#: who holds what is in no agent's directory
_HOME: Final = "home"
_UNNAMED: Final = "files that were removed and are open"

#: (owner, who of it holds it)
Holder = tuple[int, str]


class _MovedError(Exception):
    """A directory was moved while it was looked at."""


class Gait:
    """Has a thread pause, so that it works a part of the time only, and little at a time.

    A thread takes the interpreter from the event loop whenever the loop calls the kernel. One
    that works for a second makes everybody late who waits for the lock of a directory: each of
    their requests takes twice as long, and they are served one after the other.
    """

    def __init__(self) -> None:
        self._begun = time.monotonic()

    def step(self) -> None:
        """Goes before each small piece of work."""
        took = time.monotonic() - self._begun
        if took > _PORTION_SECONDS:
            time.sleep(_PART * took)
            self._begun = time.monotonic()


def measure(root: Path, step: Callable[[], None] = lambda: None) -> int | None:
    """Bytes that a tree takes on the disk; None if it could not be walked to its end.

    A tree may be as deep as an agent liked to make it, and change meanwhile. ``step`` is
    called before each look at one of its entries.
    """
    try:
        fd = os.open(root, _DIRECTORY)
    except OSError:
        return 0
    try:
        return _measure(fd, step)
    except (OSError, _MovedError):
        return None


def _measure(fd: int, step: Callable[[], None]) -> int:
    """Of an open directory, which is closed."""
    size = 0
    #: descriptors of the directories above, and what is left to be looked at in each
    above: list[tuple[int | None, tuple[int, int], list[str]]] = []
    try:
        while True:
            step()
            st = os.fstat(fd)
            here, names = (st.st_dev, st.st_ino), []
            size += st.st_blocks * 512 + ENTRY_SIZE
            with os.scandir(fd) as entries:
                for entry in entries:
                    step()
                    if entry.is_dir(follow_symlinks=False):
                        names.append(entry.name)
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        of = entry.stat(follow_symlinks=False)
                        size += (of.st_blocks * 512 + ENTRY_SIZE) // max(1, of.st_nlink)
            while True:
                below = _enter(fd, names)
                if below is not None:
                    break
                if not above:
                    return size
                kept, here, names = above.pop()
                fd = _leave(fd, kept, here)
            above.append((fd, here, names))
            if len(above) > _OPEN:
                far, whose, left = above[-_OPEN - 1]
                if far is not None:
                    os.close(far)
                    above[-_OPEN - 1] = (None, whose, left)
            fd = below
    finally:
        os.close(fd)
        for kept, _, _ in above:
            if kept is not None:
                os.close(kept)


def _enter(fd: int, names: list[str]) -> int | None:
    """The next of these directories that is still there."""
    while names:
        try:
            return os.open(names.pop(), _DIRECTORY, dir_fd=fd)
        except (FileNotFoundError, NotADirectoryError):
            continue
    return None


def _leave(fd: int, kept: int | None, here: tuple[int, int]) -> int:
    """The directory above, which is that one if nobody moved anything."""
    if kept is None:
        kept = os.open("..", _DIRECTORY, dir_fd=fd)
        st = os.fstat(kept)
        if (st.st_dev, st.st_ino) != here:
            os.close(kept)
            raise _MovedError
    os.close(fd)
    return kept


class Disk:
    """The disk accounts of all owners.

    ``incarnations`` tells, in any thread, owner and agent of each of these directories below
    ``agent``; ``stored`` how many sessions they have, and bytes of them in the store.
    """

    def __init__(
        self,
        accounts: Accounts,
        state: Path,
        incarnations: Callable[[Collection[str]], dict[str, Holder]],
        stored: Callable[[], dict[Holder, tuple[int, int]]],
        payer: Callable[[Caller], Payer],
    ) -> None:
        self._accounts = accounts
        self._payer = payer
        self._state = state
        self._incarnations = incarnations
        self._stored = stored
        #: as measured, by tree and whose it was
        self._sizes: dict[Path, tuple[Holder, int]] = {}
        self._measured: dict[Holder, Charge] = {}
        self._written: dict[int, Charge] = {}
        self._wake = trio.Event()
        #: bytes of the filesystem below the state: those that are free, and all; -1 until known
        self.free = self.size = -1
        #: bytes of files that are open and have no name, by owner
        self.unnamed: Callable[[], dict[int, int]] = dict

    # for those who write

    def share(self, whose: Agent | Session) -> Share:
        """The share of an agent or a session, on the account of its owner at each moment."""
        return Share(self, lambda: whose.owner, self._payer)

    def share_of(self, uid: int) -> Share:
        """The part of a user."""
        return Share(self, lambda: uid, self._payer)

    def check(self, owner: int, size: int, *, reserve: Reserve = Reserve.NONE) -> None:
        """``QuotaError`` if an owner has no room for so many bytes more."""
        self._accounts.check(owner, Resource.DISK, size, reserve=reserve)

    def note(self, owner: int, size: int) -> None:
        """So many bytes were written, or removed if it is less than 0."""
        if not size:
            return
        charge = self._written.get(owner)
        if charge is None:
            charge = Charge(self._accounts, Payer(owner, "what was just written"), Resource.DISK)
            self._written[owner] = charge
        charge.set(charge.amount + size)
        if charge.amount > self._accounts.limit(Resource.DISK) // _MUCH:
            self.look()

    def room(self, owner: int) -> int:
        """Bytes that agents of an owner may still write."""
        return self._accounts.room(owner, Resource.DISK)

    def look(self) -> None:
        """Something changed that has to be measured soon."""
        self._wake.set()

    # measuring

    async def run(self) -> None:
        """Measures for ever."""
        while True:
            await self.measure()
            await trio.sleep(_SOON_SECONDS)
            with trio.move_on_after(_SECONDS - _SOON_SECONDS):
                await self._wake.wait()
            self._wake = trio.Event()

    async def measure(self) -> None:
        """Looks at everything, one tree after the other, with pauses. If that cannot be done, what
        was measured last and what was written since go on to count."""
        try:
            await self._measure_all()
        except OSError as error:
            log.warning("cannot measure the disk accounts: %s", error)

    async def _measure_all(self) -> None:
        before = {owner: charge.amount for owner, charge in self._written.items()}
        gait = Gait()
        trees = await trio.to_thread.run_sync(self._trees, abandon_on_cancel=True)
        found: dict[Path, tuple[Holder, int]] = {}
        for path, holder in trees.items():
            size = await trio.to_thread.run_sync(
                measure, path, gait.step, abandon_on_cancel=True
            )
            if size is None:
                # who moves things about while they are looked at gains nothing by it
                _, size = self._sizes.get(path, (holder, 0))
            found[path] = holder, size
        stored = await trio.to_thread.run_sync(self._stored, abandon_on_cancel=True)
        self._sizes = found
        self._note_measured(before, stored)
        await self._note_room()

    async def _note_room(self) -> None:
        """Bounds all owners together: they share nine tenths of what they have and what is
        free. A tenth is root's, and everything else on the filesystem."""
        try:
            real = await trio.to_thread.run_sync(os.statvfs, self._state, abandon_on_cancel=True)
        except OSError as error:
            log.warning("%s: %s", self._state, error.strerror)
            return
        self.free, self.size = real.f_bavail * real.f_frsize, real.f_blocks * real.f_frsize
        self._accounts.set_total(Resource.DISK, self._accounts.used(Resource.DISK) + self.free)

    def _trees(self) -> dict[Path, Holder]:
        return dict(self._find_trees())

    def _find_trees(self) -> Iterator[tuple[Path, Holder]]:
        """Every tree that is measured by itself, and whose it is."""
        found = {path.name: path for path in _entries(self._state / "agent")}
        for name, holder in self._incarnations(found).items():
            yield found[name], holder
        for home in _entries(self._state / "home"):
            if not home.name.isdigit():
                continue
            owner = int(home.name)
            yield home / "data", (owner, _HOME)
            for agent in _entries(home / "agent"):
                yield agent, (owner, agent.name)
        for space in _entries(self._state / "shared"):
            with contextlib.suppress(OSError):
                st = os.lstat(space)
                if stat.S_ISDIR(st.st_mode):
                    yield space, (st.st_uid, f"shared/{space.name}")

    def _note_measured(
        self, before: dict[int, int], stored: dict[Holder, tuple[int, int]]
    ) -> None:
        totals: Counter[Holder] = Counter()
        for holder, size in self._sizes.values():
            totals[holder] += size
        for owner, size in self.unnamed().items():
            totals[owner, _UNNAMED] += size
        for holder, (sessions, size) in stored.items():
            totals[holder] += sessions * INCARNATION_SIZE + size
        for holder in [each for each in self._measured if each not in totals]:
            self._measured.pop(holder).release()
        for holder, size in totals.items():
            charge = self._measured.get(holder)
            if charge is None:
                charge = Charge(self._accounts, Payer(*holder), Resource.DISK)
                self._measured[holder] = charge
            if charge.amount != size:
                charge.set(size)
        # what was written meanwhile may have been seen or not: it counts until next time
        for owner, amount in before.items():
            charge = self._written[owner]
            charge.set(charge.amount - amount)
            if not charge.amount:
                del self._written[owner]


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


@dataclass(frozen=True, slots=True)
class Share:
    """One tree's part of its owner's account."""

    disk: Disk
    owner: Callable[[], int]
    payer: Callable[[Caller], Payer]

    def check(self, caller: Caller, size: int) -> None:
        """``QuotaError`` if the owner has no room for so much more of this caller's."""
        who = self.payer(caller)
        owner = self.owner()
        # another uid's operators have no part in what is kept for this owner's
        reserve = who.reserve
        if reserve is Reserve.OWNER and who.owner != owner:
            reserve = Reserve.NONE
        self.disk.check(owner, size, reserve=reserve)

    def note(self, change: int) -> None:
        """So many bytes more, or less, are on the disk."""
        self.disk.note(self.owner(), change)

    @contextlib.contextmanager
    def writing(self, caller: Caller, fd: int, size: int) -> Iterator[None]:
        """While so many bytes are written to an open file; ``QuotaError`` before.

        What writes none, such as a truncation, is never refused.
        """
        if size:
            self.check(caller, size)
        before = os.fstat(fd).st_blocks
        # others may write meanwhile
        self.note(size)
        try:
            yield
        finally:
            self.note((os.fstat(fd).st_blocks - before) * 512 - size)
