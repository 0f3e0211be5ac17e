"""What an orchestrator makes and removes in a row stays as cheap as the first of it was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from tests.unit.ctxfs.tools.test_tools import Desk
from tests.worlds.tree import Mounted

MANY = 3000
#: children after which all that is made once has been made
_FIRST = 20


class Cost:
    """What a block did: functions of Python that it called, and steps of SQLite."""

    def __init__(self) -> None:
        self.calls = 0
        self.steps = 0


@contextmanager
def costing(desk: Desk) -> Iterator[Cost]:
    cost = Cost()

    def called(frame: FrameType, event: str, arg: Any) -> None:
        cost.calls += event == "call"

    def stepped() -> int:
        cost.steps += 1
        return 0

    database = desk.mounted.world.store._db
    database.set_progress_handler(stepped, 1)
    sys.setprofile(called)
    try:
        yield cost
    finally:
        sys.setprofile(None)
        database.set_progress_handler(None, 1)


def _one_more(desk: Desk, given: dict[str, str]) -> None:
    name = desk.call("SpawnAgent", {"initial_message": "look", **given})["agent_id"]
    desk.end_child(name)
    assert desk.call("TaskOutput", {"task_id": name})["status"] == "completed"
    desk.call("AgentRemove", {"agent_id": name})


@pytest.fixture
def desk(mounted: Mounted) -> Desk:
    return Desk(mounted)


@pytest.mark.long
@pytest.mark.parametrize(
    "given",
    [
        lambda number: {},
        lambda number: {"name": "reviewer"},
        lambda number: {"name": f"reviewer-{number}"},
    ],
    ids=["not given", "reused", "new"],
)
def test_three_thousand_children_in_a_row(
    desk: Desk, given: Callable[[int], dict[str, str]]
) -> None:
    assert desk.mounted.world.config.children < MANY
    for number in range(_FIRST):
        _one_more(desk, given(number))
    with costing(desk) as first:
        _one_more(desk, given(_FIRST))
    for number in range(_FIRST + 1, MANY - 1):
        _one_more(desk, given(number))
    with costing(desk) as last:
        _one_more(desk, given(MANY))
    assert last.calls <= 1.25 * first.calls
    # trees of SQLite get a level more, and few names more are looked at
    assert last.steps <= 1.5 * first.steps


@pytest.mark.long
def test_the_name_of_one_of_many_is_found_at_once(desk: Desk) -> None:
    def cost_of_one() -> Cost:
        with costing(desk) as cost:
            desk.call("SpawnAgent", {"initial_message": "look"})
        return cost

    for _ in range(_FIRST):
        cost_of_one()
    names = desk.agents.births
    with costing(desk) as few:
        assert names.free_name(desk.me, desk.coder) == f"coder-{_FIRST + 1}"
    for _ in range(200):
        cost_of_one()
    with costing(desk) as many:
        assert names.free_name(desk.me, desk.coder) == f"coder-{_FIRST + 201}"
    assert many.calls <= few.calls + 60
