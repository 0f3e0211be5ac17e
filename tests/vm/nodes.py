"""Two machines of their own, one the other's node: stopped, reset, and put back; then by ssh(1).

They are emulated, so all is slow there, and the lease is two minutes. ``python -m tests.vm.nodes``
runs these scenes alone, or those that it is given.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runtime.peers.lease import bound
from tests.vm.machine import MachineError, command, image, payload, say, tail, workplace

LEASE: Final = 120.0
#: of the other node, which is the same machine: it ends while that is stopped
SHORT: Final = 30.0
#: what the lead reckons with
GRACE: Final = 10.0
STOPPED: Final = 60.0
#: for whatever is waited for, and for all of it
SECONDS: Final = 300.0
_MOST_SECONDS: Final = 2400.0
_ADDRESS: Final = "10.79.0.2"
_RELAY: Final = f"[/usr/bin/python3, -IS, /opt/ctxfs/tests/vm/relay.py, {_ADDRESS}, '7979']"
_ROOT: Final = "users: {root: root}"
_CONFIG: Final = f"""\
nodes:
  n2: {{command: {_RELAY}, as: owner, {_ROOT}, lease: {LEASE:g}s}}
  short: {{command: {_RELAY}, as: owner, {_ROOT}, lease: {SHORT:g}s}}
"""
#: a key exchange is slow there
_FAR: Final = (
    f'  far: {{ssh: "{_ADDRESS}", {_ROOT}, lease: {LEASE:g}s, '
    "options: [-oKexAlgorithms=curve25519-sha256]}"
)


_AGENTS: Final = "/sys/fs/cgroup/system.slice/ctxd-agents.service/user-*"


def _runs(name: str) -> str:
    """What fails if no process of an agent is left, whatever ctxd says."""
    return f"grep -q 'populated 1' {_AGENTS}/agent-{name}/cgroup.events 2>/dev/null"


@dataclass
class Guest:
    """A machine with a disk of its own, which is told what to do by a serial line."""

    name: str
    work: Path
    mac: str
    #: of UDP: its own, and the other machine's
    ports: tuple[int, int]
    _process: subprocess.Popen[bytes] | None = None
    _number: int = 0

    @property
    def disk(self) -> Path:
        return self.work / f"{self.name}.img"

    @property
    def _console(self) -> Path:
        return self.work / f"{self.name}.console"

    @property
    def _monitor(self) -> Path:
        return self.work / f"{self.name}.monitor"

    def boot(self) -> None:
        """Begins to; ``wait_up`` says when it has."""
        own, other = self.ports
        payload_disk = self.work / f"payload-{self.name}.img"
        self._process = subprocess.Popen(
            command(
                self.work / "vmlinuz",
                {"root": f"file={self.disk}", "payload": f"file={payload_disk}"},
                self.name, self._console,
                "-netdev", f"socket,id=net,udp=127.0.0.1:{other},localaddr=127.0.0.1:{own}",
                "-device", f"virtio-net-pci,netdev=net,mac={self.mac}",
                "-qmp", f"unix:{self._monitor},server=on,wait=off",
            ),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def wait_up(self) -> None:
        self._line("@@ up")

    def _line(self, begins: str) -> str:
        assert self._process and self._process.stdout
        said: list[str] = []
        for line in self._process.stdout:
            text = line.decode(errors="replace").strip()
            if text.startswith(begins):
                return text
            said = [*said[-20:], text]
        said.append(tail(self._console))
        raise AssertionError(f"{self.name} is off; it said:\n" + "\n".join(said))

    def ask(self, script: str) -> tuple[int, str]:
        """What a script does there: its status, and what it prints."""
        assert self._process and self._process.stdin
        self._number += 1
        sent = base64.b64encode(script.encode()).decode()
        self._process.stdin.write(f"{self._number} {sent}\n".encode())
        self._process.stdin.flush()
        _, _, status, *said = self._line(f"@@ {self._number} ").split()
        return int(status), base64.b64decode("".join(said)).decode().strip()

    def do(self, script: str) -> str:
        status, said = self.ask(script)
        assert status == 0, f"{self.name}: {script}: status {status}: {said}"
        return said

    def until(self, condition: str, what: str, seconds: float = SECONDS) -> None:
        """It looks itself, since each word with it takes a while."""
        loop = f"until {condition}; do sleep 0.5; done"
        status, _ = self.ask(f"timeout {seconds:.0f} sh -c {shlex.quote(loop)}")
        assert status == 0, f"not within {seconds:.0f} s: {what}"

    def read(self, name: str, *files: str) -> list[str]:
        return [self.do(f"cat /ctx/agent/{name}.d/{file}") for file in files]

    def is_running(self, name: str) -> bool:
        return self.ask(_runs(name))[0] == 0

    def wait_ended(self, name: str, seconds: float = SECONDS) -> None:
        self.until(f"! {_runs(name)}", f"nothing runs of {name}", seconds)

    def end_sleep(self, name: str) -> None:
        """Has the program of an agent go on that waits for a sleep(1) to end."""
        pids = f"$(cat $(find {_AGENTS}/agent-{name} -name cgroup.procs))"
        self.do(f"for p in {pids}; do ! grep -qx sleep /proc/$p/comm || kill $p; done")

    # what befalls it

    def signal(self, number: int) -> None:
        assert self._process
        self._process.send_signal(number)

    def reset(self) -> None:
        """As by its button."""
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.connect(str(self._monitor))
            with monitor.makefile("rwb") as said:
                for word in ("qmp_capabilities", "system_reset"):
                    said.write(json.dumps({"execute": word}).encode() + b"\n")
                    said.flush()
                    while b'"return"' not in said.readline():
                        pass

    def off(self) -> None:
        if self._process:
            self._process.kill()
            self._process.communicate()
            self._process = None

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def snapshot(self) -> None:
        """A copy of its disk, as it is at one moment."""
        self.do("sync")
        with self.stopped():
            _copy(self.disk, self.disk.with_suffix(".kept"))

    def put_back(self) -> None:
        self.off()
        os.replace(self.disk.with_suffix(".kept"), self.disk)
        self.boot()


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "--sparse=always", "--reflink=auto", source, target], check=True)


def _ports() -> tuple[int, int]:
    """Two that nobody has."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.socket(type=socket.SOCK_DGRAM)) for _ in range(2)]
        for each in made:
            each.bind(("127.0.0.1", 0))
        first, second = (each.getsockname()[1] for each in made)
    return first, second


def _kill(*guests: Guest) -> None:
    """What waits for them is told that they are off."""
    for guest in guests:
        guest.signal(signal.SIGKILL)


class Two:
    """A lead, ``one``, and a host, ``two``."""

    def __init__(self, one: Guest, two: Guest) -> None:
        self.one, self.two = one, two
        self._names = iter(f"x{number}" for number in range(1, 1000))

    def configure(self, text: str) -> None:
        self.one.do(f"echo {shlex.quote(text)} >> /etc/ctxfs/config.yaml; systemctl reload ctxd")

    def connect(self) -> None:
        self.configure(_CONFIG.strip())
        self.works()
        for each in (self.one, self.two):
            each.do("sync")  # what was set up here is no part of what is tried

    def start(self, name: str, program: str, where: str = "n2") -> None:
        self.one.do(
            f"cd /ctx/agent && mkdir {name}.d && cd {name}.d && echo node={where} > placement && "
            f"echo {shlex.quote(program)} > exec && echo start > ctl"
        )

    def place(self, program: str, where: str = "n2") -> str:
        """A placed agent that runs."""
        name = next(self._names)
        self.start(name, program, where)
        self.one.until(f"grep -qx busy /ctx/agent/{name}.d/status", f"{name} runs")
        return name

    def dead(self, name: str, seconds: float = SECONDS) -> tuple[str, str]:
        """What has become of an agent, once it is dead, at both machines."""
        self.one.until(f"grep -qx dead /ctx/agent/{name}.d/status", f"{name} is dead", seconds)
        outcome, reason = self.one.read(name, "outcome", "reason")
        assert not self.two.is_running(f"{name}@one"), f"{name} is {outcome}, {reason}, and runs"
        return outcome, reason

    def works(self) -> None:
        """The node is in use, and runs nothing that its lead does not know of."""
        for _ in range(5):  # the link may not be there in time yet
            name = next(self._names)
            self.start(name, "echo again")
            if (end := self.dead(name)) == ("done", "exit:0"):
                break
        assert end == ("done", "exit:0"), end
        assert self.one.read(name, "out") == ["again"]
        assert not self.two.is_running("*"), "something runs that nobody knows"


def stopped(both: Two) -> None:
    """For less than one lease, and for more than another: the one is not noticed, and what has the
    other ends."""
    on, over = both.place("sh -c 'sleep 10000; echo went'"), both.place("sleep 10000", "short")
    pid = both.two.read(f"{on}@one", "pid")
    with both.two.stopped():
        time.sleep(STOPPED)
    woke = time.monotonic()
    both.two.wait_ended(f"{over}@one")
    say(f"  whose lease was over was gone {time.monotonic() - woke:.0f} s after it woke")
    outcome, reason = both.dead(over)
    assert (outcome, reason) in (("interrupted", "lease_over"), ("interrupted", "runtime_lost"))
    assert both.one.read(on, "status") == ["busy"] and both.two.read(f"{on}@one", "pid") == pid
    both.two.end_sleep(f"{on}@one")
    assert both.dead(on) == ("done", "exit:0")
    assert both.one.read(on, "out") == ["went"], "it ran once"
    both.works()


def reset(both: Two) -> None:
    """Of the host: all that was there has ended, and it is in use again. Of the lead: its placed
    children end, since their parent did."""
    lost = both.place("sleep 10000")
    both.two.do("sync")  # else it may have forgotten the agent
    began = time.monotonic()
    both.two.reset()
    both.two.wait_up()
    say(f"  the host is back after {time.monotonic() - began:.0f} s")
    outcome, reason = both.dead(lost, bound(LEASE, GRACE) + SECONDS)
    assert outcome == "interrupted" and reason in ("reboot", "runtime_lost"), (outcome, reason)
    say(f"  known at the lead after {time.monotonic() - began:.0f} s: {reason}")
    both.works()

    both.one.do(
        "mkdir /ctx/agent/boss.d; cd /ctx/agent/boss.d; "
        r"printf 'allow boss_t agent:* create\nallow boss_t tool:* execute\n"
        r"allow boss_t node:n2 place\n' > policy; "
        """echo "sh -c 'ctx spawn kid --node n2 -- sleep 10000; sleep 10000'" > exec; """
        "echo start > ctl"
    )  # fmt: skip
    both.one.until("grep -qx busy /ctx/agent/kid.d/status", "its child runs")
    assert both.two.is_running("kid@one")
    both.one.do("sync")
    began = time.monotonic()
    both.one.reset()
    both.two.wait_ended("kid@one", bound(LEASE, GRACE))
    say(f"  the child was gone after {time.monotonic() - began:.0f} s")
    both.one.wait_up()
    say(f"  the lead is back after {time.monotonic() - began:.0f} s")
    both.dead("boss", bound(LEASE, GRACE) + SECONDS)
    assert both.one.read("boss", "reason") == ["reboot"]
    both.works()


def put_back(both: Two) -> None:
    """To a snapshot of its disk: each of both. What was placed since then is nobody's, and ends."""
    for machine in (both.two, both.one):
        before = both.place("sleep 10000")
        machine.snapshot()
        after = both.place("sleep 10000")
        began = time.monotonic()
        machine.put_back()
        if machine is both.two:
            machine.wait_up()
        for name in (before, after):
            both.two.wait_ended(f"{name}@one", bound(LEASE, GRACE))
        say(f"  {machine.name} was put back: all was gone after {time.monotonic() - began:.0f} s")
        if machine is both.one:
            machine.wait_up()
        outcome, reason = both.dead(before, bound(LEASE, GRACE) + SECONDS)
        assert outcome == "interrupted" and reason in ("reboot", "runtime_lost"), (outcome, reason)
        both.works()


def typed(both: Two) -> None:
    """The five minutes of ctxfs-nodes(7), as root."""
    shown = both.two.do("ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub").split()[1]
    said = both.one.do(f"ctx nodes add far {_ADDRESS} --fingerprint {shown}")
    (line,) = (line for line in said.splitlines() if line.startswith("restrict,"))
    both.two.do(
        f"mkdir -p -m 700 /root/.ssh; echo {shlex.quote(line)} >> /root/.ssh/authorized_keys"
    )
    both.configure(_FAR)
    both.one.until("ctx nodes check far > /tmp/said 2>&1", "the node is reached")
    both.one.do("ctx spawn there --node far -- hostname")
    assert both.dead("there") == ("done", "exit:0")
    assert both.one.read("there", "out") == ["two"]


SCENES: Final = (stopped, reset, put_back, typed)


def run(wanted: tuple[Callable[[Two], None], ...] = SCENES) -> list[str]:
    """What went wrong; one after the other on the same machines."""
    found, failures = image(), []
    with workplace() as work, contextlib.ExitStack() as stack:
        payload(work / "payload", work / "payload.img")
        shutil.rmtree(work / "payload")
        first, second = _ports()
        one, two = (
            Guest(name, work, f"52:54:00:00:00:0{number}", ports)
            for number, (name, ports) in enumerate(
                (("one", (first, second)), ("two", (second, first))), 1
            )
        )
        (work / "vmlinuz").symlink_to(found / "vmlinuz")
        for guest in (one, two):
            _copy(found / "root.img", guest.disk)
            _copy(work / "payload.img", work / f"payload-{guest.name}.img")
            stack.callback(guest.off)
            guest.boot()
        late = threading.Timer(_MOST_SECONDS, _kill, (one, two))
        stack.callback(late.cancel)
        late.start()
        both, began = Two(one, two), time.monotonic()
        for guest in (one, two):
            guest.wait_up()
        say(f"two machines are up after {time.monotonic() - began:.0f} s")
        both.connect()
        for scene in wanted:
            say(f"{scene.__name__}, after {time.monotonic() - began:.0f} s")
            try:
                scene(both)
            except AssertionError as error:
                failures.append(f"{scene.__name__}: {error}")
                for guest in (one, two):
                    with contextlib.suppress(AssertionError):
                        looks = "cat /tmp/said /ctx/nodes /ctx/agents"
                        _, said = guest.ask(f"journalctl -u ctxd -n 20; {looks}")
                        say(f"{guest.name} says:\n{said}")
                break
    return failures


def main(names: list[str]) -> int:
    wanted = tuple(scene for scene in SCENES if not names or scene.__name__ in names)
    try:
        failures = run(wanted)
    except (AssertionError, MachineError, subprocess.CalledProcessError) as error:
        failures = [str(error)]
    for failure in failures:
        say(failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
