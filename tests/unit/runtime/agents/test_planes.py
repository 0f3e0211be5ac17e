"""What messages, tasks, work items and waits may become, written out once more and compared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import CtxError, MissingError, WrongStateError
from runtime.ids import AgentIndex, ItemIndex, MessageId, RunId, SessionIndex
from runtime.records.itemlists import Items
from runtime.records.items import (
    KINDS,
    MESSAGE_MOVES,
    TASK_MOVES,
    WAIT_MOVES,
    WORK_MOVES,
    Item,
    Message,
    MessageStatus,
    Report,
    Task,
    TaskCue,
    TaskStatus,
    Wait,
    WaitStatus,
    Work,
    WorkStatus,
)
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.records.moves import Moves
from tests.worlds.records import World, operator

USER = operator(1000)

#: by kind: the cues, or the statuses to be, and for each status what each makes of it; "-" for a
#: refusal
EXPECTED: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "message": (
        ("queued", "running", "processed", "failed", "aborted", "dropped"),
        {
            "queued": ("-", "running", "-", "-", "-", "dropped"),
            "running": ("-", "-", "processed", "failed", "aborted", "-"),
            **{end: ("-",) * 6 for end in ("processed", "failed", "aborted", "dropped")},
        },
    ),
    "task": (
        (
            *("start", "stop", "kill", "run"),
            *("done", "error", "cancelled", "interrupted", "follow"),
        ),
        {
            "made": (
                *("queued", "cancelled", "cancelled", "-"),
                *("-", "-", "cancelled", "interrupted", "running"),
            ),
            "queued": (
                *("-", "cancelling", "cancelling", "running"),
                *("completed", "failed", "cancelled", "interrupted", "-"),
            ),
            "running": (
                *("-", "cancelling", "cancelling", "-"),
                *("completed", "failed", "cancelled", "interrupted", "-"),
            ),
            "cancelling": ("-", "-", "cancelling", "-", "-", "-", "cancelled", "interrupted", "-"),
            "completed": ("-",) * 9,
            "failed": ("-",) * 9,
            "cancelled": ("-",) * 9,
            "interrupted": ("-",) * 9,
        },
    ),
    "work item": (
        ("open", "active", "blocked", "done", "cancelled"),
        {
            "open": ("-", "active", "blocked", "done", "cancelled"),
            "active": ("open", "-", "blocked", "done", "cancelled"),
            "blocked": ("open", "active", "-", "done", "cancelled"),
            **{end: ("-",) * 5 for end in ("done", "cancelled")},
        },
    ),
    "wait": (
        ("new", "armed", "fired", "cancelled", "expired"),
        {
            "new": ("-", "armed", "-", "cancelled", "-"),
            "armed": ("-", "-", "fired", "cancelled", "expired"),
            **{end: ("-",) * 5 for end in ("fired", "cancelled", "expired")},
        },
    ),
}
MOVES: dict[str, tuple[Moves[Any, Any], Any, Any]] = {
    "message": (MESSAGE_MOVES, MessageStatus, MessageStatus),
    "task": (TASK_MOVES, TaskStatus, TaskCue),
    "work item": (WORK_MOVES, WorkStatus, WorkStatus),
    "wait": (WAIT_MOVES, WaitStatus, WaitStatus),
}
PAIRS = [
    (kind, status, cue, to)
    for kind, (cues, rows) in EXPECTED.items()
    for status, row in rows.items()
    for cue, to in zip(cues, row, strict=True)
]


def test_the_test_knows_every_pair() -> None:
    assert {(kind, status, cue) for kind, status, cue, _ in PAIRS} == {
        (kind, s.value, e.value)
        for kind, (_, statuses, cues) in MOVES.items()
        for s in statuses
        for e in cues
    }


@pytest.mark.parametrize(("kind", "status", "cue", "to"), PAIRS)
def test_each_pair_moves_or_is_refused(kind: str, status: str, cue: str, to: str) -> None:
    moves, statuses, cues = MOVES[kind]
    if to == "-":
        wanted = f"cannot (become )?{cue}: the {kind} is {status}"
        with pytest.raises(WrongStateError, match=wanted):
            moves.move(statuses(status), cues(cue))
    else:
        assert moves.move(statuses(status), cues(cue)).status is statuses(to)


@pytest.mark.parametrize("kind", EXPECTED)
def test_terminal_is_what_nothing_leads_out_of(kind: str) -> None:
    _, rows = EXPECTED[kind]
    terminal = {status for status, row in rows.items() if set(row) == {"-"}}
    assert {s.value for s in MOVES[kind][0].terminal} == terminal
    assert terminal


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_refusal_names_what_would_fit(kind: str) -> None:
    moves, statuses, cues = MOVES[kind]
    names, rows = EXPECTED[kind]
    for status, row in rows.items():
        fits = sorted(
            n for n, to in zip(names, row, strict=True) if to != "-" and n in moves.verbs
        )
        refused = next(n for n, to in zip(names, row, strict=True) if to == "-")
        use = " or ".join((", ".join(fits[:-1]), *fits[-1:])).removeprefix(" or ")
        wanted = f"the {kind} is {status}" + (f"; use {use}$" if use else "$")
        with pytest.raises(WrongStateError, match=wanted):
            moves.move(statuses(status), cues(refused))


@pytest.mark.parametrize("kind", MOVES)
@given(data=st.data())
def test_no_walk_leaves_a_terminal_status(kind: str, data: st.DataObject) -> None:
    moves, statuses, cues = MOVES[kind]
    status = next(iter(statuses))
    for cue in data.draw(st.lists(st.sampled_from(list(cues)), max_size=20)):
        try:
            to = moves.move(status, cue).status
        except WrongStateError:
            continue
        assert status not in moves.terminal
        status = to


@pytest.mark.parametrize("kind", MOVES)
def test_every_status_leads_to_an_end(kind: str) -> None:
    moves, statuses, _ = MOVES[kind]
    for start in statuses:
        reached = {start}
        for _ in statuses:
            reached |= {to.status for (at, _), to in moves.table.items() if at in reached}
        assert reached & moves.terminal


def test_a_task_that_waits_to_be_started_is_shown_as_queued() -> None:
    assert {status.value: status.shown for status in TaskStatus} == {
        status.value: "queued" if status is TaskStatus.MADE else status.value
        for status in TaskStatus
    }


# through the operations


@pytest.fixture
def agent(world: World) -> Agent:
    agent = world.live(world.agents.births.create(USER, "coder"), Status.IDLE)
    world.agents.journal.update(agent, mode="turn")
    return agent


def message_that_is(world: World, agent: Agent, status: MessageStatus) -> Message:
    message = world.agents.messages.send(USER, agent, "hello", name="1", asked="x")
    with world.agents.journal.changing() as change:
        if status is not MessageStatus.DROPPED:
            world.agents.messages.deliver(change, agent, message, RunId("r1"))
        world.agents.messages.end(change, agent, message, status)
    return message


@pytest.mark.parametrize("status", sorted(MESSAGE_MOVES.terminal))
def test_a_message_ends_once(world: World, agent: Agent, status: MessageStatus) -> None:
    message = message_that_is(world, agent, status)
    before = world.lines(agent)
    messages = world.agents.messages
    for again in sorted(MESSAGE_MOVES.terminal):
        with pytest.raises(WrongStateError), world.agents.journal.changing() as change:
            messages.end(change, agent, message, again)
    with pytest.raises(WrongStateError), world.agents.journal.changing() as change:
        messages.deliver(change, agent, message, RunId("r2"))
    with world.agents.journal.changing() as change:
        messages.add_ends(change, agent, "exit:0")
    assert (message.status, message.run) == (status, "" if status == "dropped" else "r1")
    assert world.lines(agent) == before
    world.reopen()
    (kept,) = world.agents.items.of(agent.index, Message)
    assert kept.dump() == message.dump()


def task_that_is(world: World, agent: Agent, status: TaskStatus) -> Task:
    tasks = world.agents.tasks
    task = tasks.make(USER, agent, "t")
    tasks.set(task, cmd="true")
    tasks.start(USER, agent, task)
    cue = {
        TaskStatus.COMPLETED: TaskCue.DONE,
        TaskStatus.FAILED: TaskCue.ERROR,
        TaskStatus.CANCELLED: TaskCue.CANCELLED,
        TaskStatus.INTERRUPTED: TaskCue.INTERRUPTED,
    }[status]
    with world.agents.journal.changing() as change:
        tasks.end(change, agent, task, cue, exit_text="exit:0")
    return task


@pytest.mark.parametrize("status", sorted(TASK_MOVES.terminal))
def test_the_first_end_of_a_task_counts(world: World, agent: Agent, status: TaskStatus) -> None:
    task = task_that_is(world, agent, status)
    before = (task.dump(), world.lines(agent), len(world.agents.messages.pending(agent)))
    tasks = world.agents.tasks

    def end(cue: TaskCue) -> None:
        with world.agents.journal.changing() as change:
            tasks.end(change, agent, task, cue)

    attempts: list[Callable[[], None]] = [
        lambda: tasks.start(USER, agent, task),
        lambda: tasks.stop(USER, agent, task, kill=False),
        lambda: tasks.stop(USER, agent, task, kill=True),
        lambda: tasks.set(task, cmd="false"),
        *(partial(end, cue) for cue in TaskCue),
    ]
    for attempt in attempts:
        with pytest.raises(WrongStateError):
            attempt()
    with world.agents.journal.changing() as change:
        tasks.add_ends(change, agent, TaskCue.CANCELLED, "why")
    assert (task.dump(), world.lines(agent), len(world.agents.messages.pending(agent))) == before


@pytest.mark.parametrize("status", sorted(WORK_MOVES.terminal))
def test_a_work_item_that_is_over_is_only_read(
    world: World, agent: Agent, status: WorkStatus
) -> None:
    work = world.agents.work
    item, other = work.make(USER, agent, "w"), work.make(USER, agent, "x")
    work.set(agent, item, "objective", "to be reached")
    work.set(agent, item, "status", status.value)
    before = (item.dump(), world.lines(agent))
    writes = {
        "status": "open",
        "objective": "another",
        "plan": "p",
        "acceptance": "a",
        "parent": "p",
        "blocked_by": "x\n",
    }
    for field, text in writes.items():
        with pytest.raises(WrongStateError, match=f'"w" has ended: its status is {status}'):
            work.set(agent, item, field, text)
    with pytest.raises(WrongStateError):
        work.focus(agent, "w")
    wait = world.agents.waiting.make(USER, agent, "i")
    with pytest.raises(WrongStateError):
        world.agents.waiting.set(agent, wait, "work", "w")
    work.set(agent, other, "status", "active")
    assert (item.dump(), agent.focus) == (before[0], "x")
    assert [line for line in world.lines(agent) if '"work":"w"' in line] == [
        line for line in before[1] if '"work":"w"' in line
    ]


def wait_that_is(world: World, agent: Agent, status: WaitStatus) -> Wait:
    waiting = world.agents.waiting
    wait = waiting.make(USER, agent, "i")
    waiting.arm(USER, agent, wait, "trigger")
    with world.agents.journal.changing() as change:
        if status is WaitStatus.FIRED:
            waiting.fire(change, agent, wait, "now\n")
        elif status is WaitStatus.EXPIRED:
            waiting.expire(change, agent, wait)
        else:
            waiting.cancel(change, agent, wait)
    return wait


@pytest.mark.parametrize("status", sorted(WAIT_MOVES.terminal))
def test_a_wait_leaves_armed_once(world: World, agent: Agent, status: WaitStatus) -> None:
    wait = wait_that_is(world, agent, status)
    before = (wait.dump(), world.lines(agent), len(world.agents.messages.pending(agent)))
    waiting = world.agents.waiting

    def change_it(act: Callable[..., None], *more: Any) -> None:
        with world.agents.journal.changing() as change:
            act(change, agent, wait, *more)

    refused: list[tuple[type[CtxError], Callable[[], None]]] = [
        (WrongStateError, lambda: waiting.arm(USER, agent, wait, "timer 1h")),
        (WrongStateError, lambda: waiting.set(agent, wait, "deadline", "1h")),
        (WrongStateError, lambda: waiting.set(agent, wait, "work", "")),
        (MissingError, lambda: waiting.trigger(wait, "now\n")),
        (WrongStateError, lambda: change_it(waiting.fire, "again\n")),
        (WrongStateError, lambda: change_it(waiting.expire)),
        (WrongStateError, lambda: change_it(waiting.cancel)),
    ]
    for error, attempt in refused:
        with pytest.raises(error):
            attempt()
    with world.agents.journal.changing() as change:
        waiting.cancel_all(change, agent)
    assert (wait.dump(), world.lines(agent), len(world.agents.messages.pending(agent))) == before


# the records in memory

ONE, TWO = AgentIndex(1), AgentIndex(2)


def message(index: int, name: str, agent: AgentIndex = ONE, session: int = 1) -> Message:
    return Message(
        index=ItemIndex(index), agent=agent, name=MessageId(name),
        session=SessionIndex(session), sender="s", provenance="operator",
    )  # fmt: skip


def test_records_are_found_by_number_by_name_and_by_agent() -> None:
    items = Items()
    one, two = message(1, "a"), message(2, "b")
    other: list[Item] = [message(3, "a", agent=TWO), Work(index=ItemIndex(4), agent=ONE, name="a")]
    for item in (one, two, *other):
        items.add(item)
    assert items.of(ONE, Message) == [one, two]
    assert items.named(ONE, Message, "1/b") is two
    assert items.named(TWO, Message, "1/b") is None
    assert (items.get(ItemIndex(3)), items.named(ONE, Work, "a")) == tuple(other)
    assert items.all(Message) == [one, two, other[0]]
    items.drop(one)
    assert items.of(ONE, Message) == [two]
    assert items.get(ItemIndex(1)) is None
    items.drop_all(ONE)
    assert (items.of(ONE, Message), items.of(ONE, Work)) == ([], [])
    assert items.of(TWO, Message) == [other[0]]


def test_an_id_is_of_a_session() -> None:
    items = Items()
    one, two = message(1, "a", session=1), message(2, "a", session=2)
    items.add(one)
    items.add(two)
    assert items.of(ONE, Message) == [one, two]


def test_what_takes_a_name_is_the_youngest_and_stays_when_the_other_goes() -> None:
    items = Items()
    tasks = [Task(index=ItemIndex(n), agent=ONE, name=name) for n, name in enumerate("aba", 1)]
    for task in tasks:
        items.add(task)
    items.drop(tasks[0])
    assert items.of(ONE, Task) == [tasks[1], tasks[2]]
    assert items.named(ONE, Task, "a") is tasks[2]


def test_a_token_is_known_as_long_as_its_wait() -> None:
    items = Items()
    wait = Wait(index=ItemIndex(1), agent=ONE, name="i")
    items.add(wait)
    assert items.with_token(wait.token) is wait
    items.drop(wait)
    assert items.with_token(wait.token) is None


@pytest.mark.parametrize(
    "item",
    [
        message(0, "a"),
        Task(agent=ONE, name="t", status=TaskStatus.RUNNING, accepts_input=True, child=TWO),
        Work(agent=ONE, name="w", status=WorkStatus.BLOCKED, blocked_by=("x", "y")),
        Wait(agent=ONE, name="i", status=WaitStatus.ARMED, due=1.5),
        Report(agent=ONE, name=MessageId("m"), session=SessionIndex(1), child="c", text="x"),
    ],
    ids=lambda item: item.kind,
)
def test_a_record_is_the_same_from_the_store(world: World, item: Item) -> None:
    with world.store.transaction():
        item.index = world.store.insert_item(item)
    (loaded,) = world.store.load_items()
    assert type(loaded) is KINDS[item.kind] is type(item)
    assert (loaded.index, loaded.dump()) == (item.index, item.dump())
    assert type(loaded.dump()["status"]) is type(item.status)


def test_what_a_later_version_wrote_is_left_out() -> None:
    values = {**Work(agent=ONE, name="w").dump(), "colour": "red", "status": "open"}
    loaded = Work.load(ItemIndex(7), values, lambda *_: "")
    assert loaded.dump() == {**Work(agent=ONE, name="w").dump(), "status": "open"}
