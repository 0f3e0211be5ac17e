"""Whatever dies while git works at a pack: what was committed comes, or is kept, and nothing else
is left. Git is stopped until something has died; whoever takes over ends it.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from tests.worlds.daemon import TIMEOUT, Daemon, alive, read, wait_dead, wait_until
from tests.worlds.family import Family, git
from tests.worlds.nodes import LEASE
from tests.worlds.three import Three, three_of

pytestmark = pytest.mark.long

#: bytes of what is committed at either side: git takes a moment for it
SIZE: Final = 24 << 20
WHOLE: Final = {"config", "dotgit", "git", "work"}
COMMIT: Final = (
    f"head -c {SIZE} /dev/urandom > more; git add more; git commit -qm more;"
    " git rev-parse HEAD; sha256sum more"
)


@pytest.fixture(scope="module")
def three() -> Iterator[Three]:
    with three_of(n2="60s", n3=LEASE) as made:
        yield made


@pytest.fixture
def family(three: Three) -> Iterator[Family]:
    made = Family(three.daemon, three.numbers)
    (made.repository / "large").write_bytes(os.urandom(SIZE))
    git(made.repository, "add", ".")
    git(made.repository, "commit", "-q", "-m", "large")
    yield made
    made.end()


class Scene:
    """A child that commits, and git in the middle of something."""

    def __init__(self, three: Three, family: Family, where: str = "n2") -> None:
        self.three, self.family, self.where = three, family, where
        self.directory = family.child(COMMIT, where)
        self.name = self.directory.name.removesuffix(".d")
        self.place = family.repository / f".git/ctx/{self.name}"

    def stop(self, daemon: Daemon, agent: str, word: str) -> int:
        """Stops git as soon as it does this in the cell of an agent."""
        until = time.monotonic() + 2 * TIMEOUT
        while time.monotonic() < until:
            for pid in daemon.processes_of(agent, "git"):
                with suppress(OSError):  # it is gone
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    if word.encode() in words:
                        os.kill(pid, signal.SIGSTOP)
                        return pid
            select.select([], [], [], 0.002)
        raise AssertionError(f"git {word} was not seen of {agent}")

    def stop_there(self, word: str) -> int:
        return self.stop(self.three.hosts[self.where], f"{self.name}@one", word)

    def stop_here(self, word: str) -> int:
        return self.stop(self.three.daemon, self.family.name, word)

    def comes(self) -> None:
        """What was committed has come, as it was."""
        wait_dead(self.directory, timeout=90)
        said = read(self.directory, "out").split()
        wait_until(lambda: self.state() != "fetching", "it is judged", timeout=90)
        facts = self.family.facts(self.directory)
        if facts["state"] == "kept":
            self.family.fetch(self.directory)
            wait_until(lambda: self.state() not in ("kept", "fetching"), "it is fetched", 60)
            facts = self.family.facts(self.directory)
        assert (facts["state"], facts["commit"]) == ("fetched", said[0]), facts
        git(self.family.repository, "fsck", "--strict")
        self.nothing_is_left()

    def trees(self) -> list[Path]:
        """What its host has of it."""
        return [*self.three.hosts[self.where].state.glob(f"tree/agent/*/{self.name}@*")]

    def beside(self) -> set[str]:
        with suppress(FileNotFoundError):
            return set(os.listdir(self.place))
        return set()

    def state(self) -> str:
        return self.family.facts(self.directory)["state"]

    def nothing_is_left(self) -> None:
        assert not [*self.family.repository.rglob("tmp_*")], "nothing half made is left"
        there = self.three.there(self.directory, self.where)
        wait_until(lambda: self.beside() in (set(), WHOLE), "nor beside it")
        wait_until(lambda: not self.trees(), "nothing is left there")
        wait_until(lambda: not there.exists(), "nor the agent")


#: where git works, at what, and who dies then
MOMENTS: Final[dict[str, Callable[[Scene], int]]] = {
    "sent": lambda scene: scene.stop_here("pack-objects"),
    "unpacked": lambda scene: scene.stop_there("index-pack"),
    "written": lambda scene: scene.stop_there("reset"),
    "packed": lambda scene: scene.stop_there("pack-objects"),
    "received": lambda scene: scene.stop_here("index-pack"),
}


@pytest.mark.parametrize("of", ["lead", "host"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_daemon_dies_in_the_middle_of(
    three: Three, family: Family, moment: str, of: str
) -> None:
    scene = Scene(three, family)
    pid = MOMENTS[moment](scene)
    (three.daemon if of == "lead" else three.hosts["n2"]).restart()
    here = moment in ("sent", "received")
    if here == (of == "lead"):
        wait_until(lambda: not alive(pid), "it is ended by who takes over")
    else:
        os.kill(pid, signal.SIGCONT)
    scene.comes()


@pytest.mark.parametrize("moment", MOMENTS)
def test_git_is_killed_in_the_middle_of(three: Three, family: Family, moment: str) -> None:
    scene = Scene(three, family)
    os.kill(MOMENTS[moment](scene), signal.SIGKILL)
    wait_dead(scene.directory)
    if moment in ("packed", "received"):
        facts = family.facts(scene.directory)
        assert facts["state"] == "kept", facts
        if moment == "received":
            scene.comes()
        return
    assert read(scene.directory, "outcome") == "error\n"
    assert "start_failed" in read(scene.directory, "reason"), read(scene.directory, "reason")
    scene.nothing_is_left()


@pytest.mark.parametrize("moment", ["unpacked", "packed"])
def test_a_lease_ends_git_in_the_middle_of(three: Three, family: Family, moment: str) -> None:
    scene = Scene(three, family, "n3")
    pid = MOMENTS[moment](scene)
    three.wires["n3"].stop()
    wait_until(lambda: not alive(pid), "its lease has ended it")
    wait_dead(scene.directory, timeout=90)
    three.wires["n3"].go_on()
    assert read(scene.directory, "reason").startswith("runtime_lost")
    if moment == "packed":
        facts = family.facts(scene.directory)
        [tree] = scene.trees()
        assert facts["state"] == "kept" and (tree / "work/more").stat().st_size == SIZE, facts
    wait_until(lambda: not three.there(scene.directory, "n3").exists(), "it is forgotten there")
    if moment == "unpacked":
        scene.nothing_is_left()
