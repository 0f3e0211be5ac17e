"""Parents and children: made from inside, nested, ended together."""

from __future__ import annotations

import mmap
import os
import shlex
import struct
from pathlib import Path

import pytest

from runtime.kernel.cgroups import Cgroup
from tests.worlds.daemon import (
    Daemon,
    alive,
    end_process,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)


def _script(*lines: str) -> str:
    return "sh -c " + shlex.quote("set -e; cd $CTX_ROOT/agent; " + "; ".join(lines))


def _child(name: str, command: str, handoff: str = "", *, may_create: bool = False) -> list[str]:
    lines = [f"mkdir {name}.d", f"printf '%s\\n' {shlex.quote(command)} > {name}.d/exec"]
    if may_create:  # by default a child makes no agents
        lines.append(f"echo 'allow {name}_t agent:* create' >> {name}.d/policy")
    if handoff:
        lines.append(f"printf '%s\\n' {shlex.quote(handoff)} > {name}.d/handoff.md")
    return [*lines, f"echo start > {name}.d/ctl"]


def test_a_parent_hands_over_waits_and_merges(daemon: Daemon) -> None:
    lines = []
    for name in ("a", "b", "c"):
        lines += _child(name, "sh -c 'tr a-z A-Z'", f"task of {name}")
    lines.append("for n in a b c; do cat $n.d/wait $n.d/result.md; done > $CTX_SELF/result.md")
    lines.append("ls $CTX_SELF/child; cat $CTX_SELF/session/context/pack.md")
    agent = daemon.finish("boss", _script(*lines))
    assert read(agent, "result.md") == "TASK OF A\nTASK OF B\nTASK OF C\n"
    assert read(agent, "out").startswith("a\nb\nc\n# c: done\n\nTASK OF C\n")
    for name in ("a", "b", "c"):
        channel = agent / "session" / "context" / "child" / name
        assert read(channel, "status") == "done\n"
        assert read(channel, "agent") == f"{name}\n"
        assert read(channel, "result.md") == f"TASK OF {name.upper()}\n"
        own = daemon.agent_dir(name)
        assert (channel / "result.md").stat().st_ino == (own / "result.md").stat().st_ino
        assert read(own, "parent") == "agent:boss session:default run:r1\n"
    agent.rmdir()
    assert os.listdir(daemon.root / "agent") == []
    channel = daemon.path("home", "0", "agent", "boss", "session", "default", "context", "child")
    assert read(channel / "a", "result.md") == "TASK OF A\n"


def test_a_child_sees_its_parents_view_in_fresh_namespaces(daemon: Daemon) -> None:
    project = daemon.base / "project"
    project.mkdir()
    (project / "file").write_text("shared\n")
    look = "sh -c 'cat /project/file; touch /project/x; ls /proc | wc -l; ls -A ~ /tmp'"
    lines = ["touch ~/private /tmp/private", *_child("kid", look), "cat kid.d/wait"]
    agent = daemon.finish("boss", _script(*lines), mount=f"{project} /project ro")
    assert read(agent, "reason") == "exit:0\n", read(agent, "log")
    kid = daemon.agent_dir("kid")
    assert read(kid, "out").splitlines()[0] == "shared"
    assert "private" not in read(kid, "out")
    assert "Read-only file system" in read(kid, "log")
    assert read(kid, "mount.effective") == f"{project}\t/project\tro\t-\n"


def test_what_the_parent_has_below_tmp_is_seen_by_the_child(daemon: Daemon) -> None:
    (daemon.base / "file").write_text("here\n")
    target = "/tmp/below/file"
    lines = [*_child("kid", f"cat {target}"), "cat kid.d/wait"]
    daemon.finish("boss", _script(*lines), mount=f"{daemon.base}/file {target} ro")
    assert read(daemon.agent_dir("kid"), "out") == "here\n"


def test_children_end_with_a_killed_parent_three_levels_deep(daemon: Daemon) -> None:
    bottom = "sh -c 'trap \"echo term; exit 0\" TERM; echo up; while :; do sleep 0.05; done'"
    inner = _script(*_child("l3", bottom), "sleep 1000")
    middle = _script(*_child("l2", inner, may_create=True), "sleep 1000")
    top = daemon.run("l1", middle)
    directories = [daemon.agent_dir(name) for name in ("l1", "l2", "l3")]
    for directory in directories:
        wait_until(directory.exists, f"{directory.name} is made")
        wait_status(directory, "busy")
    wait_until(lambda: read(directories[2], "out") == "up\n", "its trap is set")
    pids = [int(read(directory, "pid")) for directory in directories]
    other = daemon.run("other", "sleep 1000")
    wait_status(other, "busy")
    end_process(pids[0])
    for directory in directories:
        wait_dead(directory)
    assert read(top, "reason") == "signal:9\n"
    for directory in directories[1:]:
        assert read(directory, "outcome") == "cancelled\n"
        assert read(directory, "reason") == "parent_dead\n"
    assert read(directories[2], "out") == "up\nterm\n"
    assert not any(alive(pid) for pid in pids)
    assert read(other, "status") == "busy\n"
    cancels = [e for e in daemon.events("l1") if e["type"] == "agent.child.cancel"]
    assert [(e["parent"], e["child"], e["reason"]) for e in cancels] == [
        ("l1", "l2", "parent_dead")
    ]
    assert daemon.events("l2")[-1] == {
        **daemon.events("l2")[-1],
        "type": "agent.stop",
        "agent": "l2",
        "status": "cancelled",
    }


def test_new_children_of_a_dead_parent_are_dead(daemon: Daemon) -> None:
    agent = daemon.finish("boss", _script("mkdir kid.d"))
    kid = daemon.agent_dir("kid")
    wait_dead(kid)
    assert read(kid, "status") == "dead\n"
    assert read(kid, "reason") == "parent_dead\n"
    assert read(agent, "reason") == "exit:0\n"


def test_stopping_a_parent_stops_its_children_within_one_grace(daemon: Daemon) -> None:
    stubborn = "sh -c 'trap \"\" TERM; while :; do sleep 0.05; done'"
    agent = daemon.run("boss", _script(*_child("kid", stubborn), "sleep 1000"),
                       limits="grace=300ms")
    kid = daemon.agent_dir("kid")
    wait_until(kid.exists, "the child is made")
    wait_status(kid, "busy")
    node = Cgroup(Path(read(agent, "cgroup").strip()))
    write(agent / "ctl", "stop")
    wait_dead(agent)
    assert read(kid, "reason") == "parent_dead\n"
    wait_until(lambda: not node.exists(), "its cgroup is removed")


def test_the_creator_commands_its_child_and_strangers_do_not(daemon: Daemon) -> None:
    lines = [
        *_child("one", "sleep 1000"),
        *_child("two", "sh -c 'cat $CTX_ROOT/agent/one.d/status; "
                       "echo kill > $CTX_ROOT/agent/boss.d/ctl; sleep 1000'"),
        "while [ $(cat two.d/status) != busy ]; do sleep 0.05; done",
        "while [ ! -s two.d/log ] || [ $(wc -l < two.d/log) -lt 2 ]; do sleep 0.05; done",
        "cat two.d/log",
        "cat one.d/session/events.jsonl || cat $CTX_ROOT/error",
        "echo stop > one.d/ctl; cat one.d/wait one.d/reason",
        "echo kill > two.d/ctl; cat two.d/wait",
    ]
    agent = daemon.finish("boss", _script(*lines))
    out = read(agent, "out")
    assert "one.d/status: No such file or directory" in out
    assert "boss.d/ctl: Permission denied" in out
    assert "EACCES home/0/agent/one/session/default: " in out, "results, not messages"
    assert out.endswith("supervisor_stop\n")


def test_an_agent_stops_itself(daemon: Daemon) -> None:
    agent = daemon.finish("quitter", "sh -c 'echo stop > $CTX_SELF/ctl; sleep 1000'")
    assert read(agent, "reason") == "self_stop\n"
    assert read(agent, "outcome") == "cancelled\n"


def test_a_child_starts_nothing_below_an_ended_parent(daemon: Daemon) -> None:
    daemon.run("boss", "sleep 1000")
    wait_status(daemon.agent_dir("boss"), "busy")
    kid = daemon.make("kid", "sleep 1000")
    write(kid / "parent", "agent:boss")
    write(daemon.agent_dir("boss") / "ctl", "kill")
    wait_dead(daemon.agent_dir("boss"))
    wait_dead(kid)
    assert read(kid, "reason") == "parent_dead\n"


@pytest.mark.settings(depth=2, children=1)
def test_depth_and_number_of_children_are_limited(daemon: Daemon) -> None:
    deep = _script("mkdir l3.d || cat $CTX_ROOT/error", "exec sleep 1000")
    lines = [*_child("l2", deep, may_create=True)]
    # a child that has ended does not count
    lines.append("until grep -q EDQUOT l2.d/out; do sleep 0.01; done")
    lines.append("mkdir other.d || cat $CTX_ROOT/error")
    agent = daemon.finish("l1", _script(*lines))
    assert "EDQUOT agent/l3.d" in read(daemon.agent_dir("l2"), "out")
    assert "EDQUOT agent/other.d" in read(agent, "out")
    assert "Disk quota exceeded" in read(agent, "log")


def test_self_is_the_callers_own(daemon: Daemon) -> None:
    lines = [*_child("kid", "readlink $CTX_ROOT/self"), "readlink $CTX_ROOT/self", "cat kid.d/wait"]
    agent = daemon.finish("boss", _script(*lines).replace("readlink $CTX_ROOT/self' ",
                                                          "readlink $CTX_ROOT/self' "))
    assert read(agent, "out") == "agent/boss.d\n"
    assert not (daemon.root / "self").is_symlink()


def test_children_beyond_what_may_run_at_once_wait_for_their_turn(daemon: Daemon) -> None:
    lines = [line for name in "abcd" for line in _child(name, "sleep 1000")]
    daemon.run("boss", _script(*lines, "exec sleep 1000"), limits="children.running=2")
    a, b, c, d = (daemon.agent_dir(name) for name in "abcd")
    wait_until(lambda: d.is_dir() and read(d, "reason") == "queued\n", "all are started")
    for first in (a, b):
        wait_status(first, "busy")
    daemon.restart()
    assert daemon.ctx("reexec").returncode == 0
    for waiting in (c, d):
        assert (read(waiting, "status"), read(waiting, "reason")) == ("starting\n", "queued\n")
        assert read(waiting, "cgroup") == ""
    assert "queued" in daemon.ctx("ps").stdout
    end_process(int(read(b, "pid")))
    wait_status(c, "busy")
    assert (read(c, "reason"), read(d, "reason")) == ("", "queued\n")
    d.rmdir()
    write(daemon.agent_dir("boss") / "ctl", "stop")
    wait_dead(daemon.agent_dir("boss"))
    assert (read(a, "reason"), read(b, "reason")) == ("parent_dead\n", "signal:9\n")


#: looks for names of a new agent until it is told to end, and counts its looks
_LOOKER = """
import mmap, os, struct
with open("/gate/turn", "rb") as file:
    turn = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
with open("/gate/looks", "r+b") as file:
    looks = mmap.mmap(file.fileno(), 8)
base = os.environ["CTX_ROOT"] + "/agent/worker.d"
ways = (
    lambda: os.stat(base),
    lambda: os.stat(base + "/status"),
    lambda: os.close(os.open(base + "/status", os.O_RDONLY)),
    lambda: os.close(os.open(base, os.O_RDONLY | os.O_DIRECTORY)),
)
count = 0
while (before := struct.unpack("<Q", turn)[0]) != (1 << 64) - 1:
    for way in ways:
        try:
            way()
            found = True
        except FileNotFoundError:
            found = False
        except PermissionError:  # it was seen just before it turned private
            found = None
        after = struct.unpack("<Q", turn)[0]
        # odd while it is being changed, and a multiple of four while it is private
        assert after != before or before % 2 or found is bool(before % 4), (before, found)
        before = after
    count += 1
    looks[:] = struct.pack("<Q", count)
"""


@pytest.mark.parametrize("turns", [100, pytest.param(10_000, marks=pytest.mark.long)])
def test_nobody_sees_what_has_turned_private(daemon: Daemon, turns: int) -> None:
    """Nor misses what is public: another agent looks while a new one is given to a parent and
    taken back."""
    gate = daemon.base / "gate"
    gate.mkdir()
    for name, number in (("turn", 2), ("looks", 0)):
        (gate / name).write_bytes(struct.pack("<Q", number))
        (gate / name).chmod(0o666)
    (gate / "look").write_text(_LOOKER)
    daemon.run("boss", "sleep 1000")
    worker = daemon.make("worker")
    stranger = daemon.run("stranger", "python3 /gate/look", mount=f"{gate} /gate rw")
    with (
        (gate / "turn").open("r+b") as told,
        mmap.mmap(told.fileno(), 8) as turn,
        (gate / "looks").open("rb") as counted,
        mmap.mmap(counted.fileno(), 8, access=mmap.ACCESS_READ) as looks,
    ):
        for number in range(1, turns + 1):
            turn[:] = struct.pack("<Q", 2 * number + 1)
            write(worker / "parent", "agent:boss" if number % 2 else "operator")
            turn[:] = struct.pack("<Q", 2 * number + 2)
            # two more: one look may have begun before it was told
            wanted = struct.unpack("<Q", looks)[0] + 2
            wait_until(
                lambda: struct.unpack("<Q", looks)[0] >= wanted or read(stranger, "outcome"),  # noqa: B023
                "it looks", interval=0,
            )
        turn[:] = struct.pack("<Q", (1 << 64) - 1)
    wait_dead(stranger)
    assert read(stranger, "reason") == "exit:0\n", read(stranger, "log")
