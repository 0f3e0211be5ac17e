"""Worktrees of children over their lives: made at their start, taken away with the handle that
their parent has of them (``runtime.workspace`` knows git)."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Final

import trio

from runtime import cell, crashpoints, workspace
from runtime.agents import Agents
from runtime.change import Watching
from runtime.ending import guarded
from runtime.errors import MalformedError, NotEmptyError, QuotaError, WrongStateError
from runtime.lifecycle import Status
from runtime.model import Agent
from runtime.names import quote
from runtime.planes import Task
from runtime.workspace import Run, Worktree

log = logging.getLogger("ctxd.worktrees")

#: requests that wait for git; the filesystem answers about a hundred at a time
_ASKED_OF_ONE: Final = 8
_ASKED: Final = 32


class Worktrees(Watching):
    """Makes and removes them, one at a time in one parent's repository."""

    def __init__(self, *, agents: Agents, run: Run, nursery: trio.Nursery) -> None:
        self._agents = agents
        self._run = run
        self._nursery = nursery
        self._locks: dict[int, trio.Lock] = {}
        self._asked: Counter[int] = Counter()
        agents.watching.append(self)

    # Watching

    def agent_listed(self, agent: Agent) -> None:
        if self._agents.get(agent.index) is None:
            self._locks.pop(agent.index, None)
        if agent.worktree is not None and self._agents.get(agent.index) is None:
            self._nursery.start_soon(self._clean, agent)

    def resume(self) -> None:
        """Goes on with what an earlier daemon did not get done."""
        for task in self._agents.items.all(Task):
            child = self._agents.tasks.child_of(task)
            gone = child is not None and self._agents.get(child.index) is None
            if child is not None and gone and child.worktree is not None and not task.worktree:
                self._nursery.start_soon(self._clean, child)

    # making

    async def make(self, agent: Agent) -> None:
        """What the start of a child needs, if that wants a worktree.

        ``MalformedError`` (no repository, no commit), ``TakenError`` (the branch is
        there), ``WrongStateError`` or ``UnsupportedError``.
        """
        if agent.workspace != "worktree" or agent.status is not Status.NEW:
            return
        workspace.check_possible(agent)
        parent = self._agents.live_parent(agent)
        assert parent is not None
        with self._asking(parent):
            async with self._lock(parent):
                if not agent.worktree_made:
                    await self._make(parent, agent)

    async def _make(self, parent: Agent, agent: Agent) -> None:
        root = cell.workspace(self._agents, parent)
        if root is None:
            raise MalformedError(
                f"workspace=worktree: {quote(parent.name)} has no workspace: "
                "write explicit_root:/PATH to its workspace before its start"
            )
        if agent.worktree is not None:  # a daemon died while it was made
            left = await workspace.remove(self._run, parent, Worktree.load(agent.worktree))
            if left is not None:
                raise WrongStateError(f"an earlier worktree of {quote(agent.name)} is {left}")
        worktree = await workspace.plan(self._run, parent, agent, root)
        self._agents.update(agent, worktree=worktree.dump())
        crashpoints.reach("worktree.planned")
        try:
            await workspace.add(self._run, parent, worktree)
        except BaseException:
            self._agents.update(agent, worktree=None)
            raise
        crashpoints.reach("worktree.made")
        self._agents.update(agent, worktree_made=True)

    # removing

    async def remove(self, parent: Agent, task: Task) -> None:
        """What the removal of a handle needs; ``NotEmptyError`` saying why it is kept."""
        child = self._agents.tasks.child_of(task)
        if child is None or child.worktree is None or child.live:
            return
        with self._asking(parent):
            why = await self._remove(parent, child)
        if why is not None:
            with self._agents.changing() as change:
                change.put(task, worktree=why)
            raise NotEmptyError(f"the worktree of {quote(child.name)} is {why}")

    async def _clean(self, child: Agent) -> None:
        """The child was removed: its handle stays only for a worktree that is kept."""
        with guarded(child):
            parent = self._agents.parent_of(child)
            if parent is None:
                return
            why = await self._remove(parent, child)
            task = self._agents.items.named(parent.index, Task, child.name)
            if task is None or task.child != child.index:
                return
            with self._agents.changing() as change:
                if why is None:
                    change.drop(task)
                else:
                    log.info("%s: its worktree is %s", child.name, why)
                    change.put(task, worktree=why)

    async def _remove(self, parent: Agent, child: Agent) -> str | None:
        assert child.worktree is not None
        worktree = Worktree.load(child.worktree)
        async with self._lock(parent):
            why = await workspace.remove(self._run, parent, worktree)
            if why is None:
                crashpoints.reach("worktree.removed")
                self._agents.update(child, worktree=None, worktree_made=False)
            return why

    @contextlib.contextmanager
    def _asking(self, parent: Agent) -> Iterator[None]:
        """Around what a request for the filesystem waits for: git in a parent's view may take
        long, and the requests that are answered at a time are those of everybody."""
        if self._asked[parent.index] >= _ASKED_OF_ONE or self._asked.total() >= _ASKED:
            raise QuotaError(
                f"{self._asked[parent.index]} worktrees of {quote(parent.name)}, "
                f"{self._asked.total()} of all, are being made or removed: try again then"
            )
        self._asked[parent.index] += 1
        try:
            yield
        finally:
            self._asked[parent.index] -= 1
            if not self._asked[parent.index]:
                del self._asked[parent.index]

    def _lock(self, parent: Agent) -> trio.Lock:
        return self._locks.setdefault(parent.index, trio.Lock())

