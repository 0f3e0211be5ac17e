"""What owners used of models, as metrics tell it."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.cell import networks
from runtime.cell.spending import KEYS, Spending
from runtime.records.config import Network
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.records.spent import NOTHING_SPENT
from tests.worlds.records import World, inside, operator

pytestmark = pytest.mark.settings(
    networks={"api": Network(socket="/srv/api.sock", port=8080, header="counters")}
)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (made := tmp_path / "net").mkdir()
    return made


def begin(world: World, files: Path, agent: Agent) -> Agent:
    world.may_create(world.live(agent))
    networks.prepare(world.agents, agent, files, {"api": 8080})
    return agent


def use(files: Path, *agents: Agent, tokens: int) -> None:
    """As a meter counts it: at all payers."""
    for agent in agents:
        counters = networks.counters(files, agent)
        spent = counters.spent()
        assert spent is not None
        counters.spend(input=spent.input + tokens)


def over(world: World, files: Path, spending: Spending, agent: Agent) -> None:
    world.agents.journal.update(agent, status=Status.DEAD)
    spending.look(agent)
    networks.remove(world.agents.registry, files, agent, "no-cell")
    spending.forget(agent)


def told(spending: Spending, owner: int = 1000) -> int:
    return spending.of_owner.get(owner, NOTHING_SPENT)[KEYS.index("tokens.in")]


def test_what_is_below_counts_once_and_sums_outlive_files(world: World, files: Path) -> None:
    agents = world.agents
    spending = Spending(agents, files)
    boss = begin(world, files, agents.births.create(operator(1000), "boss"))
    kid = begin(world, files, agents.births.create(inside(boss), "kid"))
    use(files, kid, boss, tokens=7)
    for agent in (kid, boss, kid):
        spending.look(agent)
    assert told(spending) == 7
    assert told(spending, agents.privilege.uid) == 0, "it is there"
    use(files, kid, boss, tokens=2)
    over(world, files, spending, kid)
    over(world, files, spending, boss)
    assert not list(files.iterdir())
    assert told(spending) == 9
    again = begin(world, files, agents.births.create(operator(1000), "again"))
    use(files, again, tokens=1)
    spending.look(again)
    assert told(spending) == 10


def test_a_detached_child_goes_on_for_who_is_gone(world: World, files: Path) -> None:
    agents = world.agents
    spending = Spending(agents, files)
    boss = begin(world, files, agents.births.create(operator(1000), "boss"))
    kid = begin(world, files, agents.births.create(inside(boss), "kid"))
    agents.journal.update(kid, life="detached")
    use(files, boss, tokens=1)
    over(world, files, spending, boss)
    use(files, kid, boss, tokens=5)
    over(world, files, spending, kid)
    assert told(spending) == 6


def test_another_daemon_counts_from_what_it_finds(world: World, files: Path) -> None:
    agents = world.agents
    boss = begin(world, files, agents.births.create(operator(1000), "boss"))
    use(files, boss, tokens=100)
    spending = Spending(agents, files)
    assert told(spending) == 0
    use(files, boss, tokens=3)
    spending.look(boss)
    assert told(spending) == 3


def test_after_a_reboot_sums_go_on_at_who_pays_then(world: World, files: Path) -> None:
    agents = world.agents
    boss = begin(world, files, agents.births.create(operator(1000), "boss"))
    kid = begin(world, files, agents.births.create(inside(boss), "kid"))
    agents.journal.update(kid, life="detached")
    agents.journal.update(kid, spent=(50, *NOTHING_SPENT[1:]))
    agents.journal.update(boss, status=Status.DEAD)
    agents.removals.remove(boss)
    for file in files.iterdir():
        file.unlink()
    spending = Spending(agents, files)
    begin(world, files, kid)
    assert kid.payers == (kid.incarnation,)
    use(files, kid, tokens=4)
    spending.look(kid)
    assert told(spending) == 4
