"""Clocks of leads and hosts: set by days, they end nothing; who sleeps vouches for nobody."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.worlds.clocked import Clocked, clocked_three
from tests.worlds.daemon import read, wait_dead, wait_until
from tests.worlds.pairs import STUBBORN, Pair, Took, end_of, pair_of

_DAY: Final = 86400.0
#: ahead of this machine's: years, and then a day behind it
_SET: Final = (1000 * _DAY, -_DAY)


@pytest.fixture
def pair(took: Took) -> Iterator[Pair]:
    with pair_of(clocked_three(5), 5, took) as made:
        yield made


@pytest.fixture
def patient(took: Took) -> Iterator[Pair]:
    with pair_of(clocked_three(30), 30, took) as made:
        yield made


def _machines(pair: Pair, of: str) -> list[Clocked]:
    found = {"lead": [pair.daemon], "host": [pair.hosts["n2"]]}
    each = found.get(of, [*found["lead"], *found["host"]])
    assert all(isinstance(daemon, Clocked) for daemon in each)
    return each  # type: ignore[return-value]


def _ends_well(pair: Pair, directory: Path) -> None:
    """It is the same run, and lasted as long as it did."""
    pair.go(directory)
    wait_dead(directory)
    assert (end_of(directory)[0], read(directory, "out")) == ("done", "went\n")
    events = pair.daemon.events(directory.name.removesuffix(".d"))
    (end,) = (event for event in events if event["type"] == "run.end")
    assert [event["type"] for event in events].count("run.start") == 1
    assert 0 <= end["usage"]["wall_msec"] < 600_000


def _set_right(pair: Pair, machines: list[Clocked]) -> None:
    for each in machines:
        each.set_by(0)
    pair.lead.wait_reached()
    pair.everywhere.agree()


@pytest.mark.parametrize("of", ["lead", "host", "both"])
def test_a_wall_clock_that_is_set_ends_nothing(pair: Pair, of: str) -> None:
    directory, machines = pair.busy("sleep 1000; echo went"), _machines(pair, of)
    engines = pair.lead.engines()
    for by in _SET:
        for each in machines:
            each.set_by(by)
        began = time.monotonic()
        wait_until(lambda b=began: time.monotonic() > b + 2 * pair.lease, "leases pass")  # type: ignore[misc]
        (left,) = (x for x in read(directory, "node").splitlines() if x.startswith("lease="))
        assert int(left.partition("=")[2]) > 0, "it is granted again and again"
        assert read(directory, "status") == read(pair.there(directory), "status") == "busy\n"
        assert pair.lead.engines() == engines, "the link has not noticed"
    _ends_well(pair, directory)
    _set_right(pair, machines)


@pytest.mark.parametrize("of", ["lead", "host", "both"])
def test_daemons_that_come_back_to_another_time(patient: Pair, of: str) -> None:
    directory, machines = patient.busy("sleep 1000; echo went"), _machines(patient, of)
    for by in _SET:
        for each in machines:
            each.kill()
            each.set_by(by)
        for each in machines:
            each.start()
        patient.lead.wait_reached()
        assert read(directory, "status") == read(patient.there(directory), "status") == "busy\n"
    _ends_well(patient, directory)
    _set_right(patient, machines)


@pytest.mark.parametrize("of", ["lead", "host"])
def test_who_sleeps_for_less_than_a_lease_is_not_noticed(patient: Pair, of: str) -> None:
    directory, engines = patient.busy("sleep 1000; echo went"), patient.lead.engines()
    (machine,) = _machines(patient, of)
    began = time.monotonic()
    with machine.asleep():
        wait_until(lambda: time.monotonic() > began + patient.lease / 3, "it sleeps for a while")
    row = patient.lead.rows()["n2"]
    wait_until(lambda: patient.lead.rows()["n2"]["seen"] > row["seen"], "it is heard again")
    assert patient.lead.engines() == engines
    assert read(directory, "status") == "busy\n"
    _ends_well(patient, directory)
    patient.works()


@pytest.mark.parametrize("beyond", ["the lease", "the bound"])
def test_a_lead_that_sleeps_vouches_for_nobody(pair: Pair, beyond: str) -> None:
    """At the host nothing waits for it. When it is awake it says what the host says, or by itself
    that all is lost, where there is no network any more."""
    idle, stubborn = pair.busy(), pair.busy(STUBBORN)
    (lead,) = _machines(pair, "lead")
    began = time.monotonic()
    with lead.asleep():
        if beyond == "the bound":
            pair.cut()
        pair.gone_in_time(began, idle, stubborn)
        for each in map(pair.there, (idle, stubborn)):
            wait_dead(each)
            assert end_of(each) == ("interrupted", "lease_over")
        if beyond == "the bound":
            wait_until(lambda: time.monotonic() > began + pair.lost, "so long", pair.patience)
    for each in (idle, stubborn):
        wait_dead(each, timeout=pair.patience)
        found = end_of(each)
        assert found == ("interrupted", "runtime_lost") or (
            beyond == "the lease" and found == ("interrupted", "lease_over")
        )
    pair.took(f"known to have ended, asleep beyond {beyond}", time.monotonic() - began, pair.lost)
    pair.heal()
    pair.works()


def test_what_sleeps_with_its_host_executes_nothing_when_it_is_awake(pair: Pair) -> None:
    """The lead has called it lost meanwhile."""
    idle, stubborn = pair.busy(), pair.busy(STUBBORN)
    (host,) = _machines(pair, "host")
    began = time.monotonic()
    with host.asleep():
        pair.lost_in_time(began, idle, stubborn)
        assert pair.runs(idle) and pair.runs(stubborn)
    woke = time.monotonic()
    for each in (idle, stubborn):
        pair.gone(each)
    pair.took("last process gone after it slept", time.monotonic() - woke, 1.0)
    pair.works()
