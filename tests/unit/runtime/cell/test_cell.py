"""Plans: the steps into a cell, as data. Nothing is started here."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import pytest

from runtime.agents.workspace import Worktree
from runtime.agents.workspace import binds as worktree_mounts
from runtime.cell import cell, networks, starting
from runtime.cell.cell import Places, Plan
from runtime.cell.prepared import HOME
from runtime.errors import MalformedError, WrongStateError
from runtime.ids import BootId, RunId
from runtime.kernel import cgroups, linux, orders
from runtime.records.config import Network
from runtime.records.model import Agent
from runtime.records.run import Run
from runtime.texts import mounts
from tests.worlds.records import World, inside, operator

PLACES = Places(mount=Path("/ctx"), state=Path("/var/lib/c"), runtime=Path("/run/c"))
#: ctxfs-programs(7), Environment: what programs start from, besides ``env``
VARIABLES = {
    "CTX_ROOT",
    "CTX_AGENT",
    "CTX_SELF",
    "CTX_SESSION",
    "CTX_RUN",
    "CTX_HOME",
    "CTX_PATH",
    "CTX_MODEL",
    "GIT_CONFIG_SYSTEM",
    "npm_config_offline",
    "YARN_ENABLE_NETWORK",
    "PIP_NO_INDEX",
    "UV_OFFLINE",
    "CARGO_NET_OFFLINE",
    "GOPROXY",
    "COMPOSER_DISABLE_NETWORK",
    "HF_HUB_OFFLINE",
    "HOME",
    "PATH",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "TERM",
}
FD = {"report": "3", "spec": "4", "keeper": "5", "view": "6", "extra": "7", "cell": "8"}


@pytest.fixture
def agent(world: World) -> Agent:
    made = world.agents.births.create(operator(1000), "x")
    world.agents.journal.update(made, exec="prog 'a b' c", groups=(5, 6), creator_groups=(9,))
    return made


@pytest.fixture
def child(world: World, agent: Agent) -> Agent:
    return world.agents.births.create(inside(world.live(agent)), "c")


def plan(world: World, agent: Agent) -> Plan:
    return cell.plan(world.agents, agent, PLACES)


def strings(data: bytes) -> list[str]:
    """Of a message, without their number."""
    count, *found = [part.decode() for part in data.split(b"\0")[:-1]]
    assert int(count) == len(found)
    return found


def operations(found: Plan) -> list[tuple[str, ...]]:
    """What view.c is to do."""
    return list(found.view)


def staged(found: Plan) -> list[str]:
    """The mounts that stage.c is to make: three words each."""
    *_, mounts = taken(found)
    return mounts


def taken(found: Plan) -> tuple[str, str, str, list[str], list[str], list[str], list[str]]:
    """What stage.c takes: directory, uid, gid, groups, forbidden paths, those in them that are
    permitted, mounts."""
    directory, uid, gid, *rest = strings(found.stage)
    groups, rest = first_list(rest)
    forbidden, rest = first_list(rest)
    permitted, (count, *rest) = first_list(rest)
    assert len(rest) == 4 * int(count) and set(rest[::4]) <= {"3"}
    words = [word for number, word in enumerate(rest) if number % 4]
    return directory, uid, gid, groups, forbidden, permitted, words


def first_list(found: list[str]) -> tuple[list[str], list[str]]:
    """A list that strings begin with, and the rest."""
    count, *rest = found
    return rest[: int(count)], rest[int(count) :]


def binds(found: Plan, options: str = "-") -> list[tuple[str, str]]:
    """(source, target) of each bind with these options."""
    return [(o[3], o[4]) for o in operations(found) if o[0] == "bind" and o[1] == options]


def links(found: Plan) -> list[tuple[str, str]]:
    return [(o[1], o[2]) for o in operations(found) if o[0] == "symlink"]


def spec(found: Plan) -> tuple[str, dict[str, str], list[str]]:
    """Working directory, environment, program."""
    cwd, *rest = strings(found.spec)
    entries, rest = first_list(rest)
    program, rest = first_list(rest)
    assert not rest
    return cwd, dict(entry.split("=", 1) for entry in entries), program


# what the program starts from


def test_the_environment_is_what_the_abi_lists(world: World, agent: Agent) -> None:
    world.agents.journal.update(agent, run=Run(id=RunId("r3")), model="m")
    _, variables, words = spec(plan(world, agent))
    assert set(variables) == VARIABLES
    assert words == ["prog", "a b", "c"]
    assert {k: v for k, v in variables.items() if k.startswith("CTX_")} == {
        "CTX_ROOT": "/ctx",
        "CTX_AGENT": "x",
        "CTX_SELF": "/ctx/agent/x.d",
        "CTX_SESSION": "default",
        "CTX_RUN": "r3",
        "CTX_HOME": "/ctx/home/1000",
        "CTX_PATH": "/ctx/tool",
        "CTX_MODEL": "m",
    }
    assert variables["HOME"] == HOME


def test_the_daemons_own_environment_is_not_handed_on(
    world: World, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    found = plan(world, agent)
    assert "s3cret" not in repr(found)


def test_secrets_of_the_environment_are_on_no_command_line(world: World, agent: Agent) -> None:
    world.agents.journal.update(agent, env="TOKEN=s3cret\n")
    found = plan(world, agent)
    assert spec(found)[1]["TOKEN"] == "s3cret"
    assert "s3cret" not in " ".join([*found.steps, *sum(found.view, ()), found.describe()])


def test_the_programs_words_are_on_no_command_line_of_the_steps(world: World, agent: Agent) -> None:
    assert "prog" not in plan(world, agent).steps


@pytest.mark.parametrize("value", ["", "x y", "a=b", "ä", "x\ry", "x\u2028y", "x\x0cy", "x\x85y"])
def test_a_value_reaches_the_program_as_it_was_written(
    world: World, agent: Agent, value: str
) -> None:
    world.agents.journal.update(agent, env=f"A={value}\nB=2\n")
    variables = spec(plan(world, agent))[1]
    assert (variables["A"], variables["B"]) == (value, "2")
    assert set(variables) == VARIABLES | {"A", "B"}


def test_given_variables_win_over_the_common_ones(world: World, agent: Agent) -> None:
    world.agents.journal.update(agent, env="LANG=de\nPATH=/p\n")
    variables = spec(plan(world, agent))[1]
    assert (variables["LANG"], variables["PATH"]) == ("de", "/p")


def test_tool_directories_are_a_path(world: World, agent: Agent) -> None:
    world.agents.journal.update(agent, path="/a\n/b c\n")
    assert spec(plan(world, agent))[1]["CTX_PATH"] == "/a:/b c"


def test_without_a_program_there_is_no_plan(world: World, agent: Agent) -> None:
    world.agents.journal.update(agent, exec="")
    with pytest.raises(MalformedError, match="exec is empty"):
        plan(world, agent)


def test_the_working_directory_is_cwd_else_the_workspace_else_home(
    world: World, agent: Agent, child: Agent
) -> None:
    assert spec(plan(world, agent))[0] == HOME
    world.agents.journal.update(agent, workspace="explicit_root:/w")
    assert spec(plan(world, agent))[0] == "/w"
    assert spec(plan(world, child))[0] == "/w"
    world.agents.journal.update(child, cwd="/c")
    assert spec(plan(world, child))[0] == "/c"


# the steps


def test_a_root_agents_view_is_built_with_its_ids(world: World, agent: Agent) -> None:
    assert list(plan(world, agent).steps) == [
        *("/run/c/root/bin/view", FD["report"], FD["view"], FD["keeper"]),
        *("1000", "1000", "2", "5", "6"),
        *("4", "keeper", FD["spec"], FD["report"], "5000"),
    ]


def test_without_groups_it_keeps_none(world: World, agent: Agent) -> None:
    world.agents.journal.update(agent, groups=())
    assert plan(world, agent).steps[4:8] == ("1000", "1000", "0", "4")


def test_a_childs_steps_enter_its_parents_cell_with_its_ids(world: World, child: Agent) -> None:
    found = plan(world, child)
    assert list(found.steps) == [
        *("/run/c/root/bin/enter", FD["cell"], FD["extra"], "1000", "1000", "2", "5", "6", "cell"),
        *("12", "view", FD["report"], FD["view"], FD["keeper"], "1000", "1000", "="),
        *("4", "keeper", FD["spec"], FD["report"], "5000"),
    ]
    programs = ("spec", "keeper", "view", "builder", "cell")
    assert found.passed == programs, "by descriptor, not by a path in there"


def test_the_grace_is_the_agents_in_milliseconds(world: World, agent: Agent) -> None:
    world.agents.journal.update(agent, limits={"grace": "250ms"})
    assert plan(world, agent).steps[-1] == "250"


def test_every_cell_has_processes_and_devices_of_its_own(
    world: World, agent: Agent, child: Agent
) -> None:
    for found in (plan(world, agent), plan(world, child)):
        assert {("proc", "/proc"), ("dev", "/dev")} <= set(operations(found))


def test_the_network_is_opened_by_policy_only(world: World, agent: Agent, child: Agent) -> None:
    assert ("network",) in plan(world, agent).view
    # nor has the parent's cell, where the child's is made; but that has a loopback
    assert ("network",) in plan(world, child).view
    world.agents.journal.update(agent, policy="allow x_t network:default connect\n")
    assert ("network",) not in plan(world, agent).view
    assert ("network",) in plan(world, child).view
    world.agents.journal.update(child, policy="allow c_t network:default connect\n")
    assert ("network",) not in plan(world, child).view


# the view


def test_a_root_agent_sees_the_configured_base_read_only(world: World, agent: Agent) -> None:
    found = plan(world, agent)
    for path in map(Path, world.config.base_view):
        if path.is_symlink():
            assert (os.readlink(path), str(path)) in links(found)
        else:
            assert (str(path), str(path)) in binds(found, "rt")
    shared = str(PLACES.shared)
    assert binds(found, "s") == [(shared, shared)]
    assert (str(PLACES.fuse), "/ctx") in links(found)
    assert found.stage == b""


def test_a_child_sees_what_its_parent_sees(world: World, child: Agent) -> None:
    found = plan(world, child)
    assert operations(found)[2:4] == [("root", "/"), ("tmpfs", "0755", "/var/tmp")]
    assert binds(found, "rt") == []
    assert found.stage == b""


def test_a_child_without_the_hosts_network_has_no_service_of_it(
    world: World, agent: Agent, child: Agent
) -> None:
    fresh = ("tmpfs", "0755", "/run")
    for lines in ("", "allow x_t network:default connect\n"):  # the parent's may have changed
        world.agents.journal.update(agent, policy=lines)
        assert fresh in operations(plan(world, child))
    world.agents.journal.update(child, policy="allow c_t network:default connect\n")
    assert fresh not in operations(plan(world, child))


@pytest.mark.parametrize("named", [{"root": "/tree"}, {"iso": "shared"}])
def test_a_root_that_the_runtime_did_not_make_is_a_childs_too(
    world: World, agent: Agent, child: Agent, named: dict[str, str]
) -> None:
    assert cell.has_own_root(world.agents, child)
    world.agents.journal.update(agent, **named)
    assert not cell.has_own_root(world.agents, child)
    assert operations(plan(world, child))[2] == ("bind", "s", "-", "/", "/")


def test_a_detached_child_knows_whose_root_its_parent_had(world: World, child: Agent) -> None:
    world.agents.journal.update(child, life="detached")
    assert not cell.has_own_root(world.agents, child)
    world.agents.journal.update(child, bound_root=True)
    assert cell.has_own_root(world.agents, child)


def test_operators_mounts_are_staged_with_the_creators_rights(world: World, agent: Agent) -> None:
    world.agents.journal.update(
        agent,
        root="/tree",
        workspace="explicit_root:/work",
        mount="/a /m/a ro\n- /hidden hide\n/b /m/b rw bind,nosuid,nodev,noexec\n",
    )
    found = plan(world, agent)
    stage, *rest = list(found.steps)
    assert stage.endswith("/stage")
    assert rest[:4] == [FD["extra"], "-", str(len(rest[3:])), "/run/c/root/bin/view"]
    assert taken(found) == (
        *("/run/c/stage", "1000", "1000", ["9"]),
        *(["/var/lib/c", "/run/c"], ["/run/c/tree", "/var/lib/c/tree"]),
        ["r", "-", "/tree", "r", "-", "/work", "r", "-", "/a", "sdx", "-", "/b"],
    )
    stage = "/run/c/stage"
    assert (f"{stage}/0", "/") in binds(found)
    assert (f"{stage}/1", "/work") in binds(found)
    assert (f"{stage}/2", "/m/a") in binds(found, "r")
    assert (f"{stage}/3", "/m/b") in binds(found)
    for source in ("/tree", "/a", "/b"):
        assert source not in sum(found.view, ())


def test_a_childs_mounts_are_named_inside_its_parents_view(world: World, child: Agent) -> None:
    world.agents.journal.update(child, mount="/a /m/a ro\n/b /m/b rw\n")
    found = plan(world, child)
    assert ("/a", "/m/a") in binds(found, "r")
    assert ("/b", "/m/b") in binds(found)
    assert found.stage == b""


def test_noexec_of_a_child_is_made_with_its_view(world: World, child: Agent) -> None:
    world.agents.journal.update(child, mount="/a /a rw noexec\n/b /m ro noexec\n/c /m/c ro\n")
    found = plan(world, child)
    assert binds(found, "x") == [("/a", "/a")]
    assert binds(found, "rx") == [("/b", "/m")]
    assert binds(found, "r") == [("/c", "/m/c")]


def test_noexec_of_what_is_staged_is_there_already(
    world: World, agent: Agent, child: Agent
) -> None:
    world.agents.journal.update(agent, mount="/a /m rw noexec\n")
    detached = world.agents.births.create(inside(agent), "d")
    world.agents.journal.update(detached, life="detached", mount="/m /n rw noexec\n")
    for one in (agent, detached):
        assert binds(plan(world, one), "x") == []
        assert staged(plan(world, one))[-3] == "rx"


def found_at(boot: str, **paths: str) -> dict[str, Any]:
    """A record of what /NAME was in a boot: another path, and 8:1 there."""
    return mounts.Sources(
        BootId(boot), {f"/{name}": mounts.Source(path, "8:1") for name, path in paths.items()}
    ).dump()


def test_what_was_found_is_staged_by_its_path_without_links(world: World, agent: Agent) -> None:
    boot = linux.boot_id()
    world.agents.journal.update(
        agent, root="/tree", workspace="explicit_root:/work", mount="/a /m rw\n",
        sources={"mount": found_at(boot, a="/real/a"), "root": found_at(boot, tree="/real/tree"),
                 "workspace": found_at(boot, work="/real/work")},
    )
    found = plan(world, agent)
    assert staged(found) == [
        *("r", "8:1", "/real/tree", "r", "8:1", "/real/work", "r", "8:1", "/real/a")
    ]
    assert ("/run/c/stage/1", "/work") in binds(found), "it appears where it was named"


def test_numbers_of_another_boot_are_not_compared(world: World, agent: Agent) -> None:
    world.agents.journal.update(
        agent, mount="/a /m rw\n", sources={"mount": found_at("an earlier one", a="/real/a")}
    )
    assert staged(plan(world, agent)) == ["r", "*", "/real/a"]


def test_what_is_staged_of_a_durable_tree_is_named_where_it_really_is(
    world: World, agent: Agent, tmp_path: Path
) -> None:
    """Without root a link leads there, and what was found is opened without following any."""
    places = Places(mount=Path("/ctx"), state=tmp_path / "state", runtime=tmp_path / "run")
    places.trees.mkdir(parents=True, exist_ok=True)
    places.runtime.mkdir()
    places.tree.symlink_to(places.trees)
    authority = world.agents.authority
    authority.places = dataclasses.replace(authority.places, directory=str(places.tree))
    world.agents.journal.update(
        agent,
        policy=f"allow {agent.label} shared:s read\nallow {agent.label} shared:s write\n",
        mount=f"{places.tree}/shared/s/a /m rw\n",
    )
    found = cell.plan(world.agents, agent, places)
    assert staged(found) == ["r", "-", f"{places.trees}/shared/s/a"]
    assert taken(found)[5] == [str(places.tree), str(places.trees)]


def test_planning_thousands_of_lines_is_not_quadratic(world: World, agent: Agent) -> None:
    def cost(count: int) -> float:
        text = "".join(f"/a/{n} /m/{n} ro noexec\n" for n in range(count))
        world.agents.journal.update(agent, mount=text)
        begun = time.thread_time()
        plan(world, agent)
        return time.thread_time() - begun

    cost(100)
    # the collector may come in one of them, and look at the heap of all tests
    few, many = (min(cost(count) for _ in range(3)) for count in (250, 2000))
    assert many < few * 8 * 4


API = {"api": Network(socket="/srv/api.sock", port=8080)}


@pytest.mark.settings(networks=API)
def test_a_network_is_listened_for_in_a_directory_that_nothing_covers(
    world: World, agent: Agent
) -> None:
    world.agents.journal.update(
        agent, policy=f"allow {agent.label} network:* connect\n", mount="/a /run rw\n"
    )
    # everything is allowed, also the host's network: there is no loopback of its own then
    assert plan(world, agent).networks == {"api": networks.SOCKET}
    world.agents.journal.update(agent, policy=f"allow {agent.label} network:a* connect\n")
    found = plan(world, agent)
    assert found.networks == {"api": 8080}
    assert operations(found)[-1] == ("tmpfs", "0755", networks.DIRECTORY)
    assert found.steps[-1] == "5", "where the keeper hands out what it listens on"
    world.agents.journal.update(agent, mount="")
    found = plan(world, agent)
    assert found.steps[2:4] == ("7", "6"), "what comes after that"
    _, *rest = strings(found.spec)
    entries, rest = first_list(rest)
    _, rest = first_list(rest)
    assert rest == ["1", "2", "api", "8080"]
    assert "CTX_NET_API=http://127.0.0.1:8080" in entries


@pytest.mark.settings(networks=API)
def test_a_child_has_a_network_by_its_own_line_only(
    world: World, agent: Agent, child: Agent
) -> None:
    world.agents.journal.update(agent, policy=f"delegate {agent.label} network:api connect\n")
    assert plan(world, agent).networks == {}
    world.agents.journal.update(child, policy=f"allow {child.label} network:api connect\n")
    found = plan(world, child)
    assert found.networks == {"api": 8080}
    assert found.view[-1] == ("tmpfs", "0755", networks.DIRECTORY)
    world.agents.journal.update(child, policy="")
    assert plan(world, child).networks == {}
    assert plan(world, child).view[-1] == ("hide", networks.DIRECTORY), "its parent's"


def test_a_network_that_nobody_configured_is_none(world: World, agent: Agent) -> None:
    world.agents.journal.update(agent, policy=f"allow {agent.label} network:api connect\n")
    assert plan(world, agent).networks == {}


def test_mounts_apply_in_order(world: World, agent: Agent) -> None:
    world.agents.journal.update(agent, mount="/a /m rw\n- /m/x hide\n/b /m/x/y ro\n")
    *_, first, second, third, told = operations(plan(world, agent))
    assert [each[-1] for each in (first, second, third)] == ["/m", "/m/x", "/m/x/y"]
    assert told[:2] == ("expect", "/m")
    assert "chown" in told[2] and " /a:" in told[2] and "/b" not in told[2]


def test_what_is_hidden_is_left_to_whoever_builds_the_view(world: World, child: Agent) -> None:
    world.agents.journal.update(child, mount="- /h hide\n")
    assert operations(plan(world, child))[-2] == ("hide", "/h")


def test_what_a_parent_had_below_the_fresh_directories_is_given_on(
    world: World, agent: Agent, child: Agent
) -> None:
    mount = f"/a /tmp/a rw\n/b {HOME}/b ro\n/c /else rw\n- /tmp/h hide\n"
    world.agents.journal.update(agent, mount=mount, workspace="explicit_root:/tmp/w")
    given = binds(plan(world, child), "t")
    assert given == [(p, p) for p in ("/tmp/a", f"{HOME}/b", "/tmp/w")]


def test_a_shared_agent_sees_the_host_but_not_the_daemon(
    world: World, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "mount_points", lambda: ["/sys/fs/cgroup", "/else/cgroup"])
    world.agents.journal.update(agent, iso="shared")
    found = plan(world, agent)
    assert binds(found, "s")[0] == ("/", "/")
    for hidden in ("/sys/fs/cgroup", "/else/cgroup"):
        assert ("hide", hidden) in operations(found)
    for hidden in ("/var/lib/c", "/run/c"):
        assert ("tmpfs", "0755", hidden) in operations(found)


def test_a_shared_agent_with_a_root_does_not_see_the_daemon_either(
    world: World, agent: Agent
) -> None:
    world.agents.journal.update(agent, iso="shared", root="/tree")
    found = plan(world, agent)
    for hidden in ("/var/lib/c", "/run/c"):
        assert ("tmpfs", "0755", hidden) in operations(found)
    assert binds(found, "s")[0] == ("/run/c/stage/0", "/")


# a worktree


def give_worktree(world: World, child: Agent, root: str) -> Worktree:
    worktree = Worktree(name=child.name, root=root, common=f"{root}/.git", base="0" * 40)
    world.agents.journal.update(world.live(child), workspace="worktree", worktree=worktree.dump())
    return worktree


def test_a_worktree_is_the_workspace_in_force(world: World, agent: Agent, child: Agent) -> None:
    world.agents.journal.update(agent, workspace="explicit_root:/w")
    world.agents.journal.update(child, workspace="worktree")
    heir = world.agents.births.create(inside(world.may_create(world.live(child))), "heir")
    for one in (child, heir):
        assert cell.workspace(world.agents, one) == "/workspace"
        assert cell.working_directory(world.agents, one) == "/workspace"
    assert cell.workspace(world.agents, agent) == "/w"
    world.agents.journal.update(heir, workspace="explicit_root:/w/sub")
    assert cell.workspace(world.agents, heir) == "/w/sub"
    world.agents.journal.update(heir, workspace="inherit", life="detached", profile="public_named")
    assert cell.workspace(world.agents, heir) is None


def test_a_worktree_is_mounted_before_the_childs_table(world: World, child: Agent) -> None:
    worktree = give_worktree(world, child, "/data/w")
    world.agents.journal.update(child, mount="/workspace/a /m rw\n- /workspace/b hide\n")
    found = plan(world, child)
    lines = [
        ("bind", "r" if mount.mode == "ro" else "-", "-", mount.source, mount.target)
        for mount in worktree_mounts(worktree)
    ]
    made = operations(found)
    start = made.index(lines[0])
    assert [each for each in made[start:] if each[0] != "expect"] == [
        *lines, ("bind", "-", "-", "/workspace/a", "/m"), ("hide", "/workspace/b"),
        ("hide", networks.DIRECTORY),
    ]
    assert found.stage == b""
    assert spec(found)[0] == "/workspace"


def test_without_its_worktree_there_is_no_plan(world: World, child: Agent) -> None:
    world.agents.journal.update(child, workspace="worktree")
    with pytest.raises(WrongStateError, match="does not exist yet"):
        plan(world, child)


def test_a_worktree_below_the_fresh_directories_is_given_on(
    world: World, agent: Agent, child: Agent
) -> None:
    world.agents.journal.update(agent, workspace="explicit_root:/tmp/w")
    worktree = give_worktree(world, child, "/tmp/w")
    assert binds(plan(world, child), "t") == [("/tmp/w", "/tmp/w")]
    heir = world.agents.births.create(inside(world.may_create(child)), "heir")
    world.agents.journal.update(heir, exec="true")
    given = [m.target for m in worktree_mounts(worktree) if "/workspace" not in m.target]
    assert binds(plan(world, heir), "t") == [(p, p) for p in ("/tmp/w", *given)]


# handing it over


@pytest.fixture
def places(tmp_path: Path) -> Places:
    made = Places(mount=Path("/ctx"), state=tmp_path / "state", runtime=tmp_path / "run")
    made.programs.mkdir(parents=True)
    for name in ("keeper", "view"):
        made.program(name).write_text(name)
    return made


def test_what_is_handed_over_is_in_memory_and_readable_once(
    world: World, agent: Agent, places: Places
) -> None:
    world.agents.journal.update(agent, mount="/a /m ro\n")
    prepared = plan(world, agent)
    with starting.passed_files(prepared, places, None, rootless=False) as fds:
        assert [os.readlink(f"/proc/self/fd/{fd}").split()[0] for fd in fds] == [
            "/memfd:spec",
            str(places.program("keeper")),
            "/memfd:view",
            "/memfd:stage",
        ]
        assert [os.read(fd, 1 << 20) for fd in (fds[0], *fds[2:])] == [
            prepared.spec,
            orders.message(prepared.view),
            prepared.stage,
        ]
    for fd in fds:
        with pytest.raises(OSError):
            os.fstat(fd)


def test_a_parents_cell_comes_last_and_stays_open(
    world: World, child: Agent, places: Places
) -> None:
    held = os.open("/dev/null", os.O_RDONLY)
    try:
        with starting.passed_files(plan(world, child), places, held, rootless=False) as fds:
            assert (len(fds), fds[-1]) == (5, held)
        os.fstat(held)
    finally:
        os.close(held)


def test_programs_are_sealed_copies_where_agents_own_the_files(places: Places) -> None:
    fd = starting.open_program(places, "keeper", rootless=True)
    try:
        assert os.pread(fd, 100, 0) == b"keeper"
        assert os.fstat(fd).st_mode & 0o777 == 0o111
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"other", 0)
    finally:
        os.close(fd)


def test_a_delegated_network_is_the_hosts(world: World, agent: Agent, child: Agent) -> None:
    """The parent has none to enter."""
    world.agents.journal.update(agent, policy="delegate x_t network:default connect\n")
    world.agents.journal.update(child, policy=f"allow {child.label} network:default connect\n")
    found = plan(world, child)
    assert "host" in found.steps and "cell" not in found.steps
    assert ("network",) not in found.view


# a detached child


@pytest.fixture
def detached(world: World, child: Agent) -> Agent:
    world.agents.journal.update(child, life="detached", profile="public_named")
    return child


def test_a_detached_childs_view_is_its_parents_but_not_inside_its_cell(
    world: World, detached: Agent
) -> None:
    world.agents.journal.update(detached, mount="/inner /m ro\n")
    found = plan(world, detached)
    assert found.steps[0].endswith("/stage")
    assert found.steps[2] != "-", "the parent's cell is handed on"
    assert found.steps[4].endswith("/view"), "and nothing enters it"
    assert staged(found) == ["r", "-", "/", "r", "-", "/inner"]
    assert ("/run/c/stage/0", "/") in binds(found, "s")
    assert ("/run/c/stage/1", "/m") in binds(found, "r")
    assert "/inner" not in sum(found.view, ())
    assert ("network",) in found.view


def test_a_detached_childs_sources_are_opened_with_its_own_ids(
    world: World, detached: Agent
) -> None:
    world.agents.journal.update(detached, creator_uid=0, creator_gid=0, creator_groups=(0,))
    ids = (str(detached.uid), str(detached.gid), [str(group) for group in detached.groups])
    assert taken(plan(world, detached))[1:4] == ids


def test_what_the_parent_has_below_tmp_may_be_gone_when_a_detached_child_starts(
    world: World, detached: Agent, agent: Agent
) -> None:
    world.agents.journal.update(agent, mount="/a /tmp/a ro\n")
    found = plan(world, detached)
    assert staged(found) == ["r", "-", "/", "rt", "-", "/tmp/a"]
    assert ("/run/c/stage/1", "/tmp/a") in binds(found, "t")


def test_a_detached_child_inherits_no_workspace(
    world: World, detached: Agent, agent: Agent
) -> None:
    world.agents.journal.update(agent, workspace="explicit_root:/work")
    assert spec(plan(world, detached))[0] == HOME
