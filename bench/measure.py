"""Timing two or more sides against each other so that drift cancels.

In every round each side is timed once, in a batch long enough to be far above
the timer's resolution; the side that begins changes from round to round. A
ratio is made within a round only, so that what slows the whole machine for a
while slows both of its parts.

What can happen only once to what it happens to, and takes long to set up, is
an episode: it is run once a round, sets up and clears away by itself, and tells
what it timed between the two.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

from bench import progress

#: one batch of any side takes at least this long, unless one call does already
_BATCH_NS: Final = 20_000_000
_MOST_CALLS: Final = 1 << 20

#: of what is measured: time, or room
Unit = Literal["ns", "bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One thing that is timed; ``call`` does it once."""

    name: str
    call: Callable[[], object]


#: what a row is about, and its references
Sides = tuple[Side, list[Side]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Episode:
    """Something that is done once a round; ``run`` returns what it measured, each by its name."""

    name: str
    run: Callable[[], Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the times that an episode returns, and what it is called where it is shown."""

    name: str
    episode: Episode
    time: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A ratio to be made of two times of one round."""

    row: str
    subject: Part
    reference: Part
    unit: Unit = "ns"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """What a row found of its subject and one reference, round by round."""

    row: str
    subject_name: str
    reference_name: str
    subject: tuple[float, ...]
    reference: tuple[float, ...]
    unit: Unit = "ns"

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(a / b for a, b in zip(self.subject, self.reference, strict=True))

    @property
    def spread(self) -> tuple[float, float, float]:
        """Smallest, median and largest of the rounds' ratios."""
        return min(self.ratios), median(self.ratios), max(self.ratios)


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection of ours while something is timed."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def time_calls(call: Callable[[], object], count: int) -> int:
    """Nanoseconds that ``count`` calls take."""
    with undisturbed():
        begin = time.perf_counter_ns()
        for _ in range(count):
            call()
        return time.perf_counter_ns() - begin


def calibrate(call: Callable[[], object]) -> int:
    """How many calls make a batch; warms everything up as well."""
    count = 1
    while (taken := time_calls(call, count)) < _BATCH_NS and count < _MOST_CALLS:
        # more than double, so that a slow first call does not decide alone
        count = max(count * 2, min(count * 8, count * _BATCH_NS // max(taken, 1) + 1))
    return count


def compare(row: str, subject: Side, references: Sequence[Side], rounds: int) -> list[Ratio]:
    """Times the sides in turn, ``rounds`` times."""
    sides = [subject, *references]
    counts = [calibrate(side.call) for side in sides]
    found: list[list[float]] = [[] for _ in sides]
    for number in range(rounds):
        for position in range(len(sides)):
            chosen = (number + position) % len(sides)
            taken = time_calls(sides[chosen].call, counts[chosen])
            found[chosen].append(taken / counts[chosen])
    return [
        Ratio(
            row=row,
            subject_name=subject.name,
            reference_name=side.name,
            subject=tuple(found[0]),
            reference=tuple(times),
        )
        for side, times in zip(references, found[1:], strict=True)
    ]


def compare_episodes(pairs: Sequence[Pair], rounds: int) -> list[Ratio]:
    """Runs every episode of the pairs once in each of ``rounds``, in turn."""
    parts = [part for pair in pairs for part in (pair.subject, pair.reference)]
    episodes = list(dict.fromkeys(part.episode for part in parts))
    found: list[dict[Episode, Mapping[str, float]]] = []
    try:
        for number in range(rounds):
            times: dict[Episode, Mapping[str, float]] = {}
            for position in range(len(episodes)):
                episode = episodes[(number + position) % len(episodes)]
                progress.show(f"{pairs[0].row}: round {number + 1} of {rounds}, {episode.name}")
                times[episode] = episode.run()
            found.append(times)
    finally:
        progress.clear()
    return [
        Ratio(
            row=pair.row,
            subject_name=pair.subject.name,
            reference_name=pair.reference.name,
            subject=tuple(times[pair.subject.episode][pair.subject.time] for times in found),
            reference=tuple(times[pair.reference.episode][pair.reference.time] for times in found),
            unit=pair.unit,
        )
        for pair in pairs
    ]
