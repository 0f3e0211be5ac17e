"""Waits that stay armed: one message each time, and what was missed once."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.system.test_tools import said, script
from tests.worlds.daemon import Daemon, read, wait_status, wait_until, write

#: arms what it is told to, and repeats what wakes it
PROGRAM = script(
    "read -r text",
    f"""case $text in
tick) {said("WaitFor", wake="timer", resource="every 10m", id="tick")};;
hook) {said("WaitFor", wake="externals", id="hook")};;
stop) {said("WaitCancel", wait_id="tick")};;
*) printf "woken: %s\\n" "$text"; esac""".replace("\n", " "),
)


def woken(agent: Path) -> list[tuple[str, Any]]:
    """Which waits woke it, and with what."""
    lines = [line for line in read(agent, "out").splitlines() if line.startswith("woken: ")]
    notices = [json.loads(line.removeprefix("woken: ")) for line in lines]
    return [(notice["wait"], notice["payload"]) for notice in notices]


def tell(agent: Path, word: str) -> None:
    wait_status(agent, "idle")
    write(agent / "inbox", word)


def later(daemon: Daemon, seconds: float) -> None:
    """So much time passes for timers, while no daemon runs."""
    with closing(sqlite3.connect(daemon.state / "ctxfs.db")) as db:
        for field in ("$.due", "$.due_up"):
            db.execute(
                "UPDATE items SET data=json_set(data, :at, json_extract(data, :at) - :seconds) "
                "WHERE kind='wait'",
                {"at": field, "seconds": seconds},
            )
        db.commit()


def test_a_timer_comes_again(daemon: Daemon) -> None:
    """One is armed by a shell, one by a tool; each tells once what it missed, and goes on."""
    agent = daemon.run("x", PROGRAM, mode="turn")
    assert daemon.ctx("waits", "add", "-a", "x", "shell", "timer", "every", "10m").returncode == 0
    tell(agent, "tick")
    wait_until(lambda: (agent / "waiting" / "tick").exists(), "it is armed")
    wait_status(agent, "idle")
    for times in (1, 2):
        daemon.kill()
        later(daemon, 3 * 600)
        daemon.start()
        wait_until(lambda n=times: len(woken(agent)) == 2 * n, "both woke it")  # type: ignore[misc]
        wait_status(agent, "idle")
    assert sorted(wait for wait, _ in woken(agent)) == ["shell", "shell", "tick", "tick"]
    assert {payload["missed"] for _, payload in woken(agent)} == {2}
    assert [read(agent / "waiting" / name, "status") for name in ("shell", "tick")] == [
        "armed\n", "armed\n",
    ]  # fmt: skip
    tell(agent, "stop")
    wait_until(lambda: not (agent / "waiting" / "tick").exists(), "it is cancelled")
    assert daemon.ctx("waits", "cancel", "-a", "x", "shell").returncode == 0
    wait_status(agent, "idle")
    daemon.kill()
    later(daemon, 3600)
    daemon.start()
    assert len(woken(agent)) == 4


def test_a_token_takes_one_event_after_the_other(daemon: Daemon) -> None:
    agent = daemon.run("x", PROGRAM, mode="turn")
    tokens = [Path(daemon.ctx("waits", "add", "-a", "x", "shell", "triggers").stdout.strip())]
    tell(agent, "hook")
    wait_until(lambda: '"token"' in read(agent, "out"), "it is armed")
    tokens.append(Path(json.loads(read(agent, "out").splitlines()[0])["token"]))
    for number, token in enumerate(tokens):
        token.write_text(f"opened {number}")
        token.write_text(f"closed {number}")
    daemon.kill()
    daemon.start()
    tokens[0].write_text("merged")
    wait_until(lambda: len(woken(agent)) == 5, "each has woken it")
    assert woken(agent) == [
        ("shell", "opened 0"), ("shell", "closed 0"), ("hook", "opened 1"), ("hook", "closed 1"),
        ("shell", "merged"),
    ]  # fmt: skip
    assert read(agent / "waiting" / "hook", "status") == "armed\n"
