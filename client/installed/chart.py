"""The timeline of a family as text: who ran when, who ended whom and why."""

from __future__ import annotations

import os
import time
from collections import Counter

from client.installed.lives import Life, last_moment
from client.output import cut
from client.types import Iterator, Sequence

GROUP = 3  # agents that share a line, at least
STEPS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600,
    900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800, 1209600, 2592000, 7776000,
    31536000,
)  # fmt: skip
SIGNS = {
    "busy": "█", "paused": "▒", "idle": "─", "ready": "─", "starting": "╌", "stopping": "▓",
    "new": "·",
}  # fmt: skip
ENDS = {"done": "✓", "error": "✗", "interrupted": "✗", "cancelled": "■"}
LEGEND = (
    "█ busy", "─ idle", "▒ paused", "╌ starts", "▓ stops", "· new", "✓ done", "✗ failed",
    "■ cancelled", "► lives",
)  # fmt: skip
OF_SEVERAL = "░▒▓█ how many of several"
SHADES = " ░▒▓█"


class Row:
    """A line: one life, or several of one kind; `above` is the row of their parent."""

    def __init__(self, lives: Sequence[Life], above: Row | None, last: bool = True) -> None:
        self.lives = lives
        self.above = above
        self.last = last  # of its parent's rows
        self.grouped = len(lives) > 1

    @property
    def life(self) -> Life:
        return self.lives[0]

    @property
    def label(self) -> str:
        """The name of the life; of several what their names begin with, and how many they are."""
        if not self.grouped:
            return self.life.name
        names = sorted({life.name for life in self.lives})
        if len(names) == 1:
            return f"{names[0]} (×{len(self.lives)})"
        stem = os.path.commonprefix(names).rstrip("0123456789")  # noqa: RUF071, no paths
        return f"{stem}* (×{len(self.lives)})" if stem else f"{len(self.lives)} agents"

    @property
    def fate(self) -> str:
        """How the lives ended, the most frequent end first."""
        if not self.grouped:
            return self.life.fate()
        counts = Counter(life.fate() for life in self.lives)
        if len(counts) == 1:
            return f"all {self.life.fate()}"
        return ", ".join(f"{number} {fate}" for fate, number in counts.most_common())

    @property
    def branches(self) -> str:
        """The branches that are drawn before the label."""
        if self.above is None:
            return ""
        drawn, row = ("└─ " if self.last else "├─ "), self.above
        while row.above is not None:
            drawn, row = ("   " if row.last else "│  ") + drawn, row.above
        return drawn


def depth_of(life: Life) -> int:
    """Return how many generations are below a life."""
    return max((1 + depth_of(child) for child in life.children), default=0)


def rows_of(top: Life, deepest: int, by_fate: bool | None) -> list[Row]:
    """Return the rows of a family. Below `deepest` generations all share one; of siblings with
    nobody below them those share one that ended in the same way (`by_fate`), or all of them, or
    (None) nobody does."""
    found: list[Row] = []

    def add(life: Life, above: Row | None, generation: int, last: bool) -> None:
        row = Row([life], above, last)
        found.append(row)
        below = sorted(life.children, key=lambda child: (child.made, child.name))
        if generation == deepest:
            everyone = list(life.family())[1:]
            parts = [everyone] if len(everyone) >= GROUP else [[each] for each in below]
        else:
            parts = list(grouped(below, by_fate))
        for place, part in enumerate(parts):
            is_last = place == len(parts) - 1
            if len(part) > 1:
                found.append(Row(part, row, is_last))
            else:
                add(part[0], row, generation + 1, is_last)

    add(top, None, 0, True)
    return found


def grouped(siblings: Sequence[Life], by_fate: bool | None) -> Iterator[list[Life]]:
    """Yield siblings alone, or those of one kind together where their first one is."""
    kinds: dict[str, list[Life]] = {}
    for life in siblings:
        if not life.children and by_fate is not None:
            kinds.setdefault(life.fate() if by_fate else "", []).append(life)
    together = {life: part for part in kinds.values() if len(part) >= GROUP for life in part}
    for life in siblings:
        part = together.get(life, [life])
        if part[0] is life:
            yield part


def planned(top: Life, most: int) -> list[Row]:
    """Return the rows of a family, at most so many if that is possible."""
    depth = depth_of(top)
    ways = [(depth, None), (depth, True), *((deep, False) for deep in range(depth, -1, -1))]
    rows: list[Row] = []
    for deepest, by_fate in ways:
        rows = rows_of(top, deepest, by_fate)
        if len(rows) <= most:
            break
    return rows


def ticks(seconds: float, most: int) -> Iterator[float]:
    """Yield round times from 0 on, which divide a longer one into at most so many parts."""
    step = next((step for step in STEPS if seconds / step <= most), STEPS[-1])
    return (number * step for number in range(int(seconds / step) + 1))


def span(seconds: float) -> str:
    """Return a duration in its two largest units."""
    if seconds < 1:
        return f"{round(seconds * 1000)} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    for unit, size, small, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if seconds >= size:
            rest = int(seconds % size // part)
            return f"{int(seconds // size)} {unit}" + f" {rest} {small}" * bool(rest)
    rest = int(seconds % 60)
    return f"{int(seconds // 60)} min" + f" {rest} s" * bool(rest)


def clock(when: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return a moment in local time."""
    return time.strftime(form, time.localtime(when))


def summary(top: Life) -> tuple[str, str]:
    """Return a heading, and a sentence about the whole family."""
    lives = list(top.family())
    below = len(lives) - 1
    more = f" and the {below} agent{'s' * (below != 1)} below it" if below else ""
    end = last_moment(top)
    counts = Counter("alive" if life.end is None else life.outcome for life in lives)
    told = ", ".join(f"{number} {word}" for word, number in sorted(counts.items()))
    until = "now" if "alive" in counts else clock(end, "%H:%M:%S")
    when = f"{clock(top.made)} {time.strftime('%Z', time.localtime(top.made))}"
    return f"{top.name}{more}", f"{when} to {until}, {span(end - top.made)}: {told}"


class Chart:
    """A line of characters for a time."""

    def __init__(self, begin: float, end: float, width: int) -> None:
        self.begin = begin
        self.width = max(1, width)
        self.scale = (self.width - 1) / max(end - begin, 1e-3)

    def place(self, when: float) -> int:
        """Return the column of a moment."""
        return max(0, min(self.width - 1, round((when - self.begin) * self.scale)))

    def axis(self, end: float) -> str:
        """Return round times since the beginning."""
        line = [" "] * self.width
        for tick in ticks(end - self.begin, max(1, self.width // 12)):
            text = "|" + (span(tick) if tick else "0")
            at = self.place(self.begin + tick)
            if at + len(text) <= self.width:
                line[at : at + len(text)] = text
        return "".join(line).rstrip()

    def life(self, life: Life, now: float) -> str:
        """Return one life; of a short status at least one character is seen."""
        line = [" "] * self.width
        for each in life.spans:
            begin, end = self.place(each.begin), self.place(now if each.end is None else each.end)
            if each.status in SIGNS:
                line[begin : end + 1] = SIGNS[each.status] * (end + 1 - begin)
        line[self.place(now if life.end is None else life.end)] = ENDS.get(life.outcome, "►")
        return "".join(line).rstrip()

    def several(self, lives: Sequence[Life], now: float) -> str:
        """Return how many lives there were, as shades."""
        changes = [0] * (self.width + 1)
        for life in lives:
            changes[self.place(life.made)] += 1
            changes[self.place(now if life.end is None else life.end) + 1] -= 1
        line, number = [], 0
        for change in changes[: self.width]:
            number += change
            line.append(SHADES[-(-number * (len(SHADES) - 1) // len(lives))])
        return "".join(line).rstrip()


def legend(several: bool, width: int) -> Iterator[str]:
    """Yield the lines that say what the characters stand for."""
    first, *others = (*LEGEND, OF_SEVERAL) if several else LEGEND
    line = first
    for each in others:
        if len(line) + 2 + len(each) > width:
            yield cut(line, width)
            line = each
        else:
            line += f"  {each}"
    yield cut(line, width)


def text_of(top: Life, rows: Sequence[Row], width: int) -> Iterator[str]:
    """Yield the lines of a timeline as text."""
    end = last_moment(top)
    names = [row.branches + row.label for row in rows]
    fates = [row.fate for row in rows]
    left = min(max(map(len, names)), max(12, width // 4))
    right = min(max(map(len, fates)), max(14, width * 2 // 5))
    chart = Chart(top.made, end, width - left - right - 3)
    for line in summary(top):
        yield cut(line, width)
    yield ""
    yield " " * (left + 1) + chart.axis(end)
    for row, name, fate in zip(rows, names, fates, strict=True):
        drawn = chart.several(row.lives, end) if row.grouped else chart.life(row.life, end)
        line = f"{cut(name, left):<{left}} {drawn:<{chart.width}}  {cut(fate, right)}"
        yield line.rstrip()
    yield ""
    yield from legend(any(row.grouped for row in rows), width)
