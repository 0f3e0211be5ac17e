"""What daemons of other machines say: targets for hosts, and for leads."""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import trio.testing

from runtime.errors import MalformedError
from runtime.peers.admission import (
    Bound,
    Put,
    check_sizes,
    least,
    lines_of,
    mount_table,
    narrowed,
    settable,
)
from runtime.peers.peering import (
    DELTA_MAX,
    FACTS,
    OPERATIONS,
    BrokenLinkError,
    Delta,
    Message,
    Over,
)
from runtime.peers.speaking import OWN
from runtime.peers.streams import Stream
from runtime.records import items
from runtime.records.config import Config
from runtime.records.model import Agent
from runtime.texts import mounts, policy
from runtime.texts.names import decode, parse_json_object
from tests.worlds.leads import Leader, Site, at_site
from tests.worlds.parcels import Two, in_two
from tests.worlds.placed import NODES, Lone, on_lead
from tests.worlds.records import ROOT, world_in

#: what a parcel may leave at its lead, below the directory of its agent
_LEFT: Final = ("parcel/", "doc/", "out/", "log/")
_FILES_MAX, _DOCUMENT_MAX, _ARTIFACT_MAX, _LOG_MAX = 12, 1 << 14, 1 << 16, 1 << 14


class _Bugs(logging.Handler):
    """Errors of which a traceback would be in the log."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1]:
            self.found.append(record.exc_info[1])


@contextmanager
def _without_bugs() -> Iterator[Path]:
    """A directory; raises what was only logged."""
    bugs, root = _Bugs(), logging.getLogger()
    root.addHandler(bugs)
    try:
        with tempfile.TemporaryDirectory(prefix="ctxfs-fuzz-") as directory:
            yield Path(directory)
    finally:
        root.removeHandler(bugs)
    for error in bugs.found:
        raise error


def _messages(
    data: bytes, ops: frozenset[str], agents: Mapping[str, str]
) -> Iterator[Message | Over | Delta]:
    """Lines as messages; the agents are called by letters. What is no frame ends them."""
    number = 0
    for line in data.split(b"\n"):
        try:
            said = parse_json_object(line.decode())
        except (UnicodeDecodeError, MalformedError):
            return
        op, agent = said.get("op"), said.get("agent")
        if op == "over" and said.get("upto").__class__ is int and 0 <= said["upto"] < 1 << 63:
            yield Over(said["upto"])
        elif op == "delta" and ops is FACTS:
            at, text, name = (said.get(key) for key in ("at", "text", "id"))
            if at.__class__ is int and 0 <= at < 1 << 63 and isinstance(text, str):
                yield Delta(agents.get(str(agent), ""), str(name), at, text[:DELTA_MAX])
        elif isinstance(op, str) and op in ops and isinstance(agent, str) and len(agent) <= 1024:
            number += 1
            yield Message(number, op, agents.get(agent, agent), said, line + b"\n")


def admitted(data: bytes) -> None:
    """What ``put`` says, and ``bound`` after it: nothing is ever more than before."""
    first, _, second = decode(data).partition("\n")
    put = Put.read(parse_json_object(first), "one")
    label = put.config["label"]
    check_sizes(put.files, Config())
    for each in mounts.parse(mount_table(put.config.get("mount", ""), Path("/recipes"))):
        assert each.mode == "hide" or f"{each.source}/".startswith("/recipes/"), each
    wanted = least(put.limits, put.bound.limits)
    lines_of(settable(wanted))
    most = policy.as_bound(policy.parse(put.bound.policy, label))
    rules, _ = narrowed(
        policy.parse(put.config.get("policy", ""), label), put.bound, label,
        networks=["web"], shared=["notes"], metered={"web"}, limited=wanted,
    )  # fmt: skip
    assert policy.uncovered(rules, most) is None
    after = Bound.read(parse_json_object(second), label, put.bound)
    assert after.depth <= put.bound.depth and {*after.families} <= {*put.bound.families}
    assert after.limits.keys() >= put.bound.limits.keys()
    assert policy.uncovered(policy.parse(after.policy, label), most) is None


def _go_on(site: Site, agent: Agent) -> None:
    """The machine does what is next: there is a cell, or a run, whose program ends."""
    cell = site.cell(agent)
    if not cell.facts.exist():
        return
    if not agent.run.id:
        site.machine.held(cell)
    elif agent.how.run_per_message and (run := cell.run_at_hand()).facts.exist():
        if agent.run.pid:
            site.machine.ended(run, code=0)
        else:
            site.machine.began(run)


def operations(data: bytes) -> None:
    """What a lead says: only its own agents are there, and no one else's is changed."""

    async def act(site: Site, lead: Leader) -> None:
        local = site.agents.births.create(ROOT, "local")
        before = local.dump()
        lead.grant()
        agents = {"a": "a" * 16, "b": "b" * 16, "local": local.incarnation}
        for event in _messages(data, OPERATIONS, agents):
            try:
                await site.guests.hear(lead.key, lead.uid, lead.host, event)
            except BrokenLinkError:
                break
            await trio.testing.wait_all_tasks_blocked()
            for agent in site.agents.registry:
                if agent.index in site.supervisor._live_cells:
                    _go_on(site, agent)
        await trio.testing.wait_all_tasks_blocked()
        assert local.dump() == before
        for agent in site.agents.registry:
            if agent is not local:
                assert agent.is_guest and (agent.owner, agent.peer) == (lead.uid, lead.key)
                assert agent.name.endswith("@one") and agent.guest["alias"] == "one"
                own = site.agents.authority.own_policy(agent)
                most = policy.as_bound(policy.parse(agent.guest["bound"]["policy"], agent.label))
                assert policy.uncovered(own, most) is None

    with _without_bugs() as path, world_in(path) as world, pytest.MonkeyPatch.context() as patch:
        at_site(world, patch, act)


def facts(data: bytes) -> None:
    """What a host says: no one else's agent changes, and what is told of its own is as it would be
    of an agent here."""

    async def act(lone: Lone) -> None:
        agent, other = await lone.running("x"), lone.make("other", placement="")
        talker = lone.start(lone.make("t", mode="turn"))
        await lone.far.say("state", talker, status="idle", run="")
        messages = lone.world.agents.messages
        for name in ("m", "n"):
            messages.send(ROOT, talker, name, name=name, asked="me")
        lone.lead.switch(talker, "s")
        before = other.dump()
        agents = {"x": agent.incarnation, "other": other.incarnation, "t": talker.incarnation}
        lone.far.stream = Stream()
        for event in _messages(data, FACTS, agents):
            try:
                await lone.far.hear(event)
            except BrokenLinkError:
                break
        await lone.until(lambda: True)
        assert other.dump() == before
        assert all(math.isfinite(value) for value in agent.usage.values())
        for one in (agent, talker):
            for text in (one.reason, *one.usage, str(one.heard.get("refused", ""))):
                assert text.isprintable(), text
            for line in lone.world.lines(one):
                assert line.isprintable() and isinstance(json.loads(line), dict), line
            assert all(isinstance(json.loads(line), dict) for line in messages.lines(one))
        for message in lone.world.agents.items.of(talker.index, items.Message):
            assert message.sender.isprintable() and message.reason.isprintable(), message
            assert message.provenance in OWN or message.name in ("m", "n")
            assert len(lone.streams.of(message.index).text) <= 512 << 10

    with _without_bugs() as path, world_in(path, nodes=NODES) as world:
        on_lead(world, act)


def given_back(data: bytes) -> None:
    """What a host gives of an agent that has ended: it is where such files are, no more than there
    may be, and the agent ends, whatever it is."""
    first, _, rest = data.partition(b"\n")
    said = parse_json_object(decode(first))
    files = said.get("files")
    lengths = {name: abs(said[name]) % (1 << 63) for name in ("out", "log")
               if said.get(name).__class__ is int}  # fmt: skip
    gap = lengths.get("log", 0) % 7

    def read(agent: Any, name: str, offset: int, size: int) -> tuple[int, bytes]:
        skip = gap if name in ("out", "log") else 0
        return offset + skip, rest[offset : offset + size]

    async def act(two: Two) -> None:
        agent = two.lead.agent("x")
        with mock.patch.object(two.supplies, "_read", read):
            two.returns.ended(agent, {"files": files, **lengths})
            await two.run(lambda: bool(two.lead.done))
        top, size = two.lead.directory("x"), 0
        for above, directories, names in os.walk(top):
            for name in (*directories, *names):
                path = Path(above, name)
                assert not path.is_symlink()
                if name in names:
                    assert str(path.relative_to(top)).startswith(_LEFT), path
                    size += path.stat().st_size
        assert size <= 2 * (_ARTIFACT_MAX + 2 * _DOCUMENT_MAX) + 4 * _LOG_MAX

    with _without_bugs() as path:
        two = Two(path, files=_FILES_MAX, document_max=_DOCUMENT_MAX, artifact_max=_ARTIFACT_MAX,
                  log_max=_LOG_MAX)  # fmt: skip
        two.add("x")
        in_two(two, act)


PEERS: Final[tuple[Callable[[bytes], None], ...]] = (admitted, operations, facts, given_back)
