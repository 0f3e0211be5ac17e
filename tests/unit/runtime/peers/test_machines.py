"""Many machines that place agents at each other, and every fault; and that each rule is needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from runtime.peers.lease import SLACK, Grants, Lease
from runtime.peers.peering import Host, Lead
from runtime.texts.names import dump_json
from tests.worlds.machines import Fleet, Plan, Rules

_SEED = 20260


def test_a_thousand_machines() -> None:
    Fleet(_SEED, Plan(machines=1000, agents=5000)).run()


@pytest.mark.parametrize("seed", [
    *range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 10))
])
def test_a_hundred_machines_with_more_faults(seed: int) -> None:
    Fleet(seed, Plan(faults=3.0)).run()


@pytest.mark.long
def test_five_thousand_machines() -> None:
    Fleet(_SEED, Plan(machines=5000, agents=25000)).run()


@pytest.mark.long
@pytest.mark.parametrize("lease", [5.0, 300.0, 3600.0])
@pytest.mark.parametrize("seed", range(50))
def test_leases_of_any_length(seed: int, lease: float) -> None:
    Fleet(seed, Plan(faults=4.0, lease=lease)).run()


# rules that are broken: each has to be noticed


class _FromReceipt(Lease):
    """Counts from when a grant came."""

    def granted(self, number: int, after: int, now: float) -> None:
        self._asked[number] = now
        super().granted(number, after, now)


class _NoMargin(Grants):
    """Does without a margin for clocks."""

    factor = 1.0

    def lost_at(self) -> float:
        return self._granted + (self.seconds + self.grace + SLACK) * self.factor


class _LittleMargin(_NoMargin):
    factor = 1.011


class _Behind(Host):
    """Asks when it has nothing else to say."""

    def _say(self, said: Mapping[str, Any]) -> None:
        if said["op"] == "ask":
            self._bulk.append(dump_json(said).encode() + b"\n")
        else:
            super()._say(said)


class _NoOrder(Lead):
    """Grants whatever is done."""

    def _say(self, said: Mapping[str, Any]) -> None:
        super()._say({**said, "after": 0} if said["op"] == "grant" else said)


_MUTANTS: dict[str, tuple[Rules, dict[str, Any]]] = {
    "the lead renews unasked": (Rules(lease=_FromReceipt, is_asked=False), {}),
    "no margin for clocks": (Rules(grants=_NoMargin), {"lease": 300.0}),
    "a lead forgets what it granted": (Rules(remembers=False), {}),
    "a stop is lost by a reboot": (Rules(stores_stops=False), {}),
    "the grace begins when it is noticed": (Rules(grace_from_end=False), {}),
    "a margin of a hundredth": (Rules(grants=_LittleMargin), {"lease": 300.0}),
    "a request waits for bytes": (Rules(host=_Behind), {}),
    "a grant does not say after what": (Rules(lead=_NoOrder), {}),
    "done before it is stored": (Rules(commits_first=False), {}),
}


@pytest.mark.parametrize("mutant", _MUTANTS)
def test_each_rule_is_needed(mutant: str) -> None:
    rules, plan = _MUTANTS[mutant]
    with pytest.raises(AssertionError):
        for seed in range(20):
            Fleet(seed, Plan(faults=3.0, **plan), rules).run()
