"""How a row of the store is read, whichever version wrote it.

A row is a JSON object with the fields of its record by name. Two rules carry it from version to
version, so that most changes of a record need no more than a default:

- A field that an older version did not write gets its default, or what the record's ``load`` puts
  in its place. Every new field needs one of the two. JSON knows neither tuples nor words of an
  enumeration nor records within records: those are read as the type of the field says.
- A field that the record no longer has is left out, and disappears when the row is next written.

Any other change is a step in ``runtime.records.schema``: a new table or index, a field that means
something else, and also a field that an older daemon must not drop. The number of steps is the
version of the state. A daemon refuses a state whose version is higher than its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from enum import StrEnum
from functools import cache, partial
from operator import attrgetter
from types import UnionType
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

_R = TypeVar("_R")


#: one line of JSON of a row and the records within it
dump_row: Final = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), default=lambda value: value.row()
).encode


@cache
def _columns(cls: Any) -> tuple[tuple[str, ...], attrgetter[tuple[Any, ...]]]:
    names = tuple(f.name for f in fields(cls) if f.name != "index")
    # each commit reads all of them
    return names, attrgetter(*names)


def names_of(cls: Any) -> tuple[str, ...]:
    """The fields of a record but its index, which is no part of the row."""
    return _columns(cls)[0]


def dumped(record: Any) -> dict[str, Any]:
    """The values of these fields, not copied: for serialising at once."""
    cls: Any = type(record)
    names, read = _columns(cls)
    return dict(zip(names, read(record), strict=True))


class Value:
    """A record that is a part of another one's row: a frozen dataclass, replaced as a whole."""

    __slots__ = ()

    def row(self) -> dict[str, Any]:
        return shortened(type(self), dumped(self))


def loaded(cls: Callable[..., _R], values: Mapping[str, Any], **more: Any) -> _R:
    """The record of a row, and of ``more`` that is not in it."""
    read, known = _readers(cls), {name: values[name] for name in names_of(cls) if name in values}
    for name in read.keys() & known.keys():
        if known[name] is not None:
            known[name] = read[name](known[name])
    return cls(**{**known, **more})


def _loaded_each(cls: Callable[..., _R], rows: Iterable[Mapping[str, Any]]) -> tuple[_R, ...]:
    return tuple(loaded(cls, row) for row in rows)


@cache
def _readers(cls: Any) -> dict[str, Callable[[Any], Any]]:
    """The readers of those fields that JSON has in another form."""
    found: dict[str, Callable[[Any], Any]] = {}
    for name, kind in get_type_hints(cls).items():
        # the other one of two is None
        kind = get_args(kind)[0] if isinstance(kind, UnionType) else kind
        inner = next(iter(get_args(kind)), None)
        kind = get_origin(kind) or kind
        if kind is tuple and isinstance(inner, type) and issubclass(inner, Value):
            found[name] = partial(_loaded_each, inner)
        elif isinstance(kind, type) and issubclass(kind, Value):
            found[name] = partial(loaded, kind)
        elif isinstance(kind, type) and issubclass(kind, StrEnum | tuple):
            found[name] = kind
    return found


@cache
def defaults_of(cls: Any) -> dict[str, Any]:
    """The values of fields that a row does not have. A default belongs to the state's format: one
    that changes must be written to the rows first."""
    found = {}
    for each in fields(cls):
        if each.default is not MISSING:
            found[each.name] = each.default
        elif each.default_factory is not MISSING:
            found[each.name] = each.default_factory()
    return found


@cache
def _default_values(cls: Any) -> tuple[Any, ...]:
    return tuple(defaults_of(cls).get(name, MISSING) for name in names_of(cls))


def shortened(cls: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The fields that a row has, of all of them in the order of ``dumped``: most fields of most
    records have their defaults."""
    return {
        name: value
        for (name, value), default in zip(values.items(), _default_values(cls), strict=True)
        if value is not default and value != default
    }
