"""The units of contrib/systemd under a real systemd."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

from runtime.kernel import linux
from tests.systemd.service import AGENTS, DAEMON, Service, systemctl
from tests.worlds.daemon import (
    TIMEOUT,
    alive,
    end_process,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)

#: ends when the operator writes "go" into its meta.json, which it can see when /ctx works
UNTIL_GO = "while ! grep -q go $CTX_SELF/meta.json 2>/dev/null; do sleep 0.05; done"
STUBBORN = "sh -c 'trap \"echo term; exit 0\" TERM; while :; do sleep 0.05; done'"


def _go(agent: Path) -> None:
    write(agent / "meta.json", '{"go": true}')


def _cgroup(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text().split("::")[1].strip()


def _family(service: Service, prefix: str) -> list[Path]:
    """Three generations, all busy."""
    command = STUBBORN
    for level in (3, 2):
        name = f"{prefix}{level}.d"
        command = "sh -c " + shlex.quote(
            f"set -e; cd $CTX_ROOT/agent; mkdir {name}; "
            f"echo 'allow {prefix}{level}_t agent:* create' > {name}/policy; "
            f"printf '%s\\n' {shlex.quote(command)} > {name}/exec; echo start > {name}/ctl; "
            "sleep 1000"
        )
    service.run(f"{prefix}1", command)
    family = [service.agent_dir(f"{prefix}{level}") for level in (1, 2, 3)]
    for agent in family:
        wait_until(agent.exists, f"{agent.name} is made")
        wait_status(agent, "busy")
    return family


def _ends(service: Service, agent: Path) -> tuple[str, str]:
    name = agent.name.removesuffix(".d")
    stops = [event for event in service.events(name) if event["type"] == "agent.stop"]
    assert len(stops) == 1
    return read(agent, "outcome").strip(), read(agent, "reason").strip()


def test_the_unit_is_ready_when_ctx_answers(service: Service) -> None:
    assert service.show("Type") == "notify"
    assert service.show("ActiveState") == "active"
    assert "state=ready\n" in (service.root / "status").read_text()
    agent = service.run("first", f"sh -c '{UNTIL_GO}; echo hello'")
    wait_status(agent, "busy")
    assert _cgroup(service.pid) == f"/system.slice/{DAEMON}"
    cgroup = _cgroup(int(read(agent, "pid")))
    assert cgroup.startswith(f"/system.slice/{AGENTS}/user-0/agent-first/")
    _go(agent)
    wait_dead(agent)
    assert _ends(service, agent) == ("done", "exit:0")
    assert read(agent, "result.md") == "hello\n"


def test_the_configuration_is_read_again_on_reload(service: Service) -> None:
    pid = service.pid
    config = Path("/etc/ctxfs/config.yaml")
    config.parent.mkdir(exist_ok=True)
    config.write_text("children: 77\n")
    try:
        systemctl("reload", DAEMON)
        status = service.root / "status"
        wait_until(lambda: "children=77," in status.read_text(), "the setting counts")
    finally:
        config.unlink()
    systemctl("reload", DAEMON)
    assert service.pid == pid


def test_declared_agents_come_up_and_a_broken_file_changes_nothing(service: Service) -> None:
    path = Path("/etc/ctxfs/agents.d/declared.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("start: true\nexec: sleep 1000\n")
    agent = service.agent_dir("declared")
    try:
        systemctl("reload", DAEMON)
        wait_until(agent.exists, "it is made")
        wait_status(agent, "busy")
        pid = read(agent, "pid")
        path.write_text("start: true\nexec: sleep 2000\nmode: fast\n")
        done = subprocess.run(["systemctl", "reload", DAEMON], capture_output=True, timeout=TIMEOUT,
                              check=False)
        assert done.returncode != 0
        journal = ["journalctl", "-u", DAEMON, "-o", "cat"]
        said = subprocess.run(journal, capture_output=True, text=True, timeout=TIMEOUT, check=True)
        assert f'{path}:3: mode: "fast" is not one of once, turn, resident' in said.stdout
        service.restart()
        assert (read(agent, "pid"), read(agent, "exec")) == (pid, "sleep 1000\n")
        assert service.stop() == 0
        service.start()
        wait_status(agent, "busy")
        assert read(agent, "exec") == "sleep 1000\n", "what the file said before"
    finally:
        path.unlink()
    systemctl("reload", DAEMON)
    assert read(agent, "status") == "busy\n"


def test_agents_live_through_crashes_and_find_ctx_again(service: Service) -> None:
    agent = service.run("survivor", f"sh -c '{UNTIL_GO}; echo found > $CTX_SELF/result.md'")
    wait_status(agent, "busy")
    pid, incarnation = read(agent, "pid"), read(agent, "incarnation")
    mounts = sorted(service.mounts())
    waiting = subprocess.Popen(["cat", str(agent / "wait")])
    try:
        for _ in range(2):
            before = service.pid
            service.restart()
            assert service.pid != before
            assert alive(int(pid))
            assert read(agent, "status") == "busy\n"
            assert (read(agent, "pid"), read(agent, "run")) == (pid, "r1\n")
            assert read(agent, "incarnation") == incarnation
            assert sorted(service.mounts()) == mounts, "a dead mount is left"
        assert waiting.poll() is None
        _go(agent)
        assert waiting.wait(TIMEOUT) == 0
    finally:
        waiting.kill()
        waiting.wait()
    assert _ends(service, agent) == ("done", "exit:0")
    assert read(agent, "result.md") == "found\n"
    types = [event["type"] for event in service.events("survivor")]
    assert types.count("agent.start") == types.count("run.end") == 1
    assert service.finish("later", "true").exists()


def test_a_family_whose_head_dies_with_the_daemon_is_gone_and_recorded(service: Service) -> None:
    family = _family(service, "l")
    pids = [int(read(agent, "pid")) for agent in family]
    restarts = int(service.show("NRestarts"))
    for pid in (service.pid, pids[0]):
        end_process(pid)
    wait_until(lambda: not any(alive(pid) for pid in pids), "nobody of the family is left")
    service.wait_restarted(restarts + 1)
    for agent in family:
        wait_dead(agent)
    assert _ends(service, family[0]) == ("error", "signal:9")
    for agent in family[1:]:
        assert _ends(service, agent) == ("cancelled", "parent_dead")
    assert read(family[2], "out") == "term\n", "SIGTERM came first"
    for parent, child in (("l1", "l2"), ("l2", "l3")):
        cancels = [e for e in service.events(parent) if e["type"] == "agent.child.cancel"]
        assert [(e["parent"], e["child"], e["reason"]) for e in cancels] == [
            (parent, child, "parent_dead")
        ]
    cgroup = service.cgroup.child("user-0", "agent-l1")
    wait_until(lambda: not cgroup.exists(), "a helper has removed its cgroup")


def test_stop_cancels_every_agent_and_takes_the_mount_away(service: Service) -> None:
    family = _family(service, "s")
    made = service.make("never-started", "true")
    pids = [int(read(agent, "pid")) for agent in family]
    assert service.stop() == 0
    assert service.show("Result") == "success"
    assert service.show("ActiveState") == "inactive"
    assert not any(alive(pid) for pid in pids)
    assert service.mounts() == []
    assert not os.path.lexists("/ctx/status")
    left = {path.name for path in service.cgroup.path.iterdir() if path.is_dir()}
    assert left - {".control"} == {"holder"}
    assert len(service.cgroup.processes()) == 1, "the one that holds the cgroup"
    service.start()
    reasons = [_ends(service, agent) for agent in (*family, made)]
    down = ("cancelled", "shutdown")
    below = ("cancelled", "parent_dead")
    assert reasons == [down, below, below, down]


def test_stopping_the_agents_unit_stops_the_daemon_first(service: Service) -> None:
    agent = service.run("orderly", STUBBORN)
    wait_status(agent, "busy")
    systemctl("stop", AGENTS)
    assert service.show("ActiveState") == "inactive"
    assert service.show("Result") == "success"
    assert service.mounts() == []
    service.start()
    assert _ends(service, agent) == ("cancelled", "shutdown")


def test_the_agents_unit_ends_agents_that_have_no_daemon(service: Service) -> None:
    agent = service.run("lost", STUBBORN)
    wait_status(agent, "busy")
    pid = int(read(agent, "pid"))
    service.kill()
    systemctl("stop", AGENTS)
    assert service.show("ActiveState") != "active"
    assert not alive(pid)
    service.start()
    assert _ends(service, agent) == ("interrupted", "runtime_lost")


def test_what_the_reboot_finds() -> None:
    """Left as it is: test_after_reboot.py looks what became of it."""
    service = Service()
    service.start()
    _family(service, "r")
    boot = json.dumps({"boot": linux.boot_id()})
    service.make("configured", "true", **{"label": "first-boot", "meta.json": boot})
