"""Helpers that answer, hang, are stopped, flood and fail, started by a real launcher."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio

from runtime.cell.cell import native
from runtime.errors import KernelError, UnansweredError
from runtime.kernel import helpers as module
from runtime.kernel.cgroups import Cgroup, unified_mount
from runtime.kernel.helpers import Helpers
from runtime.kernel.spawn import Process, Spawner
from tests.worlds.daemon import TIMEOUT

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or unified_mount() is None, reason="needs root and cgroup v2"
)

_numbers = itertools.count()


@pytest.fixture
def home() -> Iterator[Cgroup]:
    """The leaf of the helpers; nothing may be left in it."""
    mount = unified_mount()
    assert mount is not None
    home = Cgroup(mount / f"ctxtest-{os.getpid()}-helpers-{next(_numbers)}")
    home.path.mkdir()
    yield home
    assert home.remove_when_empty(TIMEOUT)


@pytest.fixture
def with_helpers(home: Cgroup) -> Iterator[Callable[[Callable[[Helpers], Awaitable[None]]], None]]:
    spawner = Spawner(native("launcher"), home)

    def run(main: Callable[[Helpers], Awaitable[None]]) -> None:
        async def made() -> None:
            with trio.fail_after(TIMEOUT):
                async with trio.open_nursery() as nursery:
                    helpers = Helpers(spawner, nursery)
                    await main(helpers)
                assert not helpers._turns, "nothing is kept of who has asked"

        trio.run(made)

    yield run
    spawner.close()


def sh(text: str, *words: str | Path) -> list[str | Path]:
    return ["/bin/sh", "-c", text, "sh", *words]


With = Callable[[Callable[[Helpers], Awaitable[None]]], None]


def test_a_helper_is_in_the_leaf_without_an_environment(with_helpers: With, home: Cgroup) -> None:
    async def main(helpers: Helpers) -> None:
        said = await helpers.ask(0, "look", ["/usr/bin/env"], seconds=TIMEOUT)
        assert said == b""
        said = await helpers.ask(0, "look", ["/bin/cat", "/proc/self/cgroup"], seconds=TIMEOUT)
        assert said.decode().rstrip().endswith(home.path.name)

    with_helpers(main)


def test_descriptors_are_found_from_three_on(with_helpers: With) -> None:
    async def main(helpers: Helpers) -> None:
        reading, writing = os.pipe()
        os.write(writing, b"passed\n")
        os.close(writing)
        script = "read said <&3; echo $said; cat <&4"
        with open(reading, "rb"):
            said = await helpers.ask(0, "look", sh(script), seconds=TIMEOUT, fds=[reading, None])
        assert said == b"passed\n"

    with_helpers(main)


@pytest.mark.parametrize("script", ["kill -STOP $$", "exec sleep 1000", "exec >&- sleep 1000"])
def test_one_that_hangs_is_given_up_and_killed(with_helpers: With, script: str) -> None:
    async def main(helpers: Helpers) -> None:
        with pytest.raises(UnansweredError, match="look: not done within"):
            await helpers.ask(0, "look", sh(script), seconds=0.2)
        assert await helpers.ask(0, "look", sh("echo next"), seconds=TIMEOUT) == b"next\n"

    with_helpers(main)


def test_nobody_waits_for_it_any_more(with_helpers: With) -> None:
    """It is killed then, too: its turn would never end."""

    async def main(helpers: Helpers) -> None:
        with trio.move_on_after(0.2):
            await helpers.ask(0, "look", sh("exec sleep 1000"), seconds=1000)
        assert await helpers.ask(0, "look", sh("echo next"), seconds=TIMEOUT) == b"next\n"

    with_helpers(main)


def test_one_that_floods_its_output_is_given_up(with_helpers: With) -> None:
    async def main(helpers: Helpers) -> None:
        with pytest.raises(KernelError, match="more than"):
            await helpers.ask(0, "look", ["/bin/cat", "/dev/zero"], seconds=TIMEOUT)

    with_helpers(main)


def test_an_answer_is_bounded_in_bytes(with_helpers: With, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_MAX", 100)

    async def main(helpers: Helpers) -> None:
        script = 'head -c "$1" /dev/zero'
        assert len(await helpers.ask(0, "look", sh(script, "100"), seconds=TIMEOUT)) == 100
        with pytest.raises(KernelError, match="more than 100 bytes"):
            await helpers.ask(0, "look", sh(script, "101"), seconds=TIMEOUT)

    with_helpers(main)


def test_one_that_fails_says_why_in_one_line(with_helpers: With) -> None:
    async def main(helpers: Helpers) -> None:
        script = r"printf 'ctxfs: no room\n  left \033\n' >&2; exit 125"
        with pytest.raises(KernelError) as raised:
            await helpers.ask(0, "look", sh(script), seconds=TIMEOUT)
        assert raised.value.sentence == r"no room left \x1b"
        with pytest.raises(KernelError, match=r"look failed \(-15\)"):
            await helpers.ask(0, "look", sh("kill $$"), seconds=TIMEOUT)
        with pytest.raises(KernelError, match="/gone: No such file"):
            await helpers.ask(0, "look", ["/gone"], seconds=TIMEOUT)

    with_helpers(main)


def test_an_owner_has_one_of_a_kind_and_others_are_not_held_up(
    with_helpers: With, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it sleeps in the kernel, where SIGKILL does not reach it."""
    unreached: list[int] = []
    monkeypatch.setattr(Process, "kill", lambda process: unreached.append(process.pid))

    async def main(helpers: Helpers) -> None:
        ran = os.memfd_create("ran")
        with pytest.raises(UnansweredError):
            await helpers.ask(0, "look", ["/bin/sleep", "1000"], seconds=0.1)
        for _ in range(2):
            with pytest.raises(UnansweredError):
                await helpers.ask(0, "look", sh("echo ran >&3"), seconds=0.1, fds=[ran])
        for owner, kind in ((0, "remove"), (1, "look")):
            said = await helpers.ask(owner, kind, sh("echo other"), seconds=TIMEOUT)
            assert said == b"other\n"
        [pid] = unreached
        os.kill(pid, signal.SIGKILL)
        said = await helpers.ask(0, "look", sh("echo next"), seconds=TIMEOUT)
        assert said == b"next\n", "the turn is free as soon as it is gone"
        assert os.fstat(ran).st_size == 0, "what had no turn was never started"
        os.close(ran)

    with_helpers(main)
