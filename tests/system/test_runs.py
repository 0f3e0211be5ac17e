"""Real programs in real cells: ends, output, results, limits."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from runtime.kernel.cgroups import Cgroup
from runtime.kernel.users import find_user
from tests.worlds.daemon import (
    AGENT_UID,
    Daemon,
    alive,
    end_process,
    read,
    refusal,
    wait_dead,
    wait_status,
    wait_until,
    write,
)


def test_from_handoff_to_result(daemon: Daemon) -> None:
    agent = daemon.finish(
        "coder", "sh -c 'cat > $CTX_SELF/result.md; echo said; echo warned >&2'", "the task\n"
    )
    assert read(agent, "status") == "dead\n"
    assert read(agent, "outcome") == "done\n"
    assert read(agent, "reason") == "exit:0\n"
    assert read(agent, "result.md") == "the task\n"
    assert read(agent, "out") == "said\n"
    assert read(agent, "log").startswith("warned\n")
    assert read(agent, "session/state") == "done\n"
    assert read(agent, "session/latest.md") == "the task\n"
    types = [event["type"] for event in daemon.events("coder")]
    assert types == [
        # exec, the verb
        *("agent.create", "agent.control", "agent.control"),
        *("agent.start", "agent.status", "run.start", "agent.status"),
        *("agent.status", "run.end", "agent.status", "agent.stop"),
    ]
    assert [event["id"] for event in daemon.events("coder")] == [f"e{n}" for n in range(1, 12)]


@pytest.mark.parametrize(
    ("command", "outcome", "reason"),
    [
        ("true", "done", "exit:0"),
        ("sh -c 'exit 3'", "error", "exit:3"),
        ("sh -c 'exit 137'", "error", "exit:137"),
        ("sh -c 'kill -9 $$'", "error", "signal:9"),
        ("sh -c 'kill -SEGV $$'", "error", "signal:11"),
        ("/no/such/program", "error", "start_failed: /no/such/program: no such program"),
        ("/etc/passwd", "error", "start_failed: /etc/passwd: Permission denied"),
    ],
)
def test_ends_are_told_apart(
    shared_daemon: Daemon, command: str, outcome: str, reason: str
) -> None:
    agent = shared_daemon.finish("ends", command)
    assert read(agent, "outcome") == outcome + "\n"
    assert read(agent, "reason").startswith(reason)
    assert read(agent, "session/state") == outcome + "\n"
    assert read(agent, "cgroup") == read(agent, "pid") == read(agent, "run") == ""
    agent.rmdir()


def test_a_missing_mount_source_and_cwd_are_named(shared_daemon: Daemon) -> None:
    agent = shared_daemon.make("lost", "true")
    assert refusal(agent / "mount", "/no/such/source /project ro") == "ENOENT"
    assert '"/no/such/source" ("/no") does not exist' in shared_daemon.error()
    agent.rmdir()
    agent = shared_daemon.finish("lost", "true", cwd="/no/such/place")
    assert "cwd /no/such/place: No such file" in read(agent, "reason")
    agent.rmdir()


@pytest.mark.needs_root("an ordinary user's agents have the user's own uid")
def test_what_it_asked_for_and_has_not_is_in_its_log(shared_daemon: Daemon, tmp_path: Path) -> None:
    closed, open_, fixed = (tmp_path / name for name in ("closed", "open", "fixed"))
    closed.mkdir()
    open_.mkdir()
    fixed.mkdir()
    os.chown(open_, AGENT_UID, -1)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", fixed], check=True)
    try:
        agent = shared_daemon.finish(
            "lacking", "echo it runs",
            mount=f"{closed} /closed rw\n{open_} /open rw\n{closed} /read ro\n{fixed} /fixed rw",
            policy="allow lacking_t network:nope connect\nallow lacking_t network:no* connect",
        )
    finally:
        subprocess.run(["umount", fixed], check=True)
    told = (
        "ctxfs: its policy allows network:nope, but no such network is configured: add it to"
        " networks in the configuration of ctxd",
        f"mount: /closed is rw, but uid {AGENT_UID} may not write {closed}: chown it,"
        f" or give it to this uid with setfacl -m u:{AGENT_UID}:rwx",
        "mount: /fixed is rw, but its filesystem is read-only",
    )
    *said, _ = read(agent, "log").splitlines()
    assert said == [*told]
    assert read(agent, "out") == "it runs\n"
    agent.rmdir()


def test_the_result_falls_back_to_the_end_of_stdout(shared_daemon: Daemon) -> None:
    agent = shared_daemon.finish("talker", "sh -c 'seq 100000'")
    whole = "".join(f"{n}\n" for n in range(1, 100001))
    assert read(agent, "out") == whole
    assert read(agent, "result.md") == whole[-65536:]
    agent.rmdir()
    agent = shared_daemon.finish("talker", "sh -c 'echo text; exit 1'")
    assert read(agent, "result.md") == ""
    agent.rmdir()


def test_the_environment_is_what_the_contract_lists(shared_daemon: Daemon) -> None:
    agent = shared_daemon.finish("coder", "env -0", env="GREETING=a b $HOME")
    variables = dict(item.split("=", 1) for item in read(agent, "out").split("\0") if item)
    root = str(shared_daemon.root)
    user = find_user(AGENT_UID)
    name = "ctxfs" if user is None else user.pw_name
    assert variables == {
        "CTX_ROOT": root,
        "CTX_AGENT": "coder",
        "CTX_SELF": f"{root}/agent/coder.d",
        "CTX_SESSION": "default",
        "CTX_RUN": "r1",
        "CTX_HOME": f"{root}/home/0",
        "CTX_PATH": f"{root}/tool",
        "CTX_MODEL": "",
        "HOME": "/tmp/home",
        "PATH": f"/usr/local/bin:/usr/bin:/bin:{root}/bin",
        "USER": name,
        "LOGNAME": name,
        "SHELL": "/bin/sh",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "GREETING": "a b $HOME",
        "GIT_CONFIG_SYSTEM": str(shared_daemon.runtime / "root" / "gitconfig"),
        "npm_config_offline": "true",
        "YARN_ENABLE_NETWORK": "0",
        "PIP_NO_INDEX": "1",
        "UV_OFFLINE": "1",
        "CARGO_NET_OFFLINE": "true",
        "GOPROXY": "off",
        "COMPOSER_DISABLE_NETWORK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    agent.rmdir()


def test_its_uid_has_a_name_and_a_home(shared_daemon: Daemon) -> None:
    script = "id -un; getent passwd $(id -u) | cut -d : -f 6; cd ~ && pwd; dpkg -l | wc -l"
    agent = shared_daemon.finish("coder", f"sh -c '{script}'")
    name, home, here, packages = read(agent, "out").split()
    assert not name.isdigit() and home == here == "/tmp/home"
    assert int(packages) > 10 or not os.path.exists("/var/lib/dpkg/status")
    agent.rmdir()


def test_privileges_are_gone_before_the_first_instruction(shared_daemon: Daemon) -> None:
    agent = shared_daemon.finish("coder", "sh -c 'cat /proc/self/status; ulimit -c; tty'")
    facts = dict(
        line.split(":", 1) for line in read(agent, "out").splitlines() if ":\t" in line
    )
    assert facts["Uid"].split() == [str(AGENT_UID)] * 4
    assert facts["Gid"].split() == [str(AGENT_UID)] * 4
    assert facts["Groups"].split() == []
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(facts[name], 16) == 0, name
    assert facts["NoNewPrivs"].strip() == "1"
    assert read(agent, "out").splitlines()[-2:] == ["0", "not a tty"]
    agent.rmdir()


def test_the_view_shows_no_more_than_it_should(shared_daemon: Daemon) -> None:
    command = (
        "sh -c 'ls -A / | tr \"\\n\" \" \"; echo; ls -A /tmp /run /root 2>&1; ls /proc | grep -c "
        '"^[0-9]"; touch /usr/x 2>&1; ls /proc/self/fd; cat /proc/net/dev | wc -l; '
        "ls /sys 2>&1; touch ~/mine && echo home'"
    )
    agent = shared_daemon.finish("looker", command)
    out = read(agent, "out")
    assert "sys" not in out.splitlines()[0].split()
    assert "root" not in out.splitlines()[0].split()
    assert "Read-only file system" in out
    assert out.endswith("home\n")
    agent.rmdir()


def test_mounts_reach_what_the_creator_reaches(daemon: Daemon) -> None:
    secret = daemon.base / "closed"
    secret.mkdir(mode=0o700)
    (secret / "project").mkdir(mode=0o755)
    (secret / "project" / "file").write_text("content\n")
    (secret / "project" / "file").chmod(0o644)
    agent = daemon.finish(
        "reader",
        "sh -c 'cat /project/file; echo x > /project/new; echo $?; cat /etc/hostname; ls -d /opt2'",
        mount=f"{secret}/project\t/project\tro\t-\n- /etc/hostname hide",
    )
    assert read(agent, "out").splitlines() == ["content", "2"]
    assert "Read-only file system" in read(agent, "log")
    assert not [m for m in Path("/proc/self/mountinfo").read_text().splitlines() if "stage" in m]


def test_a_part_of_a_mount_is_hidden(daemon: Daemon) -> None:
    (daemon.base / "closed").mkdir(mode=0o700)
    closed = daemon.base / "closed" / "project"
    closed.mkdir()
    for name in ("keys", "open"):
        (closed / name).mkdir()
        (closed / name / "file").write_text(name)
    (closed / "secret").write_text("secret")
    agent = daemon.finish(
        "reader",
        "sh -c 'cat /p/open/file; cat /p/secret; ls /p/keys; cat /p/keys/file'",
        mount=f"{closed} /p ro\n- /p/keys hide\n- /p/secret hide\n- /p/none hide",
    )
    assert read(agent, "out") == "open", "nothing else is seen"
    assert read(agent, "log").count("ermission denied") == 3


def test_forbidden_mount_sources(shared_daemon: Daemon) -> None:
    link = shared_daemon.base / "link"
    for source in (
        "/proc",
        "/proc/self/cwd",
        str(shared_daemon.cgroup.path),
        str(shared_daemon.state),
        str(shared_daemon.runtime),
        str(shared_daemon.state / "agent"),
    ):
        agent = shared_daemon.make("thief", "true")
        assert refusal(agent / "mount", f"{source} /stolen ro") == "EACCES", source
        link.symlink_to(source)
        assert refusal(agent / "mount", f"{link} /stolen ro") == "EACCES", source
        assert "cannot be given to an agent" in shared_daemon.error(), source
        agent.rmdir()
        link.unlink()


def test_what_is_forbidden_is_not_below_a_mount_either(shared_daemon: Daemon) -> None:
    state, cgroup = shared_daemon.state, shared_daemon.cgroup.path
    look = f"ls /host/proc /host{cgroup} /host{state} /host{shared_daemon.runtime}/root"
    agent = shared_daemon.finish("looker", f"sh -c '{look}; ls /host/usr'", mount="/ /host ro")
    assert "bin\n" in read(agent, "out")
    assert "cpuinfo" not in read(agent, "out")
    assert "user-0" not in read(agent, "out")
    assert "wait" not in read(agent, "out").split()
    agent.rmdir()


def test_stdin_stdout_and_stderr_can_be_opened_anew(shared_daemon: Daemon) -> None:
    agent = shared_daemon.finish(
        "plain", "sh -c 'cat /dev/stdin > /dev/stdout; echo e > /dev/stderr'", "input\n"
    )
    assert read(agent, "out") == "input\n"
    assert read(agent, "log").startswith("e\n")
    agent.rmdir()


def test_stop_gives_a_grace_and_kill_does_not(daemon: Daemon) -> None:
    trap = "sh -c 'trap \"echo bye; exit 0\" TERM; echo up; while :; do sleep 0.05; done'"
    agent = daemon.run("polite", trap, limits="grace=1h")
    wait_until(lambda: read(agent, "out") == "up\n", "the program is up")
    write(agent / "ctl", "stop")
    wait_dead(agent)
    assert read(agent, "out") == "up\nbye\n"
    assert (read(agent, "outcome"), read(agent, "reason")) == ("cancelled\n", "operator_stop\n")
    rude = daemon.run("rude", "sh -c 'trap \"\" TERM; echo up; while :; do sleep 0.05; done'",
                      limits="grace=200ms")
    wait_until(lambda: read(rude, "out") == "up\n", "the program is up")
    write(rude / "ctl", "stop")
    wait_dead(rude)
    assert read(rude, "outcome") == "cancelled\n"
    assert "SIGKILL" in read(rude, "log")
    stubborn = daemon.run(
        "stubborn", "sh -c 'trap \"\" TERM; echo up; while :; do sleep 0.05; done'",
        limits="grace=1h",
    )
    wait_until(lambda: read(stubborn, "out") == "up\n", "its trap is set")
    write(stubborn / "ctl", "stop")
    assert refusal(stubborn / "ctl", "stop") == "EBUSY"
    write(stubborn / "ctl", "kill")
    wait_dead(stubborn)
    assert read(stubborn, "outcome") == "cancelled\n"


def test_timeout_cancels(shared_daemon: Daemon) -> None:
    agent = shared_daemon.finish("slow", "sleep 1000", limits="timeout=300ms")
    assert (read(agent, "outcome"), read(agent, "reason")) == ("cancelled\n", "timeout\n")
    agent.rmdir()


def test_what_the_program_left_is_ended_with_it(shared_daemon: Daemon) -> None:
    agent = shared_daemon.finish(
        "forker", "sh -c 'setsid sleep 1000 & (setsid sleep 1001 &) ; exit 0'",
        limits="grace=300ms",
    )
    assert read(agent, "reason") == "exit:0\n"
    agent.rmdir()


def test_killed_from_outside(shared_daemon: Daemon) -> None:
    agent = shared_daemon.run("victim", "sleep 1000")
    wait_status(agent, "busy")
    pid = int(read(agent, "pid"))
    wait_until(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n", "the program runs")
    end_process(pid)
    wait_dead(agent)
    assert (read(agent, "outcome"), read(agent, "reason")) == ("error\n", "signal:9\n")
    assert not alive(pid)
    agent.rmdir()


def test_a_keeper_killed_from_outside_ends_the_agent(shared_daemon: Daemon) -> None:
    agent = shared_daemon.run("headless", "sleep 1000")
    wait_status(agent, "busy")
    pid = int(read(agent, "pid"))
    keeper = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    end_process(keeper)
    wait_dead(agent)
    assert read(agent, "outcome") == "error\n"
    assert not alive(pid)
    agent.rmdir()


def test_a_monitor_killed_from_outside_ends_the_agent(shared_daemon: Daemon) -> None:
    agent = shared_daemon.run("unwatched", "sleep 1000", limits="grace=300ms")
    wait_status(agent, "busy")
    pid = int(read(agent, "pid"))
    monitors = shared_daemon.monitors
    wait_until(lambda: len(monitors()) == 1, "the monitors of ended agents are gone")
    end_process(monitors()[0])
    wait_dead(agent)
    assert (read(agent, "outcome"), read(agent, "reason")) == ("interrupted\n", "runtime_lost\n")
    assert not alive(pid)
    agent.rmdir()


def test_old_output_is_dropped_and_said_so(shared_daemon: Daemon) -> None:
    agent = shared_daemon.finish("noisy", "seq 200000", limits="log_max=64K")
    out = read(agent, "out")
    assert out.startswith("ctxfs: ")
    assert "bytes of older output dropped" in out.splitlines()[0]
    assert out.endswith("199999\n200000\n")
    assert len(out) < 3 * 65536
    assert (agent / "out").stat().st_size == len(out.encode())
    agent.rmdir()


def test_usage_is_kept_after_the_end(shared_daemon: Daemon) -> None:
    agent = shared_daemon.run("worker", "sh -c 'i=0; while [ $i -lt 50000 ]; do i=$((i+1)); done'")
    wait_dead(agent)
    usage = dict(line.split("=") for line in read(agent, "usage").splitlines())
    assert int(usage["cpu_usec"]) > 0
    assert int(usage["processes"]) == 0
    assert int(usage["wall_msec"]) > 0
    end = next(e for e in shared_daemon.events("worker") if e["type"] == "run.end")
    assert end["usage"]["cpu_usec"] == int(usage["cpu_usec"])
    agent.rmdir()


def test_configuration_is_written_while_new_only(shared_daemon: Daemon) -> None:
    agent = shared_daemon.finish("fixed", "true")
    for file in ("label", "env", "mount", "handoff.md", "uid", "life", "parent", "exec"):
        code = refusal(agent / file, "x")
        assert code == ("EBUSY" if file != "exec" else "accepted"), file
    assert refusal(agent / "ctl", "start") == "EBUSY"
    assert refusal(agent / "ctl", "stop") == "EBUSY"
    assert refusal(agent / "ctl", "pause") == "EBUSY"
    write(agent / "meta.json", '{"still": "writable"}')
    agent.rmdir()


def test_stop_of_a_new_agent_ends_it(shared_daemon: Daemon) -> None:
    agent = shared_daemon.make("unborn", "true")
    write(agent / "ctl", "stop")
    wait_dead(agent)
    assert (read(agent, "outcome"), read(agent, "reason")) == ("cancelled\n", "operator_stop\n")
    agent.rmdir()


def test_stop_during_start(shared_daemon: Daemon) -> None:
    for _ in range(10):
        agent = shared_daemon.run("brief", "sleep 1000", limits="grace=1s")
        write(agent / "ctl", "stop")
        wait_dead(agent)
        assert read(agent, "outcome") == "cancelled\n"
        agent.rmdir()


def test_artifacts_and_references(daemon: Daemon) -> None:
    program = (
        "sh -c 'cd $CTX_SELF; mkdir artifact/sub; echo one > artifact/sub/a; "
        "mv artifact/sub/a artifact/sub/b; "
        'echo "{\\"path\\": \\"artifact/sub/b\\", \\"summary\\": \\"first\\"}" > refs.jsonl; '
        'echo "{\\"path\\": \\"../x\\"}" >> refs.jsonl; cat $CTX_ROOT/error; '
        "ln -s /etc/passwd artifact/link; mkfifo artifact/fifo; "
        "echo whole > artifact/result; mv artifact/result result.md'"
    )
    agent = daemon.finish("maker", program)
    assert read(agent, "result.md") == "whole\n"
    assert os.listdir(agent / "artifact") == ["sub"]
    assert read(agent, "artifact/sub/b") == "one\n"
    assert read(agent, "refs.jsonl").count("\n") == 1
    assert "EINVAL agent/maker.d/refs.jsonl" in read(agent, "out")
    assert read(agent, "log").count("Operation not permitted") == 2
    with pytest.raises(PermissionError):
        (agent / "artifact" / "mine").write_text("x")


@pytest.mark.settings(document_max="64K")
def test_full_documents_are_refused(daemon: Daemon) -> None:
    agent = daemon.finish(
        "big", "sh -c 'head -c 70000 /dev/zero > $CTX_SELF/result.md; cat $CTX_ROOT/error'"
    )
    assert "File too large" in read(agent, "log")
    assert "EFBIG agent/big.d/result.md" in read(agent, "out")
    new = daemon.make("other")
    assert refusal(new / "handoff.md", "x" * 70000) == "EFBIG"


def test_cgroups_nest_and_processes_are_in_leaves(daemon: Daemon) -> None:
    agent = daemon.run("boss", "sh -c 'cd $CTX_ROOT/agent; mkdir w.d; echo sleep 1000 > w.d/exec; "
                               "echo start > w.d/ctl; sleep 1000'")
    child = daemon.agent_dir("w")
    wait_until(child.exists, "the child is made")
    wait_status(child, "busy")
    node = Cgroup(Path(read(agent, "cgroup").strip()))
    assert node.path == daemon.cgroup.path / "user-0" / "agent-boss"
    assert read(child, "cgroup").strip() == f"{node.path}/child/agent-w"
    for directory, names, _ in os.walk(node.path):
        if names:
            assert (Path(directory) / "cgroup.procs").read_text() == ""
    assert int(read(child, "pid")) in node.child("child", "agent-w", "run").processes()
    write(agent / "ctl", "kill")
    wait_dead(agent)
    assert read(child, "status") == "dead\n"
    wait_until(lambda: not node.exists(), "its cgroup is removed")


def test_output_of_a_hundred_at_once(daemon: Daemon) -> None:
    for number in range(100):
        daemon.run(f"a{number}", f"echo {number}")
    for number in range(100):
        directory = daemon.agent_dir(f"a{number}")
        wait_dead(directory, timeout=60)
        assert read(directory, "out") == f"{number}\n"
        assert read(directory, "outcome") == "done\n"


def test_tail_follows_growing_output(daemon: Daemon) -> None:
    agent = daemon.run("ticker", "sh -c 'for i in 1 2 3; do echo $i; sleep 0.2; done; sleep 1000'")
    with subprocess.Popen(
        ["tail", "-s", "0.05", "-n", "+1", "-f", str(agent / "out")], stdout=subprocess.PIPE
    ) as tail:
        assert tail.stdout is not None
        assert [tail.stdout.readline() for _ in range(3)] == [b"1\n", b"2\n", b"3\n"]
        tail.terminate()
    write(agent / "ctl", "kill")
    wait_dead(agent)


def test_memory_that_processes_share_is_told_once(daemon: Daemon) -> None:
    """And not that of the cell, nor its processes; by the kernel, if that counts."""
    code = ("import os, time; kept = os.urandom(40 << 20); "
            "[os.fork() or time.sleep(1000) for _ in range(4)]; print(len(kept)); time.sleep(1000)")
    agent = daemon.run("a", f"python3 -uc '{code}'")
    wait_until(lambda: read(agent, "out"), "all are forked")

    def usage() -> dict[str, int]:
        pairs = (line.split("=") for line in read(agent, "usage").splitlines())
        return {key: int(value) for key, value in pairs}

    now = usage()
    assert now["processes"] == 5
    assert 40 << 20 < now["memory_current"] < 80 << 20
    peak = "memory_peak" if "memory_peak" in now else "memory_peak_sampled"
    assert now[peak] >= now["memory_current"] - (1 << 20)
    write(agent / "ctl", "kill")
    wait_dead(agent)
    then = usage()
    assert then["processes"] == 0
    assert then[peak] >= now["memory_current"] - (1 << 20), "and is kept"
