"""Who may do what with an agent that another machine's daemon has placed here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from ctxfs.tools import registry
from runtime.caller import Caller
from runtime.errors import MissingError, UnsupportedError
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from tests.worlds.leads import Leader, Site, put
from tests.worlds.memory import Machine
from tests.worlds.records import ROOT, World, inside
from tests.worlds.tree import CONTEXT, STRANGER, USER, Mounted, complete, refused

MAKES = "allow x_t agent:* create,detach\nallow x_t tool:* execute\n"


@pytest.fixture
def site(world: World) -> Iterator[Site]:
    made = Site(world, Machine())

    async def place() -> None:
        lead = Leader(USER.uid)
        lead.connect(made)
        await lead.say("put", **put(config={"policy": MAKES}, bound={"policy": MAKES}))
        assert lead.refusals == []

    trio.run(place)
    yield made
    made.mounted.unmount()


def _lives(site: Site) -> Agent:
    return site.mounted.live(site.guest(), run="r3")


@pytest.mark.parametrize("caller", [ROOT, USER])
@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("policy", "\n"),
        ("exec", "id\n"),
        ("env", "A=b\n"),
        ("limits", "pids.max=max\n"),
        ("label", "other\n"),
        ("mount", "/etc /x ro\n"),
        ("meta.json", "{}\n"),
        ("mode", "turn\n"),
        ("restart", "always\n"),
        ("life", "detached\n"),
        ("parent", "operator\n"),
        ("handoff.md", "something else"),
        ("input.jsonl", "{}\n"),
        ("inbox", "hello"),
        ("report", "hello"),
        ("ctl", "start\n"),
        ("ctl", "reset\n"),
        ("ctl", "session other\n"),
    ],
)
def test_nobody_but_its_lead_says_what_it_is(
    site: Site, caller: Caller, file: str, text: str
) -> None:
    mounted, before = site.mounted, site.guest().dump()
    with mounted.as_(caller):
        with refused("EACCES" if file == "report" else "EPERM"):
            mounted.put(f"agent/x@one.d/{file}", text)
        if file != "report":
            assert "at one, which has placed" in mounted.reason
    assert site.guest().dump() == before


def test_operators_stop_pause_and_answer_and_do_not_remove(site: Site) -> None:
    mounted, agent = site.mounted, _lives(site)
    with mounted.as_(USER):
        for verb, status in (("pause", Status.PAUSED), ("resume", Status.BUSY)):
            mounted.put("agent/x@one.d/ctl", f"{verb}\n")
            assert agent.status is status
        for what in ("abort\n", "reset\n"):
            with refused("EPERM"):
                mounted.put("agent/x@one.d/ctl", what)
        with refused("EPERM"):
            _mkdir(mounted, "agent/x@one.d/task", "t")
        mounted.put("agent/x@one.d/ctl", "kill\n")
        assert agent.status is Status.STOPPING


def test_it_is_removed_when_it_is_old(site: Site) -> None:
    mounted, agent = site.mounted, site.guest()
    with mounted.as_(USER):
        mounted.put("agent/x@one.d/ctl", "stop\n")
        assert mounted.agent("x@one").status is Status.DEAD
        with refused("EPERM"):
            _rmdir(mounted, "agent", "x@one.d")
        assert "7 days" in mounted.reason
        site.agents.journal.update(agent, ended=agent.ended - 8 * 86400)
        _rmdir(mounted, "agent", "x@one.d")
    assert site.agents.registry.named("x@one") is None


def test_strangers_do_not_see_it(site: Site) -> None:
    mounted = site.mounted
    with mounted.as_(STRANGER):
        assert mounted.list("agent") == []
        with refused("ENOENT"):
            mounted.get("agent/x@one.d/status")


def test_nobody_makes_such_a_name(site: Site) -> None:
    for name in ("x@two", "@", "x@"):
        with refused("EINVAL"):
            site.mounted.make(name)


def test_it_has_its_own_and_no_more(site: Site) -> None:
    mounted, agent = site.mounted, _lives(site)
    with mounted.as_(inside(agent)):
        assert mounted.get("agent/x@one.d/supervisor") == "agent:boss@one\n"
        mounted.put("agent/x@one.d/result.md", "done")
        _mkdir(mounted, "agent/x@one.d/task", "t")
        _mkdir(mounted, "agent/x@one.d/work", "w")
        mounted.put("agent/x@one.d/report", "half")
        child = mounted.make("child", inside(agent))
        with refused("ENOTSUP"):
            mounted.put("agent/child.d/life", "detached\n")
        with refused("EACCES"):
            mounted.put("agent/x@one.d/policy", MAKES)
        mounted.put("agent/child.d/exec", "id\n")
    assert (child.owner, child.parent) == (USER.uid, agent.index)
    kept = site.post.stream(agent.peer).kept
    assert b'"op":"report"' in kept[-1].line.replace(b" ", b"")


def test_messages_to_its_supervisor_are_reports(site: Site) -> None:
    agent, base = _lives(site), site.mounted.base

    def call(tool: str, **given: Any) -> dict[str, Any]:
        root, caller = site.mounted.fs.root, inside(agent)
        return trio.run(registry.call, base, root, caller, tool, given, None)

    sent = call("SendMessage", agent_id="boss@one", text="hello", id="a")
    assert (sent["message_id"], sent["status"]) == ("a", "queued")
    assert call("SendMessage", agent_id="boss@one", text="hello", id="a") == sent
    assert call("Report", text="more")["to"] == "agent:boss@one"
    facts = [json.loads(each.line) for each in site.post.stream(agent.peer).kept]
    assert [each["text"] for each in facts if each["op"] == "report"] == ["hello", "more"]
    with pytest.raises(MissingError):
        call("SendMessage", agent_id="boss", text="hello")
    with pytest.raises(UnsupportedError):
        call("SendMessage", agent_id="boss@one", text="hello", wait=True)


def _mkdir(mounted: Mounted, path: str, name: str) -> None:
    complete(mounted.ops.mkdir, mounted.inode(path), name.encode(), 0o755, CONTEXT)


def _rmdir(mounted: Mounted, path: str, name: str) -> None:
    complete(mounted.ops.rmdir, mounted.inode(path), name.encode(), CONTEXT)


def test_callers_are_known_by_their_cgroup(site: Site) -> None:
    agent = _lives(site)
    found: Any = site.agents.registry.by_cgroup("user-1000/agent-x@one/run")
    assert found is agent
    path: Path = site.agents.sessions.directory(site.agents.sessions.load(agent.session))
    assert path.parent.name == "x@one"
