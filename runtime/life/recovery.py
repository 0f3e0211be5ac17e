"""Taking over what an earlier daemon left: agents that live, ends that were begun, strays.

The store holds the state between two runs, and of paused agents: the next daemon asserts due
restarts and frozen cgroups again. A run whose record has an unknown version counts as lost. Under
systemd the agents' cgroup is a unit of its own: so the daemon's unit can be restarted beside
living agents, and the agents' unit can be stopped without a daemon.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from runtime import crashpoints
from runtime.agents.parts import Agents
from runtime.cell import networks, oldinputs
from runtime.cell.port import Host, LiveCell, Part
from runtime.life.conclusions import end_message
from runtime.life.ending import Ender
from runtime.life.following import Inside
from runtime.life.worktrees import Worktrees
from runtime.records.change import Change
from runtime.records.items import MessageStatus, Task
from runtime.records.lifecycle import Cue, Status
from runtime.records.model import Agent, Outcome

_SETTLE_SECONDS: Final = 10.0


class Recovery(Part):
    """The work of a daemon before it serves.

    ``make_live_cell`` makes what is known of an agent's programs, ``live`` leads them, and
    ``restore`` freezes or thaws them as the record says.
    """

    def __init__(
        self,
        host: Host,
        *,
        ender: Ender,
        inside: Inside,
        worktrees: Worktrees,
        make_live_cell: Callable[[Agent], LiveCell],
        live: Callable[[LiveCell], None],
        restore: Callable[[Agent], None],
    ) -> None:
        super().__init__(host)
        self._host = host
        self._ender = ender
        self._inside = inside
        self._worktrees = worktrees
        self._make_live_cell = make_live_cell
        self._live = live
        self._restore = restore

    def adopt(self) -> list[LiveCell]:
        """Adopts what lives, and records what ended with the machine."""
        self._agents.births.take_back()
        self._agents.tasks.take_back()
        for agent in self._agents.registry:
            family = self._agents.registry.family(agent)
            self._agents.wait_files.create(agent.wait_token, agent.owner, family)
            for task in self._agents.items.of(agent.index, Task):
                if not task.child:
                    self._agents.wait_files.create(task.wait_token, agent.owner, family)
                    if task.over:
                        self._agents.wait_files.release(task.wait_token)
            if agent.status is Status.DEAD:
                self._ender.release(agent)
        adopted: list[LiveCell] = []
        lost = []
        for agent in self._agents.registry:
            if agent.index in self._live_cells:
                continue  # this daemon has started it: requests are served already
            if agent.live and agent.cell.boot == self._port.boot:
                adopted.append(self._make_live_cell(agent))
            elif agent.live:
                lost.append(agent)
        for agent in sorted(lost, key=self._agents.registry.depth, reverse=True):
            record_lost(self._agents, agent, Cue.REBOOTED, "reboot")
            crashpoints.reach("adopt.lost")
        return adopted

    async def run(self, adopted: list[LiveCell]) -> None:
        """Follows what lives, and goes on ending what was being ended.

        Returns when what has ended meanwhile is recorded, and what lives can be spoken to.
        """
        for live_cell in adopted:
            self._inside.end_left(live_cell)
        await oldinputs.take_over(self._host, adopted)
        gone = []
        for live_cell in adopted:
            if live_cell.agent.status is not Status.STOPPING:
                self._restore(live_cell.agent)
            # a daemon that died while it ended a program may have left that frozen
            for execution in live_cell.programs():
                self._port.thaw(execution.leaf)
            # nothing was launched if no monitor has begun a record: it is done now
            is_new = live_cell.agent.status is Status.STARTING and not live_cell.facts.exist()
            if not is_new and not live_cell.node.populated():
                gone.append(live_cell)
            self._live(live_cell)
        crashpoints.reach("adopt.led")
        for agent in (live_cell.agent for live_cell in adopted):
            if agent.status is Status.STOPPING:
                parent = self._agents.registry.parent_of(agent)
                if parent is None or parent.status is not Status.STOPPING or not agent.owned:
                    self._ender.lead(agent)
        with trio.move_on_after(_SETTLE_SECONDS):
            for live_cell in gone:
                await live_cell.wait_over()
            for live_cell in adopted:
                await live_cell.wait_reachable()
        crashpoints.reach("adopt.ended")
        self._remove_strays()
        self._worktrees.resume()
        crashpoints.reach("adopt.cleaned")

    def _remove_strays(self) -> None:
        """Cgroups and files of no agent: left by a crash between two steps."""
        self._agents.removals.remove_strays()
        living = {agent.cell.cgroup for agent in self._agents.registry if agent.cell.cgroup}
        known = {
            each.facts.key
            for live_cell in self._live_cells.values()
            for each in live_cell.programs()
        }
        self._port.remove_strays(living, known)
        kept = {agent.incarnation for agent in self._agents.registry if agent.live}
        for path in self._places.networks.iterdir():
            if path.name not in known | kept and not path.name.startswith(networks.OWNER):
                path.unlink(missing_ok=True)


def record_lost(agents: Agents, agent: Agent, cue: Cue, reason: str) -> None:
    """Records the end of an agent of whose program nothing is known any more."""
    change = Change()
    for member in reversed(agents.registry.descendants(agent)):
        if member.status is Status.NEW:
            agents.ends.record(change, member, Cue.OWNER_ENDING, Outcome.CANCELLED, "parent_dead")
    if agent.run.pid:
        change.tell(agent, "run.end", run=agent.run.id, outcome=Outcome.INTERRUPTED, reason=reason)
    message = agents.messages.current(agent)
    if message is not None:
        failed = MessageStatus.FAILED
        end_message(change, agents, agent, message, failed, reason=reason)
    agents.ends.record(change, agent, cue, Outcome.INTERRUPTED, reason)
    agents.journal.note(change)
