"""The fields of what a stranger says, checked as they are read. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from runtime.errors import MalformedError
from runtime.texts.names import escape, quote

#: characters of a text, and of one that is shown; no number is as great
_TEXT_MAX: Final = 4096
_SHOWN_MAX: Final = 1024
_NUMBER_MAX: Final = 1 << 63
_KEY: Final = re.compile(r"[!-~]{1,512}")


class Said:
    """The fields of an object; ``MalformedError`` for one that is not right. What is not said is
    the default, if there is one."""

    def __init__(self, values: object, what: str) -> None:
        if not isinstance(values, Mapping):
            raise MalformedError(f"{what} is no object")
        self._values: Mapping[str, Any] = values
        self._what = what

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def only(self, known: Iterable[str]) -> None:
        """Nothing else may be there."""
        unknown = sorted(self._values.keys() - {*known})
        if unknown:
            raise MalformedError(f"{self._what} has {quote(unknown[0])}, which is not known here")

    def _right(self, name: str, right: object) -> None:
        if not right:
            raise MalformedError(f"{self._what} is without a right {name}")

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """A number is whole, and not negative."""
        value: Any = self._values.get(name, default)
        right = value.__class__ is kind
        self._right(name, right and (kind is not int or 0 <= value < _NUMBER_MAX))
        return value

    def amount(self, name: str, default: Any = None) -> Any:
        """A number that may be a fraction."""
        value: Any = self._values.get(name, default)
        self._right(name, _is_amount(value))
        return value

    def amounts(self, name: str, most: int) -> dict[str, int | float]:
        """An object of words with numbers, at most so many; empty if it is not said."""
        values: dict[str, Any] = self.get(name, dict, {})
        right = all(_KEY.fullmatch(key) and _is_amount(value) for key, value in values.items())
        self._right(name, right and len(values) <= most)
        return values

    def texts(self, name: str, but: str = "") -> dict[str, str]:
        """An object whose values, but for one, are texts."""
        values = {key: value for key, value in self.get(name, dict, {}).items() if key != but}
        self._right(name, all(isinstance(value, str) for value in values.values()))
        return values

    def word(self, name: str) -> str:
        """A short text without control characters."""
        value = str(self.get(name, str))
        self._right(name, len(value) <= _TEXT_MAX and value.isprintable())
        return value

    def shown(self, name: str, most: int = _SHOWN_MAX) -> str:
        """A text that can be shown; empty if it is not said."""
        value = self.get(name, str, "")
        self._right(name, len(value) <= most)
        return escape(value)

    def all_shown(self, name: str, most: int, each_most: int) -> list[str]:
        """A list of such texts."""
        values = self.get(name, list, [])
        right = all(isinstance(each, str) and len(each) <= each_most for each in values)
        self._right(name, right and len(values) <= most)
        return list(map(escape, values))


def _is_amount(value: Any) -> bool:
    return value.__class__ in (int, float) and 0 <= value < _NUMBER_MAX
