"""How requests are paced: on whose account their time goes, and who waits for the disk."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

import trio

from runtime.authority.accounts import Payer
from runtime.authority.loop import Late, Timed, Turns
from runtime.caller import Caller
from runtime.errors import CtxError, OverTimeError
from runtime.kernel.lanes import Lanes
from runtime.kernel.recent import Recent
from runtime.runtime import Runtime

_R = TypeVar("_R")


#: what one owner may have waiting; more is not made to wait
_SYNCS_MAX: Final = 16
#: who called is looked up again after this time, in seconds; for the account only
_KNOWN_SECONDS: Final = 1.0
_KNOWN_MAX: Final = 4096


class Pace:
    """Accounts of time, and the waits that need more than a line."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._late = Late(runtime.accounts.time, Turns())
        self._syncs = Lanes[int]()
        self._disks = trio.CapacityLimiter(4)
        self._known = Recent[tuple[int, int, int], tuple[float, Payer]](_KNOWN_MAX)

    # who pays

    def payer(self, caller: Caller) -> Payer:
        return self._runtime.agents.identity.payer(caller)

    def payer_of(self, uid: int, gid: int, pid: int) -> Payer | None:
        """Of a request, as it was a moment ago; None if that cannot be told now."""
        key, now = (uid, gid, pid), time.monotonic()
        known = self._known.get(key)
        if known is not None and now - known[0] < _KNOWN_SECONDS:
            return known[1]
        try:
            caller = self._runtime.agents.identity.resolve(uid, gid, pid)
        except (CtxError, OSError):
            return None
        found = self.payer(caller)
        self._known.put(key, (now, found))
        return found

    def is_over(self, who: Payer | None) -> bool:
        """Whether an agent's owner has used more of the loop's time than it has."""
        return who is not None and self._runtime.accounts.time.makes_wait(who)

    def timed(
        self, who: Payer | None, coroutine: Coroutine[Any, Any, _R]
    ) -> Awaitable[_R]:
        """Awaits it; its steps go on an agent's owner's account."""
        accounts = self._runtime.accounts.time
        if who is None or not accounts.is_charged(who):
            return coroutine
        return Timed(coroutine, partial(accounts.pay, who))

    # waiting

    def refuse(self, who: Payer) -> None:
        """``OverTimeError``."""
        raise OverTimeError(
            f"the agents of uid {who.owner} have used up their time (owner_time): "
            "try again"
        )

    async def late(self, who: Payer) -> None:
        """Until its owner has time again, at most half a second, and then until it is its turn."""
        await self._late.wait(who)

    async def synced(self, caller: Caller, work: Callable[[], None] | None) -> None:
        """Does ``work`` and syncs the store, beside the loop; ``OverTimeError``, ``OSError``."""
        owner = self.payer(caller).owner
        if self._syncs.users(owner) >= _SYNCS_MAX:
            raise OverTimeError(f"{_SYNCS_MAX} fsync(2) of uid {owner} are waiting: try again")
        async with self._syncs.turn(owner):
            if work is not None:
                await trio.to_thread.run_sync(work, limiter=self._disks)
            await self._runtime.agents.journal.synced()
