"""The command prune."""

from __future__ import annotations

import json

from tests.unit.client.fakes import ASKED, FakeAgent, FakeRoot, Run

ENDED = "2026-10-01T00:00:00.000Z"
OLD = {"type": "removed", "path": "agent/x.d", "owner": 1000, "ended": ENDED}
LEFT = {**OLD, "type": "left", "path": "agent/y.d", "left": "its worktree is kept"}
DONE = {"type": "prune", "removed": 1, "left": 1}


def test_it_shows_what_is_removed_and_what_is_left(root: FakeRoot, run: Run) -> None:
    fake = FakeAgent(root, ASKED, OLD, LEFT, DONE, path="ctxd.sock", times=3)
    lines = f"{ENDED} removed agent/x.d\n{ENDED} left agent/y.d: its worktree is kept\n"
    assert run("prune", "--older", "30d") == (0, lines, "")
    dry = lines.replace("removed", "would remove")
    assert run("prune", "--older", "30d", "--dry-run") == (0, dry, "")
    _, out, _ = run("prune", "--older", "30d", "--json")
    told = [{**json.loads(line), "id": None} for line in out.splitlines()]
    assert told == [{**each, "id": None} for each in (OLD, LEFT)]
    asked = [(each["older"], each["dry_run"]) for each in fake.requests]
    assert asked == [("30d", False), ("30d", True), ("30d", False)]


def test_it_says_what_is_missing(root: FakeRoot, run: Run) -> None:
    assert run("prune") == (2, "", "ctx: say what is old: ctx prune --older 30d\n")


def test_it_says_what_is_wrong(root: FakeRoot, run: Run) -> None:
    wrong = {"type": "error", "code": "EINVAL", "message": "older: x is no duration"}
    FakeAgent(root, ASKED, wrong, path="ctxd.sock")
    assert run("prune", "--older", "x") == (1, "", "ctx: older: x is no duration (EINVAL)\n")


def test_it_says_so_if_the_daemon_goes_away(root: FakeRoot, run: Run) -> None:
    FakeAgent(root, ASKED, OLD, path="ctxd.sock")
    status, _, err = run("prune", "--older", "30d")
    assert (status, err) == (69, "ctx: the daemon did not answer\n")
