"""The second boot: what the power cut of cut1.py left."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.systemd.service import SECONDS, Service
from tests.vm.power import UNSYNCED, damaged, durable_trees, models
from tests.worlds.daemon import read, wait_until
from tests.worlds.models import Metered
from tests.worlds.spenders import TOKENS, tokens, usage

RAN = ("runs", "above", "below", "partly")
LOST = ("interrupted\n", "reboot\n")


@pytest.fixture(scope="module", autouse=True)
def metering() -> Iterator[Metered]:
    """There before ctxd is."""
    with models() as made:
        yield made


def _types(service: Service, name: str) -> list[str]:
    lines = read(service.agent_dir(name), "session/events.jsonl").splitlines()
    return [json.loads(line)["type"] for line in lines if "\0" not in line]


def test_the_cut_was_one() -> None:
    assert not UNSYNCED.exists()


def test_agents_that_ran_are_lost_by_reboot(service: Service) -> None:
    for name in RAN:
        agent = service.agent_dir(name)
        assert read(agent, "status") == "dead\n"
        assert (read(agent, "outcome"), read(agent, "reason")) == LOST
    goes_on = Path(read(service.agent_dir("spends"), "cgroup").strip())
    assert set(service.cgroup.path.glob("user-*/agent-*")) <= {goes_on}


def test_a_life_that_goes_on_has_used_what_it_had(service: Service, metering: Metered) -> None:
    """What was used ten seconds before the cut, though nobody synced it."""
    spends = service.agent_dir("spends")
    refused = usage(spends)["requests.refused"]
    assert tokens(spends) == 3 * TOKENS
    wait_until(lambda: usage(spends)["requests.refused"] != refused, "it is refused", SECONDS)
    assert tokens(spends) == 3 * TOKENS and metering.upstream.asked == []


def test_a_control_is_there_that_was_written_and_synced(service: Service) -> None:
    made = service.agent_dir("made")
    assert read(made, "status") == "new\n"
    assert read(made, "label") in ("synced\n", "not-synced\n")
    assert read(made, "exec") == "true\n"


def test_a_control_is_there_that_was_synced_by_another_descriptor(service: Service) -> None:
    assert read(service.agent_dir("by-file"), "label") == "synced\n"


def test_documents_are_there_that_were_synced(service: Service) -> None:
    agent = service.agent_dir("ended")
    assert (read(agent, "outcome"), read(agent, "reason")) == ("done\n", "exit:0\n")
    assert read(agent, "result.md") == "result\n"
    assert read(agent, "handoff.md") == "task\n"


def test_a_history_is_there_that_was_synced(service: Service) -> None:
    types = _types(service, "ended")
    assert [types.count(x) for x in ("agent.start", "run.end", "agent.stop")] == [1, 1, 1], types


def test_there_is_no_state_without_its_event(service: Service) -> None:
    expected = ["agent.create", "agent.start", "agent.stop"]
    found = {name: _types(service, name) for name in RAN}
    told = {name: [type for type in types if type in expected] for name, types in found.items()}
    assert told == dict.fromkeys(RAN, expected)
    assert [type for type in _types(service, "made") if type in expected] == expected[:1]


def test_histories_are_whole(service: Service) -> None:
    damage = damaged(service.root)
    assert not damage, damage


def test_files_are_there_that_were_synced(service: Service) -> None:
    for tree in durable_trees(service.root):
        # behind it ext4 may show zeros, as it does for whatever was appended and not synced
        assert (tree / "synced").read_bytes().startswith(b"first\nsecond\n"), tree
        assert (tree / "current").read_bytes() == b"new\n", tree
        assert not (tree / "new").exists()


def test_files_that_were_not_synced_are_there_or_not(service: Service) -> None:
    for tree in durable_trees(service.root):
        lost = tree / "not-synced"
        assert not lost.exists() or lost.read_bytes() in (b"", b"lost or not\n"), tree


def test_what_was_not_synced_is_there_or_not(service: Service) -> None:
    agent = service.agent_dir("late")
    if agent.exists():
        assert read(agent, "status") in ("new\n", "dead\n")
    else:
        assert service.make("late", "true").exists()


def test_agents_run_again(service: Service) -> None:
    assert read(service.finish("next", "echo hello"), "result.md") == "hello\n"
    agent = service.agent_dir("runs")
    agent.rmdir()
    assert read(service.finish("runs", "echo again"), "result.md") == "again\n"
