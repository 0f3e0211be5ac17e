"""The logs of all events: one order, each event once, bounded for each owner."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from runtime.records import fleet as fleet_module
from runtime.records.change import Change
from runtime.records.fleet import Reader, number_of, plain
from runtime.records.history import History
from runtime.records.model import Agent
from tests.worlds.records import ROOT, World, cancel_new, operator, world_in


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with world_in(tmp_path, events_max=64 << 10) as made:
        yield made


def make(world: World, name: str, owner: int = 0) -> Agent:
    return world.agents.births.create(operator(owner) if owner else ROOT, name)


def happen(world: World, agent: Agent, times: int = 1, size: int = 1) -> None:
    """Events of an agent, each in a change of its own."""
    for number in range(times):
        change = Change()
        change.tell(agent, "agent.report", text=f"{number} " + "x" * size)
        world.agents.journal.commit(change)


def read(world: World, owner: int | None = None, after: int = 0) -> list[dict[str, Any]]:
    """All that a reader gets, piece by piece."""
    reader, found = Reader(world.agents.fleet, owner, after), list[bytes]()
    while lines := reader.read():
        found += lines
    assert reader.after == (number_of(found[-1]) if found else after)
    return [json.loads(line) for line in found]


def files(world: World, owner: int = 0) -> dict[int, bytes]:
    directory = world.state / "events" / str(owner)
    return {int(path.name): path.read_bytes() for path in sorted(directory.iterdir())}


def numbers(events: list[dict[str, Any]]) -> list[int]:
    return [event["seq"] for event in events]


def small(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """What is read at once is so small."""
    monkeypatch.setattr(fleet_module, "PIECE", size)
    monkeypatch.setattr(fleet_module, "_LEAST", size)
    monkeypatch.setattr(fleet_module, "_BACKWARDS", size)


# what is in a log


def test_a_log_has_the_lines_of_histories_with_three_keys_in_front(world: World) -> None:
    agent = make(world, "x", 1000)
    happen(world, agent, 3)
    events = read(world, 1000)
    lines = world.lines(agent)
    assert [list(event)[:3] for event in events] == [["seq", "owner", "session"]] * len(lines)
    for event, line in zip(events, lines, strict=True):
        front = f'{{"seq":{event["seq"]},"owner":1000,"session":"default",'
        assert f'{front}{line[1:]}\n'.encode() in files(world, 1000)[0]
    assert numbers(events) == sorted(set(numbers(events)))


def test_held_events_and_those_in_files_are_there_once(world: World) -> None:
    agent = make(world, "x")
    for size in (10, 10, 3000, 10):  # the third has a file made
        happen(world, agent, size=size)
        assert [event["id"] for event in read(world)] == [
            json.loads(line)["id"] for line in world.lines(agent)
        ]


def test_what_is_said_is_no_event(world: World) -> None:
    agent = make(world, "x")
    change = Change()
    change.say(agent.session, role="user", content="hello")
    world.agents.journal.commit(change)
    assert [event["type"] for event in read(world)] == ["agent.create"]
    assert world.lines(agent, "messages.jsonl")


def test_the_events_of_one_change_follow_each_other(world: World) -> None:
    first, second = make(world, "x", 1), make(world, "y", 2)
    change = Change()
    for _ in range(3):
        for agent in (first, first, second):
            change.tell(agent, "agent.report", text="x")
    before = numbers(read(world))[-1]
    world.agents.journal.commit(change)
    events = read(world, after=before)
    assert [event["agent"] for event in events] == ["x", "x", "y"] * 3
    ids = [event["id"] for event in events if event["agent"] == "x"]
    assert ids == [f"e{number}" for number in range(2, 8)]


def test_a_refused_change_tells_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make(world, "x")
    before = files(world)
    monkeypatch.setattr(world.agents.journal, "_apply_items", None)
    with pytest.raises(TypeError):
        happen(world, agent)
    assert files(world) == before


def test_what_was_removed_stays_told(world: World) -> None:
    agent = make(world, "x")
    cancel_new(world.agents, agent)
    before = read(world)
    world.agents.removals.remove(agent)
    world.reopen()
    assert read(world)[: len(before)] == before


# numbers


def test_numbers_follow_the_clock_and_never_go_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make(world, "x")
    begun = numbers(read(world))[-1]
    assert abs(begun - time.time() * 1e6) < 60e6
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    happen(world, agent, 2)
    assert numbers(read(world))[-2:] == [begun + 1, begun + 2]
    world.reopen()
    agent = world.agents.registry.named("x") or agent
    happen(world, agent)
    assert numbers(read(world))[-1] == begun + 3


def test_the_log_alone_keeps_a_number_from_being_used_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a loss of power took the last rows of the database."""
    agent = make(world, "x")
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    happen(world, agent, 5)
    last = numbers(read(world))[-1]
    world.store.execute("DELETE FROM outbox")
    world.reopen()
    happen(world, world.agents.registry.named("x") or agent)
    assert numbers(read(world))[-1] == last + 1


# after a crash


def busy(world: World) -> dict[int, bytes]:
    """Of two owners, held events and others; what the log of the first has."""
    first, second = make(world, "x"), make(world, "y", 1000)
    for size in (10, 900, 900, 900, 10):
        happen(world, first, size=size)
        happen(world, second, size=size)
    return files(world)


def test_a_log_that_was_cut_anywhere_is_completed(world: World) -> None:
    whole = busy(world)[0]
    other = files(world, 1000)
    path = world.state / "events/0/0"
    for cut in {*range(0, len(whole), 97), *range(len(whole) - 40, len(whole) + 1)}:
        path.write_bytes(whole[:cut])
        world.reopen()
        assert path.read_bytes() == whole, cut
    assert files(world, 1000) == other


@pytest.mark.parametrize("rest", [b"\0" * 100, b'{"seq":1', b"{\0\0x\n"])
def test_what_a_loss_of_power_left_of_a_line_goes(world: World, rest: bytes) -> None:
    whole = busy(world)[0]
    path = world.state / "events/0/0"
    for cut in (len(whole) // 2, len(whole)):
        path.write_bytes(whole[:cut] + rest)
        world.reopen()
        assert path.read_bytes() == whole


def test_logs_that_are_gone_are_made_again(world: World) -> None:
    before = busy(world)
    (world.state / "events/0/0").unlink()
    (world.state / "events/0").rmdir()
    world.reopen()
    assert files(world) == before


def test_both_files_are_completed(world: World) -> None:
    agent = make(world, "x")
    while len(files(world)) < 2:
        happen(world, agent, size=3000)
    happen(world, agent, 3, size=3000)
    before = files(world)
    for name, data in before.items():
        (world.state / f"events/0/{name}").write_bytes(data[:-10])
    world.reopen()
    assert files(world) == before


def test_what_went_with_its_file_is_not_brought_back(world: World) -> None:
    agent = make(world, "x")
    while 0 in files(world):
        happen(world, agent, size=3000)
    before = files(world)
    world.reopen()
    assert files(world) == before


def test_an_older_outbox_is_for_histories_alone(world: World) -> None:
    """Their rows are there until they are synced: they were told of before there was a log."""
    agent = make(world, "x")
    happen(world, agent, size=3000)
    for path in (world.state / "events/0").iterdir():
        path.unlink()
    for row in world.store.undelivered():
        world.store.execute("UPDATE outbox SET line=? WHERE seq=?", plain(row.line), row.seq)
    world.reopen()
    assert read(world) == []
    assert len(world.lines(agent)) == 2


# bounds


def test_a_log_has_two_files_of_a_size_together(world: World) -> None:
    agent = make(world, "x")
    seen = set[int]()
    for size in itertools.islice(itertools.cycle((10, 500, 3000)), 200):
        happen(world, agent, size=size)
        now = files(world)
        assert len(now) <= 2
        assert sum(map(len, now.values())) <= 64 << 10
        seen |= now.keys()
    assert len(seen) > 4
    for name, data in files(world).items():
        first = number_of(data)
        assert name <= first
        assert list(map(number_of, data.splitlines())) == sorted(
            {number_of(line) for line in data.splitlines()}
        )


def test_noise_of_one_owner_pushes_out_nobody_elses_events(world: World) -> None:
    quiet, loud = make(world, "quiet", 1000), make(world, "loud", 1001)
    happen(world, quiet)
    before = read(world, 1000)
    for _ in range(60):
        happen(world, loud, size=3000)
    assert 0 not in files(world, 1001)
    assert read(world, 1000) == before
    assert [event for event in read(world) if event["owner"] == 1000] == before


def test_events_max_holds_from_the_next_event_on(tmp_path: Path) -> None:
    with world_in(tmp_path, events_max=0) as world:
        agent = make(world, "x")
        happen(world, agent, 5)
        assert [len(data.splitlines()) for data in files(world).values()] == [1, 1]


def test_a_log_is_on_the_disk_account_of_its_owner(world: World) -> None:
    agent = make(world, "x", 1000)
    before = world.agents.disk.room(1000)
    happen(world, agent, size=5000)
    assert before - world.agents.disk.room(1000) > 2 * 5000
    assert ("events/1000", (1000, "the log of events")) in list(world.agents.disk._trees())


# readers


@pytest.mark.parametrize("piece", [1, 100, 1000, 1 << 17])
def test_a_reader_gets_each_event_once_wherever_it_begins(
    world: World, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    agents = [make(world, f"x{owner}", owner) for owner in (1, 2, 3)]
    for number in range(60):
        happen(world, agents[number * number % 3], size=number * 37 % 900)
    whole = read(world)
    small(monkeypatch, piece)
    for place in (0, *numbers(whole)[::7], numbers(whole)[-1], numbers(whole)[-1] + 5):
        assert read(world, after=place) == [each for each in whole if each["seq"] > place]
    for owner in (1, 2, 3, 4):
        assert read(world, owner) == [each for each in whole if each["owner"] == owner]


def test_a_reader_goes_on_through_new_files(world: World) -> None:
    agent = make(world, "x")
    reader, seen = Reader(world.agents.fleet, None, 0), list[int]()
    for _ in range(120):
        happen(world, agent, size=2000)
        assert not reader.lost()
        seen += map(number_of, reader.read())
        assert reader.read() == []
    assert len(seen) == 121
    assert 0 not in files(world)


def test_a_reader_is_told_once_what_it_lost(world: World) -> None:
    agent = make(world, "x", 1)
    other = make(world, "y", 2)
    reader = Reader(world.agents.fleet, None, 0)
    slow = Reader(world.agents.fleet, 1, 0)
    assert slow.read()
    while len(files(world, 1)) < 2 or 0 in files(world, 1):
        happen(world, agent, size=3000)
        happen(world, other)
    oldest = min(files(world, 1))
    for each in (reader, slow):
        assert each.lost() == oldest
        assert each.lost() == 0
    rest = list[int]()
    while lines := slow.read():
        rest += map(number_of, lines)
    assert rest[0] >= oldest
    assert rest == numbers(read(world, 1, oldest - 1))
    assert {event["agent"] for event in read(world)} == {"x", "y"}
    # whoever has seen the last one that is gone lost nothing
    assert not Reader(world.agents.fleet, None, oldest - 1).lost()
    assert Reader(world.agents.fleet, None, oldest - 2).lost() == oldest
    assert not Reader(world.agents.fleet, 2, 0).lost()


@pytest.mark.parametrize("piece", [1, 300, 16 << 10])
def test_the_end_of_logs_is_shown_in_their_order(
    world: World, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    small(monkeypatch, piece)
    agents = [make(world, f"x{owner}", owner) for owner in (1, 2)]
    for number in range(40):
        happen(world, agents[number % 2], size=number * 37 % 3000)
    for owner in (1, 2, None):
        whole = b"".join(
            json.dumps(event, separators=(",", ":")).encode() + b"\n"
            for event in read(world, owner)
        )
        for most in (0, 1, 500, 20_000, 1 << 20):
            tail = world.agents.fleet.tail(owner, most)
            assert len(tail) <= most
            assert whole.endswith(tail)
            assert tail[:1] in (b"", b"{")
            longer = whole[: len(whole) - len(tail)].splitlines(keepends=True)
            assert not longer or len(tail) + len(longer[-1]) > most


# a full disk


def test_nothing_is_shown_before_what_waits_for_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The events of others have room: a reader of all would not come back to these."""
    first, second = make(world, "x", 1), make(world, "y", 2)
    before = read(world)
    write, told = History.write, list[None]()
    monkeypatch.setattr(
        History,
        "write",
        lambda self, fd, path, lines: (
            refused() if "events/1" in path else write(self, fd, path, lines)
        ),
    )
    happen(world, first)
    happen(world, second)
    happen(world, first)
    assert world.agents.journal.behind
    assert read(world) == before
    assert len(read(world, 2)) == 2
    monkeypatch.undo()
    monkeypatch.setattr(world.agents.journal, "_told", {
        **world.agents.journal._told, "caught_up": [lambda: told.append(None)],
    })  # fmt: skip

    async def wait() -> None:
        with trio.move_on_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(world.agents.journal._retry)
                while not told:
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()

    trio.run(wait)
    assert told == [None]
    assert [event["agent"] for event in read(world, after=before[-1]["seq"])] == ["x", "y", "x"]


def refused() -> int:
    raise OSError(28, os.strerror(28))
