"""Starting and stopping ctxd: one clear sentence, or ready."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil
import pytest

from runtime.authority.accounts import Resource
from runtime.kernel import linux
from runtime.kernel.cgroups import CONTROLLERS
from runtime.records.lifecycle import Status
from runtime.records.model import Outcome
from runtime.runtime import STATES
from tests.worlds.daemon import (
    TIMEOUT,
    Daemon,
    daemon_of,
    read,
    refusal,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.readiness import readable

_CTX: Final = str(Path(sys.executable).with_name("ctx"))


@pytest.fixture
def stopped() -> Iterator[Daemon]:
    """A daemon that has not been started."""
    daemon = Daemon()
    yield daemon
    if daemon.process is not None:
        daemon.stop()
    shutil.rmtree(daemon.base, ignore_errors=True)


def _refused(daemon: Daemon, *more: str, **options: object) -> str:
    """Standard error of a start that must fail with exit status 1 and one sentence."""
    before = sorted(p.name for p in daemon.base.iterdir())
    result = subprocess.run(
        daemon.command(*more), capture_output=True, text=True, timeout=TIMEOUT, check=False,
        **options,  # type: ignore[call-overload]
    )
    assert result.returncode == 1, result.stderr
    assert result.stderr.startswith("ctxd: ")
    assert result.stderr.count("\n") == 1
    assert sorted(p.name for p in daemon.base.iterdir()) == before, "nothing is touched"
    return str(result.stderr)


def test_ready_status_and_a_clean_end(stopped: Daemon) -> None:
    stopped.start()
    assert "state=ready" in (stopped.root / "status").read_text()
    agent = stopped.run("sleeper", "sleep 1000")
    wait_status(agent, "busy")
    assert stopped.stop() == 0
    assert linux.mount_at(stopped.root) is None
    assert not stopped.cgroup.exists()
    stopped.start()
    assert (read(agent, "outcome"), read(agent, "reason")) == ("cancelled\n", "shutdown\n")
    assert stopped.stop() == 0


def samples(daemon: Daemon) -> dict[str, float]:
    """What ``metrics`` says; each sample belongs to the family that was announced last."""
    found, family = {}, ""
    for line in (daemon.root / "metrics").read_text().splitlines():
        words = line.split(" ")
        if words[0] == "#":
            family = words[2]
            continue
        key, figure = line.rsplit(" ", 1)
        assert key.partition("{")[0] == family
        assert key not in found
        found[key] = float(figure)
    return found


def test_metrics_have_each_fact_of_status_and_keep_it_at_zero(daemon: Daemon) -> None:
    before = samples(daemon)
    agent = daemon.run("counted", "true")
    wait_dead(agent)
    after = samples(daemon)
    assert after.keys() == before.keys()
    status = dict(line.split("=", 1) for line in read(daemon.root, "status").splitlines())
    told = {f"agents.{name}": after.pop(f'ctxfs_agents{{status="{name}"}}') for name in Status}
    assert {key: float(status.pop(key)) for key in told} == told
    assert told["agents.dead"] == 1
    assert told["agents.new"] == 0
    words = ",".join(f'{key}="{status.pop(key)}"' for key in ("version", "cgroup", "mount"))
    assert after.pop(f"ctxfs_info{{{words}}}") == 1
    states = {name: after.pop(f'ctxfs_state{{state="{name}"}}') for name in STATES}
    assert states == {"starting": 0, "ready": 1, "stopping": 0}
    assert status.pop("state") == "ready"
    there = status.pop("controllers").split(",")
    for name in CONTROLLERS:
        assert after.pop(f'ctxfs_controller{{controller="{name}"}}') == (name in there)
    for limit in status.pop("limits").split(","):
        name, value = limit.split("=")
        assert after.pop(f'ctxfs_limit{{limit="{name}"}}') == float(value.removesuffix("s"))
    assert after.pop("ctxfs_trees_hard") == (status.pop("trees") == "hard")
    assert 0 < after.pop("ctxfs_uptime_seconds") <= float(status.pop("uptime"))
    assert not status
    for resource in Resource:
        after.pop(f'ctxfs_account_used{{account="{resource}"}}')
        after.pop(f'ctxfs_account_total{{account="{resource}"}}')
    ends = {
        name: after.pop(f'ctxfs_agent_ends_total{{outcome="{name}"}}') for name in Outcome if name
    }
    assert {name: count for name, count in ends.items() if count} == {"done": 1}
    kinds = ("in", "cached", "written", "out", "estimated")
    owner = f'owner="{os.geteuid()}"'
    models = {f'tokens_total{{{owner},kind="{kind}"}}' for kind in kinds}
    models |= {f"cost_total{{{owner}}}"}
    answers = ("passed", "refused", "unpriced")
    models |= {f'model_requests_total{{{owner},answer="{answer}"}}' for answer in answers}
    assert {after.pop(f"ctxfs_{name}") for name in models} == {0}, "nobody has used one"
    rest = {name for name in after if not name.startswith("ctxfs_loop_")}
    assert rest == {
        f"ctxfs_{name}"
        for name in (
            *("requests_total", "requests_at_hand", "refusals_total", "agent_restarts_total"),
            *("messages_waiting", "waits_armed", "asks_open", "changes_waiting", "descriptors"),
            *("event_readers", "terminals", "viewers"),
            *("descriptors_max", "process_resident_bytes", "process_cpu_seconds_total"),
            *("process_threads", "process_start_time_seconds"),
            *("state_free_bytes", "state_size_bytes"),
        )
    }


@pytest.mark.settings(restart_max=2)
def test_metrics_count_what_waits_and_what_the_daemon_holds(daemon: Daemon) -> None:
    agent = daemon.run("queued", "sleep 1000", mode="turn")
    before = samples(daemon)
    for text in ("one", "two", "three"):
        write(agent / "inbox", text)
    assert before["ctxfs_messages_waiting"] == 0
    wait_until(lambda: samples(daemon)["ctxfs_messages_waiting"] == 2, "the first is worked on")
    after = samples(daemon)
    # the start of a run opens and closes some
    wait_until(lambda: samples(daemon)["ctxfs_descriptors"]
               == len(os.listdir(f"/proc/{daemon.pid}/fd")), "its descriptors are counted")
    process = psutil.Process(daemon.pid)
    assert after["ctxfs_process_start_time_seconds"] == pytest.approx(process.create_time())
    assert after["ctxfs_process_resident_bytes"] == pytest.approx(process.memory_info().rss, 0.2)
    assert after["ctxfs_requests_at_hand"] >= 1, "this one"
    real = os.statvfs(daemon.state)
    wait_until(lambda: samples(daemon)["ctxfs_state_size_bytes"] == real.f_blocks * real.f_frsize,
               "the disk is looked at")
    with pytest.raises(OSError):
        write(agent / "ctl", "resume\n")
    assert samples(daemon)["ctxfs_refusals_total"] > after["ctxfs_refusals_total"]
    write(agent / "ctl", "stop\n")
    wait_dead(agent)
    assert samples(daemon)["ctxfs_messages_waiting"] == 0
    again = daemon.run("again", "false", restart="on-failure")
    wait_until(lambda: samples(daemon)["ctxfs_agent_restarts_total"] >= 1, "it is started again")
    write(again / "ctl", "stop\n")


def test_ready_is_told_to_systemd(stopped: Daemon) -> None:
    path = str(stopped.base / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path)
        receiver.settimeout(TIMEOUT)
        process = subprocess.Popen(
            stopped.command(), stderr=subprocess.DEVNULL, env={**os.environ, "NOTIFY_SOCKET": path}
        )
        while (said := receiver.recv(200)) != b"READY=1":
            assert said == b"STATUS=starting: 0 agents, 0 busy"
        assert "state=ready" in (stopped.root / "status").read_text()
        process.terminate()
        while (said := receiver.recv(200)) != b"STOPPING=1":
            assert said == b"STATUS=0 agents, 0 busy"
        assert process.wait(TIMEOUT) == 0


def test_a_second_daemon_on_the_same_mount_state_or_cgroup(stopped: Daemon) -> None:
    stopped.start()
    other = Daemon()
    try:
        arguments = {
            "--mount": ("a running ctxd is mounted there", stopped.root),
            "--state": ("another ctxd uses this state directory", stopped.state),
            "--cgroup": ("another ctxd uses this cgroup", stopped.cgroup.path),
        }
        for option, (sentence, value) in arguments.items():
            assert sentence in _refused(other, option, str(value))
        assert "state=ready" in (stopped.root / "status").read_text()
    finally:
        shutil.rmtree(other.base)


def test_a_foreign_mount(stopped: Daemon) -> None:
    stopped.root.mkdir()
    linux.mount("none", stopped.root, "tmpfs", 0)
    try:
        assert "a tmpfs filesystem (none) is mounted there" in _refused(stopped)
    finally:
        linux.unmount(stopped.root)


def test_a_mount_point_that_is_not_an_empty_directory(stopped: Daemon) -> None:
    stopped.root.mkdir()
    (stopped.root / "file").write_text("mine")
    assert "not empty" in _refused(stopped)
    assert (stopped.root / "file").read_text() == "mine"
    shutil.rmtree(stopped.root)
    stopped.root.write_text("a file")
    assert "not a directory" in _refused(stopped)
    stopped.root.unlink()
    assert "no such directory" in _refused(stopped, "--mount", f"{stopped.base}/no/such")


def test_wrong_arguments_and_configuration(stopped: Daemon) -> None:
    assert "not an absolute path" in _refused(stopped, "--mount", "relative")
    assert "not inside the cgroup v2 hierarchy" in _refused(stopped, "--cgroup", "/tmp")
    assert "no such cgroup" in _refused(stopped, "--cgroup", "no/such")
    assert "no such configuration file" in _refused(stopped, "--config", "/no/such")
    config = stopped.base / "config.yaml"
    config.write_text("depht: 3\n")
    said = _refused(stopped, "--config", str(config))
    assert ":1: depht: unknown setting; did you mean depth?" in said


def test_a_user_without_a_name(stopped: Daemon) -> None:
    # another uid in a user namespace, which still reads what this one reads
    result = subprocess.run(
        ["unshare", "--user", "--map-user=12345", "--map-group=12345", *stopped.command()],
        capture_output=True, text=True, check=False,
    )
    assert result.returncode == 1
    assert result.stderr.startswith("ctxd: uid 12345 has no entry in passwd(5), which")


def test_a_runtime_directory_that_agents_cannot_reach(stopped: Daemon) -> None:
    closed = Path(tempfile.mkdtemp(dir=stopped.base))
    assert "agents cannot reach it" in _refused(stopped, "--runtime", str(closed / "run"))


def test_a_stale_mount_is_cleared(stopped: Daemon) -> None:
    stopped.start()
    stopped.kill()
    with pytest.raises(OSError, match="Errno 107"):
        os.listdir(stopped.root)
    stopped.start()
    assert "state=ready" in (stopped.root / "status").read_text()


def test_sighup_ends_no_daemon_that_starts(stopped: Daemon) -> None:
    settings = stopped.base / "config.yaml"
    os.mkfifo(settings)
    stopped.arguments += ["--config", str(settings)]

    def come() -> None:
        with open(settings, "w") as writer:  # waits until the daemon reads its settings
            settings.unlink()
            settings.write_text("grace: 1s\n")
            assert stopped.process is not None
            os.kill(stopped.pid, signal.SIGHUP)
            # the handler, and then the call again
            wait_until(lambda: not _is_pending(stopped.pid, signal.SIGHUP), "it is taken")
            writer.write("grace: 2s\n")

    comes = threading.Thread(target=come)
    comes.start()
    stopped.start()
    comes.join()
    wait_until(lambda: "the settings were read again" in stopped.log.read_text(), "it is obeyed")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_no_signal_cuts_an_end_short(stopped: Daemon, number: signal.Signals) -> None:
    stopped.start()
    pidfd = os.pidfd_open(stopped.pid)
    over = threading.Event()

    def come() -> None:
        with suppress(ProcessLookupError):
            # a millisecond apart: to handle one takes part of that, and the end has to get on
            while not over.is_set() and not readable([pidfd], 0.001):
                signal.pidfd_send_signal(pidfd, number)

    comes = threading.Thread(target=come)
    comes.start()
    try:
        assert stopped.stop() == 0
    finally:
        over.set()
        comes.join()
        os.close(pidfd)


def _is_pending(pid: int, number: int) -> bool:
    """Of the process, or of its first thread."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = re.findall(r"^S[ih][gd]Pnd:\t(\w+)$", status, re.MULTILINE)
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def test_sighup_reads_the_configuration_again() -> None:
    with daemon_of(config="control_max: 100\n") as daemon:
        agent = daemon.make("coder")
        assert refusal(agent / "exec", "x" * 200) == "EMSGSIZE"
        (daemon.base / "config.yaml").write_text("control_max: 1000\n")
        os.kill(daemon.pid, signal.SIGHUP)
        wait_until(lambda: refusal(agent / "exec", "x" * 200) == "accepted", "the new setting")
        (daemon.base / "config.yaml").write_text("control_max: 9\nnodes: {n2: {ssh: -oX=y}}\n")
        os.kill(daemon.pid, signal.SIGHUP)
        wait_until(lambda: "the settings remain unchanged" in daemon.log.read_text(), "a word")
        write(agent / "exec", "y" * 200)


def test_help_and_version(stopped: Daemon) -> None:
    for option, text in (("--help", "--mount DIR"), ("--version", "ctxd ")):
        result = subprocess.run(stopped.command(option), capture_output=True, text=True, check=True)
        assert text in result.stdout


def test_programs_are_run_from_a_noexec_runtime_directory(stopped: Daemon) -> None:
    """As /run is mounted on many machines."""
    stopped.runtime.mkdir()
    linux.mount("noexec", stopped.runtime, "tmpfs", 8, "mode=0755")  # MS_NOEXEC
    try:
        stopped.start()
        agent = stopped.finish("agent", "echo ran")
        assert read(agent, "result.md") == "ran\n"
        assert stopped.stop() == 0
    finally:
        linux.unmount(stopped.runtime, linux.MNT_DETACH)


def test_the_demo_ends_with_a_daemon_that_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "contrib").mkdir()
    shutil.copy("contrib/demo.sh", tmp_path / "contrib")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    daemon = tmp_path / ".venv" / "bin" / "ctxd"
    daemon.write_text("#!/bin/sh\necho ctxd: no >&2\nexit 1\n")
    daemon.chmod(0o755)
    done = subprocess.run(
        ["sh", tmp_path / "contrib" / "demo.sh"],
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.endswith("state and cgroup\nctxd: no\n")


@pytest.mark.parametrize("left", [True, False])
def test_the_demo_finds_what_is_left_without_pgrep(left: bool, tmp_path: Path) -> None:
    whole = Path("contrib/demo.sh").read_text()
    check = whole[whole.index("\nleft=0\n"):]
    (tmp_path / "bin").mkdir()
    for name in ("grep", "tr"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / "bin" / name).symlink_to(found)
    base = tmp_path / "base"
    base.mkdir()
    (base / "sleep").symlink_to("/bin/sleep")
    survivor = subprocess.Popen([str(base / "sleep"), "1000"]) if left else None
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", check], capture_output=True, text=True, timeout=TIMEOUT, check=False,
            env={"PATH": str(tmp_path / "bin"), "base": str(base), "cgroup": str(base / "none")},
        )
    finally:
        if survivor is not None:
            survivor.kill()
            survivor.wait()
    if survivor is not None:
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"a process is left: {survivor.pid}\n"
    else:
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "no process, mount or cgroup is left\n"


@pytest.mark.parametrize("place", ["state", "run"])
def test_what_another_user_can_replace_is_not_used(stopped: Daemon, place: str) -> None:
    """Who became this user by su(1) may have the environment of the one before."""
    theirs = stopped.base / "theirs"
    theirs.mkdir()
    os.chown(theirs, 1234, 1234)
    option = {"state": "--state", "run": "--runtime"}[place]
    for path in (theirs, theirs / place):
        said = _refused(stopped, option, str(path))
        assert f"{path}: {theirs} belongs to uid 1234: choose a directory of your own" in said
