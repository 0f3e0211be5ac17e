"""Random lives and deaths for as long as one likes, by a seed.

    python -m tests.soak [SECONDS [SEED]]

Chapters of several rounds on one state. In a round operators work on agents of theirs, as in the
random kills, beside programs of another user that make, remove, ask and
print without end. Then the daemon is killed, and now and then monitors, keepers, programs, the
binder or the guard, too; the next daemon is held to all invariants. At the end of a chapter
everything is stopped and removed, and what ctxd still uses is noted: over the chapters it must
not grow. Prints a line for each chapter and a summary; stops by itself.
"""

from __future__ import annotations

import random
import select
import shlex
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final

from tests.system.hostile.guarded import resident
from tests.worlds.daemon import Daemon, alive, end_process, wait_until
from tests.worlds.invariants import Invariants, Operator
from tests.worlds.random_lives import Worker, disturb, hold, told_of

_WORKERS: Final = 3
#: characters of the daemon's log, of whoever fails
_LOG_SHOWN: Final = 6000
_ROUNDS: Final = 8
#: chapters until caches are full and arenas are as large as they get
_WARM: Final = 2
_DESCRIPTORS: Final = 16
_MEMORY: Final = 64 << 20
#: of another user's agents; none of them ends by itself
_HOSTILE: Final = (
    "cd $CTX_ROOT/agent; while :; do mkdir $CTX_AGENT.x.d; rmdir $CTX_AGENT.x.d; done 2>/dev/null",
    "while :; do cat $CTX_SELF/* >/dev/null 2>&1; done",
    "while :; do echo fly > $CTX_ROOT/agent/self/ctl; done 2>/dev/null",
    "yes",
    # a name of its own for each: of one that is made again the history cannot tell
    "cd $CTX_SELF; i=0; while :; do i=$((i+1)); echo x > result.md; mkdir task/t$i "
    "&& echo true > task/t$i/cmd && echo start > task/t$i/ctl; rmdir task/t$i; done 2>/dev/null",
)


@dataclass(slots=True)
class Figures:
    """What a soak has done and seen."""

    operations: int = 0
    rounds: int = 0
    #: of the daemon; and of other processes, beside it
    kills: int = 0
    others: int = 0
    longest_start: float = 0.0
    #: (seconds, resident bytes, descriptors, bytes below the state) after each chapter
    series: list[tuple[float, int, int, int]] = field(default_factory=list)

    def __str__(self) -> str:
        return (f"{self.operations} operations in {self.rounds} rounds, {self.kills} kills of the "
                f"daemon, {self.others} of others; longest start {self.longest_start:.2f} s; "
                f"at most {max((s[1] for s in self.series), default=0) >> 20} MiB and "
                f"{max((s[2] for s in self.series), default=0)} descriptors between chapters")


def _kill_helpers(chance: random.Random, daemon: Daemon) -> int:
    """Sometimes binder or guard, while the daemon lives; it starts another guard."""
    if chance.random() > 0.2:
        return 0
    helpers = [pid for pid in daemon.own.processes() if pid != daemon.pid and alive(pid)]
    victims = chance.sample(helpers, min(1, len(helpers)))
    for pid in victims:
        end_process(pid)
        wait_until(lambda pid=pid: not alive(pid), "it is gone, and is no guard any more")  # type: ignore[misc]
    # a daemon that is killed without one may be held by whoever waits for it
    wait_until(daemon.guards, "there is a guard")
    return len(victims)


def _let_hostile_work(chance: random.Random, daemon: Daemon, chapter: int) -> None:
    for number, text in enumerate(chance.sample(_HOSTILE, 2)):
        daemon.run(f"h{chapter}-{number}", f"sh -c {shlex.quote(text)}", owner="4242")


def _chapter(
    chance: random.Random, daemon: Daemon, chapter: int, until: float, figures: Figures
) -> None:
    operator, invariants = Operator(daemon), Invariants(daemon)
    seed = chance.randrange(1 << 30)
    workers = [Worker(100 * chapter + n, seed, operator, daemon) for n in range(_WORKERS)]
    with closing(invariants), told_of(workers, daemon, f"in chapter {chapter}"):
        _let_hostile_work(chance, daemon, chapter)
        for _ in range(_ROUNDS):
            if time.monotonic() > until:
                break
            for worker in workers:
                worker.begin()
            # nothing is waited for: this is the moment
            select.select([], [], [], chance.uniform(0.05, 1.5))
            if chance.random() < 0.5:
                invariants.observe()
                hold(chance, invariants, daemon)
            figures.others += _kill_helpers(chance, daemon)
            daemon.kill()
            figures.kills += 1
            for worker in workers:
                worker.join()
            invariants.observe()
            figures.others += disturb(chance, daemon)
            begun = time.monotonic()
            daemon.start()
            figures.longest_start = max(figures.longest_start, time.monotonic() - begun)
            invariants.check(operator)
            figures.rounds += 1
        figures.operations += sum(len(worker.done) for worker in workers)
        invariants.dismantle(operator)
        daemon.check_own_cgroup()


def _measure(daemon: Daemon, begun: float) -> tuple[float, int, int, int]:
    """Of a daemon that has nothing to do; anew, so that each has the same age."""
    figures = resident(daemon.pid), len(daemon.descriptors()), daemon.kept()
    return time.monotonic() - begun, *figures


def _grew(series: list[tuple[float, int, int, int]]) -> list[str]:
    """What is more in the end than it was once it was warm."""
    if len(series) <= _WARM:
        return []
    first, last = series[_WARM - 1], series[-1]
    wrong = []
    if last[1] > first[1] + _MEMORY:
        wrong.append(f"memory grew from {first[1] >> 20} to {last[1] >> 20} MiB")
    if last[2] > first[2] + _DESCRIPTORS:
        wrong.append(f"descriptors grew from {first[2]} to {last[2]}")
    return wrong


def soak(seconds: float, seed: int) -> Figures:
    """Raises what is wrong, with a note of what was done last."""
    chance = random.Random(seed)
    daemon = Daemon(config="grace: 200ms\nrestart_max: 3\n")
    figures = Figures()
    begun = time.monotonic()
    try:
        daemon.start()
        chapter = 0
        while time.monotonic() < begun + seconds:
            chapter += 1
            _chapter(chance, daemon, chapter, begun + seconds, figures)
            wait_until(lambda: not daemon.strangers(), "what it started has ended")
            figures.series.append(_measure(daemon, begun))
            at, memory, opened, kept = figures.series[-1]
            print(f"{at:7.0f} s  chapter {chapter}  {memory >> 20} MiB  {opened} descriptors  "
                  f"{kept >> 10} KiB of state", flush=True)
        assert not (wrong := _grew(figures.series)), "\n".join(wrong)
    except BaseException as error:
        error.add_note(f"seed {seed}: {figures}")
        error.add_note(daemon.log.read_text(errors="replace")[-_LOG_SHOWN:])
        raise
    finally:
        daemon.close()
    return figures


if __name__ == "__main__":
    wanted = [*sys.argv[1:], *("3600", "1")[len(sys.argv) - 1:]]
    print(f"as it should be: {soak(float(wanted[0]), int(wanted[1]))}")
