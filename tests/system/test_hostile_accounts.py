"""Agents that take what the daemon has: their owner's account bounds them, all together."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.hostile.guarded import guarded
from tests.worlds.daemon import (
    Daemon,
    daemon_of,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.whose import OTHER, ROOTLESS

PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
OWNER = OTHER
POOR = 3000


class Poor(Daemon):
    """May not open many files."""

    executed = True

    def command(self, *more: str) -> list[str]:
        return ["prlimit", f"--nofile={POOR}:{POOR}", *super().command(*more)]


def descriptors(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def resident_memory(daemon: Daemon) -> int:
    """Bytes of the daemon in memory."""
    for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmRSS")


def as_stranger(program: str, *arguments: str) -> str:
    """What another user's program says; without root, where others get nowhere, the user's."""
    ids = [] if ROOTLESS else ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]
    done = subprocess.run([*ids, PYTHON, "-c", program, *arguments], capture_output=True,
                          text=True, timeout=30, check=False)
    return done.stdout + done.stderr


def boss(daemon: Daemon, script: str, **files: str) -> Path:
    """An agent of an owner of its own, which may make children that run ``script``."""
    (daemon.base / "bin").mkdir(exist_ok=True)
    (daemon.base / "bin" / "boss.sh").write_text(script)
    return daemon.run("boss", "sh /attack/boss.sh", owner=OWNER,
                      mount=f"{daemon.base}/bin /attack ro", **files)


def children_said(daemon: Daemon) -> list[list[str]]:
    """The words of the first line of each of the six, when all have said something."""
    kids = [daemon.agent_dir(f"kid-{number}") for number in range(1, 7)]
    wait_until(lambda: all(kid.is_dir() and read(kid, "out") for kid in kids), "all have said it")
    return [read(kid, "out").splitlines()[0].split() for kid in kids]


CHILDREN = """
cd $CTX_ROOT/agent
for n in 1 2 3 4 5 6; do
    mkdir kid-$n.d
    echo "{command}" > kid-$n.d/exec
    echo start > kid-$n.d/ctl
done
exec sleep 1000
"""
#: opens files of its own until it is refused, closes none, and says how many there were
OPENER = """
import os, time
path = os.environ["CTX_SELF"] + "/artifact/file"
open(path, "w").close()
count = 0
try:
    while count < 20000:
        os.open(path, os.O_RDONLY)
        count += 1
except OSError as error:
    print(count, error.errno, flush=True)
else:
    print(count, 0, flush=True)
time.sleep(1000)
"""


@pytest.mark.needs_root("who works beside it is on the same account")
@pytest.mark.alone
def test_out_of_descriptors_nobody_is_unknown_and_root_is_obeyed() -> None:
    """Six children open files until they are refused: that was once the daemon's last."""
    daemon = Poor()
    daemon.start()
    with contextlib.closing(daemon), guarded(daemon):
        before = descriptors(daemon)
        (daemon.base / "bin").mkdir()
        (daemon.base / "bin" / "opener.py").write_text(OPENER)
        agent = boss(daemon, CHILDREN.format(command=f"{PYTHON} /attack/opener.py"))
        said = children_said(daemon)
        assert {error for _, error in said} == {str(errno.EDQUOT)}, said
        assert 0 < sum(int(count) for count, _ in said) < POOR
        assert descriptors(daemon) < POOR - 256, "what it needs for itself is left"
        program = "import os, sys; print(os.listdir(sys.argv[1])); print(open(sys.argv[2]).read())"
        told = as_stranger(program, str(daemon.root / "agent"), str(daemon.root / "status"))
        assert "boss.d" in told
        assert "ready" in told, told
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(daemon.root / "ctxd.sock"))
            peer.sendall(b'{"op":"ping"}\n')
            assert b"pong" in peer.recv(100)
        write(agent / "ctl", "kill")
        wait_dead(agent)
        wait_until(lambda: descriptors(daemon) < before + 1100, "all but what is known is closed")
        other = daemon.run("other", "sleep 1000", owner=OWNER)
        wait_status(other, "busy")


@pytest.mark.usefixtures("guard_after")
def test_the_process_without_any_descriptor_knows_its_callers(daemon: Daemon) -> None:
    """Whatever took the last one, the accounts or not."""
    agent = daemon.run("sleeper", "sleep 1000")
    wait_status(agent, "busy")
    most = max(int(fd) for fd in os.listdir(f"/proc/{daemon.pid}/fd")) + 1
    used = {int(fd) for fd in os.listdir(f"/proc/{daemon.pid}/fd")}
    lowest = next(n for n in range(most + 1) if n not in used)
    hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        told = as_stranger("import os, sys; print(os.listdir(sys.argv[1]))",
                           str(daemon.root / "agent"))
        assert "sleeper.d" in told, told
        assert read(agent, "status") == "busy\n"
    finally:
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (hard, hard))
    write(agent / "ctl", "kill")
    wait_dead(agent)


FILLER = """
cat /dev/zero > $CTX_SELF/artifact/zeros
cat $CTX_ROOT/error
dd if=/dev/zero of=$CTX_SELF/result.md bs=256K count=1 || echo refused
n=0; while mkdir $CTX_ROOT/agent/more-$n.d; do n=$((n+1)); done; echo refused
sleep 1000
"""


@pytest.mark.needs_root("owners have accounts of their own")
@pytest.mark.usefixtures("guard")
@pytest.mark.settings(owner_disk_max="8M", grace="1s")
def test_an_owner_that_fills_its_disk_account_touches_nobody_else(daemon: Daemon) -> None:
    ids = {"uid": OWNER, "gid": OWNER}
    agent = boss(daemon, FILLER, **ids)
    wait_until(lambda: read(agent, "out").count("refused") == 2, "it is refused")
    assert "EDQUOT" in read(agent, "out")
    assert f"account disk of uid {OWNER}" in read(agent, "out")
    assert (agent / "artifact" / "zeros").stat().st_size <= 8 << 20
    other = daemon.finish("other", "sh -c 'echo fine > $CTX_SELF/result.md'", owner="4001")
    assert read(other, "result.md") == "fine\n"
    write(agent / "ctl", "stop")
    wait_dead(agent)
    agent.rmdir()
    again = daemon.make("again", "true", owner=OWNER)
    wait_until(lambda: accepted(again / "ctl", "start"), "there is room again")
    wait_dead(again)


def accepted(path: Path, text: str) -> bool:
    try:
        write(path, text)
    except OSError:
        return False
    return True


@pytest.mark.needs_root("all spaces are the user's")
def test_spaces_are_their_makers() -> None:
    program = """
import os, sys
from pathlib import Path
shared = Path(sys.argv[1])
(shared / "mine").mkdir()
for name in ("mine", "roots"):
    try:
        (shared / name).rmdir()
        print(name, "removed")
    except OSError as error:
        print(name, error.errno)
"""
    with daemon_of() as daemon, guarded(daemon, bystanders=False):
        (daemon.root / "shared" / "roots").mkdir()
        assert as_stranger(program, str(daemon.root / "shared")) == (
            f"mine removed\nroots {errno.EPERM}\n"
        )
        agent = daemon.finish("maker", "sh -c 'mkdir $CTX_ROOT/shared/own; cat $CTX_ROOT/error'")
        assert "the caller may not make shared/own; operators may" in read(agent, "out")


def test_who_holds_what_is_told_to_the_owner_and_all_of_it_to_root(daemon: Daemon) -> None:
    agent = daemon.run("holder", "sh -c 'exec 3<$CTX_SELF/status; sleep 1000'", owner=OWNER)
    wait_status(agent, "busy")
    rows = json.loads(daemon.ctx("quota", "--json").stdout)
    own = {row["account"]: row for row in rows if str(row["owner"]) == OWNER}
    assert set(own) == {"descriptors", "connections", "memory", "tasks", "monitors", "disk",
                        "tmp", "time", "asks"}
    assert own["monitors"]["use"] == 1
    assert own["descriptors"]["most"] == "holder"
    assert own["descriptors"]["reserve"] == own["descriptors"]["limit"] // 10
    shown = daemon.ctx("quota").stdout
    assert shown.startswith("OWNER  ACCOUNT")
    inside = daemon.finish("asker", "ctx quota --json", owner=OWNER)
    assert {row["owner"] for row in json.loads(read(inside, "out"))} == {int(OWNER)}
    assert 'ctxfs_account_used{account="monitors"}' in (daemon.root / "metrics").read_text()


@pytest.mark.needs_root("who works beside it is on the same account")
@pytest.mark.usefixtures("guard_beside")
def test_memory_is_given_back_and_long_texts_are_not_in_it(daemon: Daemon) -> None:
    """Work items once stayed in the daemon's memory, after their agent's death too."""
    text = "x" * 60_000
    sizes = []
    for cycle in range(4):
        agent = daemon.run(f"planner-{cycle}", "sleep 1000", owner=OWNER)
        wait_status(agent, "busy")
        for number in range(100):
            (agent / "work" / f"w{number}").mkdir()
            write(agent / "work" / f"w{number}" / "plan.md", text)
        assert read(agent, "work/w7/plan.md").strip() == text
        write(agent / "ctl", "kill")
        wait_dead(agent)
        agent.rmdir()
        sizes.append(resident_memory(daemon))
    assert sizes[-1] - sizes[0] < 12 << 20, sizes
    rows = json.loads(daemon.ctx("quota", "--json").stdout)
    left = {row["account"]: row["use"] for row in rows if str(row["owner"]) == OWNER}
    assert not any(left.get(name) for name in ("memory", "tasks", "monitors", "descriptors"))


HALF_FRAMES = """
import os, socket, time
path = os.environ["CTX_ROOT"] + "/agent/" + os.environ["CTX_AGENT"] + ".sock"
peers, refused = [], 0
for _ in range(60):
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(5)
    try:
        peer.connect(path)
        peer.sendall(b"x" * 500_000)
    except OSError:
        refused += 1
    peers.append(peer)
print(len(peers), refused, flush=True)
time.sleep(1000)
"""


@pytest.mark.long
@pytest.mark.usefixtures("guard")
@pytest.mark.settings(owner_memory_max="8M", grace="1s")
def test_unfinished_frames_of_children_are_one_account(daemon: Daemon) -> None:
    before = resident_memory(daemon)
    (daemon.base / "bin").mkdir()
    (daemon.base / "bin" / "frames.py").write_text(HALF_FRAMES)
    agent = boss(daemon, CHILDREN.format(command=f"{PYTHON} /attack/frames.py"))
    said = children_said(daemon)
    assert all(count == "60" for count, _ in said)
    assert resident_memory(daemon) - before < 64 << 20, "not the 180 MB that were sent"
    assert "pong" in as_stranger(PING, str(daemon.root / "agent" / "boss.sock"))
    write(agent / "ctl", "kill")
    wait_dead(agent)


WHOLE_FRAMES = """
import os, socket, sys, time
path = os.environ["CTX_ROOT"] + "/agent/" + os.environ["CTX_AGENT"] + ".sock"
wide = '"\\U0001f600' + "x" * 1_000_000 + '"'
value = {"wide": wide, "values": "[" + "[]," * 300_000 + "[]]"}[sys.argv[1]]
frame = ('{"op":"nothing","a":' + value + '}\\n').encode()
left = []
for _ in range(60):
    peer = socket.socket(socket.AF_UNIX)
    try:
        peer.connect(path)
        peer.setblocking(False)
        left.append([peer, frame])
    except OSError:
        pass
until = time.monotonic() + 3
while time.monotonic() < until and left:
    for each in list(left):
        try:
            each[1] = each[1][each[0].send(each[1][:65536]):]
        except BlockingIOError:
            continue
        except OSError:
            each[1] = b""
        if not each[1]:
            left.remove(each)
print("sent", flush=True)
time.sleep(1000)
"""


@pytest.mark.usefixtures("guard")
@pytest.mark.settings(owner_memory_max="16M", grace="1s")
@pytest.mark.parametrize("what", ["wide", pytest.param("values", marks=pytest.mark.long)])
def test_frames_are_charged_for_what_they_take(daemon: Daemon, what: str) -> None:
    """A text with one wide character takes four times its length, and its JSON as much again; a
    list of empty lists takes thirty times as much."""
    before = resident_memory(daemon)
    (daemon.base / "bin").mkdir()
    (daemon.base / "bin" / "frames.py").write_text(WHOLE_FRAMES)
    agent = daemon.run("sender", f"{PYTHON} /attack/frames.py {what}", owner=OWNER,
                       mount=f"{daemon.base}/bin /attack ro")  # fmt: skip
    most = 0

    def sent() -> bool:
        nonlocal most
        most = max(most, resident_memory(daemon))
        return read(agent, "out") == "sent\n"

    wait_until(sent, "it has sent all that it can")
    assert most - before < 60 << 20
    write(agent / "ctl", "kill")
    wait_dead(agent)


PING = """
import socket, sys
peer = socket.socket(socket.AF_UNIX)
peer.connect(sys.argv[1])
peer.sendall(b'{"op":"ping"}\\n')
print(peer.recv(1000))
"""


@pytest.mark.usefixtures("guard_beside")
@pytest.mark.settings(owner_tasks=10, grace="1s")
def test_a_hundred_tasks_are_on_the_owners_account(daemon: Daemon) -> None:
    agent = daemon.run("busy", "sleep 1000", owner=OWNER)
    wait_status(agent, "busy")
    refused = 0
    for number in range(12):
        task = agent / "task" / f"t{number}"
        task.mkdir()
        write(task / "cmd", "sleep 1000")
        try:
            write(task / "ctl", "start")
        except OSError as error:
            assert error.errno == errno.EDQUOT
            refused += 1
    assert refused == 3
    assert f"account tasks of uid {OWNER} has 9 of 10" in daemon.error()
    write(agent / "task" / "t0" / "ctl", "kill")
    last = agent / "task" / "t11" / "ctl"
    wait_until(lambda: accepted(last, "start"), "what ended makes room")
    write(agent / "ctl", "kill")
    wait_dead(agent)
