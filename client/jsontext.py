"""JSON as `json` reads and writes it, without importing that: it takes `re`, half of a start."""

from __future__ import annotations

from client.types import Any, Callable

BLANKS = " \t\n\r"
#: the parts that are used are Python's own, and may be others in a later one
GONE = ImportError, AttributeError, TypeError


class Rules:
    """The rules by which the scanner of `json` reads, see `json.JSONDecoder`."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_int = int

    def __init__(self, parse_constant: Callable[[str], object] = float,
                 parse_float: Callable[[str], object] = float) -> None:  # fmt: skip
        self.parse_constant = parse_constant  # -Infinity, Infinity, NaN
        self.parse_float = parse_float


def loads(text: str, **rules: Callable[[str], object]) -> Any:
    """Return what a text says; `ValueError` if it is not JSON, `RecursionError` if too deep."""
    whole = text.strip(BLANKS)
    try:
        import _json

        value, end = _json.make_scanner(Rules(**rules))(whole, 0)  # type: ignore[arg-type]
        if end == len(whole):
            return value
    except (*GONE, StopIteration, SystemError, ValueError):
        pass  # `json` says what is wrong, and where in the whole text
    import json

    return json.loads(text, **rules)  # type: ignore[arg-type]


def dumps(value: object) -> str:
    """Return a value as JSON on one line, with all characters as they are."""
    try:
        import _json

        encode = _json.make_encoder(
            None, refuse, _json.encode_basestring, None, ": ", ", ", False, False, True
        )
    except GONE:
        import json

        return json.dumps(value, ensure_ascii=False)
    return "".join(encode(value, 0))


def refuse(value: object) -> object:
    """Refuse what JSON does not have."""
    raise TypeError(f"not for JSON: {type(value).__name__}")
