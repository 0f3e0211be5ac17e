"""What ended long ago is removed, and what somebody may still want is not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import trio

from runtime.agents.pruning import Old
from runtime.agents.workspace import Worktree, WorktreeState
from runtime.caller import Caller
from runtime.records.change import Change
from runtime.records.lifecycle import Cue, Status
from runtime.records.model import Agent, Outcome
from tests.worlds.jumping import run_jumping
from tests.worlds.records import ROOT, World, cancel_new, inside, operator

USER, OTHER = operator(1000), operator(1001)
DAY = 86_400.0


def pruned(
    world: World, caller: Caller | None = USER, *, age: float = 30 * DAY, **more: Any
) -> dict[str, str]:
    """What is told of, by path, and why it is left."""
    told: dict[str, str] = {}

    async def tell(old: Old) -> None:
        told[old.path] = old.why

    async def prune() -> None:
        before = time.time() - age
        wanted = {"ended": before, "sessions": before, **more}
        await world.agents.pruning.prune(caller, tell, **wanted)

    trio.run(prune)
    return told


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets so many days pass."""
    passed = 0.0
    now = time.time

    def shift(days: float) -> None:
        nonlocal passed
        passed += days * DAY

    monkeypatch.setattr(time, "time", lambda: now() + passed)
    return shift


def dead(world: World, name: str, caller: Caller = USER) -> Agent:
    agent = world.agents.births.create(caller, name)
    cancel_new(world.agents, agent)
    return agent


def child_of(
    world: World, parent: Agent, name: str, worktree: WorktreeState | None = None
) -> Agent:
    agent = world.live(world.agents.births.create(inside(parent), name))
    change = Change()
    world.agents.ends.record(change, agent, Cue.LOST, Outcome.DONE, "exit:0")
    world.agents.journal.note(change)
    if worktree is not None:
        found = Worktree(name=name, root="/w", common="/w/.git", base="0" * 40, state=worktree)
        world.agents.journal.update(agent, worktree=found.dump(), worktree_made=True)
    return agent


def test_what_ended_long_ago_goes_with_its_history(
    world: World, later: Callable[[float], None]
) -> None:
    dead(world, "old")
    world.live(world.agents.births.create(USER, "live"))
    world.agents.births.create(USER, "new")
    later(31)
    dead(world, "young")
    there = ["agent/old.d", "home/1000/agent/old/session/default"]
    assert list(pruned(world, dry=True)) == there
    assert list(pruned(world)) == there
    assert pruned(world) == {}
    assert sorted(agent.name for agent in world.agents.registry) == ["live", "new", "young"]
    assert world.agents.sessions.agents(1000) == ["live", "new", "young"]
    assert list(world.reopen().registry) and not world.agents.sessions.of(1000, "old")


def test_histories_of_agents_that_are_there_stay_but_for_those_of_earlier_lives(
    world: World, later: Callable[[float], None]
) -> None:
    agent = dead(world, "coder")
    world.agents.births.renew(agent)
    later(31)
    assert list(pruned(world)) == ["home/1000/agent/coder/session/default"]
    assert [name for name, _ in world.agents.sessions.of(1000, "coder")] == ["default.2"]


def test_each_removes_what_is_its_own(world: World, later: Callable[[float], None]) -> None:
    dead(world, "mine")
    dead(world, "theirs", OTHER)
    boss = world.may_create(world.live(world.agents.births.create(OTHER, "boss")))
    child_of(world, boss, "child")
    later(31)
    assert list(pruned(world, USER)) == ["agent/mine.d", "home/1000/agent/mine/session/default"]
    # an agent's histories are its operators'
    assert list(pruned(world, inside(boss))) == ["agent/child.d"]
    assert list(pruned(world, ROOT, dry=True)) == [
        *("agent/theirs.d", "home/1001/agent/theirs/session/default"),
        "home/1001/agent/child/session/default",
    ]


@pytest.mark.parametrize("state", WorktreeState)
def test_commits_that_nobody_took_over_stay(
    world: World, later: Callable[[float], None], state: WorktreeState
) -> None:
    boss = world.may_create(world.live(world.agents.births.create(USER, "boss")))
    child_of(world, boss, "child", state)
    later(31)
    told = pruned(world)
    if state is WorktreeState.FETCHED:
        assert set(told.values()) == {""} and "agent/child.d" in told
    else:
        shown = "being fetched" if state is WorktreeState.FETCHING else state
        assert f'the worktree of "child" is {shown}' in told["agent/child.d"]
        assert world.agents.registry.named("child") is not None
    # with its parent it would be lost as well
    if state is WorktreeState.KEPT:
        change = Change()
        world.agents.ends.record(change, boss, Cue.LOST, Outcome.DONE, "exit:0")
        world.agents.journal.note(change)
        later(31)
        assert "kept" in pruned(world)["agent/boss.d"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [({"declared": "/etc/ctxfs/agents.d/x.yaml"}, "declares"), ({"window": "remove"}, "window")],
)
def test_what_somebody_wants_stays(
    world: World, later: Callable[[float], None], fields: dict[str, str], why: str
) -> None:
    world.agents.journal.update(dead(world, "x"), **fields)
    later(31)
    assert why in pruned(world)["agent/x.d"]


def test_results_that_a_child_has_in_its_parents_session_stay(
    world: World, later: Callable[[float], None]
) -> None:
    boss = world.may_create(world.live(world.agents.births.create(USER, "boss")))
    child = world.agents.births.create(inside(boss), "child")
    world.agents.journal.update(child, life="detached", profile="public_named")
    world.live(child)
    change = Change()
    world.agents.ends.record(change, boss, Cue.LOST, Outcome.DONE, "exit:0")
    world.agents.journal.note(change)
    later(31)
    told = pruned(world)
    assert "results" in told["home/1000/agent/boss/session/default"]
    assert child.status is Status.BUSY


def test_ended_work_of_an_agent_that_goes_on_is_removed(
    world: World, later: Callable[[float], None]
) -> None:
    agent = world.live(world.agents.births.create(USER, "coder"))
    for name in ("done", "open"):
        item = world.agents.work.make(USER, agent, name)
        world.agents.work.set(agent, item, "objective", "x")
    world.agents.work.set(agent, world.agents.work.find(agent, "done"), "status", "done")
    later(31)
    assert pruned(world) == {"agent/coder.d/work/done": ""}
    assert pruned(world, sessions=None) == {}
    assert [item.name for item in world.agents.work.of(Change(), agent)] == ["open"]


@pytest.mark.settings(keep_ended=DAY)
def test_the_settings_have_it_done(
    world: World, later: Callable[[float], None]
) -> None:
    dead(world, "old")
    later(2)

    async def look() -> None:
        with trio.move_on_after(2 * 3600):
            await world.agents.pruning.run()

    run_jumping(look, 0)
    assert not list(world.agents.registry)
    # histories are kept: nothing is said of them
    assert world.agents.sessions.agents(1000) == ["old"]
