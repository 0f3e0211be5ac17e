"""Limits of networks: their keys, and their variables in the environment. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from runtime.texts import names

#: keys ``net.NAME.max`` of one agent
NETWORKS_MAX: Final = 32
_KEY: Final = re.compile(r"net\.(.+)\.max", re.DOTALL)
_OTHER: Final = re.compile(r"[^A-Z0-9_]")


def network_of(key: str) -> str | None:
    """The network that a key limits; None for other keys."""
    match = _KEY.fullmatch(key)
    return match[1] if match and names.is_name(match[1]) else None


def network_limit(limits: Mapping[str, str], name: str) -> int | None:
    """Bytes that may pass; None for any number."""
    text = limits.get(f"net.{name}.max")
    return None if text is None else names.parse_size(text)


def variable(name: str) -> str:
    """The variable of the environment with a network's URL."""
    return f"CTX_NET_{_OTHER.sub('_', name.upper())}"
