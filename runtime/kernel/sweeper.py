"""Signals, priorities and removals in cgroups that agents were in, by a helper (sweep.c).

All of it is done beside the loop.

An agent may hold the lock of a directory of its own cgroups, and make cgroups there if the daemon
has no other uid than it. So the daemon opens, lists and removes none of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import trio

from runtime.errors import CtxError, UnansweredError
from runtime.kernel.cgroups import Cgroup
from runtime.kernel.daemonlog import because_of
from runtime.kernel.helpers import Helpers

log = logging.getLogger("ctxd.sweeper")

#: that a signal to many processes, and the removal of many cgroups, may take
_SIGNAL_SECONDS: Final = 1.0
_REMOVAL_SECONDS: Final = 10.0
#: the longest time between two attempts to remove what cannot be removed
_LAST_RETRY: Final = 60.0
_FIRST_RETRY: Final = 0.1
#: a start waits no longer for what is left of an earlier one
_LEFT_SECONDS: Final = 5.0


class Sweeper:
    """Signals and removes, in the turn of each owner."""

    def __init__(self, program: Path, helpers: Helpers, nursery: trio.Nursery) -> None:
        self._program = program
        self._helpers = helpers
        self._nursery = nursery
        #: cgroups that are to be removed, of owners for whom somebody does it
        self._left: dict[int, dict[str, trio.Event]] = {}
        #: of these owners: set when there is more to remove
        self._more: dict[int, trio.Event] = {}

    async def signal(
        self, owner: int, number: int, cgroups: Iterable[Cgroup], spared: Iterable[int]
    ) -> int:
        """Signals what is in and below ``cgroups`` but for some PIDs; how many processes there
        are. ``CtxError``, ``OSError``."""
        told = ("signal", number, sorted(spared), [str(each) for each in cgroups])
        ask = self._helpers.tell
        return int(await ask(owner, "signal", self._program, *told, seconds=_SIGNAL_SECONDS))

    async def hurry(self, owner: int, cgroup: Cgroup) -> None:
        """Gives what is in and below a cgroup the priority of others. ``CtxError``, ``OSError``."""
        told = ("hurry", [str(cgroup)])
        await self._helpers.tell(owner, "signal", self._program, *told, seconds=_SIGNAL_SECONDS)

    def remove(self, owner: int, cgroup: Cgroup) -> None:
        """Kills what is left in a cgroup, and removes it, soon; again and again if it must."""
        if not self._is_there(owner, cgroup):
            return
        left = self._left.get(owner)
        if left is None:
            left = self._left[owner] = {}
            self._more[owner] = trio.Event()
            self._nursery.start_soon(self._sweep, owner, left)
        left.setdefault(str(cgroup), trio.Event())
        self._more[owner].set()

    async def removed(self, owner: int, cgroup: Cgroup) -> None:
        """Returns when there is no such cgroup any more; ``UnansweredError``."""
        self.remove(owner, cgroup)
        if not self._is_there(owner, cgroup):
            return
        with trio.move_on_after(_LEFT_SECONDS):
            await self._left[owner][str(cgroup)].wait()
        if cgroup.exists():
            raise UnansweredError(f"{cgroup}: cannot be removed yet: try again")

    def _is_there(self, owner: int, cgroup: Cgroup) -> bool:
        # one that is about to be removed may be gone by now, and would be removed if made anew
        return str(cgroup) in self._left.get(owner, ()) or cgroup.exists()

    async def drained(self) -> None:
        """Returns when nothing is to be removed any more."""
        while self._left:
            await next(iter(next(iter(self._left.values())).values())).wait()
            await trio.lowlevel.checkpoint()

    async def _sweep(self, owner: int, left: dict[str, trio.Event]) -> None:
        retry = _FIRST_RETRY
        while left:
            # what is to be removed in this moment is in one request
            await trio.lowlevel.checkpoint()
            more = self._more[owner] = trio.Event()
            paths = list(left)
            try:
                said = await self._helpers.tell(
                    *(owner, "cgroups", self._program), "remove", paths, seconds=_REMOVAL_SECONDS
                )
                there = {paths[int(word)] for word in said.split()}
            except (CtxError, OSError) as error:
                log.warning("cannot remove cgroups: %s", error, extra=because_of(owner))
                there = set(paths)
            for path in paths:
                if path not in there:
                    left.pop(path).set()
            if there:
                with trio.move_on_after(retry):
                    await more.wait()
                retry = min(2 * retry, _LAST_RETRY)
        del self._left[owner], self._more[owner]
