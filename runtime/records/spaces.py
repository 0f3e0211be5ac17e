"""The spaces that users and agents share, by name, and where durable trees lie.

A space is a row of the store and a tree. The row says whose it is and what it had when it was last
measured: nobody has to look at the tree to answer for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from runtime.ids import NO_SPACE, SpaceIndex
from runtime.records.model import Space
from runtime.records.store import Store


def tree_of_space(name: str) -> str:
    """Relative to the directory of all durable trees."""
    return f"shared/{name}"


def tree_of_home(uid: int) -> str:
    """The same of a user's own."""
    return f"home/{uid}"


class Spaces:
    """All of them; each change is a transaction."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._named = {space.name: space for space in store.load_spaces()}

    def __iter__(self) -> Iterator[Space]:
        """By name."""
        return iter([self._named[name] for name in sorted(self._named)])

    def __len__(self) -> int:
        return len(self._named)

    def named(self, name: str) -> Space | None:
        return self._named.get(name)

    def get(self, index: SpaceIndex) -> Space | None:
        return next((each for each in self._named.values() if each.index == index), None)

    def of(self, owner: int) -> int:
        """How many an owner has."""
        return sum(space.owner == owner for space in self._named.values())

    def add(self, name: str, owner: int) -> Space:
        """A new one, whose tree has nothing."""
        now = time.time()
        return self._insert(Space(index=NO_SPACE, name=name, owner=owner, made=now, measured=now))

    def adopt(self, name: str, owner: int) -> Space:
        """One whose tree was there, and has what nobody knows yet."""
        return self._insert(Space(index=NO_SPACE, name=name, owner=owner, made=time.time()))

    def _insert(self, space: Space) -> Space:
        with self._store.transaction():
            space.index = self._store.insert_space(space)
        self._named[space.name] = space
        return space

    def note(self, space: Space, size: int, entries: int) -> None:
        """It was measured."""
        space.measured = time.time()
        if (size, entries) == (space.bytes, space.entries):
            return
        space.bytes, space.entries = size, entries
        if self._named.get(space.name) is space:
            with self._store.transaction():
                self._store.put_space(space)

    def remove(self, space: Space) -> None:
        with self._store.transaction():
            self._store.delete_space(space.index)
        del self._named[space.name]
