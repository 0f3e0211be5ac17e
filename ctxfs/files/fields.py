"""Files of an agent that show, or set, one of its fields: what most of its rows are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ctxfs.tree.base import Base
from ctxfs.tree.rows import NEW, NOT_BUSY, Check, Control, Render, one_line
from ctxfs.tree.shapes import Shape
from runtime.authority.guard import Guard
from runtime.caller import CONTROLLERS, Caller
from runtime.records.model import Agent

#: what a line says; raises for one that is refused
Parse = Callable[[Base, Agent, Caller, str], Any]

AT_ANY_TIME: Final[Guard[Agent]] = Guard(who=CONTROLLERS)
WHILE_NEW: Final[Guard[Agent]] = Guard(who=CONTROLLERS, when=NEW)
BETWEEN_RUNS: Final[Guard[Agent]] = Guard(who=CONTROLLERS, when=NOT_BUSY)


def value(attribute: str) -> Render[Agent]:
    """The field's text on one line; an empty value is an empty file."""

    def render(base: Base, agent: Agent, caller: Caller) -> str:
        value = str(getattr(agent, attribute))
        return value + "\n" if value else ""

    return render


def text(attribute: str) -> Render[Agent]:
    def render(base: Base, agent: Agent, caller: Caller) -> str:
        return str(getattr(agent, attribute))

    return render


def number(attribute: str) -> Render[Agent]:
    def render(base: Base, agent: Agent, caller: Caller) -> str:
        value = int(getattr(agent, attribute))
        return f"{value}\n" if value or attribute != "pid" else ""

    return render


def checked(parse: Parse) -> Check[Agent]:
    """A check of a line that is good if it can be parsed."""

    def check(base: Base, agent: Agent, caller: Caller, line: str) -> None:
        parse(base, agent, caller, line)

    return check


def lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line]


def single(
    name: str,
    doc: str,
    parse: Parse,
    *,
    shape: Shape,
    default: str = "",
    public: bool = False,
    guard: Guard[Agent] = WHILE_NEW,
    render: Render[Agent] | None = None,
) -> Control[Agent]:
    """A control with one value on one line, kept in the field of its name."""

    def commit(base: Base, agent: Agent, caller: Caller, text: str) -> None:
        value = parse(base, agent, caller, one_line(text))
        base.runtime.agents.journal.update(agent, **{name: value})

    return Control(
        name=name, doc=doc, default=default, shape=shape, public=public, guard=guard, single=True,
        render=render or value(name), check=checked(parse), commit=commit,
    )  # fmt: skip
