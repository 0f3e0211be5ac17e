"""The program that makes and removes durable trees, and who is told of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from runtime.cell.cell import Places, native
from runtime.cell.treework import Trees
from runtime.records.model import Space, SpaceState
from runtime.records.spaces import Spaces
from tests.worlds.natives import Children


def test_the_disk_is_told_of_each_new_tree(tmp_path: Path, spaces: Spaces) -> None:
    """So that it joins its owner's project before much is in it."""
    places = Places(mount=Path("/ctx"), state=tmp_path, runtime=tmp_path / "run")
    places.trees.mkdir()
    places.runtime.mkdir()
    places.tree.symlink_to(places.trees)
    told = list[int]()
    trees = Trees(places, native("tree"), Children(), spaces, told.append)
    uid, gid = os.getuid(), os.getgid()
    space = spaces.add("data", owner=uid, gid=gid, mode=0o700)
    trio.run(trees.ready, space)
    assert told == [uid] and space.state is SpaceState.THERE
    assert (places.trees / "shared/data").samefile(places.trees / "space/data/data")
    for _ in range(2):
        trio.run(trees.have, uid, "home/1", uid, gid, 10.0)
    assert told == [uid, uid]


def test_a_removal_that_comes_twice_leaves_the_next_of_that_name(
    tmp_path: Path, spaces: Spaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = Places(mount=Path("/ctx"), state=tmp_path, runtime=tmp_path / "run")
    places.trees.mkdir()
    places.runtime.mkdir()
    places.tree.symlink_to(places.trees)
    trees = Trees(places, native("tree"), Children(), spaces, lambda owner: None)
    own = {"owner": os.getuid(), "gid": os.getgid(), "mode": 0o700}
    space = spaces.add("data", **own)
    trio.run(trees.ready, space)
    spaces.remove(space)
    forget = spaces.forget

    def forget_and_make(space: Space) -> None:
        forget(space)
        spaces.add("data", **own)

    monkeypatch.setattr(spaces, "forget", forget_and_make)

    async def twice() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(trees.ready, space)

    trio.run(twice)
    made = spaces.named("data")
    assert made is not None and made.index != space.index
