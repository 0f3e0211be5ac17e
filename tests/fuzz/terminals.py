"""The part of the monitor that takes what programs write on terminals and what viewers say, in a
process of its own (terminal.c), which ends if it does what it must not."""

from __future__ import annotations

import struct
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[2]
_FLAGS: Final = ("-std=gnu11", "-g", "-O1", "-fsanitize=address,undefined")
_LENGTH: Final = struct.Struct("=I")


class Terminal:
    """The process; whoever asks is told into which modes another terminal would be put."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ctxfs-fuzz-")
        program = Path(self._directory.name) / "terminal"
        source = Path(__file__).with_name("terminal.c")
        include = f"-I{_ROOT / 'runtime' / 'native'}"
        words: list[str | Path] = ["gcc", *_FLAGS, "-fno-sanitize-recover=all", include]
        words += ["-o", program, source]
        subprocess.run(words, check=True)
        self._process = subprocess.Popen(
            [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def ask(self, steps: bytes) -> bytes:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(_LENGTH.pack(len(steps)) + steps)
        process.stdin.flush()
        head = process.stdout.read(_LENGTH.size)
        assert head, process.stderr.read().decode()
        return process.stdout.read(_LENGTH.unpack(head)[0])


@cache
def terminal() -> Terminal:
    return Terminal()


def step(kind: str, data: bytes) -> bytes:
    return kind.encode() + struct.pack(">H", len(data)) + data
