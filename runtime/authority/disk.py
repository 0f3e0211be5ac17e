"""The disk account of each owner, below the daemon's state.

A helper measures it (``runtime.kernel.walker``), now and then and soon after much was written;
what requests wrote since is added at once. Removing makes room at once, too. What the filesystem
has left is looked at every second: of what owners have and that, a tenth is kept for root.

An owner whose trees take long, or whose agent holds the lock of a directory, delays no other's
measure. A tree that was not walked to its end, or was moved meanwhile, counts for what was found
and for no less than before. An owner over its account can create, write and start nothing; it can
always read, remove and end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from runtime.authority.accounts import Accounts, Charge, Payer, Reserve, Resource
from runtime.caller import Caller
from runtime.errors import CtxError
from runtime.kernel.inotify import Wakeup
from runtime.kernel.quotas import Quotas
from runtime.kernel.rooms import Rooms
from runtime.kernel.walker import Walker
from runtime.records.fleet import DIRECTORY as FLEET
from runtime.records.model import Agent, Session
from runtime.records.spaces import Spaces, tree_of_space

log = logging.getLogger("ctxd.disk")

_SECONDS: Final = 30.0
#: measuring may take this part of the time
_PART: Final = 10
#: of an account, written since it was measured: then it is measured again soon
_MUCH: Final = 32
_SOON_SECONDS: Final = 1.0
#: while no agent has a tree that may grow: how much output there is is looked at so seldom
_SELDOM_SECONDS: Final = 5.0
#: of an account: when what trees may have has moved by that, the kernel is told
_MOVED: Final = 16
#: what an entry costs though its file is empty, in bytes; as in walk.c
ENTRY_SIZE: Final = 512
#: about what the rows of an incarnation and its session take in the store, and the directories
#: that either gets with its first file
INCARNATION_SIZE: Final = 2 << 10
DIRECTORIES_SIZE: Final = 4 * ((4 << 10) + ENTRY_SIZE)
#: where durable trees are
_TREES: Final = "tree/"
#: who holds what is in no agent's directory
_HOME: Final = "home"
_EVENTS: Final = "the log of events"
_UNNAMED: Final = "files that were removed and are open"

#: (owner, who of it holds it)
Holder = tuple[int, str]


@dataclass(slots=True)
class _Measure:
    """The last measure of one owner's trees."""

    #: of each tree, who holds it, and its bytes
    sizes: dict[str, tuple[str, int]] = field(default_factory=dict)
    #: when each was last looked at: what did not come to its turn is first the next time
    tried: dict[str, float] = field(default_factory=dict)
    charges: dict[str, Charge] = field(default_factory=dict)
    #: whether it is being measured; else when that ended, and how long it took
    running: bool = False
    ended: float = 0.0
    took: float = 0.0
    #: what the filesystem has had left at most since it began
    free: int = -1
    wanted: bool = False
    #: the directories of trees that are in the owner's project, and what that may have
    bound: set[str] = field(default_factory=set)
    most: int = -1 << 62
    #: there when the daemon began, and not measured since: nobody knows what has grown
    adopted: bool = False

    def size(self, tree: str) -> int:
        """As it was measured last."""
        return self.sizes[tree][1] if tree in self.sizes else 0

    def is_due(self, now: float, free: int, much: int) -> bool:
        """When much less is left than before, some owner has written much: who, is measured."""
        if self.running or now - self.ended < max(_SOON_SECONDS, _PART * self.took):
            return False
        return self.wanted or now - self.ended >= _SECONDS or self.free - free > much


class Disk:
    """The disk accounts of all owners.

    ``incarnations`` tells, in any thread, owner and agent of each of these directories below
    ``agent``; ``stored`` how many sessions they have, and bytes of them in the store.
    """

    def __init__(
        self,
        accounts: Accounts,
        state: Path,
        rooms: Rooms,
        spaces: Spaces,
        incarnations: Callable[[Collection[str]], dict[str, Holder]],
        stored: Callable[[], dict[Holder, tuple[int, int]]],
        payer: Callable[[Caller], Payer],
    ) -> None:
        self._accounts = accounts
        self.payer = payer
        self._state = state
        self._rooms = rooms
        #: what monitors have kept as far as it was noted, by owner; not before it is measured
        self._kept: dict[int, int] = {}
        self._spaces = spaces
        self._incarnations = incarnations
        self._stored = stored
        self._measures: dict[int, _Measure] = {}
        #: when all trees were looked for last, and what the filesystem has had left at most since
        self._surveyed = 0.0
        self._surveyed_free = -1
        #: whether an agent lives that may have a durable tree grow
        self.grows: Callable[[], bool] = lambda: False
        self._wake = trio.Event()
        #: durable trees that grew over the account of their owner, who still has no room
        self.full: set[str] = set()
        #: is told when an owner was measured
        self.measured = Wakeup()
        self._written: dict[int, Charge] = {}
        #: bytes of the filesystem below the state: those that are free, and all; -1 until known
        self.free = self.size = -1
        #: bytes of files that are open and have no name, by owner
        self.unnamed: Callable[[], dict[int, int]] = dict
        #: where the kernel bounds durable trees
        self.quotas: Quotas | None = None

    # for those who write

    def share(self, whose: Agent | Session) -> Share:
        """The share of an agent or a session, on the account of its owner at each moment."""
        return Share(self, whose)

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
            self.look(owner)

    def room(self, owner: int) -> int:
        """Bytes that agents of an owner may still write."""
        return self._accounts.room(owner, Resource.DISK)

    def output(self, owner: int) -> Path:
        """The file that tells monitors how much they may keep."""
        if self._rooms.make(owner):
            self._kept[owner] = 0
            self._share_room(owner)
        return self._rooms.path(owner)

    def _share_room(self, owner: int) -> None:
        kept = self._rooms.kept(owner)
        self.note(owner, kept - self._kept[owner])
        self._kept[owner] = kept
        self._rooms.limit(owner, kept + self.room(owner))

    def look(self, owner: int) -> None:
        """Something changed that has to be measured soon."""
        self._measures.setdefault(owner, _Measure()).wanted = True
        self.wake()

    def wake(self) -> None:
        """An agent has a tree that may grow, or something is to be measured."""
        self._wake.set()

    # measuring

    async def run(self, walker: Walker) -> None:
        """Measures for ever. An owner whose trees take long, or are held up, delays no other."""
        async with trio.open_nursery() as nursery:
            while True:
                begun = time.monotonic()
                await self._note_room()
                for owner in self._kept:
                    self._share_room(owner)
                if self._is_anybody_due(begun):
                    await self._survey(walker, nursery)
                took = time.monotonic() - begun
                await trio.sleep(max(_SOON_SECONDS, _PART * took))
                if not self.grows():
                    with trio.move_on_after(_SELDOM_SECONDS):
                        await self._wake.wait()
                self._wake = trio.Event()

    def _noted(self) -> dict[int, int]:
        return {owner: charge.amount for owner, charge in self._written.items()}

    def _is_anybody_due(self, now: float) -> bool:
        """Owners that nobody knows yet, too."""
        much = self._accounts.limit(Resource.DISK) // _MUCH
        if now - self._surveyed >= _SECONDS or self._surveyed_free - self.free > much:
            return True
        return any(each.is_due(now, self.free, much) for each in self._measures.values())

    async def _survey(self, walker: Walker, nursery: trio.Nursery) -> None:
        """Finds all trees, and begins to measure those of the owners that are due. If that cannot
        be done, what was measured last and what was written since go on to count."""
        first, before = not self._surveyed, self._noted()
        self._surveyed, self._surveyed_free = time.monotonic(), self.free
        try:
            trees = await trio.to_thread.run_sync(
                lambda: dict(self._trees()), abandon_on_cancel=True
            )
            stored = await trio.to_thread.run_sync(self._stored, abandon_on_cancel=True)
        except OSError as error:
            log.warning("cannot measure the disk accounts: %s", error)
            return
        much = self._accounts.limit(Resource.DISK) // _MUCH
        self.full &= {tree.removeprefix(_TREES) for tree in trees}
        there = {owner for owner, _ in (*stored, *trees.values())} | set(self.unnamed())
        for owner in there | set(self._measures):
            known = self._measures.setdefault(owner, _Measure(adopted=first))
            if known.is_due(time.monotonic(), self.free, much):
                known.running = True
                own = {tree: who for tree, (uid, who) in trees.items() if uid == owner}
                kept = {who: each for (uid, who), each in stored.items() if uid == owner}
                written = before.get(owner, 0)
                nursery.start_soon(self._measure, walker, owner, own, kept, written)

    async def _measure(
        self,
        walker: Walker,
        owner: int,
        trees: dict[str, str],
        stored: dict[str, tuple[int, int]],
        written: int,
    ) -> None:
        """``written`` was noted before the trees were looked for: a newer one is not among them."""
        known = self._measures[owner]
        known.wanted, known.free, begun = False, self.free, time.monotonic()
        written = min(written, self._noted().get(owner, 0))
        try:
            order = sorted(trees, key=lambda tree: known.tried.get(tree, 0.0))
            project = await self._give_to_project(walker, owner, trees)
            found = await walker.measure(owner, order) if order else []
            known.tried = {tree: known.tried.get(tree, 0.0) for tree in order}
            # the next one was begun, and may be held up
            known.tried |= dict.fromkeys(order[: len(found) + 1], begun)
            sizes = {tree: (who, known.size(tree)) for tree, who in trees.items()}
            for tree, measured in zip(order, found, strict=False):
                who, before = sizes[tree]
                # who moves things about while they are looked at gains nothing by it
                size = max(before, measured.bytes) if measured.partial else measured.bytes
                sizes[tree] = who, size
                self._spaces.measured(tree.removeprefix("tree/"), size, measured.entries)
            grown = {tree for tree, (_, size) in sizes.items() if size > known.size(tree)}
            known.sizes = sizes
            self._note_measured(owner, written, stored)
            self._note_full(owner, set() if known.adopted or project is not None else grown)
            known.adopted = False
            if project is not None:
                await self._limit(owner, project)
        except (CtxError, OSError) as error:
            log.warning("cannot measure the disk account of uid %d: %s", owner, error)
        finally:
            known.running = False
            known.ended = time.monotonic()
            known.took = known.ended - begun
            if not (known.sizes or known.charges or known.wanted):
                del self._measures[owner]

    async def _note_room(self) -> None:
        """Bounds all owners together: they share nine tenths of what they have and what is
        free. A tenth is root's, and everything else on the filesystem."""
        try:
            real = await trio.to_thread.run_sync(os.statvfs, self._state, abandon_on_cancel=True)
        except OSError as error:
            log.warning("%s: %s", self._state, error.strerror)
            return
        self.free, self.size = real.f_bavail * real.f_frsize, real.f_blocks * real.f_frsize
        # what others remove meanwhile does not hide what somebody writes
        self._surveyed_free = max(self._surveyed_free, self.free)
        for each in self._measures.values():
            each.free = max(each.free, self.free)
        self._accounts.set_total(Resource.DISK, self._accounts.used(Resource.DISK) + self.free)

    def _trees(self) -> Iterator[tuple[str, Holder]]:
        """Every tree that is measured by itself, from the state, and whose it is."""
        names = _entries(self._state / "agent")
        for name, holder in self._incarnations(names).items():
            yield f"agent/{name}", holder
        for home in _entries(self._state / "home"):
            if not home.isdigit():
                continue
            for agent in _entries(self._state / "home" / home / "agent"):
                yield f"home/{home}/agent/{agent}", (int(home), agent)
        for home in _entries(self._state / "tree/home"):
            yield f"tree/home/{home}", (int(home), _HOME)
        for user in _entries(self._state / "tree/agent"):
            for agent in _entries(self._state / "tree/agent" / user):
                yield f"tree/agent/{user}/{agent}", (int(user), agent)
        for owner in _entries(self._state / FLEET):
            yield f"{FLEET}/{owner}", (int(owner), _EVENTS)
        for space in self._spaces:
            yield f"tree/{tree_of_space(space.name)}", (space.owner, f"shared/{space.name}")

    async def _give_to_project(
        self, walker: Walker, owner: int, trees: Collection[str]
    ) -> int | None:
        """The project that has all durable trees of an owner, if the kernel bounds them."""
        project = self.quotas.project(owner) if self.quotas is not None else None
        known = self._measures[owner]
        # one for all homes of agents, so that a new one is in the project at once
        tops = {"/".join(tree.split("/")[:3]) for tree in trees if tree.startswith(_TREES)}
        known.bound &= tops
        if project is None or not tops:
            return None
        missing = sorted(tops - known.bound)
        if missing:
            done = await walker.measure(owner, missing, project)
            whole = zip(missing, done, strict=False)
            known.bound |= {top for top, each in whole if not each.partial}
        return project if known.bound == tops else None

    async def _limit(self, owner: int, project: int) -> None:
        """Has the kernel bound the trees of an owner by what the account has left for them."""
        known = self._measures[owner]
        trees = sum(size for tree, (_, size) in known.sizes.items() if tree.startswith(_TREES))
        most = trees + self.room(owner)
        moved = abs(most - known.most) > self._accounts.limit(Resource.DISK) // _MOVED
        if moved and self.quotas is not None:
            await trio.to_thread.run_sync(self.quotas.limit, project, most, abandon_on_cancel=True)
            known.most = most

    def _note_full(self, owner: int, grown: set[str]) -> None:
        """Notes the trees, of those that ctxd sees nobody write, that grow over the account; until
        there is some room again, lest who goes on be over at once."""
        known, much = self._measures[owner], self._accounts.limit(Resource.DISK) // _MUCH
        trees = {tree.removeprefix(_TREES) for tree in known.sizes if tree.startswith(_TREES)}
        if self.room(owner) > much:
            self.full -= trees
        elif not self.room(owner):
            self.full |= trees & {tree.removeprefix(_TREES) for tree in grown}
        # room is made by removing, which nobody tells
        known.wanted |= not self.full.isdisjoint(trees)
        self.measured.notify()

    def _note_measured(
        self, owner: int, written: int, stored: dict[str, tuple[int, int]]
    ) -> None:
        known = self._measures[owner]
        totals: Counter[str] = Counter()
        for who, size in known.sizes.values():
            totals[who] += size
        totals[_UNNAMED] = self.unnamed().get(owner, 0)
        for who, (sessions, size) in stored.items():
            totals[who] += sessions * INCARNATION_SIZE + size
        for who in known.charges.keys() | totals.keys():
            charge = known.charges.pop(who, None) or Charge(
                self._accounts, Payer(owner, who), Resource.DISK
            )
            charge.set(totals[who])
            if charge.amount:
                known.charges[who] = charge
        # what was written meanwhile may have been seen or not: it counts until next time
        if self._rooms.path(owner).exists():
            self._kept.setdefault(owner, self._rooms.kept(owner))
        if written:
            noted = self._written[owner]
            noted.set(noted.amount - written)
            if not noted.amount:
                del self._written[owner]


def _entries(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


@dataclass(frozen=True, slots=True)
class Share:
    """One tree's part of its owner's account."""

    disk: Disk
    whose: Agent | Session

    def check(self, caller: Caller, size: int) -> None:
        """``QuotaError`` if the owner has no room for so much more of this caller's."""
        self.disk.check(self.whose.owner, size, reserve=self.reserve(caller))

    def reserve(self, caller: Caller) -> Reserve:
        """The reserve that this caller may use."""
        who = self.disk.payer(caller)
        # another uid's operators have no part in what is kept for this owner's
        if who.reserve is Reserve.OWNER and who.owner != self.whose.owner:
            return Reserve.NONE
        return who.reserve

    def note(self, change: int) -> None:
        """So many bytes more, or less, are on the disk."""
        self.disk.note(self.whose.owner, change)

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
