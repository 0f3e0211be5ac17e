"""Tools as programs in sandboxes, and over the sockets."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ctxfs.tools.registry import TOOLS
from tests.system.test_sockets import Peer
from tests.worlds.daemon import AGENT_UID, Daemon, read, wait_dead, wait_status, wait_until, write
from tests.worlds.fates import CRASH_AT

NAMES = sorted(tool.name for tool in TOOLS)
#: of ExecCommand: it does not wait for the end
AT_ONCE = {"yield": 0}
#: nobody's in these tests
_STRANGER = 4242


@contextmanager
def operator(daemon: Daemon) -> Iterator[Peer]:
    connection = Peer(daemon.path("ctxd.sock"))
    try:
        yield connection
    finally:
        connection.close()


def call(connection: Peer, name: str, /, **given: Any) -> dict[str, Any]:
    answer = connection.ask({"op": "tool", "name": name, "input": given})
    assert answer["type"] == "tool", answer
    output: dict[str, Any] = answer["output"]
    return output


def script(*commands: str) -> str:
    """A program of the shell that finds the tools by its PATH."""
    return "sh -c " + shlex.quote("; ".join(('PATH="$CTX_PATH:$PATH"', *commands)))


def said(name: str, /, **given: Any) -> str:
    """The command that calls a tool."""
    return f"{name} {shlex.quote(json.dumps(given))}"


def test_an_agent_works_with_tools_alone(daemon: Daemon) -> None:
    agent = daemon.finish(
        "coder",
        script(
            said("WorkCreate", objective="know who I am", id="w", focus=True),
            said("ExecCommand", cmd="read x; echo got $x $A", accepts_input=True,
                 env={"A": "1 2"}, work="w", **AT_ONCE),
            said("WaitFor", wake="task_result", resource="task-1", work="w"),
            f"until {said('TaskInput', task_id='task-1', text='it' + chr(10))}; do :; done",
            """echo '{"task_id": "task-1", "block": true}' | TaskOutput""",
            "AgentGet </dev/null",
            said("WorkUpdate", id="w", status="done"),
            "TaskList </dev/null",
            said("ExecCommand", cmd="expr 2 + 3; exit 4"),
        ),
    )
    out = [json.loads(line) for line in read(agent, "out").splitlines()]
    assert out[0]["status"] == "active"
    assert out[1]["task_handle"]["task_id"] == "task-1"
    assert out[2]["status"] == "armed"
    assert out[3] == {"task_id": "task-1", "accepted": 3}
    assert out[4]["preview"] == "got it 1 2\n"
    assert (out[4]["status"], out[4]["exit"]) == ("completed", "exit:0")
    assert read(agent / "task" / "task-1", "output") == out[4]["preview"]
    assert out[4]["output_path"] == f"{daemon.root}/agent/coder.d/task/task-1/output"
    assert (out[5]["status"], out[5]["work_focus"]) == ("busy", "w")
    assert (out[5]["waiting"], out[5]["tasks"]) == ([], {"completed": 1})
    assert out[6]["status"] == "done"
    assert out[7] == {"tasks": [], "left": 0}
    ended = out[8]["task_handle"]
    assert (ended["initial_output"], ended["exit"], ended["status"]) == ("5\n", "exit:4", "failed")
    assert read(agent / "waiting" / "wait-1", "status") == "fired\n"


def test_a_parent_spawns_and_reads_what_comes_back(daemon: Daemon) -> None:
    parent = daemon.finish(
        "coder",
        script(
            said("SpawnAgent", initial_message="what is it?",
                 exec="sh -c 'read x; echo $x 42 | tee $CTX_SELF/result.md'"),
            said("TaskOutput", task_id="coder-1", block=True),
            said("AgentGet", agent_id="coder-1"),
            "AgentList </dev/null",
        ),
    )
    out = [json.loads(line) for line in read(parent, "out").splitlines()]
    assert out[0]["agent_id"] == "coder-1"
    assert out[0]["task_handle"]["task_kind"] == "child_agent_task"
    assert (out[1]["preview"], out[1]["status"]) == ("what is it? 42\n", "completed")
    assert (out[2]["status"], out[2]["outcome"]) == ("dead", "done")
    assert (out[2]["supervisor"], out[2]["mode"]) == ("agent:coder", "once")
    assert out[2]["task_handle"]["initial_output"] == "what is it? 42\n"
    assert [agent["agent_id"] for agent in out[3]["agents"]] == ["coder", "coder-1"]


def test_an_orchestrator_leaves_nothing_but_its_result(daemon: Daemon) -> None:
    refs = [{"path": "artifact/log", "kind": "log"}]
    parent = daemon.finish(
        "coder",
        script(
            said("SpawnAgent", initial_message="look", name="rev", exec="cat"),
            said("AgentRemove", agent_id="coder") + "; echo $?",
            said("TaskRemove", task_id="rev") + "; echo $?",
            said("TaskOutput", task_id="rev", block=True),
            said("AgentRemove", agent_id="rev"),
            said("SpawnAgent", initial_message="look", name="rev", exec="true", life="temp"),
            f"while {said('TaskStatus', task_id='rev')}; do :; done >/dev/null",
            said("ExecCommand", cmd="true", task_id="t"),
            said("TaskOutput", task_id="t", block=True),
            said("TaskRemove", task_id="t"),
            said("ResultWrite", text="all is well", refs=refs),
            "TaskList </dev/null",
            "AgentGet </dev/null",
        ),
    )
    out = [json.loads(line) for line in read(parent, "out").splitlines()]
    assert out[0]["agent_id"] == "rev"
    assert out[1:3] == [13, 1]
    assert (out[3]["status"], out[3]["preview"]) == ("completed", "look\n")
    assert out[4] == {"agent_id": "rev"}
    assert out[5]["task_handle"]["task_id"] == "rev"
    assert (out[7]["task_id"], out[7]["status"]) == ("t", "completed")
    assert out[8] == {"task_id": "t"}
    assert out[9] == {"result_path": f"{daemon.root}/agent/coder.d/result.md"}
    assert out[10] == {"tasks": [], "left": 0}
    assert out[11]["children"] == []
    assert read(parent, "result.md") == "all is well\n"
    assert [json.loads(line) for line in read(parent, "refs.jsonl").splitlines()] == refs
    channels = parent / "session" / "context" / "child"
    assert sorted(os.listdir(channels)) == ["rev", "rev~1"]
    assert read(channels / "rev~1", "result.md") == "look\n"


@pytest.mark.parametrize(
    ("crash_at", "made"),
    [
        ("create.inserted", False),
        ("write.committed:3", False),  # some of its files
        ("start.committed", True),
    ],
)
def test_who_spawns_an_agent_has_all_of_it_or_nothing(
    daemon: Daemon, crash_at: str, made: bool
) -> None:
    """Also when the daemon dies before it answers: the call can be said again."""
    boss = daemon.run("boss", "cat", mode="turn")
    wait_status(boss, "idle")
    daemon.kill()
    daemon.env[CRASH_AT] = crash_at
    daemon.start()
    del daemon.env[CRASH_AT]
    kid = {"agent_id": "boss", "name": "kid", "initial_message": "look", "mode": "turn",
           "exec": "cat"}  # fmt: skip
    request = {"op": "tool", "name": "SpawnAgent", "input": kid}
    with operator(daemon) as connection:
        connection.send(request)
        daemon.wait_killed()
    daemon.start()
    with operator(daemon) as connection:
        known = call(connection, "AgentGet", agent_id="boss")["children"]
        assert [child["agent_id"] for child in known] == ["kid"] * made
        answer = connection.ask(request)
    assert (answer["type"], answer.get("code")) == (("error", "EEXIST") if made else ("tool", None))
    wait_until(lambda: read(daemon.agent_dir("kid"), "out") == "look\n", "it works")
    kinds = [event["type"] for event in daemon.events("kid")]
    assert (kinds.count("agent.create"), kinds.count("agent.start")) == (1, 1)
    assert os.listdir(boss / "session" / "context" / "child") == ["kid"]


@pytest.mark.parametrize(
    ("crash_at", "made"), [("write.committed:2", False), ("task.queued", True)]
)
def test_who_executes_a_command_has_all_of_it_or_nothing(
    daemon: Daemon, crash_at: str, made: bool
) -> None:
    """Also when the daemon dies before it answers: the call can be said again."""
    boss = daemon.run("boss", "cat", mode="turn")
    wait_status(boss, "idle")
    write(daemon.make("other", "cat", mode="turn") / "ctl", "start")
    made_with_files = daemon.agent_dir("other") / "task" / "patient"
    made_with_files.mkdir()
    daemon.kill()
    daemon.env[CRASH_AT] = crash_at
    daemon.start()
    del daemon.env[CRASH_AT]
    given = {"agent_id": "boss", "task_id": "t", "cmd": "echo it", "title": "it"}
    request = {"op": "tool", "name": "ExecCommand", "input": {**given, **AT_ONCE}}
    with operator(daemon) as connection:
        connection.send(request)
        daemon.wait_killed()
    daemon.start()
    assert os.listdir(boss / "task") == ["t"] * made
    with operator(daemon) as connection:
        answer = connection.ask(request)
    assert (answer["type"], answer.get("code")) == (("error", "EEXIST") if made else ("tool", None))
    wait_until(lambda: read(boss / "task" / "t", "output") == "it\n", "it has run")
    wait_until(lambda: read(boss / "task" / "t", "status") == "completed\n", "it has ended")
    kinds = [event["type"] for event in daemon.events("boss")]
    assert (kinds.count("task.start"), kinds.count("task.end")) == (1, 1)
    assert made_with_files.is_dir()


#: where the daemon dies, the call, its input, whose events tell of it, and of which kind
ONCE: tuple[tuple[str, str, dict[str, Any], str, str], ...] = (
    ("write.committed:3", "SpawnAgent",
     {"agent_id": "boss", "name": "new", "initial_message": "look", "mode": "turn"},
     "new", "agent.start"),
    ("start.committed", "SpawnAgent",
     {"agent_id": "boss", "name": "new", "initial_message": "look", "mode": "turn"},
     "new", "agent.start"),
    ("write.committed:2", "ExecCommand", {"agent_id": "boss", "cmd": "sleep 1000", **AT_ONCE},
     "boss", "task.start"),
    ("task.queued", "ExecCommand", {"agent_id": "boss", "cmd": "sleep 1000", **AT_ONCE},
     "boss", "task.start"),
    ("write.committed", "SendMessage", {"agent_id": "boss", "text": "hello"},
     "boss", "message.queued"),
    ("write.committed", "WorkCreate", {"agent_id": "boss", "objective": "x"},
     "boss", "work.status"),
    ("write.committed", "WaitFor", {"agent_id": "boss", "wake": "external"}, "boss", "wait.armed"),
    ("cancel.marked", "AgentStop", {"agent_id": "boss"}, "boss", "agent.stop"),
    ("remove.committed", "AgentRemove", {"agent_id": "fresh"}, "boss", "agent.create"),
)  # fmt: skip


#: of each kind of thing that is made one, in every run of the tests
OFTEN = ("start.committed", "task.queued", "write.committed", "remove.committed")


@pytest.mark.parametrize("case", [
    pytest.param(case, id=f"{case[1]}-{case[0]}",
                 marks=[] if case[0] in OFTEN and case[1] not in ("WorkCreate", "WaitFor")
                 else pytest.mark.long)
    for case in ONCE
])
def test_a_call_with_an_id_is_carried_out_once_whenever_the_daemon_dies(
    daemon: Daemon, case: tuple[str, str, dict[str, Any], str, str]
) -> None:
    crash_at, name, given, whose, kind = case
    boss = daemon.run("boss", "sh -c 'sleep 1000'", mode="turn")
    daemon.make("fresh", "cat")
    wait_status(boss, "idle")
    daemon.kill()
    daemon.env[CRASH_AT] = crash_at
    daemon.start()
    del daemon.env[CRASH_AT]
    request = {"op": "tool", "id": "once", "name": name, "input": given}
    with operator(daemon) as connection:
        connection.send(request)
        daemon.wait_killed()
    daemon.start()
    with operator(daemon) as connection:
        first = connection.ask(request)
        assert (first["type"], first.get("id")) == ("tool", "once"), first
        again = connection.ask(request)
        other = connection.ask({**request, "input": {**given, "agent_id": "other"}})
    for answer in (first, again):  # a command goes on between the two
        answer["output"].get("task_handle", {}).pop("status", None)
    assert again == first
    assert (other["type"], other["code"]) == ("error", "EEXIST")

    def told() -> list[str]:
        return [event["type"] for event in daemon.events(whose)]

    wait_until(lambda: kind in told(), f"an event {kind}")
    assert told().count(kind) == 1
    assert daemon.agent_dir("fresh").exists() is (name != "AgentRemove")


def test_a_waiting_call_can_be_cancelled(daemon: Daemon) -> None:
    boss = daemon.run("boss", "cat", mode="turn")
    wait_status(boss, "idle")
    with operator(daemon) as connection, operator(daemon) as another:
        call(connection, "ExecCommand", agent_id="boss", cmd="sleep 1000", **AT_ONCE)
        given = {"agent_id": "boss", "task_id": "task-1", "block": True}
        for ident in ("a", "b"):
            connection.send({"op": "tool", "id": ident, "name": "TaskOutput", "input": given})
        assert connection.ask({"op": "ping"}) == {"type": "pong"}
        unknown = another.ask({"op": "cancel", "id": "c"})
        assert (unknown["code"], unknown["id"]) == ("ENOENT", "c")
        another.send({"op": "cancel", "id": "a"})
        assert another.ask({"op": "cancel", "id": "a"})["code"] == "ENOENT", "it is over"
        assert connection.ask({"op": "ping"}) == {"type": "pong"}, "and not answered"
        wait_status(boss / "task" / "task-1", "running")
        call(another, "TaskStop", agent_id="boss", task_id="task-1", kill=True)
        answer = connection.receive()
    assert answer is not None and answer["id"] == "b"
    assert answer["output"]["status"] == "cancelled"


def test_an_agent_made_with_files_waits_for_its_start(daemon: Daemon) -> None:
    """Whoever makes it may start it when they like: it is there, also after a crash."""
    daemon.make("patient", "cat", mode="turn")
    daemon.restart()
    assert read(daemon.agent_dir("patient"), "status") == "new\n"


def test_exit_statuses_tell_what_was_wrong(daemon: Daemon) -> None:
    agent = daemon.make(
        "coder",
        script(
            "ls $CTX_ROOT/tool",
            said("AgentGet", who=1) + "; echo $?",
            "AgentGet '[1]'; echo $?",
            said("AgentGet", agent_id="none") + "; echo $?",
            "TaskList </dev/null; echo $?",
            "$CTX_ROOT/bin/ctx tool call TaskList '{}'; echo $?",
            "$CTX_ROOT/bin/ctx tool call Nothing '{}'; echo $?",
        ),
    )
    policy = read(agent, "policy").replace("tool:* execute", "tool:Agent* execute")
    (agent / "policy").write_text(policy)
    write(agent / "ctl", "start")
    wait_dead(agent)
    out = read(agent, "out").splitlines()
    names = [name for name in NAMES if name.startswith("Agent")]
    assert out[: 2 * len(names)] == sorted([*names, *(f"{name}.d" for name in names)])
    assert out[2 * len(names) :] == ["2", "2", "1", "127", "13", "69"]
    assert "who: " in read(agent, "log")


def test_operators_name_the_agent_and_strangers_are_refused(daemon: Daemon) -> None:
    agent = daemon.run("coder", "sleep 1000", mode="once")
    wait_status(agent, "busy")
    with operator(daemon) as connection:
        answer = connection.ask({"op": "tool", "name": "TaskList", "input": {}, "id": "x"})
        assert (answer["code"], answer["id"]) == ("EINVAL", "x")
        assert answer["message"].startswith("agent_id: ")
        assert connection.ask({"op": "tool", "name": "Shell"})["code"] == "ENOENT"
        assert connection.ask({"op": "tool"})["code"] == "EINVAL"
        assert connection.ask({"op": "tool", "name": "TaskList", "input": [1]})["code"] == "EINVAL"
        given = {"agent_id": "coder", "cmd": "id -u; exec sleep 1000", **AT_ONCE}
        handle = call(connection, "ExecCommand", **given)
        assert handle["task_handle"]["task_id"] == "task-1"
        task = agent / "task" / "task-1"
        wait_status(task, "running")
        wait_until(lambda: read(task, "output"), "the command has written")
        assert call(connection, "TaskOutput", agent_id="coder", task_id="task-1")["preview"] == (
            f"{AGENT_UID}\n"
        )
        # one that waits holds up nobody on its connection
        given = {"agent_id": "coder", "task_id": "task-1", "block": True}
        connection.send({"op": "tool", "name": "TaskOutput", "input": given, "id": "slow"})
        assert connection.ask({"op": "ping"}) == {"type": "pong"}
        stopped = call(connection, "TaskStop", agent_id="coder", task_id="task-1")
        assert stopped["status"] == "cancelling"
        ended = connection.receive()
        assert ended is not None
        assert (ended["id"], ended["output"]["status"]) == ("slow", "cancelled")
        assert call(connection, "AgentStop", agent_id="coder", kill=True)["agent_id"] == "coder"
    wait_dead(agent)
    found = subprocess.run(
        [daemon.path("tool", "AgentGet"), '{"agent_id": "coder"}'],
        user=_STRANGER, group=_STRANGER, extra_groups=[], capture_output=True, text=True,
        check=False, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert (found.returncode, found.stdout) == (13, "")
    assert "the caller may not look at" in found.stderr


def test_whoever_hangs_up_cancels_nothing(daemon: Daemon) -> None:
    agent = daemon.run("coder", "sleep 1000")
    wait_status(agent, "busy")
    given = {"agent_id": "coder", "task_id": "task-1", "block": True}
    with operator(daemon) as connection:
        call(connection, "ExecCommand", agent_id="coder", cmd="sleep 1000", **AT_ONCE)
        connection.send({"op": "tool", "name": "TaskOutput", "input": given})
        assert connection.ask({"op": "ping"}) == {"type": "pong"}
    assert wait_status(agent / "task" / "task-1", "running") == "running"
    write(agent / "ctl", "stop")
    wait_dead(agent)


def test_a_waiting_call_is_answered_when_the_agent_ends(daemon: Daemon) -> None:
    agent = daemon.run("coder", "sleep 1000")
    wait_status(agent, "busy")
    with operator(daemon) as connection:
        call(connection, "ExecCommand", agent_id="coder", cmd="sleep 1000", **AT_ONCE)
        wait_status(agent / "task" / "task-1", "running")
        given = {"agent_id": "coder", "task_id": "task-1", "block": True}
        connection.send({"op": "tool", "name": "TaskOutput", "input": given})
        assert connection.ask({"op": "ping"}) == {"type": "pong"}
        write(agent / "ctl", "stop")
        answer = connection.receive()
        assert answer is not None
        assert answer["output"]["status"] == "cancelled"
    wait_dead(agent)


def test_a_start_that_is_refused_leaves_no_agent(daemon: Daemon) -> None:
    with operator(daemon) as connection:
        given = {"preset": "public_named", "name": "idle"}
        answer = connection.ask({"op": "tool", "name": "SpawnAgent", "input": given})
        assert (answer["type"], answer["code"]) == ("error", "EINVAL")
        assert not daemon.agent_dir("idle").exists()
        assert os.listdir(daemon.path("home", "0", "agent")) == []
        assert "EINVAL tool/SpawnAgent: " in daemon.error()
        output = call(connection, "SpawnAgent", **given, exec="sleep 1000")
        assert output == {"agent_id": "idle"}
    wait_status(daemon.agent_dir("idle"), "busy")


def test_readers_see_what_a_tool_did_at_once(daemon: Daemon) -> None:
    agent = daemon.run("coder", "sleep 1000")
    wait_status(agent, "busy")
    with operator(daemon) as connection:
        call(connection, "WorkCreate", agent_id="coder", objective="a", id="w")
        item = agent / "work" / "w"
        for number in range(50):
            assert os.listdir(agent / "work").count("w") == 1
            call(connection, "WorkUpdate", agent_id="coder", id="w", plan=f"step {number}")
            assert read(item, "plan.md") == f"step {number}\n"


def test_tools_go_on_after_a_crash(daemon: Daemon) -> None:
    agent = daemon.run("coder", "sleep 1000")
    wait_status(agent, "busy")
    with operator(daemon) as connection:
        call(connection, "ExecCommand", agent_id="coder", cmd="sleep 1000", **AT_ONCE)
        token = call(connection, "WaitFor", agent_id="coder", wake="external")["token"]
    wait_status(agent / "task" / "task-1", "running")
    pid = int(read(agent / "task" / "task-1", "pid"))
    daemon.restart()
    with operator(daemon) as connection:
        listed = call(connection, "TaskList", agent_id="coder")["tasks"]
        assert [task["status"] for task in listed] == ["running"]
        given = {"agent_id": "coder", "task_id": "task-1", "block": True}
        connection.send({"op": "tool", "name": "TaskOutput", "input": given})
        assert connection.ask({"op": "ping"}) == {"type": "pong"}
        os.kill(pid, signal.SIGKILL)
        answer = connection.receive()
        assert answer is not None
        assert answer["output"]["exit"] == "signal:9"
        with open(token, "w") as file:
            file.write("go")
        assert call(connection, "AgentGet", agent_id="coder")["waiting"] == []


def test_every_tool_is_there_for_the_client(daemon: Daemon) -> None:
    for name in NAMES:
        found = daemon.ctx("tool", "show", name)
        assert found.returncode == 0, found.stderr
        assert '"additionalProperties": false' in found.stdout
