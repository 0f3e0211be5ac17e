"""Tasks as directories, and the inbox and the queue: what a shell writes and reads there."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from runtime.ids import RunId
from runtime.kernel.output import append
from runtime.records.change import Change
from runtime.records.documents import replace_file
from runtime.records.items import MessageStatus, Task, TaskCue, TaskStatus
from runtime.records.lifecycle import Status
from runtime.records.model import Agent, Outcome
from tests.worlds.records import add_end, inside
from tests.worlds.tree import (
    CONTEXT,
    STRANGER,
    USER,
    Mounted,
    Waiter,
    complete,
    refused,
)

D = "agent/x.d"
T = f"{D}/task/t"
APPEND = os.O_APPEND
WRITE = os.O_WRONLY


pytestmark = pytest.mark.settings(tasks=2, messages=3, frame_max=16)


@pytest.fixture
def mounted(mounted: Mounted) -> Mounted:
    agent = mounted.make("x", USER)
    mounted.agents.journal.update(agent, mode="turn")
    mounted.live(agent, Status.IDLE)
    mkdir(mounted, T)
    return mounted


def mkdir(mounted: Mounted, path: str) -> None:
    directory, name = os.path.split(path)
    complete(mounted.ops.mkdir, mounted.inode(directory), os.fsencode(name), 0o755, CONTEXT)


def rmdir(mounted: Mounted, path: str) -> None:
    directory, name = os.path.split(path)
    complete(mounted.ops.rmdir, mounted.inode(directory), os.fsencode(name), CONTEXT)


def the_agent(mounted: Mounted, name: str = "x") -> Agent:
    return mounted.agent(name)


def the_task(mounted: Mounted, name: str = "t") -> Task:
    task = mounted.agents.items.named(the_agent(mounted).index, Task, name)
    assert task is not None
    return task


def put_status(mounted: Mounted, status: TaskStatus) -> None:
    with mounted.agents.journal.changing() as change:
        change.put(the_task(mounted), status=status)


def supervised(mounted: Mounted, mode: str = "turn") -> Agent:
    """A child of the agent's, with a handle of its name."""
    child = mounted.make("rev", inside(mounted.world.may_create(the_agent(mounted))))
    mounted.agents.journal.update(child, mode=mode)
    return child


# a command


FRESH = {
    "kind": "command_task\n",
    "title": "",
    "cmd": "",
    "cwd": "",
    "env": "",
    "accepts_input": "0\n",
    "tty": "",
    "status": "queued\n",
    "exit": "",
    "reason": "",
    "agent": "",
    "pid": "",
    "output": "",
    "preview": "",
    "ctl": "start\nstop\nkill\n",
    "work": "",
    "started_at": "",
    "ended_at": "",
    "worktree": "",
}


def test_a_new_task_shows_what_it_is_not_yet(mounted: Mounted) -> None:
    assert {name: mounted.get(f"{T}/{name}") for name in FRESH} == FRESH
    for name, text in FRESH.items():
        assert mounted.stat(f"{T}/{name}").st_size == len(text), name


def test_tasks_are_directories_that_are_made_and_removed(mounted: Mounted) -> None:
    mkdir(mounted, f"{D}/task/a")
    assert mounted.list(f"{D}/task") == ["t", "a"]
    with refused("EDQUOT"):
        mkdir(mounted, f"{D}/task/b")
    with refused("EEXIST"):
        mkdir(mounted, f"{D}/task/a")
    with refused("EINVAL"):
        mkdir(mounted, f"{D}/task/b c")
    rmdir(mounted, T)
    assert mounted.list(f"{D}/task") == ["a"]
    with refused("ENOENT"):
        mounted.inode(T)


def test_the_file_to_wait_at_is_a_link(mounted: Mounted) -> None:
    target = os.fsdecode(complete(mounted.ops.readlink, mounted.inode(f"{T}/wait"), CONTEXT))
    assert Path(target).is_fifo()
    assert stat.S_ISLNK(mounted.stat(f"{T}/wait").st_mode)


WRITTEN = {
    "title": ("run the tests\n", "run the tests\n"),
    "cmd": ("make test\nmake lint", "make test\nmake lint\n"),
    "cwd": ("/tmp\n", "/tmp\n"),
    "env": ("A=1\n\nB=\n", "A=1\nB=\n"),
    "accepts_input": ("1\n", "1\n"),
    "tty": ("80x24\n", "80x24\n"),
}
BAD = [
    ("title", "a\x1b[2J\n", "EINVAL"),
    ("title", "x" * 201 + "\n", "EINVAL"),
    ("title", "two\nlines\n", "EINVAL"),
    ("cmd", b"a\0b", "EINVAL"),
    ("cmd", b"\xff", "EINVAL"),
    ("cmd", "x" * (65 << 10), "EMSGSIZE"),
    ("cwd", "here\n", "EINVAL"),
    ("cwd", "/a/../b\n", "EINVAL"),
    ("env", "CTX_RUN=r1\n", "EINVAL"),
    ("env", "A=1\nno pair\n", "EINVAL"),
    ("env", "no pair", "EINVAL"),
    ("accepts_input", "yes\n", "EINVAL"),
    ("accepts_input", "2", "EINVAL"),
    ("work", "none\n", "ENOENT"),
    ("work", "none", "ENOENT"),
    ("ctl", "begin\n", "EINVAL"),
    ("ctl", "stop now\n", "EINVAL"),
    ("ctl", "START\n", "EINVAL"),
]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_command_is_said_until_it_is_started(mounted: Mounted, name: str) -> None:
    text, shown = WRITTEN[name]
    mounted.put(f"{T}/{name}", text)
    assert mounted.get(f"{T}/{name}") == shown
    mounted.put(f"{T}/cmd", "true")
    open_before = mounted.open(f"{T}/{name}", WRITE | os.O_TRUNC)
    mounted.put(f"{T}/ctl", "start\n")
    with refused("EBUSY"):
        mounted.put(f"{T}/{name}", text)
    with refused("EBUSY"):
        mounted.write(open_before, text.encode())
    assert "was already started" in mounted.reason


@pytest.mark.parametrize(("name", "text", "error"), BAD)
def test_what_is_malformed_changes_nothing(
    mounted: Mounted, name: str, text: str | bytes, error: str
) -> None:
    before = mounted.get(f"{T}/{name}")
    with refused(error):
        mounted.put(f"{T}/{name}", text)
    assert mounted.get(f"{T}/{name}") == before
    assert f"{T}/{name}" in mounted.reason


def test_a_task_may_be_for_a_work_item_at_any_time(mounted: Mounted) -> None:
    mkdir(mounted, f"{D}/work/w")
    put_status(mounted, TaskStatus.RUNNING)
    mounted.put(f"{T}/work", "w\n")
    assert mounted.get(f"{T}/work") == "w\n"
    mounted.put(f"{T}/work", "\n")
    assert mounted.get(f"{T}/work") == ""


def test_the_words_of_ctl(mounted: Mounted) -> None:
    with refused("EINVAL"):
        mounted.put(f"{T}/ctl", "start\n")
    assert "cmd is empty" in mounted.reason
    mounted.put(f"{T}/cmd", "true\n")
    mounted.put(f"{T}/ctl", " start\t\n")
    assert the_task(mounted).status == "queued"
    with refused("EBUSY"):
        mounted.put(f"{T}/ctl", "start\n")
    mounted.put(f"{T}/ctl", "stop\nkill\n")
    assert (the_task(mounted).status, the_task(mounted).given_up) == ("cancelling", True)
    assert mounted.get(f"{T}/status") == "cancelling\n"
    with refused("EBUSY"):
        rmdir(mounted, T)


def test_a_removed_task_is_not_started_through_an_open_file(mounted: Mounted) -> None:
    mounted.put(f"{T}/cmd", "true\n")
    ctl, cmd = mounted.open(f"{T}/ctl", WRITE), mounted.open(f"{T}/cmd", WRITE | os.O_TRUNC)
    work = mounted.open(f"{T}/work", WRITE | os.O_TRUNC)
    task = the_task(mounted)
    rmdir(mounted, T)
    with refused("ENOENT"):
        mounted.write(ctl, b"start\n")
    with refused("ENOENT"):
        mounted.write(cmd, b"false\n")
    with refused("ENOENT"):
        mounted.write(work, b"\n")
    assert (task.status, task.cmd) == ("made", "true")


def test_status_is_polled_and_caches_follow(mounted: Mounted) -> None:
    mounted.put(f"{T}/cmd", "true\n")
    fh = mounted.open(f"{T}/status")
    assert mounted.read(fh) == b"queued\n"
    waiter = Waiter()
    complete(mounted.ops.poll, mounted.inode(f"{T}/status"), fh, waiter, CONTEXT)
    assert waiter.notified == 0
    mounted.put(f"{T}/ctl", "start\nstop\n")
    assert waiter.notified
    assert mounted.read(fh) == b"cancelling\n"


def test_what_a_task_left(mounted: Mounted) -> None:
    agent, task = the_agent(mounted), the_task(mounted)
    mounted.put(f"{T}/cmd", "true\n")
    mounted.put(f"{T}/ctl", "start\n")
    append(mounted.agents.results.directory(agent, task), b"one\ntwo\n", 1 << 20)
    with mounted.agents.journal.changing() as change:
        change.put(task, pid=42, started=1.5)
    assert mounted.get(f"{T}/pid") == "42\n"
    with mounted.agents.journal.changing() as change:
        mounted.agents.tasks.end(change, agent, task, TaskCue.ERROR, exit_text="exit:3")
    assert mounted.get(f"{T}/status") == "failed\n"
    assert (mounted.get(f"{T}/exit"), mounted.get(f"{T}/pid")) == ("exit:3\n", "")
    assert mounted.get(f"{T}/output") == mounted.get(f"{T}/preview") == "one\ntwo\n"
    assert mounted.get(f"{T}/started_at") == "1970-01-01T00:00:01.500Z\n"
    assert mounted.get(f"{T}/ended_at").endswith("Z\n")
    fh = mounted.open(f"{T}/output")
    assert mounted.read(fh, 4, 3) == b"two"


def test_input_goes_to_what_takes_it(mounted: Mounted) -> None:
    with refused("EACCES"):
        mounted.put(f"{T}/input", "hello")
    assert "accepts_input is 0" in mounted.reason
    mounted.put(f"{T}/accepts_input", "1\n")
    put_status(mounted, TaskStatus.RUNNING)
    inlet = mounted.run_task(the_agent(mounted), "t").inlet
    inlet.room = 8
    fh = mounted.open(f"{T}/input", WRITE)
    assert mounted.write(fh, b"hello") == 5
    assert mounted.write(fh, b"more than fits", 5) == 8
    assert inlet.taken == b"hellomore tha"
    assert mounted.get(f"{T}/input") == ""
    assert inlet.taken == b"hellomore tha"
    put_status(mounted, TaskStatus.COMPLETED)
    with refused("EBUSY"):
        mounted.open(f"{T}/input", WRITE)


# the handle of a child


def test_wait_is_there_by_name_and_in_no_listing(mounted: Mounted) -> None:
    for directory in (D, T):
        assert "wait" not in mounted.list(directory)
        assert complete(mounted.ops.readlink, mounted.inode(f"{directory}/wait"), CONTEXT)


def test_a_handle_shows_its_child(mounted: Mounted) -> None:
    child = supervised(mounted)
    mounted.agents.documents.write(child, "handoff.md", b"look at it\nclosely\n")
    handle = f"{D}/task/rev"
    assert mounted.list(f"{D}/task") == ["t", "rev"]
    assert mounted.get(f"{handle}/kind") == "child_agent_task\n"
    assert mounted.get(f"{handle}/title") == "look at it\n"
    assert mounted.get(f"{handle}/accepts_input") == "1\n"
    assert mounted.get(f"{handle}/status") == "queued\n"
    mounted.world.live(child, Status.IDLE)
    assert mounted.get(f"{handle}/status") == "running\n"
    session = mounted.agents.sessions.get(child.session)
    assert session is not None
    replace_file(mounted.agents.sessions.ensure(session) / "latest.md", b"so far\n")
    assert mounted.get(f"{handle}/output") == mounted.get(f"{handle}/preview") == "so far\n"
    target = complete(mounted.ops.readlink, mounted.inode(f"{handle}/wait"), CONTEXT)
    assert os.fsdecode(target) == str(mounted.agents.wait_files.path(child.wait_token))


def test_a_read_from_the_beginning_fixes_what_an_open_output_shows(mounted: Mounted) -> None:
    child = mounted.world.live(supervised(mounted), Status.BUSY)
    append(mounted.agents.documents.directory(child) / "out", b"working\n", 1 << 20)
    fh = mounted.open(f"{D}/task/rev/output")
    assert mounted.read(fh, 0, 4) == b"work"
    session = mounted.agents.sessions.get(child.session)
    assert session is not None
    replace_file(mounted.agents.sessions.ensure(session) / "latest.md", b"a reply\n")
    assert mounted.read(fh, 4) == b"ing\n"
    assert mounted.stat(f"{D}/task/rev/output").st_size == len(b"a reply\n")
    assert mounted.read(fh, 0) == b"a reply\n"
    mounted.close(fh)


def test_a_handle_shows_whose_it_is_and_how_it_ended(mounted: Mounted) -> None:
    child = mounted.world.live(supervised(mounted), Status.BUSY)
    names = ("agent", "exit", "reason", "started_at")
    assert [mounted.get(f"{D}/task/rev/{name}") for name in names] == ["rev\n", "", "", ""]
    with mounted.agents.journal.changing() as change:
        mounted.agents.tasks.child_started(change, child, 1.0)
    change = Change()
    add_end(mounted.agents, change, child, Outcome.ERROR, "signal:9")
    mounted.agents.journal.note(change)
    assert [mounted.get(f"{D}/task/rev/{name}") for name in names] == [
        "rev\n", "signal:9\n", "signal:9\n", "1970-01-01T00:00:01.000Z\n",
    ]  # fmt: skip
    assert mounted.get(f"{D}/task/rev/status") == "failed\n"


def test_what_is_said_to_a_handle_is_said_to_its_child(mounted: Mounted) -> None:
    child = mounted.world.live(supervised(mounted), Status.IDLE)
    with mounted.as_(inside(the_agent(mounted))):
        mounted.put(f"{D}/task/rev/ctl", "stop\n")
        with refused("EINVAL"):
            mounted.put(f"{D}/task/rev/ctl", "pause\n")
    assert mounted.supervisor.said[-1] == ("supervisor_stop", "rev")
    assert child.status is Status.STOPPING
    assert mounted.get(f"{D}/task/rev/status") == "cancelling\n"
    with refused("EBUSY"):
        rmdir(mounted, f"{D}/task/rev")


def test_input_of_a_handle_is_a_message_at_each_flush(mounted: Mounted) -> None:
    child = mounted.world.live(supervised(mounted), Status.IDLE)
    with mounted.as_(inside(the_agent(mounted))):
        fh = mounted.open(f"{D}/task/rev/input", WRITE)
        mounted.write(fh, b"one ")
        mounted.write(fh, b"message\n", 4)
        mounted.flush(fh)
        mounted.flush(fh)
        mounted.write(fh, b"another", 0)
        mounted.close(fh)
    pending = mounted.agents.messages.pending(child)
    assert [(m.text, m.provenance) for m in pending] == [
        ("one message", "supervisor"),
        ("another", "supervisor"),
    ]


def test_a_once_child_takes_no_input(mounted: Mounted) -> None:
    mounted.world.live(supervised(mounted, "once"))
    assert mounted.get(f"{D}/task/rev/accepts_input") == "0\n"
    with refused("EACCES"):
        mounted.put(f"{D}/task/rev/input", "hello")


# inbox and queue


def queue(mounted: Mounted) -> list[str]:
    return [json.loads(line)["text"] for line in mounted.get(f"{D}/queue").splitlines()]


@pytest.mark.parametrize(
    ("text", "sent"),
    [("hello\n", "hello"), ("hello", "hello"), ("a\nb\n", "a\nb"), ("\n", ""), ("a\n\n", "a\n"),
     ("x" * 16, "x" * 16), ("x" * 16 + "\n", "x" * 16)],
)  # fmt: skip
def test_what_is_written_is_one_message(mounted: Mounted, text: str, sent: str) -> None:
    mounted.put(f"{D}/inbox", text)
    assert queue(mounted) == [sent]


def test_opening_and_closing_sends_nothing(mounted: Mounted) -> None:
    fh = mounted.open(f"{D}/inbox", WRITE | os.O_TRUNC)
    mounted.flush(fh)
    mounted.close(fh)
    assert mounted.get(f"{D}/queue") == ""


@pytest.mark.parametrize(
    ("text", "error"),
    [("x" * 18, "EMSGSIZE"), ("x" * 17, "EMSGSIZE"), (b"a\0", "EINVAL"), (b"\xff", "EINVAL")],
)
def test_what_is_no_message_is_refused(mounted: Mounted, text: str | bytes, error: str) -> None:
    with refused(error):
        mounted.put(f"{D}/inbox", text)
    assert queue(mounted) == []


def test_a_refused_message_is_not_sent_by_a_later_flush(mounted: Mounted) -> None:
    fh = mounted.open(f"{D}/inbox", WRITE)
    mounted.write(fh, b"x" * 10)
    with refused("EMSGSIZE"):
        mounted.write(fh, b"x" * 10, 10)
    # what the kernel had split off the same write(2) is no message of its own
    with refused("EMSGSIZE"):
        mounted.write(fh, b"x", 20)
    with refused("EMSGSIZE"):
        mounted.flush(fh)
    mounted.write(fh, b"short", 0)
    mounted.close(fh)
    assert queue(mounted) == ["short"]


def test_a_report_is_a_message_to_ones_supervisor(mounted: Mounted) -> None:
    x = mounted.agent("x")
    child = mounted.world.live(mounted.make("child", inside(mounted.world.may_create(x))))
    with mounted.as_(inside(child)):
        mounted.put("agent/child.d/report", "half is done\n")
        mounted.put(f"{D}/inbox", "and more", os.O_APPEND)
        with refused("EMSGSIZE"):
            mounted.put("agent/child.d/report", "x" * 18)
        assert "the report is too long and was not sent" in mounted.reason
        assert mounted.get("agent/child.d/report") == ""
    assert queue(mounted) == ["half is done", "and more"]
    waiting = [json.loads(line) for line in mounted.get(f"{D}/queue").splitlines()]
    assert [message["provenance"] for message in waiting] == ["child", "child"]
    mounted.agents.journal.update(x, mode="once")
    with mounted.as_(inside(child)):
        for path in ("agent/child.d/report", f"{D}/inbox"):
            with refused("ENOTSUP"):
                mounted.put(path, "more")
            assert "write result.md" in mounted.reason


def test_a_full_queue_takes_no_more(mounted: Mounted) -> None:
    for number in range(3):
        mounted.put(f"{D}/inbox", f"{number}\n")
    with refused("EDQUOT"):
        mounted.put(f"{D}/inbox", "3\n")
    assert queue(mounted) == ["0", "1", "2"]


def test_the_inbox_is_empty_and_the_queue_not_written(mounted: Mounted) -> None:
    mounted.put(f"{D}/inbox", "a message")
    assert mounted.get(f"{D}/inbox") == ""
    with refused("EPERM"):
        mounted.put(f"{D}/queue", "x")
    with mounted.as_(STRANGER), refused("EACCES"):
        mounted.inode(f"{D}/inbox")


@pytest.mark.parametrize("status", [Status.STOPPING, Status.DEAD])
def test_who_is_ending_takes_no_messages(mounted: Mounted, status: Status) -> None:
    opened = mounted.open(f"{D}/inbox", WRITE)
    mounted.agents.journal.update(the_agent(mounted), status=status)
    with refused("EBUSY"):
        mounted.put(f"{D}/inbox", "late")
    with refused("EBUSY"):
        mounted.write(opened, b"late")
    mounted.close(opened)


def test_the_queue_is_polled(mounted: Mounted) -> None:
    fh = mounted.open(f"{D}/queue")
    assert mounted.read(fh) == b""
    waiter = Waiter()
    complete(mounted.ops.poll, mounted.inode(f"{D}/queue"), fh, waiter, CONTEXT)
    mounted.put(f"{D}/inbox", "hello\n")
    assert waiter.notified
    assert json.loads(mounted.read(fh))["text"] == "hello"


def test_the_message_at_hand_is_shown_and_polled(mounted: Mounted) -> None:
    agent, messages = the_agent(mounted), mounted.agents.messages
    fh = mounted.open(f"{D}/message")
    assert mounted.read(fh) == b""
    waiter = Waiter()

    def poll() -> None:
        complete(mounted.ops.poll, mounted.inode(f"{D}/message"), fh, waiter, CONTEXT)

    poll()
    mounted.put(f"{D}/inbox", "hello\n")
    before = waiter.notified
    assert before == 0, "it only waits"
    message = messages.pending(agent)[0]
    with mounted.agents.journal.changing() as change:
        messages.deliver(change, agent, message, RunId("r1"))
    assert waiter.notified == 1
    shown = json.loads(mounted.read(fh))
    assert list(shown) == ["id", "ts", "from", "provenance", "priority", "run", "text"]
    assert shown.pop("ts").endswith("Z")
    assert shown == {"id": message.name, "from": message.sender, "provenance": "operator",
                     "priority": "normal", "run": "r1", "text": "hello"}  # fmt: skip
    poll()
    with mounted.agents.journal.changing() as change:
        messages.end(change, agent, message, MessageStatus.PROCESSED)
    assert waiter.notified == 2
    assert mounted.read(fh) == b""


@pytest.mark.parametrize("more", [0, 1])
def test_of_a_long_handoff_the_beginning_is_shown(mounted: Mounted, more: int) -> None:
    agent, messages = the_agent(mounted), mounted.agents.messages
    text = "ä" * 32_768 + "x" * more
    with mounted.agents.journal.changing() as change:
        messages.queue_first(change, agent, text=text, sender="s", provenance="delegation")
    with mounted.agents.journal.changing() as change:
        messages.deliver(change, agent, messages.pending(agent)[0], RunId("r1"))
    shown = json.loads(mounted.get(f"{D}/message"))
    assert shown["text"] == "ä" * 32_768
    assert shown.get("path") == ("/ctx/agent/x.d/handoff.md" if more else None)
