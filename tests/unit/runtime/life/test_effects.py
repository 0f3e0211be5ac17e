"""What the kernel refuses is refused to the caller, and no status claims that it was done."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
import trio
import trio.testing

from runtime.authority.loop import Gentle
from runtime.cell.cell import Places
from runtime.errors import KernelError, NoSpaceError, QuotaError
from runtime.kernel.cgroups import Cgroup
from runtime.kernel.inotify import Watcher
from runtime.kernel.processes import Census
from runtime.kernel.sweeper import Sweeper
from runtime.life import ending
from runtime.life.streams import Streams
from runtime.life.supervisor import Supervisor
from runtime.records.change import Change, Subscriber
from runtime.records.lifecycle import AFTERWARDS, BEFOREHAND, TABLE, Cue, Effect, Status
from runtime.records.model import Agent
from tests.worlds.daemon import TIMEOUT
from tests.worlds.hosts import host_with
from tests.worlds.records import ROOT, World


def _have_no_room(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/full")


def _be_no_file(path: Path) -> None:
    path.unlink()
    path.mkdir()


#: how a write to a file of a cgroup fails, and with what
FAILURES: Final[dict[str, tuple[Callable[[Path], None], int]]] = {
    "missing": (Path.unlink, errno.ENOENT),
    "no room": (_have_no_room, errno.ENOSPC),
    "no file": (_be_no_file, errno.EISDIR),
}


class _NoHelpers:
    """None can be started."""

    async def ask(self, *_: object, **__: object) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    tell = ask


class Scene:
    """A supervisor of one busy agent, whose cgroup is a directory of plain files."""

    def __init__(self, world: World, nursery: trio.Nursery, watcher: Watcher) -> None:
        self.world = world
        self.agents = world.agents
        self.root = Cgroup(world.path / "cgroup")
        places = Places(mount=Path("/ctx"), state=world.state, runtime=world.path / "run")
        helpers = cast(Any, _NoHelpers())
        host = host_with(
            agents=world.agents,
            hierarchy=SimpleNamespace(root=self.root, controllers=()),
            watcher=watcher,
            places=places,
            sweeper=Sweeper(places.program("sweep"), helpers, nursery),
            nursery=nursery,
        )
        streams = Streams(Gentle(world.agents.accounts.time))
        nothing = cast(Any, None)
        census = Census(places.program("census"), helpers)
        self.supervisor = Supervisor(host, nothing, census, streams)
        self.agent = self.live("x")

    def live(self, name: str) -> Agent:
        """Busy, and known to have begun."""
        agent = self.world.live(self.agents.births.create(ROOT, name))
        self.path(agent).mkdir(parents=True)
        for file in ("cgroup.freeze", "cgroup.kill"):
            (self.path(agent) / file).write_text("0")
        self.supervisor._make_live_cell(agent).settled = True
        return agent

    def path(self, agent: Agent) -> Path:
        return self.root.path / agent.cell.cgroup

    def file(self, name: str) -> Path:
        return self.path(self.agent) / name

    def told(self) -> list[str]:
        """The statuses that the history tells of."""
        return [line for line in self.world.lines(self.agent) if '"agent.status"' in line]


def in_scene(world: World, act: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        watcher = Watcher()
        try:
            async with trio.open_nursery() as nursery:
                await act(Scene(world, nursery, watcher))
                nursery.cancel_scope.cancel()
        finally:
            watcher.close()

    trio.run(main)


@contextmanager
def refused(number: int, sentence: str) -> Iterator[None]:
    with pytest.raises(KernelError, match=sentence) as caught:
        yield
    assert caught.value.errno == number
    assert caught.value.sentence.endswith(f": {os.strerror(number)}")


@pytest.mark.parametrize("failure", FAILURES)
def test_a_pause_that_freezes_nothing_is_refused(world: World, failure: str) -> None:
    fail, number = FAILURES[failure]

    async def act(scene: Scene) -> None:
        fail(scene.file("cgroup.freeze"))
        before = scene.told()
        with refused(number, '^cannot freeze "x": '):
            scene.supervisor.pause(scene.agent)
        assert (scene.agent.status, scene.agent.frozen) == (Status.BUSY, False)
        assert scene.told() == before

    in_scene(world, act)
    (kept,) = world.reopen().registry
    assert (kept.status, kept.frozen, kept.paused_from) == (Status.BUSY, False, "")


@pytest.mark.parametrize("failure", sorted(set(FAILURES) - {"missing"}))
def test_a_resume_that_thaws_nothing_is_refused(world: World, failure: str) -> None:
    fail, number = FAILURES[failure]

    async def act(scene: Scene) -> None:
        scene.supervisor.pause(scene.agent)
        assert scene.file("cgroup.freeze").read_text() == "1"
        before = scene.told()
        fail(scene.file("cgroup.freeze"))
        with refused(number, '^cannot thaw "x": '):
            scene.supervisor.resume(scene.agent)
        assert (scene.agent.status, scene.agent.frozen) == (Status.PAUSED, True)
        assert scene.told() == before

    in_scene(world, act)
    (kept,) = world.reopen().registry
    assert (kept.status, kept.frozen, kept.paused_from) == (Status.PAUSED, True, "busy")


def test_what_has_no_cgroup_any_more_has_nothing_to_thaw(world: World) -> None:
    async def act(scene: Scene) -> None:
        scene.supervisor.pause(scene.agent)
        scene.file("cgroup.freeze").unlink()
        scene.supervisor.resume(scene.agent)
        assert scene.agent.status is Status.BUSY

    in_scene(world, act)


def full(monkeypatch: pytest.MonkeyPatch, scene: Scene) -> None:
    """From now on the disk has no room for a record."""
    def put_agent(*args: Any) -> None:
        raise NoSpaceError("the disk is full")

    monkeypatch.setattr(scene.world.store, "put_agent", put_agent)


def test_what_was_frozen_is_thawed_if_the_pause_cannot_be_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(scene: Scene) -> None:
        full(monkeypatch, scene)
        with pytest.raises(NoSpaceError):
            scene.supervisor.pause(scene.agent)
        assert scene.agent.status is Status.BUSY
        assert scene.file("cgroup.freeze").read_text() == "0"

    in_scene(world, act)


def test_what_was_thawed_is_frozen_if_the_resume_cannot_be_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(scene: Scene) -> None:
        scene.supervisor.pause(scene.agent)
        full(monkeypatch, scene)
        with pytest.raises(NoSpaceError):
            scene.supervisor.resume(scene.agent)
        assert scene.agent.status is Status.PAUSED
        assert scene.file("cgroup.freeze").read_text() == "1"

    in_scene(world, act)


def test_what_an_abort_paused_is_not_frozen_by_a_resume_that_cannot_be_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(scene: Scene) -> None:
        with scene.agents.journal.changing() as change:
            change.move(scene.agent, Cue.ABORT)
        full(monkeypatch, scene)
        with pytest.raises(NoSpaceError):
            scene.supervisor.resume(scene.agent)
        assert scene.file("cgroup.freeze").read_text() == "0"

    in_scene(world, act)


def test_two_pauses_in_one_change_are_both_undone(world: World) -> None:
    async def act(scene: Scene) -> None:
        other = scene.live("y")
        _have_no_room(scene.path(other) / "cgroup.freeze")
        with refused(errno.ENOSPC, '"y"'), scene.agents.journal.changing() as change:
            change.move(scene.agent, Cue.PAUSE)
            change.move(other, Cue.PAUSE)
        assert scene.agent.status is other.status is Status.BUSY
        assert scene.file("cgroup.freeze").read_text() == "0"

    in_scene(world, act)


def test_nothing_is_frozen_for_a_pause_that_somebody_else_refuses(world: World) -> None:
    class Full(Subscriber):
        def admit(self, change: Change) -> None:
            raise QuotaError("no room")

    async def act(scene: Scene) -> None:
        scene.agents.journal.subscribe(Full())
        scene.file("cgroup.freeze").write_text("untouched")
        with pytest.raises(QuotaError):
            scene.supervisor.pause(scene.agent)
        assert scene.file("cgroup.freeze").read_text() == "untouched"

    in_scene(world, act)


def test_a_pause_whose_owner_ends_in_the_same_change_is_an_end(world: World) -> None:
    async def act(scene: Scene) -> None:
        with scene.agents.journal.changing() as change:
            change.move(scene.agent, Cue.PAUSE)
            change.move(scene.agent, Cue.ENDING)
            change.set(scene.agent, cause=("cancelled", "parent_dead"))
        assert scene.agent.status is Status.STOPPING
        await trio.testing.wait_all_tasks_blocked()
        assert scene.file("cgroup.freeze").read_text() == "0"

    in_scene(world, act)


def test_a_kill_that_is_refused_says_so_and_can_be_said_again(world: World) -> None:
    async def act(scene: Scene) -> None:
        kill = scene.file("cgroup.kill")
        _have_no_room(kill)
        with refused(errno.ENOSPC, '^cannot kill "x" yet: '):
            scene.supervisor.stop(scene.agent, kill=True)
        assert scene.agent.status is Status.STOPPING
        assert scene.told()[-1].count('"stopping"') == 1
        kill.unlink()
        kill.write_text("0")
        scene.supervisor.stop(scene.agent, kill=True)
        assert kill.read_text() == "1"

    in_scene(world, act)


def test_an_end_goes_on_though_nothing_can_be_thawed_or_signalled(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL follows after the grace, again and again until the kernel takes it."""
    world.agents.settings.config = world.config = type(world.config)(grace=0.0)
    monkeypatch.setattr(ending, "_REPEAT_SECONDS", 0.01)

    async def act(scene: Scene) -> None:
        kill = scene.file("cgroup.kill")
        for name in ("cgroup.freeze", "cgroup.kill"):
            _have_no_room(scene.file(name))
        scene.file("cgroup.events").write_text("populated 1\n")
        refusal = trio.Event()
        monkeypatch.setattr(
            ending.log, "error", lambda text, *_, **__: "kill it" in text and refusal.set()
        )
        scene.supervisor.stop(scene.agent, kill=False)
        await refusal.wait()
        kill.unlink()
        os.mkfifo(kill)
        fd = os.open(kill, os.O_RDONLY | os.O_NONBLOCK)
        try:
            with trio.fail_after(TIMEOUT):
                await trio.lowlevel.wait_readable(fd)
            assert os.read(fd, 10) == b"1"
        finally:
            os.close(fd)

    in_scene(world, act)


def test_the_phases_of_effects_are_apart() -> None:
    assert not BEFOREHAND & AFTERWARDS
    # a move has nothing done beforehand beside what cannot be undone
    for move in TABLE.values():
        effects = {Effect(effect) for effect in move.effects}
        assert not effects & BEFOREHAND or effects <= BEFOREHAND
