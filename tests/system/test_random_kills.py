"""The daemon is killed at random moments of a random life, again and again on one state."""

from __future__ import annotations

import os
import random
import select
from contextlib import closing
from typing import Final

import pytest

from tests.worlds.daemon import Daemon
from tests.worlds.invariants import Invariants, Operator
from tests.worlds.random_lives import Worker, disturb, hold, told_of

_WORKERS: Final = 3
#: CTXTEST_SEED="2 3 4" tries others
_SEEDS: Final = [int(word) for word in os.environ.get("CTXTEST_SEED", "1").split()]


@pytest.mark.parametrize("rounds", [4, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("seed", _SEEDS)
def test_a_random_life_with_random_deaths(seed: int, rounds: int) -> None:
    chance = random.Random(seed)
    daemon = Daemon(config="grace: 200ms\nrestart_max: 3\n")
    operator, invariants = Operator(daemon), Invariants(daemon)
    workers = [Worker(number, seed, operator, daemon) for number in range(_WORKERS)]
    with closing(daemon), closing(invariants), told_of(
        workers, daemon, f"seed {seed}: CTXTEST_SEED={seed} tries it again"
    ):
        daemon.start()
        for _ in range(rounds):
            for worker in workers:
                worker.begin()
            # nothing is waited for: this is the moment
            select.select([], [], [], chance.uniform(0.05, 0.7))
            if chance.random() < 0.5:
                invariants.observe()
                hold(chance, invariants, daemon)
            daemon.kill()
            for worker in workers:
                worker.join()
            invariants.observe()
            disturb(chance, daemon)
            daemon.start()
            invariants.check(operator)
        invariants.dismantle(operator)
