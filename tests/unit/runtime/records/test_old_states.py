"""States that older versions left are opened: in ``states`` is what a kill of their daemons left of
``tests.upgrade.scene``, by the version of the schema. ``tests.upgrade.state`` makes them."""

from __future__ import annotations

import json
import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from runtime.cell.record import RunRecord, read_record
from runtime.kernel import clock, linux
from runtime.records.change import Change
from runtime.records.items import Ask, Item, Message, Task, Wait, Work
from runtime.records.lifecycle import Cue, Status
from runtime.records.model import Agent, Outcome
from runtime.records.store import check_state
from tests.upgrade.scene import STATUSES
from tests.worlds.records import ROOT, World, inside, world_in

STATES = Path(__file__).parent / "states"
#: records of agents, by kind and agent, with what tells them apart and their statuses
ITEMS: dict[tuple[type[Item], str], list[tuple[str, str]]] = {
    (Message, "froze"): [("hold on", "running")],
    (Message, "talker"): [
        ("gate it", "running"), ("second " * 1000, "queued"), ("see", "queued"),
    ],
    (Message, "worker"): [("gate it", "running"), ("second", "queued")],
    (Task, "boss"): [("kid", "made"), ("tree", "made")],
    (Task, "tasker"): [
        *((name, "running") for name in ("good", "long", "deaf", "lost")), ("later", "made"),
    ],
    (Work, "talker"): [("w", "active"), ("v", "blocked")],
    (Wait, "talker"): [("trigger", "armed"), ("timer", "armed"), ("late", "armed")],
    (Wait, "tasker"): [("task", "armed")],
}


@pytest.fixture(params=[2, 3, 4, 5, 7, 8])
def schema(request: pytest.FixtureRequest) -> int:
    version: int = request.param
    return version


@pytest.fixture
def unpacked(tmp_path: Path, schema: int) -> Path:
    with tarfile.open(STATES / f"schema-{schema}.tar.xz") as archive:
        # as a matter of course in later Pythons; some of 3.11 do not have it
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path)
    return tmp_path


def test_it_is_looked_at_without_being_changed(unpacked: Path, schema: int) -> None:
    (path,) = unpacked.rglob("ctxfs.db")
    before = path.read_bytes()
    check_state(path)
    assert path.read_bytes() == before
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (schema,)


@pytest.fixture
def world(unpacked: Path) -> Iterator[World]:
    with world_in(unpacked) as made:
        yield made


def named(world: World, name: str) -> Agent:
    agent = world.agents.registry.named(name)
    assert agent is not None
    return agent


def numbers(world: World, agent: Agent) -> list[str]:
    return [json.loads(line)["id"] for line in world.lines(agent)]


def test_they_are_what_they_say(unpacked: Path, schema: int) -> None:
    with closing(sqlite3.connect(unpacked / "state" / "ctxfs.db")) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (schema,)


def test_agents_are_what_they_were(world: World) -> None:
    assert {a.name: a.status.value for a in world.agents.registry} == STATUSES
    boss, kid, apart = (named(world, name) for name in ("boss", "kid", "apart"))
    assert world.agents.registry.children(boss) == [kid, apart, named(world, "tree")]
    assert (kid.life, kid.owned, apart.life, apart.owned) == ("owned", True, "detached", False)
    assert boss.policy == "allow boss_t agent:* create\nallow boss_t agent:* write\n"
    assert boss.workspace.startswith("explicit_root:")
    tree = named(world, "tree")
    assert tree.worktree_made and tree.worktree is not None
    paused, aborted, froze = (named(world, name) for name in ("paused", "aborted", "froze"))
    assert (paused.frozen, aborted.frozen, froze.frozen) == (True, False, True)
    assert (paused.run.id, aborted.run.id, froze.run.id) == ("r1", "", "r1")
    again, over, anew = (named(world, name) for name in ("again", "over", "anew"))
    assert again.waits_to_run and again.restarts == 3 and again.restart_at > 0
    assert (over.outcome, over.reason) == ("done", "exit:0")
    assert (anew.status, world.agents.registry.next_run(Change(), anew)) == (Status.NEW, "r2")
    for agent in world.agents.registry:
        assert not agent.run.ending and (agent.cause is None or agent.status is Status.DEAD)
        assert agent.how.name in ("once", "turn", "resident") and agent.discards == ()


def test_what_they_own_is_what_it_was(world: World) -> None:
    found: dict[tuple[type[Item], str], list[tuple[str, str]]] = {}
    for agent in world.agents.registry:
        for cls in (Message, Task, Work, Wait):
            for item in world.agents.items.of(agent.index, cls):
                name = item.text if isinstance(item, Message) else item.name
                found.setdefault((cls, agent.name), []).append((name, item.status.value))
    assert found == ITEMS
    talker = named(world, "talker")
    assert talker.focus == "w"
    work = world.agents.items.named(talker.index, Work, "v")
    assert work is not None and work.objective.rstrip("\n") == "long " * 1000 + "v"
    late = world.agents.items.named(talker.index, Wait, "late")
    timer = world.agents.items.named(talker.index, Wait, "timer")
    assert timer is not None and late is not None
    # by the wall clock alone, as after a reboot; machines that begin as copies of one share theirs
    for wait, moment in ((timer, timer.due), (late, late.expires)):
        if wait.boot == linux.boot_id():
            continue
        (counted,) = world.agents.waiting.moments._moments_of(wait)
        assert moment - clock.ahead() == pytest.approx(counted, abs=5)
    assert late is not None and late.expires > late.created > 0
    assert world.agents.waiting.with_token(late.token) is late
    boss, kid = named(world, "boss"), named(world, "kid")
    handle = world.agents.items.named(boss.index, Task, "kid")
    assert handle is not None and world.agents.results.child_of(handle) is kid


def test_histories_go_on(world: World) -> None:
    for agent in world.agents.registry:
        known = numbers(world, agent)
        assert known == [f"e{number + 1}" for number in range(len(known))]
    talker = named(world, "talker")
    before = len(numbers(world, talker))
    trigger = world.agents.items.named(talker.index, Wait, "trigger")
    assert trigger is not None
    world.agents.waiting.trigger(trigger, "now")
    world.agents.messages.send(ROOT, talker, "more")
    known = numbers(world, talker)
    assert len(known) > before + 1
    assert known == [f"e{number + 1}" for number in range(len(known))]
    session = world.agents.sessions.get(talker.session)
    assert session is not None and (session.name, session.events) == ("other", len(known))
    assert [s for s, _ in world.agents.sessions.of(0, "talker")] == ["default", "other"]


def test_lives_go_on_to_their_ends(world: World) -> None:
    for agent in list(world.agents.registry):
        if agent.live:
            change = Change()
            world.agents.ends.record(change, agent, Cue.LOST, Outcome.INTERRUPTED, "why")
            world.agents.journal.note(change)
    over = named(world, "over")
    world.agents.births.renew(over)
    before = {a.name: a.dump() for a in world.agents.registry}
    world.reopen()
    assert {a.name: a.dump() for a in world.agents.registry} == before
    talker = named(world, "talker")
    assert (talker.status, talker.outcome) == (Status.DEAD, "interrupted")
    assert all(wait.over for wait in world.agents.items.of(talker.index, Wait))
    assert named(world, "over").status is Status.NEW


def test_records_of_living_cells_are_understood(
    world: World, unpacked: Path, schema: int
) -> None:
    """What their monitors write, which go on while versions change."""
    living = [a for a in world.agents.registry if a.live and not a.waits_to_run]
    assert living
    for agent in living:
        names: set[str] = {name for name in (agent.cell.id, agent.run.id) if name}
        for task in world.agents.items.of(agent.index, Task):
            if task.status.value == "running":
                names.add(f"task-{task.name}")
        assert names
        for name in names:
            record = read_record(unpacked / "record" / f"{agent.incarnation}-{name}")
            check_record(record, over=agent.name == "aborted", version=int(schema > 3))


def check_record(record: RunRecord, *, over: bool, version: int) -> None:
    assert record.understood and record.version == version
    assert record.settled and record.monitor and record.chain and record.keeper
    assert record.held or record.program
    assert (record.over, record.signal) == ((True, 15) if over else (False, None))


def test_agents_that_could_not_ask_ask(world: World) -> None:
    talker, asks = named(world, "talker"), world.agents.asks
    assert not asks.seen_by(ROOT) and not asks.known(talker)
    ask = asks.make(inside(talker), talker, "q")
    with world.agents.journal.changing() as change:
        asks.begin(change, talker, ask, "May I?")
    asks.answer(ROOT, talker, ask, "yes")
    agents = world.reopen()
    (again,) = agents.items.all(Ask)
    assert (again.question, again.answer, again.by) == ("May I?", "yes\n", "runtime")


def test_what_happens_from_then_on_is_in_the_log(world: World) -> None:
    """What had happened before is in the histories alone, delivered or not."""
    fleet, agent = world.agents.fleet, named(world, "talker")
    assert fleet.tail(None, 1 << 20) == b""
    change = Change()
    change.tell(agent, "agent.report", text="x")
    world.agents.journal.commit(change)
    event = json.loads(fleet.tail(agent.owner, 1 << 20))
    assert event["id"] == numbers(world, agent)[-1]
    assert event["seq"] > 1_700_000_000_000_000
    tail = fleet.tail(None, 1 << 20)
    assert world.reopen().fleet.tail(None, 1 << 20) == tail
