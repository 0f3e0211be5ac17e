"""The port to the machine on which programs run, for those who begin, follow and end them.

Here that is cgroups and the records of monitors; ``runtime.life`` knows neither. What becomes of a
program is told by its ``Facts``: it was born, it began or is held, it ended, nothing of it is
left, or it is lost. A place (``Execution.leaf``, ``LiveCell.node``) can be frozen and killed, and
says whether somebody is there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager

import trio

from runtime.authority.limits import apply_limits, check_limits, spent
from runtime.cell.cell import Places
from runtime.cell.execution import Execution, LiveCell
from runtime.cell.record import Facts
from runtime.kernel import cgroups, linux
from runtime.kernel.cgroups import Cgroup, Hierarchy
from runtime.kernel.inotify import Wakeup, Watcher
from runtime.kernel.sweeper import Sweeper

log = logging.getLogger("ctxd.port")

#: what ``Port.place`` gives
Place = Cgroup


class Port:
    """The cgroups of agents, and the monitors of their programs."""

    def __init__(
        self, hierarchy: Hierarchy, watcher: Watcher, sweeper: Sweeper, places: Places
    ) -> None:
        self._hierarchy = hierarchy
        self._watcher = watcher
        self._sweeper = sweeper
        self._places = places
        #: the boot of the machine, which no program outlives
        self.boot = linux.boot_id()

    def place(self, path: str) -> Cgroup:
        """Where an agent and all that it owns are, by its record."""
        return self._hierarchy.root.child(path)

    # facts

    def facts(self, key: str) -> Facts:
        """The facts of a program, by whose it is."""
        return Facts(self._places.records / key)

    def watching_facts(self, execution: Execution) -> AbstractContextManager[None]:
        """While that is told by ``execution.changed``."""
        return self._watcher.watching_present(execution.changed, execution.facts.path)

    def watching_place(self, place: Cgroup, wakeup: Wakeup) -> AbstractContextManager[None]:
        """While it is told that the last process of a place is gone, or one is there again."""
        return self._watcher.watching_present(wakeup, place.path / "cgroup.events")

    async def wait_empty(self, place: Cgroup) -> None:
        """Until no process is left in a place, or it is gone."""
        wakeup = Wakeup()
        with self.watching_place(place, wakeup):
            await wakeup.until(lambda: not place.populated())

    async def watch_monitor(self, execution: Execution) -> None:
        """Until the monitor of a program, whichever daemon started it, is gone."""
        monitor = execution.record().monitor
        with contextlib.suppress(OSError):
            if monitor:
                fd = os.pidfd_open(monitor)
                try:
                    # a pid may have been given to another process since
                    if self._hierarchy.holds_monitors(cgroups.path_of(monitor) or ""):
                        await trio.lowlevel.wait_readable(fd)
                finally:
                    os.close(fd)
        if monitor:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(monitor, os.WNOHANG)  # ours to reap, unless adopted
        execution.monitor_gone = True
        execution.changed.notify()

    async def wait_settled(self, execution: Execution) -> None:
        """Until it is known whether a program began: only then can SIGTERM reach it."""
        if execution.settled:
            return
        await execution.until(lambda: execution.launched)
        if execution.facts.exist():
            with self.watching_facts(execution):
                await execution.until(
                    lambda: (
                        execution.monitor_gone or execution.over or execution.record().settled
                    )
                )

    # what is done to programs

    async def signal(self, owner: int, number: int, execution: Execution) -> int:
        """Signals what is left of a program, but nothing that leads to it; how many processes
        there are. ``CtxError``, ``OSError``."""
        return await self._sweeper.signal(owner, number, [execution.leaf], execution.spared())

    async def signal_cells(self, owner: int, number: int, cells: Collection[LiveCell]) -> None:
        """Signals all programs of cells."""
        places = [leaf for each in cells for leaf in each.leaves()]
        spared = [pid for each in cells for ex in each.programs() for pid in ex.spared()]
        await self._sweeper.signal(owner, number, places, spared)

    async def hurry(self, owner: int, place: Cgroup) -> None:
        """Has what was killed end as soon as others would. ``CtxError``, ``OSError``."""
        await self._sweeper.hurry(owner, place)

    @staticmethod
    def thaw(place: Cgroup) -> None:
        """Thaws processes that are ended anyway; SIGKILL reaches frozen ones too."""
        try:
            place.freeze(False)
        except OSError as error:
            log.error("%s: cannot thaw it: %s", place.path, error.strerror)

    def open_keeper(self, live_cell: LiveCell) -> int:
        """A pidfd of the PID 1 of a cell; ``ProcessLookupError`` if that is gone."""
        keeper = live_cell.record().keeper
        if not keeper:
            raise ProcessLookupError
        fd = os.pidfd_open(keeper)
        # a pid may have been given to another process since
        if not live_cell.leaf.holds(cgroups.path_of(keeper) or ""):
            os.close(fd)
            raise ProcessLookupError
        return fd

    def _tell_keeper(self, live_cell: LiveCell, number: int) -> bool:
        try:
            fd = self.open_keeper(live_cell)
        except OSError:
            return False
        try:
            signal.pidfd_send_signal(fd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)
        return True

    def hold(self, live_cell: LiveCell) -> bool:
        """A cell is not to end with its first program (keeper.c); False if it is over."""
        return self._tell_keeper(live_cell, signal.SIGUSR1)

    def release(self, live_cell: LiveCell) -> bool:
        """A cell is to end as soon as nothing else is in it (keeper.c); False if it is over."""
        return self._tell_keeper(live_cell, signal.SIGHUP)

    def remove(self, owner: int, place: Cgroup) -> None:
        """Kills what is left in a place, and removes it, soon."""
        self._sweeper.remove(owner, place)

    async def removed(self) -> None:
        """Returns when nothing is to be removed any more."""
        await self._sweeper.drained()

    # what they use

    @property
    def counts_memory(self) -> bool:
        """Whether the kernel counts the memory of places."""
        return "memory" in self._hierarchy.controllers

    def check_limits(self, limits: dict[str, str]) -> None:
        """``UnsupportedError`` where the machine lacks a controller."""
        check_limits(self._hierarchy, limits)

    def apply_limits(self, place: Cgroup, limits: dict[str, str]) -> None:
        """Limits what an agent and all that it owns use, if it has a place now."""
        apply_limits(self._hierarchy, place, limits)

    def spent(self, place: Cgroup) -> dict[str, int]:
        """Processor time, and the peak of the memory where that is counted."""
        return spent(place, counted=self.counts_memory)

    @staticmethod
    def memory(place: Cgroup) -> int:
        """Bytes that are used now, where they are counted."""
        return place.number("memory.current") or 0

    # what nobody follows

    def all_places(self) -> Iterator[Cgroup]:
        """Those of all agents that no other agent owns."""
        yield from map(Cgroup, self._hierarchy.root.path.glob("user-*/agent-*"))

    def remove_strays(self, living: set[str], known: set[str]) -> None:
        """Removes places of no agent, and facts that nobody has a key of: left by a crash between
        two steps."""
        for directory in (self._places.records, self._places.monitors):
            for path in directory.iterdir():
                if path.name not in known:
                    path.unlink(missing_ok=True)
        for user in self._hierarchy.root.path.glob("user-*"):
            owner = int(user.name.removeprefix("user-"))
            self._remove_strays(owner, Cgroup(user), user.name, living)

    def _remove_strays(self, owner: int, base: Cgroup, path: str, living: set[str]) -> None:
        for node in base.children():
            if node.path.name == "monitor":
                continue
            below = f"{path}/{node.path.name}"
            if below in living:
                self._remove_strays(owner, node.child("child"), f"{below}/child", living)
            else:
                node.kill()
                self.remove(owner, node)
