"""The last events of agents, as ``ctx top`` looks at them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from client.installed.feed import Sampler
from client.root import Root
from tests.unit.client.fakes import FakeRoot
from tests.unit.client.installed.test_model import agent


def line(kind: str) -> str:
    return f'{{"id":"e1","ts":"2026-11-25T00:00:00.000Z","type":"{kind}","run":"r1"}}\n'


@pytest.fixture
def root(tmp_path: Path) -> FakeRoot:
    return FakeRoot(tmp_path / "ctx")


@pytest.fixture
def sampler(root: FakeRoot) -> Sampler:
    return Sampler(Root(str(root.path)), lambda: None)


def test_an_event_is_read_once_and_its_file_is_not_kept_open(
    root: FakeRoot, sampler: Sampler
) -> None:
    events = root.agent("x", events=line("run.start")) / "session" / "events.jsonl"
    of, descriptors = agent("x"), os.listdir("/proc/self/fd")
    assert sampler.read(of) and sampler.last[of.key].text == "run.start r1"
    assert not sampler.read(of), "it has not grown"
    events.write_text(line("run.start") + line("run.end"))
    assert sampler.read(of) and sampler.last[of.key].text == "run.end r1"
    assert os.listdir("/proc/self/fd") == descriptors


def test_a_dead_agent_is_looked_at_once_more(root: FakeRoot, sampler: Sampler) -> None:
    events = root.agent("x", events=line("agent.start")) / "session" / "events.jsonl"
    assert sampler.read(agent("x"))
    events.write_text(line("agent.stop"))
    assert sampler.read(agent("x", "dead"))
    events.write_text(line("agent.create") + line("agent.start"))
    assert not sampler.read(agent("x", "dead"))


def test_what_is_not_the_callers_is_asked_for_once(root: FakeRoot, sampler: Sampler) -> None:
    assert not sampler.read(agent("none"))
    root.agent("none", events=line("run.start"))
    assert not sampler.read(agent("none")), "each time would be a refusal"
