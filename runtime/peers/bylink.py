"""Things that belong to links, of which there may be very many."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")

#: the node and the owner of a link
Where = tuple[str, int]


class ByLink(Generic[_K, _V]):
    """Values by their keys, each of which belongs to a link; those of one are found at once."""

    def __init__(self) -> None:
        self._where: dict[_K, Where] = {}
        self._at: dict[Where, dict[_K, _V]] = {}

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, key: _K) -> bool:
        return key in self._where

    def put(self, where: Where, key: _K, value: _V) -> None:
        """A value, which may have belonged to another link."""
        self.pop(key)
        self._where[key] = where
        self._at.setdefault(where, {})[key] = value

    def pop(self, key: _K) -> bool:
        """Whether it was there."""
        if (where := self._where.pop(key, None)) is None:
            return False
        del self._at[where][key]
        if not self._at[where]:
            del self._at[where]
        return True

    def at(self, where: Where) -> Collection[_V]:
        return self._at.get(where, {}).values()

    def values(self) -> Iterator[_V]:
        return (value for each in self._at.values() for value in each.values())
