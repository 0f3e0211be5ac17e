"""Holding up agents that fill a durable tree, until its owner has room again.

Where no quota of the filesystem bounds a tree, it is measured while it grows. Whoever may write
one that grew over its owner's account is paused, of whichever owner, and goes on by itself. Git
that works beside an agent of another machine, before it runs or after, is ended.

The daemon sees nobody write a durable tree, so this is a soft bound. The agent's record says for
which tree it was paused (``Agent.no_room``), so that the next daemon has it go on, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import trio

from runtime.agents.parts import Agents
from runtime.cell.port import about
from runtime.records.change import RUNTIME, Change
from runtime.records.lifecycle import Cue, Status
from runtime.records.model import Agent
from runtime.texts.names import quote

log = logging.getLogger("ctxd.room")

_PAUSED: Final = frozenset({Status.READY, Status.IDLE, Status.BUSY})
_GREW: Final = "grew over the disk account of its owner (owner_disk_max)"
#: agents that are looked at before others have their turn in the loop
_AT_ONCE: Final = 32


class Room:
    """Pauses agents, and has them go on. ``give_up`` ends what is done beside one."""

    def __init__(self, agents: Agents, give_up: Callable[[Agent, str], None]) -> None:
        self._agents = agents
        self._give_up = give_up
        # of those that an earlier daemon paused, until it is measured anew
        agents.disk.full |= {agent.no_room for agent in agents.registry if agent.no_room}
        agents.disk.grows = self._may_any_grow

    def _may_any_grow(self) -> bool:
        """Asked often: so by what an agent has, and not by where that leads."""
        return any(
            agent.trees or agent.mount or agent.root or agent.homedir == "durable" or agent.is_guest
            for agent in self._agents.registry
            if agent.live
        )

    async def run(self) -> None:
        while True:
            await self._agents.disk.measured.wait_changed()
            for number, agent in enumerate(tuple(self._agents.registry)):
                if number % _AT_ONCE == 0:
                    await trio.lowlevel.checkpoint()
                self._judge(agent)

    def _judge(self, agent: Agent) -> None:
        full = self._agents.disk.full
        if full and (agent.status in _PAUSED or agent.is_guest):
            tree = min(self._agents.authority.written_trees(agent) & full, default="")
            if tree and agent.status in _PAUSED:
                self._pause(agent, tree)
            elif tree:
                self._give_up(agent, f"the tree {_shown(tree)} {_GREW}")
        elif agent.no_room and agent.no_room not in full:
            self._go_on(agent)

    def _pause(self, agent: Agent, tree: str) -> None:
        change = Change(by=RUNTIME)
        change.set(agent, no_room=tree)
        change.move(agent, Cue.PAUSE, reason=f"no_room: {_shown(tree)}")
        self._agents.journal.note(change)
        why = about(agent)
        log.warning("%s is paused: %s", quote(agent.name), describe(agent), extra=why)

    def _go_on(self, agent: Agent) -> None:
        change = Change(by=RUNTIME)
        change.set(agent, no_room="")
        if agent.status is Status.PAUSED:
            change.move(agent, Cue.RESUME)
        elif agent.status is Status.STARTING:
            change.set(agent, paused_from="")  # it comes back after a reboot
        self._agents.journal.note(change)


def _shown(tree: str) -> str:
    """A tree as users know it: a space lies in a directory of its own."""
    kind, _, name = tree.partition("/")
    return f"shared/{name.partition('/')[0]}" if kind == "space" else tree


def describe(agent: Agent) -> str:
    """Why it is paused, in a sentence; empty if it is not for want of room."""
    if not agent.no_room or agent.status is not Status.PAUSED:
        return ""
    return (
        f"the tree {_shown(agent.no_room)}, which it may write, {_GREW}: remove files there; then "
        "it goes on by itself"
    )
