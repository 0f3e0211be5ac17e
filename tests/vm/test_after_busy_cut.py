"""The third boot: what cut2.py left, whatever that is, is in order."""

from __future__ import annotations

import json

from tests.systemd.service import Service
from tests.vm.power import ACKNOWLEDGED, UNSYNCED, damaged, durable_trees, version
from tests.worlds.daemon import read

FINAL = {("done\n", "exit:0\n"), ("interrupted\n", "reboot\n")}


def test_the_cut_was_one() -> None:
    assert not UNSYNCED.exists()


def test_every_agent_is_new_or_recorded(service: Service) -> None:
    found = sorted((service.root / "agent").glob("busy-*.d"))
    assert found, "something was synced"
    for agent in found:
        if read(agent, "status") != "new\n":
            assert read(agent, "status") == "dead\n"
            assert (read(agent, "outcome"), read(agent, "reason")) in FINAL, agent
        agent.rmdir()


def test_histories_are_whole(service: Service) -> None:
    damage = damaged(service.root)
    assert not damage, damage


def test_what_was_acknowledged_and_synced_is_there(service: Service) -> None:
    """That, or what was being written; never some of both."""
    last = json.loads(ACKNOWLEDGED.read_bytes())
    assert last > 0
    assert int(read(service.agent_dir("counted"), "label")) in (last, last + 1)
    for tree in durable_trees(service.root):
        synced = "".join(f"{number}\n" for number in range(1, last + 1))
        assert (tree / "lines").read_text().startswith(synced), tree
        # the next version was renamed before it was synced, as careful programs do not
        replaced = (tree / "replaced").read_bytes()
        assert replaced in (version(last), version(last + 1), b""), f"{replaced[:8]!r}, {last}"


def test_agents_run_again(service: Service) -> None:
    assert read(service.finish("last", "echo hello"), "result.md") == "hello\n"
