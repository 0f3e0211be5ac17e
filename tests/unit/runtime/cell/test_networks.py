"""What daemons and relays share of an agent's networks, as a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.cell import networks
from runtime.cell.networks import Counters
from runtime.errors import QuotaError
from runtime.records.config import Network
from runtime.texts import limits
from tests.worlds.records import World, inside, operator

API = {"api": Network(socket="/srv/api.sock", port=8080)}


def test_a_line_is_made_once(tmp_path: Path) -> None:
    counters = Counters(tmp_path / "f").make()
    assert [counters.number_of(name) for name in ("a", "b", "a")] == [0, 1, 0]
    counters.write(1, "listens", 8080)
    counters.limit({"net.b.max": "5"})
    first, second = Counters(tmp_path / "f").make().lines()
    assert (first.name, first.max, first.listens) == ("a", networks.NO_LIMIT, networks.NOWHERE)
    assert (second.name, second.max, second.listens) == ("b", 5, 8080)


def test_there_is_room_for_so_many(tmp_path: Path) -> None:
    counters = Counters(tmp_path / "f").make()
    for number in range(networks.LINES):
        counters.number_of(f"{'n' * 60}{number}")
    assert counters.path.stat().st_size == networks.SIZE
    with pytest.raises(QuotaError, match="have had 42 networks"):
        counters.number_of("more")


def test_what_another_version_made_is_replaced(tmp_path: Path) -> None:
    counters = Counters(tmp_path / "f").make()
    counters.number_of("a")
    other = b"\2" + counters.path.read_bytes()[1:]
    counters.path.write_bytes(other)
    assert counters.lines() == [], "nothing that this version would understand"
    assert counters.make().lines() == []
    assert counters.path.read_bytes() == b"\1".ljust(networks.SIZE, b"\0")


@pytest.mark.settings(networks=API)
def test_a_child_counts_with_all_whose_it_is(world: World, tmp_path: Path) -> None:
    agents = world.agents
    boss = world.may_create(world.live(agents.births.create(operator(1000), "boss")))
    kid = world.live(agents.births.create(inside(boss), "kid"))
    other = world.live(agents.births.create(inside(boss), "other"))
    agents.journal.update(other, life="detached")
    agents.journal.update(boss, limits={"net.api.max": "7"})
    assert networks.family(agents.registry, kid) == [kid, boss]
    assert networks.family(agents.registry, other) == [other]
    networks.prepare(agents, kid, tmp_path, {"api": 8080})
    assert networks.of_cell(tmp_path, kid) == {"api": 8080}
    assert networks.of_cell(tmp_path, boss) == {}, "it has no cell with that network"
    assert [line.max for line in networks.counters(tmp_path, boss).lines()] == [7]
    assert networks.usage(tmp_path, boss) == {
        "net.api.connections": 0, "net.api.sent": 0, "net.api.received": 0,
    }
    networks.prepare(agents, kid, tmp_path, {})
    assert networks.of_cell(tmp_path, kid) == {}, "the next cell of the same incarnation"


@pytest.mark.settings(networks=API, depth=40)
def test_nobody_is_too_deep_to_be_limited(world: World, tmp_path: Path) -> None:
    agents = world.agents
    line = [world.may_create(world.live(agents.births.create(operator(1000), "a")))]
    for _ in range(networks.LEVELS):
        name = f"{line[-1].name}b"
        line.append(world.may_create(world.live(agents.births.create(inside(line[-1]), name))))
    networks.prepare(agents, line[-2], tmp_path, {"api": 8080})
    with pytest.raises(QuotaError, match="is 33 levels deep"):
        networks.prepare(agents, line[-1], tmp_path, {"api": 8080})
    networks.prepare(agents, line[-1], tmp_path, {})


@pytest.mark.settings(networks=API)
def test_a_trouble_is_told_with_what_to_do(world: World, tmp_path: Path) -> None:
    agents = world.agents
    boss = world.may_create(world.live(agents.births.create(operator(1000), "boss")))
    kid = world.live(agents.births.create(inside(boss), "kid"))
    agents.journal.update(boss, limits={"net.api.max": "7"})
    networks.prepare(agents, kid, tmp_path, {"api": 8080})

    def told(trouble: int) -> str:
        counters = networks.counters(tmp_path, kid)
        counters.write(0, "trouble", trouble)
        line = counters.lines()[0]
        return networks.describe_trouble(agents.registry, kid, line, "/srv/api.sock")

    assert told(0) == ""
    assert told(2) == "network:api: cannot connect to /srv/api.sock: No such file or directory"
    assert told((1 << 32) + 1) == (
        'network:api: net.api.max=7 of "boss" is used up: its connections are closed, and new '
        "ones refused"
    )


def test_the_variable_of_a_network_is_of_letters_and_digits() -> None:
    assert limits.variable("open-ai.v1+x") == "CTX_NET_OPEN_AI_V1_X"
    assert limits.network_of("net.open-ai.v1.max") == "open-ai.v1"
    assert limits.network_of("net.max") is None
