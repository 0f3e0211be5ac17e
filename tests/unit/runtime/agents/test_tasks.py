"""Tasks: commands until they are started, previews, handles of children, and ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.caller import Caller
from runtime.cell.record import RunRecord, judge_task
from runtime.errors import (
    DeniedError,
    ForbiddenError,
    MalformedError,
    MissingError,
    QuotaError,
    TakenError,
    WrongStateError,
)
from runtime.ids import AgentIndex
from runtime.kernel.output import append
from runtime.records.change import Change
from runtime.records.documents import replace_file
from runtime.records.items import TASK_MOVES, Task, TaskCue, TaskStatus, Wait
from runtime.records.lifecycle import Status
from runtime.records.model import Agent, Outcome
from tests.worlds.records import ROOT, World, add_end, inside, operator, rmdir, world_in

USER = operator(1000)


pytestmark = pytest.mark.settings(tasks=3)


@pytest.fixture
def agent(world: World) -> Agent:
    return made_live(world, "coder")


def made_live(world: World, name: str) -> Agent:
    agent = world.may_create(world.live(world.agents.births.create(USER, name), Status.IDLE))
    world.agents.journal.update(agent, mode="turn")
    return agent


def make(world: World, agent: Agent, name: str = "t", cmd: str = "true") -> Task:
    task = world.agents.tasks.make(USER, agent, name)
    world.agents.tasks.set(task, cmd=cmd)
    return task


def child_of(world: World, agent: Agent, name: str = "rev") -> Agent:
    return world.agents.births.create(inside(agent), name)


def handle(world: World, agent: Agent, name: str = "rev") -> Task | None:
    return world.agents.items.named(agent.index, Task, name)


def the_handle(world: World, agent: Agent, name: str = "rev") -> Task:
    found = handle(world, agent, name)
    assert found is not None
    assert found.child
    return found


def put_status(world: World, task: Task, status: TaskStatus) -> None:
    with world.agents.journal.changing() as change:
        change.put(task, status=status)


def end(
    world: World, agent: Agent, task: Task, cue: str = "done", exit_text: str = ""
) -> None:
    with world.agents.journal.changing() as change:
        world.agents.tasks.end(change, agent, task, TaskCue(cue), exit_text=exit_text)


def record_end(world: World, agent: Agent, outcome: Outcome = Outcome.DONE) -> None:
    change = Change()
    add_end(world.agents, change, agent, outcome, "why")
    world.agents.journal.note(change)


def wait_on(world: World, agent: Agent, on: str, name: str = "i") -> Wait:
    wait = world.agents.waiting.make(USER, agent, name)
    world.agents.waiting.arm(USER, agent, wait, on)
    return wait


def told(world: World, agent: Agent, kind: str = "task") -> list[dict[str, Any]]:
    """The events of tasks so far, without ids and times."""
    lines = [json.loads(line) for line in world.lines(agent)]
    return [
        {key: value for key, value in event.items() if key not in ("id", "ts", "agent", "by")}
        for event in lines
        if event["type"].startswith(f"{kind}.")
    ]


def results(world: World, agent: Agent) -> list[dict[str, Any]]:
    """What the agent was told of ends, by messages."""
    found = [m for m in world.agents.messages.pending(agent) if m.provenance == "task_result"]
    assert all(m.sender == f"task:{json.loads(m.text)['task']}" for m in found)
    return [json.loads(m.text) for m in found]


# making


def test_a_task_begins_as_a_command_that_waits(world: World, agent: Agent) -> None:
    task = world.agents.tasks.make(inside(agent), agent, "t")
    tasks = world.agents.tasks
    assert (task.task_kind, task.status, tasks.status(task)) == ("command_task", "made", "queued")
    assert (task.cmd, task.exit, task.pid, task.child) == ("", "", 0, 0)
    assert world.agents.results.title(task) == ""
    assert tasks.wait_path(task).is_fifo()
    assert tasks.known(agent) == [task]
    assert told(world, agent) == []


@pytest.mark.parametrize(
    "name", ["", "a b", "current", "x.d", "x.sock", ".a", "a/b", "x" * 65, "ä"]
)
def test_what_is_no_name_is_refused(world: World, agent: Agent, name: str) -> None:
    with pytest.raises(MalformedError):
        world.agents.tasks.make(USER, agent, name)


def test_a_name_is_given_once_and_there_are_so_many(world: World, agent: Agent) -> None:
    for name in "abc":
        make(world, agent, name)
    with pytest.raises(TakenError, match='already has a task "a"'):
        make(world, agent, "a")
    with pytest.raises(QuotaError, match="has 3 tasks"):
        make(world, agent, "d")
    rmdir(world.agents.tasks, USER, agent, "b")
    make(world, agent, "d")


def test_handles_do_not_count(world: World, agent: Agent) -> None:
    for name in "abcd":
        child_of(world, agent, f"child-{name}")
    for name in "abc":
        make(world, agent, name)
    child_of(world, agent, "one-more")
    assert len(world.agents.tasks.known(agent)) == 8


def test_who_starts_stops_and_removes_tasks(world: World, agent: Agent) -> None:
    other = world.live(world.agents.births.create(USER, "other"))
    child = world.live(child_of(world, agent))
    task = make(world, agent)
    tasks = world.agents.tasks
    strangers: list[Caller] = [operator(4242), inside(other), inside(child)]
    for caller in strangers:
        with pytest.raises(DeniedError):
            tasks.start(caller, agent, task)
        with pytest.raises(DeniedError):
            tasks.stop(caller, agent, task, kill=True)
        with pytest.raises(DeniedError):
            rmdir(tasks, caller, agent, "t")
    assert task.status == "made"
    for number, caller in enumerate((ROOT, USER, inside(agent))):
        rmdir(tasks, caller, agent, make(world, agent, f"n{number}").name)


def test_local_environment_is_a_family(
    world: World, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    families = world.agents.authority.families
    monkeypatch.setattr(
        world.agents.authority, "families",
        lambda a: tuple(f for f in families(a) if f != "local_environment"),
    )  # fmt: skip
    with pytest.raises(DeniedError, match="lacks local_environment"):
        world.agents.tasks.make(inside(agent), agent, "t")
    make(world, agent)


# a command until it is started


def test_a_command_is_started_once(world: World, agent: Agent) -> None:
    task = make(world, agent)
    world.agents.tasks.start(USER, agent, task)
    assert task.status == "queued"
    for status in (s for s in TaskStatus if s is not TaskStatus.MADE):
        put_status(world, task, status)
        with pytest.raises(WrongStateError, match="cannot start"):
            world.agents.tasks.start(USER, agent, task)
        with pytest.raises(WrongStateError, match="was already started"):
            world.agents.tasks.set(task, cmd="false")
    assert task.cmd == "true"


@pytest.mark.parametrize("cmd", ["", " ", "\n\t"])
def test_an_empty_command_is_not_started(world: World, agent: Agent, cmd: str) -> None:
    task = make(world, agent, cmd=cmd)
    with pytest.raises(MalformedError, match="cmd is empty"):
        world.agents.tasks.start(USER, agent, task)
    assert task.status == "made"


def test_below_what_is_paused_or_over_nothing_starts(world: World, agent: Agent) -> None:
    child = world.live(child_of(world, agent))
    task = world.agents.tasks.make(inside(agent), child, "t")
    world.agents.tasks.set(task, cmd="true")
    for frozen in (agent, child):
        world.agents.journal.update(frozen, frozen=True)
        with pytest.raises(WrongStateError, match=f'"{frozen.name}" is paused'):
            world.agents.tasks.start(USER, child, task)
        world.agents.journal.update(frozen, frozen=False)
    world.agents.journal.update(child, status=Status.STOPPING)
    with pytest.raises(WrongStateError, match="is stopping"):
        world.agents.tasks.start(USER, child, task)


@pytest.mark.parametrize("kill", [False, True])
def test_what_never_ran_is_cancelled_at_once(world: World, agent: Agent, kill: bool) -> None:
    task = make(world, agent)
    world.agents.tasks.stop(USER, agent, task, kill=kill)
    assert task.status == "cancelled"
    assert told(world, agent) == [
        {"type": "task.end", "task": "t", "status": "cancelled", "exit": ""}
    ]
    assert [r["status"] for r in results(world, agent)] == ["cancelled"]


@pytest.mark.parametrize("status", [TaskStatus.QUEUED, TaskStatus.RUNNING])
def test_what_runs_is_asked_to_end_and_killed_by_the_next_word(
    world: World, agent: Agent, status: TaskStatus
) -> None:
    task = make(world, agent)
    put_status(world, task, status)
    world.agents.tasks.stop(USER, agent, task, kill=False)
    assert (task.status, task.given_up) == ("cancelling", False)
    with pytest.raises(WrongStateError, match="is cancelling; use kill"):
        world.agents.tasks.stop(USER, agent, task, kill=False)
    for _ in range(2):
        world.agents.tasks.stop(USER, agent, task, kill=True)
        assert (task.status, task.given_up) == ("cancelling", True)


# removing


@pytest.mark.parametrize("status", TaskStatus)
def test_what_runs_is_not_removed(world: World, agent: Agent, status: TaskStatus) -> None:
    task = make(world, agent)
    append(world.agents.results.directory(agent, task), b"output", 1 << 20)
    path = world.agents.tasks.wait_path(task)
    put_status(world, task, status)
    if status in TASK_MOVES.terminal or status is TaskStatus.MADE:
        rmdir(world.agents.tasks, USER, agent, "t")
        assert handle(world, agent, "t") is None
        assert not path.exists()
        assert not world.agents.results.directory(agent, task).exists()
        with pytest.raises(MissingError):
            rmdir(world.agents.tasks, USER, agent, "t")
    else:
        with pytest.raises(WrongStateError, match="stop it"):
            rmdir(world.agents.tasks, USER, agent, "t")
        assert path.is_fifo()


def test_what_was_removed_is_neither_written_nor_started(world: World, agent: Agent) -> None:
    """Though somebody has its files open."""
    task = make(world, agent)
    tasks = world.agents.tasks
    rmdir(tasks, USER, agent, "t")
    attempts: list[Callable[[], None]] = [
        lambda: tasks.set(task, cmd="false"),
        lambda: tasks.start(USER, agent, task),
        lambda: tasks.stop(USER, agent, task, kill=True),
    ]
    for attempt in attempts:
        with pytest.raises(MissingError, match='the task "t" was removed'):
            attempt()
    assert (task.status, task.cmd) == ("made", "true")
    assert told(world, agent) == []


def test_nobody_waits_for_what_was_removed_before_it_ran(world: World, agent: Agent) -> None:
    make(world, agent)
    wait = wait_on(world, agent, "task t")
    rmdir(world.agents.tasks, USER, agent, "t")
    assert wait.status == "fired"
    assert json.loads(wait.payload) == {
        "task": "t", "kind": "command_task", "title": "", "status": "cancelled", "exit": "",
        "reason": "", "preview": "", "truncated": False,
        "output_path": "/ctx/agent/coder.d/task/t/output",
    }  # fmt: skip


# ends


@pytest.mark.parametrize(
    ("cue", "status"),
    [
        ("done", "completed"),
        ("error", "failed"),
        ("cancelled", "cancelled"),
        ("interrupted", "interrupted"),
    ],
)
def test_an_end_is_recorded_told_and_lets_waiters_go(
    world: World, agent: Agent, cue: str, status: str
) -> None:
    task = make(world, agent)
    world.agents.tasks.set(task, title="run the tests")
    append(world.agents.results.directory(agent, task), b"1 failed\n", 1 << 20)
    wait = wait_on(world, agent, "task t")
    world.agents.tasks.start(USER, agent, task)
    with world.agents.journal.changing() as change:
        change.put(task, status=TaskStatus.RUNNING, pid=42)
    assert world.agents.tasks.wait_path(task).is_fifo()
    end(world, agent, task, cue, "exit:3")
    assert (task.status, task.exit, task.pid) == (status, "exit:3", 0)
    assert task.ended > 0
    assert told(world, agent) == [
        {"type": "task.end", "task": "t", "status": status, "exit": "exit:3"}
    ]
    facts = {
        "task": "t", "kind": "command_task", "title": "run the tests", "status": status,
        "exit": "exit:3", "reason": "exit:3", "preview": "1 failed\n", "truncated": False,
        "output_path": "/ctx/agent/coder.d/task/t/output",
    }  # fmt: skip
    assert results(world, agent) == [facts]
    assert wait.status == "fired"
    assert json.loads(wait.payload) == facts
    assert not world.agents.tasks.wait_path(task).is_fifo()


@pytest.mark.parametrize("outcome", Outcome)
@pytest.mark.parametrize(
    "status", [s for s in TaskStatus if s not in TASK_MOVES.terminal], ids=str
)
def test_the_end_of_an_agent_ends_its_commands(
    world: World, agent: Agent, status: TaskStatus, outcome: Outcome
) -> None:
    """Whatever they are at: a loss that cannot be recorded keeps the daemon from starting."""
    task, done = make(world, agent), make(world, agent, "done")
    end(world, agent, task=started(world, agent, done))
    put_status(world, task, status)
    world.agents.journal.update(agent, status=Status.STOPPING)
    record_end(world, agent, outcome)
    lost = outcome is Outcome.INTERRUPTED
    assert task.status == ("interrupted" if lost else "cancelled")
    assert done.status == "completed"
    assert [e["task"] for e in told(world, agent)] == ["done", "t"]
    assert results(world, agent) == []
    assert not world.agents.tasks.wait_path(task).is_fifo()


def started(world: World, agent: Agent, task: Task) -> Task:
    world.agents.tasks.start(USER, agent, task)
    return task


@pytest.mark.parametrize(
    ("status", "record", "expected"),
    [
        ("running", {"exit_code": 0}, ("done", "exit:0")),
        ("running", {"exit_code": 3}, ("error", "exit:3")),
        ("running", {"signal": 9}, ("error", "signal:9")),
        ("running", {"failed": "no such shell", "monitor": 7}, ("error", "")),
        ("queued", {}, ("error", "")),
        ("running", {"monitor": 7}, ("interrupted", "")),
        ("running", {"version": 1000, "lost": True}, ("interrupted", "")),
        ("cancelling", {"exit_code": 0}, ("cancelled", "exit:0")),
        ("cancelling", {"signal": 15}, ("cancelled", "signal:15")),
        ("cancelling", {"monitor": 7}, ("cancelled", "")),
        ("cancelling", {"monitor": 7, "started": 1, "lost": True}, ("cancelled", "")),
        ("cancelling", {"started": 1, "lost": True, "finished": True}, ("cancelled", "signal:9")),
        ("cancelling", {"failed": "no such shell", "finished": True}, ("cancelled", "")),
    ],
)
def test_what_becomes_of_a_command(
    status: str, record: dict[str, Any], expected: tuple[str, str]
) -> None:
    task = Task(agent=AgentIndex(1), name="t", status=TaskStatus(status))
    assert judge_task(task, RunRecord(**record)) == expected


# previews


def write(world: World, agent: Agent, data: bytes) -> Task:
    task = make(world, agent)
    append(world.agents.results.directory(agent, task), data, 1 << 20)
    return task


@pytest.mark.parametrize("data", [b"", b"hello\n", "ä".encode() * 4096, b"x" * 8192])
def test_a_short_output_is_its_preview(world: World, agent: Agent, data: bytes) -> None:
    task = write(world, agent, data)
    assert world.agents.results.preview(task)[0] == data.decode()
    assert world.agents.results.source(task).size() == len(data)
    assert world.agents.results.source(task).read(2, 3) == data[2:5]


def test_one_byte_more_than_is_shown_is_too_much(world: World, agent: Agent) -> None:
    shown, cut = world.agents.results.preview(write(world, agent, b"x" * 8193))
    assert shown == f"{'x' * 4000}\n[193 bytes left out: see output]\n{'x' * 4000}"
    assert cut


def test_of_a_long_output_head_and_tail_are_shown(world: World, agent: Agent) -> None:
    task = write(world, agent, b"begin " + b"x" * 100_000 + b" end\n")
    preview = world.agents.results.preview(task)[0]
    assert preview.startswith("begin xxx")
    assert preview.endswith("xxx end\n")
    assert "\n[92011 bytes left out: see output]\n" in preview
    assert len(preview.encode()) <= 8 << 10


def test_characters_are_not_cut(world: World, agent: Agent) -> None:
    for shift in range(4):
        data = b"." * shift + "\N{GRINNING FACE}".encode() * 5000
        task = make(world, agent)
        append(world.agents.results.directory(agent, task), data, 1 << 20)
        preview = world.agents.results.preview(task)[0]
        assert "\N{REPLACEMENT CHARACTER}" not in preview
        shown = preview.split("\n")
        assert set(shown[0]) | set(shown[2]) <= {".", "\N{GRINNING FACE}"}
        left = len(data) - len(shown[0].encode()) - len(shown[2].encode())
        assert shown[1] == f"[{left} bytes left out: see output]"
        rmdir(world.agents.tasks, USER, agent, "t")


@pytest.mark.parametrize("size", [1, 2700, 4000, 5000, 8000, 8192, 8193, 100_000])
def test_what_is_no_text_does_not_grow_beyond_the_maximum(
    world: World, agent: Agent, size: int
) -> None:
    task = write(world, agent, b"\xff" * size)
    preview = world.agents.results.preview(task)[0]
    assert len(preview.encode()) <= 8 << 10
    whole = preview == "\N{REPLACEMENT CHARACTER}" * size
    assert whole or f"[{size} bytes left out: see output]" in preview


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([b"\xff", b"a", "\N{GRINNING FACE}".encode(), b"\n"]), max_size=4),
       st.integers(0, 5000))  # fmt: skip
def test_a_preview_fits_whatever_the_output_is(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], times: int
) -> None:
    data = b"".join(parts) * times
    with world_in(tmp_path_factory.mktemp("preview")) as world:
        task = write(world, made_live(world, "coder"), data)
        preview = world.agents.results.preview(task)[0]
    assert len(preview.encode()) <= 8 << 10
    assert preview == data.decode(errors="replace") or "bytes left out: see output]" in preview


# handles


def test_a_supervised_child_has_a_handle(world: World, agent: Agent) -> None:
    child = child_of(world, agent)
    found = the_handle(world, agent)
    tasks = world.agents.tasks
    assert (found.task_kind, found.child) == ("child_agent_task", child.index)
    assert world.agents.results.child_of(found) is child
    assert tasks.wait_path(found) == world.agents.wait_files.path(child.wait_token)
    root = made_live(world, "root")
    assert tasks.known(root) == []


HANDLE_STATUS = {
    "new": "queued",
    "starting": "running",
    "ready": "running",
    "busy": "running",
    "idle": "running",
    "paused": "running",
    "stopping": "cancelling",
}


@pytest.mark.parametrize("status", HANDLE_STATUS)
def test_a_handles_status_is_that_of_its_child(world: World, agent: Agent, status: str) -> None:
    child = child_of(world, agent)
    world.agents.journal.update(child, status=Status(status))
    assert world.agents.tasks.status(the_handle(world, agent)) == HANDLE_STATUS[status]


def test_every_status_of_a_child_is_looked_at() -> None:
    assert set(HANDLE_STATUS) == {s.value for s in Status} - {"dead"}


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        ("done", "completed"),
        ("error", "failed"),
        ("cancelled", "cancelled"),
        ("interrupted", "interrupted"),
    ],
)
def test_a_handle_ends_with_its_child(
    world: World, agent: Agent, outcome: str, status: str
) -> None:
    child = world.live(child_of(world, agent))
    world.agents.documents.write(child, "handoff.md", b"\n  look at it\nclosely\n")
    waits = [wait_on(world, agent, f"{kind} rev", kind) for kind in ("task", "child")]
    world.agents.journal.update(child, status=Status.STOPPING)
    record_end(world, child, Outcome(outcome))
    assert world.agents.tasks.status(the_handle(world, agent)) == status
    assert told(world, agent) == [
        {"type": "task.end", "task": "rev", "status": status, "exit": ""}
    ]
    facts = {
        "task": "rev", "kind": "child_agent_task", "title": "look at it", "status": status,
        "exit": "", "reason": "why", "preview": "", "truncated": False,
        "output_path": "/ctx/agent/coder.d/task/rev/output",
        "agent": "rev", "result": "", "refs": [], "artifacts": [],
    }  # fmt: skip
    assert results(world, agent) == [facts]
    assert [w.status for w in waits] == ["fired", "fired"]
    assert [json.loads(w.payload) for w in waits] == [facts, facts]


def test_once_agents_are_not_told_of_ends(world: World, agent: Agent) -> None:
    world.agents.journal.update(agent, mode="once")
    record_end(world, child_of(world, agent))
    assert world.agents.tasks.status(the_handle(world, agent)) == "completed"
    assert results(world, agent) == []


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("", ""),
        ("\n \n", ""),
        ("one\ntwo", "one"),
        ("\n\n  # ä \n", "# ä"),
        ("x" * 300, "x" * 200),
        ("\r\none\r\n", "one"),
    ],
)
def test_a_handles_title_is_the_first_line_of_the_task(
    world: World, agent: Agent, text: str, title: str
) -> None:
    child = child_of(world, agent)
    world.agents.documents.write(child, "handoff.md", text.encode())
    assert world.agents.results.title(the_handle(world, agent)) == title


def test_a_handles_output_is_the_latest_reply_then_the_result(world: World, agent: Agent) -> None:
    child = world.live(child_of(world, agent))
    found, results = the_handle(world, agent), world.agents.results
    assert (results.source(found).size(), results.preview(found)[0]) == (0, "")
    session = world.agents.sessions.get(child.session)
    assert session is not None
    replace_file(world.agents.sessions.ensure(session) / "latest.md", b"still at it\n")
    assert world.agents.results.preview(found)[0] == "still at it\n"
    world.agents.documents.write(child, "result.md", b"all of it: " + b"x" * 20_000)
    assert world.agents.results.source(found).read(6, 5) == b"at it"
    record_end(world, child)
    assert world.agents.results.source(found).size() == 20_011
    assert world.agents.results.source(found).read(0, 9) == b"all of it"
    assert "[12011 bytes left out: see output]" in world.agents.results.preview(found)[0]


def test_a_handle_is_not_configured_and_goes_with_its_child(world: World, agent: Agent) -> None:
    child = world.live(child_of(world, agent))
    with pytest.raises(ForbiddenError, match="handle of an agent"):
        world.agents.tasks.set(the_handle(world, agent), cmd="true")
    with pytest.raises(WrongStateError, match="rmdir the agent"):
        rmdir(world.agents.tasks, USER, agent, "rev")
    record_end(world, child)
    world.agents.removals.remove(child)
    assert handle(world, agent) is None


def test_an_ended_handle_can_be_removed_alone(world: World, agent: Agent) -> None:
    child = world.live(child_of(world, agent))
    record_end(world, child)
    rmdir(world.agents.tasks, USER, agent, "rev")
    assert handle(world, agent) is None
    assert world.agents.registry.named("rev") is child
    assert world.agents.wait_files.path(child.wait_token).exists()


def test_a_reset_child_has_a_new_handle(world: World, agent: Agent) -> None:
    child = world.live(child_of(world, agent))
    task = make(world, agent)
    before = the_handle(world, agent)
    record_end(world, child)
    fresh = world.agents.births.renew(child)
    found = the_handle(world, agent)
    assert found is not before
    assert (found.child, world.agents.tasks.status(found)) == (fresh.index, "queued")
    assert world.agents.tasks.known(agent) == [task, found]
    world.reopen()
    assert [t.name for t in world.agents.tasks.known(agent)] == ["t", "rev"]


def test_a_child_is_not_made_where_its_handle_would_be(world: World, agent: Agent) -> None:
    make(world, agent, "rev")
    with pytest.raises(TakenError, match='already has a task "rev": choose another name'):
        child_of(world, agent)
    assert world.agents.registry.named("rev") is None
    child_of(world, agent, "other")
    with pytest.raises(TakenError):
        make(world, agent, "other")


def test_a_child_is_not_reset_onto_a_command(world: World, agent: Agent) -> None:
    child = world.live(child_of(world, agent))
    record_end(world, child)
    rmdir(world.agents.tasks, USER, agent, "rev")
    command = make(world, agent, "rev")
    with pytest.raises(TakenError, match='has a task "rev"'):
        world.agents.births.renew(child)
    assert world.agents.registry.named("rev") is child
    assert handle(world, agent) is command
    world.reopen()
    assert [(t.name, t.child) for t in world.agents.tasks.known(agent)] == [("rev", 0)]


def test_a_detached_child_has_no_handle(world: World, agent: Agent) -> None:
    child = child_of(world, agent)
    task, about = wait_on(world, agent, "task rev", "i"), wait_on(world, agent, "child rev", "j")
    world.agents.births.set_life(child, "detached", "public_named")
    assert handle(world, agent) is None
    assert (task.status, about.status) == ("fired", "armed")
    make(world, agent, "rev")
    with pytest.raises(TakenError):
        world.agents.births.set_life(child, "owned", "private_child")
    assert child.life == "detached"
    rmdir(world.agents.tasks, USER, agent, "rev")
    world.agents.births.set_life(child, "owned", "private_child")
    assert the_handle(world, agent).child == child.index


def test_an_adopted_child_takes_its_handle_along(world: World, agent: Agent) -> None:
    other = made_live(world, "other")
    child = child_of(world, agent)
    waits = [wait_on(world, agent, f"{kind} rev", kind) for kind in ("task", "child")]
    world.agents.births.adopt(child, other)
    assert handle(world, agent) is None
    assert the_handle(world, other).child == child.index
    assert [w.status for w in waits] == ["fired", "fired"], "nobody waits for it in vain"
    world.agents.births.adopt(child, None)
    assert handle(world, other) is None
    make(world, agent, "rev")
    with pytest.raises(TakenError):
        world.agents.births.adopt(child, agent)
    assert child.parent is None


def test_an_orphan_is_adopted(world: World, agent: Agent) -> None:
    child = child_of(world, agent)
    world.agents.births.set_life(child, "detached", "public_named")
    record_end(world, agent)
    world.agents.removals.remove(agent)
    other = made_live(world, "other")
    world.agents.births.adopt(child, other)
    assert world.agents.registry.children(other) == [child]
    assert the_handle(world, other).child == child.index


def test_children_are_oldest_first_however_they_came(world: World, agent: Agent) -> None:
    elder = world.agents.births.create(USER, "elder")
    child_of(world, agent, "younger")
    world.agents.births.adopt(elder, agent)
    assert [c.name for c in world.agents.registry.children(agent)] == ["elder", "younger"]
    world.reopen()
    assert [c.name for c in world.agents.registry.children(agent)] == ["elder", "younger"]


def test_tasks_are_there_again_after_a_crash(world: World, agent: Agent) -> None:
    child_of(world, agent)
    task = started(world, agent, make(world, agent))
    world.agents.tasks.stop(USER, agent, task, kill=True)
    before = [t.dump() for t in world.agents.tasks.known(agent)]
    world.reopen()
    assert [t.dump() for t in world.agents.tasks.known(agent)] == before


