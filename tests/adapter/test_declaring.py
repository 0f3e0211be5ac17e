"""Agents that files declare: made, started, changed and kept."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from ctxfs.declaring import Declaring
from runtime.ids import BootId, RunId
from runtime.kernel.linux import boot_id
from runtime.kernel.privilege import Privilege
from runtime.records.change import Change
from runtime.records.lifecycle import Cue, Status
from runtime.records.model import Agent, Outcome
from runtime.records.nodes import Node
from runtime.records.run import NOWHERE, Cell
from tests.worlds.records import World, operator, world_in
from tests.worlds.tree import Mounted

ALICE = "daemon"  # uid 1 everywhere


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "agents.d"
    made.mkdir(mode=0o755)
    return made


class Described:
    """A directory of declarations, and what is made of it."""

    def __init__(self, mounted: Mounted, directory: Path) -> None:
        self.mounted = mounted
        self.directory = directory
        self.declaring = Declaring(mounted.fs, directory)

    def say(self, name: str, text: str) -> None:
        path = self.directory / f"{name}.yaml"
        path.write_text(text)
        path.chmod(0o644)

    def read(self, *, booting: bool = False) -> None:
        trio.run(lambda: self.declaring.read(booting=booting))

    def go_on(self) -> None:
        trio.run(self.declaring.go_on)

    def agent(self, name: str) -> Agent:
        return self.mounted.agent(name)

    def is_there(self, name: str) -> bool:
        return self.mounted.agents.registry.named(name) is not None

    def get(self, path: str) -> str:
        return self.mounted.get(f"agent/{path}")

    def run(self, name: str) -> None:
        """As if its program had begun."""
        agent = self.agent(name)
        if agent.status is Status.NEW:
            self.mounted.put(f"agent/{name}.d/ctl", "start\n")
        self.mounted.world.live(agent)

    def end(self, name: str, reason: str = "why") -> None:
        agent, change = self.agent(name), Change()
        cue = Cue.STOP if agent.status is Status.NEW else Cue.LOST
        self.mounted.agents.ends.record(change, agent, cue, Outcome.CANCELLED, reason)
        self.mounted.agents.journal.note(change)


@pytest.fixture
def described(mounted: Mounted, directory: Path) -> Described:
    return Described(mounted, directory)


WHOLE = """\
exec: sh -c 'sleep 1000'
mode: turn
label: tagged
policy:
  - allow tagged agent:rev-* create,start
  - allow tagged model:opus use
mount:
  - /srv/data /data ro
limits:
  memory.max: 1M
  pids.max: 50
  net.api.max: 1K
env:
  PORT: 8080
  NAME: a b
path: [/opt/a, /opt/b]
cwd: /data
model: opus
homedir: durable
author: Ann Lee <ann@example.org>
restart: on-failure
uid: 1234
gid: 1235
groups: [7, 8]
meta.json: {a: [1, {b: null}]}
handoff.md: |
  Do it.
  All of it.
input.jsonl:
  - {path: /data/x}
"""


def test_every_file_is_written_as_an_operator_would(described: Described) -> None:
    described.say("coder", WHOLE)
    described.read()
    got = {
        file: described.get(f"coder.d/{file}")
        for file in ("exec", "mode", "label", "policy", "mount", "env", "path", "cwd", "model",
                     "homedir", "author", "restart", "uid", "gid", "groups", "meta.json",
                     "handoff.md", "input.jsonl", "owner", "status")
    }  # fmt: skip
    assert got == {
        "exec": "sh -c 'sleep 1000'\n", "mode": "turn\n", "label": "tagged\n",
        "policy": "allow tagged agent:rev-* create,start\nallow tagged model:opus use\n",
        "mount": "/srv/data /data ro\n", "env": "PORT=8080\nNAME=a b\n",
        "path": "/opt/a\n/opt/b\n", "cwd": "/data\n", "model": "opus\n", "homedir": "durable\n",
        "author": "Ann Lee <ann@example.org>\n",
        "restart": "on-failure\n", "uid": "1234\n", "gid": "1235\n", "groups": "7\n8\n",
        "meta.json": '{"a":[1,{"b":null}]}\n', "handoff.md": "Do it.\nAll of it.\n",
        "input.jsonl": '{"path":"/data/x"}\n', "owner": "0\n", "status": "new\n",
    }  # fmt: skip
    limits = described.get("coder.d/limits")
    assert "memory.max=1048576\npids.max=50\n" in limits and "net.api.max=1024\n" in limits


def test_the_owner_makes_it_with_the_ids_and_the_rights_that_it_has(described: Described) -> None:
    described.say("mine", f"owner: {ALICE}\nexec: 'true'\n")
    described.say("theirs", f"owner: {ALICE}\nexec: 'true'\niso: shared\nuid: 1234\n")
    described.read()
    mine = described.agent("mine")
    assert (mine.owner, mine.uid, mine.gid, mine.creator_uid, mine.maker) == (1, 1, 1, 1, 1)
    assert described.agent("theirs").uid == 1234, "the file is root's, who may say so"


def test_a_root_agent_may_be_at_a_node(
    described: Described, caplog: pytest.LogCaptureFixture
) -> None:
    settings = described.mounted.agents.settings
    nodes = {"n2": Node(ssh="n2", users={ALICE: "alice"})}
    settings.config = replace(settings.config, nodes=nodes)
    described.say(
        "far", f"mount: ['node:recipes /r ro']\nowner: {ALICE}\nexec: x\nplacement: {{node: n*}}\n"
    )
    described.say("both", f"restart: always\nowner: {ALICE}\nexec: x\nplacement: {{node: n2}}\n")
    described.read()
    agent = described.agent("far")
    assert (agent.placement, agent.placed_freely) == ("node=n*\n", True)
    assert not described.is_there("both")
    assert "restart: restart always and placement node=n2 exclude each other" in caplog.text


def test_a_name_of_another_users_stays_theirs(
    described: Described, caplog: pytest.LogCaptureFixture
) -> None:
    described.say("mine", "exec: 'true'\n")
    described.read()
    described.say("mine", f"owner: {ALICE}\nexec: 'true'\n")
    described.mounted.agents.removals.remove(described.agent("mine"))
    described.read()
    assert not described.is_there("mine")
    assert "belong to another user" in caplog.text


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("exec: 'true'\niso: private\n", "coder.yaml:2: iso: \"private\" is not one of sandbox"),
        ("exec: 'true'\nrestrat: always\n", "coder.yaml:2: restrat: unknown key; did you mean res"),
        ("exec: 'true'\n\ncontext: fork\n", "coder.yaml:3: context: fork: a root agent has no par"),
        ("policy:\n  - allow coder_t agent:* create\n  - allow coder_t model:x fly\n",
         "coder.yaml:3: policy[1]: unknown permission"),
        ("env: {CTX_X: 1}\n", 'coder.yaml:1: env.CTX_X: "CTX_X" is reserved'),
        ("mount:\n  - /proc/1 /x ro\n", "coder.yaml:2: mount[0]: \"/proc/1\": procfs, cgroupfs"),
        ("life: owned\n", 'coder.yaml:1: life: "owned": only a child'),
        ("exec: [\n", "coder.yaml:2: not YAML"),
        ("uid: 0\n", "coder.yaml:1: uid: 0: agents do not run as root"),
        ("owner: 4711\n", "coder.yaml:1: owner: uid 4711 is no user of this machine"),
        ("model: opus\npolicy: []\n", "coder.yaml:1: model: model:opus use is not in the agent's"),
        ("start: true\n", "coder.yaml:1: start: there is nothing to start: add exec"),
        ("parent: coder\n", "coder.yaml:1: parent: the agent would be its own ancestor"),
        ("placement: {node: n9}\n", 'coder.yaml:1: placement.node: "node=n9": no such node; there'),
        ("placement: {engine: x}\n", "coder.yaml:1: placement.engine: unknown key"),
        ("placement: {node: -oX=y}\n", 'coder.yaml:1: placement.node: "-oX=y" is not a name'),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_file_line_and_key_and_makes_nothing(
    described: Described, caplog: pytest.LogCaptureFixture, text: str, wrong: str
) -> None:
    described.say("good", "exec: 'true'\n")
    described.say("coder", text)
    described.read()
    assert f"{described.directory}/{wrong}" in caplog.text
    assert not described.is_there("coder")
    assert described.is_there("good")
    assert not described.mounted.agents.registry.named("coder")


def test_a_broken_file_leaves_what_it_said_before(
    described: Described, caplog: pytest.LogCaptureFixture
) -> None:
    described.say("coder", "exec: sleep 1\nstart: true\n")
    described.read(booting=True)
    before = described.agent("coder")
    described.run("coder")
    described.end("coder", "shutdown")
    described.say("coder", "exec: sleep 2\nmode: [\n")
    described.read(booting=True)
    assert "coder.yaml:3: not YAML" in caplog.text
    now = described.agent("coder")
    assert (now.exec, now.live, now is before) == ("sleep 1", True, False), "it started again"
    described.say("coder", "exec: sleep 2\nmodel: x\npolicy: []\n")
    described.end("coder")
    described.read()
    assert "coder.yaml:2: model: model:x use" in caplog.text
    assert "remains as it was" in caplog.text
    assert (described.agent("coder").exec, described.agent("coder").status) == ("sleep 1", "new")


def test_what_says_start_starts_when_it_is_made_and_at_each_boot(described: Described) -> None:
    described.say("up", "exec: sleep 1\nstart: true\n")
    described.say("down", "exec: sleep 1\n")
    described.read(booting=True)
    assert described.agent("up").live
    assert described.agent("down").status is Status.NEW
    for reason, starts in (("shutdown", True), ("operator_stop", False), ("exited", False)):
        described.run("up")
        described.mounted.agents.journal.update(described.agent("up"), cell=Cell(boot=boot_id()))
        described.end("up", reason)
        described.read()
        assert described.agent("up").status is Status.DEAD, "a reload starts nothing"
        described.read(booting=True)
        assert described.agent("up").live is starts, reason
        if not starts:  # in another boot of the machine it does
            earlier = Cell(boot=BootId("earlier"))
            described.mounted.agents.journal.update(described.agent("up"), cell=earlier)
            described.read(booting=True)
            assert described.agent("up").live


def test_what_goes_on_after_a_reboot_is_what_its_file_says(described: Described) -> None:
    for name, start in (("same", "true"), ("other", "true"), ("idle", "false")):
        described.say(name, f"exec: sleep 1\nstart: {start}\n")
    described.read(booting=True)
    described.run("idle")
    described.say("other", "exec: sleep 2\nstart: true\n")
    assert trio.run(described.declaring.started_at_boot) == {"same"}


def test_what_ended_with_ctxd_is_new_again_at_the_next_boot(described: Described) -> None:
    described.say("down", "exec: sleep 1\n")
    described.read(booting=True)
    described.end("down", "shutdown")
    described.read()
    assert described.agent("down").status is Status.DEAD
    described.read(booting=True)
    assert described.agent("down").status is Status.NEW
    described.run("down")
    described.end("down", "operator_stop")
    described.read(booting=True)
    assert described.agent("down").status is Status.DEAD


def test_one_that_runs_is_changed_when_it_has_ended(
    described: Described, caplog: pytest.LogCaptureFixture
) -> None:
    described.say("coder", "exec: sleep 1\nlimits: {pids.max: 5}\nstart: true\n")
    described.read()
    described.run("coder")
    described.say("coder", "exec: sleep 2\nstart: true\n")
    described.read()
    assert "coder runs: it is changed when it has ended" in caplog.text
    assert described.get("coder.d/exec") == "sleep 1\n"
    described.end("coder", "operator_stop")
    described.go_on()
    agent = described.agent("coder")
    assert (agent.exec, agent.limits, agent.status) == ("sleep 2", {}, Status.NEW)
    described.go_on()
    assert described.agent("coder") is agent, "once"


def test_a_change_back_before_it_ends_changes_nothing(described: Described) -> None:
    described.say("coder", "exec: sleep 1\n")
    described.read()
    described.run("coder")
    described.say("coder", "exec: sleep 2\n")
    described.read()
    described.say("coder", "exec: sleep 1\n")
    described.read()
    described.end("coder")
    described.go_on()
    assert described.agent("coder").status is Status.DEAD


def test_what_an_operator_changed_stays_until_the_file_changes(described: Described) -> None:
    described.say("coder", "exec: sleep 1\n")
    described.read()
    described.mounted.put("agent/coder.d/exec", "sleep 9\n")
    before = described.agent("coder")
    described.read()
    assert described.agent("coder") is before
    assert before.exec == "sleep 9"
    described.say("coder", "exec: sleep 1\nmode: turn\n")
    described.read()
    assert (described.agent("coder").exec, described.agent("coder").mode) == ("sleep 1", "turn")


def test_an_agent_that_no_file_made_is_left_alone(
    described: Described, caplog: pytest.LogCaptureFixture
) -> None:
    made = described.mounted.make("coder")
    described.say("coder", "exec: sleep 1\nstart: true\n")
    described.read(booting=True)
    assert "an agent coder exists that this file did not declare: it is left alone" in caplog.text
    assert described.agent("coder") is made
    assert (made.exec, made.status) == ("", Status.NEW)


def test_an_agent_whose_file_goes_stays_and_it_is_told(
    described: Described, caplog: pytest.LogCaptureFixture
) -> None:
    described.say("coder", "exec: sleep 1\nstart: true\n")
    described.read()
    described.run("coder")
    (described.directory / "coder.yaml").unlink()
    described.read(booting=True)
    assert "coder.yaml is gone: the agent coder stays until it is removed" in caplog.text
    assert described.agent("coder").live
    described.say("coder", "exec: sleep 2\n")
    described.read()
    described.end("coder")
    described.go_on()
    assert described.agent("coder").exec == "sleep 2", "it is that file's again"


def test_a_removed_one_is_made_again_at_the_next_reading(described: Described) -> None:
    described.say("coder", "exec: sleep 1\n")
    described.read()
    described.mounted.agents.removals.remove(described.agent("coder"))
    described.go_on()
    assert not described.is_there("coder")
    described.read()
    assert described.is_there("coder")


def test_paths_are_looked_at_anew_at_each_reading(described: Described) -> None:
    described.say("coder", "exec: sleep 1\nmount: [/srv/data /data ro]\n")
    described.read()
    agent = described.agent("coder")
    described.mounted.agents.journal.update(agent, sources={})
    described.read()
    assert described.agent("coder") is agent
    assert "mount" in agent.sources


PARENT = "exec: sleep 1\nmode: turn\npolicy: [allow lead_t agent:* create]\n"


def test_children_come_with_their_parent(
    described: Described, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    described.say("lead", PARENT)
    described.say("a-child", "parent: lead\nstart: true\nhandoff.md: Review.\nlife: owned\n")
    described.say("b-grandchild", "parent: a-child\nprofile: private_child\n")
    described.read(booting=True)
    assert not described.is_there("a-child")
    assert "a-child is made when its parent lead runs" in caplog.text
    described.run("lead")
    described.go_on()
    child = described.agent("a-child")
    lead = described.agent("lead")
    assert (child.parent, child.exec, child.live) == (lead.index, "sleep 1", True)
    assert described.get("a-child.d/handoff.md") == "Review."
    described.run("a-child")
    described.go_on()
    assert described.agent("b-grandchild").parent == child.index


def test_children_come_back_with_the_next_run_of_their_parent(described: Described) -> None:
    described.say("lead", PARENT + "start: true\n")
    described.say("child", "parent: lead\nstart: true\n")
    described.read(booting=True)
    described.run("lead")
    described.go_on()
    described.run("child")
    described.end("child", "parent_dead")
    described.end("lead", "shutdown")
    before = described.agent("child").incarnation
    described.read(booting=True)  # resets the parent, and with it goes the child
    assert described.agent("lead").live
    assert described.agent("child").incarnation != before
    described.run("lead")
    described.go_on()
    assert described.agent("child").live
    described.run("child")
    described.end("child", "parent_dead")
    journal, lead = described.mounted.agents.journal, described.agent("lead")
    journal.update(lead, status=Status.STARTING, cell=NOWHERE)  # it waits to be restarted
    described.go_on()
    assert described.agent("child").status is Status.DEAD
    journal.update(lead, status=Status.IDLE, cell=Cell(id=RunId("c2")))
    described.go_on()
    assert described.agent("child").live
    described.end("child", "operator_stop")
    journal.update(lead, status=Status.BUSY)
    described.go_on()
    assert described.agent("child").status is Status.DEAD, "somebody stopped it"


def test_a_child_is_no_more_than_its_parent(
    described: Described, caplog: pytest.LogCaptureFixture
) -> None:
    described.say("lead", f"owner: {ALICE}\nexec: sleep 1\nstart: true\npolicy: []\n")
    described.say("more", "parent: lead\npolicy:\n  - allow more_t agent:* create\n")
    described.say("other", "parent: lead\nowner: nobody\n")
    described.say("ids", "parent: lead\nuid: 1234\n")
    described.say("good", "parent: lead\n")
    described.read(booting=True)
    described.run("lead")
    described.go_on()
    assert [described.is_there(n) for n in ("more", "other", "ids", "good")] == [
        False, False, False, True]  # fmt: skip
    assert 'more.yaml:3: policy[0]: agent:* create exceeds what the parent "lead"' in caplog.text
    assert "other.yaml:1: parent: " in caplog.text and "not its operator" in caplog.text
    assert "ids.yaml:2: uid: a child has the uid and gid of its parent" in caplog.text
    assert described.agent("good").owner == 1


def test_who_took_the_name_of_a_parent_gets_no_child(
    described: Described, caplog: pytest.LogCaptureFixture
) -> None:
    taken = described.mounted.make("lead", operator(2))
    described.say("lead", PARENT + "start: true\n")
    described.say("told", "parent: lead\nenv: {KEY: secret}\n")
    described.say("other", "parent: theirs\n")
    described.say("named", f"parent: theirs\nowner: {ALICE}\nexec: sleep 2\n")
    theirs = described.mounted.make("theirs", operator(1))
    for agent in (taken, theirs):
        described.mounted.put(f"agent/{agent.name}.d/exec", "sleep 1\n")
        described.run(agent.name)
    described.read(booting=True)
    described.go_on()
    assert [described.is_there(name) for name in ("told", "other", "named")] == [
        False, False, True]  # fmt: skip
    assert "told.yaml:1: parent: the agent lead is not the one that" in caplog.text
    assert "other.yaml:1: parent: the agent theirs is not declared, and belongs" in caplog.text
    described.end("lead")
    described.mounted.agents.removals.remove(taken)
    described.read(booting=True)
    described.run("lead")
    described.go_on()
    assert described.agent("told").parent == described.agent("lead").index


def test_a_daemon_that_dies_while_it_makes_one_leaves_nothing_of_it(
    described: Described, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    described.say("coder", "exec: sleep 1\nmode: turn\n")

    async def die(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ctxfs.tools.paths.Paths.write_lines", die)
    monkeypatch.setattr(type(world.agents.removals), "unmake", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        described.read()
    monkeypatch.undo()
    agents = world.reopen()
    agents.births.take_back()
    assert agents.registry.named("coder") is None


def test_nothing_is_begun_once_all_is_about_to_end(described: Described) -> None:
    described.say("coder", "exec: sleep 1\nstart: true\n")
    described.declaring.close()
    described.read(booting=True)
    trio.run(described.declaring.closed)
    assert not described.is_there("coder")


def test_a_daemon_without_root_makes_agents_of_its_own_user_only(
    tmp_path: Path, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with world_in(tmp_path, privilege=Privilege(uid=4242, gid=4242, groups=(4242,))) as world:
        described = Described(Mounted(world), directory)
        described.say("mine", "exec: 'true'\nstart: true\n")
        described.say("same", "owner: 4242\nexec: 'true'\n")
        described.say("theirs", f"owner: {ALICE}\nexec: 'true'\n")
        described.say("ids", "uid: 1234\n")
        described.read(booting=True)
        assert (described.agent("mine").uid, described.agent("mine").live) == (4242, True)
        assert described.agent("same").owner == 4242
        assert not described.is_there("theirs") and not described.is_there("ids")
        assert "theirs.yaml:1: owner: owner 1: this ctxd runs without root" in caplog.text
        assert "ids.yaml:1: uid: uid 1234: this ctxd runs without root" in caplog.text


# who may declare


def in_place(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.chmod(0o666), "others may write it: chmod go-w"),
        (lambda path: path.chmod(0o664), "others may write it: chmod go-w"),
        (lambda path: path.parent.chmod(0o777), "others may write it: chmod go-w"),
        (lambda path: os.rename(path, path.with_suffix(".yml")), "must be named NAME.yaml"),
        (lambda path: os.rename(path, path.with_name("a b.yaml")), "is not a name of an agent"),
        (lambda path: in_place(path, os.mkfifo), "not a regular file"),
        (lambda path: in_place(path, os.mkdir), "not a regular file"),
        (lambda path: in_place(path, partial(os.symlink, "nowhere")), "No such file"),
        (lambda path: path.write_bytes(b"exec: \xff"), "not UTF-8"),
        (lambda path: path.write_text("#" * (1 << 20) + "\n"), "longer than 1048576 bytes"),
    ],
)
def test_a_file_that_cannot_be_trusted_or_read_declares_nothing(
    described: Described, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], object],
    why: str,
) -> None:
    described.say("coder", "exec: sleep 1\n")
    spoil(described.directory / "coder.yaml")
    described.read()
    assert why in caplog.text
    assert not described.is_there("coder")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it gives files away")
@pytest.mark.parametrize("of", ["file", "directory"])
def test_what_belongs_to_another_user_declares_nothing(
    described: Described, caplog: pytest.LogCaptureFixture, of: str
) -> None:
    described.say("coder", "exec: sleep 1\n")
    path = described.directory / "coder.yaml" if of == "file" else described.directory
    os.chown(path, 1, 1)
    described.read()
    assert f"{path}: belongs to uid 1: it declares agents only if" in caplog.text
    assert not described.is_there("coder")


def test_hidden_files_and_copies_of_editors_declare_nothing(described: Described) -> None:
    for name in (".coder.yaml", "coder.yaml~", "coder.yaml.dpkg-old", "README"):
        (described.directory / name).write_text("exec: sleep 1\n")
    described.read()
    assert list(described.mounted.agents.registry) == []


def test_whoever_asks_is_told_of_what_was_read_last(described: Described) -> None:
    """As ``ctx reexec`` does, whose caller reads no log."""
    described.say("bad", "limts: {}\n")
    described.say("good", "exec: 'true'\n")
    described.mounted.make("mine")
    described.say("mine", "exec: 'true'\n")
    described.read()
    assert described.declaring.known.is_set()
    directory = described.directory
    mine = f"{directory}/mine.yaml: an agent mine exists that this file did not declare"
    assert described.declaring.complaints == [
        f"{directory}/bad.yaml:1: limts: unknown key; did you mean limits?",
        f"{mine}: it is left alone",
    ]
    for name in ("bad", "mine"):
        (directory / f"{name}.yaml").unlink()
    described.run("good")
    described.say("good", "exec: 'false'\n")
    described.read()
    assert described.declaring.complaints == [
        f"{directory}/good.yaml: good runs: it is changed when it has ended"
    ]
    (directory / "good.yaml").unlink()
    described.read()
    assert described.declaring.complaints == [
        f"{directory}/good.yaml is gone: the agent good stays until it is removed"
    ]
