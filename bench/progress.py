"""What is being done, in one line on standard error, if a person looks there."""

from __future__ import annotations

import sys


def show(text: str) -> None:
    """Takes the place of what was shown before."""
    if sys.stderr.isatty():
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)


def clear() -> None:
    """Before anything else is printed."""
    show("")
