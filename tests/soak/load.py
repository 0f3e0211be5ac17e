"""Many at work without malice: 300 writers, 50 look-ups, 20 makers and removers.

    python -m tests.soak.load [SECONDS]

Prints how long their requests took, and fails if one took more than a second, was refused,
or was never answered. A machine that is busy with other things answers late without us: the
bound is then ten times the slowest of a hundred answers to a single writer just before.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.worlds.daemon import Daemon, daemon_of

HERE: Final = Path(__file__).parent
CROWD: Final = (300, 50, 20)
AGENTS: Final = 30
BOUND: Final = 1.0


@dataclass(frozen=True, slots=True)
class Kind:
    """Figures of one kind of request; times in seconds."""

    name: str
    count: int
    refused: int
    median: float
    high: float
    slowest: float

    def __str__(self) -> str:
        return (f"{self.name}: {self.count} requests, {self.refused} refused, "
                f"median {self.median * 1e3:.1f} ms, p99 {self.high * 1e3:.1f} ms, "
                f"slowest {self.slowest * 1e3:.1f} ms")


def put_load(
    daemon: Daemon, seconds: float, crowd: tuple[int, int, int]
) -> tuple[list[Kind], int]:
    """(figures of each kind, how many were never answered)."""
    program = daemon.base / "load"
    if not program.exists():
        subprocess.run(["cc", "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-static", "-o",
                        str(program), str(HERE / "load.c")], check=True, timeout=60)
    words = [str(daemon.root), str(seconds), *map(str, crowd), str(AGENTS)]
    said = subprocess.run([str(program), *words], check=True, stdout=subprocess.PIPE, text=True,
                          timeout=seconds + 60).stdout
    kinds, stuck = [], 0
    for line in said.splitlines():
        name, *numbers = line.split()
        if name == "stuck":
            stuck = int(numbers[0])
        elif numbers[0] != "0":
            count, refused, *times = map(int, numbers)
            kinds.append(Kind(name, count, refused, *(each / 1e6 for each in times)))
    return kinds, stuck


def check_load(daemon: Daemon, seconds: float) -> list[str]:
    """What is wrong; prints the figures."""
    for number in range(AGENTS):
        daemon.make(f"load-{number}")
    alone, _ = put_load(daemon, 1.0, (1, 0, 0))
    bound = max(BOUND, 10 * alone[0].slowest)
    kinds, stuck = put_load(daemon, seconds, CROWD)
    print(f"alone: {alone[0]}", *kinds, f"{stuck} were never answered; the bound is {bound:.2f} s",
          sep="\n", flush=True)
    wrong = [str(kind) for kind in kinds if kind.slowest > bound or kind.refused]
    return wrong + [f"{stuck} were never answered"] * bool(stuck)


def main(arguments: list[str]) -> int:
    # the accounts of an owner are no subject here: they all belong to root
    with daemon_of(config="children: 1000\n") as daemon:
        wrong = check_load(daemon, float(arguments[0]) if arguments else 300.0)
    print("\n".join(["wrong:", *wrong]) if wrong else "as it should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
