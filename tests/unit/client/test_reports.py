"""What agents reported, of all histories together."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from tests.unit.client.fakes import FakeRoot, Run


def line(agent: str, second: int, text: str, kind: str = "agent.report") -> str:
    when = f"2026-11-21T21:50:{second:02}.000Z"
    return json.dumps({"id": "e1", "ts": when, "type": kind, "agent": agent, "text": text}) + "\n"


def history(root: FakeRoot, name: str, text: str, session: str = "default") -> Path:
    directory = root.path / "home" / "0" / "agent" / name / "session" / session
    directory.mkdir(parents=True)
    (directory / "events.jsonl").write_text(text)
    return directory / "events.jsonl"


def present(root: FakeRoot, name: str) -> None:
    """An agent whose session is in its history."""
    directory = root.agent(name, status="busy") / "session"
    (directory / "events.jsonl").unlink()
    directory.rmdir()
    directory.symlink_to(f"../../home/0/agent/{name}/session/default")


def test_reports_of_all_agents_oldest_first(root: FakeRoot, run: Run) -> None:
    a = line("a", 1, "one\n\x1b[2J") + line("a", 2, "agent.report", "other") + "broken\n"
    history(root, "a", a + line("a", 5, "five"))
    history(root, "gone", line("gone", 3, "three") + line("gone", 7, "torn").rstrip())
    history(root, "gone", line("gone", 4, "four"), "default.1")
    status, out, _ = run("reports")
    assert status == 0
    assert [shown.partition("Z ")[2] for shown in out.splitlines()] == [
        "a: one\\n\\x1b[2J", "gone: three", "gone: four", "a: five",
    ]  # fmt: skip
    assert run("reports", "--json", "gone")[1] == line("gone", 3, "three") + line("gone", 4, "four")
    status, _, err = run("reports", "a", "nobody")
    assert (status, err) == (1, 'ctx: no agent "nobody", or you may not read its history\n')


def test_new_reports_are_followed_until_ctrl_c(root: FakeRoot, spawned: Any) -> None:
    present(root, "a")
    events = history(root, "a", line("a", 1, "one") + line("a", 2, "two")[:20])
    process = spawned("reports", "-f")
    assert process.stdout.readline().endswith(b" a: one\n")
    with events.open("a") as more:
        more.write(line("a", 2, "two")[20:])
    assert process.stdout.readline().endswith(b" a: two\n")
    history(root, "b", line("b", 3, "three"))
    present(root, "b")
    assert process.stdout.readline().endswith(b" b: three\n")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (out, err, process.returncode) == (b"", b"", 130)


def test_new_reports_are_followed_as_long_as_somebody_reads(root: FakeRoot, spawned: Any) -> None:
    present(root, "a")
    history(root, "a", line("a", 1, "one"))
    process = spawned("reports", "-f")
    assert process.stdout.readline().endswith(b" a: one\n")
    process.stdout.close()
    assert process.wait(timeout=10) == 141
    assert process.stderr.read() == b""
