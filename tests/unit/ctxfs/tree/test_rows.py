"""The tables of files agree with themselves; what each file is, `adapter/test_who_may.py` says."""

from __future__ import annotations

import stat
from typing import Any

import pytest

from ctxfs.files import agent as agent_files
from ctxfs.files import root as root_files
from ctxfs.filesystem import LAYOUTS
from ctxfs.tree.layouts import Layout, split_inode
from ctxfs.tree.rows import (
    Directory,
    Document,
    History,
    Inlet,
    Kind,
    Row,
    Staged,
    Verbs,
    one_line,
)
from runtime.authority.guard import said, times
from runtime.caller import CONTROLLERS, PARTIES, Role
from runtime.errors import MalformedError
from runtime.records.lifecycle import Status

ROWS = [(layout, row) for layout in LAYOUTS for row in layout.rows]
FILES = [(layout, row) for layout, row in ROWS if row.kind is Kind.FILE]
SINGLE = [(layout, row) for layout, row in FILES if isinstance(row, Staged) and row.single]


def identify(value: object) -> str:
    if isinstance(value, Row):
        return f"{value.within}/{value.name}"
    return value.name if isinstance(value, Layout) else str(value)


@pytest.mark.parametrize("layout", LAYOUTS, ids=identify)
def test_names_are_unique_and_numbers_fit_an_inode(layout: Layout[Any]) -> None:
    elsewhere = [row.name for row in layout.rows if not row.is_inside]
    assert len(layout.numbers) + len(set(elsewhere)) == len(layout.rows) < 256
    for (within, name), number in layout.numbers.items():
        assert layout.numbered[number].name == name
        assert layout.number_of(name, within) == number


@pytest.mark.parametrize("layout", LAYOUTS, ids=identify)
def test_an_object_has_one_directory(layout: Layout[Any]) -> None:
    assert [row for row in layout.rows if row.top] == [layout.numbered[layout.top]]


def test_planes_are_told_apart() -> None:
    assert sorted(layout.number for layout in LAYOUTS) == list(range(len(LAYOUTS)))
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)


@pytest.mark.parametrize(("layout", "row"), ROWS, ids=identify)
def test_every_name_that_is_shown_is_explained(layout: Layout[Any], row: Row[Any]) -> None:
    assert row.doc or not row.is_inside
    assert "\n" not in row.doc


@pytest.mark.parametrize(("layout", "row"), FILES, ids=identify)
def test_mode_bits_agree_with_who_may(layout: Layout[Any], row: Row[Any]) -> None:
    assert bool(row.mode & 0o222) is bool(row.guard.who)
    # what is only written looks like a ctl
    assert bool(row.mode & 0o444) is bool(row.public or row.read or isinstance(row, Inlet))
    if isinstance(row, Inlet | Verbs):
        assert row.mode == 0o660
    assert row.mode & 0o7000 == 0


@pytest.mark.parametrize(("layout", "row"), SINGLE, ids=identify)
def test_one_value_is_checked_when_its_line_is_written(
    layout: Layout[Any], row: Staged[Any]
) -> None:
    assert row.check is not None


@pytest.mark.parametrize(("layout", "row"), ROWS, ids=identify)
def test_what_is_only_shown_is_written_by_nobody(layout: Layout[Any], row: Row[Any]) -> None:
    writable = isinstance(row, Staged | Verbs | Document | History | Inlet)
    assert writable or isinstance(row, Directory) or not row.guard.who
    if writable and not isinstance(row, History):
        assert row.guard.who


@pytest.mark.parametrize("directory", ["agent", "tool", "home", "shared", "trigger"])
def test_the_modes_of_the_roots_directories(directory: str) -> None:
    modes = {"agent": 0o1777, "shared": 0o1777, "trigger": 0o333}
    row = root_files.LAYOUT.row(directory)
    assert row.mode == modes.get(directory, 0o755)


def test_secrets_are_readable_by_the_owner_only() -> None:
    assert agent_files.LAYOUT.row("env").mode == 0o600


@pytest.mark.parametrize("index", [0, 1, 20_000, 2**31])
@pytest.mark.parametrize("layout", LAYOUTS, ids=identify)
def test_an_inode_number_is_computed_and_taken_apart(layout: Layout[Any], index: int) -> None:
    inode = layout.inode(index, 77)
    assert split_inode(inode) == (layout.number, index, 77)
    assert inode < 1 << 62


def test_a_change_of_a_field_reaches_every_file_that_shows_it() -> None:
    layout = agent_files.LAYOUT
    for field, shown in (
        ("profile", {"profile", "visibility", "ownership", "ingress"}),
        ("policy", {"policy"}),
        ("lineage", {"parent"}),
        ("meta", {"meta.json"}),
        ("status", {"status"}),
    ):
        assert {layout.numbered[n].name for n in layout.depending[field]} >= shown


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
