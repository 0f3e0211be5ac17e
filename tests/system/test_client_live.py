"""The client against a real daemon, as a user types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.worlds.daemon import Daemon, read, wait_dead, wait_status, wait_until, write


def started(daemon: Daemon, *arguments: str) -> subprocess.Popen[str]:
    """The client, still at work."""
    return subprocess.Popen(
        [sys.executable, "-IS", str(daemon.root / "bin" / "ctx"), *arguments],
        env={"CTX_ROOT": str(daemon.root)}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )


def holds(pid: int, path: str) -> bool:
    """Whether a process has a file open."""
    base = f"/proc/{pid}/fd"
    for fd in os.listdir(base):
        with suppress(FileNotFoundError):  # closed since it was listed
            if os.readlink(f"{base}/{fd}") == path:
                return True
    return False


def test_the_whole_life_of_an_agent(daemon: Daemon) -> None:
    assert daemon.ctx("new", "coder", "exec=cat", "label=mine").returncode == 0
    assert daemon.ctx("set", "coder", "handoff.md", "-", stdin=None, input="task\n").returncode == 0
    assert daemon.ctx("get", "coder", "label").stdout == "mine\n"
    assert "coder" in daemon.ctx("ps").stdout
    assert daemon.ctx("start", "coder").returncode == 0
    assert daemon.ctx("wait", "coder").returncode == 0
    assert daemon.ctx("result", "coder").stdout == "task\n"
    assert "run.end" in daemon.ctx("events", "coder").stdout
    assert "task" in daemon.ctx("log", "coder").stdout
    assert "coder" not in daemon.ctx("ps").stdout
    assert "coder" in daemon.ctx("ps", "-a").stdout
    assert "coder" in daemon.ctx("tree").stdout
    assert daemon.ctx("rm", "coder").returncode == 0
    assert os.listdir(daemon.root / "agent") == []
    left = daemon.ctx("events", "-f", "coder").stdout
    assert "agent.stop" in left.splitlines()[-1], "its history is kept"
    assert daemon.ctx("new", "coder").returncode == 0
    assert daemon.ctx("rm", "coder").returncode == 0
    assert "run.start" not in daemon.ctx("events", "coder").stdout, "of its last life"
    unknown = daemon.ctx("events", "nobody")
    assert (unknown.returncode, unknown.stderr) == (1, 'ctx: no agent "nobody"\n')


def test_the_processes_of_a_family(daemon: Daemon) -> None:
    """Each sees those of what it owns, by the PIDs that it has for them."""
    boss = daemon.run("boss", "sh -c 'sleep 1000 & exec sleep 2000'")
    wait_status(boss, "busy")
    begun = "until grep -q busy $CTX_SELF/status; do sleep 0.02; done"
    reads = "cat $CTX_SELF/processes; cat $CTX_ROOT/agent/boss.d/processes"
    look = f"{begun}; {reads}; exec sleep 3000"
    kid = daemon.run("kid", f"sh -c '{look}'", parent="agent:boss")
    wait_status(kid, "busy")
    mine = daemon.agent_dir("kid")
    wait_until(lambda: "Permission denied" in read(mine, "log"), "it has looked")
    own = [json.loads(line) for line in read(mine, "out").splitlines()]
    assert [line["agent"] for line in own] == ["kid", "kid"], own
    assert all(line["pid"] < 10 for line in own), "in its own PID namespace"
    assert own[1]["command"].endswith("/kid.d/processes")

    def all_of_it() -> dict[int, str]:
        lines = map(json.loads, read(boss, "processes").splitlines())
        return {line["pid"]: f"{line['agent']}: {line['command']}" for line in lines}

    sleepers = ["boss: sleep 1000", "boss: sleep 2000", "kid: sleep 3000"]
    wait_until(lambda: sorted(all_of_it().values()) == sleepers, "all of them sleep")
    found = all_of_it()
    assert found[int(read(boss, "pid"))] == "boss: sleep 2000"
    shown = daemon.ctx("ps", "-p").stdout.splitlines()
    assert shown[0].split() == ["AGENT", "PID", "STATE", "CPU", "MEMORY", "AGE", "COMMAND"]
    assert len(shown) == 4
    assert len(daemon.ctx("ps", "-p", "kid").stdout.splitlines()) == 2
    assert daemon.ctx("ps", "kid").returncode == 2
    write(boss / "ctl", "kill")
    wait_dead(boss)
    assert read(boss, "processes") == ""


def test_a_handle_whose_daemon_has_just_died_says_that_it_is_unavailable(daemon: Daemon) -> None:
    """The program was read before, and asks afterwards."""
    waits, goes = os.pipe()
    calls = []
    for kind, name, words in (("tool", "AgentGet", "{}"), ("agent", "a", "hello")):
        for own in ("", "a"):  # what is said to be of an agent, too
            daemon_dies_first = (
                "import os, sys; from client.main import main; "
                f"os.read({waits}, 1); sys.argv = sys.argv[1:]; sys.exit(main())"
            )
            calls.append(subprocess.Popen(
                [sys.executable, "-c", daemon_dies_first, f"{daemon.root}/{kind}/{name}", words],
                env={"CTX_AGENT": own} if own else {}, stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE, text=True, pass_fds=(waits,),
            ))
    os.close(waits)
    daemon.kill()
    os.close(goes)
    for call in calls:
        said = call.communicate()[1]
        assert call.returncode == 69, said
        assert said.startswith(("ctx: no ctxd answers at ", "ctx: the ctxd of ")), said
    daemon.start()


def test_spawn_hands_over_follows_and_exits_with_the_outcome(daemon: Daemon) -> None:
    result = daemon.ctx(
        "spawn", "a", "--wait", "--handoff", "-", "--", "sh", "-c", "cat; echo warning >&2; exit 4",
        stdin=None, input="the task\n",
    )
    assert result.returncode == 4
    assert result.stdout == "the task\n"
    assert "warning\n" in result.stderr
    script = "\nprintf %s \"$1\"\nkill -9 $$\n"
    lines = "two\nlines's \\ \x01 \udcff"
    result = daemon.ctx(
        "spawn", "b", "--wait", "--", "sh", "-c", script, "sh", lines, errors="surrogateescape"
    )
    assert (result.returncode, result.stdout) == (137, lines)
    result = daemon.ctx("spawn", "c", "--wait", "--", "/no/such")
    assert result.returncode == 126
    why = "no such program in the agent's view: mount it, or name another in exec"
    assert result.stderr == f"ctxfs: r1 ended: error start_failed: /no/such: {why}\n", "once"
    result = daemon.ctx("spawn", "d", "--wait", "--timeout", "200ms", "--", "sleep", "1000")
    assert result.returncode == 124
    project = daemon.base / "project"
    project.mkdir()
    (project / "file").write_text("content\n")
    result = daemon.ctx("spawn", "e", "--wait", "--mount", f"{project}:/p", "--", "cat", "/p/file")
    assert (result.returncode, result.stdout) == (0, "content\n")


def test_what_is_slow_to_import_is_not_imported(daemon: Daemon) -> None:
    """Python takes as long for these as for all else that a command does."""
    slow = ("argparse", "collections", "contextlib", "dataclasses", "enum", "functools", "json",
            "re", "shlex", "signal", "socket", "subprocess", "threading", "typing")
    code = (
        "import os, sys\n"
        "def end(status, end=os._exit):\n"
        f"    print([name for name in {slow} if name in sys.modules], flush=True)\n"
        "    end(status)\n"
        "os._exit = end\n"
        "del sys.argv[0]\n"
        "c = open(sys.argv[0], 'rb').read()\n"
        "exec(c)\n"
    )
    wait_status(daemon.run("talker", "cat", mode="turn"), "idle")
    for line in (
        "spawn --wait --rm --set label=it's worker -- sh -c true;\n",
        "run asked --message it's -- cat",
        "send talker --priority=next it's",
        "status talker",
        "stop talker --wait",
        "wait --timeout 9s talker",
        "mcp --agent talker",
        "ps --all",
    ):
        client = str(daemon.root / "bin" / "ctx")
        done = subprocess.run(
            [sys.executable, "-IS", "-c", code, client, *line.split(" ")],
            env={"CTX_ROOT": str(daemon.root)}, stdin=subprocess.DEVNULL, text=True,
            capture_output=True,
        )
        assert done.stdout.splitlines()[-1:] == ["[]"], (line, done.stdout, done.stderr)


def test_ctrl_c_stops_what_spawn_waits_for(daemon: Daemon) -> None:
    with started(daemon, "spawn", "s", "--wait", "--", "sleep", "1000") as client:
        try:
            directory = daemon.agent_dir("s")
            wait_until(directory.exists, "the agent is made")
            wait_status(directory, "busy")
            client.send_signal(signal.SIGINT)
            _, said = client.communicate(timeout=30)
            assert client.returncode == 130
            assert "stop" in said
        finally:
            client.kill()
    assert read(directory, "outcome") == "cancelled\n"


def test_ctrl_c_ends_wait_and_not_the_agent(daemon: Daemon) -> None:
    directory = daemon.run("s", "sleep 1000")
    wait_status(directory, "busy")
    with started(daemon, "wait", "s") as client:
        fifo = os.readlink(directory / "wait")

        try:
            wait_until(lambda: holds(client.pid, fifo), "ctx waits")
            client.send_signal(signal.SIGINT)
            assert client.wait(30) == 130
        finally:
            client.kill()
    assert read(directory, "status") == "busy\n"


def test_the_client_outlives_the_daemon(daemon: Daemon) -> None:
    """All that it needs of its own file is read when it starts."""
    directory = daemon.run("s", "sleep 1000")
    wait_status(directory, "busy")
    with started(daemon, "log", "-f", "s") as client:
        fifo = os.readlink(directory / "wait")
        wait_until(lambda: holds(client.pid, fifo), "ctx waits")
        daemon.kill()
        said = client.communicate(timeout=30)[1]
        assert client.returncode == 69
    assert said.startswith(f"ctx: the ctxd of {daemon.root} died (ENOTCONN)")
    daemon.start()


def test_the_installed_command_does_the_same(daemon: Daemon) -> None:
    daemon.make("s", "true")
    installed = Path(sys.executable).with_name("ctx")
    environment = {"CTX_ROOT": str(daemon.root)}
    for argv in (["get", "s", "exec"], ["help"], ["get", "nobody", "exec"], ["nope"]):
        result = subprocess.run(
            [installed, *argv], env=environment, capture_output=True, text=True, check=False
        )
        other = daemon.ctx(*argv)
        assert (result.returncode, result.stdout, result.stderr) == (
            other.returncode, other.stdout, other.stderr
        )


def test_every_failure_prints_the_daemons_reason(daemon: Daemon) -> None:
    daemon.make("coder")
    for arguments, reason in (
        (("set", "coder", "life", "forever"), 'unknown value "forever"; use owned, temp, detached'),
        (("set", "coder", "policy", "allow x agent:* create"), "is another agent's label"),
        (("start", "coder"), "exec is empty"),
        (("pause", "coder"), "cannot pause: the agent is new"),
        (("new", "-bad-"), "usage"),
        (("new", "coder"), "exists"),
        (("new", "other", "mode=loop"), 'unknown value "loop"'),
        (("rm", "nobody"), 'no agent "nobody"'),
        (("wait", "nobody"), 'no agent "nobody"'),
    ):
        result = daemon.ctx(*arguments)
        assert result.returncode in (1, 2), arguments
        assert reason in result.stderr, (arguments, result.stderr)
        assert "Traceback" not in result.stderr
    assert sorted(os.listdir(daemon.root / "agent")) == ["coder", "coder.d", "coder.sock"]


def test_the_client_works_inside_a_sandbox(daemon: Daemon) -> None:
    script = (
        "ctx spawn kid -- echo from the child >/dev/null && ctx wait kid && ctx result kid && "
        "ctx ps -a && ctx set $CTX_AGENT label mine"
    )
    agent = daemon.finish("boss", f"sh -c '{script}'")
    out = read(agent, "out")
    assert "from the child\n" in out
    assert "agent:boss" in out
    assert "ctx: agent/boss.d/label: the caller may not write label" in read(agent, "log")
    assert read(agent, "reason") == "exit:1\n"


def test_following_events_and_output_until_the_end(daemon: Daemon) -> None:
    directory = daemon.make("s", "sh -c 'echo one; sleep 0.3; echo two'")
    with (
        started(daemon, "events", "-f", "s") as events,
        started(daemon, "log", "-f", "--out", "s") as output,
    ):
        assert daemon.ctx("start", "s").returncode == 0
        told, _ = events.communicate(timeout=30)
        said, _ = output.communicate(timeout=30)
    wait_dead(directory)
    assert told.count("agent.create") == told.count("agent.stop") == 1
    assert said == "one\ntwo\n"


def test_what_the_client_tells_of_the_ways_of_living(daemon: Daemon) -> None:
    boss = daemon.run("boss", "sleep 1000")
    wait_status(boss, "busy")
    spawn = ("spawn", "rev", "--parent", "boss", "--handoff", "-", "--wait", "--rm")
    result = daemon.ctx(*spawn, "--", "cat", stdin=None, input="the task\n")
    assert (result.returncode, result.stdout) == (0, "the task\n")
    spawn = ("spawn", "kid", "--parent", "boss", "--life", "detached", "--limit", "grace=1s")
    assert daemon.ctx(*spawn, "--", "sleep", "1000").returncode == 0
    wait_status(daemon.agent_dir("kid"), "busy")
    assert daemon.ctx("pause", "boss").returncode == 0
    assert daemon.ctx("tree").stdout == "boss  paused\n└─ kid  busy (detached)\n"
    assert "is paused" in daemon.ctx("spawn", "x", "--parent", "boss", "--", "true").stderr
    assert daemon.ctx("resume", "boss").returncode == 0
    assert daemon.ctx("kill", "--wait", "boss", "kid").returncode == 0
    daemon.ctx("spawn", "flaky", "--restart", "always", "--", "sh", "-c", "exit 3")
    wait_until(lambda: " after exit:3" in daemon.ctx("ps").stdout, "it waits for its next run")
    # it is refused while the next run is just ending
    wait_until(lambda: daemon.ctx("stop", "--wait", "flaky").returncode == 0, "it is stopped")
    assert daemon.ctx("reset", "flaky").returncode == 0
    assert read(daemon.agent_dir("flaky"), "status") == "new\n"


def test_the_end_of_a_temp_child_is_told(daemon: Daemon) -> None:
    boss = daemon.run("boss", "sleep 1000")
    wait_status(boss, "busy")
    spawn = ("spawn", "kid", "--parent", "boss", "--life", "temp")
    assert daemon.ctx(*spawn, "--", "sleep", "1000").returncode == 0
    directory = daemon.agent_dir("kid")
    wait_status(directory, "busy")
    with started(daemon, "wait", "kid") as client:
        fifo = os.readlink(directory / "wait")
        wait_until(lambda: holds(client.pid, fifo), "ctx waits")
        os.kill(int(read(directory, "pid")), signal.SIGKILL)
        assert client.communicate(timeout=30)[0] == "kid error signal:9\n"
    assert client.returncode == 1
    assert not directory.exists()


def test_doctor(daemon: Daemon) -> None:
    result = daemon.ctx("doctor")
    assert result.returncode == 0, result.stdout
    assert f"ctxd at {daemon.root} is ready" in result.stdout
