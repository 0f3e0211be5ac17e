"""Random lives and deaths for as long as one likes, by a seed.

    python -m tests.soak [SECONDS [SEED]]

Chapters of several rounds on one state. In a round operators work on agents of theirs, as in the
random kills, beside programs of another user that make, remove, ask and print without end. Some
agents are placed at one of two other daemons, to each of which a wire leads. Meanwhile wires are
cut, and daemons executed again. Then the lead is killed, and now and then a host, monitors,
keepers, programs, binders or guards, too. They stay away for a moment, or for longer than a lease.
The next daemons are held to all invariants, and to what each of them says of the others. At the end
of a chapter everything is stopped and removed, and what each ctxd still uses is noted: over the
chapters it must not grow. Prints the seed, a line for each chapter and a summary; stops by itself.
"""

from __future__ import annotations

import os
import random
import select
import shlex
import signal
import sys
import time
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final

from runtime.peers.lease import bound
from runtime.records.settings import PLACED_GRACE
from tests.system.hostile.guarded import resident
from tests.worlds.daemon import Daemon, alive, end_process, wait_until
from tests.worlds.everywhere import Everywhere
from tests.worlds.invariants import Operator
from tests.worlds.random_lives import Worker, disturb, hold, told_of
from tests.worlds.three import Three, three_of

_WORKERS: Final = 3
#: of each node, in seconds
_LEASE: Final = 5.0
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
    #: of the lead; of hosts; and of other processes, beside them
    kills: int = 0
    hosts: int = 0
    others: int = 0
    executed: int = 0
    #: wires that were cut, and times that lasted longer than a lease
    cuts: int = 0
    long: int = 0
    #: lives at nodes that were seen, and the most that executed after its parent, in seconds
    placed: int = 0
    orphaned: float = 0.0
    longest_start: float = 0.0
    #: (seconds, resident bytes, descriptors, bytes below the state) after each chapter, by node
    series: dict[str, list[tuple[float, int, int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def _most(self, column: int) -> int:
        return int(max((row[column] for rows in self.series.values() for row in rows), default=0))

    def __str__(self) -> str:
        return (f"{self.operations} operations in {self.rounds} rounds, {self.kills} kills of the "
                f"lead, {self.hosts} of hosts, {self.others} of others, {self.executed} executed "
                f"again; {self.cuts} cuts, {self.long} for longer than a lease; {self.placed} "
                f"lives at nodes, at most {self.orphaned:.1f} s after a parent; longest start "
                f"{self.longest_start:.2f} s; at most {self._most(1) >> 20} MiB and "
                f"{self._most(2)} descriptors between chapters")


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


def _trouble(chance: random.Random, three: Three, figures: Figures) -> None:
    """Something becomes of wires, and daemons are executed again."""
    for made in three.wires.values():
        how = chance.choice((*("",) * 5, "close", "hold up", "hold down", "delay 0.3", "stop"))
        figures.cuts += bool(how)
        if how == "stop":
            made.stop()
        elif how:
            made.say(how)
    for daemon in (three.daemon, *three.hosts.values()):
        if chance.random() < 0.1:
            os.kill(daemon.pid, signal.SIGUSR1)
            figures.executed += 1


def _pause(chance: random.Random, figures: Figures) -> None:
    """Mostly for a moment, seldom for longer than a lease, or than it takes to be lost."""
    longer = chance.choice((*(0.0,) * 36, *(_LEASE + 1,) * 3, bound(_LEASE, PLACED_GRACE)))
    figures.long += bool(longer)
    select.select([], [], [], chance.uniform(0, 0.5) + longer)


def _heal(three: Three) -> None:
    for made in three.wires.values():
        made.go_on()
        made.say("go")
    for node in three.wires:
        three.lead.wait_reached(node)


def _round(
    chance: random.Random, three: Three, workers: list[Worker], everywhere: Everywhere,
    figures: Figures,
) -> None:  # fmt: skip
    daemon, hosts = three.daemon, list(three.hosts.values())
    for worker in workers:
        worker.begin()
    # nothing is waited for: this is the moment
    select.select([], [], [], chance.uniform(0.0, 0.5))
    _trouble(chance, three, figures)
    select.select([], [], [], chance.uniform(0.05, 1.5))
    if chance.random() < 0.5:
        everywhere.observe()
        hold(chance, everywhere.lead, daemon)
    figures.others += _kill_helpers(chance, chance.choice((daemon, daemon, *hosts)))
    down = [each for each in hosts if chance.random() < 0.3]
    for each in chance.sample([daemon, *down], 1 + len(down)):
        each.kill()
    figures.kills += 1
    figures.hosts += len(down)
    for worker in workers:
        worker.join()
    everywhere.observe()
    for each in (daemon, *hosts):
        figures.others += disturb(chance, each)
    _pause(chance, figures)
    for each in chance.sample([daemon, *down], 1 + len(down)):
        begun = time.monotonic()
        each.start()
        figures.longest_start = max(figures.longest_start, time.monotonic() - begun)
    _pause(chance, figures)
    _heal(three)


def _chapter(
    chance: random.Random, three: Three, chapter: int, until: float, figures: Figures
) -> None:
    daemon = three.daemon
    operator, everywhere = Operator(daemon), Everywhere(three, _LEASE)
    seed, nodes = chance.randrange(1 << 30), (*three.hosts, "n*")
    workers = [Worker(100 * chapter + n, seed, operator, daemon, nodes) for n in range(_WORKERS)]
    with closing(everywhere), told_of(workers, daemon, f"in chapter {chapter}"):
        _let_hostile_work(chance, daemon, chapter)
        for _ in range(_ROUNDS):
            if time.monotonic() > until:
                break
            _round(chance, three, workers, everywhere, figures)
            everywhere.check(operator)
            figures.rounds += 1
        figures.operations += sum(len(worker.done) for worker in workers)
        figures.placed += everywhere.placed
        figures.orphaned = max(figures.orphaned, everywhere.orphaned)
        everywhere.dismantle(operator)
        for each in (daemon, *three.hosts.values()):
            each.check_own_cgroup()


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
    print(f"seed {seed}", flush=True)
    chance, figures, begun = random.Random(seed), Figures(), time.monotonic()
    leases = dict.fromkeys(("n2", "n3"), f"{_LEASE:g}s")
    with three_of("grace: 200ms\nrestart_max: 3\n", **leases) as three:
        daemons = {"lead": three.daemon, **three.hosts}
        try:
            chapter = 0
            while time.monotonic() < begun + seconds:
                chapter += 1
                _chapter(chance, three, chapter, begun + seconds, figures)
                for node, daemon in daemons.items():
                    wait_until(lambda d=daemon: not d.strangers(), "what it started has ended")  # type: ignore[misc]
                    figures.series[node].append(_measure(daemon, begun))
                print(_line(chapter, figures), flush=True)
            wrong = [f"{node}: {what}" for node, rows in figures.series.items()
                     for what in _grew(rows)]  # fmt: skip
            assert not wrong, "\n".join(wrong)
        except BaseException as error:
            error.add_note(f"seed {seed}: {figures}")
            for node, daemon in daemons.items():
                said = daemon.log.read_text(errors="replace")
                error.add_note(f"{node}:\n{said[-_LOG_SHOWN:]}")
            raise
    return figures


def _line(chapter: int, figures: Figures) -> str:
    rows = {node: rows[-1] for node, rows in figures.series.items()}
    said = [f"{node} {memory >> 20} MiB {opened} descriptors {kept >> 10} KiB of state"
            for node, (_, memory, opened, kept) in rows.items()]  # fmt: skip
    return f"{rows['lead'][0]:7.0f} s  chapter {chapter}  {';  '.join(said)}"


if __name__ == "__main__":
    wanted = [*sys.argv[1:], *("3600", "1")[len(sys.argv) - 1:]]
    print(f"as it should be: {soak(float(wanted[0]), int(wanted[1]))}")
