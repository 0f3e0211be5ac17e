"""What keeps a program in: mounts without execution, abstract sockets of its own only."""

from __future__ import annotations

import ctypes
import socket
from pathlib import Path

import pytest

from tests.worlds.daemon import Daemon, read, wait_dead, wait_status, wait_until, write

CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
PYTHON = "/usr/bin/python3"
_CREATE_RULESET, _VERSION, _SCOPES = 444, 1, 6  # landlock(7)


@pytest.fixture
def data(daemon: Daemon) -> Path:
    """A directory that everybody may write to, with a program."""
    made = daemon.base / "data"
    tool(made)
    made.chmod(0o777)
    return made


def tool(directory: Path) -> None:
    directory.mkdir()
    (directory / "tool").write_text(f"#!/bin/sh\necho ran {directory.name}\n")
    (directory / "tool").chmod(0o755)


def program(data: Path, name: str, *lines: str, interpreter: str = "sh") -> str:
    """The command that runs these lines where ``data`` is ``/data``."""
    (data / name).write_text("".join(f"{line}\n" for line in lines))
    return f"{interpreter} /data/{name}"


def busy(daemon: Daemon, name: str, data: Path, command: str = "sleep 1000", **files: str) -> Path:
    agent = daemon.run(name, command, mount=f"{data} /data rw", **files)
    wait_status(agent, "busy")
    return agent


def child_of(daemon: Daemon, parent: str, name: str, command: str, **files: str) -> Path:
    """A started child, made by an operator."""
    agent = daemon.make(name, parent=f"agent:{parent}", **files)
    write(agent / "exec", command)
    write(agent / "ctl", "start")
    return agent


# mounts without execution


def test_a_child_reads_and_does_not_execute_what_is_noexec(daemon: Daemon, data: Path) -> None:
    tool(data / "tools")
    tool(data / "tools" / "dark")
    wait = program(data, "wait", "while ! test -e /data/go; do sleep 0.02; done", "/data/tool")
    boss = busy(daemon, "boss", data, wait)
    table = (
        "/data /mine rw noexec\n"
        "/data/tools /mine/tools ro\n"
        "/data/tools/dark /mine/tools/dark ro noexec\n"
        "/data /other rw\n"
    )
    look = program(
        data,
        "look",
        "for d in /mine /mine/tools /mine/tools/dark /other /data; do",
        "  head -n 1 $d/tool; $d/tool",
        "done",
        "cat /proc/1/status /proc/self/status",
        "unshare -Urm mount -o remount,bind,exec /mine && echo LOOSE",
        "unshare -Urm umount /mine && echo LOOSE",
        "touch /mine/written",
        "cat $CTX_SELF/status",
    )
    kid = child_of(daemon, "boss", "kid", look, mount=table)
    wait_dead(kid)
    out = read(kid, "out").splitlines()
    assert out.count("#!/bin/sh") == 5
    assert [line for line in out if line.startswith("ran ")] == ["ran tools", *2 * ["ran data"]]
    assert "LOOSE" not in out
    assert "/mine/tool: Permission denied" in read(kid, "log")
    assert "/mine/tools/dark/tool: Permission denied" in read(kid, "log")
    for name in CAPABILITIES:
        # of its PID 1 and of itself
        assert [line for line in out if line.startswith(name)] == [f"{name}:\t{0:016x}"] * 2
    assert (data / "written").exists()
    assert out[-1] in ("starting", "busy"), "it reads its own files"
    assert read(kid, "mount.effective").splitlines()[1] == "/data\t/mine\trw\tnoexec"
    (data / "go").touch()
    wait_dead(boss)
    assert read(boss, "out") == "ran data\n", "the parent's own mount is as it was"


def test_noexec_is_handed_down_and_outlives_the_daemon(daemon: Daemon, data: Path) -> None:
    busy(daemon, "boss", data)
    kid = child_of(daemon, "boss", "kid", "sleep 1000", mount="/data /tmp/mine rw noexec")
    wait_status(kid, "busy")
    again = program(
        data,
        "again",
        "touch /data/there; while ! test -e /data/go; do sleep 0.02; done; cat $CTX_SELF/status",
        "/tmp/mine/tool; /own/tool; /data/tool",
    )
    grandchild = child_of(daemon, "kid", "grandchild", again, mount="/tmp/mine /own rw")
    wait_until((data / "there").exists, "the grandchild runs")
    wait_status(grandchild, "busy")
    daemon.restart()
    (data / "go").touch()
    wait_dead(grandchild)
    assert read(grandchild, "out") == "busy\nran data\n"
    for path in ("/tmp/mine/tool", "/own/tool"):
        assert f"{path}: Permission denied" in read(grandchild, "log")
    assert read(grandchild, "mount.effective").endswith("/tmp/mine\t/own\trw\tnoexec\n")


def test_a_detached_childs_noexec_holds_too(daemon: Daemon, data: Path) -> None:
    busy(daemon, "boss", data)
    look = program(data, "look", "cat /mine/tool", "/mine/tool", "/data/tool")
    kid = child_of(daemon, "boss", "kid", look, life="detached", mount="/data /mine rw noexec")
    wait_dead(kid)
    assert read(kid, "out").splitlines()[-1] == "ran data"
    assert "/mine/tool: Permission denied" in read(kid, "log")


# abstract sockets


@pytest.mark.skipif(
    ctypes.CDLL(None).syscall(_CREATE_RULESET, None, 0, _VERSION) < _SCOPES,
    reason="this kernel has no Landlock that scopes abstract sockets (Linux 6.12 has)",
)
def test_abstract_sockets_reach_the_agents_own_processes_only(daemon: Daemon, data: Path) -> None:
    name = daemon.base.name
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket() as inet:
        abstract.bind(f"\0{name}")
        abstract.listen()
        inet.bind(("127.0.0.1", 0))
        inet.listen()
        connect = program(
            data,
            "connect",
            "import os, socket",
            "def reach(family, address):",
            "    try:",
            "        with socket.socket(family) as s: s.connect(address)",
            "        return 'reached'",
            "    except OSError as error:",
            "        return error.strerror",
            f"print(reach(socket.AF_UNIX, '\\0{name}'))",
            f"print(reach(socket.AF_INET, {inet.getsockname()!r}))",
            "own = socket.socket(socket.AF_UNIX)",
            f"own.bind('\\0{name}' + os.environ['CTX_AGENT'])",
            "own.listen()",
            "if not os.fork():",
            "    print(reach(socket.AF_UNIX, own.getsockname()))",
            "    os._exit(0)",
            "os.wait()",
            interpreter=f"{PYTHON} -u",
        )
        allowed = "allow boss_t network:default connect"
        boss = daemon.finish("boss", connect, mount=f"{data} /data rw", policy=allowed)
        busy(daemon, "idle", data, policy=allowed.replace("boss", "idle"))
        kid = child_of(daemon, "idle", "kid", connect)
        wait_dead(kid)
    for agent in (boss, kid):
        assert read(agent, "out").splitlines() == ["Operation not permitted", *2 * ["reached"]]


def test_sandboxes_of_an_agents_own_work_as_before(daemon: Daemon, data: Path) -> None:
    command = program(
        data,
        "make",
        "unshare -Urm sh -c 'mount -t tmpfs none /tmp && touch /tmp/x && ls /tmp'",
        "bwrap --unshare-all --ro-bind / / --dev /dev --proc /proc --tmpfs /tmp echo inside",
        "mkdir a b; touch a/file; mv a/file b/file; ln b/file a/file; ls a",
        "sleep 1000 & kill -TERM $!; wait $!; echo $?",
    )
    agent = daemon.finish("maker", command, mount=f"{data} /data rw")
    assert read(agent, "out") == "x\ninside\nfile\n143\n", read(agent, "log")
