"""The second boot of the machine: what test_unit.py left, after ``systemctl reboot``."""

from __future__ import annotations

import json

from runtime.kernel import linux
from tests.systemd.service import Service
from tests.worlds.daemon import read, wait_dead, wait_status


def test_an_orderly_reboot_cancels_agents(service: Service) -> None:
    expected = {"r1": "shutdown", "r2": "parent_dead", "r3": "parent_dead"}
    for name, reason in {**expected, "configured": "shutdown"}.items():
        agent = service.agent_dir(name)
        wait_dead(agent)
        assert read(agent, "outcome") == "cancelled\n"
        assert read(agent, "reason") == f"{reason}\n"
    assert read(service.agent_dir("r3"), "out") == "term\n"
    configured = service.agent_dir("configured")
    assert read(configured, "label") == "first-boot\n"
    assert json.loads(read(configured, "meta.json"))["boot"] != linux.boot_id()


def test_declared_agents_come_up_with_the_machine(service: Service) -> None:
    agent = service.agent_dir("booting")
    wait_status(agent, "busy")
    types = [event["type"] for event in service.events("booting")]
    assert types.count("agent.start") == 1, "of this life"
