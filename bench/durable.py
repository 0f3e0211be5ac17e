"""Durable trees: a space of ``shared/`` beside other ways to the same filesystem."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from bench.measure import Episode, Pair, Part, Side, undisturbed
from bench.setting import Setting

_SPACE: Final = "bench"
#: of the repository that is cloned
_DIRECTORIES: Final = 10
_FILES: Final = 10
_CONTENT: Final = b"a line of a file\n" * 64


def _places(setting: Setting, stack: ExitStack) -> Iterator[tuple[str, Path]]:
    """(name, directory) of the space, and of what is compared with it, all empty."""
    space = setting.ctx / "shared" / _SPACE
    for name, directory in (
        ("shared", space),
        ("passthrough", setting.passthrough / "through"),
        ("backing", setting.backing / "direct"),
    ):
        directory.mkdir()
        stack.callback(shutil.rmtree, directory)
        yield name, directory


def create_sides(setting: Setting, stack: ExitStack) -> tuple[Side, list[Side]]:
    """Files of their own names, created, written and closed."""

    def side(name: str, directory: Path) -> Side:
        numbers = itertools.count()

        def call() -> None:
            fd = os.open(f"{directory}/{next(numbers)}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            os.write(fd, _CONTENT)
            os.close(fd)

        return Side(name=name, call=call)

    subject, *references = [side(name, where) for name, where in _places(setting, stack)]
    return subject, references


def _git(environment: Mapping[str, str], *words: str) -> None:
    subprocess.run(["git", *words], env=environment, stdin=subprocess.DEVNULL, check=True)


def clone_pairs(row: str, setting: Setting, stack: ExitStack) -> list[Pair]:
    """``git clone`` of a small repository of the backing filesystem, which copies its objects."""
    home = setting.backing / "git"
    home.mkdir()
    stack.callback(shutil.rmtree, home)
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "GIT_CONFIG_NOSYSTEM": "1"}
    source = home / "source"
    _git(environment, "init", "--quiet", "--initial-branch=main", str(source))
    for number in range(_DIRECTORIES):
        directory = source / f"d{number}"
        directory.mkdir()
        for position in range(_FILES):
            (directory / f"f{position}").write_bytes(b"%d %d\n" % (number, position) + _CONTENT)
    _git(environment, "-C", str(source), "add", ".")
    identity = ("-c", "user.name=bench", "-c", "user.email=bench@localhost")
    _git(environment, "-C", str(source), *identity, "commit", "--quiet", "--message=all")

    def episode(name: str, directory: Path) -> Episode:
        target = directory / "clone"

        def run() -> dict[str, float]:
            with undisturbed():
                begin = time.perf_counter_ns()
                _git(environment, "clone", "--quiet", "--no-hardlinks", str(source), str(target))
                taken = time.perf_counter_ns() - begin
            shutil.rmtree(target)
            return {"clone": taken}

        return Episode(name=name, run=run)

    parts = [
        Part(name=name, episode=episode(name, where), time="clone")
        for name, where in _places(setting, stack)
    ]
    for part in parts:
        part.episode.run()
    return [Pair(row=row, subject=parts[0], reference=part) for part in parts[1:]]
