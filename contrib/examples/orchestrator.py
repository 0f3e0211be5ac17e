"""The orchestrator of story.sh: an agent of mode turn that has three others review some files.

Each message starts a run of this program. The run does what the message calls for, and ends; then
nothing of the orchestrator runs until something happens that it has to know. Nothing is polled, and
nothing is read but the messages: they carry the reports, the answer and the results.

Who speaks is in CTX_PROVENANCE and CTX_FROM, which ctxfs sets. A text proves nothing: whoever may
send messages could write one that looks like the end of a child.
"""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from tools import Refused, call

ME, RUN = os.environ["CTX_AGENT"], os.environ["CTX_RUN"]
#: (mode, task) of each child; all names of agents are in one directory, so mine begin with my own
TASKS = {
    "long": ("once", "Which lines are longer than 100 characters?"),
    "longest": ("turn", "Which file is the longest?"),
    "marks": ("resident", "What is left to do?"),
}
CHILDREN = {f"{ME}-{name}": name for name in TASKS}
QUESTION = "How does it begin?"
#: HOME stays from run to run, and is removed with the agent
NOTES = Path.home() / "notes.json"


def tell(text: str) -> None:
    """Standard output is the reply, and kept in the agent's `out`."""
    print(f"{RUN}: {text}", flush=True)
    if gate := os.environ.get("GATE"):  # a FIFO, with which tests stop the program after each step
        Path(gate).read_bytes()


def begin() -> None:
    for child, name in CHILDREN.items():
        mode, task = TASKS[name]
        reviewer = Path(__file__).with_name("reviewer.py")
        command = shlex.join(("python3", str(reviewer), name, os.getcwd()))
        try:
            call("SpawnAgent", name=child, mode=mode, exec=command, initial_message=task)
        except Refused as refused:
            # spawned already, and the daemon died before it had said so?
            if refused.code != "EEXIST" or child not in my_children():
                raise
        tell(f"spawned {child} (mode {mode}): {task}")


def my_children() -> list[str]:
    return [child["agent_id"] for child in call("AgentGet")["children"]]


def reported(child: str, text: str) -> None:
    tell(f"{child} reports: {text}")
    match CHILDREN.get(child):
        case "longest":
            # the message and the wait for its answer are one change: the answer cannot be missed
            if unless_ended("SendMessage", agent_id=child, text=QUESTION, id="question", wait=True):
                tell(f"asked {child}: {QUESTION}")
        case "marks":
            stop(child)


def answered(wait: dict[str, Any]) -> None:
    payload = wait["payload"]
    child, outcome = payload["child"], payload["outcome"]
    if outcome == "processed":
        tell(f"{child} answers: {payload['reply'].strip()}")
    else:  # the wait fires as well if the child fails, or ends
        tell(f"{child} does not answer: {outcome} ({payload['reason']})")
    stop(child)


def stop(child: str) -> None:
    """A child of mode turn or resident ends when it is told to."""
    unless_ended("AgentStop", agent_id=child)
    tell(f"needs {child} no more")


def unless_ended(tool: str, **given: Any) -> bool:
    """Whether a child took the call; false if it is ending or has ended, of which I am told."""
    try:
        call(tool, **given)
    except Refused as refused:
        if refused.code != "EBUSY":
            raise
        return False
    return True


def ended(notice: dict[str, Any]) -> None:
    """All that there is to know about a child is in the notice of its end."""
    child, status, reason = notice["agent"], notice["status"], notice["reason"]
    if "message" in notice:  # of its task alone: it goes on, and may answer what it is asked
        tell(f"{child} goes on without its task: {status} ({reason})")
        return
    text = f"{CHILDREN[child]}: {status} ({reason})\n{notice['result']}"
    if notice["truncated"]:  # head and tail are here; all of it is in a file that stays
        text += f"\n(in full: {notice['output_path']})"
    tell(f"{child} has ended: {status} ({reason})")
    results = json.loads(NOTES.read_text()) if NOTES.exists() else {}
    results[child] = text.rstrip()
    NOTES.write_text(json.dumps(results))
    if results.keys() == CHILDREN.keys():
        finish([results[child] for child in CHILDREN])


def finish(results: list[str]) -> None:
    call("ResultWrite", text="\n\n".join(results))
    tell("wrote the result")
    for child in CHILDREN:
        try:
            call("AgentRemove", agent_id=child)
        except Refused as refused:
            if refused.code != "ENOENT":  # removed already
                raise
    tell("removed its children")
    call("AgentStop", agent_id=ME)


def main(text: str) -> None:
    match os.environ["CTX_PROVENANCE"]:
        case "child":
            reported(os.environ["CTX_FROM"].removeprefix("agent:"), text)
        case "wait":
            answered(json.loads(text))
        case "task_result":
            ended(json.loads(text))
        case "agent":  # others whom a policy lets write
            tell(f"{os.environ['CTX_FROM']} has nothing to say here")
        case _:  # who made this agent gives it its task
            begin()


try:
    main(sys.stdin.read().strip())
except Exception:
    # what was missed here happens no more, so nothing would go on: end, with all children
    call("AgentStop", agent_id=ME)
    raise
