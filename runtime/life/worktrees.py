"""Worktrees of children over their lives: made as a part of their start, taken over when they
end or when it is asked for, taken away after the handle that their parent has of them
(``runtime.agents.workspace`` knows git). Nothing here is waited for by a request.

A start answers ``starting``, and git is part of it. An end is recorded after the child's commits
were taken over, at most a minute later. If the parent or an ancestor is ending or paused, the end
is recorded at once and the worktree kept. The parent's record lists what is to be removed, and the
daemon works through it in the background. A child's slow git delays its own end, and otherwise
only the ends of its owners.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

import trio

from runtime import crashpoints
from runtime.agents import workspace
from runtime.agents.workspace import RunInside, Worktree, WorktreeState
from runtime.cell import cell
from runtime.cell.port import Host, Part, guarded
from runtime.errors import CtxError, MalformedError, TakenError, UnsupportedError, WrongStateError
from runtime.ids import AgentIndex
from runtime.kernel.daemonlog import because_of
from runtime.kernel.lanes import Lanes
from runtime.records.change import Change, Subscriber
from runtime.records.items import Task
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.texts.names import quote

log = logging.getLogger("ctxd.worktrees")

#: a parent's view may hold up git; no end waits longer
_SECONDS: Final = 60.0
#: at a time in one parent's cell; what waits for its turn has the same bound
_AT_A_TIME: Final = 4
#: what a failed start calls these: it is said too late for an errno
_NAMES: Final = (
    (MalformedError, "EINVAL"),
    (TakenError, "EEXIST"),
    (UnsupportedError, "EOPNOTSUPP"),
    (WrongStateError, "EBUSY"),
)


@dataclass(slots=True, kw_only=True, eq=False)
class _Care:
    """The work for one child: it ends when an agent of ``above`` cannot help any more."""

    scope: trio.CancelScope
    above: frozenset[AgentIndex]
    why: str = ""


class Worktrees(Part, Subscriber):
    """Has git make them, and take over what children committed, in their parents' cells."""

    def __init__(self, host: Host, run: RunInside) -> None:
        super().__init__(host)
        self._run = run
        self._gather, self._carry = (
            str(host.places.program(name)) for name in ("gather", "carry")
        )
        self._cares: list[_Care] = []
        #: one thing at a time for each child, and so many in the cell of one parent
        self._children = Lanes[int]()
        self._parents = Lanes[AgentIndex](_AT_A_TIME)
        self._discarding: set[AgentIndex] = set()
        self._agents.journal.subscribe(self)

    # Subscriber

    def agent_changed(self, index: AgentIndex, names: Iterable[str]) -> None:
        agent = self._agents.registry.get(index)
        if agent is None:
            return
        if "status" in names:
            why = _unable(agent)
            for care in self._cares:
                if why and index in care.above and not care.scope.cancel_called:
                    care.why = why
                    care.scope.cancel()
        if agent.discards and index not in self._discarding and not self._unable(agent):
            self._discarding.add(index)
            self._nursery.start_soon(self._discard_all, agent)

    def resume(self) -> None:
        """Goes on with what an earlier daemon did not get done."""
        for agent in self._agents.registry:
            self.agent_changed(agent.index, ())
        for task in self._agents.items.all(Task):
            child = self._agents.results.child_of(task)
            if child is None or child.live or child.worktree is None:
                continue
            if Worktree.load(child.worktree).state in (WorktreeState.OPEN, WorktreeState.FETCHING):
                self._keep(child, "ctxd ended while it took over the commits")

    # making

    def check_start(self, agent: Agent) -> None:
        """Checks what can be told of a start without git; ``CtxError``."""
        if agent.workspace != "worktree":
            return
        workspace.check_possible(agent)
        workspace.check_branch(agent.name)
        if agent.worktree is not None and agent.worktree_made:
            return
        parent = self._agents.registry.parent_of(agent)
        assert parent is not None
        if cell.workspace(self._agents, parent) is None:
            raise MalformedError(
                f"workspace=worktree: {quote(parent.name)} has no workspace: "
                "write explicit_root:/PATH to its workspace before its start"
            )

    async def make(self, agent: Agent) -> None:
        """Makes what the start of a child needs that wants a worktree.

        ``CtxError`` if it cannot have one, or not in time; the sentence begins with what a
        request would have been told.
        """
        if agent.workspace != "worktree":
            return
        try:
            if agent.worktree is None or not agent.worktree_made:
                await self._make(agent)
            else:
                found = Worktree.load(agent.worktree)
                self._put(agent, replace(found, state=WorktreeState.OPEN, reason=""))
        except CtxError as error:
            names = [name for cls, name in _NAMES if isinstance(error, cls)]
            raise type(error)(": ".join([*names[:1], error.sentence])) from None

    async def _make(self, agent: Agent) -> None:
        parent = self._agents.registry.parent_of(agent)

        async def steps() -> None:
            assert parent is not None
            if agent.worktree is not None:  # a daemon died while it was made
                await workspace.discard(self._run, parent, Worktree.load(agent.worktree))
            await self._discard_before(parent, agent.name)
            root = cell.workspace(self._agents, parent)
            assert root is not None
            worktree = await workspace.plan(self._run, parent, agent, root)
            self._agents.journal.update(agent, worktree=worktree.dump())
            crashpoints.reach("worktree.planned")
            covered = self._agents.authority.covered(agent)
            worktree = await workspace.add(self._run, parent, worktree, self._carry, covered)
            crashpoints.reach("worktree.made")
            self._agents.journal.update(agent, worktree=worktree.dump(), worktree_made=True)
            self._put(agent, worktree)

        if why := await self._care(parent, agent.index, steps, starting=agent):
            raise WrongStateError(f"cannot make its worktree: {why}")

    # taking over

    async def take_over(self, agent: Agent) -> None:
        """Before the end of a child is recorded, once nothing of it runs any more."""
        if agent.worktree is None:
            return
        worktree = Worktree.load(agent.worktree)
        if not agent.worktree_made:
            self._abandon(agent, worktree)
        else:
            await self._take(agent, ended=True)

    def fetch(self, task: Task) -> None:
        """Has the commits of a handle's child taken over, now; the guard (``FETCHING``) was asked.

        ``WrongStateError`` if the parent's side cannot do it now.
        """
        child = self._agents.results.child_of(task)
        parent = self._agents.registry.get(task.agent)
        assert child is not None and child.worktree is not None  # or the guard had refused it
        why = "its parent was removed" if parent is None else self._unable(parent)
        if why:
            raise WrongStateError(f"the worktree of {quote(task.name)} cannot be fetched: {why}")
        worktree = Worktree.load(child.worktree)
        fetching = replace(worktree, state=WorktreeState.FETCHING, reason="")
        self._agents.journal.commit(self._change(child, fetching))
        self._nursery.start_soon(self._fetch, child)

    async def _fetch(self, child: Agent) -> None:
        with guarded(child):
            await self._take(child, ended=child.status is Status.DEAD)

    async def _take(self, child: Agent, *, ended: bool) -> None:
        parent = self._agents.registry.parent_of(child)

        async def steps() -> None:
            assert parent is not None and child.worktree is not None
            worktree = Worktree.load(child.worktree)
            self._put(child, replace(worktree, state=WorktreeState.FETCHING, reason=""))
            found = await workspace.take(
                self._run,
                parent,
                worktree,
                self._gather,
                settled=self._settled(child) if ended else None,
            )
            crashpoints.reach("worktree.fetched")
            self._put(child, found)

        if why := await self._care(parent, child.index, steps):
            self._keep(child, why)

    def _settled(self, child: Agent) -> list[str]:
        """Worktrees of its own children that hold nothing more: they may go with its own."""
        found = [str(values["name"]) for values in child.discards]
        for each in self._agents.registry.children(child):
            if each.worktree is None:
                continue
            if Worktree.load(each.worktree).state is WorktreeState.FETCHED:
                found.append(each.name)
        return found

    def _keep(self, child: Agent, why: str) -> None:
        assert child.worktree is not None
        self._put(child, Worktree.load(child.worktree).kept(why))

    def _put(self, child: Agent, worktree: Worktree) -> None:
        """Notes a fact, which a full disk does not change."""
        self._agents.journal.note(self._change(child, worktree))

    def _change(self, child: Agent, worktree: Worktree) -> Change:
        change = Change()
        change.set(child, worktree=worktree.dump())
        parent = self._agents.registry.parent_of(child)
        if parent is not None:
            task = self._agents.items.named(parent.index, Task, child.name)
            if task is not None and task.child == child.index:
                change.put(task, worktree=worktree.state.value)
        return change

    # taking away

    def _abandon(self, agent: Agent, worktree: Worktree) -> None:
        """Gives up a worktree that was not made to its end, and holds nothing."""
        change = Change()
        change.set(agent, worktree=None)
        parent = self._agents.registry.parent_of(agent)
        if parent is not None:
            change.set(parent, discards=(*parent.discards, worktree.dump()))
        self._agents.journal.note(change)

    async def _discard_all(self, parent: Agent) -> None:
        """In the parent's cell, one after the other, as long as that goes on; what was not
        done stays in the list until the parent has a cell again."""
        try:
            with guarded(parent):
                tried: list[dict[str, object]] = []
                while left := [each for each in parent.discards if each not in tried]:
                    tried.append(left[0])
                    await self._discard(parent, Worktree.load(left[0]))
        finally:
            self._discarding.discard(parent.index)

    async def _discard_before(self, parent: Agent, name: str) -> None:
        """Discards the worktree of an earlier child of this name, whose place and branch are
        needed."""
        for values in parent.discards:
            if values["name"] == name:
                await self._discard_one(parent, Worktree.load(values))

    async def _discard(self, parent: Agent, worktree: Worktree) -> None:
        async def steps() -> None:
            if worktree.dump() in parent.discards:
                await self._discard_one(parent, worktree)

        try:
            why = await self._care(parent, -parent.index, steps)
        except (CtxError, OSError) as error:
            why = str(error)
        if why:
            extra = because_of(parent.owner, agents=[parent.name])
            what = f"what is left of {worktree.name} stays: {why}"
            log.warning("%s: %s", parent.name, what, extra=extra)

    async def _discard_one(self, parent: Agent, worktree: Worktree) -> None:
        await workspace.discard(self._run, parent, worktree)
        crashpoints.reach("worktree.removed")
        values = worktree.dump()
        rest = tuple(each for each in parent.discards if each != values)
        change = Change()
        change.set(parent, discards=rest)
        self._agents.journal.note(change)

    # whether there is anybody to do it

    def _unable(self, parent: Agent) -> str:
        """Why nothing can run in a parent's cell now, if so."""
        for agent in (parent, *self._agents.registry.ancestors(parent)):
            if why := _unable(agent):
                return why
        return ""

    async def _care(
        self,
        parent: Agent | None,
        key: int,
        steps: Callable[[], Awaitable[None]],
        *,
        starting: Agent | None = None,
    ) -> str:
        """Does something in a parent's cell, one thing at a time for each key; else why not.

        It is left when the time is over, when the parent cannot any more, or when the child
        that is starting is to end.
        """
        if parent is None:
            return "its parent was removed"
        if why := self._unable(parent):
            return why
        above = {parent.index, *(each.index for each in self._agents.registry.ancestors(parent))}
        if starting is not None:
            above.add(starting.index)
        with trio.move_on_after(_SECONDS) as scope:
            care = _Care(scope=scope, above=frozenset(above))
            self._cares.append(care)
            try:
                async with self._children.turn(key), self._parents.turn(parent.index):
                    await steps()
            finally:
                self._cares.remove(care)
        if scope.cancelled_caught:
            return care.why or f"git did not end within {_SECONDS:g} s"
        return ""


def _unable(agent: Agent) -> str:
    """Why an agent's cell is of no use, if so: it is its parent's side, or above that."""
    if agent.status is Status.PAUSED or agent.frozen:
        return f"{quote(agent.name)} is paused"
    if not agent.live:
        return f"{quote(agent.name)} has ended"
    if not agent.accepts_children:
        return f"{quote(agent.name)} is ending"
    if agent.waits_to_run:
        return f"{quote(agent.name)} is between two runs"
    return ""
