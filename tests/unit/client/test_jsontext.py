"""JSON without the module json: the same as with it."""

from __future__ import annotations

import json
import sys

import pytest

from client.jsontext import dumps, loads

TEXTS = (
    "{}", " [1, -2.5e3, true, false, null]\r\n", '{"a": {"b": ["\\u00e9\\ud83d\\ude00", "é"]}}',
    "NaN", "-Infinity", "1e999", '""', "12345678901234567890", '{"a": 1, "a": 2}',
)  # fmt: skip
WRONG = (
    "", " ", "{", "{x", "\n{x", ' "', "[1\n", '"\t', "[1,]", '{"a" 1}', "nul", "1 2", '"\n"',
    "'a'", "[] ]", '"\\x"',
)  # fmt: skip


@pytest.fixture(params=["as it is", "of another Python"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "as it is":
        monkeypatch.setitem(sys.modules, "_json", None)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("text", TEXTS)
def test_what_a_text_says(text: str) -> None:
    found = loads(text)
    assert repr(found) == repr(json.loads(text))
    assert dumps(found) == json.dumps(found, ensure_ascii=False)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_told_as_json_tells_it(text: str) -> None:
    with pytest.raises(ValueError) as said:
        json.loads(text)
    with pytest.raises(ValueError) as found:
        loads(text)
    assert str(found.value) == str(said.value)


@pytest.mark.usefixtures("parts")
def test_what_is_not_for_json_is_refused() -> None:
    with pytest.raises(TypeError):
        dumps({"a": object()})


@pytest.mark.usefixtures("parts")
def test_what_is_nested_too_deep_is_told() -> None:
    with pytest.raises(RecursionError):
        loads("[" * 100_000)
