"""The inbox of what agents ask, and answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from client.asks import answer_text, value_for
from client.calls import WAIT, Call
from client.exits import Misuse
from tests.unit.client.fakes import FakeRoot, Run

FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": "whose"},
        "size": {"type": "string", "enum": ["s", "m"]},
        "count": {"type": "integer"},
        "some": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
    },
}


def asked(root: FakeRoot, *rows: dict[str, Any]) -> None:
    """These are open."""
    whole = []
    for number, row in enumerate(rows):
        asked_at = f"2026-01-01T00:00:0{number}.000Z"
        whole.append({
            "agent": "x", "ask": f"ask-{number + 1}", "owner": 0, "kind": "question",
            "to": "operator", "question": "May I?", "options": [], "form": None, "default": "",
            "deadline": "", "asked_at": asked_at, "run": "r1", "detail": "", **row,
        })  # fmt: skip
        last = whole[-1]
        root.part("ask", last["ask"], of=last["agent"], question=last["question"],
                  asked_at=asked_at, status="open")  # fmt: skip
    (root.path / "asks").write_text("".join(json.dumps(row) + "\n" for row in whole))


def answer_of(root: FakeRoot, ask: str = "ask-1", name: str = "x") -> str:
    return (root.path / "agent" / f"{name}.d" / "ask" / ask / "answer").read_text()


@pytest.fixture
def x(root: FakeRoot) -> Path:
    return root.agent("x", status="busy")


def test_the_inbox_lists_what_operators_are_asked(root: FakeRoot, run: Run, x: Path) -> None:
    asked(
        root,
        {"options": ["yes", "no Not today"], "question": "May I \x1b[31mpush?"},
        {"to": "supervisor", "kind": "permission"},
        {"form": FORM},
    )
    lines = run("asks")[1].splitlines()
    assert [line.split()[:1] + line.split()[2:5] for line in lines] == [
        ["ASK", "KIND", "TO", "ANSWERS"],
        ["x/ask-1", "question", "operator", "yes"],
        ["x/ask-3", "question", "operator", "name="],
    ]
    assert "yes no" in lines[1] and "May I \\x1b[31mpush?" in lines[1]
    assert len(run("asks", "-a")[1].splitlines()) == 4
    rows = json.loads(run("asks", "--json")[1])
    assert [row["ask"] for row in rows] == ["ask-1", "ask-3"]


def test_an_answer_is_a_word_a_text_or_fields(root: FakeRoot, run: Run, x: Path) -> None:
    asked(root, {"options": ["yes", "no"]}, {}, {"form": FORM})
    assert run("answer", "x/ask-1", "yes", "--note", "but slowly") == (0, "", "")
    assert answer_of(root) == "yes\nbut slowly\n"
    assert run("answer", "x/ask-2", "in", "the", "evening") == (0, "", "")
    assert answer_of(root, "ask-2") == "in the evening\n"
    assert run("answer", "x/ask-3", "name=y", "count=3", "some=a, b") == (0, "", "")
    assert json.loads(answer_of(root, "ask-3")) == {"name": "y", "count": 3, "some": ["a", "b"]}


def test_an_agent_that_asks_one_thing_is_answered_by_its_name(
    root: FakeRoot, run: Run, x: Path
) -> None:
    root.agent("y", status="busy")
    asked(root, {"options": ["yes"]}, {"agent": "y"}, {"agent": "y"})
    assert run("answer", "x", "yes") == (0, "", "")
    assert answer_of(root) == "yes\n"
    assert run("answer", "y", "yes") == (
        2, "", "ctx: y asks 2 things: say which one: y/ask-2, y/ask-3\n"
    )  # fmt: skip
    (root.path / "asks").write_text("")
    assert run("answer", "y", "yes") == (1, "", "ctx: y asks nothing that you may answer\n")
    assert run("answer", "z", "yes")[2] == 'ctx: no agent "z"\n'


def test_another_question_of_the_same_name_is_not_answered(
    root: FakeRoot, run: Run, x: Path
) -> None:
    asked(root, {"question": "May I look?", "options": ["yes"]})
    file = x / "ask" / "ask-1" / "question"
    file.write_text("May I remove everything?\n")
    said = "ctx: x/ask-1 asks something else by now: look again\n"
    assert run("answer", "x/ask-1", "yes") == (1, "", said)
    assert answer_of(root) == ""
    file.write_text("May I look?\n")
    (x / "ask" / "ask-1" / "asked_at").write_text("2026-01-01T00:00:09.000Z\n")
    assert run("answer", "x", "yes") == (1, "", said)


def test_a_person_is_told_which_question_was_answered(
    root: FakeRoot, run: Run, x: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(root, {"question": "Delete \x9ball?"})
    monkeypatch.setattr("client.asks.os.isatty", lambda fd: fd == 2)
    assert run("answer", "x", "yes") == (0, "", "ctx: answered x/ask-1: Delete \\x9ball?\n")


def test_what_cannot_be_said_is_told(root: FakeRoot, run: Run, x: Path) -> None:
    asked(root, {"form": FORM}, {"agent": "x"})
    assert run("answer", "x/ask-1", "yes")[2] == (
        'ctx: "yes" is not FIELD=VALUE; fields: name, size, count, some\n'
    )
    assert run("answer", "x/ask-1", "name=y", "--note", "n")[:1] == (2,)
    assert run("answer", "x/ask-2")[2] == (
        "ctx: no answer given: say it after the name of the ask\n"
    )
    assert run("ask", "May I?")[2] == "ctx: only agents ask: run this inside of one\n"


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("string", "3", "3"), ("integer", "3", 3), ("number", "1.5", 1.5),
        ("boolean", "true", True), ("boolean", "yes", "yes"), ("integer", "x", "x"),
        ("array", "a,b", ["a", "b"]), ("array", "", []), ("", "x", "x"),
    ],
)  # fmt: skip
def test_values_of_fields(kind: str, text: str, value: object) -> None:
    assert value_for({"type": kind}, text) == value


def test_an_object_is_an_answer_as_it_is() -> None:
    assert answer_text(FORM, ['{"name": 1}']) == '{"name": 1}'
    with pytest.raises(Misuse):
        answer_text(FORM, ["name"])


def test_a_call_that_asks_and_waits_says_the_same_again() -> None:
    """It is carried out once, by its id: so what it says must not change with the time left."""
    call = Call("Ask", {"question": "x", "block": True}, lambda call, frame: None)
    assert call.given["timeout"] == WAIT
    assert call.request() == call.request()
    assert Call("Ask", {"question": "x"}, lambda call, frame: None).given == {"question": "x"}
    longer = {"question": "x", "block": True, "timeout": 900}
    assert Call("Ask", longer, lambda call, frame: None).given == longer
