"""contrib/examples/follow.py: a private child follows a pull request for days."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.test_tools import said, script
from tests.worlds.daemon import Daemon, daemon_of, read, wait_dead, wait_status, wait_until, write
from tests.worlds.fates import CRASH_AT, lose_machine

CONTRIB = Path(__file__).parents[2] / "contrib"
EVENT = CONTRIB / "webhook" / "event"
_SPAWN = said("SpawnAgent", name="pr-7", mode="turn", initial_message="7",
              exec="python3 /examples/follow.py")  # fmt: skip
#: makes the child, however often it has to ask, and repeats what wakes it
PARENT = script(
    "read -r text",
    f"""case $text in
follow) until test -e $CTX_ROOT/agent/pr-7.d; do {_SPAWN}; done;;
*) printf "woken: %s\\n" "$text"; esac""".replace("\n", " "),
)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with daemon_of() as daemon:
        yield daemon


def woken(boss: Path) -> list[str]:
    lines = read(boss, "out").splitlines()
    return [line.removeprefix("woken: ") for line in lines if line.startswith("woken: ")]


def happens(hooks: Path, action: str) -> int:
    """As webhook executes it; its exit status."""
    values = ["action", action, "number", "7", "merged", "true", "sender", "ann\nx=y"]
    return subprocess.run(
        [EVENT, "pull-request", *values], env={"CTX_WEBHOOK": str(hooks)}, check=False,
        stderr=subprocess.DEVNULL,
    ).returncode  # fmt: skip


def lines_of(result: Path) -> list[str]:
    """What it noted, without the ids of the messages."""
    text = result.read_text() if result.exists() else ""
    return [line.partition(" ")[2] for line in text.splitlines()]


def test_a_child_follows_a_pull_request_through_a_reboot_and_kills(daemon: Daemon) -> None:
    hooks = daemon.base / "hooks"
    hooks.mkdir()
    boss = daemon.run("boss", PARENT, mode="turn", mount=f"{CONTRIB}/examples /examples ro")
    wait_status(boss, "idle")
    child, token = daemon.agent_dir("pr-7"), hooks / "pull-request.token"
    result = boss / "session" / "context" / "child" / "pr-7" / "result.md"

    def killed_at(point: str, action: str = "") -> None:
        """ctxd dies there, when this happens, and the next one goes on."""
        daemon.kill()
        daemon.env[CRASH_AT] = point
        daemon.start()
        del daemon.env[CRASH_AT]
        if action == "follow":
            write(boss / "inbox", action)
        elif action:
            happens(hooks, action)
        daemon.wait_killed()
        daemon.start()

    # it is made, it arms its waits, it reports
    killed_at("start.committed", "follow")
    wait_until(lambda: len(woken(boss)) == 1, "the parent is told where the token is")
    assert woken(boss) == ["follow pull request 7: see pr-7.d/waiting/events/token"]
    for status in (child, boss):
        wait_status(status, "idle")
    token.write_text(f"{daemon.root}/trigger/{read(child / 'waiting' / 'events', 'token')}")

    # an event comes, wakes it, and its run ends
    expected: list[str] = []
    for point in ("wait.fired", "run.committed", "run.ended", "run.recorded"):
        killed_at(point, point)
        expected.append(f"{point} by annx=y")
        wait_until(lambda: lines_of(result) == expected, f"it has noted {expected}")
        wait_status(child, "idle")

    # while no daemon runs an event is refused, and the machine is started anew
    daemon.kill()
    assert happens(hooks, "lost") != 0
    lose_machine(daemon)
    daemon.start()
    assert [read(child / "waiting" / name, "status") for name in ("events", "daily")] == [
        "armed\n", "armed\n",
    ]  # fmt: skip
    assert happens(hooks, "reopened") == 0
    expected.append("reopened by annx=y")
    wait_until(lambda: lines_of(result) == expected, f"it has noted {expected}")

    # it is closed: the child ends itself, and its parent has the result
    wait_status(child, "idle")
    killed_at("cancel.marked", "closed")
    wait_dead(child)
    expected.append("closed by annx=y")
    assert (read(child, "outcome"), lines_of(result)) == ("done\n", expected)
    wait_until(lambda: len(woken(boss)) == 2, "the parent is told of the end")
    notice: dict[str, Any] = json.loads(woken(boss)[-1])
    assert (notice["status"], notice["result"]) == ("completed", result.read_text())
    assert happens(hooks, "again") != 0, "its token is good no more"
