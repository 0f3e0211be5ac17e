"""Durable homes: whose they are, and when they go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime.records.change import Change
from runtime.records.model import Agent, Outcome, Session
from tests.worlds.records import ROOT, World, add_end, inside, operator

ID = 1000
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="gives directories to other uids")


def live_parent(world: World, name: str) -> Agent:
    return world.live(world.may_create(world.agents.births.create(operator(ID), name)))


def end(world: World, *agents: Agent) -> None:
    for agent in agents:
        change = Change()
        add_end(world.agents, change, agent, Outcome.DONE)
        world.agents.journal.commit(change)


def session_of(world: World, agent: Agent) -> Session:
    return world.agents.sessions.load(agent.session)


def homes(world: World) -> list[str]:
    """The durable homes that are on the disk."""
    found = (path.relative_to(world.state) for path in world.state.glob("tree/agent/*/*/*"))
    return sorted(str(path) for path in found if path.parts[3][0] != ".")  # discarded


def keep_home(world: World, agent: Agent) -> Path:
    """As after a start, with a file in it."""
    world.agents.journal.update(agent, homedir="durable")
    path = world.state / "tree" / world.agents.sessions.home(agent)
    path.mkdir(parents=True, exist_ok=True)
    (path / "file").touch()
    return path


def test_a_durable_home_is_the_next_lifes_and_goes_with_the_history(world: World) -> None:
    first = world.agents.births.create(operator(ID), "x")
    path = keep_home(world, first)
    world.agents.removals.remove(first)
    second = world.agents.births.create(operator(ID), "x")
    assert keep_home(world, second) == path
    world.agents.removals.remove(second)
    old, new = (session_of(world, agent) for agent in (first, second))
    world.agents.removals.remove_session(old)
    assert (path / "file").exists(), "there is history left"
    world.agents.removals.remove_session(new)
    assert homes(world) == []


def test_nobody_prepares_the_home_of_another_family(world: World) -> None:
    """An agent may make children of any name; what one leaves in its home is for such a child."""
    boss, other = live_parent(world, "boss"), live_parent(world, "other")
    found = []
    for parent in (boss, other, boss):
        child = world.agents.births.create(inside(parent), "helper")
        found.append(keep_home(world, child))
        maker = world.live(world.may_create(child))
        below = world.agents.births.create(inside(maker), "below")
        found.append(keep_home(world, below))
        end(world, below, child)
        world.agents.removals.remove(child)
    top = keep_home(world, world.agents.births.create(operator(ID), "helper"))
    assert found[:2] == found[4:]
    assert len({*found, top}) == 5


def test_a_home_is_of_one_uid(world: World) -> None:
    agent = world.agents.births.create(ROOT, "x")
    world.agents.journal.update(agent, uid=ID, gid=ID)
    first = keep_home(world, agent)
    world.agents.journal.update(agent, uid=ID + 1)
    second = keep_home(world, agent)
    assert second != first


def test_a_detached_childs_home_outlives_its_parent(world: World) -> None:
    parent = live_parent(world, "p")
    child = world.agents.births.create(inside(parent), "c")
    world.agents.births.set_life(child, "detached", "public_named")
    path = keep_home(world, child)
    end(world, parent)
    world.agents.removals.remove(parent)
    assert keep_home(world, child) == path


def test_a_history_without_sessions_leaves_no_home_to_its_old_owner(world: World) -> None:
    """The old one's sessions are gone, and the last one is another owner's now."""
    first = world.agents.births.create(ROOT, "x")
    world.agents.journal.update(first, uid=ID, gid=ID)
    keep_home(world, first)
    world.agents.removals.remove(first)
    second = world.agents.births.create(ROOT, "x")
    world.agents.removals.remove_session(session_of(world, first))
    assert homes(world) == [f"tree/agent/0/x/{ID}"]
    world.agents.births.change_owner(second, 2)
    assert homes(world) == []
