"""Who may list, find, read and write which file of an agent: the contract's table, cell by cell.

Only what the daemon decides itself is looked at: modes and owners are the kernel's to check.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyfuse3
import pytest

from ctxfs.files import agent as agent_files
from ctxfs.files import session as session_files
from ctxfs.files.agents import KEYS
from ctxfs.files.verbs import VERBS
from ctxfs.filesystem import LAYOUTS
from ctxfs.tree import rows as kinds
from ctxfs.tree.items import ItemLayout
from ctxfs.tree.layouts import Layout
from ctxfs.tree.rows import Gathered, Kind, Row, Shown, Staged
from runtime.authority.guard import Act
from runtime.caller import Caller
from runtime.errors import DeniedError
from runtime.ids import NO_AGENT, RunId
from runtime.records.items import AskStatus, TaskStatus, WaitStatus, WorkStatus
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.records.run import NOWHERE, Run, RunStatus
from runtime.sockets.operations import OPERATIONS
from tests.worlds.records import ROOT, inside, operator, rmdir
from tests.worlds.tree import CONTEXT, STRANGER, USER, Mounted, mounted_in

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

ANY_STATUS = frozenset(Status)
WHILE_NEW = frozenset({Status.NEW})
LIVE = ANY_STATUS - {Status.NEW, Status.DEAD}
GOING_ON = LIVE - {Status.STOPPING}
NOT_DEAD = ANY_STATUS - {Status.DEAD}
NOT_ENDING = NOT_DEAD - {Status.STOPPING}
BETWEEN_RUNS = ANY_STATUS - {Status.STARTING, Status.BUSY, Status.STOPPING}

#: a form as long as one may be
FORM = (
    '{"type":"object","properties":{'
    + ",".join(f'"f{n}":{{"type":"string","enum":["{"x" * 180}"]}}' for n in range(60))
    + "}}\n"
)
#: statuses of tasks, work items, waits and asks from which a file of theirs is written no more
STARTED = frozenset(TaskStatus) - {TaskStatus.MADE}
ENDED = STARTED - {TaskStatus.QUEUED, TaskStatus.RUNNING, TaskStatus.CANCELLING}
DONE = frozenset({WorkStatus.DONE, WorkStatus.CANCELLED})
ARMED = frozenset(WaitStatus) - {WaitStatus.NEW}
OVER = ARMED - {WaitStatus.ARMED}
ASKED = frozenset(AskStatus) - {AskStatus.NEW}


@dataclass(frozen=True)
class File:
    """What the table says of one file beside who may use it.

    The file is written while its agent has a status in ``when`` and its record none in ``final``.
    A file that takes more than one value has samples of its ``lines``: "%x" makes each differ.
    """

    when: frozenset[Status] = ANY_STATUS
    final: frozenset[str] = frozenset()
    generated: bool = False
    polled: bool = False
    volatile: bool = False
    lines: tuple[str, ...] = ()


def files(names: str, below: str = "", **told: Any) -> dict[str, File]:
    """Files of which the same is said; "." is the directory that holds the others."""
    return {
        f"{below}{name}".removesuffix("/.").removesuffix("."): File(**told)
        for name in names.split()
    }


@dataclass(frozen=True)
class Group:
    """Files of which the same callers may list, stat, read and write each.

    ``public`` is said of a public agent, ``private`` of a private one. The list column of the
    contract is about the names of agents ("entries"); of what is below them, whoever finds a
    name sees it listed. Write: "" is EPERM to those who find it, "-" is for nobody here (EACCES).
    """

    public: Cells
    private: Cells
    files: dict[str, File]

    def cells(self, kind: str) -> Cells:
        return self.private if KINDS[kind] == "private" else self.public

    @property
    def writers(self) -> set[str]:
        """To a public agent."""
        return set(self.public[3].replace("-", ""))


PERMS = "create,start,stop,read,write,detach"
REF = '{"path":"/%x"}\n'

#: names in ``/ctx/agent`` are what is put behind the agent's name
AGENT = {
    "entries": Group(
        (ALL, FOUND, ALL, ""),
        ("Oosa", KNOWS, KNOWS, ""),
        {"": File(), ".sock": File()},
    ),
    # the children that a private agent supervises find an inbox in it
    "directory": Group(
        (ALL, FOUND, ALL, ""),
        ("Oosa", KNOWS + "c", KNOWS, ""),
        {".d": File()},
    ),
    "told": Group(
        (ALL, FOUND, ALL, ""),
        (KNOWS, KNOWS, KNOWS, ""),
        files("visibility outcome wait") | files("status", polled=True),
    ),
    "lineage": Group(
        (ALL, FOUND, ALL, "Oo"),
        (KNOWS, KNOWS, KNOWS, "Oo"),
        files("parent", when=WHILE_NEW),
    ),
    "kind": Group(
        (ALL, FOUND, ALL, "Oos"),
        (KNOWS, KNOWS, KNOWS, "Oos"),
        files("life profile", when=WHILE_NEW) | files("model", when=BETWEEN_RUNS),
    ),
    "ids": Group(
        ("Oosarpk", "Oosarpk", "Oosarpk", "O"),
        (KNOWS, KNOWS, KNOWS, "O"),
        files("owner uid gid", when=WHILE_NEW),
    ),
    "configuration": Group(
        ("Oosarpk", "Oosarpk", "Oosarpk", "Oos"),
        (KNOWS, KNOWS, KNOWS, "Oos"),
        files("label root iso workspace cwd context mode tty homedir author", when=WHILE_NEW)
        | files("placement", when=WHILE_NEW, lines=("node=%x\n",))
        | files("groups", when=WHILE_NEW, lines=("%d\n",))
        | files("path", when=WHILE_NEW, lines=("/%x\n",))
        | files("mount", when=WHILE_NEW, lines=("/srv/a /m/%x ro\n",))
        | files("exec", when=BETWEEN_RUNS)
        | files("policy", when=NOT_DEAD,
                lines=("allow x_t agent:%x create\n", f"allow x_t agent:a {PERMS}\n",
                       "allow d7_t agent:p0%x " + PERMS + "\n"))
        | files("limits", lines=("timeout=%ds\n", "grace=5s\n"))
        | files("restart")
        | files("meta.json",
                lines=("{" + ",".join(f'"{n:x}":1' for n in range(7000)) + "}",
                       "[" * 60_000, '{"a":"' + '\\"' * 30_000 + '"}')),
    ),
    # what keys are in there is for nobody by policy
    "environment": Group(
        ("Oosa", "Oosa", "Oosa", "Oos"),
        (KNOWS, KNOWS, "Oosa", "Oos"),
        files("env", when=WHILE_NEW, lines=("A%x=\n",)),
    ),
    "facts": Group(
        ("Oosarpk", "Oosarpk", "Oosarpk", ""),
        (KNOWS, KNOWS, KNOWS, ""),
        files("supervisor ownership ingress reason incarnation child session")
        | files("pid run cgroup out log", volatile=True)
        | files("families policy.effective mount.effective usage error node", generated=True)
        | files("queue message", generated=True, polled=True),
    ),
    "planes": Group(
        ("Oosarpk", "Oosarpk", "Oosarpk", "Oosa"),
        (KNOWS, KNOWS, KNOWS, "Oosa"),
        files("task work waiting", when=GOING_ON) | files("work/current", when=LIVE),
    ),
    "asks": Group(
        ("Oosarpk", "Oosarpk", "Oosarpk", "a"),
        (KNOWS, KNOWS, KNOWS, "a"),
        files("ask", when=GOING_ON),
    ),
    # who may say a verb has to find it; which verb is the other table
    "ctl": Group(
        ("Oosarpkbe", "Oosarpkbe", "Oosarpk", "Oosabepk"),
        (KNOWS, KNOWS, KNOWS, "Oosapk"),
        files("ctl", lines=("pause\nresume\n", "start\n", "nonsense %x\n")),
    ),
    "delegation": Group(
        ("Oosa", "Oosa", "Oosa", "Oos"),
        ("Oosa", "Oosa", "Oosa", "s"),
        files("handoff.md", when=WHILE_NEW, lines=("a line %x\n",))
        | files("input.jsonl", when=WHILE_NEW, lines=(REF, "{}\n")),
    ),
    "processes": Group(
        ("Oosa", "Oosa", "Oosa", ""),
        (KNOWS, KNOWS, "Oosa", ""),
        files("processes", generated=True),
    ),
    "inheritance": Group(
        ("Oosa", "Oosa", "Oosa", ""),
        (KNOWS, KNOWS, "Oosa", ""),
        files("inherited.md inherited.json"),
    ),
    "result": Group(
        ("Oosarpk", "Oosarpk", "Oosarpk", "a"),
        (KNOWS, KNOWS, KNOWS, "a"),
        files("artifact", when=NOT_DEAD)
        | files("result.md", when=NOT_DEAD, lines=("a line %x\n",))
        | files("refs.jsonl", when=NOT_DEAD,
                lines=(REF, '{"path":"artifact/%x","summary":"s"}\n')),
    ),
    # it is empty to who may write it
    "inbox": Group(
        ("Ooswpkc", "Ooswpkc", "Ooswpkc", "Ooswpkc"),
        ("Os", "Osc", "Osc", "sc"),
        files("inbox", when=NOT_ENDING, lines=("a message %x\n",)),
    ),
    "report": Group(
        ("Oosarpk", "Oosarpk", "Oosarpk", "a"),
        (KNOWS, KNOWS, KNOWS, "a"),
        files("report", when=NOT_DEAD, lines=("a report %x\n",)),
    ),
}  # fmt: skip

#: of sessions; the maker has no part in them
SESSION = {
    "runtime's": Group(
        ("Ooahpk", "Ooahpk", "Ooahpk", ""),
        ("Ooahpk", "Ooahpk", "Ooahpk", ""),
        files(". latest.md state created_at updated_at meta.json context context/child")
        | files("cwd", volatile=True)
        | files("events.jsonl", polled=True)
        | files("context/pack.md context/now.md", generated=True),
    ),
    "agent's": Group(
        ("Ooahpk", "Ooahpk", "Ooahpk", "a"),
        ("Ooahpk", "Ooahpk", "Ooahpk", "a"),
        files("context/episode")
        | files("context/memory.md", lines=("a line %x\n",))
        | files("messages.jsonl",
                lines=('{"role":"user","content":""}\n',
                       '{"role":"user","content":{"a":[1,2,%d]}}\n')),
    ),
}  # fmt: skip

#: of the maker's side of a delegation, which lies in its session
CHANNEL = {
    "facts": Group(
        ("Oos", "Oos", "Oos", ""), ("Oos", "Oos", "Oos", ""), files(". agent session status")
    ),
    # the same documents as in the agent's directory
    "delegation": Group(
        ("Oos", "Oos", "Oos", "Oos"), ("Oos", "Oos", "Oos", "s"), AGENT["delegation"].files
    ),
    # a child opens nothing of its maker's session: it writes where its own directory shows them
    "result": Group(
        ("Oos", "Oos", "Oos", "-"), ("Oos", "Oos", "Oos", "-"), AGENT["result"].files
    ),
}

#: of a task, a work item and a wait. Who finds the directory of the plane finds what is in it.
RECORD = {
    "told": Group(
        ("Oosarpk", "Oosarpk", "Oosarpk", ""),
        (KNOWS, KNOWS, KNOWS, ""),
        files(". kind exit reason agent wait started_at ended_at", "task/item/")
        | files("pid output preview", "task/item/", volatile=True)
        | files("status worktree", "task/item/", polled=True)
        | files(". created_at updated_at", "work/item/")
        | files(". payload", "waiting/item/")
        | files("status", "waiting/item/", polled=True)
        | files(". by asked_at ended_at wait", "ask/item/")
        | files("status", "ask/item/", polled=True),
    ),
    # before it is asked
    "asked": Group(
        ("Oosarpk", "Oosarpk", "Oosarpk", "a"),
        (KNOWS, KNOWS, KNOWS, "a"),
        files("kind question default deadline life", "ask/item/", when=GOING_ON, final=ASKED)
        | files("detail", "ask/item/", when=GOING_ON, final=ASKED, lines=("a line %x\n",))
        | files("options", "ask/item/", when=GOING_ON, final=ASKED, lines=("w%x A label\n",))
        | files("form", "ask/item/", when=GOING_ON, final=ASKED, lines=(FORM,)),
    ),
    "said": Group(
        ("Oosarpk", "Oosarpk", "Oosarpk", "Oosa"),
        (KNOWS, KNOWS, KNOWS, "Oosa"),
        files("title cwd accepts_input tty", "task/item/", final=STARTED)
        | files("cmd", "task/item/", final=STARTED, lines=("true %x\n",))
        | files("ctl", "task/item/", lines=("start\n", "nonsense %x\n"))
        | files("work", "task/item/")
        | files("objective", "work/item/", when=LIVE, final=DONE, lines=("an aim %x\n",))
        | files("plan.md", "work/item/", when=LIVE, final=DONE, lines=("- [ ] a step %x\n",))
        | files("acceptance.md", "work/item/", when=LIVE, final=DONE, lines=("it works %x\n",))
        | files("blocked_by", "work/item/", when=LIVE, final=DONE, volatile=True,
                lines=("W%d\n",))
        | files("parent", "work/item/", when=LIVE, final=DONE)
        | files("status", "work/item/", when=LIVE, final=DONE, polled=True)
        | files("on", "waiting/item/", when=GOING_ON, final=ARMED)
        | files("work deadline", "waiting/item/", when=LIVE, final=OVER),
    ),
    # whoever may look must not be able to send it anything
    "secret": Group(
        ("Oosarpk", "Oosarpk", "Oosa", ""),
        (KNOWS, KNOWS, "Oosa", ""),
        files("token", "waiting/item/"),
    ),
    "environment": Group(
        ("Oosarpk", "Oosarpk", "Oosa", "Oosa"),
        (KNOWS, KNOWS, "Oosa", "Oosa"),
        files("env", "task/item/", final=STARTED, lines=("A%x=\n",)),
    ),
    # what goes in there does not come out: it is empty
    "given": Group(
        ("Oosarpk", "Oosarpk", "Oosarpk", "Oosa"),
        (KNOWS, KNOWS, KNOWS, "Oosa"),
        files("input", "task/item/", final=ENDED, lines=("some %x\n",)),
    ),
}

#: of no agent: all callers that can be identified find these names and read the files, but for
#: those of ``READERS``
OPEN = {
    "root": {"/": File()}
    | files("ctxd.sock bin bin/ctx agent tool home shared trigger")
    | files("status error metrics", generated=True)
    | files("agents asks events nodes", generated=True, polled=True),
    "home": files(". agent data"),
    "history": files(". session"),
    "space": files(". owner data") | files("usage max", generated=True),
    "tool": {"": File(), ".d": File()} | files("description output_schema family")
    | files("schema", generated=True),
}
READERS = {"events": "Oox"}
#: at places of their own, with tests of their own
ELSEWHERE = {
    "agent": files("self"),
    "waiting": files("TOKEN", volatile=True, lines=("fired %x\n",)),
    # whose they are depends on what is asked (test_asks.py)
    "ask": files("to", volatile=True) | files("answer", lines=("a line %x\n",)),
    "child": files("child"),
    # as of the agent itself
    "supervisor": {".d": File()} | files("inbox", lines=("some %x\n",)),
}


@dataclass(frozen=True)
class Says:
    """Who may say a verb to a public agent, and to a private one, which b and e do not know of.

    ``goes`` has, for each status in which the verb is not refused with EBUSY, the next status,
    "same" (the status before the pause), "stays", or another errno.
    """

    public: str
    private: str
    goes: dict[str, str]

    def parties(self, kind: str) -> str:
        return self.private if KINDS[kind] == "private" else self.public


_RUNNING = ("starting", "ready", "idle", "busy", "paused")
SAYS = {
    "start": Says("Oosbpk", "Oospk", {"new": "starting"}),
    "stop": Says("Oosaepk", "Oosapk", {"new": "dead", **dict.fromkeys(_RUNNING, "stopping")}),
    "kill": Says(
        "Oosepk", "Oospk",
        {"new": "dead", **dict.fromkeys((*_RUNNING, "stopping"), "stopping")},
    ),
    "pause": Says("Oosepk", "Oospk", dict.fromkeys(("ready", "idle", "busy"), "paused")),
    "resume": Says("Oosbpk", "Oospk", {"paused": "same"}),
    "abort [RUN]": Says(
        "Oosepk", "Oospk",
        {"busy": "paused", "paused": "paused",
         **dict.fromkeys(("new", "starting", "ready", "idle", "dead"), "ESRCH")},
    ),
    "reset": Says("Oosbpk", "Oospk", {"dead": "new"}),
    "session NAME": Says(
        "Oos", "Oos", dict.fromkeys(("new", "ready", "idle", "paused"), "stays")
    ),
}  # fmt: skip

#: of a text in a frame of a socket, which takes a mebibyte
LONG = 1_000_000


@dataclass(frozen=True)
class Asks:
    """``who`` may ask for an operation at an agent's socket, and to a ``private`` one if those
    are others. ``requests`` are the fields of some, the least of them first, then the worst."""

    who: str
    requests: tuple[dict[str, Any], ...] = ({},)
    private: str | None = None

    def parties(self, kind: str) -> str:
        return self.private if KINDS[kind] == "private" and self.private else self.who


#: operations of the sockets; "status" is one of ctxd.sock only
ASKS = {
    "ping": Asks(ALL),
    "wait": Asks(ALL),
    "status": Asks(""),
    "reexec": Asks(""),
    "events": Asks(
        "",
        ({}, {"after": 0}, {"after": 0, "types": ["none"]}, {"after": 0, "agents": ["x"] * 64},
         {"after": 0, "types": ["x" * (LONG // 64)] * 64},
         {"after": 0, "types": [""] * (LONG // 4)},
         {"after": 10**4000}, {"after": [[]] * 10_000}, {"follow": [[]] * 10_000},
         {"agents": ["x" * LONG]}, {"types": [[]] * 10_000}),
    ),
    "who": Asks("", ({"address": "::"}, {"address": "fd63:7478:6673::1"}, {"address": "x" * LONG})),
    "quota": Asks("Oosa"),
    "resume": Asks(
        "Ooahpk",
        ({}, *({"after": f"e{after}"} for after in (0, 35_000, 69_999, 10**15 - 1)),
         {"after": "e" + "0" * LONG}),
    ),
    "send": Asks(
        "Ooswpkc",
        ({"id": "a", "input": ""}, {"id": "b", "input": "x" * LONG},
         {"id": "b", "input": "\xe4\n" * (LONG // 8)}, {"id": "x" * LONG, "input": ""},
         {"id": "c", "input": "", "priority": "x" * LONG}),
        private="sc",
    ),
    "cancel": Asks(
        "Oosepk",
        ({"id": "m0"}, {"id": "m1"}, {"id": "x" * LONG}, {"id": [[]] * 10_000}),
    ),
    "tool": Asks(
        "a",
        ({"name": "AgentGet", "input": {"agent_id": "x"}}, {"name": "x" * LONG},
         {"name": "SpawnAgent", "input": {"name": "x" * LONG}},
         {"name": "AgentGet", "input": [[]] * 10_000},
         *({"name": "WorkCreate", "input": {"objective": "x" * 60_000, "plan": "x\n" * (LONG // 8)},
            "id": f"a{number}"} for number in range(2)),
         {"name": "AgentGet", "id": "x" * LONG}, {"name": "AgentGet", "id": [[]] * 10_000}),
    ),
    "why": Asks(
        "Oosa",
        ({"verb": "create", "object": f"agent:p7{'x' * 90}1"},
         {"verb": "create", "object": "agent:" + "q" * LONG},
         {"verb": "x" * LONG, "object": "agent:x"}, {"verb": "", "object": [[]] * 10_000}),
    ),
    "audit": Asks("Ooa", ({}, {"agent": "x"})),
    # what each may remove
    "prune": Asks(
        "a",
        ({"older": "36500d", "dry_run": True}, {"older": "x" * LONG},
         {"older": "36500d", "dry_run": [[]] * 10_000}),
    ),
    # whose child or agent it is that it names decides, too
    "window": Asks(
        "a",
        ({"agent": "x"}, {"agent": "x" * LONG}, {"agent": [[]] * 10_000, "remove": "x" * LONG}),
    ),
    # whose agent it is that it names decides, too
    "terminal": Asks(
        "",
        ({"agent": "x"}, {"agent": "x", "task": "T0", "start": True}, {"agent": "x" * LONG},
         {"agent": "x", "task": "x" * LONG}, {"agent": "x", "size": "x" * LONG},
         {"agent": [[]] * 10_000, "look": "x" * LONG}),
    ),
    "nodes": Asks(
        "Oo",
        ({}, {"check": "x"}, {"forget": "x"}, {"check": "x" * LONG}, {"check": [[]] * 10_000}),
    ),
    # nothing that comes after it is an operation: tests/unit/runtime/peers
    "peer": Asks("Oo", ()),
    # what it may say is decided by the agent that it names
    "ctl": Asks(
        "a",
        ({"line": "none"}, {"agent": "x", "line": "x" * LONG},
         {"agent": "x" * LONG, "line": "kill"}, {"agent": [[]] * 10_000},
         {"agent": "x", "task": "x" * LONG, "line": "kill"}),
    ),
}  # fmt: skip

#: files of a private agent, with parties that may write them and do not find the agent
UNREACHED = {("ctl", "b"), ("ctl", "e")}
#: groups of names in /ctx/agent, which the manual does not list
NAMES = ("entries", "directory")
#: groups of files that the children of a private agent find
OPEN_TO_CHILDREN = ("directory", "inbox")
COLUMNS = ("list", "stat", "read", "write")

KINDS = {"root": "public", "detached": "public", "child": "private"}
ITEM_PLANES = [plane for plane in LAYOUTS if isinstance(plane, ItemLayout)]
#: of verbs that are refused in a status
ERRNOS_OF_VERBS = ("EBUSY", "ESRCH")


def key_of(row: Row[Any]) -> str:
    """How the table calls it: its place in the directory of its object."""
    return f"{row.within}/{row.name}" if row.within else row.name


def path_of(agent: str, row: Row[Any]) -> str:
    if not row.is_inside:
        return f"agent/{agent}{row.name}"
    return f"agent/{agent}.d/{key_of(row)}"


def at_once(operation: Coroutine[Any, Any, Any]) -> Any:
    """What it returns. None of these waits, and a loop for each would be most of the time."""
    try:
        operation.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("the operation waits")


class Heard:
    """Stands for the supervisor: is told to do something, and does not."""

    def __init__(self) -> None:
        self.verbs: list[str] = []

    def __getattr__(self, verb: str) -> Callable[..., None]:
        def hear(*args: object, kill: bool = False) -> None:
            self.verbs.append("kill" if kill else verb)

        return hear


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
        names = ops.opened.listings[fh].names
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

    def listed(self, name: str) -> dict[str, Any] | None:
        """What ``agents`` tells of an agent."""
        ops = self.mounted.ops
        fh = at_once(ops.open(self.find("agents")[0], os.O_RDONLY, CONTEXT)).fh
        text = at_once(ops.read(fh, 0, 1 << 20))
        at_once(ops.release(fh))
        rows = {row["name"]: row for row in map(json.loads, text.splitlines())}
        return rows.get(name)

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
        for plane in ITEM_PLANES:
            plane.records(world.agents).make(ROOT, agent, "item")
        world.agents.tasks.set(world.agents.tasks.find(agent, "item"), accepts_input=True)
    world.agents.journal.update(maker, policy="", mode="turn")

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
            if column == "list":
                expected = "yes" if party in named[asked] and row.listed else "no"
            elif party in named[asked]:
                expected = "yes"
            else:
                expected = refusal(party in knows, party, named, column)
            found = look(stage, kind, column, path, row, party)
            if found != expected:
                wrong.append(f"{path}: {column} by {PARTIES[party]}: {found}, not {expected}")
    assert files
    assert not wrong, "\n".join(wrong)


def cells_of(table: dict[str, Group], kinds: Iterable[str]) -> list[Any]:
    """(group, (kind, column, parties))."""
    return [
        pytest.param(group, (kind, column, "".join(PARTIES)), id=f"{group}-{kind}-{column}")
        for group in table
        for kind in kinds
        for column in COLUMNS
    ]


def placed(*tables: dict[str, Group], below: str = "") -> dict[str, File]:
    """The files of all groups, or of those of one directory, by their place in that."""
    return {
        name.removeprefix(below).removeprefix("/"): file
        for table in tables
        for group in table.values()
        for name, file in group.files.items()
        if name == below or name.startswith(f"{below}/" if below else "")
    }


#: by plane: each of its files, and what is said of it
PLACED = {
    **OPEN,
    "agent": placed(AGENT) | ELSEWHERE["agent"],
    "child": ELSEWHERE["child"],
    "supervisor": ELSEWHERE["supervisor"],
    "session": placed(SESSION),
    "channel": CHANNEL["facts"].files,
    "task": placed(RECORD, below="task/item"),
    "work": placed(RECORD, below="work/item"),
    "waiting": placed(RECORD, below="waiting/item") | ELSEWHERE["waiting"],
    "ask": placed(RECORD, below="ask/item") | ELSEWHERE["ask"],
}


@pytest.mark.parametrize("plane", LAYOUTS, ids=lambda plane: plane.name)
def test_the_table_has_every_file_and_says_how_it_is_kept(plane: Layout[Any]) -> None:
    rows = {key_of(row): row for row in plane.rows}
    told = PLACED[plane.name]
    assert rows.keys() == told.keys()
    for name, row in rows.items():
        generated = isinstance(row, Gathered) or (isinstance(row, Shown) and row.generated)
        assert generated is told[name].generated, name
        assert row.polled is told[name].polled, name
        assert row.volatile is told[name].volatile, name
        one = isinstance(row, Staged) and row.single
        many = isinstance(row, kinds.File) and bool(row.guard.who) and not one
        assert many <= bool(told[name].lines), f"{name}: say which lines it takes"


def test_the_table_is_of_planes_verbs_and_parties_that_there_are() -> None:
    assert {plane.name for plane in LAYOUTS} == PLACED.keys()
    assert [verb.usage for verb in VERBS.values()] == list(SAYS)
    documents = CHANNEL["delegation"].files | CHANNEL["result"].files
    assert documents.keys() == set(agent_files.DOCUMENTS)
    for table in (AGENT, SESSION, CHANNEL, RECORD):
        for group in table.values():
            assert set("".join((*group.public, *group.private))) <= {*PARTIES, "-"}


def knows(kind: str) -> str:
    """To whom an agent is there at all."""
    return KNOWS if KINDS[kind] == "private" else FOUND


def rows_of_agents() -> dict[str, Row[Any]]:
    return {key_of(row): row for row in agent_files.ROWS}


def rows_of_records() -> dict[str, Row[Any]]:
    """Every file of a task, a work item and a wait, by its path below the agent's directory."""
    return {
        f"{plane.name}/item/{row.name}".rstrip("/"): row
        for plane in ITEM_PLANES
        for row in plane.rows
        if row.path is None
    }


@pytest.mark.parametrize(("group", "cell"), cells_of(AGENT, KINDS))
def test_files_of_an_agent(stage: Stage, group: str, cell: tuple[str, str, str]) -> None:
    kind = cell[0]
    rows = rows_of_agents()
    found = [(path_of(kind, rows[name]), rows[name]) for name in AGENT[group].files]
    children = "c" if group in OPEN_TO_CHILDREN else ""
    judge(stage, cell, AGENT[group].cells(kind), found, knows(kind) + children)


@pytest.mark.parametrize(("group", "cell"), cells_of(RECORD, KINDS))
def test_tasks_work_items_and_waits(stage: Stage, group: str, cell: tuple[str, str, str]) -> None:
    kind = cell[0]
    rows = rows_of_records()
    found = [(f"agent/{kind}.d/{path}", rows[path]) for path in RECORD[group].files]
    judge(stage, cell, RECORD[group].cells(kind), found, knows(kind))


@pytest.mark.parametrize("plane", ["root", "home", "history", "space"])
def test_what_is_of_no_agent_is_open(stage: Stage, plane: str) -> None:
    base = {"root": "", "home": "home/1000/", "history": "home/1000/agent/root/",
            "space": "shared/team/"}[plane]  # fmt: skip
    stage.mounted.base.runtime.trees._homes.add(1000)  # no program makes it here
    if stage.mounted.agents.spaces.named("team") is None:
        stage.mounted.agents.spaces.adopt("team", 1000)
    rows = {key_of(row): row for each in LAYOUTS if each.name == plane for row in each.rows}
    for name in OPEN[plane]:
        for party in ALL.replace("s", ""):
            with stage.mounted.as_(stage.callers["root"][party]):
                assert outcome(partial(stage.find, base + name)) == "yes", name
                may = "yes" if party in READERS.get(name, ALL) else "EACCES"
                assert outcome(partial(stage.read, base + name, rows[name].kind)) == may, name


@pytest.mark.parametrize("kind", KINDS)
def test_the_list_of_agents_tells_what_the_files_would(stage: Stage, kind: str) -> None:
    """An agent is in it for those who find it by listing, with the keys that they may read."""
    cells = {name: group.cells(kind) for group in AGENT.values() for name in group.files}
    for party, caller in stage.callers[kind].items():
        with stage.mounted.as_(caller):
            if party == "u":
                assert outcome(partial(stage.listed, kind)) == "EACCES"
                continue
            row = stage.listed(kind)
        if party not in cells[""][0]:
            assert row is None, PARTIES[party]
            continue
        readable = {key for key, (file, _) in KEYS.items() if not file or party in cells[file][2]}
        readable -= {"tty", "viewers"}  # which are those of a terminal
        assert row is not None and row.keys() == readable, PARTIES[party]


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
        rmdir(agents.waiting, ROOT, stage.objects[kind], wait.name)


@pytest.mark.parametrize(("group", "cell"), cells_of(SESSION, KINDS))
def test_sessions(stage: Stage, group: str, cell: tuple[str, str, str]) -> None:
    kind, column, _ = cell
    base = f"home/{USER.uid}/agent/{kind}/session/default"
    rows = {key_of(row): row for row in session_files.ROWS}
    found = [
        (f"{base}/{name}".rstrip("/"), rows[name])
        for name in SESSION[group].files
        # that there is a session is told where its agent is
        if name or column != "list"
    ]
    of_it = knows(kind) if knows(kind) is FOUND else KNOWS + "h"
    judge(stage, cell, SESSION[group].cells(kind), found, of_it)


def test_operators_remove_the_sessions_of_agents_that_are_gone(mounted: Mounted) -> None:
    agent = mounted.make("x", USER)
    other = mounted.world.live(mounted.make("other", USER))
    inode = mounted.inode("home/1000/agent/x/session")

    def remove(caller: Caller) -> str:
        with mounted.as_(caller):
            return outcome(lambda: at_once(mounted.ops.rmdir(inode, b"default", CONTEXT)))

    assert remove(USER) == "EBUSY"
    mounted.agents.removals.remove(agent)
    assert [remove(caller) for caller in (STRANGER, inside(other), USER)] == [
        "EACCES", "EACCES", "yes",
    ]  # fmt: skip


@pytest.mark.parametrize(("group", "cell"), cells_of(CHANNEL, ("detached", "child")))
def test_the_makers_side_of_a_delegation(
    stage: Stage, group: str, cell: tuple[str, str, str]
) -> None:
    kind = cell[0]
    base = f"home/{USER.uid}/agent/maker/session/default/context/child/{kind}"
    rows = rows_of_agents() | {key_of(row): row for row in session_files.CHANNEL_ROWS}
    found = [(f"{base}/{name}".rstrip("/"), rows[name]) for name in CHANNEL[group].files]
    # the maker is public, and with it all around its session
    judge(stage, cell, CHANNEL[group].cells(kind), found, FOUND)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("column", ["read", "write"])
def test_who_has_a_file_by_its_number_may_no_more(stage: Stage, kind: str, column: str) -> None:
    """As through a descriptor that was handed over: no name is looked up any more."""
    wrong = []
    for group in AGENT.values():
        cells = dict(zip(COLUMNS, group.cells(kind), strict=True))
        for number, row in agent_files.LAYOUT.numbered.items():
            if key_of(row) not in group.files or row.kind is not Kind.FILE:
                continue
            path = path_of(kind, row)
            inode = agent_files.LAYOUT.inode(stage.objects[kind].index, number)
            flags = os.O_RDONLY if column == "read" else os.O_WRONLY
            reach = partial(stage.open, inode, flags)
            for party, caller in stage.callers[kind].items():
                # that they may say verbs to a private agent fails at its name only
                if party in cells[column] or (row.name, party) in UNREACHED:
                    continue
                with stage.mounted.as_(caller):
                    found = outcome(reach)
                expected = "EPERM" if column == "write" and not cells["write"] else "EACCES"
                if found != expected:
                    wrong.append(f"{path}: {column} by {PARTIES[party]}: {found}, not {expected}")
    assert not wrong, "\n".join(wrong)


RUNNING = Run(id=RunId("r1"), status=RunStatus.RUNNING)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", SAYS)
def test_verbs(stage: Stage, verb: str, kind: str) -> None:
    # this one passes the judgement of who speaks, and then is refused for something else
    answers = {"session NAME": "EBUSY"}
    wrong = []
    agent = stage.objects[kind]
    agent.run = RUNNING
    fitting = fits(verb)
    for party, caller in stage.callers[kind].items():
        stage.heard.verbs.clear()
        # an agent that has not begun, or is over, has no processes
        begun = party == "a" or verb in answers or Status.BUSY in fitting
        agent.status = Status.BUSY if begun else min(fitting)
        allowed = party in SAYS[verb].parties(kind)
        if allowed:
            expected = answers.get(verb, "yes")
        else:
            expected = "EACCES" if party in knows(kind) else "ENOENT"
        with stage.mounted.as_(caller):
            found = outcome(lambda: stage.mounted.put(f"agent/{kind}.d/ctl", line(verb)))
        acted = [verb.split()[0]] if allowed and verb not in answers else []
        if (found, stage.heard.verbs) != (expected, acted):
            wrong.append(f"{kind}: {verb} by {PARTIES[party]}: {found}, not {expected}")
    agent.status, agent.run = Status.BUSY, Run()
    assert not wrong, "\n".join(wrong)


def line(verb: str) -> str:
    """How it is said, without what may be left out."""
    return verb.partition(" [")[0] + "\n"


def fits(verb: str) -> set[Status]:
    """In which statuses it is not refused."""
    return {Status(status) for status, to in SAYS[verb].goes.items() if to not in ERRNOS_OF_VERBS}


@pytest.mark.parametrize("verb", SAYS)
def test_in_which_statuses_a_verb_is_said(mounted: Mounted, verb: str) -> None:
    heard = Heard()
    mounted.base.runtime.supervisor = heard  # type: ignore[assignment]
    agent = mounted.make("x", USER)
    path = "agent/x.d/ctl"
    for status in Status:
        agent.status, agent.run = status, RUNNING if verb.startswith("abort") else Run()
        expected = "yes" if status in fits(verb) else SAYS[verb].goes.get(status, "EBUSY")
        assert outcome(lambda: mounted.put(path, line(verb))) == expected, status
    agent.status, agent.run = Status.PAUSED, RUNNING
    frozen = "EBUSY" if verb == "session NAME" or Status.PAUSED not in fits(verb) else "yes"
    assert outcome(lambda: mounted.put(path, line(verb))) == frozen
    agent.run = replace(RUNNING, status=RunStatus.ENDING, cause="why")
    ending = "EBUSY" if verb == "resume" else frozen
    assert outcome(lambda: mounted.put(path, line(verb))) == ending


@pytest.mark.parametrize(
    ("verb", "above", "why"),
    [
        ("start", {"status": Status.STOPPING}, 'the parent "x" is stopping'),
        ("start", {"status": Status.STARTING, "cell": NOWHERE}, 'the parent "x" waits'),
        ("start", {"status": Status.PAUSED}, '"x", which it would run in, is paused'),
        ("reset", {"status": Status.DEAD}, 'the parent "x" is dead'),
    ],
)
def test_what_is_above_stands_in_the_way_of_a_verb(
    mounted: Mounted, verb: str, above: dict[str, Any], why: str
) -> None:
    heard = Heard()
    mounted.base.runtime.supervisor = heard  # type: ignore[assignment]
    parent = mounted.world.live(mounted.make("x", USER))
    child = mounted.agents.births.create(inside(parent), "c")
    child.status = min(fits(verb))
    path = "agent/c.d/ctl"
    assert outcome(lambda: mounted.put(path, line(verb))) == "yes"
    for name, value in above.items():
        setattr(parent, name, value)
    assert outcome(lambda: mounted.put(path, line(verb))) == "EBUSY"
    assert why in mounted.reason
    assert heard.verbs == [verb]


def written(table: dict[str, Group]) -> list[Any]:
    """(who writes it, its path, its file), of all that somebody writes."""
    return [
        pytest.param(min(group.writers), name, file, id=name)
        for group in table.values()
        if group.writers
        for name, file in group.files.items()
    ]


@pytest.mark.parametrize(("writer", "name", "file"), written(AGENT))
def test_in_which_statuses_a_file_is_written(
    stage: Stage, writer: str, name: str, file: File
) -> None:
    agent, row = stage.objects["root"], rows_of_agents()[name]
    try:
        for status in Status:
            # an agent that has not begun, or is over, writes nothing
            if writer == "a" and status not in LIVE:
                continue
            agent.status = status
            with stage.mounted.as_(stage.callers["root"][writer]):
                found = outcome(lambda: stage.write(path_of("root", row), row.kind))
            assert found == ("yes" if status in file.when else "EBUSY"), status
    finally:
        agent.status = Status.BUSY


@pytest.mark.parametrize(("writer", "name", "file"), written(RECORD))
def test_in_which_statuses_a_file_of_a_record_is_written(
    stage: Stage, writer: str, name: str, file: File
) -> None:
    agent, row = stage.objects["root"], rows_of_records()[name]
    plane = next(plane for plane in ITEM_PLANES if name.startswith(f"{plane.name}/"))
    item = stage.mounted.agents.items.named(agent.index, plane.cls, "item")
    assert item is not None
    before = item.status
    with stage.mounted.as_(stage.callers["root"][writer]):
        try:
            for agent.status in Status:
                for item.status in type(before):
                    found = outcome(lambda: stage.write(f"agent/root.d/{name}", row.kind))
                    takes = agent.status in file.when and item.status not in file.final
                    # of an agent that is not live, no process is left
                    no = "EACCES" if writer == "a" and agent.status not in LIVE else "EBUSY"
                    assert found == ("yes" if takes else no), (agent.status, item.status)
        finally:
            agent.status, item.status = Status.BUSY, before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_of_sockets(stage: Stage, name: str, kind: str) -> None:
    agents, agent = stage.mounted.agents, stage.objects[kind]
    may = []
    for party, caller in stage.callers[kind].items():
        roles = agents.identity.roles(caller, agent)
        with suppress(DeniedError):
            OPERATIONS[name].guard.check_who(Act.ASK, name, agents, roles, agent)
            may.append(party)
    assert set(may) == set(ASKS[name].parties(kind)) & stage.callers[kind].keys()


#: the words of the manual, and whom of the parties they mean to a public agent
WORDS = {
    "the creator": "s",
    "operators": "Oo",
    "operators with uid 0": "O",
    "supervised children": "c",
    "the agent itself": "a",
    "agents with policy read": "rpk",
    "agents with policy start": "bpk",
    "agents with policy stop": "epk",
    "agents with policy write": "wpk",
    "agents with policy session read": "hpk",
    # of none of the parties
    "the sender": "",
}
PAGES = "".join(
    page.read_text() for page in (Path(__file__).parents[2] / "man").glob("ctxfs*.5")
)


def told(section: str) -> dict[str, str]:
    """What a generated list of a page says of each of its entries, by name, on one line."""
    _, _, rest = PAGES.partition(f'.\\" BEGIN {section}\n')
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


@pytest.mark.parametrize("group", [name for name in AGENT if name not in NAMES])
def test_the_manual_says_of_an_agents_files_who_writes_and_reads_them(group: str) -> None:
    entries = told("agent files")
    _, _, reads, _ = AGENT[group].public
    for name in AGENT[group].files:
        text = entries[name]
        plane = "mkdir(2)" in text
        assert said_by(text, "mkdir(2)" if plane else "Written") == AGENT[group].writers, name
        if plane:
            assert said_by(text, "rmdir(2)") == AGENT["planes"].writers, name
        if "Public." in text:
            assert set(reads) == set(ALL), name
        else:
            read = said_by(text, "Read") if "Read by" in text else set("Oosarpk")
            if "Empty to them and to who may write it." in text:
                read |= AGENT[group].writers
            assert read == set(reads), name
        private = {"s": "the creator", "sc": "the creator and supervised children"}
        who = private.get(AGENT[group].private[3])
        assert ("Of a private child by" in text) is (who is not None), name
        assert f"Of a private child by {who} only." in text or who is None, name


@pytest.mark.parametrize("group", RECORD)
def test_the_manual_says_it_of_tasks_work_items_and_waits(group: str) -> None:
    reads = set(RECORD[group].public[2])
    for path in RECORD[group].files:
        plane, _, name = path.replace("/item", "", 1).partition("/")
        if not name:
            continue
        text = told(f"{plane} files")[name]
        assert said_by(text, "Written") == RECORD[group].writers, path
        assert ("Read by" in text) is (reads != set("Oosarpk")), path
        if "Read by" in text:
            assert said_by(text, "Read") == reads, path


@pytest.mark.parametrize("group", SESSION)
def test_the_manual_says_it_of_sessions(group: str) -> None:
    for name in filter(None, SESSION[group].files):
        text = told("session files")[name]
        assert said_by(text, "Read") == set(SESSION[group].public[2]), name
        assert said_by(text, "Written") == SESSION[group].writers, name


@pytest.mark.parametrize("verb", SAYS)
def test_the_manual_says_whose_verb_it_is(verb: str) -> None:
    assert said_by(told("verbs")[verb], "Said") == set(SAYS[verb].public)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_manual_says_who_asks_for_an_operation(name: str) -> None:
    assert said_by(told("operations")[name], "Asked for") == set(ASKS[name].who)


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
        "ask": "unless new, stopping or dead.",
    },
    "ask files": {
        "question": "unless new, stopping or dead. Refused if it was asked (EBUSY).",
        "answer": "at any time. Refused if the caller is an agent, and it is not asked of that "
        "(EACCES), or if it is not asked yet (EBUSY), or if it is over (EBUSY).",
    },
    "waiting files": {
        "on": "unless new, stopping or dead. Refused if it was armed before (EBUSY).",
        "deadline": "unless new or dead. Refused if it has ended (EBUSY).",
        "trigger/TOKEN": "at any time. Refused if it was used, or its wait has ended (ENOENT).",
    },
    "work files": {"objective": "unless new or dead. Refused if it is done or cancelled (EBUSY)."},
    "task files": {
        "cmd": "at any time. Refused if it is the handle of a child (EPERM), or if it was started "
        "(EBUSY).",
        "input": "at any time. Refused if accepts_input is 0 (EACCES), or if it has ended "
        "(EBUSY).",
    },
    "task verbs": {
        "start": "(EACCES), or if it was started (EBUSY), or if its agent, or what that runs in, "
        "is paused (EBUSY).",
        "stop": "(EACCES), or if it was stopped, or has ended (EBUSY).",
        "kill": "(EACCES), or if it has ended (EBUSY).",
        "fetch": "(EACCES), or if it has no worktree (EINVAL), or if",
    },
    "verbs": {
        "start": "while new. Refused if its parent is not live (EBUSY), or if its parent waits for "
        "its next run, or for its turn (EBUSY), or if what it would run in is paused (EBUSY).",
        "reset": "while dead. Refused if its worktree is being fetched (EBUSY), or if its parent "
        "is not live (EBUSY), or if its parent has a command of its name (EEXIST), "
        "or if its parent has as many children as it may have (EDQUOT).",
        "stop": "unless stopping or dead.",
        "abort [RUN]": "while busy or paused. Refused if it has no run (ESRCH).",
    },
}


@pytest.mark.parametrize("section", STATUSES)
def test_the_manual_says_when(section: str) -> None:
    entries = told(section)
    for name, words in STATUSES[section].items():
        assert words in entries[name], name


@pytest.mark.parametrize("plane", ITEM_PLANES, ids=lambda plane: plane.name)
@pytest.mark.parametrize("status", Status)
def test_records_are_removed_in_any_status(
    stage: Stage, plane: ItemLayout[Any], status: Status
) -> None:
    agent, agents = stage.objects["root"], stage.mounted.agents
    plane.records(agents).make(ROOT, agent, "made")
    agent.status = status
    try:
        with stage.mounted.as_(ROOT):
            inode, _ = stage.find(f"agent/root.d/{plane.name}")
            rmdir = partial(stage.mounted.ops.rmdir, inode, b"made", CONTEXT)
            assert outcome(lambda: at_once(rmdir())) == "yes"
    finally:
        agent.status = Status.BUSY


def test_the_handle_of_a_child_is_not_configured(stage: Stage) -> None:
    agent, tasks = stage.objects["root"], stage.mounted.agents.tasks
    task = tasks.make(ROOT, agent, "handle")
    task.child = stage.objects["child"].index
    configured = [name for name, file in PLACED["task"].items() if file.final == STARTED]
    assert configured
    with stage.mounted.as_(ROOT):
        for name in configured:
            path = f"agent/root.d/task/handle/{name}"
            assert outcome(partial(stage.write, path, Kind.FILE)) == "EPERM", name
    task.child = NO_AGENT
    rmdir(tasks, ROOT, agent, task.name)
