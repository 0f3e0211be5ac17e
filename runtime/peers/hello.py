"""A host says what it is and offers, which is checked as all that a stranger says. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from runtime.texts.said import Said

#: a host says words and lists of names; how long they are, and how many
_WORDS: Final = ("node", "alias", "product", "boot")
_NAMES: Final = ("directories", "networks", "shared")
_WORD_MAX: Final = 256
_NAMES_MAX: Final = 1024


def told_of_itself(values: Mapping[str, Any]) -> dict[str, Any]:
    """The words of a host about itself, as they may be shown; ``MalformedError``."""
    said = Said(values, "hello")
    words = {name: said.shown(name, _WORD_MAX) for name in _WORDS}
    names = {name: said.all_shown(name, _NAMES_MAX, _WORD_MAX) for name in _NAMES}
    most = said.amount("lease_max", 0)
    return {"version": said.get("version", int), **words, **names, "lease_max": most}
