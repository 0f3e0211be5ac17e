"""Who may list, find, read and write which file of an agent: the contract's table, cell by cell.

Only what the daemon decides itself is looked at: modes and owners are the kernel's to check.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyfuse3
import pytest

from ctxfs.files import agent as agent_files
from ctxfs.files import session as session_files
from ctxfs.files import task as task_files
from ctxfs.files import waiting as waiting_files
from ctxfs.files import work as work_files
from ctxfs.files.verbs import VERBS
from ctxfs.tree.planes import Plane
from ctxfs.tree.rows import Kind, Row
from runtime.caller import Caller
from runtime.records.items import TaskStatus
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from tests.worlds.records import ROOT, inside, operator
from tests.worlds.tree import (
    CONTEXT,
    STRANGER,
    USER,
    FakeSupervisor,
    Mounted,
    mounted_in,
)

#: (list, stat, read, write)
Cells = tuple[str, str, str, str]

#: one letter a party; "to it" is to the agent that is looked at
PARTIES = {
    "O": "operator: uid 0",
    "o": "operator: the owner",
    "s": "the agent that made it; a root agent has none",
    "a": "the agent itself",
    "r": "an agent with policy read to it",
    "w": "an agent with policy write to it",
    "b": "an agent with policy start to it",
    "e": "an agent with policy stop to it",
    "h": "an agent with policy read to its sessions",
    "p": "an agent with all of these",
    "k": "an agent of another owner with all of these, written by uid 0",
    "f": "an agent of another owner with all of these, written by that owner",
    "n": "an agent of the same owner with an empty policy",
    "c": "its child",
    "x": "a stranger outside of all agents",
    "u": "a caller that cannot be identified, of uid 0",
}

#: u has no rights, but names that all may see are cached and not asked for per caller
ALL = "Oosarwbehpkfncx"
FOUND = ALL + "u"

#: who knows of a private agent; to all others it is not there (ENOENT, not EACCES)
KNOWS = "Oosarpk"

#: group: (list, stat, read, write) to a public agent; the same to a private one.
#: The list column of the contract is about the names of agents ("entries"); of what
#: is below them, whoever finds a name sees it listed.
#: Write: "" is EPERM to those who find it, "-" is for nobody here (EACCES); looked at
#: in a status in which the file is written.
AGENT: dict[str, dict[str, Cells]] = {
    "entries": {
        "public": (ALL, FOUND, ALL, ""),
        "private": ("Oosa", KNOWS, KNOWS, ""),
    },
    "told": {
        "public": (ALL, FOUND, ALL, ""),
        "private": (KNOWS, KNOWS, KNOWS, ""),
    },
    "lineage": {
        "public": (ALL, FOUND, ALL, "Oo"),
        "private": (KNOWS, KNOWS, KNOWS, "Oo"),
    },
    "kind": {
        "public": (ALL, FOUND, ALL, "Oos"),
        "private": (KNOWS, KNOWS, KNOWS, "Oos"),
    },
    "ids": {
        "public": ("Oosarpk", "Oosarpk", "Oosarpk", "O"),
        "private": (KNOWS, KNOWS, KNOWS, "O"),
    },
    "configuration": {
        "public": ("Oosarpk", "Oosarpk", "Oosarpk", "Oos"),
        "private": (KNOWS, KNOWS, KNOWS, "Oos"),
    },
    # what keys are in there is for nobody by policy
    "environment": {
        "public": ("Oosa", "Oosa", "Oosa", "Oos"),
        "private": (KNOWS, KNOWS, "Oosa", "Oos"),
    },
    "facts": {
        "public": ("Oosarpk", "Oosarpk", "Oosarpk", ""),
        "private": (KNOWS, KNOWS, KNOWS, ""),
    },
    "planes": {
        "public": ("Oosarpk", "Oosarpk", "Oosarpk", "Oosa"),
        "private": (KNOWS, KNOWS, KNOWS, "Oosa"),
    },
    # who may say a verb has to find it; which verb is the other table
    "ctl": {
        "public": ("Oosarpkbe", "Oosarpkbe", "Oosarpk", "Oosabepk"),
        "private": (KNOWS, KNOWS, KNOWS, "Oosapk"),
    },
    "delegation": {
        "public": ("Oosa", "Oosa", "Oosa", "Oos"),
        "private": ("Oosa", "Oosa", "Oosa", "s"),
    },
    "inheritance": {
        "public": ("Oosa", "Oosa", "Oosa", ""),
        "private": (KNOWS, KNOWS, "Oosa", ""),
    },
    "result": {
        "public": ("Oosarpk", "Oosarpk", "Oosarpk", "a"),
        "private": (KNOWS, KNOWS, KNOWS, "a"),
    },
    # it is read by nobody; who may write it has to find it
    "inbox": {
        "public": ("Ooswpk", "Ooswpk", "", "Ooswpk"),
        "private": ("s", "s", "", "s"),
    },
}

#: group: names, those in ``/ctx/agent`` as what is put behind the agent's name
MEMBERS = {
    "entries": {".d", ".sock", ""},
    "told": {"visibility", "status", "outcome", "wait"},
    "lineage": {"parent"},
    "kind": {"life", "profile", "model"},
    "ids": {"owner", "uid", "gid"},
    "configuration": {
        "groups", "label", "policy", "mount", "root", "iso", "workspace", "cwd", "path",
        "context", "exec", "mode", "limits", "restart", "meta.json",
    },
    "environment": {"env"},
    "facts": {
        "supervisor", "ownership", "families", "ingress", "policy.effective", "mount.effective",
        "reason", "incarnation", "pid", "run", "cgroup", "usage", "queue", "error", "out", "log",
        "child", "session",
    },
    "planes": {"task", "work", "waiting", "current"},
    "ctl": {"ctl"},
    "delegation": {"handoff.md", "input.jsonl"},
    "inheritance": {"inherited.md", "inherited.json"},
    "result": {"result.md", "refs.jsonl", "artifact"},
    "inbox": {"inbox"},
}  # fmt: skip
#: rows that are neither in the agent's directory nor named after the agent
ELSEWHERE = {"self"}

#: group: (list, stat, read, write), of sessions; the maker has no part in them
SESSION: dict[str, dict[str, Cells]] = {
    "runtime's": {
        "public": ("Ooahpk", "Ooahpk", "Ooahpk", ""),
        "private": ("Ooahpk", "Ooahpk", "Ooahpk", ""),
    },
    "agent's": {
        "public": ("Ooahpk", "Ooahpk", "Ooahpk", "a"),
        "private": ("Ooahpk", "Ooahpk", "Ooahpk", "a"),
    },
}
SESSION_MEMBERS = {
    "runtime's": {
        "", "events.jsonl", "latest.md", "state", "cwd", "created_at", "updated_at", "meta.json",
        "context", "context/pack.md", "context/child",
    },
    "agent's": {"messages.jsonl", "context/memory.md", "context/episode"},
}  # fmt: skip

#: group: (list, stat, read, write), of the maker's side of a delegation, which lies in its session
CHANNEL: dict[str, dict[str, Cells]] = {
    "facts": {"public": ("Oos", "Oos", "Oos", ""), "private": ("Oos", "Oos", "Oos", "")},
    # the same documents as in the agent's directory
    "delegation": {"public": ("Oos", "Oos", "Oos", "Oos"), "private": ("Oos", "Oos", "Oos", "s")},
    # a child opens nothing of its maker's session: it writes where its own directory shows them
    "result": {"public": ("Oos", "Oos", "Oos", "-"), "private": ("Oos", "Oos", "Oos", "-")},
}
CHANNEL_MEMBERS = {
    "facts": {"", "agent", "session", "status"},
    "delegation": {"handoff.md", "input.jsonl"},
    "result": {"result.md", "refs.jsonl", "artifact"},
}

#: group: (list, stat, read, write), of a task, a work item and a wait. Who finds the directory
#: of the plane finds what is in it.
RECORD: dict[str, dict[str, Cells]] = {
    "told": {
        "public": ("Oosarpk", "Oosarpk", "Oosarpk", ""),
        "private": (KNOWS, KNOWS, KNOWS, ""),
    },
    "said": {
        "public": ("Oosarpk", "Oosarpk", "Oosarpk", "Oosa"),
        "private": (KNOWS, KNOWS, KNOWS, "Oosa"),
    },
    # whoever may look must not be able to send it anything
    "secret": {
        "public": ("Oosarpk", "Oosarpk", "Oosa", ""),
        "private": (KNOWS, KNOWS, "Oosa", ""),
    },
    "environment": {
        "public": ("Oosarpk", "Oosarpk", "Oosa", "Oosa"),
        "private": (KNOWS, KNOWS, "Oosa", "Oosa"),
    },
    # what goes in there does not come out
    "given": {
        "public": ("Oosarpk", "Oosarpk", "", "Oosa"),
        "private": (KNOWS, KNOWS, "", "Oosa"),
    },
}
RECORD_MEMBERS = {
    "told": {
        "task/item", "task/item/kind", "task/item/status", "task/item/exit", "task/item/pid",
        "task/item/output", "task/item/preview", "task/item/wait", "task/item/started_at",
        "task/item/ended_at", "task/item/worktree",
        "work/item", "work/item/created_at", "work/item/updated_at",
        "waiting/item", "waiting/item/status", "waiting/item/payload",
    },
    "said": {
        "task/item/title", "task/item/cmd", "task/item/cwd", "task/item/accepts_input",
        "task/item/ctl", "task/item/work",
        "work/item/objective", "work/item/plan.md", "work/item/acceptance.md",
        "work/item/status", "work/item/blocked_by", "work/item/parent",
        "waiting/item/on", "waiting/item/work", "waiting/item/deadline",
    },
    "secret": {"waiting/item/token"},
    "environment": {"task/item/env"},
    "given": {"task/item/input"},
}  # fmt: skip

#: verb: who may say it to a public agent, and to a private one, which b and e do not know of
SAYS = {
    "start": {"public": "Oosbpk", "private": "Oospk"},
    "resume": {"public": "Oosbpk", "private": "Oospk"},
    "reset": {"public": "Oosbpk", "private": "Oospk"},
    "stop": {"public": "Oosaepk", "private": "Oosapk"},
    "kill": {"public": "Oosepk", "private": "Oospk"},
    "pause": {"public": "Oosepk", "private": "Oospk"},
    "abort": {"public": "Oosepk", "private": "Oospk"},
    "session NAME": {"public": "Oos", "private": "Oos"},
}

COLUMNS = ("list", "stat", "read", "write")

KINDS = {"root": "public", "detached": "public", "child": "private"}


def path_of(agent: str, row: Row[Any]) -> str:
    if not row.is_inside:
        return f"agent/{agent}{row.name}"
    return f"agent/{agent}.d/{row.within}/{row.name}".replace("//", "/")


def at_once(operation: Coroutine[Any, Any, Any]) -> Any:
    """What it returns. None of these waits, and a loop for each would be most of the time."""
    try:
        operation.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("the operation waits")


class Heard(FakeSupervisor):
    """Is told to do something, and does not."""

    def __init__(self) -> None:
        super().__init__()
        self.verbs: list[str] = []

    def start(self, agent: Agent) -> None:
        self.verbs.append("start")

    def stop(self, agent: Agent, reason: str, *, kill: bool) -> None:
        self.verbs.append("kill" if kill else "stop")

    def pause(self, agent: Agent) -> None:
        self.verbs.append("pause")

    def resume(self, agent: Agent) -> None:
        self.verbs.append("resume")

    def abort(self, agent: Agent, run: str | None) -> None:
        self.verbs.append("abort")

    def reset(self, agent: Agent) -> None:
        self.verbs.append("reset")


@dataclass
class Stage:
    """One mount with agents to look at, and all who look at them."""

    mounted: Mounted
    heard: Heard
    objects: dict[str, Agent]
    callers: dict[str, dict[str, Caller]]

    def find(self, path: str) -> tuple[int, int]:
        """(inode, mode) as the kernel walks there."""
        inode, mode = pyfuse3.ROOT_INODE, 0
        for part in filter(None, path.split("/")):
            found = at_once(self.mounted.ops.lookup(inode, os.fsencode(part), CONTEXT))
            inode, mode = found.st_ino, found.st_mode
        return inode, mode

    def names(self, path: str) -> list[str]:
        ops = self.mounted.ops
        fh = at_once(ops.opendir(self.find(path)[0], CONTEXT))
        names = ops._listings[fh].names
        at_once(ops.releasedir(fh))
        return names

    def read(self, path: str, kind: Kind) -> None:
        if kind is Kind.DIRECTORY:
            self.names(path)
        elif kind is Kind.LINK:
            at_once(self.mounted.ops.readlink(self.find(path)[0], CONTEXT))
        elif kind is Kind.SOCKET:
            self.find(path)  # who connects is asked for at the other end
        else:
            self.open(self.find(path)[0], os.O_RDONLY)

    def write(self, path: str, kind: Kind) -> None:
        inode, _ = self.find(path)
        if kind is not Kind.DIRECTORY:
            self.open(inode, os.O_WRONLY)
            return
        ops = self.mounted.ops
        try:
            at_once(ops.mkdir(inode, b"made", 0o755, CONTEXT))
        except pyfuse3.FUSEError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            # planes that are yet to come say so to those who may, after they judged who it is
        else:
            at_once(ops.rmdir(inode, b"made", CONTEXT))

    def open(self, inode: int, flags: int) -> None:
        ops = self.mounted.ops
        info = at_once(ops.open(inode, flags, CONTEXT))
        at_once(ops.release(info.fh))


POLICIES = {
    "r": "agent:NAME read",
    "w": "agent:NAME write",
    "b": "agent:NAME start",
    "e": "agent:NAME stop",
    "h": "session:NAME read",
    "n": "",
}
EVERYTHING = ("agent:NAME read,write,start,stop", "session:NAME read")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with mounted_in(tmp_path_factory.mktemp("who")) as mounted:
        yield staged(mounted)


def staged(mounted: Mounted) -> Stage:
    world = mounted.world
    heard = Heard()
    heard.world = world
    mounted.supervisor = heard
    mounted.base.runtime.supervisor = heard  # type: ignore[assignment]
    maker = world.live(mounted.make("maker", USER))
    objects = {"root": mounted.make("root", USER)}
    for kind in ("detached", "child"):
        objects[kind] = mounted.make(kind, inside(maker))
    mounted.put("agent/detached.d/life", "detached\n")
    children = {}
    for kind, agent in objects.items():
        world.live(world.may_create(agent))
        children[kind] = world.live(mounted.make(f"below-{kind}", inside(agent)))
        world.agents.journal.update(children[kind], policy="")
        world.agents.journal.update(agent, policy="", mode="turn")
        world.agents.work.make(ROOT, agent, "item")
        world.agents.waiting.make(ROOT, agent, "item")
        task = world.agents.tasks.make(ROOT, agent, "item")
        world.agents.tasks.set(task, accepts_input=True)
    world.agents.journal.update(maker, policy="")

    def policed(letter: str, lines: tuple[str, ...], owner: Caller, writer: Caller) -> Caller:
        agent = mounted.make(f"party-{letter}", owner)
        text = "".join(
            f"allow {agent.label} {line.replace('NAME', name)}\n"
            for name in objects
            for line in lines
            if line
        )
        with mounted.as_(writer):
            mounted.put(f"agent/{agent.name}.d/policy", text or "# nothing\n")
        return inside(world.live(agent))

    parties = {"O": ROOT, "o": USER, "x": STRANGER, "u": replace(ROOT, known=False)}
    for letter, line in POLICIES.items():
        parties[letter] = policed(letter, (line,), USER, USER)
    other = operator(2000)
    parties["p"] = policed("p", EVERYTHING, USER, USER)
    parties["f"] = policed("f", EVERYTHING, other, other)
    parties["k"] = policed("k", EVERYTHING, other, ROOT)
    callers = {}
    for kind, agent in objects.items():
        callers[kind] = parties | {"a": inside(agent), "c": inside(children[kind])}
        if kind != "root":
            callers[kind]["s"] = inside(maker)
    return Stage(mounted, heard, objects, callers)


def outcome(action: Callable[[], object]) -> str:
    try:
        action()
    except pyfuse3.FUSEError as error:
        return errno.errorcode[error.errno]
    return "yes"


def refusal(known: bool, party: str, cells: dict[str, str], column: str) -> str:
    """What those hear who may not."""
    if not known:
        return "ENOENT"
    if column == "write" and not cells["write"] and party in cells["stat"]:
        return "EPERM"
    return "EACCES"


def look(stage: Stage, kind: str, column: str, path: str, row: Row[Any], party: str) -> str:
    """What this caller gets of one file; its agent is in a status where writing is possible."""
    agent = stage.objects[kind]
    writes = column == "write" and row.kind is not Kind.DIRECTORY
    stays_new = writes and Status.NEW in row.guard.when
    # a new agent has no processes, and who is refused is refused before the status is judged
    agent.status = Status.NEW if stays_new and party != "a" else Status.BUSY
    try:
        with stage.mounted.as_(stage.callers[kind][party]):
            if column == "list":
                directory, name = os.path.split(path)
                try:
                    return "yes" if name in stage.names(directory) else "no"
                except pyfuse3.FUSEError:
                    return "no"
            if column == "stat":
                return outcome(lambda: stage.find(path))
            reach = stage.read if column == "read" else stage.write
            return outcome(lambda: reach(path, row.kind))
    finally:
        agent.status = Status.BUSY


def judge(
    stage: Stage,
    cell: tuple[str, str, str],
    cells: Cells,
    files: list[tuple[str, Row[Any]]],
    knows: str,
) -> None:
    """Every file of a group, for these parties; ``knows``: to whom its agent is there at all."""
    kind, column, parties = cell
    named = dict(zip(COLUMNS, cells, strict=True))
    wrong = []
    for path, row in files:
        # of a link or a socket the daemon is asked for the name only
        asked = "stat" if column == "read" and row.kind in (Kind.LINK, Kind.SOCKET) else column
        for party in parties:
            if party not in stage.callers[kind]:
                continue
            if party in named[asked]:
                expected = "yes"
            elif column == "list":
                expected = "no"
            else:
                expected = refusal(party in knows, party, named, column)
            found = look(stage, kind, column, path, row, party)
            if found != expected:
                wrong.append(f"{path}: {column} by {PARTIES[party]}: {found}, not {expected}")
    assert files
    assert not wrong, "\n".join(wrong)


def cells_of(plane: str, table: dict[str, dict[str, Cells]], kinds: tuple[str, ...]) -> list[Any]:
    """(group, (kind, column, parties)), the deviating parties apart from the others."""
    found = []
    for group in table:
        for kind in kinds:
            for column in COLUMNS:
                name = f"{group}-{kind}-{column}"
                found.append(pytest.param(group, (kind, column, "".join(PARTIES)), id=name))
    return found


def test_every_file_has_its_place_in_the_table() -> None:
    def names(rows: tuple[Row[Any], ...]) -> list[str]:
        return sorted(
            f"context/{row.name}" if row.within == "context" else row.name
            for row in rows
            if row.name not in ELSEWHERE
        )

    def placed(members: dict[str, set[str]]) -> list[str]:
        return sorted(name for group in members.values() for name in group)

    assert names(agent_files.ROWS) == placed(MEMBERS)
    assert sorted(record_rows()) == placed(RECORD_MEMBERS)
    assert names(session_files.ROWS) == placed(SESSION_MEMBERS)
    channel = names(session_files.CHANNEL_ROWS) + list(agent_files.DOCUMENTS)
    assert sorted(channel) == placed(CHANNEL_MEMBERS)
    assert sorted(verb.usage.replace(" [RUN]", "") for verb in VERBS.values()) == sorted(SAYS)
    known = {*PARTIES, "-"}
    for table, members in (
        (AGENT, MEMBERS),
        (SESSION, SESSION_MEMBERS),
        (CHANNEL, CHANNEL_MEMBERS),
        (RECORD, RECORD_MEMBERS),
    ):
        assert table.keys() == members.keys()
        for group in table.values():
            assert all(set("".join(cells)) <= known for cells in group.values())


@pytest.mark.parametrize(("group", "cell"), cells_of("agent", AGENT, tuple(KINDS)))
def test_files_of_an_agent(stage: Stage, group: str, cell: tuple[str, str, str]) -> None:
    kind = cell[0]
    files = [
        (path_of(kind, row), row)
        for row in agent_files.ROWS
        if row.name in MEMBERS[group] and row.name not in ELSEWHERE
    ]
    knows = KNOWS if KINDS[kind] == "private" else FOUND
    judge(stage, cell, AGENT[group][KINDS[kind]], files, knows)


def record_rows() -> dict[str, Row[Any]]:
    """Every file of a task, a work item and a wait, by its path below the agent's directory."""
    tables: dict[str, Plane[Any]] = {
        "task": task_files.PLANE,
        "work": work_files.PLANE,
        "waiting": waiting_files.PLANE,
    }
    return {
        f"{plane}/item/{row.name}".rstrip("/"): row
        for plane, table in tables.items()
        for row in table.rows
        if row.name != "TOKEN"
    }


@pytest.mark.parametrize(("group", "cell"), cells_of("record", RECORD, tuple(KINDS)))
def test_tasks_work_items_and_waits(stage: Stage, group: str, cell: tuple[str, str, str]) -> None:
    kind = cell[0]
    rows = record_rows()
    files = [(f"agent/{kind}.d/{path}", rows[path]) for path in sorted(RECORD_MEMBERS[group])]
    knows = KNOWS if KINDS[kind] == "private" else FOUND
    judge(stage, cell, RECORD[group][KINDS[kind]], files, knows)


@pytest.mark.parametrize("kind", KINDS)
def test_everybody_who_can_be_identified_writes_to_a_token(stage: Stage, kind: str) -> None:
    agents = stage.mounted.agents
    waits = {}
    for party, caller in stage.callers[kind].items():
        wait = agents.waiting.make(ROOT, stage.objects[kind], f"for-{party}")
        agents.waiting.arm(ROOT, stage.objects[kind], wait, "trigger")
        waits[party] = wait
        path = f"trigger/{wait.token}"
        with stage.mounted.as_(caller):
            assert outcome(lambda p=path: stage.find(p)) == "yes"  # type: ignore[misc]
            assert outcome(lambda p=path: stage.read(p, Kind.FILE)) == "EACCES"  # type: ignore[misc]
            wrote = outcome(lambda p=path: stage.mounted.put(p, "now\n"))  # type: ignore[misc]
        assert wrote == ("EACCES" if party == "u" else "yes")
        assert wait.status == ("armed" if party == "u" else "fired")
    for wait in waits.values():
        agents.waiting.remove(ROOT, stage.objects[kind], wait.name)


@pytest.mark.parametrize(("group", "cell"), cells_of("session", SESSION, tuple(KINDS)))
def test_sessions(stage: Stage, group: str, cell: tuple[str, str, str]) -> None:
    kind, column, _ = cell
    base = f"home/{USER.uid}/agent/{kind}/session/default"
    files = []
    for row in session_files.ROWS:
        name = f"context/{row.name}" if row.within == "context" else row.name
        # that there is a session is told where its agent is
        if name in SESSION_MEMBERS[group] and (name or column != "list"):
            files.append((f"{base}/{name}".rstrip("/"), row))
    knows = KNOWS + "h" if KINDS[kind] == "private" else FOUND
    judge(stage, cell, SESSION[group][KINDS[kind]], files, knows)


@pytest.mark.parametrize(("group", "cell"), cells_of("channel", CHANNEL, ("detached", "child")))
def test_the_makers_side_of_a_delegation(
    stage: Stage, group: str, cell: tuple[str, str, str]
) -> None:
    kind = cell[0]
    base = f"home/{USER.uid}/agent/maker/session/default/context/child/{kind}"
    rows = {row.name: row for row in agent_files.ROWS if row.is_inside and not row.within}
    rows |= {row.name: row for row in session_files.CHANNEL_ROWS}
    files = [(f"{base}/{name}".rstrip("/"), rows[name]) for name in CHANNEL_MEMBERS[group]]
    # the maker is public, and with it all around its session
    judge(stage, cell, CHANNEL[group][KINDS[kind]], files, FOUND)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("column", ["read", "write"])
def test_who_has_a_file_by_its_number_may_no_more(stage: Stage, kind: str, column: str) -> None:
    """As through a descriptor that was handed over: no name is looked up any more."""
    visibility = KINDS[kind]
    wrong = []
    for group, members in MEMBERS.items():
        cells = dict(zip(COLUMNS, AGENT[group][visibility], strict=True))
        for number, row in enumerate(agent_files.ROWS, 1):
            if row.name not in members or row.kind is not Kind.FILE:
                continue
            path = path_of(kind, row)
            inode = agent_files.PLANE.inode(stage.objects[kind].index, number)
            flags = os.O_RDONLY if column == "read" else os.O_WRONLY
            reach = partial(stage.open, inode, flags)
            for party, caller in stage.callers[kind].items():
                # that they may say verbs to a private agent fails at its name only
                if party in cells[column] or (row.name == "ctl" and party in "be"):
                    continue
                with stage.mounted.as_(caller):
                    found = outcome(reach)
                expected = "EPERM" if column == "write" and not cells["write"] else "EACCES"
                if found != expected:
                    wrong.append(f"{path}: {column} by {PARTIES[party]}: {found}, not {expected}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", SAYS)
def test_verbs(stage: Stage, verb: str, kind: str) -> None:
    visibility = KINDS[kind]
    # this one passes the judgement of who speaks, and then is refused for something else
    answers = {"session NAME": "EBUSY"}
    fitting = {"start": Status.NEW, "resume": Status.PAUSED, "reset": Status.DEAD}
    wrong = []
    agent = stage.objects[kind]
    agent.run = "r1"
    for party, caller in stage.callers[kind].items():
        stage.heard.verbs.clear()
        # an agent that has not begun, or is over, has no processes
        agent.status = fitting.get(verb, Status.BUSY) if party != "a" else Status.BUSY
        allowed = party in SAYS[verb][visibility]
        if allowed:
            expected = answers.get(verb, "yes")
        else:
            expected = "ENOENT" if visibility == "private" and party not in KNOWS else "EACCES"
        with stage.mounted.as_(caller):
            found = outcome(lambda: stage.mounted.put(f"agent/{kind}.d/ctl", f"{verb}\n"))
        acted = [verb] if allowed and verb not in answers else []
        if (found, stage.heard.verbs) != (expected, acted):
            wrong.append(f"{kind}: {verb} by {PARTIES[party]}: {found}, not {expected}")
    agent.status, agent.run = Status.BUSY, ""
    assert not wrong, "\n".join(wrong)


#: the words of the manual, and whom of the parties they mean to a public agent
WORDS = {
    "the creator": "s",
    "operators": "Oo",
    "operators with uid 0": "O",
    "the agent itself": "a",
    "agents with policy read": "rpk",
    "agents with policy start": "bpk",
    "agents with policy stop": "epk",
    "agents with policy write": "wpk",
    "agents with policy session read": "hpk",
}
MAN = Path(__file__).parents[2] / "man" / "ctxfs.5"


def told(section: str) -> dict[str, str]:
    """What a generated list of the page says of each of its entries, by name, on one line."""
    _, _, rest = MAN.read_text().partition(f'.\\" BEGIN {section}\n')
    text, found, _ = rest.partition(f'.\\" END {section}\n')
    assert found
    entries: dict[str, str] = {}
    for entry in text.split("\n.It ")[1:]:
        head, _, body = entry.partition("\n")
        name = head.split(" ", 1)[1].removesuffix(" Pq link").rstrip("/")
        entries[name] = body.replace("\n", " ").removesuffix(" .El ")
    return entries


def parties_of(words: str) -> set[str]:
    if words == "nobody":
        return set()
    if words == "everybody":
        return set(ALL)
    named = re.split(r", (?!or )| and ", words)
    return {letter for word in named for letter in WORDS[word]}


def said_by(text: str, verb: str) -> set[str]:
    """Whom a sentence such as "Written by operators, while new." means; nobody without it."""
    match = re.search(rf"{re.escape(verb)} by (.*?)(?:, (?:at any time|while |unless )|\.)", text)
    return parties_of(match[1]) if match else set()


def write_cell(group: Cells) -> set[str]:
    return set(group[3].replace("-", ""))


@pytest.mark.parametrize("group", MEMBERS)
def test_the_manual_says_of_an_agents_files_who_writes_and_reads_them(group: str) -> None:
    entries = told("agent files")
    cells = AGENT[group]["public"]
    for name in MEMBERS[group] - MEMBERS["entries"]:
        text = entries["work/current" if name == "current" else name]
        plane = name in ("task", "work", "waiting")
        assert said_by(text, "mkdir(2)" if plane else "Written") == write_cell(cells), name
        if plane:
            assert said_by(text, "rmdir(2)") == write_cell(cells), name
        if "Public." in text:
            assert set(cells[2]) == set(ALL), name
        else:
            read = said_by(text, "Read") if "Read by" in text else set("Oosarpk")
            assert read == set(cells[2]), name
        assert ("Of a private child by the creator only." in text) is (
            AGENT[group]["private"][3] == "s"
        ), name


@pytest.mark.parametrize("group", RECORD)
def test_the_manual_says_it_of_tasks_work_items_and_waits(group: str) -> None:
    cells = RECORD[group]["public"]
    for path in RECORD_MEMBERS[group]:
        plane, _, name = path.split("/", 2) if path.count("/") == 2 else (*path.split("/"), "")
        if not name:
            continue
        text = told(f"{plane} files")[name]
        assert said_by(text, "Written") == write_cell(cells), path
        assert ("Read by" in text) is (set(cells[2]) != set("Oosarpk")), path
        if "Read by" in text:
            assert said_by(text, "Read") == set(cells[2]), path


@pytest.mark.parametrize("group", SESSION)
def test_the_manual_says_it_of_sessions(group: str) -> None:
    cells = SESSION[group]["public"]
    for name in SESSION_MEMBERS[group] - {""}:
        text = told("session files")[name]
        assert said_by(text, "Read") == set(cells[2]), name
        assert said_by(text, "Written") == write_cell(cells), name


@pytest.mark.parametrize("verb", SAYS)
def test_the_manual_says_whose_verb_it_is(verb: str) -> None:
    name = "abort [RUN]" if verb == "abort" else verb
    assert said_by(told("verbs")[name], "Said") == set(SAYS[verb]["public"])


#: file or verb: in which statuses of its agent that is refused, whoever asks
STATUSES = {
    "agent files": {
        "parent": "while new.",
        "model": "unless starting, busy or stopping.",
        "policy": "unless dead.",
        "limits": "at any time.",
        "inbox": "unless stopping or dead.",
        "result.md": "unless dead.",
        "task": "unless new, stopping or dead.",
        "work": "unless new, stopping or dead.",
        "waiting": "unless new, stopping or dead.",
        "work/current": "unless new or dead.",
    },
    "waiting files": {
        "on": "unless new, stopping or dead. Refused if it was armed before (EBUSY).",
        "deadline": "unless new or dead. Refused if it is over (EBUSY).",
        "trigger/TOKEN": "at any time. Refused if it was used, or the wait is over (ENOENT).",
    },
    "work files": {"objective": "unless new or dead. Refused if it is done or cancelled (EBUSY)."},
    "task files": {
        "cmd": "at any time. Refused if it is the handle of a child (EPERM), or if it was started "
        "(EBUSY).",
        "input": "at any time. Refused if it accepts none (EACCES), or if it has ended (EBUSY).",
    },
    "verbs": {
        "start": "while new.",
        "stop": "unless stopping or dead.",
        "abort [RUN]": "while busy or paused. Refused if it has no run (ESRCH).",
    },
}


@pytest.mark.parametrize("section", STATUSES)
def test_the_manual_says_when(section: str) -> None:
    entries = told(section)
    for name, words in STATUSES[section].items():
        assert words in entries[name], name


@pytest.mark.parametrize("plane", ["task", "work", "waiting"])
@pytest.mark.parametrize("status", Status)
def test_records_are_made_below_a_live_agent_that_is_not_stopping(
    stage: Stage, plane: str, status: Status
) -> None:
    agent, ops = stage.objects["root"], stage.mounted.ops
    agent.status = status
    takes = status not in (Status.NEW, Status.STOPPING, Status.DEAD)
    try:
        with stage.mounted.as_(ROOT):
            inode, _ = stage.find(f"agent/root.d/{plane}")
            made = outcome(lambda: at_once(ops.mkdir(inode, b"made", 0o755, CONTEXT)))
            assert made == ("yes" if takes else "EBUSY")
            # what is there is removed in any status
            if takes:
                agent.status = Status.DEAD
                assert outcome(lambda: at_once(ops.rmdir(inode, b"made", CONTEXT))) == "yes"
    finally:
        agent.status = Status.BUSY


@pytest.mark.parametrize("name", ["title", "cmd", "cwd", "env", "accepts_input"])
def test_a_command_is_configured_until_it_is_started(stage: Stage, name: str) -> None:
    agent, tasks = stage.objects["root"], stage.mounted.agents.tasks
    task = tasks.make(ROOT, agent, f"started-{name}")
    path = f"agent/root.d/task/{task.name}/{name}"
    with stage.mounted.as_(ROOT):
        assert outcome(lambda: stage.write(path, Kind.FILE)) == "yes"
        task.status = TaskStatus.RUNNING
        assert outcome(lambda: stage.write(path, Kind.FILE)) == "EBUSY"
        task.child = stage.objects["child"].index
        assert outcome(lambda: stage.write(path, Kind.FILE)) == "EPERM"
    task.status, task.child = TaskStatus.COMPLETED, 0
    tasks.remove(ROOT, agent, task.name)
