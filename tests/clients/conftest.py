"""These tests need real command lines, which ``make test-clients`` installs, and are collected
only there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worlds.daemon import Daemon

collect_ignore_glob = [] if os.environ.get("CTXFS_CLIENTS") else ["test_*.py"]


class Model:
    """The scripted model, at a port and at a socket."""

    def __init__(self, base: Path, socket: Path, *options: str) -> None:
        self.socket = socket
        self.log = base / "model.log"
        self.log.touch()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.clients.model", str(self.socket), str(self.log),
             *options],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def requests(self) -> list[dict[str, Any]]:
        """Those that a model answers, oldest first."""
        lines = map(json.loads, self.log.read_text().splitlines())
        return [line for line in lines if line.get("tools")]


@pytest.fixture
def socket() -> Iterator[Path]:
    """Where the model answers, which the daemon's configuration may name."""
    with tempfile.TemporaryDirectory(prefix="ctxtest-model-") as directory:
        os.chmod(directory, 0o755)
        yield Path(directory) / "model.sock"


@pytest.fixture
def model(daemon: Daemon, socket: Path) -> Iterator[Model]:
    made = Model(daemon.base, socket)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _told(request: pytest.FixtureRequest) -> Iterator[None]:
    """How long each takes is a part of what is to be found out."""
    begun = time.monotonic()
    yield
    print(f"  {time.monotonic() - begun:.1f} s")
