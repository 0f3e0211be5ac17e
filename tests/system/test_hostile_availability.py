"""Agents of one owner that make very many requests: all others are answered as ever."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.system.hostile.guarded import (
    OBEDIENCE,
    TIMES_BASELINE,
    agents_of,
    end_and_remove,
    guarded,
)
from tests.system.test_hostile_requests import compiled, run
from tests.worlds.daemon import Daemon, daemon_of, read, wait_until

#: that an attack goes on, in seconds
LONG_ENOUGH = 1.1
#: the first of their owners: one for each attack, with accounts that nobody has used
FIRST_OWNER = 30_000


@dataclass(frozen=True, slots=True)
class Attack:
    """``protects`` is what must go on; the rest is what ``throng`` is told."""

    protects: str
    mode: str
    #: of each agent
    threads: int = 180
    agents: int = 1
    #: in seconds, of a client that looks at everything, with a hundred requests
    look: float = OBEDIENCE
    #: what some request came to, before it was over its account: it does reach the daemon
    meets: str = "ok"


ATTACKS = (
    Attack("everybody, while a family of one owner reads", "read", threads=60, agents=4),
    Attack("look-ups, while others ask for names that are not there", "lookup", meets="ENOENT"),
    # the requests that are served at once: each of the hundred waits for some of them
    Attack("attributes, while others ask for them", "attributes", threads=16,
           look=2 * OBEDIENCE),
    Attack("directories, while others list them", "list"),
    Attack("names, while others may not change them", "names", meets="EPERM"),
    Attack("verbs, while others obey theirs", "lead", threads=40),
    Attack("what is made, while others make and remove", "make"),
    Attack("a session, while another has hundreds of followers", "follow"),
    Attack("connections, while others say nothing, or half", "connect"),
    Attack("writes, while others append", "append"),
    Attack("pages, while others map, splice and copy files", "map"),
)
#: what takes locks, places or turns of others in ways of its own is in every run of the tests
OFTEN = ("read", "lead", "make")


@pytest.fixture(scope="module")
def stage() -> Iterator[Daemon]:
    with daemon_of(config="grace: 300ms\n") as daemon:
        compiled(daemon, "throng")
        yield daemon


def took(daemon: Daemon, what: str, bound: float) -> float:
    """Seconds until root's client was answered: the middle of three times. The third is not
    tried where two are on the same side of the bound, which the middle one is then on too."""
    times: list[float] = []
    while len(times) < 3:
        begun = time.monotonic()
        done = daemon.ctx(what)
        assert done.returncode == 0, done.stderr
        times.append(time.monotonic() - begun)
        if len(times) == 2 and (times[0] < bound) == (times[1] < bound):
            break
    return statistics.median(times)


@pytest.mark.alone
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=attack.protects,
                     marks=[] if attack.mode in OFTEN else pytest.mark.long)
        for number, attack in enumerate(ATTACKS)
    ],
)
def test_who_asks_without_pause_holds_up_nobody(stage: Daemon, number: int) -> None:
    attack = ATTACKS[number]
    names = {f"{attack.mode}-{number}-{each}" for each in range(attack.agents)}
    try:
        with guarded(stage):
            # just before it, on a machine that may be as busy with other things meanwhile
            quiet = attack.look / TIMES_BASELINE
            before = {what: took(stage, what, quiet) for what in ("ps", "quota")}
            for name in sorted(names):
                agent = run(stage, name, f"/programs/throng {attack.mode} {attack.threads}",
                            owner=str(FIRST_OWNER + number))
                wait_until(lambda agent=agent: "attacks" in read(agent, "out"), "it attacks")  # type: ignore[misc]
                assert attack.meets in read(agent, "out").split()
            deadline = time.monotonic() + LONG_ENOUGH
            for what, usual in before.items():
                bound = max(attack.look, TIMES_BASELINE * usual)
                late = took(stage, what, bound)
                assert late < bound, f"ctx {what} took {late:.2f} s"
            time.sleep(max(0.0, deadline - time.monotonic()))  # what is measured is time
    finally:
        end_and_remove(stage, names & agents_of(stage))  # of an attack that won


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.parametrize("threads", [1, 2, 4, 16, 180])
def test_who_only_computes_is_what_others_are_compared_with(stage: Daemon, threads: int) -> None:
    """An agent that asks ctxd for nothing: what bystanders wait for beside it is the processor.

    The table of ``make test-hostile`` has it beside the attacks.
    """
    compute = f"for n in $(seq {threads}); do while :; do :; done & done; echo computes; wait"
    with guarded(stage):
        agent = stage.run(f"computes-{threads}", f"sh -c '{compute}'")
        wait_until(lambda: "computes" in read(agent, "out"), "it computes")
        time.sleep(LONG_ENOUGH)  # what is measured is time
