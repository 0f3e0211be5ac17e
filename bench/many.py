"""What the number of agents costs who uses one of them, or lists them all."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from bench.agents import fresh_name, whole_life
from bench.measure import Episode, Pair, Part, Ratio, Side, compare, compare_episodes, undisturbed
from bench.reference.commands import finish, print_with_python, spawn
from bench.setting import Setting, another_daemon

MANY: Final = 10_000
FEW: Final = 10


def _command(name: str, command: list[str]) -> Part:
    def run() -> dict[str, float]:
        with undisturbed():
            begin = time.perf_counter_ns()
            finish(spawn(command))
            return {"taken": time.perf_counter_ns() - begin}

    return Part(name=name, episode=Episode(name=name, run=run), time="taken")


def _listing(setting: Setting) -> list[Pair]:
    client = str(Path(sys.executable).parent / "ctx")
    command = [client, "--root", str(setting.ctx), "ps"]
    listed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    if listed.count(b"\n") < MANY:
        raise RuntimeError(f"ctx ps shows {listed.count(10)} lines, not {MANY}")
    copy = setting.base / "listed"
    copy.write_bytes(listed)
    reference = _command("python, file", print_with_python(copy))
    return [Pair(row=f"ps-{MANY}", subject=_command("ctx ps", command), reference=reference)]


def measure_many(row: str, setting: Setting, rounds: int) -> list[Ratio]:
    """A life among many and among few, each in a daemon of its own, and ``ctx ps`` of many."""
    with ExitStack() as stack:
        crowded, calm = (stack.enter_context(another_daemon(setting)) for _ in range(2))
        for where, count in ((crowded, MANY), (calm, FEW)):
            for _ in range(count):
                os.mkdir(f"{where.ctx}/agent/{fresh_name()}.d")
        subject = Side(name=f"among {MANY}", call=lambda: whole_life(crowded))
        reference = Side(name=f"among {FEW}", call=lambda: whole_life(calm))
        # enough for a median: one of few lives tells nothing of a hundredth
        found = compare(f"life-{MANY}", subject, [reference], max(rounds, 9))
        return found + compare_episodes(_listing(crowded), rounds)
