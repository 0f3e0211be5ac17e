"""What must be true whatever is attacked: asserted around every attack of the suite.

    with guarded(daemon) as guard:
        ...                     # the attack, by agents that it makes

While the attack runs, bystanders of another user work and note how long each of their requests
took (probe.c): an operator, and an agent. In the end, with the attackers still there, root kills
first an agent that has nothing to do with it, then theirs, and removes them. It fails if

- a process other than ctxd, binder and guard was in ctxd's own cgroup, however short,
- a request of a bystander was refused, or the 99th percentile of its reads, writes or stops is
  above 250 ms,
- root's ``echo kill > ctl`` is not obeyed within a second,
- ctxd holds more descriptors or memory in the end than before, beyond some slack,
- ctxd's log tells of a bug.

At the end of ``make test-hostile`` a table has each 99th percentile beside that of the same
requests without the attack.

A machine that is busy with other things answers late without any attack. So the bystanders
begin before it, and a bound is the larger of the one above and a multiple of what the same
requests took then.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.system.hostile.compiling import compile_to
from tests.worlds.daemon import (
    REMOVALS,
    TIMEOUT,
    Daemon,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.whose import AGENT_UID, ROOTLESS

HERE: Final = Path(__file__).parent
#: owns the bystanders; nobody else of the suite has this uid, unless everything has the user's
BYSTANDER: Final = AGENT_UID if ROOTLESS else 4343
#: seconds of the 99th percentile, and of root's kill
LATENCY: Final = 0.25
OBEDIENCE: Final = 1.0
#: how much later than without an attack an answer may come, on a machine busy with other things
TIMES_BASELINE: Final = 3.0
#: a percentile of fewer is the slowest of them, which is held to the bound below instead
ENOUGH: Final = 100
SLOWEST: Final = 1.0
#: an attack that is over before is held to nothing but answers
SHORT: Final = 1.0
#: seconds of quiet that are compared with
QUIET: Final = 0.3
#: what may stay: caches that were filled, the allocator's arenas
DESCRIPTORS: Final = 16
MEMORY: Final = 48 << 20
#: whether others work beside attacks that hold up nobody, too: make test-hostile, which has the
#: machine for itself
BESIDE: Final = os.environ.get("CTXFS_TEST_BYSTANDERS") == "1"
#: requests that are judged; the others are only not refused
JUDGED: Final = ("read", "write", "stop")


#: what all attacks of this run cost bystanders, for the table at its end
COSTS: Final[list[str]] = []


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of these that a share of them does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else 0.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a bystander; times are seconds of CLOCK_MONOTONIC."""

    kind: str
    began: float
    took: float
    error: str


@dataclass(slots=True)
class Figures:
    """Of one kind of request of one bystander, in seconds."""

    count: int
    median: float
    high: float
    slowest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figures:
        return cls(len(values), percentile(values, 0.5), percentile(values, 0.99),
                   max(values, default=0.0))

    def __str__(self) -> str:
        return (f"{self.count} requests, median {self.median * 1e3:.1f} ms, "
                f"p99 {self.high * 1e3:.1f} ms, slowest {self.slowest * 1e3:.1f} ms")


class Bystander:
    """Somebody of another user who works beside the attack, and writes down how it goes."""

    def __init__(self, daemon: Daemon, name: str, program: Path, log: Path) -> None:
        self.name = name
        self._daemon = daemon
        self._log = log
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self, *, as_agent: bool) -> None:
        """From now on; ``wait_answered`` returns once it is at work."""
        if as_agent:
            directory = self._daemon.agent_dir(self.name)
            lines = {"mount": f"{self._program.parent} /by rw",
                     "exec": f"/by/{self._program.name} {self._daemon.root} {self.name} "
                             f"/by/{self._log.name}"}
            _as_user("mkdir", str(directory))
            for file, text in lines.items():
                write(directory / file, text)
            write(directory / "ctl", "start")
        else:
            self._process = subprocess.Popen(
                [*_IDS, str(self._program), str(self._daemon.root), self.name, str(self._log)],
                process_group=0,
            )

    def asked(self) -> list[Asked]:
        """All that has been answered."""
        found = []
        with suppress(FileNotFoundError):
            for line in self._log.read_text().split("\n")[:-1]:
                kind, began, took, error = line.split()
                found.append(Asked(kind, int(began) / 1e9, int(took) / 1e9, error))
        return found

    def wait_answered(self, since: float) -> None:
        """Until a request of each kind that began after this moment was answered."""
        def answered() -> bool:
            kinds = {each.kind for each in self.asked() if each.began >= since}
            return kinds >= set(JUDGED)

        wait_until(answered, f"{self.name} is answered: {self.asked()[-5:]}", timeout=60,
                   interval=0.02)

    def end(self) -> None:
        if self._process is not None:
            group = self._process.pid
            os.killpg(group, signal.SIGKILL)
            self._process.wait()
            wait_until(lambda: not _group_lives(group), f"{self.name} is gone")


def _group_lives(group: int) -> bool:
    """Whether any of a group of processes is more than a zombie: PID 1 may be slow to reap."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                state, _, of = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(of) == group and state not in "ZX":
                    return True
    return False


_IDS: Final = () if ROOTLESS else (
    "setpriv", f"--reuid={BYSTANDER}", f"--regid={BYSTANDER}", "--clear-groups"
)


def _as_user(*command: str) -> None:
    subprocess.run([*_IDS, *command], check=True, timeout=30)


@dataclass(slots=True)
class Guard:
    """What is known of one attack; ``figures`` once it is over."""

    daemon: Daemon
    #: whether nothing else runs on the machine, so that times say something
    alone: bool
    bystanders: list[Bystander] = field(default_factory=list)
    figures: dict[str, Figures] = field(default_factory=dict)
    #: seconds from root's kill to the end of an agent, before the attack
    kill_before: float = 0.0
    began: float = 0.0
    #: spans in which nobody can be answered, by the attack's own doing
    _excused: list[tuple[float, float]] = field(default_factory=list)

    @contextmanager
    def excused(self) -> Iterator[None]:
        """For who stops the daemon itself: what was asked meanwhile is not judged."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self._excused.append((begun, time.monotonic()))

    def _is_excused(self, asked: Asked) -> bool:
        end = asked.began + asked.took
        return any(asked.began <= to and end >= since for since, to in self._excused)

    def kill(self, name: str) -> float:
        """Root's ``echo kill > ctl``: fails unless the agent is dead within a second."""
        took = self._killed(name)
        bound = max(OBEDIENCE, TIMES_BASELINE * self.kill_before)
        assert took < bound, f"{name} was dead {took:.2f} s after root's kill, not {bound:.2f}"
        return took

    def _killed(self, name: str) -> float:
        """Seconds from the verb until somebody who has waited is let go: who began to wait only
        then would be started among all that the attack keeps busy, which is not measured."""
        directory = self.daemon.agent_dir(name)
        with subprocess.Popen(["cat", directory / "wait"]) as waiter:
            try:
                kernel = Path(f"/proc/{waiter.pid}/wchan")
                wait_until(lambda: "wait_for_partner" in kernel.read_text()
                           or waiter.poll() is not None, "somebody waits")
                begun = time.monotonic()
                write(directory / "ctl", "kill")
                assert waiter.wait(TIMEOUT) == 0
                return time.monotonic() - begun
            finally:
                waiter.kill()

    # before

    def prepare(self, bystanders: bool) -> None:
        for name in ("by-nobody-1", "by-nobody-2"):
            wait_status(self.daemon.run(name, "sleep 100000"), "busy")
        self.kill_before = self._killed("by-nobody-1")
        if bystanders:
            self._let_others_work()
        self.began = time.monotonic()

    def _let_others_work(self) -> None:
        directory = Path(tempfile.mkdtemp(prefix="by-", dir=self.daemon.base))
        directory.chmod(0o755)
        program = compile_to(directory / "probe", HERE / "probe.c")
        os.chown(directory, BYSTANDER, BYSTANDER)
        for name in ("by-user", "by-agent"):
            bystander = Bystander(self.daemon, name, program, directory / f"{name}.log")
            self.bystanders.append(bystander)
            bystander.begin(as_agent=name == "by-agent")
        for bystander in self.bystanders:
            bystander.wait_answered(0.0)
        time.sleep(QUIET)  # what it measures is time

    # after

    def judge(self) -> None:
        """Everything that must be true with the attackers still there."""
        ended = time.monotonic()
        self.kill("by-nobody-2")
        for bystander in self.bystanders:
            bystander.wait_answered(ended)
        wrong = [what for each in self.bystanders for what in self._late(each, ended)]
        assert not wrong, "\n".join(["bystanders during the attack:", *wrong])

    def _late(self, bystander: Bystander, ended: float) -> Iterator[str]:
        asked = [each for each in bystander.asked() if each.began < ended]
        for each in asked:
            if each.error != "ok" and not self._is_excused(each):
                yield f"{bystander.name} was refused: {each}"
        for kind in JUDGED:
            mine = [each for each in asked if each.kind == kind and not self._is_excused(each)]
            quiet = [each.took for each in mine if each.began + each.took < self.began]
            during = [each.took for each in mine if each.began + each.took >= self.began]
            before, figures = Figures.of(quiet), Figures.of(during)
            self.figures[f"{bystander.name} {kind}"] = figures
            if before.high and figures.high:
                attack = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
                COSTS.append(f"{figures.high / before.high:6.2f} {before.high * 1e3:8.1f} "
                             f"{figures.high * 1e3:8.1f} {bystander.name:8} {kind:5} "
                             f"{attack.rpartition('/')[2]}")
            if ended - self.began < SHORT:
                continue
            noise = TIMES_BASELINE * before.high
            late = (figures.high if figures.count >= ENOUGH else
                    percentile(sorted(during)[:-1], 0.99))
            if late >= max(LATENCY, noise) or (
                figures.count < ENOUGH and figures.slowest >= max(SLOWEST, 2 * noise)
            ):
                yield f"{bystander.name}, {kind}: {figures}; before it {before}"


def resident(pid: int) -> int:
    """Bytes of memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def agents_of(daemon: Daemon) -> set[str]:
    return {path.name.removesuffix(".d") for path in (daemon.root / "agent").glob("*.d")}


def end_and_remove(daemon: Daemon, names: set[str]) -> None:
    """Root kills these and removes them; a parent's removal may be its children's."""
    directories = [daemon.agent_dir(name) for name in sorted(names)]
    for directory in directories:
        with suppress(FileNotFoundError, PermissionError):
            if read(directory, "status").strip() not in ("new", "dead", "stopping"):
                with suppress(OSError):  # it may have ended by itself
                    write(directory / "ctl", "kill")
    for directory in directories:
        with suppress(FileNotFoundError):
            if read(directory, "status").strip() not in ("new", "dead"):
                wait_dead(directory)
    for directory in directories:
        if "@" not in directory.name:  # only its lead removes a guest
            with suppress(FileNotFoundError):
                directory.rmdir()


@contextmanager
def guarded(
    daemon: Daemon, *, bystanders: bool = True, kept: frozenset[str] = frozenset()
) -> Iterator[Guard]:
    """Asserts around an attack on a running daemon what this module says.

    Without ``bystanders`` nobody works beside it: for attacks that fill what everybody
    shares, and those that take a moment. What is in ``kept`` is neither killed nor removed
    in the end, nor is what was there before.
    """
    log = daemon.log.stat().st_size
    before = agents_of(daemon)
    guard = Guard(daemon, alone=bystanders or BESIDE)
    if guard.alone:
        REMOVALS.wait()  # of earlier tests: their disk is everybody's
    try:
        opened = len(daemon.descriptors())
        guard.prepare(bystanders)
        pid, used = daemon.pid, resident(daemon.pid)
        there = agents_of(daemon)
        yield guard
        guard.judge()
        attackers = agents_of(daemon) - there - kept
        for name in sorted(attackers):
            with suppress(FileNotFoundError):
                if read(daemon.agent_dir(name), "status").strip() in ("busy", "idle", "ready"):
                    guard.kill(name)
        end_and_remove(daemon, attackers)
        daemon.check_own_cgroup()
        _end_bystanders(guard, before)  # for each end among them something is open for a moment
        if daemon.pid == pid:
            _is_as_before(daemon, opened, used)
        with open(daemon.log, errors="replace") as text:
            text.seek(log)
            said = text.read()
        for word in ("a bug in ctxfs", "Traceback"):
            assert word not in said, said[max(0, said.index(word) - 500):]
    finally:
        _end_bystanders(guard, before)


def _end_bystanders(guard: Guard, before: set[str]) -> None:
    while guard.bystanders:
        guard.bystanders.pop().end()
    if guard.daemon.process is not None:
        mine = {name for name in agents_of(guard.daemon) - before if name.startswith("by-")}
        end_and_remove(guard.daemon, mine)


def _is_as_before(daemon: Daemon, opened: int, used: int) -> None:
    """Descriptors and memory go when those who had them have gone."""
    pid = daemon.pid
    with suppress(AssertionError):
        wait_until(lambda: len(daemon.descriptors()) <= opened + DESCRIPTORS
                   and resident(pid) <= used + MEMORY, "it is as before", timeout=120)
    found = daemon.descriptors()
    assert len(found) <= opened + DESCRIPTORS, (
        f"ctxd had {opened} descriptors before the attack, and has these after it: {found}"
    )
    assert (now := resident(pid)) <= used + MEMORY, (
        f"ctxd used {used >> 20} MiB before the attack, and uses {now >> 20} after it"
    )
