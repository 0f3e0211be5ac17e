"""What programs ask in words of their own, as asks of the agent that they run in."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.acp import agent as scripted
from tests.worlds.daemon import Daemon, read, wait_dead, wait_status, wait_until, write

pytestmark = pytest.mark.settings(grace="500ms")

BASH = {"tool_name": "Bash", "tool_input": {"command": "rm -rf build\nls", "timeout": 5}}
#: what Claude Code's own tool asks its user
WHICH = {
    "tool_name": "AskUserQuestion",
    "tool_input": {"questions": [
        {"question": "Which colour?", "header": "Colour", "multiSelect": False,
         "options": [{"label": "Deep red", "description": "warm"}, {"label": "Blue"}]},
        {"question": "Which fruits?", "header": "Fruits", "multiSelect": True,
         "options": [{"label": "Fig"}, {"label": "Pear"}]},
    ]},
}  # fmt: skip


@pytest.fixture(scope="module")
def daemon(shared_daemon: Daemon) -> Daemon:
    return shared_daemon


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"a{abs(hash(request.node.nodeid)) % 10**9}"


def asked(daemon: Daemon, name: str) -> list[dict[str, Any]]:
    rows = map(json.loads, (daemon.root / "asks").read_text().splitlines())
    return [row for row in rows if row["agent"] == name]


def the_ask(daemon: Daemon, name: str) -> dict[str, Any]:
    """The open ask of an agent, as soon as there is one."""
    wait_until(lambda: asked(daemon, name), "it is asked")
    (row,) = asked(daemon, name)
    return row


def answer(daemon: Daemon, name: str, *words: str) -> None:
    result = daemon.ctx("answer", name, *words)
    assert result.returncode == 0, result.stderr


def events_dir(daemon: Daemon, name: str, **events: dict[str, Any]) -> Path:
    """Files of events, for a cell to read."""
    gate = daemon.base / f"gate-{name}"
    gate.mkdir()
    for file, event in events.items():
        (gate / file).write_text(json.dumps(event))
    return gate


def hooked(daemon: Daemon, name: str, script: str, **events: dict[str, Any]) -> Path:
    """An agent whose program runs hooks on these events."""
    gate = events_dir(daemon, name, **events)
    return daemon.run(name, f"sh -c {shlex.quote(script)}", mount=f"{gate} /gate ro")


def decision(agent: Path) -> Any:
    wait_dead(agent)
    said = json.loads(read(agent, "out"))["hookSpecificOutput"]
    assert said["hookEventName"] in ("PermissionRequest", "Elicitation")
    return said.get("decision", said)


def request_of(event: dict[str, Any]) -> dict[str, Any]:
    return {"hook_event_name": "PermissionRequest", **event}


@pytest.mark.parametrize("allowed", [True, False])
def test_a_hook_asks_whether_a_tool_may_be_used(daemon: Daemon, name: str, allowed: bool) -> None:
    agent = hooked(daemon, name, "ctx hook claude < /gate/ask", ask=request_of(BASH))
    row = the_ask(daemon, name)
    assert (row["kind"], row["question"]) == ("permission", "Bash: rm -rf build ls")
    assert json.loads(row["detail"]) == BASH["tool_input"]
    assert [line.split()[0] for line in row["options"]] == ["allow", "deny"]
    if allowed:
        answer(daemon, name, "allow")
        assert decision(agent) == {"behavior": "allow", "updatedInput": BASH["tool_input"]}
    else:
        answer(daemon, name, "deny", "--note", "not on a Friday")
        assert decision(agent) == {"behavior": "deny", "message": "not on a Friday"}
    assert asked(daemon, name) == []


def test_questions_of_the_model_are_a_form(daemon: Daemon, name: str) -> None:
    agent = hooked(daemon, name, "ctx hook claude < /gate/ask", ask=request_of(WHICH))
    row = the_ask(daemon, name)
    assert row["question"] == "Which colour? / Which fruits?"
    refused = daemon.ctx("answer", name, "answer_1=Green", "answer_2=Fig")
    assert refused.returncode == 1
    answer(daemon, name, "answer_1=Deep red", "answer_2=Fig,Pear")
    assert decision(agent)["updatedInput"] == {
        **WHICH["tool_input"],  # type: ignore[dict-item]
        "answers": {"Which colour?": "Deep red", "Which fruits?": "Fig, Pear"},
    }


def test_elicitation_is_a_form(daemon: Daemon, name: str) -> None:
    schema = {"type": "object", "properties": {"port": {"type": "integer"}}, "required": ["port"]}
    event = {"hook_event_name": "Elicitation", "mcp_server_name": "db", "message": "Which port?",
             "requested_schema": schema}  # fmt: skip
    agent = hooked(daemon, name, "ctx hook claude < /gate/ask", ask=event)
    assert the_ask(daemon, name)["question"] == "db: Which port?"
    answer(daemon, name, "port=5432")
    said = decision(agent)
    assert (said["action"], said["content"]) == ("accept", {"port": 5432})


#: an input that is too long to be shown whole
LONG = {"tool_name": "Write", "tool_input": {"file_path": "/x", "content": "x" * 99_000}}


@pytest.mark.parametrize(
    ("event", "used", "more"),
    [("PostToolUse", BASH, {}), ("PostToolUse", LONG, {}),
     ("PostToolUse", WHICH, {"answers": {"Which colour?": "Blue"}}),
     ("Stop", BASH, {}), ("SessionEnd", BASH, {})],
    ids=["used", "long", "answered", "stop", "end"],
)  # fmt: skip
def test_what_was_answered_in_the_dialogue_leaves_the_inbox(
    daemon: Daemon, name: str, event: str, used: dict[str, Any], more: dict[str, Any]
) -> None:
    """Also if its hook was killed; what the agent asks by itself stays. ``more`` is what the
    dialogue adds to the input."""
    script = (
        "ctx ask --life run mine & ctx hook claude < /gate/ask & "
        "until test -e $CTX_ROOT/agent/$CTX_AGENT.d/ask/claude-1 -a "
        "\"$(cat $CTX_ROOT/agent/$CTX_AGENT.d/ask/claude-1/status)\" = open; do :; done; "
        "kill -9 $!; ctx hook claude < /gate/over; echo withdrawn; wait"
    )
    over = {**used, "tool_input": {**used["tool_input"], **more}, "hook_event_name": event}
    agent = hooked(daemon, name, script, ask=request_of(used), over=over)
    wait_until(lambda: "withdrawn" in read(agent, "out"), "the hook has run")
    assert [row["question"] for row in asked(daemon, name)] == ["mine"], read(agent, "log")
    answer(daemon, name, "done")
    wait_dead(agent)


def test_a_hook_that_ends_withdraws(daemon: Daemon, name: str) -> None:
    script = "ctx hook claude < /gate/ask & read -r _ < /gate/go; kill $!; wait $!; echo $?"
    gate = events_dir(daemon, name, ask=request_of(BASH))
    os.mkfifo(gate / "go")
    (gate / "go").chmod(0o666)
    agent = daemon.run(name, f"sh -c {shlex.quote(script)}", mount=f"{gate} /gate ro")
    the_ask(daemon, name)
    (gate / "go").write_text("\n")
    wait_dead(agent)
    assert (read(agent, "out"), asked(daemon, name)) == ("0\n", [])


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "no object of JSON"), ("[1]", "no object of JSON"),
     ('{"hook_event_name":"Notification"}', ""),
     ('{"hook_event_name":"Elicitation","message":"x","requested_schema":{"type":"array"}}',
      "nobody is asked")],
)  # fmt: skip
def test_a_hook_that_cannot_ask_says_nothing(
    daemon: Daemon, name: str, text: str, said: str
) -> None:
    script = f"printf %s {shlex.quote(text)} | ctx hook claude"
    agent = daemon.finish(name, f"sh -c {shlex.quote(script)}")
    assert (read(agent, "reason"), read(agent, "out")) == ("exit:0\n", "")
    assert said in read(agent, "log")


def test_nobody_is_asked_outside_of_an_agent(daemon: Daemon) -> None:
    result = daemon.ctx("hook", "claude", stdin=None, input=json.dumps(request_of(BASH)))
    assert (result.returncode, result.stdout) == (0, "")
    assert "you are not in an agent" in result.stderr


# Permission, a tool of ctx mcp


_MCP = """
import json, subprocess, sys
process = subprocess.Popen(["ctx", "mcp", "--permissions"], stdin=-1, stdout=-1, text=True)
def say(**frame):
    process.stdin.write(json.dumps({"jsonrpc": "2.0", **frame}) + "\\n")
    process.stdin.flush()
def hear(ident):
    while True:
        frame = json.loads(process.stdout.readline())
        if frame.get("id") == ident:
            return frame
        print(json.dumps(frame), flush=True)
say(id=1, method="initialize", params={"protocolVersion": "2025-11-25", "capabilities": {},
    "clientInfo": {"name": "t", "version": "1"}})
hear(1)
say(method="notifications/initialized")
say(id=2, method="tools/list")
print("Permission" in [tool["name"] for tool in hear(2)["result"]["tools"]], flush=True)
given = json.load(open("/gate/ask"))
call = {"name": "Permission", "_meta": {"progressToken": "p"},
        "arguments": {"tool_name": given["tool_name"], "input": given["tool_input"]}}
say(id=3, method="tools/call", params=call)
if len(sys.argv) > 1:
    sys.stdin.readline()
    say(method="notifications/cancelled", params={"requestId": 3})
    say(id=4, method="ping")
    hear(4)
    print("cancelled", flush=True)
else:
    result = hear(3)["result"]
    print(result["content"][0]["text"] if not result["isError"] else result, flush=True)
process.stdin.close()
"""


def asking_by_mcp(daemon: Daemon, name: str, event: dict[str, Any], **files: str) -> Path:
    gate = events_dir(daemon, name, ask=event)
    (gate / "program").write_text(_MCP)
    return daemon.run(name, "python3 /gate/program", mount=f"{gate} /gate ro", **files)


@pytest.mark.parametrize("event", [BASH, WHICH], ids=["tool", "question"])
def test_a_permission_prompt_is_an_ask(
    daemon: Daemon, name: str, event: dict[str, Any]
) -> None:
    agent = asking_by_mcp(daemon, name, event)
    the_ask(daemon, name)
    words = ("allow",) if event is BASH else ("answer_1=Blue", "answer_2=Pear")
    answer(daemon, name, *words)
    wait_dead(agent)
    first, *_, last = read(agent, "out").splitlines()
    assert (first, json.loads(last)["behavior"]) == ("True", "allow")


def test_no_room_for_a_question_is_an_error_of_the_tool(daemon: Daemon, name: str) -> None:
    agent = asking_by_mcp(daemon, name, {"tool_name": "Bash", "tool_input": {}})
    the_ask(daemon, name)
    answer(daemon, name, "deny")
    wait_dead(agent)
    said = json.loads(read(agent, "out").splitlines()[-1])
    assert said == {"behavior": "deny", "message": "refused by operator uid:0"}


def test_permissions_are_asked_inside_an_agent_only(daemon: Daemon) -> None:
    result = daemon.ctx("mcp", "--permissions")
    assert result.returncode == 2
    assert "only an agent asks" in result.stderr


# the bridge


@contextmanager
def bridged(daemon: Daemon, name: str, *options: str) -> Iterator[Path]:
    program = Path(shutil.copy(scripted.__file__, daemon.base / f"{name}.py"))
    agent = daemon.run(
        name, f"ctx bridge acp {shlex.join(options)} -- python3 /agent.py", mode="resident",
        mount=f"{program} /agent.py ro",
    )  # fmt: skip
    wait_status(agent, "ready")
    yield agent
    write(agent / "ctl", "stop")
    wait_dead(agent)


def reply(agent: Path) -> str:
    """Its first reply, as soon as it has ended."""
    wait_until(lambda: len(said(agent)) == 2, "it has replied")
    return str(said(agent)[1]["content"])


def said(agent: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read(agent, "session/messages.jsonl").splitlines()]


def test_a_bridge_asks_people_about_what_is_not_allowed(daemon: Daemon, name: str) -> None:
    with bridged(daemon, name, "--permit", "ask", "--allow", "read") as agent:
        write(agent / "inbox", "ask read; ask edit")
        row = the_ask(daemon, name)
        assert row["question"] == "edit: to edit"
        assert [line.split()[0] for line in row["options"]] == [
            "id-reject_always", "id-reject_once", "id-allow_always", "id-allow_once"]
        answer(daemon, name, "id-allow_always")
        assert reply(agent) == "id-allow_onceid-allow_always"


def test_a_cancel_withdraws_what_a_bridge_asks(daemon: Daemon, name: str) -> None:
    with bridged(daemon, name, "--permit", "ask") as agent:
        write(agent / "inbox", "ask edit")
        the_ask(daemon, name)
        write(agent / "ctl", "abort")
        wait_until(lambda: asked(daemon, name) == [], "nothing is asked any more")
        wait_until(lambda: "message.end" in read(agent, "session/events.jsonl"), "it is over")
        write(agent / "ctl", "resume")


def test_a_bridge_denies_what_is_not_allowed(daemon: Daemon, name: str) -> None:
    with bridged(daemon, name, "--permit", "deny", "--allow", "read") as agent:
        write(agent / "inbox", "ask read; ask edit")
        assert reply(agent) == "id-allow_onceid-reject_once"
        assert asked(daemon, name) == []


def test_a_bridge_elicits_by_a_form_and_sets_a_mode(daemon: Daemon, name: str) -> None:
    with bridged(daemon, name, "--permit", "ask", "--session-mode", "read-only") as agent:
        write(agent / "inbox", "mode; form colour")
        assert the_ask(daemon, name)["question"] == "which colour?"
        answer(daemon, name, "colour=red")
        assert reply(agent) == 'read-only{"action": "accept", "content": {"colour": "red"}}'


def test_a_mode_that_is_not_there_is_said(daemon: Daemon, name: str) -> None:
    program = Path(shutil.copy(scripted.__file__, daemon.base / f"{name}.py"))
    agent = daemon.finish(
        name, "ctx bridge acp --session-mode none -- python3 /agent.py", mode="resident",
        mount=f"{program} /agent.py ro",
    )  # fmt: skip
    assert "session/set_mode: no mode none" in read(agent, "log")
