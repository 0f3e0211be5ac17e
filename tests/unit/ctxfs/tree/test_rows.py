"""The tables of files agree with themselves and with ctxfs(5)."""

from __future__ import annotations

import stat
from typing import Any

import pytest

from ctxfs.files import agent as agent_files
from ctxfs.files import root as root_files
from ctxfs.files import session as session_files
from ctxfs.files import task as task_files
from ctxfs.files import waiting as waiting_files
from ctxfs.files import work as work_files
from ctxfs.files.verbs import VERBS
from ctxfs.filesystem import PLANES
from ctxfs.tree.planes import Plane, split_inode
from ctxfs.tree.rows import (
    Directory,
    Document,
    History,
    Inlet,
    Kind,
    Row,
    Shown,
    Staged,
    Verbs,
    one_line,
)
from runtime.authority.guard import said, times
from runtime.caller import CONTROLLERS, OPERATORS, PARTIES, Role
from runtime.errors import MalformedError, NotRunningError, WrongStateError
from runtime.records.lifecycle import Status

ROWS = [(plane, row) for plane in PLANES for row in plane.rows]
FILES = [(plane, row) for plane, row in ROWS if row.kind is Kind.FILE]

#: ctxfs(5), Files of an agent
AGENT = {
    "parent",
    "supervisor",
    "life",
    "profile",
    "visibility",
    "ownership",
    "families",
    "ingress",
    "owner",
    "uid",
    "gid",
    "groups",
    "label",
    "policy",
    "policy.effective",
    "mount",
    "mount.effective",
    "root",
    "iso",
    "workspace",
    "cwd",
    "env",
    "path",
    "context",
    "model",
    "exec",
    "mode",
    "limits",
    "restart",
    "meta.json",
    "status",
    "outcome",
    "reason",
    "incarnation",
    "pid",
    "run",
    "cgroup",
    "usage",
    "out",
    "log",
    "error",
    "ctl",
    "wait",
    "inbox",
    "queue",
    "handoff.md",
    "input.jsonl",
    "inherited.md",
    "inherited.json",
    "result.md",
    "refs.jsonl",
    "artifact",
    "child",
    "task",
    "work",
    "waiting",
    "session",
}
PUBLIC = {
    "parent",
    "life",
    "profile",
    "visibility",
    "status",
    "outcome",
    "model",
    "wait",
}
ROOT = {
    "status",
    "error",
    "metrics",
    "ctxd.sock",
    "bin",
    "agent",
    "tool",
    "home",
    "shared",
    "trigger",
}
SESSION = {
    "messages.jsonl",
    "events.jsonl",
    "latest.md",
    "state",
    "cwd",
    "created_at",
    "updated_at",
    "meta.json",
    "context",
}
CONTEXT = {
    "memory.md",
    "episode",
    "pack.md",
    "child",
}

#: the columns "written by" and "when" of ctxfs(5)
WRITTEN = {
    "parent": (OPERATORS, "new"),
    "life": (CONTROLLERS, "new"),
    "profile": (CONTROLLERS, "new"),
    "owner": (Role.ROOT, "new"),
    "uid": (Role.ROOT, "new"),
    "gid": (Role.ROOT, "new"),
    "groups": (CONTROLLERS, "new"),
    "label": (CONTROLLERS, "new"),
    "policy": (CONTROLLERS, "not dead"),
    "mount": (CONTROLLERS, "new"),
    "root": (CONTROLLERS, "new"),
    "iso": (CONTROLLERS, "new"),
    "workspace": (CONTROLLERS, "new"),
    "cwd": (CONTROLLERS, "new"),
    "env": (CONTROLLERS, "new"),
    "path": (CONTROLLERS, "new"),
    "context": (CONTROLLERS, "new"),
    "model": (CONTROLLERS, "not busy"),
    "exec": (CONTROLLERS, "not busy"),
    "mode": (CONTROLLERS, "new"),
    "limits": (CONTROLLERS, "any"),
    "restart": (CONTROLLERS, "any"),
    "meta.json": (CONTROLLERS, "any"),
    "ctl": (PARTIES | Role.STARTER | Role.STOPPER, "any"),
    "inbox": (CONTROLLERS | Role.WRITER, "taking messages"),
    "handoff.md": (CONTROLLERS, "new"),
    "input.jsonl": (CONTROLLERS, "new"),
    "result.md": (Role.SELF, "not dead"),
    "refs.jsonl": (Role.SELF, "not dead"),
    "artifact": (Role.SELF, "not dead"),
    "task": (PARTIES, "not stopping"),
    "work": (PARTIES, "not stopping"),
    "waiting": (PARTIES, "not stopping"),
}
#: these, in statuses
WHEN = {
    "new": {"new"},
    "any": set(Status),
    "not dead": set(Status) - {"dead"},
    "not busy": {"new", "ready", "idle", "paused", "dead"},
    "not stopping": {"starting", "ready", "busy", "idle", "paused"},
    "taking messages": set(Status) - {"stopping", "dead"},
}
#: ctxfs(5), Tasks
TASK = {
    *("kind", "title", "cmd", "cwd", "env", "accepts_input", "status", "exit", "pid"),
    *("output", "preview", "input", "ctl", "wait", "work", "started_at", "ended_at"),
    "worktree",
}
#: of these, until it is started
TASK_WRITTEN = {"title", "cmd", "cwd", "env", "accepts_input"}
#: ctxfs(5), Work items
WORK = {
    "objective",
    "plan.md",
    "acceptance.md",
    "status",
    "blocked_by",
    "parent",
    "created_at",
    "updated_at",
}
#: ctxfs(5), Waits
WAITING = {"on", "work", "deadline", "status", "payload", "token"}
#: of both: written by the agent itself too, while it is live
PLANES_WRITTEN = {
    *("objective", "plan.md", "acceptance.md", "blocked_by", "parent"),
    *("on", "work", "deadline"),
}


def names(plane: Plane[Any], within: str = "") -> set[str]:
    return {row.name for _, row in plane.within(within)}


def identify(value: object) -> str:
    if isinstance(value, Row):
        return f"{value.within}/{value.name}"
    return value.name if isinstance(value, Plane) else str(value)


def test_the_files_of_an_agent_are_those_of_the_abi() -> None:
    assert names(agent_files.PLANE) == AGENT


def test_the_files_of_the_root_are_those_of_the_abi() -> None:
    assert names(root_files.PLANE) == ROOT
    assert names(root_files.PLANE, "bin") == {"ctx"}


def test_the_files_of_a_session_are_those_of_the_abi() -> None:
    assert names(session_files.PLANE) == SESSION
    assert names(session_files.PLANE, "context") == CONTEXT


def test_the_files_of_work_items_and_waits_are_those_of_the_abi() -> None:
    assert names(agent_files.PLANE, "work") == {"current"}
    assert names(work_files.PLANE) == WORK
    assert names(waiting_files.PLANE) == WAITING
    assert [row.name for row in waiting_files.ROWS if row.path is not None] == ["TOKEN"]


def test_the_files_of_a_task_are_those_of_the_abi() -> None:
    assert names(task_files.PLANE) == TASK


def test_a_command_is_written_by_the_parties_until_it_is_started() -> None:
    for _, row in task_files.PLANE.within(""):
        written = row.name in TASK_WRITTEN | {"input", "ctl", "work"}
        assert row.guard.who == (PARTIES if written else Role.NONE), row.name
        assert bool(row.guard.unless) is (row.name in TASK_WRITTEN | {"input"}), row.name


@pytest.mark.parametrize("plane", [work_files.PLANE, waiting_files.PLANE], ids=identify)
def test_the_planes_are_written_by_the_parties_while_the_agent_lives(plane: Plane[Any]) -> None:
    for _, row in plane.within(""):
        written = row.name in PLANES_WRITTEN or (row.name == "status" and row in work_files.ROWS)
        assert row.guard.who == (PARTIES if written else Role.NONE), row.name
        if written:
            assert Status.NEW not in row.guard.when
            assert Status.DEAD not in row.guard.when
            assert row.guard.unless
            assert (Status.STOPPING in row.guard.when) is (row.name != "on")


def test_the_verbs_are_those_of_the_abi() -> None:
    assert list(VERBS) == ["start", "stop", "kill", "pause", "resume", "abort", "reset", "session"]
    assert {verb for verb, row in VERBS.items() if row.guard.who & Role.SELF} == {"stop"}


#: the table of verbs of ctxfs(5): in which statuses each is not refused
SAID = {
    "start": {"new"},
    "stop": {"new", "starting", "ready", "idle", "busy", "paused"},
    "kill": {"new", "starting", "ready", "idle", "busy", "paused", "stopping"},
    "pause": {"ready", "idle", "busy"},
    "resume": {"paused"},
    "abort": {"busy", "paused"},
    "reset": {"dead"},
}


@pytest.mark.parametrize("verb", SAID)
def test_a_verb_is_said_in_the_statuses_of_the_abi(verb: str) -> None:
    guard = VERBS[verb].guard
    assert guard.when == SAID[verb]
    assert guard.misfit is not None
    for status in set(Status) - guard.when:
        error = guard.misfit(status)
        nothing_runs = verb == "abort" and status is not Status.STOPPING
        assert type(error) is (NotRunningError if nothing_runs else WrongStateError)


def test_a_session_is_switched_while_nothing_runs() -> None:
    guard = VERBS["session"].guard
    assert guard.when == {"new", "ready", "idle", "paused"}
    assert [reason.text for reason in guard.unless] == ["its run is paused"]


def test_only_the_public_files_of_a_public_agent_are_open_to_all() -> None:
    found = {row.name for row in agent_files.ROWS if row.public and row.is_inside}
    assert found == PUBLIC


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_who_writes_a_file_and_when(name: str) -> None:
    row = agent_files.PLANE.row(name)
    roles, when = WRITTEN[name]
    assert row.guard.who == roles
    assert row.guard.when == WHEN[when]


def test_every_other_file_of_an_agent_is_written_by_nobody() -> None:
    written = {row.name for row in agent_files.ROWS if row.guard.who and not row.within}
    assert written == set(WRITTEN)


@pytest.mark.parametrize("plane", PLANES, ids=identify)
def test_names_are_unique_and_numbers_fit_an_inode(plane: Plane[Any]) -> None:
    elsewhere = [row.name for row in plane.rows if not row.is_inside]
    assert len(plane.numbers) + len(set(elsewhere)) == len(plane.rows) < 256
    for (within, name), number in plane.numbers.items():
        assert plane.rows[number - 1].name == name
        assert plane.number_of(name, within) == number


@pytest.mark.parametrize("plane", PLANES, ids=identify)
def test_an_object_has_one_directory(plane: Plane[Any]) -> None:
    assert [row for row in plane.rows if row.top] == [plane.rows[plane.top - 1]]


def test_planes_are_told_apart() -> None:
    assert sorted(plane.number for plane in PLANES) == list(range(11))
    assert len({plane.name for plane in PLANES}) == len(PLANES)


@pytest.mark.parametrize(("plane", "row"), ROWS, ids=identify)
def test_every_name_that_is_shown_is_explained(plane: Plane[Any], row: Row[Any]) -> None:
    assert row.doc or not row.is_inside
    assert "\n" not in row.doc


@pytest.mark.parametrize(("plane", "row"), FILES, ids=identify)
def test_mode_bits_agree_with_who_may(plane: Plane[Any], row: Row[Any]) -> None:
    assert bool(row.mode & 0o222) is bool(row.guard.who)
    assert bool(row.mode & 0o444) is bool(row.public or row.read)
    assert row.mode & 0o7000 == 0


GENERATED = {
    *("status", "error", "metrics", "agents"),
    *("policy.effective", "mount.effective", "families", "usage", "processes", "queue", "message"),
    *("pack.md", "now.md"),
}


@pytest.mark.parametrize(("plane", "row"), FILES, ids=identify)
def test_what_is_generated_has_no_size_and_what_has_one_is_cheap(
    plane: Plane[Any], row: Row[Any]
) -> None:
    of_another = row.name in ("status", "error") and plane.name not in ("root", "agent")
    public_state = row.name == "status" and plane is agent_files.PLANE
    generated = isinstance(row, Shown) and row.generated
    assert generated is (row.name in GENERATED and not of_another and not public_state)


@pytest.mark.parametrize(("plane", "row"), FILES, ids=identify)
def test_one_value_is_checked_when_its_line_is_written(plane: Plane[Any], row: Row[Any]) -> None:
    if isinstance(row, Staged) and row.single:
        assert row.check is not None


@pytest.mark.parametrize(("plane", "row"), ROWS, ids=identify)
def test_what_is_only_shown_is_written_by_nobody(plane: Plane[Any], row: Row[Any]) -> None:
    writable = isinstance(row, Staged | Verbs | Document | History | Inlet)
    assert writable or isinstance(row, Directory) or not row.guard.who
    if writable and not isinstance(row, History):
        assert row.guard.who


@pytest.mark.parametrize("directory", ["agent", "tool", "home", "shared", "trigger"])
def test_the_modes_of_the_roots_directories(directory: str) -> None:
    modes = {"agent": 0o1777, "shared": 0o1777, "trigger": 0o311}
    row = root_files.PLANE.row(directory)
    assert row.mode == modes.get(directory, 0o755)


def test_what_can_be_polled_is_what_the_abi_says() -> None:
    assert {row.name for _, row in ROWS if row.polled} == {
        "status", "events.jsonl", "queue", "worktree",
    }  # fmt: skip


def test_secrets_are_readable_by_the_owner_only() -> None:
    assert agent_files.PLANE.row("env").mode == 0o600


@pytest.mark.parametrize("index", [0, 1, 20_000, 2**31])
@pytest.mark.parametrize("plane", PLANES, ids=identify)
def test_an_inode_number_is_computed_and_taken_apart(plane: Plane[Any], index: int) -> None:
    inode = plane.inode(index, 77)
    assert split_inode(inode) == (plane.number, index, 77)
    assert inode < 1 << 62


def test_a_change_of_a_field_reaches_every_file_that_shows_it() -> None:
    plane = agent_files.PLANE
    for field, shown in (
        ("profile", {"profile", "visibility", "ownership", "ingress"}),
        ("policy", {"policy"}),
        ("lineage", {"parent"}),
        ("meta", {"meta.json"}),
        ("status", {"status"}),
    ):
        assert {plane.rows[n - 1].name for n in plane.depending[field]} == shown


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (CONTROLLERS, "the creator and operators"),
        (PARTIES, "the creator, operators and the agent itself"),
        (Role.ROOT, "operators with uid 0"),
        (Role.ANYONE | Role.SELF, "everybody"),
        (Role.NONE, "nobody"),
    ],
)
def test_roles_are_told_in_words(roles: Role, words: str) -> None:
    assert said(roles) == words


@pytest.mark.parametrize(
    ("when", "words"),
    [
        ({Status.NEW}, "while new"),
        (set(Status), "at any time"),
        (set(Status) - {Status.DEAD}, "unless dead"),
        (set(Status) - {Status.NEW, Status.DEAD, Status.STOPPING}, "unless new, stopping or dead"),
        ({Status.READY, Status.IDLE}, "while ready or idle"),
    ],
)
def test_statuses_are_told_in_words(when: set[Status], words: str) -> None:
    assert times(frozenset(when)) == words


@pytest.mark.parametrize(("text", "value"), [("a\n", "a"), ("a", "a"), ("", ""), ("\n", "")])
def test_one_value_is_without_its_newline(text: str, value: str) -> None:
    assert one_line(text) == value


@pytest.mark.parametrize("text", ["a\nb", "a\n\n", "\na\n", "\n\n"])
def test_two_lines_are_no_value(text: str) -> None:
    with pytest.raises(MalformedError, match="write one value, on one line"):
        one_line(text)


def test_kinds_are_file_types() -> None:
    assert [stat.S_IFMT(kind.value) for kind in Kind] == [kind.value for kind in Kind]
