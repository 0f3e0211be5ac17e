"""The client at a terminal: status, attach and logs of several agents."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.worlds.daemon import Daemon, read, wait_dead, wait_status, wait_until, write
from tests.worlds.terminal import terminal

RESIDENT = Path(__file__).parents[2] / "contrib" / "examples" / "resident.py"


def plain(text: str) -> str:
    return re.sub("\x1b\\[[0-9;]*m", "", text).replace("\r\n", "\n")


def test_status_says_all_about_an_agent(daemon: Daemon) -> None:
    boss = daemon.run("boss", "sh -c 'echo hello; echo oops >&2; cat; sleep 1000'",
                      "fix the test\nand more")
    wait_status(boss, "busy")
    wait_until(lambda: "more" in read(boss, "out"), "it has read its task")
    (daemon.agent_dir("kid")).mkdir()
    write(daemon.agent_dir("kid") / "parent", "agent:boss")
    assert daemon.ctx("work", "new", "-a", "boss", "--focus", "make it pass").returncode == 0
    assert daemon.ctx("waits", "add", "-a", "boss", "later", "timer", "1h").returncode == 0
    assert daemon.ctx("task", "start", "-a", "boss", "--", "sleep 500").returncode == 0
    wait_status(boss / "task" / "task-1", "running")
    write_refused(boss)
    said = daemon.ctx("status", "boss").stdout
    lines = [line.strip() for line in said.splitlines()]
    assert lines[0] == "● boss - fix the test…"
    changed = re.search(r"Status: busy since (\S+) \(\d+s ago\)", said)
    assert changed is not None
    for line in ("Run: r1, mode once", f"PID: {read(boss, 'pid').strip()}",
                 "Work: work-1 active make it pass", "Task: task-1 running sleep 500",
                 "Waits for: later armed timer 1h", "└─ kid  new", "hello", "oops", "and more"):
        assert line in lines, f"{line} in {said}"
    assert 'unknown verb "jump"' in said
    assert not [line for line in said.splitlines() if line.endswith(" ")]
    assert re.search(r"Usage: CPU [0-9.]+s, memory \S+ .*processes \d", said)
    facts = json.loads(daemon.ctx("status", "boss", "--json").stdout)
    assert facts["since"] == changed[1]
    assert (facts["status"], facts["run"], facts["queue"]) == ("busy", "r1", 0)
    assert [task["name"] for task in facts["task"]] == ["kid", "task-1"]
    assert [child["name"] for child in facts["children"]] == ["kid"]
    assert facts["out"] == ["hello", "fix the test", "and more"]
    assert daemon.ctx("status", "-n", "1", "boss", "--json").stdout.count("hello") == 1
    write(boss / "ctl", "kill")
    wait_dead(boss)
    said = daemon.ctx("status", "boss").stdout
    assert said.startswith("○ boss")
    assert "Status: dead cancelled operator_stop since" in said
    assert daemon.ctx("status", "nobody").stderr == 'ctx: no agent "nobody"\n'


def write_refused(agent: Path) -> None:
    with pytest.raises(OSError):
        write(agent / "ctl", "jump")


def test_status_of_the_daemon_and_of_the_own_agent(daemon: Daemon) -> None:
    agent = daemon.finish("inner", "sh -c 'ctx status; ctx status --json'")
    said = read(agent, "out")
    facts = json.loads(said[said.index("{\n"):])
    # a program may be faster than its status
    assert said.startswith("● inner") and facts["status"] in ("starting", "busy")
    assert "Agents: 1 dead" in daemon.ctx("status").stdout
    assert json.loads(daemon.ctx("status", "--json").stdout)["agents.dead"] == 1


def test_status_leaves_out_what_the_caller_may_not_read(daemon: Daemon) -> None:
    wait_status(daemon.run("other", "sleep 1000"), "busy")
    stranger = daemon.finish("stranger", "ctx status other")
    said = [line.split(":")[0].strip() for line in read(stranger, "out").splitlines()]
    assert said == ["● other", "Status", "Parent"]


def test_attach_to_an_agent_that_takes_messages(daemon: Daemon) -> None:
    clerk = daemon.run("clerk", "sh -c 'tr a-z A-Z'", mode="turn")
    wait_status(clerk, "idle")
    with terminal(daemon.root, "attach", "clerk") as screen:
        screen.wait_for("attached to clerk (turn)")
        screen.type("make it loud\n\n")
        screen.wait_for("MAKE IT LOUD")
        write(clerk / "inbox", "from elsewhere")
        screen.wait_for("FROM ELSEWHERE")
        wait_status(clerk, "idle")  # its output comes first
        screen.type("\x04")
        screen.wait_for("detached: clerk goes on (idle)")
        assert screen.end() == 0
    assert read(clerk, "status") == "idle\n"
    sent = [event for event in daemon.events("clerk") if event["type"] == "message.queued"]
    assert len(sent) == 2, "blank lines are no messages"


def test_attach_shows_the_replies_of_a_resident(daemon: Daemon) -> None:
    counter = daemon.run("counter", "python3 /examples/resident.py", mode="resident",
                         mount=f"{RESIDENT.parent} /examples ro")
    wait_status(counter, "ready")
    with terminal(daemon.root, "attach", "counter") as screen:
        screen.wait_for("attached to counter (resident)")
        screen.type("two words\n")
        screen.wait_for("2 words, 2 in all")
        screen.type("\x03")
        screen.wait_for("detached: counter goes on (ready)")
        assert screen.end() == 0
    piped = daemon.ctx("attach", "counter", stdin=None, input="three more words")
    assert (piped.returncode, piped.stdout) == (0, "2 words, 2 in all\n")
    wait_until(lambda: "5 in all" in read(counter, "session/latest.md"), "the last line was sent")


def test_attach_ends_with_the_agent(daemon: Daemon) -> None:
    agent = daemon.run("once", "sh -c 'echo here; sleep 1000'")
    wait_status(agent, "busy")
    with terminal(daemon.root, "attach", "once") as screen:
        screen.wait_for("attached to once (once)")
        screen.wait_for("here")
        screen.type("hi\n")
        screen.wait_for("(EBUSY)")
        write(agent / "ctl", "stop")
        screen.wait_for("once ended: cancelled operator_stop")
        assert screen.end() == 130
    again = daemon.ctx("attach", "once")
    assert (again.returncode, again.stdout) == (69, "")
    assert "not running" in again.stderr and "ctx log once" in again.stderr
    assert daemon.ctx("attach", "nobody").stderr == 'ctx: no agent "nobody"\n'


def test_logs_of_several_agents(daemon: Daemon) -> None:
    """Those that are made later are followed, too; each line has a name in front."""
    gate = "until test -e $CTX_SELF/work/go; do sleep 0.02; done"
    first = daemon.run("first", f"sh -c 'echo one; {gate}; printf two; exit 3'")
    daemon.run("second", "sh -c 'echo three; sleep 1000'")
    daemon.finish("over", "echo nothing")
    wait_until(lambda: "one" in read(first, "out"), "it says something")
    wait_until(lambda: "three" in read(daemon.agent_dir("second"), "out"), "so does the other")
    assert daemon.ctx("logs").stdout.splitlines() == ["first  | one", "second | three"]
    assert daemon.ctx("log", "over", "first", "--out").stdout.splitlines() == [
        "over  | nothing", "first | one",
    ]  # fmt: skip
    with terminal(daemon.root, "logs", "-f") as screen:
        screen.wait_for("three")
        (first / "work" / "go").mkdir()
        screen.wait_for("two")
        screen.wait_for("r1 ended: error exit:3")
        daemon.run("new", "echo later")
        screen.wait_for("later")
        screen.type("\x03")
        assert screen.end() == 130
    lines = plain(screen.shown).splitlines()
    assert {"first  | two", "second | three", "new    | later"} <= {*lines}
    colors = {line.partition("m")[0] for line in screen.shown.splitlines() if " | " in line}
    assert len(colors) == 3, "each name has a color of its own"


def test_logs_of_a_family(daemon: Daemon) -> None:
    """The children that come are followed, until all have ended."""
    spawn = "ctx spawn kid -- sh -c 'echo deep; sleep 1000' < /dev/null"
    boss = daemon.make("boss", "sh", f"echo high; {spawn}; sleep 1000")
    daemon.run("other", "echo unrelated")
    write(boss / "ctl", "start")
    with terminal(daemon.root, "logs", "-fc", "boss") as screen:
        screen.wait_for("deep")
        write(boss / "ctl", "stop")
        assert screen.end() == 0
    said = plain(screen.shown)
    assert "boss | high" in said and "kid  | deep" in said and "unrelated" not in said
    refused = daemon.ctx("logs", "boss", "nobody")
    assert refused.returncode == 1 and 'no agent "nobody"' in refused.stderr
    assert "boss" in refused.stdout


@pytest.mark.skipif(not (shutil.which("man") and shutil.which("less")), reason="needs man and less")
def test_help_opens_the_page_at_the_command(daemon: Daemon) -> None:
    with terminal(daemon.root, "help", "quota") as screen:
        screen.wait_for("Show what the daemon holds for")
        assert "There is no" not in screen.shown and "SYNOPSIS" not in screen.shown
        screen.type("q")
        assert screen.end() == 0
