"""Durable trees: where they lie and are seen, how they begin and end, those of an older version.

Agents can open the root of a tree, and hold its lock for as long as they like. What is done to a
tree is done by a helper (tree.c); the directories above trees are the daemon's own.

Where trees are, below the state, and since when:

- ``tree/agent/UID/NAME/UID[-FAMILY]``: since an agent with a durable home starts
- ``tree/home/UID``: since the user follows ``data``, or an agent with a line ``home:`` starts
- ``tree/space/SPACE/SPACE``: since a space is made. SPACE is the number of its record, which is
  never used again: one that is removed and made anew is another

Users have each tree by a mount of its own, at ``shared/SPACE`` or ``home/UID`` on a small
filesystem at ``<runtime>/tree``; a start after a crash finds these mounts, and leaves them alone.
Without root that is a link to ``tree/``.

``mkdir`` and ``rmdir`` of a space change its row and are answered; the helper makes or removes the
tree and its mount, also after a crash, and who follows ``data`` waits for that. Who holds a tree
holds up the helpers of its owner, and a lender of that tree.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

import trio

from runtime.cell.cell import Places
from runtime.errors import CtxError, StartupError, UnansweredError
from runtime.ids import SpaceIndex
from runtime.kernel import linux, orders
from runtime.kernel.helpers import Helpers
from runtime.kernel.inotify import Wakeup
from runtime.kernel.lanes import Lanes
from runtime.kernel.privilege import Privilege
from runtime.kernel.spawn import Spawner
from runtime.records.model import Space, SpaceState
from runtime.records.spaces import Spaces, tree_of_home, tree_of_space
from runtime.texts import mounts
from runtime.texts.names import quote

log = logging.getLogger("ctxd.trees")

#: directories of all trees; "lost" has what was kept
_KINDS: Final = ("space", "home", "agent", "lost")
#: many times what it takes to rename, or to mount, every tree
_ALL_SECONDS: Final = 60.0
#: names the mount where trees have their places
_SOURCE: Final = "ctxfs-tree"
#: who follows a link to a tree that is just being made waits so long at most
READY_SECONDS: Final = 1.0
#: a helper that an agent holds up is given up after this time, and begun again
_SECONDS: Final = 30.0


class Trees:
    """Makes and removes the trees of spaces, and makes those of homes, by helpers."""

    def __init__(
        self,
        places: Places,
        program: Path,
        helpers: Helpers,
        spaces: Spaces,
        made: Callable[[int], None],
    ) -> None:
        """``made`` is told of an owner who has a new tree."""
        self._made = made
        self._places = places
        self._program = program
        self._helpers = helpers
        self._spaces = spaces
        #: one helper at a time for each space
        self._turns = Lanes[SpaceIndex]()
        #: homes that are there
        self._homes: set[int] = set()
        self._wake = Wakeup()
        spaces.changed = self._wake.notify

    async def run(self) -> None:
        """Does what was begun, and what an earlier daemon did not come to."""
        async with trio.open_nursery() as nursery:
            while True:
                for space in self._spaces.unfinished():
                    if not self._turns.is_full(space.index):
                        nursery.start_soon(self._finish, space)
                with trio.move_on_after(_SECONDS):
                    await self._wake.wait_changed()

    async def _finish(self, space: Space) -> None:
        """Makes or removes a tree, if that is to be done still."""
        try:
            await self._do(space)
        except (CtxError, OSError) as error:
            log.warning("the tree of the space %s: %s", quote(space.name), error)

    async def ready(self, space: Space, seconds: float = READY_SECONDS) -> None:
        """Returns when its tree is there; ``CtxError`` or ``OSError``."""
        if space.state is SpaceState.THERE:
            return
        with trio.move_on_after(seconds):
            return await self._do(space)
        raise UnansweredError(f"the space {quote(space.name)} is just being made: try again")

    async def _do(self, space: Space) -> None:
        async with self._turns.turn(space.index):
            tree = tree_of_space(space.name)
            place = mounts.place_of(f"{mounts.SHARED_TREE}{space.name}")
            if space.state is SpaceState.WANTED:
                own = space.owner, space.gid, space.mode
                await self._make(space.owner, "make", tree, *own, place)
                self._spaces.made(space)
            elif space.state is SpaceState.REMOVED and self._spaces.knows(space):
                kept = f"lost/{space.name}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
                if await self._ask(space.owner, "remove", tree, place, kept):
                    directory = self._places.trees / kept
                    log.warning(
                        "the space %s had something: kept in %s", quote(space.name), directory
                    )
                self._spaces.forget(space)

    async def ready_home(self, uid: int, gid: int) -> None:
        """Returns when a user's own tree is there; ``CtxError`` or ``OSError``."""
        if uid not in self._homes:
            await self.have(uid, tree_of_home(uid), uid, gid, READY_SECONDS)
            self._homes.add(uid)

    async def have(self, owner: int, tree: str, uid: int, gid: int, seconds: float) -> None:
        """Returns when a tree that is not a space's is there, and its user may use it."""
        await self._make(owner, "have", tree, uid, gid, seconds=seconds)

    async def _make(
        self, owner: int, verb: str, *words: orders.Word, seconds: float = _SECONDS
    ) -> None:
        if await self._ask(owner, verb, *words, seconds=seconds):
            self._made(owner)

    async def _ask(
        self, owner: int, verb: str, *words: orders.Word, seconds: float = _SECONDS
    ) -> bytes:
        places = self._places
        command = orders.words(self._program, places.trees, verb, places.tree, *words)
        return await self._helpers.ask(owner, f"tree {verb}", command, seconds=seconds)


def adopt(places: Places, spawner: Spawner, spaces: Spaces, closed: Collection[int]) -> None:
    """Trees of an older version get their places, before the daemon serves; homes of ``closed``
    uids, for root alone. A tree that no record is of, as after a power loss, is its owner's space.
    ``StartupError``.

    An earlier start may have died at any step of it. The directory that had the spaces goes last,
    so that the next start does what is left; what it moved and did not note has no record.
    """
    is_older, own = (places.state / "shared").is_dir(), places.trees / "space"
    names = os.listdir(own) if own.is_dir() else []
    unknown = [name for name in names if not spaces.has(name)]
    if not unknown and not is_older:
        return
    command = orders.words(places.program("tree"), places.state, "adopt", list(closed), unknown)
    try:
        said = spawner.run_now(command, seconds=_ALL_SECONDS)
    except CtxError as error:
        raise StartupError(
            f"{places.state}: the durable trees of an older ctxd cannot be moved to "
            f"{places.trees} ({error.sentence}): end the agents that live, then start ctxd again"
        ) from None
    for line in said.splitlines():
        owner, _, name = line.partition(" ")
        if not spaces.has(name):
            spaces.adopt(name, int(owner))
    if is_older:
        log.info(
            "the durable trees of an older ctxd are now in %s: data of a space or home leads there",
            places.trees,
        )


def show(places: Places, privilege: Privilege, spawner: Spawner, spaces: Spaces) -> None:
    """They are seen below the runtime directory, by the modes of each; ``StartupError``."""
    there = [space.name for space in spaces if space.state is SpaceState.THERE]
    known = orders.memory_file("spaces", orders.message(there))
    try:
        for path in (places.trees, *(places.trees / kind for kind in _KINDS)):
            path.mkdir(exist_ok=True)
            path.chmod(0o711)
        if privilege.rootless:
            _link(places)
        else:
            _mount(places)
        command = orders.words(places.program("tree"), places.trees, "show", places.tree, 3)
        spawner.run_now(command, known, seconds=_ALL_SECONDS)
    except (CtxError, OSError) as error:
        raise StartupError(f"{places.tree}: cannot show {places.trees} there: {error}") from None
    finally:
        os.close(known)


def _link(places: Places) -> None:
    if not places.tree.is_symlink() or os.readlink(places.tree) != str(places.trees):
        places.tree.unlink(missing_ok=True)
        places.tree.symlink_to(places.trees)


def _mount(places: Places) -> None:
    """A small filesystem on which each tree has a place."""
    # that of a daemon that was killed, or was executed before in this process, is known again
    while (there := linux.mount_at(places.tree)) is not None and there.source != _SOURCE:
        linux.unmount(places.tree, linux.MNT_DETACH)
    if there is None:
        if places.tree.is_symlink():
            places.tree.unlink()
        places.tree.mkdir(mode=0o711, exist_ok=True)
        flags = linux.MS_NOSUID | linux.MS_NODEV
        linux.mount(_SOURCE, places.tree, "tmpfs", flags, "mode=711,size=1m,nr_inodes=0")
        linux.mount("none", places.tree, "none", linux.MS_PRIVATE)


def hide(places: Places) -> None:
    if linux.mount_at(places.tree) is not None:
        linux.unmount(places.tree, linux.MNT_DETACH)
    if places.tree.is_symlink():
        places.tree.unlink()
    elif places.tree.is_dir():
        places.tree.rmdir()
