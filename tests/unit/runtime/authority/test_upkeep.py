"""What agents and their records hold follows from their fields, also after a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.authority.accounts import Resource
from runtime.authority.upkeep import INPUT_SIZE
from runtime.errors import QuotaError
from runtime.records.change import Change
from runtime.records.items import TaskStatus
from runtime.records.lifecycle import Status
from runtime.records.run import NOWHERE
from tests.worlds.records import World, inside, operator, rmdir, world_in

OWNER = 1000
HELD = (Resource.DESCRIPTORS, Resource.TASKS, Resource.MONITORS)


def held(world: World) -> tuple[int, ...]:
    return tuple(world.agents.accounts.use(OWNER, resource) for resource in HELD)


def memory(world: World) -> int:
    return world.agents.accounts.use(OWNER, Resource.MEMORY)


def test_a_live_agent_holds_descriptors_and_its_monitor_until_it_is_dead(tmp_path: Path) -> None:
    with world_in(tmp_path) as world:
        agent = world.agents.births.create(operator(OWNER), "a")
        assert held(world) == (0, 0, 0)
        world.live(agent)
        assert held(world) == (4, 0, 1)
        world.reopen()
        assert held(world) == (4, 0, 1)
        again = world.agents.registry.named("a")
        assert again is not None
        world.agents.journal.update(again, status=Status.DEAD)
        assert held(world) == (0, 0, 0)


def test_a_running_command_is_counted_until_it_is_over(tmp_path: Path) -> None:
    with world_in(tmp_path, owner_tasks=2) as world:
        agent = world.live(world.agents.births.create(operator(OWNER), "a"))
        plane, me = world.agents.tasks, inside(agent)
        tasks = [plane.make(me, agent, name) for name in ("x", "y", "z")]
        for task in tasks:
            plane.set(task, cmd="true")
        plane.start(me, agent, tasks[0])
        plane.start(me, agent, tasks[1])
        assert held(world) == (4 + 2 * 2, 2, 3)
        with pytest.raises(QuotaError, match="account tasks of uid 1000 has 2 of 2"):
            plane.start(me, agent, tasks[2])
        assert tasks[2].status is TaskStatus.MADE
        change = Change()
        change.put(tasks[0], status=TaskStatus.CANCELLED)
        world.agents.journal.note(change)
        assert held(world) == (4 + 2, 1, 2)
        plane.start(me, agent, tasks[2])


def test_a_start_is_refused_before_the_process_has_nothing_left(tmp_path: Path) -> None:
    with world_in(tmp_path, owner_monitors=1) as world:
        first = world.agents.births.create(operator(OWNER), "a")
        world.agents.upkeep.check_agent(first)
        world.live(first)
        second = world.agents.births.create(operator(OWNER), "b")
        with pytest.raises(QuotaError, match="owner_monitors"):
            world.agents.upkeep.check_agent(second)


def test_an_agent_that_holds_all_does_not_keep_its_operator_from_starting_another(
    tmp_path: Path,
) -> None:
    with world_in(tmp_path, owner_descriptors=400) as world:
        agents = world.agents
        hog = world.live(agents.births.create(operator(OWNER), "hog"))
        room = agents.accounts.room(OWNER, Resource.DESCRIPTORS)
        agents.accounts.charged(agents.identity.payer(inside(hog)), Resource.DESCRIPTORS, room)
        others = [agents.births.create(operator(OWNER), f"other-{number}") for number in range(6)]
        for caller in (inside(hog), operator(OWNER + 1)):
            with agents.journal.acting(caller), pytest.raises(QuotaError, match='"hog" holds most'):
                agents.upkeep.check_agent(others[0])
        with agents.journal.acting(operator(OWNER)):
            for other in others[:5]:
                agents.upkeep.check_agent(other)
                world.live(other)
            with pytest.raises(QuotaError, match='"hog" holds most'):
                agents.upkeep.check_agent(others[5])
        # half of the tenth is left to its operator, who may have to open what ends one
        agents.accounts.charged(agents.identity.payer(operator(OWNER)), Resource.DESCRIPTORS, 20)


def test_children_do_not_multiply_what_texts_may_take(tmp_path: Path) -> None:
    with world_in(tmp_path, owner_disk_max=600_000) as world:
        parent = world.live(world.agents.births.create(operator(OWNER), "boss"))
        world.may_create(parent)
        written = 0
        with pytest.raises(QuotaError, match="holds most"):
            for number in range(20):
                child = world.live(world.agents.births.create(inside(parent), f"c{number}"))
                item = world.agents.work.make(inside(child), child, "w")
                world.agents.work.set(child, item, "plan", "x" * 30_000)
                written += 1
        assert 1 < written < 15


def test_children_do_not_multiply_what_is_in_memory(tmp_path: Path) -> None:
    with world_in(tmp_path, owner_memory_max=100_000) as world:
        parent = world.live(world.agents.births.create(operator(OWNER), "boss"))
        world.may_create(parent)
        made = 0
        with pytest.raises(QuotaError, match="owner_memory_max"):
            for number in range(20):
                child = world.live(world.agents.births.create(inside(parent), f"c{number}"))
                for item in range(20):
                    world.agents.work.make(inside(child), child, f"w{item}")
                    made += 1
        assert 20 < made < 100


def test_what_a_parents_git_says_of_a_worktree_is_memory_of_its_owner(tmp_path: Path) -> None:
    """A git of the parent's making says what it likes: a quarter of a mebibyte for each child."""
    said = {"name": "c", "objects": [f"/{n:02}{'x' * 4000}" for n in range(60)], "earlier": False}
    with world_in(tmp_path, owner_memory_max=800_000) as world:
        parent = world.live(world.agents.births.create(operator(OWNER), "boss"))
        world.may_create(parent)
        children = [world.agents.births.create(inside(parent), f"c{n}") for n in range(4)]
        before = memory(world)
        world.agents.journal.update(children[0], worktree=said)
        assert 240_000 < memory(world) - before < 250_000
        world.agents.journal.update(parent, discards=(said,))
        world.agents.journal.update(children[0], worktree=None)
        assert 240_000 < memory(world) - before < 250_000
        world.agents.journal.update(children[1], worktree=said)
        with pytest.raises(QuotaError, match="owner_memory_max"):
            world.agents.journal.update(children[2], worktree=said)


def test_what_was_removed_holds_nothing(tmp_path: Path) -> None:
    with world_in(tmp_path) as world:
        agent = world.live(world.agents.births.create(operator(OWNER), "a"))
        before = memory(world)
        item = world.agents.work.make(inside(agent), agent, "w")
        world.agents.work.set(agent, item, "plan", "x" * 30_000)
        assert memory(world) < before + 5000, "long texts are not in memory"
        assert world.agents.accounts.use(OWNER, Resource.DISK) > 30_000
        rmdir(world.agents.work, inside(agent), agent, "w")
        assert memory(world) == before
        item = world.agents.work.make(inside(agent), agent, "v")
        world.agents.journal.update(agent, status=Status.DEAD, cell=NOWHERE)
        world.agents.removals.remove(agent)
        assert memory(world) == 0
        assert held(world) == (0, 0, 0)


def test_the_input_of_programs_and_commands_is_memory_of_their_owner(tmp_path: Path) -> None:
    with world_in(tmp_path, owner_memory_max=4 * INPUT_SIZE) as world:
        agent = world.agents.births.create(operator(OWNER), "a")
        world.agents.journal.update(agent, mode="resident")
        before = memory(world)
        world.live(agent)
        assert memory(world) == before + INPUT_SIZE
        plane, me = world.agents.tasks, inside(agent)
        tasks = [plane.make(me, agent, name) for name in ("x", "y", "z", "without")]
        for task in tasks:
            plane.set(task, cmd="true", accepts_input=task.name != "without")
        plane.start(me, agent, tasks[0])
        plane.start(me, agent, tasks[1])
        assert memory(world) > before + 3 * INPUT_SIZE
        with pytest.raises(QuotaError, match="account memory of uid 1000"):
            plane.start(me, agent, tasks[2])
        plane.start(me, agent, tasks[3])
