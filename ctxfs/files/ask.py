"""The asks of an agent, ``agent/NAME.d/ask``, and all of them, ``asks`` of the root, as rows
(ctxfs-tasks(5), Asks)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from ctxfs.files import fields
from ctxfs.tree.base import Base
from ctxfs.tree.items import agent_with, item_layout
from ctxfs.tree.rows import Control, Directory, Link, Row, Shown, one_line
from runtime.agents.asks import ADDRESSING, ANSWERING, ASKS, WRITING, is_unfinished
from runtime.caller import Caller
from runtime.records.change import Change
from runtime.records.items import Ask, AskStatus
from runtime.texts.names import head, parse_json_object, shown_json, timestamp

#: of the detail, in a line of ``asks``
_DETAIL_MAX: Final = 1024
#: lines of ``asks`` that are made before others have their turn
_AT_ONCE: Final = 128


#: what the text of a file does to an ask, in a change
_Act = Callable[[Base, Change, Caller, Ask, str], None]


def _committed(act: _Act) -> Callable[[Base, Ask, Caller, str], None]:
    def commit(base: Base, ask: Ask, caller: Caller, text: str) -> None:
        with base.agents.journal.changing() as change:
            act(base, change, caller, ask, text)

    return commit


def _line(name: str, doc: str, act: _Act, **more: Any) -> Control[Ask]:
    """A file of one line, of which it is tried first whether it may be."""
    commit = _committed(act)
    return Control(
        name=name, doc=doc, single=True,
        check=lambda base, ask, caller, line: act(base, Change(), caller, ask, line),
        commit=lambda base, ask, caller, text: commit(base, ask, caller, one_line(text)),
        **more,
    )  # fmt: skip


def _updating(field: str) -> _Act:
    return lambda base, change, caller, ask, text: base.agents.asks.update(
        change, agent_with(base, ask), ask, field, text
    )


def _field(name: str, doc: str, **more: Any) -> Control[Ask]:
    """A value on one line, written before it is asked."""
    field = {"kind": "ask_kind"}.get(name, name)
    return _line(name, doc, _updating(field), guard=WRITING, render=fields.value(field), **more)


def _text(name: str, doc: str) -> Control[Ask]:
    """A value of several lines, written before it is asked."""
    act = _updating(name)

    def checking(base: Base, ask: Ask, caller: Caller) -> fields.Whole:
        def check(text: str) -> None:
            if not (name == "form" and is_unfinished(text)):
                act(base, Change(), caller, ask, text)

        return fields.Whole(check)

    return Control(
        name=name, doc=doc, guard=WRITING, render=fields.text(name), checking=checking,
        commit=_committed(act),
    )  # fmt: skip


ROWS: Final[tuple[Row[Ask], ...]] = (
    Directory(name="", top=True),
    _field("kind", "question, or permission", default="question"),
    _line("question", "one line, of at most 1024 bytes. Writing it asks, once",
        lambda base, change, caller, ask, line: base.agents.asks.begin(
            change, agent_with(base, ask), ask, line
        ),
        guard=WRITING, render=fields.value("question")),
    _text("detail", "more about it, such as what is to be allowed"),
    _text("options", "the answers that there are, one per line: WORD, or WORD LABEL; empty: any "
          "text"),
    _text("form", "instead of options: a JSON schema of an object with fields of the types string, "
          "number, integer, boolean, or array of choices"),
    _field("default", "the answer if there is none before the deadline"),
    _field("deadline", "a duration or time after which it expires; a duration counts from the "
           "asking"),
    _line("to", "whom it asks: operator, or supervisor. While it is open, the creator may write "
        "operator, and operators may write either",
        lambda base, change, caller, ask, line: base.agents.asks.address(
            change, caller, agent_with(base, ask), ask, line
        ),
        default="operator", guard=ADDRESSING, volatile=True,
        render=lambda base, ask, caller: base.agents.asks.addressee(
            agent_with(base, ask), ask
        ) + "\n"),
    _field("life", "agent; or run: it is withdrawn at the end of the run that asks",
           default="agent"),
    Control(name="answer", guard=ANSWERING, render=fields.text("answer"),
        checking=lambda base, ask, caller: fields.Whole(
            lambda text: base.agents.asks.check_answer(ask, text)
        ),
        commit=lambda base, ask, caller, text: base.agents.asks.answer(
            caller, agent_with(base, ask), ask, text
        ),
        doc="a line with a word of the options, or a text, then perhaps lines with a note; of a "
        "form an object of JSON. It is written once, by operators; by the creator if to is "
        "supervisor"),
    Shown(name="status", polled=True, instead="answer", render=fields.value("status"),
        doc=" ".join(AskStatus)),
    Shown(name="by", render=fields.value("by"), doc="who ended it, as in events"),
    Shown(name="asked_at", render=fields.time("asked"), depends=("asked",), doc="RFC 3339 time"),
    Shown(name="ended_at", render=fields.time("ended"), depends=("ended",), doc="RFC 3339 time"),
    Link(name="wait", listed=False,
        target=lambda base, ask: str(base.agents.wait_files.path(ask.wait_token)),
        doc="reading it blocks until it is over; by name only, no listing has it"),
)

LAYOUT: Final = item_layout(13, "ask", ROWS, ASKS, lambda agents: agents.asks)


def view(base: Base, ask: Ask) -> dict[str, Any]:
    """An ask as who may answer it is shown it; who asks is said by the runtime."""
    agent = agent_with(base, ask)
    return {
        "agent": agent.name,
        "ask": ask.name,
        "owner": agent.owner,
        "kind": ask.ask_kind,
        "to": base.agents.asks.addressee(agent, ask),
        "question": ask.question,
        "options": ask.options.splitlines(),
        "form": parse_json_object(ask.form) if ask.form else None,
        "default": ask.default,
        "deadline": timestamp(ask.expires) if ask.expires else "",
        "asked_at": timestamp(ask.asked),
        "run": ask.run,
        "detail": head(ask.detail, _DETAIL_MAX),
    }


def _lines(base: Base, _: Base, caller: Caller) -> Iterator[str]:
    """One line each; an empty piece after some."""
    for number, ask in enumerate(base.agents.asks.seen_by(caller), 1):
        if ask.status is AskStatus.OPEN and base.agents.items.get(ask.index) is ask:
            yield shown_json(view(base, ask)) + "\n"
        if number % _AT_ONCE == 0:
            yield ""


#: at the root
LIST: Final[Shown[Base]] = Shown(
    name="asks", public=True, generated=True, polled=True, render=_lines,
    doc="one JSON object per line for each open ask that the caller may answer, or asks itself, "
    "oldest first: agent ask owner kind to question options form default deadline asked_at run "
    "detail. form is null without one, detail its first 1024 bytes",
)  # fmt: skip
