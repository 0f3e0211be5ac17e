"""Who calls, and what that makes it to an agent."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from runtime.caller import NOBODY, OPERATORS, PARTIES, Caller, Role
from runtime.kernel import linux
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from tests.worlds.records import ROOT, World, inside, operator

NO_PROCESS = 2**22 + 1  # above every pid_max


@pytest.fixture
def agent(world: World) -> Agent:
    return world.live(world.agents.births.create(operator(1000), "x"))


def roles(world: World, caller: Caller, agent: Agent) -> Role:
    return world.agents.identity.roles(caller, agent)


# resolving


def test_a_process_outside_every_agent_is_its_uid(world: World) -> None:
    caller = world.agents.identity.resolve(7, 8, os.getpid())
    assert caller == Caller(7, 8, os.getpid())
    assert caller.key == "uid:7"


def test_a_process_in_an_agents_cgroup_is_that_incarnation(world: World, agent: Agent) -> None:
    world.hierarchy.below = "user-1000/agent-x/run"
    caller = world.agents.identity.resolve(0, 0, os.getpid())
    assert (caller.agent, caller.incarnation, caller.known) == (
        agent.index,
        agent.incarnation,
        True,
    )
    assert caller.key == agent.incarnation


def test_a_thread_is_resolved_too(world: World, agent: Agent) -> None:
    import threading

    world.hierarchy.below = "user-1000/agent-x/run"
    found: list[Caller] = []
    thread = threading.Thread(
        target=lambda: found.append(world.agents.identity.resolve(0, 0, threading.get_native_id()))
    )
    thread.start()
    thread.join()
    assert found[0].agent == agent.index


@pytest.mark.parametrize("pid", [0, -1, NO_PROCESS])
def test_a_process_that_cannot_be_seen_is_unknown_even_with_uid_0(world: World, pid: int) -> None:
    assert not world.agents.identity.resolve(0, 0, pid).known


@pytest.mark.parametrize("below", ["user-1000/agent-gone/run", "user-1000", "user-1000/x"])
def test_a_process_in_a_cgroup_of_no_agent_is_unknown(world: World, below: str) -> None:
    world.hierarchy.below = below
    assert not world.agents.identity.resolve(0, 0, os.getpid()).known


@pytest.mark.parametrize("below", ["monitor", "user-0/monitor", "helper", "daemon"])
def test_what_helps_the_daemon_has_no_rights(world: World, below: str) -> None:
    world.hierarchy.below = below
    assert not world.agents.identity.resolve(0, 0, os.getpid()).known


def test_a_peer_is_who_connected(world: World, agent: Agent) -> None:
    world.hierarchy.below = "user-1000/agent-x/run"
    one, other = socket.socketpair()
    with one, other:
        caller = world.agents.identity.resolve_peer(one)
    assert (caller.uid, caller.gid, caller.pid) == (os.getuid(), os.getgid(), os.getpid())
    assert caller.agent == agent.index


def test_a_peer_has_the_groups_that_it_connected_with(world: World) -> None:
    one, other = socket.socketpair()
    with one, other:
        caller = world.agents.identity.resolve_peer(one)
    assert caller.groups is not None
    assert set(caller.groups) == set(os.getgroups())


def test_groups_of_a_peer_are_not_looked_up_by_its_number(world: World) -> None:
    # this process may have got the number of the one that connected
    caller = Caller(1000, 1000, os.getpid(), groups=(7, 8))
    agent = world.agents.births.create(caller, "y")
    assert agent.creator_groups == agent.groups == (7, 8)


def test_a_peer_that_is_gone_is_unknown(world: World, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        pid = os.fork()
        if pid == 0:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(tmp_path / "s"))
            os._exit(0)
        os.waitpid(pid, 0)
        accepted, _ = listener.accept()
        with accepted:
            assert not world.agents.identity.resolve_peer(accepted).known


def test_groups_are_those_of_the_process() -> None:
    assert set(linux.groups_of(os.getpid())) == set(os.getgroups())
    assert linux.groups_of(NO_PROCESS) == ()


# still


@pytest.mark.parametrize("status", list(Status))
def test_an_incarnation_still_may_while_it_is_live(
    world: World, agent: Agent, status: Status
) -> None:
    caller = inside(agent)
    world.agents.journal.update(agent, status=status)
    assert world.agents.identity.still(caller) is (status not in (Status.NEW, Status.DEAD))


def test_a_new_incarnation_of_the_name_is_somebody_else(world: World, agent: Agent) -> None:
    old = inside(agent)
    world.agents.journal.update(agent, status=Status.DEAD)
    world.agents.removals.remove(agent)
    again = world.live(world.agents.births.create(operator(1000), "x"))
    assert not world.agents.identity.still(old)
    assert roles(world, old, again) is Role.NONE
    assert roles(world, inside(again), again) == Role.SELF | Role.ANYONE


def test_a_reset_incarnation_is_somebody_else(world: World, agent: Agent) -> None:
    old = inside(agent)
    world.agents.journal.update(agent, incarnation="other")
    assert not world.agents.identity.still(old)
    assert roles(world, old, agent) is Role.NONE


def test_outside_every_agent_the_known_still_may() -> None:
    assert ROOT.known
    assert not NOBODY.known


# roles


@pytest.mark.parametrize(
    ("caller", "expected"),
    [
        (operator(0), OPERATORS | Role.ANYONE),
        (operator(1000), Role.OPERATOR | Role.ANYONE),
        (operator(1001), Role.ANYONE),
        (Caller(0, 0, 0, known=False), Role.NONE),
        (Caller(1000, 1000, 0, known=False), Role.NONE),
        (NOBODY, Role.NONE),
    ],
)
def test_roles_outside_every_agent(
    world: World, agent: Agent, caller: Caller, expected: Role
) -> None:
    assert roles(world, caller, agent) == expected


def test_roles_inside_agents(world: World, agent: Agent) -> None:
    child = world.may_create(world.live(world.agents.births.create(inside(agent), "c")))
    grandchild = world.live(world.agents.births.create(inside(child), "g"))
    world.agents.journal.update(agent, policy="")
    world.agents.journal.update(child, policy="")
    other = world.live(world.agents.births.create(operator(1000), "o"))
    world.agents.journal.update(other, policy="")
    assert roles(world, inside(agent), agent) == Role.SELF | Role.ANYONE
    assert roles(world, inside(agent), child) == Role.CREATOR | Role.ANYONE
    assert roles(world, inside(agent), grandchild) == Role.ANYONE
    assert roles(world, inside(child), agent) == Role.CHILD | Role.ANYONE
    assert roles(world, inside(grandchild), agent) == Role.ANYONE
    assert roles(world, inside(other), agent) == Role.ANYONE


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("agent:x read", Role.READER),
        ("agent:* start", Role.STARTER),
        ("agent:x stop", Role.STOPPER),
        ("agent:x write", Role.WRITER),
        ("session:x read", Role.SESSION_READER),
        ("agent:x create", Role.NONE),
        ("agent:y read", Role.NONE),
    ],
)
def test_roles_by_policy(world: World, agent: Agent, rule: str, expected: Role) -> None:
    other = world.live(world.agents.births.create(operator(1000), "o"))
    world.agents.journal.update(other, policy=f"allow o_t {rule}\n")
    assert roles(world, inside(other), agent) == expected | Role.ANYONE


def test_a_policy_reaches_other_owners_by_roots_lines_only(world: World, agent: Agent) -> None:
    other = world.live(world.agents.births.create(operator(1001), "o"))
    world.agents.journal.update(other, policy="allow o_t agent:x read,stop\n")
    assert roles(world, inside(other), agent) == Role.ANYONE
    world.agents.journal.update(other, policy_of_root=("allow agent:x read",))
    assert roles(world, inside(other), agent) == Role.READER | Role.ANYONE
    world.agents.journal.update(other, policy="allow o_t agent:x stop\n")
    assert roles(world, inside(other), agent) == Role.ANYONE


@pytest.mark.parametrize("uid", [0, 1000])
def test_inside_an_agent_no_uid_makes_an_operator(world: World, agent: Agent, uid: int) -> None:
    other = world.live(world.agents.births.create(operator(1000), "o"))
    world.agents.journal.update(other, policy="")
    caller = Caller(uid, uid, 1, other.index, other.incarnation)
    assert roles(world, caller, agent) == Role.ANYONE


def test_a_dead_creator_has_no_rights(world: World, agent: Agent) -> None:
    child = world.agents.births.create(inside(agent), "c")
    world.agents.journal.update(agent, status=Status.DEAD)
    assert roles(world, inside(agent), child) is Role.NONE


def test_an_owner_is_decided_by_the_owner_not_by_the_uid(world: World) -> None:
    agent = world.agents.births.create(ROOT, "r")
    assert agent.uid != 0
    assert roles(world, operator(agent.uid), agent) == Role.ANYONE


def test_a_stranger_is_no_party(world: World, agent: Agent) -> None:
    assert not roles(world, operator(4242), agent) & PARTIES
