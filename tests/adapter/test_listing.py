"""Listing ``/ctx/agent``: what it tells of a name is what looking the name up tells."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyfuse3
import pytest

from runtime.caller import Caller
from runtime.records.lifecycle import Status
from runtime.records.model import Profile
from tests.worlds.records import ROOT, inside
from tests.worlds.tree import CONTEXT, STRANGER, USER, Mounted, complete, mounted_in, refused

SUFFIXES = ("", ".sock", ".d")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    with mounted_in(tmp_path) as mounted:
        yield mounted


def listed(
    mounted: Mounted, monkeypatch: pytest.MonkeyPatch, fh: int
) -> dict[str, dict[str, Any]]:
    """What one reply to readdir says of each name."""
    found: dict[str, dict[str, Any]] = {}

    def reply(token: Any, name: bytes, entry: Any, position: int) -> bool:
        found[os.fsdecode(name)] = entry.__getstate__()
        return True

    monkeypatch.setattr(pyfuse3, "readdir_reply", reply)
    complete(mounted.ops.readdir, fh, 0, None)
    return found


def opened(mounted: Mounted) -> int:
    return int(complete(mounted.ops.opendir, mounted.inode("agent"), CONTEXT))


def looked_up(mounted: Mounted, name: str) -> dict[str, Any]:
    parent = mounted.inode("agent")
    found: dict[str, Any] = complete(
        mounted.ops.lookup, parent, name.encode(), CONTEXT
    ).__getstate__()
    return found


def callers(mounted: Mounted) -> dict[str, Caller]:
    """Callers of all kinds, with agents of all kinds made for them."""
    live, update = mounted.world.live, mounted.agents.journal.update
    boss = mounted.world.may_create(live(mounted.make("boss", USER)))
    kid, secret = (live(mounted.make(name, inside(boss))) for name in ("kid", "secret"))
    update(kid, profile=Profile.PUBLIC_NAMED)
    assert secret.private
    for name, owner in (("d", ROOT), ("x.y", ROOT), ("new", USER), ("dead", USER)):
        mounted.make(name, owner)
    for name, status in (("d", Status.BUSY), ("x.y", Status.IDLE), ("dead", Status.DEAD)):
        agent = mounted.agent(name)
        live(agent, status)
    for number, agent in enumerate(mounted.agents.registry):
        agent.created += number  # a name has the time of its own agent
    return {
        **{"root": ROOT, "owner": USER, "stranger": STRANGER},
        **{"boss": inside(boss), "secret": inside(secret)},
    }


@pytest.mark.parametrize("who", ["root", "owner", "stranger", "boss", "secret"])
def test_a_listing_tells_what_a_look_up_tells(
    mounted: Mounted, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    caller = callers(mounted)[who]
    with mounted.as_(caller):
        found = listed(mounted, monkeypatch, opened(mounted))
        for agent in mounted.agents.registry:
            known = not agent.private or who != "stranger"
            for suffix in SUFFIXES:
                name = f"{agent.name}{suffix}"
                assert (name in found) == known, name
                if known:
                    assert found[name] == looked_up(mounted, name), name
    assert len({entry["st_ino"] for entry in found.values()}) == len(found)


def test_the_kernel_knows_what_it_was_told(
    mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted.make("x")
    found = listed(mounted, monkeypatch, opened(mounted))
    known = mounted.base.cache._known
    before = {entry["st_ino"]: known[entry["st_ino"]] for entry in found.values()}
    assert set(before.values()) == {1, 2}, "made as x.d, and listed"
    complete(mounted.ops.forget, list(before.items()))
    assert not before.keys() & known.keys()


def test_each_reply_judges_anew(mounted: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    agents = {name: mounted.make(name, USER) for name in ("stays", "hides", "goes", "again")}
    with mounted.as_(STRANGER):
        fh = opened(mounted)
        assert len(listed(mounted, monkeypatch, fh)) == len(agents) * len(SUFFIXES)
        fh = opened(mounted)
        mounted.agents.journal.update(agents["hides"], profile=Profile.PRIVATE_CHILD)
        for name in ("goes", "again"):
            with mounted.as_(USER):
                complete(mounted.ops.rmdir, mounted.inode("agent"), f"{name}.d".encode(), CONTEXT)
        again = mounted.make("again")
        found = listed(mounted, monkeypatch, fh)
    names = {f"{name}{suffix}" for name in ("stays", "again") for suffix in SUFFIXES}
    assert found.keys() == names
    assert found["again.d"]["st_uid"] == again.uid
    with mounted.as_(STRANGER), refused("ENOENT"):
        looked_up(mounted, "hides.d")
