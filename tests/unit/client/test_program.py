"""The client as one file: what `bin/ctx` and the handles are."""

from __future__ import annotations

import ast
import binascii
import os
import shutil
import subprocess
import sys
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any

import pytest

import client.unpack
from client.exits import NOT_RUNNING
from ctxfs.program import pack
from tests.unit.client.fakes import DONE, START, FakeAgent, FakeRoot, message


def python(program: Path | str, *argv: str, **options: Any) -> str:
    command = [sys.executable, "-IS", str(program), *argv]
    said: bytes = subprocess.check_output(command, **options)
    return said.decode()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A program of which the byte code says another thing than the source."""
    unpack = Path(client.unpack.__file__).read_text()
    sources = {"client": "", "client.main": "def program():\n    print('compiled')\n"}
    path = tmp_path / "small"
    said, other = (binascii.b2a_base64(f"{text}\n".encode(), newline=False) for text in (
        sources["client.main"], sources["client.main"].replace("compiled", "source")))
    path.write_bytes(pack(sources, unpack=unpack).replace(said, other))
    return path


def test_it_starts_isolated(program: Path) -> None:
    first, _, _ = program.read_bytes().partition(b"\n")
    assert first.startswith(b"#!/usr/bin/env -S python3 -ISc ")
    assert len(first) < 256  # as much as the kernel reads


def test_that_it_cannot_be_opened_is_no_wrong_input(program: Path, tmp_path: Path) -> None:
    """As when the daemon dies between the execution of a handle and its interpreter's open."""
    handle = shutil.copy(program, tmp_path / "Report")
    python3 = tmp_path / "python3"
    python3.write_text(f'#!/bin/sh\nrm {handle}\nexec {sys.executable} "$@"\n')
    python3.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.defpath}"}
    done = subprocess.run([handle, "{}"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (NOT_RUNNING, "")
    assert done.stderr == f"ctx: [Errno 2] No such file or directory: '{handle}'\n"


def test_every_module_is_in_it(program: Path) -> None:
    lines = [line.split() for line in program.read_bytes().splitlines() if line[:1] == b"#"]
    sources = {binascii.a2b_base64(words[2]) for words in lines if words[0][:7] == b"#client"}
    for path in Path(client.__file__).parent.glob("*.py"):
        if path.stem != "unpack":
            assert path.read_bytes() + b"\n" in sources


def test_byte_code_is_for_the_python_that_made_it(small: Path) -> None:
    assert python(small) == "compiled\n"
    data = small.read_bytes()
    small.write_bytes(data.replace(repr(MAGIC_NUMBER).encode(), b"b'another'"))
    assert python(small) == "source\n"


def test_it_does_the_same_from_its_sources(program: Path, tmp_path: Path) -> None:
    other = tmp_path / "ctx"
    data = program.read_bytes().replace(repr(MAGIC_NUMBER).encode(), b"b'another'")
    assert data != program.read_bytes()
    other.write_bytes(data)
    assert python(other, "help") == python(program, "help")


def test_no_other_module_of_its_name_is_imported(small: Path, tmp_path: Path) -> None:
    (tmp_path / "client").mkdir()
    (tmp_path / "client" / "main.py").write_text("def program():\n    print('another')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert python(small, cwd=tmp_path, env=environment) == "compiled\n"


@pytest.mark.parametrize(
    "argv",
    [
        ["get", "x", "status"],
        ["ps"],
        ["log", "-n", "3", "x"],
        ["mcp", "--agent", "x"],
    ],
)
def test_heavy_modules_are_not_loaded(root: FakeRoot, program: Path, argv: list[str]) -> None:
    root.agent("x", status="busy")
    root.list_agents()
    code = (
        "import os, sys\n"
        "heavy = ('argparse', 'collections', 'contextlib', 'dataclasses', 'enum', 'functools',"
        " 'json', 're', 'shlex', 'signal', 'socket', 'subprocess', 'threading', 'typing')\n"
        "def end(status, end=os._exit):\n"
        "    print([name for name in heavy if name in sys.modules], flush=True)\n"
        "    end(status)\n"
        "os._exit = end\n"
        "del sys.argv[0]\n"
        "c = open(sys.argv[0], 'rb').read()\n"
        "exec(c)\n"
    )
    command = [sys.executable, "-IS", "-c", code, str(program), *argv]
    done = subprocess.run(command, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert ast.literal_eval(done.stdout.splitlines()[-1]) == []


def test_a_handle_is_the_agent_it_is_named_after(
    root: FakeRoot, tmp_path: Path, program: Path
) -> None:
    root.agent("coder", status="idle")
    handle = root.path / "agent" / "coder"
    shutil.copy(program, handle)
    link = tmp_path / "link"
    link.symlink_to(handle)
    for called, argv, stdin, text in (
        (handle, ["--root", "fix"], b"", "--root fix"),
        (handle, ["--", "-h"], b"", "-h"),
        (link, [], b"from stdin\n", "from stdin\n"),
    ):
        fake = FakeAgent(root, START, message("done it"), DONE, path="agent/coder.sock")
        environment = {**os.environ, "CTX_ROOT": "/nowhere"}
        process = subprocess.run([called, *argv], input=stdin, capture_output=True, env=environment)
        fake.thread.join()
        assert (process.returncode, process.stdout, process.stderr) == (0, b"done it\n", b"")
        assert fake.requests[0]["input"] == text
        (root.path / "agent" / "coder.sock").unlink()
    process = subprocess.run([handle, "hi"], capture_output=True)
    assert process.returncode == 69
    assert subprocess.run([handle, "--help"], capture_output=True).returncode == 0
    assert subprocess.run([handle], stdin=subprocess.DEVNULL, capture_output=True).returncode == 2
