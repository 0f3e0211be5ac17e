"""Pipes whose mutex somebody holds: an agent that of its own, into which or from which others move
bytes, and strangers that of a FIFO on which others wait."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.system.hostile.guarded import OBEDIENCE, Guard
from tests.worlds.daemon import TIMEOUT, Daemon, read, wait_dead, wait_status, wait_until, write
from tests.worlds.held import held
from tests.worlds.whose import OTHER

PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
OWNER = OTHER
#: that an attack goes on, in seconds
LONG_ENOUGH = 1.5

#: writes to its own standard input or output from pages that only ctxd can fill: the pipe's mutex
#: is held meanwhile
HOLD = """
import mmap, os, sys, threading
path, number = f'{sys.argv[2]}/artifact/page', int(sys.argv[1])
SIZE = 16 << 20
with open(path, 'wb') as file:
    for _ in range(SIZE >> 16):
        file.write(b'x' * (1 << 16))
pipe = os.open(f'/proc/self/fd/{number}', os.O_WRONLY)

def holding():
    while True:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(fd, SIZE, mmap.MAP_PRIVATE, mmap.PROT_READ) as pages:
            pages.madvise(mmap.MADV_RANDOM)
            for at in range(0, SIZE, 4096):
                with memoryview(pages)[at:at + 8] as part:
                    os.write(pipe, part)
        os.close(fd)

for _ in range(4):
    threading.Thread(target=holding).start()
print('attacks', flush=True)
while number == 0:
    os.read(0, 1 << 16)
"""


def script(daemon: Daemon) -> str:
    directory = daemon.base / "attack"
    directory.mkdir(exist_ok=True)
    (directory / "hold.py").write_text(HOLD)
    return f"{directory} /attack ro\n"


def command(number: int) -> str:
    return f"{PYTHON} /attack/hold.py {number} $CTX_SELF"


def resident(
    daemon: Daemon, number: int, **fields: str
) -> tuple[Path, Callable[[], object]]:
    """An agent that does so, and what hands it bytes."""
    fields = {"owner": OWNER, "mount": script(daemon), "mode": "resident", **fields}
    agent = daemon.make("hold", f"sh -c '{command(number)}'", **fields)
    write(agent / "ctl", "start")
    wait_until(lambda: "attacks" in read(agent, "out"), "it attacks")
    return agent, lambda: write(agent / "inbox", "x" * 100)


def task(daemon: Daemon, number: int, **fields: str) -> tuple[Path, Callable[[], object]]:
    """An agent with such a command."""
    fields = {"owner": OWNER, "mount": script(daemon), **fields}
    agent = daemon.make("hold", "sleep 1000", **fields)
    write(agent / "ctl", "start")
    made = agent / "task" / "t"
    made.mkdir()
    write(made / "cmd", command(number))
    write(made / "accepts_input", "1")
    write(made / "ctl", "start")
    wait_until(lambda: "attacks" in read(made, "output"), "it attacks")
    return agent, lambda: write(made / "input", "x" * 100)


Kind = Callable[..., tuple[Path, Callable[[], object]]]
CASES = {"stdin-resident": (resident, 0), "stdout-task": (task, 1),
         "stdin-task": (task, 0), "stdout-resident": (resident, 1)}
#: one of them in each run of the tests
EACH = pytest.mark.parametrize(("kind", "number"), [
    pytest.param(*case, id=name, marks=pytest.mark.long if number else [])
    for number, (name, case) in enumerate(CASES.items())
])


@EACH
def test_who_holds_its_own_pipe_holds_up_nobody_else(
    daemon: Daemon, guard: Guard, kind: Kind, number: int
) -> None:
    """Nor who hands it bytes: what is not read is refused, or waits."""
    _, hand = kind(daemon, number)
    slowest, until = 0.0, time.monotonic() + LONG_ENOUGH
    while time.monotonic() < until:
        begun = time.monotonic()
        try:
            hand()
        except OSError as error:
            assert error.strerror in ("Device or resource busy", "Disk quota exceeded"), error
        slowest = max(slowest, time.monotonic() - begun)
        time.sleep(0.02)  # what is measured is time
    assert slowest < OBEDIENCE


@pytest.mark.alone
@EACH
def test_it_is_killed_by_the_client(daemon: Daemon, kind: Kind, number: int) -> None:
    agent, hand = kind(daemon, number)
    hand()
    begun = time.monotonic()
    done = daemon.ctx("kill", "hold")
    assert done.returncode == 0, done.stderr
    wait_dead(agent)
    assert time.monotonic() - begun < 2 * OBEDIENCE


@EACH
def test_it_ends_with_its_parent(daemon: Daemon, kind: Kind, number: int) -> None:
    boss = daemon.run("boss", "sleep 1000", owner=OWNER, mount=script(daemon))
    agent, _ = kind(daemon, number, mount="", parent="agent:boss")  # it sees the same
    write(boss / "ctl", "kill")
    wait_dead(agent)


@EACH
def test_the_death_of_the_daemon_is_obeyed(daemon: Daemon, kind: Kind, number: int) -> None:
    agent, hand = kind(daemon, number)
    hand()
    node = daemon.cgroup.child(f"user-{OWNER}", "agent-hold")
    daemon.kill()
    node.child("run").kill()  # a resident's program is the agent, and so is that of mode once
    wait_until(lambda: not node.populated(), "its cell ends without a daemon")
    daemon.start()
    wait_dead(agent)


def waiter(
    stack: ExitStack, agent: Path, where: str = "wait_for_partner"
) -> subprocess.Popen[bytes]:
    """Whoever waits for its end; sleeps in that function of the kernel."""
    process = stack.enter_context(subprocess.Popen(["cat", agent / "wait"]))
    stack.callback(process.kill)
    kernel = Path(f"/proc/{process.pid}/wchan")
    wait_until(lambda: where in kernel.read_text(), "it waits")
    return process


HOLDS = pytest.mark.needs_root("only root opens a FIFO of wait, which is 0444, for writing")


@HOLDS
@pytest.mark.alone
@pytest.mark.parametrize("owner", [OWNER, pytest.param("4001", marks=pytest.mark.long)],
                         ids=["same", "other"])
def test_who_holds_a_wait_holds_up_no_waiter_elsewhere(daemon: Daemon, owner: str) -> None:
    attacked = daemon.run("attacked", "sleep 1000", owner=OWNER)
    agents = [daemon.run(f"other{i}", "sleep 1000", owner=owner) for i in range(2)]
    with ExitStack() as stack:
        others = [waiter(stack, agent) for agent in agents]
        with held(Path(os.readlink(attacked / "wait")), what="write"):
            its = waiter(stack, attacked, "fifo_open")
            write(attacked / "ctl", "kill")
            wait_status(attacked, "dead")
            for agent, other in zip(agents, others, strict=True):
                write(agent / "ctl", "kill")
                wait_status(agent, "dead")
                other.wait(OBEDIENCE)
            assert its.poll() is None
        assert its.wait(TIMEOUT) == 0


@HOLDS
@pytest.mark.alone
def test_the_daemon_stops_while_somebody_holds_a_wait(daemon: Daemon) -> None:
    attacked = daemon.run("attacked", "sleep 1000", owner=OWNER)
    with held(Path(os.readlink(attacked / "wait")), what="write"):
        write(attacked / "ctl", "kill")
        wait_status(attacked, "dead")
        begun = time.monotonic()
        daemon.stop()
        assert time.monotonic() - begun < 5 * OBEDIENCE
