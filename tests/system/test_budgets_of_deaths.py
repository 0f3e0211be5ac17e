"""Whoever is killed, what models were used for is counted once, and limits hold and are told."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from runtime.cell.networks import Counters
from runtime.crashpoints import POINTS
from runtime.kernel.cgroups import Cgroup
from runtime.records.spent import NO_LIMIT
from tests.worlds.daemon import (
    Daemon,
    daemon_of,
    end_process,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.fates import CRASH_AT, lose_machine
from tests.worlds.models import Metered, metered
from tests.worlds.spenders import TOKENS, asked_by, over, spend, tokens, usage


@pytest.fixture
def models() -> Iterator[Metered]:
    with (
        tempfile.TemporaryDirectory(prefix="ctxtest-models-") as directory,
        metered(Path(directory), drain="10s", proxied=True) as made,
    ):
        yield made


@pytest.fixture
def daemon(models: Metered) -> Iterator[Daemon]:
    network = f"{{socket: {models.socket}, port: 8080, header: counters}}"
    with daemon_of(config=f"networks: {{models: {network}}}\n") as made:
        yield made


def _told(daemon: Daemon, name: str) -> list[dict[str, Any]]:
    return [event for event in daemon.events(name) if event["type"] == "agent.limit"]


def _messages(daemon: Daemon, name: str) -> list[dict[str, Any]]:
    return [event for event in daemon.events(name) if event["type"] == "message.queued"]


def _refused(agent: Path) -> int:
    return int(usage(agent)["requests.refused"])


def _family(daemon: Daemon) -> Path:
    """``boss``, who has a supervisor that reads, and a limit of one request."""
    lines = [f"{verb} top_t network:models connect" for verb in ("allow", "delegate")]
    top = daemon.run("top", "cat", mode="turn", policy="\n".join(lines))
    wait_status(top, "idle")
    lines = [f"{verb} boss_t network:models connect" for verb in ("allow", "delegate")]
    boss = daemon.run("boss", "sleep 1000", parent="agent:top", policy="\n".join(lines),
                      limits="tokens.max=20")
    wait_status(boss, "busy")
    return boss


#: where a daemon dies again that takes over agents, and one that executes its program again
_ADOPTS: Final = tuple(point for point in POINTS if point.startswith("adopt."))
_EXECUTES: Final = tuple(point for point in POINTS if point.startswith("reexec."))


def _begin_after_death(daemon: Daemon, place: str) -> None:
    """A daemon in place of one that was killed; at a place, one that died there came between."""
    if place:
        daemon.env[CRASH_AT] = place
        assert not daemon.start_or_die(), f"{place} was never reached"
        del daemon.env[CRASH_AT]
    daemon.start()


@pytest.mark.parametrize("place", ["", *(
    pytest.param(each, marks=pytest.mark.long)
    for each in (*_ADOPTS, *_EXECUTES) if each != "adopt.lost"
)])  # fmt: skip
@pytest.mark.parametrize("stays", [True, False])
def test_a_limit_that_is_met_without_ctxd_is_told_once_it_is_back(
    daemon: Daemon, models: Metered, stays: bool, place: str
) -> None:
    if place in _EXECUTES:
        daemon.env[CRASH_AT] = place
        daemon.restart()
        del daemon.env[CRASH_AT]
    boss = _family(daemon)
    models.upstream.may_answer.clear()
    kid = spend(daemon, "kid", "plain", stay=stays, parent="agent:boss")
    wait_until(lambda: models.upstream.asked, "it asks")
    programs = Cgroup(Path(read(kid, "cgroup").strip()))
    assert programs.populated()
    if place in _EXECUTES:
        os.kill(daemon.pid, signal.SIGUSR1)
        daemon.wait_killed()
    else:
        daemon.kill()
    models.upstream.may_answer.set()
    if not stays:
        wait_until(lambda: not programs.populated(), "it has ended")
    _begin_after_death(daemon, place if place in _ADOPTS else "")
    wait_until(lambda: over(kid), "it is refused")
    wait_until(lambda: _told(daemon, "kid") and _told(daemon, "boss"), "both are told")
    if not stays:
        wait_dead(kid)
    daemon.restart()
    (event,) = _told(daemon, "kid")
    assert [event["limit"], event["of"], event["max"], event["used"]] == [
        "tokens.max", "boss", "20", "25",
    ]  # fmt: skip
    assert len(_told(daemon, "boss")) == len(_messages(daemon, "top")) == 1
    for agent in (boss, kid):
        assert read(agent, "log").count("tokens.max=20") == 1
    assert tokens(boss) == tokens(kid) == TOKENS


def test_a_limit_of_who_made_a_detached_one_holds_though_ctxd_dies_before_it_says_so(
    daemon: Daemon, models: Metered
) -> None:
    """It has no network of its own, and has ended."""
    boss = daemon.run("boss", "sleep 1000", policy="delegate boss_t network:models connect")
    wait_status(boss, "busy")
    models.upstream.may_answer.clear()
    kid = spend(daemon, "kid", "plain", stay=True, parent="agent:boss", life="detached")
    wait_until(lambda: models.upstream.asked, "it asks")
    write(boss / "limits", "tokens.max=20")
    write(boss / "ctl", "kill")
    wait_dead(boss)
    counts = Counters(daemon.runtime / "net" / read(boss, "incarnation").strip())
    daemon.kill()
    counts.spend(tokens_max=NO_LIMIT)  # as before the commit
    daemon.start()
    models.upstream.may_answer.set()
    wait_until(lambda: over(kid), "it is refused")
    assert over(kid) == (1, 0)
    wait_until(lambda: _told(daemon, "boss"), "who pays is told")
    sentence = 'tokens.max=20 of "boss" is used up (25)'
    for agent in (boss, kid):
        assert [read(agent, name).count(sentence) for name in ("log", "error")] == [1, 1]


@pytest.mark.parametrize("place", [
    "", *(pytest.param(each, marks=pytest.mark.long) for each in _ADOPTS),
])  # fmt: skip
def test_a_life_that_goes_on_after_a_reboot_has_used_what_it_has(
    daemon: Daemon, models: Metered, place: str
) -> None:
    again = spend(daemon, "again", "plain", restart="always", limits="tokens.max=60")
    wait_until(lambda: _refused(again) >= 2, "it is started again")
    daemon.kill()
    lose_machine(daemon)
    _begin_after_death(daemon, place)
    assert tokens(again) == 3 * TOKENS
    before = _refused(again)
    wait_until(lambda: _refused(again) > before, "it is refused again", 120)
    assert len(models.upstream.asked) == 3


#: where an agent with such a network begins, meets a limit and ends
_PLACES: Final = tuple(
    point for point in POINTS
    if point.partition(".")[0] in ("create", "write", "outbox", "start", "relay", "finish",
                                   "events") and point not in ("relay.told", "finish.shed")
)  # fmt: skip
_OFTEN = ("relay.started", "finish.recorded")
#: how often what follows is done until the child is refused, and it ends
_LATER: Final = [
    *itertools.product(("write.committed", "events.appended"), range(19, 29)),
    *itertools.product(("outbox.appended",), range(4, 8)),
]


@pytest.mark.parametrize(("place", "count"), [
    *(pytest.param(point, 1, marks=() if point in _OFTEN else (pytest.mark.long,))
      for point in _PLACES),
    *(pytest.param(*each, marks=pytest.mark.long)
      for each in (*itertools.product(_PLACES, [3]), *_LATER)),
])  # fmt: skip
def test_ctxd_dies_anywhere_and_each_request_is_counted_and_told_once(
    models: Metered, place: str, count: int
) -> None:
    network = f"{{socket: {models.socket}, port: 8080, header: counters}}"
    daemon = Daemon(config=f"networks: {{models: {network}}}\n")
    daemon.env[CRASH_AT] = f"{place}:{count}"
    try:
        died = not daemon.start_or_die()
        if died:
            _revive(daemon)
        for _ in range(5):
            try:
                _go_on(daemon, models)
                if died or count > 1:
                    break
                assert daemon.has_ended(5), f"{place} was never reached"
            except (OSError, AssertionError):
                if not daemon.has_ended(5):
                    raise
            daemon.wait_killed()
            died = True
            _revive(daemon)
    finally:
        daemon.env.pop(CRASH_AT, None)
        daemon.kill()  # it may have got past the place, and would die at its end
        daemon.close()


def _revive(daemon: Daemon) -> None:
    daemon.env.pop(CRASH_AT, None)
    daemon.start()


def _go_on(daemon: Daemon, models: Metered) -> None:
    """A boss whose child meets its limit and ends, from wherever this was left; and what is so
    then."""
    above = ""
    for name, files in {
        "top": {"mode": "turn", "exec": "cat"},
        "boss": {"exec": "sleep 1000", "limits": "tokens.max=30"},
    }.items():
        agent = daemon.agent_dir(name)
        if not agent.exists():
            agent.mkdir()
        if read(agent, "status") == "new\n":
            if above:
                write(agent / "parent", f"agent:{above}")
            lines = [f"{verb} {name}_t network:models connect" for verb in ("allow", "delegate")]
            for file, text in {**files, "policy": "\n".join(lines)}.items():
                write(agent / file, text)
            write(agent / "ctl", "start")
        wait_status(agent, "idle", "busy")
        above = name
    kid = daemon.agent_dir("kid")
    if kid.exists() and read(kid, "status") == "new\n":
        kid.rmdir()
    if not kid.exists():
        spend(daemon, "kid", "plain", parent="agent:boss")
    wait_status(kid, "dead")
    assert len(models.upstream.asked) == 2
    assert over(kid) == (2, 0)
    assert [tokens(daemon.agent_dir(name)) for name in ("boss", "kid")] == [2 * TOKENS] * 2
    assert [len(_told(daemon, name)) for name in ("boss", "kid")] == [1, 1]
    assert len(_messages(daemon, "top")) == 1


#: CTXTEST_SECONDS=1800 and CTXTEST_SEED=N try it for longer, or again
_LONG: Final = int(os.environ.get("CTXTEST_SECONDS", "300"))


@pytest.mark.parametrize("seconds", [4, pytest.param(_LONG, marks=pytest.mark.long)])
def test_at_random_whoever_is_killed_no_sum_falls_and_none_counts_twice(
    daemon: Daemon, models: Metered, seconds: int
) -> None:
    seed = int(os.environ.get("CTXTEST_SEED", "0")) or random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    boss = spend(daemon, "boss", "plain", stay=True)
    wait_status(boss, "busy")
    kids = [spend(daemon, way, way, stay=True, parent="agent:boss", life=life) for way, life in
            (("streams", "owned"), ("pipelines", "detached"), ("aborts", "owned"))]  # fmt: skip
    agents = [boss, *kids]
    leaves = [Cgroup(Path(read(each, "cgroup").strip(), "net")) for each in agents]

    def kill_meter() -> None:
        models.end(signal.SIGKILL)
        models.start()

    def kill_relay() -> None:
        for relay in chance.choice(leaves).processes():
            with contextlib.suppress(ProcessLookupError):
                end_process(relay)

    kills = {"ctxd": daemon.restart, "meter": kill_meter, "relay": kill_relay,
             "api": models.upstream.cut}  # fmt: skip
    if models.nginx:
        kills["nginx"] = models.nginx.restart
    deaths = dict.fromkeys(sorted(kills), 0)
    seen = dict.fromkeys(agents, 0)
    until = time.monotonic() + seconds
    while time.monotonic() < until or 0 in deaths.values():
        fewest = min(deaths, key=deaths.__getitem__)
        victim = chance.choice(sorted(deaths)) if deaths[fewest] else fewest
        deaths[victim] += 1
        kills[victim]()
        for each in agents:
            now = tokens(each)
            assert now >= seen[each], (seed, each.name)
            seen[each] = now
        before = len(models.upstream.asked)
        wait_until(lambda n=before: len(models.upstream.asked) > n + 4,  # type: ignore[misc]
                   "it goes on")
    write(boss / "limits", "tokens.max=1")
    for each in agents:
        wait_until(lambda a=each: over(a), f"{each.name} is refused")  # type: ignore[misc]
    asked = asked_by(models.upstream.asked)
    found = usage(boss)
    print(seed, deaths, asked.total(), found)
    assert int(found["requests"]) >= asked.total(), "none passes uncounted"
    # at each death but ctxd's, one request of each agent was in flight
    flew = len(agents) * (sum(deaths.values()) - deaths["ctxd"])
    for each, names in (*((kid, [kid.name[:-2]]) for kid in kids), (boss, list(asked))):
        whole = sum((over(daemon.agent_dir(name)) or (0,))[0] for name in names)
        exact = tokens(each) - int(usage(each)["tokens.estimated"])
        most = sum(asked[name] for name in names)
        assert whole * TOKENS <= exact <= most * TOKENS, (seed, each.name)
        assert tokens(each) >= (most - flew) * TOKENS, (seed, each.name)
