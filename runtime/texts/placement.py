"""Where an agent is to run: the text of the file ``placement``. Pure.

It is a line ``node=NAME``, or ``node=PREFIX*`` for any of several nodes; nothing is this machine.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from runtime.errors import MalformedError
from runtime.texts.names import check_name, quote

_KEY: Final = "node"


def parse_line(line: str) -> str:
    """The node, or prefix ending in ``*``, of one line; ``MalformedError``."""
    key, separator, pattern = line.partition("=")
    if not separator or key != _KEY:
        raise MalformedError(f"{quote(line)} is not node=NAME or node=PREFIX*")
    if pattern != "*":
        check_name(pattern.removesuffix("*"))
    return pattern


def listed(known: Collection[str]) -> str:
    """The nodes that somebody may use, in words that go on a sentence."""
    none = "there is no node that you may use: ctx nodes check"
    return f"you may use {', '.join(known)}" if known else none


def parse(text: str) -> str:
    """The node, or prefix, of a whole text; empty for this machine. ``MalformedError``."""
    if not text:
        return ""
    first, *more = text.removesuffix("\n").split("\n")
    pattern = parse_line(first)
    if more:
        raise MalformedError(
            f"line 2: {quote(more[0])} is one line too many: an agent runs at one node; for any "
            "of several write a prefix, such as node=gpu*"
        )
    return pattern


def matches(pattern: str, name: str) -> bool:
    """Whether a node is meant."""
    if pattern.endswith("*"):
        return name.startswith(pattern[:-1])
    return name == pattern
