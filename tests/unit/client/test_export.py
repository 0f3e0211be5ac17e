"""Agents as YAML that declares them."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from client import shipped
from client.export import yaml_value
from client.words import AGENT_FORMS
from ctxfs.declared import SHAPES
from runtime.texts import yaml_marks
from tests.unit.client.fakes import FakeRoot, Run

_LINE = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\n\0"))
_TEXT = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"))
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
_OBJECT = st.dictionaries(_TEXT, _JSON, max_size=4)
_KEY = st.text(string.ascii_letters + "_", min_size=1)


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


#: texts of files of each form
FORMS: dict[str, st.SearchStrategy[str]] = {
    "word": _LINE.map("{}\n".format),
    "number": st.integers(0, 2**32 - 2).map("{}\n".format),
    "numbers": st.lists(st.integers(0, 2**32 - 2).map("{}\n".format)).map("".join),
    "lines": st.lists(_LINE.map("{}\n".format)).map("".join),
    "pairs": st.dictionaries(_KEY, _LINE).map(
        lambda found: "".join(f"{key}={value}\n" for key, value in found.items())
    ),
    "json": _OBJECT.map(lambda value: dumped(value) + "\n"),
    "json_lines": st.lists(_OBJECT).map(lambda all_: "".join(dumped(o) + "\n" for o in all_)),
    "text": _TEXT,
}


def test_every_form_is_tried() -> None:
    assert FORMS.keys() | {"parent"} == set(AGENT_FORMS.values())


def parsed(text: str) -> list[Any]:
    return [json.loads(line) for line in text.split("\n") if line]


def read_back(form: str, text: str) -> str:
    """What a file that declares this would write."""
    marked = yaml_marks.read("f", f"mode: once\nkey:{yaml_value(form, text)}\nexec: x\n")
    assert marked.mistakes == []
    assert set(marked.values) == {"mode", "key", "exec"}
    shape = next(shape for shape in SHAPES.values() if shape.form == form)
    lines = [line for _, line in shape.lines(marked.values["key"])]
    return "".join(f"{line}\n" for line in lines) if shape.lined else lines[0]


@given(st.sampled_from(sorted(FORMS)).flatmap(
    lambda form: st.tuples(st.just(form), FORMS[form])))
@example(("word", "no\n"))
@example(("word", "a: b\n"))
@example(("word", "a #b\n"))
@example(("word", "12:30\n"))
@example(("word", "7\n"))
@example(("word", " \x85\u2028\ufeff\U000e0001\n"))
@example(("text", "a\n\nb\n"))
@example(("text", "\na\n"))
@example(("text", "  a\nb\n"))
@example(("text", "a\n \n"))
@example(("text", "a\nb"))
@example(("text", "---\n...\n"))
@example(("text", "# a\n"))
@example(("json", '{"a": 1e100, "b": -0.0, "c": 123456789012345678901234567890}\n'))
def test_what_is_exported_is_written_as_it_was(pair: tuple[str, str]) -> None:
    form, text = pair
    back = read_back(form, text)
    if form in ("json", "json_lines"):
        assert parsed(back) == parsed(text)
    else:
        assert back == text


FILES = {
    "status": "idle", "parent": "operator uid:0", "life": "detached", "profile": "public_named",
    "owner": "0", "uid": "61000", "gid": "61000", "groups": "", "label": "coder_t",
    "policy": "allow coder_t agent:* create", "mount": "/srv /data ro", "root": "",
    "placement": "", "iso": "sandbox", "workspace": "inherit", "cwd": "/data", "env": "A=1\nB=x y",
    "context": "fresh", "model": "", "exec": "sh -c 'sleep 1'", "mode": "turn",
    "tty": "", "homedir": "private", "restart": "no",
    "limits": "memory.max=1048576\npids.max=max\ngrace=5s",
    "meta.json": "{}", "handoff.md": "Do it.\nAll.", "input.jsonl": "",
}  # fmt: skip


def agent(at: FakeRoot, name: str, **more: str) -> Path:
    directory = at.agent(name)
    for file, text in {**FILES, "path": f"{at.path}/tool", **more}.items():
        (directory / file).write_text(f"{text}\n" if text else "")
    (at.path / "status").write_text("version=0\nlimits=depth=8,grace=5s\n")
    return directory


def test_an_agent_is_printed_without_what_is_so_at_first(
    run: Run, root: FakeRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "shipped", lambda checkout, installed: iter(()))
    agent(root, "coder")
    assert run("export", "coder") == (0, """\
# yaml-language-server: $schema=/usr/share/ctxfs/ctxfs-agent.schema.json
start: true
uid: 61000
gid: 61000
policy:
  - allow coder_t agent:* create
mount:
  - /srv /data ro
cwd: /data
env:
  A: "1"
  B: x y
exec: sh -c 'sleep 1'
mode: turn
limits:
  memory.max: "1048576"
handoff.md: |
  Do it.
  All.
""", "")


def test_editors_are_told_of_the_schema_that_came_with_it(run: Run, root: FakeRoot) -> None:
    agent(root, "coder")
    schema = Path(__file__).parents[3] / "contrib/ctxfs-agent.schema.json"
    first = run("export", "coder")[1].partition("\n")[0]
    assert schema.exists() and first == f"# yaml-language-server: $schema={schema}"


def test_a_child_has_what_is_not_its_parents(run: Run, root: FakeRoot) -> None:
    agent(root, "lead", owner="1000", groups="7")
    child = {**FILES, "owner": "1000", "groups": "", "parent": "agent:lead session:default",
             "life": "temp", "profile": "private_child", "status": "new", "policy": "", "mount": "",
             "cwd": "", "env": "", "mode": "once", "limits": "", "handoff.md": ""}
    agent(root, "child", **child)
    assert run("export", "child")[1].splitlines()[1:] == [
        "start: false", "parent: lead", "life: temp", "owner: 1000", "groups: []", "label: coder_t",
        "policy: []",
    ]  # fmt: skip


@pytest.mark.parametrize("data", [b"\xff", b"a\0b"])
def test_what_is_no_text_is_refused(run: Run, root: FakeRoot, data: bytes) -> None:
    directory = agent(root, "coder")
    (directory / "handoff.md").write_bytes(data)
    status, out, err = run("export", "coder")
    assert (status, out) == (1, "")
    assert "coder: handoff.md is not a text" in err
