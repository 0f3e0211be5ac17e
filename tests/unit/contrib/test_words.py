"""What the client knows of the tables of the runtime and of the files."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

import client.words
from client import events, messages, planes, root, sockets, tools
from contrib.generate import words
from ctxfs.errnos import ERRNOS
from ctxfs.files import agent as agent_files
from ctxfs.files import task as task_files
from ctxfs.files import waiting as waiting_files
from ctxfs.files import work as work_files
from ctxfs.files.verbs import VERBS
from ctxfs.tree.layouts import Layout
from ctxfs.tree.rows import Kind
from runtime.records.items import MESSAGE_MOVES
from runtime.records.model import Outcome
from tests.unit.client.fakes import all_commands

MODULE = Path(client.words.__file__)
PLANES: dict[str, Layout[Any]] = {
    "task": task_files.LAYOUT,
    "work": work_files.LAYOUT,
    "waits": waiting_files.LAYOUT,
}
#: of a plane's files, those that a command of their own shows, or that nothing is read from
ELSEWHERE = {"input", "output", "ctl"}


def files_of(layout: Layout[Any]) -> set[str]:
    """What can be read of each object of a plane."""
    rows = (row for _, row in layout.within("") if row.kind is Kind.FILE)
    return {row.name for row in rows if row.read}


def test_the_module_is_up_to_date() -> None:
    assert words.main(["--check", str(MODULE)]) == 0, "run: make words"


def test_check_refuses_a_module_that_is_out_of_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "words.py"
    copy.write_text(MODULE.read_text().replace('"rw"', '"wr"'))
    assert words.main(["--check", str(copy)]) == 1
    assert "make words" in capsys.readouterr().err
    assert words.main([str(copy)]) == 0
    assert copy.read_text() == MODULE.read_text()


@pytest.mark.parametrize("group", PLANES)
def test_every_file_of_a_plane_is_shown(group: str) -> None:
    plane = planes.PLANES[group]
    assert {*plane.files, *plane.texts} == files_of(PLANES[group]) - ELSEWHERE
    assert {file for files in plane.columns.values() for file in files.split()} <= {*plane.files}


def test_every_verb_of_an_agent_is_a_command() -> None:
    commands = {command.name for command in all_commands()}
    assert set(VERBS) <= commands


def test_options_that_are_files_are_rows() -> None:
    rows = {row.name for row in agent_files.LAYOUT.rows}
    assert {"parent", "mount", "env", "cwd", "limits", "exec", "handoff.md", "ctl"} <= rows
    assert {"life", "restart", "mode", "context", "workspace", "model"} <= rows


def test_every_end_has_an_exit_status() -> None:
    assert set(messages.ENDINGS) == {str(status) for status in MESSAGE_MOVES.terminal}
    assert set(events.TASK_OUTCOMES) <= set(client.words.TASK_ENDS)
    assert set(events.TASK_OUTCOMES.values()) <= {str(outcome) for outcome in Outcome}


def test_every_error_that_is_explained_can_be_met() -> None:
    numbers = {*ERRNOS.values(), errno.EIO}
    assert set(root.HINTS) <= numbers
    names = {*sockets.MESSAGE_CODES, *tools.TOOL_CODES}
    connecting = {errno.ENOTCONN, errno.ECONNREFUSED}
    assert {getattr(errno, name) for name in names} <= numbers | connecting
