"""Taking over what an earlier daemon left: agents that live, ends that were begun, strays.

The store holds the state between two runs, and of paused agents: the next daemon asserts due
restarts and frozen cgroups again. A run whose record has an unknown version counts as lost. Under
systemd the agents' cgroup is a unit of its own: so the daemon's unit can be restarted beside
living agents, and the agents' unit can be stopped without a daemon.
"""

from __future__ import annotations

from collections.abc import Callable

from runtime import crashpoints
from runtime.agents.parts import Agents
from runtime.cell import networks
from runtime.cell.port import Host, LiveCell
from runtime.life.conclusions import end_message
from runtime.life.ending import Ender
from runtime.records.change import Change
from runtime.records.items import MessageStatus, Task
from runtime.records.lifecycle import Cue, Status
from runtime.records.model import Agent, Outcome


def adopt(host: Host, ender: Ender, make_live_cell: Callable[[Agent], LiveCell]) -> list[LiveCell]:
    """Adopts what lives, and records what ended with the machine, before a daemon serves."""
    agents = host.agents
    agents.births.take_back()
    agents.tasks.take_back()
    for agent in agents.registry:
        family = agents.registry.family(agent)
        agents.wait_files.create(agent.wait_token, agent.owner, family)
        for task in agents.items.of(agent.index, Task):
            if not task.child:
                agents.wait_files.create(task.wait_token, agent.owner, family)
                if task.over:
                    agents.wait_files.release(task.wait_token)
        if agent.status is Status.DEAD:
            ender.release(agent)
    adopted: list[LiveCell] = []
    lost = []
    for agent in agents.registry:
        if agent.index in host.live_cells:
            continue  # this daemon has started it: requests are served already
        if agent.live and agent.cell.boot == host.port.boot:
            adopted.append(make_live_cell(agent))
        elif agent.live:
            lost.append(agent)
    for agent in sorted(lost, key=agents.registry.depth, reverse=True):
        record_lost(agents, agent, Cue.REBOOTED, "reboot")
        crashpoints.reach("adopt.lost")
    return adopted


def remove_strays(host: Host) -> None:
    """Cgroups and files of no agent: left by a crash between two steps."""
    agents = host.agents
    agents.removals.remove_strays()
    living = {agent.cell.cgroup for agent in agents.registry if agent.cell.cgroup}
    known = {
        each.facts.key for live_cell in host.live_cells.values() for each in live_cell.programs()
    }
    host.port.remove_strays(living, known)
    kept = {agent.incarnation for agent in agents.registry if agent.live}
    for path in host.places.networks.iterdir():
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
        end_message(change, agents, agent, message, failed, reason=reason, last=True)
    agents.ends.record(change, agent, cue, Outcome.INTERRUPTED, reason)
    agents.journal.note(change)
