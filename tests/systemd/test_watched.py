"""What systemd and the journal know of the daemon: watchdogs, reloads, status, fields."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.systemd.service import CHECKOUT, DAEMON, SECONDS, Service, systemctl
from tests.worlds.daemon import alive, read, wait_dead, wait_status, wait_until, write

CONFIG = Path("/etc/ctxfs/config.yaml")
DROP_IN = Path(f"/run/systemd/system/{DAEMON}.d/test.conf")
#: ptrace(2)
SEIZE, INTERRUPT = 0x4206, 0x4207
#: waitpid(2)
WALL = 0x40000000


@contextmanager
def _set_up(service: Service, settings: str, unit: str = "") -> Iterator[None]:
    """The service, started anew with these settings and this addition to its unit."""
    for path, text in ((CONFIG, settings), (DROP_IN, unit)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    systemctl("daemon-reload")
    service.stop()
    service.start()
    try:
        yield
    finally:
        service.stop()
        CONFIG.unlink()
        DROP_IN.unlink()
        systemctl("daemon-reload")
        service.start()


def _entries(*matches: str) -> list[dict[str, str]]:
    """What the journal has, oldest first."""
    said = subprocess.run(
        ["journalctl", "--sync"], capture_output=True, timeout=SECONDS, check=False
    )
    assert said.returncode == 0, said.stderr
    found = subprocess.run(
        ["journalctl", "--output=json", *matches],
        capture_output=True, text=True, timeout=SECONDS, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in found.stdout.splitlines()]


def _stop_loop(pid: int) -> None:
    """Stops the main thread alone, as one that hangs in the kernel, until the process is gone:
    the others go on."""
    libc = ctypes.CDLL(None, use_errno=True)
    for request in (SEIZE, INTERRUPT):
        assert libc.ptrace(request, pid, None, None) == 0, os.strerror(ctypes.get_errno())
    # who traces it hears of its end first
    _, status = os.waitpid(pid, WALL)
    while os.WIFSTOPPED(status):
        _, status = os.waitpid(pid, WALL)
    assert os.WTERMSIG(status) == signal.SIGABRT


@contextmanager
def _adopted(service: Service, name: str) -> Iterator[int]:
    """Ends with another daemon, which has taken over an agent; yields the first one's pid."""
    agent = service.run(name, "sleep 1000")
    wait_status(agent, "busy")
    pid, before = read(agent, "pid"), service.pid
    restarts = int(service.show("NRestarts"))
    yield before
    service.wait_restarted(restarts + 1)
    assert service.pid != before
    assert alive(int(pid))
    assert [read(agent, file) for file in ("status", "pid", "run")] == ["busy\n", pid, "r1\n"]
    write(agent / "ctl", "stop\n")
    wait_dead(agent)


def test_systemd_ends_a_daemon_whose_loop_stands_and_the_next_adopts(service: Service) -> None:
    with _set_up(service, "watchdog: 0s\n", "[Service]\nWatchdogSec=2\n"):
        with _adopted(service, "watched") as pid:
            _stop_loop(pid)
        said = [entry["MESSAGE"] for entry in _entries(f"_PID={pid}")]
        assert any("Fatal Python error: Aborted" in line for line in said), said
        assert any("most recent call first" in line for line in said), said


def test_the_mount_guard_is_quicker_than_systemd(service: Service) -> None:
    unit = "[Service]\nWatchdogSec=30\n"
    with _set_up(service, "watchdog: 2s\n", unit), _adopted(service, "guarded") as pid:
        os.kill(pid, signal.SIGSTOP)
    messages = [entry["MESSAGE"] for entry in _entries("-u", DAEMON, "-n", "200")]
    # not by systemd, for which that would have been a timeout
    assert not any("watchdog" in line.lower() and "timeout" in line for line in messages[-30:])


def test_a_daemon_that_answers_is_left_alone(service: Service) -> None:
    with _set_up(service, "watchdog: 0s\n", "[Service]\nWatchdogSec=1\n"):
        pid = service.pid
        first = int(service.show("WatchdogTimestampMonotonic"))
        # five times as long as systemd waits
        wait_until(
            lambda: int(service.show("WatchdogTimestampMonotonic")) > first + 5_000_000,
            "keep-alives come", SECONDS,
        )  # fmt: skip
        assert (service.pid, service.show("NRestarts")) == (pid, "0")


def test_systemctl_status_counts_agents(service: Service) -> None:
    # a declared agent may have come up
    there = [read(directory, "status") for directory in (service.root / "agent").glob("*.d")]
    others, busy = len(there) - there.count("dead\n"), there.count("busy\n")
    agents = [service.run(f"counted{n}", "sleep 1000") for n in range(3)]
    for agent in agents:
        wait_status(agent, "busy")
    service.make("counted-new", "true")
    told = f"{others + 4} agents, {busy + 3} busy"
    wait_until(lambda: service.show("StatusText") == told, "the status is told", SECONDS)
    for agent in agents:
        write(agent / "ctl", "stop\n")
    left = f"{others + 1} agent{'s' * (others > 0)}, {busy} busy"
    wait_until(lambda: service.show("StatusText") == left, "it follows", SECONDS)


def test_a_reload_is_announced_and_a_wrong_file_is_named(service: Service) -> None:
    since = _entries("-u", DAEMON, "-n", "1")[-1]["__CURSOR"]
    CONFIG.parent.mkdir(exist_ok=True)
    CONFIG.write_text("children: 78\n")
    try:
        systemctl("reload", DAEMON)
        status = service.root / "status"
        wait_until(lambda: "children=78," in status.read_text(), "the setting counts", SECONDS)
        CONFIG.write_text("children: many\n")
        refused = subprocess.run(["systemctl", "reload", DAEMON], capture_output=True,
                                 timeout=SECONDS, check=False)  # fmt: skip
        assert refused.returncode != 0, "the check before it fails"
        os.kill(service.pid, signal.SIGHUP)  # who does not ask first
        wait_until(lambda: str(CONFIG) in service.show("StatusText"), "it is told", SECONDS)
        assert "the settings remain unchanged" in service.show("StatusText")
        assert "children=78," in status.read_text()
        assert service.show("ActiveState") == "active"
        messages = [entry["MESSAGE"] for entry in _entries("-u", DAEMON, f"--after-cursor={since}")]
        assert any("Reload" in line for line in messages), messages
    finally:
        CONFIG.unlink()
    systemctl("reload", DAEMON)
    wait_until(lambda: service.show("StatusText").endswith("busy"), "it is right again", SECONDS)


def test_a_long_grace_period_is_not_cut_short(service: Service) -> None:
    stubborn = "sh -c 'trap : TERM; while :; do sleep 0.05; done'"
    with _set_up(service, "grace: 5s\n", "[Service]\nTimeoutStopSec=2\n"):
        agent = service.run("long-grace", stubborn)
        wait_status(agent, "busy")
        pid = int(read(agent, "pid"))
        assert service.stop() == 0
        assert service.show("Result") == "success"
        assert not alive(pid)
        service.start()
        assert read(agent, "reason") == "shutdown\n"


def test_the_journal_finds_an_agents_lines_by_its_name(service: Service) -> None:
    for name, command in (("coder", "sh -c 'exit 3'"), ("other", "true")):
        wait_dead(service.run(name, command))
    with pytest.raises(OSError):
        (service.agent_dir("coder") / "ctl").write_text("resume\n")
    wait_until(lambda: len(_entries("CTX_AGENT=coder")) > 1, "the journal has both", SECONDS)
    # the write is refused, and once more the close that would say it again
    ended, refused, *_ = _entries("CTX_AGENT=coder")
    assert ended["MESSAGE"].endswith("coder: error (exit:3)")
    assert (ended["CTX_RUN"], ended["CTX_REASON"], ended["PRIORITY"]) == ("r1", "exit:3", "6")
    assert (ended["SYSLOG_IDENTIFIER"], ended["_SYSTEMD_UNIT"]) == ("ctxd", DAEMON)
    assert "agent/coder.d/ctl" in refused["MESSAGE"]
    assert refused["CTX_REASON"] == "EBUSY"
    assert [entry["CTX_REASON"] for entry in _entries("CTX_AGENT=other")] == ["exit:0"]
    said = [entry["MESSAGE"] for entry in _entries(f"_PID={service.pid}")]
    assert "ready" in said


def _units() -> list[str]:
    units = CHECKOUT / "contrib"
    patterns = ("systemd/*.service", "monitoring/ctxfs-metrics.*", "proxy/*.service")
    return sorted(str(path) for pattern in patterns for path in units.glob(pattern))


def test_the_units_are_without_faults() -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *_units()],
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_every_missing_protection_has_a_reason_in_the_unit() -> None:
    unit = CHECKOUT / "contrib/systemd/ctxd.service"
    text = unit.read_text()
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--json=short", str(unit)],
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    rows = json.loads(done.stdout)
    assert len(rows) > 50
    missing = {row["name"] for row in rows if row["exposure"]}
    assert missing, "or there is nothing to explain"
    for name in missing:
        for option in name.partition("=")[0].split("/"):
            assert f"{option}=" in text, f"{name} is missing without a reason"


def test_metrics_are_copied_for_node_exporter_and_go_with_the_daemon(service: Service) -> None:
    units, directory = CHECKOUT / "contrib/monitoring", Path("/var/lib/prometheus")
    copied = directory / "node-exporter" / "ctxfs.prom"
    copied.parent.mkdir(parents=True, exist_ok=True)
    for unit in ("ctxfs-metrics.service", "ctxfs-metrics.timer"):
        (Path("/run/systemd/system") / unit).write_bytes((units / unit).read_bytes())
    systemctl("daemon-reload")
    systemctl("start", "ctxfs-metrics.timer")
    try:
        wait_until(copied.exists, "the timer has it copied", SECONDS)
        assert 'ctxfs_state{state="ready"} 1\n' in copied.read_text()
        assert copied.stat().st_mode & 0o777 == 0o644
    finally:
        systemctl("stop", "ctxfs-metrics.timer")
    service.stop()
    systemctl("start", "ctxfs-metrics.service")
    assert os.listdir(copied.parent) == [], "nobody takes old values for new ones"


def test_what_is_declared_for_the_next_boot(service: Service) -> None:
    """Last, as it comes up at each start: test_after_reboot.py looks for it."""
    path = Path("/etc/ctxfs/agents.d/booting.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("start: true\nexec: sleep 1000\n")
    systemctl("reload", DAEMON)
    agent = service.agent_dir("booting")
    wait_until(agent.exists, "it is made", SECONDS)
    wait_status(agent, "busy")
