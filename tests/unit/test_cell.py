"""Plans: the steps into a cell, as data. Nothing is started here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from runtime import cell
from runtime.cell import HOME, Places, Plan
from runtime.errors import MalformedError, WrongStateError
from runtime.model import Agent
from runtime.workspace import Worktree
from runtime.workspace import binds as worktree_mounts
from tests.unit.fakes import World, inside, operator, world_in

PLACES = Places(mount=Path("/ctx"), state=Path("/var/lib/c"), runtime=Path("/run/c"))
#: ABI section 6: what programs start from, besides ``env``
VARIABLES = {
    "CTX_ROOT",
    "CTX_AGENT",
    "CTX_SELF",
    "CTX_SESSION",
    "CTX_RUN",
    "CTX_HOME",
    "CTX_PATH",
    "CTX_MODEL",
    "HOME",
    "PATH",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "TERM",
}
FD = {"report": "3", "spec": "4", "view": "5", "extra": "6"}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with world_in(tmp_path) as made:
        yield made


@pytest.fixture
def agent(world: World) -> Agent:
    made = world.agents.create(operator(1000), "x")
    world.agents.update(made, exec="prog 'a b' c", groups=(5, 6), creator_groups=(9,))
    return made


@pytest.fixture
def child(world: World, agent: Agent) -> Agent:
    return world.agents.create(inside(world.live(agent)), "c")


def plan(world: World, agent: Agent, **hidden: str) -> Plan:
    return cell.plan(
        world.agents, agent, PLACES, hidden={"/" + key: kind for key, kind in hidden.items()}
    )


def strings(data: bytes) -> list[str]:
    return [part.decode() for part in data.split(b"\0")[:-1]]


def binds(found: Plan, option: str) -> list[tuple[str, str]]:
    """(source, target) of each ``option`` in the view."""
    view = found.view
    return [(view[i + 1], view[i + 2]) for i, word in enumerate(view) if word == option]


def spec(found: Plan) -> tuple[str, dict[str, str], list[str]]:
    """Working directory, environment, program."""
    cwd, entries, _, words = parts(found)
    return cwd, dict(e.split("=", 1) for e in entries), words


def parts(found: Plan) -> tuple[str, list[str], list[str], list[str]]:
    """Working directory, environment, mount targets, program."""
    cwd, count, *rest = strings(found.spec)
    entries, (number, *left) = rest[: int(count)], rest[int(count) :]
    return cwd, entries, left[: int(number)], left[int(number) :]


# what the program starts from


def test_the_environment_is_what_the_abi_lists(world: World, agent: Agent) -> None:
    world.agents.update(agent, run="r3", model="m")
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
    world.agents.update(agent, env="TOKEN=s3cret\n")
    found = plan(world, agent)
    assert spec(found)[1]["TOKEN"] == "s3cret"
    assert "s3cret" not in " ".join([*found.steps, *found.view, found.describe()])


def test_the_programs_words_are_on_no_command_line_of_the_steps(world: World, agent: Agent) -> None:
    assert "prog" not in plan(world, agent).steps


@pytest.mark.parametrize("value", ["", "x y", "a=b", "ä", "x\ry", "x\u2028y", "x\x0cy", "x\x85y"])
def test_a_value_reaches_the_program_as_it_was_written(
    world: World, agent: Agent, value: str
) -> None:
    world.agents.update(agent, env=f"A={value}\nB=2\n")
    variables = spec(plan(world, agent))[1]
    assert (variables["A"], variables["B"]) == (value, "2")
    assert set(variables) == VARIABLES | {"A", "B"}


def test_given_variables_win_over_the_common_ones(world: World, agent: Agent) -> None:
    world.agents.update(agent, env="LANG=de\nPATH=/p\n")
    variables = spec(plan(world, agent))[1]
    assert (variables["LANG"], variables["PATH"]) == ("de", "/p")


def test_tool_directories_are_a_path(world: World, agent: Agent) -> None:
    world.agents.update(agent, path="/a\n/b c\n")
    assert spec(plan(world, agent))[1]["CTX_PATH"] == "/a:/b c"


def test_without_a_program_there_is_no_plan(world: World, agent: Agent) -> None:
    world.agents.update(agent, exec="")
    with pytest.raises(MalformedError, match="exec is empty"):
        plan(world, agent)


def test_the_working_directory_is_cwd_else_the_workspace_else_home(
    world: World, agent: Agent, child: Agent
) -> None:
    assert spec(plan(world, agent))[0] == HOME
    world.agents.update(agent, workspace="explicit_root:/w")
    assert spec(plan(world, agent))[0] == "/w"
    assert spec(plan(world, child))[0] == "/w"
    world.agents.update(child, cwd="/c")
    assert spec(plan(world, child))[0] == "/c"


# the steps


def test_a_root_agents_steps_drop_every_right_first(world: World, agent: Agent) -> None:
    steps = plan(world, agent).steps
    before = steps[: steps.index("bwrap")]
    assert before[0] == "setpriv"
    for words in (("--reuid", "1000"), ("--regid", "1000"), ("--groups", "5,6")):
        assert words in list(pairwise(before))
    for word in ("--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"):
        assert word in before
    assert steps[steps.index("bwrap") :] == (
        *("bwrap", "--args", FD["view"], "--", "/run/c/root/bin/keeper"),
        *(FD["spec"], FD["report"], "5000"),
    )


def test_without_groups_it_keeps_none(world: World, agent: Agent) -> None:
    world.agents.update(agent, groups=())
    steps = plan(world, agent).steps
    assert "--clear-groups" in steps
    assert "--groups" not in steps


def test_a_childs_steps_enter_its_parents_cell_with_its_ids(world: World, child: Agent) -> None:
    steps = plan(world, child).steps
    assert steps[0].endswith("/enter")
    assert steps[1:6] == (FD["extra"], "1000", "1000", "5,6", "cell")
    assert steps[6:8] == ("--", "bwrap")
    assert "setpriv" not in steps


def test_the_grace_is_the_agents_in_milliseconds(world: World, agent: Agent) -> None:
    world.agents.update(agent, limits={"grace": "250ms"})
    assert plan(world, agent).steps[-1] == "250"


def test_every_cell_has_its_own_namespaces(world: World, agent: Agent, child: Agent) -> None:
    for found in (plan(world, agent), plan(world, child)):
        wanted = {"--unshare-user", "--unshare-pid", "--unshare-ipc", "--as-pid-1", "--new-session"}
        assert wanted <= set(found.view)
        assert [found.view[i + 1] for i, w in enumerate(found.view) if w == "--proc"] == ["/proc"]
        assert [found.view[i + 1] for i, w in enumerate(found.view) if w == "--dev"] == ["/dev"]


def test_the_network_is_opened_by_policy_only(world: World, agent: Agent, child: Agent) -> None:
    assert "--unshare-net" in plan(world, agent).view
    # nor has the parent's cell, where the child's is made; but that has a loopback
    assert "--unshare-net" in plan(world, child).view
    world.agents.update(agent, policy="allow x_t network:default connect\n")
    assert "--unshare-net" not in plan(world, agent).view
    assert "--unshare-net" in plan(world, child).view
    world.agents.update(child, policy="allow c_t network:default connect\n")
    assert "--unshare-net" not in plan(world, child).view


# the view


def test_a_root_agent_sees_the_configured_base_read_only(world: World, agent: Agent) -> None:
    found = plan(world, agent)
    for path in map(Path, world.config.base_view):
        if path.is_symlink():
            assert (os.readlink(path), str(path)) in binds(found, "--symlink")
        else:
            assert (str(path), str(path)) in binds(found, "--ro-bind-try")
    assert ("/", "/") not in binds(found, "--bind")
    shared = str(PLACES.shared)
    assert binds(found, "--bind") == [(shared, shared)]
    assert (str(PLACES.fuse), "/ctx") in binds(found, "--symlink")
    assert found.stage == b""


def test_a_child_sees_what_its_parent_sees(world: World, child: Agent) -> None:
    found = plan(world, child)
    assert binds(found, "--bind")[0] == ("/", "/")
    assert "--ro-bind-try" not in found.view
    assert found.stage == b""


def test_operators_mounts_are_staged_with_the_creators_rights(world: World, agent: Agent) -> None:
    world.agents.update(
        agent,
        root="/tree",
        workspace="explicit_root:/work",
        mount="/a /m/a ro\n- /hidden hide\n/b /m/b rw bind,nosuid,nodev,noexec\n",
    )
    found = plan(world, agent)
    assert found.steps[0].endswith("/stage")
    assert found.steps[1:5] == (FD["extra"], "-", "--", "setpriv")
    assert strings(found.stage) == [
        *("/run/c/stage", "1000", "1000", "9", "/var/lib/c:/run/c"),
        *("r", "/tree", "r", "/work", "r", "/a", "sdx", "/b"),
    ]
    stage = "/run/c/stage"
    assert (f"{stage}/0", "/") in binds(found, "--bind")
    assert (f"{stage}/1", "/work") in binds(found, "--bind")
    assert (f"{stage}/2", "/m/a") in binds(found, "--ro-bind")
    assert (f"{stage}/3", "/m/b") in binds(found, "--bind")
    for source in ("/tree", "/a", "/b"):
        assert source not in found.view


def test_a_childs_mounts_are_named_inside_its_parents_view(world: World, child: Agent) -> None:
    world.agents.update(child, mount="/a /m/a ro\n/b /m/b rw\n")
    found = plan(world, child)
    assert ("/a", "/m/a") in binds(found, "--ro-bind")
    assert ("/b", "/m/b") in binds(found, "--bind")
    assert found.stage == b""


def test_a_childs_noexec_is_for_its_keeper(world: World, child: Agent) -> None:
    table = "/a /a rw noexec\n/b /m rw noexec\n/c /m/c ro\n- /m/h hide\n/d /m/c/d rw noexec\n"
    world.agents.update(child, mount=table + "/e /e rw\n/f /f/f rw noexec\n/g /f rw\n")
    found = plan(world, child)
    # a later line takes the place of /f/f
    assert parts(found)[2] == ["x/a", "x/m", "k/m/c", "x/m/c/d"]
    added = [found.view[i + 1] for i, word in enumerate(found.view) if word == "--cap-add"]
    assert added == ["CAP_SYS_ADMIN", "CAP_SETPCAP"]
    assert spec(found)[2] == ["prog", "a b", "c"]


def test_without_noexec_a_keeper_has_no_capability(
    world: World, agent: Agent, child: Agent
) -> None:
    world.agents.update(agent, mount="/a /m rw noexec\n")
    world.agents.update(child, mount="/m /n rw\n")
    detached = world.agents.create(inside(agent), "d")
    world.agents.update(detached, life="detached", mount="/m /n rw noexec\n")
    for one in (agent, child, detached):
        found = plan(world, one)
        assert parts(found)[2] == []
        assert "--cap-add" not in found.view
    assert strings(plan(world, detached).stage)[-2:] == ["rx", "/m"]


def test_mounts_apply_in_order(world: World, agent: Agent) -> None:
    world.agents.update(agent, mount="/a /m rw\n- /m/x hide\n/b /m/x/y ro\n")
    view = plan(world, agent, **{"m/x": "directory"}).view
    positions = [view.index(target) for target in ("/m", "/m/x", "/m/x/y")]
    assert positions == sorted(positions)


def test_a_hidden_file_is_nothing(world: World, agent: Agent) -> None:
    world.agents.update(agent, mount="- /h hide\n")
    assert ("/dev/null", "/h") in binds(plan(world, agent, h="file"), "--ro-bind")


def test_what_is_not_there_is_not_hidden(world: World, agent: Agent) -> None:
    world.agents.update(agent, mount="- /h hide\n")
    assert "/h" not in plan(world, agent, h="none").view


def test_what_to_hide_is_looked_for_where_an_earlier_line_takes_it_from(
    world: World, agent: Agent
) -> None:
    table = "/src /p ro\n- /p/secret hide\n- /etc/x hide\n/other /p/sub rw\n- /p/sub/y hide\n"
    world.agents.update(agent, mount=table)
    assert cell.hidden_paths(world.agents, agent) == [
        ("/p/secret", "/src/secret", True),
        ("/etc/x", "/etc/x", False),
        ("/p/sub/y", "/other/y", True),
    ]


def test_a_hidden_directory_is_empty_and_closed(world: World, agent: Agent) -> None:
    world.agents.update(agent, mount="- /h hide\n")
    view = plan(world, agent, h="directory").view
    assert view[-6:] == ("--perms", "0000", "--tmpfs", "/h", "--remount-ro", "/h")


def test_what_a_parent_had_below_the_fresh_directories_is_given_on(
    world: World, agent: Agent, child: Agent
) -> None:
    mount = f"/a /tmp/a rw\n/b {HOME}/b ro\n/c /else rw\n- /tmp/h hide\n"
    world.agents.update(agent, mount=mount, workspace="explicit_root:/tmp/w")
    given = binds(plan(world, child), "--bind-try")
    assert given == [(p, p) for p in ("/tmp/a", f"{HOME}/b", "/tmp/w")]


def test_a_shared_agent_sees_the_host_but_not_the_daemon(world: World, agent: Agent) -> None:
    world.agents.update(agent, iso="shared")
    found = plan(world, agent)
    assert binds(found, "--bind")[0] == ("/", "/")
    assert ("/sys/fs/cgroup", "/sys/fs/cgroup") in binds(found, "--ro-bind-try")
    for hidden in ("/var/lib/c", "/run/c"):
        assert ("--tmpfs", hidden) in list(pairwise(found.view))


def test_a_shared_agent_with_a_root_does_not_see_the_daemon_either(
    world: World, agent: Agent
) -> None:
    world.agents.update(agent, iso="shared", root="/tree")
    view = plan(world, agent).view
    for hidden in ("/var/lib/c", "/run/c"):
        assert ("--tmpfs", hidden) in list(pairwise(view))
    assert ("--bind", "/run/c/stage/0") in list(pairwise(view))


# a worktree


def give_worktree(world: World, child: Agent, root: str) -> Worktree:
    worktree = Worktree(name=child.name, root=root, common=f"{root}/.git", base="0" * 40)
    world.agents.update(world.live(child), workspace="worktree", worktree=worktree.dump())
    return worktree


def test_a_worktree_is_the_workspace_in_force(world: World, agent: Agent, child: Agent) -> None:
    world.agents.update(agent, workspace="explicit_root:/w")
    world.agents.update(child, workspace="worktree")
    heir = world.agents.create(inside(world.may_create(world.live(child))), "heir")
    for one in (child, heir):
        assert cell.workspace(world.agents, one) == "/workspace"
        assert cell.working_directory(world.agents, one) == "/workspace"
    assert cell.workspace(world.agents, agent) == "/w"
    world.agents.update(heir, workspace="explicit_root:/w/sub")
    assert cell.workspace(world.agents, heir) == "/w/sub"
    world.agents.update(heir, workspace="inherit", life="detached", profile="public_named")
    assert cell.workspace(world.agents, heir) is None


def test_a_worktree_is_mounted_before_the_childs_table(world: World, child: Agent) -> None:
    worktree = give_worktree(world, child, "/data/w")
    world.agents.update(child, mount="/workspace/a /m rw\n- /workspace/b hide\n")
    found = plan(world, child, **{"workspace/b": "directory"})
    mounted = [
        (found.view[i].removeprefix("--"), *found.view[i + 1 : i + 3])
        for i, word in enumerate(found.view)
        if word in ("--bind", "--ro-bind")
    ]
    lines = [
        ("ro-bind" if mount.mode == "ro" else "bind", mount.source, mount.target)
        for mount in worktree_mounts(worktree)
    ]
    start = mounted.index(lines[0])
    assert mounted[start:] == [*lines, ("bind", "/workspace/a", "/m")]
    assert found.view.index("--remount-ro") > len(found.view) - 10
    assert found.stage == b""
    assert spec(found)[0] == "/workspace"


def test_what_is_hidden_in_a_worktree_is_looked_for_where_that_is(
    world: World, child: Agent
) -> None:
    worktree = give_worktree(world, child, "/w")
    world.agents.update(child, mount="- /workspace/x hide\n- /w/.git/hooks hide\n")
    assert cell.hidden_paths(world.agents, child) == [
        ("/workspace/x", f"{worktree.path}/x", True),
        ("/w/.git/hooks", "/w/.git/hooks", True),
    ]


def test_without_its_worktree_there_is_no_plan(world: World, child: Agent) -> None:
    world.agents.update(child, workspace="worktree")
    with pytest.raises(WrongStateError, match="has not been made"):
        plan(world, child)


def test_a_worktree_below_the_fresh_directories_is_given_on(
    world: World, agent: Agent, child: Agent
) -> None:
    world.agents.update(agent, workspace="explicit_root:/tmp/w")
    worktree = give_worktree(world, child, "/tmp/w")
    assert binds(plan(world, child), "--bind-try") == [("/tmp/w", "/tmp/w")]
    heir = world.agents.create(inside(world.may_create(child)), "heir")
    world.agents.update(heir, exec="true")
    given = [m.target for m in worktree_mounts(worktree) if m.target != "/workspace"]
    assert binds(plan(world, heir), "--bind-try") == [(p, p) for p in ("/tmp/w", *given)]


# handing it over


def test_what_is_handed_over_is_in_memory_and_readable_once(world: World, agent: Agent) -> None:
    world.agents.update(agent, mount="/a /m ro\n")
    prepared = plan(world, agent)
    with cell.passed_files(prepared, None) as fds:
        assert [os.readlink(f"/proc/self/fd/{fd}").split()[0] for fd in fds] == [
            "/memfd:spec",
            "/memfd:view",
            "/memfd:stage",
        ]
        assert [os.read(fd, 1 << 20) for fd in fds] == [
            prepared.spec,
            b"".join(word.encode() + b"\0" for word in prepared.view),
            prepared.stage,
        ]
    for fd in fds:
        with pytest.raises(OSError):
            os.fstat(fd)


def test_a_parents_cell_comes_last_and_stays_open(world: World, child: Agent) -> None:
    held = os.open("/dev/null", os.O_RDONLY)
    try:
        with cell.passed_files(plan(world, child), held) as fds:
            assert (len(fds), fds[-1]) == (3, held)
        os.fstat(held)
    finally:
        os.close(held)


def test_a_delegated_network_is_the_hosts(world: World, agent: Agent, child: Agent) -> None:
    """The parent has none to enter."""
    world.agents.update(agent, policy="delegate x_t network:default connect\n")
    world.agents.update(child, policy=f"allow {child.label} network:default connect\n")
    found = plan(world, child)
    assert found.steps[5] == "host"
    assert "--unshare-net" not in found.view


# a detached child


@pytest.fixture
def detached(world: World, child: Agent) -> Agent:
    world.agents.update(child, life="detached", profile="public_named")
    return child


def test_a_detached_childs_view_is_its_parents_but_not_inside_its_cell(
    world: World, detached: Agent
) -> None:
    world.agents.update(detached, mount="/inner /m ro\n")
    found = plan(world, detached)
    assert found.steps[0].endswith("/stage")
    assert found.steps[2] != "-", "the parent's cell is handed on"
    assert found.steps[4] == "setpriv", "and nothing enters it"
    assert strings(found.stage)[5:] == ["r", "/", "r", "/inner"]
    assert ("/run/c/stage/0", "/") in binds(found, "--bind")
    assert ("/run/c/stage/1", "/m") in binds(found, "--ro-bind")
    assert "/inner" not in found.view
    assert "--unshare-net" in found.view


def test_a_detached_childs_sources_are_opened_with_its_own_ids(
    world: World, detached: Agent
) -> None:
    world.agents.update(detached, creator_uid=0, creator_gid=0, creator_groups=(0,))
    ids = [str(detached.uid), str(detached.gid), ",".join(map(str, detached.groups))]
    assert strings(plan(world, detached).stage)[1:4] == ids


def test_what_the_parent_has_below_tmp_may_be_gone_when_a_detached_child_starts(
    world: World, detached: Agent, agent: Agent
) -> None:
    world.agents.update(agent, mount="/a /tmp/a ro\n")
    found = plan(world, detached)
    assert strings(found.stage)[5:] == ["r", "/", "rt", "/tmp/a"]
    assert ("/run/c/stage/1", "/tmp/a") in binds(found, "--bind-try")


def test_a_detached_child_inherits_no_workspace(
    world: World, detached: Agent, agent: Agent
) -> None:
    world.agents.update(agent, workspace="explicit_root:/work")
    assert spec(plan(world, detached))[0] == HOME
