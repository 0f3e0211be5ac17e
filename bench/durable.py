"""Durable trees: a space of ``shared/`` beside other ways to the same filesystem."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.agents import await_busy, await_end, fresh_name, make, start, write
from bench.measure import Episode, Pair, Part, Side, Sides, undisturbed
from bench.setting import Setting

#: where an agent has the backing filesystem in its view
_BACKING: Final = Path("/backing")
#: of the repository that is cloned
_DIRECTORIES: Final = 10
_FILES: Final = 10
_CONTENT: Final = b"a line of a file\n" * 64
#: until the daemon knows that a space is empty
_MEASURED_SECONDS: Final = 60.0


def _space(setting: Setting, stack: ExitStack) -> Path:
    """Where a new space really is, by the path that all have for it."""
    space = setting.ctx / "shared" / fresh_name()
    space.mkdir()
    tree = (space / "data").resolve()
    stack.callback(_remove, space, tree)
    return tree


def _remove(space: Path, tree: Path) -> None:
    """A space goes once the daemon has seen that it is empty, and measured is it now and then."""
    for entry in list(tree.iterdir()):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    deadline = time.monotonic() + _MEASURED_SECONDS
    while True:
        try:
            return space.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def _direct(setting: Setting, tree: Path) -> Path:
    """The same directory by the path that the backing filesystem has for it. Files of two
    directories may differ in speed: ext4 searches long where many inodes were freed of late."""
    return next(
        place for place in setting.base.glob("state/tree/space/*/*") if place.samefile(tree)
    )


def _agent(setting: Setting, stack: ExitStack) -> tuple[int, Path]:
    """The pid of an agent's program that has a space, and the backing filesystem by a mount line
    at ``_BACKING``; and where the space is in all views."""
    tree = _space(setting, stack)
    name = fresh_name()
    directory = make(setting, name, b"sleep infinity\n")
    stack.callback(os.rmdir, directory)
    write(f"{directory}/policy", f"allow {name}_t shared:{tree.name} read,write\n".encode())
    write(f"{directory}/mount", f"{setting.backing} {_BACKING} rw\n".encode())
    start(directory)
    stack.callback(await_end, directory)
    stack.callback(write, f"{directory}/ctl", b"kill\n")
    await_busy(directory)
    return int(Path(directory, "pid").read_text()), tree


def _create_side(name: str, directory: Path, stack: ExitStack) -> Side:
    numbers = itertools.count()
    # as the working directory of a program in there: no path of the view is walked
    place = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    stack.callback(os.close, place)

    def call() -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        fd = os.open(f"{name}-{next(numbers)}", flags, dir_fd=place)
        os.write(fd, _CONTENT)
        os.close(fd)

    return Side(name=name, call=call)


def create_sides(setting: Setting, stack: ExitStack) -> Sides:
    """Files of their own names, created, written and closed."""
    tree = _space(setting, stack)
    direct = _create_side("backing", _direct(setting, tree), stack)
    return _create_side("shared", tree, stack), [direct]


def agent_sides(setting: Setting, stack: ExitStack) -> Sides:
    """The same in an agent's view."""
    pid, tree = _agent(setting, stack)
    direct = _create_side("backing", _direct(setting, tree), stack)
    view = Path(f"/proc/{pid}/root") / tree.relative_to("/")
    return _create_side("agent", view, stack), [direct]


def _git(environment: Mapping[str, str], *words: str, view: Sequence[str] = ()) -> None:
    command = [*view, "git", *words]
    subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=True)


def clone_pairs(row: str, setting: Setting, stack: ExitStack) -> list[Pair]:
    """``git clone`` of a small repository of the backing filesystem, which copies its objects."""
    source, environment = _repository(setting, stack)
    tree = _space(setting, stack)
    direct = _direct(setting, tree)
    return _clones(
        row,
        _Clone("shared", direct, tree, source, environment),
        _Clone("backing", direct, direct, source, environment),
    )


def agent_clone_pairs(row: str, setting: Setting, stack: ExitStack) -> list[Pair]:
    """The same by git in an agent's view, with all paths as they are there, against git in the
    view of this program, entered in the same way."""
    source, environment = _repository(setting, stack)
    pid, tree = _agent(setting, stack)
    direct = _direct(setting, tree)
    inside = _BACKING / source.relative_to(setting.backing)
    home = {**environment, "HOME": str(inside.parent)}
    return _clones(
        row,
        _Clone("agent", direct, tree, inside, home, pid),
        _Clone("backing", direct, direct, source, environment, os.getpid()),
    )


def _repository(setting: Setting, stack: ExitStack) -> tuple[Path, dict[str, str]]:
    """A repository, and the environment of git."""
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
    return source, environment


@dataclass(frozen=True, slots=True)
class _Clone:
    """One way to clone: ``source`` into ``target``, which is ``direct`` for this program, by git
    in the view of the process ``pid``."""

    name: str
    direct: Path
    target: Path
    source: Path
    environment: Mapping[str, str]
    pid: int = 0

    def run(self) -> dict[str, float]:
        view = ("nsenter", f"--target={self.pid}", "--mount") if self.pid else ()
        words = ["clone", "--quiet", "--no-hardlinks", str(self.source), self.name]
        with undisturbed():
            begin = time.perf_counter_ns()
            _git(self.environment, "-C", str(self.target), *words, view=view)
            taken = time.perf_counter_ns() - begin
        shutil.rmtree(self.direct / self.name)
        return {"clone": taken}


def _clones(row: str, *clones: _Clone) -> list[Pair]:
    """The first, against the others; each was done once."""
    parts = []
    for clone in clones:
        clone.run()
        episode = Episode(name=clone.name, run=clone.run)
        parts.append(Part(name=clone.name, episode=episode, time="clone"))
    return [Pair(row=row, subject=parts[0], reference=part) for part in parts[1:]]
