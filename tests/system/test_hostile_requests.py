"""Agents that want others to wait: requests that hold each other up, leases, stale pages."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxfs.files import agent as agent_files
from ctxfs.tree.inodes import Treatment
from ctxfs.tree.rows import Inlet, Kind
from tests.system.hostile.compiling import compile_to
from tests.system.hostile.guarded import guarded
from tests.worlds.daemon import (
    AGENT_UID,
    REMOVALS,
    TIMEOUT,
    Daemon,
    alive,
    persist,
    read,
    running,
    wait_dead,
    wait_status,
    wait_until,
    write,
)

pytestmark = pytest.mark.settings(grace="1s")

HERE = Path(__file__).parent / "requests"
#: whatever others do, an answer comes in this time on a busy machine
PATIENCE = 5.0
KERNEL = tuple(int(number) for number in os.uname().release.split(".")[:2])


def compiled(daemon: Daemon, name: str) -> Path:
    """A program of ``requests/``, where agents can be shown it."""
    directory = daemon.base / "programs"
    directory.mkdir(exist_ok=True)
    return compile_to(directory / name, HERE / f"{name}.c", flags=("-static", "-pthread"))


def run(daemon: Daemon, name: str, command: str, **files: str) -> Path:
    """An agent that finds the compiled programs in ``/programs``."""
    return daemon.run(name, command, mount=f"{daemon.base}/programs /programs ro", **files)


def took(command: list[str]) -> float:
    """Seconds until a process of its own has done it; it may have to be given up."""
    begun = time.monotonic()
    subprocess.run(command, timeout=PATIENCE, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - begun


@pytest.mark.usefixtures("guard")
def test_writers_makers_and_lookups_never_wait_for_each_other(daemon: Daemon) -> None:
    compiled(daemon, "jam")
    agents = []
    for number in range(2):
        own = daemon.agent_dir(f"jam{number}")
        agents.append(run(
            daemon, f"jam{number}",
            f"/programs/jam 0 80 6 1 '{own}/work/w#/plan.md' x {own}/work x",
        ))
    for agent in agents:
        wait_until(lambda agent=agent: "jammed" in read(agent, "out"), f"{agent} jams")  # type: ignore[misc]
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        took(["cat", str(daemon.root / "status")])
        took(["mkdir", str(daemon.agent_dir("passer-by"))])
        took(["rmdir", str(daemon.agent_dir("passer-by"))])
    for agent in agents:
        took(["sh", "-c", f"echo kill > {agent}/ctl"])
        wait_dead(agent, PATIENCE)


def readable() -> Iterator[str]:
    """The regular files of an agent that everybody in it may read."""
    for row in agent_files.ROWS:
        if isinstance(row, Inlet) and not row.read:
            continue
        if row.kind is Kind.FILE and row.is_inside and not row.within and row.mode & 0o400:
            yield row.name


@pytest.mark.needs_root("controls are the user's, and only what is in a cell is kept from leases")
@pytest.mark.usefixtures("guard_beside")
def test_controls_are_nobodys_to_lease(daemon: Daemon) -> None:
    program = compiled(daemon, "grants")
    # its user, outside of every cell: no filter of system calls is in the way
    directory = daemon.agent_dir("leased")
    subprocess.run(["mkdir", str(directory)], check=True, user=AGENT_UID, group=AGENT_UID,
                   extra_groups=[])
    write(directory / "exec", "sleep 1000")
    write(directory / "ctl", "start")
    wait_status(directory, "busy")
    files = [str(directory / name) for name in readable()]
    with subprocess.Popen([str(program), "hold", *files], stdout=subprocess.PIPE, text=True,
                          user=AGENT_UID, group=AGENT_UID, extra_groups=[]) as holder:
        try:
            assert holder.stdout is not None
            for file in files:
                said = holder.stdout.readline().split()
                row = agent_files.LAYOUT.row(Path(file).name)
                # pages of what can be polled are kept only once it has lasted
                shared = "ok" if row.treatment is Treatment.PUBLIC else "ENODEV"
                if row.polled and shared == "ok":
                    shared = said[3]
                    assert shared in ("ok", "ENODEV")
                assert said == [file, "EACCES", "EACCES", shared, "ok", "ok"]
            for name in readable():
                assert took(["cat", str(directory / name)]) < PATIENCE
            took(["sh", "-c", f"echo kill > {directory}/ctl"])
            wait_dead(directory, PATIENCE)
        finally:
            holder.kill()


@pytest.mark.usefixtures("guard_beside")
def test_what_an_agent_owns_it_cannot_lease_either(daemon: Daemon) -> None:
    compiled(daemon, "grants")
    own = daemon.agent_dir("leaser")
    agent = run(daemon, "leaser",
                f"sh -c 'echo x > {own}/artifact/a; exec /programs/grants hold {own}/artifact/a'")
    wait_until(lambda: "\n" in read(agent, "out"), "it has tried")
    assert read(agent, "out").split()[1:3] == ["EPERM", "EPERM"]
    took(["cat", str(own / "artifact" / "a")])


@pytest.mark.usefixtures("guard_after")
def test_whose_right_was_taken_away_reads_nothing_new(daemon: Daemon) -> None:
    compiled(daemon, "reread")
    told = daemon.run("told", "sleep 1000", **{"meta.json": '{"n": 1}'})
    reader = run(daemon, "reader", f"/programs/reread {told}/meta.json",
                 policy="allow reader_t agent:told read")
    wait_until(lambda: '{"n": 1}' in read(reader, "out"), "it reads what it may")
    write(reader / "policy", "")
    write(told / "meta.json", '{"n": 2}')
    assert read(told, "meta.json") == '{"n": 2}\n'  # by another, who may
    wait_until(lambda: "EACCES" in read(reader, "out"), "it is refused")
    assert '"n": 2' not in read(reader, "out")


def test_a_name_is_at_once_what_has_it_now(daemon: Daemon) -> None:
    paths = ["", "/status", "/label", "/work", "/task"]
    for number in range(20):
        agent = daemon.make("again", label=f"l{number}")
        for path in paths:
            os.stat(f"{agent}{path}")
        assert read(agent, "label") == f"l{number}\n"
        agent.rmdir()
        for path in paths:
            with pytest.raises(FileNotFoundError):
                os.stat(f"{agent}{path}")


# the watchdog


def answers(daemon: Daemon) -> bool:
    try:
        return (daemon.root / "status").read_text().find("ready") >= 0
    except OSError:
        return False


@pytest.mark.settings(grace="1s", watchdog="2s")
def test_a_connection_that_was_aborted_is_made_anew(daemon: Daemon) -> None:
    agent = daemon.run("survivor", "sleep 1000")
    wait_status(agent, "busy")
    pid = int(read(agent, "pid"))
    daemon.abort()
    wait_until(lambda: answers(daemon), "it is mounted anew")
    assert (read(agent, "status"), int(read(agent, "pid"))) == ("busy\n", pid)
    assert alive(pid)
    assert not daemon.has_ended()  # the same process
    write(agent / "ctl", "kill")
    wait_dead(agent)


@pytest.mark.long
@pytest.mark.settings(grace="1s", watchdog="2s")
def test_a_daemon_that_answers_nobody_holds_nobody_up(daemon: Daemon) -> None:
    agent = daemon.run("survivor", "sleep 1000")
    wait_status(agent, "busy")
    pid = int(read(agent, "pid"))
    os.kill(daemon.pid, signal.SIGSTOP)
    # whoever asks is set free when the connection is aborted
    asked = subprocess.run(["stat", str(daemon.root / "agent" / "none")], timeout=TIMEOUT,
                           check=False, stderr=subprocess.PIPE)
    assert asked.returncode != 0
    daemon.wait_killed()
    daemon.start()
    assert (read(agent, "status"), int(read(agent, "pid"))) == ("busy\n", pid)
    assert alive(pid)


@pytest.mark.usefixtures("guard_after")
def test_a_command_line_of_any_size_is_told_in_no_time_and_memory(daemon: Daemon) -> None:
    """By the process itself, which may look at its own, and by root."""
    compiled(daemon, "argued")
    agent = run(daemon, "verbose", "sh -c '/programs/argued 256 & "
                "until grep -q argued $CTX_SELF/out; do :; done; "
                "for _ in 1 2 3; do until grep argued $CTX_SELF/processes >&2; do :; done; done; "
                "wait'")
    # on a busy machine a look may take more than its second (EAGAIN), and ctxd may hear only
    # later that the program has begun, until when nothing is told
    wait_until(lambda: read(agent, "log").count('"name":"argued"') == 3, "it has looked at itself")
    assert took(["cat", str(agent / "processes")]) < PATIENCE


def test_processes_that_wait_for_a_file_keep_nobody_from_files() -> None:
    """The agent looks at itself, and reads a file meanwhile: its next page is the same caller's."""
    daemon = Daemon(config="grace: 300ms\n")
    # of its files nothing is read at once (preadv2(2), RWF_NOWAIT), as where nothing is in memory
    state = Path(tempfile.mkdtemp(prefix="ctxtest-", dir="/dev/shm"))
    daemon.arguments += ["--state", str(state)]
    with running(daemon), guarded(daemon, bystanders=False):
        compiled(daemon, "tangled")
        daemon.path("shared", "space").mkdir()
        space = daemon.path("shared", "space", "data")
        persist(lambda: space.chmod(0o1777))
        with open(space / "file", "w") as file:
            file.truncate(16 << 30)
        agent = run(daemon, "tangler", f"sh -c '/programs/tangled {space}/file 200 & "
                    "until grep -q tangled $CTX_SELF/out; do :; done; "
                    "while :; do cat $CTX_SELF/processes > /dev/null && echo seen; done'",
                    policy="allow tangler_t shared:space read")
        wait_until(lambda: read(agent, "out").count("seen") >= 5, "it sees itself", timeout=20)
        assert took(["cat", str(agent / "processes")]) < PATIENCE
    REMOVALS.begin(state)


@pytest.mark.long
@pytest.mark.usefixtures("guard")
@pytest.mark.alone
def test_a_descriptor_that_closes_slowly_holds_up_nobody(daemon: Daemon) -> None:
    """The kernel refuses it, or a signal ends the wait."""
    program = compiled(daemon, "linger")
    agent = run(daemon, "sender", f"/programs/linger {daemon.root}/agent/sender.sock 5", policy="")
    wait_until(lambda: read(agent, "out"), "the agent was told")
    said = [read(agent, "out")]
    for path in (daemon.root / "ctxd.sock", daemon.runtime / "ctxd.sock"):
        words: list[str | Path] = [program, path, "5"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as stranger:
            assert stranger.stdout is not None
            said.append(stranger.stdout.readline())
            stranger.kill()
    assert said == ["EPERM\n" if KERNEL >= (6, 16) else "answered\n"] * 3
