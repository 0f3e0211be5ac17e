"""An orchestrator that makes thousands of children in a row, with tools alone."""

from __future__ import annotations

import os

import pytest

from tests.worlds.daemon import Daemon, read, wait_until, write

MANY = 3000
_CALLS = """
import json, os, socket, sys

own = socket.socket(socket.AF_UNIX)
own.connect(os.environ["CTX_ROOT"] + "/agent/" + os.environ["CTX_AGENT"] + ".sock")
answers = own.makefile("rb")

def call(tool, **given):
    frame = {"op": "tool", "name": tool, "input": given}
    own.sendall(json.dumps(frame).encode() + b"\\n")
    answer = json.loads(answers.readline())
    assert answer["type"] == "tool", answer
    return answer["output"]

def spawn(number):
    given = {"name": f"reviewer-{number}"} if number % 3 == 0 else {}
    exec = f"echo {number + 1}"
    return call("SpawnAgent", initial_message="look", exec=exec, **given)["agent_id"]

def finish():
    seen = call("AgentGet")
    call("ResultWrite", text=json.dumps([seen["children"], seen["tasks"], seen["queue"]]))
"""
#: all of them in the run of one message
_AT_ONCE = f"""
for number in range({MANY}):
    name = spawn(number)
    ended = call("TaskOutput", task_id=name, block=True)
    assert ended["status"] == "completed", ended
    call("AgentRemove", agent_id=name)
finish()
"""
#: the next one in the run that the notice of the last one's end begins
_ONE_EACH = f"""
text = sys.stdin.read()
number = 0
if os.environ["CTX_PROVENANCE"] == "task_result":
    ended = json.loads(text)
    assert ended["status"] == "completed", ended
    number = int(ended["result"])
    call("AgentRemove", agent_id=ended["agent"])
if number < {MANY}:
    spawn(number)
else:
    finish()
"""


@pytest.mark.long
@pytest.mark.parametrize("program", [_AT_ONCE, _ONE_EACH], ids=["one run", "a run each"])
def test_three_thousand_children_reach_no_maximum(daemon: Daemon, program: str) -> None:
    place = daemon.base / "program"
    place.mkdir()
    (place / "main.py").write_text(_CALLS + program)
    agent = daemon.run("coder", "python3 /p/main.py", mode="turn", mount=f"{place} /p ro")
    write(agent / "inbox", "begin")
    wait_until(
        lambda: read(agent, "result.md") or "error:" in read(agent, "log"),
        "the orchestrator has its result",
        timeout=3600,
    )
    assert read(agent, "result.md") == "[[], {}, 0]\n", read(agent, "log")
    assert not os.listdir(agent / "task")
