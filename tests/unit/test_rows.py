"""The tables of files agree with themselves and with ctxfs(5)."""

from __future__ import annotations

import stat

import pytest

from ctxfs.files import agent as agent_files
from ctxfs.files import root as root_files
from ctxfs.files import session as session_files
from ctxfs.files import task as task_files
from ctxfs.files import tool as tool_files
from ctxfs.files import waiting as waiting_files
from ctxfs.files import work as work_files
from ctxfs.files.verbs import VERBS
from ctxfs.rows import (
    Kind,
    Plane,
    Row,
    Table,
    inode_number,
    one_line,
    split_inode,
    statuses,
    writers,
)
from runtime.caller import CONTROLLERS, OPERATORS, PARTIES, Role
from runtime.errors import MalformedError
from runtime.lifecycle import Status

TABLES = [
    agent_files.TABLE,
    agent_files.CHILD_TABLE,
    session_files.TABLE,
    session_files.CHANNEL_TABLE,
    root_files.TABLE,
    root_files.HOME_TABLE,
    root_files.HISTORY_TABLE,
    task_files.TABLE,
    work_files.TABLE,
    waiting_files.TABLE,
    tool_files.TABLE,
]
ROWS = [(table, row) for table in TABLES for row in table.rows]
FILES = [(table, row) for table, row in ROWS if row.kind is Kind.FILE]

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

#: who writes a file of an agent, and when: (roles, "new", "not busy", "any", "not dead" or "live")
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
    "inbox": (CONTROLLERS | Role.WRITER, "any"),
    "handoff.md": (CONTROLLERS, "new"),
    "input.jsonl": (CONTROLLERS, "new"),
    "result.md": (Role.SELF, "not dead"),
    "refs.jsonl": (Role.SELF, "not dead"),
    "artifact": (Role.SELF, "not dead"),
    "task": (PARTIES, "live"),
    "work": (PARTIES, "live"),
    "waiting": (PARTIES, "live"),
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


def names(table: Table, within: str = "") -> set[str]:
    return {row.name for _, row in table.within(within) if row.name}


def identify(value: object) -> str:
    if isinstance(value, Row):
        return f"{value.within}/{value.name}"
    return value.plane.name if isinstance(value, Table) else str(value)


def test_the_files_of_an_agent_are_those_of_the_abi() -> None:
    assert names(agent_files.TABLE) == AGENT


def test_the_files_of_the_root_are_those_of_the_abi() -> None:
    assert names(root_files.TABLE) == ROOT
    assert names(root_files.TABLE, "bin") == {"ctx"}


def test_the_files_of_a_session_are_those_of_the_abi() -> None:
    assert names(session_files.TABLE) == SESSION
    assert names(session_files.TABLE, "context") == CONTEXT


def test_the_files_of_work_items_and_waits_are_those_of_the_abi() -> None:
    assert names(agent_files.TABLE, "work") == {"current"}
    assert names(work_files.TABLE) == WORK
    assert names(waiting_files.TABLE) == WAITING
    assert names(waiting_files.TABLE, "trigger") == {"TOKEN"}


def test_the_files_of_a_task_are_those_of_the_abi() -> None:
    assert names(task_files.TABLE) == TASK


def test_a_command_is_written_by_the_parties_until_it_is_started() -> None:
    for _, row in task_files.TABLE.within(""):
        written = row.name in TASK_WRITTEN | {"input", "ctl", "work"}
        assert row.write == (PARTIES if written else Role.NONE), row.name
        assert (row.writable is not None) is (row.name in TASK_WRITTEN), row.name


@pytest.mark.parametrize("table", [work_files.TABLE, waiting_files.TABLE], ids=identify)
def test_the_planes_are_written_by_the_parties_while_the_agent_lives(table: Table) -> None:
    for _, row in table.within(""):
        written = row.name in PLANES_WRITTEN or (row.name == "status" and row in work_files.ROWS)
        assert row.write == (PARTIES if written else Role.NONE), row.name
        if written:
            assert Status.NEW not in row.when
            assert Status.DEAD not in row.when
            assert row.writable is not None
            assert Status.STOPPING in row.when


def test_the_verbs_are_those_of_the_abi() -> None:
    assert list(VERBS) == ["start", "stop", "kill", "pause", "resume", "abort", "reset", "session"]
    assert {verb for verb, row in VERBS.items() if row.who & Role.SELF} == {"stop"}


def test_only_the_public_files_of_a_public_agent_are_open_to_all() -> None:
    found = {row.name for row in agent_files.ROWS if row.public and not row.within}
    assert found == PUBLIC


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_who_writes_a_file_and_when(name: str) -> None:
    row = agent_files.TABLE.rows[agent_files.TABLE.number(name) - 1]
    roles, when = WRITTEN[name]
    assert row.write == roles
    assert (row.when == {Status.NEW}) is (when == "new")
    assert (row.when == frozenset(Status)) is (when == "any")
    assert (Status.BUSY in row.when) is (when in ("any", "not dead", "live"))
    assert (Status.DEAD in row.when) is (when in ("any", "not busy"))


def test_every_other_file_of_an_agent_is_written_by_nobody() -> None:
    written = {row.name for row in agent_files.ROWS if row.write and not row.within}
    assert written == set(WRITTEN)


@pytest.mark.parametrize("table", TABLES, ids=identify)
def test_names_are_unique_and_numbers_fit_an_inode(table: Table) -> None:
    assert len(table.by_name) == len(table.rows) < 256
    for (within, name), number in table.by_name.items():
        assert table.rows[number - 1].name == name
        assert table.number(name, within) == number


def test_planes_are_told_apart() -> None:
    assert {table.plane for table in TABLES} == set(Plane)
    assert len({table.plane for table in TABLES}) == len(TABLES)


@pytest.mark.parametrize(("table", "row"), ROWS, ids=identify)
def test_every_name_that_is_shown_is_explained(table: Table, row: Row) -> None:
    shape = row.within in ("agent", "self", "tool", "/") or table.plane is Plane.CHILD
    hidden = not row.name or shape
    assert hidden or row.doc
    assert "\n" not in row.doc


@pytest.mark.parametrize(("table", "row"), FILES, ids=identify)
def test_mode_bits_agree_with_who_may(table: Table, row: Row) -> None:
    assert bool(row.mode & 0o222) is bool(row.write)
    assert bool(row.mode & 0o444) is bool(row.public or row.read)
    assert row.mode & 0o7000 == 0


@pytest.mark.parametrize(("table", "row"), FILES, ids=identify)
def test_every_file_can_be_read_and_written_as_it_says(table: Table, row: Row) -> None:
    if row.mode & 0o444:
        assert row.render is not None or row.opener is not None
    if row.write and row.opener is None:
        assert ((row.commit or row.commit_found) is not None) is (row.store is None)
        assert row.render is not None
        assert row.document or row.store is None
    if row.render is None and row.opener is not None and row.mode & 0o444:
        assert row.size is not None


GENERATED = {
    *("status", "error", "metrics", "agents"),
    *("policy.effective", "mount.effective", "families", "usage", "processes", "queue", "message"),
    *("pack.md", "now.md"),
}


@pytest.mark.parametrize(("table", "row"), FILES, ids=identify)
def test_what_is_generated_has_no_size_and_what_has_one_is_cheap(table: Table, row: Row) -> None:
    of_another = row.name in ("status", "error") and table.plane not in (Plane.ROOT, Plane.AGENT)
    public_state = row.name == "status" and table.plane is Plane.AGENT
    assert row.generated is (row.name in GENERATED and not of_another and not public_state)
    if row.document:
        assert row.size is not None, "a document is not read to be measured"


@pytest.mark.parametrize(("table", "row"), ROWS, ids=identify)
def test_each_kind_has_what_it_needs(table: Table, row: Row) -> None:
    assert bool(row.target) is (row.kind is Kind.LINK)
    if row.entries is not None or row.make is not None or row.remove is not None:
        assert row.kind is Kind.DIRECTORY
    if row.single:
        assert row.check is not None


@pytest.mark.parametrize("directory", ["agent", "tool", "home", "shared", "trigger"])
def test_the_modes_of_the_roots_directories(directory: str) -> None:
    modes = {"agent": 0o1777, "shared": 0o1777, "trigger": 0o311}
    row = root_files.TABLE.rows[root_files.TABLE.number(directory) - 1]
    assert row.mode == modes.get(directory, 0o755)


def test_what_can_be_polled_is_what_the_abi_says() -> None:
    assert {row.name for _, row in ROWS if row.polled} == {
        "status", "events.jsonl", "queue", "worktree",
    }  # fmt: skip


def test_secrets_are_readable_by_the_owner_only() -> None:
    assert agent_files.TABLE.rows[agent_files.TABLE.number("env") - 1].mode == 0o600


@pytest.mark.parametrize("index", [0, 1, 20_000, 2**31])
@pytest.mark.parametrize("plane", list(Plane))
def test_an_inode_number_is_computed_and_taken_apart(plane: Plane, index: int) -> None:
    inode = inode_number(plane, index, 77)
    assert split_inode(inode) == (plane, index, 77)
    assert inode < 1 << 62


def test_a_change_of_a_field_reaches_every_file_that_shows_it() -> None:
    table = agent_files.TABLE
    for field, shown in (
        ("profile", {"profile", "visibility", "ownership", "ingress"}),
        ("policy", {"policy"}),
        ("lineage", {"parent"}),
        ("meta", {"meta.json"}),
        ("status", {"status"}),
    ):
        assert {table.rows[n - 1].name for n in table.depending[field]} == shown


def test_writers_and_statuses_are_told_in_words() -> None:
    row = Row(name="x", write=CONTROLLERS, when=frozenset({Status.NEW}))
    assert (writers(row), statuses(row)) == ("its creator and operators", "while new")
    row = Row(name="x", write=Role.ROOT, when=frozenset(Status))
    assert (writers(row), statuses(row)) == ("operators with uid 0", "in any status")
    row = Row(name="x", when=frozenset(Status) - {Status.DEAD})
    assert (writers(row), statuses(row)) == ("nobody", "unless dead")


@pytest.mark.parametrize(("text", "value"), [("a\n", "a"), ("a", "a"), ("", ""), ("\n", "")])
def test_one_value_is_without_its_newline(text: str, value: str) -> None:
    assert one_line(text) == value


@pytest.mark.parametrize("text", ["a\nb", "a\n\n", "\na\n", "\n\n"])
def test_two_lines_are_no_value(text: str) -> None:
    with pytest.raises(MalformedError, match="write one value, on one line"):
        one_line(text)


def test_kinds_are_file_types() -> None:
    assert [stat.S_IFMT(kind.value) for kind in Kind] == [kind.value for kind in Kind]
