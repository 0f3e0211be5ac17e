"""Agents over a real store: what is made with which defaults, refused, changed and kept."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from runtime.caller import Role
from runtime.errors import (
    DeniedError,
    MalformedError,
    NoSpaceError,
    QuotaError,
    TakenError,
    WrongStateError,
)
from runtime.ids import RunId
from runtime.records.change import Change, Subscriber
from runtime.records.lifecycle import Status
from runtime.records.model import Agent, Outcome
from runtime.records.run import BETWEEN_RUNS, Run
from runtime.records.store import Pending
from tests.unit.runtime.records.test_history import full_disk
from tests.worlds.records import ROOT, World, add_end, cancel_new, inside, operator, world_in


def live_parent(world: World, name: str = "p", uid: int = 1000) -> Agent:
    return world.live(world.agents.births.create(operator(uid), name))


def shown(directory: Path) -> list[str]:
    """What was not discarded."""
    return [name for name in os.listdir(directory) if name[0] != "."]


def session_name(world: World, agent: Agent) -> str:
    session = world.agents.sessions.get(agent.session)
    assert session is not None
    return session.name


def next_run(world: World, agent: Agent) -> str:
    with world.agents.journal.changing() as change:
        return world.agents.registry.next_run(change, agent)


# making


def test_an_operators_agent_is_a_root_agent_with_the_operators_ids(world: World) -> None:
    agent = world.agents.births.create(operator(1000), "coder")
    assert (agent.owner, agent.uid, agent.gid) == (1000, 1000, 1000)
    assert (agent.creator_uid, agent.creator_gid) == (1000, 1000)
    assert (agent.life, agent.profile, agent.private) == ("detached", "public_named", False)
    assert (agent.label, agent.lineage) == ("coder_t", "operator uid:1000")
    assert (agent.status, agent.exec, agent.mode, agent.iso) == (Status.NEW, "", "once", "sandbox")
    assert agent.policy == (
        "allow coder_t agent:* create\n"
        "allow coder_t tool:* execute\n"
        "allow coder_t model:* use\n"
    )


def test_roots_agent_runs_as_the_configured_user(world: World) -> None:
    agent = world.agents.births.create(ROOT, "coder")
    assert agent.owner == 0
    assert (agent.uid, agent.gid) == world.config.agent_ids()
    assert agent.uid != 0
    assert agent.groups == ()


def test_a_new_agent_has_a_session_documents_and_an_event(world: World) -> None:
    agent = world.agents.births.create(operator(1000), "coder")
    assert session_name(world, agent) == "default"
    (line,) = world.lines(agent)
    event = json.loads(line)
    assert list(event)[:2] == ["id", "ts"]
    assert (event["id"], event["type"], event["agent"]) == ("e1", "agent.create", "coder")
    assert world.told.listed == ["coder"]
    assert [path for path in world.state.rglob("*") if "coder" in path.name] == []
    assert not world.agents.documents.directory(agent).exists()


def test_an_agents_agent_is_its_child_with_a_childs_defaults(world: World) -> None:
    parent = live_parent(world)
    world.agents.journal.update(parent, exec="prog", groups=(7,), run=Run(id=RunId("r17")))
    child = world.agents.births.create(inside(parent), "c")
    assert (child.parent, child.owner) == (parent.index, 1000)
    assert (child.uid, child.gid, child.groups) == (1000, 1000, (7,))
    assert (child.life, child.profile, child.private) == ("owned", "private_child", True)
    assert child.lineage == "agent:p session:default run:r17"
    assert child.exec == "prog"
    assert child.policy == "allow c_t model:* use\nallow c_t tool:* execute\n"
    assert (child.parent_session, child.channel) == (parent.session, "c")
    assert world.agents.registry.children(parent) == [child]
    assert "agent_creation" not in world.agents.authority.families(child)


def test_a_private_child_may_make_agents_by_an_explicit_line_only(world: World) -> None:
    child = world.agents.births.create(inside(live_parent(world)), "c")
    world.agents.journal.update(child, policy="allow c_t agent:x create\n")
    assert "agent_creation" in world.agents.authority.families(child)
    assert "authority_expansion" not in world.agents.authority.families(child)


@pytest.mark.parametrize("name", ["current", "a/b", "", "x.sock", "a\n"])
def test_a_bad_name_makes_nothing(world: World, name: str) -> None:
    with pytest.raises(MalformedError):
        world.agents.births.create(ROOT, name)
    assert list(world.agents.registry) == []


def test_a_name_is_taken_once(world: World) -> None:
    world.agents.births.create(operator(1), "x")
    with pytest.raises(TakenError, match="exists"):
        world.agents.births.create(operator(1), "x")


def test_who_cannot_be_identified_makes_nothing(world: World) -> None:
    caller = operator(0)
    unknown = type(caller)(0, 0, 5, known=False)
    with pytest.raises(DeniedError, match="cannot identify the calling process"):
        world.agents.births.create(unknown, "x")


@pytest.mark.parametrize("status", [Status.NEW, Status.DEAD])
def test_an_agent_that_does_not_live_makes_nothing(world: World, status: Status) -> None:
    parent = live_parent(world)
    world.agents.journal.update(parent, status=status)
    with pytest.raises(WrongStateError):
        world.agents.births.create(inside(parent), "c")


def test_an_agent_makes_what_its_policy_lets_it_create(world: World) -> None:
    child = world.live(world.agents.births.create(inside(live_parent(world)), "c"))
    with pytest.raises(DeniedError, match=r'agent:below create is not in .* policy of "c"'):
        world.agents.births.create(inside(child), "below")
    assert world.agents.births.create(inside(world.may_create(child)), "below")


# limits


def test_an_owner_has_so_many_agents(tmp_path: Path) -> None:
    with world_in(tmp_path, agents=2) as world:
        world.agents.births.create(operator(1), "a")
        world.agents.births.create(operator(1), "b")
        with pytest.raises(QuotaError, match="uid 1 has 2 agents"):
            world.agents.births.create(operator(1), "c")
        world.agents.births.create(operator(2), "c")


def test_what_an_owner_gives_away_or_loses_counts_no_more(tmp_path: Path) -> None:
    with world_in(tmp_path, agents=2) as world:
        births, removals = world.agents.births, world.agents.removals
        given = births.create(operator(1), "given")
        lost = births.create(operator(1), "lost")
        births.change_owner(given, 2)
        removals.remove(lost)
        for name in ("a", "b"):
            births.create(operator(1), name)
        births.create(operator(2), "c")
        for uid in (1, 2):
            with pytest.raises(QuotaError, match=f"uid {uid} has 2 agents"):
                births.create(operator(uid), "d")
        births.renew(world.live(given, Status.DEAD))
        registry = world.reopen().registry
        assert [registry.count(uid) for uid in (1, 2, 3)] == [2, 2, 0]


def test_an_agent_has_so_many_children(tmp_path: Path) -> None:
    with world_in(tmp_path, children=1) as world:
        parent = live_parent(world)
        world.agents.births.create(inside(parent), "a")
        with pytest.raises(QuotaError, match='"p" has 1 children'):
            world.agents.births.create(inside(parent), "b")


def test_a_removed_child_makes_room(tmp_path: Path) -> None:
    with world_in(tmp_path, children=1, agents=2) as world:
        parent = live_parent(world)
        world.agents.removals.remove(world.agents.births.create(inside(parent), "a"))
        assert world.agents.births.create(inside(parent), "b").parent == parent.index


def test_agents_are_so_many_levels_deep(tmp_path: Path) -> None:
    with world_in(tmp_path, depth=2) as world:
        parent = live_parent(world)
        child = world.may_create(world.live(world.agents.births.create(inside(parent), "a")))
        with pytest.raises(QuotaError, match="3 levels deep"):
            world.agents.births.create(inside(child), "b")


def test_a_refused_agent_leaves_nothing(tmp_path: Path) -> None:
    with world_in(tmp_path, depth=1) as world:
        parent = live_parent(world)
        before = sorted(p.name for p in (world.state / "agent").iterdir())
        with pytest.raises(QuotaError):
            world.agents.births.create(inside(parent), "a")
        assert sorted(p.name for p in (world.state / "agent").iterdir()) == before
        assert len(os.listdir(tmp_path / "wait")) == 1


# names and incarnations


def test_a_name_belongs_to_who_first_used_it(world: World) -> None:
    world.agents.removals.remove(world.agents.births.create(operator(1), "x"))
    with pytest.raises(DeniedError, match="belong to another user"):
        world.agents.births.create(operator(2), "x")
    assert world.agents.births.create(operator(1), "x").owner == 1


def test_a_name_without_history_is_free(world: World) -> None:
    agent = world.agents.births.create(operator(1), "x")
    session = world.agents.sessions.get(agent.session)
    assert session is not None
    world.agents.removals.remove(agent)
    world.agents.removals.remove_session(session)
    assert world.agents.births.create(operator(2), "x").owner == 2


def test_a_session_of_an_agent_that_exists_is_kept(world: World) -> None:
    agent = world.agents.births.create(operator(1), "x")
    session = world.agents.sessions.get(agent.session)
    assert session is not None
    with pytest.raises(WrongStateError, match="still exists"):
        world.agents.removals.remove_session(session)
    assert world.agents.sessions.of(1, "x") == [("default", session.index)]


def test_removing_an_old_owners_history_leaves_the_name_to_the_new_one(world: World) -> None:
    first = world.agents.births.create(operator(1), "x")
    old = world.agents.sessions.get(first.session)
    assert old is not None
    world.agents.removals.remove(first)
    second = world.agents.births.create(ROOT, "x")
    world.agents.removals.remove_session(old)
    assert world.store.name_owner("x") == second.owner
    assert next_run(world, second) == "r1"


def test_a_new_incarnation_has_a_new_session_and_goes_on_counting_runs(world: World) -> None:
    first = world.agents.births.create(operator(1), "x")
    assert next_run(world, first) == "r1"
    world.agents.removals.remove(first)
    second = world.agents.births.create(operator(1), "x")
    assert session_name(world, second) == "default.2"
    assert second.incarnation != first.incarnation
    assert second.index != first.index
    assert next_run(world, second) == "r2"
    world.agents.removals.remove(second)
    assert session_name(world, world.agents.births.create(operator(1), "x")) == "default.3"


def test_a_run_has_its_number_only_if_it_is_committed(world: World) -> None:
    agent = world.agents.births.create(ROOT, "x")
    assert world.agents.registry.next_run(Change(), agent) == "r1"
    whole = Change()
    part = Change(whole)
    assert world.agents.registry.next_run(part, agent) == "r1"
    whole.add(part)
    world.agents.journal.commit(whole)
    assert world.agents.registry.next_run(Change(), agent) == "r2"


def test_the_old_history_stays(world: World) -> None:
    first = world.agents.births.create(operator(1), "x")
    world.agents.removals.remove(first)
    before = world.lines(first)
    world.agents.births.create(operator(1), "x")
    assert world.lines(first) == before
    assert json.loads(before[0])["type"] == "agent.create"


def test_the_old_channel_makes_room_for_the_new_child(world: World) -> None:
    parent = live_parent(world)
    for _ in range(3):
        child = world.agents.births.create(inside(parent), "c")
        world.agents.documents.write(child, "result.md", child.incarnation.encode())
        world.agents.removals.remove(child)
    last = world.agents.births.create(inside(parent), "c")
    channels = dict(world.agents.sessions.channels(parent.session))
    assert set(channels) == {"c", "c~1", "c~2", "c~3"}
    assert channels["c"] == last.index
    assert sorted(channels.values()) == [channels[n] for n in ("c~1", "c~2", "c~3", "c")]
    for name in ("c~1", "c~2", "c~3"):
        removed = world.agents.registry.recall(channels[name])
        assert removed is not None
        assert removed.channel == name
        assert world.agents.documents.read(removed, "result.md") == removed.incarnation.encode()


def test_a_child_removed_in_an_earlier_session_keeps_its_channel_there(world: World) -> None:
    parent = live_parent(world)
    world.agents.removals.remove(world.agents.births.create(inside(parent), "c"))
    world.agents.journal.update(parent, status=Status.DEAD)
    world.agents.removals.remove(parent)
    again = live_parent(world)
    world.agents.births.create(inside(again), "c")
    assert [name for name, _ in world.agents.sessions.channels(parent.session)] == ["c"]
    assert [name for name, _ in world.agents.sessions.channels(again.session)] == ["c"]


# removing


def test_a_live_agent_is_not_removed(world: World) -> None:
    parent = live_parent(world)
    with pytest.raises(WrongStateError, match='"p" is busy: stop it'):
        world.agents.removals.remove(parent)
    assert world.agents.registry.named("p") is parent


def test_nothing_is_removed_while_a_descendant_lives(world: World) -> None:
    parent = live_parent(world)
    world.live(world.agents.births.create(inside(parent), "c"))
    world.agents.journal.update(parent, status=Status.DEAD)
    with pytest.raises(WrongStateError, match='"c" is busy'):
        world.agents.removals.remove(parent)
    assert {a.name for a in world.agents.registry} == {"p", "c"}


def test_dead_and_new_descendants_go_with_it(world: World) -> None:
    parent = live_parent(world)
    child = world.agents.births.create(inside(parent), "c")
    world.agents.journal.update(parent, status=Status.DEAD)
    world.agents.removals.remove(parent)
    assert list(world.agents.registry) == []
    assert world.agents.registry.named("c") is None
    assert (child.status, child.outcome) == (Status.DEAD, "cancelled")
    assert os.listdir(world.path / "wait") == []
    assert world.reopen() is world.agents
    assert list(world.agents.registry) == []


def test_a_removed_new_agent_was_cancelled(world: World) -> None:
    agent = world.agents.births.create(operator(1), "x")
    world.agents.removals.remove(agent)
    assert (agent.outcome, agent.reason) == ("cancelled", "operator_stop")
    kinds = [json.loads(line)["type"] for line in world.lines(agent)]
    assert kinds == ["agent.create", "agent.status", "agent.stop"]


def test_a_root_agents_own_directory_goes_a_childs_documents_stay(world: World) -> None:
    parent = live_parent(world)
    child = world.agents.births.create(inside(parent), "c")
    world.agents.documents.ensure(child)
    (world.agents.documents.directory(child) / "record-r1").touch()
    (world.agents.documents.directory(child) / "out").mkdir()
    world.agents.removals.remove(child)
    assert shown(world.agents.documents.directory(child)) == ["doc"]
    world.agents.journal.update(parent, status=Status.DEAD)
    world.agents.removals.remove(parent)
    assert not world.agents.documents.directory(parent).exists()


def test_a_child_without_documents_leaves_no_directory(world: World) -> None:
    parent = live_parent(world)
    child = world.agents.births.create(inside(parent), "c")
    (world.agents.documents.directory(child) / "out").mkdir(parents=True)
    world.agents.removals.remove(child)
    assert not world.agents.documents.directory(child).exists()
    (world.agents.documents.directory(child) / "log").mkdir(parents=True)
    world.reopen().removals.remove_strays()
    assert not world.agents.documents.directory(child).exists()


# a new incarnation


def dead(world: World, agent: Agent) -> Agent:
    ended = {"status": Status.DEAD, "outcome": "done", "reason": "exit:0", "started": 5.0}
    world.agents.journal.update(agent, **ended)
    return agent


def test_a_reset_agent_is_new_with_its_configuration_and_task(world: World) -> None:
    agent = world.agents.births.create(operator(1), "x")
    world.agents.journal.update(agent, exec="prog", env="A=1\n", restarts=3, bound_policy="")
    for name in ("handoff.md", "input.jsonl", "result.md"):
        world.agents.documents.write(agent, name, name.encode())
    new = world.agents.births.renew(dead(world, agent))
    assert (new.status, new.outcome, new.reason, new.started) == (Status.NEW, "", "", 0.0)
    assert (new.exec, new.env, new.owner, new.policy) == ("prog", "A=1\n", 1, agent.policy)
    assert (new.restarts, new.bound_policy) == (0, None)
    assert new.incarnation != agent.incarnation and new.wait_token != agent.wait_token
    assert session_name(world, new) == "default.2"
    assert world.agents.documents.read(new, "handoff.md") == b"handoff.md"
    assert world.agents.documents.read(new, "input.jsonl") == b"input.jsonl"
    assert world.agents.documents.read(new, "result.md") == b""
    assert world.agents.documents.read(agent, "result.md") == b"result.md"
    assert world.agents.registry.named("x") is new
    assert world.agents.registry.get(agent.index) is None
    recalled = world.agents.registry.recall(agent.index)
    assert recalled is not None and recalled.removed and recalled.archived
    assert list(world.reopen().registry) == [new]


def test_the_channel_of_a_reset_child_is_kept_beside_the_new_one(world: World) -> None:
    parent = live_parent(world)
    child = world.agents.births.create(inside(parent), "c")
    maker = inside(world.may_create(world.live(child)))
    below = world.live(world.agents.births.create(maker, "below"))
    dead(world, below)
    new = world.agents.births.renew(dead(world, child))
    channels = dict(world.agents.sessions.channels(parent.session))
    assert channels == {"c~1": child.index, "c": new.index}
    assert world.agents.registry.children(parent) == [new]
    assert world.agents.registry.named("below") is None, "it belonged to the earlier incarnation"
    assert new.parent_session == parent.session


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.DEAD])
def test_only_a_dead_agent_is_reset(world: World, status: Status) -> None:
    agent = world.agents.births.create(operator(1), "x")
    world.agents.journal.update(agent, status=status)
    with pytest.raises(WrongStateError):
        world.agents.births.renew(agent)
    assert list(world.agents.registry) == [agent]


def test_nothing_is_reset_below_what_is_not_live(world: World) -> None:
    parent = live_parent(world)
    child = dead(world, world.agents.births.create(inside(parent), "c"))
    world.agents.journal.update(parent, status=Status.STOPPING)
    with pytest.raises(WrongStateError, match='"p" is stopping'):
        world.agents.births.renew(child)
    world.agents.journal.update(child, life="detached")
    world.agents.journal.update(parent, status=Status.DEAD)
    world.agents.removals.remove(parent)
    with pytest.raises(WrongStateError, match="was removed"):
        world.agents.births.renew(child)


def test_a_reset_that_cannot_be_kept_changes_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(agent: Agent) -> int:
        raise NoSpaceError("the disk is full")

    agent = world.agents.births.create(operator(1), "x")
    world.agents.documents.write(agent, "handoff.md", b"go on\n")
    dead(world, agent)
    directories = shown(world.state / "agent")
    with monkeypatch.context() as patch, pytest.raises(NoSpaceError):
        patch.setattr(world.store, "insert_agent", refuse)
        world.agents.births.renew(agent)
    assert list(world.agents.registry) == [agent] and world.agents.registry.named("x") is agent
    assert shown(world.state / "agent") == directories
    assert world.agents.births.renew(agent).status is Status.NEW


def test_a_removed_session_takes_what_was_archived_with_it(world: World) -> None:
    agent = world.agents.births.create(operator(1), "x")
    world.agents.documents.write(agent, "handoff.md", b"go on\n")
    world.agents.births.renew(dead(world, agent))
    assert world.agents.documents.path(agent, "artifact").is_dir()
    session = world.agents.sessions.get(agent.session)
    assert session is not None
    world.agents.removals.remove_session(session)
    assert not world.agents.documents.directory(agent).exists()


@pytest.mark.parametrize("first", ["parent", "child"])
def test_a_removed_session_takes_what_it_showed_of_children_with_it(
    world: World, first: str
) -> None:
    parent = world.agents.births.create(operator(1), "x")
    child = world.agents.births.create(inside(world.may_create(world.live(parent))), "kid")
    world.agents.documents.write(child, "result.md", b"found\n")
    directory = world.agents.documents.directory(child)
    parts = {"parent": parent, "child": child}
    sessions = {name: world.agents.sessions.load(part.session) for name, part in parts.items()}
    for part in (child, parent):
        world.agents.removals.remove(dead(world, part))
    assert (directory / "doc" / "result.md").exists(), "it is in the channel"
    for name in (first, *(parts.keys() - {first})):
        channel = world.agents.sessions.find(sessions["parent"].index)
        assert directory.exists() is (channel is not None)
        world.agents.removals.remove_session(sessions[name])
    assert not directory.exists()
    world.agents.removals.remove_strays()
    assert not directory.exists()


# detached


def test_a_detached_child_is_bound_by_what_its_parent_had(world: World) -> None:
    parent = live_parent(world)
    child = world.agents.births.create(inside(parent), "c")
    world.agents.journal.update(
        child,
        life="detached",
        policy="allow c_t model:* use\nallow c_t network:default connect\n",
        mount="/own /m rw\n",
        bound_policy="allow c_t model:a* use\n",
        bound_mount="/p /x ro\n",
    )
    rules = world.agents.authority.effective_policy(child)
    assert [(r.cls, r.object) for r in rules] == [("model", "a*")]
    assert [m.target for m in world.agents.authority.effective_mounts(child)] == ["/x", "/m"]
    assert world.agents.registry.descendants(parent) == []
    assert world.agents.registry.ancestors(child) == []
    assert world.agents.registry.node_path(child) == "user-1000/agent-c"
    assert world.agents.registry.family(child) == parent.index


# the end


def test_an_end_is_recorded_in_the_agent_and_its_session(world: World) -> None:
    agent = world.live(world.agents.births.create(operator(1), "x"))
    change = Change()
    add_end(world.agents, change, agent, Outcome.INTERRUPTED, "reboot")
    world.agents.journal.commit(change)
    assert (agent.status, agent.outcome, agent.reason) == (Status.DEAD, "interrupted", "reboot")
    assert (agent.run, agent.cell.cgroup) == (BETWEEN_RUNS, "")
    session = world.agents.sessions.get(agent.session)
    assert session is not None
    assert session.state == "cancelled"
    event = json.loads(world.lines(agent)[-1])
    assert event["type"] == "agent.stop"
    assert event["status"] == "interrupted"


def test_a_child_that_died_with_its_parent_is_told_in_the_parents_session(world: World) -> None:
    parent = live_parent(world)
    child = world.agents.births.create(inside(parent), "c")
    cancel_new(world.agents, child, "parent_dead")
    events = [json.loads(line) for line in world.lines(parent)]
    event = next(e for e in events if e["type"] == "agent.child.cancel")
    del event["id"], event["ts"]
    assert event == {
        "by": "runtime",
        "type": "agent.child.cancel",
        "agent": "p",
        "parent": "p",
        "child": "c",
        "reason": "parent_dead",
    }


# committing


class FullDisk:
    """A database whose COMMIT, or any statement beginning so, finds the disk full."""

    def __init__(self, db: sqlite3.Connection, statement: str) -> None:
        self._db = db
        self._statement = statement

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def execute(self, sql: str, *args: Any) -> Any:
        if sql.startswith(self._statement):
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return self._db.execute(sql, *args)


@pytest.fixture(
    params=[
        "COMMIT", "UPDATE agents", "INSERT INTO outbox", "INSERT INTO held", "UPDATE sessions"
    ]
)  # fmt: skip
def statement(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def fill_disk(world: World, monkeypatch: pytest.MonkeyPatch, statement: str) -> None:
    monkeypatch.setattr(world.store, "_db", FullDisk(world.store._db, statement))


def test_a_change_that_cannot_be_committed_changes_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    held = statement == "INSERT INTO held"
    agent = world.agents.births.create(operator(1), "x") if held else with_files(world, "x")
    session = world.agents.sessions.get(agent.session)
    assert session is not None
    before, was, lines = agent.dump(), session.dump(), world.lines(agent)
    world.told.agents.clear()
    change = Change()
    change.set(agent, model="m", status=Status.STARTING)
    change.set_session(agent.session, state="done")
    change.event(agent.session, "agent.status", "x", status="starting")
    with monkeypatch.context() as patch:
        fill_disk(world, patch, statement)
        with pytest.raises(NoSpaceError):
            world.agents.journal.commit(change)
    assert (agent.dump(), session.dump(), world.lines(agent)) == (before, was, lines)
    assert world.told.agents == []
    world.agents.journal.commit(change)
    assert (agent.model, session.state) == ("m", "done")
    assert world.lines(agent)[:-1] == lines
    assert json.loads(world.lines(agent)[-1])["id"] == f"e{len(lines) + 1}"


@pytest.mark.parametrize("statement", ["COMMIT", "INSERT INTO agents", "INSERT INTO sessions"])
def test_an_agent_that_cannot_be_recorded_is_not_made(
    world: World, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    with monkeypatch.context() as patch:
        fill_disk(world, patch, statement)
        with pytest.raises(NoSpaceError):
            world.agents.births.create(operator(1), "x")
    assert list(world.agents.registry) == []
    assert not (world.state / "agent").exists()
    assert os.listdir(world.path / "wait") == []
    assert session_name(world, world.agents.births.create(operator(1), "x")) == "default"


def test_an_adoption_that_cannot_be_committed_changes_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = live_parent(world, "p", 1)
    agent = world.agents.births.create(operator(1), "x")
    before = agent.dump()
    fill_disk(world, monkeypatch, "COMMIT")
    with pytest.raises(NoSpaceError):
        world.agents.births.adopt(agent, parent)
    assert agent.dump() == before
    assert world.agents.registry.children(parent) == []


def test_an_owner_that_cannot_be_committed_is_not_changed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = world.agents.births.create(operator(1), "x")
    before = agent.dump()
    fill_disk(world, monkeypatch, "COMMIT")
    with pytest.raises(NoSpaceError):
        world.agents.births.change_owner(agent, 2)
    assert agent.dump() == before
    session = world.agents.sessions.get(agent.session)
    assert session is not None
    assert session.owner == 1
    assert world.lines(agent)


def test_changes_are_told_after_they_are_in_the_history(world: World) -> None:
    agent = world.agents.births.create(operator(1), "x")
    seen: list[tuple[str, int]] = []

    class Checking(Subscriber):
        def agent_changed(self, index: int, names: Any) -> None:
            seen.append((agent.model, len(world.lines(agent))))

        def session_changed(self, index: int, names: Any) -> None:
            seen.append((agent.model, len(world.lines(agent))))

        def agent_listed(self, agent: Agent) -> None:
            raise AssertionError("nothing appeared")

    world.agents.journal.subscribe(Checking())
    change = Change()
    change.set(agent, model="m")
    change.event(agent.session, "agent.status", "x")
    world.agents.journal.commit(change)
    assert seen == [("m", 2), ("m", 2)]


def test_several_changes_of_one_agent_are_one(world: World) -> None:
    agent = world.agents.births.create(operator(1), "x")
    change = Change()
    change.set(agent, model="a", cwd="/a")
    change.set(agent, model="b")
    world.agents.journal.commit(change)
    assert (agent.model, agent.cwd) == ("b", "/a")
    (again,) = world.reopen().registry
    assert (again.model, again.cwd) == ("b", "/a")


# histories


def with_files(world: World, name: str) -> Agent:
    """An agent whose events are in a file, as those of one that has many; two lines so far."""
    agent = world.live(world.agents.births.create(operator(1), name))
    change = Change()
    change.event(agent.session, "agent.status", name, reason="x" * 2048)
    world.agents.journal.commit(change)
    return agent


def test_events_are_numbered_and_survive(world: World) -> None:
    agent = world.agents.births.create(operator(1), "x")
    (again,) = world.reopen().registry
    change = Change()
    change.event(again.session, "agent.status", "x")
    change.say(again.session, role="user", content="hi")
    world.agents.journal.commit(change)
    assert [json.loads(line)["id"] for line in world.lines(agent)] == ["e1", "e2"]
    assert [json.loads(line)["id"] for line in world.lines(agent, "messages.jsonl")] == ["m1"]


def test_events_that_an_earlier_daemon_left_in_the_outbox_are_delivered_once(world: World) -> None:
    agent = with_files(world, "x")
    session = world.agents.sessions.get(agent.session)
    assert session is not None
    path = f"{world.agents.sessions.path(session)}/events.jsonl"
    with world.store.transaction():
        world.store.post(Pending(world.store.number(1), path, '{"id":"e3"}'))
        world.store.post(Pending(world.store.number(1), path, '{"id":"e4"}'))
    with open(world.state / path, "a") as file:
        file.write('{"id":"e3"}\n{"id')
    for _ in range(3):
        world.reopen()
    assert world.lines(agent)[2:] == ['{"id":"e3"}', '{"id":"e4"}']


def test_events_for_a_removed_history_hold_nothing_up(world: World) -> None:
    with world.store.transaction():
        path = "home/1/agent/gone/default/events.jsonl"
        world.store.post(Pending(world.store.number(1), path, "{}"))
    trio.run(world.reopen().journal.synced)
    with world.store.transaction():
        pass
    assert world.store.undelivered() == []


def test_events_stay_in_the_outbox_until_their_file_is_synced(world: World) -> None:
    """Of the record and the file, a loss of power may keep either."""
    agent = with_files(world, "x")
    session = world.agents.sessions.get(agent.session)
    assert session is not None
    path = world.agents.sessions.directory(session) / "events.jsonl"
    for kept in (b"", path.read_bytes()[:20], b"\0" * path.stat().st_size, path.read_bytes()):
        path.write_bytes(kept)
        world.reopen()
        assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["e1", "e2"]
    trio.run(world.agents.journal.synced)
    world.agents.journal.update(agent, label="l")
    assert world.store.undelivered() == []


def test_a_disk_that_cannot_be_synced_is_synced_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in the histories stays in the outbox until then, and the daemon goes on."""
    agent = with_files(world, "x")
    monkeypatch.setattr("runtime.records.outbox.OUTBOX_MAX", 0)
    oldest = world.store.undelivered()[0]
    failed: list[Path] = []
    is_well = False

    def syncfs(path: Path) -> None:
        if not is_well:
            failed.append(path)
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("runtime.kernel.linux.sync_filesystem", syncfs)

    async def run() -> None:
        nonlocal is_well
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.agents.journal.run)
            with trio.fail_after(10):
                while len(failed) < 3:
                    world.agents.journal.update(agent, label="a")
                    await trio.testing.wait_all_tasks_blocked()
                assert oldest in world.store.undelivered()
                is_well = True
                while oldest in world.store.undelivered():
                    world.agents.journal.update(agent, label="b")
                    await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    trio.run(run)


def test_numbers_go_on_behind_lines_whose_record_was_lost(world: World) -> None:
    agent = with_files(world, "x")
    session = world.agents.sessions.get(agent.session)
    assert session is not None
    with open(world.agents.sessions.directory(session) / "events.jsonl", "a") as file:
        file.write('{"id":"e7","type":"lost"}\n')
    world.reopen()
    change = Change()
    change.event(agent.session, "agent.status", "x")
    world.agents.journal.commit(change)
    assert json.loads(world.lines(agent)[-1])["id"] == "e8"


def test_an_event_that_a_full_disk_cut_is_completed_not_repeated(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = with_files(world, "x")
    session = world.agents.sessions.get(agent.session)
    assert session is not None
    path = world.agents.sessions.directory(session) / "events.jsonl"
    history = world.agents.journal._history
    append = history.append

    def cut(name: str, lines: Iterable[str]) -> None:
        with full_disk(path.stat().st_size + 10):
            append(name, lines)

    def event(kind: str) -> None:
        change = Change()
        change.event(agent.session, kind, "x")
        world.agents.journal.commit(change)

    with monkeypatch.context() as patch:
        patch.setattr(history, "append", cut)
        event("run.start")
    event("run.end")
    assert [json.loads(line)["type"] for line in world.lines(agent)[2:]] == ["run.start", "run.end"]


# adoption and owners


def test_an_adopted_agent_has_a_childs_defaults(world: World) -> None:
    parent = live_parent(world, "p", 1)
    agent = world.agents.births.create(operator(1), "x")
    world.agents.births.adopt(agent, parent)
    assert (agent.parent, agent.life, agent.private) == (parent.index, "owned", True)
    assert agent.policy == "allow x_t model:* use\nallow x_t tool:* execute\n"
    assert agent.lineage == "agent:p session:default"
    assert world.agents.registry.children(parent) == [agent]
    assert dict(world.agents.sessions.channels(parent.session)) == {"x": agent.index}
    assert world.agents.registry.node_path(agent) == "user-1/agent-p/child/agent-x"


def test_who_made_an_agent_prepares_it_for_its_parent_until_its_start(world: World) -> None:
    parent = live_parent(world, "p", 1)
    agent = world.agents.births.create(operator(1), "x")
    made_inside = world.agents.births.create(inside(parent), "y")
    world.agents.births.adopt(agent, parent)
    roles = world.agents.identity.roles
    assert roles(operator(1), agent) & Role.CREATOR
    assert not roles(operator(0), agent) & Role.CREATOR, "an operator, who did not make it"
    assert not roles(operator(2), agent) & Role.CREATOR
    assert not roles(operator(1), made_inside) & Role.CREATOR
    world.agents.journal.update(agent, status=Status.STARTING)
    assert not roles(operator(1), agent) & Role.CREATOR


def test_an_adopted_agent_is_given_back(world: World) -> None:
    parent = live_parent(world, "p", 1)
    agent = world.agents.births.create(operator(1), "x")
    world.agents.births.adopt(agent, parent)
    world.agents.births.adopt(agent, None)
    assert (agent.parent, agent.life, agent.private) == (None, "detached", False)
    assert (agent.lineage, agent.channel) == ("operator uid:1", "")
    assert world.agents.registry.children(parent) == []
    assert world.agents.sessions.channels(parent.session) == []


def test_a_child_made_a_root_agent_reaches_its_mounts_with_its_own_rights(world: World) -> None:
    """Its creator was an agent: uid 0 must not be what is left of that."""
    child = world.agents.births.create(inside(live_parent(world, "p", 1000)), "c")
    world.agents.births.adopt(child, None)
    assert (child.creator_uid, child.creator_gid) == (1000, 1000)


def test_an_agent_moves_from_one_parent_to_another(world: World) -> None:
    one, two = live_parent(world, "p", 1), live_parent(world, "q", 1)
    agent = world.agents.births.create(inside(one), "x")
    world.agents.births.adopt(agent, two)
    registry = world.agents.registry
    assert (registry.children(one), registry.children(two)) == ([], [agent])


def test_an_adoption_by_the_present_parent_changes_nothing(tmp_path: Path) -> None:
    with world_in(tmp_path, children=1) as world:
        parent = live_parent(world)
        child = world.agents.births.create(inside(parent), "c")
        before = child.dump()
        world.agents.births.adopt(child, parent)
        assert child.dump() == before


def test_nobody_adopts_itself(world: World) -> None:
    agent = live_parent(world)
    with pytest.raises(MalformedError, match="its own ancestor"):
        world.agents.births.adopt(agent, agent)


def test_nobody_is_adopted_by_a_descendant(world: World) -> None:
    agent = live_parent(world)
    child = world.live(world.agents.births.create(inside(agent), "c"))
    world.agents.journal.update(agent, status=Status.NEW)
    with pytest.raises(MalformedError, match="its own ancestor"):
        world.agents.births.adopt(agent, child)


def test_who_does_not_live_adopts_nobody(world: World) -> None:
    parent = world.agents.births.create(operator(1), "p")
    with pytest.raises(WrongStateError, match='"p" is new: agents below it cannot be'):
        world.agents.births.adopt(world.agents.births.create(operator(1), "x"), parent)


def test_a_new_owner_gets_the_name_and_the_session(world: World) -> None:
    agent = world.agents.births.create(operator(1), "x")
    world.agents.births.change_owner(agent, 2)
    session = world.agents.sessions.get(agent.session)
    assert session is not None
    assert (agent.owner, session.owner, world.store.name_owner("x")) == (2, 2, 2)
    assert world.agents.sessions.directory(session) == world.state / "home/2/agent/x/default"
    assert len(world.lines(agent)) == 1
    assert world.agents.sessions.of(1, "x") == []


def test_a_new_owner_with_such_a_session_is_refused(world: World) -> None:
    world.agents.removals.remove(world.agents.births.create(operator(2), "x"))
    agent = world.agents.births.create(ROOT, "x")
    with pytest.raises(TakenError, match="uid 2 already has a session default"):
        world.agents.births.change_owner(agent, 2)
    assert agent.owner == 0


# looking up


def test_agents_are_known_by_their_cgroup(world: World) -> None:
    parent = live_parent(world, "p", 1)
    child = world.live(world.agents.births.create(inside(parent), "c"))
    find = world.agents.registry.by_cgroup
    assert find("user-1/agent-p/run") is parent
    assert find("user-1/agent-p") is parent
    assert find("user-1/agent-p/run/made/by/itself") is parent
    assert find("user-1/agent-p/child/agent-c/run") is child
    assert find("user-1/agent-p/child/agent-c/run/x") is child
    assert find("user-1/agent-q/run") is None
    assert find("user-1/other") is None
    assert find("monitor") is None


@pytest.mark.parametrize("name", ["c", "none", "other"])
def test_a_cgroup_that_an_agent_made_below_its_leaf_is_its_own(world: World, name: str) -> None:
    parent = live_parent(world, "p", 1)
    world.live(world.agents.births.create(inside(parent), "c"))
    live_parent(world, "other", 2)
    assert world.agents.registry.by_cgroup(f"user-1/agent-p/run/child/agent-{name}") is parent


def test_a_cgroup_of_an_agent_that_does_not_run_is_nobodys(world: World) -> None:
    world.agents.births.create(operator(1), "x")
    assert world.agents.registry.by_cgroup("user-1/agent-x/run") is None


def test_descendants_are_the_owned_ones_parents_first(world: World) -> None:
    parent = live_parent(world)
    one = world.may_create(world.live(world.agents.births.create(inside(parent), "a")))
    two = world.live(world.agents.births.create(inside(one), "b"))
    free = world.live(world.agents.births.create(inside(parent), "d"))
    world.agents.journal.update(free, life="detached")
    assert world.agents.registry.descendants(parent) == [one, two]


def test_a_childs_policy_is_bound_by_its_parents_as_it_is_now(world: World) -> None:
    parent = live_parent(world)
    child = world.agents.births.create(inside(parent), "c")
    world.agents.journal.update(parent, policy="allow p_t tool:Agent* execute\n")
    rules = world.agents.authority.effective_policy(child)
    assert [(r.cls, r.object, r.perm) for r in rules] == [("tool", "Agent*", "execute")]


def test_what_a_parent_only_delegates_its_child_may(world: World) -> None:
    parent = live_parent(world)
    child = world.agents.births.create(inside(parent), "c")
    world.agents.journal.update(parent, policy="delegate p_t network:default connect\n")
    world.agents.journal.update(child, policy="allow c_t network:default connect\n")
    assert [r.kind for r in world.agents.authority.effective_policy(parent)] == ["delegate"]
    assert [r.kind for r in world.agents.authority.effective_policy(child)] == ["allow"]


def test_limits_are_the_agents_else_the_configured(tmp_path: Path) -> None:
    with world_in(tmp_path, grace=3.0, timeout=60.0) as world:
        agent = world.agents.births.create(operator(1), "x")
        assert (world.agents.settings.grace(agent), world.agents.settings.timeout(agent)) == (
            3.0,
            60.0,
        )
        assert world.agents.settings.log_max(agent) == 64 << 20
        world.agents.journal.update(
            agent, limits={"grace": "1s", "timeout": "500ms", "log_max": "8K"}
        )
        assert (world.agents.settings.grace(agent), world.agents.settings.timeout(agent)) == (
            1.0,
            0.5,
        )
        assert world.agents.settings.log_max(agent) == 8192


def test_documents_are_replaced_as_a_whole(world: World) -> None:
    agent = world.agents.births.create(operator(1), "x")
    assert world.agents.documents.read(agent, "result.md") == b""
    assert world.agents.documents.size(agent, "result.md") == 0
    world.agents.documents.write(agent, "result.md", b"one")
    old = world.agents.documents.path(agent, "result.md").open("rb")
    with old:
        world.agents.documents.write(agent, "result.md", b"two")
        assert old.read() == b"one"
    assert world.agents.documents.read(agent, "result.md") == b"two"
    names = {"artifact", "result.md"}
    assert set(os.listdir(world.agents.documents.path(agent, ""))) == names


def test_everything_is_found_again_after_a_crash(world: World) -> None:
    parent = live_parent(world)
    child = world.agents.births.create(inside(parent), "c")
    agents = world.reopen()
    again = agents.registry.named("c")
    assert again is not None
    assert again.dump() == child.dump()
    above = agents.registry.parent_of(again)
    assert above is not None
    assert above.dump() == parent.dump()
    assert [a.index for a in agents.registry.children(above)] == [child.index]


# who caused it


def causes(world: World, agent: Agent) -> list[tuple[str, str]]:
    return [(e["type"], e["by"]) for e in map(json.loads, world.lines(agent))]


def test_what_is_committed_while_somebody_acts_was_caused_by_it(world: World) -> None:
    agent = world.agents.births.create(operator(1000), "x")
    with world.agents.journal.acting(operator(1000)):
        cancel_new(world.agents, agent, "operator_stop")
    assert causes(world, agent)[1:] == [
        ("agent.status", "operator uid:1000"), ("agent.stop", "operator uid:1000"),
    ]  # fmt: skip


def test_an_agent_that_acts_is_named_with_its_run(world: World) -> None:
    parent = live_parent(world)
    world.agents.journal.update(parent, run=Run(id=RunId("r7")))
    with world.agents.journal.acting(inside(parent)):
        child = world.agents.births.create(inside(parent), "c")
    assert causes(world, child) == [("agent.create", "agent:p run:r7")]


def test_nobody_acts_after_it_and_inside_another_both_are_right(world: World) -> None:
    agents = world.agents
    assert agents.journal.actor == "runtime"
    with agents.journal.acting(operator(1)):
        with pytest.raises(KeyError), agents.journal.acting(operator(2)):
            assert agents.journal.actor == "operator uid:2"
            raise KeyError
        assert agents.journal.actor == "operator uid:1"
    assert agents.journal.actor == "runtime"


def test_a_control_is_told_once_in_the_transaction_that_it_changes(world: World) -> None:
    agent = world.agents.births.create(operator(1000), "x")
    with world.agents.journal.acting(operator(1000), agent, file="model"):
        world.agents.journal.update(agent, model="m")
        world.agents.journal.update(agent, model="n")
    events = [json.loads(line) for line in world.lines(agent)][1:]
    assert [{k: e[k] for k in e if k not in ("id", "ts")} for e in events] == [
        {"type": "agent.control", "agent": "x", "file": "model", "by": "operator uid:1000"}
    ]


def test_a_verb_that_changes_nothing_is_told_all_the_same(world: World) -> None:
    agent = world.agents.births.create(operator(1000), "x")
    with world.agents.journal.acting(operator(0), agent, verb="kill"):
        pass
    assert causes(world, agent)[1:] == [("agent.control", "operator uid:0")]


def test_what_was_refused_is_no_event(world: World) -> None:
    agent = world.agents.births.create(operator(1000), "x")
    with pytest.raises(DeniedError), world.agents.journal.acting(operator(0), agent, file="model"):
        raise DeniedError("no")
    assert len(world.lines(agent)) == 1


def test_what_waits_for_room_was_caused_by_who_caused_it_then(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = world.agents.births.create(operator(1000), "x")

    def full(*_: object) -> None:
        raise NoSpaceError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(world.agents.journal, "_commit", full)
        with world.agents.journal.acting(operator(7)):
            cancel_new(world.agents, agent, "operator_stop")
    with world.agents.journal.acting(operator(8)):
        world.agents.journal.update(agent, meta="{}")
    assert causes(world, agent)[-1] == ("agent.stop", "operator uid:7")
