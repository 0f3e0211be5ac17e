"""Inode numbers mean the same file for ever: the kernel keeps them longer than a version runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ctxfs.files import agent as agent_files
from ctxfs.filesystem import LAYOUTS
from ctxfs.tools.registry import NUMBERS
from ctxfs.tools.registry import TOOLS as PRESENT_TOOLS
from ctxfs.tree.layouts import Layout
from ctxfs.tree.numbers import ROWS, ROWS_MAX, TOOLS
from ctxfs.tree.rows import Row, Shown
from runtime.records.model import Agent

#: a line for each number that was ever given: add new ones at the end of their list
RECORDED = Path(__file__).with_name("numbers.txt")


def present() -> Iterator[str]:
    layouts = {layout.name: layout.number for layout in LAYOUTS}
    for name, rows in ROWS.items():
        for number, row in enumerate(rows, 1):
            yield f"{layouts[name]} {number} {name}/{row}"
    for number, name in enumerate(TOOLS, 1):
        yield f"tool {number} {name}"


def test_no_number_that_was_given_changes() -> None:
    recorded = RECORDED.read_text().splitlines()
    assert sorted(present()) == sorted(recorded)
    assert len({line.rpartition(" ")[0] for line in recorded}) == len(recorded)


@pytest.mark.parametrize("names", [*ROWS.values(), TOOLS])
def test_every_name_has_one_number_that_fits(names: tuple[str, ...]) -> None:
    assert len(set(names)) == len(names) <= ROWS_MAX


def test_every_tool_has_a_number() -> None:
    assert {tool.name for tool in PRESENT_TOOLS} <= set(NUMBERS)


def test_a_row_in_front_of_all_others_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    layout: Layout[Agent] = agent_files.LAYOUT
    row: Row[Agent] = Shown(name="first", render=lambda base, agent, caller: "")
    with pytest.raises(LookupError, match=r"add \['first'\] at the end of 'agent'"):
        replace(layout, rows=(row, *layout.rows))
    monkeypatch.setitem(ROWS, "agent", (*ROWS["agent"], "first"))
    longer = replace(layout, rows=(row, *layout.rows))
    assert next(iter(longer.within("")))[1] is row  # it is listed first
    assert all(longer.number_of(name, within) == number
               for (within, name), number in layout.numbers.items())
    assert longer.top == layout.top and longer.beside == layout.beside
