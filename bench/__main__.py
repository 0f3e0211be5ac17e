"""make bench: ratios of ctxfs to named references, measured in one run."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from bench.files import LISTED
from bench.measure import Ratio, Unit
from bench.rows import ROWS, Row
from bench.setting import SettingError, prepared

_NAMES: Final = tuple(row.name for row in ROWS)
_HEADINGS: Final = ("row", "side", "median", "reference", "median", "min", "ratio", "max")
_UNITS: Final[Mapping[Unit, Sequence[tuple[float, str]]]] = {
    "ns": ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1, "ns")),
    "bytes": ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B")),
}


def _describe_rows() -> str:
    lines = ["rows:"]
    for row in ROWS:
        lines.append(
            textwrap.fill(
                row.doc,
                width=78,
                initial_indent=f"  {row.name:<14}",
                subsequent_indent=" " * 16,
            )
        )
    return "\n".join(lines)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Compares ctxfs with references timed in the same run, round by round in "
        "turn. A row's ratio is the median of its rounds' ratios, between the smallest and the "
        "largest; the times beside it are for orientation. Needs root.",
        epilog=_describe_rows(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rounds", metavar="N", type=int, default=15, help="rounds of each row (default: 15)"
    )
    parser.add_argument(
        "--only", metavar="NAME", nargs="+", choices=_NAMES, help="these rows and no others"
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write JSON to FILE, all rounds included"
    )
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error("--rounds: at least 1")
    if arguments.json:
        try:
            arguments.json.touch()  # rather now than after minutes of measuring
        except OSError as error:
            parser.error(f"--json: {error}")
    return arguments


def _quantity(found: float, unit: Unit) -> str:
    size, name = next((each for each in _UNITS[unit] if found >= each[0]), _UNITS[unit][-1])
    return f"{found / size:.3g} {name}"


def _cells(ratio: Ratio) -> tuple[str, ...]:
    return (
        ratio.row,
        ratio.subject_name,
        _quantity(median(ratio.subject), ratio.unit),
        ratio.reference_name,
        _quantity(median(ratio.reference), ratio.unit),
        *(f"{found:.2f}" if found >= 0.1 else f"{found:.2g}" for found in ratio.spread),
    )


_WIDTHS: Final = (19, 11, 9, 16, 9, 9, 9, 9)


def _print_cells(cells: Sequence[str]) -> None:
    padded = [
        cell.ljust(width) if position in (0, 1, 3) else cell.rjust(width)
        for position, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    ]
    print("  ".join(padded).rstrip(), flush=True)


def _as_json(ratios: Sequence[Ratio]) -> str:
    found = []
    for ratio in ratios:
        low, middle, high = ratio.spread
        found.append(
            {
                "row": ratio.row,
                "side": ratio.subject_name,
                "reference": ratio.reference_name,
                "ratio": {"min": low, "median": middle, "max": high},
                "unit": ratio.unit,
                "median": {
                    "side": median(ratio.subject),
                    "reference": median(ratio.reference),
                },
                "rounds": ratio.ratios,
            }
        )
    return json.dumps(found, indent=2)


def run(rows: Sequence[Row], *, rounds: int) -> list[Ratio]:
    """Measures and prints, each row as soon as it is known."""
    # the listing of the minimal filesystem has as many names as that of the agents
    with prepared(many=3 * LISTED) as setting:
        _print_cells(_HEADINGS)
        found: list[Ratio] = []
        for row in rows:
            count = max(min(3, rounds), math.ceil(rounds * row.share))
            ratios = row.measure(row.name, setting, count)
            found += ratios
            for ratio in ratios:
                _print_cells(_cells(ratio))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    wanted = arguments.only or _NAMES
    try:
        found = run([row for row in ROWS if row.name in wanted], rounds=arguments.rounds)
        if arguments.json:
            arguments.json.write_text(_as_json(found) + "\n")
    except SettingError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        # as if the signal had ended it, for whoever waits for this process
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
