"""The program that makes and removes durable trees, and who is told of it."""

from __future__ import annotations

import os
from pathlib import Path

import trio

from runtime.cell.cell import Places, native
from runtime.cell.treework import Trees
from runtime.records.model import SpaceState
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
