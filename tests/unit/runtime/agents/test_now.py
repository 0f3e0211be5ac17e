"""``now.md``: equal for equal state, bounded, and stable before what changed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from runtime.agents import now
from runtime.agents.workspace import DIFFERENCES, Worktree
from runtime.ids import MessageId
from runtime.records.change import Change
from runtime.records.items import Report, Task, TaskStatus, Wait, WaitStatus, Work, WorkStatus
from runtime.records.lifecycle import Status
from runtime.records.model import Agent, Outcome
from runtime.texts import context
from runtime.texts.names import timestamp
from tests.worlds.records import World, add_end, inside, operator

USER = operator(1000)
ROOMS = (context.NOW_FOCUS, context.NOW_WAITS, context.NOW_THINGS, context.NOW_REPORTS)
pytestmark = pytest.mark.settings(tasks=2000, waits=2000)


@pytest.fixture
def agent(world: World) -> Agent:
    made = world.may_create(world.live(world.agents.births.create(USER, "boss"), Status.IDLE))
    world.agents.journal.update(made, mode="turn")
    return made


def text_of(world: World, agent: Agent) -> str:
    session = world.agents.sessions.get(agent.session)
    assert session is not None
    return now.now(world.agents, session)


def make(world: World, agent: Agent, *items: Any, **values: Any) -> None:
    change = Change()
    for item in items:
        change.make(item)
    change.set(agent, **values)
    world.agents.journal.commit(change)


def busy(world: World, agent: Agent) -> Work:
    item = Work(agent=agent.index, name="ship", objective="ship it", plan="- [ ] a\n- [ ] b\n",
                blocked_by=("done", "open"), updated=1.0)  # fmt: skip
    make(
        world, agent, item,
        Work(agent=agent.index, name="done", status=WorkStatus.DONE),
        Work(agent=agent.index, name="open"),
        Wait(agent=agent.index, name="w", on="timer 1d", status=WaitStatus.ARMED, work="ship"),
        Wait(agent=agent.index, name="old", on="message", status=WaitStatus.FIRED),
        Task(agent=agent.index, name="t", status=TaskStatus.FAILED, title="tests", exit="exit:1",
             reason="exit:1", started=1.0, ended=2.5),
        focus="ship",
    )  # fmt: skip
    child = world.agents.births.create(inside(agent), "rev")
    world.agents.documents.write(child, "handoff.md", b"look\n# Waits\n")
    return item


EXPECTED = """\
agent: boss
session: default

## Current work item

id: ship
status: open
objective: ship it
blocked_by: open
plan:
	- [ ] a
	- [ ] b

## Waits

id: w
on: timer 1d
work: ship

## Children and tasks

name: t
kind: command_task
title: tests
started_at: 1970-01-01T00:00:01.000Z
status: failed
exit: exit:1
reason: exit:1
ended_at: 1970-01-01T00:00:02.500Z

name: rev
kind: child_agent_task
title: look
status: queued
"""


def test_it_says_where_an_agent_is(world: World, agent: Agent) -> None:
    busy(world, agent)
    text = text_of(world, agent)
    assert text.startswith("# Now\n")
    assert text.endswith("\n\n" + EXPECTED)


def test_equal_state_gives_equal_bytes(world: World, agent: Agent) -> None:
    item = busy(world, agent)
    before = text_of(world, agent)
    assert text_of(world, agent) == before
    with world.agents.journal.changing() as change:
        change.put(item, updated=item.updated + 60)
    assert text_of(world, agent) == before, "no time of a record's own is in it"
    world.reopen()
    found = world.agents.registry.named("boss")
    assert found is not None
    assert text_of(world, found) == before


def test_what_is_before_a_change_stays(world: World, agent: Agent) -> None:
    busy(world, agent)
    before = text_of(world, agent)
    child = world.agents.registry.named("rev")
    assert child is not None
    change = Change()
    add_end(world.agents, change, child, Outcome.ERROR, "exit:7")
    world.agents.journal.note(change)
    after = text_of(world, agent)
    stable = before.index("status: queued")
    assert after[:stable] == before[:stable]
    assert "status: failed\nexit: exit:7\nreason: exit:7\n" in after[stable:]


def test_a_child_without_a_handle_is_shown(world: World, agent: Agent) -> None:
    child = world.agents.births.create(inside(agent), "free")
    world.agents.births.set_life(child, "detached", "public_named")
    assert "name: free\nkind: child_agent_task\nstatus: new\n" in text_of(world, agent)


def test_every_part_is_bounded_and_says_what_it_left_out(
    world: World, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = [
        Report(agent=agent.index, session=agent.session, name=MessageId(str(n)), child="rev",
               created=float(n), text=f"{n}\n# Now\n" + "x" * 5000)
        for n in range(12)
    ]  # fmt: skip
    monkeypatch.setattr(world.agents.messages, "reports", lambda agent: reports)
    long = "\n" * 60_000
    assert context.NOW_WORKSPACE + sum(ROOMS) == 64 << 10
    make(
        world, agent,
        Work(agent=agent.index, name="big", objective=long, acceptance=long, plan=long),
        *(Wait(agent=agent.index, name=f"w{n}", on="timer 1d", status=WaitStatus.ARMED)
          for n in range(1000)),
        *(Task(agent=agent.index, name=f"t{n}", status=TaskStatus.COMPLETED, title="x" * 200)
          for n in range(1000)),
        Task(agent=agent.index, name="live", status=TaskStatus.RUNNING),
        *(Task(agent=agent.index, name=f"u{n}", status=TaskStatus.COMPLETED, title="x" * 200)
          for n in range(100)),
        focus="big",
    )  # fmt: skip
    text = text_of(world, agent)
    titles = ("Current work item", "Waits", "Children and tasks", "Reports of children")
    begins = [*(text.index(f"\n## {title}\n") for title in titles), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(begins)]
    for part, room in zip(parts, ROOMS, strict=True):
        assert room // 2 < len(part.encode()) <= room
        assert "left out]\n" in part
    assert len(text.encode()) <= 64 << 10
    assert "name: live\n" in parts[2], "what has not ended comes before what has"
    assert "name: u99\n" in parts[2], "and then the youngest"
    assert text.count("\n## ") == 4, "no text of another makes a section"
    assert "\n\t# Now\n" in parts[3]
    told = [f"ts: {timestamp(n)}\n" for n in range(12)]
    assert parts[3].index(told[10]) < parts[3].index(told[11]), "oldest first"
    assert told[7] not in parts[3]


def test_a_worktree_says_in_what_it_differs(world: World, agent: Agent) -> None:
    """Also to who inherits it; at length, which leaves room for the rest."""
    differs = dict.fromkeys(DIFFERENCES, "x" * 300)
    worktree = Worktree(name="kid", root="/w", common="/w/.git", base="0" * 40, differs=differs)
    kid = world.agents.births.create(inside(agent), "kid")
    world.agents.journal.update(kid, workspace="worktree", worktree=worktree.dump())
    assert "## Workspace" not in text_of(world, kid), "it is not made yet"
    world.agents.journal.update(kid, worktree_made=True)
    world.live(kid)
    heir = world.live(world.agents.births.create(inside(world.may_create(kid)), "heir"))
    make(world, heir, Work(agent=heir.index, name="ship", objective="ship it"), focus="ship")
    wanted = f"branch: ctx/kid\nbase: {'0' * 40}\ncopied: {'x' * 300}\n"
    for each in (kid, heir):
        text = text_of(world, each)
        part = text[text.index("\n## Workspace\n\npath: /workspace\n" + wanted) :]
        assert all(f"{key}: {'x' * 300}\n" in part for key in DIFFERENCES)
        assert "left out]" not in text
    assert part.endswith("\n\n## Current work item\n\nid: ship\nstatus: open\nobjective: ship it\n")
    world.agents.journal.update(kid, worktree=replace(worktree, differs={"copied": ""}).dump())
    assert f"base: {'0' * 40}\n\n## Current" in text_of(world, heir), "no more than there is"


def test_nothing_is_shown_of_a_removed_agent(world: World, agent: Agent) -> None:
    session = world.agents.sessions.get(agent.session)
    assert session is not None
    change = Change()
    add_end(world.agents, change, agent, Outcome.DONE)
    world.agents.journal.note(change)
    world.agents.removals.remove(agent)
    assert now.now(world.agents, session) == ""


def test_what_children_reported_is_shown(world: World) -> None:
    boss = world.live(world.agents.births.create(operator(1), "boss"))
    boss.mode = "turn"
    kid = world.live(world.agents.births.create(inside(world.may_create(boss)), "kid"))
    for number in range(12):
        world.agents.messages.report(inside(kid), kid, f"step {number}\nand more")
    session = world.agents.sessions.get(boss.session)
    assert session is not None
    text = now.now(world.agents, session)
    assert "step 1\n" not in text, "ten are kept"
    assert text.index("step 2") < text.index("step 11")
    assert "kid" in text[: text.index("step 2")]
    assert now.now(world.agents, session) == text
