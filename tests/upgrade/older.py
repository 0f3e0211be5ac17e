"""A daemon of an earlier version, and this one's after it on the same state and cgroup."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

from tests.worlds.daemon import TIMEOUT, Daemon, wait_until, write
from tests.worlds.stages import AT_GATE

HOUSE = Path(__file__).resolve().parents[2]
#: at the gate it looks whether the tree is there, as somebody whom an earlier version started
ONCE = f"sh -c 'echo got $CTX_RUN; {AT_GATE}; cat $CTX_SELF/status; echo over'"


class Successor(Daemon):
    """``start_older`` starts the version that is installed in ``older``, ``start`` this one."""

    def __init__(self, older: Path, config: str = "") -> None:
        super().__init__(config=f"grace: 500ms\nrestart_max: 20\n{config}")
        self._older = older
        self._earlier: subprocess.Popen[bytes] | None = None
        self.gate = self.base / "gate"
        self.gate.mkdir()

    def start_older(self) -> None:
        python = str(self._older / ".venv/bin/python")
        with open(self.log, "ab") as log:
            self._earlier = subprocess.Popen(
                # without the directory it is started in, which has this version's modules
                self._placed([python, "-P", "-m", "ctxfs.daemon", *self.arguments]),
                stderr=log,
                start_new_session=True,
            )
        wait_until(lambda: b"ready\n" in self.log.read_bytes(), "the older daemon is ready")

    def kill_older(self) -> None:
        assert self._earlier is not None
        self._earlier.kill()
        self._earlier.wait(TIMEOUT)
        self._earlier = None
        wait_until(lambda: not self.own.processes(), "what belonged to the older daemon is gone")

    def abandon(self) -> None:
        """Leaves nothing of what a failed test made."""
        if self._earlier is not None:
            self.kill_older()

    def open_gate(self) -> None:
        (self.gate / "open").touch()

    # agents

    def begin(self, name: str, program: str = ONCE, **files: str) -> Path:
        """A started agent that sees the gate, unless its parent's view has it."""
        if "parent" not in files:
            files = {"mount": f"{self.gate} /gate ro", **files}
        return self.run(name, program, **files)

    def task(self, name: str, title: str, command: str) -> Path:
        directory = self.agent_dir(name) / "task" / title
        directory.mkdir()
        write(directory / "cmd", command)
        write(directory / "ctl", "start")
        return directory

    def wait_for(self, name: str, title: str, on: str, **files: str) -> Path:
        directory = self.agent_dir(name) / "waiting" / title
        directory.mkdir()
        for file, text in {**files, "on": on}.items():
            write(directory / file, text)
        return directory


class Executed(Successor):
    """``start`` starts the older version from a copy, ``execute_this`` puts this version in its
    place and has the daemon execute it."""

    executed = True

    def __init__(self, older: Path, config: str = "") -> None:
        super().__init__(older, config)
        self._program = self.base / "program"
        self._copy(older)

    def alter(self, file: str, before: str, after: str) -> None:
        """Changes the program, which has the text ``before``."""
        source = self._program / file
        text = source.read_text()
        assert before in text, f"{file} has no {before}"
        source.write_text(text.replace(before, after))

    def _copy(self, version: Path) -> None:
        for package in ("ctxfs", "runtime", "client"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(version / package, self._program / package, ignore=ignored)

    def command(self, *more: str) -> list[str]:
        # python -m looks into the working directory first
        python = str(self._older / ".venv/bin/python")
        enter = ["env", "-C", str(self._program), python]
        return [*enter, "-m", "ctxfs.daemon", *self.arguments, *more]

    def operations(self) -> str:
        """Where the program says what can be asked for."""
        return (self._program / "runtime" / "sockets" / "operations.py").read_text()

    def become_this(self) -> None:
        """Puts this version in the place of the program."""
        # not the directory itself, in which the daemon runs
        for package in self._program.iterdir():
            shutil.rmtree(package)
        self._copy(HOUSE)

    def execute_this(self) -> dict[str, Any]:
        """What is answered. No process is started, which would close what is open here."""
        self.become_this()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT)
            connection.connect(str(self.path("ctxd.sock")))
            connection.sendall(b'{"op":"reexec"}\n')
            with connection.makefile("rb") as answers:
                found: dict[str, Any] = json.loads(answers.readline())
                return found
