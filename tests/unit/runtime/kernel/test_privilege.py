"""What follows from whose rights the daemon has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ctxfs.daemon import Defaults
from runtime.caller import OPERATORS, Role
from runtime.cell import cell
from runtime.cell.cell import Places
from runtime.errors import ForbiddenError
from runtime.kernel import orders
from runtime.kernel.privilege import ROOT, Privilege
from runtime.records.model import Agent
from tests.worlds.records import World, inside, operator

USER = Privilege(uid=1000, gid=100, groups=(4, 100))
PLACES = Places(mount=Path("/r/ctx"), state=Path("/s"), runtime=Path("/r/ctxfs"))

pytestmark = pytest.mark.settings(privilege=USER)


@pytest.fixture
def agent(world: World) -> Agent:
    made = world.agents.births.create(operator(1000), "x")
    world.agents.journal.update(made, exec="true")
    return made


def plan(world: World, agent: Agent) -> cell.Plan:
    return cell.plan(world.agents, agent, PLACES)


def test_of_this_process() -> None:
    found = Privilege.of_this_process()
    assert (found.uid, found.gid) == (os.geteuid(), os.getegid())
    assert found.rootless == (os.geteuid() != 0)


def test_root_gives_an_agent_its_groups() -> None:
    assert ROOT.groups_of(()) == () and ROOT.groups_of((7, 8)) == (7, 8)
    ROOT.check_ids("uid 5", (5,), (6,))


def test_a_user_changes_no_ids() -> None:
    assert USER.groups_of((4,)) == "="
    USER.check_ids("uid 1000", (1000,), (1000,))
    with pytest.raises(ForbiddenError, match="uid 5: this ctxd runs without root, as uid 1000"):
        USER.check_ids("uid 5", (5,), (1000,))


def test_agents_have_the_ids_of_the_daemon_and_its_user_the_last_word(
    world: World, agent: Agent
) -> None:
    assert (agent.uid, agent.gid, agent.groups, agent.owner) == (1000, 100, (4, 100), 1000)
    identity = world.agents.identity
    made_it = Role.CREATOR
    assert identity.roles(operator(1000), agent) == OPERATORS | Role.ANYONE | made_it
    assert identity.is_master(operator(1000)) and not identity.is_master(operator(1001))
    world.live(agent)
    assert not identity.is_master(inside(agent))


def test_the_steps_into_a_cell(world: World, agent: Agent) -> None:
    view = ["/r/ctxfs/root/bin/view", "3", "6", "5", "1000", "100", "=", "4", "keeper"]
    assert list(plan(world, agent).steps)[:9] == view
    child = world.agents.births.create(inside(world.live(agent)), "c")
    enter = list(plan(world, child).steps)[:7]
    assert enter == ["/r/ctxfs/root/bin/enter", "8", "7", "1000", "100", "=", "cell"]


def test_what_sandboxes_share_is_read_only_but_for_the_filesystem(
    world: World, agent: Agent
) -> None:
    for privilege, options in ((USER, "sR"), (ROOT, "s")):
        world.agents.privilege = privilege
        view = plan(world, agent).view
        assert ("bind", options, "-", "/r/ctxfs/root", "/r/ctxfs/root") in view


def test_a_sealed_file_is_read_and_never_written() -> None:
    fd = orders.sealed_file("x", b"text")
    try:
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        try:
            assert os.read(again, 10) == b"text"
            with pytest.raises(PermissionError):
                os.pwrite(again, b"more", 0)
            with pytest.raises(PermissionError):
                os.ftruncate(again, 0)
        finally:
            os.close(again)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            {"HOME": "/h", "XDG_RUNTIME_DIR": "/x", "XDG_STATE_HOME": ""},
            ("/x/ctx", "/h/.local/state/ctxfs", "/x/ctxfs", "/h/.config/ctxfs/config.yaml"),
        ),
        (
            {"HOME": "/h", "XDG_STATE_HOME": "/s", "XDG_CONFIG_HOME": "/c"},
            ("/run/user/1000/ctx", "/s/ctxfs", "/run/user/1000/ctxfs", "/c/ctxfs/config.yaml"),
        ),
    ],
)
def test_default_places_of_a_user(
    environment: dict[str, str], expected: tuple[str, ...]
) -> None:
    found = Defaults.of(USER, environment)
    assert (found.mount, found.state, found.runtime, found.config) == tuple(map(Path, expected))


def test_default_places_of_root() -> None:
    found = Defaults.of(ROOT, {"HOME": "/h", "XDG_RUNTIME_DIR": "/x"})
    assert (found.mount, found.state) == (Path("/ctx"), Path("/var/lib/ctxfs"))
    assert (found.runtime, found.config) == (
        Path("/run/ctxfs"), Path("/etc/ctxfs/config.yaml"),
    )
