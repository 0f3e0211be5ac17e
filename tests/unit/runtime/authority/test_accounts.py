"""One account for each owner and resource, with a reserve for operators and for root."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.authority.accounts import (
    Accounts,
    Payer,
    Reserve,
    Resource,
    TimeAccounts,
)
from runtime.caller import Caller
from runtime.errors import QuotaError
from runtime.ids import AgentIndex, Incarnation
from tests.worlds.records import ROOT, inside, operator, world_in

FILES = Resource.DESCRIPTORS
ALICE = 1000
BOB = 1001


def accounts(limit: int = 100, total: int | None = None) -> Accounts:
    totals = {} if total is None else {FILES: total}
    return Accounts(dict.fromkeys(Resource, limit), totals)


def test_agents_of_one_owner_share_its_account() -> None:
    made = accounts()
    made.charged(Payer(ALICE, "a"), FILES, 50)
    made.charged(Payer(ALICE, "b"), FILES, 40)
    with pytest.raises(QuotaError):
        made.charged(Payer(ALICE, "c"), FILES, 1)
    made.charged(Payer(BOB, "d"), FILES, 90)
    made.pay_anyway(Payer(ALICE, "a"), FILES, -50)
    made.charged(Payer(ALICE, "c"), FILES, 50)
    assert made.use(ALICE, FILES) == 90


def test_a_tenth_is_kept_for_the_owners_operators() -> None:
    made = accounts()
    made.charged(Payer(ALICE), FILES, 90)
    with pytest.raises(QuotaError):
        made.charged(Payer(ALICE), FILES, 1)
    made.charged(Payer(ALICE, reserve=Reserve.OWNER), FILES, 10)
    with pytest.raises(QuotaError):
        made.charged(Payer(ALICE, reserve=Reserve.OWNER), FILES, 1)
    made.charged(Payer(ALICE, reserve=Reserve.MASTER), FILES, 1)


def test_a_tenth_of_all_is_kept_for_root() -> None:
    made = accounts(limit=100, total=150)
    made.charged(Payer(ALICE), FILES, 90)
    made.charged(Payer(BOB), FILES, 45)
    for reserve in (Reserve.NONE, Reserve.OWNER):
        with pytest.raises(QuotaError, match="root"):
            made.charged(Payer(BOB, reserve=reserve), FILES, 1)
    made.charged(Payer(0, reserve=Reserve.MASTER), FILES, 15)
    with pytest.raises(QuotaError):
        made.charged(Payer(0, reserve=Reserve.MASTER), FILES, 1)
    assert made.used(FILES) == 150


def test_an_owner_never_has_more_than_there_is() -> None:
    assert accounts(limit=100, total=40).limit(FILES) == 40


def test_a_refusal_names_account_use_limit_most_setting_and_remedy() -> None:
    made = accounts()
    made.charged(Payer(ALICE, "greedy"), FILES, 70)
    made.charged(Payer(ALICE, "modest"), FILES, 10)
    with pytest.raises(QuotaError) as caught:
        made.charged(Payer(ALICE, "modest"), FILES, 20)
    for part in (
        *("descriptors", "uid 1000", "80 of 100", "20 more", '"greedy" holds most (70)'),
        *("owner_descriptors", "close open files"),
    ):
        assert part in caught.value.sentence


def test_what_is_held_is_given_back_as_a_whole() -> None:
    made = accounts()
    held = made.charged(Payer(ALICE, "a"), FILES, 10)
    held.resize(60)
    with pytest.raises(QuotaError):
        held.resize(91)
    assert (held.amount, made.use(ALICE, FILES)) == (60, 60)
    held.resize(5)
    held.release()
    held.release()
    assert made.use(ALICE, FILES) == 0
    assert made.owners() == []


def test_less_is_always_taken_back_though_the_limit_fell() -> None:
    made = accounts(total=100)
    held = made.charged(Payer(ALICE, "a"), FILES, 80)
    made.set_total(FILES, 10)
    held.resize(50)
    with pytest.raises(QuotaError):
        held.resize(51)


def test_what_is_there_is_counted_though_there_is_no_room() -> None:
    made = accounts()
    held = made.charged_anyway(Payer(ALICE, "b"), Resource.DISK, 200)
    assert made.used(Resource.DISK) == 200
    assert made.room(ALICE, Resource.DISK) == 0
    with pytest.raises(QuotaError, match='"b" holds most'):
        made.charged(Payer(ALICE), Resource.DISK, 1)
    held.set(0)
    assert made.owners() == []
    assert made.room(ALICE, Resource.DISK) == 90
    assert made.room(ALICE, Resource.DISK, reserve=Reserve.OWNER) == 100


def test_standings_tell_every_account() -> None:
    made = accounts()
    made.charged(Payer(ALICE, "a"), FILES, 7)
    told = {s.account: s for s in made.standings(ALICE)}
    assert set(told) == {*(resource.value for resource in Resource), "time"}
    files = told["descriptors"]
    assert (files.use, files.limit, files.reserve) == (7, 100, 10)
    assert (files.most, files.held) == ("a", 7)


def test_who_pays(tmp_path: Path) -> None:
    with world_in(tmp_path) as world:
        agent = world.live(world.agents.births.create(operator(ALICE), "a"))
        assert world.agents.identity.payer(inside(agent)) == Payer(ALICE, "a")
        assert world.agents.identity.payer(operator(ALICE)).reserve is Reserve.OWNER
        assert world.agents.identity.payer(ROOT).reserve is Reserve.MASTER
        unknown = world.agents.identity.payer(Caller(0, 0, 1, known=False))
        assert unknown.reserve is Reserve.NONE
        removed = Caller(ALICE, ALICE, 1, AgentIndex(99), Incarnation("gone"))
        assert world.agents.identity.payer(removed) == Payer(ALICE, "gone")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_owner_has_its_share_of_the_loop_and_a_burst() -> None:
    clock = Clock()
    made = TimeAccounts(0.5, burst=1.0, clock=clock)
    made.pay(Payer(ALICE), 1.0)
    assert not made.is_over(ALICE)
    assert made.delay(ALICE) == 0.0
    made.pay(Payer(ALICE), 0.1)
    assert made.is_over(ALICE)
    assert made.delay(ALICE) == pytest.approx(0.2)
    assert not made.is_over(BOB)
    clock.now += 0.2
    assert not made.is_over(ALICE)


def test_nobody_waits_longer_than_half_a_second_or_owes_for_ever() -> None:
    clock = Clock()
    made = TimeAccounts(0.5, burst=1.0, clock=clock)
    made.pay(Payer(ALICE), 1000.0)
    assert made.delay(ALICE) == 0.5
    clock.now += 2.0
    assert not made.is_over(ALICE)
    assert made.used(ALICE) == pytest.approx(1.0)
