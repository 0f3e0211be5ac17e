"""Files that are written from tables, by ``python -m``: man pages, and the words of the client."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path


class RenewingError(Exception):
    """A file cannot be renewed, or is out of date; one sentence."""


def run(
    name: str,
    what: str,
    where: str,
    renewed: Callable[[Path], Iterator[tuple[Path, str]]],
    argv: list[str] | None,
    target: str,
) -> int:
    """The program ``contrib.generate.NAME``, which ``make TARGET`` runs: renews files, or says
    which are not up to date."""
    parser = argparse.ArgumentParser(prog=f"python -m contrib.generate.{name}", description=what)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if it would")
    parser.add_argument("path", type=Path, help=where)
    arguments = parser.parse_args(argv)
    try:
        for path, new in renewed(arguments.path):
            if path.exists() and path.read_text(encoding="utf-8") == new:
                continue
            if arguments.check:
                raise RenewingError(f"{path} is out of date: run make {target}")
            path.write_text(new, encoding="utf-8")
    except (OSError, RenewingError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0
