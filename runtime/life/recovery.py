"""Taking over what an earlier daemon left: agents that live, ends that were begun, strays.

The store holds the state between two runs, and of paused agents: the next daemon asserts due
restarts and frozen cgroups again. A run whose record has an unknown version counts as lost.

A reboot ends what runs, and nothing that does not: agents of mode ``turn``, and what waits to run,
go on in new cells with their messages, waits, work and children, if what owns them does. What has
``restart=always``, or is declared to start, is started again, with its messages.

Under systemd the agents' cgroup is a unit of its own: so the daemon's unit can be restarted beside
living agents, and the agents' unit can be stopped without a daemon.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

from runtime import crashpoints
from runtime.agents import visits
from runtime.agents.parts import Agents
from runtime.cell import networks
from runtime.cell.port import Host, LiveCell, Part, about
from runtime.errors import CtxError
from runtime.life.beginning import Beginner
from runtime.life.conclusions import end_message
from runtime.life.ending import Ender
from runtime.records.change import RUNTIME, Change
from runtime.records.items import MessageStatus, TaskCue, TaskStatus
from runtime.records.lifecycle import Cue, Status
from runtime.records.model import Agent, Outcome
from runtime.records.run import RunCue

log = logging.getLogger("ctxd.recovery")

_REBOOT: Final = "reboot"


class Recovery(Part):
    """Adopts what lives, and brings back what goes on after a reboot."""

    def __init__(
        self,
        host: Host,
        ender: Ender,
        beginner: Beginner,
        make_live_cell: Callable[[Agent], LiveCell],
    ) -> None:
        super().__init__(host)
        self._ender = ender
        self._beginner = beginner
        self._make_live_cell = make_live_cell

    def adopt(self, declared: Collection[str]) -> list[LiveCell]:
        """Adopts what lives, and records what ended with the machine, before a daemon serves.
        ``declared`` names agents that are started with the machine."""
        agents = self._agents
        agents.births.take_back()
        agents.tasks.take_back()
        for agent in agents.registry:
            family, over = agents.registry.family(agent), agent.status is Status.DEAD
            agents.wait_files.create(agent.wait_token, agent.owner, family, over=over)
            for task in agents.tasks.known(agent):
                agents.tasks.block(agent, task)
            for ask in agents.asks.known(agent):
                agents.asks.block(agent, ask)
            if over:
                self._ender.release(agent)
        adopted: list[Agent] = []
        lost: list[Agent] = []
        for agent in agents.registry:
            if agent.index in self._live_cells:
                continue  # this daemon has started it: requests are served already
            if agent.live:
                # what is on another machine has not ended with this one
                there = agent.away or agent.cell.boot == self._port.boot
                (adopted if there else lost).append(agent)
        for agent in sorted(lost, key=agents.registry.depth, reverse=True):
            if self._goes_on(agent, declared) and self._bring_back(agent):
                adopted.append(agent)
            elif any(each.away and each.live for each in agents.registry.descendants(agent)):
                self._wait_for_others(agent)
                adopted.append(agent)
            else:
                record_lost(agents, agent, Cue.REBOOTED, _REBOOT)
            crashpoints.reach("adopt.lost")
        return list(map(self._make_live_cell, adopted))

    def _wait_for_others(self, agent: Agent) -> None:
        """An agent that the machine took along ends once what it owns elsewhere has ended."""
        change = Change()
        _end_run(change, self._agents, agent, _REBOOT, last=True)
        change.run(agent, RunCue.OVER)
        if agent.status is Status.STOPPING:
            self._agents.journal.note(change)
        else:
            self._ender.end(agent, Outcome.INTERRUPTED, _REBOOT, change=change)

    def _goes_on(self, agent: Agent, declared: Collection[str]) -> bool:
        """Whether an agent that the machine took along begins again."""
        above = self._agents.registry.ancestors(agent)
        if any(each.status is Status.STOPPING or each.is_guest for each in (*above, agent)):
            return False
        if not all(each.how.run_per_message for each in above):
            return False
        if agent.how.run_per_message or agent.waits_to_run or agent.name in declared:
            return True
        return agent.restart == "always" and agent.parent is None

    def _bring_back(self, agent: Agent) -> bool:
        """Records that an agent starts again, or still waits to; False if that cannot be."""
        agents, ended = self._agents, _end_line(agent, _REBOOT)
        change = Change()
        try:
            if agent.waits_to_run:
                cell = replace(agent.cell, boot=self._port.boot)
                change.set(agent, cell=cell, restart_up=0.0)  # on by the wall clock
            else:
                _end_run(change, agents, agent, _REBOOT, last=False)
                for task in agents.tasks.unfinished(change, agent):
                    if task.status is not TaskStatus.MADE:
                        agents.tasks.end(change, agent, task, TaskCue.INTERRUPTED, reason=_REBOOT)
                change.run(agent, RunCue.OVER)
                visits.end(change, agent)
                change.set(agent, frozen=False)
                self._beginner.add_start(change, agent)
                change.move(agent, Cue.RETURNING, reason=_REBOOT)
                self._tell_log(agent, ended)
            agents.journal.note(change)
        except (CtxError, OSError) as error:
            log.error("%s: cannot start it again: %s", agent.name, error, extra=about(agent))
            return False
        return True


def remove_strays(host: Host) -> None:
    """Cgroups and files of no agent: left by a crash between two steps."""
    agents = host.agents
    agents.removals.remove_strays()
    living = {agent.cell.cgroup for agent in agents.registry if agent.cell.cgroup}
    known = {
        each.facts.key for live_cell in host.live_cells.values() for each in live_cell.programs()
    }
    host.port.remove_strays(living, known)
    strays = [
        path
        for path in host.places.networks.iterdir()
        if path.name not in known and not path.name.startswith(networks.OWNER)
        and not agents.registry.is_paying(path.name)
    ]  # fmt: skip
    change = Change(by=RUNTIME)
    networks.keep(change, agents.registry, host.places.networks, [path.name for path in strays])
    if change.agents:
        agents.journal.note(change)
    for path in strays:
        path.unlink(missing_ok=True)


def record_lost(agents: Agents, agent: Agent, cue: Cue, reason: str) -> None:
    """Records the end of an agent of whose program nothing is known any more."""
    change = Change()
    for member in reversed(agents.registry.descendants(agent)):
        if member.status is Status.NEW:
            agents.ends.record(change, member, Cue.OWNER_ENDING, Outcome.CANCELLED, "parent_dead")
    _end_run(change, agents, agent, reason, last=True)
    change.set(agent, last_line=_end_line(agent, reason))
    agents.ends.record(change, agent, cue, Outcome.INTERRUPTED, reason)
    agents.journal.note(change)


def _end_run(change: Change, agents: Agents, agent: Agent, reason: str, *, last: bool) -> None:
    """The run at hand is lost, and the message that it worked on; with the ``last`` one its agent
    is over."""
    if agent.run.pid:
        change.tell(agent, "run.end", run=agent.run.id, outcome=Outcome.INTERRUPTED, reason=reason)
    agents.asks.run_over(change, agent)
    message = agents.messages.current(agent)
    if message is not None:
        failed = MessageStatus.FAILED
        end_message(change, agents, agent, message, failed, reason=reason, last=last)


def _end_line(agent: Agent, reason: str) -> str:
    return f"{agent.run.id or 'it'} ended: {Outcome.INTERRUPTED} {reason}"
