"""Worktrees of children over their lives: made as a part of their start, taken over when they
end or when it is asked for, taken away after the handle that their parent has of them
(``runtime.agents.workspace`` knows git). Nothing here is waited for by a request.

A start answers ``starting``, and git is part of it. An end is recorded after the child's commits
were taken over, at most a minute later. If the parent or an ancestor is ending or paused, the end
is recorded at once and the worktree kept. The parent's record lists what is to be removed, and the
daemon works through it in the background. A child's slow git delays its own end, and otherwise
only the ends of its owners.

Of a child that is placed elsewhere, its start sends what its branch leads to, and its end takes
over what came back (``runtime.agents.bundles``). What did not come is kept there, and the reason
says where. An agent of another machine has git run in cells like its own, before its first program
and after its last.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Final

import trio

from runtime import crashpoints
from runtime.agents import bundles, workspace
from runtime.agents.bundles import Given, Left
from runtime.agents.gitcalls import FIRST, RunFiles
from runtime.agents.placing import check_here
from runtime.agents.workspace import Worktree, WorktreeState
from runtime.cell import cell
from runtime.cell.port import Host, Part, guarded
from runtime.errors import (
    CtxError,
    MalformedError,
    QuotaError,
    TakenError,
    TooLargeError,
    UnsupportedError,
    WrongStateError,
)
from runtime.ids import AgentIndex
from runtime.kernel.daemonlog import because_of
from runtime.kernel.lanes import Lanes
from runtime.life.elsewhere import Elsewhere
from runtime.records.change import Change, Subscriber
from runtime.records.items import Task
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.texts.names import quote

log = logging.getLogger("ctxd.worktrees")

#: a parent's view may hold up git; no end waits longer
_SECONDS: Final = 60.0
#: to make the repository of an agent of another machine, in its own cgroup
_UNPACK_SECONDS: Final = 300.0
#: at a time in one parent's cell; an end that waits for its turn has the same bound
_AT_A_TIME: Final = 4
#: what a failed start calls these: it is said too late for an errno
_NAMES: Final = (
    (MalformedError, "EINVAL"),
    (TakenError, "EEXIST"),
    (UnsupportedError, "EOPNOTSUPP"),
    (TooLargeError, "EFBIG"),
    (WrongStateError, "EBUSY"),
)


@dataclass(slots=True, kw_only=True, eq=False)
class _Care:
    """The work for one child: it ends when an agent of ``above`` cannot help any more. That beside
    an agent of another machine says which that is."""

    scope: trio.CancelScope
    above: frozenset[AgentIndex]
    beside: Agent | None = None
    why: str = ""

    def leave(self, why: str) -> None:
        if not self.scope.cancel_called:
            self.why = why
            self.scope.cancel()


class Worktrees(Part, Subscriber):
    """Has git make them, and take over what children committed, in their parents' cells."""

    def __init__(self, host: Host, run: RunFiles, elsewhere: Elsewhere) -> None:
        super().__init__(host)
        self._run = run
        self._elsewhere = elsewhere
        #: the number of the lease under which an agent of another machine may run now, 0 for none
        self.lease_of: Callable[[Agent], int] = lambda agent: 0
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
                if why and index in care.above:
                    care.leave(why)
        if agent.discards and index not in self._discarding and not self._unable(agent):
            self._discarding.add(index)
            self._nursery.start_soon(self._discard_all, agent)

    def give_up(self, agent: Agent, why: str) -> None:
        """Leaves what is done beside an agent of another machine."""
        for care in self._cares:
            if care.beside is agent:
                care.leave(why)

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
        if agent.workspace != "worktree" or agent.is_guest:
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
            if agent.is_guest:
                await self._unpack(agent)
            elif agent.worktree is None or not agent.worktree_made:
                await self._make(agent)
            else:
                found = await self._go_on(agent, Worktree.load(agent.worktree))
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
            worktree = replace(worktree, node=agent.node)
            self._agents.journal.update(agent, worktree=worktree.dump())
            crashpoints.reach("worktree.planned")
            covered = self._agents.authority.covered(agent)
            if agent.node:
                worktree = await self._send(parent, agent, worktree)
            else:
                worktree = await workspace.add(self._run, parent, worktree, self._carry, covered)
            crashpoints.reach("worktree.made")
            self._agents.journal.update(agent, worktree=worktree.dump(), worktree_made=True)
            self._put(agent, worktree)

        if why := await self._care(parent, agent.index, steps, starting=agent):
            raise WrongStateError(f"cannot make its worktree: {why}")

    async def _go_on(self, agent: Agent, worktree: Worktree) -> Worktree:
        """The worktree of an agent that goes on in it: of one at a node, what came from there."""
        parent = self._agents.registry.parent_of(agent)
        if bool(agent.node) != bool(worktree.node):
            made = f"for {worktree.node} and has no files here" if worktree.node else "here"
            raise WrongStateError(
                f"its worktree was made {made}: keep its placement, or remove "
                f"{quote(worktree.place, 300)} and the agent"
            )
        if not agent.node:
            return worktree

        async def steps() -> None:
            nonlocal worktree
            assert parent is not None
            worktree = await self._send(parent, agent, replace(worktree, node=agent.node))

        if why := await self._care(parent, agent.index, steps, starting=agent):
            raise WrongStateError(f"cannot send its worktree: {why}")
        return worktree

    async def _send(self, parent: Agent, agent: Agent, worktree: Worktree) -> Worktree:
        """Makes a worktree without files, unless it is there, and the pack that its node is
        sent."""
        most = self._agents.settings.config.artifact_max
        directory = bundles.made(self._agents, agent)
        self._agents.trash.discard(directory, agent.owner)
        send = partial(self._run, out=directory, most=most)
        if agent.worktree_made:
            worktree = await workspace.send_again(self._run, send, parent, worktree, most)
        else:
            worktree = await workspace.add(
                self._run, parent, worktree, self._carry, send=send, most=most
            )
        if bundles.size_of(directory / FIRST) != worktree.size:
            raise QuotaError(
                f"there is no room for the {worktree.size} bytes that its node is to be sent: "
                "see disk in the file usage of its owner"
            )
        return worktree

    # of agents of other machines

    async def _unpack(self, agent: Agent) -> None:
        """Makes the files of an agent of another machine, of what its lead has sent."""
        given, lease = Given(**agent.guest["worktree"]), self.lease_of(agent)
        come = partial(bundles.open_pack, bundles.came(self._agents, agent))
        why = await self._apart(
            agent,
            _UNPACK_SECONDS,
            partial(bundles.unpack, partial(self._run, open_input=come, lease=lease), agent, given),
        )
        if why:
            raise WrongStateError(why)
        crashpoints.reach("worktree.unpacked")
        if agent.status is Status.STARTING:
            self._note(agent, unpacked=True)

    async def _pack(self, agent: Agent) -> None:
        """Packs what an agent of another machine has committed, and notes what is left of it."""
        if not agent.guest.get("unpacked") or agent.guest.get("packed"):
            return
        config = self._agents.settings.config
        left, directory = Left(), bundles.made(self._agents, agent)
        self._agents.trash.discard(directory, agent.owner)

        async def steps() -> None:
            nonlocal left
            lease, most = self.lease_of(agent), config.artifact_max
            if not lease:
                raise WrongStateError("its lease was over")
            run = partial(self._run, out=directory, most=most, lease=lease)
            given, settled = Given(**agent.guest["worktree"]), self._settled(agent)
            left = await bundles.keep(run, agent, given, self._gather, settled, most)
            if bundles.size_of(directory / FIRST) != left.size:
                raise QuotaError("there was no room for a pack of what it committed")

        try:
            why = await self._apart(agent, _SECONDS, steps)
        except CtxError as error:
            why = error.sentence
        if why:
            left = Left(why=why)
        crashpoints.reach("worktree.packed")
        where = {key: agent.guest["left"][key] for key in ("path", "keep")}
        self._note(agent, left=asdict(replace(left, **where)), packed=True)

    async def _apart(
        self, agent: Agent, seconds: float, steps: Callable[[], Awaitable[None]]
    ) -> str:
        """Does something beside an agent of another machine, which does not run; why it was left
        if its time was over, or the agent was to end instead of to start."""
        starting = {agent.index} if agent.status is Status.STARTING else set[AgentIndex]()
        with trio.move_on_after(seconds) as scope:
            care = _Care(scope=scope, above=frozenset(starting), beside=agent)
            self._cares.append(care)
            try:
                await steps()
            finally:
                self._cares.remove(care)
        if scope.cancelled_caught:
            return care.why or f"git did not end within {seconds:g} s"
        return ""

    def _note(self, agent: Agent, **values: object) -> None:
        change = Change()
        change.set(agent, guest={**agent.guest, **values})
        self._agents.journal.note(change)

    # taking over

    async def take_over(self, agent: Agent) -> None:
        """Before the end of a child is recorded, once nothing of it runs any more."""
        if agent.is_guest:
            if agent.workspace == "worktree":
                await self._pack(agent)
            return
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
        if child.live:
            check_here(child, "commits")
        if worktree.node and worktree.state is WorktreeState.FETCHED:
            return  # nothing more comes
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
            if worktree.node:
                found = await self._take_far(parent, child, worktree)
            else:
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

    async def _take_far(self, parent: Agent, child: Agent, worktree: Worktree) -> Worktree:
        """Takes over what came of a child whose files are at a node."""
        left, come = self._elsewhere.left_of(child)
        most = self._agents.settings.config.artifact_max
        if come is not None:
            give = partial(self._run, open_input=partial(bundles.open_pack, come))
            try:
                await bundles.receive(give, parent, worktree, left.commit, most)
            except CtxError as error:
                return worktree.kept(f"{error.sentence}: {left.where(worktree.node)}")
            crashpoints.reach("worktree.received")
        found = await workspace.take(
            self._run, parent, worktree, self._gather, settled=None, most=most
        )
        if found.state is WorktreeState.FETCHED and not left.why:
            self._agents.trash.discard(bundles.came(self._agents, child), child.owner)
        if found.state is WorktreeState.KEPT or found.reason or not left.why:
            return found
        return found.kept(f"{left.why}: {left.where(worktree.node)}")

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
        worktree = Worktree.load(child.worktree)
        if worktree.node:
            left, _ = self._elsewhere.left_of(child)
            why += f"; {left.where(worktree.node)}" if left.size or left.why else ""
        self._put(child, worktree.kept(why))

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
        that is starting is to end. Who starts waits for his turn as long as others take.
        """
        if parent is None:
            return "its parent was removed"
        if why := self._unable(parent):
            return why
        above = {parent.index, *(each.index for each in self._agents.registry.ancestors(parent))}
        if starting is not None:
            above.add(starting.index)
        with trio.move_on_after(math.inf if starting else _SECONDS) as scope:
            care = _Care(scope=scope, above=frozenset(above))
            self._cares.append(care)
            try:
                async with self._children.turn(key), self._parents.turn(parent.index):
                    scope.deadline = min(scope.deadline, trio.current_time() + _SECONDS)
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
