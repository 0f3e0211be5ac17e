"""Forms: which schemas are ones, and what fills them in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import MalformedError
from runtime.texts.forms import FORM_MAX, parse_filled, parse_form

FIELDS: dict[str, dict[str, Any]] = {
    "text": {"type": "string", "minLength": 2, "maxLength": 4, "title": "A text"},
    "word": {"type": "string", "enum": ["a", "b"]},
    "titled": {"type": "string", "oneOf": [{"const": "x", "title": "X"}]},
    "number": {"type": "number", "minimum": 0.5},
    "count": {"type": "integer", "maximum": 9},
    "flag": {"type": "boolean", "default": True},
    "some": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}, "minItems": 1},
    "any": {"type": "array", "items": {"anyOf": [{"const": "c", "title": "C"}]}},
}


def form_of(**fields: Any) -> str:
    return json.dumps({"type": "object", "properties": fields})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("text", "abcd"), ("word", "b"), ("titled", "x"), ("number", 1), ("number", 0.5),
        ("count", 9), ("count", 2.0), ("flag", False), ("some", ["a", "b"]), ("any", []),
    ],
)  # fmt: skip
def test_what_fits(field: str, value: Any) -> None:
    form = parse_form(form_of(**FIELDS))
    assert parse_filled(form, json.dumps({field: value})) == {field: value}


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("text", "a", "minLength is 2"), ("text", "abcde", "maxLength is 4"),
        ("text", 1, "not of type string"), ("word", "c", '"c" is no choice; use a, b'),
        ("titled", "X", "use x"), ("number", 0, "minimum is 0.5"), ("number", True, "type number"),
        ("number", "1", "type number"), ("count", 10, "maximum is 9"),
        ("count", 1.5, "type integer"), ("count", 10**300, "maximum is 9"),
        ("flag", "yes", "type boolean"), ("flag", 1, "type boolean"),
        ("some", [], "minItems is 1"), ("some", "a", "type array"),
        ("some", ["c"], "no choice"), ("any", [1], "type array"), ("else", 1, "is no field"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(field: str, value: Any, said: str) -> None:
    form = parse_form(form_of(**FIELDS))
    with pytest.raises(MalformedError, match=said):
        parse_filled(form, json.dumps({field: value}))


def test_what_is_required_is_missing() -> None:
    form = parse_form('{"type":"object","properties":{"a":{"type":"string"}},"required":["a"]}')
    with pytest.raises(MalformedError, match='"a" is missing: give all of a'):
        parse_filled(form, "{}")


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"type":"object"}', '{"type":"object","properties":{}}',
        form_of(a=1), form_of(a={}), form_of(a={"type": ["string"]}), form_of(a={"type": "object"}),
        form_of(a={"type": "string", "enum": []}), form_of(a={"type": "string", "enum": [1]}),
        form_of(a={"type": "string", "enum": 1}), form_of(a={"type": "string", "oneOf": [1]}),
        form_of(a={"type": "string", "minLength": "x"}), form_of(a={"type": "array"}),
        form_of(a={"type": "array", "items": {"type": "string"}}),
        '{"type":"object","properties":{"a":{"type":"string"}},"required":["b"]}',
        '{"type":"object","properties":{"a":{"type":"string"}},"required":[[]]}',
        '{"type":"object","properties":{"a":{"type":"string"}},"required":"a"}',
        form_of(**{f"f{n}": {"type": "string"} for n in range(65)}),
        form_of(a={"type": "string", "title": "x" * FORM_MAX}),
    ],
)  # fmt: skip
def test_what_is_no_form(text: str) -> None:
    with pytest.raises(MalformedError):
        parse_form(text)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["type", "properties", "required", "enum", "oneOf", "items", "const",
                         "minLength", "maximum", "a"]),
        inner | st.sampled_from(["object", "string", "array", "integer", "a"]), max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@given(_JSON, _JSON)
def test_anything_is_a_form_or_refused(schema: Any, filled: Any) -> None:
    whole = {"type": "object", "properties": {"a": schema}}
    for text in (json.dumps(schema), json.dumps(whole)):
        try:
            form = parse_form(text)
        except MalformedError:
            continue
        for value in (filled, {"a": filled}):
            try:
                parse_filled(form, json.dumps(value))
            except MalformedError:
                continue
