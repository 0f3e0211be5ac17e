"""Durable homes: what programs find in HOME, in their next run, next life, and after a crash."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator

import pytest

from tests.worlds.daemon import (
    AGENT_UID,
    Daemon,
    discarded,
    read,
    refusal,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.ordinary import OrdinaryDaemon, ordinary_daemon

#: says what it found, and leaves something for the next one
NOTE = "sh -c 'cat ~/note 2>/dev/null || echo nothing; echo $CTX_RUN > ~/note; pwd'"


def once(daemon: Daemon, name: str, command: str = NOTE, **files: str) -> list[str]:
    """What an agent with a durable home said, which is removed afterwards."""
    agent = daemon.run(name, command, **{"homedir": "durable", **files})
    wait_dead(agent)
    said = read(agent, "out").splitlines()
    assert read(agent, "reason") == "exit:0\n", read(agent, "log")
    agent.rmdir()
    return said


def test_it_is_there_in_the_next_life_of_the_name(daemon: Daemon) -> None:
    assert once(daemon, "x") == ["nothing", "/tmp/home"]
    assert once(daemon, "x") == ["r1", "/tmp/home"]
    assert once(daemon, "y") == ["nothing", "/tmp/home"], "each name has its own"
    assert once(daemon, "x", homedir="private") == ["nothing", "/tmp/home"]
    daemon.restart()
    assert once(daemon, "x") == ["r2", "/tmp/home"]


def test_it_is_the_agents_own_and_nothing_in_it_gains_rights(daemon: Daemon) -> None:
    said = once(
        daemon, "x",
        "sh -c 'stat -c %u:%a ~; grep \" /tmp/home \" /proc/self/mountinfo | cut -d\" \" -f6;"
        " mknod ~/null c 1 3 || echo no'",
    )  # fmt: skip
    assert said[0] == f"{AGENT_UID}:700"
    assert {"rw", "nosuid", "nodev"} <= set(said[1].split(","))
    assert said[2] == "no"
    private = once(daemon, "x", "stat -c %a /tmp/home", homedir="private")
    assert private == ["700"]


#: fills its home with what is hard to remove, and closes it
_HOSTILE = """
import os, socket
home = os.path.expanduser("~")
os.chdir(home)
os.symlink("/etc/shadow", "link")
os.mkfifo("fifo")
socket.socket(socket.AF_UNIX).bind("sock")
for taken in ("/etc/hostname", "/ctx/agents"):
    try:
        os.link(taken, "hard")
        print(taken)
    except OSError:
        pass
try:
    os.rename(home, "/tmp/moved")
    print("moved")
except OSError:
    pass
for _ in range(3000):
    os.mkdir("d" * 20)
    os.chdir("d" * 20)
os.chmod(".", 0)
os.chmod(home, 0)
"""


def test_whatever_is_done_to_it_the_next_life_has_it_and_it_can_be_removed(daemon: Daemon) -> None:
    data = daemon.base / "data"
    data.mkdir()
    (data / "hostile.py").write_text(_HOSTILE)
    assert once(daemon, "x", "python3 /data/hostile.py", mount=f"{data} /data ro") == []
    said = once(daemon, "x", "sh -c 'stat -c %a ~; ls ~'")
    assert said == ["700", "d" * 20, "fifo", "link", "sock"]
    history = daemon.path("home", "0", "agent", "x", "session")
    for session in os.listdir(history):
        (history / session).rmdir()
    wait_until(lambda: not discarded(daemon.state), "what was removed is gone")
    assert not list((daemon.state / "tree/agent").glob("*/x"))


def test_it_goes_with_the_last_of_the_history(daemon: Daemon) -> None:
    once(daemon, "x")
    once(daemon, "x")
    history = daemon.path("home", "0", "agent", "x", "session")
    (history / "default").rmdir()
    assert once(daemon, "x")[0] == "r2"
    for session in os.listdir(history):
        (history / session).rmdir()
    wait_until(lambda: not discarded(daemon.state), "what was removed is gone")
    assert not list((daemon.state / "tree/agent").glob("*/x"))
    assert once(daemon, "x")[0] == "nothing"


def test_runs_of_a_conversation_have_it_and_a_crash_takes_nothing(daemon: Daemon) -> None:
    agent = daemon.run("x", NOTE, mode="turn", homedir="durable")
    for count, found in enumerate(("nothing", "r1", "r2")):
        write(agent / "inbox", "go on")
        wait_until(
            lambda found=found: read(agent, "session/latest.md").startswith(found),  # type: ignore[misc]
            f"run {count + 1} has answered",
        )
        daemon.restart()
    write(agent / "ctl", "stop")
    wait_dead(agent)
    write(agent / "ctl", "reset")
    write(agent / "ctl", "start")
    write(agent / "inbox", "go on")
    wait_until(lambda: read(agent, "session/latest.md").startswith("r3"), "it has answered")


def test_it_cannot_be_changed_once_the_agent_has_started(daemon: Daemon) -> None:
    agent = daemon.run("x", "sleep 1000", homedir="durable")
    wait_status(agent, "busy")
    assert refusal(agent / "homedir", "private") == "EBUSY"
    new = daemon.make("y", "true")
    assert refusal(new / "homedir", "/root") == "EINVAL"
    assert 'unknown value "/root"; use private, durable' in daemon.error()


def test_a_child_has_one_of_its_own_and_gets_no_other_by_its_name(daemon: Daemon) -> None:
    def child(command: str) -> str:
        return (
            "cd $CTX_ROOT/agent; mkdir kid.d; echo durable > kid.d/homedir;"
            f" echo {shlex.quote(command)} > kid.d/exec; echo start > kid.d/ctl; cat kid.d/wait;"
            " cat kid.d/out; rmdir kid.d"
        )

    def boss(name: str, *more: str) -> list[str]:
        command = f"sh -c {shlex.quote('; '.join([*more, child(NOTE)]))}"
        return once(daemon, name, command)

    assert once(daemon, "kid") == ["nothing", "/tmp/home"]
    mine = "touch ~/mine"
    assert boss("boss", mine) == ["nothing", "/tmp/home"], "it is not the operator's"
    assert boss("boss") == ["r2", "/tmp/home"]
    assert boss("other") == ["nothing", "/tmp/home"], "nor of another parent's child"
    assert once(daemon, "kid") == ["r1", "/tmp/home"], "nor do they come by that"
    [home] = (daemon.state / "tree/agent/0/boss").iterdir()
    assert os.listdir(home) == ["mine"], "a child has not its parent's"


def test_lines_of_mount_go_on_top_of_it(daemon: Daemon) -> None:
    source = daemon.base / "settings"
    source.mkdir()
    (source / "file").write_text("given\n")
    said = once(daemon, "x", "sh -c 'cat ~/.settings/file; touch ~/.settings/no || echo ro'",
                mount=f"{source} /tmp/home/.settings ro\nhome: /h rw")  # fmt: skip
    assert said == ["given", "ro"]
    assert once(daemon, "x", "ls -A /tmp/home") == [".settings"]


def used(daemon: Daemon) -> int:
    """What is on the disk account of root."""
    rows = json.loads(daemon.ctx("quota", "--json").stdout)
    return sum(row["use"] for row in rows if row["account"] == "disk" and str(row["owner"]) == "0")


@pytest.mark.long
def test_its_size_is_on_the_owners_account(daemon: Daemon) -> None:
    once(daemon, "x", "dd if=/dev/zero of=/tmp/home/big bs=1M count=10 status=none")
    wait_until(lambda: used(daemon) > 10 << 20, "it was measured")
    [session] = daemon.path("home", "0", "agent", "x", "session").iterdir()
    session.rmdir()
    wait_until(lambda: used(daemon) < 10 << 20, "it was measured again")


@pytest.fixture
def user() -> Iterator[OrdinaryDaemon]:
    with ordinary_daemon() as daemon:
        yield daemon


def test_an_ordinary_users_agents_have_them_too(user: OrdinaryDaemon) -> None:
    kid = "cat kid.d/wait; cat kid.d/out"
    command = (
        "cat ~/note; touch ~/note; cd $CTX_ROOT/agent; mkdir kid.d; echo durable > kid.d/homedir;"
        f" echo 'ls -A /tmp/home' > kid.d/exec; echo start > kid.d/ctl; {kid}; rmdir kid.d"
    )

    def life() -> str:
        agent = user.make("boss", f"sh -c {shlex.quote(command)}", homedir="durable")
        write(agent / "ctl", "start")
        wait_dead(agent)
        said = read(agent, "log")
        agent.rmdir()
        return said

    assert "note: No such file" in user.do(life)
    assert "note: No such file" not in user.do(life)
