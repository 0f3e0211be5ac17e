"""Values of files as YAML has them: the schema of each, and the lines that it is written as.

A row with a shape can be said in a file of ``agents.d`` (``ctxfs.declared``); ``form`` is what
``ctx export`` writes it by.
"""

from __future__ import annotations

import grp
import pwd
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from runtime.errors import MalformedError
from runtime.texts import names
from runtime.texts.names import quote
from runtime.texts.yaml_marks import Path

#: a line of a file, and where its value is below the file's
Lines = list[tuple[Path, str]]
#: checks one line, for an agent with a label, by itself; ``MalformedError``
Check = Callable[[str, str], object]
Schema = Mapping[str, Any]

_SCALAR: Final = ("string", "integer")


def _unchecked(line: str, label: str) -> None:
    """Whatever it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """``schema`` is the JSON schema of a value, and ``lines`` says one that satisfies it, or
    raises ``MalformedError``. Without ``lined`` it is one text, newlines and all. ``hint`` tells
    how a value that is one line says a line break."""

    form: str
    schema: Schema
    lines: Callable[[Any], Lines]
    check: Check = _unchecked
    lined: bool = True
    hint: str = ""


def _word(value: Any, hint: str = "") -> Lines:
    text = str(value).removesuffix("\n")
    if "\n" in text:
        raise MalformedError(f"write one value, on one line{hint}")
    return [((), text)]


def word(check: Check = _unchecked, hint: str = "", **schema: Any) -> Shape:
    """One value on one line."""
    return Shape(
        form="word", schema={"type": "string", **schema}, lines=partial(_word, hint=hint),
        check=check, hint=hint,
    )  # fmt: skip


def choice(choices: Collection[str]) -> Shape:
    return Shape(form="word", schema={"enum": list(choices)}, lines=_word)


PARENT: Final = Shape(
    form="parent",
    schema={"type": "string"},
    lines=lambda value: [((), f"agent:{names.check_name(value)}")],
)


def _id(value: str | float, what: str, known: Callable[[str], int]) -> str:
    if not isinstance(value, str) or value.isdecimal():
        return str(int(value))  # 61000.0 is a whole number for schemas
    try:
        return str(known(value))
    except (KeyError, ValueError):
        raise MalformedError(f"no {what} {quote(value)} is known here") from None


def _user(value: str | float) -> str:
    return _id(value, "user", lambda name: pwd.getpwnam(name).pw_uid)


def _group(value: str | float) -> str:
    return _id(value, "group", lambda name: grp.getgrnam(name).gr_gid)


_ID: Final[Schema] = {"type": list(_SCALAR), "minimum": 0, "maximum": 2**32 - 2}
USER: Final = Shape(form="number", schema=_ID, lines=lambda value: [((), _user(value))])
GROUP: Final = Shape(form="number", schema=_ID, lines=lambda value: [((), _group(value))])
GROUPS: Final = Shape(
    form="numbers",
    schema={"type": "array", "items": _ID},
    lines=lambda value: [((number,), _group(each)) for number, each in enumerate(value)],
)


def _listed(value: list[str]) -> Lines:
    if any("\n" in line for line in value):
        raise MalformedError("has a newline: write one item for each line")
    return [((number,), line) for number, line in enumerate(value)]


def lines(check: Check) -> Shape:
    """A list with an item for each line."""
    schema = {"type": "array", "items": {"type": "string"}}
    return Shape(form="lines", schema=schema, lines=_listed, check=check)


def _paired(value: Mapping[str, Any]) -> Lines:
    for each in value.values():
        if "\n" in str(each):
            raise MalformedError("has a newline, which a line cannot have")
    return [((key,), f"{key}={each}") for key, each in value.items()]


def pairs(check: Check, keys: Collection[str] = (), pattern: str = "") -> Shape:
    """A map of KEY: VALUE for lines KEY=VALUE; of these keys, and any that match the pattern."""
    value = {"type": list(_SCALAR)}
    schema: dict[str, Any] = {"type": "object"}
    if keys:
        schema["properties"] = {key: value for key in keys}
    schema["patternProperties"] = {pattern: value}
    schema["additionalProperties"] = False
    return Shape(form="pairs", schema=schema, lines=_paired, check=check)


def _json_line(value: Any) -> str:
    line = names.dump_json(value)
    names.parse_json_object(line)
    return line


JSON: Final = Shape(
    form="json", schema={"type": "object"}, lines=lambda value: [((), _json_line(value))]
)
JSON_LINES: Final = Shape(
    form="json_lines",
    schema={"type": "array", "items": {"type": "object"}},
    lines=lambda value: [((n,), _json_line(each)) for n, each in enumerate(value)],
)
TEXT: Final = Shape(
    form="text", schema={"type": "string"}, lines=lambda value: [((), value)], lined=False
)
