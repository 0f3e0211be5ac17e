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
from typing import Any


def known_fields(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a row, without those that its record has no field for."""
    return {f.name: values[f.name] for f in fields(cls) if f.name in values}
