"""Agents that files beside the configuration declare, with a real daemon."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

import pytest

from ctxfs.daemon import main
from ctxfs.declared import SHAPES
from runtime.records.lifecycle import Status
from tests.worlds.daemon import (
    MARK,
    TIMEOUT,
    Daemon,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.ordinary import as_user

pytestmark = pytest.mark.settings(depth=8)

LEAD = """\
start: true
exec: sleep 1000
policy: [allow lead_t agent:* create]
"""
CHILD = """\
parent: lead
start: true
mode: resident
exec: cat
env:
  GREETING: hello
handoff.md: Review it.
"""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """One that is not started yet, with an empty directory for declarations."""
    made = Daemon(config="depth: 8\n")
    (made.base / "agents.d").mkdir(mode=0o755)
    yield made
    made.close()


def declare(daemon: Daemon, name: str, text: str) -> Path:
    path = daemon.base / "agents.d" / f"{name}.yaml"
    path.write_text(text)
    path.chmod(0o644)
    return path


def log_of(daemon: Daemon) -> str:
    return daemon.log.read_text()


def reload(daemon: Daemon) -> None:
    """Returns when all was read and done."""
    before = log_of(daemon).count("agents are declared")
    os.kill(daemon.pid, signal.SIGHUP)
    wait_until(lambda: log_of(daemon).count("agents are declared") > before, "it has read them")


def pid_of(daemon: Daemon, name: str) -> str:
    wait_status(daemon.agent_dir(name), "busy", "ready", "idle")
    wait_until(lambda: read(daemon.agent_dir(name), "pid"), "it has a process")
    return read(daemon.agent_dir(name), "pid")


def test_a_tree_comes_up_is_adopted_and_comes_up_again(daemon: Daemon) -> None:
    declare(daemon, "lead", LEAD)
    declare(daemon, "a-child", CHILD)
    declare(daemon, "idle", "exec: sleep 1000\n")
    daemon.start()
    lead, child = daemon.agent_dir("lead"), daemon.agent_dir("a-child")
    wait_until(child.exists, "the child of what runs now is made")
    pids = [pid_of(daemon, "lead"), pid_of(daemon, "a-child")]
    assert read(child, "parent").startswith("agent:lead ")
    assert read(child, "env") == "GREETING=hello\n"
    assert read(daemon.agent_dir("idle"), "status") == "new\n"
    daemon.restart()
    assert [pid_of(daemon, "lead"), pid_of(daemon, "a-child")] == pids, "a crash ends nothing"
    assert daemon.stop() == 0
    daemon.start()
    wait_until(child.exists, "the child is made again")
    assert pid_of(daemon, "lead") != pids[0]
    assert pid_of(daemon, "a-child") != pids[1]
    assert read(daemon.agent_dir("idle"), "status") == "new\n"
    write(lead / "ctl", "kill")
    wait_dead(lead)
    daemon.restart()
    assert read(lead, "status") == "dead\n", "somebody stopped it"


def test_a_broken_file_changes_nothing_and_is_named_with_its_line(daemon: Daemon) -> None:
    path = declare(daemon, "lead", LEAD)
    daemon.start()
    pid = pid_of(daemon, "lead")
    declare(daemon, "lead", LEAD + "restart: sometimes\n")
    declare(daemon, "new", "exec: sleep 1000\nstart: true\n")
    reload(daemon)
    assert f"{path}:4: restart: \"sometimes\" is not one of no, on-failure" in log_of(daemon)
    assert pid_of(daemon, "lead") == pid
    assert pid_of(daemon, "new"), "another file is read all the same"
    declare(daemon, "lead", LEAD.replace("1000", "2000"))
    reload(daemon)
    assert "lead runs: it is changed when it has ended" in log_of(daemon)
    assert read(daemon.agent_dir("lead"), "exec") == "sleep 1000\n"
    write(daemon.agent_dir("lead") / "ctl", "kill")
    wait_until(lambda: "lead was changed" in log_of(daemon), "it is changed")
    assert read(daemon.agent_dir("lead"), "exec") == "sleep 2000\n"
    assert read(daemon.agent_dir("lead"), "status") == "new\n"


def test_a_result_of_before_a_change_stays_with_its_session(daemon: Daemon) -> None:
    declare(daemon, "once", "start: true\nexec: sh -c 'read x; echo result $x'\n"
                            "handoff.md: |\n  one\n")
    daemon.start()
    directory = daemon.agent_dir("once")
    wait_dead(directory)
    session = (directory / "session").resolve()
    declare(daemon, "once", "exec: sh -c 'read x; echo result $x'\nhandoff.md: |\n  two\n")
    reload(daemon)
    assert read(directory, "status") == "new\n"
    assert read(directory, "handoff.md") == "two\n"
    assert read(session, "result.md") == "result one\n"


def test_it_runs_as_its_owner_and_sees_what_that_may_see(daemon: Daemon) -> None:
    mine, secret = daemon.base / "mine", daemon.base / "secret"
    mine.mkdir()
    secret.mkdir(mode=0o700)
    (secret / "inner").mkdir()
    declare(daemon, "mine", f"owner: daemon\nstart: true\nmount: [{mine} /data ro]\n"
                            "exec: sh -c 'id -u; ls -d /data'\n")
    path = declare(daemon, "no", f"owner: daemon\nmount:\n  - {secret}/inner /data ro\n")
    daemon.start()
    wait_dead(daemon.agent_dir("mine"))
    assert read(daemon.agent_dir("mine"), "out") == "1\n/data\n"
    assert read(daemon.agent_dir("mine"), "owner") == "1\n"
    assert f"{path}:3: mount[0]: " in log_of(daemon)
    assert not daemon.agent_dir("no").exists()


def test_a_source_that_was_replaced_is_taken_at_the_next_reading(daemon: Daemon) -> None:
    source = daemon.base / "source"
    source.mkdir()
    declare(daemon, "coder", f"exec: ls /data\nmount: [{source} /data ro]\n")
    daemon.start()
    source.rename(daemon.base / "before")
    source.mkdir()
    (source / "here").touch()
    reload(daemon)
    write(daemon.agent_dir("coder") / "ctl", "start")
    wait_dead(daemon.agent_dir("coder"))
    assert read(daemon.agent_dir("coder"), "out") == "here\n"


def test_an_agent_is_exported_and_declared_again(daemon: Daemon) -> None:
    daemon.start()
    made = daemon.make("coder", "sh -c 'sleep 1000'", "Do it.\nAll of it.", mode="turn",
                       env="A=1\nB=x: y #z", limits="log_max=1048576\ntimeout=1h",
                       policy="allow coder_t agent:rev-* create", path="/opt/a\n/opt/b")
    files = [name for name in SHAPES if name != "parent"]
    before = {name: read(made, name) for name in files}
    exported = daemon.ctx("export", "coder")
    assert exported.returncode == 0, exported.stderr
    daemon.ctx("rm", "coder")
    declare(daemon, "coder", exported.stdout)
    reload(daemon)
    assert {name: read(made, name) for name in files} == before, exported.stdout
    assert read(made, "status") == "new\n"


# without a daemon


def check(
    *arguments: str, stdout: int | IO[str] = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "ctxfs.daemon", *arguments],
        stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip


def check_here(*arguments: str) -> tuple[int, str]:
    """The same in this process: what it returns, and says."""
    with tempfile.TemporaryFile("w+") as said, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", said)
        status = main([*arguments])
        said.seek(0)
        return status, said.read()


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory that other users reach, too."""
    with tempfile.TemporaryDirectory(prefix=f"{MARK}-", dir="/tmp") as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_the_configuration_is_checked_without_a_daemon_or_root(reachable: Path) -> None:
    config, agents = reachable / "config.yaml", reachable / "agents.d"
    config.write_text("grace: 1s\ndepht: 3\nfiles: many\n")
    agents.mkdir(mode=0o755)
    coder = agents / "coder.yaml"
    coder.write_text("exec: [\n")
    other = agents / "other.yaml"
    other.write_text("mode: once\nmodel:\n")
    found = check("--check-config", "--config", str(config))
    assert [line.partition(": ")[0] for line in found.stderr.splitlines()] == [
        f"{config}:2", f"{config}:3", f"{coder}:2", f"{other}:2",
    ]  # fmt: skip
    assert "depht: unknown setting; did you mean depth?" in found.stderr
    assert found.returncode == 1
    by_root = check_here("--check-config", "--config", str(config))
    assert by_root == (1, found.stderr)
    assert as_user(partial(check_here, "--check-config", "--config", str(config))) == by_root
    config.write_text("grace: 1s\n")
    coder.write_text("exec: sleep 1\n")
    other.unlink()
    right = check("--check-config", "--config", str(config))
    assert (right.returncode, right.stdout, right.stderr) == (0, "", "")
    config.write_text("nodes:\n  n2: {ssh: n2, users: {a: x, b: x}}\n")
    status, said = check_here("--check-config", "--config", str(config))
    assert (status, said.count("\n")) == (0, 1), "a warning"
    assert said.startswith(f"warning: {config}:2: nodes.n2.users.b: a is x there too")
    assert check("--check-config", "--config", str(reachable / "none")).returncode == 1


def test_the_schema_is_printed() -> None:
    found = check("--print-schema")
    assert found.returncode == 0
    assert "exec" in json.loads(found.stdout)["properties"]
    assert Status.NEW not in json.loads(found.stdout)["properties"]


def test_nobody_takes_what_is_printed() -> None:
    with Path("/dev/full").open("w") as full:
        found = check("--print-schema", stdout=full)
    said = "ctxd: standard output: No space left on device\n"
    assert (found.returncode, found.stderr) == (1, said)
    reader, writer = os.pipe()
    os.close(reader)
    found = check("--print-schema", stdout=writer)
    os.close(writer)
    assert (found.returncode, found.stderr) == (1, "")
