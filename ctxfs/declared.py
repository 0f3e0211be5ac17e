"""Agents as files of ``agents.d`` declare them (ctxfs.yaml(5)): their schema, and reading them.

A key of such a file is a file of the agent: the rows that have a shape, and ``start``. Nothing
here knows a daemon: what is wrong by itself is found, and told with its line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ctxfs.files import agent
from ctxfs.tree.rows import File
from ctxfs.tree.shapes import Shape
from ctxfs.trusted import read_trusted, why_not_trusted
from runtime.errors import MalformedError
from runtime.texts import yaml_marks
from runtime.texts.names import is_name, quote
from runtime.texts.yaml_marks import Marked, Mistake

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator, ValidationError

SUFFIX: Final = ".yaml"
START: Final = "start"
#: of the settings, and what is written by those who remember the manual page, or the program
_NAME: Final = "config.yaml"
_MISNAMED: Final = ("config.yml", "ctxd.yaml", "ctxd.yml", "ctxfs.yaml", "ctxfs.yml")
_TYPES: Final = {
    "string": "a text",
    "integer": "a whole number",
    "object": "a map",
    "array": "a list",
    "boolean": "true or false",
}


def _ordered() -> Iterator[tuple[str, File[Any]]]:
    """In an order in which they can be written."""
    for row in agent.ROWS:
        if isinstance(row, File) and row.shape is not None:
            yield row.name, row


#: the files that can be declared
ROWS: Final = dict(_ordered())
SHAPES: Final = {name: row.shape for name, row in ROWS.items() if row.shape is not None}


def schema() -> dict[str, Any]:
    """The JSON schema of a file of ``agents.d``."""
    properties: dict[str, Any] = {
        START: {
            "type": "boolean",
            "default": False,
            "description": "whether ctxd starts the agent when it has made it, and at each start "
            "of ctxd",
        }
    }
    for name, shape in SHAPES.items():
        doc = "the name of its parent" if name == "parent" else ROWS[name].doc
        properties[name] = {**shape.schema, "description": doc}
        if ROWS[name].default in shape.schema.get("enum", ()):
            properties[name]["default"] = ROWS[name].default
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "An agent of ctxfs: agents.d/NAME.yaml, see ctxfs.yaml(5)",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """The agent that a file of its name declares; ``values`` are by key, as in YAML."""

    name: str
    file: str
    values: Mapping[str, Any]
    marked: Marked

    @property
    def start(self) -> bool:
        return self.values.get(START) is True

    @property
    def parent(self) -> str:
        """Its name; empty for a root agent."""
        return str(self.values.get("parent", ""))

    @property
    def label(self) -> str:
        return str(self.values.get("label", f"{self.name}_t"))

    def mistake(self, path: yaml_marks.Path, sentence: str) -> Mistake:
        return self.marked.at(path, sentence)

    @classmethod
    def recorded(cls, name: str, file: str, values: Mapping[str, Any]) -> Declaration:
        """The declaration that a file made earlier."""
        return cls(name=name, file=file, values=values, marked=Marked(file))


@dataclass(slots=True)
class Declared:
    """All declarations of a directory, by name, and which files say nothing that can be used."""

    agents: dict[str, Declaration] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    mistakes: list[Mistake] = field(default_factory=list)

    def ordered(self) -> list[Declaration]:
        """Parents before their children."""
        found: dict[str, Declaration] = {}
        for first in self.agents.values():
            line = [first]
            while (parent := self.agents.get(line[-1].parent)) and parent not in line:
                line.append(parent)
            found.update((each.name, each) for each in reversed(line) if each.name not in found)
        return list(found.values())


def unread(settings: Path) -> list[Mistake]:
    """Names files beside that of the settings that look as if they were it."""
    beside = [settings.with_name(name) for name in _MISNAMED] if settings.name == _NAME else []
    what = f"this file is not read: settings are in {settings}, agents in agents.d beside it"
    return [Mistake(str(path), 0, "", what) for path in beside if os.path.lexists(path)]


def read_directory(directory: Path, *, trusted: Collection[int]) -> Declared:
    """The agents that the files in a directory declare; none if it is not there.

    Files and directory must belong to one of the ``trusted`` uids, and be writable by nobody
    else, as with sudoers(5).
    """
    found = Declared()
    try:
        names = sorted(os.listdir(directory))
        why = why_not_trusted(os.stat(directory), trusted)
    except FileNotFoundError:
        return found
    except OSError as error:
        names, why = [], error.strerror or str(error)
    if why:
        found.mistakes.append(Mistake(str(directory), 0, "", why))
    for name in names:
        path = directory / name
        if name.startswith(".") or path.suffix not in (SUFFIX, ".yml"):
            continue
        declaration, mistakes = (None, []) if why else read_file(path, trusted=trusted)
        found.mistakes += mistakes
        if declaration is None:
            found.broken.add(str(path))
        else:
            found.agents[declaration.name] = declaration
    for circular in _circular(found):
        del found.agents[circular.name]
        found.broken.add(circular.file)
        found.mistakes.append(circular.mistake(("parent",), "the agent would be its own ancestor"))
    return found


def _circular(found: Declared) -> list[Declaration]:
    """Those whose ancestors, as far as they are declared, never end."""

    def is_circular(declaration: Declaration) -> bool:
        seen: set[str] = set()
        name = declaration.name
        while name in found.agents and name not in seen:
            seen.add(name)
            name = found.agents[name].parent
        return name in seen

    return [declaration for declaration in found.agents.values() if is_circular(declaration)]


def read_file(
    path: Path, *, trusted: Collection[int]
) -> tuple[Declaration | None, list[Mistake]]:
    """The declaration of one file, or all that is wrong with it."""
    name = path.name.removesuffix(SUFFIX)
    try:
        text = read_trusted(path, trusted)
        if path.suffix != SUFFIX:
            raise MalformedError(f"a file of agents.d must be named NAME{SUFFIX}")
        if not is_name(name):
            raise MalformedError(f"{quote(name)} is not a name of an agent")
    except MalformedError as error:
        return None, [Mistake(str(path), 0, "", error.sentence)]
    except OSError as error:
        return None, [Mistake(str(path), 0, "", error.strerror or str(error))]
    return parse(name, str(path), text)


def parse(name: str, file: str, text: str) -> tuple[Declaration | None, list[Mistake]]:
    """The declaration of an agent by a text, or all that is wrong with it."""
    marked = yaml_marks.read(file, text)
    values = yaml_marks.is_map(marked, "the agent's files") if not marked.mistakes else None
    if values is None:
        return None, marked.in_order()
    wrong: set[yaml_marks.Path] = set()
    for error in _validator().iter_errors(values):
        for at, sentence in _explained(error, tuple(error.absolute_path)):
            wrong.add(at)
            marked.mistake(at, sentence)
    declaration = Declaration(name=name, file=file, values=values, marked=marked)
    for key, value in values.items():
        if key in SHAPES and (key,) not in wrong:
            for path, part in _parts(key, value):
                if path not in wrong:
                    for at, sentence in _misfits(declaration, path, part):
                        marked.mistake(at, sentence)
    if declaration.start and not declaration.parent and not values.get("exec"):
        marked.mistake((START,), "there is nothing to start: add exec")
    return (None if marked.mistakes else declaration), marked.in_order()


@cache
def _validator() -> Draft202012Validator:
    from jsonschema import Draft202012Validator  # where nothing is declared it is not needed

    return Draft202012Validator(schema())


def _explained(
    error: ValidationError, path: yaml_marks.Path
) -> Iterator[tuple[yaml_marks.Path, str]]:
    """Where one thing is wrong by the schema, and a sentence about it."""
    rule = error.validator
    given: Any = error.instance
    wanted: Any = error.validator_value
    if rule == "additionalProperties":
        assert isinstance(error.schema, dict)
        known: Any = error.schema.get("properties", {})
        patterns: Any = error.schema.get("patternProperties", {})
        for key in given:
            if key not in known and not any(re.search(each, key) for each in patterns):
                yield (*path, key), f"unknown key; {_instead(key, known, patterns)}"
    elif rule == "type":
        kinds: list[str] = [wanted] if isinstance(wanted, str) else wanted
        words = " or ".join(_TYPES[kind] for kind in kinds)
        quoted = "string" in kinds and isinstance(given, int | float)
        remedy = "; put it into quotes" if quoted else ""
        yield path, f"{'nothing' if given is None else _said(given)} is not {words}{remedy}"
    elif rule == "enum":
        yield path, f"{_said(given)} is not one of {', '.join(wanted)}"
    else:
        yield path, error.message


def _instead(key: str, known: Collection[str], patterns: Collection[str]) -> str:
    if not known:
        return f"a name that matches {' or '.join(patterns)} is one"
    return yaml_marks.nearest(key, known)


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict | list):
        return "a map" if isinstance(value, dict) else "a list"
    return quote(value) if isinstance(value, str) else str(value)


def _parts(key: str, value: Any) -> Iterator[tuple[yaml_marks.Path, Any]]:
    """The items of a list or of a map of pairs, each as such with nothing else in it."""
    if isinstance(value, list):
        yield from (((key, number), [each]) for number, each in enumerate(value))
    elif isinstance(value, dict) and SHAPES[key].form == "pairs":
        yield from (((key, name), {name: each}) for name, each in value.items())
    else:
        yield (key,), value


def _misfits(
    declaration: Declaration, path: yaml_marks.Path, value: Any
) -> Iterator[tuple[yaml_marks.Path, str]]:
    """The mistakes in a part of which the schema says nothing, as far as it is known here."""
    shape: Shape = SHAPES[str(path[0])]
    try:
        for _, line in shape.lines(value):
            if "\0" in line:
                raise MalformedError("a NUL byte cannot be in a text")
            shape.check(line, declaration.label)
    except MalformedError as error:
        yield path, error.sentence
