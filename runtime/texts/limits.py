"""Limits that are not the kernel's: of children and of networks, with the variables in the
environment that tell of those. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from runtime.texts import names

#: how many children of an agent run at once
RUNNING: Final = "children.running"
#: keys ``net.NAME.max`` of one agent
NETWORKS_MAX: Final = 32
_KEY: Final = re.compile(r"net\.(.+)\.max", re.DOTALL)
_OTHER: Final = re.compile(r"[^A-Z0-9_]")


def running_limit(limits: Mapping[str, str]) -> int | None:
    """Children that may run at once; None for any number."""
    text = limits.get(RUNNING)
    return None if text is None else names.parse_number(text)


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
