"""The events of a session."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from client.words import EVENT_TYPES
from tests.unit.client.fakes import EVENT, FakeRoot, Run


def test_events(root: FakeRoot, run: Run) -> None:
    lines = json.dumps(EVENT) + "\n" + "not \x1b json\n" + "[" * 60_000 + "\n"
    root.agent("a", status="dead", events=lines)
    status, out, _ = run("events", "a")
    assert status == 0
    assert out.splitlines()[:2] == [
        "2026-11-21T21:50:00.123Z run.end            run=r1 n=3",
        "not \\x1b json",
    ]
    assert run("events", "--json", "a")[1] == lines
    (root.path / "self").symlink_to("agent/a.d")
    assert run("events", "--json")[1] == lines
    first = lines.splitlines(keepends=True)[0]
    for types in (["run.end"], ["run.*"], ["*"], ["agent.stop", "run.end"]):
        words = [word for name in types for word in ("--type", name)]
        assert run("events", "--json", "a", *words)[1].splitlines(keepends=True)[:1] == [first]
    assert run("events", "--json", "a", "--type", "run.start")[1] == ""


def test_a_type_that_is_none_is_refused(root: FakeRoot, run: Run) -> None:
    root.agent("a", status="dead", events=json.dumps(EVENT) + "\n")
    for name in ("run", "end", "*.end", "runs.*", "agent.stopp", ""):
        for words in (("a",), (), ("-f",), ("--after", "0")):
            status, out, err = run("events", *words, "--type", name)
            assert (status, out) == (2, "")
            assert f'"{name}" is not a type of events: agent.create, ' in err


def test_the_types_that_are_offered_are_those_of_the_manual() -> None:
    page = (Path(__file__).parents[3] / "man" / "ctxfs.5").read_text()
    told = page.partition("Types of events are\n")[2].partition(".Pp\n")[0]
    assert set(re.findall(r"[a-z]+(?:\.[a-z]+)+", told)) == set(EVENT_TYPES)


def test_events_follow_whole_lines_until_the_end(root: FakeRoot, spawned: Any) -> None:
    line = json.dumps(EVENT) + "\n"
    directory = root.agent("a", status="busy", events=line + line[:20])
    process = spawned("events", "-f", "--json", "a")
    assert process.stdout.readline() == line.encode()
    with (directory / "session" / "events.jsonl").open("a") as events:
        events.write(line[20:])
    root.end("a", "done", "exit:0")
    assert process.communicate()[0] == line.encode()
    assert process.returncode == 0
