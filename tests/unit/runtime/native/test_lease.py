"""What a monitor does when the lease of its cell is over."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from runtime.cell.leases import Leases
from runtime.cell.record import LEASE_OVER
from runtime.kernel import clock
from runtime.records.model import Outcome
from tests.unit.runtime.native.test_keeper_monitor import WHY_NOT, Run
from tests.worlds.daemon import TIMEOUT, wait_until

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

OVER = (Outcome.INTERRUPTED, LEASE_OVER)
#: programs that end when they are told to, and that do not
HEEDS: Final = "trap 'echo term; exit 0' TERM; echo here; while :; do sleep 600 & wait; done"
STUBBORN: Final = "trap '' TERM HUP; echo here; while :; do sleep 600; done"
ORPHAN: Final = f"setsid sh -c \"{STUBBORN}\" & trap 'exit 0' TERM; wait"
#: seconds by which a lease is put off, more than a busy machine takes to do it again
AHEAD: Final = 1.5
#: of the grace
SHORT, NEVER = 0.3, 600.0


class Leased(Run):
    """A run in the place of an agent, of which the parent directory is the whole cgroup."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        (base / "lease").mkdir()
        self.leases = Leases(base / "lease")
        self.number = 0
        self.outer = self.leaf
        self.leaf = self.outer.child("run")
        self.leaf.path.mkdir()

    def begin(self, script: str, grace: float) -> int:
        """Returns what ``start`` does. Its keeper has all the time in the world."""
        self.number = self.number or self.leases.grant(clock.up() + AHEAD)
        return self.start(
            script=script, grace=600_000, whole=self.outer,
            lease=self.leases.path(self.number), lease_grace=int(grace * 1000),
        )  # fmt: skip

    def write(self, data: bytes) -> None:
        self.leases.path(self.number).write_bytes(data)

    def is_here(self) -> bool:
        return self.output() == b"here\n"

    def close(self) -> None:
        super().close()
        self.outer.path.rmdir()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Leased]:
    with closing(Leased(tmp_path)) as made:
        yield made


# many at once, since each takes a while


def _nothing(run: Leased) -> None:
    """The daemon lives, and does nothing."""


def _freeze(run: Leased) -> None:
    run.daemon_dies()
    run.outer.freeze(True)


def _stop_keeper(run: Leased) -> None:
    os.kill(run.record.keeper, signal.SIGSTOP)


def _stop_monitor(run: Leased) -> None:
    assert run.monitor is not None
    os.kill(run.monitor, signal.SIGSTOP)


def _wake_monitor(run: Leased) -> None:
    """As a machine that slept."""
    assert run.monitor is not None and run.outer.populated()
    os.kill(run.monitor, signal.SIGCONT)


def _stop_lease(run: Leased) -> None:
    run.leases.stop(run.number)


def _remove(run: Leased) -> None:
    run.leases.path(run.number).unlink()


def _empty(run: Leased) -> None:
    run.write(b"")


def _shorten(run: Leased) -> None:
    run.write(b"\xff" * 7)


def _put_off(run: Leased) -> None:
    run.write(int((clock.up() + 600) * 1e9).to_bytes(8, "little"))


class Scene(NamedTuple):
    script: str
    grace: float
    #: happens before the end, and after the end and a while
    before: Callable[[Leased], None] = Run.daemon_dies
    after: Callable[[Leased], None] = _nothing


#: of those who heed, and who are told
TOLD: Final = {
    "a daemon": Scene(HEEDS, NEVER, _nothing),
    "no daemon": Scene(HEEDS, NEVER),
    "a file that is gone": Scene(HEEDS, NEVER, _remove),
}
KILLED: Final = {
    "stubborn, a daemon": Scene(STUBBORN, SHORT, _nothing),
    "stubborn": Scene(STUBBORN, SHORT),
    "stubborn, no grace": Scene(STUBBORN, 0.0),
    "frozen": Scene(HEEDS, SHORT, _freeze),
    "keeper stopped": Scene(HEEDS, SHORT, _stop_keeper),
    "an orphan": Scene(ORPHAN, SHORT),
    "monitor late": Scene(STUBBORN, SHORT, _stop_monitor, _wake_monitor),
    "lease stopped": Scene(STUBBORN, NEVER, _stop_lease),
    "lease empty": Scene(STUBBORN, NEVER, _empty),
    "lease short": Scene(STUBBORN, NEVER, _shorten),
    "put off too late": Scene(STUBBORN, 4 * SHORT, after=_put_off),
}
SCENES: Final = {**TOLD, **KILLED}


class Play:
    """Runs of all scenes, whose leases are over."""

    def __init__(self, base: Path, stack: ExitStack) -> None:
        self.runs: dict[str, Leased] = {}
        #: in seconds of CLOCK_BOOTTIME: when leases were over, and when monitors were gone
        self.ends: dict[str, float] = {}
        self.gone: dict[str, float] = {}
        names = {name: name.replace(", ", "-").replace(" ", "-") for name in SCENES}

        def made(name: str) -> Leased:
            (base / name).mkdir()
            return stack.enter_context(closing(Leased(base / name)))

        for name, scene in SCENES.items():
            run = self.runs[name] = made(names[name])
            run.begin(scene.script, scene.grace)
            self.renew()
        #: a cell that is held, what has entered it, and what has no lease
        self.held, self.entered, self.other = map(made, ("held", "entered", "other"))
        self.runs["held"] = self.held
        self.held.begin("", SHORT)
        self.wait(lambda: self.held.record.held and self.held.record.keeper)
        self.entered.enter(self.held, script=STUBBORN)
        self.other.start(script=HEEDS, whole=self.other.outer)
        here = [*(self.runs[name] for name in SCENES), self.entered, self.other]
        self.wait(lambda: all(each.is_here() for each in here))
        for each in (self.held, self.entered, self.other):
            each.daemon_dies()
        for name, scene in SCENES.items():
            self.renew(name)  # or its lease might be over before, on a busy machine
            scene.before(self.runs[name])
        over = max(self.ends.values()) + SHORT
        wait_until(lambda: clock.up() > over, "the leases are over")
        for name, scene in SCENES.items():
            scene.after(self.runs[name])
        self.wait_gone()

    def renew(self, *names: str) -> None:
        for name in names or self.runs:
            run = self.runs[name]
            self.ends[name] = clock.up() + AHEAD
            run.leases.extend(run.number, self.ends[name])

    def wait(self, is_so: Callable[[], object]) -> None:
        """Puts all leases off until something is so."""

        def looks() -> object:
            self.renew()
            return is_so()

        wait_until(looks, "it is there")

    def wait_gone(self) -> None:
        with ExitStack() as stack:
            left: dict[int, str] = {}
            poller = select.poll()
            for name, run in self.runs.items():
                assert run.monitor is not None
                fd = os.pidfd_open(run.monitor)
                stack.callback(os.close, fd)
                poller.register(fd, select.POLLIN)
                left[fd] = name
            while left:
                found = poller.poll(TIMEOUT * 1000)
                assert found, f"not gone: {sorted(left.values())}"
                for fd, _ in found:
                    self.gone[left.pop(fd)] = clock.up()
                    poller.unregister(fd)


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    with ExitStack() as stack:
        yield Play(tmp_path_factory.mktemp("play"), stack)


@pytest.mark.parametrize("name", [*SCENES, "held"])
def test_all_of_a_cell_is_gone_when_its_lease_is_over(play: Play, name: str) -> None:
    run = play.runs[name]
    assert (run.record.cut_short, run.record.finished) == (OVER, True)
    assert not run.outer.populated()


@pytest.mark.parametrize("name", TOLD)
def test_its_keeper_is_told(play: Play, name: str) -> None:
    assert play.runs[name].output() == b"here\nterm\n"
    assert play.runs[name].record.exit_code == 0


@pytest.mark.parametrize("name", KILLED)
def test_what_is_left_then_is_killed_after_the_grace(play: Play, name: str) -> None:
    grace = SCENES[name].grace
    assert "term" not in play.runs[name].output().decode()
    if grace is not NEVER:  # else there is none
        assert play.gone[name] >= play.ends[name] + grace


def test_who_wakes_late_gives_no_grace(play: Play) -> None:
    lines = [line.split() for line in play.runs["monitor late"].lines]
    noticed, over = (int(line[-1]) for line in lines if line[0] in ("lease", "end"))
    assert over - noticed < SHORT * 1e9


def test_what_has_entered_ends_with_the_cell(play: Play) -> None:
    assert play.entered.wait_end().cut_short is None


def test_others_live_on(play: Play) -> None:
    assert play.other.outer.populated()
    assert not play.other.record.over


# what does not begin


def _runs_out(run: Leased) -> None:
    run.number = run.leases.grant(clock.up() - 0.001)


def _stops(run: Leased) -> None:
    run.number = run.leases.grant(clock.up() + 600)
    run.leases.stop(run.number)


def _breaks(run: Leased) -> None:
    run.number = run.leases.grant(clock.up() + 600)
    os.truncate(run.leases.path(run.number), 7)


@pytest.mark.parametrize("over", [_runs_out, _stops, _breaks])
def test_nothing_begins_past_the_end(run: Leased, over: Callable[[Leased], None]) -> None:
    over(run)
    assert run.begin("echo never", NEVER) == 0
    assert run.wait_monitor() == 1
    record = run.record
    assert (record.cut_short, record.chain, record.started) == (OVER, 0, 0)
    assert (record.failed, record.finished) == ("its lease was over before it began", True)
    assert run.output() == b""
