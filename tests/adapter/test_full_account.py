"""An owner whose disk account is full: what is begun is refused, what ends something is obeyed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pyfuse3
import pytest

from runtime.authority.accounts import Resource
from runtime.caller import Caller
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from tests.worlds.records import ROOT, inside
from tests.worlds.tree import CONTEXT, USER, Mounted, complete, mounted_in, refused

D = "agent/x.d"
OWNER = 1000
EVENTS = "home/1000/agent/x/session/default/events.jsonl"


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    """With a live agent, which has something of everything, and one that is new."""
    with mounted_in(tmp_path) as mounted:
        agent = mounted.make("x", USER)
        mounted.make("new", USER)
        with mounted.as_(USER):
            mounted.put(f"{D}/exec", "true\n")
            mounted.put(f"{D}/mode", "turn\n")
        mounted.world.live(agent, Status.IDLE)
        with mounted.as_(USER):
            for plane, name in (("task", "t"), ("work", "w"), ("waiting", "a"), ("waiting", "b")):
                add(mounted, f"{D}/{plane}", name)
            mounted.put(f"{D}/work/w/objective", "all\n")
            mounted.put(f"{D}/waiting/a/on", "timer 1h\n")
            mounted.put(f"{D}/task/t/cmd", "true\n")
            mounted.put(f"{D}/task/t/ctl", "start\n")
        yield mounted


@pytest.fixture
def agent(mounted: Mounted) -> Agent:
    return mounted.agent("x")


def add(mounted: Mounted, directory: str, name: str) -> None:
    complete(mounted.ops.mkdir, mounted.inode(directory), name.encode(), 0o755, CONTEXT)


def take(mounted: Mounted, directory: str, name: str) -> None:
    complete(mounted.ops.rmdir, mounted.inode(directory), name.encode(), CONTEXT)


def fill(mounted: Mounted, part: float = 1.0) -> None:
    mounted.agents.disk.note(OWNER, int(part * mounted.world.config.owner_disk_max))


def answer(act: Callable[[], object]) -> str:
    try:
        act()
    except pyfuse3.FUSEError as error:
        return errno.errorcode[error.errno]
    return "done"


#: each writes an event, and could be said for ever
BEGINNINGS = (
    ("label", "other\n"), ("meta.json", '{"a": 1}\n'), ("limits", "grace=1s\n"),
    ("policy", "allow x_t tool:* execute\n"), ("inbox", "hello\n"), ("ctl", "pause\n"),
    ("ctl", "session another\n"), ("ctl", "session default\n"), ("work/w/status", "blocked\n"),
    ("waiting/b/on", "timer 1h\n"),
)  # fmt: skip


@pytest.mark.parametrize(("file", "text"), BEGINNINGS)
def test_what_is_begun_needs_room_for_its_event(mounted: Mounted, file: str, text: str) -> None:
    path = f"{D}/{file}" if file != "label" else "agent/new.d/label"
    before = mounted.get(EVENTS)
    fill(mounted)
    with mounted.as_(USER):
        assert answer(lambda: mounted.put(path, text)) == "EDQUOT"
        assert "account disk of uid 1000" in mounted.reason
    assert mounted.get(EVENTS) == before
    with mounted.as_(ROOT):
        assert answer(lambda: mounted.put(path, text)) == "done"


def test_agents_have_no_part_in_what_is_kept_for_operators(mounted: Mounted, agent: Agent) -> None:
    fill(mounted, 0.95)
    acts = (
        lambda: mounted.put(f"{D}/report", "so far\n"),
        lambda: mounted.put(f"{D}/work/w/status", "blocked\n"),
        lambda: mounted.put(f"{D}/waiting/b/on", "timer 1h\n"),
    )
    with mounted.as_(inside(agent)):
        assert [answer(act) for act in acts] == ["EDQUOT"] * 3
    with mounted.as_(USER):
        assert [answer(act) for act in acts[1:]] == ["done"] * 2


@pytest.mark.parametrize("verb", ["stop", "kill", "abort"])
def test_agents_can_be_ended_all_the_same(mounted: Mounted, agent: Agent, verb: str) -> None:
    if verb == "abort":
        mounted.live(agent, run="r1")
    fill(mounted)
    with mounted.as_(USER):
        assert answer(lambda: mounted.put(f"{D}/ctl", f"{verb}\n")) == "done"
    assert f'"verb":"{verb}"' in mounted.get(EVENTS)


@pytest.mark.parametrize("inside_it", [True, False])
def test_what_belongs_to_agents_can_be_ended_and_removed(
    mounted: Mounted, agent: Agent, inside_it: bool
) -> None:
    fill(mounted)
    caller: Caller = inside(agent) if inside_it else USER
    with mounted.as_(caller):
        assert answer(lambda: mounted.put(f"{D}/task/t/ctl", "stop\n")) == "done"
        assert answer(lambda: take(mounted, f"{D}/waiting", "a")) == "done"
        assert answer(lambda: take(mounted, f"{D}/waiting", "b")) == "done"
        assert answer(lambda: take(mounted, f"{D}/work", "w")) == "done"
    with mounted.as_(USER):
        assert answer(lambda: take(mounted, "agent", "new.d")) == "done"
    assert '"wait.cancelled"' in mounted.get(EVENTS)


def test_histories_count_when_they_grow(mounted: Mounted, agent: Agent) -> None:
    """Not half a minute later, when they are measured."""


    def used_by(changes: int) -> tuple[int, int]:
        used = mounted.agents.accounts.used(Resource.DISK)
        before = len(mounted.get(EVENTS))
        with mounted.as_(USER):
            for number in range(changes):
                mounted.put(f"{D}/meta.json", f'{{"a": {number}}}\n')
        return mounted.agents.accounts.used(Resource.DISK) - used, len(mounted.get(EVENTS)) - before

    used_by(50)  # the first of them are in the store, and then there are directories
    used, grown = used_by(20)
    # in the session, and with more in front of it in the log of the owner
    assert 3 * grown > used > 2 * grown > 20 * 200


def test_a_file_that_is_called_ctl_is_none(
    mounted: Mounted, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over its account of time an agent is refused, but for its verbs."""
    with mounted.as_(inside(agent)):
        own, folder = mounted.inode(D), mounted.inode(f"{D}/artifact")
        monkeypatch.setattr(mounted.agents.accounts.time, "makes_wait", lambda who: True)
        complete(mounted.ops.lookup, own, b"ctl", CONTEXT)
        with refused("EAGAIN"):
            complete(mounted.ops.create, folder, b"ctl", 0o644, os.O_WRONLY, CONTEXT)
