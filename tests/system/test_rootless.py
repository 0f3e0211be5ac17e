"""ctxd of an ordinary user: the whole life, and what is refused or weaker there."""

from __future__ import annotations

import ctypes
import errno
import os
import shlex
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from client import networks
from tests.worlds.daemon import (
    MARK,
    TIMEOUT,
    alive,
    discarded,
    end_process,
    read,
    refusal,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.models import Metered, start_meter
from tests.worlds.ordinary import UID, OrdinaryDaemon, ordinary_daemon
from tests.worlds.spenders import TOKENS, over, spend, tokens, usage


@pytest.fixture
def user() -> Iterator[OrdinaryDaemon]:
    with ordinary_daemon() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def shared_user() -> Iterator[OrdinaryDaemon]:
    with ordinary_daemon() as daemon:
        yield daemon


def test_a_life(user: OrdinaryDaemon) -> None:
    script = "cat; id -u; id -g; id -G; echo $CTX_ROOT; test -w $CTX_SELF/result.md && echo mine"

    def life() -> tuple[str, ...]:
        agent = user.finish("coder", f"sh -c '{script}'", "the task\n")
        return tuple(read(agent, file) for file in ("out", "outcome", "reason", "owner", "uid"))

    out, *rest = user.do(life)
    assert out.splitlines() == ["the task", *[str(UID)] * 3, str(user.root), "mine"]
    assert rest == ["done\n", "exit:0\n", f"{UID}\n", f"{UID}\n"]
    assert user.root.is_symlink()
    assert user.state.stat().st_mode & 0o777 == 0o700
    assert user.stop() == 0
    assert not user.root.is_symlink() and not user.runtime.exists()
    user.start()
    assert user.do(lambda: read(user.agent_dir("coder"), "result.md")) == out
    user.do(lambda: user.agent_dir("coder").rmdir())


def test_a_family_and_the_end_of_its_parent(user: OrdinaryDaemon) -> None:
    below = "cd $CTX_ROOT/agent; mkdir worker.d; echo \"sh -c \\\"touch /tmp/x; ls /tmp; " \
            "sleep 1000\\\"\" > worker.d/exec; echo start > worker.d/ctl; sleep 1000"

    def begin() -> tuple[int, int, str]:
        boss = user.run("boss", f"sh -c 'touch /tmp/theirs; {below}'")
        wait_until(lambda: user.agent_dir("worker").exists(), "the child is made")
        worker = user.agent_dir("worker")
        wait_status(worker, "busy")
        return int(read(boss, "pid")), int(read(worker, "pid")), read(worker, "parent")

    boss, worker, parent = user.do(begin)
    assert parent == "agent:boss session:default run:r1\n"

    def namespaces(pid: int) -> list[str]:
        """Its PID namespace and those around it."""
        status = Path(f"/proc/{pid}/status").read_text()
        return next(line for line in status.splitlines() if line.startswith("NSpid")).split()[1:]

    assert len(namespaces(worker)) == len(namespaces(boss)) + 1
    end_process(boss)
    user.do(lambda: wait_dead(user.agent_dir("boss")))
    assert user.do(lambda: read(user.agent_dir("worker"), "reason")) == "parent_dead\n"
    assert not alive(worker)
    wait_until(lambda: not list(user.cgroup.path.glob("user-*/agent-*")), "their cgroups are gone")


@pytest.mark.parametrize("network", [False, True])
def test_runs_and_tasks_enter_a_cell_that_is_held(user: OrdinaryDaemon, network: bool) -> None:
    def talk() -> list[str]:
        agent = user.make("coder", "sh -c 'read -r text; echo $CTX_RUN: $text'", mode="turn")
        if network:
            policy = read(agent, "policy")
            write(agent / "policy", f"{policy}allow coder_t network:default connect")
        write(agent / "ctl", "start")

        def replied(text: str) -> bool:
            return text in read(agent, "session/latest.md")

        for number in ("1", "2"):
            write(agent / "inbox", f"message {number}")
            wait_until(partial(replied, number), "it replied")
        # the end of the task is a message, too
        found = [read(agent, "session/latest.md")]
        (agent / "task" / "T").mkdir()
        write(agent / "task/T/cmd", "id -u; exit 3")
        write(agent / "task/T/ctl", "start")
        wait_until(lambda: read(agent, "task/T/exit"), "the task has ended")
        found.append(read(agent, "task/T/output"))
        write(agent / "inbox", "last")
        wait_until(lambda: "last" in read(agent, "session/latest.md"), "it replied")
        write(agent / "ctl", "stop")
        wait_dead(agent)
        return [*found, read(agent, "reason")]

    assert user.do(talk) == ["r2: message 2\n", f"{UID}\n", "operator_stop\n"]


#: asks by the port, and then by the socket, and prints both answers
ASK = """
import os, socket
port = os.environ["CTX_NET_API"].rpartition(":")[2]
for family, address in (
    (socket.AF_INET, ("127.0.0.1", int(port))), (socket.AF_UNIX, "/run/ctx/net/api")
):
    with socket.socket(family) as connection:
        connection.connect(address)
        connection.sendall(b"hello")
        print(connection.makefile().readline(), end="", flush=True)
"""


def test_a_network_is_the_users_socket() -> None:
    with (
        tempfile.TemporaryDirectory(prefix=f"{MARK}-", dir="/tmp") as directory,
        socket.socket(socket.AF_UNIX) as api,
    ):
        os.chmod(directory, 0o755)
        path = Path(directory) / "api.sock"
        api.bind(str(path))
        os.chown(path, UID, UID)
        api.listen()
        api.settimeout(TIMEOUT)
        config = f"networks: {{api: {{socket: {path}, port: 8081}}}}\n"
        with ordinary_daemon(config=config) as user:
            (Path(directory) / "ask.py").write_text(ASK)

            def begin() -> None:
                user.run("a", f"python3 {directory}/ask.py", mount=f"{directory} {directory} ro",
                         policy="allow a_t network:api connect")

            def said(what: str) -> None:
                wait_until(lambda: what in read(user.agent_dir("a"), "out"), f"{what} arrived")

            user.do(begin)
            for number in ("one", "two"):
                with api.accept()[0] as connection:
                    connection.settimeout(TIMEOUT)
                    assert connection.recv(1000) == b"hello"
                    connection.sendall(f"{number}\n".encode())
                user.do(partial(said, number))
            user.do(lambda: wait_dead(user.agent_dir("a")))
            assert "net.api.connections=2" in user.do(lambda: read(user.agent_dir("a"), "usage"))


def test_a_meter_of_the_user_counts_and_ends_at_the_limit() -> None:
    with tempfile.TemporaryDirectory(prefix=f"{MARK}-", dir="/tmp") as directory:
        models = Metered(Path(directory))
        for path in (directory, str(models.upstream.server_address)):
            os.chown(path, UID, UID)
        network = f"{{socket: {models.socket}, port: 8080, header: counters}}"
        with ordinary_daemon(config=f"networks: {{models: {network}}}\n") as user:
            meter = start_meter(models.config, *user.run_as_user())
            try:
                user.do(partial(_spend_and_see, user))
            finally:
                meter.terminate()
                meter.communicate(timeout=40)
                models.close()


def _spend_and_see(user: OrdinaryDaemon) -> None:
    policy = "\n".join(f"{verb} boss_t network:models connect" for verb in ("allow", "delegate"))
    boss = user.run("boss", "sleep 1000", policy=policy, limits="tokens.max=60")
    wait_status(boss, "busy")
    kid = spend(user, "kid", "plain", parent="agent:boss")
    wait_dead(kid)
    assert over(kid) == (3, 0)
    for agent in (boss, kid):
        assert tokens(agent) == 3 * TOKENS and usage(agent)["tokens.left"] == "0"
        events = user.events(agent.stem)
        (told,) = (event for event in events if event["type"] == "agent.limit")
        assert (told["of"], told["max"], told["used"]) == ("boss", "60", "75")
    status = read(user.root, "status").splitlines()
    found = networks.check_networks(dict(line.split("=", 1) for line in status), rootless=True)
    assert {level for level, _, _ in found} == {"ok", "weak"}
    write(boss / "ctl", "kill")
    wait_dead(boss)


def test_a_crash_takes_only_the_mount(user: OrdinaryDaemon) -> None:
    waiting = "while ! grep -q go $CTX_SELF/meta.json 2>/dev/null; do sleep 0.05; done; "
    command = f"sh -c '{waiting} echo found > $CTX_SELF/result.md; echo more; exit 7'"

    def begin() -> int:
        agent = user.run("survivor", command)
        wait_status(agent, "busy")
        return int(read(agent, "pid"))

    pid = user.do(begin)
    wait = user.do(lambda: os.readlink(user.agent_dir("survivor") / "wait"))
    waiter = subprocess.Popen(user.run_as_user("cat", wait))
    user.kill()
    assert alive(pid) and waiter.poll() is None
    with pytest.raises(OSError, match="Errno 107"):
        user.do(lambda: os.listdir(user.root))
    user.start()

    def finish() -> list[str]:
        agent = user.agent_dir("survivor")
        assert read(agent, "status") == "busy\n"
        write(agent / "meta.json", '{"go": true}')
        wait_dead(agent)
        return [read(agent, file) for file in ("reason", "result.md", "out")]

    assert user.do(finish) == ["exit:7\n", "found\n", "more\n"]
    assert waiter.wait(TIMEOUT) == 0


def test_parent_and_daemon_killed_the_child_ends_without_a_daemon(user: OrdinaryDaemon) -> None:
    def begin() -> list[int]:
        boss = user.run("boss", "sleep 1000")
        wait_status(boss, "busy")
        child = user.run("child", "sleep 1000", parent="agent:boss")
        wait_status(child, "busy")
        return [int(read(each, "pid")) for each in (boss, child)]

    boss, child = user.do(begin)
    user.kill()
    end_process(boss)
    wait_until(lambda: not alive(child), "it ends")
    user.start()
    user.do(lambda: wait_dead(user.agent_dir("child")))  # its keeper may end later
    assert user.do(lambda: read(user.agent_dir("child"), "reason")) == "parent_dead\n"


def test_a_detached_child_has_its_parents_view_and_lives_on(user: OrdinaryDaemon) -> None:
    inside, outside = user.home / "inside", user.home / "outside"
    look = f"cat /data/file /tmp/deep/file; touch /data/x; ls /proc | grep -c ^[0-9]; ls {outside}"
    go = "while ! grep -q go $CTX_SELF/meta.json 2>/dev/null; do sleep 0.05; done"

    def begin() -> tuple[int, int]:
        for directory in (inside, outside):
            directory.mkdir()
            (directory / "file").write_text(f"{directory.name}\n")
        boss = user.run("boss", "sleep 1000", mount=f"{inside} /data ro\n{inside} /tmp/deep rw")
        wait_status(boss, "busy")
        command = f"sh -c '{look}; echo here; {go}; cat $CTX_SELF/status'"
        kid = user.run("kid", command, parent="agent:boss", life="detached")
        wait_until(lambda: read(kid, "out").endswith("here\n") and str(outside) in read(kid, "log"),
                   "it has looked around")
        found = read(kid, "out").splitlines()
        assert found[:2] == ["inside", "inside"] and int(found[2]) < 8
        assert "Read-only file system" in read(kid, "log") and "No such file" in read(kid, "log")
        write(boss / "ctl", "kill")
        wait_dead(boss)
        return int(read(kid, "pid")), int(found[2])

    pid, _ = user.do(begin)
    assert alive(pid)
    user.restart()

    def finish() -> str:
        kid = user.agent_dir("kid")
        write(kid / "meta.json", '{"go": true}')
        wait_dead(kid)
        return read(kid, "out").splitlines()[-1]

    assert user.do(finish) == "busy"


@pytest.mark.parametrize("verb", ["stop", "kill"])
def test_stop_and_kill(shared_user: OrdinaryDaemon, verb: str) -> None:
    def end() -> str:
        agent = shared_user.run(verb, "sleep 1000")
        wait_status(agent, "busy")
        write(agent / "ctl", verb)
        wait_dead(agent)
        return read(agent, "outcome") + read(agent, "reason")

    assert shared_user.do(end) == "cancelled\noperator_stop\n"


def test_pause_and_resume(shared_user: OrdinaryDaemon) -> None:
    def life() -> str:
        agent = shared_user.run("paused", "sleep 1000")
        wait_status(agent, "busy")
        write(agent / "ctl", "pause")
        assert read(agent, "status") == "paused\n"
        write(agent / "ctl", "resume")
        write(agent / "ctl", "kill")
        wait_dead(agent)
        return read(agent, "outcome")

    assert shared_user.do(life) == "cancelled\n"


@pytest.mark.parametrize(
    ("file", "value", "refused"),
    [
        ("owner", "0", "EPERM"),
        ("uid", "1000", "EPERM"),
        ("gid", "1000", "EPERM"),
        ("groups", "4", "EPERM"),
        ("owner", str(UID), "accepted"),
        ("uid", str(UID), "accepted"),
        ("iso", "shared", "EOPNOTSUPP"),
        ("mount", "/proc /x ro", "EACCES"),
    ],
)
def test_what_is_refused(
    shared_user: OrdinaryDaemon, file: str, value: str, refused: str
) -> None:
    def attempt() -> tuple[str, str]:
        agent = shared_user.agent_dir("refused")
        if not agent.exists():
            shared_user.make("refused")
        return refusal(agent / file, value), shared_user.error()

    found, why = shared_user.do(attempt)
    assert found == refused
    if refused in ("EPERM", "EOPNOTSUPP"):
        assert f"{file}.d" not in why and "without root" in why


def test_others_are_kept_out_by_the_kernel(shared_user: OrdinaryDaemon) -> None:
    own = shared_user.run_as_user("cat", str(shared_user.root / "status"))
    assert subprocess.run(own, capture_output=True, check=True).stdout.startswith(b"version=")
    as_root = own[:3] + own[-2:]
    result = subprocess.run(as_root, capture_output=True, text=True, check=False)
    assert "Permission denied" in result.stderr


def test_the_doctor_lists_what_is_weaker(shared_user: OrdinaryDaemon) -> None:
    result = shared_user.do(lambda: shared_user.ctx("doctor"))
    lines = result.stdout.splitlines()
    assert result.returncode == 0 and not [line for line in lines if line.startswith("FAIL")]
    weak = [line for line in lines if line.startswith("weak  ")]
    for words in ("is an operator", "iso=shared is refused", "supplementary groups", "wait"):
        assert any(words in line for line in weak), words
    assert any(f"ctxd at {shared_user.root} is ready" in line for line in lines)


def test_the_installed_client_finds_the_users_own(shared_user: OrdinaryDaemon) -> None:
    installed = [str(Path(sys.executable).with_name("ctx")), "doctor"]
    command = ["env", f"XDG_RUNTIME_DIR={shared_user.run_dir}", *installed]
    said = subprocess.run(
        shared_user.run_as_user(*command), capture_output=True, text=True, check=False
    ).stdout
    assert f"ctxd at {shared_user.root} is ready" in said


def test_spaces_are_the_users_to_make(shared_user: OrdinaryDaemon) -> None:
    def life() -> list[str]:
        shared_user.path("shared", "team").mkdir()
        agent = shared_user.finish("intruder", "mkdir $CTX_ROOT/shared/mine")
        assert read(agent, "outcome") == "error\n"
        return os.listdir(shared_user.path("shared"))

    assert shared_user.do(life) == ["team"]


# what an agent sees of the daemon, whose uid it has


def _said(user: OrdinaryDaemon, name: str, script: str, **files: str) -> str:
    """Both outputs of a script that has run in an agent."""
    path = f"sh -c '{script}'"

    def run() -> str:
        agent = user.finish(name, path, **files)
        return read(agent, "out") + read(agent, "log")

    return user.do(run)


def test_the_daemons_directories_are_not_in_the_sandbox(shared_user: OrdinaryDaemon) -> None:
    places = shared_user.state, shared_user.runtime / "bin", shared_user.runtime / "record"
    script = f"ls -d {' '.join(map(str, places))}; ls {shared_user.base}"
    said = _said(shared_user, "looker", script)
    for place in places:
        assert f"cannot access '{place}': No such file" in said
    assert "home" not in said.splitlines()


def test_what_sandboxes_share_cannot_be_changed(shared_user: OrdinaryDaemon) -> None:
    root = shared_user.runtime / "root"
    script = f"cd {root}; rm -f bin/keeper; echo x > bin/keeper; mkdir new; chmod 777 wait; " \
             "rm -rf wait; echo > wait/x; echo fine > $CTX_SELF/result.md"
    said = _said(shared_user, "changer", script)
    assert said.count("Read-only file system") >= 5
    assert shared_user.do(lambda: read(shared_user.agent_dir("changer"), "result.md")) == "fine\n"


def test_the_keeper_cannot_be_traced(shared_user: OrdinaryDaemon) -> None:
    script = "readlink /proc/1/exe /proc/1/ns/mnt; cat /proc/1/environ; ls /proc/1/fd; " \
             "nsenter -m -t 1 true; echo end"
    said = _said(shared_user, "tracer", script)
    assert said.startswith("end\n")
    assert said.count("Permission denied") + said.count("not permitted") >= 3


def test_the_task_cannot_be_changed_through_standard_input(shared_user: OrdinaryDaemon) -> None:
    def life() -> str:
        command = "sh -c 'cat /dev/stdin; echo x > /dev/stdin'"
        agent = shared_user.finish("scribe", command, "task\n")
        return read(agent, "out") + read(agent, "handoff.md")

    assert shared_user.do(life) == "task\ntask\n"


def test_no_agent_releases_who_waits_for_another(shared_user: OrdinaryDaemon) -> None:
    """Though the FIFOs belong to its uid: nobody may write, and its view of them is read-only."""
    def life() -> tuple[str, int]:
        asleep = shared_user.run("asleep", "sleep 1000")
        fifo = os.readlink(asleep / "wait")
        script = f"chmod 600 {fifo}; unshare -Umr sh -c \"mount -o remount,rw,bind /; " \
                 f"chmod 600 {fifo}\"; timeout 1 sh -c \": > {fifo}\"; rm -f {fifo}; ls -l {fifo}"
        releaser = shared_user.finish("releaser", f"sh -c '{script}'")
        return read(releaser, "out") + read(releaser, "log"), os.stat(fifo).st_mode

    said, mode = shared_user.do(life)
    assert mode == stat.S_IFIFO | 0o444, said
    assert said.count("Read-only file system") >= 1, said
    assert "Permission denied" in said or "cannot create" in said, said


def test_cgroups_of_an_agents_own_are_bounded_and_end_with_it(shared_user: OrdinaryDaemon) -> None:
    """Its leaf belongs to its uid, and a cgroup namespace lets it mount that."""
    script = "mount -t cgroup2 none /tmp && cd /tmp && while mkdir $0; do cd $0; done; " \
             "cd .. && rmdir $0; mkdir /tmp/s && echo $$ > /tmp/s/cgroup.procs && " \
             "echo 1 > /tmp/s/cgroup.freeze; sleep 1000"
    name = "d" * 250

    def life() -> str:
        agent = shared_user.run(
            "digger", f"unshare --user --map-root-user --mount --cgroup sh -c '{script}' {name}",
            limits="grace=200ms",
        )
        leaf = shared_user.cgroup.child(f"user-{UID}", "agent-digger", "run")
        own = leaf.own().child("s")
        wait_until(lambda: own.keys("cgroup.events").get("frozen"), "it has frozen itself")
        depth = sum(1 for _ in os.walk(leaf.path)) - 1
        write(agent / "ctl", "stop")
        wait_dead(agent)
        wait_until(lambda: not leaf.exists(), "its cgroup is removed")
        return f"{depth} {read(agent, 'outcome')}"

    assert shared_user.do(life) == "13 cancelled\n"


# mounts of an operator


def test_the_users_home_without_the_daemons_directories(shared_user: OrdinaryDaemon) -> None:
    home = shared_user.home
    shared_user.do(lambda: (home / "note").write_text("mine\n"))
    script = f"cat {home}/note; ls -a {home}/.local/state/ctxfs; echo yours > {home}/note"
    said = _said(shared_user, "guest", script, mount=f"{home} {home} rw")
    assert "mine\n" in said
    assert f"cannot open directory '{home}/.local/state/ctxfs': Permission denied" in said
    assert (home / "note").read_text() == "yours\n"


def test_options_of_mounts(shared_user: OrdinaryDaemon) -> None:
    script = "/mnt/true || echo noexec; echo x > /ro/x"
    table = "/usr/bin /mnt rw noexec,nosuid,nodev\n/var /ro ro\n/etc /mnt/x hide"
    said = _said(shared_user, "careful", script, mount=table)
    assert "noexec\n" in said and "Read-only file system" in said


@pytest.mark.parametrize(
    "source", ["{link}", "{home}/.local/state/ctxfs/home", "/sys/fs/cgroup/unified", "/dev/fd/0"]
)
def test_sources_that_no_agent_gets(shared_user: OrdinaryDaemon, source: str) -> None:
    link = shared_user.home / "link"
    if not link.is_symlink():
        link.symlink_to(shared_user.state)  # root's, which is followed

    def run() -> str:
        agent = shared_user.agent_dir("grabber")
        if agent.exists():
            agent.rmdir()
        shared_user.make("grabber", "true")
        line = f"{source.format(link=link, home=shared_user.home)} /x ro"
        if refusal(agent / "mount", line) != "accepted":
            return shared_user.error()
        write(agent / "ctl", "start")
        wait_dead(agent)
        return read(agent, "reason")

    assert "cannot be given to an agent" in shared_user.do(run)


def test_a_childs_sources_are_looked_up_in_its_parents_view(shared_user: OrdinaryDaemon) -> None:
    script = "; ".join((
        "cd $CTX_ROOT/agent; mkdir looked.d; ln -s /etc /tmp/link; mkdir /tmp/own",
        "echo /tmp/own /x ro > looked.d/mount && cat looked.d/mount.effective",
        "echo /tmp/link /x ro > looked.d/mount && echo taken", "cat ../error",
    ))
    said = _said(shared_user, "onlooker", script, policy="allow onlooker_t agent:* create")
    assert "/tmp/own\t/x\tro\t-\n" in said
    assert 'the link "/tmp/link" to "/etc" does not belong to root' in said
    assert "taken" not in said


def test_the_hosts_root_without_what_no_agent_may_have(shared_user: OrdinaryDaemon) -> None:
    state, bins = shared_user.state, shared_user.runtime / "bin"
    script = f"ls /host/usr >/dev/null && echo host; ls /host/proc /host{state} /host{bins}; " \
             "ls /host/sys/fs/cgroup/unified /host/sys/fs/cgroup"
    said = _said(shared_user, "rooted", script, mount="/ /host ro")
    assert said.startswith("host\n")
    for path in ("/host/proc", f"/host{state}", "/host/sys/fs/cgroup/unified"):
        assert f"'{path}': Permission denied" in said
    assert "keeper" not in said


def test_hidden_files_of_a_mount(shared_user: OrdinaryDaemon) -> None:
    tree = shared_user.home / "tree"

    def make() -> None:
        (tree / "secret").mkdir(parents=True)
        (tree / "secret" / "key").write_text("k")
        (tree / "file").write_text("f")

    shared_user.do(make)
    said = _said(
        shared_user, "blind", "ls /t; cat /t/secret/key /t/file; echo end",
        mount=f"{tree} /t rw\n/x /t/secret hide\n/x /t/file hide",
    )
    assert "file\nsecret\nend\n" in said and "Permission denied" in said


# files of agents whose modes the daemon is not above


def test_files_with_narrow_modes(shared_user: OrdinaryDaemon) -> None:
    script = (
        "cd $CTX_SELF/artifact; umask 0; "
        "sh -c \"umask 0333; echo one > sealed\"; cat sealed; "
        "echo two > out; chmod 200 out; echo three >> out; chmod 600 out; cat out; "
        "mkdir closed; echo x > closed/x; chmod 0 closed; echo end"
    )
    said = _said(shared_user, "narrow", script)
    assert said.startswith("one\ntwo\nthree\nend\n"), said
    shared_user.do(lambda: shared_user.agent_dir("narrow").rmdir())
    wait_until(lambda: not discarded(shared_user.state), "all is removed")


# machines that lack something


def _hold_connection(daemon: OrdinaryDaemon) -> int:
    """What keeps the kernel from ending the connection when the daemon dies, as one of
    its own threads can: a second descriptor of it (pidfd_getfd(2))."""
    (number,) = [
        int(path.name)
        for path in Path(f"/proc/{daemon.pid}/fd").iterdir()
        if os.readlink(path) == "/dev/fuse"
    ]
    pidfd = os.pidfd_open(daemon.pid)
    held = int(ctypes.CDLL(None).syscall(438, pidfd, number, 0))
    os.close(pidfd)
    assert held >= 0
    return held


@pytest.mark.parametrize(("fusectl", "number"), [("yes", errno.ENOTCONN), ("no", errno.ENOENT)])
def test_nobody_hangs_when_the_daemon_dies_in_a_knot(fusectl: str, number: int) -> None:
    with ordinary_daemon(fusectl=fusectl) as user:
        held = _hold_connection(user)
        user.kill()

        def look() -> int | None:
            try:
                os.stat(user.root / "status")
            except OSError as error:
                return error.errno
            return None

        if fusectl == "no":  # who calls before the mount is gone waits for the dead daemon
            wait_until(lambda: not user.is_mounted(), "the guard has acted")
        wait_until(lambda: user.do(look) == number, "nobody waits", interval=0.05)
        user.start()
        assert user.do(look) is None
        os.close(held)


def test_without_shared_mounts_agents_live_on_without_the_filesystem() -> None:
    with ordinary_daemon(propagation="private") as user:
        assert "is not on a shared mount" in user.log.read_text()

        def begin() -> int:
            agent = user.run("survivor", "sleep 1000")
            wait_status(agent, "busy")
            return int(read(agent, "pid"))

        pid = user.do(begin)
        user.restart()
        assert alive(pid)

        def end() -> str:
            agent = user.agent_dir("survivor")
            assert read(agent, "status") == "busy\n"
            write(agent / "ctl", "stop")
            wait_dead(agent)
            return read(agent, "outcome")

        assert user.do(end) == "cancelled\n"


@pytest.fixture
def stopped() -> Iterator[OrdinaryDaemon]:
    daemon = OrdinaryDaemon()
    yield daemon
    daemon.close()


def _refused(user: OrdinaryDaemon, *more: str, cgroup: Path | None = None) -> str:
    command = super(OrdinaryDaemon, user).command(*more)
    where = cgroup if cgroup is not None else user.cgroup.path / "daemon"
    result = subprocess.run(
        user.run_as_user(*command, cgroup=where), env={**os.environ, **user.env},
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )
    assert result.returncode == 1, result.stderr
    assert result.stderr.startswith("ctxd: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def test_cgroups_that_are_not_delegated(stopped: OrdinaryDaemon) -> None:
    outside = stopped.cgroup.path.parent
    assert "no cgroup is delegated to this user" in _refused(stopped, cgroup=outside)
    wanted = ("--cgroup", str(stopped.cgroup.path))
    assert "cannot move processes there" in _refused(stopped, *wanted, cgroup=outside)
    assert "not permitted to use" in _refused(stopped, "--cgroup", f"{outside}/ctxtest-no")


def test_a_cgroup_with_other_processes(stopped: OrdinaryDaemon) -> None:
    sleeper = subprocess.Popen(["sleep", "1000"])
    (stopped.cgroup.path / "cgroup.procs").write_text(str(sleeper.pid))
    try:
        assert "other processes are in this cgroup" in _refused(stopped)
    finally:
        sleeper.kill()
        sleeper.wait()


def test_something_at_the_mount_point(stopped: OrdinaryDaemon) -> None:
    stopped.root.mkdir()
    assert "ctxd makes a link there" in _refused(stopped)
    stopped.root.rmdir()


def test_what_a_cell_has_in_memory_is_bounded_and_counted() -> None:
    """Also that of a child, whose cell is in its parent's."""
    fill = (
        "dd if=/dev/zero of=/tmp/x bs=64k 2>/dev/null; dd if=/dev/zero of=$HOME/x bs=64k "
        "2>/dev/null; stat -c %s /tmp/x $HOME/x"
    )
    both = f"{fill}; ctx spawn kid -- sh -c '{fill}; exec sleep 1000' >/dev/null; exec sleep 1000"
    with ordinary_daemon(config="tmp_max: 16M\n") as user:

        def usage(name: str) -> dict[str, int]:
            lines = read(user.agent_dir(name), "usage").splitlines()
            return {key: int(value) for key, _, value in (line.partition("=") for line in lines)}

        def fills() -> list[tuple[str, int]]:
            boss = user.run("boss", shlex.join(("sh", "-c", both)))
            wait_until(lambda: read(boss, "out").count("\n") == 2, "it has filled its cell")
            kid = user.agent_dir("kid")
            wait_until(lambda: kid.exists() and read(kid, "out").count("\n") == 2, "so has it")
            return [(read(user.agent_dir(name), "out"), usage(name)["memory_tmp"])
                    for name in ("boss", "kid")]  # fmt: skip

        (boss, of_both), (kid, of_kid) = user.do(fills)
        for out in (boss, kid):
            assert 15 << 20 < sum(map(int, out.split())) <= 16 << 20
        assert 15 << 20 < of_kid <= 16 << 20
        assert 30 << 20 < of_both <= 32 << 20
        lines = user.do(lambda: user.ctx("quota").stdout).splitlines()
        (tmp,) = (line.split() for line in lines if " tmp " in line)
        assert tmp[2] == "32MiB", "it is on the account"
