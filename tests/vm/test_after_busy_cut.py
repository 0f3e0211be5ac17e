"""The third boot: what cut2.py left, whatever that is, is in order."""

from __future__ import annotations

from tests.systemd.service import Service
from tests.vm.power import UNSYNCED, damaged
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


def test_agents_run_again(service: Service) -> None:
    assert read(service.finish("last", "echo hello"), "result.md") == "hello\n"
