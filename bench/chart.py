"""make chart: the ratios of a run of the bench, drawn from its JSON.

    python -m bench.chart JSON SVG
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def _spread(ratio: dict[str, object]) -> dict[str, float]:
    spread = ratio["ratio"]
    assert isinstance(spread, dict)
    return spread


def draw(ratios: list[dict[str, object]], target: Path) -> None:
    """A line for each ratio, from the smallest round to the largest, the median as a dot."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.fonttype"] = "none"  # text stays text
    # a ratio of zero, of what did nothing at all, has no place on a scale of powers
    ratios = [each for each in ratios if _spread(each)["min"] > 0]
    figure = Figure(figsize=(9, 1.2 + 0.19 * len(ratios)), layout="constrained")
    axes = figure.subplots()
    for position, ratio in enumerate(ratios):
        spread = _spread(ratio)
        axes.plot([spread["min"], spread["max"]], [position] * 2, color="tab:blue", linewidth=2)
        axes.plot(spread["median"], position, "o", color="tab:blue", markersize=5)
        axes.annotate(
            f"{spread['median']:.3g}",
            (spread["max"], position),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    labels = [f"{each['row']}: {each['side']} / {each['reference']}" for each in ratios]
    axes.set_yticks(range(len(ratios)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.1, y=0.02)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("ratio to the reference, smallest to largest round, median as dot; 1 is alike")
    figure.savefig(target, metadata={"Date": None})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.chart", description=__doc__.split("\n")[0])
    parser.add_argument("json", metavar="JSON", type=Path, help="what the bench wrote by --json")
    parser.add_argument("svg", metavar="SVG", type=Path, help="the file to write")
    arguments = parser.parse_args(argv)
    if not arguments.json.exists():
        print(
            f"bench.chart: {arguments.json} is missing: run python -m bench --json "
            f"{arguments.json}",
            file=sys.stderr,
        )
        return 1
    draw(json.loads(arguments.json.read_text()), arguments.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
