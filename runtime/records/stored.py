"""How a row of the store is read, whichever version wrote it.

A row is a JSON object with the fields of its record by name. Two rules carry it from version to
version, so that most changes of a record need no more than a default:

- A field that an older version did not write gets its default, or what the record's ``load`` puts
  in its place. Every new field needs one of the two.
- A field that the record no longer has is left out, and disappears when the row is next written.

Any other change is a step in ``runtime.records.store``: a new table or index, a field that means
something else, and also a field that an older daemon must not drop. The number of steps is the
version of the state. A daemon refuses a state whose version is higher than its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any


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


def known_fields(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a row, without those that its record has no field for."""
    return {f.name: values[f.name] for f in fields(cls) if f.name in values}
