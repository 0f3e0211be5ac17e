"""What ends are told with: bounded, whatever a child wrote, and without what is not there."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from runtime.agents.results import exit_of
from runtime.kernel.output import append
from runtime.records.change import Change
from runtime.records.documents import replace_file
from runtime.records.items import Task
from runtime.records.lifecycle import Status
from runtime.records.model import Agent, Outcome
from runtime.records.run import Said
from tests.worlds.records import World, add_end, inside, operator

USER = operator(1000)
BOUND = 8 << 10


@pytest.fixture
def parent(world: World) -> Agent:
    agent = world.may_create(world.live(world.agents.births.create(USER, "boss"), Status.IDLE))
    world.agents.journal.update(agent, mode="turn")
    return agent


@pytest.fixture
def child(world: World, parent: Agent) -> Agent:
    return world.live(world.agents.births.create(inside(parent), "rev"))


def handle_of(world: World, parent: Agent) -> Task:
    found = world.agents.items.named(parent.index, Task, "rev")
    assert found is not None
    return found


def end(
    world: World, parent: Agent, child: Agent, outcome: Outcome = Outcome.DONE,
    reason: str = "exit:0",
) -> dict[str, Any]:  # fmt: skip
    """Ends the child; what its parent is told."""
    change = Change()
    add_end(world.agents, change, child, outcome, reason)
    world.agents.journal.note(change)
    (message,) = world.agents.messages.pending(parent)
    told: dict[str, Any] = json.loads(message.text)
    return told


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("exit:7", "exit:7"),
        ("signal:9", "signal:9"),
        ("exit:7,unkillable", "exit:7"),
        ("exit:", ""),
        ("exit:7x", ""),
        ("timeout", ""),
        ("start_failed: exit:7", ""),
        ("", ""),
    ],
)
def test_an_exit_is_what_a_program_ended_with(reason: str, text: str) -> None:
    assert exit_of(reason) == text


def test_a_failure_is_told_with_its_exit_and_its_last_words(
    world: World, parent: Agent, child: Agent
) -> None:
    append(world.agents.documents.directory(child) / "out", b"no such file\n", 1 << 20)
    told = end(world, parent, child, Outcome.ERROR, "exit:7")
    assert (told["status"], told["exit"], told["reason"]) == ("failed", "exit:7", "exit:7")
    assert (told["preview"], told["result"], told["truncated"]) == ("no such file\n", "", False)
    assert told["output_path"] == "/ctx/agent/boss.d/task/rev/output"
    handle = handle_of(world, parent)
    assert (handle.exit, handle.reason) == ("exit:7", "exit:7")


def test_all_that_a_child_gave_back_comes_along(world: World, parent: Agent, child: Agent) -> None:
    agents = world.agents
    agents.documents.write(child, "result.md", "schön\n".encode())
    agents.documents.write(child, "refs.jsonl", b'{"path":"a.c","line":3}\n\n{"path":"b.c"}\n')
    (agents.documents.path(child, "artifact") / "sub").mkdir()
    for name in ("sub/plot.png", "b"):
        (agents.documents.path(child, "artifact") / name).touch()
    told = end(world, parent, child)
    assert (told["result"], told["preview"], told["truncated"]) == ("schön\n", "schön\n", False)
    assert told["refs"] == [{"path": "a.c", "line": 3}, {"path": "b.c"}]
    assert told["artifacts"] == ["artifact/b", "artifact/sub/plot.png"]
    path = "/ctx/home/1000/agent/boss/session/default/context/child/rev/result.md"
    assert told["output_path"] == path


@pytest.mark.parametrize("letter", ["x", "\x01", "\N{GRINNING FACE}", "\udcff"])
def test_everything_is_bounded(world: World, parent: Agent, child: Agent, letter: str) -> None:
    data = ("begin " + letter * (1 << 20) + " end").encode(errors="surrogateescape")
    agents = world.agents
    agents.documents.path(child, "result.md").write_bytes(data)
    ref = json.dumps({"path": letter * 100 if letter != "\udcff" else "x"}) + "\n"
    agents.documents.write(child, "refs.jsonl", ref.encode() * 10_000)
    root = agents.documents.path(child, "artifact")
    for number in range(1000):
        (root / os.fsdecode(b"%d-" % number + letter.encode(errors="surrogateescape"))).touch()
    told = end(world, parent, child)
    assert told["truncated"] is True
    for key in ("preview", "result"):
        assert len(told[key].encode()) <= BOUND
        assert told[key].startswith("begin ")
        assert told[key].endswith(" end")
        assert "bytes left out" in told[key]
    for key in ("refs", "artifacts"):
        shown = json.dumps(told[key], ensure_ascii=False, separators=(",", ":"))
        assert 0 < len(shown.encode()) <= BOUND, key
    assert all(ref == told["refs"][0] for ref in told["refs"])
    assert len(json.dumps(told)) < 256 << 10


@pytest.mark.parametrize("key", ["refs", "artifacts"])
def test_one_that_has_no_room_is_left_out(
    world: World, parent: Agent, child: Agent, key: str
) -> None:
    agents = world.agents
    if key == "refs":
        agents.documents.write(child, "refs.jsonl", json.dumps({"a": "x" * BOUND}).encode() + b"\n")
    else:
        path = agents.documents.path(child, "artifact")
        for _ in range(36):
            path /= "d" * 100
            path.mkdir()
        for number in range(4):
            (path / f"{number}{'f' * 100}").touch()
    told = end(world, parent, child)
    assert told["truncated"] is True
    assert len(told[key]) == (0 if key == "refs" else 2)


def test_a_handle_starts_with_its_child(world: World, parent: Agent, child: Agent) -> None:
    handle, tasks = handle_of(world, parent), world.agents.tasks
    assert handle.started == 0.0
    with world.agents.journal.changing() as change:
        tasks.child_started(change, child, 5.0)
    assert handle.started == 5.0
    (event,) = [json.loads(line) for line in world.lines(parent) if "task.start" in line]
    assert (event["task"], event["pid"], event["agent"]) == ("rev", "", "boss")


def say(world: World, child: Agent, data: bytes) -> None:
    append(world.agents.documents.directory(child) / "out", data, 1 << 20)


def test_of_a_child_that_runs_the_end_of_its_output_is_shown(
    world: World, parent: Agent, child: Agent
) -> None:
    handle = handle_of(world, parent)
    say(world, child, b"first\n")
    assert world.agents.results.preview(handle) == ("first\n", False)
    say(world, child, "ä".encode() * 40_000 + b"\nlast\n")
    preview, truncated = world.agents.results.preview(handle)
    assert truncated
    assert preview.endswith("ä\nlast\n")
    assert set(preview[:-6]) == {"ä"}
    assert len(preview.encode()) <= BOUND
    source = world.agents.results.source(handle)
    whole = source.read(0, 1 << 20)
    assert source.size() == len(whole) <= 64 << 10
    assert set(whole.decode()[:-6]) == {"ä"}, "it begins with a character"
    say(world, child, b"more\n")
    assert source.read(len(whole), 100) == b"more\n", "it grows"


def test_of_another_run_only_its_own_output_is_shown(
    world: World, parent: Agent, child: Agent
) -> None:
    say(world, child, b"before\n")
    world.agents.journal.update(child, said=Said(output_start=len(b"before\n")))
    say(world, child, b"now\n")
    assert world.agents.results.preview(handle_of(world, parent)) == ("now\n", False)


def test_a_reply_is_shown_before_a_result_until_the_end(
    world: World, parent: Agent, child: Agent
) -> None:
    handle = handle_of(world, parent)
    say(world, child, b"output\n")
    world.agents.documents.write(child, "result.md", b"result\n")
    assert world.agents.results.preview(handle)[0] == "result\n"
    session = world.agents.sessions.get(child.session)
    assert session is not None
    replace_file(world.agents.sessions.ensure(session) / "latest.md", b"reply\n")
    assert world.agents.results.preview(handle)[0] == "reply\n"
    assert end(world, parent, child)["preview"] == "result\n"
    assert world.agents.results.preview(handle)[0] == "result\n"


def test_what_nobody_is_told_is_not_looked_for(
    world: World, parent: Agent, child: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ends of a thousand children with their parent cost no look at what they wrote."""
    world.agents.journal.update(parent, status=Status.STOPPING)
    monkeypatch.setattr(os, "scandir", None)
    change = Change()
    add_end(world.agents, change, child, Outcome.CANCELLED, "parent_dead")
    world.agents.journal.note(change)
    assert handle_of(world, parent).reason == "parent_dead"
