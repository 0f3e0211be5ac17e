"""Meters that die at a chosen step: of each line that is read, one that lives until it has executed
so many lines of what serves requests. 0: until it is told to end. All are forks of one process,
which has imported what a meter needs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import runtime.metering
from runtime.metering.main import main
from runtime.metering.passing import Meter

_SERVES = tuple(
    f"{Path(runtime.metering.__file__).parent}/{name}.py"
    for name in ("passing", "charging", "counters", "reading")
)


def _die_after(lines: int) -> None:
    left = lines
    serves = False

    def at_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
        return at_line

    def at_call(frame: FrameType, _: str, __: Any) -> Any:
        nonlocal serves
        serves |= frame.f_code is Meter.serve.__code__
        return at_line if serves and frame.f_code.co_filename in _SERVES else None

    sys.settrace(at_call)


def _serve(config: str) -> None:
    for line in sys.stdin:
        child = os.fork()
        if not child:
            if lines := int(line):
                _die_after(lines)
            os._exit(main(["--config", config]))
        print(child, flush=True)
        sys.stdin.readline()
        os.kill(child, signal.SIGTERM)  # it may be dead, and nobody else has its pid meanwhile
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


class DyingMeters:
    """One at a time."""

    def __init__(self, config: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(config)], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
        self._pid = 0

    def start(self, lines: int = 0) -> None:
        """Returns when it takes connections."""
        self._pid = int(self._told(str(lines)))
        assert self._process.stderr
        while (said := self._process.stderr.readline()) != "ready\n":
            assert said, "no meter"

    def is_dead(self) -> bool:
        return ") Z " in Path(f"/proc/{self._pid}/stat").read_text()

    def end(self) -> bool:
        """Whether it lived until now, and what it had to do is done."""
        status = int(self._told("end"))
        assert status in (0, -signal.SIGKILL)
        return status == 0

    def close(self) -> None:
        self._process.communicate(timeout=30)

    def _told(self, word: str) -> str:
        assert self._process.stdin and self._process.stdout
        print(word, file=self._process.stdin, flush=True)
        return self._process.stdout.readline()


if __name__ == "__main__":
    _serve(sys.argv[1])
