"""A limit of tokens or cost holds for all below an agent, however they ask, and whoever is asked.

What is counted is compared with what an upstream was asked for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worlds.daemon import Daemon, daemon_of, read, wait_dead, wait_status, wait_until, write
from tests.worlds.models import Metered, metered
from tests.worlds.spenders import TOKENS, WAYS, asked_by, over, spend, tokens, usage

#: of the whole, as rates and tokens of ``models`` and ``spenders`` have it: 10⁻⁶ of the unit
_COST = 525


@pytest.fixture(scope="module")
def models() -> Iterator[Metered]:
    with (
        tempfile.TemporaryDirectory(prefix="ctxtest-models-") as directory,
        metered(Path(directory), drain="30s") as made,
    ):
        yield made


@pytest.fixture(scope="module")
def daemon(models: Metered) -> Iterator[Daemon]:
    network = f"{{socket: {models.socket}, port: 8080, header: counters}}"
    with daemon_of(config=f"agents: 1000\nnetworks: {{models: {network}}}\n") as made:
        yield made


def _tree(daemon: Daemon, prefix: str, limit: str, shape: tuple[int, ...]) -> dict[str, list[str]]:
    """A tree with so many at each level: for each agent those that it pays for, itself first.
    Half of those with nobody below are detached."""
    levels: list[list[str]] = []
    paid: dict[str, list[str]] = {}
    above: dict[str, str] = {}
    for level, size in enumerate(shape):
        names = [f"{prefix}{level}-{number}" for number in range(size)]
        last = level == len(shape) - 1
        for number, name in enumerate(names):
            files = {"limits": limit} if not level else {}
            if level:
                above[name] = levels[-1][number % len(levels[-1])]
                files["parent"] = f"agent:{above[name]}"
                if last and number % 2:
                    files["life"] = "detached"
            way = WAYS[(number + level) % len(WAYS)]
            spend(daemon, name, way, stay=not last, many=256 if number == 2 else 16, **files)
            each = name
            paid[name] = []
            while True:
                paid[each].append(name)
                if each not in above:
                    break
                each = above[each]
        for name in [] if last else names:
            wait_status(daemon.agent_dir(name), "busy")
        levels.append(names)
    return paid


@pytest.mark.parametrize(("limit", "shape"), [
    pytest.param("tokens.max=1500", (1, 1, 2, 6), id="tokens"),
    pytest.param("cost.max=0.021", (1, 1, 2, 6), id="cost", marks=pytest.mark.long),
    pytest.param("tokens.max=60000", (1, 5, 34, 160), id="tokens-200", marks=pytest.mark.long),
    pytest.param("cost.max=1.05", (1, 5, 34, 160), id="cost-200", marks=pytest.mark.long),
])  # fmt: skip
def test_a_tree_ends_at_its_limit_however_it_asks(
    daemon: Daemon, models: Metered, limit: str, shape: tuple[int, ...]
) -> None:
    upstream = models.upstream
    with upstream.lock:
        upstream.asked.clear()
    upstream.may_answer.clear()
    try:
        key, _, most = limit.partition("=")
        paid = _tree(daemon, f"{key[0]}{len(shape)}{sum(shape)}-", limit, shape)
    finally:
        upstream.may_answer.set()
    for name in paid:
        agent = daemon.agent_dir(name)
        wait_until(lambda a=agent: over(a), f"{name} is refused", 300)  # type: ignore[misc]
    asked = asked_by(upstream.asked)
    top = daemon.agent_dir(next(iter(paid)))
    found = usage(top)
    assert found["requests"] == str(asked.total())
    assert found["tokens.estimated"] == "0"
    if key == "tokens.max":
        assert int(most) <= tokens(top) < int(most) + TOKENS, "one was in flight"
        assert found["tokens.left"] == "0"
    else:
        assert float(most) <= float(found["cost"]) < float(most) + _COST / 1e6
        assert found["cost.left"] == "0.000000"
    assert found["cost"] == f"{asked.total() * _COST / 1e6:.6f}"
    for name, below in paid.items():
        counted = tokens(daemon.agent_dir(name))
        assert counted == TOKENS * sum(asked[each] for each in below), name
    _reset_begins_at_nothing(daemon, next(name for name in reversed(paid)))
    assert asked_by(upstream.asked) == asked, "it is refused as it was"
    write(top / "ctl", "kill")
    wait_dead(top)


def _reset_begins_at_nothing(daemon: Daemon, name: str) -> None:
    """Those above have used what they have used."""
    agent = daemon.agent_dir(name)
    wait_dead(agent)
    write(agent / "ctl", "reset")
    assert tokens(agent) == 0
    write(agent / "ctl", "start")
    wait_dead(agent)
    assert read(agent, "out").startswith("over 0 ")
