"""Agents of other machines leave something here, which goes when nobody has used it for long.

Their durable homes are for the next agent of their name, and a worktree that its lead has not taken
over whole is for those who look for it. Both are of the link's uid and on its account, and go
``placed_keep`` after they were used last; so does the copy of an agent whose lead is not heard of
any more. They go sooner if the lead, or an operator here, forgets the other machine.

When a tree was used last is the time of the directory above it, which is the daemon's own.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import trio

from runtime.cell.port import Host as Machine
from runtime.cell.port import Part, guarded
from runtime.records.lifecycle import Status
from runtime.records.model import Agent

log = logging.getLogger("ctxd.peers")

#: between two looks: a tenth of what is kept, but from and to
_FIRST_LOOK: Final = 10.0
_LAST_LOOK: Final = 3600.0
_AT_ONCE: Final = 1024


class Keeping(Part):
    """Looks after all that guests have left."""

    def __init__(self, host: Machine, take_away: Callable[[Agent], None]) -> None:
        super().__init__(host)
        self._take_away = take_away
        self._top = self._places.trees / "agent"
        self._thread = trio.CapacityLimiter(1)
        #: by owner and alias of a lead, lives of its agents that are forgotten; "" for all
        self._forgotten: dict[tuple[int, str], set[str]] = {}

    async def run(self) -> None:
        """For ever."""
        while True:
            keep = self._agents.settings.config.placed_keep
            await self.clear(time.time() - keep)
            await trio.sleep(min(max(keep / 10, _FIRST_LOOK), _LAST_LOOK))

    async def clear(self, before: float) -> None:
        """Takes away what was used last before a moment."""
        for agent in tuple(self._agents.registry):
            if agent.is_guest and agent.status is Status.DEAD and agent.ended < before:
                with guarded(agent):
                    if self._agents.registry.get(agent.index) is agent:
                        self._take_away(agent)
                await trio.lowlevel.checkpoint()
        for owner, name, used in await self._trees():
            if used < before and not self._is_used(name):
                log.info("removed what %s of uid %d had left here", name, owner)
                self._discard(owner, name)

    def _path(self, owner: int, name: str) -> Path:
        return self._top / f"{owner}/{name}"

    def _discard(self, owner: int, name: str) -> None:
        self._agents.trash.discard(self._path(owner, name), owner)
        self._agents.disk.look(owner)

    async def _trees(self, *users: str) -> list[tuple[int, str, float]]:
        """Owner and name of each tree of guests, of these users or of all, and when it was used
        last: in one thread, however many ask, and there may be very many trees."""

        def look() -> Iterator[tuple[int, str, float]]:
            for user in users or _entries(self._top):
                for name in _entries(self._top / user):
                    # no agent that is made here has such a name
                    if "@" in name and name[0] != ".":
                        with suppress(OSError):
                            yield int(user), name, (self._top / user / name).stat().st_mtime

        return await trio.to_thread.run_sync(lambda: list(look()), limiter=self._thread)

    def _is_used(self, name: str) -> bool:
        agent, _, incarnation = name.partition("~")
        found = self._agents.registry.named(agent)
        return found is not None and incarnation in ("", found.incarnation)

    def left(self, agent: Agent) -> None:
        """A guest was taken away: so is its worktree, unless that was made and is kept. What stays
        counts as used now."""
        worktree = f"{agent.name}~{agent.incarnation}"
        if not (agent.guest.get("kept") and agent.guest.get("unpacked")):
            self._discard(agent.owner, worktree)
        for name in (agent.name, worktree):
            with suppress(FileNotFoundError):
                os.utime(self._path(agent.owner, name))

    def forget(self, owner: int, alias: str, incarnation: str = "") -> None:
        """Takes away the worktree of one agent of a lead, or of none: all that nobody uses."""
        lives = self._forgotten.setdefault((owner, alias), set())
        if not lives:
            self._nursery.start_soon(self._forget, owner, alias)
        if len(lives) < _AT_ONCE:  # what else there is goes when it is old
            lives.add(incarnation)

    async def _forget(self, owner: int, alias: str) -> None:
        """Looks once for all that is forgotten meanwhile."""
        trees = await self._trees(str(owner))
        lives = self._forgotten.pop((owner, alias))
        for user, name, _ in trees:
            agent, _, life = name.partition("~")
            own = agent.rpartition("@")[2] == alias
            if own and not lives.isdisjoint(("", life)) and not self._is_used(name):
                self._discard(user, name)


def _entries(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
