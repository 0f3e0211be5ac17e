"""Forms, which people fill in: what MCP elicitation asks for (ctxfs-tasks(5), Asks).

A form is a JSON schema of one object whose fields are texts, numbers, flags or choices. Nothing
else of JSON Schema is looked at: no pattern, which could take for ever, and no reference, which
could lead anywhere. What else a field says, such as a title, is for whoever fills it in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from runtime.errors import MalformedError
from runtime.texts.names import dump_json, parse_json_object, quote

FORM_MAX: Final = 16 << 10
_FIELDS_MAX: Final = 64
_EXAMPLE: Final = '{"type":"object","properties":{"FIELD":{"type":"string"}},"required":["FIELD"]}'
#: bounds of a value, and what of it they bound
_BOUNDS: Final[dict[str, tuple[str, str]]] = {
    "string": ("minLength", "maxLength"),
    "number": ("minimum", "maximum"),
    "integer": ("minimum", "maximum"),
    "array": ("minItems", "maxItems"),
}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


#: the kinds of fields, and what is one
_KINDS: Final[dict[str, Callable[[Any], bool]]] = {
    "string": lambda value: isinstance(value, str),
    "number": _is_number,
    "integer": lambda value: _is_number(value) and (isinstance(value, int) or value.is_integer()),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list) and all(isinstance(v, str) for v in value),
}


def parse_form(text: str) -> dict[str, Any]:
    """The schema of a form; ``MalformedError``."""
    if len(text.encode()) > FORM_MAX:
        raise MalformedError(f"the form is too long; it may have at most {FORM_MAX} bytes")
    form = parse_json_object(text)
    fields, required = form.get("properties"), form.get("required", [])
    if form.get("type") != "object" or not isinstance(fields, dict) or not fields:
        raise MalformedError(f"{quote(text)} is not a form; use {_EXAMPLE}")
    if len(fields) > _FIELDS_MAX:
        raise MalformedError(f"the form has {len(fields)} fields; use at most {_FIELDS_MAX}")
    for name, field in fields.items():
        _check_field(name, field)
    if not isinstance(required, list) or not all(
        isinstance(name, str) and name in fields for name in required
    ):
        raise MalformedError(f"required is not a list of fields; use {', '.join(fields)}")
    return form


def _check_field(name: str, field: Any) -> None:
    kind = field.get("type") if isinstance(field, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise MalformedError(f"{quote(name)} is of no type; use one of {', '.join(_KINDS)}")
    for bound in _BOUNDS.get(kind, ()):
        if bound in field and not _is_number(field[bound]):
            raise MalformedError(f"{quote(name)}: {bound} is not a number")
    try:
        choices = _choices(field)
    except (KeyError, TypeError):
        choices = []
    if choices is None and kind != "array":
        return
    if not choices or not all(isinstance(choice, str) for choice in choices):
        raise MalformedError(f'{quote(name)} has no choices; use {{"enum": ["one", "other"]}}')


def _choices(field: dict[str, Any]) -> list[str] | None:
    """The texts that a field may have, None for any; an array may have several of its items'."""
    if field["type"] == "array":
        field = field["items"]
    for key in ("oneOf", "anyOf"):
        if key in field:
            return [each["const"] for each in field[key]]
    return list(field["enum"]) if "enum" in field else None


def parse_filled(form: dict[str, Any], text: str) -> dict[str, Any]:
    """The fields of a form as somebody filled it in; ``MalformedError`` names the wrong one."""
    fields = form["properties"]
    try:
        filled = parse_json_object(text)
    except MalformedError as error:
        use = f"use an object of JSON with the fields {', '.join(fields)}"
        raise MalformedError(f"{error.sentence}; {use}") from None
    for name in filled:
        if name not in fields:
            raise MalformedError(f"{quote(name)} is no field; use {', '.join(fields)}")
    for name in form.get("required", ()):
        if name not in filled:
            raise MalformedError(f"{quote(name)} is missing: give all of {_required(form)}")
    for name, value in filled.items():
        if why := _why_wrong(fields[name], value):
            raise MalformedError(f"{quote(name)}: {why}")
    return filled


def _required(form: dict[str, Any]) -> str:
    return ", ".join(form["required"])


def _why_wrong(field: dict[str, Any], value: Any) -> str:
    kind, shown = field["type"], quote(value if isinstance(value, str) else dump_json(value))
    if not _KINDS[kind](value):
        return f"{shown} is not of type {kind}"
    choices = _choices(field)
    if choices is not None:
        given = value if kind == "array" else [value]
        if unknown := [each for each in given if each not in choices]:
            return f"{quote(str(unknown[0]))} is no choice; use {', '.join(choices)}"
    least, most = _BOUNDS.get(kind, ("", ""))
    size = value if kind in ("number", "integer") else len(value) if least else 0
    if size < field.get(least, size):
        return f"{shown} is too small; {least} is {field[least]}"
    if size > field.get(most, size):
        return f"{shown} is too large; {most} is {field[most]}"
    return ""
