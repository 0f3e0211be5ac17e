"""Fuzzes every target for a while: ``python -m tests.fuzz [SECONDS] [TARGET...]``.

With atheris where it is installed (``pip install .[fuzz]``): guided by what of the code was
reached. Otherwise by changes to the corpus at random. Each target has a process and its share
of the time; what was found worth keeping is in tests/fuzz/corpus, and replayed by the tests.
"""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
import tempfile
import time
from typing import Final

from tests.fuzz.targets import TARGETS, corpus, run

#: a process of its own takes it, which does not tell what was reached
_ELSEWHERE: Final = ("viewers",)
#: what bytes are made of that have something to do with the formats
_WORDS: Final = (
    *(b"{", b"}", b"[", b"]", b'"', b"\n", b"\t", b" ", b"\0", b"\\ud800", b"\\", b":", b","),
    *(b"allow x_t agent:* read", b"/", b"..", b"hide", b"ro", b"1e999", b"9" * 5000, b"timer"),
    *(b"\x1b[?1049h", b"\x1b[>7u", b"\x1b]0;", b"\x1b[", b"o\0\x20", b"1\0\x06w80x24", b"\x9b6n"),
    *(b"\xff", "\u00a0".encode(), "\u0663".encode(), b"\x1b[2J", b"*", b"-"),
)


def _guided(name: str, seconds: float) -> int:
    """With atheris; the exit status of its process."""
    command = [sys.executable, "-m", "tests.fuzz.guided", name, f"-max_total_time={seconds:.0f}",
               "-max_len=8192", "-timeout=20", "-rss_limit_mb=2048", "-print_final_stats=1",
               # what fails is part of the corpus from then on
               f"-artifact_prefix={corpus(name)}/"]
    with tempfile.TemporaryDirectory(prefix="ctxfs-fuzz-") as grown:
        return subprocess.run([*command, grown, str(corpus(name))], check=False).returncode


def _changed(chance: random.Random, data: bytes) -> bytes:
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0:
                data = data[:at] + chance.choice(_WORDS) + data[at:]
            case 1:
                data = data[:at] + data[at + chance.randint(1, 9):]
            case 2:
                data = data[:at] + bytes([chance.randrange(256)]) + data[at + 1:]
            case _:
                data = data[:at] + data[chance.randrange(len(data) + 1):]
    return data[:65536]


def blind(name: str, seconds: float, seed: int = 0) -> int:
    """Without atheris: how many inputs were tried. Raises what a target raises, with a note."""
    chance = random.Random(f"{name} {seed}")
    directory = corpus(name)
    found = [path.read_bytes() for path in sorted(directory.glob("*"))] or [b""]
    until = time.monotonic() + seconds
    tried = 0
    while time.monotonic() < until:
        data = _changed(chance, chance.choice(found))
        tried += 1
        try:
            run(name, data)
        except BaseException as error:
            error.add_note(f"{name}: {data!r}")
            raise
    return tried


def main(arguments: list[str]) -> int:
    seconds = float(arguments[0]) if arguments else 600.0
    names = arguments[1:] or sorted(TARGETS)
    share = max(2.0, seconds / len(names))
    guided = importlib.util.find_spec("atheris") is not None
    if not guided:
        print("atheris is not installed: changes at random, which reach less "
              "(pip install .[fuzz])", flush=True)
    wrong = []
    for name in names:
        print(f"== {name}: {share:.0f} s", flush=True)
        try:
            if guided and name not in _ELSEWHERE:
                failed = _guided(name, share) != 0
            else:
                print(f"{blind(name, share)} inputs", flush=True)
                failed = False
        except Exception as error:
            print(f"{error!r} {error.__notes__}", flush=True)
            failed = True
        if failed:
            wrong.append(name)
    print(f"found something: {', '.join(wrong)}" if wrong else "nothing was found", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
