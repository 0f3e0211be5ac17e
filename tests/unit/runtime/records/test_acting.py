"""Who acts, and what belongs to one change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import NoSpaceError
from runtime.records.change import Change, Subscriber
from tests.worlds.records import ROOT, World, world_in


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with world_in(tmp_path) as made:
        yield made


class Told(Subscriber):
    """The fields of agents that each transaction changes."""

    def __init__(self) -> None:
        self.names: list[set[str]] = []

    def posting(self, change: Change, undoing: Any) -> None:
        self.names.append({name for _, values in change.agents.values() for name in values})


def test_what_is_gathered_holds_at_once_and_is_one_transaction(world: World) -> None:
    agent, journal, told = world.agents.births.create(ROOT, "x"), world.agents.journal, Told()
    journal.subscribe(told)
    with journal.gathering() as change:
        journal.update(agent, exec="one", cwd="/there")
        assert (agent.exec, agent.cwd) == ("one", "/there")
        journal.update(agent, exec="two")
        change.set(agent, model="m")
        assert agent.model == "" and told.names == []
    assert (agent.exec, agent.cwd, agent.model) == ("two", "/there", "m")
    assert told.names == [{"exec", "cwd", "model"}]
    stored = world.store.find_agent(agent.index)
    assert stored and (stored.exec, stored.cwd, stored.model) == ("two", "/there", "m")


@pytest.mark.parametrize("late", [False, True])
def test_nothing_of_what_is_gathered_holds_after_an_error(world: World, late: bool) -> None:
    class Full(Subscriber):
        def posting(self, change: Change, undoing: Any) -> None:
            raise NoSpaceError("full")

    agent, journal = world.agents.births.create(ROOT, "x"), world.agents.journal
    if late:
        journal.subscribe(Full())
    with pytest.raises(NoSpaceError), journal.gathering():
        journal.update(agent, exec="one")
        journal.update(agent, exec="two")
        if not late:
            raise NoSpaceError("said meanwhile")
    assert agent.exec == ""
    stored = world.store.find_agent(agent.index)
    assert stored and stored.exec == ""
