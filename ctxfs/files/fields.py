"""Files that show, or set, one field of an agent or of what is below it: most rows are such."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final, TypeVar

from ctxfs.tree.base import Base
from ctxfs.tree.rows import NEW, NOT_BUSY, Control, Render, one_line
from ctxfs.tree.shapes import Shape
from runtime.authority.guard import Guard
from runtime.caller import CONTROLLERS, Caller
from runtime.records.model import Agent
from runtime.texts import names

_O = TypeVar("_O")
#: what a line says; raises for one that is refused
Parse = Callable[[Base, _O, Caller, str], Any]

AT_ANY_TIME: Final[Guard[Agent]] = Guard(who=CONTROLLERS)
WHILE_NEW: Final[Guard[Agent]] = Guard(who=CONTROLLERS, when=NEW)
BETWEEN_RUNS: Final[Guard[Agent]] = Guard(who=CONTROLLERS, when=NOT_BUSY)


def value(attribute: str) -> Render[Any]:
    """The text of a field, or of one of its fields, on one line; an empty value, or none, is an
    empty file."""
    find = attrgetter(attribute)

    def render(base: Base, obj: Any, caller: Caller) -> str:
        value = find(obj)
        return f"{value}\n" if value else ""

    return render


def text(attribute: str) -> Render[Any]:
    return lambda base, obj, caller: str(getattr(obj, attribute))


def number(attribute: str) -> Render[Any]:
    return lambda base, obj, caller: f"{int(getattr(obj, attribute))}\n"


def time(attribute: str) -> Render[Any]:
    """An RFC 3339 time; an empty file before there is one."""

    def render(base: Base, obj: Any, caller: Caller) -> str:
        value = getattr(obj, attribute)
        return f"{names.timestamp(value)}\n" if value else ""

    return render


def alone(check: Callable[[str], Any]) -> Parse[Any]:
    """The meaning of a line by itself, whoever writes it."""
    return lambda base, obj, caller, line: check(line)


def check_path(line: str, _: str = "") -> str:
    """An absolute path, or none."""
    return names.check_absolute(line) if line else ""


def lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line]


def ended(text: str) -> str:
    """A text whose last line ends, too."""
    return text if not text or text.endswith("\n") else f"{text}\n"


class Whole:
    """Has what is written checked as a whole, whenever there are lines more."""

    def __init__(self, check: Callable[[str], object]) -> None:
        self._check = check
        self._text = ""

    def take(self, text: str) -> None:
        self._text += f"{text}\n"
        self._check(self._text)


def check_variable(line: str) -> None:
    """One of an environment; an empty line is none."""
    if line:
        names.parse_env_line(line)


def variables(text: str) -> str:
    """An environment as it is kept; ``MalformedError``."""
    for line in (found := lines(text)):
        check_variable(line)
    return "".join(f"{line}\n" for line in found)


def _update(base: Base, agent: Agent, **values: Any) -> None:
    base.agents.journal.update(agent, **values)


def single(
    name: str,
    doc: str,
    parse: Parse[_O],
    *,
    shape: Shape | None = None,
    default: str = "",
    public: bool = False,
    guard: Guard[Any] = WHILE_NEW,
    render: Render[_O] | None = None,
    update: Callable[..., None] = _update,
) -> Control[_O]:
    """A control with one value on one line, kept in the field of its name."""

    def commit(base: Base, obj: _O, caller: Caller, text: str) -> None:
        update(base, obj, **{name: parse(base, obj, caller, one_line(text))})

    return Control(
        name=name, doc=doc, default=default, shape=shape, public=public, guard=guard, single=True,
        render=render or value(name), check=parse, commit=commit,
    )  # fmt: skip
