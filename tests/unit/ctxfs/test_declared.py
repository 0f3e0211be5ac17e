"""Files that declare agents: their schema, and what is wrong with a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from ctxfs.declared import ROWS, START, Declared, parse, read_directory, schema, unread
from ctxfs.files import agent
from ctxfs.tree.rows import Control, PathControl

SCHEMA = Path(__file__).parents[3] / "contrib" / "ctxfs-agent.schema.json"


def said(text: str) -> list[str]:
    _, mistakes = parse("coder", "coder.yaml", text)
    return [str(mistake) for mistake in mistakes]


def test_the_schema_is_one_and_is_up_to_date() -> None:
    Draft202012Validator.check_schema(schema())
    assert json.loads(SCHEMA.read_text()) == schema(), "run: make schema"


def test_every_file_that_sets_an_agent_up_can_be_declared() -> None:
    written = {row.name for row in agent.ROWS
               if isinstance(row, Control | PathControl) and not row.within}  # fmt: skip
    assert ROWS.keys() == written | {"handoff.md", "input.jsonl"}
    assert set(schema()["properties"]) == ROWS.keys() | {START}
    assert next(iter(ROWS)) == "parent", "what is written later is judged by it"


def test_all_that_is_wrong_is_told_by_line() -> None:
    assert said("""\
exce: sh
mode: fast
limits:
  memroy.max: 1G
  pids.max: many
  net.api.max: 10
policy:
  - allow coder_t agent:* create
  - allow b_t agent:* create
  - 7
env:
  A: 1.5
  B-C: x
  D: "a\\nb"
groups: [nobodys, 5]
meta.json: [1]
start: maybe
cwd:
handoff.md: "a\\0b"
""") == [
        "coder.yaml:1: exce: unknown key; did you mean exec?",
        'coder.yaml:2: mode: "fast" is not one of once, turn, resident',
        "coder.yaml:4: limits.memroy.max: unknown key; did you mean memory.max?",
        'coder.yaml:5: limits.pids.max: "many" is not a number; use digits 0-9',
        'coder.yaml:9: policy[1]: "b_t" is another agent\'s label; use coder_t',
        "coder.yaml:10: policy[2]: 7 is not a text; put it into quotes",
        "coder.yaml:12: env.A: 1.5 is not a text or a whole number; put it into quotes",
        "coder.yaml:13: env.B-C: unknown key; a name that matches ^[A-Za-z_][A-Za-z0-9_]*$ is one",
        "coder.yaml:14: env.D: has a newline, which a line cannot have",
        'coder.yaml:15: groups[0]: no group "nobodys" is known here',
        "coder.yaml:16: meta.json: a list is not a map",
        'coder.yaml:17: start: "maybe" is not true or false',
        "coder.yaml:18: cwd: nothing is not a text",
        "coder.yaml:19: handoff.md: a NUL byte cannot be in a text",
    ]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", []),
        ("# nothing\n", []),
        ("label: tag\npolicy: [allow tag agent:* create]\n", []),
        ("restart: no\nexec: echo no\n", []),
        ("- exec\n", ["coder.yaml:1: not a map of the agent's files; write one"]),
        ("owner: -1\n", ["coder.yaml:1: owner: -1 is less than the minimum of 0"]),
        ("owner: root\ngid: 0\n", []),
        ("parent: a/b\n", ['coder.yaml:1: parent: "a/b" is not a name']),
        ("exec: |\n  a\n  b\n", ["coder.yaml:1: exec: write one value, on one line"]),
        ("exec: >\n  a\n  b\n", []),
        ("start: true\n", ["coder.yaml:1: start: there is nothing to start: add exec"]),
        ("start: true\nparent: lead\n", []),
    ],
)  # fmt: skip
def test_a_text_declares_an_agent_or_says_why_not(text: str, wrong: list[str]) -> None:
    found = said(text)
    assert len(found) == len(wrong)
    assert all(one.startswith(other) for one, other in zip(found, wrong, strict=True)), found


_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*ROWS, START]), _VALUES, max_size=4))
@example({"owner": 0.0, "gid": 61000.0, "groups": [1.0]})  # whole numbers, for schemas
def test_any_values_are_right_or_wrong(values: dict[str, Any]) -> None:
    declaration, mistakes = parse("coder", "coder.yaml", json.dumps(values))
    assert (declaration is None) == bool(mistakes)
    for mistake in mistakes:
        assert mistake.line == 1
        assert str(mistake).isprintable()


def test_parents_come_before_their_children_and_circles_are_refused(tmp_path: Path) -> None:
    for name, parent in (("a", "b"), ("b", "c"), ("c", "other"), ("d", ""),
                         ("x", "y"), ("y", "x"), ("z", "x")):  # fmt: skip
        (tmp_path / f"{name}.yaml").write_text(f"parent: {parent}\n" if parent else "")
        (tmp_path / f"{name}.yaml").chmod(0o644)
    found = read_directory(tmp_path, trusted={tmp_path.stat().st_uid})
    assert [each.name for each in found.ordered()] == ["c", "b", "a", "d"]
    assert found.broken == {str(tmp_path / f"{name}.yaml") for name in "xyz"}
    assert {mistake.key for mistake in found.mistakes} == {"parent"}


def test_without_a_directory_nothing_is_declared(tmp_path: Path) -> None:
    assert read_directory(tmp_path / "none", trusted=()) == Declared()


def test_what_is_no_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "agents.d").touch()
    found = read_directory(tmp_path / "agents.d", trusted={0})
    assert [str(mistake) for mistake in found.mistakes] == [f"{tmp_path}/agents.d: Not a directory"]


def test_a_file_that_looks_like_the_settings_is_told_of(tmp_path: Path) -> None:
    settings = tmp_path / "config.yaml"
    assert unread(settings) == []
    for name in ("config.yaml", "ctxfs.yaml", "config.yml", "other.yaml"):
        (tmp_path / name).touch()
    what = f"this file is not read: settings are in {settings}, agents in agents.d beside it"
    told = [str(mistake) for mistake in unread(settings)]
    assert told == [f"{tmp_path}/config.yml: {what}", f"{tmp_path}/ctxfs.yaml: {what}"]
    # another one is given by --config, and they may be those of another ctxd
    assert unread(tmp_path / "ctxfs.yaml") == []
