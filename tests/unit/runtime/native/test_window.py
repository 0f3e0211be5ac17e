"""What a monitor does when the window of its cell is closed."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio

from runtime.cell.inlet import Inlet
from tests.unit.runtime.native.test_keeper_monitor import WHY_NOT, Run
from tests.worlds.daemon import wait_until

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

#: says that it has started, and which signals it gets
TALKS = "trap 'echo hup' HUP; trap 'echo term' TERM; echo here; while :; do sleep 600 & wait; done"


class Windowed(Run):
    """A run in the place of an agent, of which the parent directory is the whole cgroup."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.inlet = Inlet(base / "socket")
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.window = theirs
        # a directory of its own around it: all that is killed
        self.outer = self.leaf
        self.leaf = self.outer.child("run")
        self.leaf.path.mkdir()

    def begin(self, script: str, grace: float = 600.0, **options: Any) -> None:
        listening = self.inlet.listen()
        self.inlet.give(self.ours, grace)

        class Listening(Inlet):
            def listen(self) -> int:
                return listening

        inlet = Listening(self.record_path)
        options = {"fed": False, "whole": self.outer, "grace": 600_000, **options}
        self.start(script=script, inlet=inlet, **options)
        self.ours.close()

    def close(self) -> None:
        self.window.close()
        super().close()
        self.outer.path.rmdir()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Windowed]:
    with closing(Windowed(tmp_path)) as made:
        yield made


def _dies(run: Windowed) -> None:
    run.daemon_dies()


def _stays(run: Windowed) -> None:
    """A daemon that does not act."""


@pytest.mark.parametrize("daemon", [_dies, _stays])
def test_the_keeper_ends_the_cell_where_no_daemon_does(
    run: Windowed, daemon: Callable[[Windowed], None]
) -> None:
    run.begin(TALKS)
    wait_until(lambda: run.output() == b"here\n", "it has started")
    daemon(run)
    run.window.close()
    record = run.wait_end()
    assert record.hung_up and record.finished
    assert run.output().startswith(b"here\nhup\n")


def test_the_cgroup_is_killed_where_the_keeper_does_not_hear(run: Windowed) -> None:
    run.begin(TALKS, grace=0.0)
    wait_until(lambda: run.output() == b"here\n", "it has started")
    run.leaf.freeze(True)
    run.daemon_dies()
    run.window.close()
    record = run.wait_end()
    assert record.hung_up and record.lost and record.finished


def test_what_a_daemon_leads_is_not_told_to_the_keeper(run: Windowed) -> None:
    run.begin(TALKS, grace=0.0)
    wait_until(lambda: run.output() == b"here\n", "it has started")
    run.record_path.chmod(0o400)
    run.window.close()
    record = run.wait_end()
    assert record.hung_up and run.output() == b"here\n"


def test_the_next_daemon_gets_the_window(run: Windowed) -> None:
    run.begin("exit 3")
    run.daemon_dies()
    wait_until(lambda: run.record.finished, "it has ended")
    end = trio.run(run.inlet.ask_window)
    assert end is not None
    with end:
        run.window.send(b"nobody reads this")
        assert end.recv(100) == b"nobody reads this"
    run.record_path.unlink()
    assert run.wait_monitor() == 0
    assert trio.run(run.inlet.ask_window) is None


def test_a_window_that_is_closed_after_the_end_is_recorded_and_changes_nothing(
    run: Windowed,
) -> None:
    run.begin("exit 3")
    wait_until(lambda: run.record.finished, "it has ended")
    run.window.close()
    record = run.wait_end()
    assert "hangup" in run.record_path.read_text()
    assert (record.exit_code, record.hung_up) == (3, False)
