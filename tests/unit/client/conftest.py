"""The client over fake trees: neither root nor a mount is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from client import main
from ctxfs.program import program as client_program
from tests.unit.client.fakes import PARTS, FakeRoot, Run


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client as the one file that sandboxes see."""
    path = tmp_path_factory.mktemp("program") / "ctx"
    path.write_bytes(client_program())
    path.chmod(0o755)
    return path


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRoot:
    path = tmp_path / "ctx"
    monkeypatch.setenv("CTX_ROOT", str(path))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    return FakeRoot(path)


@pytest.fixture
def run(root: FakeRoot, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the client in this process, with the given standard input."""

    def call(*argv: str, stdin: bytes = b"") -> tuple[int, str, str]:
        root.list_agents()
        reader, writer = os.pipe()
        os.write(writer, stdin)
        os.close(writer)
        saved = os.dup(0)
        os.dup2(reader, 0)
        try:
            status = main.main(list(argv))
        finally:
            os.dup2(saved, 0)
            os.close(saved)
            os.close(reader)
        captured = capfd.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def made_agents_are_full(root: FakeRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `mkdir` fill a fresh agent, and `rmdir` remove it, as the file system does."""
    mkdir = os.mkdir

    def fill(path: Any, mode: int = 0o777) -> None:
        mkdir(path, mode)
        if not isinstance(path, str):
            return  # it is of the test, which fills it itself
        if path.endswith(".d"):
            root.fill(Path(path))
        elif Path(path).parent.name in PARTS:
            root.fill_part(Path(path))

    def remove(path: str) -> None:
        subprocess.run(["rm", "-r", path], check=True)

    monkeypatch.setattr(os, "mkdir", fill)
    monkeypatch.setattr(os, "rmdir", remove)


@pytest.fixture
def inside(root: FakeRoot) -> Path:
    """An agent `x` that the client runs in."""
    (root.path / "self").symlink_to("agent/x.d")
    return root.agent("x", status="busy")


@pytest.fixture
def spawned(program: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start the client as a program; whatever still runs at the end is killed."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*argv: str, **options: Any) -> subprocess.Popen[bytes]:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        options.setdefault("stdin", subprocess.DEVNULL)
        command = [sys.executable, "-IS", str(program), *argv]
        processes.append(subprocess.Popen(command, **options))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()
