"""The same operations on two directories, by users of whom each has a process beside each."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from tests.posix.deviations import DEVIATIONS, Answer, Deviation
from tests.posix.operations import Operation
from tests.worlds.daemon import TIMEOUT
from tests.worlds.readiness import readable

_CHECKOUT: Final = Path(__file__).parents[2]
#: uid, gid, and other groups
User = tuple[int, int, tuple[int, ...]]


class Process:
    """A worker (worker.py) at work."""

    def __init__(self, user: User) -> None:
        uid, gid, groups = user
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.posix.worker", *map(str, (uid, gid, *groups))],
            cwd=_CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._commands: IO[bytes] = self._process.stdin
        self._answers: IO[bytes] = self._process.stdout

    def tell(self, verb: str, *arguments: Any) -> None:
        pickle.dump((verb, *arguments), self._commands)
        self._commands.flush()

    def hear(self) -> Answer:
        assert readable([self._answers.fileno()], TIMEOUT), "the call does not return"
        answer: Answer = pickle.load(self._answers)
        return answer

    def do(self, verb: str, *arguments: Any) -> object:
        """What must succeed."""
        self.tell(verb, *arguments)
        outcome, value = self.hear()
        assert outcome == "is", f"{verb}{arguments}: {value}"
        return value

    def close(self) -> None:
        self._commands.close()
        try:
            self._process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(TIMEOUT)
        self._answers.close()


class Pair:
    """Two directories that must answer alike. The first user makes and removes what is in them."""

    def __init__(self, backing: Path, space: Path, users: Sequence[User],
                 deviations: Sequence[Deviation]) -> None:
        self._deviations = deviations
        self._sides = tuple((directory, [Process(user) for user in users])
                            for directory in (backing, space))
        self._numbers = itertools.count(1)
        self._directories: tuple[Path, ...] = ()

    def close(self) -> None:
        for _, processes in self._sides:
            for each in processes:
                each.close()

    @contextmanager
    def fresh(self, first: Sequence[Operation]) -> Iterator[Pair]:
        """Empty directories in both, where some operations were done."""
        name = str(next(self._numbers))
        self._directories = tuple(directory / name for directory, _ in self._sides)
        for directory, (_, processes) in zip(self._directories, self._sides, strict=True):
            processes[0].do("mkdir", str(directory), 0o777)
            processes[0].do("chmod", str(directory), 0o777)
            for each in processes:
                each.do("begin", str(directory))
        try:
            for operation in first:
                self.do(operation)
            yield self
        finally:
            for directory, (_, processes) in zip(self._directories, self._sides, strict=True):
                for each in processes:
                    each.do("end")
                processes[0].do("remove", str(directory))

    def do(self, operation: Operation) -> None:
        """Fails if the answers differ, and no deviation says so."""
        user, verb, arguments = operation
        backing, space = (processes[user] for _, processes in self._sides)
        known = next((each for each in self._deviations if each.applies(operation)), None)
        space.tell(verb, *arguments)
        if known is not None and known.instead is None:
            got = space.hear()
            assert known.allowed(got), f"{operation}: {got}, but {known.reason}"
            return
        asked = operation if known is None or known.instead is None else known.instead(operation)
        backing.tell(asked[1], *asked[2])
        wanted, got = backing.hear(), space.hear()
        assert wanted[0] != "broken", f"{operation}: {wanted[1]}"
        assert got == wanted, f"{operation}: {got}, on the backing filesystem {wanted}"

    def compare(self) -> None:
        """Fails if what there is differs."""
        wanted, got = (processes[0].do("snapshot") for _, processes in self._sides)
        assert isinstance(wanted, list) and isinstance(got, list)
        for have, want in zip(got, wanted, strict=True):
            assert have == want, f"at the end: {have}, on the backing filesystem {want}"


@contextmanager
def pair(backing: Path, space: Path, users: Sequence[User],
         deviations: Sequence[Deviation] = DEVIATIONS) -> Iterator[Pair]:
    made = Pair(backing, space, users, deviations)
    try:
        yield made
    finally:
        made.close()
