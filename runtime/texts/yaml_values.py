"""Values of settings, as YAML has them: a *reader* makes one of what is written, or says what is
wrong (``MalformedError``), or what is wrong with its parts, by places (``MisplacedError``)."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from keyword import iskeyword
from typing import Any, Final, TypeVar, get_type_hints

from runtime.errors import MalformedError
from runtime.texts import yaml_marks
from runtime.texts.names import check_choice, check_socket, parse_duration, parse_size
from runtime.texts.yaml_marks import Marked, MisplacedError, Path, nearest

_T = TypeVar("_T")
_K = TypeVar("_K", bound=str | int)

#: words that YAML 1.1 had for the two values
_FLAGS: Final = {"yes": True, "on": True, "no": False, "off": False}


def size(value: Any) -> int:
    return parse_size(str(value))


def duration(value: Any) -> float:
    return parse_duration(str(value))


def count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise MalformedError(f"{value!r} is not a number; use 0 or more, in digits")
    return value


def share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise MalformedError(f"{value!r} is not a share; use a number up to 1, such as 0.5")
    return float(value)


def text(value: Any) -> str:
    if not isinstance(value, str):
        remedy = "; put it into quotes" if isinstance(value, int | float) else ""
        raise MalformedError(f"{value!r} is not a string{remedy}")
    return value


def socket(value: Any) -> str:
    return check_socket(text(value), "the path")


def flag(value: Any) -> bool:
    if isinstance(value, str):
        value = _FLAGS.get(value.lower(), value)
    if not isinstance(value, bool):
        raise MalformedError(f"{value!r} is not a boolean; use true or false")
    return value


def choice(*known: str) -> Callable[[Any], str]:
    """Reads one of a few words."""
    return lambda value: check_choice(str(value), known)


def optional(read: Callable[[Any], _T]) -> Callable[[Any], _T | None]:
    """Reads a setting that may also be none."""
    return lambda value: None if value is None else read(value)


def list_of(read: Callable[[Any], _T], what: str = "strings") -> Callable[[Any], tuple[_T, ...]]:
    """Reads a list."""

    def read_list(value: Any) -> tuple[_T, ...]:
        if not isinstance(value, list):
            raise MalformedError(f"{value!r} is not a list of {what}, such as [a, b]")
        return tuple(_parts(enumerate(value), lambda _, each: read(each)).values())

    return read_list


def map_of(
    read_key: Callable[[str], object], read: Callable[[Any], _T], what: str
) -> Callable[[Any], dict[str, _T]]:
    """Reads a map, in which each key is one by ``read_key``."""

    def read_part(key: str, value: Any) -> _T:
        read_key(key)
        return read(value)

    def read_map(value: Any) -> dict[str, _T]:
        if not isinstance(value, dict):
            raise MalformedError(f"{value!r} is not a map of {what}")
        return _parts(value.items(), read_part)

    return read_map


def record(cls: type[_T], what: str = "key") -> Callable[[Any], _T]:
    """Reads a map whose keys are the fields of a dataclass.

    The type of a field is annotated with its reader. A field for a word of Python has that word
    and ``_`` as its name.
    """
    hints = get_type_hints(cls, include_extras=True)
    readers = {name.rstrip("_"): kind.__metadata__[0] for name, kind in hints.items()}
    needed = {
        field.name.rstrip("_") for field in fields(cls)  # type: ignore[arg-type]
        if field.default is field.default_factory is MISSING
    }  # fmt: skip

    def read_field(key: str, value: Any) -> Any:
        if key not in readers:
            raise MalformedError(f"unknown {what}; {nearest(key, readers)}")
        return readers[key](value)

    def read_record(value: Any) -> _T:
        if not isinstance(value, dict):
            raise MalformedError(f"{value!r} is not a map with {', '.join(readers)}")
        found = _parts(value.items(), read_field)
        for key in sorted(needed - found.keys()):
            raise MalformedError(f"{key} is missing")
        return cls(**{f"{key}_" if iskeyword(key) else key: each for key, each in found.items()})

    return read_record


def read_settings(file: pathlib.Path, cls: type[_T], *, required: bool = True) -> tuple[_T, Marked]:
    """The settings in a file, and all that is wrong with it: then they have their defaults."""
    marked, found = yaml_marks.read_file(file, required=required), cls()
    with marked.noting(()):
        found = record(cls, "setting")(yaml_marks.is_map(marked, "settings") or {})
    return found, marked


def _parts(
    parts: Iterable[tuple[_K, Any]], read: Callable[[_K, Any], _T]
) -> dict[_K, _T]:
    """The parts as they are read, by key or index; ``MisplacedError`` with all that is wrong."""
    found: dict[_K, _T] = {}
    wrong: dict[Path, str] = {}
    for key, each in parts:
        try:
            found[key] = read(key, each)
        except MisplacedError as error:
            wrong.update(((key, *place), said) for place, said in error.places.items())
        except MalformedError as error:
            wrong[key,] = error.sentence
    if wrong:
        raise MisplacedError(wrong)
    return found
