"""Calls with an id: carried out once, and answered the same."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from ctxfs.tools import registry
from ctxfs.tools.registry import BY_NAME, TOOLS
from ctxfs.tools.tool import Does
from runtime.agents import answers
from runtime.agents.answers import Answers
from runtime.authority.accounts import Resource
from runtime.caller import Caller
from runtime.errors import (
    CtxError,
    MalformedError,
    NoSpaceError,
    QuotaError,
    StaleError,
    TakenError,
)
from runtime.ids import CallId
from runtime.kernel import clock
from runtime.records.items import Message, Work
from runtime.records.store import Store
from tests.unit.ctxfs.tools.test_tools import CALLS, Desk, _running, _work
from tests.worlds.tree import USER, mounted_in

ONE = CallId("one")
#: what these do is written beside the store
BESIDE = ("ResultWrite",)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with mounted_in(tmp_path, document_max=4096) as mounted:
        yield Desk(mounted)


def call(
    desk: Desk, name: str, given: dict[str, Any], ident: str = "one", caller: Caller | None = None
) -> dict[str, Any]:
    base, root = desk.mounted.base, desk.mounted.fs.root
    who = caller or desk.me
    if name == "ExecCommand":  # nothing runs, and so ends
        given = {"yield": 0, **given}
    return trio.run(registry.call, base, root, who, name, given, CallId(ident))


def rows(desk: Desk, table: str) -> list[Any]:
    path = desk.mounted.world.state / "ctxfs.db"
    with closing(sqlite3.connect(path)) as db:
        return db.execute(f"SELECT * FROM {table} ORDER BY idx").fetchall()


def everything(desk: Desk) -> list[Any]:
    return [rows(desk, table) for table in ("agents", "items", "sessions", "answers")]


def kept(desk: Desk) -> int:
    return len(rows(desk, "answers"))


@pytest.mark.parametrize("which", CALLS)
def test_a_call_that_is_said_again_is_not_made_again(desk: Desk, which: str) -> None:
    before, given, wanted, _ = CALLS[which]
    name = which.split()[0]
    before(desk)
    first = call(desk, name, given)
    assert {key: first.get(key) for key in wanted} == wanted
    reads = Does.READS in BY_NAME[name].does
    assert kept(desk) == (0 if reads else 1)
    then = everything(desk)
    again = call(desk, name, given)
    for answer in (first, again):  # has the time that passed, too
        answer.pop("usage", None)
    assert again == first
    assert everything(desk) == then


@pytest.mark.parametrize(
    "which", [w for w in CALLS if Does.READS not in BY_NAME[w.split()[0]].does]
)
def test_the_answer_is_stored_with_what_the_call_changes(
    desk: Desk, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction in which the answer appears is the last that changes a record, but for what
    the end of one brings with it; and no change of the call comes after it alone."""
    before, given, _, _ = CALLS[which]
    name = which.split()[0]
    before(desk)
    store = desk.mounted.world.store
    commits: list[set[str]] = []
    tables: set[str] = set()
    transaction = Store.transaction

    def seen(self: Store) -> Any:
        outer = not store._depth

        class Watched:
            def __enter__(self) -> None:
                if outer:
                    tables.clear()
                    store._db.set_authorizer(noted)
                self.inner = transaction(store)
                self.inner.__enter__()

            def __exit__(self, *error: Any) -> Any:
                result = self.inner.__exit__(*error)
                if outer:
                    store._db.set_authorizer(None)
                    commits.append(set(tables))
                return result

        return Watched()

    def noted(action: int, first: str | None, *_: Any) -> int:
        if action in (sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE):
            tables.add(str(first))
        return sqlite3.SQLITE_OK

    monkeypatch.setattr(Store, "transaction", seen)
    call(desk, name, given)
    holding = [changed for changed in commits if "answers" in changed]
    beside = name in BESIDE or (name == "TaskInput")
    assert holding
    if not beside:
        assert len(holding) == 1
        assert holding[0] & {"agents", "items", "sessions", "outbox", "held"} or not any(
            changed & {"agents", "items"} for changed in commits
        )


def test_an_id_is_its_callers_own_and_of_one_call(desk: Desk) -> None:
    given = {"objective": "fix it"}
    assert call(desk, "WorkCreate", given)["id"] == "work-1"
    with pytest.raises(TakenError, match='id: "one" is the id of another call'):
        call(desk, "WorkCreate", {"objective": "break it"})
    with pytest.raises(TakenError):
        call(desk, "WorkUpdate", {"id": "work-1", **given})
    again = call(desk, "WorkCreate", {**given, "agent_id": "coder"}, caller=USER)
    assert again["id"] == "work-2"
    assert call(desk, "WorkCreate", given, "two")["id"] == "work-3"


def test_what_is_refused_is_not_kept(desk: Desk) -> None:
    with pytest.raises(CtxError):
        call(desk, "WorkFocus", {"id": "w"})
    with pytest.raises(MalformedError):
        call(desk, "TaskInput", {"task_id": "t", "text": ""})
    assert kept(desk) == 0
    _work(desk)
    assert call(desk, "WorkFocus", {"id": "w"}) == {"focus": "w"}


def test_it_is_kept_when_another_daemon_answers(desk: Desk) -> None:
    given = {"initial_message": "look", "name": "kid"}
    first = call(desk, "SpawnAgent", given)
    used = desk.agents.accounts.use(1000, Resource.DISK)
    agents = desk.mounted.world.reopen()
    found = agents.answers.find(desk.me, ONE, answers.digest("SpawnAgent", given))
    assert found == first
    assert agents.accounts.use(1000, Resource.DISK) == pytest.approx(used, abs=100_000)
    assert any(
        row.most for row in agents.accounts.standings(1000) if row.account == Resource.DISK.value
    )


def test_what_changes_nothing_is_answered_the_same(desk: Desk) -> None:
    _work(desk)
    desk.call("WorkFocus", {"id": "w"})
    assert call(desk, "WorkFocus", {"id": "w"}) == {"focus": "w"}
    desk.call("WorkFocus", {"id": None})
    assert call(desk, "WorkFocus", {"id": "w"}) == {"focus": "w"}
    assert desk.coder.focus == ""


def test_a_change_that_fails_leaves_neither(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    put = Store.put_answer

    def fail(*args: Any) -> int:
        put(*args)
        raise NoSpaceError("the disk is full")

    before = everything(desk)
    with monkeypatch.context() as patched:
        patched.setattr(Store, "put_answer", fail)
        with pytest.raises(NoSpaceError):
            call(desk, "WorkCreate", {"objective": "x", "focus": True})
    assert everything(desk) == before
    assert desk.agents.items.of(desk.coder.index, Work) == []
    assert desk.coder.focus == ""
    assert call(desk, "WorkCreate", {"objective": "x", "focus": True})["id"] == "work-1"


def test_of_bytes_to_a_command_nobody_knows_whether_they_arrived(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that dies while it writes them may have written them: they are not written twice."""

    class Death(BaseException):
        pass

    def die(*_: Any) -> int:
        raise Death

    _running(desk)
    given = {"task_id": "t", "text": "yes\n"}
    with monkeypatch.context() as patched:
        patched.setattr(desk.mounted.supervisor, "write_input", die)
        patched.setattr(Answers, "_delete", lambda *_: [])
        with pytest.raises(Death):
            call(desk, "TaskInput", given)
    with pytest.raises(StaleError, match="not known"):
        call(desk, "TaskInput", given)
    assert call(desk, "TaskInput", given, "two")["accepted"] == 4


def test_what_is_said_again_meanwhile_waits(desk: Desk) -> None:
    answered: list[Any] = []
    base, root = desk.mounted.base, desk.mounted.fs.root
    given = {"initial_message": "look", "name": "kid"}

    async def ask() -> None:
        answered.append(await registry.call(base, root, desk.me, "SpawnAgent", given, ONE))

    async def both() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask)

    trio.run(both)
    assert len(answered) == 3 and answered[0] == answered[1] == answered[2]
    assert [child.name for child in desk.agents.registry.children(desk.coder)] == ["kid"]
    assert not desk.agents.answers._turns


def test_a_caller_has_so_many(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "KEPT", 3)
    for number in range(5):
        call(desk, "SendMessage", {"agent_id": "coder", "text": "x"}, f"n{number}", USER)
    assert [row[2] for row in rows(desk, "answers")] == ["n2", "n3", "n4"]
    monkeypatch.setattr(answers, "KEPT_SIZE", 1)
    call(desk, "SendMessage", {"agent_id": "coder", "text": "x"}, "n5", USER)
    assert [row[2] for row in rows(desk, "answers")] == ["n5"]
    assert len(desk.agents.items.of(desk.coder.index, Message)) == 6


def test_it_is_kept_for_an_hour(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    used = desk.agents.accounts.use(1000, Resource.DISK)
    call(desk, "WorkFocus", {"id": None})
    assert desk.agents.accounts.use(1000, Resource.DISK) > used
    now, up = clock.wall(), clock.up()

    def pass_(seconds: float, *, set_by: float = 0.0) -> None:
        monkeypatch.setattr(clock, "wall", lambda: now + seconds + set_by)
        monkeypatch.setattr(clock, "up", lambda: up + seconds)

    pass_(3599)
    desk.agents.answers.forget_old()
    assert kept(desk) == 1
    pass_(3599.5, set_by=86400)
    desk.agents.answers.forget_old()
    assert kept(desk) == 1, "the wall clock was set, and nothing is older by that"
    pass_(3601)
    assert desk.agents.answers.find(desk.me, ONE, answers.digest("WorkFocus", {"id": None})) is None
    assert kept(desk) == 0
    call(desk, "WorkFocus", {"id": None})
    pass_(7300)
    assert not desk.agents.answers.forget_old()
    assert kept(desk) == 0
    assert desk.agents.accounts.use(1000, Resource.DISK) == used


def test_it_goes_with_its_caller(desk: Desk) -> None:
    desk.call("SpawnAgent", {"initial_message": "x", "name": "kid", "mode": "turn"})
    kid = desk.agents.registry.named("kid")
    assert kid is not None
    me = Caller(kid.uid, kid.gid, 0, kid.index, kid.incarnation)
    call(desk, "WorkCreate", {"objective": "x"}, caller=me)
    assert kept(desk) == 1
    desk.end_child("kid")
    assert kept(desk) == 1, "it may be read until the agent is removed"
    desk.call("AgentRemove", {"agent_id": "kid"})
    assert kept(desk) == 0
    assert kid.incarnation not in desk.agents.answers._kept


def test_without_room_nothing_is_called_but_what_makes_room(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    _running(desk)

    def full(*_: Any, **__: Any) -> None:
        raise QuotaError("the account disk is full")

    monkeypatch.setattr(desk.agents.disk, "check", full)
    with pytest.raises(QuotaError):
        call(desk, "WorkFocus", {"id": None})
    assert kept(desk) == 0
    assert call(desk, "TaskStop", {"task_id": "t"})["status"] == "cancelling"


def test_what_makes_room_ends_or_removes() -> None:
    frees = {tool.name for tool in TOOLS if Does.FREES in tool.does}
    assert frees == {"AgentStop", "AgentRemove", "TaskStop", "TaskRemove", "WaitCancel",
                     "WorkRemove", "AskWithdraw"}  # fmt: skip
    for tool in TOOLS:
        assert not (Does.READS in tool.does and tool.does & ~Does.READS), tool.name
        assert tool.waits is None or Does.READS in tool.does, "what waits is not carried out once"


def test_answers_of_agents_that_are_gone_are_dropped_at_the_start(desk: Desk) -> None:
    call(desk, "WorkFocus", {"id": None})
    with closing(sqlite3.connect(desk.mounted.world.state / "ctxfs.db")) as db, db:
        db.execute("UPDATE answers SET caller='nobody'")
    agents = desk.mounted.world.reopen()
    assert isinstance(agents.answers, Answers)
    assert kept(desk) == 0
