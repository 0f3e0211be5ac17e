"""Programs in C and Python share numbers: a constant that both name has to be the same in both.

The programs are compiled with another C library than the interpreter is.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import select
import shutil
import signal
import socket
import stat
import subprocess
import termios
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[4] / "runtime" / "native"
_NAMED = (errno, fcntl, os, resource, select, signal, socket, stat, termios)
_INCLUDED = ("errno.h", "fcntl.h", "poll.h", "sched.h", "signal.h", "stdio.h", "sys/epoll.h",
             "sys/mman.h", "sys/resource.h", "sys/socket.h", "sys/stat.h", "sys/wait.h",
             "termios.h", "unistd.h")  # fmt: skip
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def _shared(text: str) -> dict[str, int]:
    """The constants that a program in C names, and Python too, with Python's numbers."""
    found = {}
    for name in set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", _COMMENT.sub("", text))):
        for module in _NAMED:
            if isinstance(value := getattr(module, name, None), int):
                found[name] = int(value)
    return found


def _numbers(names: list[str], directory: Path) -> dict[str, int]:
    """What they are in the C library of the programs."""
    source = "".join([
        "#define _GNU_SOURCE\n", *(f"#include <{header}>\n" for header in _INCLUDED),
        "int main(void)\n{\n",
        *(f'#ifdef {name}\nprintf("{name} %lld\\n", (long long){name});\n#endif\n'
          for name in names),
        "}\n",
    ])  # fmt: skip
    (directory / "numbers.c").write_text(source)
    program = directory / "numbers"
    subprocess.run(["musl-gcc", "-static", "-o", program, program.with_suffix(".c")], check=True)
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in map(str.split, said.splitlines())}


@pytest.mark.skipif(shutil.which("musl-gcc") is None, reason="needs musl-gcc: install musl-tools")
def test_constants_have_the_same_numbers_in_both(tmp_path: Path) -> None:
    text = "".join(path.read_text() for path in sorted(NATIVE.glob("*.[ch]")))
    python = _shared(text)
    musl = _numbers(sorted(python), tmp_path)
    assert {"SIGTERM", "SIGUSR1", "O_PATH", "EAGAIN"} <= set(musl)
    differing = [f"{name} is {musl[name]} in C and {value} in Python"
                 for name, value in python.items() if musl.get(name, value) != value]  # fmt: skip
    assert not differing, "pass their numbers to the program"


@pytest.mark.skipif(shutil.which("musl-gcc") is None, reason="needs musl-gcc: install musl-tools")
def test_one_that_differs_is_found(tmp_path: Path) -> None:
    """As SIGRTMIN, with which the guard ended the daemon instead of asking it."""
    python = _shared("kill(daemon, SIGRTMIN); /* not SIGRTMAX */")
    assert python == {"SIGRTMIN": signal.SIGRTMIN}
    assert _numbers(["SIGRTMIN"], tmp_path)["SIGRTMIN"] != signal.SIGRTMIN
