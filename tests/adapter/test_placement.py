"""``placement``: what it takes of whom, what it does not go with, and what is said of nodes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.agents.nodes import Ways
from runtime.errors import DeniedError, MissingError
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.records.nodes import Node
from runtime.records.run import Cell
from tests.worlds.records import ROOT, inside
from tests.worlds.tree import CONTEXT, STRANGER, USER, Mounted, complete, mounted_in, refused

X = "agent/x.d"
ONLY_USER = {"1000": "somebody"}


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    with mounted_in(tmp_path) as mounted:
        nodes = {
            name: Node(ssh=name, users=users, max=9)
            for name, users in {
                "n2": ONLY_USER, "gpu1": ONLY_USER, "gpu2": ONLY_USER, "theirs": {"4242": "they"},
            }.items()
        }  # fmt: skip
        settings = mounted.agents.settings
        settings.config = replace(settings.config, nodes=nodes)
        yield mounted


def boss_of(mounted: Mounted, *rules: str) -> Agent:
    """One that runs, with these rules for nodes."""
    boss = mounted.world.may_create(mounted.world.live(mounted.make("boss", USER)))
    lines = "".join(f"allow {boss.label} {rule}\n" for rule in rules)
    mounted.agents.journal.update(boss, policy=f"allow {boss.label} agent:* create,detach\n{lines}")
    return boss


def say(mounted: Mounted, errno: str, file: str, text: str, flags: int = os.O_TRUNC) -> str:
    """The reason with which a write is refused."""
    with refused(errno):
        mounted.put(f"{X}/{file}", text, flags)
    return mounted.reason


def test_an_operator_places_a_root_agent_where_its_owner_may(mounted: Mounted) -> None:
    agent = mounted.make("x", USER)
    with mounted.as_(USER):
        assert mounted.get(f"{X}/placement") == mounted.get(f"{X}/node") == ""
        mounted.put(f"{X}/placement", "node=n2")
        assert mounted.get(f"{X}/placement") == "node=n2\n"
        mounted.put(f"{X}/placement", "node=gpu*\n")
        assert mounted.agents.nodes.candidates(agent) == ["gpu1", "gpu2"]
        mounted.put(f"{X}/placement", "")
        assert mounted.get(f"{X}/placement") == ""


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("engine=slurm\n", '"engine=slurm" is not node=NAME'),
        ("node=n3\n", '"node=n3": no such node'),
        ("node=theirs\n", '"node=theirs": no such node'),
        ("node=tpu*\n", '"node=tpu*": no node begins so'),
        ("node=-oX=y\n", '"-oX=y" is not a name'),
        ("node= n2\n", '" n2" is not a name'),
        ("node=n2\nnode=n2\n", 'line 2: "node=n2" is one line too many'),
        ("node=n2\nnode=gpu1\n", 'line 2: "node=gpu1" is one line too many'),
    ],
)
def test_bad_input_is_refused_with_the_nodes_that_there_are(
    mounted: Mounted, text: str, wrong: str
) -> None:
    mounted.make("x", USER)
    with mounted.as_(USER):
        mounted.put(f"{X}/placement", "node=n2\n")
        reason = say(mounted, "EINVAL", "placement", text)
        assert wrong in reason
        assert reason.endswith("; you may use gpu1, gpu2, n2\n")
        assert mounted.get(f"{X}/placement") == "node=n2\n"


def test_a_second_line_is_refused_when_it_is_written(mounted: Mounted) -> None:
    mounted.make("x", USER)
    with mounted.as_(USER):
        fh = mounted.open(f"{X}/placement", os.O_WRONLY | os.O_TRUNC)
        mounted.write(fh, b"node=n2\n")
        with refused("EINVAL"):
            mounted.write(fh, b"node=gpu1\n", len("node=n2\n"))
        complete(mounted.ops.release, fh)


def test_who_writes_it_and_when(mounted: Mounted) -> None:
    agent = mounted.make("x", USER)
    with mounted.as_(STRANGER):
        assert "may not see" in say(mounted, "EACCES", "placement", "node=theirs\n")
    mounted.world.live(agent)
    with mounted.as_(USER):
        assert "written while new" in say(mounted, "EBUSY", "placement", "node=n2\n")


def test_an_agent_needs_a_line_for_each_node(mounted: Mounted) -> None:
    boss = boss_of(mounted, "node:gpu1 place")
    child = mounted.make("x", inside(boss))
    with mounted.as_(inside(boss)):
        reason = say(mounted, "EACCES", "placement", "node=n2\n")
        assert 'node:n2 place is not in the effective policy of "boss"' in reason
        assert '"allow boss_t node:n2 place"' in reason
        assert "you may use gpu1\n" in say(mounted, "EINVAL", "placement", "node=n3\n")
        mounted.put(f"{X}/placement", "node=g*\n")
        assert mounted.agents.nodes.candidates(child) == ["gpu1"]
        assert "node:n*" in say(mounted, "EACCES", "placement", "node=n*\n")
    # what it has lost is asked for again at the start
    mounted.agents.journal.update(boss, policy=f"allow {boss.label} agent:* create\n")
    with pytest.raises(DeniedError, match="node:g\\* place is not in"):
        mounted.agents.nodes.candidates(child)


def test_no_policy_bounds_what_an_operator_writes(mounted: Mounted) -> None:
    child = mounted.make("x", inside(boss_of(mounted, "node:gpu1 place")))
    with mounted.as_(ROOT):
        mounted.put(f"{X}/placement", "node=*\n")
    assert mounted.agents.nodes.candidates(child) == ["gpu1", "gpu2", "n2"]
    settings = mounted.agents.settings
    settings.config = replace(settings.config, nodes={})
    with pytest.raises(MissingError, match="no such node is configured; there is no node that"):
        mounted.agents.nodes.candidates(child)


#: of a root agent: a file, a value that a placed one cannot have, the errno, and why
FORBIDDEN = [
    ("tty", "80x24", "ENOTSUP", "terminal"),
    ("restart", "always", "ENOTSUP", "not started again"),
    ("root", "/srv", "EINVAL", "base view of the node"),
    ("iso", "shared", "EINVAL", "tree of another machine"),
    ("uid", "1234", "EINVAL", "ids that its owner has at the node"),
    ("gid", "1234", "EINVAL", "ids that its owner has at the node"),
    ("groups", "1234", "EINVAL", "ids that its owner has at the node"),
    ("workspace", "explicit_root:/srv", "ENOTSUP", "no path of the node"),
    ("mount", "/srv /srv ro", "ENOTSUP", '"/srv" is a path of this machine'),
    ("mount", "home: /files rw", "EINVAL", "own tree on this machine"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "value", "errno", "why"), FORBIDDEN)
def test_what_does_not_go_with_it_is_refused_whichever_is_second(
    mounted: Mounted, file: str, value: str, errno: str, why: str
) -> None:
    mounted.make("x", USER)
    before = mounted.get(f"{X}/{file}")
    mounted.put(f"{X}/placement", "node=n2\n")
    reason = say(mounted, errno, file, value + "\n")
    assert f"{file} " in reason
    assert f"and placement node=n2 exclude each other: {why}" in reason or why in reason
    assert "placement node=n2" in reason
    assert mounted.get(f"{X}/{file}") == before
    mounted.put(f"{X}/placement", "")
    mounted.put(f"{X}/{file}", value + "\n")
    reason = say(mounted, errno, "placement", "node=n2\n")
    assert f"{file} " in reason
    assert why in reason
    assert mounted.get(f"{X}/placement") == ""


def test_a_child_at_a_node_lives_no_longer_than_its_parent(mounted: Mounted) -> None:
    boss = boss_of(mounted, "node:n2 place")
    mounted.make("x", inside(boss))
    for file, value in (("life", "detached"), ("profile", "public_named")):
        mounted.put(f"{X}/placement", "node=n2\n")
        assert "life detached and placement" in say(mounted, "ENOTSUP", file, f"{value}\n")
        mounted.put(f"{X}/placement", "")
        mounted.put(f"{X}/{file}", f"{value}\n")
        assert "life detached" in say(mounted, "ENOTSUP", "placement", "node=n2\n")
        mounted.put(f"{X}/life", "temp\n")
    mounted.put(f"{X}/placement", "node=n2\n")


def test_a_directory_of_the_node_can_be_mounted_there_alone(mounted: Mounted) -> None:
    mounted.make("x", USER)
    line = "node:recipes/claude\t/recipe\tro\t-\n"
    reason = say(mounted, "EINVAL", "mount", line)
    assert '"node:recipes/claude" is a directory of a node, and placement is empty' in reason
    mounted.put(f"{X}/placement", "node=n2\n")
    mounted.put(f"{X}/mount", line + "- /usr/share hide\n")
    assert mounted.get(f"{X}/mount.effective").startswith(line)
    assert "is read-only; use ro" in say(mounted, "EINVAL", "mount", "node:recipes /r rw\n")
    assert "is not a name" in say(mounted, "EINVAL", "mount", "node:../etc /r ro\n")
    assert '"/../etc"' in say(mounted, "EINVAL", "mount", "node:recipes/../etc /r ro\n")
    assert "mount: " in say(mounted, "EINVAL", "placement", "")
    mounted.put(f"{X}/mount", "")
    mounted.put(f"{X}/placement", "")


def test_a_space_of_the_node_need_not_be_here(mounted: Mounted) -> None:
    mounted.make("x", USER)
    mounted.put(f"{X}/policy", "allow x_t shared:there read\n")
    with refused("ENOENT"):
        mounted.put(f"{X}/mount", "shared:there /there ro\n")
    mounted.put(f"{X}/placement", "node=n2\n")
    mounted.put(f"{X}/mount", "shared:there /there ro\n")
    with refused("EACCES"):
        mounted.put(f"{X}/mount", "shared:there /there rw\n")


def test_who_runs_at_a_node_gets_no_child_here(mounted: Mounted) -> None:
    parent = mounted.world.live(mounted.make("p", USER))
    mounted.agents.journal.update(parent, placement="node=n2\n", node="n2", peer="n1")
    mounted.make("x", USER)
    reason = say(mounted, "ENOTSUP", "parent", "agent:p\n")
    assert '"p" runs at the node n2, and has children there alone' in reason


def test_who_was_placed_here_places_nobody(mounted: Mounted) -> None:
    boss = boss_of(mounted, "node:n2 place")
    mounted.make("x", inside(boss))
    mounted.agents.journal.update(boss, peer="l123", guest={"alias": "one"})
    reason = say(mounted, "ENOTSUP", "placement", "node=n2\n")
    assert 'one has placed "boss" here: what that makes runs here, too' in reason


def test_a_reset_keeps_it(mounted: Mounted) -> None:
    agent = mounted.make("x", USER)
    mounted.put(f"{X}/placement", "node=gpu*\n")
    mounted.agents.journal.update(agent, node="gpu1", peer="n1", status=Status.DEAD, outcome="done")
    new = mounted.agents.births.renew(agent)
    assert (new.placement, new.placed_freely) == ("node=gpu*\n", True)
    assert (new.node, new.peer, new.heard) == ("", "", {})


class Up(Ways):
    """A link to n2 of the owner 1000."""

    def heard(self, node: str, owner: int) -> Mapping[str, Any]:
        if (node, owner) != ("n2", 1000):
            return {}
        return {
            "state": "up", "since": 60.0, "seen": 90.5, "version": "0.3", "networks": ["model"],
        }  # fmt: skip

    def of_agent(self, agent: Agent) -> Mapping[str, Any]:
        return {"lease": 21, "pending": "pause", "fetch": 4096}


def lines(mounted: Mounted) -> list[dict[str, Any]]:
    return [json.loads(line) for line in mounted.get("nodes").splitlines()]


def test_node_says_what_was_heard_of_it(mounted: Mounted) -> None:
    mounted.agents.nodes.ways = Up()
    agent = mounted.make("x", USER)
    mounted.put(f"{X}/placement", "node=n2\n")
    assert mounted.get(f"{X}/node") == ""
    mounted.agents.journal.update(agent, node="n2", peer="n1")
    assert mounted.get(f"{X}/node") == (
        "name=n2\nlink=up\nseen=1970-01-01T00:01:30.500Z\nlease=21\npending=pause\nfetch=4096\n"
    )
    mounted.agents.nodes.ways = Ways()
    assert mounted.get(f"{X}/node") == "name=n2\nlink=down\nseen=\nlease=0\npending=\nfetch=0\n"
    listed = [json.loads(line) for line in mounted.get("agents").splitlines()]
    assert [line["node"] for line in listed] == ["n2"]


def test_nodes_are_those_that_the_reader_may_use(mounted: Mounted) -> None:
    mounted.agents.nodes.ways = Up()
    boss = boss_of(mounted, "node:gpu* place")
    mounted.agents.journal.update(boss, node="n2", peer="n1")
    with mounted.as_(USER):
        found = lines(mounted)
        assert [(line["name"], line["owner"]) for line in found] == [
            ("gpu1", 1000), ("gpu2", 1000), ("n2", 1000),
        ]  # fmt: skip
        assert found[2] == {
            "name": "n2", "owner": 1000, "state": "up", "since": "1970-01-01T00:01:00.000Z",
            "seen": "1970-01-01T00:01:30.500Z", "agents": 1, "max": 9, "directories": [],
            "networks": ["model"], "shared": [], "version": "0.3", "error": "",
        }  # fmt: skip
        assert (found[0]["state"], found[0]["seen"], found[0]["agents"]) == ("idle", "", 0)
    with mounted.as_(STRANGER):
        assert [line["name"] for line in lines(mounted)] == ["theirs"]
    with mounted.as_(inside(boss)):
        assert [line["name"] for line in lines(mounted)] == ["gpu1", "gpu2"]
    with mounted.as_(ROOT):
        assert [line["name"] for line in lines(mounted)] == ["gpu1", "gpu2", "n2", "theirs"]
    assert mounted.stat("nodes").st_size == 0


def test_who_polls_nodes_is_told(mounted: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(mounted.base.cache.poller, "changed_again", told.append)
    nodes = mounted.inode("nodes")
    agent = mounted.make("x", USER)
    mounted.agents.nodes.changed()
    assert told.count(nodes) == 1
    mounted.agents.journal.update(agent, node="n2", peer="n1")
    mounted.agents.journal.update(agent, model="x")
    assert told.count(nodes) == 2


def away(mounted: Mounted, name: str = "x") -> Agent:
    """An agent that runs at n2."""
    agent = mounted.world.live(mounted.make(name, USER))
    mounted.agents.journal.update(agent, placement="node=n2\n", node="n2", peer="n1")
    return agent


@pytest.mark.parametrize("plane", ["task", "work", "waiting", "ask", "child"])
def test_the_planes_of_who_runs_at_a_node_are_there(mounted: Mounted, plane: str) -> None:
    away(mounted)
    assert [name for name in mounted.list(f"{X}/{plane}") if name != "current"] == []
    if plane == "child":
        return
    caller = inside(mounted.agent("x")) if plane == "ask" else USER
    with mounted.as_(caller):
        with refused("ENOTSUP"):
            directory = mounted.inode(f"{X}/{plane}")
            complete(mounted.ops.mkdir, directory, b"one", 0o755, CONTEXT)
        assert '"x" runs at the node n2' in mounted.reason
        assert mounted.reason.endswith("use its directory in /ctx/agent of that machine\n")


def test_of_its_processes_nothing_is_here(mounted: Mounted) -> None:
    agent = away(mounted)
    mounted.agents.journal.update(agent, cell=Cell(cgroup="agent-x"), usage={"cpu_usec": 7})
    assert mounted.get(f"{X}/pid") == mounted.get(f"{X}/cgroup") == ""
    assert "cpu_usec=7\n" in mounted.get(f"{X}/usage")
    with refused("ENOTSUP"):
        mounted.get(f"{X}/processes")
    assert "its processes are there alone" in mounted.reason


def test_a_node_judges_limits_itself(mounted: Mounted) -> None:
    mounted.make("x", USER)
    assert "nothing counts" in say(mounted, "ENOTSUP", "limits", "tokens.max=5\n")
    mounted.put(f"{X}/placement", "node=n2\n")
    mounted.put(f"{X}/limits", "tokens.max=5\n")
    assert "nothing counts" in say(mounted, "ENOTSUP", "placement", "")
    mounted.put(f"{X}/limits", "tokens.max=max\n")
    mounted.put(f"{X}/placement", "")


def test_the_view_of_its_parent_is_of_another_machine(mounted: Mounted) -> None:
    boss = boss_of(mounted, "node:n2 place")
    mounted.agents.journal.update(boss, mount="/srv /srv rw\n")
    mounted.make("x", inside(boss))
    assert mounted.get(f"{X}/mount.effective") == "/srv\t/srv\trw\t-\n"
    with mounted.as_(inside(boss)):
        mounted.put(f"{X}/placement", "node=n2\n")
        mounted.put(f"{X}/mount", "node:recipes /r ro\n")
    assert mounted.get(f"{X}/mount.effective") == "node:recipes\t/r\tro\t-\n"
