"""YAML with the lines of its values."""

from __future__ import annotations

import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from runtime.texts.yaml_marks import VALUES_MAX, Marked, nearest, read, shown

TEXT = """\
exec: sh -c 'echo'
limits:
  memory.max: 1G
  pids.max: 10
policy:
  - one
  - two
handoff.md: |
  a
  b
"""


def said(text: str) -> list[str]:
    return [str(mistake) for mistake in read("f", text).in_order()]


def test_each_value_has_its_line() -> None:
    marked = read("f", TEXT)
    assert marked.mistakes == []
    assert marked.values["limits"] == {"memory.max": "1G", "pids.max": 10}
    lines = {shown(path): line for path, line in marked.lines.items()}
    assert lines == {
        "": 1, "exec": 1, "limits": 2, "limits.memory.max": 3, "limits.pids.max": 4,
        "policy": 5, "policy[0]": 6, "policy[1]": 7, "handoff.md": 8,
    }  # fmt: skip
    assert marked.line(("policy", 1, "deeper")) == 7
    assert marked.line(("gone",)) == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"), ("on", "on"), ("true", True), ("False", False), ("12:30", "12:30"),
        ("010", "010"), ("0x10", "0x10"), ("1_000", "1_000"), ("-7", -7), ("0", 0), ("1.5", 1.5),
        ("1e3", 1000.0), ("1.5E-3", 0.0015), (".5", 0.5), ("-0.0", -0.0),
        ("5.", "5."), ("e5", "e5"),
        ("9" * 30, int("9" * 30)), ("'1.5'", "1.5"),
        (".inf", ".inf"), ("1e400", "1e400"), ("1" * 5000, "1" * 5000), ("+7", "+7"),
        ("2026-01-01", "2026-01-01"), ("-0", "-0"), ("~", None), ("null", None), ("'1'", "1"),
        ("=", "="), ("", None),
    ],
)  # fmt: skip
def test_plain_words_are_what_they_look_like(text: str, value: object) -> None:
    marked = read("f", f"key: {text}\n")
    assert (marked.values, marked.mistakes) == ({"key": value}, [])
    assert type(marked.values["key"]) is type(value)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("a: 1\nb: 2\na: 3", ["f:3: a: is there twice, first on line 1"]),
        ("l:\n  x: 1\n  x: 1", ["f:3: l.x: is there twice, first on line 2"]),
        ("a: 1\n<<: {b: 1}", ["f:2: << cannot be used here: write the keys out"]),
        ("a: !other 1", ['f:1: a: the tag "!other" means nothing here']),
        ("a: !x [1]", ['f:1: a: the tag "!x" means nothing here']),
        ("a: !x {b: 1}", ['f:1: a: the tag "!x" means nothing here']),
        ("a:\n  ? [b]\n  : 1", ["f:2: a: a key must be a word, not a list or a map"]),
        ("a: 1\nb: [", ["f:2: not YAML: a value is missing, or a bracket is not closed"]),
        ("a: [1 2\nb: 1", ["f:2: not YAML: a bracket is not closed, or a comma is missing"]),
        ("a: 1\n\tb: 2", ["f:2: not YAML: indent with blanks, not with TABs"]),
        ("a: 1\nb: @x", ["f:2: not YAML: put a text that begins so into quotes"]),
        ("a: 1\nb: *x", ["f:2: not YAML: put a text that begins with * into quotes"]),
        ("a: 1\nb", ["f:2: not YAML: write key: value"]),
        ("a: x: y", ["f:1: not YAML: put a text with a colon into quotes, or indent this line "
                     "less"]),
        ("a: - b", ["f:1: not YAML: begin a list on a line of its own"]),
        ("a: 'it's'", ["f:1: not YAML: indent this line as those above it, and close quotes at "
                       "the end only"]),
        ("a: 1\nb: 'c", ["f:2: not YAML: a quote is not closed"]),
        ('a: "\\q"', [r"f:1: not YAML: write \\ for a backslash, or use single quotes"]),
        ("a: 1\n--- \nb: 2", ["f:2: not YAML: a file has one document: leave out ---"]),
        ("a: 1\nb: \0", ["f:2: not YAML: it cannot have the character U+0000"]),
        (r'a: "\Uffffffff"', [r"f: not YAML: an escape in it, as by \U, stands for no character"]),
        ("[" * 2000, ["f: not YAML: it is nested too deep"]),
        # in PyYAML's words
        ("a: !<x 1", ["f:1: not YAML: while parsing a tag expected '>', but found ' '"]),
    ],
)  # fmt: skip
def test_what_is_wrong_names_file_line_and_key(text: str, wrong: list[str]) -> None:
    assert said(text) == wrong


def test_aliases_repeat_values_but_not_without_end() -> None:
    assert read("f", "a: &x [1]\nb: *x\n").values == {"a": [1], "b": [1]}
    bomb = "a0: &a0 [1]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
    )
    assert said(bomb) == [f"f: not YAML: more than {VALUES_MAX} values"]
    assert len(said("a: &x [*x]")) == 1
    assert len(said("[" * 3000)) == 1


@pytest.mark.parametrize("text", [r'a: "x\ud800"', r'"\udfff": x', r'a: ["\ud83d"]'])
def test_half_a_character_is_a_mistake(text: str) -> None:
    (mistake,) = said(text)
    assert "half of a character" in mistake
    assert said(r'a: "\U0001f600"') == []


@given(st.text())
def test_any_text_is_values_or_mistakes(text: str) -> None:
    marked = read("f", text)
    assert isinstance(marked, Marked)
    for mistake in marked.mistakes:
        assert "\n" not in str(mistake)


# PyYAML writes YAML 1.1, and leaves 0E0 without quotes: a number only in YAML 1.2
_TEXTS = st.text().filter(lambda text: not re.fullmatch(r"[-+.\dEe]*\d[-+.\dEe]*", text))
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**16), 10**16) | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(_TEXTS, _VALUES))
def test_what_a_library_writes_is_read_as_it_was(values: dict[str, object]) -> None:
    marked = read("f", yaml.safe_dump(values, allow_unicode=False))
    assert (marked.values, marked.mistakes) == (values, [])


def test_a_word_that_is_not_known_is_answered_with_the_nearest() -> None:
    assert nearest("restrat", ("restart", "mode")) == "did you mean restart?"
    assert nearest("zzz", ("restart", "mode")) == "use restart, mode"
