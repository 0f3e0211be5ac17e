"""The tables of files agree with themselves; what each file is, `adapter/test_who_may.py` says."""

from __future__ import annotations

import stat
from typing import Any

import pytest

from ctxfs.files import agent as agent_files
from ctxfs.files import root as root_files
from ctxfs.filesystem import PLANES
from ctxfs.tree.planes import Plane, split_inode
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

ROWS = [(plane, row) for plane in PLANES for row in plane.rows]
FILES = [(plane, row) for plane, row in ROWS if row.kind is Kind.FILE]
SINGLE = [(plane, row) for plane, row in FILES if isinstance(row, Staged) and row.single]


def identify(value: object) -> str:
    if isinstance(value, Row):
        return f"{value.within}/{value.name}"
    return value.name if isinstance(value, Plane) else str(value)


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
    assert sorted(plane.number for plane in PLANES) == list(range(len(PLANES)))
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


@pytest.mark.parametrize(("plane", "row"), SINGLE, ids=identify)
def test_one_value_is_checked_when_its_line_is_written(plane: Plane[Any], row: Staged[Any]) -> None:
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
        assert {plane.rows[n - 1].name for n in plane.depending[field]} >= shown


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
