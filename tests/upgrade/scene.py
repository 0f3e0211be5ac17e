"""What an earlier version is to begin: agents of every mode and state, and what they own."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from tests.upgrade.older import ONCE, Successor
from tests.worlds.daemon import AGENT_UID, Daemon, read, wait_status, wait_until, write
from tests.worlds.stages import AT_GATE

SLEEP = "sleep 1000"
_TURN = (
    'read -r line; echo "got $line as $CTX_RUN"; '
    f"case $line in gate*) {AT_GATE};; hold*) {SLEEP};; see*) cat $CTX_SELF/status;; esac"
)
TURN = f"sh -c {shlex.quote(_TURN)}"
_RESIDENT = (
    'while read -r line; do id=${line#*\\"id\\":\\"}; id=${id%%\\"*}; text=${line##*:\\"}; '
    f"case $text in gate*) {AT_GATE};; esac; "
    'echo "{\\"type\\":\\"message\\",\\"id\\":\\"$id\\",'
    '\\"text\\":\\"re ${text%%[\\"\\\\]*}\\"}"; done'
)
RESIDENT = f"sh -c {shlex.quote(_RESIDENT)}"
#: of the agents that are begun
STATUSES = {
    **{"boss": "busy", "kid": "busy", "apart": "busy", "once": "busy", "tree": "busy"},
    **{"paused": "paused", "aborted": "paused", "froze": "paused"},
    **{"talker": "busy", "tasker": "idle", "quiet": "idle", "ending": "busy"},
    **{"worker": "busy", "steady": "ready"},
    **{"again": "starting", "flaky": "busy"},
    **{"fresh": "new", "over": "dead", "anew": "new"},
}


def ends(daemon: Daemon, name: str) -> list[str]:
    """What became of the messages of an agent's session that have ended, in this order."""
    return [e["outcome"] for e in daemon.events(name) if e["type"] == "message.end"]


def git(repository: Path, *words: str) -> str:
    command = ["git", "-c", "safe.directory=*", "-C", str(repository), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def make_repository(path: Path) -> None:
    path.mkdir()
    git(path, "init", "--quiet", "--initial-branch=main")
    (path / "file").write_text("content\n")
    git(path, "add", "file")
    identity = ("-c", "user.name=you", "-c", "user.email=you@localhost")
    git(path, *identity, "commit", "--quiet", "--message", "One")
    for each in (path, *path.rglob("*")):
        os.chown(each, AGENT_UID, AGENT_UID)


def has_said(directory: Path, text: str) -> None:
    wait_until(lambda: text in read(directory, "out"), f"{directory.name} says {text!r}")


def begin_all(daemon: Successor) -> None:
    """Agents of every mode, in every state, with something of every plane."""
    repository = daemon.base / "repository"
    make_repository(repository)
    daemon.begin("boss", SLEEP, workspace=f"explicit_root:{repository}",
                 policy="allow boss_t agent:* create\nallow boss_t agent:* write")
    wait_status(daemon.agent_dir("boss"), "busy")
    daemon.begin("kid", parent="agent:boss")
    daemon.begin("apart", parent="agent:boss", life="detached")
    daemon.begin("tree", parent="agent:boss", workspace="worktree")
    daemon.begin("once", handoff="the task")
    paused = daemon.begin("paused")
    aborted = daemon.begin("aborted")
    for directory in (paused, aborted):
        has_said(directory, "got r1")
        wait_status(directory, "busy")  # the daemon may hear of it later
    write(paused / "ctl", "pause")
    write(aborted / "ctl", "abort")
    wait_status(paused, "paused")
    wait_status(aborted, "paused")
    wait_until(lambda: read(aborted, "run") == "", "its run has ended")

    froze = daemon.begin("froze", TURN, mode="turn")
    wait_status(froze, "idle")
    write(froze / "inbox", "hold on")
    has_said(froze, "got hold on")
    wait_status(froze, "busy")
    write(froze / "ctl", "pause")
    wait_status(froze, "paused")

    talker = daemon.begin("talker", TURN, mode="turn", handoff="at first")
    wait_until(lambda: ends(daemon, "talker") == ["processed"], "its task is done")
    wait_status(talker, "idle")
    write(talker / "ctl", "session other")
    for name in ("w", "v"):
        (talker / "work" / name).mkdir()
        write(talker / "work" / name / "objective", "long " * 1000 + name)
    write(talker / "work" / "current", "w")
    daemon.wait_for("talker", "trigger", "trigger", work="v")
    daemon.wait_for("talker", "timer", "timer 1h")
    daemon.wait_for("talker", "late", "trigger", deadline="1h")
    for text in ("gate it", "second " * 1000, "see"):
        write(talker / "inbox", text)
    has_said(talker, "got gate it")

    tasker = daemon.begin("tasker", TURN, mode="turn")
    wait_status(tasker, "idle")
    for title, command in (
        ("good", "echo up; until test -e /gate/open; do sleep 0.02; done; exit 3"),
        ("long", f"echo up; exec {SLEEP}"),
        ("deaf", f'trap "" TERM; echo up; {SLEEP}; {SLEEP}'),
        ("lost", f"echo up; exec {SLEEP}"),
    ):
        task = daemon.task("tasker", title, command)
        wait_until(lambda d=task: read(d, "output") == "up\n", f"{title} has begun")  # type: ignore[misc]
    (tasker / "task" / "later").mkdir()
    write(tasker / "task" / "later" / "cmd", "echo later")
    daemon.wait_for("tasker", "task", "task good")

    quiet = daemon.begin("quiet", TURN, mode="turn")
    ending = daemon.begin("ending", f"sh -c 'trap \"\" TERM; echo up; {SLEEP}; {SLEEP}'")
    has_said(ending, "up")
    steady = daemon.begin("steady", RESIDENT, mode="resident")
    worker = daemon.begin("worker", RESIDENT, mode="resident")
    for directory in (steady, worker):
        wait_status(directory, "ready")
    for text in ("gate it", "second"):
        write(worker / "inbox", text)
    wait_status(worker, "busy")
    wait_status(quiet, "idle")

    flaky = daemon.begin("flaky", "sh -c 'test $CTX_RUN != r1 && exec sleep 1000; exit 1'",
                         restart="on-failure")
    over = daemon.finish("over", "sh -c 'echo said; echo found > $CTX_SELF/result.md'")
    assert read(over, "outcome") == "done\n"
    daemon.make("fresh", ONCE, mount=f"{daemon.gate} /gate ro",
                workspace=f"explicit_root:{repository}")
    anew = daemon.finish("anew", "sh -c 'echo $CTX_RUN'")
    write(anew / "ctl", "reset")
    wait_status(anew, "new")
    for name in ("boss", "kid", "apart", "tree", "once"):
        wait_status(daemon.agent_dir(name), "busy")
    wait_until(lambda: read(flaky, "run") == "r2\n", "it runs again")
    wait_status(flaky, "busy")
    again = daemon.begin("again", "false", restart="always")
    wait_until(lambda: " in 4 s" in read(again, "log"), "it is to wait for four seconds")
