"""Which lines ``ctx top`` shows, in which order, and what they say."""

from __future__ import annotations

from typing import Any

import pytest

from client.installed.model import (
    BY_METER,
    SORTS,
    Agent,
    Snapshot,
    Usage,
    View,
    lines,
    percent,
    size,
    told,
)


def agent(name: str, status: str = "busy", **more: Any) -> Agent:
    row = {"name": name, "status": status, "created_at": "2026-11-25T00:00:00.000Z", **more}
    return Agent.of(row)


def snapshot(*agents: Agent, **below: list[str]) -> Snapshot:
    return Snapshot({each.name: each for each in agents}, below)


FAMILY = snapshot(
    agent("boss"), agent("r2"), agent("r10", "dead", outcome="error", reason="exit:3"),
    agent("lint"), agent("alone", "dead", outcome="done", reason="exit:0"),
    boss=["r10", "r2"], r2=["lint"],
)  # fmt: skip


def shown(found: Snapshot, view: View, **usage: Usage) -> list[str]:
    by_key = {found.agents[name].key: used for name, used in usage.items()}
    return [line.branches + line.agent.name for line in lines(found, view, by_key)]


def test_a_tree_is_sorted_by_names_as_people_count() -> None:
    assert shown(FAMILY, View()) == ["alone", "boss", "├─r2", "│ └─lint", "└─r10"]


def test_what_is_folded_is_counted() -> None:
    view = View(folded={FAMILY.agents["boss"].key})
    assert shown(FAMILY, view) == ["alone", "boss"]
    assert lines(FAMILY, view, {})[1].hidden == 3
    view.without_dead = True
    assert lines(FAMILY, view, {})[0].hidden == 2


def test_dead_agents_are_hidden_but_not_above_others() -> None:
    family = snapshot(agent("top", "dead"), agent("kid"), agent("gone", "dead"), top=["kid"])
    assert shown(family, View(without_dead=True)) == ["top", "└─kid"]


def test_what_is_found_is_shown_below_its_parents() -> None:
    assert shown(FAMILY, View(find="lin")) == ["boss", "└─r2", "  └─lint"]
    assert shown(FAMILY, View(find="nobody")) == []


def test_siblings_are_sorted_by_what_they_use() -> None:
    family = snapshot(agent("a"), agent("b"), agent("c"), agent("d", "dead"))
    used = {"a": Usage(0.1, 300, 1), "b": Usage(0.9, 100, 1), "c": Usage(None, 200, 1)}
    used["d"] = Usage(5.0, 900, 1)  # of before its end
    assert shown(family, View("cpu"), **used) == ["b", "a", "c", "d"]
    assert shown(family, View("memory"), **used) == ["a", "c", "b", "d"]
    used = {"a": Usage(0.1, 300, 1, 5, 0.5), "b": Usage(0.9, 100, 1, 9, 0.2),
            "c": Usage(None, 200, 1)}  # fmt: skip
    assert shown(family, View("tokens"), **used) == ["b", "a", "c", "d"]
    assert shown(family, View("cost"), **used) == ["a", "b", "c", "d"]
    since = (("a", 1), ("b", 3), ("c", 2))
    made = (agent(name, since=f"2026-11-25T00:00:0{second}.000Z") for name, second in since)
    family = snapshot(*made)
    assert shown(family, View("change")) == ["b", "c", "a"]


@pytest.mark.parametrize("metered", [True, False])
def test_the_key_goes_round(metered: bool) -> None:
    view = View()
    wanted = [sort for sort in SORTS if metered or sort not in BY_METER]
    seen = []
    for _ in wanted:
        seen.append(view.sort)
        view.next_sort(metered)
    assert seen == wanted
    assert view.sort == SORTS[0]


def test_parents_in_a_circle_are_shown() -> None:
    family = snapshot(agent("a"), agent("b"), a=["b"], b=["a"])
    assert shown(family, View()) == ["a", "└─b"]
    assert family.descendants("a") == ["b"]


def test_what_the_caller_may_not_read_is_empty() -> None:
    one = Agent.of({"name": "x", "status": "dead", "outcome": "error",
                    "created_at": "2026-11-25T00:00:00.000Z"})  # fmt: skip
    assert (one.state, one.kind, one.queue, one.run) == ("error", "error", 0, "")


@pytest.mark.parametrize(
    ("status", "outcome", "reason", "state"),
    [
        ("busy", "", "", "busy"),
        ("dead", "done", "exit:0", "done"),
        ("dead", "error", "exit:3", "exit:3"),
        ("dead", "cancelled", "parent_dead", "parent_dead"),
        ("dead", "", "", "dead"),
    ],
)
def test_the_state_says_why_an_agent_ended(
    status: str, outcome: str, reason: str, state: str
) -> None:
    assert agent("x", status, outcome=outcome, reason=reason).state == state


def test_numbers_are_short() -> None:
    assert [size(count) for count in (0, 1023, 1024, 10 << 10, 1 << 20, 5 << 30, 1 << 40)] == [
        "0B", "1023B", "1.0K", "10K", "1.0M", "5.0G", "1.0T"
    ]  # fmt: skip
    assert all(len(size(10**power)) <= 5 for power in range(15))
    assert [percent(cpu) for cpu in (None, 0.0, 0.123, 1.0, 12.34)] == [
        "", "0.0", "12.3", "100", "1234"
    ]  # fmt: skip


def test_what_agents_write_is_harmless() -> None:
    event = {"type": "agent.report", "ts": "2026-11-25T00:00:00.000Z", "text": "\x1b[2J\u202eab\nc"}
    assert told(event).text == r"agent.report \x1b[2J\u202eab…"
    assert told({"type": "x\x07", "ts": 3}).text == r"x\x07"
    assert told({"type": "run.end", "run": "r1", "outcome": "done"}).text == "run.end r1 done"
