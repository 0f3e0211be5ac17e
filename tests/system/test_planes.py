"""Work items and waits on a real mount, by agents in their sandboxes and by strangers."""

from __future__ import annotations

import errno
import json
import os
import select
import shlex
import subprocess
import threading
from pathlib import Path

import pytest

from tests.worlds.daemon import Daemon, read, wait_dead, wait_status, wait_until, write

#: nobody's in these tests
_STRANGER = 4242


def _as_stranger(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", command], user=_STRANGER, group=_STRANGER, extra_groups=[],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def _types(daemon: Daemon, name: str, *wanted: str) -> list[str]:
    return [event["type"] for event in daemon.events(name) if event["type"] in wanted]


def test_an_agent_plans_waits_and_is_seen_to(daemon: Daemon) -> None:
    lines = (
        "cd $CTX_SELF",
        "mkdir work/w waiting/x",
        "echo 'to reach it' > work/w/objective",
        "echo '- [ ] one' > work/w/plan.md",
        "echo w > work/current",
        "cat work/w/status",
        "echo w > waiting/x/work",
        "echo 'timer 2s' > waiting/x/on",
        "cat work/w/status work/w/blocked_by",
        'until [ "$(cat waiting/x/status)" = fired ]; do sleep 0.02; done',
        "cat work/w/status work/w/blocked_by work/current",
        "echo done > work/w/status",
        "cat work/w/status work/current",
        "echo again > work/w/plan.md || echo refused",
    )
    agent = daemon.finish("coder", "sh -c " + shlex.quote("; ".join(lines)))
    assert read(agent, "out").splitlines() == [
        *("active", "blocked", "wait x", "active", "w", "done", "refused"),
    ]
    assert _types(daemon, "coder", "wait.armed", "wait.fired") == ["wait.armed", "wait.fired"]
    assert read(agent / "work" / "w", "plan.md") == "- [ ] one\n"


def test_readers_see_a_change_at_once_and_poll_wakes_them(daemon: Daemon) -> None:
    agent = daemon.run("coder", "sleep 1000")
    for path in ("work/w", "waiting/x"):
        (agent / path).mkdir()
    item = agent / "work" / "w"
    assert (read(item, "status"), read(agent / "work", "current")) == ("open\n", "")
    write(agent / "work" / "current", "w")
    assert (read(item, "status"), read(agent / "work", "current")) == ("active\n", "w\n")
    write(agent / "waiting" / "x" / "work", "w")
    write(agent / "waiting" / "x" / "on", "trigger")
    assert (read(item, "status"), read(item, "blocked_by")) == ("blocked\n", "wait x\n")
    token = daemon.path("trigger", read(agent / "waiting" / "x", "token").strip())
    fd = os.open(item / "status", os.O_RDONLY)
    try:
        assert os.read(fd, 99) == b"blocked\n"
        poller = select.poll()
        poller.register(fd, select.POLLPRI | select.POLLERR)
        thread = threading.Thread(target=write, args=(token, "go"))
        thread.start()
        assert poller.poll(10_000)
        thread.join()
        assert os.pread(fd, 99, 0) == b"active\n"
    finally:
        os.close(fd)
    assert (read(item, "blocked_by"), read(agent / "waiting" / "x", "payload")) == ("", "go\n")


def test_a_token_is_all_that_a_stranger_needs(daemon: Daemon) -> None:
    agent = daemon.run("coder", "sleep 1000")
    wait = agent / "waiting" / "x"
    wait.mkdir()
    write(wait / "on", "trigger")
    token = daemon.path("trigger", read(wait, "token").strip())
    assert _as_stranger(f"cat {wait}/status").returncode != 0
    assert _as_stranger(f"ls {daemon.root}/trigger").returncode != 0
    assert _as_stranger(f"cat {token}").returncode != 0
    assert os.listdir(daemon.root / "trigger") == []
    assert read(wait, "status") == "armed\n"
    for _ in range(3):  # the kernel keeps nothing of the name
        assert token.exists()
    assert _as_stranger(f"echo 'from afar' > {token}").returncode == 0
    assert read(wait, "payload") == "from afar\n"
    assert not token.exists()
    second = _as_stranger(f"echo again > {token}")
    assert second.returncode != 0
    assert read(wait, "payload") == "from afar\n"
    write(agent / "ctl", "kill")
    wait_dead(agent)
    for text in (daemon.error(), json.dumps(daemon.events("coder"))):
        assert token.name not in text


def test_an_agent_fires_the_wait_of_another_from_its_sandbox(daemon: Daemon) -> None:
    agent = daemon.run("coder", "sleep 1000")
    (agent / "waiting" / "x").mkdir()
    write(agent / "waiting" / "x" / "on", "trigger")
    token = read(agent / "waiting" / "x", "token").strip()
    other = daemon.finish("other", f"sh -c 'echo psst > $CTX_ROOT/trigger/{token}'")
    assert read(other, "outcome") == "done\n"
    assert read(agent / "waiting" / "x", "payload") == "psst\n"


@pytest.mark.parametrize("down", [True, False])
def test_what_comes_while_the_daemon_is_dead_is_not_missed(daemon: Daemon, down: bool) -> None:
    boss = daemon.run("boss", "sleep 1000")
    kid = daemon.make("kid")
    write(kid / "parent", "agent:boss")
    write(kid / "exec", "sleep 1000")
    write(kid / "ctl", "start")
    wait_status(kid, "busy")
    (boss / "work" / "w").mkdir()
    for name, on in (("child", "child kid"), ("timer", "timer 200ms"), ("later", "timer 1d")):
        (boss / "waiting" / name).mkdir()
        write(boss / "waiting" / name / "work", "w" if name != "later" else "")
        write(boss / "waiting" / name / "on", on)
    pid = int(read(kid, "pid"))
    if down:
        daemon.kill()
    os.kill(pid, 9)
    if down:
        daemon.start()
    for name in ("child", "timer"):
        wait: Path = boss / "waiting" / name
        wait_until(lambda w=wait: read(w, "status") == "fired\n", f"{name} fires")  # type: ignore[misc]
    payload = json.loads(read(boss / "waiting" / "child", "payload"))
    assert (payload["agent"], payload["status"]) == ("kid", "failed")
    assert (payload["exit"], payload["reason"]) == ("signal:9", "signal:9")
    assert read(boss / "work" / "w", "status") == "open\n"
    assert read(boss / "waiting" / "later", "status") == "armed\n"
    assert _types(daemon, "boss", "wait.fired") == ["wait.fired", "wait.fired"]
    write(boss / "ctl", "kill")
    wait_dead(boss)
    assert read(boss / "waiting" / "later", "status") == "cancelled\n"


def test_a_reset_agent_has_no_records_of_its_former_life(daemon: Daemon) -> None:
    agent = daemon.run("coder", "sleep 1000")
    (agent / "work" / "w").mkdir()
    (agent / "waiting" / "x").mkdir()
    held = os.open(agent / "work" / "w", os.O_RDONLY | os.O_DIRECTORY)
    try:
        write(agent / "ctl", "kill")
        wait_dead(agent)
        write(agent / "ctl", "reset")
        assert sorted(os.listdir(agent / "work")) == ["current"]
        assert os.listdir(agent / "waiting") == []
        with pytest.raises(OSError) as refused:
            os.stat("status", dir_fd=held)
        assert refused.value.errno == errno.ESTALE
    finally:
        os.close(held)
