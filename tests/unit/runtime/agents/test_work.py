"""Work items: what each may become, the focus, and what is in their way."""

from __future__ import annotations

import json
from functools import partial

import pytest

from runtime.errors import (
    CtxError,
    MalformedError,
    MissingError,
    QuotaError,
    TakenError,
    TooLongError,
    WrongStateError,
)
from runtime.records.change import Change
from runtime.records.items import Wait, Work, WorkStatus
from runtime.records.lifecycle import Status
from runtime.records.model import Agent, Outcome
from tests.worlds.records import World, add_end, cancel_new, inside, operator, rmdir

USER = operator(1000)


pytestmark = pytest.mark.settings(work_items=8, waits=8)


@pytest.fixture
def agent(world: World) -> Agent:
    return world.live(world.agents.births.create(USER, "coder"))


def make(world: World, agent: Agent, *names: str) -> list[Work]:
    return [world.agents.work.make(USER, agent, name) for name in names]


def write(world: World, agent: Agent, item: Work, field: str, text: str) -> None:
    world.agents.work.set(agent, item, field, text)


def status(world: World, agent: Agent, item: Work, text: str) -> None:
    write(world, agent, item, "status", text)


def wait_for(world: World, agent: Agent, name: str, item: Work, on: str = "timer 1h") -> Wait:
    wait = world.agents.waiting.make(USER, agent, name)
    world.agents.waiting.set(agent, wait, "work", item.name)
    world.agents.waiting.arm(USER, agent, wait, on)
    return wait


def told(world: World, agent: Agent) -> list[tuple[str, str]]:
    """(work, status) of the events so far."""
    lines = [json.loads(line) for line in world.lines(agent)]
    return [(e["work"], e["status"]) for e in lines if e["type"] == "work.status"]


# the table


#: (status before, what is written) -> (status after, whether it has the focus), or the error
WRITTEN: dict[tuple[str, str], tuple[str, bool] | type[CtxError]] = {
    ("open", "open"): ("open", False),
    ("open", "active"): ("active", True),
    ("open", "blocked"): ("blocked", False),
    ("open", "done"): ("done", False),
    ("open", "cancelled"): ("cancelled", False),
    ("active", "open"): ("open", False),
    ("active", "active"): ("active", True),
    ("active", "blocked"): ("blocked", True),
    ("active", "done"): ("done", False),
    ("active", "cancelled"): ("cancelled", False),
    ("blocked", "open"): ("open", False),
    ("blocked", "active"): ("active", True),
    ("blocked", "blocked"): ("blocked", False),
    ("blocked", "done"): ("done", False),
    ("blocked", "cancelled"): ("cancelled", False),
    **{("done", word): WrongStateError for word in WorkStatus},
    **{("cancelled", word): WrongStateError for word in WorkStatus},
}


def test_every_status_that_can_be_written_is_looked_at() -> None:
    assert {before for before, _ in WRITTEN} == set(WorkStatus) == {word for _, word in WRITTEN}
    assert len(WRITTEN) == len(WorkStatus) ** 2


@pytest.mark.parametrize(("before", "word"), WRITTEN)
def test_what_a_written_status_does(world: World, agent: Agent, before: str, word: str) -> None:
    (item,) = make(world, agent, "w")
    write(world, agent, item, "objective", "to reach it\n")
    if before != "open":
        status(world, agent, item, before)
    events = len(told(world, agent))
    wanted = WRITTEN[before, word]
    if isinstance(wanted, type):
        with pytest.raises(wanted, match=f'"w" (is|has ended: its status is) {before}'):
            status(world, agent, item, word)
        assert item.status == before
        return
    world.agents.work.update(Change(), agent, item, "status", word)
    assert item.status == before, "only looked at"
    status(world, agent, item, word)
    assert (item.status, agent.focus == "w") == wanted
    assert told(world, agent)[events:] == ([("w", word)] if word != before else [])


# making and removing


def test_an_item_begins_open_and_empty(world: World, agent: Agent) -> None:
    item = world.agents.work.make(inside(agent), agent, "w")
    assert (item.status, item.objective, item.plan, item.acceptance) == ("open", "", "", "")
    assert (item.blocked_by, item.parent) == ((), "")
    assert item.created > 0
    assert item.updated >= item.created
    assert told(world, agent) == [("w", "open")]
    assert agent.focus == ""


@pytest.mark.parametrize("name", ["", ".", "a/b", "current", "x.d", "x.sock", "ä", "x" * 65, "a\n"])
def test_what_is_no_name_is_refused(world: World, agent: Agent, name: str) -> None:
    with pytest.raises(MalformedError):
        make(world, agent, name)


def test_a_name_is_given_once(world: World, agent: Agent) -> None:
    make(world, agent, "w")
    with pytest.raises(TakenError, match='already has a work item "w"'):
        make(world, agent, "w")


def test_there_are_so_many_and_no_more(world: World, agent: Agent) -> None:
    items = make(world, agent, *(f"w{n}" for n in range(8)))
    with pytest.raises(QuotaError, match="has 8 work items"):
        make(world, agent, "one-more")
    rmdir(world.agents.work, USER, agent, items[0].name)
    make(world, agent, "one-more")
    write(world, agent, items[1], "objective", "it")
    status(world, agent, items[1], "done")
    make(world, agent, "after-the-done-one")


@pytest.mark.settings(ended=1)
def test_what_is_done_counts_by_itself(world: World, agent: Agent) -> None:
    for item in make(world, agent, "a", "b"):
        status(world, agent, item, "cancelled")
    with pytest.raises(QuotaError, match=r"has 2 work items that have ended.*remove some"):
        make(world, agent, "c")
    rmdir(world.agents.work, USER, agent, "a")
    rmdir(world.agents.work, USER, agent, "b")
    make(world, agent, "c")


def test_the_name_is_judged_before_the_state(world: World, agent: Agent) -> None:
    make(world, agent, "w")
    world.agents.journal.update(agent, status=Status.DEAD)
    with pytest.raises(MalformedError):
        make(world, agent, "a/b")
    with pytest.raises(TakenError):
        make(world, agent, "w")


@pytest.mark.parametrize("at", WorkStatus)
def test_what_is_in_use_is_not_removed(world: World, agent: Agent, at: WorkStatus) -> None:
    (item,) = make(world, agent, "w")
    write(world, agent, item, "objective", "x")
    status(world, agent, item, at)
    if at in (WorkStatus.ACTIVE, WorkStatus.BLOCKED):
        with pytest.raises(WrongStateError, match=f'"w" is {at}'):
            rmdir(world.agents.work, USER, agent, "w")
        return
    rmdir(world.agents.work, USER, agent, "w")
    assert world.agents.items.of(agent.index, Work) == []
    with pytest.raises(MissingError):
        rmdir(world.agents.work, USER, agent, "w")
    with pytest.raises(MissingError, match="was removed"):
        write(world, agent, item, "plan", "too late")


def test_what_is_removed_is_in_nobodys_way(world: World, agent: Agent) -> None:
    first, second = make(world, agent, "first", "second")
    write(world, agent, second, "blocked_by", "first\n")
    assert second.status == "blocked"
    rmdir(world.agents.work, USER, agent, first.name)
    assert (second.status, second.blocked_by) == ("open", ())


# the fields


def test_done_needs_an_objective(world: World, agent: Agent) -> None:
    (item,) = make(world, agent, "w")
    write(world, agent, item, "objective", " \n")
    with pytest.raises(WrongStateError, match='"w" has no objective'):
        status(world, agent, item, "done")
    write(world, agent, item, "objective", "to reach it\n")
    status(world, agent, item, "done")


@pytest.mark.parametrize(
    ("field", "text", "error", "match"),
    [
        ("status", "finished", MalformedError, "open, active, blocked, done, cancelled"),
        ("status", "done\n", MalformedError, "unknown value"),
        ("status", "", MalformedError, "unknown value"),
        ("parent", "a\nb", MalformedError, "one line"),
        ("blocked_by", "w\n", MalformedError, "block itself"),
        ("blocked_by", "other\nnone\n", MissingError, 'has no work item "none"'),
        ("plan", "x" * 65537, TooLongError, "65536"),
        ("objective", "ä" * 32769, TooLongError, "65536"),
    ],
)
def test_bad_text_is_refused_and_changes_nothing(
    world: World, agent: Agent, field: str, text: str, error: type[CtxError], match: str
) -> None:
    item, _ = make(world, agent, "w", "other")
    before = item.dump()
    with pytest.raises(error, match=match):
        world.agents.work.update(Change(), agent, item, field, text)
    with pytest.raises(error, match=match):
        write(world, agent, item, field, text)
    assert item.dump() == before


def test_a_change_is_timed(world: World, agent: Agent) -> None:
    (item,) = make(world, agent, "w")
    before = item.updated
    write(world, agent, item, "plan", "x")
    assert item.updated > before
    assert item.created <= before


# the focus


def test_at_most_one_is_active(world: World, agent: Agent) -> None:
    first, second = make(world, agent, "first", "second")
    world.agents.work.focus(agent, "first")
    world.agents.work.focus(agent, "second")
    assert (first.status, second.status, agent.focus) == ("open", "active", "second")
    status(world, agent, first, "active")
    assert (first.status, second.status, agent.focus) == ("active", "open", "first")
    world.agents.work.focus(agent, "")
    assert (first.status, second.status, agent.focus) == ("open", "open", "")
    world.agents.work.focus(agent, "")
    assert told(world, agent)[2:] == [
        ("first", "active"),
        ("first", "open"),
        ("second", "active"),
        ("second", "open"),
        ("first", "active"),
        ("first", "open"),
    ]


@pytest.mark.parametrize("end", ["done", "cancelled"])
def test_what_is_over_takes_no_focus(world: World, agent: Agent, end: str) -> None:
    item, other = make(world, agent, "w", "other")
    world.agents.work.focus(agent, "other")
    write(world, agent, item, "objective", "x")
    status(world, agent, item, end)
    for refused in (world.agents.work.focus, partial(world.agents.work.turn_to, Change())):
        with pytest.raises(WrongStateError, match=f"is {end}"):
            refused(agent, "w")
    assert (agent.focus, other.status) == ("other", "active")


def test_what_is_not_there_takes_no_focus(world: World, agent: Agent) -> None:
    for refused in (world.agents.work.focus, partial(world.agents.work.turn_to, Change())):
        with pytest.raises(MissingError, match='has no work item "none"'):
            refused(agent, "none")


def test_looking_whether_it_could_be_focused_does_not_focus(world: World, agent: Agent) -> None:
    (item,) = make(world, agent, "w")
    world.agents.work.turn_to(Change(), agent, "w")
    assert (item.status, agent.focus) == ("open", "")


def test_the_end_of_an_item_ends_its_focus(world: World, agent: Agent) -> None:
    (item,) = make(world, agent, "w")
    world.agents.work.focus(agent, "w")
    status(world, agent, item, "cancelled")
    assert agent.focus == ""


def test_a_new_incarnation_has_neither_items_nor_focus(world: World, agent: Agent) -> None:
    (item,) = make(world, agent, "w")
    world.agents.work.focus(agent, "w")
    cancel_new(world.agents, _as_new(world, agent), "operator_stop")
    fresh = world.agents.births.renew(agent)
    assert fresh.focus == ""
    assert world.agents.items.of(fresh.index, Work) == []
    assert world.agents.items.get(item.index) is None
    assert world.reopen().items.all(Work) == []


def _as_new(world: World, agent: Agent) -> Agent:
    world.agents.journal.update(agent, status=Status.NEW)
    return agent


# what is in the way


def test_a_wait_blocks_and_lets_go(world: World, agent: Agent) -> None:
    (item,) = make(world, agent, "w")
    wait_for(world, agent, "x", item)
    second = wait_for(world, agent, "y", item)
    assert item.status == "blocked"
    assert world.agents.work.blocked_by(agent, item) == "wait x\nwait y\n"
    rmdir(world.agents.waiting, USER, agent, "x")
    assert item.status == "blocked"
    world.agents.waiting.set(agent, second, "work", "")
    assert (item.status, world.agents.work.blocked_by(agent, item)) == ("open", "")
    assert told(world, agent) == [("w", "open"), ("w", "blocked"), ("w", "open")]


def test_what_has_the_focus_keeps_it_while_it_is_blocked(world: World, agent: Agent) -> None:
    (item,) = make(world, agent, "w")
    world.agents.work.focus(agent, "w")
    wait_for(world, agent, "x", item)
    assert (item.status, agent.focus) == ("blocked", "w")
    rmdir(world.agents.waiting, USER, agent, "x")
    assert (item.status, agent.focus) == ("active", "w")
    assert told(world, agent)[-2:] == [("w", "blocked"), ("w", "active")]


def test_what_lost_the_focus_meanwhile_is_open_again(world: World, agent: Agent) -> None:
    item, other = make(world, agent, "w", "other")
    world.agents.work.focus(agent, "w")
    wait_for(world, agent, "x", item)
    world.agents.work.focus(agent, "other")
    assert (item.status, other.status) == ("blocked", "active")
    rmdir(world.agents.waiting, USER, agent, "x")
    assert (item.status, other.status, agent.focus) == ("open", "active", "other")


def test_a_blocked_item_can_be_taken_up_all_the_same(world: World, agent: Agent) -> None:
    item, _ = make(world, agent, "w", "other")
    wait = wait_for(world, agent, "x", item)
    world.agents.work.focus(agent, "w")
    assert (item.status, wait.status) == ("active", "armed")
    world.agents.work.focus(agent, "other")
    assert item.status == "blocked", "the wait is still in its way"
    world.agents.work.focus(agent, "w")
    rmdir(world.agents.waiting, USER, agent, "x")
    assert item.status == "active"


def test_what_is_blocked_is_not_just_opened(world: World, agent: Agent) -> None:
    item, _ = make(world, agent, "w", "first")
    write(world, agent, item, "blocked_by", "first\n")
    wait_for(world, agent, "x", item)
    with pytest.raises(WrongStateError, match='"w" is blocked by first, wait x'):
        status(world, agent, item, "open")
    assert item.status == "blocked"


def test_items_that_come_first_block(world: World, agent: Agent) -> None:
    item, first, second = make(world, agent, "w", "first", "second")
    write(world, agent, item, "blocked_by", "first\nsecond\nfirst\n")
    assert (item.status, item.blocked_by) == ("blocked", ("first", "second"))
    write(world, agent, first, "objective", "x")
    status(world, agent, first, "done")
    assert item.status == "blocked"
    status(world, agent, second, "cancelled")
    assert item.status == "open"
    assert world.agents.work.blocked_by(agent, item) == "first\nsecond\n"


def test_an_item_is_unblocked_by_the_last_of_all(world: World, agent: Agent) -> None:
    item, first = make(world, agent, "w", "first")
    write(world, agent, item, "blocked_by", "first\n")
    wait_for(world, agent, "x", item)
    status(world, agent, first, "cancelled")
    assert item.status == "blocked"
    rmdir(world.agents.waiting, USER, agent, "x")
    assert item.status == "open"


def test_waits_are_read_in_blocked_by_and_ignored_when_written(world: World, agent: Agent) -> None:
    item, _, _ = make(world, agent, "w", "first", "second")
    wait_for(world, agent, "x", item)
    write(world, agent, item, "blocked_by", "first\n")
    shown = world.agents.work.blocked_by(agent, item)
    assert shown == "first\nwait x\n"
    write(world, agent, item, "blocked_by", f"{shown}second\nwait nothing\n")
    assert world.agents.work.blocked_by(agent, item) == "first\nsecond\nwait x\n"
    write(world, agent, item, "blocked_by", "")
    assert (item.status, item.blocked_by) == ("blocked", ())


def test_what_is_taken_out_of_blocked_by_blocks_no_more(world: World, agent: Agent) -> None:
    item, _, _ = make(world, agent, "w", "first", "second")
    write(world, agent, item, "blocked_by", "first\nsecond\n")
    world.agents.work.focus(agent, "w")
    write(world, agent, item, "blocked_by", "second\n")
    assert item.status == "active", "nothing new is in its way"
    world.agents.work.focus(agent, "")
    assert item.status == "blocked"
    write(world, agent, item, "blocked_by", "")
    assert item.status == "open"


def test_blocked_without_a_reason_stays_until_it_is_taken_back(world: World, agent: Agent) -> None:
    (item,) = make(world, agent, "w")
    status(world, agent, item, "blocked")
    write(world, agent, item, "blocked_by", "")
    assert item.status == "blocked"
    status(world, agent, item, "open")
    assert item.status == "open"


@pytest.mark.parametrize("end", ["done", "cancelled"])
def test_the_end_of_an_item_cancels_its_waits(world: World, agent: Agent, end: str) -> None:
    item, other = make(world, agent, "w", "other")
    write(world, agent, item, "objective", "x")
    waits = [wait_for(world, agent, name, item) for name in ("x", "y")]
    kept = wait_for(world, agent, "z", other)
    status(world, agent, item, end)
    assert [wait.status for wait in waits] == ["cancelled", "cancelled"]
    assert (item.status, kept.status) == (end, "armed")
    assert told(world, agent)[-1] == ("w", end)


def test_everything_is_there_again_after_a_crash(world: World, agent: Agent) -> None:
    item, _ = make(world, agent, "w", "first")
    for field, text in (
        ("objective", "o\n"), ("plan", "p\n"), ("acceptance", "a\n"), ("parent", "chain"),
        ("blocked_by", "first\n"),
    ):  # fmt: skip
        write(world, agent, item, field, text)
    world.agents.work.focus(agent, "w")
    agents = world.reopen()
    again = agents.registry.named("coder")
    assert again is not None
    assert again.focus == "w"
    assert agents.work.find(again, "w").dump() == item.dump()
    assert agents.work.find(again, "w").status is WorkStatus.ACTIVE


def test_an_agent_that_ends_leaves_its_items_unblocked(world: World, agent: Agent) -> None:
    (item,) = make(world, agent, "w")
    wait = wait_for(world, agent, "x", item)
    change = Change()
    add_end(world.agents, change, agent, Outcome.DONE, "exit:0")
    world.agents.journal.note(change)
    assert (wait.status, item.status) == ("cancelled", "open")
