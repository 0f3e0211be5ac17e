"""Work items and waits."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from client.root import Root
from tests.unit.client.fakes import FakeRoot, Run


def test_unknown_work_items_and_waits(run: Run, inside: Path) -> None:
    assert run("work", "done", "nope")[2] == 'ctx: no work item "nope"\n'
    assert run("waits", "show", "nope")[2] == 'ctx: no wait "nope"\n'


@pytest.mark.usefixtures("made_agents_are_full")
def test_removing_tasks_and_cancelling_waits(root: FakeRoot, run: Run, inside: Path) -> None:
    root.part("task", "a", status="completed")
    root.part("waiting", "b", status="armed")
    assert run("task", "rm", "a") == run("waits", "cancel", "b") == (0, "", "")
    assert os.listdir(inside / "task") == os.listdir(inside / "waiting") == []


@pytest.mark.usefixtures("made_agents_are_full")
def test_work(root: FakeRoot, run: Run, inside: Path) -> None:
    assert run("work", "new", "fix the login") == (0, "work-1\n", "")
    assert run("work", "new", "--focus", "docs", "write it down") == (0, "docs\n", "")
    assert (inside / "work/work-1/objective").read_text() == "fix the login\n"
    assert (inside / "work/docs/objective").read_text() == "write it down\n"
    assert (inside / "work/current").read_text() == "docs\n"
    assert run("work", "focus", "work-1")[0] == 0
    assert (inside / "work/current").read_text() == "work-1\n"
    assert run("work", "set", "docs", "plan.md", "-", stdin=b"1. this\n2. that\n")[0] == 0
    assert run("work", "set", "docs", "parent=site", "blocked_by=work-1")[0] == 0
    for name, status in (("work-1", "active"), ("docs", "blocked")):
        (inside / "work" / name / "status").write_text(status + "\n")
    assert [line.split(maxsplit=4) for line in run("work")[1].splitlines()[1:]] == [
        ["docs", "blocked", "work-1", "site", "write it down"],
        ["work-1", "active", "-", "-", "fix the login"],
    ]
    assert run("work", "show", "docs")[1] == (
        "name: docs\nstatus: blocked\nobjective: write it down\nblocked_by: work-1\n"
        "parent: site\nplan.md:\n  1. this\n  2. that\n"
    )
    assert run("work", "done", "docs", "work-1")[0] == 0
    assert (inside / "work/docs/status").read_text() == "done\n"
    assert len(run("work", "list")[1].splitlines()) == 1
    assert run("work", "cancel", "docs")[0] == 0
    assert (inside / "work/docs/status").read_text() == "cancelled\n"


@pytest.mark.usefixtures("made_agents_are_full")
def test_waits(root: FakeRoot, run: Run, inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    write = Root.write

    def note(self: Any, relative: str, data: bytes) -> None:
        written.append(relative.rpartition("/")[2])
        write(self, relative, data)

    monkeypatch.setattr(Root, "write", note)
    argv = ["waits", "add", "-a", "x", "--work", "w1", "--deadline", "2h", "later", "timer", "30s"]
    assert run(*argv) == (0, "", "")
    assert written == ["work", "deadline", "on"]  # which arms it, so that all must be there
    assert (inside / "waiting/later/on").read_text() == "timer 30s\n"
    assert run("waits", "add", "-a", "x", "soon", "timer 1s")[0] == 0
    for name, status in (("later", "armed"), ("soon", "fired")):
        (inside / "waiting" / name / "status").write_text(status + "\n")
    rows = [line.split(maxsplit=4) for line in run("waits")[1].splitlines()]
    assert rows == [
        ["WAIT", "STATUS", "ON", "WORK", "DEADLINE"],
        ["later", "armed", "timer", "30s", "w1    2h"],
    ]
    assert "payload" in json.loads(run("waits", "show", "--json", "soon")[1])


@pytest.mark.usefixtures("made_agents_are_full", "inside")
def test_a_trigger_says_whom_to_tell(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Root.write

    def arm(self: Any, relative: str, data: bytes) -> None:
        write(self, relative, data)
        (root.path / relative).with_name("token").write_text("0123abcd\n")

    monkeypatch.setattr(Root, "write", arm)
    assert run("waits", "add", "w", "trigger") == (0, f"{root.path}/trigger/0123abcd\n", "")
