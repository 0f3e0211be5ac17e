"""Files and directories of an agent that are on the disk only once something was written."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.authority.accounts import Resource
from runtime.authority.disk import DIRECTORIES_SIZE
from runtime.records.lifecycle import Cue, Status
from runtime.records.model import Agent
from runtime.records.run import Cell
from runtime.records.sessions import Sessions
from tests.worlds.records import inside
from tests.worlds.tree import CONTEXT, USER, Mounted, complete, mounted_in, refused

D = "agent/x.d"
S = "home/1000/agent/x/session/default"
DIRECTORIES = (f"{D}/artifact", f"{S}/context/episode")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    with mounted_in(tmp_path) as mounted:
        mounted.make("x", USER)
        yield mounted


@pytest.fixture
def agent(mounted: Mounted) -> Agent:
    return mounted.agent("x")


def on_disk(mounted: Mounted) -> list[str]:
    state = mounted.world.state
    return [
        str(path.relative_to(state)) for path in state.rglob("*")
        if path.relative_to(state).parts[0] in ("agent", "home")
        and len(path.relative_to(state).parts) > 1
    ]  # fmt: skip


def shown(mounted: Mounted, path: str) -> tuple[Any, ...]:
    found = mounted.stat(path)
    return (found.st_ino, found.st_mode, found.st_uid, found.st_gid, found.st_nlink,
            found.st_mtime_ns)  # fmt: skip


def make(mounted: Mounted, agent: Agent, path: str) -> None:
    """A file in a directory, as the agent makes it: it runs, though nothing was made for it."""
    cell = Cell(cgroup=mounted.agents.registry.node_path(agent))
    mounted.agents.journal.update(agent, status=Status.BUSY, cell=cell)
    with mounted.as_(inside(agent)):
        info, _ = complete(mounted.ops.create, mounted.inode(path), b"f", 0o644, os.O_WRONLY,
                           CONTEXT)  # fmt: skip
        mounted.write(info.fh, b"one\n")
        mounted.close(info.fh)


def tell_much(mounted: Mounted, agent: Agent) -> None:
    """One event, after which the store holds the events no longer, and a start."""
    with mounted.agents.journal.changing() as change:
        change.move(agent, Cue.START, reason="x" * 2048)


def test_looking_at_everything_makes_nothing(mounted: Mounted) -> None:
    for path in (D, S, f"{S}/context", *DIRECTORIES):
        for name in mounted.list(path):
            mounted.stat(f"{path}/{name}")
    for directory in DIRECTORIES:
        assert mounted.list(directory) == []
        with refused("ENOENT"):
            mounted.inode(f"{directory}/nothing")
    for path in ("handoff.md", "input.jsonl", "result.md", "refs.jsonl", "out", "log"):
        assert mounted.get(f"{D}/{path}") == ""
        assert mounted.stat(f"{D}/{path}").st_size == 0
    assert mounted.get(f"{S}/messages.jsonl") == mounted.get(f"{S}/context/memory.md") == ""
    assert json.loads(mounted.get(f"{S}/events.jsonl"))["type"] == "agent.create"
    assert on_disk(mounted) == []


@pytest.mark.parametrize("path", DIRECTORIES)
def test_a_directory_stays_what_it_was_when_it_is_made(
    mounted: Mounted, agent: Agent, path: str
) -> None:
    before = shown(mounted, path)
    assert stat.S_ISDIR(before[1]) and before[2:4] == (agent.uid, agent.gid)
    assert abs(before[-1] / 1e9 - agent.created) < 1
    mounted.agents.documents.ensure(agent)
    session = mounted.agents.sessions.load(agent.session)
    mounted.agents.sessions.ensure(session)
    assert mounted.list(path) == []
    assert shown(mounted, path) == before
    make(mounted, agent, path)
    assert mounted.list(path) == ["f"]
    assert shown(mounted, path)[:4] == before[:4]
    assert mounted.get(f"{path}/f") == "one\n"


@pytest.mark.parametrize("path", DIRECTORIES)
def test_the_first_file_makes_its_directory(mounted: Mounted, agent: Agent, path: str) -> None:
    before = shown(mounted, path)
    used = mounted.agents.accounts.use(1000, Resource.DISK)
    make(mounted, agent, path)
    assert mounted.list(path) == ["f"] and shown(mounted, path)[:4] == before[:4]
    assert mounted.get(f"{path}/f") == "one\n"
    assert mounted.agents.accounts.use(1000, Resource.DISK) >= used + DIRECTORIES_SIZE


@pytest.mark.parametrize("path", DIRECTORIES)
def test_on_a_full_disk_the_first_file_is_refused(
    mounted: Mounted, agent: Agent, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = shown(mounted, path)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, refused("ENOSPC"):
        patch.setattr(Path, "mkdir", full)
        make(mounted, agent, path)
    assert mounted.list(path) == [] and shown(mounted, path) == before
    assert on_disk(mounted) == []
    make(mounted, agent, path)
    assert mounted.list(path) == ["f"]


def test_who_reads_what_is_not_there_sees_it_once_it_is(mounted: Mounted) -> None:
    fh = mounted.open(f"{D}/handoff.md")
    assert mounted.read(fh) == b""
    mounted.put(f"{D}/handoff.md", "do it\n")
    assert mounted.read(fh) == b"do it\n"
    mounted.close(fh)
    assert mounted.get(f"{D}/handoff.md") == "do it\n"


def test_events_are_the_same_before_and_after_they_have_a_file(
    mounted: Mounted, agent: Agent
) -> None:
    path = f"{S}/events.jsonl"
    with mounted.as_(USER):
        mounted.put(f"{D}/model", "m\n")
        before, fh = mounted.get(path), mounted.open(path)
        assert mounted.read(fh).decode() == before
        assert before.count("\n") == 2
        assert mounted.stat(path).st_size == len(before)
        assert on_disk(mounted) == []
        tell_much(mounted, agent)
        after = mounted.get(path)
        assert after.startswith(before) and after.count("\n") == 3
        assert mounted.read(fh, len(before)).decode() == after[len(before) :]
        assert mounted.stat(path).st_size == len(after)
        assert (mounted.world.state / "home/1000/agent/x/default/events.jsonl").read_text() == after
        mounted.close(fh)


def test_many_events_get_a_file(mounted: Mounted, agent: Agent) -> None:
    for number in range(40):
        mounted.put(f"{D}/model", f"m{number}\n")
    lines = [json.loads(line) for line in mounted.get(f"{S}/events.jsonl").splitlines()]
    assert [line["id"] for line in lines] == [f"e{n}" for n in range(1, 42)]
    session = mounted.agents.sessions.load(agent.session)
    assert session.held is None and mounted.agents.sessions.lines(session.index) == ""
    assert (mounted.world.state / "home/1000/agent/x/default/events.jsonl").exists()


def test_a_change_without_room_for_its_events_is_refused(
    mounted: Mounted, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = mounted.get(f"{S}/events.jsonl")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        with pytest.raises(Exception, match="full"):
            tell_much(mounted, agent)
    assert agent.status == "new" and mounted.get(f"{S}/events.jsonl") == before


def test_a_short_life_leaves_no_file_of_its_events(mounted: Mounted, agent: Agent) -> None:
    with mounted.agents.journal.changing() as change:
        change.move(agent, Cue.START)
    assert mounted.get(f"{S}/events.jsonl").count("\n") == 2
    assert on_disk(mounted) == []


def test_what_is_held_is_there_after_a_crash(mounted: Mounted, agent: Agent) -> None:
    mounted.put(f"{D}/model", "m\n")
    before = mounted.get(f"{S}/events.jsonl")
    agents = mounted.world.reopen()
    again = agents.registry.named("x")
    assert again is not None and again.dump() == agent.dump()
    session: Sessions = agents.sessions
    found = session.held(session.load(again.session))
    assert found is not None and found.decode() == before
