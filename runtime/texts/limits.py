"""Limits that are not the kernel's: of children, of networks, and of what is used of models; with
the variables in the environment that tell of networks. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from runtime.errors import MalformedError
from runtime.texts import names

#: how many children of an agent run at once
RUNNING: Final = "children.running"
#: keys ``net.NAME.max`` of one agent
NETWORKS_MAX: Final = 32
#: of what is used of models
TOKENS: Final = "tokens.max"
COST: Final = "cost.max"
#: 10⁻⁹ of the operator's unit
UNIT: Final = 10**9
_TOKENS: Final = re.compile(r"[0-9]{1,18}")
_COST: Final = re.compile(r"([0-9]{1,9})(?:\.([0-9]{1,6}))?")
_KEY: Final = re.compile(r"net\.(.+)\.max", re.DOTALL)
_OTHER: Final = re.compile(r"[^A-Z0-9_]")


def running_limit(limits: Mapping[str, str]) -> int | None:
    """Children that may run at once; None for any number."""
    text = limits.get(RUNNING)
    return None if text is None else names.parse_number(text)


def parse_tokens(text: str) -> int:
    """A number of tokens; ``MalformedError``."""
    if not _TOKENS.fullmatch(text):
        why = "is not a number of tokens; write all of its digits, such as 1000000"
        raise MalformedError(f"{names.quote(text)} {why}")
    return int(text)


def parse_cost(text: str) -> int:
    """A cost in 10⁻⁹ of the unit; ``MalformedError``."""
    match = _COST.fullmatch(text)
    if match is None:
        why = "is not a cost; write up to 9 digits, and up to 6 more after a point, such as 2.50"
        raise MalformedError(f"{names.quote(text)} {why}")
    return int(match[1]) * UNIT + int((match[2] or "").ljust(9, "0"))


def show_cost(cost: int) -> str:
    """A cost with six decimals."""
    return f"{cost // UNIT}.{cost % UNIT // 1000:06}"


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
