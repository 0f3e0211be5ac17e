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
#: for which removals are gathered: each helper is a process
_GATHER_SECONDS: Final = 0.1
#: a start waits no longer for what is left of an earlier one
_LEFT_SECONDS: Final = 5.0


class _Left:
    """The cgroups of one owner that are to be removed."""

    def __init__(self) -> None:
        #: set when they are removed
        self.paths: dict[str, trio.Event] = {}
        #: set when there are more of them, and when somebody waits for one
        self.more = trio.Event()
        self.wanted = trio.Event()


class Sweeper:
    """Signals and removes, in the turn of each owner."""

    def __init__(self, program: Path, helpers: Helpers, nursery: trio.Nursery) -> None:
        self._program = program
        self._helpers = helpers
        self._nursery = nursery
        #: by owners for whom somebody removes them
        self._left: dict[int, _Left] = {}

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

    def remove(self, owner: int, cgroup: Cgroup, *, wanted: bool = False) -> None:
        """Kills what is left in a cgroup, and removes it, soon; again and again if it must.
        ``wanted`` says that it may be made anew at any moment."""
        if not self._is_there(owner, cgroup):
            return
        left = self._left.get(owner)
        if left is None:
            left = self._left[owner] = _Left()
            self._nursery.start_soon(self._sweep, owner, left)
        left.paths.setdefault(str(cgroup), trio.Event())
        left.more.set()
        if wanted:
            left.wanted.set()

    async def removed(self, owner: int, cgroup: Cgroup) -> None:
        """Returns when there is no such cgroup any more; ``UnansweredError``."""
        self.remove(owner, cgroup, wanted=True)
        if not self._is_there(owner, cgroup):
            return
        with trio.move_on_after(_LEFT_SECONDS):
            await self._left[owner].paths[str(cgroup)].wait()
        if self._is_there(owner, cgroup):
            raise UnansweredError(f"{cgroup}: cannot be removed yet: try again")

    def _is_there(self, owner: int, cgroup: Cgroup) -> bool:
        # one that is about to be removed may be gone by now, and would be removed if made anew
        left = self._left.get(owner)
        return (left is not None and str(cgroup) in left.paths) or cgroup.exists()

    async def drained(self) -> None:
        """Returns when nothing is to be removed any more."""
        while self._left:
            left = next(iter(self._left.values()))
            left.wanted.set()
            await next(iter(left.paths.values())).wait()
            await trio.lowlevel.checkpoint()

    async def _sweep(self, owner: int, left: _Left) -> None:
        retry = _FIRST_RETRY
        while left.paths:
            # what is to be removed until then is in one request
            with trio.move_on_after(_GATHER_SECONDS):
                await left.wanted.wait()
            left.more, left.wanted = trio.Event(), trio.Event()
            paths = list(left.paths)
            try:
                said = await self._helpers.tell(
                    *(owner, "cgroups", self._program), "remove", paths, seconds=_REMOVAL_SECONDS
                )
                there = {paths[int(word)] for word in said.split()}
            except (CtxError, OSError) as error:
                log.warning("cannot remove cgroups: %s", error, extra=because_of(owner))
                # what it had removed may be made anew, and would be killed by the next
                there = {path for path in paths if Cgroup(Path(path)).exists()}
            for path in paths:
                if path not in there:
                    left.paths.pop(path).set()
            if there:
                with trio.move_on_after(retry):
                    await left.more.wait()
                retry = min(2 * retry, _LAST_RETRY)
        del self._left[owner]
