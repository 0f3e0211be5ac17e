"""What daemons and relays share of an agent's networks, as a file."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from runtime.cell import networks
from runtime.cell.networks import Counters
from runtime.errors import QuotaError
from runtime.records.change import Change
from runtime.records.config import Network
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.records.spent import NO_LIMIT, SIZE, Spent
from runtime.texts import limits
from tests.worlds.records import World, inside, operator

API = {"api": Network(socket="/srv/api.sock", port=8080)}
METERED = {
    "api": Network(socket="/srv/api.sock", port=8080, header="counters"),
    "plain": Network(socket="/srv/plain.sock", port=8081),
}


@pytest.fixture
def agent(world: World) -> Agent:
    return world.live(world.agents.births.create(operator(1000), "boss"))


def test_a_line_is_made_once(tmp_path: Path, agent: Agent) -> None:
    counters = Counters(tmp_path / "f").make(agent)
    assert [counters.number_of(name) for name in ("a", "b", "a")] == [0, 1, 0]
    counters.write(1, "listens", 8080)
    counters.limit({"net.b.max": "5"})
    first, second = Counters(tmp_path / "f").make(agent).lines()
    assert (first.name, first.max, first.listens) == ("a", NO_LIMIT, networks.NOWHERE)
    assert (second.name, second.max, second.listens) == ("b", 5, 8080)


def test_there_is_room_for_so_many(tmp_path: Path, agent: Agent) -> None:
    counters = Counters(tmp_path / "f").make(agent)
    for number in range(networks.LINES):
        counters.number_of(f"{'n' * 60}{number}")
    assert counters.path.stat().st_size == SIZE
    with pytest.raises(QuotaError, match="have had 42 networks"):
        counters.number_of("more")


def test_what_a_later_version_made_is_replaced(tmp_path: Path, agent: Agent) -> None:
    counters = Counters(tmp_path / "f").make(agent)
    counters.number_of("a")
    other = b"\3" + counters.path.read_bytes()[1:]
    counters.path.write_bytes(other)
    assert counters.lines() == [], "nothing that this version would understand"
    assert counters.make(agent).lines() == []
    assert counters.spent() == Spent(owner=1000)


def test_what_the_version_before_made_goes_on(tmp_path: Path, agent: Agent) -> None:
    """Its relays map two pages, and add to them."""
    counters = Counters(tmp_path / "f").make(agent)
    counters.number_of("a")
    counters.path.write_bytes(b"\1" + counters.path.read_bytes()[1:8192])
    with open(counters.path, "r+b") as file, mmap.mmap(file.fileno(), 8192) as mapped:
        assert counters.spent() is None
        counters.make(agent)
        at = networks.position(0, "sent")
        mapped[at : at + 8] = (5).to_bytes(8, "little")
    assert [(line.name, line.sent) for line in counters.lines()] == [("a", 5)]
    assert counters.spent() == Spent(owner=1000)


@pytest.mark.settings(networks=METERED)
def test_who_pays_is_who_made_it_and_all_above(world: World, tmp_path: Path) -> None:
    agents, files = world.agents, tmp_path / "net"
    files.mkdir()
    boss = world.may_create(world.live(agents.births.create(operator(1000), "boss")))
    kid = world.may_create(world.live(agents.births.create(inside(boss), "kid")))
    deep = world.live(agents.births.create(inside(kid), "deep"))
    agents.journal.update(kid, life="detached")
    networks.prepare(agents, deep, files, {"plain": 8081})
    assert not (files / boss.incarnation).exists(), "nothing is counted there"
    networks.prepare(agents, deep, files, {"api": 8080})
    assert deep.payers == (deep.incarnation, kid.incarnation, boss.incarnation)
    networks.counters(files, boss).spend(tokens_max=5)
    assert networks.counters(files, boss).spent() == Spent(tokens_max=5, owner=1000)
    for each in (boss, kid):
        agents.journal.update(each, status=Status.DEAD)
        networks.remove(agents.registry, files, each, "no-cell")
        assert networks.counters(files, each).spent(), "it pays for one that lives"
    agents.journal.update(deep, status=Status.DEAD)
    networks.remove(agents.registry, files, deep, "no-cell")
    assert not list(files.iterdir())


def _tell(world: World, files: Path, agent: Agent) -> list[str]:
    """Whom it tells of a limit."""
    change = Change()
    told, _ = networks.tell_limit(change, world.agents, files, agent)
    assert [line[2]["type"] for line in change.lines][: len(told)] == ["agent.limit"] * len(told)
    world.agents.journal.note(change)
    return [each.name for each in told]


@pytest.mark.settings(networks=METERED)
def test_who_made_it_pays_after_a_reset_and_for_what_starts_later(
    world: World, tmp_path: Path
) -> None:
    agents = world.agents
    boss = world.may_create(world.live(agents.births.create(operator(1000), "boss")))
    kid = world.may_create(world.live(agents.births.create(inside(boss), "kid")))
    agents.journal.update(boss, limits={"tokens.max": "5"})
    deep = world.live(agents.births.create(inside(kid), "deep"))
    agents.journal.update(kid, life="detached")
    networks.prepare(agents, kid, tmp_path, {"api": 8080})
    networks.counters(tmp_path, boss).spend(input=5, trouble=1 << 32)
    assert _tell(world, tmp_path, boss) == ["boss"]
    agents.journal.update(boss, status=Status.DEAD, spent=(5,) * 9)
    again = agents.births.renew(boss)
    assert (again.payers, again.spent, again.limits_told) == ((again.incarnation,), (), {})
    networks.prepare(agents, deep, tmp_path, {"api": 8080})
    assert deep.payers == (deep.incarnation, kid.incarnation, boss.incarnation)
    assert networks.usage(agents, tmp_path, deep)["tokens.left"] == 0
    networks.counters(tmp_path, deep).spend(trouble=1 << 32 | 2)
    assert _tell(world, tmp_path, deep) == ["deep"], "the payer is removed"


@pytest.mark.settings(networks=METERED)
def test_a_limit_is_told_once_of_each_value(world: World, tmp_path: Path) -> None:
    agents = world.agents
    top = world.live(agents.births.create(operator(1000), "top"))
    boss = world.live(agents.births.create(inside(world.may_create(top)), "boss"))
    kids = [world.live(agents.births.create(inside(world.may_create(boss)), f"k{number}"))
            for number in range(2)]  # fmt: skip
    agents.journal.update(top, mode="turn")
    agents.journal.update(boss, limits={"tokens.max": "5", "cost.max": "1"})
    for kid in kids:
        networks.prepare(agents, kid, tmp_path, {"api": 8080})
    counts = networks.counters(tmp_path, boss)

    def refuse(agent: Agent, kind: int) -> list[str]:
        counts.spend(trouble=kind << 32)
        networks.counters(tmp_path, agent).spend(trouble=kind << 32 | 1)
        return _tell(world, tmp_path, agent)

    assert refuse(kids[0], 1) == [], "it is not met any more"
    counts.spend(output=5)
    assert refuse(kids[0], 1) == ["k0", "boss"]
    assert [refuse(kids[0], 3), refuse(kids[0], 1), refuse(kids[0], 3)] == [["k0", "boss"], [], []]
    assert [_tell(world, tmp_path, boss), refuse(kids[1], 1)] == [[], ["k1"]]
    agents.journal.update(boss, limits={"tokens.max": "4"})
    counts.limit(boss.limits)
    assert refuse(kids[1], 1) == ["k1", "boss"]
    assert refuse(kids[1], 3) == [], "there is no such limit"
    texts = [message.text for message in agents.messages.pending(top)]
    assert texts == [
        'tokens.max=5 of "boss" is used up (5)',
        'cost.max=1.000000 of "boss": a model has no rate',
        'tokens.max=4 of "boss" is used up (5)',
    ]
    assert {message.sender for message in agents.messages.pending(top)} == {"agent:boss"}


@pytest.mark.settings(networks=METERED, messages=2)
def test_limits_that_are_changed_again_and_again_fill_no_queue(
    world: World, tmp_path: Path
) -> None:
    """Each refusal is one of a new value, and nobody reads."""
    agents = world.agents
    boss = world.may_create(world.live(agents.births.create(operator(1000), "boss")))
    agents.journal.update(boss, mode="turn")
    kid = world.live(agents.births.create(inside(boss), "kid"))
    networks.prepare(agents, kid, tmp_path, {"api": 8080})
    counts = networks.counters(tmp_path, kid)
    counts.spend(output=9)
    for number in range(5):
        agents.journal.update(kid, limits={"tokens.max": str(number)})
        counts.limit(kid.limits)
        counts.spend(trouble=1 << 32)
        assert _tell(world, tmp_path, kid) == ["kid"]
    texts = [message.text for message in agents.messages.pending(boss)]
    assert texts == [f'tokens.max={number} of "kid" is used up (9)' for number in range(2)]


@pytest.mark.settings(networks=METERED)
def test_sums_of_who_has_ended_are_kept_to_the_last(world: World, tmp_path: Path) -> None:
    agents = world.agents
    boss = world.may_create(world.live(agents.births.create(operator(1000), "boss")))
    kid = world.live(agents.births.create(inside(boss), "kid"))
    agents.journal.update(kid, life="detached")
    networks.prepare(agents, kid, tmp_path, {"api": 8080})
    for each in (kid, boss):
        networks.counters(tmp_path, each).spend(output=7, requests=1)
    change = Change()
    networks.keep_last(change, agents.registry, tmp_path, kid)
    assert [agent.name for agent, _ in change.agents.values()] == ["kid"], "boss has its turn"
    agents.journal.update(boss, status=Status.DEAD)
    networks.keep_last(change, agents.registry, tmp_path, kid)
    agents.journal.note(change)
    agents.journal.update(kid, status=Status.DEAD)
    networks.remove(agents.registry, tmp_path, kid, "no-cell")
    assert not list(tmp_path.glob("[0-9a-f]*")), "nobody is left who pays"
    assert networks.usage(agents, tmp_path, boss)["tokens.out"] == 7


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
    assert networks.usage(agents, tmp_path, boss) == {
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


@pytest.mark.settings(networks=METERED, depth=40)
def test_no_more_than_so_many_pay_for_a_detached_one(world: World, tmp_path: Path) -> None:
    agents = world.agents
    line = [world.may_create(world.live(agents.births.create(operator(1000), "a")))]
    for _ in range(networks.LEVELS):
        name = f"{line[-1].name}b"
        line.append(world.may_create(world.live(agents.births.create(inside(line[-1]), name))))
        agents.journal.update(line[-1], life="detached")
    networks.prepare(agents, line[-2], tmp_path, {"api": 8080})
    networks.prepare(agents, line[-1], tmp_path, {"plain": 8081})
    with pytest.raises(QuotaError, match="is 33 levels deep, and what models say is charged to 32"):
        networks.prepare(agents, line[-1], tmp_path, {"api": 8080})


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
