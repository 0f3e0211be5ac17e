"""Durable trees answer as the filesystem behind them: the same operations on both, at random."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from tests.posix.operations import Operation, operations
from tests.posix.pair import Pair, User, pair
from tests.worlds.daemon import MARK, Daemon

#: two ordinary users who share a group
_GROUP: Final = 61099
_FIRST: Final = (61011, 61011, (_GROUP,))
_SECOND: Final = (61012, 61012, (_GROUP,))
_ROOT: Final = (0, 0, ())
_USERS: Final[tuple[User, ...]] = (_ROOT, _FIRST, _SECOND)
_IDS: Final = [0, 61011, 61012, _GROUP]
#: What the users meet: a file, a directory of the first one, and one like /tmp.
_PRELUDE: Final[tuple[Operation, ...]] = (
    (1, "open", (0, "a", os.O_RDWR | os.O_CREAT, 0o644)),
    (1, "write", (0, b"0123456789")),
    (1, "mkdir", ("d", 0o755)),
    (0, "mkdir", ("t", 0o777)),
    (0, "chmod", ("t", 0o1777)),
    (2, "open", (0, "t/b", os.O_RDWR | os.O_CREAT, 0o664)),
)


def _sequences(made: Pair, users: int, prelude: tuple[Operation, ...]) -> type[Any]:
    class Sequences(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self._fresh: AbstractContextManager[Pair] = made.fresh(prelude)
            self._fresh.__enter__()

        @rule(operation=operations(list(range(users)), _IDS))
        def does(self, operation: Operation) -> None:
            made.do(operation)

        def teardown(self) -> None:
            try:
                made.compare()
            finally:
                self._fresh.__exit__(None, None, None)

    return Sequences


def _run(made: Pair, users: int, prelude: tuple[Operation, ...], **how: Any) -> None:
    run_state_machine_as_test(
        _sequences(made, users, prelude),
        settings=settings(deadline=None, database=None, print_blob=False,
                          suppress_health_check=list(HealthCheck), **how),
    )


@contextmanager
def _shared(daemon: Daemon, name: str) -> Iterator[Pair]:
    """A space of root that is open to all, and a plain directory of the same filesystem."""
    backing, space = daemon.base / f"backing-{name}", daemon.root / "shared" / name
    for directory in (backing, space):
        directory.mkdir()
        directory.chmod(0o777)
    with pair(backing, space, _USERS) as made:
        yield made


@contextmanager
def _home(daemon: Daemon) -> Iterator[Pair]:
    """The data of the first user."""
    backing, data = daemon.base / "backing-home", daemon.root / "home" / str(_FIRST[0]) / "data"
    backing.mkdir(mode=0o700)
    os.chown(backing, _FIRST[0], _FIRST[1])
    # made for whoever is the first to look: nobody else can be
    subprocess.run(["setpriv", "--reuid", str(_FIRST[0]), "--clear-groups", "ls", str(data)],
                   check=True)
    with pair(backing, data, (_ROOT, _FIRST)) as made:
        yield made


@contextmanager
def _plain() -> Iterator[tuple[Pair, Path]]:
    """Two plain directories, and the second of them."""
    made = Path(tempfile.mkdtemp(prefix=f"{MARK}-", dir="/tmp"))
    places = [made / name for name in ("one", "other")]
    try:
        made.chmod(0o755)
        for place in places:
            place.mkdir()
            place.chmod(0o777)
        with pair(places[0], places[1], _USERS, ()) as both:
            yield both, places[1]
    finally:
        shutil.rmtree(made)


def test_a_difference_is_told() -> None:
    with _plain() as (made, other), made.fresh(()):
        (other / "1" / "a").mkdir()
        with pytest.raises(AssertionError, match="EEXIST"):
            made.do((0, "mkdir", ("a", 0o755)))
        made.compare()
        (other / "1" / "a").chmod(0o700)
        with pytest.raises(AssertionError, match="0700"):
            made.compare()


def test_two_plain_directories_answer_alike() -> None:
    """The comparison takes nothing for a difference that is none."""
    with _plain() as (made, _):
        _run(made, len(_USERS), _PRELUDE, max_examples=20, stateful_step_count=40,
             derandomize=True)


def test_only_the_umask_of_who_makes_a_file_takes_bits_of_its_mode(shared_daemon: Daemon) -> None:
    with _shared(shared_daemon, "umask") as made, made.fresh(()):
        for user in range(len(_USERS)):
            made.do((user, "umask", (0,)))
            for verb, arguments in (
                ("open", (0, f"open-{user}", os.O_RDONLY | os.O_CREAT, 0o777)),
                ("open", (0, f"excl-{user}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)),
                ("mkdir", (f"mkdir-{user}", 0o777)),
                ("mkfifo", (f"mkfifo-{user}", 0o666)),
            ):
                made.do((user, verb, arguments))
        made.compare()


def test_a_space_answers_as_the_filesystem_behind_it(shared_daemon: Daemon) -> None:
    with _shared(shared_daemon, "short") as made:
        _run(made, len(_USERS), _PRELUDE, max_examples=60, stateful_step_count=40,
             derandomize=True)


def test_the_data_of_a_home_answer_as_the_filesystem_behind_them(shared_daemon: Daemon) -> None:
    with _home(shared_daemon) as made:
        _run(made, 2, _PRELUDE[:3], max_examples=20, stateful_step_count=40, derandomize=True)


@pytest.mark.long
def test_spaces_answer_so_at_length(shared_daemon: Daemon) -> None:
    """As often as CTXFS_TEST_EXAMPLES says, each time others (make test-posix)."""
    examples = int(os.environ.get("CTXFS_TEST_EXAMPLES", "2000"))
    with _shared(shared_daemon, "long") as made:
        _run(made, len(_USERS), _PRELUDE, max_examples=examples, stateful_step_count=60)
