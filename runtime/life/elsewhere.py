"""Agents whose processes are on another machine, as those who lead agents see them.

Such an agent has a live cell as any other, which is empty: it waits for its turn, is marked and is
recorded in the same way. What differs is asked of ``Elsewhere``, by which
``runtime.peers.leading`` tells the other machine.
"""

from __future__ import annotations

from pathlib import Path

from runtime.agents.bundles import Left
from runtime.cell.port import LiveCell
from runtime.errors import UnsupportedError
from runtime.ids import NO_RUN, RunId
from runtime.life.ending import Ender
from runtime.records.change import Change
from runtime.records.model import Agent


class Elsewhere:
    """Other machines. Here there are none."""

    def lead_by(self, ender: Ender) -> None:
        """From now on ``ender`` ends here whatever ends there."""

    def choose(self, agent: Agent) -> str:
        """The node for an agent that is to start now; ``CtxError`` if there is none for it."""
        raise UnsupportedError("no other machine is configured (nodes)")

    def is_ready(self, agent: Agent, node: str) -> bool:
        """Whether a node can be told of an agent at once."""
        return False

    async def reach(self, live_cell: LiveCell) -> None:
        """Until the node of a starting agent can be told of it, or the agent ends instead;
        ``CtxError`` with the reason if it cannot be reached."""

    def add_start(self, change: Change, agent: Agent, run: RunId) -> None:
        """Adds that an open node is told of an agent, and to start it."""

    def say(self, agent: Agent, verb: str, run: RunId = NO_RUN) -> None:
        """Tells the host of an agent a verb that changes nothing until that says so; of one about
        a run, which. ``AgainError`` if it was told so much that it has not done."""

    def switch(self, agent: Agent, name: str) -> None:
        """Tells it to switch to a session, or to make it; ``DeniedError`` if that is another
        incarnation's."""

    def ask_usage(self, agent: Agent) -> None:
        """Has the host of an agent that is away tell what that uses, for a while."""

    async def follow(self, live_cell: LiveCell) -> None:
        """Until nothing of an agent is left there, as far as can be known."""

    def left_of(self, agent: Agent) -> tuple[Left, Path | None]:
        """Tells what an agent that was placed elsewhere has left in its worktree there, as far as
        that is known, and the pack of it if all of that is here."""
        return Left(), None

    def recovered(self) -> None:
        """All that lived when the daemon started is taken over."""

    async def give_up(self) -> None:
        """At the end of the daemon: does not wait for nodes longer than agents may take."""
