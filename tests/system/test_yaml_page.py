"""The examples of ctxfs.yaml(5), as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.records.config import load_config
from tests.worlds.daemon import TIMEOUT, Daemon, read, running, wait_status, wait_until
from tests.worlds.pages import mdoc_blocks

ETC = "/etc/ctxfs"


def blocks() -> list[str]:
    return mdoc_blocks("ctxfs.yaml.5")


def files(base: Path) -> dict[str, str]:
    """By name below the directory of the configuration, with what is there on this machine."""
    named = {}
    for block in blocks():
        if match := re.match(rf"# {ETC}/(\S+)\n", block):
            text = block.replace("/srv/project", str(base / "project"))
            named[match[1]] = text.replace("owner: alice", "owner: daemon")
    return named


@pytest.fixture
def configured() -> Iterator[Daemon]:
    """A daemon to be started, with all files of the page beside its configuration."""
    daemon = Daemon(config="depth: 8\n")
    (daemon.base / "project").mkdir()
    (daemon.base / "agents.d").mkdir(mode=0o755)
    for name, text in files(daemon.base).items():
        if name != "config.yaml":
            path = daemon.base / name
            path.write_text(text)
            path.chmod(0o644)
    yield daemon


def test_the_settings_are_ones(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(files(tmp_path)["config.yaml"])
    config = load_config(tmp_path / "config.yaml", required=True)
    assert (config.grace, [*config.networks]) == (10.0, ["anthropic", "web"])
    assert ([*config.nodes], config.placed.max) == (["n2", "gpu", "pod"], 64)


def test_the_agents_come_up(configured: Daemon) -> None:
    with running(configured) as daemon:
        lead, child = daemon.agent_dir("lead"), daemon.agent_dir("reviewer")
        wait_status(lead, "busy")
        wait_until(child.exists, "the child is made")
        wait_status(child, "busy", "idle")  # its first message is the handoff
        assert read(lead, "owner") == "1\n"
        assert read(lead, "restart") == "on-failure\n"
        assert "grace=10s" in read(lead, "limits")
        assert read(child, "parent").startswith("agent:lead ")
        assert read(child, "meta.json") == '{"team":"parsers","rank":2}\n'
        assert not daemon.agent_dir("broken").exists()
        wait_until(lambda: "one paragraph" in read(child, "out"), "it reads what it is to do")


def test_mistakes_are_told_as_the_page_says(configured: Daemon) -> None:
    command, _, said = next(b for b in blocks() if b.startswith("$ ctxd"))[2:].partition("\n")
    config = configured.base / "config.yaml"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ctxfs.daemon", *command.split()[1:], "--config", str(config)],
            capture_output=True, text=True, timeout=TIMEOUT, check=False,
        )  # fmt: skip
        assert done.stderr.replace(str(configured.base), ETC) == said
        assert done.returncode == 1
        # the first one on the page
        line = next(block for block in blocks() if block.startswith(f"{ETC}/agents.d/coder"))
        coder = configured.base / "agents.d" / "coder.yaml"
        coder.write_text("exec: sleep 1\n\nrestrat: always\n")
        again = subprocess.run(done.args, capture_output=True, text=True, timeout=TIMEOUT,
                               check=False)
        assert line in again.stderr.replace(str(configured.base), ETC)
    finally:
        subprocess.run(["rm", "-r", str(configured.base)], check=True)
