"""A host says what it is and offers, which is checked as all that a stranger says. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from runtime.peers.peering import BrokenLinkError
from runtime.texts.names import escape

#: a host says words and lists of names; how long they are, and how many
_WORDS: Final = ("node", "alias", "product", "boot")
_NAMES: Final = ("directories", "networks", "shared")
_WORD_MAX: Final = 256
_NAMES_MAX: Final = 1024
#: seconds
_LEASE_MAX: Final = 1e9


def told_of_itself(said: Mapping[str, Any]) -> dict[str, Any]:
    """The words of a host about itself, as they may be shown; ``BrokenLinkError``."""
    found: dict[str, Any] = {"version": said["version"]}
    for name in _WORDS:
        value = said.get(name, "")
        if not isinstance(value, str) or len(value) > _WORD_MAX:
            raise BrokenLinkError(f"hello without a right {name}")
        found[name] = escape(value)
    for name in _NAMES:
        value = said.get(name, [])
        right = isinstance(value, list) and len(value) <= _NAMES_MAX
        if not right or not all(isinstance(each, str) and len(each) <= _WORD_MAX for each in value):
            raise BrokenLinkError(f"hello without right {name}")
        found[name] = [escape(each) for each in value]
    most = said.get("lease_max", 0)
    if most.__class__ not in (int, float) or not 0 <= most <= _LEASE_MAX:
        raise BrokenLinkError("hello without a right lease_max")
    return {**found, "lease_max": most}
