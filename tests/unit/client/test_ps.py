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


def test_where_an_agent_runs(root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    far = root.agent("far", status="busy")
    root.agent("near", status="busy")
    root.list_agents()
    rows = [json.loads(line) for line in (root.path / "agents").read_text().splitlines()]
    lines = [{**row, "node": "n2" if row["name"] == "far" else ""} for row in rows]
    monkeypatch.setattr(root, "list_agents", lambda: None)
    (root.path / "agents").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = [line.split() for line in run("ps")[1].splitlines()]
    assert [row[-1] for row in table] == ["NODE", "n2", "-"]
    assert [row["node"] for row in json.loads(run("ps", "--json")[1])] == ["n2", ""]
    assert run("tree")[1] == "far  busy (at n2)\nnear  busy\n"
    for agent in root.made:
        (agent / "usage").write_text(USED)
    table = [line.split() for line in run("tree", "-l")[1].splitlines()]
    assert [row[2] for row in table] == ["NODE", "n2", "-"]
    (far / "node").write_text("name=n2\nlink=up\nseen=\nlease=21\npending=pause\nfetch=2048\n")
    status = run("status", "far")[1]
    assert "Node: n2, link up, lease 21 s, not confirmed: pause, 2.0KiB to come\n" in status
    assert json.loads(run("status", "--json", "far")[1])["node"]["link"] == "up"
    assert "Node:" not in run("status", "near")[1]


def test_an_agent_lists_the_nodes_that_it_may_use(
    root: FakeRoot, run: Run, inside: object
) -> None:
    line = {"name": "n2", "owner": 0, "state": "up", "since": "2026-11-28T23:12:59.693Z",
            "seen": "", "version": "0.3", "error": ""}  # fmt: skip
    (root.path / "nodes").write_text(json.dumps(line) + "\n")
    status, out, _ = run("nodes", "list")
    assert status == 0
    assert out.splitlines()[0].split() == ["NAME", "STATE", "SINCE", "SEEN", "PRODUCT", "ERROR"]
    row = out.splitlines()[1].split()
    assert (row[:2], row[-3:]) == (["n2", "up"], ["-", "0.3", "-"])


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


USED = "cpu_usec=1500000\nmemory_current=2048\nprocesses=2\n"


def test_tree_with_what_is_used(root: FakeRoot, run: Run) -> None:
    boss = root.agent("boss", status="busy")
    (boss / "usage").write_text(USED)
    for name in ("a", "b"):
        root.agent(name, status="idle", parent="agent:boss")
    rows = [line.split() for line in run("tree", "-l")[1].splitlines()]
    assert rows == [
        ["NAME", "STATUS", "CPU", "MEMORY", "PROCS"],
        ["boss", "busy", "1.5", "2.0KiB", "2"],
        ["├─", "a", "idle", "-", "-", "-"],
        ["└─", "b", "idle", "-", "-", "-"],
    ]
    for name, count in (("a", 1), ("b", 1_500_000)):
        metered = f"tokens.in={count}\ntokens.out=7\ncost=0.250000\n"
        (root.path / f"agent/{name}.d/usage").write_text(USED + metered)
    lines = run("tree", "--sort", "tokens")[1].splitlines()
    assert lines[0].split()[-2:] == ["TOKENS", "COST"]
    assert [line.split()[1] for line in lines[2:]] == ["b", "a"]
    assert lines[2].split()[-2:] == ["1.5M", "0.25"] and lines[3].split()[-2:] == ["8", "0.25"]
    (found,) = json.loads(run("tree", "-l", "--json")[1])
    assert found["usage"]["processes"] == 2
    assert found["children"][0]["usage"]["cost"] == 0.25
    assert "usage" not in json.loads(run("tree", "--json")[1])[0]
    assert run("tree", "--sort", "age")[0] == 2


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
