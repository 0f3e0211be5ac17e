"""The files of the tools: who finds which, and what they say."""

from __future__ import annotations

import json
import os
import stat

import pytest
from jsonschema import Draft202012Validator

from ctxfs.tools.registry import TOOLS
from runtime.caller import Caller
from runtime.records.model import Agent
from tests.worlds.records import ROOT, inside
from tests.worlds.tree import CONTEXT, STRANGER, USER, Mounted, complete, refused

NAMES = [tool.name for tool in TOOLS]
UNKNOWN = Caller(0, 0, 7, known=False)


@pytest.fixture
def agent(mounted: Mounted) -> Agent:
    return mounted.world.live(mounted.make("coder", USER))


def listed(mounted: Mounted, caller: Caller) -> list[str]:
    with mounted.as_(caller):
        return mounted.list("tool")


def test_each_tool_has_a_program_and_a_directory(mounted: Mounted, agent: Agent) -> None:
    wanted = sorted(name + suffix for name in NAMES for suffix in ("", ".d"))
    for caller in (ROOT, USER, STRANGER, inside(agent)):
        assert sorted(listed(mounted, caller)) == wanted


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_a_tool_tells_what_it_is(mounted: Mounted, agent: Agent, tool: object) -> None:
    found = next(each for each in TOOLS if each is tool)
    directory = f"tool/{found.name}.d"
    with mounted.as_(inside(agent)):
        assert mounted.get(f"{directory}/description") == found.described + "\n"
        assert mounted.get(f"{directory}/family") == found.family + "\n"
        own = found.schema_for(mounted.base, inside(agent))
        for name, schema in (("schema", own), ("output_schema", found.output_schema)):
            text = mounted.get(f"{directory}/{name}")
            assert text.count("\n") == 1
            assert json.loads(text) == schema
            Draft202012Validator.check_schema(json.loads(text))
        for name in mounted.list(directory):
            size = mounted.stat(f"{directory}/{name}").st_size
            shown = len(mounted.get(f"{directory}/{name}").encode())
            assert size == (0 if name == "schema" else shown)


def test_the_program_is_the_client(mounted: Mounted) -> None:
    found = mounted.stat("tool/AgentGet")
    assert stat.S_ISREG(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o555
    assert found.st_size == len(mounted.base.client_program)
    assert mounted.get("tool/AgentGet").encode() == mounted.base.client_program


def test_what_policy_does_not_allow_is_not_there(mounted: Mounted, agent: Agent) -> None:
    mounted.agents.journal.update(agent, policy="allow coder_t tool:Work* execute\n")
    names = [name for name in NAMES if name.startswith("Work")]
    assert listed(mounted, inside(agent)) == [n + s for n in names for s in ("", ".d")]
    with mounted.as_(inside(agent)):
        for name in ("AgentGet", "AgentGet.d"):
            with refused("ENOENT"):
                mounted.inode(f"tool/{name}")
        assert mounted.get("tool/WorkList.d/family") == "core\n"
    assert len(listed(mounted, USER)) == 2 * len(NAMES)
    mounted.agents.journal.update(agent, policy="")
    assert listed(mounted, inside(agent)) == []


def test_what_no_family_has_is_not_there(mounted: Mounted, agent: Agent) -> None:
    with mounted.as_(USER):
        child = mounted.make("rev", inside(mounted.world.may_create(agent)))
    mounted.world.live(child)
    assert set(listed(mounted, inside(child))) == {
        name + suffix for name in NAMES if name != "SpawnAgent" for suffix in ("", ".d")
    }
    mounted.agents.journal.update(child, policy=child.policy + "allow rev_t agent:rev-* create\n")
    assert "SpawnAgent" in listed(mounted, inside(child))


def test_names_are_looked_up_per_caller(mounted: Mounted, agent: Agent) -> None:
    directory = mounted.inode("tool")
    for name in (b"AgentGet", b"AgentGet.d"):
        assert complete(mounted.ops.lookup, directory, name, CONTEXT).entry_timeout == 0
    inner = complete(mounted.ops.lookup, mounted.inode("tool/AgentGet.d"), b"schema", CONTEXT)
    assert inner.entry_timeout > 0


def test_inodes_stay_and_are_found_again(mounted: Mounted) -> None:
    inodes = {mounted.inode(f"tool/{name}{end}") for name in NAMES for end in ("", ".d")}
    assert len(inodes) == 2 * len(NAMES)
    assert all(mounted.fs.node(inode).inode == inode for inode in inodes)
    assert mounted.fs.node(mounted.inode("tool/TaskList")).path == "tool/TaskList"
    assert mounted.fs.node(mounted.inode("tool/TaskList.d")).path == "tool/TaskList.d"
    assert mounted.fs.node(mounted.inode("tool/TaskList.d/schema")).path == "tool/TaskList.d/schema"


def test_nobody_has_none(mounted: Mounted) -> None:
    with mounted.as_(UNKNOWN):
        with refused("EACCES"):
            mounted.list("tool")
        with refused("ENOENT"):
            mounted.inode("tool/AgentGet")


@pytest.mark.parametrize("name", ["agentget", "AgentGet.d.d", ".d", "AgentGet.sock", "Tool"])
def test_other_names_are_not_there(mounted: Mounted, name: str) -> None:
    with refused("ENOENT"):
        mounted.inode(f"tool/{name}")


def test_tools_are_not_made_written_or_removed(mounted: Mounted) -> None:
    directory = mounted.inode("tool")
    with refused("EPERM"):
        complete(mounted.ops.mkdir, directory, b"Mine.d", 0o755, CONTEXT)
    with refused("EPERM"):
        complete(mounted.ops.rmdir, directory, b"AgentGet.d", CONTEXT)
    with refused("EPERM"):
        complete(mounted.ops.unlink, directory, b"AgentGet", CONTEXT)
    for name in ("tool/AgentGet", "tool/AgentGet.d/schema"):
        with refused("EPERM"):
            mounted.open(name, os.O_WRONLY)
