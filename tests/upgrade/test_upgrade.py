"""What an earlier version began, this one goes on with."""

from __future__ import annotations

import json
import os
import shlex
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from runtime.kernel.cgroups import Cgroup
from tests.upgrade.older import Executed, Successor
from tests.upgrade.scene import SLEEP, STATUSES, begin_all, ends, has_said
from tests.worlds.daemon import (
    AGENT_UID,
    TIMEOUT,
    Daemon,
    alive,
    end_process,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.fates import lose_machine
from tests.worlds.models import metered
from tests.worlds.viewers import Typing, Viewer, echoing

#: what is compared before and after
SAME = (
    *("status", "pid", "run", "incarnation", "cgroup", "outcome", "reason", "queue", "policy"),
    *("mount", "mode", "life", "parent", "out", "work/current"),
)


def check_numbers(daemon: Daemon, name: str) -> None:
    """The events of its session have consecutive ids, whoever wrote them."""
    found = [event["id"] for event in daemon.events(name)]
    assert found == [f"e{number}" for number in range(1, len(found) + 1)]


def is_living(directory: Path) -> bool:
    pid = read(directory, "pid").strip()
    return bool(pid) and alive(int(pid))


def ask(daemon: Successor, name: str, **request: str) -> dict[str, object]:
    """The first frame that is answered."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT)
        connection.connect(str(daemon.path("agent", f"{name}.sock")))
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as answers:
            found: dict[str, object] = json.loads(answers.readline())
            return found


def shown(daemon: Successor, name: str) -> dict[str, str]:
    directory = daemon.agent_dir(name)
    found = {file: read(directory, file) for file in SAME if (directory / file).exists()}
    return {**found, "session": (directory / "session").readlink().name}


def check_statuses(daemon: Successor) -> None:
    # it is tried again now and then
    wait_status(daemon.agent_dir("again"), "starting")
    found = {name: read(daemon.agent_dir(name), "status").strip() for name in STATUSES}
    assert found == STATUSES


def test_living_agents_are_adopted(daemon: Successor) -> None:
    daemon.start_older()
    begin_all(daemon)
    check_statuses(daemon)
    before = {name: shown(daemon, name) for name in STATUSES if name not in ("again", "tasker")}
    task_pids = {t: read(daemon.agent_dir("tasker") / "task" / t, "pid")
                 for t in ("good", "long", "deaf", "lost")}
    daemon.kill_older()
    end_process(int(task_pids["lost"]))  # with nobody there
    daemon.start()

    wait_until(lambda: ends(daemon, "tasker") == ["processed"], "it is told what was lost")
    wait_status(daemon.agent_dir("tasker"), "idle")
    check_statuses(daemon)
    assert {name: shown(daemon, name) for name in before} == before
    for name in STATUSES:
        check_numbers(daemon, name)
        if STATUSES[name] not in ("new", "dead", "starting"):
            assert ask(daemon, name, op="ping")["type"] == "pong", name
    check_runs(daemon)
    daemon.restart()
    check_planes(daemon, task_pids)
    check_family(daemon)
    check_ends(daemon)


def test_living_agents_go_on_when_this_version_is_executed(executed: Executed) -> None:
    """Nobody is interrupted, and what was open under the older version is open still."""
    daemon = executed
    daemon.start()
    if '"reexec"' not in daemon.operations():
        pytest.skip("the older version executes no other")
    begin_all(daemon)
    before = {name: shown(daemon, name) for name in STATUSES if name not in ("again", "tasker")}
    task_pids = {t: read(daemon.agent_dir("tasker") / "task" / t, "pid")
                 for t in ("good", "long", "deaf", "lost")}
    pid = daemon.pid
    control = os.open(daemon.agent_dir("fresh") / "env", os.O_WRONLY | os.O_APPEND)
    os.write(control, b"HALF=")
    status = os.open(daemon.agent_dir("steady") / "status", os.O_RDONLY)
    assert daemon.execute_this()["type"] == "reexec"
    assert daemon.pid == pid and alive(pid)
    assert os.pread(status, 100, 0).decode().strip() == STATUSES["steady"]
    os.close(status)
    os.write(control, b"whole\n")
    os.close(control)
    assert read(daemon.agent_dir("fresh"), "env").endswith("HALF=whole\n")
    check_statuses(daemon)
    assert {name: shown(daemon, name) for name in before} == before
    end_process(int(task_pids["lost"]))
    wait_until(lambda: ends(daemon, "tasker") == ["processed"], "it is told what was lost")
    wait_status(daemon.agent_dir("tasker"), "idle")
    check_runs(daemon)
    check_planes(daemon, task_pids)
    check_family(daemon)
    check_ends(daemon)


#: keeps a connection to one network, and asks another one again and again
_CONNECTED = """
import socket, time
kept = socket.create_connection(("127.0.0.1", 8081))
while True:
    kept.sendall(b"x")
    assert kept.recv(1) == b"x"
    try:
        with socket.create_connection(("127.0.0.1", 8080)) as models:
            models.sendall(b"POST /v1/messages HTTP/1.1\\r\\nHost: x\\r\\n"
                           b"Content-Length: 17\\r\\n\\r\\n" b'{"model":"m-3-4"}')
            print(models.recv(15) or "closed", flush=True)
    except OSError:
        print("closed", flush=True)
    time.sleep(0.02)
"""


class _Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(4096):
            self.request.sendall(data)


@contextmanager
def _echo_at(path: Path) -> Iterator[Path]:
    with socketserver.ThreadingUnixStreamServer(str(path), _Echo) as server:
        server.daemon_threads, server.block_on_close = True, False  # connections are left open
        os.chmod(path, 0o666)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield path
        server.shutdown()


def test_connections_go_on_and_a_meter_counts_from_the_next_cell(daemon: Successor) -> None:
    def net(agent: Path) -> int:
        lines = dict(line.split("=") for line in read(agent, "usage").splitlines())
        return int(lines.get("net.echo.sent", 0))

    config = daemon.base / "config.yaml"
    with metered(daemon.base) as models, _echo_at(daemon.base / "echo.sock") as echo:
        networks = f"echo: {{socket: {echo}, port: 8081}}, models: {{port: 8080, socket: "
        old = config.read_text()
        config.write_text(f"{old}networks: {{{networks}{models.upstream.server_address}}}}}\n")
        os.chmod(str(models.upstream.server_address), 0o666)
        daemon.start_older()
        policy = "\n".join(f"allow wired_t network:{name} connect" for name in ("echo", "models"))
        wired = daemon.run("wired", f"python3 -c {shlex.quote(f'exec({_CONNECTED!r})')}",
                           policy=policy)
        has_said(wired, "200")
        relays = Cgroup(Path(read(wired, "cgroup").strip(), "net")).processes()
        sent = net(wired)
        daemon.kill_older()
        config.write_text(f"{old}networks: {{{networks}{models.socket}, header: counters}}}}\n")
        daemon.start()
        wait_until(lambda: net(wired) > sent + 10, "its bytes are counted on")
        assert Cgroup(Path(read(wired, "cgroup").strip(), "net")).processes() == relays
        assert "tokens.out=0\n" in read(wired, "usage")
        write(wired / "limits", "tokens.max=5")
        again = daemon.run("again", f"python3 -c {shlex.quote(f'exec({_CONNECTED!r})')}",
                           policy=policy.replace("wired", "again"))
        wait_until(lambda: "tokens.out=4\n" in read(again, "usage"), "it is counted")


def check_runs(daemon: Successor) -> None:
    """What was going on goes on, and what was held up can go on."""
    paused, aborted, froze, talker, worker, quiet, flaky, again, once = map(
        daemon.agent_dir,
        ("paused", "aborted", "froze", "talker", "worker", "quiet", "flaky", "again", "once"),
    )
    write(quiet / "inbox", "see")
    has_said(quiet, "busy\n")
    write(quiet / "inbox", "hold on")
    has_said(quiet, "got hold on as r2")
    write(quiet / "ctl", "pause")
    wait_status(quiet, "paused")
    write(quiet / "ctl", "resume")
    wait_status(quiet, "busy")
    write(quiet / "ctl", "abort")
    wait_status(quiet, "paused")
    wait_until(lambda: ends(daemon, "quiet") == ["processed", "aborted"], "it is aborted")
    write(quiet / "ctl", "resume")
    wait_status(quiet, "idle")

    for directory in (paused, aborted, froze):
        write(directory / "ctl", "resume")
        wait_status(directory, "busy")
    has_said(aborted, "got r2")
    # its cell is not held yet: its keeper, which is of the older version, is told to
    write(paused / "ctl", "abort")
    wait_status(paused, "paused")
    wait_until(lambda: read(paused, "run") == "", "its run has ended")
    write(paused / "ctl", "resume")
    has_said(paused, "got r2")
    write(froze / "ctl", "abort")
    wait_until(lambda: ends(daemon, "froze") == ["aborted"], "it is aborted")
    assert ask(daemon, "steady", op="send", id="m", input="you")["type"] == "start"
    wait_until(lambda: ends(daemon, "steady") == ["processed"], "it replies")

    assert read(talker, "queue").count("\n") == 2
    daemon.open_gate()
    wait_until(lambda: ends(daemon, "talker") == ["processed"] * 3, "all is answered")
    has_said(talker, "got second second")
    has_said(talker, "busy\n")
    wait_until(lambda: ends(daemon, "worker") == ["processed"] * 2, "all is replied to")
    wait_status(worker, "ready")
    said = [json.loads(line) for line in read(worker / "session", "messages.jsonl").splitlines()]
    replies = [line["content"] for line in said if line["role"] == "assistant"]
    assert replies == ["re gate it", "re second"]
    for directory in (once, paused, aborted):
        wait_dead(directory)
        assert read(directory, "outcome") == "done\n", read(directory, "reason")
        assert read(directory, "out").endswith("busy\nover\n")
    runs = int(read(again, "log").rpartition("restart ")[2].split()[0])
    wait_until(lambda: f"restart {runs + 1} of" in read(again, "log"), "it is tried again", 90.0)
    assert read(again, "log").count("in 4 s") == 1
    end_process(int(read(flaky, "pid")))
    wait_until(lambda: read(flaky, "run") == "r3\n", "it runs again")
    wait_status(flaky, "busy")


def check_planes(daemon: Successor, task_pids: dict[str, str]) -> None:
    talker, tasker = daemon.agent_dir("talker"), daemon.agent_dir("tasker")
    tasks = tasker / "task"
    assert is_living(tasks / "long") and read(tasks / "long", "pid") == task_pids["long"]
    for title, status, end in (
        ("good", "failed", "exit:3"), ("lost", "failed", "signal:9"),
    ):
        wait_dead(tasks / title)
        assert (read(tasks / title, "status"), read(tasks / title, "exit")) == (
            f"{status}\n", f"{end}\n")
        assert read(tasks / title, "output") == "up\n"
    for title, end in (("deaf", "signal:9"), ("long", "signal:15")):
        write(tasks / title / "ctl", "stop")
        wait_dead(tasks / title)
        assert (read(tasks / title, "status"), read(tasks / title, "exit")) == (
            "cancelled\n", f"{end}\n")
    write(tasks / "later" / "ctl", "start")
    wait_dead(tasks / "later")
    assert read(tasks / "later", "output") == "later\n"
    waiting = tasker / "waiting" / "task"
    wait_until(lambda: read(waiting, "status") == "fired\n", "it is told")
    wait_until(lambda: read(tasker, "queue") == "" and read(tasker, "status") == "idle\n",
               "all is told")
    # of five tasks, and of a wait
    assert ends(daemon, "tasker") == ["processed"] * 6

    assert read(talker / "work", "current") == "w\n"
    assert read(talker / "work" / "v", "objective") == "long " * 1000 + "v\n"
    assert read(talker / "work" / "v", "status") == "blocked\n"
    assert read(talker / "waiting" / "timer", "status") == "armed\n"
    token = read(talker / "waiting" / "trigger", "token").strip()
    write(daemon.path("trigger", token), "now")
    assert read(talker / "waiting" / "trigger", "status") == "fired\n"
    assert read(talker / "work" / "v", "status") == "open\n"
    (talker / "waiting" / "timer").rmdir()
    wait_until(lambda: len(ends(daemon, "talker")) == 4, "it is told")
    write(talker / "ctl", "session default")
    write(talker / "inbox", "at home")
    wait_until(lambda: ends(daemon, "talker") == ["processed"] * 2, "it is answered there")
    has_said(talker, "got at home as r6")


def check_family(daemon: Successor) -> None:
    """Children of both versions in cells of the older one's."""
    boss = daemon.agent_dir("boss")
    for name in ("kid", "apart", "tree"):
        wait_dead(daemon.agent_dir(name))
        assert read(daemon.agent_dir(name), "outcome") == "done\n", name
    wait_until(lambda: "completed" in read(boss / "task" / "kid", "status"), "it is told")
    assert read(boss / "child" / "kid", "result.md")
    young = daemon.begin("young", parent="agent:boss")
    wait_dead(young)
    assert read(young, "outcome") == "done\n" and read(young, "out").endswith("over\n")
    tree = daemon.begin("sapling", parent="agent:boss", workspace="worktree")
    wait_dead(tree)
    assert read(tree, "outcome") == "done\n", read(tree, "reason")
    assert "state=fetched\n" in read(boss / "task" / "sapling", "worktree")
    # an earlier version had it made by git worktree: kept for whoever has work there
    state = read(boss / "task" / "tree", "worktree").splitlines()[0]
    assert state in ("state=fetched", "state=kept")
    for directory in (daemon.agent_dir("fresh"), daemon.agent_dir("anew")):
        write(directory / "ctl", "start")
        wait_dead(directory)
        assert read(directory, "outcome") == "done\n", read(directory, "reason")
    assert read(daemon.agent_dir("anew"), "out") == "r2\n"
    over = daemon.agent_dir("over")
    assert (read(over, "out"), read(over, "result.md")) == ("said\n", "found\n")
    write(over / "ctl", "reset")
    write(over / "ctl", "start")
    wait_dead(over)
    assert (read(over, "outcome"), read(over, "out")) == ("done\n", "said\n")


def check_ends(daemon: Successor) -> None:
    """Nothing is left of what an older version made."""
    ending, boss = daemon.agent_dir("ending"), daemon.agent_dir("boss")
    write(ending / "ctl", "stop")
    wait_status(ending, "stopping")
    wait_dead(ending)
    assert read(ending, "reason") == "operator_stop\n"
    daemon.begin("late", SLEEP, parent="agent:boss")
    wait_status(daemon.agent_dir("late"), "busy")
    write(daemon.agent_dir("steady") / "ctl", "kill")
    wait_dead(daemon.agent_dir("steady"))
    write(boss / "ctl", "stop")
    wait_dead(boss)
    assert read(daemon.agent_dir("late"), "reason") == "parent_dead\n"
    for name in STATUSES:
        directory = daemon.agent_dir(name)
        if read(directory, "status") != "dead\n":
            write(directory / "ctl", "stop")
        wait_dead(directory)
        check_numbers(daemon, name)
    wait_until(lambda: not list((daemon.runtime / "record").glob("*")), "no record is left")
    remove_all(daemon, *STATUSES, "young", "sapling", "late")
    assert daemon.stop() == 0
    assert not daemon.cgroup.path.exists()
    daemon.start()


def remove_all(daemon: Successor, *names: str) -> None:
    for name in names:
        directory = daemon.agent_dir(name)
        if not directory.exists():  # it went with its parent
            continue
        if read(directory, "status") != "new\n":
            wait_dead(directory)
        directory.rmdir()
    assert not list(daemon.path("agent").glob("*.d"))


def test_the_state_of_dead_agents_is_read(daemon: Successor) -> None:
    daemon.start_older()
    begin_all(daemon)
    before = {name: shown(daemon, name) for name in STATUSES}
    daemon.kill_older()
    lose_machine(daemon)
    daemon.start()
    # these go on after a reboot
    back = {"froze": "paused", "talker": "idle", "tasker": "idle", "quiet": "idle"}
    for name, status in back.items():
        wait_status(daemon.agent_dir(name), status)
    timer = daemon.agent_dir("talker") / "waiting" / "timer"
    assert read(timer, "status") == "armed\n"
    for name in (*back, "again"):
        write(daemon.agent_dir(name) / "ctl", "stop")
    for name, status in STATUSES.items():
        directory = daemon.agent_dir(name)
        if status not in ("new",):
            wait_dead(directory)
        lost = "cancelled\n" if name in (*back, "again") else "interrupted\n"
        wanted = {"new": "", "dead": "done\n"}.get(status, lost)
        assert read(directory, "outcome") == wanted, name
        for file in ("incarnation", "policy", "mount", "mode", "life", "out"):
            # what goes on writes more
            found, was = read(directory, file), before[name].get(file, "")
            assert found == was or (name in back and found.startswith(was)), (name, file)
        assert (directory / "session").readlink().name == before[name]["session"]
        check_numbers(daemon, name)
    tasks = daemon.agent_dir("tasker") / "task"
    for title in ("good", "long", "deaf", "lost", "later"):
        assert read(tasks / title, "status") in ("interrupted\n", "cancelled\n"), title
    talker = daemon.agent_dir("talker")
    assert read(talker / "work" / "w", "objective") == "long " * 1000 + "w\n"
    assert read(timer, "status") == "cancelled\n"
    assert ends(daemon, "talker").count("aborted") <= 1
    daemon.open_gate()
    for name, run in (("once", "r2"), ("fresh", "r1"), ("talker", "r3"), ("worker", "r2")):
        directory = daemon.agent_dir(name)
        if name != "fresh":
            write(directory / "ctl", "reset")
        write(directory / "ctl", "start")
        if name in ("talker", "worker"):
            wait_until(lambda d=directory: read(d, "status") in ("idle\n", "ready\n"), name)  # type: ignore[misc]
            write(directory / "inbox", "see")
            wait_until(lambda n=name: "processed" in ends(daemon, n), "it is answered")  # type: ignore[misc]
        else:
            wait_dead(directory)
            said = read(directory, "out")
            assert said.startswith(f"got {run}\n") and said.endswith("over\n")
        check_numbers(daemon, name)
    for name in ("talker", "worker"):
        write(daemon.agent_dir(name) / "ctl", "kill")
    remove_all(daemon, *STATUSES)


#: has one file of a space open by a line of its mount table, and adds to it when it may
WRITER = (
    "sh -c 'exec 3>> /t/file; echo before >&3; echo holds; "
    "until test -e /gate/open; do sleep 0.02; done; echo after >&3; echo kept > ~/note'"
)


@pytest.mark.parametrize("way", ["killed", "executed"])
def test_durable_trees_are_below_data(
    way: str, daemon: Successor, executed: Executed
) -> None:
    """Who has one by a line goes on with it, whether the older version had them there or not."""
    host = executed if way == "executed" else daemon
    if way == "executed":
        host.start()
    else:
        host.start_older()
    team, own = host.path("shared", "team"), host.path("home", "0", "data")
    team.mkdir(mode=0o777)
    there = (team / "data").exists()
    shared = team / "data" if there else team
    shared.chmod(0o777)
    (shared / "old").write_text("of a space\n")
    (own / "old").write_text("of a home\n")
    agent = host.run(
        "writer", WRITER, homedir="durable", policy="allow writer_t shared:team read,write",
        mount=f"{host.gate} /gate ro\nshared:team /t rw",
    )  # fmt: skip
    has_said(agent, "holds")
    if way == "executed":
        assert executed.execute_this()["type"] == "reexec"
    else:
        host.kill_older()
        host.start()
    assert read(team, "owner") == "0\n"
    assert read(team / "data", "old") == "of a space\n"
    assert read(own, "old") == "of a home\n"
    moved = "the durable trees of an older ctxd are now in" in host.log.read_text()
    assert moved != there
    host.open_gate()
    wait_dead(agent)
    assert read(team / "data", "file") == "before\nafter\n"
    assert read(host.state / "tree/agent/0/writer" / str(AGENT_UID), "note") == "kept\n"


@pytest.mark.parametrize("way", ["killed", "executed"])
def test_whoever_types_at_a_terminal_notices_nothing(
    way: str, daemon: Successor, executed: Executed
) -> None:
    """In ten sessions not one byte is lost, told twice, or a second late; and each is known."""
    if '"terminal"' not in executed.operations():
        pytest.skip("the older version has no terminals")
    host = executed if way == "executed" else daemon
    if way == "executed":
        host.start()
    else:
        host.start_older()
    names = [f"typed{number}" for number in range(10)]
    with ExitStack() as stack:
        with Typing(echoing(stack, host, *names)) as typing:
            typing.go_on(50)
            if way == "executed":
                assert executed.execute_this()["type"] == "reexec"
            else:
                host.kill_older()
                typing.go_on(50)
                host.start()
            typing.go_on(50)
        assert typing.latest < 1.0
        with Viewer(host, names[0]) as another:
            assert another.said["viewer"] == 2
    for name in names:
        directory = host.agent_dir(name)
        wait_dead(directory)
        assert read(directory, "reason") == "hangup\n"
        assert (directory / "out").read_bytes().decode() == typing.echoed
