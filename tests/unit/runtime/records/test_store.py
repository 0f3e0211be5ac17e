"""The database: transactions, the outbox, names and their runs."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from runtime.errors import NoSpaceError, StartupError
from runtime.ids import NO_SESSION, AgentIndex, RunId, SessionIndex
from runtime.kernel.trash import Trash
from runtime.records.items import LongText, Work
from runtime.records.lifecycle import Status
from runtime.records.model import Agent, Session
from runtime.records.registry import Registry
from runtime.records.run import Run
from runtime.records.schema import STEPS
from runtime.records.sessions import Sessions
from runtime.records.store import Pending, Store, check_state
from runtime.records.stored import defaults_of, dumped, shortened


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path / "db")) as opened:
        yield opened


def an_agent(name: str = "a", **values: object) -> Agent:
    facts: dict[str, object] = {"index": 0, "incarnation": name + "-1", "name": name, **values}
    return Agent(owner=1, uid=1, gid=1, **facts)  # type: ignore[arg-type]


def sessions_in(store: Store) -> Sessions:
    state = store._path.parent
    return Sessions(store=store, registry=Registry(store), trash=Trash(state), state=state)


def a_session(name: str = "default", agent: str = "a", owner: int = 1) -> Session:
    return Session(
        index=NO_SESSION, owner=owner, agent=agent, name=name, agent_index=AgentIndex(1)
    )


class Fault(Exception):
    pass


def test_what_is_committed_is_there_after_a_crash(tmp_path: Path) -> None:
    first = Store(tmp_path / "db")
    with first.transaction():
        index = first.insert_agent(an_agent(groups=(5, 6), cause=("done", "exit:0")))
    # no close: the file as a killed daemon leaves it
    with closing(Store(tmp_path / "db")) as second:
        (agent,) = second.load_agents()
        assert (agent.index, agent.name, agent.groups) == (index, "a", (5, 6))
        assert agent.cause == ("done", "exit:0")
    first.close()


def test_a_transaction_is_all_or_nothing(store: Store) -> None:
    with pytest.raises(Fault), store.transaction():
        store.insert_agent(an_agent())
        store.claim_name("a", 1)
        store.post(Pending(1, "x", "{}"))
        raise Fault
    assert store.load_agents() == []
    assert store.name_owner("a") is None
    assert store.undelivered() == []


def test_a_nested_transaction_joins_the_outer_one(store: Store) -> None:
    with pytest.raises(Fault), store.transaction():
        with store.transaction():
            store.claim_name("a", 1)
        raise Fault
    assert store.name_owner("a") is None


def test_a_fault_in_a_nested_transaction_undoes_the_outer_one(store: Store) -> None:
    with pytest.raises(Fault), store.transaction():
        store.claim_name("a", 1)
        with store.transaction():
            raise Fault
    assert store.name_owner("a") is None


def test_after_a_fault_the_next_transaction_commits(store: Store) -> None:
    with pytest.raises(Fault), store.transaction(), store.transaction():
        raise Fault
    with store.transaction(), store.transaction():
        store.claim_name("a", 1)
    with pytest.raises(Fault), store.transaction():
        raise Fault
    assert store.name_owner("a") == 1


def test_a_full_disk_is_said_and_undone(store: Store) -> None:
    with store.transaction():
        store.claim_name("a", 1)
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count={pages}")
    told: list[str] = []
    store.crowded = lambda: told.append("crowded")
    with pytest.raises(NoSpaceError, match="disk"), store.transaction():
        store.claim_name("b", 1)
        for number in range(100):
            store.post(Pending(store.number(1), "x", f"{number}" * 4096))
    assert store.name_owner("b") is None
    assert told == ["crowded"], "a checkpoint makes room in the log"
    store._db.execute("PRAGMA max_page_count=100000")
    with store.transaction():
        store.claim_name("c", 1)
    assert store.name_owner("c") == 1


def test_a_newer_versions_database_is_refused_as_it_is(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "db")) as db:
        db.execute("PRAGMA user_version=99")
    sentence = r"newer ctxd \(schema 99; .*\); start the newer ctxd, or use another --state$"
    for read in (Store, check_state):
        with pytest.raises(StartupError, match=sentence):
            read(tmp_path / "db")
    with closing(sqlite3.connect(tmp_path / "db")) as db:
        assert db.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (0,)
        assert db.execute("PRAGMA user_version").fetchone() == (99,)


def test_a_state_that_is_not_there_or_damaged(tmp_path: Path) -> None:
    check_state(tmp_path / "db")
    assert not (tmp_path / "db").exists()
    (tmp_path / "db").write_bytes(b"x" * 4096)
    with pytest.raises(StartupError, match="cannot read it: file is not a database"):
        check_state(tmp_path / "db")


def test_a_row_that_this_version_cannot_read_is_told(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    check_state(tmp_path / "db")  # beside the daemon that has it open
    store._db.execute("INSERT INTO items (agent, kind, data) VALUES (1, 'novel', '{}')")
    with pytest.raises(StartupError, match="cannot read it: 'novel'"):
        check_state(tmp_path / "db")
    store.close()


def test_a_database_is_brought_up_to_date_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Store) -> None:
        raise RuntimeError("here")

    with monkeypatch.context() as patch:
        patch.setattr("runtime.records.store.STEPS", (*STEPS, ("", fail)))
        with pytest.raises(RuntimeError, match="here"):
            Store(tmp_path / "db")
    with closing(sqlite3.connect(tmp_path / "db")) as db:
        assert db.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (0,)
    with closing(Store(tmp_path / "db")) as store:
        assert (store.load_agents(), store.load_items()) == ([], [])


def test_an_agent_is_changed_in_place(store: Store) -> None:
    agent = an_agent()
    with store.transaction():
        agent.index = store.insert_agent(agent)
        store.put_agent(agent.index, {**agent.dump(), "removed": True, "channel": "a~1"})
    assert store.load_agents() == []
    found = store.find_agent(agent.index)
    assert found is not None
    assert (found.removed, found.channel) == (True, "a~1")


def test_fields_of_a_newer_version_are_left_out_when_loaded() -> None:
    run = {**Run(id=RunId("r1")).row(), "invented_later": 1}
    values = {**shortened(Agent, an_agent().dump()), "run": run, "invented_later": 1}
    assert Agent.load(AgentIndex(7), values).run == Run(id=RunId("r1"))


def test_indexes_are_not_given_twice(store: Store) -> None:
    with store.transaction():
        first = store.insert_session(a_session())
        sessions_in(store).delete(first)
        second = store.insert_session(a_session())
    assert second > first


def test_channels_are_found_by_session_and_name(store: Store) -> None:
    with store.transaction():
        one = store.insert_agent(an_agent("a", parent_session=4, channel="a"))
        two = store.insert_agent(an_agent("b", parent_session=4, channel="b"))
        store.insert_agent(an_agent("c", parent_session=5, channel="a"))
    four = SessionIndex(4)
    assert sessions_in(store).channels(four) == [("a", one), ("b", two)]
    assert sessions_in(store).find_channel(four, "b") == two
    assert sessions_in(store).find_channel(four, "c") is None


def test_holders_of_directories_are_found_also_of_removed_agents(store: Store) -> None:
    with store.transaction():
        store.insert_agent(an_agent("a"))
        index = store.insert_agent(an_agent("b"))
        store.put_agent(index, {**an_agent("b").dump(), "removed": True})
        store.insert_agent(an_agent("c"))
    asked = ["a-1", "b-1", "none-1", "b", 'quote"']
    assert store.holders(asked) == {"a-1": (1, "a"), "b-1": (1, "b")}
    assert store.holders([]) == {}


def test_run_numbers_go_on(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "db")) as store, store.transaction():
        store.claim_name("a", 1)
        assert store.runs("a") == 0
        store.put_runs("a", 2)
    with closing(Store(tmp_path / "db")) as store, store.transaction():
        assert store.runs("a") == 2


def test_run_numbers_go_on_when_the_name_changes_hands(store: Store) -> None:
    with store.transaction():
        store.claim_name("a", 1)
        store.put_runs("a", 1)
        store.claim_name("a", 2)
        assert store.runs("a") == 1
    assert store.name_owner("a") == 2


def test_a_name_belongs_to_nobody_after_its_release(store: Store) -> None:
    with store.transaction():
        store.claim_name("a", 1)
        store.release_name("a")
    assert store.name_owner("a") is None


def test_sessions_are_listed_by_owner_and_name(store: Store) -> None:
    with store.transaction():
        one = store.insert_session(a_session("default"))
        two = store.insert_session(a_session("default.2"))
        store.insert_session(a_session("default", "b"))
        store.insert_session(a_session("default", "a", owner=2))
    assert sessions_in(store).of(1, "a") == [("default", one), ("default.2", two)]
    assert sessions_in(store).agents(1) == ["a", "b"]
    assert sessions_in(store).owners() == [1, 2]


def test_a_session_is_there_once(store: Store) -> None:
    with pytest.raises(sqlite3.IntegrityError), store.transaction():
        store.insert_session(a_session())
        store.insert_session(a_session())
    assert sessions_in(store).of(1, "a") == []


def test_a_session_keeps_its_counts(store: Store) -> None:
    session = a_session()
    with store.transaction():
        session.index = store.insert_session(session)
        session.events, session.owner = 7, 2
        store.put_session(session)
    assert sessions_in(store).find(session.index) == session
    assert sessions_in(store).of(2, "a") == [("default", session.index)]


def test_the_row_of_a_session_names_its_agent_as_ever(store: Store) -> None:
    """Other versions of the daemon read it by that name."""
    record = a_session().record()
    assert record["incarnation"] == 1 and "agent_index" not in record


def post(store: Store, path: str, line: str) -> Pending:
    row = Pending(store.number(1), path, line)
    store.post(row)
    return row


def test_the_outbox_is_in_order_and_survives(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "db")) as store, store.transaction():
        rows = [post(store, "x", "1"), post(store, "y", "2")]
    with closing(Store(tmp_path / "db")) as store:
        assert store.undelivered() == rows
        assert store.synced() == 0


def test_the_next_transaction_empties_what_was_delivered(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "db")) as store:
        with store.transaction():
            first, second = post(store, "x", "1"), post(store, "x", "2")
        store.delivered(first.seq)
        with store.transaction():
            third = post(store, "x", "3")
    with closing(Store(tmp_path / "db")) as store:
        assert store.undelivered() == [second, third]
        assert store.synced() == first.seq
        store.delivered(third.seq)
        with store.transaction():
            pass
        assert store.undelivered() == []
        assert store.synced() == third.seq


def test_a_failed_transaction_forgets_no_delivery(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "db")) as store:
        with store.transaction():
            first = post(store, "x", "1")
        store.delivered(first.seq)
        with pytest.raises(Fault), store.transaction():
            raise Fault
        with store.transaction():
            store.claim_name("a", 1)
        assert store.undelivered() == []


@pytest.mark.parametrize("count", [1, 3])
def test_a_number_is_never_given_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """The clock may stand still, or go back."""
    with closing(Store(tmp_path / "db")) as store:
        with store.transaction():
            first = post(store, "x", "1")
        monkeypatch.setattr(time, "time_ns", lambda: 5)
        store.delivered(first.seq)
        with store.transaction():
            pass
        assert store.undelivered() == []
    with closing(Store(tmp_path / "db")) as store:
        assert store.number(count) == first.seq + count
        monkeypatch.setattr(time, "time_ns", lambda: (first.seq + 1000) * 1000)
        assert store.number(count) == first.seq + 1000


def test_sync_reaches_the_disk_without_a_transaction(store: Store) -> None:
    with store.transaction():
        store.claim_name("a", 1)
    store.sync()
    assert store.name_owner("a") == 1


LONG = "ä" * 5000


def texts(store: Store) -> int:
    (count,) = store._db.execute("SELECT count(*) FROM texts").fetchone()
    return int(count)


def test_long_texts_are_read_when_they_are_asked_for(store: Store) -> None:
    item = Work(agent=AgentIndex(1), name="w", objective="short", plan=LONG)
    with store.transaction():
        item.index = store.insert_item(item)
    (loaded,) = store.load_items()
    assert isinstance(loaded, Work)
    assert isinstance(loaded.raw("plan"), LongText)
    assert (loaded.objective, loaded.plan, loaded.length("plan")) == ("short", LONG, 5000)
    assert loaded.dump() == item.dump()
    with store.transaction():
        store.put_item(loaded.index, {**loaded.record(), "objective": LONG})
    (again,) = store.load_items()
    assert isinstance(again, Work)
    assert (again.objective, again.plan) == (LONG, LONG)
    with store.transaction():
        store.put_item(again.index, {**again.record(), "plan": ""})
    assert texts(store) == 1
    with store.transaction():
        store.delete_items(AgentIndex(1))
    assert texts(store) == 0
    assert again.objective == "", "what is gone has no text"


def test_an_item_lets_go_of_what_the_store_has(store: Store) -> None:
    item = Work(agent=AgentIndex(1), name="w", plan=LONG, acceptance="short")
    with store.transaction():
        item.index = store.insert_item(item)
    item.keep(store.read_text)
    assert isinstance(item.raw("plan"), LongText)
    assert item.raw("acceptance") == "short"
    assert item.plan == LONG


def test_a_database_of_version_2_is_taken_over(tmp_path: Path) -> None:
    item = Work(agent=AgentIndex(1), name="w", objective="short", plan=LONG)
    with closing(Store(tmp_path / "db")) as store, store.transaction():
        item.index = store.insert_item(item)
    with closing(sqlite3.connect(tmp_path / "db")) as db:
        data = json.dumps(item.dump())
        db.execute("UPDATE items SET data=?", (data,))
        db.execute("DROP TABLE texts")
        db.execute("DROP TABLE held")
        db.execute("DROP TABLE peers")
        db.execute("DROP TABLE posts")
        db.execute("DROP TABLE answers")
        db.execute("DROP TABLE spaces")
        db.execute("PRAGMA user_version=2")
        db.commit()
    with closing(Store(tmp_path / "db")) as store:
        (loaded,) = store.load_items()
        assert isinstance(loaded.raw("plan"), LongText)
        assert loaded.dump() == item.dump()
        assert texts(store) == 1


def test_a_row_has_only_what_is_not_as_usual(tmp_path: Path) -> None:
    usual = an_agent()
    odd = an_agent("odd", groups=(1,), run=Run(id=RunId("r3"), pid=7), status=Status.PAUSED,
                   since=0.0, started=7.0, archived=True)  # fmt: skip
    with closing(Store(tmp_path / "db")) as store:
        with store.transaction():
            for agent in (usual, odd):
                agent.index = store.insert_agent(agent)
        assert [agent.dump() for agent in store.load_agents()] == [usual.dump(), odd.dump()]
    with closing(sqlite3.connect(tmp_path / "db")) as db:
        rows = [json.loads(data) for (data,) in db.execute("SELECT data FROM agents")]
    assert "archived" not in rows[0] and rows[1]["archived"] is True
    assert len(rows[0]) < len(usual.dump()) / 3


def test_defaults_that_rows_leave_out_stay() -> None:
    """They are part of the state's format: a row without the field means this value."""
    told = {name: value for name, value in defaults_of(Agent).items() if value}
    parts = [told.pop(name) for name in ("cell", "run", "said")]
    assert [{n: v for n, v in dumped(part).items() if v} for part in parts] == [
        {}, {"status": "none"}, {},
    ]  # fmt: skip
    assert told == {
        "status": "new",
        "life": "detached", "profile": "public_named", "iso": "sandbox", "workspace": "inherit",
        "context": "fresh", "mode": "once", "restart": "no", "homedir": "private",
        "meta": "{}",
    }  # fmt: skip


def test_what_is_held_of_events_is_counted_and_goes_with_its_session(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "db")) as store:
        with store.transaction():
            one = store.insert_session(a_session("default", owner=1))
            two = store.insert_session(a_session("default.2", owner=1))
            sessions_in(store).hold(one, "sch\u00f6n\n")
            sessions_in(store).hold(one, "b\n")
            sessions_in(store).hold(two, "c\n")
        assert sessions_in(store).lines(one) == "sch\u00f6n\nb\n"
        assert store.held_sizes() == {(1, "a"): (2, 11)}
        with store.transaction():
            assert sessions_in(store).release(two) == "c\n"
            sessions_in(store).delete(one)
        assert sessions_in(store).lines(one) == sessions_in(store).lines(two) == ""
        assert store.held_sizes() == {(1, "a"): (1, 0)}


def test_other_threads_are_told_of_a_store_that_cannot_be_read(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "db")) as store:
        store._path = tmp_path / "nowhere" / "db"
        for read in (store.held_sizes, lambda: store.holders(["abc"])):
            with pytest.raises(OSError, match="unable to open database file"):
                read()


def test_a_checkpoint_keeps_no_writer_waiting_for_who_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup reads for as long as its disk takes."""
    monkeypatch.setattr("runtime.records.store._WAL_MAX", 0)
    path = tmp_path / "db"
    with (
        closing(Store(path)) as store,
        closing(sqlite3.connect(path, isolation_level=None)) as reader,
        closing(sqlite3.connect(path, isolation_level=None, timeout=1)) as writer,
    ):
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM names").fetchall()
        with store.transaction():
            store.claim_name("a", 1)
        beside = threading.Thread(target=store.checkpoint)
        beside.start()
        while beside.is_alive():
            writer.execute("UPDATE names SET runs = runs + 1")
        beside.join()
        reader.execute("COMMIT")
        store.checkpoint()
        assert os.stat(f"{path}-wal").st_size == 0


def test_a_checkpoint_that_cannot_open_the_database_is_made_later(tmp_path: Path) -> None:
    """The disk fails before SQLite has opened anything of it."""
    path, away = tmp_path / "db", tmp_path / "away"
    with closing(Store(path)) as store:
        path.rename(away)
        path.mkdir()
        with pytest.raises(NoSpaceError):
            store.checkpoint()
        path.rmdir()
        away.rename(path)
        store.checkpoint()


#: locks the bytes of the log's index that say who writes, and who repairs it (SQLite, wal.c)
_REPAIRS = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
for byte in (120, 122):
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_checkpoint_is_made_later_if_the_database_is_locked(tmp_path: Path) -> None:
    """It fails nobody: the next commit tells again that the log is long."""
    path, told = tmp_path / "db", list[str]()
    with closing(Store(path)) as store:
        store.crowded = lambda: told.append("crowded")
        with store.transaction():
            store.claim_name("a", 1)
        with open(f"{path}-shm", "r+b", buffering=0) as index, subprocess.Popen(
            [sys.executable, "-c", _REPAIRS, f"{path}-shm"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as other:  # fmt: skip
            assert other.stdout is not None
            assert other.stdout.readline() == b"locked\n"
            whole = index.read(48)
            index.seek(0)
            index.write(b"\xff" * 48)  # one of two copies of its head: somebody writes it now
            store.checkpoint()
            index.seek(0)
            index.write(whole)
            other.communicate()
        assert os.stat(f"{path}-wal").st_size > 0 and not told
        with store.transaction():
            store.claim_name("b", 1)
        assert told == ["crowded"]
        store.checkpoint()
        with store.transaction():
            store.claim_name("c", 1)
        assert told == ["crowded"]
