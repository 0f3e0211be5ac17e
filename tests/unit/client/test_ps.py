"""Agents as a list and as a tree."""

from __future__ import annotations

import json

import pytest

from tests.unit.client.fakes import EVENT, FakeRoot, Run


def test_ps(root: FakeRoot, run: Run) -> None:
    root.agent("coder", status="busy", pid="42", run="r3")
    root.agent("rev", status="new", parent="agent:coder session:default run:r3")
    root.agent("old", status="dead", outcome="error", reason="start_failed:no \x1b such file")
    status, out, err = run("ps")
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["NAME", "STATUS", "OUTCOME", "REASON", "PARENT", "RUN", "PID", "AGE"]
    assert [row[:7] for row in rows[1:]] == [
        ["coder", "busy", "-", "-", "operator", "r3", "42"],
        ["rev", "new", "-", "-", "agent:coder", "-", "-"],
    ]
    assert "start_failed:no \\x1b such file" in run("ps", "-a")[1]


def test_ps_json(root: FakeRoot, run: Run) -> None:
    root.agent("rev", status="new", parent="")
    (row,) = json.loads(run("ps", "--json")[1])
    assert row["name"] == "rev" and row["status"] == "new" and row["age"] in (0, 1)


def test_a_line_of_ps_may_hold_any_text(root: FakeRoot, run: Run) -> None:
    root.agent("odd", status="busy", run="r1", reason="a\u2028b\x85c\\")
    assert run("ps")[1].splitlines()[1].split()[:4] == ["odd", "busy", "-", "a\\u2028b\\x85c\\"]
    assert json.loads(run("ps", "--json")[1])[0]["reason"] == "a\u2028b\x85c\\"


def test_ps_of_agents_that_may_not_be_looked_into(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"name": "x", "status": "busy", "outcome": "", "parent": "operator uid:1",
            "profile": "public_named", "created_at": "2026-11-21T21:50:00.123Z"}  # fmt: skip
    monkeypatch.setattr(root, "list_agents", lambda: None)
    (root.path / "agents").write_text(json.dumps(line) + "\n")
    assert run("ps")[1].split()[8:15] == ["x", "busy", "-", "-", "operator", "-", "-"]
    assert run("tree")[1] == "x  busy\n"
    (root.path / "agents").write_text("")
    assert json.loads(run("ps", "--json")[1]) == []


def test_a_child_is_below_its_parent_not_below_another_of_that_name(
    root: FakeRoot, run: Run
) -> None:
    root.agent("p", status="busy")
    root.agent("of-p", status="busy", parent="agent:p session:s run:r1")
    given = root.agent("given", status="new")
    root.agent("stays", status="busy", parent="agent:p", life="detached")
    (root.path / "agent/p.d/child/stays").unlink()  # of one that was removed
    (root.path / "agent/p.d/child/given").symlink_to("../../given.d")
    (given / "parent").write_text("agent:p\n")
    # p is younger than both now
    root.made.sort(key=lambda directory: ("given.d", "stays.d", "p.d").index(directory.name)
                   if directory.name != "of-p.d" else 9)  # fmt: skip
    assert run("tree")[1].splitlines() == [
        "p  busy",
        "├─ given  new",
        "└─ of-p  busy",
        "stays  busy",
    ]


def test_tree(root: FakeRoot, run: Run) -> None:
    root.agent("coder", status="busy")
    root.agent("a", status="dead", outcome="error", reason="exit:3", parent="agent:coder")
    root.agent("b", status="idle", parent="agent:coder")
    root.agent("a1", status="new", parent="agent:a")
    root.agent("solo", status="ready")
    assert run("tree")[1].splitlines() == [
        "coder  busy",
        "├─ a  dead error exit:3",
        "│  └─ a1  new",
        "└─ b  idle",
        "solo  ready",
    ]
    assert run("tree", "a")[1].splitlines() == ["a  dead error exit:3", "└─ a1  new"]
    assert run("tree", "nope")[::2] == (1, 'ctx: no agent "nope"\n')


RESTART = {"id": "e9", "type": "agent.status", "reason": "restart:2", "after": "exit:3"}


def test_between_two_runs(root: FakeRoot, run: Run) -> None:
    events = json.dumps(EVENT) + "\n" + json.dumps(RESTART) + "\n"
    root.agent("waits", status="starting", events=events)
    root.agent("starts", status="starting", run="r3", events=events)
    root.agent("untold", status="starting")
    assert run("tree")[1].splitlines() == [
        "starts  starting",
        "untold  starting",
        "waits  starting restart:2 after exit:3",
    ]
    assert "restart:2 after exit:3" in run("ps")[1]


def test_the_tree_tells_what_does_not_live_as_others_do(root: FakeRoot, run: Run) -> None:
    root.agent("top", status="busy", life="detached")
    for life in ("owned", "temp", "detached"):
        root.agent(life, status="paused", life=life, parent="agent:top")
    assert run("tree")[1].splitlines() == [
        "top  busy",
        "├─ detached  paused (detached)",
        "├─ owned  paused",
        "└─ temp  paused (temp)",
    ]
    for life in ("owned", "temp", "detached"):
        assert json.loads(run("tree", life, "--json")[1])[0]["life"] == life


def test_tree_survives_a_circle(root: FakeRoot, run: Run) -> None:
    for name, other in ("ab", "ba"):
        (root.agent(name, status="busy") / "parent").write_text(f"agent:{other}\n")
    (root.path / "agent/a.d/child/b").symlink_to("../../b.d")
    (root.path / "agent/b.d/child/a").symlink_to("../../a.d")
    assert run("tree", "a")[1].splitlines() == ["a  busy", "└─ b  busy"]
