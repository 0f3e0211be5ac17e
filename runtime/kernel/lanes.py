"""Lanes: of each key so many go on at a time, and the others wait in their order.

A key is whatever must not hold up another: an owner, an agent, a file, a call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import trio

_K = TypeVar("_K", bound=Hashable)


class Lanes(Generic[_K]):
    """A lane for each key, as long as anybody is in it; false while nobody is in any."""

    def __init__(self, at_once: int = 1) -> None:
        self._at_once = at_once
        #: how many are in each, and those of them that wait
        self._users: dict[_K, int] = {}
        self._waiting: dict[_K, trio.lowlevel.ParkingLot] = {}

    def __bool__(self) -> bool:
        return bool(self._users)

    def users(self, key: _K) -> int:
        """How many go on, or wait to."""
        return self._users.get(key, 0)

    def is_full(self, key: _K) -> bool:
        """Whether whoever comes has to wait."""
        return self.users(key) >= self._at_once

    @asynccontextmanager
    async def turn(self, key: _K) -> AsyncIterator[None]:
        """Waits for a turn, and has it meanwhile."""
        await self.enter(key)
        try:
            yield
        finally:
            self.leave(key)

    async def enter(self, key: _K) -> None:
        """Waits for a turn, which is kept until ``leave``."""
        await trio.lowlevel.checkpoint_if_cancelled()
        full = self.is_full(key)
        self.enter_anyway(key)
        if not full:
            # whoever comes goes on in a later step, waiting or not
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
        waiting = self._waiting.setdefault(key, trio.lowlevel.ParkingLot())
        try:
            await waiting.park()
        except BaseException:
            self._part(key)
            raise

    def enter_anyway(self, key: _K) -> None:
        """At once, full or not: for who has looked, and for what goes on without being asked."""
        self._users[key] = self.users(key) + 1

    def leave(self, key: _K) -> None:
        waiting = self._waiting.get(key)
        if waiting is not None and self.users(key) - len(waiting) <= self._at_once:
            waiting.unpark()
        self._part(key)

    def _part(self, key: _K) -> None:
        self._users[key] -= 1
        if not self._waiting.get(key, True):
            del self._waiting[key]
        if not self._users[key]:
            del self._users[key]
