"""An orchestrator that makes thousands of children in one run, with tools alone."""

from __future__ import annotations

import json

import pytest

from tests.worlds.daemon import Daemon, read, wait_until, write

MANY = 3000
_ORCHESTRATOR = """
import json, os, socket

own = socket.socket(socket.AF_UNIX)
own.connect(os.environ["CTX_ROOT"] + "/agent/" + os.environ["CTX_AGENT"] + ".sock")
answers = own.makefile("rb")

def call(tool, **given):
    frame = {"op": "tool", "name": tool, "input": given}
    own.sendall(json.dumps(frame).encode() + b"\\n")
    answer = json.loads(answers.readline())
    assert answer["type"] == "tool", answer
    return answer["output"]

for number in range(MANY):
    given = {"name": f"reviewer-{number}"} if number % 3 == 0 else {}
    name = call("SpawnAgent", initial_message="look", exec="true", **given)["agent_id"]
    ended = call("TaskOutput", task_id=name, block=True)
    assert ended["status"] == "completed", ended
    call("AgentRemove", agent_id=name)
seen = call("AgentGet")
call("ResultWrite", text=json.dumps([seen["children"], seen["tasks"], seen["queue"]]))
"""


@pytest.mark.long
def test_three_thousand_children_in_one_run_reach_no_maximum(daemon: Daemon) -> None:
    agent = daemon.run("coder", "python3 -", mode="turn")
    # a turn program gets its message as standard input
    write(agent / "inbox", _ORCHESTRATOR.replace("MANY", str(MANY)))
    wait_until(
        lambda: "r1 ended" in read(agent, "log"),
        "the orchestrator has ended",
        timeout=3600,
    )
    assert read(agent, "log").startswith("ctxfs: r1 ended: done exit:0\n")
    children, tasks, queue = json.loads(read(agent, "result.md"))
    assert (children, tasks) == ([], {})
    assert queue <= 1024
