"""JSON schemas of what goes into a tool, and of what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]


def text(description: str, **more: Any) -> Schema:
    return {"type": "string", "description": description, **more}


def words(description: str, *choices: str) -> Schema:
    """One word of a few."""
    return {"type": "string", "enum": list(map(str, choices)), "description": description}


def flag(description: str) -> Schema:
    return {"type": "boolean", "description": description}


def count(description: str) -> Schema:
    return {"type": "integer", "minimum": 0, "description": description}


def listed(items: Schema, description: str) -> Schema:
    return {"type": "array", "items": items, "description": description}


def shape(
    required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None
) -> Schema:
    """An object with these keys and no others."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "additionalProperties": False,
        "required": list(required),
    }
