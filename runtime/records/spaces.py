"""The spaces that users and agents share, by name, and where durable trees lie.

A space is a row of the store and a tree. The row says whose it is and what it had when it was last
measured: nobody has to look at the tree to answer for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Final

from runtime.ids import NO_SPACE, SpaceIndex
from runtime.kernel import clock
from runtime.records.model import Space, SpaceState
from runtime.records.store import Store
from runtime.texts.mounts import place_of, space_of
from runtime.texts.names import dump_json

#: of a measure, in seconds: what a space has is not known from an older one
FRESH_SECONDS: Final = 30.0


def tree_of_space(name: str) -> str:
    """Relative to the directory of all durable trees. It has the directory above for itself: who
    removes one waits for its lock with that of the one above, and others hold what they open."""
    return f"space/{name}/{name}"


def tree_of_home(uid: int) -> str:
    """The path of a user's own tree, relative to the directory of all durable trees."""
    return f"home/{uid}"


def tree_of_worktree(owner: int, name: str, incarnation: str) -> str:
    """The path of the trees ``work`` and ``git`` of an agent of another machine, relative to the
    directory of all durable trees. No name of an agent has a ``~``."""
    return f"agent/{owner}/{name}~{incarnation}"


def tree_of(tree: str) -> str:
    """The path of the tree ``KIND:NAME``, which views have at another place."""
    space = space_of(tree)
    return tree_of_space(space) if space else place_of(tree)


class Spaces:
    """All of them; each change is a transaction. One that is removed is kept until its tree is
    gone, and only its name is taken still."""

    def __init__(self, store: Store) -> None:
        self._store = store
        rows = store.execute("SELECT idx, name, data FROM spaces ORDER BY idx")
        self._named = {
            name: Space.load(SpaceIndex(index), name, json.loads(data))
            for index, name, data in rows
        }
        #: is told when a tree has to be made or removed
        self.changed: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[Space]:
        """By name; may be called by any thread."""
        named = dict(self._named)
        return iter([named[name] for name in sorted(named) if self._is_there(named[name])])

    @staticmethod
    def _is_there(space: Space) -> bool:
        return space.state is not SpaceState.REMOVED

    def named(self, name: str) -> Space | None:
        space = self._named.get(name)
        return space if space is not None and self._is_there(space) else None

    def get(self, index: SpaceIndex) -> Space | None:
        return next((space for space in self if space.index == index), None)

    def knows(self, space: Space) -> bool:
        """Whether it has not been forgotten; another one may have its name by then."""
        return self._named.get(space.name) is space

    def has(self, name: str) -> bool:
        """Whether the name is taken."""
        return name in self._named

    def of(self, owner: int) -> int:
        """How many an owner has."""
        return sum(space.owner == owner for space in self._named.values())

    def unfinished(self) -> list[Space]:
        """Those whose trees are to be made, or removed."""
        return [each for each in self._named.values() if each.state is not SpaceState.THERE]

    def add(self, name: str, *, owner: int, gid: int, mode: int) -> Space:
        """A new one, whose tree is to be made and has nothing."""
        now, state = clock.wall(), SpaceState.WANTED
        return self._insert(
            Space(index=NO_SPACE, name=name, owner=owner, made=now, measured=now,
                  measured_up=clock.up(), gid=gid, mode=mode, state=state)
        )  # fmt: skip

    def adopt(self, name: str, owner: int) -> Space:
        """One whose tree is there, and has what nobody knows yet."""
        return self._insert(Space(index=NO_SPACE, name=name, owner=owner, made=clock.wall()))

    def _insert(self, space: Space) -> Space:
        with self._store.transaction():
            data = dump_json(space.record())
            space.index = SpaceIndex(self._store.insert("spaces", name=space.name, data=data))
        self._named[space.name] = space
        self.changed()
        return space

    def measured(self, tree: str, size: int, entries: int) -> None:
        """A tree was measured, perhaps that of a space."""
        space = self.named(tree.rpartition("/")[2])
        if space is None or tree != tree_of_space(space.name):
            return
        space.measured, space.measured_up = clock.wall(), clock.up()
        if (size, entries) != (space.bytes, space.entries):
            space.bytes, space.entries = size, entries
            self._put(space)

    def made(self, space: Space) -> None:
        """Its tree is there."""
        if space.state is SpaceState.WANTED:
            space.state = SpaceState.THERE
            self._put(space)

    def remove(self, space: Space) -> None:
        """Nobody finds it any more; its tree is to be removed."""
        space.state = SpaceState.REMOVED
        self._put(space)
        self.changed()

    def forget(self, space: Space) -> None:
        """Its tree is gone."""
        with self._store.transaction():
            self._store.execute("DELETE FROM spaces WHERE idx=?", space.index)
        del self._named[space.name]

    def _put(self, space: Space) -> None:
        with self._store.transaction():
            self._store.put("spaces", space.index, data=dump_json(space.record()))
