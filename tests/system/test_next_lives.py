"""A name is used again at once: nothing of the former life reaches the next one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.system.hostile.guarded import BESIDE
from tests.worlds.daemon import Daemon, read, wait_dead, wait_status, write

#: of each name; more in make test-hostile
LIVES = 6 if BESIDE else 3
AGENTS = 24


@pytest.mark.usefixtures("guard_beside")
@pytest.mark.settings(grace="300ms")
def test_the_end_of_a_life_ends_no_later_one(daemon: Daemon) -> None:
    """Whoever leads an end may come round when the name has its next life already."""
    command = "sh -c 'case $CTX_RUN in *[13579]) sleep 1000;; esac; sleep 0.5; exit 7'"
    agents = [daemon.make(f"again{number}", command) for number in range(AGENTS)]

    def live(agent: Path) -> list[str]:
        reasons = []
        for _ in range(LIVES):
            write(agent / "ctl", "start")
            wait_status(agent, "busy")
            write(agent / "ctl", "stop")
            wait_dead(agent)
            write(agent / "ctl", "reset")
            write(agent / "ctl", "start")
            wait_dead(agent)
            reasons.append(read(agent, "reason").strip())
            write(agent / "ctl", "reset")
        return reasons

    with ThreadPoolExecutor(AGENTS) as threads:
        for reasons in threads.map(live, agents):
            assert reasons == ["exit:7"] * LIVES
