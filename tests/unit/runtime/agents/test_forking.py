"""What is gathered for a forked child: no more is read than has room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.agents import forking
from runtime.ids import RunId
from runtime.records.change import Change
from runtime.records.items import Task, Work, WorkStatus
from runtime.records.model import Agent
from runtime.records.run import Run
from runtime.texts import context
from tests.worlds.records import World, inside, operator


@pytest.fixture
def parent(world: World) -> Agent:
    agent = world.live(world.agents.births.create(operator(1000), "parent"))
    return world.may_create(agent)


def inherited(world: World, parent: Agent, handoff: str = "") -> dict[str, Any]:
    child = world.agents.births.create(inside(parent), "heir")
    world.agents.documents.write(child, "handoff.md", handoff.encode())
    found: dict[str, Any] = json.loads(forking.inherit(world.agents, parent, child).json)
    return found


def working(world: World, parent: Agent, **items: dict[str, Any]) -> None:
    """Work items, of which the first is the current one."""
    change = Change()
    for name, fields in items.items():
        change.make(Work(agent=parent.index, name=name, **{"objective": "o", **fields}))
    change.set(parent, focus=next(iter(items)))
    world.agents.journal.commit(change)


def session_file(world: World, parent: Agent, name: str) -> Path:
    session = world.agents.sessions.get(parent.session)
    assert session is not None
    path = world.agents.sessions.directory(session) / "context" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_what_is_cut_says_how_many_bytes_of_the_whole_are_missing(
    world: World, parent: Agent
) -> None:
    session_file(world, parent, "memory.md").write_bytes(b"note\n" * (1 << 20))
    memory = inherited(world, parent)["memory"]
    assert memory["left_out"]["text"] == (5 << 20) - len(memory["text"])


def test_what_comes_after_that_is_counted_without_being_read(world: World, parent: Agent) -> None:
    working(world, parent, now={"blocked_by": ("first", "second")}, first={}, second={})
    session_file(world, parent, "memory.md").write_bytes(b"note\n" * (1 << 20))
    session_file(world, parent, "episode/first.md").write_bytes(b"x" * 1000)
    session_file(world, parent, "episode/second.md").write_bytes(b"")
    found = inherited(world, parent)
    assert found["episodes"] == []
    assert found["left_out"]["episodes"] == len("first") + 1000


def test_finished_blockers_do_not_enter(world: World, parent: Agent) -> None:
    done = {"status": WorkStatus.DONE}
    working(
        world, parent, now={"blocked_by": ("ended", "open", "named")}, ended=done, open={},
        named={**done, "blocked_by": ("ended",)},
    )  # fmt: skip
    found = inherited(world, parent, "see named")
    assert found["work"]["blocked_by"] == "open"
    related = {item["id"]: item for item in found["related"]}
    assert {name: item["relation"] for name, item in related.items()} == {
        "open": "blocks", "named": "named",
    }  # fmt: skip
    assert related["named"]["blocked_by"] == ""


def test_a_later_time_of_a_record_moves_no_byte(world: World, parent: Agent) -> None:
    working(world, parent, now={"blocked_by": ("next",), "plan": "- step\n"}, next={})
    child = world.agents.births.create(inside(parent), "heir")
    before = forking.inherit(world.agents, parent, child)
    assert forking.inherit(world.agents, parent, child) == before, "equal state, equal bytes"
    for item in world.agents.items.of(parent.index, Work):
        with world.agents.journal.changing() as change:
            change.put(item, updated=item.updated + 3600)
    assert forking.inherit(world.agents, parent, child) == before


def test_no_link_of_the_agents_is_followed(world: World, parent: Agent, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    session_file(world, parent, "episode/now.md").symlink_to(tmp_path / "secret")
    working(world, parent, now={})
    assert inherited(world, parent)["episodes"] == []


def test_long_names_of_parents_tell_who_belongs_together(world: World, parent: Agent) -> None:
    one, other = "a" * 5000, "b" * 5000
    working(world, parent, now={"parent": one}, same={"parent": one}, other={"parent": other})
    assert [item["id"] for item in inherited(world, parent)["related"]] == ["same"]


def test_of_very_many_related_items_the_first_are_shown(world: World, parent: Agent) -> None:
    names = [f"w{n:03}" for n in range(context.RELATED_MAX + 10)]
    items: dict[str, dict[str, Any]] = {name: {"objective": "an aim"} for name in names}
    working(world, parent, **{"now": {"blocked_by": tuple(names)}, **items})
    found = inherited(world, parent)
    assert [item["id"] for item in found["related"]] == names[: context.RELATED_MAX]
    assert found["left_out"] == {"related": 10 * len("an aim")}


def test_results_of_children_for_other_work_take_no_room(world: World, parent: Agent) -> None:
    working(world, parent, now={}, other={})
    for name, work in (("a-child", "other"), ("b-child", "now")):
        child = world.agents.births.create(inside(parent), name)
        world.agents.documents.write(child, "result.md", f"{name}\n".encode() * 10_000)
        [handle] = [t for t in world.agents.items.of(parent.index, Task) if t.name == name]
        change = Change()
        change.put(handle, work=work)
        world.agents.journal.commit(change)
    [result] = inherited(world, parent)["results"]
    assert result["child"] == "b-child"
    assert result["result"].startswith("b-child\n")


def test_the_last_messages_of_the_run_come_in_order(world: World, parent: Agent) -> None:
    world.agents.journal.update(parent, run=Run(id=RunId("run-1")))
    path = session_file(world, parent, "memory.md").parent.parent / "messages.jsonl"
    lines = [{"role": "user", "content": f"{n}", "run": f"run-{n % 2}"} for n in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tail = inherited(world, parent)["tail"]
    assert [message["content"] for message in tail] == [f"{n}" for n in range(21, 40, 2)]
