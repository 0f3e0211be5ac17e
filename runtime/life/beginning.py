"""The start of an agent: what it needs, what it fixes, and the first message."""

from __future__ import annotations

import secrets
from typing import Final

from runtime.agents import visits
from runtime.agents.births import orphaned
from runtime.agents.forking import inherit
from runtime.agents.messages import provenance_of_handoff, sender_of_handoff
from runtime.agents.parts import Agents
from runtime.authority.facts import Facts
from runtime.authority.guard import of_move, unless
from runtime.caller import CONTROLLERS, Caller, Role
from runtime.cell import cell
from runtime.errors import WrongStateError
from runtime.ids import NO_RUN, BootId, RunId
from runtime.kernel import clock
from runtime.life.conclusions import begin_run, renew_said
from runtime.life.elsewhere import Elsewhere
from runtime.life.turns import has_turn, last_place
from runtime.life.worktrees import Worktrees
from runtime.records.change import Change
from runtime.records.lifecycle import Cue, Status
from runtime.records.model import Agent
from runtime.records.run import Cell
from runtime.records.visits import Visit
from runtime.texts import mounts, policy
from runtime.texts.names import quote

#: the reason of what waits for its turn
QUEUED: Final = "queued"
#: what a first message is made of
_FIRST_DOCUMENTS: Final = ("inherited", "handoff")


@unless("its parent waits for its next run, or for its turn", WrongStateError)
def _between(facts: Facts, caller: Caller, agent: Agent) -> str:
    parent = facts.registry.parent_of(agent) if agent.owned else None
    if parent is None or not parent.waits_to_run:
        return ""
    if parent.waits_its_turn:
        return f"the parent {quote(parent.name)} waits for its turn: start it when that runs"
    return f"the parent {quote(parent.name)} waits for its next run: try again later"


@unless("what it would run in is paused", WrongStateError)
def _frozen(facts: Facts, caller: Caller, agent: Agent) -> str:
    for owner in facts.registry.ancestors(agent):
        if owner.status is Status.PAUSED:
            return f"{quote(owner.name)}, which it would run in, is paused: resume it first"
    return ""


#: who starts an agent
STARTING: Final = of_move(CONTROLLERS | Role.STARTER, Cue.START, orphaned, _between, _frozen)


class Beginner:
    """Records that an agent starts; the supervisor, which is told, makes its cell."""

    def __init__(
        self, agents: Agents, worktrees: Worktrees, boot: BootId, elsewhere: Elsewhere
    ) -> None:
        self._agents = agents
        self._boot = boot
        self._worktrees = worktrees
        self._elsewhere = elsewhere

    def begin(self, agent: Agent, visit: Visit | None = None) -> None:
        """Commits a start; the guard (``STARTING``) was asked. With a ``visit`` somebody looks at
        its terminal from then on; who would hang it up takes the place of a window.

        ``QuotaError``, or the error of a value that was written before and does not fit now.
        """
        parent = self._agents.registry.parent_of(agent)
        self._agents.upkeep.check_agent(agent)
        self._agents.authority.check_start(agent)
        cell.program(agent)
        self._worktrees.check_start(agent)
        node = self._elsewhere.choose(agent) if agent.placement else ""
        change = Change()
        if parent is not None and not agent.owned:
            # it keeps what its parent has now, even if the parent loses it later
            bound = self._agents.authority.effective_policy(parent)
            table = self._agents.authority.effective_mounts(parent)
            change.set(
                agent,
                bound_policy=policy.render(policy.as_bound(bound), agent.label),
                bound_mount=mounts.render(table),
                bound_root=cell.has_own_root(self._agents, parent),
            )
        if agent.context == "fork" and parent is not None:
            inherited = inherit(self._agents, parent, agent)
            self._agents.documents.write(agent, "inherited.md", inherited.markdown.encode())
            self._agents.documents.write(agent, "inherited.json", inherited.json.encode())
        turn = has_turn(self._agents.registry, agent)
        self._add_handoff(change, agent)
        if turn:
            change.set(agent, node=node)
        if turn and node and not self._can_be_told(agent, node):
            change.set(agent, cell=Cell(boot=self._boot))
            change.move(agent, Cue.START)
        elif turn:
            self.add_start(change, agent)
            change.move(agent, Cue.START)
        else:
            place = last_place(self._agents.registry, agent)
            change.set(agent, queued=place, reason=QUEUED, cell=Cell(boot=self._boot))
            change.move(agent, Cue.START, reason=QUEUED)
        if visit is not None:
            visits.come(change, agent, None, visit)
            if visit.hangs_up:
                change.set(agent, window="")
        self._agents.journal.commit(change)

    def _can_be_told(self, agent: Agent, node: str) -> bool:
        """Whether all is there that its node has to be told of an agent, and can be now."""
        return agent.workspace != "worktree" and self._elsewhere.is_ready(agent, node)

    def add_start(self, change: Change, agent: Agent) -> None:
        """Adds that a cell is made, here or at its node; in mode ``once`` the run has no other."""
        if agent.queued:
            change.set(agent, queued=0, reason="")
        node = change.peek_agent(agent, "node")
        trees = {} if node else self._agents.authority.trees(agent)[0]
        run = NO_RUN
        if agent.how.holds_cell:
            renew_said(change, self._agents, agent)
        else:
            run = begin_run(change, self._agents, agent)
        cell = Cell(
            id=run or RunId(f"cell-{secrets.token_hex(4)}"),
            boot=self._boot,
            cgroup="" if node else self._agents.registry.node_path(agent),
        )
        now = clock.wall()
        change.set(agent, trees=trees, cell=cell, started=now, started_up=clock.up())
        self._agents.tasks.child_started(change, agent, now)
        told = {"run": run, "node": node}
        change.tell(agent, "agent.start", **{key: value for key, value in told.items() if value})
        if node:
            self._elsewhere.add_start(change, agent, run)

    def _add_handoff(self, change: Change, agent: Agent) -> None:
        """The delegated task is the first message of an agent that takes messages; of a guest it
        is still to come."""
        if not agent.how.holds_cell or agent.is_guest:
            return
        text = first_text(self._agents, agent)
        if not text.strip():
            return
        self._agents.messages.queue_first(
            change,
            agent,
            text=text,
            sender=sender_of_handoff(agent),
            provenance=provenance_of_handoff(agent),
        )


def first_text(agents: Agents, agent: Agent) -> str:
    """The text of the first message, of what an agent was given."""
    parts = [agents.documents.read(agent, f"{name}.md") for name in _FIRST_DOCUMENTS]
    return b"\n".join(part for part in parts if part).decode(errors="replace")
