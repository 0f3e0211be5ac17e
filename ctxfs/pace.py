"""How requests are paced: on whose account their time goes, and what each waits for at first.

What is asked of a ``ctl`` waits for nothing: its verbs act. Others wait for their turn if their row
of ``locks`` says so, and those of an owner that has used up its time are late, or are refused.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import trio

from ctxfs.locks import Over, Row
from ctxfs.scheduler import Scheduler
from ctxfs.tree.nodes import Call, Node, OpenFile
from ctxfs.tree.rownodes import RowNode
from ctxfs.tree.rows import Verbs
from runtime.authority.accounts import Payer, Resource
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
#: of the bytes of a write: one as read from the kernel, one as the handler gets it
_COPIES: Final = 2
#: a request with less is not asked to pay for the time that it waits
_FREE_BYTES: Final = 8192
_NOTHING_HELD: Final = nullcontext()


@dataclass(frozen=True, slots=True)
class Meant:
    """The subject of a request, as far as it is there: a node, the open file or the name in it."""

    node: Node | None
    file: OpenFile | None = None
    name: object = None

    @property
    def is_ctl(self) -> bool:
        """Whether it is a ``ctl``; a file that somebody calls so in a folder is none."""
        node = self.node
        return isinstance(node, RowNode) and (isinstance(node.row, Verbs) or self.name == b"ctl")

    @property
    def is_locked(self) -> bool:
        """Whether others wait for a lock meanwhile: attributes of directories, and reads into
        pages that the kernel keeps."""
        if self.file is not None:
            return not self.file.direct
        return self.node is not None and self.node.is_directory()


class Pace:
    """When requests are served."""

    def __init__(self, runtime: Runtime, scheduler: Scheduler) -> None:
        self._runtime = runtime
        self._scheduler = scheduler
        self._late = Late(runtime.accounts.time, Turns())
        self._syncs = Lanes[int]()
        self._disks = trio.CapacityLimiter(4)
        self._known = Recent[tuple[int, int, int], tuple[float, Payer]](_KNOWN_MAX)

    # who pays

    def payer(self, caller: Caller) -> Payer:
        return self._runtime.agents.identity.payer(caller)

    def payer_of(self, uid: int, gid: int, pid: int) -> Payer | None:
        """The payer of a request, as it was a moment ago; None if that cannot be told now."""
        key, now = (uid, gid, pid), time.monotonic()
        known = self._known.get(key)
        if known is not None and now - known[0] < _KNOWN_SECONDS:
            return known[1]
        try:
            caller = Call(self._runtime, uid, gid, pid).caller
        except (CtxError, OSError):
            return None
        found = self.payer(caller)
        self._known.put(key, (now, found))
        return found

    def timed(
        self, who: Payer | None, coroutine: Coroutine[Any, Any, _R]
    ) -> Awaitable[_R]:
        """Awaits it; its steps go on an agent's owner's account."""
        accounts = self._runtime.accounts.time
        if who is None or not accounts.is_charged(who):
            return coroutine
        return Timed(coroutine, partial(accounts.pay, who))

    # waiting

    async def admit(
        self, row: Row, who: Payer | None, meant: Callable[[], Meant], data: object, *, reads: bool
    ) -> None:
        """Returns when a request with some data may be served; ``OverTimeError`` if its owner has
        to ask again, ``QuotaError`` if that has no room for what waits."""
        if row.turn and self._scheduler.is_asked() and not meant().is_ctl:
            with self.holding(who, data):
                await self._scheduler.turn(who, reads=reads)
        accounts = self._runtime.accounts.time
        if who is None or not accounts.makes_wait(who) or (about := meant()).is_ctl:
            return
        if row.over is Over.REFUSED:
            raise OverTimeError(
                f"the agents of uid {who.owner} have used up their time (owner_time): try again"
            )
        if row.over is Over.LATE and not about.is_locked:
            await self._late.wait(who)

    def holding(self, who: Payer | None, data: object) -> AbstractContextManager[object]:
        """Has a request that waits pay for the bytes that it wants to write; ``QuotaError``.

        What is small costs the daemon no more than the thread that asks costs its agent.
        """
        if who is None or not isinstance(data, bytes) or len(data) <= _FREE_BYTES:
            return _NOTHING_HELD
        return self._charged(who, _COPIES * len(data))

    @contextmanager
    def _charged(self, who: Payer, size: int) -> Iterator[None]:
        held = self._runtime.accounts.charged(who, Resource.MEMORY, size)
        try:
            yield
        finally:
            held.release()

    async def synced(self, caller: Caller, work: Callable[[], None] | None) -> None:
        """Does ``work`` and syncs the store, beside the loop; ``OverTimeError``, ``OSError``."""
        owner = self.payer(caller).owner
        if self._syncs.users(owner) >= _SYNCS_MAX:
            raise OverTimeError(f"{_SYNCS_MAX} fsync(2) of uid {owner} are waiting: try again")
        async with self._syncs.turn(owner):
            if work is not None:
                await trio.to_thread.run_sync(work, limiter=self._disks)
            await self._runtime.agents.journal.synced()
