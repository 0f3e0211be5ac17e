"""The first boot: limits of memory, processes and processor time, which need the controllers."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from runtime.kernel.cgroups import Cgroup
from tests.systemd.service import AGENTS, SECONDS, Service, systemctl
from tests.worlds.daemon import alive, read, refusal, wait_dead, wait_status, wait_until, write

MIB = 1 << 20


def _python(*lines: str) -> str:
    """On one line, as ``exec`` takes it."""
    text = "\n".join(lines)
    return "python3 -Sc " + shlex.quote(f"exec({text!r})")


def _allocate(mib: int) -> str:
    return f"bytes = b'x' * ({mib} << 20)"


#: until there is no process left to be had, and then goes on
FORK = _python(
    "import os, time",
    "made = 0",
    "try:",
    "    while made < 100:",
    "        if os.fork() == 0: time.sleep(1000)",
    "        made += 1",
    "except OSError as error:",
    "    print(error.strerror)",
    "print('went on')",
)
UNTIL_GO = "while ! grep -q go $CTX_SELF/meta.json 2>/dev/null; do sleep 0.1; done; "


def _usage(agent: Path) -> dict[str, int]:
    pairs = (line.split("=") for line in read(agent, "usage").splitlines())
    return {key: int(value) for key, value in pairs}


def _end(agent: Path) -> tuple[str, str]:
    wait_dead(agent, SECONDS)
    return read(agent, "outcome").strip(), read(agent, "reason").strip()


def _busy(agent: Path) -> Cgroup:
    wait_status(agent, "busy", timeout=SECONDS)
    return Cgroup(Path(read(agent, "cgroup").strip()))


def _with_child(name: str, command: str) -> str:
    """A program that makes an agent, and goes on when that has ended."""
    lines = (
        f"cd $CTX_ROOT/agent; mkdir {name}.d; cd {name}.d",
        f"printf '%s\\n' {shlex.quote(command)} > exec",
        "echo start > ctl; cat wait outcome reason",
    )
    return "sh -c " + shlex.quote("set -e; " + "; ".join(lines))


def test_the_controllers_are_there(service: Service) -> None:
    assert "controllers=memory,pids,cpu\n" in (service.root / "status").read_text()


def test_who_takes_more_memory_than_it_may_ends_with_oom(service: Service) -> None:
    other = service.run("other", "sleep 1000")
    _busy(other)
    agent = service.run("greedy", _python(_allocate(200)), limits="memory.max=64M")
    assert _end(agent) == ("error", "oom")
    assert 48 * MIB < _usage(agent)["memory_peak"] <= 64 * MIB
    assert read(other, "status") == "busy\n", "it was nobody else's end"
    assert systemctl("show", "--value", "--property", "ActiveState", AGENTS) == "active\n"
    write(other / "ctl", "kill")
    assert _end(service.run("unlimited", _python(_allocate(200)))) == ("done", "exit:0")


def test_a_program_goes_on_without_a_helper_that_was_killed_for_memory(service: Service) -> None:
    command = "sh -c " + shlex.quote(_python(_allocate(200)) + " || echo helper $?")
    agent = service.run("helped", command, limits="memory.max=64M")
    assert _end(agent) == ("done", "exit:0")
    assert read(agent, "result.md") == "helper 137\n"


def test_fork_fails_at_pids_max_and_the_agent_goes_on(service: Service) -> None:
    agent = service.run("forker", FORK, limits="pids.max=20")
    assert _end(agent) == ("done", "exit:0")
    assert read(agent, "out") == "Resource temporarily unavailable\nwent on\n"


def test_cpu_max_throttles(service: Service) -> None:
    agent = service.run("spinner", "sh -c 'while :; do :; done'", limits="cpu.max=20000")
    cgroup = _busy(agent)
    assert cgroup.read("cpu.max") == "20000 100000\n"
    wait_until(lambda: cgroup.keys("cpu.stat")["nr_throttled"] > 0, "it is throttled", SECONDS)
    write(agent / "limits", "cpu.max=30000 50000")
    assert cgroup.read("cpu.max") == "30000 50000\n"
    assert _usage(agent)["cpu_usec"] > 0
    write(agent / "ctl", "kill")
    assert _end(agent) == ("cancelled", "operator_stop")


def test_max_takes_a_limit_away_from_a_live_agent(service: Service) -> None:
    files = ("memory.max", "pids.max", "cpu.max")
    agent = service.make("freed", "sleep 1000")
    write(agent / "limits", "memory.max=64M\npids.max=30\ncpu.max=90000")
    write(agent / "ctl", "start")
    cgroup = _busy(agent)
    try:
        write(agent / "limits", "\n".join(f"{file}=max" for file in files))
        assert [cgroup.read(file) for file in files] == ["max\n", "max\n", "max 100000\n"]
    finally:
        write(agent / "ctl", "kill")


def test_refused_limits_change_nothing(service: Service) -> None:
    agent = service.run("strict", "sleep 1000")
    cgroup = _busy(agent)
    try:
        assert refusal(agent / "limits", "memory.max=64M\npids.max=many") == "EINVAL"
        assert "memory.max=max\n" in read(agent, "limits")
        assert cgroup.read("memory.max") == "max\n"
    finally:
        write(agent / "ctl", "kill")


def test_what_a_child_takes_counts_against_its_parents_memory(service: Service) -> None:
    command = _with_child("kid", _python(_allocate(200)))
    agent = service.run("boss", command, limits="memory.max=64M")
    assert _end(agent) == ("done", "exit:0")
    assert read(agent, "out") == "error\noom\n"
    assert 48 * MIB < _usage(agent)["memory_peak"] <= 64 * MIB
    kid = service.agent_dir("kid")
    # the kernel counts what it then refuses higher up
    assert 32 * MIB < _usage(kid)["memory_peak"] <= 66 * MIB
    ends = [e for e in service.events("kid") if e["type"] == "run.end"]
    assert ends[0]["usage"]["memory_peak"] == _usage(kid)["memory_peak"]


def test_what_a_child_starts_counts_against_its_parents_processes(service: Service) -> None:
    agent = service.run("boss2", _with_child("kid2", FORK), limits="pids.max=30")
    assert _end(agent) == ("done", "exit:0")
    assert read(agent, "out") == "done\nexit:0\n"
    kid = service.agent_dir("kid2")
    assert read(kid, "out") == "Resource temporarily unavailable\nwent on\n"


def test_limits_are_kept_through_a_crash(service: Service) -> None:
    limits = "memory.max=64M\npids.max=30\ncpu.max=90000"
    agent = service.make("kept", "sh -c " + shlex.quote(UNTIL_GO + _python(_allocate(200))))
    write(agent / "limits", limits)
    write(agent / "ctl", "start")
    cgroup = _busy(agent)
    pid = int(read(agent, "pid"))
    said = read(agent, "limits")
    before = {file: cgroup.read(file) for file in ("memory.max", "pids.max", "cpu.max")}
    assert list(before.values()) == [f"{64 * MIB}\n", "30\n", "90000 100000\n"]
    service.restart()
    assert alive(pid)
    assert read(agent, "status") == "busy\n"
    assert read(agent, "limits") == said
    assert {file: cgroup.read(file) for file in before} == before
    write(agent / "limits", "memory.max=80M")
    assert cgroup.read("memory.max") == f"{80 * MIB}\n"
    assert "memory_peak" in _usage(agent)
    write(agent / "meta.json", json.dumps({"go": True}))
    assert _end(agent)[0] == "error"
    wait_until(lambda: not cgroup.exists(), "a helper has removed its cgroup")
    assert 64 * MIB < _usage(agent)["memory_peak"] <= 80 * MIB


def test_a_limit_of_the_unit_is_one_of_all_agents(service: Service) -> None:
    systemctl("set-property", "--runtime", AGENTS, "MemoryMax=64M")
    try:
        assert _end(service.run("bounded", _python(_allocate(200)))) == ("error", "oom")
    finally:
        systemctl("set-property", "--runtime", AGENTS, "MemoryMax=infinity")
    assert _end(service.run("free", _python(_allocate(200)))) == ("done", "exit:0")
