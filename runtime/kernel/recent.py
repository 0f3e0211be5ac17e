"""A cache of what was used last, as far as there is room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class Recent(Generic[_K, _V]):
    """Values by key, with no more weight together than ``most``: what was not used for longest
    goes first. ``dropped`` is called with each that goes."""

    def __init__(self, most: int, dropped: Callable[[_V], object] = lambda value: None) -> None:
        self._most = most
        self._dropped = dropped
        self._weight = 0
        #: values with their weight, the one that was used last at the end; a look at them is no use
        self.entries: OrderedDict[_K, tuple[_V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self.entries)

    def get(self, key: _K) -> _V | None:
        found = self.entries.get(key)
        if found is None:
            return None
        self.entries.move_to_end(key)
        return found[0]

    def put(self, key: _K, value: _V, weight: int = 1) -> None:
        self.drop(key)
        self.entries[key] = value, weight
        self._weight += weight
        while self._weight > self._most and len(self) > 1:
            self.drop(next(iter(self.entries)))

    def drop(self, key: _K) -> None:
        if key in self.entries:
            value, weight = self.entries.pop(key)
            self._weight -= weight
            self._dropped(value)

    def clear(self) -> None:
        while self.entries:
            self.drop(next(iter(self.entries)))
