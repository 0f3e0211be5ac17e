"""YAML whose values know the lines that they are on, and mistakes that name them.

A subset for configuration: plain scalars are strings, ``true`` and ``false``, numbers and null, as
in YAML 1.2 (so ``no`` and ``12:30`` are strings); no tags of one's own, no merge keys; a key is a
string and occurs once in its map.
"""

from __future__ import annotations

import difflib
import math
import pathlib
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from runtime.errors import MalformedError
from runtime.texts.names import JSON_DIGITS, quote

#: keys and indices from the top to a value
Path = tuple[str | int, ...]

#: values in one text, those that aliases repeat too
VALUES_MAX: Final = 1 << 16
_TAG: Final = "tag:yaml.org,2002:"
_INTEGER: Final = re.compile(r"0|-?[1-9][0-9]*")
_NUMBER: Final = re.compile(
    r"-?((0|[1-9][0-9]*)?\.[0-9]+([eE][-+]?[0-9]+)?|(0|[1-9][0-9]*)[eE][-+]?[0-9]+)"
)
#: what no text has that is written somewhere
_HALF: Final = re.compile("[\ud800-\udfff]")
_HALF_SAID: Final = "half of a character, as by \\ud800, means nothing here"
#: what to do, by how PyYAML's words for the problem begin
_REMEDIES: Final = {
    "mapping values are not": "put a text with a colon into quotes, or indent this line less",
    "sequence entries are not": "begin a list on a line of its own",
    "could not find expected ':'": "write key: value",
    "found character '\\t'": "indent with blanks, not with TABs",
    "found character": "put a text that begins so into quotes",
    "found unexpected end of stream": "a quote is not closed",
    "expected ',' or": "a bracket is not closed, or a comma is missing",
    "expected the node content": "a value is missing, or a bracket is not closed",
    "expected <block end>": "indent this line as those above it, and close quotes at the end only",
    "found undefined alias": "put a text that begins with * into quotes",
    "found unknown escape": r"write \\ for a backslash, or use single quotes",
    "but found another document": "a file has one document: leave out ---",
}
_KNOWN: Final = {f"{_TAG}{name}" for name in
                 ("str", "int", "float", "bool", "null", "timestamp", "value")}  # fmt: skip


class MisplacedError(Exception):
    """All that is wrong within a value: a sentence by each place, seen from the value."""

    def __init__(self, places: Mapping[Path, str]) -> None:
        super().__init__(places)
        self.places = places


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake on one line of a file, about a key, in one sentence.

    ``line`` is 0 if it is about the file as a whole, ``key`` empty if it is about none.
    """

    file: str
    line: int
    key: str
    sentence: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.key}: {self.sentence}" if self.key else f"{where}: {self.sentence}"


@dataclass(slots=True)
class Marked:
    """The content of a text: JSON-like values, the line of each by its path, and what is wrong."""

    file: str
    values: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def line(self, path: Path) -> int:
        """The line of the value, else of the nearest one that holds it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def at(self, path: Path, sentence: str) -> Mistake:
        """A mistake in the value that is there."""
        return Mistake(self.file, self.line(path), shown(path), sentence)

    def mistake(self, path: Path, sentence: str) -> None:
        self.mistakes.append(self.at(path, sentence))

    @contextmanager
    def noting(self, path: Path) -> Iterator[None]:
        """A ``MalformedError`` is a mistake there, a ``MisplacedError`` at its places beneath."""
        try:
            yield
        except MisplacedError as error:
            for place, sentence in error.places.items():
                self.mistake((*path, *place), sentence)
        except MalformedError as error:
            self.mistake(path, error.sentence)

    def in_order(self) -> list[Mistake]:
        """The mistakes by line; of one line, what was noted first."""
        return sorted(self.mistakes, key=lambda mistake: mistake.line)


def shown(path: Path) -> str:
    """``limits.memory.max``, ``policy[2]`` (the first is 0)."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text if text.isprintable() else quote(text)


def nearest(word: str, known: Collection[str]) -> str:
    """Advice on what to use instead of an unknown word: the nearest known one, else all of
    them."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}?" if near else f"use {', '.join(known)}"


class _Reader:
    """Makes values of nodes, and notes what is wrong with each."""

    def __init__(self, marked: Marked) -> None:
        self._marked = marked
        self._left = VALUES_MAX

    def value(self, node: yaml.Node, path: Path) -> Any:
        self._left -= 1
        if self._left < 0:
            raise yaml.MarkedYAMLError(problem=f"more than {VALUES_MAX} values")
        self._marked.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._map(node, path)
        if isinstance(node, yaml.SequenceNode):
            if node.tag != f"{_TAG}seq":
                self._marked.mistake(path, f"the tag {quote(node.tag)} means nothing here")
            return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, path)

    def _map(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        if node.tag != f"{_TAG}map":
            self._marked.mistake(path, f"the tag {quote(node.tag)} means nothing here")
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._note(line, shown(path), "a key must be a word, not a list or a map")
                continue
            key = str(key_node.value)
            if key_node.tag == f"{_TAG}merge":
                self._note(line, shown(path), "<< cannot be used here: write the keys out")
                continue
            if _HALF.search(key):
                self._note(line, shown(path), _HALF_SAID)
                continue
            inner = (*path, key)
            if key in found:
                first = self._marked.lines[inner]
                self._note(line, shown(inner), f"is there twice, first on line {first}")
                continue
            self._marked.lines[inner] = line
            found[key] = self.value(value_node, inner)
        return found

    def _note(self, line: int, key: str, sentence: str) -> None:
        self._marked.mistakes.append(Mistake(self._marked.file, line, key, sentence))

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        text, tag = str(node.value), node.tag
        if _HALF.search(text):
            self._marked.mistake(path, _HALF_SAID)
            return text
        if tag not in _KNOWN:
            self._marked.mistake(path, f"the tag {quote(tag)} means nothing here")
            return text
        if tag == f"{_TAG}null":
            return None
        if tag == f"{_TAG}bool" and text.lower() in ("true", "false"):
            return text.lower() == "true"
        return text if node.style or len(text) > JSON_DIGITS else _number(text)


def _number(text: str) -> int | float | str:
    """A plain word as a number, where JSON has it as one."""
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


def read(file: str, text: str) -> Marked:
    """The values of a text, None if it is empty; ``file`` is what mistakes call it."""
    marked = Marked(file)
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        if node is not None:
            marked.values = _Reader(marked).value(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        problem = str(error.problem)
        remedies = (said for begin, said in _REMEDIES.items() if problem.startswith(begin))
        words = next(remedies, " ".join(filter(None, (error.context, problem))))
        marked.mistakes = [Mistake(file, mark.line + 1 if mark else 0, "", f"not YAML: {words}")]
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        what = f"not YAML: it cannot have the character U+{error.character:04X}"
        marked.mistakes = [Mistake(file, line, "", what)]
    except (ValueError, OverflowError):
        what = "not YAML: an escape in it, as by \\U, stands for no character"
        marked.mistakes = [Mistake(file, 0, "", what)]
    except RecursionError:
        marked.mistakes = [Mistake(file, 0, "", "not YAML: it is nested too deep")]
    return marked


def read_file(path: pathlib.Path, *, required: bool = True) -> Marked:
    """The values of a file; that it cannot be read is a mistake."""
    try:
        return read(str(path), path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        said = "no such configuration file" if required else ""
    except OSError as error:
        said = error.strerror or str(error)
    except UnicodeError:
        said = "not UTF-8"
    return Marked(str(path), mistakes=[Mistake(str(path), 0, "", said)] if said else [])


def is_map(marked: Marked, what: str) -> Mapping[str, Any] | None:
    """The keys and values of a text, none of an empty one; notes a mistake for anything else."""
    if marked.values is None:
        return {}
    if not isinstance(marked.values, dict):
        marked.mistake((), f"not a map of {what}; write one `key: value` per line")
        return None
    return marked.values
